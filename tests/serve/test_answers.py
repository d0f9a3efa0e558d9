"""A worker's tokens as answers, by hand: counts, joined texts, calls that are left out, and what is logged of them."""

import asyncio
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from support.embedded import TOKENIZER
from support.media import blank_image, blank_video

from m3jax.media import PlaceholderIds, expand_tokens
from m3jax.serve.gateway import gateway as gateway_module
from m3jax.serve.gateway.answers import (
    MOST_JOINED,
    Answer,
    AnswerReader,
    Ask,
    CallRule,
    End,
    PlainText,
    TokenLogprob,
    Usage,
    news_of,
    now,
    token_text,
)
from m3jax.serve.gateway.completions import listed_logprobs
from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.journal import Journal
from m3jax.serve.gateway.prompts import EncodedPrompt, Medium, Renderer
from m3jax.text import Event, OutputParser, StoppableText

IDS = PlaceholderIds.of_tokenizer(TOKENIZER)
ANY_CALLS = CallRule()


class Events(OutputParser):
    """A parser that makes of each text what it was told to."""

    def __init__(self, *events):
        self._events = list(events)

    def feed(self, text):
        return self._events.pop(0) if self._events else []

    def finish(self, is_cut=False):
        return [Event("content", "cut" if is_cut else "whole")]


def answer(parser, stop=(), stop_ids=(), rule=ANY_CALLS) -> Answer:
    return Answer(0, StoppableText(TOKENIZER.stream(), stop), parser, frozenset(stop_ids), rule)


def test_tokens_of_reasoning_are_counted():
    """From the token that begins it to the one before it ends; a call's arguments and nothing leave it as it is."""
    reasoning, content, call = Event("reasoning", "a"), Event("content", "b"), Event("tool_call", index=0, name="f")
    fed = [
        ([], 0), ([reasoning], 1), ([], 2), ([reasoning, content], 2), ([], 2), ([content, reasoning], 3),
        ([Event("arguments", "{", index=0)], 4), ([Event("tool_call_end", index=0)], 5), ([call], 5), ([], 5),
    ]  # fmt: skip
    whole = answer(Events(*(events for events, _ in fed)))
    for number, (_, count) in enumerate(fed):
        whole.push([100 + number], [])
        assert whole.reasoning_tokens == count, number
    *_, end = whole.end("stop", Usage(7, 3, 10))
    assert end.usage == Usage(7, 3, 10, 5)
    at_once = answer(Events(*(events for events, _ in fed)))
    at_once.push(range(100, 100 + len(fed)), [])
    assert at_once.reasoning_tokens == 5


def pushed(events) -> list[Event]:
    """The news of an answer of which so many events come at once."""
    piece = answer(Events(events)).push([100], [])
    return [] if piece is None else list(piece.events)


def test_texts_of_one_kind_are_joined_up_to_a_length():
    """Nothing is lost or moved, no joined text is longer than it may be, and no two neighbours could be one."""
    rng = np.random.default_rng(0)
    kinds = ("content", "reasoning", "tool_call", "arguments", "tool_call_end")
    for seed in range(200):
        chosen = rng.choice(len(kinds), size=rng.integers(0, 30), p=(0.45, 0.3, 0.05, 0.1, 0.1))
        most = (3, 120, 260)[seed % 3]
        events = [Event(kinds[i], "x" * int(rng.integers(1, most)) if i < 2 else "y", index=0) for i in chosen]
        joined = pushed(events)
        is_text = lambda event: event.kind in ("content", "reasoning")
        runs = lambda found: [
            (kind, "".join(event.text for event in run))
            for kind, run in itertools.groupby(found, lambda event: event.kind)
        ]
        assert runs(joined) == runs(events)
        assert [event for event in joined if not is_text(event)] == [event for event in events if not is_text(event)]
        begins = list(itertools.accumulate((len(e.text) for e in events if is_text(e)), initial=0))
        place = 0
        for event, following in itertools.zip_longest(joined, joined[1:]):
            if not is_text(event):
                continue
            assert len(event.text) <= MOST_JOINED or place + len(event.text) == begins[begins.index(place) + 1]
            place += len(event.text)
            if following is not None and following.kind == event.kind:
                first = begins[begins.index(place) + 1] - place  # of the texts that the next was made of
                assert len(event.text) + first > MOST_JOINED
    edge = [Event("content", "a" * 150), Event("content", "b" * 50), Event("content", "c")]
    assert [len(event.text) for event in pushed(edge)] == [200, 1] and MOST_JOINED == 200
    between = [Event("arguments", "{", index=0), *edge[:2]]
    assert [event.text for event in pushed(between)] == ["{", "a" * 150 + "b" * 50]
    assert [len(e.text) for e in pushed([*edge[:1], Event("reasoning", "r"), *edge[1:]])] == [150, 1, 51]


