"""Drafting in the engine: greedy tokens are those of plain decoding, whatever is proposed; so is the cache."""

from dataclasses import dataclass
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.compilations import compilations
from support.drafts import Coached, Knowing, draft, model
from support.engines import (
    SIZE,
    allocator_of,
    engine,
    finish,
    params,
    poison,
    preemptions,
    prompt,
    quick,
    runner_of,
    serve,
)
from support.fake_model import FakeConfig, FakeModel

from m3jax.decoding import Engine, PromptLookup, Sampling, SamplingParams, device

# Prompts of less than a page and of many; with a penalty, with stop ids, and some that are sampled.
WORK = [
    (prompt(5), params(30)),
    (prompt(1), params(30)),
    (prompt(40), params(60)),
    (prompt(17), params(33, repetition_penalty=1.3)),
    (prompt(61), params(16)),
    (prompt(100), params(20)),
]
TOLERANCE = 1e-5  # of a log-probability, between programs that sum in different orders
KNOWS = 8  # proposals: rounds of up to nine tokens cross the borders of pages of eight


def coached(*right: int) -> Coached:
    """A random draft whose first proposals are right; in rows that are sampled it draws its own."""
    return Coached.of(draft(fc_norm=True, norm_output=True), *right, sample=True)


ALL, NONE, SOME, RANDOM = coached(KNOWS), coached(-1), coached(3, 0, 1, 2, 0, 8, 1), coached(0)


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    with quick():
        yield


@cache
def plain():
    """Return the result of each request without a draft, log-probabilities included."""
    return serve(engine(model()), *WORK)


def drafted(drafter, **changes) -> Engine:
    return engine(model(), draft=drafter, draft_tokens=KNOWS, **changes)


def assert_plain(results):
    for found, expected in zip(results, plain(), strict=True):
        assert found.tokens == expected.tokens
        assert found.stop_reason == expected.stop_reason
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)


# Greedy


@pytest.mark.parametrize("name", [*(pytest.param(x, marks=pytest.mark.further) for x in ("right", "wrong")), "mixed"])
def test_any_proposals_give_the_plain_tokens(name):
    """T20: the target itself as the draft, one that is always wrong, and ragged acceptance.

    The penalty is not foreseen.
    """
    drafter = {"right": ALL, "wrong": NONE, "mixed": SOME}[name]
    served = drafted(drafter)
    results = serve(served, *WORK)
    assert_plain(results)
    done = served.drafting
    # Each request has its share of the engine's counts.
    assert sum(result.accepted for result in results) == sum(done.accepted)
    assert sum(result.drafted for result in results) == KNOWS * done.forwards
    if name == "wrong":
        assert done.accepted == (0,) * KNOWS and done.mean_length == 1
    alone = drafted(drafter)
    serve(alone, WORK[2])
    if name == "right":
        assert alone.drafting.forwards == -(-59 // (1 + KNOWS))  # of 60 tokens the first is prefill's
        assert alone.drafting.accepted[: 59 % (1 + KNOWS) - 1] == (alone.drafting.forwards,) * (59 % (1 + KNOWS) - 1)
    if name == "mixed":
        assert 0 < alone.drafting.accepted[2] < alone.drafting.accepted[0] < alone.drafting.forwards


@pytest.mark.further
def test_a_real_draft_gives_the_plain_tokens():
    """A random EAGLE3 draft; in a pool that is too small; with the prompts in the prefix cache."""
    served = drafted(RANDOM)
    assert_plain(serve(served, *WORK))
    assert preemptions(served) > 0
    assert_plain(serve(served, *WORK))
    assert served.pages["hit_tokens"] > 0


def test_a_request_that_fills_max_length_exactly():
    """Its last rounds propose tokens beyond all pages: they are written nowhere, not into the last page."""
    # After three rounds the newest token is the last but one, and all that is proposed after it is too much.
    new = (1 + KNOWS) * 3 + 2
    work = (prompt(128 - new), params(new))
    (expected,) = serve(engine(model()), work)
    (found,) = serve(drafted(ALL), work)
    assert (found.tokens, found.stop_reason) == (expected.tokens, "length")
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)


@jax.jit
def _logits(m, tokens):
    return m(tokens)


# The cache


