"""Every kernel lowers for CUDA at the named shapes that differ, without a GPU; and wrong operands are errors."""

import re
from functools import partial

import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from support.lowering import array, lower

from pallas_kernels.dense_causal import dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk_decode import index_topk_decode
from pallas_kernels.pages import contiguous, paged
from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert
from pallas_kernels.shapes import DECODE, PREFILL, Shape
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import sparse_prefill

SPARSE_PREFILL = [partial(sparse_prefill, schedule=name) for name in ("query_union", "kv_block_major")]
BY_NAME = {shape.name: shape for shape in (*PREFILL, *DECODE)}
SMALL = Shape("small", 2, 70, 1000, heads=12, kv_heads=2, width=64, block_size=64, top_k=5)
FEW = Shape("few", 2, 5, 1000, heads=6, kv_heads=2, width=64, block_size=64, top_k=5)


def operands(s: Shape, dtype, stored, layout: str):
    """(queries, keys with values, index queries, index keys, table, selection, positions, lengths), abstract."""
    q = array(dtype, s.batch, s.queries, s.heads, s.width)
    index_q = array(dtype, s.batch, s.queries, s.kv_heads, s.width)
    # Three layers: pools of one-byte numbers between 2 and 4 GiB are refused.
    lead = (3, s.batch * s.blocks) if layout == "paged" else (3, s.batch)
    rows = (s.block_size,) if layout == "paged" else (s.blocks * s.block_size,)
    kv = array(stored, *lead, s.kv_heads, *rows, s.width)
    index_k = array(stored, *lead, *rows, s.width)
    table = array(jnp.int32, s.batch, s.blocks) if layout == "paged" else None
    blocks = array(jnp.int32, s.batch, s.kv_heads, s.queries, s.top_k)
    return q, kv, index_q, index_k, table, blocks, *at(s)


def at(s: Shape):
    return array(jnp.int32, s.batch, s.queries), array(jnp.int32, s.batch)


def pages(x, table, s: Shape, layer):
    return contiguous(x, s.block_size, layer) if table is None else paged(x, table, layer)


def lower_all(s: Shape, index, attends, dtype=jnp.bfloat16, stored=None, layout="paged") -> list[str]:
    """Programs of the selection, and of each kind of attention."""
    q, kv, index_q, index_k, table, blocks, positions, lengths = operands(s, dtype, stored or dtype, layout)
    layer = array(jnp.int32)

    def score(q, k, table, layer, *at):
        return index(q, pages(k, table, s, layer), *at, top_k=s.top_k, backend="triton")

    def attention(attend, q, k, v, table, layer, *rest):
        kv = pages(k, table, s, layer), pages(v, table, s, layer)
        return attend(q, *kv, *rest, return_lse=True, backend="triton")

    texts = [lower(score, index_q, index_k, table, layer, positions, lengths)]
    for attend in attends:
        is_dense = isinstance(attend, partial) and "kv_heads" in attend.keywords
        chosen = () if is_dense else (blocks,)
        texts.append(lower(partial(attention, attend), q, kv, kv, table, layer, *chosen, positions, lengths))
    return texts