def test_calls_beyond_what_a_rule_allows_are_left_out():
    events = [Event("content", "a"), *(Event("tool_call", index=index) for index in range(3))]
    kept = lambda most: [event.index for event in CallRule(most).allowed(events)]
    assert [kept(most) for most in (None, 0, 1, 2, 3)] == [
        [None, 0, 1, 2], [None], [None, 0], [None, 0, 1], [None, 0, 1, 2],
    ]  # fmt: skip
    ends = [Event("tool_call_end", index=1)]
    for most, reason in ((1, "stop"), (2, "tool_calls"), (None, "tool_calls")):
        one = answer(Events(ends), rule=CallRule(most))
        one.push([100], [])
        assert one.end("stop", Usage())[-1].reason == reason
        cut = answer(Events(ends), rule=CallRule(most))
        cut.push([100], [])
        assert cut.end("length", Usage())[-1].reason == "length"


def test_counts_of_continuations_add_up_and_a_prompt_counts_once():
    assert Usage(7, 3, 10, 4) + Usage(7, 5, 20, 1) == Usage(7, 5, 30, 5)
    assert Usage() + Usage(7, 5, 20, 1) == Usage(7, 5, 20, 1) + Usage() == Usage(7, 5, 20, 1)


def texts(pieces) -> str:
    return "".join(event.text for piece in pieces if piece is not None for event in getattr(piece, "events", ()))


def test_the_token_that_ends_an_answer_has_no_text():
    """Unless another follows, or the answer ends for another reason; a stop string ends it with what is before."""
    a, b, c = (TOKENIZER.encode(letter)[0] for letter in "abc")
    for tokens, reason, expected in (
        ([a, c], "stop", "a"), ([a, c], "length", "ac"), ([a, c, b], "stop", "acb"), ([c, c], "stop", "c"),
        ([c], "stop", ""), ([a, b], "length", "ab"),
    ):  # fmt: skip
        for sizes in ((len(tokens),), (1,) * len(tokens)):
            one, rest = answer(PlainText(), stop_ids=[c]), iter(tokens)
            pieces = [one.push(list(itertools.islice(rest, size)), []) for size in sizes]
            pieces += one.end(reason, Usage())
            assert texts(pieces) == expected and pieces[-1].reason == reason, (tokens, reason)
            assert one.tokens == tokens
    stopped = answer(PlainText(), stop=["b"])
    pieces = [stopped.push([a, b, c], []), *stopped.end("stop", Usage())]
    assert texts(pieces) == "a" and pieces[-1].stop_string == "b"
    behind = answer(Events([Event("reasoning", "r")]), stop=["b"])
    behind.push([a, b, c, c], [])
    assert behind.reasoning_tokens == 2  # what one call drew behind the stop string does not count


def test_an_answer_that_fails_says_so():
    for reason, status, code, pause in (("error", 500, "engine_error", None), ("abort", 503, "aborted", 5)):
        with pytest.raises(ApiError) as caught:
            answer(PlainText()).end(reason, Usage())
        error = caught.value
        assert (error.status, error.code) == (status, code)
        assert error.headers.get("Retry-After") == (None if pause is None else str(pause))


