"""The best blocks of each query from scores in memory: the second Triton kernel of a decode step.

One maximum after the other is found and taken out. Where there are many blocks this is done twice: the best J numbers
lie in the J groups whose best numbers are the best, so J groups are taken first, then J of their numbers.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.numbers import BEHIND_ALL, power_of_two
from pallas_kernels.triton_common import div, rem, seen_position


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of the selection; a group is the blocks of a row that one of `splits` programs has scored."""

    heads: int
    block_size: int
    top_k: int
    local_blocks: int
    init_blocks: int
    splits: int
    few_blocks: int

    def per_split(self, blocks: Int[Array, ""]) -> Int[Array, ""]:
        """Return the number of blocks in a group, for a row with `blocks` of them before its last query's own one."""
        return div(blocks + self.splits - 1, self.splits)

    def group_width(self, num_blocks: int) -> int:
        """Return the room for the blocks of a group, a power of two, where a row can have `num_blocks` blocks."""
        return power_of_two(-(-num_blocks // self.splits))

    def takes_groups(self, num_blocks: int) -> bool:
        """Return True if the best groups are found first, and then the best blocks in them."""
        few = 2 * power_of_two(self.top_k) * self.group_width(num_blocks)
        return num_blocks > self.few_blocks and few <= num_blocks


def best_blocks(
    block_keys: Float[Array, "B X M"],
    group_keys: Float[Array, "B X Z"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: Rules,
    interpret: bool,
) -> Int[Array, "B K T J"]:
    """The selection of each query.

    Args:
      block_keys: sort keys of each (query, head); those from a query's own block on may be anything.
      group_keys: the highest key of each group.
      positions: of each query.
      lengths: valid keys of each row.
      rules: how many, and which are forced.
      interpret: run on the CPU.
    """
    batch, length = positions.shape
    slots = power_of_two(rules.top_k)
    num_warps = 2 if rules.takes_groups(block_keys.shape[2]) else 4
    chosen = pl.pallas_call(
        partial(_kernel, rules=rules),
        grid=(length, rules.heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, rules.heads, length, slots), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="index_topk_decode",
    )(block_keys, group_keys, positions, lengths)
    return chosen[..., : rules.top_k]


def chosen_keys(
    blocks: Int[Array, "B K T J"], block_keys: Float[Array, "B X M"], positions: Int[Array, "B T"], rules: Rules
) -> Float[Array, "B K T J"]:
    """Return the sort key of each chosen block: +inf for a forced one, -inf for an unused slot.

    Args:
      blocks: the selection.
      block_keys: sort keys of each (query, head), as `best_blocks` takes them.
      positions: of each query.
      rules: which blocks are forced.
    """
    batch, heads, length, _ = blocks.shape
    own_block = (positions // rules.block_size)[:, None, :, None]  # [B 1 T 1]
    keys = block_keys.reshape(batch, length, heads, -1).swapaxes(1, 2)  # [B K T M]
    inside = jnp.clip(blocks, 0, keys.shape[-1] - 1)
    keys = jnp.take_along_axis(keys, inside, axis=-1)
    is_forced = (blocks > own_block - rules.local_blocks) | (blocks < rules.init_blocks)
    return jnp.where(blocks < 0, -jnp.inf, jnp.where(is_forced, jnp.inf, keys))


def last_own_block(positions_ref, lengths_ref, row: Int[Array, ""], block_size: int) -> Int[Array, ""]:
    """Return the own block of a row's last query, which is the number of blocks before it; 0 if all is padding."""
    token = jnp.arange(power_of_two(positions_ref.shape[1]), dtype=jnp.int32)
    token = jnp.minimum(token, positions_ref.shape[1] - 1)
    last = jnp.max(seen_position(positions_ref, lengths_ref, row, token))
    return jnp.where(last >= 0, div(jnp.maximum(last, 0), block_size), 0)


def _kernel(block_keys_ref, group_keys_ref, positions_ref, lengths_ref, chosen_ref, *, rules: Rules):
    token, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    position = seen_position(positions_ref, lengths_ref, row, token)
    own_block = jnp.where(position >= 0, div(jnp.maximum(position, 0), rules.block_size), -1)
    # Slots that are left beside the own block's.
    free = jnp.maximum(jnp.minimum(own_block, rules.top_k - 1), 0)
    slot = jnp.arange(power_of_two(rules.top_k), dtype=jnp.int32)
    num_blocks, query = block_keys_ref.shape[2], token * rules.heads + head

    def keys_of(ids: Int[Array, "..."]) -> Float[Array, "..."]:
        key = block_keys_ref[row, query, jnp.minimum(ids, num_blocks - 1)]
        key = jnp.where((ids > own_block - rules.local_blocks) | (ids < rules.init_blocks), jnp.inf, key)
        # What lies from the own block on was never written.
        return jnp.where(ids < own_block, key, -jnp.inf)

    if rules.takes_groups(num_blocks):
        size = rules.per_split(last_own_block(positions_ref, lengths_ref, row, rules.block_size))
        size = jnp.maximum(size, 1)
        taken = jnp.minimum(jax.lax.div(jnp.maximum(own_block, 0) + size - 1, size), rules.top_k)
        group_keys = _group_keys(group_keys_ref, row, query, own_block, size, rules)
        groups = _ascending(_best(group_keys, taken, slot), slot)  # [J]
        offset = jnp.arange(rules.group_width(num_blocks), dtype=jnp.int32)
        is_inside = (groups < BEHIND_ALL)[:, None] & (offset < size)[None, :]
        ids = jnp.where(is_inside, groups[:, None] * size + offset[None, :], num_blocks)  # [J W]
        place = _best(jnp.where(is_inside, keys_of(ids), -jnp.inf).reshape(-1), free, slot)
        best = _pick(groups, div(place, offset.size), slot) * size + rem(place, offset.size)
    else:
        best = _best(keys_of(jnp.arange(power_of_two(num_blocks), dtype=jnp.int32)), free, slot)
    # The best, the own block, and behind them numbers that sort last and are written as -1.
    is_best, is_own = slot < free, (slot == free) & (own_block >= 0)
    chosen = jnp.where(is_best, best, jnp.where(is_own, own_block, BEHIND_ALL + slot))
    place = jnp.sum((chosen[None, :] < chosen[:, None]).astype(jnp.int32), axis=1)
    chosen_ref[row, head, token, place] = jnp.where(chosen < BEHIND_ALL, chosen, -1)


def _group_keys(
    group_keys_ref, row: Int[Array, ""], query: Int[Array, ""], own_block: Int[Array, ""], size: Int[Array, ""],
    rules: Rules,
) -> Float[Array, " Z"]:  # fmt: skip
    """Return the sort keys of a query's groups: +inf for one that must be taken, -inf for one behind the query.

    A group with forced blocks must be taken. So must one that the own block cuts: its highest key may be that of a
    block behind the query.
    """
    group = jnp.arange(power_of_two(rules.splits), dtype=jnp.int32)
    first, end = group * size, (group + 1) * size
    key = group_keys_ref[row, query, jnp.minimum(group, rules.splits - 1)]
    is_forced = (first < rules.init_blocks) | (end > own_block - rules.local_blocks + 1)
    is_group = (first < own_block) & (group < rules.splits)
    return jnp.where(is_group, jnp.where(is_forced, jnp.inf, key), -jnp.inf)


def _best(key: Float[Array, " X"], count: Int[Array, ""], slot: Int[Array, " J"]) -> Int[Array, " J"]:
    """Return the indices of the `count` highest keys, best first; of equal keys the first comes first.

    Slots from `count` on hold numbers above every index.
    """
    lane = jnp.arange(key.size, dtype=jnp.int32)

    def body(j, state):
        key, chosen = state
        best = jnp.argmax(key, axis=0).astype(jnp.int32)
        return jnp.where(lane == best, -jnp.inf, key), jnp.where(slot == j, best, chosen)

    return jax.lax.fori_loop(0, count, body, (key, BEHIND_ALL + slot))[1]


def _ascending(x: Int[Array, " J"], slot: Int[Array, " J"]) -> Int[Array, " J"]:
    """Return distinct numbers in ascending order, by counting for each how many are lower."""
    place = jnp.sum((x[None, :] < x[:, None]).astype(jnp.int32), axis=1)
    return jnp.sum(jnp.where(place[None, :] == slot[:, None], x[None, :], 0), axis=1)


def _pick(x: Int[Array, " J"], place: Int[Array, " J"], slot: Int[Array, " J"]) -> Int[Array, " J"]:
    """Return `x[place]` by a masked sum: Triton cannot index registers."""
    return jnp.sum(jnp.where(slot[None, :] == place[:, None], x[None, :], 0), axis=1)
