"""What a module asks for each of its parameters; `m3jax.model.build` answers with shapes, axes, or random weights."""

from typing import Protocol, runtime_checkable

from flax import nnx


@runtime_checkable
class Make(Protocol):
    """Makes the parameters of a tree: each constructor of a module takes one."""

    def weight(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], *, fan_in: int, dtype: str | None = None
    ) -> nnx.Param:
        """A matrix, or a stack of them.

        Args:
          shape: of the parameter.
          axes: a logical name for each dimension (`m3jax.parallel.RULES`), or None for one that is never divided.
          fan_in: terms of a sum over it: random weights have a standard deviation of fan_in**-0.5.
          dtype: the least that it is kept in, whatever the model's dtype is; None for the model's.
        """
        ...

    def norm(self, shape: tuple[int, ...], *, dtype: str | None = None) -> nnx.Param:
        """The weights of a norm, or a bias; every device has them whole."""
        ...
