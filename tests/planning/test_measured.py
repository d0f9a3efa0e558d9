"""Times that a plan expects, from measured ones."""

import json
from pathlib import Path

import pytest

from m3jax import plan
from m3jax.planning import MEASURED, Job, checks, evaluate, expected, parse_slice
from m3jax.planning.measured import four_layers

ONE = dict(data=1, context=1, expert=1, tensor=1)
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def step(topology: str = "h200:1", rows: int = 8, **changes):
    """Return what is expected of a step of the measured layers."""
    job = Job(config=four_layers(), slice=parse_slice(topology), context=60_064, batch=rows, **changes)
    return expected(job, evaluate(job, ONE).decode, "decode")


def test_a_measured_call_is_expected_to_take_what_it_took():
    for measured in MEASURED:
        job = measured.job
        work = getattr(evaluate(job, ONE), measured.program)
        found = expected(job, work, measured.program)
        assert found.seconds == pytest.approx(max(measured.seconds, work.roofline(job.slice.chip)))
        assert (found.card, found.date, found.is_measured_card) == ("H200", measured.date, True)


def test_between_two_sizes_the_share_is_between_theirs():
    """And beyond the sizes that were measured it is that of the nearest; no time is below the floor."""
    shares = [step(rows=rows).share for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert shares == sorted(shares) and len(set(shares)) == 6
    assert shares[-1] == shares[-2] == 1
    assert step(rows=2).share == pytest.approx((2 * step(rows=1).share + step(rows=8).share) / 3)


def test_what_was_not_measured_is_said():
    assert not step("h100:1").is_measured_card and step("h100:1").share == step().share
    assert step("v5p:2x2x1") is None
    assert step(weights="mxfp8").share < step().share


def test_a_plan_has_expected_times_and_how_far_they_were_off(capsys):
    arguments = ["--context", "8192", "--batch", "4", "--json", "--topology"]
    answers = {}
    for more in (["h200:8"], ["v5p:4x4x4", "--no-compile"], ["h200:8", "--draft"]):
        plan.main([*arguments, *more])
        answers[" ".join(more)] = json.loads(capsys.readouterr().out)
    gpu = answers["h200:8"]
    for program in ("decode", "prefill"):
        least, found = gpu[program]["least"]["seconds"], gpu[program]["expected"]
        assert found["seconds"] == pytest.approx(least / found["share"]) and 0.3 < found["share"] < 1
        assert answers["v5p:4x4x4 --no-compile"][program]["expected"] is None
        assert answers["h200:8 --draft"][program]["expected"] is None
    assert len(gpu["checks"]) == len(checks()) and answers["v5p:4x4x4 --no-compile"]["checks"] == []
    plan.main([*arguments[:4], "--topology", "h100:8"])
    text = capsys.readouterr().out
    assert "measured on one H200, 27 November 2026: another card" in text
    assert "8 times on one device: -13% to +17%" in text


def test_the_document_has_every_check():
    """docs/planning.md, line by line: who adds a measurement writes what it says of the expected times."""
    lines = [f"| {c.what} | {c.predicted:.3g} {c.unit} | {c.measured:.3g} {c.unit} | {c.off:+.0%} |" for c in checks()]
    assert [line for line in DOCUMENT.read_text().splitlines() if line in lines] == lines
    offs = {check.what: abs(check.off) for check in checks() if check.unit == "ms"}
    # MXFP8 has another kernel for 32 rows than for one, and a better one.
    assert offs.pop("step of 32 rows, MXFP8, by the other sizes") < 0.2
    assert max(offs.values()) < 0.15
