"""Shares of rows, and the choice among their candidates, against whole rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3jax.msa import SelectionRules, dense_attention, select_blocks
from m3jax.msa.candidates import Candidates, best_of_share, join_candidates
from m3jax.msa.share import Share
from m3jax.numerics import merge_parts

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


@pytest.mark.further  # a device with one block in the test above
def test_fewer_candidates_than_slots_leave_slots_unused():
    blocks, keys = jnp.int32([[[7]], [[2]]]), jnp.float32([[[1]], [[-jnp.inf]]])  # [devices X C]
    assert join_candidates(Candidates(blocks, keys), 3).tolist() == [[7, -1, -1]]


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


@pytest.mark.further  # in tests/msa/test_pieces.py each schedule does
def test_shares_attend_together_to_what_a_row_has():
    """T8, T51: three rows: one of which most devices hold nothing, one without keys, one that ends inside a block."""
    devices, begins_on = 4, jnp.int32([3, 0, 1])
    draw = np.random.default_rng(0)
    q = jnp.float32(draw.normal(size=(3, 5, 2, 8)))  # [B T N H]
    k, v = jnp.float32(draw.normal(size=(2, 3, BLOCKS * P, 1, 8)))  # [B S K H]
    lengths = jnp.int32([3, 0, 27])
    positions = jnp.int32([[0, 1, 2, 3, -1], [0, 1, 2, 3, 4], [0, 7, 8, 20, 26]])

    @jax.jit
    def attend_by_shares():
        parts = []
        for device in range(devices):
            by_block = jnp.stack([k, v], -1).reshape(3, BLOCKS, P, 1, 8, 2)
            held, part = held_by(device, begins_on, devices, by_block)
            keys, values = jnp.moveaxis(held.reshape(3, -1, 1, 8, 2), -1, 0)
            seen, held_lengths = part.positions(positions, lengths), part.lengths(lengths)
            parts.append(dense_attention(q, keys, values, seen, held_lengths, return_lse=True))
        outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
        return merge_parts(outs.__getitem__, lses), lses

    (out, lse), lses = attend_by_shares()
    assert np.isneginf(lses[:, 1]).all() and np.isneginf(lses[:, 0]).sum() > 3 * 4 * 2  # three devices hold nothing
    expected, expected_lse = dense_attention(q, k, v, positions, lengths, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
