"""Dense causal attention: the ground that every sparse schedule is compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from m3jax.msa.chunks import budget, map_chunks, rows_within
from m3jax.msa.views import BlockView
from m3jax.numerics import Softmax, accumulator, attend

_SCORE_BUDGET = 1 << 20  # scores of one step of the blockwise schedule
_FEW_ROWS = 32  # up to here pieces are longer where that pays
_KEY_CHUNK = 1024


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Grouped-query causal attention, written out: every score is held.

    Args:
      q: queries; head n reads KV head n // (N // K).
      k: keys; slot s holds position s. Slots >= lengths may hold anything, NaN included; anything finite in a gradient.
      v: values.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
      Outputs in q's dtype, and the LSE (-inf for padding) in the accumulator's dtype if asked for.

    Raises:
      ValueError: N is no multiple of K.

    Source: paper, section 3; scale H**-0.5, no sink, no soft cap.
    """
    check_heads(q, k)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    slots = jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = causal(positions, lengths, slots)
    out, lse = attend_group(q, keys, hide(values, slots, lengths), visible[:, None])
    return finish(out, lse, q.dtype, return_lse)


def blockwise_attention(
    q: Float[Array, "B T N H"],
    view: BlockView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`dense_attention` in chunks of queries and keys, merged by log-sum-exp: memory linear in T and in S.

    Pieces that lie after every query of a chunk are skipped, so is what the view holds beyond the longest row.
    """
    check_view(q, view.num_heads)
    few = q.shape[0] * q.shape[1] <= _FEW_ROWS
    per_piece = max(1, min((budget(_KEY_CHUNK) if few else _KEY_CHUNK) // view.block_size, view.num_blocks))
    piece = per_piece * view.block_size
    chunk = rows_within(budget(_SCORE_BUDGET), q.shape[0] * q.shape[2] * piece, q.shape[1])
    out, lse = map_chunks(lambda q, p: _chunk(q, p, view, per_piece, lengths), chunk, 1, q, positions)
    return (out, lse) if return_lse else out


def _chunk(q, positions, view, per_piece, lengths):
    """One chunk of queries over all pieces of keys."""
    last = jnp.max(jnp.where(positions < lengths[:, None], positions, -1))
    shortest = jnp.min(lengths)
    size = per_piece * view.block_size
    rows = group_rows(q, view.num_heads)

    def step(state, piece):
        # The last piece starts early enough to end at the view's end; what it repeats is masked.
        first = jnp.minimum(piece * per_piece, view.num_blocks - per_piece)

        def seen(dirty):
            k, v = view.run(first, per_piece)
            slots = first * view.block_size + jnp.arange(size, dtype=jnp.int32)
            held = jnp.repeat(view.present(first, per_piece), view.block_size, axis=1)
            visible = causal(positions, lengths, slots) & (held & (slots >= piece * size))[:, None]
            visible = jnp.repeat(visible, q.shape[2] // view.num_heads, axis=1)
            v = jnp.where(held[:, None, :, None], hide(v, slots, lengths), 0) if dirty else v
            return state.fold(rows, k, v, visible[:, None])

        # Values need cleaning only where a row ends, or where a block is another device's.
        clean = ((piece + 1) * size <= shortest) & jnp.all(view.present(first, per_piece))
        kind = (piece * size <= last).astype(jnp.int32) * (1 + clean)
        branches = (lambda: state, lambda: seen(True), lambda: seen(False))
        return jax.lax.switch(kind, branches), None

    empty = Softmax.empty(rows.shape[:-1], q.shape[-1], accumulator(q.dtype))
    pieces = jnp.arange(-(-view.num_blocks // per_piece), dtype=jnp.int32)
    state, _ = jax.lax.scan(jax.checkpoint(step), empty, pieces)
    return finish(*_ungroup(*state.finish(), q.shape[1]), q.dtype, True)


def attend_group(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    visible: Bool[Array, "B K2 T C"],
) -> tuple[Float[Array, "B K T G H"], Float[Array, "B K T G"]]:
    """`attend` with the G heads of each KV head as rows; the mask is one per KV head, or one for all."""
    groups = q.shape[2] // k.shape[1]
    out, lse = attend(group_rows(q, k.shape[1]), k, v, jnp.repeat(visible, groups, axis=2))
    return _ungroup(out, lse, q.shape[1])


def group_rows(q: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K R H"]:
    """The queries of a KV head as rows: R = T x G, a token's heads side by side."""
    batch, length, _, width = q.shape
    return q.reshape(batch, length, kv_heads, -1, width).swapaxes(1, 2).reshape(batch, kv_heads, -1, width)


def _ungroup(out: Float[Array, "B K R H"], lse: Float[Array, "B K R"], length: int):
    batch, heads, _, width = out.shape
    return out.reshape(batch, heads, length, -1, width), lse.reshape(batch, heads, length, -1)


def causal(positions: Int[Array, "B T"], lengths: Int[Array, " B"], slots: Int[Array, " S"]) -> Bool[Array, "B T S"]:
    """Which slot each query may see: not after it, not beyond the row's length; padding sees nothing."""
    real = positions < lengths[:, None]
    return real[..., None] & (slots <= positions[..., None])


def hide(x: Float[Array, "B K S H"], slots: Int[Array, " S"], lengths: Int[Array, " B"]) -> Float[Array, "B K S H"]:
    """Zeros in place of whatever lies beyond a row's length: 0 x NaN would be NaN."""
    valid = slots < lengths[:, None]
    return jnp.where(valid[:, None, :, None], x, 0)


def finish(out: Float[Array, "B K T G H"], lse: Float[Array, "B K T G"], dtype, return_lse: bool):
    """Back to token-major, one rounding to the queries' dtype."""
    batch, heads, length, groups, width = out.shape
    out = out.swapaxes(1, 2).reshape(batch, length, heads * groups, width).astype(dtype)
    lse = lse.swapaxes(1, 2).reshape(batch, length, heads * groups)
    return (out, lse) if return_lse else out


def check_heads(q: Float[Array, "B T N H"], k: Float[Array, "B S K H"]) -> None:
    """Raise ValueError where the query heads cannot be divided among the KV heads."""
    if q.shape[2] % k.shape[2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q has {q.shape[2]} heads of {q.shape[-1]} and k {k.shape[2]} of {k.shape[-1]}: need the same width, "
            "and as many query heads as a multiple of the KV heads"
        )


def check_view(q: Float[Array, "B T N H"], kv_heads: int, blocks: Int[Array, "B K T J"] | None = None) -> None:
    """Raise ValueError where queries or their selection do not fit the KV heads of a view: nothing is broadcast."""
    batch, length, heads, _ = q.shape
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads and the view {kv_heads}: need a multiple of the KV heads")
    if blocks is not None and blocks.shape[:3] != (batch, kv_heads, length):
        raise ValueError(f"blocks has shape {blocks.shape}: must be [{batch} {kv_heads} {length} J] for these operands")
