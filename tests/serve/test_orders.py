"""Between the protocol and the engine: orders, and what is told of an answer."""

from types import SimpleNamespace

import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from support.embedded import TOKENIZER

from m3jax.decoding import Params, Sampling
from m3jax.serve.worker.answers import Answer, StopFinder, top_logprobs
from m3jax.serve.worker.orders import Order, OrderReader, in_protocol_names
from m3jax.serve.worker.tensors import MediaReader

pytestmark = pytest.mark.usefixtures("unchecked")  # tokenizers and engines here are none


class Guides:
    """Constraints that say what they were asked for."""

    def guide(self, *asked):
        return asked


TEXTS = SimpleNamespace(fewest_tokens=lambda text: len(text) // 2, encode=lambda text: list(range(len(text))))


def reader() -> OrderReader:
    """One of a model with the EOS ids 1 and 2, for requests of 20 tokens and at most four stop ids."""
    return OrderReader(TEXTS, (1, 2), 20, 4, Guides(), MediaReader({}))


def ordered(prompt=(5, 6, 7), choice=None, text=None, **knobs) -> Order:
    request = pb.GenerateRequest(stream=knobs.pop("stream", False))
    if text is None:
        request.tokenized.input_ids.extend(prompt)
    else:
        request.text = text
    for name, value in knobs.items():
        field = getattr(request.sampling_params, name)
        if isinstance(value, dict):
            field.update(value)
        elif isinstance(value, list):
            field.extend(value)
        else:
            setattr(request.sampling_params, name, value)
    if choice is not None:
        request.sampling_params.choice.choices.extend(choice)
    return reader().read(request)


def test_what_is_not_said_is_the_protocols_default():
    found = ordered()
    sampling = found.params.sampling
    assert found.params == Params(max_new_tokens=17, sampling=sampling, stop_ids=(1, 2), min_tokens=0, top_logprobs=0)
    assert sampling == Sampling(temperature=1.0, seed=sampling.seed) and found.params.prompt_logprobs is None
    assert (found.prompt, found.media, found.sent_media, found.guide, found.n) == ((5, 6, 7), None, (), None, 1)
    assert (found.stop, found.wants_logprobs, found.is_streamed) == ((), False, False)
    seeds = {ordered().params.sampling.seed for _ in range(64)}  # each of the 32 bits is drawn
    assert len(seeds) > 60 and all(0 <= seed < 2**32 for seed in seeds) and max(seeds) >= 2**31 > min(seeds)


def test_every_knob_goes_where_it_belongs():
    found = ordered(
        temperature=0.0, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=0.75, logit_bias={4: -2.0}, seed=-1, max_tokens=9, min_tokens=2, logprobs=0,
        prompt_logprobs=0, stop=["a", "bc"], stop_token_ids=[7, 2], n=3, skip_special_tokens=True, stream=True,
    )  # fmt: skip
    assert found.params == Params(
        max_new_tokens=9, stop_ids=(1, 2, 7), min_tokens=2, top_logprobs=0, prompt_logprobs=0,
        sampling=Sampling(
            temperature=0.0, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=-0.5,
            frequency_penalty=0.75, logit_bias={4: -2.0}, seed=2**32 - 1,
        ),
    )  # fmt: skip
    assert (found.stop, found.n, found.wants_logprobs, found.is_streamed) == (("a", "bc"), 3, True, True)
    assert found.skip_special_tokens and not ordered(skip_special_tokens=False).skip_special_tokens
    assert ordered(ignore_eos=True).params.stop_ids == () and ordered(logprobs=5).params.top_logprobs == 5
    assert (
        ordered(seed=2**31 - 1).params.sampling.seed == 2**31 - 1 and ordered(max_tokens=1).params.max_new_tokens == 1
    )
    assert ordered(stop_token_ids=[7, 8], ignore_eos=True).params.stop_ids == (7, 8)
    assert ordered(range(25)).params.max_new_tokens == 1  # the engine says that there is no room


def test_prompts_are_encoded_and_cut_from_the_left():
    assert ordered(text="abcd").prompt == (0, 1, 2, 3)
    assert ordered(text="a" * 41).prompt == tuple(range(41))  # which may have no more than fit
    with pytest.raises(ValueError, match="the prompt has 21 tokens or more, and the request can have 20"):
        ordered(text="a" * 42)
    cut = lambda most, **knobs: ordered(range(100, 130), truncate_prompt_tokens=most, **knobs).prompt
    assert cut(1) == (129,) and cut(29) == tuple(range(101, 130)) and cut(40) == tuple(range(100, 130))
    assert (
        cut(-1) == tuple(range(111, 130)) and cut(-1, max_tokens=19) == (129,) and cut(-1, max_tokens=18) == (128, 129)
    )
    for most, knobs in ((0, {}), (-2, {}), (-1, {"max_tokens": 20})):
        with pytest.raises(ValueError, match=f"truncate_prompt_tokens = {most}: must be at least 1, or -1"):
            cut(most, **knobs)


def test_constraints_get_their_guide():
    assert ordered(regex="a+").guide == ("regex", "a+", (5, 6, 7), False)
    assert ordered(choice=["a", "b"], grammar_from_first_token=True).guide == ("choice", ["a", "b"], (5, 6, 7), True)
    with pytest.raises(ValueError, match="ignore_eos beside regex"):
        ordered(regex="a+", ignore_eos=True)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        (dict(stop_token_ids=[7, 8, 9]), "stop_token_ids: 5 ids with those of EOS, and this engine takes 4"),
        (dict(logprobs=-1), "logprobs = -1: must be from 0 to 20"), (dict(stop=["a", ""]), "cannot be empty"),
    ],
)  # fmt: skip
def test_orders_that_are_refused(knobs, says):
    with pytest.raises(ValueError, match=says):
        ordered(**knobs)
    assert ordered(stop_token_ids=[7, 8, 7, 1]).params.stop_ids == (1, 2, 7, 8)
    with pytest.raises(ValueError, match="the request has no prompt"):
        reader().read(pb.GenerateRequest())
    ranked = pb.GenerateRequest(data_parallel_rank=1)
    with pytest.raises(ValueError, match="data_parallel_rank = 1: this worker has rank 0 alone"):
        reader().read(ranked)
    error = in_protocol_names(ValueError("max_new_tokens = 0, stop_ids, top_logprobs; not max_new_tokens_x"))
    assert str(error) == "max_tokens = 0, stop_token_ids, logprobs; not max_new_tokens_x"


