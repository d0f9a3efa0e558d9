"""The values of a call's layers that are kept, beside the residual stream that the last one gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

# Maps a layer's named values, and what the layers of the call share (`m3jax.model.context.Context`), to the values
# that are kept.
Probe = Callable[[dict[str, Array], Any], PyTree[Array]]


@runtime_checkable
class Keep(Protocol):
    """A choice of values to keep of each layer, in a memory handed from layer to layer, or for each layer by itself."""

    def start(self, x: Float[Array, "B T D"]) -> PyTree[Array]:
        """Return the memory before the first layer, which reads `x`."""
        ...

    def after_layer(
        self, memory: PyTree[Array], num_before: int, layer: Int[Array, ""], values: dict[str, Array], context: Any
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """Return the memory, and what is kept of this layer by itself.

        Args:
          memory: of the layers before.
          num_before: layers of the model before this stack of layers.
          layer: which layer of the stack.
          values: the layer's, by name (`m3jax.execution.Values`).
          context: what the layers of the call share.
        """
        ...


@dataclass(frozen=True)
class KeepNothing:
    """A `Keep` that keeps nothing."""

    def start(self, x):
        """Return None: there is no memory."""
        return None

    def after_layer(self, memory, num_before, layer, values, context):
        """Return (None, None)."""
        return None, None


@dataclass(frozen=True)
class KeepOfEach:
    """A `Keep` of what a probe makes of each layer's named values, stacked over the layers of a stack."""

    probe: Probe

    def start(self, x):
        """Return None: there is no memory."""
        return None

    def after_layer(self, memory, num_before, layer, values, context):
        """Return None for the memory, and what the probe makes of this layer."""
        return None, self.probe(dict(values), context)  # a plain one is a pytree, if the probe keeps all


@dataclass(frozen=True)
class KeepNamed:
    """A `Keep` of the named values of each layer that the call asks for (`m3jax.execution.Inside.names`).

    Attributes:
      also: names that are kept of every layer that has them, beside those.
    """

    also: tuple[str, ...] = ()

    def start(self, x):
        """Return None: there is no memory."""
        return None

    def after_layer(self, memory, num_before, layer, values, context):
        """Return None for the memory, and the values of this layer that were asked for."""
        return None, {name: value for name, value in values.items() if name in values.kept or name in self.also}


@dataclass(frozen=True)
class KeepBoth:
    """A `Keep` of what one keeps in its memory, and of what another keeps of each layer by itself."""

    in_memory: Keep
    of_each: Keep

    def start(self, x):
        """Return the memory of the first."""
        return self.in_memory.start(x)

    def after_layer(self, memory, num_before, layer, values, context):
        """Return the memory of the first, and what the second keeps of this layer."""
        memory, _ = self.in_memory.after_layer(memory, num_before, layer, values, context)
        return memory, self.of_each.after_layer(None, num_before, layer, values, context)[1]


@dataclass(frozen=True)
class KeepResidual:
    """A `Keep` of the residual stream after some layers: 0 is the embedding, n the output of the n-th, from 1.

    The memory `[A + 1, B, T, D]` has a place for each, and a last place that all other layers write to and that is
    never read, so that every layer writes once, without a condition.
    """

    layers: tuple[int, ...]

    def start(self, x):
        """Return a memory with the embedding, if it is asked for, and room for the rest."""
        kept = [x if n == 0 else jnp.zeros_like(x) for n in self.layers]
        return jnp.stack([*kept, jnp.zeros_like(x)])

    def after_layer(self, memory, num_before, layer, values, context):
        """Return the memory with this layer's output, if it is asked for."""
        # `layer` is traced: the scan has one program for all layers of the stack, wanted or not.
        is_wanted = jnp.asarray(self.layers, jnp.int32) == num_before + layer + 1  # [A]
        memory_index = jnp.where(jnp.any(is_wanted), jnp.argmax(is_wanted), len(self.layers))
        return jax.lax.dynamic_update_index_in_dim(memory, values["output"], memory_index, 0), None
