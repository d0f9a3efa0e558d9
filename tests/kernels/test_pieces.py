"""The pieces of kernels that run without one: where blocks lie, what is refused, what a call is said to cost."""

import re
import runpy
import warnings
from dataclasses import MISSING, asdict, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.pytrees import assert_settings_are_static

import pallas_kernels
from m3jax import M3Config
from pallas_kernels import mosaic_common, pages, triton_common
from pallas_kernels.add_norm import add_norm
from pallas_kernels.backends import Limits
from pallas_kernels.checks import (
    check_attention,
    check_expert_weights,
    check_few_queries,
    check_index,
    check_kv_heads,
    check_pages,
    check_selection,
)
from pallas_kernels.cudnn_causal import cudnn_causal
from pallas_kernels.dense_causal import cudnn, dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.expert_tiles import expert_tiles
from pallas_kernels.expert_tiles.mosaic_tpu import Config as TilesConfig
from pallas_kernels.few_experts import few_experts
from pallas_kernels.few_experts.triton import default_config as few_experts_config
from pallas_kernels.gradient import with_gradient
from pallas_kernels.grouped_experts import grouped_experts
from pallas_kernels.grouped_experts import triton as grouped_triton
from pallas_kernels.grouped_experts.triton import default_config as grouped_experts_config
from pallas_kernels.grouped_outer.triton import default_config as grouped_outer_config
from pallas_kernels.grouped_product.triton import default_config as grouped_product_config
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk import mosaic_tpu as index_tpu
from pallas_kernels.index_topk.triton import default_config as index_config
from pallas_kernels.index_topk_decode import index_topk_decode
from pallas_kernels.index_topk_decode import mosaic_tpu as index_decode_tpu
from pallas_kernels.index_topk_decode.triton import Config as IndexDecodeConfig
from pallas_kernels.index_topk_decode.triton import default_config as index_decode_config
from pallas_kernels.index_topk_decode.triton.best_blocks import Rules
from pallas_kernels.mosaic_common import Chip
from pallas_kernels.mxfp8 import Weights, check_weights
from pallas_kernels.mxfp8_experts import mxfp8_experts
from pallas_kernels.mxfp8_grouped import mxfp8_grouped
from pallas_kernels.mxfp8_grouped import triton as mxfp8_triton
from pallas_kernels.mxfp8_numbers import mxfp8_numbers
from pallas_kernels.mxfp8_project import mxfp8_project
from pallas_kernels.numbers import E4M3_MAX, can_reach, power_of_two
from pallas_kernels.ordered_project import ordered_project
from pallas_kernels.ordered_project.triton import default_config as ordered_config
from pallas_kernels.pages import contiguous, paged, seen_positions
from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert
from pallas_kernels.qk_norm_rope_insert import mosaic_tpu as mosaic_insert
from pallas_kernels.shapes import DECODE, PREFILL, Shape
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_decode.triton.attend import Config as DecodeConfig
from pallas_kernels.sparse_decode.triton.attend import default_config as decode_config
from pallas_kernels.sparse_decode.triton.merge import merge
from pallas_kernels.sparse_prefill import sparse_prefill
from pallas_kernels.sparse_prefill import triton as sparse_triton
from pallas_kernels.sparse_prefill.triton import Config as PrefillConfig
from pallas_kernels.sparse_prefill.triton.kv_block_major import default_config as block_config
from pallas_kernels.sparse_prefill.triton.query_union import default_config as union_config
from pallas_kernels.sparse_prefill.triton.sizes import Sizes as PrefillSizes
from pallas_kernels.stacked_project import MOST_ROWS, stacked_project
from pallas_kernels.stacked_project.triton import default_config as stacked_config
from pallas_kernels.triton_mxfp8 import FewConfig, FragmentConfig
from pallas_kernels.triton_project import num_splits

E4M3, F32 = jnp.float8_e4m3fn, jnp.float32
by_block = import_module("pallas_kernels.sparse_prefill.triton.kv_block_major")  # its function has its name