# What is told of an answer


def test_a_stop_string_is_found_where_the_whole_text_has_it():
    """At the token that completes the first of them, behind so many tokens as there must be."""
    rng = np.random.default_rng(0)
    ids = [TOKENIZER.encode(letter)[0] for letter in "ab"]
    for _ in range(150):
        text = [int(i) for i in rng.integers(0, 2, 9)]
        stops = ["".join("ab"[i] for i in rng.integers(0, 2, rng.integers(1, 5))) for _ in range(rng.integers(0, 3))]
        least = int(rng.integers(0, 5))
        finder = StopFinder(TOKENIZER.stream(), stops, least)
        for count in range(1, len(text) + 1):
            so_far = "".join("ab"[i] for i in text[:count])
            completed = [so_far.rfind(stop) for stop in stops if so_far.endswith(stop)]
            found = finder.push(ids[text[count - 1]])
            if count <= least or not completed:
                assert found is None or (not so_far.endswith(found) and count > least), (so_far, stops, least)
            else:
                assert found in stops and so_far.endswith(found) and so_far.rfind(found) == min(completed)
                break
            if found is not None:
                break


def event(tokens, reason=None, **generation) -> SimpleNamespace:
    generation = dict(cached_tokens=4, prompt_logprobs=(), drafted=6, accepted=5) | generation
    return SimpleNamespace(
        tokens=tuple(tokens), logprobs=[-t / 8 for t in tokens], top_logprobs=[{9: -0.5, t: -t / 8} for t in tokens],
        stop_reason=reason, cached_tokens=3, prompt_logprobs=({6: -0.25},) if generation.get("first") else (),
        generation=None if reason is None else SimpleNamespace(**generation),
    )  # fmt: skip


def told(events, *, is_streamed, stop=(), wants=True, prompt_logprobs=None, min_tokens=0):
    knobs = dict(top_logprobs=1, prompt_logprobs=prompt_logprobs, min_tokens=min_tokens)
    params = Params(max_new_tokens=9, sampling=Sampling.greedy(), **knobs)
    order = Order((5, 6), params, None, (), None, 1, tuple(stop), False, wants, is_streamed)
    answer = Answer(order, 2, TOKENIZER.stream())
    return [message for each in events for message in answer.messages(each)]


