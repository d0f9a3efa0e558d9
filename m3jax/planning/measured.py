"""Measured times of calls, the share of the floor that they reached, and what that makes of a plan's floor.

A floor (`Work.roofline`) is the least time at full public rates. A call on a real card takes longer by a factor that
changes little from job to job: `expected` divides a planned floor by the share that was measured for the same program
and storage of weights, between the two measured sizes nearest to the planned one. `checks` says how far such times were
off where a measurement was not used to make them.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from m3jax.config import M3Config
from m3jax.messages import counted
from m3jax.parallel import AXES
from m3jax.planning.arithmetic import Work
from m3jax.planning.chips import Slice, parse_slice
from m3jax.planning.job import Job
from m3jax.planning.meshes import evaluate

_LONG_PROMPT = 60_064
_CHUNKS = (2048, 8192)  # of which the engine cuts long prompts on a GPU


@dataclass(frozen=True)
class Measurement:
    """The time of one call of an engine over four layers of M3, one dense and three sparse.

    Attributes:
      topology: the card that it ran on, as `parse_slice` reads it.
      date: of the run.
      weights: as in `Job`.
      program: "decode" is a step, "prefill" a chunk at the start of a prompt.
      size: rows of a step over 60,064 tokens, or tokens of a chunk.
      seconds: of the call.
    """

    topology: str
    date: str
    weights: str
    program: str
    size: int
    seconds: float

    @property
    def job(self) -> Job:
        """The call as a plan has it."""
        shared = dict(config=four_layers(), slice=parse_slice(self.topology), weights=self.weights)
        if self.program == "decode":
            return Job(**shared, context=_LONG_PROMPT, batch=self.size)
        return Job(**shared, context=self.size, chunk=self.size)

    @property
    def share(self) -> float:
        """The share of the floor's rate that the call reached, at most 1."""
        return min(1.0, _floor(self.job, self.program) / self.seconds)


# Source: docs/performance.md, "The engine": one H200, calls launched ahead where that is the default, jax 0.11.2.
_DATE = "27 November 2026"
MEASURED = tuple(
    Measurement("h200:1", _DATE, weights, program, size, milliseconds / 1e3)
    for weights, program, of_size in (
        ("dequantize", "decode", {1: 1.47, 8: 3.46, 32: 7.65}),
        ("mxfp8", "decode", {1: 1.27, 8: 2.59, 32: 5.30}),
        ("dequantize", "prefill", {256: 16.2, 2048: 24.6, 8192: 64.8}),
        ("mxfp8", "prefill", {256: 12.4, 2048: 22.2, 8192: 65.8}),
    )
    for size, milliseconds in of_size.items()
)
# Whole prompts of 60,064 tokens, in chunks of 8,192 and then 2,048: no share is made from these.
PROMPT_SECONDS = {"dequantize": 0.596, "mxfp8": 0.596}
# How many times as fast two cards were as one in the same run, over 60,064 tokens: mesh, program, rows or tokens.
# Source: docs/performance.md, "Several GPUs": two H100s (steps of tensor and expert, prompts of tensor) or H200s with
# NVLink, bfloat16, jax 0.11.2.
_TWO = "h200", _DATE
SPEEDUPS = {
    ("tensor", "decode", 1): 1.59,
    ("tensor", "decode", 16): 1.83,
    ("tensor", "prefill", 8192): 1.52,
    ("expert", "decode", 1): 1.20,
    ("expert", "decode", 16): 1.63,
    ("expert", "prefill", 8192): 1.46,
    ("context", "decode", 1): 1.16,
    ("context", "decode", 16): 1.49,
    ("context", "prefill", 8192): 1.48,
}
_KIND = {"gpu": "h200"}  # the card whose shares are taken for all of a kind


@dataclass(frozen=True)
class Expected:
    """A time that is expected, and what it rests on.

    Attributes:
      seconds: the floor over the share.
      share: of the floor's rate.
      card: on which the share was measured.
      date: of the measurement.
      is_measured_card: False where the share is another card's.
    """

    seconds: float
    share: float
    card: str
    date: str
    is_measured_card: bool


@dataclass(frozen=True)
class Check:
    """A time or a speedup that was predicted from other measurements, beside the measured one.

    Attributes:
      what: was measured, and on how many devices.
      date: of the measurement.
      predicted: seconds, or times as fast.
      measured: likewise.
      unit: "ms" or "x".
    """

    what: str
    date: str
    predicted: float
    measured: float
    unit: str

    @property
    def off(self) -> float:
        """The predicted number less the measured one, as a share of the measured one."""
        return self.predicted / self.measured - 1


