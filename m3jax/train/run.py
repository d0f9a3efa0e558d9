"""A training run that can be stopped at any time: its stages, its state on disk, the settings that it began with."""

import argparse
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from m3jax.assets import embedded_path
from m3jax.checkpoint import save
from m3jax.model import M3
from m3jax.msa import SCHEDULES
from m3jax.progress import activity
from m3jax.train.data import Batch, Batches
from m3jax.train.step import TrainOptions, TrainState, cast_weights, train_step

KEEP_SECONDS = 60.0
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_READ = ("tokens", "weights", "recall", "kept", "pictures", "naming")  # what a step reads of a batch


@dataclass(frozen=True)
class Stage:
    """Steps of one kind.

    Attributes:
      name: as it is shown.
      steps: how many.
      seq_len: tokens of a row.
      batch: rows of a step.
      sparse: whether a query reads selected blocks, or all.
    """

    name: str
    steps: int
    seq_len: int
    batch: int
    sparse: bool


def run_stages(
    folder: Path,
    stages: Sequence[Stage],
    state: TrainState,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
    *,
    batches: Callable[[Stage], Batches],
    schedule: str,
    workers: int = 0,
    teacher: M3 | None = None,
    check: Callable[[TrainState], None] | None = None,
    check_every: int = 200,
) -> TrainState:
    """Run what is left of some stages, keeping the state as it goes.

    Args:
      folder: of the states that are kept; the last one there is gone on from.
      stages: one after the other.
      state: at step 0.
      optimizer: from `make_optimizer`.
      options: of a step.
      batches: makes the batches of a stage; batch i is that of step i of the whole run.
      schedule: that sparse stages run under, one of `m3jax.msa.SCHEDULES`.
      workers: processes that make batches, which must then be picklable; 0 makes them on a thread of this process,
        which is enough where a batch takes less of a core than a step takes.
      teacher: whose predictions are kept where a batch's "kept" says so, as in `m3jax.train.step.losses`, or None.
      check: what looks at the state now and then, and says what it sees; it may not keep it.
      check_every: steps from one look to the next.

    Returns:
      The state after the last step.
    """
    settings = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder.resolve(), options=settings) as keeper:
        state = _restore(keeper, state)
        last_step = 0
        for stage in stages:
            last_step += stage.steps
            if int(state.step) < last_step:
                stage_schedule = schedule if stage.sparse else "dense"
                state = _with_schedule(state, stage_schedule)
                kept = None if teacher is None else under(teacher, stage_schedule)
                step = partial(train_step, optimizer=optimizer, options=options, teacher=kept)
                state = _run_stage(
                    stage.name, last_step, state, step, batches(stage), workers, keeper, options, check, check_every
                )
    return state


def under(model: M3, schedule: str) -> M3:
    """A model under a schedule, or, for "dense", attending to every block."""
    return model.with_dense() if schedule == "dense" else model.with_dense(False).with_schedule(schedule)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every training script has: --out, --short, --sources, --seed, --schedule."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--short", action="store_true", help="a few tiny steps, to see that everything works")
    parser.add_argument("--sources", type=Path, help="a standard library's folder; the running Python's by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--schedule",
        default="fused",
        choices=("fused", *SCHEDULES),
        help="sparse attention in training: m3jax.train.fused, or a schedule of m3jax.msa (default %(default)s)",
    )


def add_tuning_arguments(parser: argparse.ArgumentParser, most_workers: int) -> None:
    """Those of a script that goes on from a checkpoint, besides: --model, --workers.

    Args:
      parser: of the script.
      most_workers: processes that are enough for its batches; by default two cores are left to the rest.
    """
    workers = max(0, min(most_workers, (os.cpu_count() or 1) - 2))
    parser.add_argument(
        "--model", type=Path, default=embedded_path(), help="what to begin with; the embedded checkpoint"
    )
    parser.add_argument("--workers", type=int, default=workers, help="processes that make batches, 0 for a thread; "
                        "they are the same (default here: %(default)s)")  # fmt: skip


