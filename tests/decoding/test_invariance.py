"""The invariant mode: tokens and log-probabilities are, to the bit, those of the request alone in one chunk."""

from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.drafts import Coached, Knowing, draft
from support.engines import SHAPE, finish, params, preemptions, prompt, quick, serve
from support.fake_model import FakeModel

from m3jax.decoding import Engine, Generation
from m3jax.train.losses import token_logprobs

# Prompts of less than a page and of many, beyond J * P tokens; greedy, with a penalty, and sampled.
BASE = prompt(100, seed=9)
LIVES = [
    (prompt(5), {}),
    (prompt(1), dict(temperature=1.0, seed=1)),
    (
        prompt(17),
        dict(
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=0.3,
            logit_bias={3: 2.0, 8: -1.3},
            bad_words=((5,), (9, 11)),
        ),
    ),
    (BASE[:40], {}),
    (BASE[:61], dict(temperature=1.1, seed=3)),
    (BASE, dict(temperature=1.0, top_k=5, seed=4)),
    (BASE[:41], dict(temperature=0.8, top_p=0.9, seed=5)),
]
ROOM, MOST = 128, 24  # tokens of a request, and new ones among them
# What each engine has beside the shape that all have: rows, pages, chunks, drafts. Pages in host memory and weights in
# MXFP8 are held to these bits in tests/model and, as all that a request goes through, in test_engine_pairs.py.
ENGINES = {
    "batched": {},
    # What is proposed is drawn by the draft, or what the target will say.
    "draft": dict(
        draft=Coached.of(draft(), 2, 0, 1, 2, 0, 8, 1, sample=True),
        draft_tokens=2,
        max_batch=3,
        prefill_rows=1,
        prefill_chunk=20,
    ),
    # The same proposals without a draft's own layers, of which half as much is compiled.
    "known": dict(draft=Knowing.of(2, 0, 1, 2, 0, 8, 1), draft_tokens=2, max_batch=3, prefill_rows=1, prefill_chunk=20),
}


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    # Rows of at most 128 tokens: with pieces of 32 keys sums go over several of them, and over parts of the last.
    with quick(), mock.patch("m3jax.msa.schedules.lanes._PIECE", 32):
        yield


@cache
def model():
    return tiny.model(tiny.config("MM"), dtype="bfloat16")  # two layers, of which one is compiled


@cache
def served(name: str) -> Engine:
    """One engine for all examples: it is empty between them, but for its prefix cache."""
    return Engine(model(), **SHAPE | ENGINES[name], invariant=True)


@cache
def lonely() -> Engine:
    shape = dict(pages=16, max_batch=1, prefill_chunk=ROOM, steps_per_call=1, max_length=ROOM, max_stop_ids=4)
    return Engine(model(), **shape, prefix_cache=False, invariant=True)


@cache
def life(number: int) -> Generation:
    """All that request `number` can get, alone and in one chunk; with a lower limit it gets the beginning of it."""
    tokens, knobs = LIVES[number]
    return serve(lonely(), (tokens, params(min(MOST, ROOM - len(tokens)), **knobs)))[0]


def assert_same_bits(found: Generation, whole: Generation, what: str) -> None:
    count = len(found.tokens)
    assert found.tokens == whole.tokens[:count], what
    differing = np.flatnonzero(np.asarray(found.logprobs) != np.asarray(whole.logprobs[:count]))
    assert not differing.size, (
        f"{what}: log-probability of new token {differing[0]} is {found.logprobs[differing[0]]!r}, alone "
        f"{whole.logprobs[differing[0]]!r}; {differing.size} of {count} differ"
    )


ADD = st.tuples(st.just("add"), st.sampled_from(range(len(LIVES))), st.integers(3, 25))
STEP = st.tuples(st.just("step"), st.just(0), st.integers(1, 3))
OTHERS = st.tuples(
    st.sampled_from(("abort", "prefill", "truncate", "copy", "move")), st.integers(0, 9), st.integers(0, 30)
)


@pytest.mark.further  # what befalls a request, in pairs and to the bit: test_engine_pairs.py
@pytest.mark.parametrize("name", ["batched", "draft"])
@settings(max_examples=6)
@given(st.lists(ADD, min_size=2, max_size=4), st.lists(st.one_of(ADD, STEP, OTHERS), min_size=5, max_size=12))
def test_a_request_has_the_bits_that_it_has_alone(name, first, then):
    """Whatever is added, aborted, copied, taken back, moved, preempted or drafted beside it or for it."""
    engine, numbers = served(name), {}
    for what, which, size in (*first, *then):
        live = [handle for handle in numbers if engine.reason(handle) == "unfinished"]
        if what == "add":
            tokens, knobs = LIVES[which]
            numbers[engine.add(tokens, params(min(size, MOST, ROOM - len(tokens)), **knobs))] = which
        elif what == "step":
            for _ in range(size):
                engine.step()
        elif live:
            act(engine, what, live[which % len(live)], size, numbers)
    finish(engine)
    for handle, number in numbers.items():
        assert_same_bits(engine.result(handle), life(number), f"request {number} in {name}")
        engine.forget(handle)


def act(engine: Engine, what: str, handle: int, size: int, numbers: dict[int, int]) -> None:
    had, number = len(engine.result(handle).tokens), numbers[handle]
    if what == "abort":
        engine.abort(handle)
    elif what == "truncate":
        engine.truncate(handle, size % (had + 1))
    elif what == "prefill":
        engine.prefill()
    elif what == "move":
        snapshot = engine.export(handle)
        engine.abort(handle)
        numbers[engine.import_request(snapshot)] = number
    else:
        tokens, knobs = LIVES[number]
        limit = min(had + size + 1, ROOM - len(tokens), MOST)
        numbers[engine.copy(handle, params(limit, **knobs))] = number


def test_preempted_requests_have_their_bits():
    """Requests that the pool cannot hold together: the youngest gives its pages back and starts again."""
    engine = served("known")
    asked = [params(min(MOST, ROOM - len(tokens)), **knobs) for tokens, knobs in LIVES]
    results = serve(engine, *((tokens, how) for (tokens, _), how in zip(LIVES, asked, strict=True)))
    assert preemptions(engine)
    assert min(engine.drafting.accepted) > 0  # proposals that are what the model draws are taken
    for number, found in enumerate(results):
        assert_same_bits(found, life(number), f"request {number}")


@pytest.mark.further
def test_the_gradient_is_that_of_the_fast_mode():
    """The order of a sum is no part of the function."""
    tokens = jnp.asarray([BASE, BASE[::-1]], jnp.int32)
    run = jax.jit(jax.grad(lambda weights: jnp.sum(token_logprobs(weights, tokens)[:, :90])))
    weights = tiny.model(tiny.config("M"))
    expected, gradient = jax.device_get((run(weights), run(weights.with_invariance())))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(gradient), strict=True):
        scale = np.abs(a).max() + 1e-6
        np.testing.assert_allclose(b / scale, a / scale, rtol=0, atol=2e-4, err_msg=jax.tree_util.keystr(path))


def test_a_model_without_an_invariant_mode_is_refused():
    with pytest.raises(ValueError, match="invariant = True needs an M3, and the model is a FakeModel"):
        Engine(FakeModel.random(), **SHAPE, invariant=True)
