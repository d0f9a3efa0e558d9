"""Knobs, guides and alternatives through the engine, against the definition a token at a time."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from support.compilations import compilations
from support.engines import preemptions
from support.fake_model import FakeModel
from support.generation import run, small_engine, tokens
from support.sampling_reference import edited

from m3jax.decoding import Params, PromptLookup, Sampling

V = 64
PROMPTS = [np.random.default_rng(0).integers(2, V, n).tolist() for n in (5, 1, 40, 17)]
NEW = 12
MODEL = FakeModel.random()
ASKED = [
    dict(repetition_penalty=1.4, presence_penalty=1.0, frequency_penalty=0.5),
    dict(logit_bias={7: 100, 9: 100}, frequency_penalty=2.0),
    dict(presence_penalty=-2.0, bad_words=[(3,), (5, 8), (8, 5, 5)], logit_bias={5: 9.0, 8: 9.0}),
    dict(frequency_penalty=-1.5, logit_bias={2: -100.0}),
]
_forward = jax.jit(FakeModel.__call__)


def params(new: int = NEW, stop_ids: Sequence[int] = (), settings: dict | None = None, **knobs) -> Params:
    sampling = Sampling(**{"temperature": 0} | knobs)
    return Params(max_new_tokens=new, sampling=sampling, stop_ids=tuple(stop_ids), **settings or {})


def logits_of(prompts: Sequence[Sequence[int]], news: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The logits that each new token was drawn from, of one call over everything."""
    rows = np.zeros((4, 64), np.int32)
    for row, prompt, new in zip(rows, prompts, news, strict=False):
        row[: len(prompt) + len(new)] = [*prompt, *new]
    found = np.asarray(_forward(MODEL, rows))
    return [x[len(p) - 1 : len(p) + len(n) - 1] for x, p, n in zip(found, prompts, news, strict=False)]


def check_greedy(prompts: Sequence[Sequence[int]], asked: Sequence[Params], news: Sequence[Sequence[int]], guides=None):
    """Each new token is the best one that the definition leaves."""
    for row, logits in enumerate(logits_of(prompts, news)):
        for count, token in enumerate(news[row]):
            new, settings = news[row][:count], asked[row]
            allowed = None if guides is None or guides[row] is None else guides[row].allowed(new)
            context = dict(prompt=prompts[row], new=new, stop_ids=settings.stop_ids, min_tokens=settings.min_tokens)
            x = edited(logits[count], settings.sampling, **context, allowed=allowed)
            assert token == x.argmax(), f"prompt {row}, new token {count}"


class Counting:
    """A guide that allows tokens of one residue, the next one after each; it notes what it was asked."""

    def __init__(self, modulus: int):
        self.modulus, self.asked = modulus, []

    def allowed(self, new: Sequence[int]) -> list[int]:
        return list(range(len(new) % self.modulus, V, self.modulus))

    def bits(self, new: Sequence[int]) -> np.ndarray:
        self.asked.append(tuple(new))
        return np.packbits(np.isin(np.arange(V), self.allowed(new)), bitorder="little").view("<u4").astype(np.uint32)


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "drafted"])
def test_greedy_tokens_are_those_of_the_definition(draft):
    """Whatever the chunks are, beside rows with other knobs, with proposals and without."""
    asked = [params(**knobs) for knobs in ASKED]
    news = tokens(run(small_engine(MODEL, prefill_chunk=16, draft=draft), PROMPTS, *asked))
    check_greedy(PROMPTS, asked, news)
    plain = tokens(run(small_engine(MODEL, prefill_chunk=16, draft=draft), PROMPTS, params()))
    assert all(new != other for new, other in zip(news, plain, strict=True)), "the knobs changed nothing"
    assert news[1][:4] in ([7, 9, 7, 9], [9, 7, 9, 7]) or news[1][0] in (7, 9)


