"""A training run that can be stopped at any time: its stages, its state on disk, the settings that it began with."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from m3jax.model import M3
from m3jax.progress import activity
from m3jax.train.data import Batch
from m3jax.train.step import TrainOptions, TrainState, train_step

KEEP_SECONDS = 60.0


@runtime_checkable
class Batches(Protocol):
    """Batches by number: `tokens` [B T+1], `weights` and `recall` [B T]."""

    def __getitem__(self, index: int) -> Batch: ...


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
                state = _with_schedule(state, schedule if stage.sparse else "dense")
                state = _run_stage(stage.name, last_step, state, batches(stage), optimizer, options, keeper)
    return state


def under(model: M3, schedule: str) -> M3:
    """A model under a schedule, or, for "dense", attending to every block."""
    return model.with_dense() if schedule == "dense" else model.with_dense(False).with_schedule(schedule)


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
    batches: Batches,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
    keeper: ocp.CheckpointManager,
) -> TrainState:
    """The steps of one stage up to the last; batches are made one ahead, on another thread."""
    first_step = int(state.step)
    begin = last_kept = time.perf_counter()
    with ThreadPoolExecutor(1) as pool, activity(about=options) as line:
        next_batch = pool.submit(batches.__getitem__, first_step)
        for step in range(first_step, last_step):
            batch = next_batch.result()
            next_batch = pool.submit(batches.__getitem__, step + 1)
            arrays = {key: jnp.asarray(batch[key]) for key in ("tokens", "weights", "recall")}
            with line.timed(f"{name}: compiling a step") if step == first_step else nullcontext():
                state, metrics = train_step(state, arrays, optimizer, options)
            line.say(f"{name}: step {step + 1} of {last_step}")
            is_last = step + 1 == last_step
            if step % 100 == 99 or is_last:
                values = {key: round(float(value), 4) for key, value in metrics.items()}
                rate = (step + 1 - first_step) / (time.perf_counter() - begin)
                print(f"{name:>14} {step + 1:6d}/{last_step} {rate:6.2f} steps/s {values}", flush=True)
            if time.perf_counter() - last_kept >= KEEP_SECONDS or is_last:
                keeper.save(step + 1, args=ocp.args.StandardSave(_leaves(state)))
                last_kept = time.perf_counter()
    return state


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
