"""The common part of the Triton kernels: operations that Pallas spells differently on a GPU, and a running softmax."""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.backends import Interpret
from pallas_kernels.numbers import UNSEEN, can_reach
from pallas_kernels.pages import Pages

# JAX 0.11 deprecates the backend as a whole; it says so at each lowering.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

LOG2E = 1.4426950408889634  # softmax works with powers of two, which the hardware has: e**x = 2**(x * LOG2E)


def check_pool(name: str, pages: Pages, interpret: Interpret) -> None:
    """Raise ValueError where a pool is out of a Triton kernel's reach."""
    if pages.pool.dtype.itemsize == 1 and not can_reach(pages.pool.size):
        raise ValueError(f"{name}: a pool of {pages.pool.size} one-byte numbers: use below 2**31, or above 2**32")


def matmul_dtype(dtype: jax.typing.DTypeLike, stored: jax.typing.DTypeLike) -> jnp.dtype:
    """Return the dtype to multiply in: e4m3 becomes float16, exactly, in one instruction; bfloat16 takes several."""
    return jnp.dtype(jnp.float16 if stored == jnp.float8_e4m3fn and dtype == jnp.bfloat16 else dtype)


def seen_position(positions_ref, lengths_ref, row, token) -> Int[Array, "..."]:
    """Return `seen_positions` of one row, inside a kernel: the position of a token, -1 for padding."""
    position = positions_ref[row, token]
    return jnp.where((position >= 0) & (position < lengths_ref[row]), position, -1)


def div(x: Int[Array, "..."], n: int) -> Int[Array, "..."]:
    """Return x // n for x >= 0, without the code that `//` spends on signs."""
    return x if n == 1 else jax.lax.div(x, jnp.full(x.shape, n, x.dtype))


def rem(x: Int[Array, "..."], n: int) -> Int[Array, "..."]:
    """Return x % n for x >= 0."""
    return jnp.zeros_like(x) if n == 1 else jax.lax.rem(x, jnp.full(x.shape, n, x.dtype))


