"""The properties of a call that decide where it can run, and every reason why kernels cannot run it.

`m3jax.ops.backends.choose` asks a case. Nothing of `pallas_kernels` is imported before a kernel is considered.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax.mxfp8 import BLOCK, MXFP8Array
from m3jax.ops import measured
from m3jax.ops.backends import interpreted
from m3jax.platform import compute_capability, reserves_gpu_memory

MAX_DECODE_QUERIES = 16  # queries a row that the decode kernels take
_MAX_DECODE_BLOCKS = 1 << 16
_PREFILL_FOLDER = {
    "select": "index_topk", "sparse": "sparse_prefill", "dense": "dense_causal", "insert": "qk_norm_rope_insert",
}  # fmt: skip
_DECODE_FOLDER = {"select": "index_topk_decode", "sparse": "sparse_decode", "dense": "dense_decode"}

# Units that kernels cut widths into.
_STACKED_DEPTH, _STACKED_COLUMNS = 32, 64  # channels that a product sums over, and those that it gives
_MXFP8_COLUMNS = 32  # outputs that a Triton program takes at least
_MXFP8_TPU_DEPTH, _TPU_LANES = 1024, 128  # on a TPU: input channels of a step, where there are more, and outputs
_PRODUCT_UNIT, _GROUPED_UNIT, _FEW_UNIT = 256, 128, 64  # channels of experts
_MOSAIC_DEPTH, _MOSAIC_PAIR = 64, 256  # on Hopper: input channels of a step, and outputs of two pieces
_HOPPER = "9.0"  # the compute capability whose tensor cores Mosaic's kernel is written for; cuDNN was timed there
_ORDERED_UNIT = 64  # channels of a step, and the least columns of a program, where sums have one order
_ORDERED_FLOAT32_UNITS = 256, 16  # likewise of the router's product: channels, where there are more, and columns


@dataclass(frozen=True, kw_only=True)
class PagesCase:
    """An operation over the pages of a layer: selection, attention, or writing new tokens.

    Attributes:
      op: "select", "sparse", "dense" or "insert".
      queries: T.
      dtype: of the queries.
      stored: dtype of the keys in memory.
      width: H, of keys, or of index keys.
      block_size: P.
      num_blocks: M.
      group: query heads of a KV head; 1 for "select".
      slots: J; 0 for "dense" and "insert".
      rotated: dims of a head that the rotary embedding turns, for "insert".
      schedule: of attention.
      score: of "select".
      divided: True if devices divide the keys, and name candidates with their scores, in "select".
      forced: blocks that a query keeps in any case, in "select".
      pages: True if the view is one that kernels can read.
    """

    op: str
    queries: int
    dtype: DTypeLike
    stored: DTypeLike
    width: int
    block_size: int
    num_blocks: int
    group: int = 1
    slots: int = 0
    rotated: int = 0
    schedule: str = "auto"
    score: str = "max"
    divided: bool = False
    forced: int = 1
    pages: bool = True

    is_named = True

    @property
    def is_decode(self) -> bool:
        """True if the decode kernels are for it: few queries a row, or any number of them in the invariant mode."""
        return self.queries <= MAX_DECODE_QUERIES or self.schedule == "invariant"

    @property
    def folder(self) -> str:
        """The folder of `pallas_kernels` whose kernels are for it."""
        folders = _PREFILL_FOLDER | _DECODE_FOLDER if self.is_decode else _PREFILL_FOLDER
        return folders[self.op]

    def why_not(self, backend: str) -> str | None:
        """Return why a backend's kernels cannot run it; None if they can."""
        # Nothing is imported here but the op's own package.
        if importlib.util.find_spec(f"pallas_kernels.{self.folder}.{backend}") is None:
            return f"it has no kernel for {self.op}"
        reasons = [_why_not_memory(self), _why_not_schedule(self, backend), _why_not_dtypes(self, backend)]
        reasons.append(_why_not_cudnn(self) if backend.startswith("cudnn") else None)
        if not interpreted():
            reasons.append(_why_not_sizes(self, backend))
        return next((reason for reason in reasons if reason), None)


