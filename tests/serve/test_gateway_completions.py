"""POST /v1/completions, /tokenize and what lm-eval asks for, with a scripted worker."""

import asyncio
import itertools
import json
import threading
from types import SimpleNamespace

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from support.embedded import TOKENIZER
from support.serving import NAME, ScriptedWorker, clients

from m3jax.serve.gateway.completions import completions, fields_of_completions
from m3jax.serve.gateway.fields import Fields
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.sampling import Model

MODEL = Model("m", 4096, 2048, (1,), can_see=False, block_size=16, defaults={})
PROMPTS = ("one", "one two three", "two")


def answered(prompt: int, index: int) -> list[int]:
    """The new tokens of a continuation: no two have the same."""
    return TOKENIZER.encode(f" {prompt} and {index}, well.")


class Scored:
    """A worker that tells a prompt's log-probabilities too: with its first message, or with its last ones alone."""

    def __init__(self, is_late: bool):
        self.is_late = is_late

    async def generate(self, request, notes=None):
        asked, ids = request.sampling_params, list(request.tokenized.input_ids)
        number = next(i for i, text in enumerate(PROMPTS) if TOKENIZER.encode(text) == ids)
        prompt = pb.InputLogProbs(token_ids=ids, token_logprobs=[pb.InputTokenLogProb(), *(
            pb.InputTokenLogProb(value=-token / 8) for token in ids[1:]
        )])  # fmt: skip
        news = [(index, answered(number, index)[: asked.max_tokens]) for index in range(asked.n)]
        halves = [(index, tokens[first : first + 3]) for first in (0, 3, 6) for index, tokens in news]
        for index, tokens in halves:
            chunk = pb.GenerateStreamChunk(index=index, token_ids=tokens)
            if asked.HasField("logprobs"):
                chunk.output_logprobs.token_ids.extend(tokens)
                chunk.output_logprobs.token_logprobs.extend(-token / 8 for token in tokens)
            if asked.HasField("prompt_logprobs") and not self.is_late:
                chunk.input_logprobs.CopyFrom(prompt)
            yield pb.GenerateResponse(chunk=chunk)
            await asyncio.sleep(0)  # the requests of other prompts have their turn
        for index, tokens in reversed(news):
            counts = dict(prompt_tokens=len(ids), cached_tokens=len(ids) - 1, completion_tokens=len(tokens))
            last = pb.GenerateComplete(index=index, output_ids=tokens, finish_reason="length", **counts)
            if asked.HasField("prompt_logprobs"):
                last.input_logprobs.CopyFrom(prompt)
            yield pb.GenerateResponse(complete=last)


@pytest.mark.usefixtures("unchecked")  # the gateway's workers are none
@pytest.mark.parametrize("is_late", [False, True])
def test_completions_of_every_kind_whole_and_streamed(is_late):
    """Prompts, continuations, echo, log-probabilities and no new token at all, by their definition.

    Completion i n + j is the prompt i, if it is echoed, and its continuation j; a prompt counts once.
    """
    gateway = Gateway(
        settings=Settings(), model=MODEL, workers=Scored(is_late), renderer=SimpleNamespace(tokenizer=TOKENIZER)
    )
    table = fields_of_completions(MODEL)

    async def asked(**fields):
        found = await completions(gateway, Fields(fields, table), "/v1/completions")
        return found if isinstance(found, dict) else "".join([event async for event in found])

    for count, n, echo, logprobs, most in itertools.product((1, 3), (1, 2), (False, True), (None, 2), (0, 9)):
        if most == 0 and not echo:
            continue  # it is refused
        case = (count, n, echo, logprobs, most)
        fields = dict(prompt=list(PROMPTS[:count]), n=n, echo=echo, logprobs=logprobs, max_tokens=most)
        prompts = [TOKENIZER.encode(text) for text in PROMPTS[:count]]
        expected = [
            (prompts[i] if echo else []) + (answered(i, j)[:most] if most else [])
            for i in range(count)
            for j in range(n)
        ]
        texts = [TOKENIZER.decode(ids) for ids in expected]
        whole = asyncio.run(asked(**fields))
        assert [choice["index"] for choice in whole["choices"]] == list(range(count * n)), case
        assert [choice["text"] for choice in whole["choices"]] == texts, case
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
        new = sum(len(answered(i, j)[:most]) for i in range(count) for j in range(n)) if most else 0
        usage, length = whole["usage"], sum(map(len, prompts))
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, new), case
        assert usage["total_tokens"] == length + new
        assert usage["prompt_tokens_details"] == {"cached_tokens": length - count}, case
        listed = [choice["logprobs"] for choice in whole["choices"]]
        if logprobs is None:
            assert listed == [None] * (count * n)
        else:
            first = [None] if echo else []  # a prompt's first token has no log-probability
            values = [[-token / 8 for token in ids] for ids in expected]
            assert [each["token_logprobs"] for each in listed] == [first + each[len(first) :] for each in values], case
            assert [each["text_offset"] for each in listed] == [
                [len(TOKENIZER.decode(ids[:place])) for place in range(len(ids))] for ids in expected
            ], case
        for wants_usage in (False, True):
            options = {"include_usage": True} if wants_usage else None
            events = asyncio.run(asked(**fields, stream=True, stream_options=options)).split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
            if wants_usage:
                last = chunks.pop()
                assert (last["choices"], last["usage"]) == ([], usage) and all(c["usage"] is None for c in chunks)
            else:
                assert not any("usage" in chunk for chunk in chunks)
            parts = [
                [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
                for index in range(count * n)
            ]
            assert ["".join(part["text"] for part in of_one) for of_one in parts] == texts, case
            reasons = [[part["finish_reason"] for part in of_one] for of_one in parts]
            assert all(of_one[-1] == "length" and set(of_one[:-1]) <= {None} for of_one in reasons), case
            assert most == 0 or (logprobs is not None and echo and is_late) or min(map(len, parts)) > 2  # as they come
            early = [part for of_one in parts for part in of_one[:-1]]
            assert all(part["text"] or (part["logprobs"] or {}).get("tokens") for part in early), case  # none is empty
            if logprobs is None:
                assert all(part["logprobs"] is None for of_one in parts for part in of_one)
            else:
                joined = [
                    {name: [x for part in of_one for x in part["logprobs"][name]] for name in of_one[0]["logprobs"]}
                    for of_one in parts
                ]
                assert joined == listed, case


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": "a" * 70_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 4, "n": 3}, "best_of"),
    ],
)
def test_bad_fields(scripted, fields, name):
    server, _ = scripted
    with pytest.raises(clients.openai.BadRequestError) as raised:
        server.openai.completions.create(**{"model": NAME, "prompt": "a"} | fields)
    assert raised.value.param == name


