"""Rows of the device's state are those of requests, and no other row changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_model import FakeCache

from m3jax.decoding import Sampling, SamplingParams, device
from m3jax.decoding.device import state as device_state
from m3jax.decoding.sampling import count_uses


@pytest.mark.parametrize("few_elements", [0, 1 << 16], ids=["scattered", "rewritten"])
@settings(max_examples=10)
@given(data=st.data())
def test_rows_are_those_of_the_requests_and_others_stay(few_elements, data):
    batch, count = data.draw(st.sampled_from([(1, 1), (3, 2), (5, 5)]), label="rows, requests")
    free = st.integers(0, batch)  # batch is one past the last: no row
    rows = data.draw(st.lists(free, min_size=count, max_size=count).filter(_differ(batch)), label="rows")
    old = np.arange(batch, dtype=np.int32), np.arange(batch * 6, dtype=np.float32).reshape(batch, 2, 3)
    new = -1 - np.arange(count, dtype=np.int32), -1 - np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_state, "_FEW_ELEMENTS", few_elements)
        found = device_state.set_rows(jax.tree.map(jnp.asarray, old), np.array(rows, np.int32), new)
    for of_rows, of_requests, result in zip(old, new, found, strict=True):
        expected = of_rows.copy()
        for request, row in enumerate(rows):
            if row < batch:
                expected[row] = of_requests[request]
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == of_rows.dtype


def _differ(batch):
    return lambda rows: len({row for row in rows if row < batch}) == sum(row < batch for row in rows)


BATCH, VOCAB, RECENT = 6, 9, 3


def continuations(texts, limits, stop_ids=()) -> device.Continuations:
    """Return rows of a prompt and new tokens each."""
    zeros = np.zeros(len(texts), np.int32)
    last = [([-1] * RECENT + [*prompt, *new])[-RECENT:] for prompt, new in texts]
    return device.Continuations(
        sampling=SamplingParams.stack([Sampling.greedy()] * len(texts)),
        stop_ids=np.array([[*stop_ids, -1, -1][:2]] * len(texts), np.int32),
        limits=np.array(limits, np.int32),
        min_tokens=zeros,
        top_logprobs=zeros,
        counts=np.array([len(new) for _, new in texts], np.int32),
        uses=np.stack([count_uses(prompt, new, VOCAB) for prompt, new in texts]),
        recent=np.array(last, np.int32),
    )


def test_rows_that_a_call_leaves_out_stay_as_they_were_and_get_nothing():
    """Of rows 4 and 1 and one place for no row, whatever the call makes of that; each has what is its own."""
    numbers = np.arange(BATCH, dtype=np.int32)
    of_rows = continuations([([row], [row] * row) for row in range(BATCH)], numbers)
    reasons = np.array([device.LIVE, device.LIVE, device.LENGTH, device.IDLE, device.LIVE, device.STOP_ID], np.int32)
    cache = FakeCache(jnp.zeros((2, 1, 1)), jnp.asarray(numbers)[:, None] + 50)
    state = device.State(cache, of_rows, *map(jnp.asarray, (numbers, numbers + 10, reasons)), numbers[:, None] + 20.0)

    def decode(few, of_few, nothing):
        assert nothing is None
        count = few.lengths.shape
        new = device.NewTokens(
            tokens=few.newest_token[:, None] + 100, logprobs=jnp.ones((*count, 1)),
            top_ids=jnp.ones((*count, 1, 0), jnp.int32), top_logprobs=jnp.ones((*count, 1, 0)),
            counts=jnp.ones(count, jnp.int32), stop_reasons=few.stop_reasons + 0,
        )  # fmt: skip
        ended = jnp.where(few.stop_reasons == device.LIVE, device.BAD_LOGITS, few.stop_reasons)
        changed = few.cache.replace(pages=few.cache.pages + 1)
        return device.State(
            changed, few.continuations, few.lengths + 1, few.newest_token, ended, few.draft_memory + 1
        ), new

    @jax.jit
    def run(state, rows, given):
        seen = []
        noting = lambda few, of_few, nothing: (seen.append((few, of_few)), decode(few, of_few, nothing))[1]
        return *device_state.on_rows(noting, state, rows, given, None), *seen

    found, new, (few, of_few) = run(state, np.array([4, BATCH, 1], np.int32), numbers + 30)
    assert of_few[::2].tolist() == [34, 31]
    assert few.stop_reasons.tolist() == [device.LIVE, device.IDLE, device.LIVE]
    assert few.cache.table[::2].tolist() == [[54], [51]] and few.draft_memory[::2].tolist() == [[24], [21]]
    assert few.continuations.counts[::2].tolist() == few.lengths[::2].tolist() == [4, 1]

    decoded = np.isin(numbers, (1, 4))
    after = np.where(decoded, device.BAD_LOGITS, reasons)
    assert found.stop_reasons.tolist() == new.stop_reasons.tolist() == after.tolist()
    assert found.lengths.tolist() == (numbers + decoded).tolist() and found.newest_token.tolist() == [*range(10, 16)]
    assert found.draft_memory[:, 0].tolist() == (numbers + 20 + decoded).tolist()
    assert found.cache.table.tolist() == cache.table.tolist() and float(found.cache.pages.min()) == 1
    for one, other in zip(jax.tree.leaves(found.continuations), jax.tree.leaves(of_rows), strict=True):
        np.testing.assert_array_equal(one, other)
    assert new.counts.tolist() == decoded.tolist()
    assert new.tokens[:, 0].tolist() == np.where(decoded, numbers + 110, 0).tolist()