@dataclass(frozen=True)
class Stored:
    """The storage of a stack of matrices, one or more a layer.

    Attributes:
      dtype: of its numbers; None in MXFP8.
      size: numbers in the stack.
      quantises: True if what is multiplied with a matrix is quantised first.
    """

    dtype: DTypeLike | None
    size: int
    quantises: bool = False

    @classmethod
    def of(cls, stack: Float[Array, "L ..."] | MXFP8Array) -> "Stored":
        """Return how a stack lies in memory."""
        if isinstance(stack, MXFP8Array):
            return cls(None, prod(stack.shape), stack.activations is not None)
        return cls(stack.dtype, prod(stack.shape))

    @property
    def is_mxfp8(self) -> bool:
        """True if it holds codes and scales."""
        return self.dtype is None


@dataclass(frozen=True, kw_only=True)
class ProductCase:
    """A product with one layer's matrix, read where it lies in its stack.

    Attributes:
      rows: of the activations, tokens of the call.
      dtype: of the activations.
      inputs: channels that are summed over.
      outputs: channels of the product.
      stored: the stack.
      is_ordered: True for the kernel with one order of sums (`OrderedCase`), which takes any number of rows.
    """

    rows: int
    dtype: DTypeLike
    inputs: int
    outputs: int
    stored: Stored
    is_ordered: bool = False

    op, is_named = "product", False

    @classmethod
    def of(
        cls,
        stack: Float[Array, "L ..."] | MXFP8Array,
        num_inputs: int,
        rows: int,
        dtype: DTypeLike,
        is_ordered: bool = False,
    ) -> "ProductCase":
        """Return the case of a stack `[L *inputs *outputs]` whose products sum over the first `num_inputs` axes."""
        inputs, outputs = prod(stack.shape[1 : 1 + num_inputs]), prod(stack.shape[1 + num_inputs :])
        return cls(
            rows=rows, dtype=dtype, inputs=inputs, outputs=outputs, stored=Stored.of(stack), is_ordered=is_ordered
        )

    def why_not(self, backend: str) -> str | None:
        """Return why a backend's kernels do not run it; None if they do."""
        if self.is_ordered:
            return _why_out_of_reach(self.stored)
        if backend == "mosaic_gpu":
            return _why_not_mosaic_product(self)
        if self.stored.is_mxfp8:
            return _why_not_mxfp8(self.stored, self.dtype, [(self.inputs, self.outputs)], backend)
        if backend != "triton":
            return "only MXFP8 has a kernel"
        if self.stored.dtype != self.dtype or jnp.dtype(self.dtype).itemsize != 2:
            return f"{self.dtype} times a matrix in {self.stored.dtype} (it has 16-bit numbers of one kind)"
        if self.inputs % _STACKED_DEPTH or self.outputs % _STACKED_COLUMNS:
            units = f"multiples of {_STACKED_DEPTH} and {_STACKED_COLUMNS}"
            return f"{self.inputs} by {self.outputs} channels (it has {units})"
        # In interpret mode the kernel takes as many rows as it can.
        of_widths = measured.stacked_rows(self.inputs, self.outputs)
        most = max(measured.STACKED_ROWS.values()) if interpreted() else of_widths
        return None if self.rows <= most else f"{self.rows} rows, and XLA is faster from {most + 1} on"


