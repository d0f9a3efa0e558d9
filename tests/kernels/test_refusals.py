"""Operands that do not fit: each op refuses them before its kernel is called."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.backends import Limits
from pallas_kernels.checks import (
    check_attention,
    check_expert_weights,
    check_few_queries,
    check_pages,
    check_selection,
)
from pallas_kernels.dense_causal import dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.expert_tiles import expert_tiles
from pallas_kernels.few_experts import few_experts
from pallas_kernels.grouped_experts import grouped_experts
from pallas_kernels.index_topk import Call as IndexCall
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk_decode import index_topk_decode
from pallas_kernels.mxfp8 import Weights, check_weights
from pallas_kernels.mxfp8_experts import mxfp8_experts
from pallas_kernels.mxfp8_grouped import mxfp8_grouped
from pallas_kernels.mxfp8_numbers import mxfp8_numbers
from pallas_kernels.mxfp8_project import mxfp8_project
from pallas_kernels.ordered_project import ordered_project
from pallas_kernels.pages import contiguous, paged
from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import sparse_prefill
from pallas_kernels.stacked_project import MOST_ROWS, stacked_project

E4M3 = jnp.float8_e4m3fn


def array(*shape: int, dtype="float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


LIMITS = Limits(max_blocks=3, stored=(jnp.dtype(E4M3),))


def test_operands_of_attention_that_do_not_fit_are_refused(unchecked):
    q, k = array(2, 3, 4, 8), contiguous(array(2, 2, 12, 8), 4)
    check_attention(q, k, k, LIMITS, False)
    float8 = contiguous(array(2, 2, 12, 8, dtype=E4M3), 4)
    check_attention(q, float8, float8, LIMITS, False)
    for case in (
        (q, contiguous(array(2, 2, 12, 6), 4), k), (q, k, contiguous(array(2, 2, 12, 6), 4)), (q, float8, k),
        (array(2, 3, 4, 6), k, k), (q.astype("bfloat16"), k, k),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="keys and values in the queries' dtype or float8_e4m3fn"):
            check_attention(*case, LIMITS, False)
    with pytest.raises(ValueError, match="they must be the same"):
        check_attention(q, float8, float8, Limits(), False)
    with pytest.raises(ValueError, match=r"k has pages \(12, 4, 8\) and v \(6, 4, 8\): they must lie in the same way"):
        check_attention(q, k, contiguous(array(2, 1, 12, 8), 4), LIMITS, False)
    by_table = paged(array(5, 2, 4, 8), jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(ValueError, match="k: the table has 3 rows and the queries 2"):
        check_attention(q, by_table, by_table, LIMITS, False)
    check_pages("k", by_table, 3, LIMITS, False)
    for queries in (1, 16):
        check_few_queries(queries, "prefill")
    for queries in (0, 17):
        with pytest.raises(ValueError, match=rf"{queries} queries a row: need 1 to 16 queries \(prefill takes more\)"):
            check_few_queries(queries, "prefill")
    blocks = jnp.zeros((2, 2, 3, 5), jnp.int32)
    check_selection(q, blocks)
    for wrong in (blocks[:1], blocks[:, :, :2], jnp.zeros((2, 3, 3, 5), jnp.int32)):
        with pytest.raises(ValueError, match=r"must be \[2 K 3 J\], K a divisor of 4"):
            check_selection(q, wrong)


def test_operands_of_selection_that_do_not_fit_are_refused(unchecked):
    index_q, keys = array(2, 3, 2, 8), contiguous(array(2, 12, 8), 4)
    at = jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    check = lambda q=index_q, k=keys, **rules: IndexCall(q, k, *at, **(dict(top_k=3) | rules)).check(LIMITS)
    check()
    check(local_blocks=2, init_blocks=1)
    for rules in (dict(local_blocks=0), dict(init_blocks=-1), dict(local_blocks=3, init_blocks=1)):
        with pytest.raises(ValueError, match="both together at most top_k"):
            check(**rules)
    with pytest.raises(ValueError, match="4 blocks a row: need at most 3 blocks"):
        check(k=contiguous(array(2, 13, 8), 4))
    for q, k in ((index_q.astype("bfloat16"), keys), (array(2, 3, 2, 4), keys)):
        with pytest.raises(ValueError, match="index keys in the queries' dtype or float8_e4m3fn"):
            check(q=q, k=k)


def test_matrices_that_do_not_fit_are_refused(unchecked):
    x, layer = array(3, 64), jnp.int32(0)
    codes = Weights(array(2, 64, 64, dtype="uint8"), array(2, 2, 64, dtype="uint8"))
    check_weights("w", codes)
    for scales in ((2, 3, 64), (2, 1, 64), (2, 2, 32)):
        wrong = codes._replace(scales=array(*scales, dtype="uint8"))
        for call in (lambda w: check_weights("weights[0]", w),
                     lambda w: ordered_project(x.astype("bfloat16"), [w], layer, backend="triton")):  # fmt: skip
            with pytest.raises(ValueError, match=r"weights\[0\] has codes .* for every 32 input channels"):
                call(wrong)
    with pytest.raises(ValueError, match="for every 32 input channels"):
        check_weights("w", Weights(array(2, 48, 4, dtype="uint8"), array(2, 1, 4, dtype="uint8")))
    for weights, options in (
        ([array(2, 32, 64)], {}), ([array(2, 64, 64), array(3, 64, 64)], {}), ([array(64, 64)], {}),
        ([array(2, 64, 32)], dict(by_output=True)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="all of one L, with I = 64"):
            ordered_project(x, weights, layer, backend="triton", **options)
    with pytest.raises(ValueError, match=r"weights\[0\] shape \(2, 64, 64\) in MXFP8: need .*not in MXFP8"):
        ordered_project(x.astype("bfloat16"), [codes], layer, by_output=True, backend="triton")
    for wrong in (codes, array(2, 64, 64, dtype="bfloat16")):
        with pytest.raises(ValueError, match="need one dtype"):
            ordered_project(x, [wrong], layer, backend="triton")
    for rows in (0, MOST_ROWS + 1):
        with pytest.raises(ValueError, match=f"{rows} rows: need 1 to 64 rows"):
            stacked_project(array(rows, 64), [array(1, 64, 64)], layer, backend="triton")
    for weights in ([array(2, 32, 64)], [array(2, 64, 64), array(3, 64, 64)], [array(64, 64)]):
        with pytest.raises(ValueError, match="all of one L, with I = 64"):
            stacked_project(x, weights, layer, backend="triton")
    gate, down = array(2, 5, 64, 32), array(2, 5, 32, 64)
    check_expert_weights(x, gate, gate, down)
    for wrong in ((gate, gate[:1], down), (gate, gate, down[:, :4]), (gate, gate, gate), (down, down, gate)):
        with pytest.raises(ValueError, match="with D = 64"):
            check_expert_weights(x, *wrong)
    with pytest.raises(ValueError, match="need one dtype"):
        check_expert_weights(x, gate, gate.astype("bfloat16"), down)


def test_every_op_of_attention_refuses_what_does_not_fit(unchecked):
    """Before its kernel is called: another dtype, other rows of pages, another selection, more queries than a step."""
    q, pages, blocks = array(2, 3, 4, 8), contiguous(array(2, 2, 12, 8), 4), jnp.zeros((2, 2, 3, 5), jnp.int32)
    other = paged(array(12, 4, 8).reshape(6, 2, 4, 8), jnp.zeros((3, 3), jnp.int32))
    of_row = paged(other.pool.reshape(6, 2, 4, 8), jnp.zeros((2, 3), jnp.int32))
    at, index_q, index_k = (jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)), array(2, 3, 2, 8), array(6, 4, 8)
    for op, chosen in ((dense_causal, ()), (dense_decode, ()), (sparse_decode, (blocks,)), (sparse_prefill, (blocks,))):
        call = partial(op, backend="triton", **({} if chosen else dict(kv_heads=2)))
        with pytest.raises(ValueError, match="q is bfloat16 of width 8, k float32 of 8"):
            call(q.astype("bfloat16"), pages, pages, *chosen, *at)
        for name, k, v in (("k", other, of_row), ("v", of_row, other)):
            with pytest.raises(ValueError, match=f"{name}: the table has 3 rows and the queries 2"):
                call(q, k, v, *chosen, *at)
        for heads in () if chosen else (0, 3, 8):
            with pytest.raises(ValueError, match=f"4 query heads and kv_heads = {heads}: need a divisor"):
                call(q, pages, pages, *at, kv_heads=heads)
        for wrong in (blocks[:1],) if chosen else ():
            with pytest.raises(ValueError, match="K a divisor of 4"):
                call(q, pages, pages, wrong, *at)
        if op in (dense_decode, sparse_decode):
            with pytest.raises(ValueError, match="17 queries a row"):
                call(array(2, 17, 4, 8), pages, pages, *chosen, *at)
    for op in (index_topk, index_topk_decode):
        call = partial(op, top_k=3, backend="triton")
        with pytest.raises(ValueError, match="index_k: the table has 3 rows and the queries 2"):
            call(index_q, paged(index_k, other.table), *at)
        with pytest.raises(ValueError, match="index_q is bfloat16 of width 8"):
            call(index_q.astype("bfloat16"), paged(index_k, of_row.table), *at)
    with pytest.raises(ValueError, match="17 queries a row"):
        index_topk_decode(array(2, 17, 2, 8), paged(index_k, of_row.table), *at, top_k=3, backend="triton")
    heads = Projected(q, *(array(2, 3, 2, 8) for _ in range(3)), array(2, 3, 8))
    norms = Projected(*(array(8) for _ in range(5)))
    places = dict(k=of_row, v=of_row, index_k=paged(index_k, of_row.table))

    def insert(heads=heads, angles=4, **wrong):
        angle = array(2, 3, angles)
        return qk_norm_rope_insert(
            heads, norms, angle, angle, *at, **(places | wrong), eps=1e-6, dtype=jnp.float32, backend="triton"
        )

    for name in places:
        with pytest.raises(ValueError, match=f"{name}: the table has 3 rows and the queries 2"):
            insert(**{name: replace(places[name], table=other.table)})
    narrow = paged(array(6, 2, 4, 4), of_row.table)
    for wrong in (
        dict(angles=5), dict(k=narrow), dict(v=narrow), dict(heads=heads._replace(q=array(2, 3, 4, 4))),
        dict(heads=heads._replace(q=array(2, 3, 3, 8))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="at most half as many angles as dims"):
            insert(**wrong)
    for index_q in (array(2, 3, 2, 4), array(2, 3, 4, 8)):
        with pytest.raises(ValueError, match="need 2 heads of that width"):
            insert(heads=heads._replace(index_q=index_q))
    for wrong in (
        dict(index_k=None),
        dict(heads=heads._replace(index_k=None)),
        dict(heads=heads._replace(index_q=None)),
    ):
        with pytest.raises(ValueError, match="come together"):
            insert(**wrong)


def test_every_op_of_experts_refuses_what_does_not_fit(unchecked):
    """Before its kernel is called: matrices of other widths, and scales of other blocks, of each matrix."""
    x, layer, ids = array(3, 64), jnp.int32(0), jnp.zeros((3, 1), jnp.int32)
    gate = array(2, 5, 64, 32)
    how, tiles = dict(activate=lambda gate, up: gate, backend="triton"), jnp.zeros((1, 16), jnp.int32)
    expert, count = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    places = layer, expert, tiles, count
    for call in (
        lambda *w: few_experts(x, *w, layer, ids, **how),
        lambda *w: grouped_experts(x, *w, *places, num_chosen=1, **how),
        lambda *w: expert_tiles(
            x[None], *w, layer, expert, count[0], x[None, :, 0], **(how | dict(backend="mosaic_tpu"))
        ),
    ):
        with pytest.raises(ValueError, match="with D = 64"):
            call(gate, gate, gate)
    codes = lambda i, o: Weights(array(2, 5, i, o, dtype="uint8"), array(2, 5, i // 32, o, dtype="uint8"))
    short, places_of_one = codes(64, 64), (layer, expert, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))
    for call in (
        lambda *w: mxfp8_experts(x.astype("bfloat16"), *w, *places_of_one, **how),
        lambda *w: mxfp8_grouped(x.astype("bfloat16"), *w, *places, num_chosen=1, **how),
    ):
        for place, name in enumerate(("gate", "up", "down")):
            weights = [short] * 3
            weights[place] = short._replace(scales=short.scales[:, :, :1])
            with pytest.raises(ValueError, match=f"{name} has codes .* for every 32 input channels"):
                call(*weights)
        with pytest.raises(ValueError, match="with D = 64"):
            call(short, short, codes(32, 64))
    one = Weights(*(w[:, 0] for w in short))
    wrong = one._replace(scales=one.scales[:, :1])
    for call in (
        lambda w: mxfp8_numbers(w, layer, jnp.bfloat16, backend="triton"),
        lambda w: mxfp8_project(x.astype("bfloat16"), [one, w], layer, backend="triton"),
    ):
        with pytest.raises(ValueError, match=r"weights.* has codes .* for every 32 input channels"):
            call(wrong)
    for op, weights in ((mxfp8_experts, [short] * 3), (mxfp8_project, None)):
        tpu = how | dict(backend="mosaic_tpu")
        with pytest.raises(ValueError, match="a TPU kernel needs a multiple of"):
            if weights:
                op(x.astype("bfloat16"), *weights, *places_of_one, **tpu)
            else:
                op(x.astype("bfloat16"), [one], layer, backend="mosaic_tpu")