@pytest.mark.parametrize("best_of", [None, 1, 3])
def test_all_answers_that_are_drawn_come_back(scripted, best_of):
    answer = scripted[0].openai.completions.create(model=NAME, prompt="a", n=3, best_of=best_of)
    assert len(answer.choices) == 3


def test_one_of_several_is_refused(scripted):
    """The others end with it, at once, and nothing is left running."""
    server, worker = scripted
    worker.gate, worker.tokens_per_chunk = threading.Event(), 1

    async def generate(request, **_):
        if request.tokenized.input_ids == TOKENIZER.encode("b"):
            await asyncio.sleep(0.1)
            raise ValueError("seed: not this one")
        async for response in ScriptedWorker.Generate(worker, request):
            yield response

    worker.Generate = generate
    try:
        for stream in (False, True):
            status, _, text = server.ask("/v1/completions", {"prompt": ["a", "b", "a"], "stream": stream})
            assert "seed: not this one" in text and status == (200 if stream else 400)
    finally:
        del worker.Generate
    assert len(worker.requests) == len(worker.left) == 4


def test_ids_that_are_made_text_are_of_the_vocabulary_and_fit_into_the_context(scripted):
    """Which is no limit of the ids themselves, nor the vocabulary of their number."""
    server, _ = scripted
    for ids in ([2047], [100] * 4096, []):
        status, _, text = server.ask("/detokenize", {"tokens": ids})
        assert status == 200 and json.loads(text)["prompt"] == TOKENIZER.decode(ids, skip_special_tokens=False)
    for ids, says in (([2048], "integers from 0 to 2047"), ([0] * 4097, "4097 token ids, and the model's context is")):
        status, _, text = server.ask("/detokenize", {"tokens": ids})
        assert status == 400 and says in text


def test_tokenize(scripted):
    """What lm-eval and llama.cpp's clients send; what is tokenized comes back as it was."""
    server, _ = scripted
    post = lambda path, body: server.openai.post(f"{server.url}{path}", body=body, cast_to=object)
    text = "A €, a 🙂 and ]~b]ai."
    answer = post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert answer["tokens"] == TOKENIZER.encode(text) and answer["count"] == len(answer["tokens"])
    assert post("/detokenize", {"tokens": answer["tokens"]})["prompt"] == text
    pieces = post("/tokenize", {"content": "a b", "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == TOKENIZER.encode("a b")
    assert "".join(piece["piece"] for piece in pieces) == "a b"
    messages = [{"role": "user", "content": "Hi"}]
    count = post("/tokenize", {"messages": messages})["count"]
    assert count == server.openai.chat.completions.create(model=NAME, messages=messages).usage.prompt_tokens
    info = server.ask("/tokenizer_info")[2]
    assert '"eos_token":"[e~["' in info and "chat_template" in info
    assert server.openai.models.list().data[0].id == NAME
    assert server.openai.models.retrieve(NAME).id == NAME
    with pytest.raises(clients.openai.NotFoundError):
        server.openai.models.retrieve("other")