def keep_model(model: M3, base: Path, folder: Path) -> M3:
    """Write a trained model as a checkpoint, with the text files of the one that it went on from.

    Args:
      model: float32 master weights, under any schedule.
      base: folder of the checkpoint that training began with.
      folder: to write to.

    Returns:
      The model as it was written, in bfloat16 and under "mask".
    """
    model = cast_weights(under(model, "mask"), "bfloat16")
    save(model, folder)
    for name in FILES:
        shutil.copy(base / name, folder / name)
    return model


def mismatch(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Why the run in a folder cannot go on under some settings; a new folder remembers them.

    Args:
      folder: of the run.
      settings: by name, of kinds that JSON has.

    Returns:
      The reason; None where it can go on.
    """
    path = folder / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2) + "\n")
        return None
    before = json.loads(path.read_text())
    wrong = [f"{k} = {before.get(k)!r}, not {v!r}" for k, v in settings.items() if before.get(k) != v]
    return f"{folder} holds a run with {'; '.join(wrong)}: give the same, or another --out" if wrong else None


def _run_stage(
    name: str,
    last_step: int,
    state: TrainState,
    train_step: Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]],
    batches: Batches,
    workers: int,
    keeper: ocp.CheckpointManager,
    about: object,
    check: Callable[[TrainState], None] | None,
    check_every: int,
) -> TrainState:
    """The steps of one stage up to the last; batches are made ahead."""
    first_step = int(state.step)
    begin = last_kept = time.perf_counter()
    made = _made_ahead(batches, range(first_step, last_step), workers)
    with closing(made), activity(about=about) as line:
        for step, batch in enumerate(made, first_step):
            arrays = {key: jax.tree.map(jnp.asarray, batch[key]) for key in _READ if key in batch}
            with line.timed(f"{name}: compiling a step") if step == first_step else nullcontext():
                state, metrics = train_step(state, arrays)
            line.say(f"{name}: step {step + 1} of {last_step}")
            is_last = step + 1 == last_step
            if step % 100 == 99 or is_last:
                values = {key: round(float(value), 4) for key, value in metrics.items()}
                rate = (step + 1 - first_step) / (time.perf_counter() - begin)
                print(f"{name:>14} {step + 1:6d}/{last_step} {rate:6.2f} steps/s {values}", flush=True)
            if time.perf_counter() - last_kept >= KEEP_SECONDS or is_last:
                keeper.save(step + 1, args=ocp.args.StandardSave(_leaves(state)))
                last_kept = time.perf_counter()
            if check is not None and (step + 1) % check_every == 0:
                check(state)
    return state


def _made_ahead(batches: Batches, steps: range, workers: int) -> Iterator[Batch]:
    """The batches of some steps in order; one is made ahead on a thread, or two by each of the processes."""
    # A forked copy of a process with a GPU and threads may hang; a spawned one begins anew and never sees the device.
    pool = (
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _set_batches, (batches,))
        if workers
        else ThreadPoolExecutor(1, initializer=_set_batches, initargs=(batches,))
    )
    try:
        ahead = deque(pool.submit(_batch, step) for step in steps[: 2 * workers or 1])
        for step in range(steps.start + len(ahead), steps.stop + len(ahead)):
            if step < steps.stop:
                ahead.append(pool.submit(_batch, step))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_source = threading.local()


def _set_batches(batches: Batches) -> None:
    """Tell a worker, a thread or a process, whose batches it makes."""
    _source.batches = batches


def _batch(step: int) -> Batch:
    return _source.batches[step]


def _leaves(state: TrainState) -> dict[str, jax.Array]:
    """The arrays of a state by name, as they are kept: in the order of the tree."""
    return {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def _restore(keeper: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The state that was kept last, or the given one where none was."""
    step = keeper.latest_step()
    if step is None:
        return state
    print(f"going on from step {step}", flush=True)
    leaves = keeper.restore(step, args=ocp.args.StandardRestore(_leaves(state)))
    return jax.tree.unflatten(jax.tree.structure(state), [leaves[k] for k in sorted(leaves)])


def _with_schedule(state: TrainState, schedule: str) -> TrainState:
    """The optimiser's moments are models too, whose static schedule must follow the parameters'."""
    is_model = lambda x: isinstance(x, M3)
    return jax.tree.map(lambda x: under(x, schedule) if is_model(x) else x, state, is_leaf=is_model)
