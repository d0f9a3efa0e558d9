"""The invariant mode in tiles: tokens in tiles of one size, all by one program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from m3jax.execution import plain
from m3jax.execution.fast import Fast
from m3jax.numerics import einsum
from m3jax.tiles import by_tiles


@dataclass(frozen=True)
class Tiled(Fast):
    """A token's bits depend on no other token: a loop over tiles runs one program for each (`m3jax.tiles`).

    What surrounds a token in its tile changes none of its bits, and neither do the tiles of others.
    """

    takes_layers_apart = False  # prompts and steps run the same programs

    product_backend = "xla"  # a kernel sums in an order that the number of tokens decides

    def each_token(self, fn: Callable[..., PyTree[Array]]) -> Callable[..., PyTree[Array]]:
        """The function of a tile of tokens after the other."""
        as_one_row = lambda *tile: jax.tree.map(lambda x: x[0], fn(*jax.tree.map(lambda x: x[None], tile)))

        @wraps(fn)
        def tile_by_tile(*arrays):
            batch_and_length = jax.tree.leaves(arrays)[0].shape[:2]
            tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
            out = by_tiles(as_one_row, self.compute.token_tile, *tokens)
            return jax.tree.map(lambda x: x.reshape(*batch_and_length, *x.shape[1:]), out)

        return tile_by_tile

    def heads(self, projections):
        """Heads finished with the rest of the tile."""
        return projections.finish()

    def before_mesh(self, expert_ids, weights):
        """The choices with as many columns as the devices of the context axis divide.

        With a choice or several for each of them, a token's place does not say who gets which.
        """
        unused = ((0, 0), (0, -expert_ids.shape[1] % self.compute.mesh.shape["context"]))
        return jnp.pad(expert_ids, unused, constant_values=-1), jnp.pad(weights, unused)

    def sum_of_experts(self, out, weights):
        """The weighted sum, tile by tile."""
        return by_tiles(plain.weighted_sum, self.compute.token_tile, out, weights)

    def unembed(self, hidden, head):
        """One product a tile."""
        product = lambda hidden: einsum("xd,vd->xv", hidden, head)
        rows = hidden.reshape(-1, hidden.shape[-1])
        return by_tiles(product, self.compute.token_tile, rows).reshape(*hidden.shape[:-1], -1)
