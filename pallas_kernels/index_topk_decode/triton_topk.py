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

from pallas_kernels.common import div, power_of_two, rem, seen_position

_LAST = 2**30


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is chosen, in blocks of `block_size`; a group is what one of `splits` programs has scored."""

    heads: int
    block_size: int
    top_k: int
    local_blocks: int
    init_blocks: int
    splits: int
    few_blocks: int

    def per_split(self, blocks: Int[Array, ""]) -> Int[Array, ""]:
        """Blocks of a group, if a row has so many before its last query's own one."""
        return div(blocks + self.splits - 1, self.splits)

    def width(self, count: int) -> int:
        """Room for the blocks of a group, where a row can have so many blocks."""
        return power_of_two(-(-count // self.splits))

    def two_levels(self, count: int) -> bool:
        """Whether to take groups first."""
        return count > self.few_blocks and 2 * power_of_two(self.top_k) * self.width(count) <= count


def best_blocks(
    scores: Float[Array, "B X M"],
    groups: Float[Array, "B X Z"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: Rules,
    interpret: bool,
) -> Int[Array, "B K T J"]:
    """The selection of each query.

    Args:
      scores: sort keys of each (query, head); those from a query's own block on may be anything.
      groups: the highest key of each group.
      positions: of each query.
      lengths: valid keys of each row.
      rules: how many, and which are forced.
      interpret: run on the CPU.
    """
    batch, length = positions.shape
    slots = power_of_two(rules.top_k)
    chosen = pl.pallas_call(
        partial(_kernel, rules=rules),
        grid=(length, rules.heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, rules.heads, length, slots), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=2 if rules.two_levels(scores.shape[2]) else 4, num_stages=1),
        interpret=interpret,
        name="index_topk_decode",
    )(scores, groups, positions, lengths)
    return chosen[..., : rules.top_k]


def last_own(at_ref, lengths_ref, row, block_size: int) -> Int[Array, ""]:
    """How many blocks of a row come before the own one of its last query."""
    token = jnp.arange(power_of_two(at_ref.shape[1]), dtype=jnp.int32)
    last = jnp.max(seen_position(at_ref, lengths_ref, row, jnp.minimum(token, at_ref.shape[1] - 1)))
    return jnp.where(last >= 0, div(jnp.maximum(last, 0), block_size), 0)


def _kernel(scores_ref, groups_ref, at_ref, lengths_ref, out_ref, *, rules: Rules):
    token, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    at = seen_position(at_ref, lengths_ref, row, token)
    own = jnp.where(at >= 0, div(jnp.maximum(at, 0), rules.block_size), -1)
    free = jnp.maximum(jnp.minimum(own, rules.top_k - 1), 0)
    slot = jnp.arange(power_of_two(rules.top_k), dtype=jnp.int32)
    count, query = scores_ref.shape[2], token * rules.heads + head

    def keys(ids):
        key = scores_ref[row, query, jnp.minimum(ids, count - 1)]
        key = jnp.where((ids > own - rules.local_blocks) | (ids < rules.init_blocks), jnp.inf, key)
        # What lies from the own block on was never written.
        return jnp.where(ids < own, key, -jnp.inf)

    if rules.two_levels(count):
        size = jnp.maximum(rules.per_split(last_own(at_ref, lengths_ref, row, rules.block_size)), 1)
        taken = jnp.minimum(jax.lax.div(jnp.maximum(own, 0) + size - 1, size), rules.top_k)
        found = _ascending(_best(_group_keys(groups_ref, (row, query), own, size, rules), taken, slot), slot)
        offset = jnp.arange(rules.width(count), dtype=jnp.int32)
        inside = (found < _LAST)[:, None] & (offset < size)[None, :]
        ids = jnp.where(inside, found[:, None] * size + offset[None, :], count)
        place = _best(jnp.where(inside, keys(ids), -jnp.inf).reshape(-1), free, slot)
        best = _pick(found, div(place, offset.size), slot) * size + rem(place, offset.size)
    else:
        best = _best(keys(jnp.arange(power_of_two(count), dtype=jnp.int32)), free, slot)
    chosen = jnp.where(slot < free, best, jnp.where((slot == free) & (own >= 0), own, _LAST + slot))
    place = jnp.sum((chosen[None, :] < chosen[:, None]).astype(jnp.int32), axis=1)
    out_ref[row, head, token, place] = jnp.where(chosen < _LAST, chosen, -1)


def _group_keys(groups_ref, at, own, size, rules: Rules) -> Float[Array, " Z"]:
    """Sort keys of groups. One that the own block cuts is always taken: its best number may lie behind."""
    group = jnp.arange(power_of_two(rules.splits), dtype=jnp.int32)
    first, end = group * size, (group + 1) * size
    key = groups_ref[*at, jnp.minimum(group, rules.splits - 1)]
    forced = (first < rules.init_blocks) | (end > own - rules.local_blocks + 1)
    return jnp.where((first < own) & (group < rules.splits), jnp.where(forced, jnp.inf, key), -jnp.inf)


def _best(key: Float[Array, " X"], count, slot: Int[Array, " J"]) -> Int[Array, " J"]:
    """Places of the `count` highest keys, best first; of equal ones the first. What is left is behind every place."""
    lane = jnp.arange(key.size, dtype=jnp.int32)

    def body(j, state):
        key, chosen = state
        best = jnp.argmax(key, axis=0).astype(jnp.int32)
        return jnp.where(lane == best, -jnp.inf, key), jnp.where(slot == j, best, chosen)

    return jax.lax.fori_loop(0, count, body, (key, _LAST + slot))[1]


def _ascending(x: Int[Array, " J"], slot: Int[Array, " J"]) -> Int[Array, " J"]:
    place = jnp.sum((x[None, :] < x[:, None]).astype(jnp.int32), axis=1)
    return jnp.sum(jnp.where(place[None, :] == slot[:, None], x[None, :], 0), axis=1)


def _pick(x: Int[Array, " J"], place: Int[Array, " J"], slot: Int[Array, " J"]) -> Int[Array, " J"]:
    """`x[place]`, which Triton cannot read from registers."""
    return jnp.sum(jnp.where(slot[None, :] == place[:, None], x[None, :], 0), axis=1)