def in_groups(row_tiles: int, num_pieces: int, group: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return this program's (tile of rows, piece of columns), of `row_tiles x num_pieces` on the grid's first axis.

    A group of tiles takes one piece after the other, then the next group comes: tiles that run at the same time share
    the columns that they read.
    """
    order, programs = pl.program_id(0), group * num_pieces
    first_tile, place = div(order, programs) * group, rem(order, programs)
    tiles_of_group = jnp.minimum(row_tiles - first_tile, group)
    return first_tile + jax.lax.rem(place, tiles_of_group), jax.lax.div(place, tiles_of_group)


def late_first(tiles: int) -> Int[Array, ""]:
    """Return the tile of this program, along the first axis of the grid, where the last tile comes first.

    Late tiles of a prompt have the most keys: when they run first, the short ones fill the gaps.
    """
    return tiles - 1 - pl.program_id(0)


def run_own(index: Int[Array, ""], counts: Sequence[int], run: Callable[[int, Int[Array, ""]], None]) -> None:
    """Run `run` for the array that this program belongs to: the programs of several arrays share one grid axis.

    Args:
      index: of the program on that axis.
      counts: programs of each array.
      run: called with the array's number and the program's number among that array's.
    """
    first = 0
    for number, count in enumerate(counts):
        place = index - first
        first += count
        pl.when((place >= 0) & (place < count))(lambda number=number, place=place: run(number, place))


def dot(
    a: Shaped[Array, "_ _"], b: Shaped[Array, "_ _"], transpose: bool = False, transpose_a: bool = False
) -> Float[Array, "_ _"]:
    """Return the matrix product in float32; float32 operands keep their precision (no tf32).

    `transpose` reads b as `[N C]` instead of `[C N]`, `transpose_a` reads a as `[C R]` instead of `[R C]`.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((0 if transpose_a else 1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def dot_columns(weight: Float[Array, "depth W"], rows: Float[Array, "R depth"]) -> Float[Array, "W R"]:
    """Return the product as columns by rows.

    Tensor cores want 64 of one side at once: the weights have as many columns, a few tokens have fewer rows.
    """
    return dot(weight, rows, transpose_a=True, transpose=True)


def store_rows(
    ref,
    rows: Int[Array, " R"],
    columns: pl.Slice,
    values: Shaped[Array, "R C"],
    is_stored: Bool[Array, " R"],
    interpret: bool,
) -> None:
    """Write each row of `values` that is to be stored to a row of its own, rounded to the dtype of `ref`."""
    values = values.astype(ref.dtype)
    if not interpret:
        plgpu.store(ref.at[rows, columns], values, mask=jnp.broadcast_to(is_stored[:, None], values.shape))
        return

    # Interpret mode has no masked store to rows that are data.
    def store_row(i, _):
        @pl.when(is_stored[i])
        def _():
            ref[rows[i], columns] = values[i]

    jax.lax.fori_loop(0, len(rows), store_row, None)


def exp2(x: Shaped[Array, "..."], interpret: bool) -> Shaped[Array, "..."]:
    """2**x by the hardware's instruction alone: results below 1e-38 are 0, and no code is spent on saving them."""
    if interpret:
        return jnp.exp2(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )
    return out[0]


class Softmax(NamedTuple):
    """A running softmax for each row of a tile, over the keys so far; exponents are in base 2."""

    values: Float[Array, "R H"]  # values, weighted by 2**(exponent - top) and added up
    top: Float[Array, " R"]  # the highest exponent; UNSEEN, a number, before any, so that there is no -inf - -inf
    total: Float[Array, " R"]  # the weights, added up


def empty_softmax(tile_rows: int, width: int) -> Softmax:
    """Return the softmax of rows that have seen no key yet."""
    return Softmax(
        values=jnp.zeros((tile_rows, width), jnp.float32),
        top=jnp.full((tile_rows,), UNSEEN, jnp.float32),
        total=jnp.zeros((tile_rows,), jnp.float32),
    )


def fold(
    state: Softmax,
    scores: Float[Array, "R S"],
    bias: Float[Array, " R"] | None,
    v: Float[Array, "S H"],
    *,
    scale: float,
    interpret: bool,
) -> Softmax:
    """Take more keys into a softmax under way.

    Args:
      state: what was seen before.
      scores: products of queries and keys; -inf where a query does not see a key.
      bias: 0, or -inf for a row of the tile that sees none of these keys; None if there is no such row.
      v: values of these keys.
      scale: factor from scores to exponents of base 2.
      interpret: whether this is interpret mode.
    """
    highest = jnp.max(scores, axis=1) * scale
    highest = highest if bias is None else highest + bias
    top = jnp.maximum(state.top, highest)
    shift = -top if bias is None else bias - top
    weights = exp2(scores * scale + shift[:, None], interpret)  # [R S]
    fade = exp2(state.top - top, interpret)
    values = state.values * fade[:, None] + dot(weights.astype(v.dtype), v)
    return Softmax(values, top, state.total * fade + jnp.sum(weights, axis=1))


def divisor(total: Float[Array, "..."]) -> tuple[Bool[Array, "..."], Float[Array, "..."]]:
    """Return (is_seen, divisor) of a softmax's sum: a row that has seen no key is divided by 1, and stays 0."""
    is_seen = total != 0.0
    return is_seen, jnp.where(is_seen, total, 1.0)


def natural_lse(
    top: Float[Array, "..."], is_seen: Bool[Array, "..."], total: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the natural log-sum-exp of a softmax in base 2; -inf for a row that has seen no key."""
    return jnp.where(is_seen, top / LOG2E + jnp.log(total), -jnp.inf)


def finish(state: Softmax) -> tuple[Float[Array, "R H"], Float[Array, " R"]]:
    """Return (out, natural log-sum-exp) of a softmax; (0, -inf) for a row that has seen no key."""
    is_seen, total = divisor(state.total)
    lse = natural_lse(state.top, is_seen, total)
    return jnp.where(is_seen[:, None], state.values / total[:, None], 0.0), lse


def as_high_as_needed(take: Callable[[int], None], count: Int[Array, ""], tile_rows: int, low: int) -> None:
    """Call `take` with the rows of a tile to multiply: all, or `low` where these are enough; never for no rows.

    Args:
      take: multiplies so many rows.
      count: how many of the tile's rows count.
      tile_rows: all of them.
      low: fewer rows, which tensor cores take at once.
    """
    if tile_rows <= low:
        pl.when(count > 0)(lambda: take(tile_rows))
        return
    pl.when((count > 0) & (count <= low))(lambda: take(low))
    pl.when(count > low)(lambda: take(tile_rows))
