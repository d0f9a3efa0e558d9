"""Time every GPU kernel at M3's shapes beside dense attention, on an NVIDIA GPU.

Times are medians of what the profiler saw on the device, summed over all kernels of an op, its small ones included. The
roofline is that of a matrix product and of a copy, measured now. "near" selections come from index queries that drift
slowly, "random" ones are uniform.
"""

import os

# Kernels inside a command buffer have no times of their own.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Option
from benchmarks.timing import copy_rate, kernel_times, product_rate
from m3jax.cache import LayerCall, Places, Scales, StackCache
from m3jax.execution import Projections
from m3jax.model.layers import swiglu_oai
from m3jax.mxfp8 import MXFP8Array, dequantize
from m3jax.ops import Heads, project_each, run_experts
from m3jax.ops.experts import ExpertWeights
from m3jax.weights import StackedLayer
from pallas_kernels.cudnn_causal import cudnn_causal
from pallas_kernels.dense_causal import dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk_decode import index_topk_decode
from pallas_kernels.pages import contiguous, paged
from pallas_kernels.shapes import DECODE, PREFILL, Shape
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import sparse_prefill
from pallas_kernels.stacked_project import MOST_ROWS

DRIFT = 0.999  # correlation of neighbouring index queries: neighbours then share nine of ten blocks
COLD = 600 << 20  # bytes to rotate through, so that nothing is found in the cache
INSERT = [(1, 1), (8, 1), (32, 1), (8, 4), (1, 2048), (1, 8192)]  # rows, tokens
Rows = Iterator[dict]
OPTIONS = dict(
    only=Option("", "Text that the shapes' names have: a part of insert, experts, dense, projections, prefill, decode"),
)


def measure(args):
    """Yield a row for each kernel and shape."""
    if jax.default_backend() != "gpu":
        raise ValueError(f"jax runs on {jax.default_backend()!r} here: this needs an NVIDIA GPU and jax[cuda13]")
    peak, bandwidth = product_rate("bfloat16") / 1e6, copy_rate() / 1e6  # a microsecond
    yield f"ceilings measured now: {peak / 1e6:.0f} TFLOP/s in bfloat16, {bandwidth / 1e6:.2f} TB/s copied"
    for s in (*PREFILL, *DECODE):
        if args.only in s.name:
            yield from prefill(s, peak) if s in PREFILL else decode(s, bandwidth)
    for batch, queries in INSERT if args.only in "insert" else ():
        yield from insert(batch, queries, bandwidth)
    if args.only in "experts":
        yield from experts(peak, bandwidth)
    if args.only in "dense":
        yield from dense(peak)
    if args.only in "projections":
        yield from projections(peak, bandwidth)


def row(
    shape: str, kernel: str, us: float, floor: float | None = None, *, flops: float | None = None,
    size: float | None = None, kernels: int | None = None, note: str | None = None,
) -> dict:  # fmt: skip
    """Return a row: microseconds, the least that they can be, and what they compute or move a second."""
    return {
        "shape": shape, "kernel": kernel, "us": float(us), "of roofline": floor / us if floor else None,
        "TFLOP/s": flops / us / 1e6 if flops else None, "TB/s": size / us / 1e6 if size else None, "kernels": kernels,
        "note": note,
    }  # fmt: skip


# Inputs


