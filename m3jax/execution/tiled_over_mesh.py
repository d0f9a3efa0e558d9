"""The invariant mode over a mesh: tiles of tokens, of which each device computes its part, added up in one order."""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.execution.divided import divided_layer
from m3jax.execution.over_mesh import OverMesh, unembed_over_mesh
from m3jax.execution.tiled import Tiled
from m3jax.numerics import sum_over_devices


def with_even_columns(
    expert_ids: Int[Array, "X A"], weights: Float[Array, "X A"], num_devices: int
) -> tuple[Int[Array, "X _"], Float[Array, "X _"]]:
    """Return choices with columns of -1, no expert, and weight 0 behind them, so that devices divide the columns.

    Each device then gets the same columns of every token, wherever in the call the token stands.

    Args:
      expert_ids, weights: of each token.
      num_devices: those among which a token's experts are divided.
    """
    unused = ((0, 0), (0, -expert_ids.shape[1] % num_devices))
    return jnp.pad(expert_ids, unused, constant_values=-1), jnp.pad(weights, unused)


class TiledOverMesh(Tiled, OverMesh):
    """A `Tiled` whose programs say what each device multiplies, and in which order parts of a sum are added.

    Left to itself the compiler divides a tile in one way in one program and in another way in the next, and an
    all-reduce of several devices may add an element's parts in an order that its place decides.
    """

    sum_over_devices = staticmethod(sum_over_devices)

    def each_token(self, fn):
        """Return the function with a loop over tiles around it, each of which every device has before and after."""
        return super().each_token(lambda *tile: self._whole(fn(*self._whole(tile))))

    def prepared(self, layer):
        """Return the layer with matrices that say how they lie on the mesh: every device multiplies all tokens."""
        return divided_layer(layer, self.compute, sys.maxsize, is_ordered=True)

    def experts(self, x, expert_ids, weights, matrices, activate, shared, scale):
        """Return the sum of each token's experts; each device of the context axis has the same share of every token."""
        choices = (y.reshape(-1, y.shape[-1]) for y in (expert_ids, weights))  # [X A] twice
        choices = with_even_columns(*choices, self.compute.mesh.shape["context"])
        return super().experts(x, *choices, matrices, activate, shared, scale)

    def unembed(self, hidden, head):
        """Return logits on every device, tile by tile."""
        return self._whole(super().unembed(hidden, head))

    def logits_of_tile(self, hidden, head):
        """Return the logits of one tile on every device: each multiplies its part of the vocabulary."""
        return unembed_over_mesh(super().logits_of_tile, self._whole(hidden), head, self.compute.mesh, "xla")

    def _whole(self, arrays):
        """Return arrays with all of each on every device, however the compiler divides what reads them."""
        return jax.lax.with_sharding_constraint(arrays, NamedSharding(self.compute.mesh, P()))
