"""How many of a draft's tokens the target takes: figures from counts, and the counts of each temperature."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import evaluation
from support.comparisons import assert_close

from m3jax.evaluate import acceptance as acceptances
from m3jax.evaluate.acceptance import acceptance, acceptance_table, figures
from m3jax.evaluate.reading import Reading


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_figures_of_a_draft(accepted: list[int]):
    """From counts, as an engine has them: what the definition says of each verification."""
    counts = [sum(length >= k for length in accepted) for k in range(1, 5)]
    shares, mean_length = evaluation.acceptance(accepted, 4)
    found = figures(len(accepted), counts)
    assert_close(found["shares"], shares, "shares", "K", rtol=1e-12)
    assert_close(found["mean_length"], mean_length, "mean length", rtol=1e-12)


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


def test_acceptance_of_each_temperature_is_what_it_added_to_the_engine_s_counts(monkeypatch, unchecked):
    """Every prompt once at each, with a seed of its own and no end but the last token; one engine for all of them."""
    engine, built, told = Drafting(), [], []
    monkeypatch.setattr(acceptances, "build_engine", lambda *given, **named: built.append((given, named)) or engine)
    line = contextlib.nullcontext(SimpleNamespace(say=told.append))
    monkeypatch.setattr(acceptances, "activity", lambda: line)
    prompts = [np.array([1, 2, 3]), np.array([4, 5])]
    how = Reading(chunk=16, batch=9, kv_dtype="float16", index_dtype="float32", scales="scales")
    settings = dict(max_new_tokens=10, draft_tokens=2, temperatures=(0.0, 0.5, 1.0), seed=30, how=how)
    found = acceptance("model", "draft", prompts, **settings)
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
    acceptance("model", "draft", prompts, **settings | dict(how=Reading(chunk=12, batch=1)))
    assert (built[1][1]["rows"], built[1][1]["prefill_chunk"]) == (1, 12)