def scored(tokens, tops=()) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_ids=tokens, token_logprobs=[-token / 8 for token in tokens],
        top_logprobs=[pb.TopLogProbs(token_ids=[9, 8], values=[-0.5, -1.0]) for _ in tops],
    )  # fmt: skip


def test_what_is_new_in_a_response():
    """A chunk has new tokens alone, the last message all; its log-probabilities may be of all, or of the new."""
    chunk = pb.GenerateStreamChunk(token_ids=[3, 4], output_logprobs=scored([3, 4], [3]))
    expected = [TokenLogprob(3, -0.375, {9: -0.5, 8: -1.0}), TokenLogprob(4, -0.5, {})]
    assert news_of(chunk, "chunk", 5) == ([3, 4], expected)
    for listed, known, tokens in (([3, 4, 5], 1, [4, 5]), ([4, 5], 1, [4, 5]), ([3, 4, 5], 0, [3, 4, 5])):
        last = pb.GenerateComplete(output_ids=[3, 4, 5], output_logprobs=scored(listed))
        assert news_of(last, "complete", known) == (tokens, [TokenLogprob(t, -t / 8, {}) for t in tokens])
    fewer = pb.GenerateComplete(output_ids=[3, 4, 5], output_logprobs=scored([5]))
    assert news_of(fewer, "complete", 1) == ([4, 5], [])
    assert news_of(pb.GenerateComplete(output_ids=[3], output_logprobs=scored([])), "complete", 1) == ([], [])
    assert news_of(pb.GenerateComplete(output_ids=[3]), "complete", 0) == ([3], [])


def test_a_request_is_read_to_the_end_of_all_its_answers():
    """Prompt log-probabilities come first and once; an answer begins where it is first heard of."""
    request = pb.GenerateRequest()
    request.sampling_params.n = 2
    reader = AnswerReader(Ask(request=request, tokenizer=TOKENIZER, stop_ids=frozenset(), is_chat=False))
    a, b = (TOKENIZER.encode(letter)[0] for letter in "ab")
    prompt = pb.InputLogProbs(token_ids=[1, 2])
    chunk = pb.GenerateStreamChunk(token_ids=[a], index=1, input_logprobs=prompt, cached_tokens=6)
    first, piece = reader.read(pb.GenerateResponse(chunk=chunk))
    assert first == prompt and (piece.index, piece.cached, texts([piece])) == (1, 6, "a")
    with pytest.raises(ApiError, match="ended its stream too early"):
        reader.check_whole()
    for index, ids in ((1, [a, b]), (0, [b])):
        complete = pb.GenerateComplete(
            output_ids=ids, index=index, input_logprobs=prompt, finish_reason="stop", prompt_tokens=9, cached_tokens=6,
            completion_tokens=len(ids),
        )  # fmt: skip
        with pytest.raises(ApiError) as caught:
            reader.check_whole()
        assert (caught.value.status, caught.value.code) == (503, "worker_lost")
        piece, end = reader.read(pb.GenerateResponse(complete=complete))
        assert texts([piece]) == "b" and end == End(index, "stop", None, Usage(9, 6, len(ids)))
    reader.check_whole()


def test_log_probabilities_wait_for_the_text_they_are_of():
    held = answer(Events([], [Event("content", "ab")]))
    scores = [TokenLogprob(token, -1.0, {}) for token in (100, 101, 102)]
    assert held.push([100], scores[:1]) is None
    piece = held.push([101], scores[1:2])
    assert piece.logprobs == scores[:2] and piece.cached == 0
    piece, _ = held.end("stop", Usage(cached=4))
    assert (piece.logprobs, piece.cached) == ([], 4)
    silent = answer(PlainText(), stop_ids=[100])
    assert silent.push([100], scores[:1]) is None
    piece, _ = silent.end("stop", Usage())
    assert piece.logprobs == scores[:1] and not piece.events  # of the token that ended it, which has no text


