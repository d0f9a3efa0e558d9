"""The common part of the TPU kernels: limits of a chip, pages copied by hand, and products in the MXU's layout."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.backends import Interpret
from pallas_kernels.pages import FinderRefs, Pages

INTERPRETERS = (bool, pltpu.InterpretParams)
LANES, SUBLANES = 128, 8
PREFETCHED = 1 << 17  # numbers that a call may prefetch: half of the 1 MiB of scalar memory that every chip has


@dataclasses.dataclass(frozen=True)
class Chip:
    """The properties of a chip that a kernel must know when it is compiled for it."""

    cores: int  # that share a grid
    vmem: int  # bytes a kernel may use

    @classmethod
    def current(cls, interpret: Interpret) -> "Chip":
        """Return the chip of the default device, or of the abstract mesh in force; a small one in interpret mode."""
        if interpret:
            return cls(1, 32 << 20)
        info = pltpu.get_tpu_info()
        return cls(info.num_cores, info.vmem_capacity_bytes // 2)

    def compiler_params(self, *semantics: str) -> pltpu.CompilerParams:
        """Return parameters that give the kernel half of VMEM; XLA moves other operations' operands in the rest."""
        return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=self.vmem)

    def steps_per_core(self, count: int) -> int:
        """Return how many of `count` steps each core takes, rounded up."""
        return -(-count // self.cores)


def pad_steps(x: Shaped[Array, "X ..."], steps: int, value: int = 0) -> Shaped[Array, "Y ..."]:
    """`x` with its first axis filled up to `steps`, so that every core has as many."""
    return jnp.pad(x, [(0, steps - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=value)


def by_rows(
    run: Callable[[slice], tuple[Shaped[Array, "..."], ...]], batch: int, rows_at_once: int
) -> tuple[Shaped[Array, "..."], ...]:
    """Return what `run` gives for a batch, some rows at a time: as many as scalar memory holds the lists of."""
    parts = [run(slice(start, start + rows_at_once)) for start in range(0, batch, rows_at_once)]
    return tuple(jnp.concatenate(part) for part in zip(*parts, strict=True))


def dot_nt(a: Shaped[Array, "R C"], b: Shaped[Array, "S C"]) -> Float[Array, "R S"]:
    """a b^T in float32; the rows of a stream past b."""
    return _dot(a, b, (1, 1))


def dot_nn(a: Shaped[Array, "R C"], b: Shaped[Array, "C S"]) -> Float[Array, "R S"]:
    """a b in float32."""
    return _dot(a, b, (1, 0))


def dot_tn(a: Shaped[Array, "C R"], b: Shaped[Array, "C S"]) -> Float[Array, "R S"]:
    """a^T b in float32."""
    return _dot(a, b, (0, 0))


def _dot(a: Shaped[Array, "_ _"], b: Shaped[Array, "_ _"], axes: tuple[int, int]) -> Float[Array, "_ _"]:
    # One pass of bfloat16 would be enough for nothing that is stored in float32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def divisor(total: Float[Array, "..."]) -> tuple[Bool[Array, "..."], Float[Array, "..."]]:
    """Return (is_seen, divisor) of a softmax's sum: a row that has seen no key is divided by 1, and stays 0."""
    is_seen = total != 0.0
    return is_seen, jnp.where(is_seen, total, 1.0)


def natural_lse(
    top: Float[Array, "..."], is_seen: Bool[Array, "..."], total: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the natural log-sum-exp of a softmax; -inf for a row that has seen no key."""
    return jnp.where(is_seen, top + jnp.log(total), -jnp.inf)


def fold_block(
    q: Float[Array, "lanes H"],
    keys: Shaped[Array, "P H"],
    values: Shaped[Array, "P H"],
    last_key: Int[Array, "1 lanes"],
    scale: float | Float[Array, ""],
    state: tuple[Float[Array, "1 lanes"], Float[Array, "1 lanes"]],
    values_ref,
) -> tuple[Float[Array, "1 lanes"], Float[Array, "1 lanes"]]:
    """Take a block into softmaxes under way, one a lane: return the new (highest scores, sums of weights).

    Args:
      q: queries.
      keys, values: of the block; values must be finite.
      last_key: the last key of the block that each lane sees; -1 for none.
      scale: of the scores.
      state: as is returned.
      values_ref: `[H lanes]` float32, the weighted sums of values so far; they are updated.
    """
    key = jax.lax.broadcasted_iota(jnp.int32, (len(keys), 1), 0)
    top, total = state
    scores = dot_nt(keys.astype(q.dtype), q) * scale  # [P lanes]
    scores = jnp.where(key <= last_key, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
    weights, fade = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    values_ref[...] = values_ref[...] * fade + dot_tn(values.astype(q.dtype), weights.astype(q.dtype))
    return new_top, total * fade + jnp.sum(weights, axis=0, keepdims=True)


def clean_behind(values_ref, seen: Int[Array, ""]) -> None:
    """Zero what lies behind the first `seen` tokens of a block: it may hold anything, and 0 x NaN is NaN."""
    size = values_ref.shape[0]

    @pl.when(seen < size)
    def _():
        token = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        values_ref[...] = jnp.where(token < seen, values_ref[...].astype(jnp.float32), 0.0).astype(values_ref.dtype)


def kernel_cost(
    operands: Any, outputs: Sequence[jax.ShapeDtypeStruct], *, copied: float | int, products: float | int
) -> pl.CostEstimate:
    """Return what a kernel reads, writes and computes, for the compiler and for those who count its programs.

    The compiler knows nothing of what a kernel copies by hand: it would count the pool of all pages, or nothing.

    Args:
      operands: arrays that the kernel reads once, all of them.
      outputs: likewise of those that it writes.
      copied: bytes that it copies by hand. Where these are data, the most that there can be, and of devices that divide
        the blocks of rows (`Pages.num_devices`) the average one's part of it.
      products: operations of matrix products.
    """
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((operands, list(outputs))))
    return pl.CostEstimate(flops=round(products), transcendentals=0, bytes_accessed=round(nbytes + copied))


def each_page(pool_ref, buffer_ref, sem, places: list[tuple[Array, Array]], do: str) -> None:
    """Start the copies of some pages into a buffer, or wait for them.

    Args:
      pool_ref: `[X P H]` in HBM.
      buffer_ref: `[C P H]` in VMEM.
      sem: one DMA semaphore for all of them.
      places: (page, is_wanted) of each place of the buffer; what is not wanted is neither read nor waited for.
      do: "start" or "wait".
    """
    for i, (page, is_wanted) in enumerate(places):

        @pl.when(is_wanted)
        def _(i=i, page=page):
            copy = pltpu.make_async_copy(pool_ref.at[page], buffer_ref.at[i], sem)
            getattr(copy, do)()


def locate(pages: Pages, finder: FinderRefs, row, head, block) -> tuple[Array, Array]:
    """Return what `Pages.locate` does, for a flat table: (page, is_held); an entry that is no page reads as page 0."""
    base = finder.layer[0] * pages.layer_stride + head * pages.head_stride
    if finder.table is None:
        return base + row * pages.row_stride + block, block >= 0
    page = finder.table[row * pages.num_blocks + block]
    is_held = pages.holds(page)
    return base + jnp.where(is_held, page, 0) * pages.page_stride, is_held


def flat_finder(pages: Pages, rows: slice) -> FinderRefs:
    """Return `Pages.finder` as `locate` reads it: the table of some rows of the batch, flat."""
    return FinderRefs(pages.layer.reshape(1), None if pages.table is None else pages.table[rows].reshape(-1))


def check_tiles(name: str, pages: Pages, interpret: Interpret) -> None:
    """Raise ValueError where a page is not made of whole tiles of a TPU's memory."""
    rows = 4 * SUBLANES // pages.pool.dtype.itemsize
    if not interpret and (pages.width % LANES or pages.block_size % rows):
        raise ValueError(
            f"{name} has pages of {pages.block_size} x {pages.width} {pages.pool.dtype}: a TPU kernel needs a width "
            f'that is a multiple of {LANES} and a multiple of {rows} tokens a page; use backend="xla" for others'
        )
