"""POST /v1/completions, /tokenize and what lm-eval asks for, with a scripted worker."""

import openai
import pytest
from support.embedded import TOKENIZER
from support.serving import NAME


def test_several_prompts(scripted):
    """Prompts may be texts or ids; completion i n + j is the j-th of prompt i, whole and as a stream."""
    server, worker = scripted
    worker.script = lambda request, index: f"{len(request.tokenized.input_ids)}, {index}."
    prompts = ["one", "one two three four five", [5, 6, 7]]
    answer = server.openai.completions.create(model=NAME, prompt=prompts[:2], n=2, max_tokens=50)
    counts = [len(TOKENIZER.encode(prompt)) for prompt in prompts[:2]]
    expected = [f"{count}, {index}." for count in counts for index in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(counts)
    chunks = list(server.openai.completions.create(model=NAME, prompt=prompts[:2], n=2, max_tokens=50, stream=True))
    streamed = [
        "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)
        for index in range(4)
    ]
    assert streamed == expected
    assert server.openai.completions.create(model=NAME, prompt=[prompts[2]]).choices[0].text == "3, 0."


def test_echo_and_logprobs(scripted):
    server, worker = scripted
    worker.script = lambda request, index: "Fine €."
    answer = server.openai.completions.create(model=NAME, prompt="Well, ", echo=True, logprobs=2)
    assert answer.choices[0].text == "Well, Fine €."
    listed = answer.choices[0].logprobs
    assert [len(each) for each in (listed.token_logprobs, listed.top_logprobs)] == [len(listed.tokens)] * 2
    chunks = list(server.openai.completions.create(model=NAME, prompt="Well, ", logprobs=2, stream=True))
    tokens = [token for chunk in chunks for choice in chunk.choices for token in choice.logprobs.tokens]
    assert tokens == listed.tokens
    pieces = server.openai.completions.create(model=NAME, prompt="a", logprobs=1).choices[0].logprobs
    for offset, token in zip(pieces.text_offset, pieces.tokens, strict=True):
        if not token.startswith("bytes:") and token != "[e~[":
            assert "Fine €."[offset:].startswith(token)
    only = server.openai.completions.create(model=NAME, prompt="Well, ", echo=True, max_tokens=0)
    assert only.choices[0].text == "Well, " and only.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1, 2], [4096]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": "a" * 70_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_bad_fields(scripted, fields, name):
    server, _ = scripted
    with pytest.raises(openai.BadRequestError) as raised:
        server.openai.completions.create(**{"model": NAME, "prompt": "a"} | fields)
    assert raised.value.param == name


def test_one_of_several_is_refused(scripted):
    """The others end with it, and nothing is left running."""
    server, worker = scripted
    seed = {"seed": 666}
    with pytest.raises(openai.BadRequestError):
        server.openai.completions.create(model=NAME, prompt=["a"] * 50, **seed)
    assert not worker.requests


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
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("other")
