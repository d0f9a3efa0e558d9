"""Shares of rows, and the choice among their candidates, against whole rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shares import AXIS, SIZE, devices_map, shared_memory

from m3jax.msa import SelectionRules, block_scores, dense_attention, index_walk, select_blocks, sparse_attention
from m3jax.msa.candidates import Candidates, best_of_share, join_candidates, join_over_devices
from m3jax.msa.schedules.blockwise import blockwise
from m3jax.msa.schedules.lanes import invariant, invariant_all, select_invariant
from m3jax.msa.schedules.query_major import query_major
from m3jax.msa.share import Share
from m3jax.msa.views import Paged, PagedIndex
from m3jax.numerics import merge_over_devices

P, SLOTS = 4, 3  # tokens of a block, blocks that a query keeps
BLOCKS = 12  # of a row: divisible by every number of devices here
# Few values, so that most keys are equal; all that a score can be.
SCORES = st.sampled_from((0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 3e38))


def share(first, devices):
    return Share(jnp.asarray(first, jnp.int32), P, devices, ("context",))


def held_by(device, begins_on, devices, x):
    """Return the part of x [B M ...] that a device holds, and its share."""
    part = share((device - begins_on) % devices, devices)
    ids = part.first[:, None] + devices * jnp.arange(BLOCKS // devices)  # [B m]
    return x[jnp.arange(len(x))[:, None], ids], part


@partial(jax.jit, static_argnames=("devices", "rules"))
def choices(scores, positions, lengths, begins_on, devices, rules):
    """Return the blocks that shares choose together, and those of `select_blocks`; scores are [B M]."""

    def candidates(device):
        held, part = held_by(device, begins_on, devices, scores)
        return best_of_share(held[:, None, None], positions, lengths, rules, part)

    parts = jax.tree.map(lambda *x: jnp.stack(x), *map(candidates, range(devices)))
    whole = select_blocks(scores[:, None, None], positions, lengths, rules, block_size=P)
    return join_candidates(parts, rules.top_k), whole


@given(
    scores=st.lists(SCORES, min_size=2 * BLOCKS, max_size=2 * BLOCKS),
    positions=st.lists(st.integers(-1, BLOCKS * P), min_size=2, max_size=2),
    lengths=st.lists(st.integers(0, BLOCKS * P), min_size=2, max_size=2),
    begins_on=st.lists(st.integers(0, 11), min_size=2, max_size=2),
    devices=st.sampled_from((3, 4, 12)),  # 12: a block each, fewer candidates than slots
    rules=st.sampled_from((SelectionRules(SLOTS), SelectionRules(SLOTS, local_blocks=2, init_blocks=1))),
)
def test_candidates_of_shares_choose_as_all_scores_do(scores, positions, lengths, begins_on, devices, rules):
    """T28: ties go to the lower id, whichever device holds it; devices whose blocks a query does not see name none."""
    scores = np.float32(scores).reshape(2, BLOCKS)
    positions, lengths, begins_on = np.int32(positions)[:, None], np.int32(lengths), np.int32(begins_on)
    found, expected = choices(scores, positions, lengths, begins_on, devices=devices, rules=rules)
    np.testing.assert_array_equal(found, expected)


def test_a_share_is_the_keys_of_every_nth_block():
    """T48: at every residue of a turn and every length; a query sees as many keys here as stand here up to it."""
    devices, size = 3, BLOCKS * P
    first, lengths = (x.reshape(-1) for x in np.mgrid[:devices, : size + 1].astype(np.int32))
    positions = np.broadcast_to(np.arange(-1, size + 1, dtype=np.int32), (len(first), size + 2))
    part = share(first, devices)
    slots, seen, held_lengths = jax.jit(
        lambda p, n: (part.slots(p, n), part.positions(p, n), part.lengths(n))
    )(positions, lengths)  # fmt: skip
    is_held = np.arange(size) // P % devices == first[:, None]  # [B S]
    count = np.pad(np.cumsum(is_held, axis=1), ((0, 0), (1, 0)))  # [B S+1]: of the row's first keys
    is_token = (positions >= 0) & (positions < lengths[:, None])
    expected = np.where(is_token, np.take_along_axis(count, np.clip(positions + 1, 0, size), 1), 0) - 1
    np.testing.assert_array_equal(seen, expected)
    is_here = is_token & np.take_along_axis(is_held, np.clip(positions, 0, size - 1), 1)
    np.testing.assert_array_equal(slots, np.where(is_here, expected, -1))
    np.testing.assert_array_equal(held_lengths, count[np.arange(len(first)), lengths])


def test_a_share_numbers_its_blocks_in_order():
    part, blocks = share([1], 3), jnp.int32([[[[-1, *range(8)]]]])
    held = part.held(blocks)
    assert held.tolist() == [[[[-1, -1, 0, -1, -1, 1, -1, -1, 2]]]]
    assert part.in_rows(held).tolist() == [[[[-1, -1, 1, -1, -1, 4, -1, -1, 7]]]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_candidates_are_joined_over_devices_in_one_exchange_and_in_two(dtype):
    """Keys of 32 bits go with the ids, others by themselves; equal ones go to the lower id, -inf is no candidate."""
    blocks = np.array([[[4, 2, 0]], [[1, 3, 5]]], np.int32)  # [devices X C]
    keys = np.array([[[3.0, 1, -np.inf]], [[2.0, 1, np.inf]]], np.float32)
    join = lambda blocks, keys: join_over_devices(Candidates(blocks, keys), 4, (AXIS,))
    assert devices_map(join, blocks, jnp.asarray(keys, dtype)).tolist() == [[[1, 2, 4, 5]]] * 2


def test_devices_that_share_rows_select_and_attend_as_one():
    """T28, T51: each schedule on the blocks that a device holds, then the exchange, is the definition of whole rows."""
    rules = SelectionRules(SLOTS)
    (q, index_q, positions, lengths), (k, v, index_k), of_devices = shared_memory()
    q, index_q, k, v, index_k, positions, lengths = map(jnp.asarray, (q, index_q, k, v, index_k, positions, lengths))

    def on_device(k, v, index_k, table, first):
        share = Share(first, SIZE, 2, ("context",))
        view = Paged(k, v, None, 0, table, jnp.float32, share)
        index = PagedIndex(index_k, None, 0, table, jnp.float32, share)
        blocks = index_walk(index_q, index, positions, lengths, rules)
        in_lanes = select_invariant(index_q, index, positions, lengths, rules)
        seen, held_lengths = share.positions(positions, lengths), share.lengths(lengths)
        held = share.held(blocks)
        parts = blockwise(q, view, seen, held_lengths), query_major(q, view, held, seen, held_lengths)
        merged = [merge_over_devices(*part, ("context",)) for part in parts]
        joined = view.joined()
        together = invariant_all(q, joined, positions, lengths), invariant(q, joined, blocks, positions, lengths)
        return (blocks, in_lanes), (merged[0], together[0]), (*merged[1:], together[1])

    (blocks, in_lanes), dense, sparse = devices_map(on_device, *of_devices)

    @jax.jit
    def by_definition(*rows):
        chosen = select_blocks(block_scores(index_q, index_k, *rows, SIZE), *rows, rules, block_size=SIZE)
        of_chosen = sparse_attention(q, k, v, chosen, *rows, block_size=SIZE, return_lse=True)
        return chosen, of_chosen, dense_attention(q, k, v, *rows, return_lse=True)

    expected, sparse_expected, dense_expected = by_definition(positions, lengths)
    for device in range(2):
        np.testing.assert_array_equal(blocks[device], expected)
        np.testing.assert_array_equal(in_lanes[device], expected)
        for found, wanted in [(x, dense_expected) for x in dense] + [(x, sparse_expected) for x in sparse]:
            for x, y in zip(found, wanted, strict=True):
                np.testing.assert_allclose(x[device], y, atol=1e-6)