@pytest.mark.further  # preemptions beside penalties: test_engine_lives.py
def test_a_request_that_gives_way_keeps_its_counts():
    """Prompt and continuation are told apart when a preempted request goes through prefill again."""
    asked = [params(40, frequency_penalty=0.6, presence_penalty=0.8, seed=s, temperature=1.0) for s in range(4)]
    small = small_engine(MODEL, pages=6, prefill_chunk=16, max_length=96)
    news = tokens(run(small, PROMPTS, *asked))
    assert preemptions(small) > 0
    assert news == tokens(run(small_engine(MODEL, prefill_chunk=16), PROMPTS, *asked))


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "drafted"])
def test_a_guide_is_asked_before_each_token_and_others_go_on(draft):
    served = small_engine(MODEL, prefill_chunk=16, draft=draft)
    served.warmup()
    guides = [Counting(3), None, Counting(2), None]
    asked = [params(6), params(NEW), params(6, temperature=0, frequency_penalty=1.0), params(NEW)]
    with compilations() as seen:
        handles = [served.add(p, a, guide=g) for p, a, g in zip(PROMPTS, asked, guides, strict=True)]
        calls = 0
        while served.busy:
            served.step()
            calls += 1
        results = [served.result(handle) for handle in handles]
    assert seen == [], "a guide or an alternative compiled something"
    news = tokens(results)
    check_greedy(PROMPTS, asked, news, guides)
    for guide, new in zip(guides, news, strict=True):
        if guide is not None:
            assert guide.asked == [tuple(new[:count]) for count in range(len(new))], "one mask a token, in order"
    plain = tokens(run(small_engine(MODEL, prefill_chunk=16, draft=draft), PROMPTS, params(NEW)))
    assert [news[1], news[3]] == [plain[1], plain[3]]
    assert 5 <= calls <= 8, "guided rows take one token in a call"


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "drafted"])
def test_a_mask_that_allows_nothing_ends_its_request(draft):
    class Ends(Counting):
        def bits(self, new):
            return super().bits(new) if len(new) < 3 else np.zeros(2, np.uint32)

    served = small_engine(MODEL, draft=draft)
    guided, other = served.add(PROMPTS[0], params(), guide=Ends(2)), served.add(PROMPTS[1], params())
    at_once = served.add(PROMPTS[2], params(bad_words=[(i,) for i in range(16)], logit_bias={}), guide=_Nothing())
    results = served.run()
    assert results[guided].stop_reason == "no_token" and len(results[guided].tokens) == 3
    assert results[other].stop_reason == "length" and len(results[other].tokens) == NEW
    assert results[at_once].stop_reason == "no_token" and results[at_once].tokens == []
    served.check()


class _Nothing:
    def bits(self, new):
        return np.zeros(2, np.uint32)


def test_a_guide_that_is_none_of_ours_is_named(unchecked):
    served = small_engine(MODEL)
    with pytest.raises(ValueError, match=r"guide is .*: give an object with a method bits"):
        served.add(PROMPTS[0], params(), guide=lambda new: None)

    class Wrong:
        def bits(self, new):
            return np.zeros(3, np.uint32)

    handle = served.add(PROMPTS[0], params(), guide=Wrong())
    with pytest.raises(ValueError, match=r"guide of request 0 gave uint32 \[3\]: a mask of 64 tokens is .* 2 uint32"):
        served.step()
    with pytest.raises(ValueError, match="has a guide, which a snapshot cannot hold"):
        served.export(handle)
    served.abort(handle)
    assert run(served, PROMPTS[1:2], params())[0].tokens


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "drafted"])
def test_alternatives_are_the_models_own(draft):
    """Before any knob, best first, with the token itself; only for who asks, and as many as it asks for."""
    served = small_engine(MODEL, draft=draft)
    warm = dict(logit_bias={11: 30.0}, seed=4, temperature=0.7)
    asked = [params(settings=dict(top_logprobs=k), **warm) for k in (3, 0, 20, 1)]
    results = run(served, PROMPTS, *asked)
    for logits, result, params_of_row in zip(logits_of(PROMPTS, tokens(results)), results, asked, strict=True):
        k = params_of_row.top_logprobs
        assert len(result.top_logprobs) == (len(result.tokens) if k else 0)
        for x, token, logprob, found in zip(logits, result.tokens, result.logprobs, result.top_logprobs, strict=False):
            log_p = np.asarray(jax.nn.log_softmax(x))
            best = np.argsort(-x, kind="stable")[:k].tolist()
            assert list(found) == (best if token in best else [*best, token])
            np.testing.assert_allclose(list(found.values()), log_p[list(found)], rtol=1e-4, atol=1e-4)
            assert found[token] == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "drafted"])
