"""The work of `python -m m3jax.plan` after its arguments are parsed."""

import argparse
import json
from typing import Any

from m3jax.config import M3Config
from m3jax.console import say, write
from m3jax.planning import M3_DRAFT, Candidate, Job, candidates, evaluate, parse_sizes, parse_slice
from m3jax.planning.compiler import check_compiler, compile_programs
from m3jax.planning.report import as_dict, as_text
from m3jax.progress import Activity, activity
from m3jax.vision import VisionConfig

PROG = "m3jax.plan"
_TRIED = 2  # meshes that are compiled at most: the second if the compiler refuses the first


def plan(args: argparse.Namespace) -> int:
    """Plan what the parsed arguments ask for, and print it.

    Args:
      args: of `m3jax.plan.parser`.

    Returns:
      The exit status: 0 if the model fits, 1 if not.

    Raises:
      ValueError: an argument that cannot be, with the nearest that can; or no TPU compiler where `--compile` insists.
      ChildProcessError: a compiler that ended without an answer.
      OSError: stdout that cannot be written.
    """
    config = M3Config.m3() if args.model is None else M3Config.from_pretrained(args.model)
    if args.images and args.model is None:
        config = VisionConfig().add_to(config)
    draft = M3_DRAFT if args.draft else None
    if draft is not None:
        draft.check_fits(config)
    job = Job(
        config=config, slice=parse_slice(args.topology), context=args.context, batch=args.batch, dtype=args.dtype,
        kv_dtype=args.kv_dtype, index_dtype=args.index_dtype, draft=draft,
        chunk=None if args.prefill_chunk is None else min(args.prefill_chunk, args.context),
        images=args.images, image_tokens=args.image_tokens,
        weights=args.weights,
    )  # fmt: skip
    compiles = _compiles(job, args.compile)
    with activity(about=job) as line:
        line.say("comparing meshes")
        ranked = candidates(job)
        if args.mesh is None:
            tried = [candidate for candidate in ranked if candidate.memory.fits][:_TRIED] or ranked[:1]
        else:
            tried = [evaluate(job, parse_sizes(args.mesh, job))]
        answer = _compiled_plan(job, tried, ranked, line) if compiles else as_dict(job, tried[0], ranked, None)
    write((json.dumps(answer) if args.json else as_text(answer)) + "\n")
    return 0 if answer["fits"] else 1


def _compiles(job: Job, wanted: bool | None) -> bool:
    """True if the plan is compiled: the slice is a TPU's, its compiler is installed, and --no-compile was not given."""
    is_tpu = job.slice.chip.kind == "tpu"
    if wanted and not is_tpu:
        raise ValueError(f"--compile: {job.slice} is no TPU, and always planned by arithmetic; leave --compile out")
    if wanted is False or not is_tpu:
        return False
    try:
        check_compiler()
    except ValueError as error:
        if wanted:
            raise
        say(f"{PROG}: note: planned by arithmetic: {error}")
        return False
    return True


def _compiled_plan(job: Job, tried: list[Candidate], ranked: list[Candidate], line: Activity) -> dict[str, Any]:
    """Return the plan of the first mesh on which the compiled programs fit, else that of the first mesh tried."""
    plans = []
    for candidate in tried:
        with line.timed(f"compiling decode and prefill for {candidate.name}"):
            compiled = compile_programs(job, candidate.sizes)
        plans.append(as_dict(job, candidate, ranked, compiled))
        if plans[-1]["fits"]:
            return plans[-1]
    return plans[0]
