"""A training run's state on disk, as Orbax keeps it: the arrays of a tree, by number."""

import jax
import orbax.checkpoint as ocp

from m3jax.train.step import TrainState


def keep(keeper: ocp.CheckpointManager, step: int, state: TrainState) -> None:
    """Keep a state as that of a step."""
    keeper.save(step, args=ocp.args.StandardSave(_leaves(state)))


def restored(keeper: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """Return the state that was kept last, or the given one, of the same structure, if none was."""
    step = keeper.latest_step()
    if step is None:
        return state
    leaves = keeper.restore(step, args=ocp.args.StandardRestore(_leaves(state)))
    return jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in sorted(leaves)])


def _leaves(state: TrainState) -> dict[str, jax.Array]:
    """Return the arrays of a state, named by their number in the order of the tree."""
    return {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