A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages_of_an_answer(is_streamed):
    """Chunks have what is new, where they were asked for; the last message has all ids, and says how it ended."""
    *chunks, last = told([event([A, B]), event([C], "length")], is_streamed=is_streamed)
    assert [list(each.chunk.token_ids) for each in chunks] == ([[A, B], [C]] if is_streamed else [])
    for each, count in zip(chunks, (2, 1), strict=is_streamed):
        chunk = each.chunk
        assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens, chunk.index) == (2, count, 3, 2)
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
        assert list(chunk.output_logprobs.token_logprobs) == [-t / 8 for t in chunk.token_ids]
        assert [list(top.token_ids) for top in chunk.output_logprobs.top_logprobs] == [[9]] * count
    end = last.complete
    assert (list(end.output_ids), end.finish_reason, end.index) == ([A, B, C], "length", 2)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (2, 3, 4)
    assert (end.spec_draft_tokens, end.spec_accepted_tokens) == (6, 5) and not end.HasField("input_logprobs")
    assert end.HasField("output_logprobs") == (not is_streamed)
    if not is_streamed:
        assert list(end.output_logprobs.token_logprobs) == [-t / 8 for t in (A, B, C)]
    (plain,) = told([event([A], "length")], is_streamed=False, wants=False)
    assert not plain.complete.HasField("output_logprobs")


@pytest.mark.parametrize(
    ("reason", "said"),
    [("length", "length"), ("stop_id", "stop"), ("aborted", "abort"), ("deadline", "abort"), ("nan", "error"),
     ("no_token", "error")],
)  # fmt: skip
def test_how_answers_end(reason, said):
    (message,) = told([event([A, B], reason)], is_streamed=False)
    assert message.complete.finish_reason == said
    matched = message.complete.WhichOneof("matched_stop")
    assert (matched, message.complete.matched_token_id) == (
        ("matched_token_id", B) if reason == "stop_id" else (None, 0)
    )


def test_what_is_behind_a_stop_string_does_not_count():
    for is_streamed in (False, True):
        *chunks, last = told([event([A, B, C]), event([A], "aborted")], is_streamed=is_streamed, stop=["ab"])
        assert [list(each.chunk.token_ids) for each in chunks] == [[A, B]] * is_streamed
        end = last.complete
        assert (list(end.output_ids), end.finish_reason, end.matched_stop_str) == ([A, B], "stop", "ab")
    (end,) = told([event([A, B], "stop_id")], is_streamed=False, stop=["b"])
    assert end.complete.matched_token_id == B and end.complete.finish_reason == "stop"  # it is no part of the text
    (end,) = told([event([A, B, A, B], "length")], is_streamed=False, stop=["b"], min_tokens=2)
    assert list(end.complete.output_ids) == [A, B, A, B] and end.complete.finish_reason == "stop"


def test_scores_of_a_prompt_come_once():
    """With the first chunk, or with the last message where there was none; the first token has no score."""
    known = ({6: -0.25, 9: -0.125},)
    first = event([A], first=True)
    messages = told([first, event([B], "length", prompt_logprobs=known)], is_streamed=True, prompt_logprobs=1)
    kinds = [getattr(message, message.WhichOneof("response")) for message in messages]
    assert [each.HasField("input_logprobs") for each in kinds] == [True, False, False]
    for is_streamed, events in ((False, [event([A], "length", prompt_logprobs=known)]),
                                (True, [event([], "aborted", prompt_logprobs=known)])):  # fmt: skip
        found = told(events, is_streamed=is_streamed, prompt_logprobs=1)[-1].complete.input_logprobs
        assert list(found.token_ids) == [5, 6]
        assert [each.HasField("value") for each in found.token_logprobs] == [False, True]
        assert found.token_logprobs[1].value == -0.25 and [list(t.token_ids) for t in found.top_logprobs] == [[], [6]]
    short = told([event([], "aborted")], is_streamed=False, prompt_logprobs=0)[-1].complete.input_logprobs
    assert list(short.token_ids) == [5]  # it was aborted before the second was known
    assert list(top_logprobs({3: -1.0, 4: -2.0}, 0).token_ids) == []
