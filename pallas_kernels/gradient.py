"""Gradients of an attention kernel through another schedule of the same definition."""

from collections.abc import Callable

import jax
from jaxtyping import Array


def with_gradient(kernel: Callable[..., Array], schedule: Callable[..., Array]) -> Callable[..., Array]:
    """`kernel` forward, the gradient of `schedule` backward.

    Args:
      kernel: maps (q, k, v, *data) to the outputs. `data`, such as a selection and positions, has no gradient; it is
        an argument and not closed over, so that the backward pass gets what the forward pass chose.
      schedule: the same function in operations that JAX can differentiate.

    Returns:
      A function of (q, k, v, *data), which are also all that is kept for the backward pass.
    """

    @jax.custom_vjp
    def attend(q, k, v, *data):
        return kernel(q, k, v, *data)

    def backward(kept, gradient):
        arrays, data = kept[:3], kept[3:]
        gradients = jax.vjp(lambda *arrays: schedule(*arrays, *data), *arrays)[1](gradient)
        return *gradients, *(None for _ in data)

    attend.defvjp(lambda *args: (kernel(*args), args), backward)
    return attend
