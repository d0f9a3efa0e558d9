"""A training run that can be stopped at any time: its stages, and its state on disk."""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from m3jax.model import M3
from m3jax.progress import activity
from m3jax.train.keeping import keep, restored
from m3jax.train.step import LossFn, TrainState, train_step

KEEP_SECONDS = 60.0
Batch = dict[str, Any]


@runtime_checkable
class Batches(Protocol):
    """Batches by number, each a dictionary of pytrees of arrays as the loss reads them."""

    def __getitem__(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class Stage:
    """A part of a training run: consecutive steps with the same sizes and the same kind of attention.

    Attributes:
      name: as progress shows it.
      steps: the number of steps.
      seq_len: tokens of a row.
      batch: rows of a step.
      sparse: True if a query reads selected blocks, False if all.
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
    loss_fn: LossFn,
    *,
    batches: Callable[[Stage], Batches],
    schedule: str,
    keys: Sequence[str] = ("tokens", "weights"),
    shared: Mapping[str, Any] | None = None,
    balance_rate: float = 1e-3,
    workers: int = 0,
    check: Callable[[TrainState], None] | None = None,
    check_every: int = 200,
) -> TrainState:
    """Run what is left of some stages, keeping the state as it goes.

    Args:
      folder: of the states that are kept; the last one there is gone on from.
      stages: one after the other.
      state: at step 0.
      optimizer: from `make_optimizer`.
      loss_fn: of `train_step`.
      batches: makes the batches of a stage; batch i is that of step i of the whole run.
      schedule: that sparse stages run under, one of `m3jax.msa.SCHEDULES`.
      keys: what the loss reads of a batch, where the batch has it.
      shared: what every batch holds besides, as {"teacher": model}; models in it run under the stage's schedule.
      balance_rate: of `train_step`.
      workers: processes that make batches, which must then be picklable; 0 makes them on a thread of this process,
        which is enough where a batch takes less of a core than a step takes.
      check: what looks at the state now and then, and says what it sees; it may not keep it.
      check_every: steps from one look to the next.

    Returns:
      The state after the last step.
    """
    settings = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder.resolve(), options=settings) as keeper:
        state = restored(keeper, state)
        if int(state.step):
            print(f"going on from step {int(state.step)}", flush=True)
        last_step = 0
        for stage in stages:
            last_step += stage.steps
            if int(state.step) < last_step:
                stage_schedule = schedule if stage.sparse else "dense"
                state = _with_schedule(state, stage_schedule)
                fixed = _with_schedule(dict(shared or {}), stage_schedule)
                step = partial(train_step, optimizer=optimizer, loss_fn=loss_fn, balance_rate=balance_rate)
                state = _run_stage(
                    stage.name, last_step, state, step, batches(stage), keys, fixed, workers, keeper, loss_fn, check,
                    check_every,
                )  # fmt: skip
    return state


def under(model: M3, schedule: str) -> M3:
    """Return the model under a schedule of sparse attention, or, for "dense", attending to every block."""
    return model.with_dense() if schedule == "dense" else model.with_dense(False).with_schedule(schedule)


def _run_stage(
    name: str,
    last_step: int,
    state: TrainState,
    train_step: Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]],
    batches: Batches,
    keys: Sequence[str],
    shared: dict[str, Any],
    workers: int,
    keeper: ocp.CheckpointManager,
    about: object,
    check: Callable[[TrainState], None] | None,
    check_every: int,
) -> TrainState:
    """Run the steps of one stage up to `last_step`; batches are made ahead."""
    first_step = int(state.step)
    begin = last_kept = time.perf_counter()
    made = _made_ahead(batches, range(first_step, last_step), workers)
    with closing(made), activity(about=about) as line:
        for step, batch in enumerate(made, first_step):
            arrays = {key: jax.tree.map(jnp.asarray, batch[key]) for key in keys if key in batch} | shared
            with line.timed(f"{name}: compiling a step") if step == first_step else nullcontext():
                state, metrics = train_step(state, arrays)
            line.say(f"{name}: step {step + 1} of {last_step}")
            is_last = step + 1 == last_step
            if step % 100 == 99 or is_last:
                values = {key: round(float(value), 4) for key, value in metrics.items()}
                rate = (step + 1 - first_step) / (time.perf_counter() - begin)
                print(f"{name:>14} {step + 1:6d}/{last_step} {rate:6.2f} steps/s {values}", flush=True)
            if time.perf_counter() - last_kept >= KEEP_SECONDS or is_last:
                keep(keeper, step + 1, state)
                last_kept = time.perf_counter()
            if check is not None and (step + 1) % check_every == 0:
                check(state)
    return state


def _made_ahead(batches: Batches, steps: range, workers: int) -> Iterator[Batch]:
    """Yield the batches of some steps in order; a thread makes one ahead, or each worker process makes two."""
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
    """Give a worker, a thread or a process, the batches that it makes items of."""
    _source.batches = batches


def _batch(step: int) -> Batch:
    return _source.batches[step]


def _with_schedule(tree: PyTree, schedule: str) -> PyTree:
    """Put every model of a tree under a schedule: an optimiser's moments are M3 trees of the same structure."""
    is_model = lambda x: isinstance(x, M3)
    return jax.tree.map(lambda x: under(x, schedule) if is_model(x) else x, tree, is_leaf=is_model)
