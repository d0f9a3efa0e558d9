"""Times every GPU kernel at M3's shapes beside dense attention: `python scripts/bench_gpu.py`.

Times are medians of what the profiler saw on the device, summed over all kernels of an op, its small ones included.
"near" selections come from index queries that drift slowly, "random" ones are uniform.
"""

import argparse
import os
import sys
from functools import partial

# Kernels inside a command buffer have no times of their own.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
import numpy as np
from measuring import kernel_times

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
TARGET = {
    "prefill 8,192": 1900, "prefill 32,768": 8300, "prefill 65,536": 18000, "prefill 131,072": 44000,
    "chunk 8,192 at 1,048,576": 19000, "decode 1 at 131,072": 28, "decode 1 at 1,048,576": 80,
    "decode 8 at 131,072": 85, "decode 32 at 131,072": 290, "verify 8 x 4 at 131,072": 100,
}  # fmt: skip


def normal(seed: int, *shape, dtype=jnp.bfloat16):
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


def line(name: str, us: float, floor: float, extra: str = "") -> None:
    number = f"{us / 1e3:9.3f} ms" if us >= 1000 else f"{us:9.1f} us"
    print(f"  {name:34} {number}  {100 * floor / us:5.1f}% of its roofline {extra}", flush=True)


def verdict(s: Shape, label: str, us: float, unit: str) -> str:
    """Return a note whether a total meets its target, 1.3 times as long for random selections; "" without a target."""
    reach = TARGET.get(s.name, 0) * (1.3 if label == "random" else 1.0)
    number = f"{reach / 1e3:.2f}" if unit == "ms" else f"{reach:.0f}"
    return f"reach {number}: {'met' if us <= reach else 'MISSED'}" if reach else ""


def shuffled(batch: int, blocks: int, seed: int = 0):
    """A table of pages of which no two blocks share one."""
    return jnp.asarray(np.random.default_rng(seed).permutation(batch * blocks).reshape(batch, blocks), jnp.int32)


def bench_prefill(s: Shape, peak: float, dense: bool) -> None:
    at = jnp.arange(s.context - s.queries, s.context, dtype=jnp.int32)[None], jnp.array([s.context], jnp.int32)
    index_q, index_k = drifting(s), normal(1, 1, s.context, s.width)
    q = normal(2, 1, s.queries, s.heads, s.width)
    k, v = (normal(i, 1, s.kv_heads, s.context, s.width) for i in (3, 4))
    score = jax.jit(lambda q, k, *at: index_topk(
        q, contiguous(k, s.block_size), *at, top_k=s.top_k, backend="triton"))  # fmt: skip
    index, _ = kernel_times(score, [(index_q, index_k, *at)], 4)
    line("index_topk", index, s.index_flops / peak, f"{s.index_flops / index / 1e6:.0f} TFLOP/s")
    near = score(index_q, index_k, *at)
    total = {}
    for label, blocks in (("near", near), ("random", uniform(s))):
        for schedule in ("query_union", "kv_block_major"):
            attend = jax.jit(lambda q, k, v, *rest, schedule=schedule: sparse_prefill(
                q, contiguous(k, s.block_size), contiguous(v, s.block_size), *rest,
                schedule=schedule, backend="triton")[0])  # fmt: skip
            us, _ = kernel_times(attend, [(q, k, v, blocks, *at)], 3)
            useful = s.attention_flops / us / 1e6
            line(f"{schedule}, {label}", us, s.attention_flops / peak, f"{useful:.0f} TFLOP/s of chosen blocks")
            total[label] = min(us, total.get(label, np.inf))
    for label, us in total.items():
        print(f"  total, {label:27} {(index + us) / 1e3:9.3f} ms  {verdict(s, label, index + us, 'ms')}")
    if dense:
        keys, values = (x.swapaxes(1, 2) for x in (k, v))
        us, _ = kernel_times(jax.jit(cudnn(s)), [(q, keys, values, at[1])], 2)
        ratio = us / (index + total["near"])
        line("dense, cuDNN", us, s.dense_flops / peak, f"{ratio:.2f}x the time of near selections")


