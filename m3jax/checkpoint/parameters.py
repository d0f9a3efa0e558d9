"""A model's parameters by their hub names, as the definition takes them."""

import numpy as np
from jaxtyping import Array, Float

from m3jax.checkpoint import tree
from m3jax.checkpoint.names import targets
from m3jax.model import M3


def hub_parameters(model: M3) -> dict[str, Float[Array, "..."]]:
    """Return the text model's parameters by hub name, matrices [out, in], as `m3jax.spec.forward` takes them.

    Args:
      model: A model whose weights are numbers.

    Raises:
      ValueError: Weights in MXFP8.
    """
    if model.is_mxfp8:
        raise ValueError("the model's weights are in MXFP8: give m3jax.model.dequantize(model)")
    parameters = tree.flatten(model)
    return {
        name: parameters[target.param][target.index].transpose(np.argsort(target.perm)).reshape(target.hub_shape)
        for name, target in targets(model.config).items()
        if not target.param.startswith("vision.")
    }