def contents(served: Engine, of_draft: bool = True) -> dict:
    """Notes of requests that give their pages back: tokens in the cache -> each array of the cache, by token.

    Those of a draft, if there is one and they are asked for, come last.
    """
    notes, owner = {}, allocator_of(served)
    release = owner.release

    def note(handle):
        tokens, pages = owner.tokens(handle), list(owner.pages_of(handle))
        if not tokens:
            return release(handle)
        cache = runner_of(served).state.cache
        by_token = lambda x: np.moveaxis(np.asarray(x)[:, pages], -2, 2).reshape(x.shape[0], len(pages) * SIZE, -1)
        stacks = [x for s in cache.stacks for x in (s.k, s.v, s.index_k) if x is not None]
        notes[tokens] = [by_token(x)[:, : len(tokens)] for x in stacks]
        if of_draft and hasattr(cache, "draft"):
            own = [by_token(x)[:, 1 : len(tokens)] for x in (cache.draft.k, cache.draft.v)]
            notes[tokens] += [*own, np.asarray(cache.edges)[pages][: len(tokens) // SIZE]]
        return release(handle)

    owner.release = note
    return notes


@pytest.mark.further  # against one reading: below
def test_the_cache_is_that_of_plain_decoding():
    """T19: after any acceptance the pages hold what they hold without: to the bit where all calls have one shape."""
    notes = []
    for drafter in (NONE, ALL, SOME, None):
        served = drafted(drafter) if drafter is not None else engine(model())
        notes.append(contents(served, of_draft=False))
        serve(served, WORK[0], WORK[1], WORK[3])
        serve(served, WORK[2])
        assert not preemptions(served)  # what a request gives back when it is preempted depends on the steps before
    for found in notes[1:3]:
        assert found.keys() == notes[0].keys()
        for tokens, arrays in found.items():
            for a, b in zip(arrays, notes[0][tokens], strict=True):
                np.testing.assert_array_equal(a, b)
    for tokens, arrays in notes[3].items():
        for a, b in zip(arrays, notes[0][tokens], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "history",
    ["hit", "fork", "truncate", *(pytest.param(x, marks=pytest.mark.further) for x in ("move", "preemption"))],
)
def test_the_drafts_cache_is_that_of_one_reading(history):
    """T16, T27: slots and edges of the draft, however the tokens came, are those of reading them all at once."""
    served = drafted(RANDOM)
    notes = contents(served)
    first = (prompt(40), params(21))
    if history == "preemption":
        serve(served, *WORK)
        assert preemptions(served)
    elif history == "hit":
        serve(served, first)
        for cut in (8, 16, 24, 33):
            serve(served, ((*prompt(40)[:cut], *prompt(30, seed=cut)), params(7)))
        assert served.pages["hit_tokens"] == 8 + 16 + 24 + 32
    else:
        handle = served.add(*first)
        for _ in range(5):
            served.step()
        poison(served)
        if history == "fork":
            served.copy(handle, params(30, temperature=1.0, seed=3))
        elif history == "truncate":
            served.truncate(handle, 3)
        else:
            snapshot = served.export(handle)
            served = drafted(RANDOM)
            notes = contents(served)
            serve(served, (prompt(20, seed=3), params(6)))
            served.import_request(snapshot)
        finish(served)
    assert notes
    for tokens, found in notes.items():
        for a, b in zip(found, _read_at_once(tokens), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@cache
def _read_at_once(tokens):
    served = drafted(RANDOM, prefill_chunk=128, pages=64)
    notes = contents(served)
    serve(served, ((*tokens, 0), params(1)))
    *stacks, k, v, edges = notes[(*tokens, 0)]
    count = len(tokens)
    return [*(x[:, :count] for x in stacks), k[:, : count - 1], v[:, : count - 1], edges[: count // SIZE]]


def test_a_draft_that_is_always_right_has_a_page_for_the_newest_token():
    """Rounds of nine tokens end where a page does: the slot of the token after it lies in the next page."""
    served = drafted(ALL)
    notes = contents(served)
    for length in (16, 17, 18, 19):  # in some round the newest token is the first of a page
        serve(served, (prompt(length, seed=length), params(1 + 5 * (1 + KNOWS))))
    assert served.drafting.acceptance == (1,) * KNOWS
    for tokens, found in notes.items():
        for name, a, b in zip(NAMES, found[-3:], _read_at_once(tokens)[-3:], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4, err_msg=f"{name} after {len(tokens)} tokens")


NAMES = ("keys of the draft", "values of the draft", "edges")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Other(Coached):
    """A drafter of the same fields and of another type."""


def test_drafters_that_differ_in_type_alone_have_programs_of_their_own():
    """To jax `Other` and `Coached` are one structure: by chance one gets the program compiled for the other."""
    drafters = ALL, Other(ALL.draft, sample=ALL.sample, right=ALL.right)
    assert jax.tree.structure(drafters[0]) == jax.tree.structure(drafters[1])  # else nothing is proven below
    types = []

    class Called(Exception):
        pass

    def call(*_, **statics):
        types.append(statics["types"])
        raise Called

    with mock.patch.object(device, "program", lambda *_: call):
        for drafter in drafters:
            served = drafted(drafter)
            served.add(prompt(3), params(2))
            with pytest.raises(Called):
                served.prefill()
    assert len(set(types)) == len(types) == 2, f"one program for two drafters: {types}"


# Sampled rows


@pytest.mark.further
def test_sampled_tokens_have_the_targets_distribution():
    """Third tokens of many requests through the engine's rounds, against all paths that lead to them; chi-square."""
    fake, count = FakeModel.random(3, FakeConfig(vocab_size=16), width=8), 1200
    shape = dict(pages=512, max_batch=128, prefill_rows=128, prefill_chunk=16, max_length=32)
    served = Engine(fake, **shape, draft=Knowing.of(8), draft_tokens=2)
    start, knobs = (3, 7, 1, 3, 9), dict(temperature=1.5, top_k=12)
    handles = [served.add(start, params(3, seed=i, **knobs)) for i in range(count)]
    results = served.run()
    assert 240 < served.drafting.accepted[0] < 960
    pairs = np.array([[*start, a, b] for a in range(16) for b in range(16)], np.int32)
    logits = np.asarray(_logits(fake, pairs), np.float64).reshape(16, 16, 7, 16)
    first, second, third = (_top(x, knobs) for x in (logits[0, 0, 4], logits[:, 0, 5], logits[:, :, 6]))
    for position, p in ((1, first @ second), (2, np.einsum("a,ab,abc->c", first, second, third))):
        counts = np.bincount([results[handle].tokens[position] for handle in handles], minlength=16)
        assert not counts[p == 0].any()
        assert ((counts - p * count)[p > 0] ** 2 / (p[p > 0] * count)).sum() < 44.3  # once in 10,000, of 15 degrees


@pytest.mark.further
def test_tokens_have_the_targets_distribution_where_the_draft_draws():
    """Eagle3 with `sample=True` in the engine's rounds; against all paths of first and second tokens."""
    count, knobs, start = 320, dict(temperature=1.3, top_k=5), prompt(5)
    served = drafted(RANDOM, prefix_cache=False)
    handles = [served.add(start, params(3, seed=1 + i, **knobs)) for i in range(count)]
    results = served.run()
    assert 30 < served.drafting.accepted[0] < count
    pairs_after = lambda ways: np.array([[*start, a, b] for a in ways for b in range(64)], np.int32)
    first = _top(np.asarray(_last_logits(model(), pairs_after(range(5))), np.float64)[0, 0], knobs)
    ways = np.flatnonzero(first)  # the five first tokens that are drawn at all, and all second ones after each
    pairs = pairs_after(ways)
    logits = np.asarray(_last_logits(model(), pairs), np.float64).reshape(len(ways), 64, 3, 64)
    second, third = _top(logits[:, 0, 1], knobs), _top(logits[:, :, 2], knobs)
    for position, p in ((1, first[ways] @ second), (2, np.einsum("a,ab,abc->c", first[ways], second, third))):
        drawn = np.bincount([results[handle].tokens[position] for handle in handles], minlength=64)
        assert not drawn[p == 0].any()
        kept = p * count > 5
        chi_square, limit = ((drawn - p * count)[kept] ** 2 / (p[kept] * count)).sum(), _limit(kept.sum() - 1)
        assert chi_square < limit, f"position {position}: chi-square {chi_square:.0f}, limit {limit:.0f}"


def _limit(degrees):
    """Return the value that a chi-square variable exceeds once in 10,000 times (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3


@jax.jit
def _last_logits(m, tokens):
    return m.unembed(m.hidden(tokens)[0][:, 4:])


def _top(logits, knobs):
    edge = np.sort(logits, axis=-1)[..., -knobs["top_k"], None]
    p = np.where(logits >= edge, np.exp((logits - logits.max(-1, keepdims=True)) / knobs["temperature"]), 0)
    return p / p.sum(-1, keepdims=True)


# What it costs


@pytest.mark.further
def test_nothing_compiles_after_warmup():
    """Any mix of requests, with greedy and sampled rows, hits, copies, truncations and moves."""
    rng, served, newest = np.random.default_rng(0), drafted(RANDOM), None
    served.warmup()
    with compilations() as seen:
        for step in range(40):
            if rng.random() < 0.4:
                sampled = float(rng.choice([0.0, 0.8]))
                asked = params(20, temperature=sampled)
                newest = served.add(prompt(int(rng.integers(1, 60)), seed=step % 3), asked)
            if newest is not None and served.reason(newest) == "unfinished" and rng.random() < 0.2:
                newest = served.import_request(served.export(newest)) if step % 2 else served.copy(newest)
            served.step()
            served.check()
        finish(served)
    assert seen == []
    assert served.drafting.forwards > 100


def test_a_draft_adds_its_pages():
    own, drawn = engine(model()), drafted(RANDOM)
    config = RANDOM.draft.config
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4 + config.hidden_size * 4 / SIZE
    assert drawn.bytes_per_token == own.bytes_per_token + per_token
    assert drafted(PromptLookup()).bytes_per_token == own.bytes_per_token


# Prompt lookup


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (4, 1), (3, 2)]))
def test_lookup_finds_the_longest_latest_end(seed, lengths):
    rng, (longest, shortest) = np.random.default_rng(seed), lengths
    tokens, last = rng.integers(0, 3, (2, 20)).astype(np.int32), rng.integers(0, 20, 2).astype(np.int32)
    found = _lookup(PromptLookup(longest, shortest), tokens, last)
    for row in range(2):
        assert found[row].tolist() == _expected(tokens[row].tolist(), int(last[row]), longest, shortest)


def _expected(tokens, last, longest, shortest, count=5):
    agree = lambda at: next((n for n in range(longest) if at < n or tokens[at - n] != tokens[last - n]), longest)
    best = max(((agree(at), at) for at in range(last)), default=(0, 0))
    if best[0] < shortest:
        return [-1] * count
    return [tokens[best[1] + 1 + i % (last - best[1])] for i in range(count)]


@jax.jit
def _lookup(drafter, tokens, last):
    fake, rows = FakeModel.random(), len(tokens)
    proposal, _ = drafter.propose(
        fake,
        fake.new_cache(pages=1, batch=rows, blocks=1),
        jnp.asarray(tokens),
        jax.tree.map(jnp.asarray, SamplingParams.stack([Sampling()] * rows)),
        newest_token=jnp.zeros(rows, jnp.int32),
        lengths=jnp.asarray(last),
        is_live=jnp.ones(rows, bool),
        count=5,
    )
    return proposal.tokens


@pytest.mark.further
def test_lookup_pays_on_text_that_repeats():
    fake, text = FakeModel.random(), prompt(7) * 4
    served = Engine(fake, pages=16, max_batch=1, prefill_chunk=16, draft=PromptLookup(), draft_tokens=4)
    (found,) = serve(served, (text, params(100)))
    best = np.asarray(_logits(fake, np.array([[*text, *found.tokens]], np.int32))).argmax(-1)[0]
    assert found.tokens == best[len(text) - 1 : -1].tolist()
    assert served.drafting.mean_length > 1.4


# Refusals


def test_refusals():
    with pytest.raises(ValueError, match="hidden_size is 48, the target's 40"):
        Engine(tiny.model(tiny.config("dM", hidden_size=40)), pages=4, draft=RANDOM)
    with pytest.raises(ValueError, match="draft_tokens = 9: at most 8"):
        engine(model(), draft=RANDOM, draft_tokens=9)
    with pytest.raises(ValueError, match="device_pages with a draft"):
        drafted(PromptLookup(), device_pages=20)
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        PromptLookup(2, 3)
    served = engine(model())
    handle = served.add(*WORK[0])
    served.step()
    with pytest.raises(ValueError, match="its draft is None"):
        drafted(RANDOM).import_request(served.export(handle))
