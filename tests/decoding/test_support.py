"""The support of a draw: what the engine records of it, and the trainer's log-probabilities within it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.engines import SHAPE, prompt, quick

from m3jax.decoding import Engine, Generation, Params, PromptLookup, Sampling
from m3jax.decoding.sampling import SamplingParams, filtered_logits, logprob_of
from m3jax.decoding.support import logits_within, pack_support, unpack_support
from m3jax.train.rollouts import Episode, as_batch

VOCAB = 70  # the last of three words is not full
KNOBS = (dict(top_k=5), dict(top_p=0.7), dict(min_p=0.2), dict(top_k=9, top_p=0.6, temperature=0.7), {}, dict(top_k=1))
RECORDS = ("support", "drawn_logprobs")


def as_sets(bits: np.ndarray) -> list[set[int]]:
    """The numpy twin of `unpack_support`: bit i % 32 of word i // 32, one at a time."""
    return [{i for i in range(32 * len(row)) if int(row[i // 32]) >> (i % 32) & 1} for row in np.asarray(bits)]


def logprob_within(logits: np.ndarray, allowed: set[int], token: int, temperature: float) -> float:
    """The numpy twin of `logits_within`, in float64: one token's log-probability among those that are allowed."""
    x = {i: float(logits[i]) / temperature for i in allowed if i < len(logits)}
    largest = max(x.values())
    return x[token] - largest - np.log(sum(np.exp(value - largest) for value in x.values()))


@given(st.integers(0, 2**16), st.sampled_from((1, 31, 32, VOCAB)))
def test_a_set_comes_back_from_its_bits(seed, vocab):
    is_in = np.random.default_rng(seed).random((3, vocab)) < 0.4
    bits = np.asarray(pack_support(jnp.asarray(is_in)))
    assert as_sets(bits) == [set(np.flatnonzero(row).tolist()) for row in is_in]
    np.testing.assert_array_equal(unpack_support(jnp.asarray(bits), vocab), is_in)
    assert unpack_support(jnp.full_like(bits, -1), vocab).all()


@settings(max_examples=4)
@given(st.integers(0, 2**16), st.sampled_from(range(len(KNOBS))))
def test_within_the_support_stands_the_distribution_that_was_drawn_from(seed, knobs):
    """Value by numpy, and exactly no gradient for a token that could not have been drawn."""
    rng, temperature = np.random.default_rng(seed), KNOBS[knobs].get("temperature", 1.0)
    logits = rng.normal(0, 3, (2, VOCAB)).astype(np.float32)
    filtered = filtered_logits(jnp.asarray(logits), SamplingParams.stack([Sampling(**KNOBS[knobs])] * 2))
    bits = pack_support(filtered > -jnp.inf)
    np.testing.assert_array_equal(logits_within(jnp.asarray(logits), bits, temperature), filtered)
    allowed = as_sets(bits)
    tokens = jnp.asarray([min(of_row) for of_row in allowed], jnp.int32)
    read = lambda x: logprob_of(tokens, logits_within(x, bits, temperature))
    found, pull = jax.vjp(read, jnp.asarray(logits))
    for row in range(2):
        expected = logprob_within(logits[row], allowed[row], int(tokens[row]), temperature)
        assert float(found[row]) == pytest.approx(expected, abs=2e-5)
    (gradient,) = pull(jnp.ones(2))
    outside = ~np.asarray(unpack_support(bits, VOCAB))
    assert np.isfinite(gradient).all() and (np.asarray(gradient)[outside] == 0).all()
    assert (np.abs(np.asarray(gradient).sum(1)) < 1e-5).all()
    if KNOBS[knobs].get("top_k") == 1:  # one token, of probability 1 whatever its logit
        assert not found.any() and not gradient.any()


def draw(engine: Engine, knobs: int, new: int = 10) -> Generation:
    params = Params(max_new_tokens=new, sampling=Sampling(seed=3, **KNOBS[knobs]), record=RECORDS)
    handle = engine.add(prompt(30, seed=knobs), params)
    return engine.run()[handle]


def test_an_engine_records_what_its_tokens_were_drawn_from():
    """By each knob, in rounds with a draft: as the numpy twin has it of a plain forward pass.

    Steps without one, whose very bits a trainer reads in the invariant mode, are in tests/train/test_runs.py; that what
    was told to an engine compiles nothing later is in test_records.py.
    """
    model = tiny.model(tiny.config("M"))
    with quick():
        engine = Engine(model, **SHAPE, records=RECORDS, draft=PromptLookup(), draft_tokens=2)
        drawn = [draw(engine, knobs) for knobs in range(len(KNOBS))]
    forward = jax.jit(lambda model, tokens: model(tokens))
    for knobs, generation in enumerate(drawn):
        whole = [*prompt(30, seed=knobs), *generation.tokens]
        logits = np.asarray(forward(model, jnp.asarray([whole], jnp.int32)), np.float32)[0, 29:-1]
        allowed = as_sets(generation.records["support"])
        params = SamplingParams.stack([Sampling(**KNOBS[knobs])] * len(logits))
        expected = np.asarray(filtered_logits(jnp.asarray(logits), params)) > -np.inf
        assert allowed == [set(np.flatnonzero(row).tolist()) for row in expected]
        for place, token in enumerate(generation.tokens):
            temperature = KNOBS[knobs].get("temperature", 1.0)
            found = generation.records["drawn_logprobs"][place]
            assert found == pytest.approx(logprob_within(logits[place], allowed[place], token, temperature), abs=1e-4)
            assert found >= generation.logprobs[place] - 1e-5 or temperature != 1.0


def test_an_episode_without_the_record_is_said():
    episode = Episode((1, 2, 3), np.array([False, True, True]), np.float32([0, -1, -1]))
    with pytest.raises(ValueError, match="replay of support: an episode has no record"):
        as_batch([episode], 4, ("support",))
    full = replace(episode, support=np.full((3, 2), -1, np.int32))
    assert as_batch([full], 4, ("support",))["support"].shape == (1, 3, 2)