@pytest.mark.parametrize(
    "name",
    [
        "prefill 131,072",
        "chunk 8,192 at 1,048,576",
        pytest.param("shard of 4, prefill 32,768", marks=pytest.mark.further),
    ],
)
def test_prefill_lowers(name):
    """T37, T39: 131,072 queries and 8,192 blocks fit the launch grid."""
    # The second schedule takes 8,192 queries at a time: sixteen times the same kernels.
    schedules = SPARSE_PREFILL[:1] if name == "prefill 131,072" else SPARSE_PREFILL
    for text in lower_all(BY_NAME[name], index_topk, schedules):
        assert "triton" in text


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("decode 1 at 1,048,576", None),
        ("decode 32 at 131,072", jnp.float8_e4m3fn),
        pytest.param("verify 8 x 4 at 131,072", None, marks=pytest.mark.further),
        pytest.param("shard of 4, decode 32 at 131,072", jnp.float8_e4m3fn, marks=pytest.mark.further),
    ],
)
def test_decode_lowers(name, stored):
    """One row and many, one query and several, of all heads and of a device's, in two bytes and in one."""
    shape = BY_NAME[name]
    attends = [sparse_decode, partial(dense_decode, kv_heads=shape.kv_heads)]
    for text in lower_all(shape, index_topk_decode, attends, stored=stored):
        assert "triton" in text


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.further)
            for case in (("bfloat16", "contiguous"), ("float16", "paged"))
        ),
        ("float32", "contiguous"),
    ],
)
def test_every_dtype_and_layout_lowers(dtype, layout):
    """Heads of 64, blocks of 64, groups of 6 and 3, five slots: nothing here is a power of two by chance.

    Pages of bfloat16 are those of the tests above.
    """
    prefill = [*SPARSE_PREFILL, partial(dense_causal, kv_heads=SMALL.kv_heads)]
    decode = [sparse_decode, partial(dense_decode, kv_heads=FEW.kv_heads)]
    texts = lower_all(SMALL, index_topk, prefill, dtype, layout=layout)
    texts += lower_all(FEW, index_topk_decode, decode, dtype, layout=layout)
    assert len(texts) == 7 and all("triton" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("chunk 8,192 at 1,048,576", layout) for layout in ("contiguous", "paged")] + [("decode 1 at 131,072", "paged")],
)
def test_dense_attention_in_parts_lowers_to_two_calls_of_cudnn(name, layout, monkeypatch):
    """The chunk's own part is causal, a piece before it is not; jax asks cuDNN for its version, which is not here.

    A single query comes with padding behind it: cuDNN would run it by another kernel.
    """
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    s = BY_NAME[name]
    q, kv, _, _, table, _, positions, lengths = operands(s, jnp.bfloat16, jnp.bfloat16, layout)

    def attend(q, k, v, table, *at):
        of = lambda x: pages(x, table, s, 1)
        return dense_causal(q, of(k), of(v), *at, kv_heads=s.kv_heads, return_lse=True, backend="cudnn")

    text = lower(attend, q, kv, kv, table, positions, lengths)
    masks = re.findall(r"mask_type\\22: \\22(\w+)", text)
    assert sorted(masks) == ["CAUSAL", "PADDING"]
    calls = re.findall(r"@__cudnn\$fmhaSoftmax\(.*-> \(tensor<(\d+)x(\d+)x(\d+)x(\d+)xbf16>", text)
    queries = max(s.queries, 64)
    assert calls == 2 * [tuple(map(str, (s.batch, s.heads, queries, s.width)))], calls


def test_attention_behind_a_prefix_lowers_to_one_call_of_cudnn_and_the_kernel(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    s = BY_NAME["chunk 8,192 at 1,048,576"]
    q, kv, _, _, table, _, positions, lengths = operands(s, jnp.bfloat16, jnp.bfloat16, "paged")
    options = dict(kv_heads=s.kv_heads, return_lse=True, backend="cudnn_prefix")
    attend = lambda q, k, v, table, *at: dense_causal(q, *(pages(x, table, s, 1) for x in (k, v)), *at, **options)
    text = lower(attend, q, kv, kv, table, positions, lengths)
    assert re.findall(r"mask_type\\22: \\22(\w+)", text) == ["PADDING"] and "dense_causal" in text


@pytest.mark.parametrize(
    ("name", "stored"), [("prefill 131,072", jnp.bfloat16), ("decode 32 at 131,072", jnp.float8_e4m3fn)]
)
def test_insert_lowers(name, stored):
    s = BY_NAME[name]
    q, kv, index_q, index_k, table, _, positions, lengths = operands(s, jnp.float32, stored, "paged")
    head = lambda n: array(jnp.float32, s.batch, s.queries, n, s.width)
    x = Projected(q, head(s.kv_heads), head(s.kv_heads), index_q, array(jnp.float32, s.batch, s.queries, s.width))
    weight = array(jnp.float32, s.width)
    angle = array(jnp.float32, s.batch, s.queries, s.width // 4)

    def insert(x, norms, angle, positions, lengths, table, *pools):
        where = (paged(pool, table, 1) for pool in pools)
        options = dict(eps=1e-6, dtype=jnp.bfloat16, backend="triton")
        return qk_norm_rope_insert(x, norms, angle, angle, positions, lengths, *where, **options)

    norms = Projected(weight, weight, None, weight, weight)
    assert "triton" in lower(insert, x, norms, angle, positions, lengths, table, kv, kv, index_k)


# Errors: what was given, what is allowed, what to do.
