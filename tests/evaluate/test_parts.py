"""Parts of an evaluation that need no model: figures of a draft, sizes of calls, a reference's files."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from m3jax.evaluate import acceptance as acceptances
from m3jax.evaluate import dumps
from m3jax.evaluate.acceptance import acceptance, acceptance_table, figures
from m3jax.evaluate.dumps import fitting, read_dump, write_dump
from m3jax.evaluate.reading import Reading

pytestmark = pytest.mark.usefixtures("unchecked")  # the model here is none


def test_figures_of_a_draft_and_their_table():
    found = figures(8, [6, 4])
    assert found == dict(verifications=8, accepted=[6, 4], shares=[0.75, 0.5], mean_length=2.25)
    result = dict(temperatures=[found | dict(temperature=0.7), figures(2000, [500]) | dict(temperature=1.0)])
    assert acceptance_table([result, result]) == [
        ["temperature 0.7", "", ""], ["  mean length", "2.25", "2.25"],
        ["  accepted by position", "75%, 50%", "75%, 50%"], ["  verifications", "8", "8"],
        ["temperature 1", "", ""], ["  mean length", "1.25", "1.25"],
        ["  accepted by position", "25%", "25%"], ["  verifications", "2,000", "2,000"],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="--max-new-tokens must be at least 2"):
        figures(0, [])


class Drafting:
    """An engine that is none: each request is verified as often as its prompt is long, and i of them accept i tokens.

    Its counts are those of its whole life, as the engine's are; before the first of them there is no list.
    """

    def __init__(self):
        self.asked, self.waiting, self.timings = [], [], SimpleNamespace(decoded_tokens=0)
        self.drafting = SimpleNamespace(forwards=0, accepted=[])

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, prompt, params) -> None:
        self.asked.append((prompt, params))
        self.waiting.append(prompt)

    def step(self) -> None:
        prompt = self.waiting.pop(0)
        self.drafting.forwards += len(prompt)
        before = self.drafting.accepted or [0, 0]
        self.drafting.accepted = [before[0] + len(prompt) - 1, before[1] + 1]
        self.timings.decoded_tokens += 5


def test_acceptance_of_each_temperature_is_what_it_added_to_the_engine_s_counts(monkeypatch):
    """Every prompt once at each, with a seed of its own and no end but the last token; one engine for all of them."""
    engine, built, told = Drafting(), [], []
    monkeypatch.setattr(acceptances, "build_engine", lambda *given, **named: built.append((given, named)) or engine)
    line = contextlib.nullcontext(SimpleNamespace(say=told.append))
    monkeypatch.setattr(acceptances, "activity", lambda: line)
    prompts = [np.array([1, 2, 3]), np.array([4, 5])]
    how = Reading(chunk=16, batch=9, kv_dtype="float16", index_dtype="float32", scales="scales")
    given = dict(max_new_tokens=10, draft_tokens=2, temperatures=(0.0, 0.5, 1.0), seed=30, how=how)
    found = acceptance("model", "draft", prompts, **given)
    each = figures(5, [3, 2])
    assert found == [{"temperature": temperature, **each} for temperature in (0.0, 0.5, 1.0)]
    asked = [
        (prompt, p.sampling.temperature, p.sampling.seed, p.max_new_tokens, p.stop_ids) for prompt, p in engine.asked
    ]
    wanted = [(prompts[i], x, 30 + i, 10, ()) for x in (0.0, 0.5, 1.0) for i in range(2)]
    assert asked == wanted
    assert built == [(("model",), dict(
        rows=2, length=13, prefill_chunk=13, prefill_rows=1, prefix_cache=False, kv_dtype="float16",
        index_dtype="float32", scales="scales", draft="draft", draft_tokens=2,
    ))]  # fmt: skip
    assert told == [f"temperature {x}: {n} of 20 new tokens" for x in ("0", "0.5", "1") for n in (5, 10)]
    acceptance("model", "draft", prompts, **given | dict(how=Reading(chunk=12, batch=1)))
    assert (built[1][1]["rows"], built[1][1]["prefill_chunk"]) == (1, 12)


def test_calls_that_return_logits_are_short():
    """At most 2^26 logits of a call, at least one token a row; everything else stays."""
    how = Reading(chunk=512, batch=4, kv_dtype="bfloat16", index_dtype="float32")
    assert fitting(how, 2**15) == how and fitting(how, 2**15 + 1).chunk == 511
    assert fitting(how, 2**24).chunk == fitting(how, 2**25).chunk == 1
    assert fitting(how, 200_064) == Reading(83, 4, "bfloat16", "float32")


class Vocabulary:
    """What a reference asks of a model: the size of its vocabulary."""

    class config:
        vocab_size = 3


def test_a_reference_comes_in_chunks_of_interleaved_rows(tmp_path, monkeypatch):
    """Each row's chunks go to the row's own file, in a folder that is made, and the last file says that it is whole."""
    rows = [np.array([5, 6, 7]), np.array([9])]
    logits = np.arange(12, dtype=np.float32).reshape(4, 3)
    parts = [(0, 0, logits[:1]), (1, 0, logits[3:]), (0, 1, logits[1:3])]
    monkeypatch.setattr(dumps, "read", lambda *_, **__: iter(parts))
    folder = tmp_path / "a" / "b"
    write_dump(Vocabulary(), rows, folder, {"model": "x"}, Reading(chunk=16, batch=2))
    assert sorted(path.name for path in folder.iterdir()) == [
        "prompt-000.safetensors", "prompt-001.safetensors", "reference.json"
    ]  # fmt: skip
    assert json.loads((folder / "reference.json").read_text()) == dict(schema=1, prompts=2, model="x")
    first, second = read_dump(folder)
    assert (first.name, second.name) == ("prompt-000.safetensors", "prompt-001.safetensors")
    for found, tokens, expected in ((first, [5, 6, 7], logits[:3]), (second, [9], logits[3:])):
        assert found.tokens.tolist() == tokens and found.tokens.dtype == np.int32
        np.testing.assert_array_equal(found.logits, expected, strict=True)
    assert load_file(folder / "prompt-001.safetensors")["logits"].shape == (1, 3)
    (single,) = read_dump(folder / "prompt-001.safetensors")
    assert single.tokens.tolist() == [9]
