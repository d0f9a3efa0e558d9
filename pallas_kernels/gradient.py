"""Gradients of an attention kernel through another schedule of the same definition."""

from collections.abc import Callable

import jax
from jaxtyping import Array


def with_gradient(kernel: Callable[..., Array], schedule: Callable[..., Array]) -> Callable[..., Array]:
    """`kernel` forward, the gradient of `schedule` backward.

    Args:
      kernel: maps (q, k, v) to the outputs. What it selects, its positions and its lengths are closed over: they have
        no gradient, and the backward pass must not choose again.
      schedule: the same function in operations that JAX can differentiate.

    Returns:
      A function of (q, k, v), which are also all that is kept for the backward pass.
    """

    @jax.custom_vjp
    def attend(q, k, v):
        return kernel(q, k, v)

    def backward(kept, gradient):
        return jax.vjp(schedule, *kept)[1](gradient)

    attend.defvjp(lambda q, k, v: (kernel(q, k, v), (q, k, v)), backward)
    return attend
