"""Attention and selection through the ops: by name, and over rows whose blocks several devices hold."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shares import AXIS, SIZE, devices_map, shared_memory

from m3jax.msa import Paged, PagedIndex, SelectionRules, contiguous
from m3jax.msa.share import Share
from m3jax.ops import attend_all, attend_selected, select
from m3jax.spec.msa import block_scores, dense_attention, select_blocks, sparse_attention


@pytest.mark.parametrize("schedule", [pytest.param("auto", marks=pytest.mark.further), "invariant"])
def test_rows_that_devices_share_are_attended_to_as_one_device_s(schedule):
    """Selection, attention to the selected blocks and to all: on each of two devices what the definition gives."""
    (q, index_q, positions, lengths), (k, v, index_k), of_devices = shared_memory()
    q, index_q, k, v, index_k, positions, lengths = map(jnp.asarray, (q, index_q, k, v, index_k, positions, lengths))
    at, rules = (positions, lengths), SelectionRules(top_k=3)

    def on_device(k, v, index_k, table, first):
        share = Share(first, SIZE, 2, (AXIS,))
        view = Paged(k, v, None, 0, table, jnp.float32, share)
        blocks = select(index_q, PagedIndex(index_k, None, 0, table, jnp.float32, share), *at, rules, schedule=schedule)
        return blocks, (
            attend_selected(q, view, blocks, *at, schedule=schedule), attend_all(q, view, *at, schedule=schedule)
        )  # fmt: skip

    blocks, found = devices_map(on_device, *of_devices)

    @jax.jit
    def by_definition(*at):
        chosen = select_blocks(block_scores(index_q, index_k, *at, SIZE), *at, rules, block_size=SIZE)
        sparse = sparse_attention(q, k, v, chosen, *at, block_size=SIZE, return_lse=True)
        return chosen, (sparse, dense_attention(q, k, v, *at, return_lse=True))

    expected, outputs = by_definition(*at)
    for device in range(2):
        np.testing.assert_array_equal(blocks[device], expected)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(outputs), strict=True):
            np.testing.assert_allclose(x[device], y, atol=1e-6)


def test_a_schedule_is_one_of_its_operation_s(unchecked):
    q, keys, at = (
        jnp.zeros((1, 1, 2, 4)),
        jnp.zeros((1, 8, 1, 4)),
        (jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)),
    )
    view, blocks = contiguous(keys, keys, 4), jnp.zeros((1, 1, 1, 2), jnp.int32)
    for attend, operands, wrong, allowed in (
        (attend_selected, (q, view, blocks, *at), "blockwise", "'auto', 'mask', 'query_major', 'kv_block_major'"),
        (attend_all, (q, view, *at), "kv_block_major", "'auto', 'mask', 'blockwise'"),
    ):
        with pytest.raises(ValueError, match=f"schedule = '{wrong}': allowed are {allowed}"):
            attend(*operands, schedule=wrong)
        for right in re.findall("[a-z_]+", allowed):
            assert jax.eval_shape(partial(attend, schedule=right), *operands)[0].shape == q.shape
