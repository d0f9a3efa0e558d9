"""A training run on disk: its state, as Orbax keeps it, the arrays of a tree by number; and the model in the end.

A state gets its name when all of it is written, so that a run that is killed goes on from the state before.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp

from m3jax.checkpoint import save, save_orbax
from m3jax.messages import printable, shortened
from m3jax.model import M3
from m3jax.train.step import TrainState

State = TypeVar("State")  # a pytree of arrays, such as `m3jax.train.step.TrainState`


@contextmanager
def states_in(folder: str | Path) -> Iterator[ocp.CheckpointManager]:
    """Open the states of a run: the last two are kept, and are written while training goes on.

    Args:
      folder: of the run; its states are in `states`.

    Raises:
      ValueError: a state could not be written.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    keeper = ocp.CheckpointManager((Path(folder) / "states").resolve(), options=options)
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what fails is raised; Orbax would also log each thread's traceback
    try:
        yield keeper
    except BaseException:
        with suppress(Exception):  # closing raises once more what is being raised
            keeper.close()
        raise
    else:
        with _written(keeper, keeper.latest_step() or 0):
            keeper.close()
    finally:
        log.setLevel(level)


def keep(keeper: ocp.CheckpointManager, step: int, state: State) -> None:
    """Keep a state as that of a step; it may be written while training goes on.

    Args:
      keeper: of the run's states.
      step: of the state.
      state: copied before this returns.

    Raises:
      ValueError: it cannot be written, or the one before could not.
    """
    with _written(keeper, step):
        keeper.save(step, args=ocp.args.StandardSave(_leaves(state)))


def keep_whole(keeper: ocp.CheckpointManager, state: TrainState, is_told: bool = False) -> bool:
    """Keep the state of a run that was stopped, unless a step that was interrupted has taken its arrays.

    Args:
      keeper: Keeper of the run's states.
      state: State after the last step, if a step was taken.
      is_told: Whether all processes stop here. Otherwise a run over several hosts keeps nothing: all of them would
        have to write, and the others go on.

    Returns:
      Whether the state is kept, now or since its step.

    Raises:
      ValueError: it cannot be written.
    """
    is_whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    if not is_whole or not (is_told or jax.process_count() == 1) or not int(state.step):
        return False
    if keeper.latest_step() != int(state.step):
        keep(keeper, int(state.step), state)
    return True


def restored(keeper: ocp.CheckpointManager, state: State) -> State:
    """Return the state that was kept last, or the given one, of the same structure, if none was.

    Args:
      keeper: of the run's states.
      state: whose arrays' shapes, dtypes and devices the result has.

    Raises:
      ValueError: the state on the disk is damaged, or of other arrays.
    """
    step = keeper.latest_step()
    if step is None:
        return state
    try:
        leaves = keeper.restore(step, args=ocp.args.StandardRestore(_leaves(state)))
    except Exception as error:  # of any kind: what reads arrays has errors of its own
        raise ValueError(
            f"{printable(str(keeper.directory / str(step)))}: this state cannot be read ({_first_line(error)}); remove "
            "the folder, and the run goes on from the state before"
        ) from error
    return jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in sorted(leaves)])


def save_trained(model: M3, folder: str | Path, source: str | Path) -> str:
    """Save what a run has trained; of several processes all have to call it, since none has all of the model.

    Args:
      model: in the hub's layout where one process has it, else in Orbax's.
      folder: of the model.
      source: the folder that it was made of, whose tokenizer the hub's layout has too.

    Returns:
      What a message says of the layout behind the folder's name: nothing of the hub's.

    Raises:
      ValueError, OSError: as `m3jax.checkpoint.save` and `save_orbax`.
    """
    if jax.process_count() == 1:
        save(model, folder, copy_from=source)
        return ""
    save_orbax(model, folder)
    return " in Orbax's layout (m3jax.load_orbax)"


@contextmanager
def _written(keeper: ocp.CheckpointManager, step: int) -> Iterator[None]:
    """Make one line of what fails while a state is written."""
    try:
        yield
    except Exception as error:  # of any kind: what writes arrays has errors of its own
        raise ValueError(
            f"{printable(str(keeper.directory))}: the state of step {step} or the one before cannot be written "
            f"({_first_line(error)}); make room, and the same command goes on from what was kept"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return shortened(printable(text.strip().splitlines()[0] if text.strip() else text), 200)


def _leaves(state: State) -> dict[str, jax.Array]:
    """Return the arrays of a state, named by their number in the order of the tree."""
    return {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
