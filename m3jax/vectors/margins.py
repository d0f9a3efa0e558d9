"""The margin of a selection: the scores on the two sides of the cut between kept and dropped blocks."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.vectors.case import Rule


def cut(
    scores: Float[Array, "B K T M"],
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rule: Rule,
) -> dict[str, Float[Array, "B K T"]]:
    """Return the lowest score of the blocks that were kept for their score, and the highest of those that were dropped.

    Args:
      scores: of blocks.
      blocks: the selection.
      positions, lengths: as in `select_blocks`.
      rule: block_size, and local_blocks and init_blocks where they are not M3's 1 and 0.

    Returns:
      "last_kept", inf where every kept block is forced, and "first_dropped", -inf where none is dropped. NaN counts as
      below every number, here as in the choice.
    """
    ids = jnp.arange(scores.shape[-1])  # [M]
    is_token = (positions >= 0) & (positions < lengths[:, None])
    own_block = jnp.where(is_token, positions // rule["block_size"], -1)  # padding sees no block
    own_block = own_block[:, None, :, None]  # [B 1 T 1]
    is_forced = (ids > own_block - rule.get("local_blocks", 1)) | (ids < rule.get("init_blocks", 0))
    is_kept = jnp.any(blocks[..., None] == ids, axis=-2)  # [B K T M]
    is_visible = ids <= own_block
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    kept = jnp.min(jnp.where(is_kept & ~is_forced, ranked, jnp.inf), axis=-1)
    dropped = jnp.max(jnp.where(is_visible & ~is_kept, ranked, -jnp.inf), axis=-1)
    return {"last_kept": kept, "first_dropped": dropped}