def test_no_stop_id_before_the_minimum(draft):
    served = small_engine(MODEL, draft=draft)
    free = run(served, PROMPTS[:1], params(settings=dict(min_tokens=0)))[0].tokens
    stop = free[2]
    assert run(served, PROMPTS[:1], params(stop_ids=[stop]))[0].tokens == free[: free.index(stop) + 1]
    asked = params(40, stop_ids=[stop], settings=dict(min_tokens=5), logit_bias={stop: 40.0})
    (result,) = run(served, PROMPTS[:1], asked)
    assert result.tokens.index(stop) == 5 and result.stop_reason == "stop_id", "drawn as soon as it may be"
    check_greedy(PROMPTS[:1], [asked], [result.tokens])


def test_the_models_eos_can_be_ignored():
    """Of the stop ids only those of the configuration: FakeModel's is 1."""
    served = small_engine(MODEL)
    bias = dict(logit_bias={1: 50.0})
    assert run(served, PROMPTS[:1], params(stop_ids=[1, 9], **bias))[0].stop_reason == "stop_id"
    (result,) = run(served, PROMPTS[:1], params(stop_ids=[1, 9], settings=dict(ignore_eos=True), **bias))
    assert result.tokens == [1] * NEW and result.stop_reason == "length"
    (result,) = run(served, PROMPTS[:1], params(stop_ids=[9], settings=dict(ignore_eos=True), logit_bias={9: 50.0}))
    assert result.tokens == [9], "another stop id still stops"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(settings=dict(min_tokens=-1)), "min_tokens = -1: must be an integer of at least 0"),
        (dict(settings=dict(min_tokens=NEW + 1)), "min_tokens = 13: at most max_new_tokens = 12"),
        (dict(settings=dict(ignore_eos=1)), "ignore_eos = 1: must be True or False"),
        (dict(settings=dict(top_logprobs=21)), "top_logprobs = 21: must be an integer from 0 to 20"),
        (dict(logit_bias={V: 1.0}), "logit_bias: 64 is no token id; they are integers from 0 to 63"),
        (dict(bad_words=[(1, V)]), "bad_words: 64 is no token id"),
    ],
)
def test_what_no_engine_serves(unchecked, change, message):
    served = small_engine(MODEL, max_biases=1, max_bad_words=1, max_top_logprobs=2)
    with pytest.raises(ValueError, match=message):
        served.add(PROMPTS[0], params(**change))
    assert not served.busy


@pytest.mark.further
def test_an_engine_without_room_runs_what_asks_for_none():
    served = small_engine(MODEL, max_biases=0, max_bad_words=0, max_top_logprobs=0)
    assert tokens(run(served, PROMPTS, params())) == tokens(run(small_engine(MODEL), PROMPTS, params()))


def test_copies_and_truncated_requests_keep_their_alternatives():
    served = small_engine(MODEL, steps_per_call=8)
    first = served.add(PROMPTS[0], params(30, settings=dict(top_logprobs=2)))
    served.step()
    copy, more = served.copy(first), served.copy(first, params(30, settings=dict(top_logprobs=1)))
    none = served.copy(first, params(30))
    served.truncate(first, 3)
    results = served.run()
    assert len(results[first].top_logprobs) == len(results[copy].top_logprobs) == 30
    for found, expected in zip(results[copy].top_logprobs, results[first].top_logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert [len(results[handle].top_logprobs) for handle in (more, none)] == [30, 0]
    assert results[none].tokens == results[first].tokens