def array(*shape: int, dtype="float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_sizes_of_pages_are_no_arrays():
    assert_settings_are_static(pages)


def test_a_backend_that_jax_deprecates_says_nothing_at_each_lowering():
    """Others' deprecations are still said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(triton_common.__file__)
        warnings.warn("The Pallas Triton backend is deprecated and will be removed", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match="Another backend"):
            warnings.warn("Another backend is deprecated", DeprecationWarning, stacklevel=1)


# Where blocks lie


@pytest.mark.parametrize("has_heads", [True, False])
@pytest.mark.parametrize("layer", [None, 1])
def test_a_block_is_found_in_one_piece_and_in_pages(has_heads, layer):
    """Of each row, head and block; a page outside the pool reads as page 0, and is not held."""
    batch, heads, blocks, size, width, count = 2, 3 if has_heads else 1, 3, 4, 2, 5
    of_heads = (heads,) if has_heads else ()
    stack = (2,) if layer is not None else ()
    rows = numbers(*stack, batch, *of_heads, blocks * size - 1, width)  # the last block is padded
    whole = np.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, 1), (0, 0)])
    whole = (whole if layer is None else whole[layer]).reshape(batch, heads, blocks, size, width)
    in_pages = numbers(*stack, count, *of_heads, size, width)
    of_layer = (in_pages if layer is None else in_pages[layer]).reshape(count, heads, size, width)
    table = np.array([[4, 0, -1], [5, 2, 1]], np.int32)
    own = None if layer is None else jnp.int32(layer)
    in_order = contiguous(jnp.asarray(rows), size, own)
    by_table = paged(*map(jnp.asarray, (in_pages, table)), own, num_devices=2)
    for made, devices in ((in_order, 1), (by_table, 2)):
        assert (made.block_size, made.width, made.num_blocks, made.num_devices) == (size, width, blocks, devices)
        assert made.page_bytes == size * width * 4
    assert by_table.page_count == count and in_order.page_count == rows.size // (blocks * size - 1) // width * blocks
    flat = lambda made, *at: mosaic_common.locate(made, mosaic_common.flat_finder(made, slice(None)), *at)
    for at in np.ndindex(batch, heads, blocks):
        place, entry = map(jnp.int32, at), table[at[0], at[2]]
        row, head, block = place
        for locate in (lambda made, *at: made.locate(made.finder(), *at), flat):
            page, is_held = locate(in_order, row, head, block)
            np.testing.assert_array_equal(in_order.pool[page], whole[at])
            assert is_held
            page, is_held = locate(by_table, row, head, block)
            assert bool(is_held) == (0 <= entry < count)
            np.testing.assert_array_equal(by_table.pool[page], of_layer[entry if is_held else 0, at[1]])
    assert not in_order.locate(in_order.finder(), jnp.int32(0), jnp.int32(0), jnp.int32(-1))[1]


def test_other_ranks_are_refused():
    for make in (lambda x: contiguous(x, 4), lambda x: paged(x, jnp.zeros((1, 1), jnp.int32))):
        with pytest.raises(ValueError, match=r"x has shape \(4, 4\): need"):
            make(array(4, 4))
        with pytest.raises(ValueError, match=r"x has shape \(1, 1, 1, 4, 4\): need"):
            make(array(1, 1, 1, 4, 4))


def test_padding_has_no_position():
    found = seen_positions(jnp.array([[0, 3, 4], [-1, 1, 9]], jnp.int32), jnp.array([4, 2], jnp.int32), 5)
    assert found.tolist() == [[0, 3, -1, -1, -1], [-1, 1, -1, -1, -1]]
    refs = jnp.array([[0, 3, 4], [-1, 1, 9]], jnp.int32), jnp.array([4, 2], jnp.int32)
    alone = [[int(triton_common.seen_position(*refs, row, token)) for token in range(3)] for row in range(2)]
    assert alone == [[0, 3, -1], [-1, 1, -1]]


# Numbers


def test_numbers_of_every_backend(monkeypatch):
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert [can_reach(2**n + m) for n in (31, 32) for m in (-1, 0, 1)] == [True, False, False, False, False, True]
    x = jnp.arange(12, dtype=jnp.int32)
    for n in (1, 3, 4):
        assert triton_common.div(x, n).tolist() == [value // n for value in range(12)]
        assert triton_common.rem(x, n).tolist() == [value % n for value in range(12)]
    pairs = [("bfloat16", "bfloat16"), ("bfloat16", E4M3), ("float32", "float32"), ("float32", E4M3)]
    dtypes = [triton_common.matmul_dtype(*map(jnp.dtype, pair)) for pair in pairs]
    assert [str(dtype) for dtype in dtypes] == ["bfloat16", "float16", "float32", "float32"]
    chip = Chip(2, 1 << 20)
    assert [chip.steps_per_core(count) for count in (1, 2, 3)] == [1, 1, 2]
    assert chip.compiler_params("parallel").vmem_limit_bytes == 1 << 20 and Chip.current(True) == Chip(1, 32 << 20)
    own = SimpleNamespace(num_cores=2, vmem_capacity_bytes=1 << 27)
    monkeypatch.setattr(mosaic_common.pltpu, "get_tpu_info", lambda: own)
    assert Chip.current(False) == Chip(2, 1 << 26)  # half of VMEM
    assert mosaic_common.pad_steps(jnp.ones((2, 1)), 4, 7).tolist() == [[1], [1], [7], [7]]
    for module, unit in ((mosaic_common, 1.0), (triton_common, np.log2(np.e))):  # of a score in exponents
        is_seen, total = module.divisor(jnp.array([0.0, 2.0, jnp.nan]))
        assert is_seen.tolist() == [False, True, True] and total[:2].tolist() == [1, 2] and jnp.isnan(total[2])
        lse = module.natural_lse(jnp.full(3, 3 * unit, jnp.float32), is_seen, total)
        np.testing.assert_allclose(lse, [-np.inf, 3 + np.log(2), np.nan], rtol=1e-6)
    assert float(jnp.finfo(E4M3).max) == E4M3_MAX


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_a_tile_are_in_32_bits(dtype):
    a, b = (jnp.asarray(np.random.default_rng(seed).normal(size=(3, 3)), dtype) for seed in (0, 1))
    left, right = (np.asarray(x, np.float64) for x in (a, b))
    for found, expected in (
        (mosaic_common.dot_nt(a, b), left @ right.T), (mosaic_common.dot_nn(a, b), left @ right),
        (mosaic_common.dot_tn(a, b), left.T @ right), (triton_common.dot(a, b), left @ right),
        (triton_common.dot(a, b, transpose=True), left @ right.T),
        (triton_common.dot(a, b, transpose_a=True), left.T @ right),
        (triton_common.dot_columns(a, b), left.T @ right.T),
    ):  # fmt: skip
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_a_kernel_is_said_to_cost():
    operands, outputs = (array(3, 5), array(7, dtype="bfloat16")), [jax.ShapeDtypeStruct((2, 2), "float32")]
    cost = mosaic_common.kernel_cost(operands, outputs, copied=10.4, products=2.6)
    assert (cost.bytes_accessed, cost.flops, cost.transcendentals) == (60 + 14 + 16 + 10, 3, 0)


def kernel_call(function, *shapes):
    """The first call of a kernel in a function that is traced: its name, grid and cost."""
    of = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    call = next(step for step in jax.make_jaxpr(function)(*of).eqns if step.primitive.name == "pallas_call")
    return call.params["grid_mapping"].grid, call.params["cost_estimate"]


def test_index_keys_are_split_among_as_many_programs_as_fill_a_gpu(unchecked):
    """264 programs, if each has eight blocks and a tile no more than 32 of them."""
    for batch, length, blocks, tiles, splits in (
        (1, 1, 80, 1, 10), (1, 1, 81, 1, 10), (1, 1, 15, 1, 1), (1, 1, 4096, 1, 32), (3, 1, 4096, 1, 32),
        (9, 1, 4096, 1, 29), (1, 1024, 4096, 16, 16), (2, 1024, 4096, 16, 8), (1, 32768, 4096, 512, 1),
    ):  # fmt: skip
        select = lambda q, k, *at: index_topk(q, contiguous(k, 4), *at, top_k=3, backend="triton", interpret=True)
        rows = ((batch, length), jnp.int32), ((batch,), jnp.int32)
        grid, _ = kernel_call(select, ((batch, length, 1, 8), F32), ((batch, 4 * blocks, 8), F32), *rows)
        assert grid == (tiles, splits, batch), (batch, length, blocks)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_decode_step_is_cut_in_as_many_splits_as_programs_are_left_for(batch, unchecked):
    """By row, query and KV head where blocks are attended to, by row where they are chosen; no more than pieces."""
    length, blocks, chosen = 2, 40, 6
    rows = ((batch, length), jnp.int32), ((batch,), jnp.int32)
    keys, queries = ((batch, 2, 4 * blocks, 8), F32), ((batch, length, 4, 8), F32)
    for programs, splits in ((4 * batch, 1), (12 * batch + 3, 3), (1000, 2 * chosen)):
        config = DecodeConfig(programs=programs, keys=2)
        how = dict(backend="triton", config=config, interpret=True)
        attend = lambda q, k, ids, *at, how=how: sparse_decode(q, *[contiguous(k, 4)] * 2, ids, *at, **how)
        grid, _ = kernel_call(attend, queries, keys, ((batch, 2, length, chosen), jnp.int32), *rows)
        assert grid == (splits, 2, batch * length), programs
    for programs, splits in ((batch, 1), (3 * batch + batch - 1, 3), (1000, blocks)):
        how = dict(backend="triton", config=IndexDecodeConfig(programs=programs), interpret=True)
        choose = lambda q, k, *at, how=how: index_topk_decode(q, contiguous(k, 4), *at, top_k=3, **how)
        grid, _ = kernel_call(choose, queries, ((batch, 4 * blocks, 8), F32), *rows)
        assert grid == (splits, batch), programs


def test_the_last_tile_of_a_prompt_is_the_first_to_run(monkeypatch):
    monkeypatch.setattr(triton_common.pl, "program_id", lambda axis: jnp.int32([0, 7][axis]))
    assert triton_common.late_first(5) == 4
    monkeypatch.setattr(triton_common.pl, "program_id", lambda axis: jnp.int32([3, 7][axis]))
    assert triton_common.late_first(5) == 1


def test_a_token_of_contiguous_rows_is_written_into_its_own(unchecked):
    rows, nowhere = contiguous(array(2, 12, 8), 4), mosaic_insert._NOWHERE
    targets = mosaic_insert._targets(rows, jnp.int32([[0, 5, 11], [3, -1, 12]]))
    assert targets.tolist() == [0, 5, 11, 12 + 3, nowhere, nowhere]


@pytest.mark.parametrize("cores", [1, 2])
def test_tiles_meet_their_experts_on_every_core(cores, unchecked, monkeypatch):
    """Cores take turns, a part of the hidden channels a step; tiles behind the used ones stay out."""
    monkeypatch.setattr(Chip, "current", lambda interpret: Chip(cores, 32 << 20))
    draw = np.random.default_rng(cores)
    gate, up, down = (draw.normal(size=(2, 4, *shape)).astype(np.float32) for shape in ((8, 16), (8, 16), (16, 8)))
    x, share = draw.normal(size=(5, 4, 8)).astype(np.float32), draw.random((5, 4)).astype(np.float32)
    expert, used = np.int32([2, 0, 1, 3, 1]), 4
    run = partial(
        expert_tiles, activate=jnp.multiply, backend="mosaic_tpu", config=TilesConfig(hidden=8), interpret=True
    )
    found = jax.jit(run)(x, gate, up, down, jnp.int32(1), expert, jnp.int32(used), share)
    for tile in range(used):
        w = [matrix[1, expert[tile]] for matrix in (gate, up, down)]
        expected = ((x[tile] @ w[0]) * (x[tile] @ w[1])) @ w[2] * share[tile][:, None]
        np.testing.assert_allclose(found[tile], expected, rtol=1e-4, atol=1e-4)


def test_experts_are_said_to_be_read_once_for_each_tile_of_even_shares(unchecked):
    """Two of 8 x 16 channels: of two tiles a tile each, of three to four two each, and of five three."""
    for tiles, even in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 4), (6, 4), (7, 6)):
        run = lambda x, gate, down, tile, one: expert_tiles(
            x, gate, gate, down, one, tile, one, x[..., 0], activate=lambda gate, up: gate * up, backend="mosaic_tpu",
            interpret=True,
        )  # fmt: skip
        ids = ((tiles,), jnp.int32), ((), jnp.int32)
        _, cost = kernel_call(run, ((tiles, 4, 8), F32), ((1, 2, 8, 16), F32), ((1, 2, 16, 8), F32), *ids)
        assert cost.flops == 6 * even * 4 * 8 * 16, tiles
        moved = cost.bytes_accessed - even * (3 * 8 * 16 * 4 + 4 * 8 * (4 + 4))
        assert 0 <= moved <= 4 * (4 * (tiles + 1) + tiles + 3), tiles  # the lists, and a weight for each token


def test_figures_of_a_shape_count_what_any_method_needs():
    """Two rows whose last three of seven tokens are queries, in blocks of four, of which one is kept."""
    shape = Shape("small", 2, 3, 7, heads=6, kv_heads=2, width=5, block_size=4, top_k=1)
    pairs = 2 * (5 + 6 + 7)
    assert (shape.blocks, shape.index_flops, shape.dense_flops) == (2, 2 * 5 * 2 * pairs, 4 * 5 * 6 * pairs)
    assert shape.attention_flops == 4 * 2 * 6 * 5 * 3 * 4
    assert (shape.index_bytes, shape.dense_bytes) == (2 * 2 * 7 * 5, 2 * 2 * 2 * 2 * 7 * 5)
    assert shape.selected_bytes == 2 * 2 * 2 * 2 * 4 * 5
    assert replace(shape, top_k=9).selected_bytes == 2 * shape.selected_bytes  # no more than there are


def test_a_named_shape_has_the_numbers_of_its_name():
    """Rows, queries and the context that they end; M3's heads, or a quarter of them; what a name leaves out is 1."""
    config = M3Config.m3()
    whole = dict(
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, width=config.head_dim,
        block_size=config.index_block_size, top_k=config.index_topk_blocks,
    )  # fmt: skip
    for shape in (*PREFILL, *DECODE):
        share, is_shard = 4 if shape.name.startswith("shard of 4, ") else 1, shape.name.startswith("shard")
        kind, *numbers = re.findall(
            "[a-z]+|[0-9,]+", shape.name.removeprefix("shard of 4, ") if is_shard else shape.name
        )
        sizes = [int(number.replace(",", "")) for number in numbers if number not in ("at", "x")]
        at = {
            "prefill": (1, *sizes, *sizes),
            "chunk": (1, *sizes),
            "decode": (*sizes[:1], 1, *sizes[1:]),
            "verify": sizes,
        }
        expected = whole | dict(heads=whole["heads"] // share, kv_heads=whole["kv_heads"] // share)
        assert shape == Shape(shape.name, *at[kind], **expected)


def test_cudnn_attends_to_whole_rows(monkeypatch, unchecked):
    """Its output behind a row is 0, whatever it gives there; other dtypes, and keys of other tokens, are refused."""
    given = {}

    def attend(q, k, v, **options):
        given.update(options)
        return jnp.full(q.shape, 3, q.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    of = lambda *shape, dtype="bfloat16": array(*shape, dtype=dtype)
    q, keys, lengths = of(2, 3, 4, 8), of(2, 3, 2, 8), jnp.array([3, 1], jnp.int32)
    out = cudnn_causal(q, keys, keys, lengths)
    assert out[:, :, 0, 0].tolist() == [[3, 3, 3], [3, 0, 0]] and given.pop("implementation") == "cudnn"
    assert given.pop("is_causal") and all(x.tolist() == [3, 1] for x in given.values())
    assert cudnn_causal(q.astype("float16"), keys, keys, lengths).dtype == jnp.float16
    for wrong, k in ((of(2, 3, 4, 8, dtype="float32"), keys), (q, of(2, 4, 2, 8)), (q, of(1, 3, 2, 8))):
        with pytest.raises(ValueError, match="cuDNN takes bfloat16 and float16, and this path as many keys as queries"):
            cudnn_causal(wrong, k, k, lengths)


def test_a_decode_step_has_as_many_programs_as_run_at_once():
    """One a multiprocessor or, of one-byte numbers, two, for a single query of few rows; other calls walk pieces."""
    for stored, selections, length, programs in (
        (E4M3, 1, 1, 264), (E4M3, 500, 1, 264), ("bfloat16", 132, 1, 132), ("float16", 1, 1, 132),
        ("bfloat16", 133, 1, None), ("bfloat16", 1, 2, None), (E4M3, 1, 2, None), ("float32", 1, 1, None),
    ):  # fmt: skip
        expected = DecodeConfig() if programs is None else DecodeConfig(programs=programs, keys=128)
        assert decode_config(stored, selections, length) == expected, (stored, selections, length)
    assert (DecodeConfig().programs, DecodeConfig().splits, DecodeConfig().keys) == (264, None, 64)


def test_pieces_of_few_experts_divide_their_widths():
    """Of 64 and of 128 channels; two to eight pairs read another piece of each expert than one or many do.

    Of a device's part of an expert the pieces are narrower, so that 132 multiprocessors have programs.
    """
    sizes = {pairs: few_experts_config("bfloat16", (6144, 3072), pairs) for pairs in (1, 4, 8, 9)}
    assert sizes[4] == sizes[8] != sizes[9] == sizes[1]
    parts = {
        (width, pairs): few_experts_config("bfloat16", (6144, width), pairs)
        for width in (1536, 768)
        for pairs in (4, 8)
    }
    assert parts[1536, 8] == sizes[4] and parts[1536, 4] == parts[768, 8] != parts[768, 4]
    for (width, pairs), config in parts.items():
        assert config.out == sizes[4].out and config.hidden.count(6144, width) * pairs in (48, 96)
    for config in (
        *sizes.values(),
        *parts.values(),
        few_experts_config("float32", (192, 64), 4),
        few_experts_config(E4M3, (192, 128), 4),
    ):
        for piece in (config.hidden, config.out):
            assert 6144 % piece.depth == 3072 % piece.depth == 6144 % piece.columns == 3072 % piece.columns == 0
            assert all(size & (size - 1) == 0 for size in (piece.depth, piece.columns))
    narrow = few_experts_config("bfloat16", (192, 128), 4)
    assert {narrow.hidden.depth, narrow.hidden.columns, narrow.out.depth, narrow.out.columns} == {64}
    assert few_experts_config("bfloat16", (128, 192), 4) == narrow != few_experts_config("bfloat16", (128, 256), 4)


def numbers_in(config: dict):
    """Yield the (name, number) pairs of a configuration, those of its parts too."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from numbers_in(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def test_sizes_of_programs_are_powers_of_two():
    """Of tiles, warps and groups, by default and of each dtype and number of rows; programs fill 132 multiprocessors.

    How many steps are under way, and how many programs a measured case has, is free.
    """
    of_ops = [
        import_module(f"pallas_kernels.{path.parent.parent.name}.{path.parent.name}").LIMITS.config
        for path in sorted(Path(pallas_kernels.__file__).parent.glob("*/*/__init__.py"))
    ]
    of_kernels = {*of_ops, FewConfig, FragmentConfig} - {None}
    has_defaults = lambda config: all(field.default is not MISSING for field in fields(config))
    by_default = [config() for config in of_kernels if has_defaults(config)]
    assert len(by_default) >= 12
    wide, narrow = (6144, 3072), (192, 64)
    of_calls = [
        *(
            config(jnp.dtype(dtype)) for dtype in ("float32", "bfloat16", E4M3)
            for config in (grouped_product_config, grouped_outer_config, index_config, index_decode_config,
                           union_config, block_config)
        ),
        *(ordered_config(dtype, rows, dtype != "float32" and is_mxfp8) for dtype in ("float32", "bfloat16")
          for rows in (1, 5, 64, 4096) for is_mxfp8 in (True, False)),
        *(stacked_config(dtype, 6144, widths) for dtype in ("float32", "bfloat16")
          for widths in ([8192, 128], [64], [128])),
        *(grouped_experts_config(dtype, tile, widths) for dtype in ("float32", "bfloat16") for tile in (16, 64, 128)
          for widths in (wide, narrow)),
    ]  # fmt: skip
    for config in (*by_default, *of_calls):
        for name, value in numbers_in(asdict(config)):
            if name not in ("num_stages", "programs"):
                assert value & (value - 1) == 0, f"{config}: {name}"
    assert all(config.programs % 12 == 0 for config in by_default if hasattr(config, "programs"))


def test_what_a_product_fetches_ahead_fits_shared_memory():
    """Pieces of rows and of a matrix in all stages, of 32 bits too; a TPU's kernels have no stages."""
    products, of_both = [], lambda piece: replace(piece, columns=2 * piece.columns)  # gate and up
    for itemsize, dtype in ((2, "bfloat16"), (4, "float32")):
        product, outer = grouped_product_config(dtype), grouped_outer_config(dtype)
        few = few_experts_config(dtype, (6144, 3072), 4)
        of_outer = replace(few.out, columns=outer.right, depth=outer.depth, num_stages=outer.num_stages)
        products += [(itemsize, product.rows, product.piece), (itemsize, outer.left, of_outer)]
        products += [(itemsize, 64, stacked_config(dtype, 6144, widths).piece) for widths in ([8192], [64], [65536])]
        for tile in (16, 32, 64, 128):
            grouped = grouped_experts_config(dtype, tile, (6144, 3072))
            products += [(itemsize, tile, grouped.out), (itemsize, tile, of_both(grouped.hidden))]
        for pairs in (1, 4):
            few = few_experts_config(dtype, (6144, 3072), pairs)
            products += [(itemsize, 64, few.out), (itemsize, 64, of_both(few.hidden))]
    for itemsize, rows, piece in products:
        assert piece.num_stages * piece.depth * (rows + piece.columns) * itemsize <= 232_448, (itemsize, rows, piece)


def test_sizes_of_a_call_follow_its_rows_and_widths():
    """Few rows in 16 bits stand on the narrow side of tensor cores; a launch that fills the GPU once has no more."""
    for rows, least in ((1, 16), (16, 16), (17, 32), (64, 64)):
        few = ordered_config("bfloat16", rows, False)
        assert (few.rows, few.columns_first) == (least, True)
    for many in (ordered_config("bfloat16", 65, True), ordered_config("float32", 1, False)):
        assert not many.columns_first
    index, union, by_block = (
        (config(jnp.dtype("float32")), config(jnp.dtype("bfloat16")))
        for config in (index_config, union_config, block_config)
    )
    assert all(narrow.keys < wide.keys for narrow, wide in (index, union)) and index[0].rows < index[1].rows
    assert all(narrow.tokens < wide.tokens for narrow, wide in (union, by_block))
    assert [config.num_stages for config in (*by_block, union[0])] == [1, 3, 1]
    one_byte, two_bytes = (index_decode_config(jnp.dtype(dtype)) for dtype in (E4M3, "bfloat16"))
    assert (one_byte.programs, 2 * one_byte.num_warps) == (2 * two_bytes.programs, two_bytes.num_warps)
    for dtype, tile in (("float32", 32), ("bfloat16", 64)):  # higher tiles have fewer columns of gate and of up each
        lower, higher = (grouped_experts_config(dtype, tokens, (6144, 3072)).hidden for tokens in (tile, 2 * tile))
        assert lower.columns == 2 * higher.columns
    programs = [stacked_config("bfloat16", 6144, [128 * tiles]).programs for tiles in (63, 64, 132, 133)]
    assert programs == [264, 132, 132, 264]
    for dtype, inputs, widths in (
        ("float32", 6144, [8192]),
        ("bfloat16", 6144 + 32, [8192]),
        ("bfloat16", 64, [128, 64]),
    ):
        piece = stacked_config(dtype, inputs, widths).piece
        assert (piece.columns, piece.depth) == (64, 32)


@pytest.mark.parametrize(
    ("module", "uncut", "tile", "low"),
    [(grouped_triton, 64, 128, 64), (mxfp8_triton, 16, 64, 32)],
    ids=["16 bits", "8"],
)
def test_a_tile_is_multiplied_as_high_as_it_needs(module, uncut, tile, low, unchecked):
    """All rows, or as few as one product takes; a low tile is never cut, and none is multiplied for no pair."""
    for tokens in (uncut, tile):
        for count in range(tokens + 1):
            heights = []
            module._as_high_as_needed(heights.append, count, tokens)
            expected = [] if count == 0 else [low if tokens == tile and count <= low else tokens]
            assert heights == expected, (tokens, count)


def test_groups_of_blocks_have_room_for_their_part_of_a_row():
    """They are looked through first where there are many, and where the best ones hold at most half of a row."""
    rules = Rules(heads=1, block_size=4, top_k=3, local_blocks=1, init_blocks=0, splits=10, few_blocks=80)
    for blocks in (0, 1, 10, 11, 80, 81):
        assert rules.per_split(jnp.int32(blocks)) == -(-blocks // 10)
        assert rules.group_width(blocks) == power_of_two(-(-blocks // 10))
    assert [rules.takes_groups(blocks) for blocks in (80, 81, 127, 128, 129)] == [False, False, False, True, True]
    assert not replace(rules, few_blocks=128).takes_groups(128)


def test_work_is_cut_in_as_many_equal_parts_as_there_are_programs_for():
    for tiles in (1, 3, 50):
        for steps in (1, 6, 7, 12):
            fits = [n for n in range(1, steps + 1) if steps % n == 0 and tiles * n <= 12]
            assert num_splits(tiles, steps, 12) == max(fits, default=1), (tiles, steps)


@pytest.mark.parametrize("interpret", [True, False])
def test_a_step_of_selection_fills_registers_of_lanes(interpret, monkeypatch, unchecked):
    """Whole queries with all heads, in as many lanes as VMEM has lists for; of few queries several copies."""
    taken = {}
    chip = Chip(2, 1 << 20)
    monkeypatch.setattr(Chip, "current", lambda given: chip if given is interpret else None)
    keys = contiguous(array(1, 4, 8), 4)
    rules = dict(top_k=3, local_blocks=1, init_blocks=0, return_keys=False, config=None, interpret=interpret)

    def walk(q, *at, sizes, **how):
        taken.update(sizes=sizes, **how)

    def step(module, heads: int, length: int, num_blocks: int):
        monkeypatch.setattr(module, "walk", walk)
        index_q, index_k = jax.ShapeDtypeStruct((1, length, heads, 8), "float32"), replace(keys, num_blocks=num_blocks)
        module.run(index_q, index_k, None, None, **rules)
        assert (taken["chip"], taken["interpret"]) == (chip, interpret)
        return taken["sizes"]

    # A list has four bytes a lane and block, in half of VMEM: 256 blocks for 512 lanes.
    for heads, length, num_blocks, tokens in (
        (4, 1000, 256, 128), (4, 1000, 257, 64), (4, 1000, 512, 64), (4, 1000, 513, 32), (4, 1000, 9000, 32),
        (3, 1000, 10, 170), (4, 5, 10, 5), (600, 7, 10, 1),
    ):  # fmt: skip
        sizes = step(index_tpu, heads, length, num_blocks)
        assert (sizes.tokens, sizes.heads, sizes.folds) == (tokens, heads, 1), (heads, length, num_blocks)
        lanes = tokens * heads
        assert sizes.width == lanes if interpret else sizes.width % 128 == 0 <= sizes.width - lanes < 128
        assert sizes.pages == index_tpu.Config().pages
    for heads, length, folds in ((4, 1, 32), (4, 3, 8), (4, 16, 2), (16, 16, 1), (1, 1, 128)):
        sizes = step(index_decode_tpu, heads, length, 10)
        assert (sizes.tokens, sizes.heads, sizes.folds) == (length, heads, folds)
        assert sizes.width == max(128, length * heads)
        assert sizes.fold_lanes >= sizes.pairs and sizes.pages == max(32, folds)
        assert sizes.buffer_rows * folds == sizes.pages
        # A chunk of pages has whole rows, and a whole register can be read from the last one on.
        assert sizes.list_rows == sizes.buffer_rows * -(-10 // sizes.pages) + 8


def test_a_schedule_is_the_one_that_is_named_or_that_the_overlap_calls_for(monkeypatch):
    """A tile's union is walked up to 2.1 times what one query chose, and where a row has not twice as many blocks."""
    answer = lambda value: (jnp.full((1, 4, 2, 4), value, jnp.float32),)
    monkeypatch.setattr(sparse_triton, "kv_block_major", lambda **given: answer(1))
    monkeypatch.setattr(sparse_triton, "walk_unions", lambda *given: answer(2))
    monkeypatch.setattr(sparse_triton, "query_union", lambda **given: answer(3))
    q, positions, lengths = array(1, 4, 2, 4), jnp.full((1, 4), 79, jnp.int32), jnp.array([80], jnp.int32)
    blocks = jnp.zeros((1, 1, 4, 4), jnp.int32)  # a tile of four queries, of four blocks each

    def taken(size, num_blocks=20, schedule="auto"):
        unions = SimpleNamespace(counts=jnp.stack([0, size]).reshape(1, 1, 1, 2))  # of which none is seen whole
        monkeypatch.setattr(sparse_triton, "union_blocks", lambda *given: unions)
        keys = contiguous(array(1, 1, 4 * num_blocks, 4), 4)
        how = dict(schedule=schedule, backend="triton", interpret=True)
        return sparse_prefill(q, keys, keys, blocks, positions, lengths, **how)[0][0, 0, 0, 0]

    of_auto = jax.jit(taken)
    assert [int(of_auto(size)) for size in (4, 8, 9, 16)] == [2, 2, 1, 1]
    assert taken(16, num_blocks=8) == 3
    assert [taken(size, schedule=name) for size, name in ((16, "query_union"), (4, "kv_block_major"))] == [3, 1]


@pytest.mark.parametrize("splits", [4, 5])
def test_splits_of_a_decode_step_are_merged(splits):
    """Four at most by programs of all rows of a tile, more by programs of one head; a query that saw no key has 0."""
    draw = np.random.default_rng(splits)
    parts, lses = draw.normal(size=(1, 2, 2, splits, 16, 4)).astype(np.float32), draw.normal(size=(1, 2, 2, splits, 16))
    lses[0, 1, 0, 1:] = lses[0, 0, 1, :, 2] = -np.inf  # one split alone saw a key; of a head none did
    out, lse = merge(jnp.asarray(parts), jnp.asarray(lses, jnp.float32), jnp.float32, group=3, interpret=True)
    num_rows = 16 if splits == 4 else 3
    weights = np.exp2(lses)[..., :num_rows]
    total = weights.sum(3)
    expected = (parts[..., :num_rows, :] * weights[..., None]).sum(3) / np.where(total, total, 1)[..., None]
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(total), rtol=1e-5, atol=1e-6)


def test_a_chunk_is_written_into_the_outputs_of_those_before():
    """Of the third and fourth of five queries, merged of two slots each; the other queries keep what they have."""
    batch, kv_heads, group, chunk, slots, width, start, length = 2, 2, 3, 2, 2, 4, 2, 5
    q = array(batch, length, kv_heads * group, width)
    keys = contiguous(array(batch, kv_heads, 4, width), 4)
    sizes = PrefillSizes.of(q, keys, kv_heads, slots, PrefillConfig(tokens=2), return_lse=True, interpret=True)
    draw = np.random.default_rng(0)
    parts = draw.normal(size=(batch, kv_heads, chunk, slots, 4, width)).astype(np.float32)  # three heads padded to four
    lses = draw.normal(size=parts.shape[:-1]).astype(np.float32)
    is_seen = np.ones((batch, kv_heads, chunk, slots), bool)
    is_seen[0, 1, 1], is_seen[1, 0, 0, 1] = False, False  # one query saw nothing, one a single block
    parts[1, 0, 0, 1] = np.nan
    behind = ((0, 2 * 4), (0, 0))  # where the last tile's lanes without a pair write
    flat = np.pad(parts.reshape(-1, width), behind), np.pad(lses.reshape(-1), behind[:1])
    before = array(batch, length * kv_heads * 4, width) + 7, array(batch, length * kv_heads * 4) + 8
    merge_chunk = jax.jit(partial(by_block._merge, start=start, sizes=sizes))
    out, lse = merge_chunk(*map(jnp.asarray, (*flat, is_seen)), before)
    weights = np.exp2(lses) * is_seen[..., None]  # [B K C J 4]
    total = weights.sum(3)
    expected = (np.nan_to_num(parts) * weights[..., None]).sum(3) / np.where(total, total, 1)[..., None]
    in_rows = lambda x: np.asarray(x).reshape(batch, length, kv_heads, 4, *x.shape[2:])
    own = slice(start, start + chunk)
    np.testing.assert_allclose(in_rows(out)[:, own], expected.swapaxes(1, 2), rtol=1e-5, atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(in_rows(lse)[:, own], np.log(total).swapaxes(1, 2), rtol=1e-5, atol=1e-6)
    for found, value in ((out, 7), (lse, 8)):
        assert (np.delete(in_rows(found), range(start, start + chunk), axis=1) == value).all()


@pytest.mark.parametrize("backend", ["triton", "mosaic_tpu"])
def test_a_layer_without_an_index_writes_keys_and_values_alone(backend):
    """As a dense layer is: traced."""
    x = Projected(array(2, 3, 4, 8), array(2, 3, 2, 8), array(2, 3, 2, 8), None, None)
    norms = Projected(array(8), array(8), None, None, None)
    table, rows = jnp.zeros((2, 3), jnp.int32), (jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))

    def insert(pool, angle):
        places = paged(pool, table), paged(pool, table), None
        how = dict(eps=1e-6, dtype=jnp.bfloat16, backend=backend, interpret=True)
        return qk_norm_rope_insert(x, norms, angle, angle, *rows, *places, **how)

    written = jax.eval_shape(insert, array(6, 2, 4, 8), array(2, 3, 4))
    assert (written.q.shape, written.q.dtype) == (x.q.shape, jnp.bfloat16)
    assert written.k.shape == written.v.shape == (6 * 2, 4, 8) and written.index_q is written.index_k is None


def test_a_long_row_is_added_and_normed_in_pieces_of_at_most_8192():
    """Two of them, powers of two, which cover the row."""
    x, update = (np.random.default_rng(seed).normal(size=(1, 1 << 14)).astype(np.float32) for seed in (0, 1))
    weight = np.linspace(-0.5, 0.5, 1 << 14, dtype=np.float32)
    how = dict(eps=0.1, backend="triton", interpret=True)
    found, norm = add_norm(*map(jnp.asarray, (x, update, weight)), **how)
    np.testing.assert_array_equal(found, x + update)
    expected = (x + update) / np.sqrt(np.mean(np.square(x + update)) + 0.1) * (1 + weight)
    np.testing.assert_allclose(norm, expected, rtol=1e-5, atol=1e-6)


def test_parts_of_a_chunk_are_joined_by_their_weights():
    """In float32, of a query that saw keys in both, and of one that saw none in the second: that may hold NaN."""
    draw = np.random.default_rng(0)
    (out, new), (lse, new_lse) = draw.normal(size=(2, 1, 3, 2, 4)), draw.normal(size=(2, 1, 3, 2))
    new_lse[0, 1], new[0, 1] = -np.inf, np.nan
    to_jax = lambda *arrays: [jnp.asarray(x, jnp.float32) for x in arrays]
    found, found_lse = cudnn._join(*to_jax(out, lse, new, new_lse))
    weight, new_weight = (np.exp(x)[..., None] for x in (lse, new_lse))
    expected = (out * weight + np.nan_to_num(new) * new_weight) / (weight + new_weight)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found_lse, np.logaddexp(lse, new_lse), rtol=1e-5, atol=1e-6)


def test_a_chunk_needs_the_pages_up_to_its_last_query():
    """Two are held: of queries up to the last token of the second, and not of one behind it; a whole row has all."""
    pages, whole = paged(array(3, 2, 4, 8), jnp.array([[1, 0, -1]], jnp.int32)), contiguous(array(1, 2, 12, 8), 4)
    for positions, in_pages, is_run in (
        ([6, 7], True, True), ([7, 8], False, True), ([3, -1], True, True), ([-1, -1], True, True),
        ([8, -1], False, True), ([7, 6], False, False), ([-1, 7], False, False),
    ):  # fmt: skip
        at = jnp.array([positions], jnp.int32), jnp.array([max(positions) + 1], jnp.int32)
        assert cudnn.in_order(pages, *at) == in_pages and cudnn.in_order(whole, *at) == is_run, positions


def test_keys_of_a_chunk_and_of_the_pieces_before_it_are_those_of_their_pages():
    """Rows of 6 and 0 tokens before chunks of 3 and 1 queries; what no query sees is 0, whatever memory holds."""
    tokens = numbers(2, 9, 2, 4) + 1  # [B S K H]
    tokens[1, 1:] = np.nan
    held = np.pad(tokens, ((0, 0), (0, 3), (0, 0), (0, 0)), constant_values=np.nan).reshape(2, 3, 4, 2, 4)
    table = np.array([[4, 0, 2], [5, 1, 3]], np.int32)
    pool = np.zeros((6, 2, 4, 4), np.float32)
    pool[table] = held.swapaxes(2, 3)
    made = paged(jnp.asarray(pool), jnp.asarray(table))
    first, count = jnp.array([6, 0], jnp.int32), jnp.array([3, 1], jnp.int32)
    own = jax.jit(cudnn._own_tokens, static_argnums=(3, 4))(made, first, count, 4, 2)
    expected = np.zeros((2, 4, 2, 4), np.float32)
    expected[0, :3], expected[1, 0] = tokens[0, 6:9], tokens[1, 0]
    np.testing.assert_array_equal(own, expected)
    take = jax.jit(cudnn._blocks, static_argnums=(2, 4))
    for first_block, blocks in ((0, 2), (1, 2), (1, 3)):
        seen = np.clip(np.array([6, 0]) - 4 * first_block, 0, 4 * blocks)
        found = take(made, jnp.int32(first_block), blocks, jnp.asarray(seen, jnp.int32), 2)
        expected = np.zeros((2, 4 * blocks, 2, 4), np.float32)
        expected[0, : seen[0]] = tokens[0, 4 * first_block : 4 * first_block + seen[0]]
        np.testing.assert_array_equal(found, expected)


def test_a_kernel_has_the_gradient_of_its_schedule():
    call = with_gradient(lambda x, y, n: 5 * x * y * n, lambda x, y, n: x * y + y, 2)
    value, gradients = jax.value_and_grad(call, argnums=(0, 1))(jnp.float32(3), jnp.float32(4), jnp.float32(2))
    assert value == 120 and [float(x) for x in gradients] == [4, 4]


# What is refused


def test_a_tpu_reads_pages_of_whole_tiles():
    """128 numbers, and 32 bytes of each of them: 8 tokens in float32, 16 in bfloat16, 32 in float8."""
    for dtype, rows in (("float32", 8), ("bfloat16", 16), (E4M3, 32)):
        made = lambda size, width, dtype=dtype: contiguous(array(1, size, width, dtype=dtype), size)
        for size in (rows, 3 * rows):
            mosaic_common.check_tiles("k", made(size, 256), False)
        mosaic_common.check_tiles("k", made(rows // 2, 64), True)  # interpreted
        for size, width in ((rows // 2, 128), (rows + 4, 128), (rows, 64), (rows, 192)):
            with pytest.raises(ValueError, match=rf"k has pages of {size} x {width} .* a multiple of {rows} tokens"):
                mosaic_common.check_tiles("k", made(size, width), False)


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
    check_kv_heads(q, 4)
    for heads in (0, 3, 8):
        with pytest.raises(ValueError, match=f"4 query heads and kv_heads = {heads}: need a divisor"):
            check_kv_heads(q, heads)


def test_operands_of_selection_that_do_not_fit_are_refused(unchecked):
    index_q, keys = array(2, 3, 2, 8), contiguous(array(2, 12, 8), 4)
    check = lambda q=index_q, k=keys, **rules: check_index(
        q, k, **(dict(top_k=3, local_blocks=1, init_blocks=0) | rules), limits=LIMITS, interpret=False
    )
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
        wrong = (blocks[:1],) if chosen else ()
        with pytest.raises(ValueError, match="K a divisor of 4" if chosen else "kv_heads = 3: need a divisor"):
            call(q, pages, pages, *wrong, *at, **({} if chosen else dict(kv_heads=3)))
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


def test_a_pool_of_bytes_is_within_reach(unchecked):
    """Of numbers of one byte: an offset among 2 to 4 GiB of them overflows."""
    described = lambda dtype: replace(
        contiguous(array(1, 4, 8), 4), pool=jax.ShapeDtypeStruct((1 << 17, 128, 128), dtype)
    )  # 2**31 numbers
    with pytest.raises(ValueError, match="k: a pool of 2147483648 one-byte numbers: use below"):
        triton_common.check_pool("k", described(E4M3), False)
    triton_common.check_pool("k", described(jnp.bfloat16), False)
