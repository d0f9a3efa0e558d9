"""Parts of an evaluation that need no model: figures of a draft, sizes of calls, a reference's files."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import tiny

from m3jax.evaluate import acceptance as acceptances
from m3jax.evaluate import dumps, perplexity, recall
from m3jax.evaluate.acceptance import acceptance, acceptance_table, figures
from m3jax.evaluate.caught import caught_figures, caught_table
from m3jax.evaluate.divergence import _summary, divergence_table
from m3jax.evaluate.dumps import fitting, read_dump, write_dump
from m3jax.evaluate.perplexity import perplexity_table
from m3jax.evaluate.prompts import Prompt
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


# Tables


def test_a_perplexity_counts_each_token_but_the_first_once(monkeypatch):
    """By a window that has half of the one before as context; errors, bits and intervals by their definitions."""

    def scores(model, rows, how):
        assert (model, how) == ("model", "how")
        return [(0.1 * row[1:] + np.arange(len(row) - 1), row[1:] % 2 == 0) for row in rows]

    monkeypatch.setattr(perplexity, "token_scores", scores)
    tokens = [np.array([3, 7, 1, 8, 2, 9, 4, 6]), np.array([5, 2])]
    texts = [perplexity.Text("a", tokens[0], 10), perplexity.Text("b", tokens[1], 0)]
    found = perplexity.perplexity("model", texts, 4, 2, "how")
    before = [np.array([1, 2, 3, 4, 3, 4, 3]), np.array([1])]  # windows begin at 0, 2 and 4
    losses = [0.1 * ids[1:] + count - 1 for ids, count in zip(tokens, before, strict=True)]
    for part, loss, ids, num_bytes in (
        (found, np.concatenate(losses), [*tokens[0][1:], 2], 10), (found["files"]["a"], losses[0], tokens[0][1:], 10),
        (found["files"]["b"], losses[1], [2], 0),
    ):  # fmt: skip
        count, mean = len(loss), loss.mean()
        error = np.sqrt(((loss - mean) ** 2).sum() / (count - 1) / count) if count > 1 else None
        expected = dict(tokens=count, loss=mean, standard_error=error, perplexity=np.exp(mean),
                        top1=np.mean(np.array(ids) % 2 == 0))  # fmt: skip
        expected["bits_per_byte"] = loss.sum() / np.log(2) / num_bytes if num_bytes else None
        assert {name: part[name] for name in expected} == pytest.approx(expected)
    every, counts = np.concatenate(losses), np.concatenate(before)
    assert found["by_position"] == [
        {"from": first, "to": last, "tokens": int(((counts >= first) & (counts <= last)).sum()),
         "loss": pytest.approx(every[(counts >= first) & (counts <= last)].mean())}
        for first, last in ((1, 1), (2, 2), (3, 4))
    ]  # fmt: skip
    assert perplexity._by_position(np.ones(2), np.array([1, 5])) == [
        {"from": 1, "to": 1, "tokens": 1, "loss": 1.0}, {"from": 5, "to": 8, "tokens": 1, "loss": 1.0}
    ]  # fmt: skip
    for skip in (-1, 4):
        with pytest.raises(ValueError, match=f"skip = {skip}: of a window of 4 tokens it must be 0 to 3"):
            perplexity.perplexity("model", texts, 4, skip, "how")
    perplexity.perplexity("model", texts, 4, 0, "how")
    perplexity.perplexity("model", texts, 4, 3, "how")


def test_a_table_of_perplexities():
    """A line a figure, a file and a number of tokens before; what one result lacks is left empty."""
    of = lambda loss, files, by_position: dict(
        perplexity=1234.5, loss=loss, standard_error=None, bits_per_byte=0.5, top1=0.375, tokens=12_345,
        files={name: dict(perplexity=value) for name, value in files.items()},
        by_position=[{"to": to, "loss": value} for to, value in by_position],
    )  # fmt: skip
    one = of(2.0, {"a": 7.0, "b": 8.0}, [(1, 3.0), (2, 2.5), (4, 2.25)])
    two = of(1.0, {"a": 6.5}, [(2, 1.0), (4096, 0.25)])
    assert perplexity_table([one, two]) == [
        ["perplexity", "1,234.500", "1,234.500"], ["loss, nats a token", "2.0000", "1.0000"],
        ["its standard error", "", ""], ["bits a byte", "0.5000", "0.5000"],
        ["most probable token right", "37.5%", "37.5%"], ["tokens counted", "12,345", "12,345"],
        ["  a", "7.000", "6.500"], ["  b", "8.000", ""],
        ["  loss after 1 tokens", "3.0000", ""], ["  loss after 2 tokens", "2.5000", "1.0000"],
        ["  loss after 3 to 4 tokens", "2.2500", ""], ["  loss after 2,049 to 4,096 tokens", "", "0.2500"],
    ]  # fmt: skip


def test_figures_of_a_divergence_and_their_table():
    kl = np.random.default_rng(0).exponential(size=400)
    found = _summary(kl, np.arange(400) % 4 > 0)
    shares = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0]
    quantiles = [[share, float(np.quantile(kl, share))] for share in shares]
    median, p99, p999, largest = (dict(map(tuple, quantiles))[share] for share in (0.5, 0.99, 0.999, 1.0))
    assert found == {
        "positions": 400, "mean": kl.mean(), "standard_error": kl.std(ddof=1) / 20, "median": median, "p99": p99,
        "p99.9": p999, "max": largest, "top1_agreement": 0.75, "quantiles": quantiles,
    }  # fmt: skip
    assert _summary(kl[:1], np.array([True]))["standard_error"] is None
    assert _summary(kl[:2], np.array([True, False]))["standard_error"] is not None
    result = dict(mean=0.1234, standard_error=None, median=2e-5, p99=3, max=5, top1_agreement=0.98765, positions=12_345)
    assert divergence_table([result | {"p99.9": 4}]) == [
        ["mean KL, nats", "0.123"], ["its standard error", ""], ["median", "2e-05"], ["99%", "3"], ["99.9%", "4"],
        ["largest", "5"], ["same most probable token", "98.77%"], ["positions counted", "12,345"],
    ]  # fmt: skip


def test_figures_of_what_selection_catches_and_their_table():
    """Layers are numbered through all stacks; of a distance without mass there is no share."""
    config = tiny.config("dMMdM")
    draw = np.random.default_rng(0)
    mass = draw.random((3, 2, 3, 3))  # [L K W Z]
    mass[1, :, :, 2] = 0.0
    found = caught_figures(config, mass, 40, 50)
    assert (found["layers"], found["first"], found["context"]) == ([1, 2, 4], 40, 50)
    assert found["distances"] == [[0, 8], [8, 16], [16, 50]]
    for i in range(3):
        whole, part = mass[i].mean(axis=0)[:2]
        np.testing.assert_allclose(found["mass_by_distance"][i], whole)
        shares = [part[z] / whole[z] if whole[z] else None for z in range(3)]
        np.testing.assert_allclose(*(np.array(x, float) for x in (found["caught_by_distance"][i], shares)))
        assert [share is None for share in found["caught_by_distance"][i]] == [False, False, i == 1]
        np.testing.assert_allclose(found["caught"][i], mass[i, :, 1].sum(-1))
        np.testing.assert_allclose(found["by_chance"][i], mass[i, :, 2].sum(-1))
    result = dict(
        layers=[7], distances=[[0, 8], [8, 5000]], caught=[[0.5, 0.25]], by_chance=[[0.125, 0.0]],
        caught_by_distance=[[1.0, None]], mass_by_distance=[[0.75, 0.0]],
    )  # fmt: skip
    other = result | dict(caught=[[1.0, 0.5]], mass_by_distance=[[0.5, 0.5]])
    assert caught_table([result, other]) == [
        ["layer 7, by KV group", "50.0% 25.0%", "100.0% 50.0%"],
        ["  as many random blocks", "12.5% 0.0%", "12.5% 0.0%"],
        ["  0 to 7 tokens back", "100.0% of 75.0%", "100.0% of 50.0%"],
        ["  8 to 4,999 tokens back", "- of 0.0%", "- of 50.0%"],
    ]  # fmt: skip


def test_shares_of_recall_and_their_table(monkeypatch):
    """Of one question each, of several by their own depths, of a chain of all; an answer's tokens are all right."""
    of = lambda answers, depths: Prompt(np.zeros(9, np.int32), answers, depths)
    prompts = [
        ("needle", 0, of(((2, 4),), (0.0,))), ("needle", 0, of(((2, 4),), (1.0,))),
        ("needle", 1, of(((2, 3),), (0.0,))),
        ("needle", 1, of(((3, 4),), (1.0,))), ("several", 0, of(((2, 3), (5, 6)), (1.0, 0.0))),
        ("several", 1, of(((2, 3), (5, 6)), (0.0, 1.0))), ("chain", 0, of(((2, 3), (5, 6)), (0.0, 0.3))),
        ("chain", 0, of(((2, 3), (5, 6)), (1.0, 0.3))), ("chain", 1, of(((2, 3), (5, 6)), (0.0, 0.3))),
        ("chain", 1, of(((2, 3), (5, 6)), (1.0, 0.3))),
    ]  # fmt: skip
    # Token t is predicted at t - 1.
    right_at = [(1, 2), (2, 3), (1,), (3,), (1,), (1, 4), (1, 4), (1,), (4,), (1, 4)]
    scores = [(None, np.isin(np.arange(8), at)) for at in right_at]
    given = []
    monkeypatch.setattr(
        recall, "token_scores", lambda model, rows, how: given.append((model, len(rows), how)) or scores
    )
    grid = recall.Grid(("needle", "several", "chain"), (1000, 20), (0.0, 1.0), 1, prompts)
    found = recall.recall("model", grid, "how")
    assert given == [("model", 10, "how")]
    shares = dict(needle=[[1, 0], [1, 0]], several=[[0, 1], [1, 1]], chain=[[1, 0], [0, 1]])
    of_kinds = {kind: dict(shares=x, mean=np.mean(x)) for kind, x in shares.items()}
    assert found == dict(lengths=[1000, 20], depths=[0.0, 1.0], count=1, **of_kinds)
    del found["several"]
    table = [
        ["depth", "    0%  100%"], ["needle", "mean 50.0%"], ["  1,000 tokens", "  100%    0%"],
        ["  20 tokens", "  100%    0%"], ["chain", "mean 50.0%"], ["  1,000 tokens", "  100%    0%"],
        ["  20 tokens", "    0%  100%"],
    ]  # fmt: skip
    assert recall.recall_table([found]) == table
    assert recall.recall_table([found, found]) == [[name, figures, figures] for name, figures in table]
