"""Compile every TPU kernel at M3's shapes with the real TPU compiler, on a machine that has no TPU.

    python scripts/tpu_compile.py [--chip v5e v5p v6e tpu7x] [--op NAMES] [--context 8192 131072 1048576] [--quick]

It needs libtpu (`pip install "m3jax[tpu]"` or `[test]`). For each kernel and chip it prints whether it compiles or the
compiler's reason, the VMEM that the kernel takes, the bytes that it moves and the products that it makes by count, the
time that both need at the chip's published rates, and the compiler's own estimate of all, the kernel's by its own
figures. Exits with 1 if anything does not compile.
"""

import argparse
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

# Only the compiler is used: no chip is looked for, none is opened, and others may compile at the same time.
os.environ |= dict(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dense_causal import dense_causal
from pallas_kernels.expert_tiles import expert_tiles
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk_decode import index_topk_decode
from pallas_kernels.mxfp8_experts import Weights, mxfp8_experts
from pallas_kernels.mxfp8_project import mxfp8_project
from pallas_kernels.pages import contiguous, paged
from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert
from pallas_kernels.shapes import Shape
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import sparse_prefill

CHIPS = dict(v5e="v5e:2x2", v5p="v5p:2x2x1", v6e="v6e:2x2", tpu7x="tpu7x:2x2x1")
OPS = dict(
    index_topk_decode=index_topk_decode,
    sparse_decode=sparse_decode,
    index_topk=index_topk,
    query_union=partial(sparse_prefill, schedule="query_union"),
    kv_block_major=partial(sparse_prefill, schedule="kv_block_major"),
    dense_causal=dense_causal,
    qk_norm_rope_insert=qk_norm_rope_insert,
    expert_tiles=expert_tiles,
    mxfp8_project=mxfp8_project,
    mxfp8_experts=mxfp8_experts,
)
BF16, FP32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
CONTEXTS = (8192, 131072, 1048576)
TOKENS = 16  # of a tile of query_union
LANES = 128
ANGLES = 32  # of a head: rotary dim 64
WIDTH, HIDDEN = 6144, 3072  # of the model, of an expert


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one kernel."""

    op: str
    shape: Shape
    dtype: jax.typing.DTypeLike = BF16
    stored: jax.typing.DTypeLike = BF16
    paged: bool = True

    def __str__(self) -> str:
        s = self.shape
        kind = (
            jnp.dtype(self.stored).name.replace("float8_e4m3fn", "e4m3").replace("bfloat", "bf").replace("float", "fp")
        )
        return f"{self.op} {s.batch} x {s.queries} at {s.context:,} {kind}{'' if self.paged else ' contiguous'}"

    @property
    def inserts(self) -> bool:
        return self.op == "qk_norm_rope_insert"

    @property
    def donated(self) -> tuple[int, ...]:
        """The arguments whose memory the outputs reuse."""
        return (2, 3, 4) if self.inserts else ()

    def memory(self, *heads: int) -> jax.ShapeDtypeStruct:
        """Pages, or rows, of keys with these heads."""
        s = self.shape
        places = (s.batch * s.blocks, *heads, s.block_size) if self.paged else (s.batch, *heads, s.context)
        return array(self.stored, *places, s.width)

    def arguments(self) -> tuple:
        """(positions, lengths[, index keys or keys[, values]], table, queries[, blocks]); or those of an insertion."""
        s, ints = self.shape, partial(array, jnp.int32)
        at, table = (ints(s.batch, s.queries), ints(s.batch)), ints(s.batch, s.blocks)
        if self.inserts:
            head = lambda *n: array(FP32, s.batch, s.queries, *n, s.width)
            weight, few = array(FP32, s.width), head(s.kv_heads)
            angle = array(FP32, s.batch, s.queries, ANGLES)
            x, norms = Projected(head(s.heads), few, few, few, head()), Projected(weight, weight, None, weight, weight)
            kv = self.memory(s.kv_heads)
            return *at, kv, kv, self.memory(), table, x, norms, angle
        if "index" in self.op:
            return *at, self.memory(), table, array(self.dtype, s.batch, s.queries, s.kv_heads, s.width)
        kv, q = self.memory(s.kv_heads), array(self.dtype, s.batch, s.queries, s.heads, s.width)
        if self.op == "dense_causal":
            return *at, kv, kv, table, q
        return *at, kv, kv, table, q, ints(s.batch, s.kv_heads, s.queries, s.top_k)

    def function(self) -> Callable:
        """Return the function that calls the op."""
        size, op = self.shape.block_size, partial(OPS[self.op], backend="mosaic_tpu")
        view = lambda x, table: paged(x, table) if self.paged else contiguous(x, size)
        if self.inserts:
            return lambda at, n, k, v, index, t, x, norms, angle: op(
                x, norms, angle, angle, at, n, view(k, t), view(v, t), view(index, t), eps=1e-6, dtype=self.dtype
            )
        if "index" in self.op:
            return lambda at, n, k, t, q: op(q, view(k, t), at, n, top_k=self.shape.top_k)
        if self.op == "dense_causal":
            return lambda at, n, k, v, t, q: op(q, view(k, t), view(v, t), at, n, kv_heads=self.shape.kv_heads)
        return lambda at, n, k, v, t, q, blocks: op(q, view(k, t), view(v, t), blocks, at, n, return_lse=True)

    def work(self) -> tuple[float, float]:
        """Return (products and sums, bytes of HBM) of the kernel's work; in a prefill neighbours choose alike."""
        s, item = self.shape, jnp.dtype(self.stored).itemsize
        keys = min(s.top_k, s.blocks) * s.block_size
        query_bytes = 2.0 * jnp.dtype(self.dtype).itemsize * s.batch * s.queries * s.heads * s.width
        if self.inserts:
            # Projections in float32; a unit of 32 tokens, or a page, is read and written for each of 9 heads.
            unit = 32 if s.queries < s.block_size else s.block_size
            units = s.batch * -(-s.queries // unit)
            heads = 2 * s.kv_heads + 1
            new = s.batch * s.queries * (heads + s.heads + s.kv_heads) * s.width
            return 0.0, 6.0 * new + 2.0 * units * unit * heads * s.width * item
        if self.op == "index_topk_decode":
            lanes = -(-s.queries * s.kv_heads // LANES) * LANES
            return 2.0 * s.batch * s.context * s.width * lanes, s.batch * s.context * s.width * item
        if self.op == "index_topk":
            tiles = -(-s.queries * s.kv_heads // 512)
            return s.index_flops, tiles * s.batch * (s.context - s.queries / 2) * s.width * item
        pages = 2.0 * s.kv_heads * keys * s.width * item
        if self.op == "sparse_decode":
            return s.attention_flops, s.batch * s.queries * pages + query_bytes
        if self.op == "query_union":
            return s.attention_flops, s.batch * -(-s.queries // TOKENS) * pages + query_bytes
        if self.op == "dense_causal":  # tiles of 64 queries
            context_bytes = 2.0 * s.kv_heads * s.context * s.width * item
            flops = 4.0 * s.batch * s.queries * s.heads * s.width * (s.context - s.queries / 2)
            return flops, s.batch * -(-s.queries // 64) * context_bytes + query_bytes
        # Queries are gathered and read, partial outputs written, gathered and read: once for each slot.
        return s.attention_flops, s.batch * s.blocks * s.block_size * pages / keys + query_bytes * (1 + 3 * s.top_k)


@dataclasses.dataclass(frozen=True)
class ByWeights:
    """One call of a kernel that multiplies rows by MXFP8 weights of M3's widths."""

    op: str
    rows: int
    tile: int = 0  # of the experts
    dtype: jax.typing.DTypeLike = BF16
    donated: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op} of {self.rows:,} rows{f' in tiles of {self.tile}' if self.tile else ''}"

    @property
    def tiles(self) -> int:
        """The most tiles that there can be: each row chooses 4 of 16 experts."""
        return min(self.rows * 4, 16 + self.rows * 4 // self.tile)

    def arguments(self) -> tuple:
        """Return (rows, weights, layer), or the arguments of experts."""
        weights = lambda *shape: Weights(
            array(jnp.uint8, *shape), array(jnp.uint8, *shape[:-2], shape[-2] // 32, shape[-1])
        )
        x, layer = array(self.dtype, self.rows, WIDTH), array(jnp.int32)
        if not self.tile:
            return x, (weights(3, WIDTH, 8192), weights(3, WIDTH, 128)), layer
        into, out = weights(2, 16, WIDTH, HIDDEN), weights(2, 16, HIDDEN, WIDTH)
        places = array(jnp.int32, self.tiles, self.tile), array(jnp.bool_, self.tiles, self.tile)
        return x, into, into, out, layer, array(jnp.int32, self.tiles), *places

    def function(self) -> Callable:
        """Return the function that calls the op."""
        options = dict(activate=lambda gate, up: (gate * up).astype(self.dtype)) if self.tile else {}
        return partial(OPS[self.op], backend="mosaic_tpu", **options)

    def work(self) -> tuple[float, float]:
        """(products and sums, bytes of HBM): each tile reads its matrix, of which 33 bytes are 32 numbers."""
        matrices, rows = (WIDTH * 8320, 256) if not self.tile else (3 * WIDTH * HIDDEN, self.tile)
        tiles = self.tiles if self.tile else -(-self.rows // rows)
        return 2.0 * tiles * min(rows, self.rows) * matrices, tiles * matrices * 33 / 32


@dataclasses.dataclass(frozen=True)
class OfExperts:
    """One call of a kernel of routed experts in bfloat16: a device's 8 experts, a quarter of each, of a stack."""

    tiles: int
    tile: int = 128
    op: str = "expert_tiles"
    dtype: jax.typing.DTypeLike = BF16
    donated: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op} of {self.tiles} tiles of {self.tile}"

    def arguments(self) -> tuple:
        """Return the arguments of the op."""
        into, out = array(BF16, 2, 8, WIDTH, HIDDEN // 4), array(BF16, 2, 8, HIDDEN // 4, WIDTH)
        lists = array(jnp.int32), array(jnp.int32, self.tiles), array(jnp.int32), array(FP32, self.tiles, self.tile)
        return array(BF16, self.tiles, self.tile, WIDTH), into, into, out, *lists

    def function(self) -> Callable:
        """Return the function that calls the op."""
        activate = lambda gate, up: (gate * up).astype(self.dtype)
        return partial(OPS[self.op], backend="mosaic_tpu", activate=activate)

    def work(self) -> tuple[float, float]:
        """(products and sums, bytes of HBM): each tile reads its expert, and its tokens, and writes its outputs."""
        matrices = 3 * WIDTH * HIDDEN // 4
        return 2.0 * self.tiles * self.tile * matrices, self.tiles * (2.0 * matrices + 6.0 * self.tile * WIDTH)


def array(dtype: jax.typing.DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
    """Return an abstract operand: a shape and a dtype without memory."""
    return jax.ShapeDtypeStruct(shape, dtype)


def cases(contexts: tuple[int, ...], quick: bool, chip: str) -> Iterator[Case | ByWeights | OfExperts]:
    """Yield the cases of the table, or a few that still hold every kernel.

    Of these few the oldest generation, which has the least VMEM, takes every kernel once, and the newest the other
    dtypes and the kernels that compile at once.
    """
    if quick:
        if chip == "v5e":
            yield Case("index_topk_decode", _shape(8, 4, 131072))
            yield Case("sparse_decode", _shape(8, 1, 131072), paged=False)
            yield Case("index_topk", _shape(1, 8192, 1048576))
            yield Case("query_union", _shape(1, 256, 131072))
            yield Case("kv_block_major", _shape(1, 64, 131072))  # XLA's part, a sort, takes longer with more
            yield Case("qk_norm_rope_insert", _shape(8, 4, 8192))
            yield ByWeights("mxfp8_experts", 4, 16)
        if chip == "tpu7x":
            yield Case("index_topk_decode", _shape(1, 1, 1048576), stored=E4M3)
            yield Case("sparse_decode", _shape(8, 16, 131072), stored=E4M3)
            yield Case("query_union", _shape(1, 256, 8192), FP32, FP32)
        if chip in ("v5e", "tpu7x"):
            yield Case("dense_causal", _shape(1, 256, 131072))
            yield OfExperts(14)
            yield ByWeights("mxfp8_project", 8)
        return
    for rows in (1, 16, 48):
        yield ByWeights("mxfp8_project", rows)
    for rows, tile in ((1, 1), (8, 1), (32, 16), (1024, 64)):
        yield ByWeights("mxfp8_experts", rows, tile)
    yield OfExperts(14)
    kinds = ((BF16, BF16), (BF16, E4M3), (FP32, FP32))
    for context in contexts:
        for dtype, stored in kinds:
            # More rows of a million tokens do not fit into the memory of one v5e.
            for batch, queries in ((1, 1), (1, 4), (1, 16)) if context > 131072 else ((1, 1), (8, 1), (8, 4)):
                yield Case("index_topk_decode", _shape(batch, queries, context), dtype, stored)
                yield Case("sparse_decode", _shape(batch, queries, context), dtype, stored)
            for op in ("index_topk", "query_union", "qk_norm_rope_insert"):
                yield Case(op, _shape(1, min(context, 8192), context), dtype, stored)
            yield Case("qk_norm_rope_insert", _shape(8, 1, min(context, 131072)), dtype, stored)
        yield Case("kv_block_major", _shape(1, min(context, 8192), context))
        yield Case("dense_causal", _shape(1, min(context, 8192), context))


def _shape(batch: int, queries: int, context: int) -> Shape:
    return Shape("", batch, queries, context)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's report of one case: seconds that it took, bytes of VMEM, and its estimate of the rest."""

    seconds: float
    vmem: int
    around: float | None  # its estimate for the operations around the kernel, in seconds


def compile_case(case: Case | ByWeights | OfExperts, device: jax.Device, mesh: AbstractMesh) -> Compiled:
    """Lower for the chip and compile; the compiler's error goes through."""
    everywhere = NamedSharding(Mesh([device], "x", axis_types=(AxisType.Auto,)), PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
    arguments = jax.tree.map(place, case.arguments())
    start = time.monotonic()
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(case.function(), donate_argnums=case.donated).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    calls = [line for line in compiled.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    sizes = [int(n) for line in calls for n in re.findall(r'used_scoped_memory_configs":\[[^]]*"size":"(\d+)"', line)]
    if not sizes:
        raise RuntimeError("the compiled program holds no Mosaic kernel")
    around = (compiled.cost_analysis() or {}).get("optimal_seconds", -1.0)
    return Compiled(time.monotonic() - start, max(sizes), around if around >= 0 else None)


def main() -> int:
    """Print the table; 1 if anything does not compile."""
    args = _arguments()
    failed = False
    for chip in args.chip:
        device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
        about = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=about)
        with jax.sharding.use_abstract_mesh(mesh):
            info = pltpu.get_tpu_info()
        rates = info.bf16_ops_per_second * info.num_cores, info.mem_bw_bytes_per_second * info.num_cores
        print(f"{chip}: a device has {rates[0] / 1e12:.0f} TFLOP/s bf16, {rates[1] / 1e12:.2f} TB/s", flush=True)
        for case in cases(args.context, args.quick, chip):
            if case.op in args.op:
                failed |= not _report(case, device, mesh, rates)
    return int(failed)


def _report(case: Case | ByWeights | OfExperts, device, mesh, rates) -> bool:
    flops, moved = case.work()
    # The MXU multiplies float32 in passes of bfloat16: six of them for all bits.
    floor = max(flops * (6 if case.dtype == FP32 else 1) / rates[0], moved / rates[1])
    try:
        out = compile_case(case, device, mesh)
    except Exception as error:
        print(f"  FAILS     {case}: {str(error).strip().splitlines()[0]}", flush=True)
        return False
    around = "-" if out.around is None else f"{out.around * 1e6:.1f} us"
    print(
        f"  compiles  {case}: VMEM {out.vmem / 2**20:.1f} MiB, {moved / 1e6:,.1f} MB, {flops / 1e9:,.1f} GFLOP, "
        f"roofline {floor * 1e6:,.1f} us, by the compiler {around} ({out.seconds:.1f} s)",
        flush=True,
    )
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", nargs="+", choices=CHIPS, default=tuple(CHIPS), help="default: all")
    parser.add_argument("--op", nargs="+", choices=OPS, default=tuple(OPS), help="default: all")
    parser.add_argument("--context", nargs="+", type=int, default=CONTEXTS, help="tokens; multiples of 128")
    few = "every kernel on v5e; every dtype, and half of the kernels, on tpu7x"
    parser.add_argument("--quick", action="store_true", help=few)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