def normal(seed: int, *shape, dtype=jnp.bfloat16):
    """Return normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def drifting(s: Shape):
    """Index queries of one row, each close to the one before."""
    noise = np.random.default_rng(0).standard_normal((s.queries, s.kv_heads * s.width), dtype=np.float32)
    noise[0] /= (1 - DRIFT**2) ** 0.5
    for t in range(1, s.queries):
        noise[t] = DRIFT * noise[t - 1] + (1 - DRIFT**2) ** 0.5 * noise[t]
    return jnp.asarray(noise.reshape(1, s.queries, s.kv_heads, s.width), jnp.bfloat16)


def uniform(s: Shape):
    """A selection that ignores every neighbour, the own block last."""

    @jax.jit
    def piece(key, own):
        ids = jnp.arange(s.blocks)
        score = jax.random.uniform(key, (s.kv_heads, len(own), s.blocks))
        score = jnp.where(ids == own[:, None], 2.0, jnp.where(ids < own[:, None], score, -1.0))
        value, chosen = jax.lax.top_k(score, s.top_k)
        chosen = jnp.sort(jnp.where(value < 0, s.blocks, chosen), axis=-1)
        return jnp.where(chosen == s.blocks, -1, chosen).astype(jnp.int32)

    own = (s.context - s.queries + np.arange(s.queries)) // s.block_size
    pieces = np.array_split(own, -(-s.queries // 4096))
    return jnp.concatenate([piece(jax.random.key(i), jnp.asarray(x)) for i, x in enumerate(pieces)], axis=1)[None]


def shuffled(batch: int, blocks: int, seed: int = 0):
    """A table of pages of which no two blocks share one."""
    return jnp.asarray(np.random.default_rng(seed).permutation(batch * blocks).reshape(batch, blocks), jnp.int32)


def chosen(s: Shape, rng, label: str):
    """Selections of the queries of each row: "near" ones differ in one block from query to query."""
    out = np.empty((s.batch, s.kv_heads, s.queries, s.top_k), np.int32)
    for b, k in np.ndindex(s.batch, s.kv_heads):
        ids = rng.permutation(s.blocks - 1)
        for t in range(s.queries):
            first = t if label != "random" else t * (s.top_k - 1)
            out[b, k, t] = np.append(np.sort(ids[first : first + s.top_k - 1]), s.blocks - 1)
    return jnp.asarray(out)


def draw_mxfp8(key, shape: tuple[int, ...], exponent: int) -> MXFP8Array:
    """Return random weights [..., D, F] with one scale for every 32 inputs."""
    codes = jax.random.bits(key, shape, jnp.uint8)
    scales = jnp.full((*shape[:-2], shape[-2] // 32, shape[-1]), exponent, jnp.uint8)
    return MXFP8Array(jnp.where(codes & 127 == 127, 0, codes), scales)


# Attention


def prefill(s: Shape, peak: float) -> Rows:
    """Yield the index kernel, each schedule of attention over near and random selections, their sums, and cuDNN."""
    at = jnp.arange(s.context - s.queries, s.context, dtype=jnp.int32)[None], jnp.array([s.context], jnp.int32)
    index_q, index_k = drifting(s), normal(1, 1, s.context, s.width)
    q = normal(2, 1, s.queries, s.heads, s.width)
    k, v = (normal(i, 1, s.kv_heads, s.context, s.width) for i in (3, 4))
    score = jax.jit(lambda q, k, *at: index_topk(
        q, contiguous(k, s.block_size), *at, top_k=s.top_k, backend="triton"))  # fmt: skip
    index, _ = kernel_times(score, [(index_q, index_k, *at)], 4)
    yield row(s.name, "index_topk", index, s.index_flops / peak, flops=s.index_flops)
    near, total = score(index_q, index_k, *at), {}
    for label, blocks in (("near", near), ("random", uniform(s))):
        for schedule in ("query_union", "kv_block_major"):
            attend = jax.jit(lambda q, k, v, *rest, schedule=schedule: sparse_prefill(
                q, contiguous(k, s.block_size), contiguous(v, s.block_size), *rest,
                schedule=schedule, backend="triton")[0])  # fmt: skip
            us, _ = kernel_times(attend, [(q, k, v, blocks, *at)], 3)
            yield row(s.name, f"{schedule}, {label}", us, s.attention_flops / peak, flops=s.attention_flops)
            total[label] = index + min(us, total.get(label, np.inf) - index)
    for label, us in total.items():
        yield row(s.name, f"total, {label}", us)
    keys, values = (x.swapaxes(1, 2) for x in (k, v))
    # Of a chunk without a mask, since cuDNN's causal one starts at the first key.
    unmasked = lambda q, k, v, lengths: jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    attend = cudnn_causal if s.queries == s.context else unmasked
    us, _ = kernel_times(jax.jit(attend), [(q, keys, values, at[1])], 2)
    note = f"{us / total['near']:.2f}x the time of near selections"
    yield row(s.name, "dense, cuDNN", us, s.dense_flops / peak, note=note)


def decode(s: Shape, bandwidth: float) -> Rows:
    """Yield the index kernel with index keys of either dtype, attention over selected blocks, sums, and all of it."""
    at = (
        jnp.broadcast_to(jnp.arange(s.context - s.queries, s.context, dtype=jnp.int32), (s.batch, s.queries)),
        jnp.full((s.batch,), s.context, jnp.int32),
    )
    pages = s.batch * s.blocks
    layers = max(1, COLD // (pages * s.block_size * s.width * 2))
    table, index = shuffled(s.batch, s.blocks), {}
    index_q = normal(1, s.batch, s.queries, s.kv_heads, s.width)
    index_k = normal(2, layers, pages, s.block_size, s.width)
    for name, pool in (("bf16", index_k), ("e4m3", index_k.astype(jnp.float8_e4m3fn))):
        score = jax.jit(
            lambda q, k, table, layer, *at: index_topk_decode(
                q, paged(k, table, layer), *at, top_k=s.top_k, backend="triton"
            )
        )
        index[name], _ = kernel_times(score, [(index_q, pool, table, jnp.int32(i), *at) for i in range(layers)], 24)
        size = s.index_bytes * pool.dtype.itemsize / 2
        yield row(s.name, f"index_topk_decode, {name}", index[name], size / bandwidth, size=size)
    del index_k, pool

    # Fewer pages of K and V than rows have blocks do: what is not selected is not read.
    pages, rng, totals = min(s.batch * s.blocks, 8192), np.random.default_rng(0), []
    k, v = (normal(i, pages, s.kv_heads, s.block_size, s.width) for i in (3, 4))
    q = normal(5, s.batch, s.queries, s.heads, s.width)
    attend = jax.jit(lambda q, k, v, table, *rest: sparse_decode(
        q, paged(k, table), paged(v, table), *rest, backend="triton")[0])  # fmt: skip
    for label in ("near", "random") if s.queries > 1 else ("any",):
        calls = []
        for _ in range(8):
            table = jnp.asarray(rng.integers(0, pages, (s.batch, s.blocks)), jnp.int32)
            calls.append((q, k, v, table, chosen(s, rng, label), *at))
        us, _ = kernel_times(attend, calls, 24)
        size = s.selected_bytes * (s.queries if label == "random" else 1)
        yield row(s.name, f"sparse_decode, {label}", us, size / bandwidth, size=size)
        for name, of_index in index.items():
            yield row(s.name, f"sum, {label}, index keys in {name}", of_index + us)
        totals.append(index["bf16"] + us)
    k, v = (normal(i, s.batch * s.blocks, s.kv_heads, s.block_size, s.width) for i in (3, 4))
    attend = jax.jit(lambda q, k, v, table, *at: dense_decode(
        q, paged(k, table), paged(v, table), *at, kv_heads=s.kv_heads, backend="triton")[0])  # fmt: skip
    us, _ = kernel_times(attend, [(q, k, v, shuffled(s.batch, s.blocks, seed=1), *at)], 4)
    note = f"{us / totals[0]:.1f}x the time of near selections"
    yield row(s.name, "dense_decode", us, s.dense_bytes / bandwidth, note=note)


def dense(peak: float) -> Rows:
    """Yield attention of a chunk of M3's dense layers over pages, behind several numbers of tokens, by each backend."""
    heads, kv_heads, width, block_size, queries = 64, 4, 128, 128, 8192
    for past in (0, 8192, 24576, 51872):
        blocks = -(-(past + queries) // block_size)
        q, table = normal(5, 1, queries, heads, width), shuffled(1, blocks, seed=1)
        k, v = (normal(i, blocks, kv_heads, block_size, width) for i in (3, 4))
        at = past + jnp.arange(queries, dtype=jnp.int32)[None], jnp.array([past + queries], jnp.int32)
        flops, outs, name = 4 * heads * width * queries * (past + queries / 2), [], f"dense, behind {past:,}"
        for backend in ("triton", "cudnn"):
            attend = jax.jit(lambda q, k, v, table, *at, backend=backend: dense_causal(
                q, paged(k, table), paged(v, table), *at, kv_heads=kv_heads, backend=backend)[0])  # fmt: skip
            us, kernels = kernel_times(attend, [(q, k, v, table, *at)], 4)
            outs.append(attend(q, k, v, table, *at).astype(jnp.float32))
            apart = float(jnp.linalg.norm(outs[0] - outs[-1]) / jnp.linalg.norm(outs[0]))
            yield row(name, backend, us, flops / peak, flops=flops, note=f"{apart:.1e} from triton's")
            for kernel, of_kernel in sorted(kernels.items(), key=lambda kernel: -kernel[1])[:4]:
                yield row(name, f"  {kernel[:90]}", of_kernel)


# What stands around attention


def insert(batch: int, queries: int, bandwidth: float) -> Rows:
    """Yield norm, rotary embedding and write of a layer's tokens: the kernel, and XLA's of the model's code."""
    heads, kv, width, blocks = 64, 4, 128, 64
    shapes = ((heads, width), (kv, width), (kv, width), (kv, width), (width,))
    raw = Heads(*(normal(i, batch, queries, *shape, dtype=jnp.float32) for i, shape in enumerate(shapes)))
    at = jnp.broadcast_to(jnp.arange(100, 100 + queries, dtype=jnp.int32), (batch, queries))
    lengths = jnp.full((batch,), 100 + queries, jnp.int32)
    table = shuffled(batch, blocks)
    places = Places(table, jnp.take_along_axis(table, at // 128, axis=1), at % 128)
    pool = lambda seed, *n: normal(seed, 2, batch * blocks, *n, 128, width)
    cos, sin = (normal(seed, batch, queries, 32, dtype=jnp.float32) for seed in (20, 21))
    q_norm, k_norm, index_q_norm, index_k_norm = (normal(seed, width) for seed in range(9, 13))
    norms = Heads(q_norm, k_norm, None, index_q_norm, index_k_norm)

    def kernel(pages, raw, layer):
        options = dict(eps=1e-6, dtype=jnp.bfloat16, backend="triton")
        queries, pages = pages.insert(LayerCall(layer, places, at, lengths), raw, norms, cos, sin, **options)
        return pages, queries

    def xla(pages, raw, layer):
        ready = Projections(raw, norms, cos, sin, 1e-6, jnp.bfloat16).finish()
        call = LayerCall(layer, places, at, lengths)
        return pages.write(call, ready.k, ready.v, ready.index_k), (ready.q, ready.index_q)

    floor = batch * queries * (heads + 3 * kv + 1) * width * 6 / bandwidth
    for name, fn in (("qk_norm_rope_insert", kernel), ("the same by XLA", xla)):
        scales = Scales(jnp.ones((2, kv)), jnp.ones((2, kv)), jnp.ones(2))
        state = StackCache(pool(1, kv), pool(2, kv), pool(3), scales)
        step = jax.jit(fn, donate_argnums=0)

        def call(x, layer, step=step):
            nonlocal state
            state, out = step(state, x, layer)
            return out

        us, kernels = kernel_times(call, [(raw, jnp.int32(1))], 24)
        yield row(f"insert {batch} x {queries:,}", name, us, floor, kernels=len(kernels))


def experts(peak: float, bandwidth: float) -> Rows:
    """Yield experts of M3's widths, four of 128 a token, in MXFP8 and in bfloat16; then each path for few tokens."""
    layers, count, width, hidden = 2, 128, 6144, 3072
    draw = jax.jit(lambda key, inputs, outputs: draw_mxfp8(
        key, (layers, count, inputs, outputs), 127 - 7 - round(inputs**0.5).bit_length()),
        static_argnums=(1, 2))  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 3)
    kept = ExpertWeights(draw(keys[0], width, hidden), draw(keys[1], width, hidden), draw(keys[2], hidden, width))
    as_numbers = jax.jit(
        lambda weight: jax.lax.map(lambda w: jax.lax.map(lambda w: dequantize(w, "bfloat16"), w), weight)
    )
    for name, weights, number_bytes in (("MXFP8", kept, 33 / 32), ("bfloat16", None, 2)):
        if weights is None:
            weights = ExpertWeights(*(as_numbers(weight) for weight in kept))
            del kept
        for tokens in (1, 4, 8, 32, 2048, 8192):
            us, kernels, read = time_experts("auto", weights, tokens, 4, number_bytes)
            flops = 2 * 3 * tokens * 4 * width * hidden
            floor, rates = max(read / bandwidth, flops / peak), {"size": read} if tokens < 2048 else {"flops": flops}
            yield row(f"experts of {tokens:,} tokens", name, us, floor, kernels=kernels, **rates)
    yield from expert_paths("M3's experts", weights, 4)
    shapes = ((192, 192), (192, 192), (192, 192))
    embedded = ExpertWeights(*(normal(i, 3, 8, *shape) * shape[0] ** -0.5 for i, shape in enumerate(shapes)))
    yield from expert_paths("the embedded model's experts", embedded, 2)


def expert_paths(name: str, weights: ExpertWeights, num_chosen: int) -> Rows:
    """Yield each way to run a few tokens, by which m3jax/ops/experts.py chooses."""
    is_whole = all(width % 128 == 0 for width in weights.gate.shape[2:])
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        for path in ("gathered", "few", "grouped" if is_whole else "tiled"):
            if path == "gathered" and tokens * num_chosen > 16:  # a copy of an expert for each pair
                continue
            us, kernels, _ = time_experts(path, weights, tokens, num_chosen, 2)
            yield row(f"{name}, {tokens} tokens", path, us, kernels=kernels)


def time_experts(
    path: str, weights: ExpertWeights, tokens: int, num_chosen: int, number_bytes: float
) -> tuple[float, int, float]:
    """Return microseconds, kernels, and bytes of the experts that are read, for choices that differ by the call."""
    _, count, width, hidden = weights.gate.shape
    activate = lambda gate, up: swiglu_oai(gate, up, 1.702, 7.0).astype(jnp.bfloat16)
    run = jax.jit(lambda x, weights, ids: run_experts(x, weights, ids, jnp.int32(1), activate, path=path))
    rng, calls = np.random.default_rng(tokens), []
    for seed in range(4 if tokens < 32 else 1):  # other experts each time: nothing is found in the cache
        ids = rng.random((tokens, count)).argsort(axis=1)[:, :num_chosen]
        calls.append((normal(seed, tokens, width), weights, jnp.asarray(ids, jnp.int32)))
    read = np.mean([len(np.unique(ids)) for *_, ids in calls]) * 3 * width * hidden * number_bytes
    us, kernels = kernel_times(run, calls, 8)
    return us, len(kernels), float(read)


def projections(peak: float, bandwidth: float) -> Rows:
    """Yield q, k and v of a token at M3's widths, from a stack of layers: in MXFP8, and the same in bfloat16."""
    layers, width, outputs = 12, 6144, (8192, 512, 512)
    draw = jax.jit(lambda key, n: draw_mxfp8(key, (layers, width, n), 113), static_argnums=1)
    kept = [draw(key, n) for key, n in zip(jax.random.split(jax.random.key(0), 3), outputs, strict=True)]
    as_numbers = jax.jit(lambda weight: jax.lax.map(lambda w: dequantize(w, "bfloat16"), weight))
    in_bfloat16 = [as_numbers(weight) for weight in kept]

    @jax.jit
    def by_kernel(x, weights, layer):
        return project_each("xd,df->xf", x, [StackedLayer(weight, layer) for weight in weights])

    @jax.jit
    def by_xla(x, weights, layer):
        take = partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        return project_each("xd,df->xf", x, [jax.tree.map(lambda w: take(w, layer), weight) for weight in weights])

    ways = (
        ("MXFP8", by_kernel, kept, 33 / 32),
        ("MXFP8 by XLA", by_xla, kept, 33 / 32),
        ("bfloat16", by_xla, in_bfloat16, 2),
        ("bfloat16 in place", by_kernel, in_bfloat16, 2),
    )
    for rows in (1, 4, 16, 48, 256, 2048, 8192):
        for name, run, weights, number_bytes in ways:
            if rows > MOST_ROWS and name == "bfloat16 in place":
                continue
            calls = [(normal(rows, rows, width), weights, jnp.int32(layer)) for layer in range(layers)]
            us, kernels = kernel_times(run, calls, 12)
            numbers = width * sum(outputs)
            size = numbers * number_bytes
            floor = max(size / bandwidth, 2 * rows * numbers / peak)
            yield row(f"projections of {rows:,} rows", name, us, floor, size=size, kernels=len(kernels))