@dataclass(frozen=True, kw_only=True)
class ExpertsCase:
    """The experts that each token chose, by one of the kernels.

    Attributes:
      path: "few", "grouped" or "products" (`m3jax.ops.EXPERT_PATHS`), "mxfp8_grouped" for the kernel of "grouped" with
        MXFP8 weights and many tokens, "mxfp8_mosaic" for the one that only Hopper has, or "tiles" for `sums_in_tiles`.
      tokens: X.
      dtype: of the activations.
      width: D.
      hidden: F.
      stored: a stack of their matrices.
      by_name: True if the path is asked for by name: it is not held to what is fastest.
      expert_pairs: (token, expert) pairs of an expert, on average; only these two ask.
    """

    path: str
    tokens: int
    dtype: DTypeLike
    width: int
    hidden: int
    stored: Stored
    by_name: bool = False
    expert_pairs: float = 0.0

    op, is_named = "choice of experts", False

    def why_not(self, backend: str) -> str | None:
        """Return why a backend's kernels do not run it; None if they do."""
        widths = self.width, self.hidden
        if least := measured.MXFP8_PAIRS.get(self.path):
            if backend != "triton" or not self.stored.is_mxfp8:
                return "only a GPU has a kernel, and it takes MXFP8"
            if self.expert_pairs < least:
                return f"{self.expert_pairs:g} pairs an expert (it has {least} or more)"
        if self.path == "mxfp8_mosaic" and (reason := _why_not_hopper(self.dtype)):
            return reason
        if self.path == "tiles":
            if backend != "mosaic_tpu" or self.stored.is_mxfp8:
                return "only a TPU has a kernel, and it takes weights in the activations' dtype"
            if self.tokens < measured.DIVIDED_TOKENS["tpu"]:
                return f"{self.tokens} tokens (it has {measured.DIVIDED_TOKENS['tpu']} or more)"
            if str(self.dtype) != "bfloat16" or any(width % _TPU_LANES for width in widths):
                return f"experts of {self.width} by {self.hidden} channels in {self.dtype} (it has bfloat16, by 128)"
            return None
        if self.path == "products":
            if self.stored.is_mxfp8 or jnp.dtype(self.stored.dtype) != jnp.dtype(self.dtype):
                return "it takes weights in the activations' dtype, not in MXFP8"
            if not self.by_name and jnp.dtype(self.dtype).itemsize != 2:
                return f"activations in {self.dtype} (16-bit numbers gain)"
            unit = _FEW_UNIT if jnp.dtype(self.dtype).itemsize == 4 else _PRODUCT_UNIT
            if any(width % unit for width in widths):
                return f"experts of {self.width} by {self.hidden} channels (it has multiples of {unit})"
            return None if backend == "triton" else "only a GPU has a kernel"
        if self.stored.is_mxfp8:  # both paths go to one kernel, which a GPU and a TPU have
            if self.by_name:
                return None
            if any(width % _GROUPED_UNIT for width in widths):
                return f"experts of {self.width} by {self.hidden} channels (it has multiples of {_GROUPED_UNIT})"
            return _why_not_mxfp8(self.stored, self.dtype, [widths, widths[::-1]], backend)
        if backend != "triton":
            return "only a GPU has a kernel"
        if not self.by_name and jnp.dtype(self.dtype).itemsize != 2:
            return f"activations in {self.dtype} (16-bit numbers gain)"
        # By name it also runs 32-bit numbers, in which `grouped` too has pieces of 64 channels.
        is_narrow = self.path == "few" or (self.by_name and jnp.dtype(self.stored.dtype).itemsize == 4)
        unit = _FEW_UNIT if is_narrow else _GROUPED_UNIT
        if any(width % unit for width in widths):
            return f"experts of {self.width} by {self.hidden} channels (it has multiples of {unit})"
        most = measured.LAUNCH_BOUND_TOKENS if self.by_name else measured.few_tokens(*widths)
        return f"{self.tokens} tokens (it has up to {most})" if self.path == "few" and self.tokens > most else None


@dataclass(frozen=True, kw_only=True)
class TokenwiseCase:
    """An operation between a layer's products: an addition and a norm, or a router's choice.

    Attributes:
      op: "add_norm" or "choose_experts".
      tokens: of the call.
      dtype: of the residual stream, or of the router's logits.
      experts: E, of a router.
    """

    op: str
    tokens: int
    dtype: DTypeLike
    experts: int = 1

    is_named = False

    def why_not(self, backend: str) -> str | None:
        """Return why a backend's kernels do not run it; None if they do."""
        if backend != "triton":
            return "only a GPU has a kernel"
        if self.tokens > measured.LAUNCH_BOUND_TOKENS:
            return f"{self.tokens} tokens, and XLA is as fast from {measured.LAUNCH_BOUND_TOKENS + 1} on"
        if self.op == "choose_experts":
            is_power = self.experts & self.experts - 1 == 0
            return None if is_power and self.dtype == jnp.float32 else "it has powers of two of experts, and float32"
        return None if jnp.dtype(self.dtype).itemsize == 2 else f"the residual stream is {self.dtype} (it has 16 bits)"


