"""Rows of the device's state are those of requests, and no other row changes; what a round appends to each.

And what a call asks of the model and of the draw.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_model import FakeCache

from m3jax.decoding import Sampling, SamplingParams, device
from m3jax.decoding.device import rounds, step
from m3jax.decoding.device import state as device_state
from m3jax.decoding.sampling import count_uses
from m3jax.decoding.speculation.verify import Proposal, Verdict


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


def test_a_round_appends_tokens_as_if_one_after_the_other():
    """Up to the limit, to a stop id, which is kept, and to a place where none could be drawn; to live rows alone."""
    rng, rows, width = np.random.default_rng(1), 200, 4
    texts = [(rng.integers(0, VOCAB, 2).tolist(), rng.integers(0, VOCAB, rng.integers(0, 3)).tolist())] * rows
    texts = [(prompt, [*new, *rng.integers(0, VOCAB, row % 2).tolist()]) for row, (prompt, new) in enumerate(texts)]
    limits = [len(new) + int(rng.integers(1, 7)) for _, new in texts]
    before, stops = continuations(texts, limits, (8, 0)), {8, 0}
    tokens = np.where(
        rng.random((rows, width)) < 0.1, rng.integers(-2, 0, (rows, width)), rng.integers(0, VOCAB, (rows, width))
    )
    accepted, is_live = rng.integers(0, width, rows).astype(np.int32), rng.random(rows) < 0.9
    # Of the places that are offered only the last may be without a token: what is accepted is one.
    inside = np.arange(width) < accepted[:, None]
    tokens = np.where(inside, np.maximum(tokens, 0), tokens).astype(np.int32)
    nothing = jnp.zeros((rows, width, 0))
    verdict = Verdict(accepted, tokens, nothing[..., 0:0].sum(-1), nothing.astype(jnp.int32), nothing, {})
    found, reasons, counts = jax.jit(lambda *given: rounds._append_tokens(*given))(before, verdict, is_live)
    seen = set()
    for row, (prompt, new) in enumerate(texts):
        text, reason = list(new), device.LIVE
        for token in tokens[row, : accepted[row] + 1].tolist() if is_live[row] else ():
            if token < 0:
                reason = device.NOTHING_ALLOWED if token == -2 else device.BAD_LOGITS
                break
            text.append(token)
            if token in stops or len(text) == limits[row]:
                reason = device.STOP_ID if token in stops else device.LENGTH
                break
        assert int(counts[row]) == len(text) - len(new) and int(found.counts[row]) == len(text), f"row {row}"
        assert found.uses[row].tolist() == count_uses(prompt, text, VOCAB).tolist()
        assert found.recent[row].tolist() == ([-1] * RECENT + [*prompt, *text])[-RECENT:]
        if is_live[row]:
            assert int(reasons[row]) == reason, f"row {row}: {tokens[row]}, {accepted[row]} accepted"
            seen.add(reason)
    assert seen == {device.LIVE, device.LENGTH, device.STOP_ID, device.BAD_LOGITS, device.NOTHING_ALLOWED}


class Asked(Exception):
    """Raised with what a call asks for, in place of an answer."""


def asked(place: int):
    """Return a function that raises the argument at a place."""

    def ask(*given, **named):
        raise Asked(given[place])

    return ask


def test_a_loop_says_how_many_tokens_the_model_reads_in_a_step(monkeypatch, unchecked):
    """One of each row; with a draft the newest and the proposals."""
    state = SimpleNamespace(lengths=np.zeros(3, np.int32))
    for of, call, expected in (
        (step, lambda: step.decode.__wrapped__("model", state, None, 4), 3),
        (rounds, lambda: rounds.decode_in_rounds.__wrapped__("model", "drafter", state, None, 2, 4), 9),
    ):
        monkeypatch.setattr(of, "for_steps", asked(1))
        with pytest.raises(Asked, match=f"^{expected}$"):
            call()


def test_the_most_probable_tokens_are_asked_for_by_rows_that_want_some(monkeypatch, unchecked):
    """Of a prompt, of a step, of a round, and of a round that draws each token as a step does."""
    wants = np.array([0, 2, 1], np.int32)
    rows = dataclasses.replace(continuations([([1], [])] * 3, [4] * 3), top_logprobs=wants)
    zeros = jnp.zeros(3, jnp.int32)
    cache = FakeCache(jnp.zeros((3, 4, 2)), jnp.arange(3, dtype=jnp.int32)[:, None])
    state = device.State(cache, jax.tree.map(jnp.asarray, rows), zeros, zeros, zeros)
    for of in (step, rounds):
        hidden = jnp.zeros((3, 2 if of is rounds else 1, 2))
        monkeypatch.setattr(of, "run_model", lambda *_, hidden=hidden, **__: (hidden, None, {}, cache))
        monkeypatch.setattr(of, "draw_token", asked(5))
    monkeypatch.setattr(rounds, "verify", asked(5))
    monkeypatch.setattr(rounds, "room_for_choices", lambda *_: {})
    proposal = Proposal(jnp.zeros((3, 1), jnp.int32))
    drafter = SimpleNamespace(propose=lambda *_: (proposal, cache))
    chunk = device.Chunk(zeros, zeros[:, None], zeros, zeros, rows)
    model, steps = SimpleNamespace(unembed=lambda x: x), zeros + 1
    calls = [
        lambda: step.prefill.__wrapped__(model, state, chunk),
        lambda: step.decode.__wrapped__(model, state, steps, 1),
        lambda: rounds.decode_in_rounds.__wrapped__(model, drafter, state, steps, 1, 1),
        lambda: rounds._draw_all(model, jnp.zeros((3, 2, 2)), proposal, rows, rows.context(zeros > 0, None), zeros, 2),
    ]
    for number, call in enumerate(calls):
        with jax.disable_jit(), pytest.raises(Asked) as found:
            call()
        columns = 2 if number == 3 else 1
        assert found.value.args[0].tolist() == np.repeat(wants > 0, columns).tolist(), number
