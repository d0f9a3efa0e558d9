"""The units of models whose residual stream is large, and an optimiser that moves them as if it were not.

A norm, g x / sqrt(mean(x^2) + eps), divides a head's length out where x^2 is far above eps, and is linear, g x /
sqrt(eps), where it is far below. M3 has one eps for all norms. Those of the stream compute the same where the stream is
U times as large and eps U^2 times: with a large U they norm as before, and those of queries and keys are linear. A
model whose heads have no norm so becomes an M3 whose norms do nothing (`m3jax.train.dense`). What writes into the
stream is then U times as large, which AdamW would hardly move: its steps do not grow with a weight.
"""

from collections.abc import Callable

import jax
import optax
from jaxtyping import Array, PyTree

from m3jax.config import M3Config
from m3jax.model import M3

LARGE_UNIT = 2.0**20  # a power of two: weights in other units have the same digits
# Of the parameters that write into the stream. Experts do too: no model with experts has a large unit.
WRITERS = ("embed_tokens", "self_attn.o_proj", "mlp.down_proj")


def stream_unit(config: M3Config) -> float:
    """Return how many times as large a model's residual stream is as that of the model which it was made of.

    Args:
      config: the model's; an eps above 1 is no trained norm's, and says that heads are not normed.
    """
    return LARGE_UNIT if config.rms_norm_eps > 1 else 1.0


def in_source_units(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimiser that moves a model as `optimizer` would move the one which it was made of.

    Gradients, their norms, weight decay and the optimiser's state are those of the source. A model whose unit is 1, and
    parameters that are no model, are given to `optimizer` as they are.

    Args:
      optimizer: whose update reads the parameters.
    """

    def update(updates, state, params=None):
        unit = _unit_of(params)
        if unit == 1:
            return optimizer.update(updates, state, params)
        moved, state = optimizer.update(source_gradients(updates, params), state, _times(params, 1 / unit))
        return _times(moved, unit), state

    return optax.GradientTransformation(optimizer.init, update)


def source_gradients(grads: PyTree, params: PyTree) -> PyTree:
    """Return gradients as those of the model which the parameters were made of.

    Args:
      grads: of the parameters.
      params: a model; what is no model has its own units.
    """
    unit = _unit_of(params)
    return grads if unit == 1 else _times(grads, unit)  # a weight is so many times smaller there


def _unit_of(params: PyTree) -> float:
    """Return a model's `stream_unit`; 1 of parameters that are no model."""
    return stream_unit(params.config) if isinstance(params, M3) else 1.0


def _times(model: M3, factor: float) -> M3:
    """Return a model's pytree with the parameters that write into the stream multiplied."""
    return map_names(lambda name, leaf: leaf * factor if name.endswith(WRITERS) else leaf, model)


def map_names(fn: Callable[[str, Array], object], tree: PyTree) -> PyTree:
    """Map over leaves with their attribute path, as in "stacks.0.mlp.gate".

    Args:
      fn: of a name and its leaf.
      tree: of parameters, or of what an optimiser has for each.
    """

    def apply(path, leaf):
        entries = (getattr(p, "name", getattr(p, "key", getattr(p, "idx", ""))) for p in path)
        return fn(".".join(map(str, entries)).removesuffix(".value"), leaf)

    return jax.tree_util.tree_map_with_path(apply, tree)
