"""Gradients of a kernel through another schedule of the same definition."""

from collections.abc import Callable

import jax
from jaxtyping import Array


def with_gradient(kernel: Callable[..., Array], schedule: Callable[..., Array], count: int = 3) -> Callable[..., Array]:
    """`kernel` forward, the gradient of `schedule` backward.

    Args:
      kernel: maps (*arrays, *data) to the outputs. `data`, such as a selection and positions, has no gradient; it is
        an argument and not closed over, so that the backward pass gets what the forward pass chose.
      schedule: the same function in operations that JAX can differentiate.
      count: how many arrays there are, such as q, k and v.

    Returns:
      A function of the same arguments, which are also all that is kept for the backward pass.
    """

    @jax.custom_vjp
    def call(*args):
        return kernel(*args)

    def backward(residuals, gradient):
        arrays, data = residuals[:count], residuals[count:]
        gradients = jax.vjp(lambda *arrays: schedule(*arrays, *data), *arrays)[1](gradient)
        return *gradients, *(None for _ in data)

    call.defvjp(lambda *args: (kernel(*args), args), backward)
    return call
