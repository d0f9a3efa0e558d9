"""Selection where devices divide the blocks: each device names its best ones, and the best of these are taken.

A block that a query keeps of all is among the best J of the device that holds it. So the devices exchange J candidates
each, block ids and the keys of their order, and not the scores of all M blocks. The order is that of `select_blocks`:
all devices look at the same candidates and choose alike, and as one device does that has all scores.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa.share import Share
from m3jax.spec.msa import SelectionRules, selection_keys


class Candidates(NamedTuple):
    """Blocks that a query may keep, in any order, with the keys by which they are ordered.

    Attributes:
      blocks: numbers of the blocks in their row, each once over all devices; anything where the key is -inf.
      keys: `selection_keys` of the blocks; -inf where there is no candidate.
    """

    blocks: Int[Array, "*X C"]
    keys: Float[Array, "*X C"]


def join_candidates(candidates: Candidates, top_k: int) -> Int[Array, "*X J"]:
    """Return the blocks that a query keeps of all devices' candidates: `select_blocks` of all scores.

    Args:
      candidates: arrays [devices *X C]: of each device its best J blocks, or all of them where they are fewer.
      top_k: J.

    Returns:
      Ascending ids, then -1.
    """
    blocks, keys = (jnp.moveaxis(x, 0, -2) for x in candidates)  # [*X devices C]
    blocks, keys = (x.reshape(*x.shape[:-2], -1) for x in (blocks, keys))  # [*X devices*C]
    # Candidates are few: each counts those before it, in fewer and shorter kernels than a sort is on a GPU.
    is_lower = blocks[..., None, :] < blocks[..., :, None]  # [*X C C]; the second one's id beside the first one's
    other_key, own_key = keys[..., None, :], keys[..., :, None]
    # Higher keys first, of equal ones the lower id, whichever device names it (T28).
    rank = jnp.sum((other_key > own_key) | ((other_key == own_key) & is_lower), axis=-1)
    is_kept = (rank < top_k) & ~jnp.isneginf(keys)
    slot = jnp.where(is_kept, jnp.sum(is_kept[..., None, :] & is_lower, axis=-1), -1)  # by ascending ids
    is_in_slot = slot[..., None, :] == jnp.arange(top_k)[:, None]  # [*X J C]
    return jnp.max(jnp.where(is_in_slot, blocks[..., None, :], -1), axis=-1)


def best_of_share(
    scores: Float[Array, "B K T M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
    share: Share,
) -> Candidates:
    """Return the candidates of one device.

    Args:
      scores: of the blocks that it holds, by its own numbers.
      positions, lengths: of the queries in their rows, as in `select_blocks`.
      rules: J, and which blocks are forced.
      share: which blocks these are.

    Returns:
      Arrays [B K T C]; C = J, or M where that is less.
    """
    held_blocks = jnp.arange(scores.shape[-1], dtype=jnp.int32)  # [M]
    block_ids = share.in_rows(held_blocks[None, None, None])  # [B 1 1 M]
    is_token = (positions >= 0) & (positions < lengths[:, None])  # [B T]
    own_block = jnp.where(is_token, positions // share.block_size, -1)[:, None, :, None]  # [B 1 T 1]
    keys = selection_keys(scores, block_ids, own_block, rules)  # [B K T M]
    # Of equal keys the lower number comes first, here and in the row.
    best, chosen = jax.lax.top_k(keys, min(rules.top_k, scores.shape[-1]))  # [B K T C]
    return Candidates(share.in_rows(chosen.astype(jnp.int32)), best)


def join_over_devices(
    candidates: Candidates, top_k: int, axes: tuple[str, ...], all_gather: Callable[..., Array] = jax.lax.all_gather
) -> Int[Array, "*X J"]:
    """Compute `join_candidates` inside `shard_map`, of one part of each device along some mesh axes.

    Args:
      candidates: this device's.
      top_k: J.
      axes: of the mesh.
      all_gather: returns an array of each device, given this one's and the axes.
    """
    blocks, keys = candidates
    if keys.dtype.itemsize == blocks.dtype.itemsize:  # in one exchange, keys as the integers that have their bits
        packed = jnp.stack([blocks, jax.lax.bitcast_convert_type(keys, blocks.dtype)])  # [2 *X C]
        gathered = all_gather(packed, axes)  # [devices 2 *X C]
        blocks, keys = gathered[:, 0], jax.lax.bitcast_convert_type(gathered[:, 1], keys.dtype)
    else:
        blocks, keys = (all_gather(x, axes) for x in candidates)  # [devices *X C]
    return join_candidates(Candidates(blocks, keys), top_k)