def cudnn(s: Shape):
    """Dense attention of whole rows; of a chunk without a mask, since cuDNN's causal one starts at the first key."""
    if s.queries == s.context:
        return cudnn_causal
    return lambda q, k, v, lengths: jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def bench_decode(s: Shape, bandwidth: float, dense: bool) -> None:
    at = (
        jnp.broadcast_to(jnp.arange(s.context - s.queries, s.context, dtype=jnp.int32), (s.batch, s.queries)),
        jnp.full((s.batch,), s.context, jnp.int32),
    )
    index = bench_decode_index(s, at, bandwidth)
    near = bench_decode_selected(s, at, index, bandwidth)
    if dense:
        bench_decode_dense(s, at, near, bandwidth)


def bench_decode_index(s: Shape, at, bandwidth: float) -> dict[str, float]:
    """Microseconds with index keys of either dtype."""
    pages = s.batch * s.blocks
    layers = max(1, COLD // (pages * s.block_size * s.width * 2))
    table = shuffled(s.batch, s.blocks)
    index_q = normal(1, s.batch, s.queries, s.kv_heads, s.width)
    index_k = normal(2, layers, pages, s.block_size, s.width)
    times = {}
    for name, pool in (("bf16", index_k), ("e4m3", index_k.astype(jnp.float8_e4m3fn))):
        score = jax.jit(
            lambda q, k, table, layer, *at: index_topk_decode(
                q, paged(k, table, layer), *at, top_k=s.top_k, backend="triton"
            )
        )
        calls = [(index_q, pool, table, jnp.int32(i), *at) for i in range(layers)]
        us, _ = kernel_times(score, calls, 24)
        size = s.index_bytes * pool.dtype.itemsize / 2
        line(f"index_topk_decode, {name}", us, size / bandwidth, f"{size / us / 1e6:.2f} TB/s")
        times[name] = us
    return times


def bench_decode_selected(s: Shape, at, index: dict[str, float], bandwidth: float) -> float:
    """Time attention over selected blocks, and print its sums with the index kernel's times.

    Returns the microseconds of the sum for the first kind of selections, with index keys in bfloat16.
    """
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
        line(f"sparse_decode, {label}", us, size / bandwidth, f"{size / us / 1e6:.2f} TB/s")
        bf16, e4m3 = (index[name] + us for name in ("bf16", "e4m3"))
        found = verdict(s, label, bf16, "us")
        print(f"  sum, {label:29} {bf16:9.1f} us  {found}; with e4m3 index keys {e4m3:.1f} us")
        totals.append(bf16)
    return totals[0]


def bench_decode_dense(s: Shape, at, near: float, bandwidth: float) -> None:
    """Time attention over everything that a query sees, and print its ratio to `near` microseconds."""
    k, v = (normal(i, s.batch * s.blocks, s.kv_heads, s.block_size, s.width) for i in (3, 4))
    q, table = normal(5, s.batch, s.queries, s.heads, s.width), shuffled(s.batch, s.blocks, seed=1)
    attend = jax.jit(lambda q, k, v, table, *at: dense_decode(
        q, paged(k, table), paged(v, table), *at, kv_heads=s.kv_heads, backend="triton")[0])  # fmt: skip
    us, _ = kernel_times(attend, [(q, k, v, table, *at)], 4)
    floor = s.dense_bytes / bandwidth
    line("dense_decode", us, floor, f"{us / near:.1f}x the time of near selections; its bytes alone {floor:.0f} us")


def chosen(s: Shape, rng, label: str):
    """Selections of the queries of each row: "near" ones differ in one block from query to query."""
    out = np.empty((s.batch, s.kv_heads, s.queries, s.top_k), np.int32)
    for b, k in np.ndindex(s.batch, s.kv_heads):
        ids = rng.permutation(s.blocks - 1)
        for t in range(s.queries):
            first = t if label != "random" else t * (s.top_k - 1)
            out[b, k, t] = np.append(np.sort(ids[first : first + s.top_k - 1]), s.blocks - 1)
    return jnp.asarray(out)


def bench_insert(batch: int, queries: int, bandwidth: float) -> None:
    """Norm, rotary embedding and write of a layer's tokens: the kernel, and what XLA makes of the model's code."""
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

    print(f"insert {batch} x {queries:,}")
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
        line(name, us, floor, f"{len(kernels)} kernels")


def bench_experts(peak: float, bandwidth: float) -> None:
    """Experts of M3's widths, four of 128 a token: the weights in MXFP8, and the same numbers in bfloat16."""
    layers, count, width, hidden = 2, 128, 6144, 3072

    @partial(jax.jit, static_argnums=(1, 2))
    def draw(key, inputs, outputs):
        codes = jax.random.bits(key, (layers, count, inputs, outputs), jnp.uint8)
        codes = jnp.where(codes & 127 == 127, 0, codes)
        scales = jnp.full((layers, count, inputs // 32, outputs), 127 - 7 - round(inputs**0.5).bit_length(), jnp.uint8)
        return MXFP8Array(codes, scales)

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
            extra = f"{read / us / 1e6:.2f} TB/s" if tokens < 2048 else f"{flops / us / 1e6:.0f} TFLOP/s"
            floor = max(read / bandwidth, flops / peak)
            line(f"experts of {tokens:,} tokens in {name}", us, floor, f"{extra}, {kernels} kernels")
    bench_expert_paths("M3's experts", weights, 4)


def bench_embedded_experts() -> None:
    """Experts of the embedded model's widths, two of eight a token."""
    count, width, hidden = 8, 192, 192
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = (normal(i, 3, count, *shape) * shape[0] ** -0.5 for i, shape in enumerate(shapes))
    bench_expert_paths("the embedded model's experts", ExpertWeights(*weights), 2)


def bench_expert_paths(name: str, weights: ExpertWeights, num_chosen: int) -> None:
    """Microseconds of each way to run a few tokens, by which m3jax/ops/experts.py chooses."""
    is_whole = all(width % 128 == 0 for width in weights.gate.shape[2:])
    paths = ("gathered", "few", "grouped" if is_whole else "tiled")
    print(f"{name}, microseconds (and kernels) by tokens\n  {'tokens':>8} {''.join(f'{path:>16}' for path in paths)}")
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        row = []
        for path in paths:
            if path == "gathered" and tokens * num_chosen > 16:  # a copy of an expert for each pair
                row.append(f"{'':16}")
                continue
            us, kernels, _ = time_experts(path, weights, tokens, num_chosen, 2)
            row.append(f"{us:11.1f} ({kernels:2})")
        print(f"  {tokens:8} {''.join(row)}", flush=True)


def time_experts(
    path: str, weights: ExpertWeights, tokens: int, num_chosen: int, number_bytes: float
) -> tuple[float, int, float]:
    """(microseconds, kernels, bytes of the experts that are read), for choices that differ from call to call."""
    _, count, width, hidden = weights.gate.shape
    activate = lambda gate, up: swiglu_oai(gate, up, 1.702, 7.0).astype(jnp.bfloat16)
    run = jax.jit(lambda x, weights, ids: run_experts(x, weights, ids, jnp.int32(1), activate, path=path))
    rng, calls = np.random.default_rng(tokens), []
    for seed in range(4 if tokens < 32 else 1):  # other experts each time: nothing is found in the cache
        ids = rng.random((tokens, count)).argsort(axis=1)[:, :num_chosen]
        calls.append((normal(seed, tokens, width), weights, jnp.asarray(ids, jnp.int32)))
    read = np.mean([len(np.unique(ids)) for *_, ids in calls]) * 3 * width * hidden * number_bytes
    us, kernels = kernel_times(run, calls, 8)
    return us, len(kernels), read


def bench_projections(peak: float, bandwidth: float) -> None:
    """q, k and v of a token at M3's widths, from a stack of layers: in MXFP8, and the same numbers in bfloat16."""
    layers, width, outputs = 12, 6144, (8192, 512, 512)

    @partial(jax.jit, static_argnums=1)
    def draw(key, outputs):
        codes = jax.random.bits(key, (layers, width, outputs), jnp.uint8)
        return MXFP8Array(
            jnp.where(codes & 127 == 127, 0, codes), jnp.full((layers, width // 32, outputs), 113, jnp.uint8)
        )

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
            size = width * sum(outputs)
            floor = max(size * number_bytes / bandwidth, 2 * rows * size / peak)
            extra = f"{size * number_bytes / 1e6:.0f} MB, {len(kernels)} kernels"
            line(f"{rows:,} rows, {name}", us, floor, extra)


def bench_dense(peak: float) -> None:
    """Time attention of a chunk of M3's dense layers over pages, behind several numbers of tokens, by each backend."""
    heads, kv_heads, width, block_size, queries = 64, 4, 128, 128, 8192
    for past in (0, 8192, 24576, 51872):
        blocks = -(-(past + queries) // block_size)
        q, table = normal(5, 1, queries, heads, width), shuffled(1, blocks, seed=1)
        k, v = (normal(i, blocks, kv_heads, block_size, width) for i in (3, 4))
        at = past + jnp.arange(queries, dtype=jnp.int32)[None], jnp.array([past + queries], jnp.int32)
        flops, outs = 4 * heads * width * queries * (past + queries / 2), []
        for backend in ("triton", "cudnn"):
            attend = jax.jit(lambda q, k, v, table, *at, backend=backend: dense_causal(
                q, paged(k, table), paged(v, table), *at, kv_heads=kv_heads, backend=backend)[0])  # fmt: skip
            us, kernels = kernel_times(attend, [(q, k, v, table, *at)], 4)
            line(f"dense, {backend}, behind {past:,}", us, flops / peak, f"{flops / us / 1e6:.0f} TFLOP/s")
            for name, of_kernel in sorted(kernels.items(), key=lambda kernel: -kernel[1])[:4]:
                print(f"    {of_kernel:10.0f} us  {name[:90]}")
            outs.append(attend(q, k, v, table, *at).astype(jnp.float32))
        one, other = outs
        print(f"    distance of the two {float(jnp.linalg.norm(one - other) / jnp.linalg.norm(one)):.1e}", flush=True)


def ceilings() -> tuple[float, float]:
    """(multiply-add operations, bytes) a microsecond: of a bfloat16 matrix product, of a copy."""
    a, b = normal(0, 8192, 8192), normal(1, 8192, 8192)
    us, _ = kernel_times(jax.jit(lambda a, b: a @ b), [(a, b)], 10)
    x = normal(2, 1 << 30)
    copy, _ = kernel_times(jnp.copy, [(x,)], 6)
    return 2 * 8192**3 / us, 4 * (1 << 30) / copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--no-dense", action="store_true", help="without dense attention")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"error: jax runs on {jax.default_backend()!r} here: this needs an NVIDIA GPU and jax[cuda13]")
        return 2
    peak, bandwidth = ceilings()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"ceilings measured now: {peak / 1e6:.0f} TFLOP/s in bfloat16, {bandwidth / 1e6:.2f} TB/s copied")
    for s in (*PREFILL, *DECODE):
        if args.only not in s.name:
            continue
        print(s.name)
        bench_prefill(s, peak, not args.no_dense) if s in PREFILL else bench_decode(s, bandwidth, not args.no_dense)
    for batch, queries in INSERT if args.only in "insert" else ():
        bench_insert(batch, queries, bandwidth)
    if args.only in "experts":
        print("experts")
        bench_experts(peak, bandwidth)
        bench_embedded_experts()
    if args.only in "dense":
        print("dense")
        bench_dense(peak)
    if args.only in "projections":
        print("projections")
        bench_projections(peak, bandwidth)
    return 0


if __name__ == "__main__":
    sys.exit(main())