def expected(job: Job, work: Work, program: str) -> Expected | None:
    """Return the time that a planned call is expected to take; None for a kind of chip on which nothing was measured.

    Links are counted as `Work.roofline` counts them, hidden behind the rest, and what a collective takes beside its
    bytes is not in it: `checks` has what that makes of a step over two cards.

    Args:
      job: the plan.
      work: of one device in one call of it.
      program: "decode" or "prefill".
    """
    chip = job.slice.chip
    if chip.kind not in _KIND:
        return None
    taken = [m for m in MEASURED if (m.weights, m.program) == (job.weights, program)]
    card = parse_slice(taken[0].topology).chip.name
    assert card == _KIND[chip.kind]
    share = _share(taken, job.batch if program == "decode" else job.chunk)
    return Expected(work.roofline(chip) / share, share, card.upper(), taken[0].date, chip.name == card)


def checks() -> list[Check]:
    """Return predicted and measured times of calls that did not make the prediction."""
    found = []
    for weights in dict.fromkeys(m.weights for m in MEASURED):
        steps = [m for m in MEASURED if (m.weights, m.program) == (weights, "decode")]
        for left_out in steps:
            share = _share([m for m in steps if m is not left_out], left_out.size)
            predicted = 1e3 * _floor(left_out.job, "decode") / share
            what = f"step of {counted(left_out.size, 'row')}, {_named(weights)}, by the other sizes"
            found.append(Check(what, left_out.date, predicted, 1e3 * left_out.seconds, "ms"))
    for weights, seconds in PROMPT_SECONDS.items():
        predicted = 1e3 * sum(_prompt_seconds(weights))
        what = f"prompt of {_LONG_PROMPT:,} tokens, {_named(weights)}, by chunks at the start"
        found.append(Check(what, _DATE, predicted, 1e3 * seconds, "ms"))
    for (axis, program, size), times in SPEEDUPS.items():
        floors = []
        for count in (1, 2):
            shared = dict(config=four_layers(), slice=parse_slice(f"{_TWO[0]}:{count}"), context=_LONG_PROMPT)
            job = Job(**shared, batch=size) if program == "decode" else Job(**shared, chunk=size)
            floors.append(_floor(job, program, {axis: count}))
        call = f"step of {counted(size, 'row')}" if program == "decode" else f"chunk of {counted(size, 'token')}"
        what = f"{axis}=2 over one device, {call}"
        found.append(Check(what, _TWO[1], floors[0] / floors[1], times, "x"))
    return found


def four_layers() -> M3Config:
    """Return the configuration of M3's last dense layer and its first three sparse ones: what was measured."""
    full = M3Config.m3()
    first = full.layer_types.index("minimax_m3_sparse") - 1
    kinds = {name: getattr(full, name)[first : first + 4] for name in ("layer_types", "mlp_layer_types")}
    return dataclasses.replace(full, num_hidden_layers=4, vision_config=None, **kinds)


def _prompt_seconds(weights: str) -> list[float]:
    """Return the expected seconds of each chunk of the long prompt, as the engine cuts it."""
    small, large = _CHUNKS
    begins = list(range(0, _LONG_PROMPT - large, large))
    ends = [*(begin + large for begin in begins), begins[-1] + large + small, _LONG_PROMPT]
    seconds = []
    for begin, end in zip([0, *ends], ends, strict=False):
        job = Job(config=four_layers(), slice=Slice(parse_slice("h200:1").chip, (1,)), weights=weights, context=end,
                  chunk=end - begin)  # fmt: skip
        share = _share([m for m in MEASURED if (m.weights, m.program) == (weights, "prefill")], end - begin)
        seconds.append(_floor(job, "prefill") / share)
    return seconds


def _share(taken: Sequence[Measurement], size: int) -> float:
    """Return the share at a size: between two measured ones by the logarithm, outside them that of the nearest."""
    taken = sorted(taken, key=lambda m: m.size)
    sizes, shares = [math.log(m.size) for m in taken], [m.share for m in taken]
    return float(np.interp(math.log(size), sizes, shares))


def _floor(job: Job, program: str, sizes: dict[str, int] | None = None) -> float:
    """Return the least seconds of a call on a mesh; of one device without sizes."""
    return _floor_of(job, program, tuple({**dict.fromkeys(AXES, 1), **(sizes or {})}.items()))


@cache
def _floor_of(job: Job, program: str, sizes: tuple[tuple[str, int], ...]) -> float:
    candidate = evaluate(job, dict(sizes))
    return (candidate.decode if program == "decode" else candidate.prefill).roofline(job.slice.chip)


def _named(weights: str) -> str:
    return "bfloat16" if weights == "dequantize" else "MXFP8"