def test_tokens_by_their_bytes():
    whole, part = TOKENIZER.encode("a")[0], TOKENIZER.encode("\N{BULLET}")[0]
    assert token_text(TOKENIZER, whole) == ("a", [97])
    assert token_text(TOKENIZER, part) in (
        ("•", [226, 128, 162]),
        ("bytes:\\xe2", [226]),
        ("bytes:\\xe2\\x80", [226, 128]),
    )
    with pytest.raises(ApiError, match="gave the token 99999999, which the tokenizer does not have"):
        token_text(TOKENIZER, 99999999)
    assert isinstance(now(), int) and now() > 1.7e9


def test_log_probabilities_of_a_completion_have_their_places_in_its_text():
    text = "All is well, all is well."
    ids = TOKENIZER.encode(text)
    nan = float("nan")
    tokens = [TokenLogprob(id, nan if i == 0 else -i / 4, {} if i else {5: -1.0}) for i, id in enumerate(ids)]
    for start in (0, 2):
        found = listed_logprobs(TOKENIZER, tokens, start, skip_special=True)
        assert found["tokens"] == [TOKENIZER.decode([id]) for id in ids[start:]]
        assert found["text_offset"] == [len(TOKENIZER.decode(ids[:i])) for i in range(start, len(ids))]
        assert found["token_logprobs"] == [None if i == 0 else -i / 4 for i in range(start, len(ids))]
        assert found["top_logprobs"][1] == {TOKENIZER.decode([ids[start + 1]]): -(start + 1) / 4}
    assert listed_logprobs(TOKENIZER, tokens, 0, True)["top_logprobs"][0] is None
    for top in ({ids[1]: -3.0}, {ids[1]: -0.125}):  # of two that are written alike the more probable is kept
        (named,) = listed_logprobs(TOKENIZER, [TokenLogprob(ids[1], -1.0, top)], 0, True)["top_logprobs"]
        assert named == {TOKENIZER.decode([ids[1]]): max(-1.0, *top.values())}


