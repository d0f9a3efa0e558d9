"""The log-probabilities of a prompt's own tokens: the log-softmax of the model's logits, however it is served."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from support import tiny
from support.compilations import compilations
from support.engines import CONFIG, QUICK, SHAPE, finish, params, prompt, quick

import m3jax
from m3jax.decoding import Engine, Params, Sampling
from m3jax.decoding.engine import Snapshot
from m3jax.model import M3


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    with quick():
        yield


@cache
def model() -> M3:
    return tiny.model(CONFIG)


def asked(new: int = 3, prompt_logprobs: int | None = 2, **knobs) -> Params:
    sampling = Sampling(**{"temperature": 0.0} | knobs)
    return Params(max_new_tokens=new, sampling=sampling, prompt_logprobs=prompt_logprobs)


def engine(**changes) -> Engine:
    return Engine(model(), **SHAPE | changes)


@cache
def log_softmax(tokens: tuple[int, ...]) -> np.ndarray:
    """[T V]"""
    row = np.zeros((1, 64), np.int32)  # one program for texts of all lengths
    row[0, : len(tokens)] = tokens
    return np.asarray(_log_softmax(model(), row))[: len(tokens)]


@partial(jax.jit, compiler_options=QUICK)
def _log_softmax(model, row):
    return jax.nn.log_softmax(model(row)[0])


def assert_right(found: list[dict[int, float]], tokens: tuple[int, ...], count: int = 2) -> None:
    """Fail unless these are, for each token but the first, the `count` best in its place and the token itself."""
    assert len(found) == len(tokens) - 1
    for of_place, token, log_p in zip(found, tokens[1:], log_softmax(tokens), strict=False):
        best = np.argsort(-log_p, kind="stable")[:count].tolist()
        assert list(of_place) == (best if token in best else [*best, token])
        np.testing.assert_allclose(list(of_place.values()), log_p[list(of_place)], rtol=0, atol=2e-5)


def test_they_are_the_models_log_softmax():
    """In chunks of 12 that end within a page, beside requests that ask for fewer or for none; one token has none.

    An engine that was told of them compiles nothing after warm-up.
    """
    served = engine(prompt_logprobs=True)
    served.warmup()
    lengths = {1: 2, 2: 0, 8: 2, 9: 20, 50: 2}
    with compilations() as seen:
        handles = {served.add(prompt(length), asked(2, count)): (length, count) for length, count in lengths.items()}
        plain = served.add(prompt(31), params(4))
        finish(served)
    assert seen == []
    for handle, (length, count) in handles.items():
        assert_right(served.result(handle).prompt_logprobs, prompt(length), count)
    assert served.result(plain).prompt_logprobs == []


def test_a_known_beginning_is_computed_again():
    """Pages that are there say nothing of their tokens' scores; new tokens are those of the known pages."""
    served = engine()
    first = served.add(prompt(40), params(3))
    served.run()
    second, third = served.add(prompt(40), asked()), served.add(prompt(40), params(3))
    results = served.run()
    assert results[second].cached_tokens == 0 and results[third].cached_tokens > 0
    assert results[second].tokens == results[third].tokens == results[first].tokens
    assert_right(results[second].prompt_logprobs, prompt(40))
    served.check()


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_group_has_them_once(rounds):
    """One prefill for all; who computes it may be aborted: the next one begins it again."""
    served = engine()
    handles = served.add(prompt(50), asked(temperature=1.0), n=3)
    for _ in range(rounds):
        served.step()
    if rounds:
        served.abort(handles[0])
    finish(served)
    for handle in handles[1:]:
        assert_right(served.result(handle).prompt_logprobs, prompt(50))
    assert served.timings.prompt_tokens == (50 + 2 if not rounds else 24 + 50 + 1)


def test_they_go_where_their_request_goes():
    """A request that moves while its prompt is read, copies of it, and requests that had to give their pages back."""
    served = engine()
    moving = served.add(prompt(50), asked(20))
    served.step()
    snapshot = Snapshot.from_bytes(served.export(moving).to_bytes())
    assert snapshot.cached == len(snapshot.prompt_logprobs) == 12
    moved = served.import_request(snapshot)
    crowd = [served.add(prompt(60, seed=seed), asked(40)) for seed in range(3)]
    while len(served.result(moving).tokens) < 1:
        served.step()
    copies = [served.copy(moving), served.copy(moving, asked(20, prompt_logprobs=1))]
    finish(served)
    for handle in (moving, moved, copies[0]):
        assert_right(served.result(handle).prompt_logprobs, prompt(50))
    assert_right(served.result(copies[1]).prompt_logprobs, prompt(50), count=1)
    for seed, handle in enumerate(crowd):
        assert_right(served.result(handle).prompt_logprobs, prompt(60, seed=seed))
    assert sum(served.result(handle).timings.preemptions for handle in (moving, moved, *copies, *crowd)) > 0


def test_new_weights_have_their_own():
    served = engine()
    handle = served.add(prompt(50), asked(20))
    while not served.result(handle).tokens:
        served.step()
    other = tiny.model(CONFIG, seed=1)
    served.update(other, live="keep")
    found = served.run()[handle].prompt_logprobs
    expected = m3jax.score(other, prompt(50))
    chosen = [of_place[token] for of_place, token in zip(found, prompt(50)[1:], strict=True)]
    np.testing.assert_allclose(chosen, expected, rtol=0, atol=2e-5)


@pytest.mark.further
def test_in_the_invariant_mode_they_are_the_bits_of_a_score():
    """In chunks beside other prompts: what `score` gives of the texts in one chunk."""
    of_bits, lengths = tiny.model(CONFIG, dtype="bfloat16").with_invariance(), (50, 9, 30)
    served, rows = Engine(of_bits, **SHAPE), np.zeros((3, 50), np.int32)
    handles = [served.add(prompt(length), asked(1)) for length in lengths]
    results = served.run()
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = prompt(length)
    expected = m3jax.score(of_bits, rows, lengths)
    for row, handle, length in zip(expected, handles, lengths, strict=True):
        scores = zip(results[handle].prompt_logprobs, prompt(length)[1:], strict=True)
        assert [of_place[token] for of_place, token in scores] == row[: length - 1].tolist()


def test_what_is_refused(unchecked):
    served = engine(max_top_logprobs=4)
    with pytest.raises(ValueError, match="prompt_logprobs = 5: this engine gives 4"):
        served.add(prompt(3), asked(prompt_logprobs=5))
    with pytest.raises(ValueError, match="prompt_logprobs = -1: must be an integer from 0 to 20, or None"):
        served.add(prompt(3), asked(prompt_logprobs=-1))
