"""The tiled schedule of `segment_attention`, in plain JAX: for any device, with a gradient.

A segment is cut into tiles from its own first patch on, wherever it lies among the others. What is summed for a patch,
and in which order, then depends on its own segment alone: its bits do not change with what lies beside it. Tiles of
other segments are not looked at, and no more scores are held than those of a few tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from m3jax.numerics import RunningSoftmax, accumulator, einsum
from m3jax.vision.segments import Runs

TILE = 128  # patches
_GROUP = 16  # tiles that are computed at once


class _Block(NamedTuple):
    """Rows of G tiles: `arrays` [G C ...], zero in rows where `is_patch` [G C] is False."""

    arrays: tuple[Array, ...]
    is_patch: Bool[Array, "G C"]


@jax.custom_vjp
def tiled_attention(
    q: Float[Array, "X N H"], k: Float[Array, "X N H"], v: Float[Array, "X N H"], segments: Int[Array, " X"]
) -> Float[Array, "X N H"]:
    """Compute `segment_attention`, a tile of queries and a tile of keys at a time.

    Args:
      q, k, v: queries, keys, values; padding may hold anything.
      segments: as in the definition, but patches of a segment stand together, and padding behind the last.
    """
    return _forward(q, k, v, segments)[0]


_Residuals = tuple[Array, Array, Array, Array, Array, Array]  # q, k, v, segments, out, log-sum-exps [X N]


def _forward(
    q: Float[Array, "X N H"], k: Float[Array, "X N H"], v: Float[Array, "X N H"], segments: Int[Array, " X"]
) -> tuple[Float[Array, "X N H"], _Residuals]:
    """Return the outputs, and the arrays that `_backward` needs."""

    def fold(softmax: RunningSoftmax, queries: _Block, keys: _Block) -> RunningSoftmax:
        return softmax.fold(_heads(queries.arrays[0]), *map(_heads, keys.arrays), keys.is_patch[:, None, None])

    def start(group: int, tile: int) -> RunningSoftmax:
        return RunningSoftmax.empty((group, q.shape[1], tile), q.shape[2], accumulator(q.dtype))

    def finish(softmax: RunningSoftmax) -> tuple[Array, Array]:
        out, lse = softmax.average()  # [G N C H], [G N C]
        return _rows(out).astype(q.dtype), lse.swapaxes(1, 2)

    empty = (jnp.zeros_like(q), jnp.zeros(q.shape[:2], accumulator(q.dtype)))
    out, lse = _over_tiles(Runs.of(segments), (q,), (k, v), start, fold, finish, empty)
    return out, (q, k, v, segments, out, lse)


def _backward(residuals: _Residuals, d_out: Float[Array, "X N H"]) -> tuple[Array, Array, Array, None]:
    """Return the gradients by q, k and v; weights are computed again from the log-sum-exp of each query."""
    q, k, v, segments, out, lse = residuals
    runs, dtype, scale = Runs.of(segments), accumulator(q.dtype), q.shape[-1] ** -0.5
    weighed = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1)  # [X N]: the sum over keys of weight x d_weight
    of_queries, of_keys = (q, d_out, lse, weighed), (k, v)

    def pair(queries: _Block, keys: _Block) -> tuple[Array, Array]:
        """Return the weights [G N R C] of a tile's queries over a tile's keys, and the gradient by their scores."""
        q_tile, d_tile, lse_tile, weighed_tile = queries.arrays
        k_tile, v_tile = keys.arrays
        scores = einsum("grnh,gcnh->gnrc", q_tile, k_tile) * scale
        weights = jnp.exp(scores - lse_tile.swapaxes(1, 2)[..., None])
        weights = jnp.where((queries.is_patch[:, :, None] & keys.is_patch[:, None])[:, None], weights, 0.0)
        d_weights = einsum("grnh,gcnh->gnrc", d_tile, v_tile)
        return weights, weights * (d_weights - weighed_tile.swapaxes(1, 2)[..., None]) * scale

    def fold_queries(d_q: Array, queries: _Block, keys: _Block) -> Array:
        return d_q + einsum("gnrc,gcnh->grnh", pair(queries, keys)[1], keys.arrays[0])

    def fold_keys(gradients: tuple[Array, Array], keys: _Block, queries: _Block) -> tuple[Array, Array]:
        weights, d_scores = pair(queries, keys)
        d_k = gradients[0] + einsum("gnrc,grnh->gcnh", d_scores, queries.arrays[0])
        return d_k, gradients[1] + einsum("gnrc,grnh->gcnh", weights, queries.arrays[1])

    zeros = lambda group, tile: jnp.zeros((group, tile, *q.shape[1:]), dtype)
    d_q = _over_tiles(
        runs, of_queries, of_keys, zeros, fold_queries, lambda d_q: (d_q.astype(q.dtype),), (jnp.zeros_like(q),)
    )
    d_k, d_v = _over_tiles(
        runs, of_keys, of_queries, lambda *sizes: (zeros(*sizes), zeros(*sizes)), fold_keys,
        lambda pair: (pair[0].astype(k.dtype), pair[1].astype(v.dtype)), (jnp.zeros_like(k), jnp.zeros_like(v)),
    )  # fmt: skip
    return *d_q, d_k, d_v, None


tiled_attention.defvjp(_forward, _backward)


def _over_tiles(
    runs: Runs,
    own: tuple[Array, ...],
    others: tuple[Array, ...],
    start: Callable[[int, int], PyTree[Array]],
    fold: Callable[[PyTree[Array], _Block, _Block], PyTree[Array]],
    finish: Callable[[PyTree[Array]], tuple[Array, ...]],
    out: tuple[Array, ...],
) -> tuple[Array, ...]:
    """For each tile, fold all tiles of its segment, in order, into a state, and write the finished state to its rows.

    Args:
      runs: where the segments lie.
      own: arrays [X ...], of which a tile's rows go to `fold` with each tile of the segment.
      others: arrays [X ...], of which those tiles are made.
      start: maps the sizes G and C to the first state.
      fold: maps (state, G own tiles, a tile of the segment of each) to the next state.
      finish: maps the last state to arrays [G C ...].
      out: arrays [X ...] into which those are written.
    """
    num_rows = len(runs.first)
    tile, group = min(TILE, num_rows), min(_GROUP, -(-num_rows // TILE))
    offset = jnp.arange(num_rows, dtype=jnp.int32) - runs.first
    is_first = runs.is_patch & (offset % tile == 0)
    # Each patch could be a segment of its own; the loop is only as long as there are tiles.
    (tile_rows,) = jnp.nonzero(is_first, size=num_rows + group, fill_value=num_rows)
    num_groups = -(-jnp.sum(is_first, dtype=jnp.int32) // group)
    ends = jnp.append(runs.end, 0)  # a tile that only fills the group begins behind the last row and ends at 0: empty
    firsts = jnp.append(runs.first, num_rows)
    column = jnp.arange(tile, dtype=jnp.int32)

    def read(arrays: tuple[Array, ...], rows: Int[Array, "G C"], end: Int[Array, " G"]) -> _Block:
        is_patch = rows < end[:, None]
        take = lambda x: jnp.where(
            is_patch.reshape(*is_patch.shape, *[1] * (x.ndim - 1)), x.at[rows].get(mode="clip"), 0
        )
        return _Block(tuple(map(take, arrays)), is_patch)

    def of_group(index: Int[Array, ""], out: tuple[Array, ...]) -> tuple[Array, ...]:
        starts = jax.lax.dynamic_slice_in_dim(tile_rows, index * group, group)  # [G]
        first, end = firsts[starts], ends[starts]
        own_rows = starts[:, None] + column  # [G C]
        own_block = read(own, own_rows, end)

        def of_tile(number: Int[Array, ""], folded: PyTree[Array]) -> PyTree[Array]:
            rows = first[:, None] + number * tile + column
            return fold(folded, own_block, read(others, rows, end))

        num_tiles = jnp.max(-(-(end - first) // tile))
        folded = jax.lax.fori_loop(0, num_tiles, of_tile, start(group, tile))
        places = jnp.where(own_block.is_patch, own_rows, num_rows)
        return tuple(x.at[places].set(y, mode="drop") for x, y in zip(out, finish(folded), strict=True))

    return jax.lax.fori_loop(0, num_groups, of_group, out)


def _heads(x: Float[Array, "G C N H"]) -> Float[Array, "G N C H"]:
    return x.swapaxes(1, 2)


def _rows(x: Float[Array, "G N C H"]) -> Float[Array, "G C N H"]:
    return x.swapaxes(1, 2)