@pytest.mark.parametrize("reasons", [("stop", "length"), ("stop",), ("stop", None)])
def test_a_request_is_logged_once_all_of_it_has_come(tmp_path, reasons):
    path = tmp_path / "log"
    journal = Journal(path, {"weights": "w"})
    request = pb.GenerateRequest(request_id="r")
    request.sampling_params.n = 2

    async def responses():
        for index, reason in reversed(list(enumerate(reasons))):
            chunk = pb.GenerateStreamChunk(token_ids=[3], index=index, output_logprobs=scored([3]))
            yield pb.GenerateResponse(chunk=chunk)
            if reason is not None:
                last = pb.GenerateComplete(
                    output_ids=[3, 4], index=index, finish_reason=reason, output_logprobs=scored([3, 4])
                )
                yield pb.GenerateResponse(complete=last)

    async def read():
        return [response async for response in journal.kept(request, responses())]

    assert len(asyncio.run(read())) == 4 - (None in reasons) - 2 * (len(reasons) < 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # it is there before the file is closed
    assert lines[0] == {"server": {"weights": "w"}}
    if None in reasons or len(reasons) < 2:
        assert len(lines) == 1
    else:
        bits = [(-0.375).hex(), (-0.5).hex()]
        answers = [{"tokens": [3, 4], "logprobs": bits, "finish_reason": reason} for reason in reasons]
        assert lines[1] | {"request": ""} == {"request": "", "id": "r", "answers": answers}
    journal.close()
    Journal(path, {}).close()
    assert len(path.read_text().splitlines()) == len(lines) + 1  # lines are added


@pytest.mark.usefixtures("unchecked")  # the request and the workers are none
def test_progress_comes_before_the_first_news_and_where_it_has_changed(monkeypatch):
    """Its milliseconds are those since the request began."""
    monkeypatch.setattr(gateway_module, "_PROGRESS_SECONDS", 0.001)
    clock = iter([10.0, 10.25, 12.0])
    monkeypatch.setattr(gateway_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    own, looks, first = (
        gateway_module.Gateway(settings=gateway_module.Settings()),
        iter([None, (9, 2, 4), (9, 2, 4), None, (9, 2, 8)]),
        asyncio.Event(),
    )

    async def progress(name):
        found = next(looks, "none")
        if found == "none":
            first.set()
            return None
        return found

    async def run(ask, route):
        await first.wait()
        yield "one"
        yield "two"

    own.run, own.workers = run, SimpleNamespace(progress=progress)

    async def read():
        ask = SimpleNamespace(request=SimpleNamespace(request_id="a"))
        return [news async for news in own.run_with_progress(ask, "/x")]

    expected = [gateway_module.Progress(9, 2, 4, 250), gateway_module.Progress(9, 2, 8, 2000), "one", "two"]
    assert asyncio.run(asyncio.wait_for(read(), 10)) == expected


# Prompts with media


def expanded(ids, media) -> EncodedPrompt:
    """The prompt of a conversation that shows these media, where the template makes it these ids."""
    template = SimpleNamespace(render=lambda *_: "", encode_rendered=lambda *_: list(ids))
    processed = {each.digest: each.processed for each in media}

    async def process(kind, data, options):
        return processed[data], data

    async def read(kind, source):
        return source

    parts = [{"type": each.kind, each.kind: each.digest} for each in media]
    pool, sources = SimpleNamespace(process=process), SimpleNamespace(read=read)
    renderer = Renderer(TOKENIZER, template, pool, sources, can_see=True, context=4096)
    return asyncio.run(renderer.render([{"role": "user", "content": parts or "no medium"}], None, None))


@pytest.mark.usefixtures("unchecked")  # the template and what reads media are none
def test_media_stand_where_their_placeholders_did():
    """Of both kinds, in the order of the prompt: ids as of one expansion, and each span begins and ends with marks."""
    one, other, moving = blank_image(2, 4), blank_image(4, 4), blank_video(((2, 2, 2),), (0.5, 1.5))
    media = [Medium("image", one, "1"), Medium("video", moving, "2"), Medium("image", other, "3")]
    ids = [7, IDS.image, 8, 8, IDS.video, 9, IDS.image]
    found = expanded(ids, media)
    assert found.ids == expand_tokens(ids, [one, other], [moving], encode=TOKENIZER.encode, ids=IDS)
    images, videos = found.media
    assert list(images.mm_hashes) == ["1", "3"] and list(videos.mm_hashes) == ["2"]
    assert (images.im_token_id, videos.im_token_id) == (IDS.image, IDS.video)
    places = [(place.offset, place.length) for batch in (images, videos) for place in batch.mm_placeholders]
    assert places[0] == (1, one.tokens + 2) and sum(places[1]) == len(found.ids)
    assert places[2][0] == one.tokens + 2 + 3 and sum(places[2]) == places[1][0] - 1
    assert found.ids[places[1][0] - 1] == 9 and [found.ids[first] for first, _ in places[:2]] == [IDS.start] * 2
    request = pb.GenerateRequest()
    found.set_in(request)
    assert list(request.tokenized.input_ids) == found.ids
    assert request.mm_inputs == images and list(request.extra_mm_inputs) == [videos]


@pytest.mark.parametrize(
    ("kinds", "places"), [("i", "ii"), ("i", ""), ("ii", "i"), ("v", "i"), ("v", "vv"), ("iv", "v")]
)
@pytest.mark.usefixtures("unchecked")
def test_a_placeholder_that_no_medium_fills_is_refused(kinds, places):
    """Also a medium without one: each has its own, whatever a text writes."""
    of = {"i": Medium("image", blank_image(2, 2), "1"), "v": Medium("video", blank_video(((1, 2, 2),), None), "2")}
    ids = [7, *({"i": IDS.image, "v": IDS.video}[place] for place in places)]
    with pytest.raises(ApiError, match=re.compile(r"placeholders? for \d (image|video)s")):
        expanded(ids, [of[kind] for kind in kinds])