@dataclass(frozen=True, kw_only=True)
class OrderedCase:
    """All layers of a model by kernels that give a token the same bits whatever else a call has.

    The answer is one for all calls of a model: a part of it by tiles in one call and by a kernel in the next would have
    other bits.

    Attributes:
      dtype: of the activations.
      widths: of all that goes into a matrix or comes out of one, but for the router.
      router: its width and how many experts it scores.
      head: width of a head, and how many dims of it are rotated.
    """

    dtype: DTypeLike
    widths: Sequence[int]
    router: tuple[int, int]
    head: tuple[int, int]

    op, is_named = "invariant model", False

    def why_not(self, backend: str) -> str | None:
        """Return why a backend's kernels cannot run it; None if they can."""
        if backend != "triton":
            return "only a GPU has kernels with one order of sums"
        if jnp.dtype(self.dtype).itemsize != 2:
            return f"activations in {self.dtype} (it has 16-bit numbers)"
        (width, experts), (head_width, rotated) = self.router, self.head
        unit, columns = _ORDERED_FLOAT32_UNITS
        if any(n % _ORDERED_UNIT for n in (*self.widths, width)) or width % min(width, unit) or experts % columns:
            return "a width that is no multiple of the kernels' pieces"
        # Dims of a head that are rotated in pairs, and those that are not, are each a block of a kernel.
        powers = (rotated // 2, *([head_width - rotated] if head_width > rotated else []))
        is_power = all(n > 0 and n & (n - 1) == 0 for n in powers)
        return None if is_power else f"{rotated} of {head_width} dims are rotated (it has powers of two)"


@dataclass(frozen=True, kw_only=True)
class PeersCase:
    """An exchange between the devices along some axes of a mesh, each of which has an array.

    Attributes:
      result: as of `pallas_kernels.read_peers`.
      dtype: of the array.
      size: its numbers.
      axes: of the mesh.
      mesh: the devices; None where they are not known.
    """

    result: str
    dtype: DTypeLike
    size: int
    axes: tuple[str, ...]
    mesh: Mesh | None

    op, is_named = "exchange", False

    def why_not(self, backend: str) -> str | None:
        """Return why a backend's kernel does not run it; None if it does."""
        if backend != "mosaic_gpu" or interpreted():
            return "only Mosaic has a kernel, and no interpret mode"
        if not isinstance(self.mesh, Mesh) or (count := prod(self.mesh.shape[axis] for axis in self.axes)) == 1:
            return "no other device is known"
        first, ids = self.mesh.devices.flat[0], self.mesh.device_ids.ravel().tolist()
        if compute_capability() != _HOPPER or first.device_kind not in measured.NVLINK_GPUS:
            return f"it was measured on {' and '.join(measured.NVLINK_GPUS)}, and this is a {first.device_kind}"
        if len(ids) > measured.NVLINK_DEVICES:
            return f"it was measured on {measured.NVLINK_DEVICES} devices, and the mesh has {len(ids)}"
        if ids != list(range(len(ids))) or jax.process_count() > 1:
            return "it reaches the devices of one process, in the order of their ids from 0 on"
        if not reserves_gpu_memory():
            return "XLA takes memory while programs run, and NVIDIA warns that GPUs which exchange meanwhile can stop"
        itemsize, most = jnp.dtype(self.dtype).itemsize, measured.PEERS_BYTES
        if itemsize not in (2, 4):
            return f"numbers in {self.dtype} (it has 16 or 32 bits)"
        if self.result == "part of sum" and itemsize == 2:
            return f"parts of sums in {self.dtype}, for which XLA was faster"
        # Of a sum every device reads all arrays; of parts and of a part of a sum no byte is read twice.
        received = itemsize * self.size * (count - 1 if self.result == "sum" else 1)
        return f"{received} bytes for each device, and XLA may be faster from {most} on" if received > most else None


def _why_not_hopper(dtype: DTypeLike) -> str | None:
    """Return why Mosaic's kernels of MXFP8 weights do not run here; None if they do."""
    if interpreted() or compute_capability() != _HOPPER or str(dtype) != "bfloat16":
        return f"activations in {dtype}, or no Hopper GPU (it has bfloat16, and no interpret mode)"
    return None


def _why_not_mosaic_product(case: ProductCase) -> str | None:
    fewest, most = measured.MXFP8_MOSAIC_ROWS
    if not case.stored.is_mxfp8 or case.stored.quantises:
        return "it multiplies activations as they are by MXFP8"
    if not fewest <= case.rows <= most:
        return f"{case.rows} rows, and others are as fast with fewer than {fewest} or more than {most}"
    if case.inputs % _MOSAIC_DEPTH or (case.outputs % _MOSAIC_PAIR and case.outputs != _MOSAIC_PAIR // 2):
        units = f"multiples of {_MOSAIC_DEPTH} and {_MOSAIC_PAIR}, or {_MOSAIC_PAIR // 2} outputs"
        return f"{case.inputs} by {case.outputs} channels (it has {units})"
    return _why_not_hopper(case.dtype)


def _why_not_mxfp8(stored: Stored, dtype: DTypeLike, widths: Sequence[tuple[int, int]], backend: str) -> str | None:
    """Return why kernels do not multiply by matrices in MXFP8 of these (inputs, outputs); None if they do."""
    if stored.quantises:
        return "activations are quantised too"
    if any(inputs % BLOCK for inputs, _ in widths):
        return f"a block of {BLOCK} input channels is not whole"
    if backend == "triton":
        if jnp.dtype(dtype).itemsize != 2 or any(outputs % _MXFP8_COLUMNS for _, outputs in widths):
            return f"activations in {dtype}, or outputs that are no multiple of {_MXFP8_COLUMNS}"
        return _why_out_of_reach(stored)
    is_deep = all(inputs % _MXFP8_TPU_DEPTH == 0 or inputs < _MXFP8_TPU_DEPTH for inputs, _ in widths)
    is_wide = all(outputs % _TPU_LANES == 0 for _, outputs in widths)
    return None if str(dtype) == "bfloat16" and is_deep and is_wide else "a dtype or a width that it does not take"


def _why_out_of_reach(stored: Stored) -> str | None:
    """Return why a Triton kernel does not find its way in a stack of one-byte codes; None if it does."""
    from pallas_kernels.numbers import can_reach

    if not stored.is_mxfp8 or can_reach(stored.size):
        return None
    return f"offsets among {stored.size} codes overflow"


def _why_not_memory(case: PagesCase) -> str | None:
    if not case.pages:
        return "it reads keys in pages or in one piece, not a pool of host memory's pages"
    if case.divided and case.forced > 1:
        return "devices divide the keys, and of a share it forces no block but a query's own"
    if case.divided and case.schedule == "invariant":
        return "devices divide the keys, and in the invariant mode it does not write the scores of candidates"
    if case.op == "select" and case.is_decode and case.num_blocks > _MAX_DECODE_BLOCKS:
        return f"there are {case.num_blocks} blocks, and it ranks up to {_MAX_DECODE_BLOCKS}"
    return None


def _why_not_schedule(case: PagesCase, backend: str) -> str | None:
    if case.schedule == "invariant" and backend != "triton":
        return "in the invariant mode it has no schedule"
    if case.op == "select":
        return None if case.score == "max" else f"it has score 'max', and this is {case.score!r}"
    is_blockwise = case.op == "sparse" and case.schedule == "kv_block_major" and not case.is_decode
    if case.schedule in ("auto", "invariant") or is_blockwise:
        return None
    return f"the schedule {case.schedule!r} is one of XLA's"


def _why_not_dtypes(case: PagesCase, backend: str) -> str | None:
    halves = ("bfloat16",) if backend == "mosaic_tpu" else ("bfloat16", "float16")
    if str(case.dtype) not in (*halves, "float32"):
        return f"it has no kernel for queries in {case.dtype}"
    reads_float8 = str(case.stored) == "float8_e4m3fn" and (case.is_decode or case.op == "insert")
    if case.dtype != case.stored and not reads_float8:
        return f"it does not take keys in {case.stored} for {case.queries} queries a row in {case.dtype}"
    return None


def _why_not_cudnn(case: PagesCase) -> str | None:
    if compute_capability() != _HOPPER:
        return "no Hopper GPU is at hand (cuDNN is asked for its version while tracing)"
    if jnp.dtype(case.dtype).itemsize != 2:
        return f"queries in {case.dtype} (it has 16 bits)"
    if case.queries < measured.CUDNN_QUERIES:
        return f"{case.queries} queries a row, and a kernel over pages is as fast below {measured.CUDNN_QUERIES}"
    return None


def _why_not_sizes(case: PagesCase, backend: str) -> str | None:
    """Return why a size is none of those that the kernels were written and measured for; None if it is one."""
    widths = (128,) if backend == "mosaic_tpu" else (64, 128)
    if case.width not in widths or case.block_size not in (64, 128):
        allowed = " or ".join(map(str, widths))
        return f"heads of {case.width} and blocks of {case.block_size} (it has {allowed}, and 64 or 128)"
    if case.op == "insert" and (case.rotated, case.width) not in ((64, 64), (64, 128), (128, 128)):
        return f"{case.rotated} of {case.width} dims are rotated (it has 64, or all)"
    if case.group > 16 or (case.op in ("select", "sparse") and not 4 <= case.slots <= 32):
        return f"groups of {case.group} heads and {case.slots} slots (it has up to 16 heads, and 4 to 32 slots)"
    return None
