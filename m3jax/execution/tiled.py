"""The invariant mode in tiles: tokens in tiles of one size, all computed by one program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import jax
from jaxtyping import Array, Float, PyTree

from m3jax.execution import plain
from m3jax.execution.fast import Fast
from m3jax.execution.projections import Projections
from m3jax.numerics import einsum
from m3jax.tiles import by_tiles


@dataclass(frozen=True)
class Tiled(Fast):
    """An `Execution` that runs one program for each tile of tokens, so that a token's bits depend on no other token.

    What surrounds a token in its tile changes none of its bits, and neither do other tiles (`m3jax.tiles`).
    """

    takes_layers_apart = False  # prompts and steps run the same programs

    product_backend = "xla"  # a kernel sums in an order that the number of tokens decides

    def each_token(self, fn: Callable[..., PyTree[Array]]) -> Callable[..., PyTree[Array]]:
        """Return the function with a loop over tiles of tokens around it."""
        as_one_row = lambda *tile: jax.tree.map(lambda x: x[0], fn(*jax.tree.map(lambda x: x[None], tile)))

        @wraps(fn)
        def tile_by_tile(*arrays):
            batch_and_length = jax.tree.leaves(arrays)[0].shape[:2]
            tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
            out = by_tiles(as_one_row, self.compute.token_tile, *tokens)
            return jax.tree.map(lambda x: x.reshape(*batch_and_length, *x.shape[1:]), out)

        return tile_by_tile

    def add_norm(self, x, update, weight, eps):
        """Return a residual addition and its norm, tile by tile."""
        return self.each_token(lambda x, update: plain.add_norm(x, update, weight, eps))(x, update)

    def attend(self, projections, pages, call, rules, tap):
        """Norm and rotate tile by tile, then write, select and attend."""
        finish = lambda raw, cos, sin: projections.replace(raw=raw, cos=cos, sin=sin).finish()
        heads = self.each_token(finish)(projections.raw, projections.cos, projections.sin)
        return super().attend(Projections.of_heads(heads), pages, call, rules, tap)

    def sum_of_experts(self, out, weights):
        """Return the weighted sum, tile by tile."""
        return by_tiles(plain.weighted_sum, self.compute.token_tile, out, weights)

    def unembed(self, hidden, head):
        """Return logits, by one product a tile."""
        product = lambda tile: self.logits_of_tile(tile, head)
        rows = hidden.reshape(-1, hidden.shape[-1])
        return by_tiles(product, self.compute.token_tile, rows).reshape(*hidden.shape[:-1], -1)

    def logits_of_tile(self, hidden: Float[Array, "X D"], head: Float[Array, "V D"]) -> Float[Array, "X V"]:
        """Return the logits of one tile."""
        return einsum("xd,vd->xv", hidden, head)
