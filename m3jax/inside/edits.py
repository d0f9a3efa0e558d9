"""Edits that readings are made of: functions of a named value whose arrays may change without a new program.

Each is a pytree, so that a compiled call takes its arrays as arguments. A function of your own serves as well
(`m3jax.model.M3.__call__`); `jax.tree_util.Partial(f, array)` brings arrays along.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped


@struct.dataclass
class Add:
    """An edit that adds a vector, or an array that broadcasts to the value."""

    vector: Float[Array, "..."]

    def __call__(self, value: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the value plus the vector."""
        return value + self.vector


@struct.dataclass
class Put:
    """An edit that puts other numbers in the place of some of a value's.

    Attributes:
      value: what is put, of the value's shape, or an array that broadcasts to it.
      where: True for the places that change; it broadcasts to the value.
    """

    value: Shaped[Array, "..."]
    where: Bool[Array, "..."]

    def __call__(self, value: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return the value with other numbers where they are wanted."""
        return jnp.where(self.where, jnp.asarray(self.value).astype(value.dtype), value)


@struct.dataclass
class PatchAt:
    """An edit of all layers' values that changes one layer at one token alone, for `patch_effects`.

    Attributes:
      values: of the layers 0, 1, 2, ... in another run.
      layer: the one that changes.
      position: the token that changes, counted from the beginning of the row.
    """

    values: Shaped[Array, "L B T ..."]
    layer: Int[Array, ""]
    position: Int[Array, ""]

    def __call__(self, value: Shaped[Array, "B T ..."], seen: Mapping[str, Array]) -> Shaped[Array, "B T ..."]:
        """Return the value, with the other run's where the layer and the token are those asked for."""
        is_here = (seen["positions"] == self.position) & (seen["layer"] == self.layer)  # [B T]
        return jnp.where(is_here.reshape(*is_here.shape, *[1] * (value.ndim - 2)), self.values[seen["layer"]], value)


@struct.dataclass
class WithoutBlock:
    """An edit of "blocks" that takes a block out of the selections of some KV heads; nothing takes its place.

    A query's own block stays: it is in every selection.

    Attributes:
      block: its id.
      heads: True for the KV heads that lose it.
    """

    block: Int[Array, ""]
    heads: Bool[Array, " K"]

    def __call__(self, blocks: Int[Array, "B K T J"]) -> Int[Array, "B K T J"]:
        """Return the selections without the block: ascending ids, then -1."""
        last = jnp.max(blocks, axis=-1, keepdims=True)  # the own block, which a query never loses
        is_lost = (blocks == self.block) & (blocks != last) & jnp.asarray(self.heads)[:, None, None]
        behind_all = jnp.iinfo(blocks.dtype).max  # sorted last, then -1 again
        kept = jnp.sort(jnp.where(is_lost | (blocks < 0), behind_all, blocks), axis=-1)
        return jnp.where(kept == behind_all, -1, kept)


@struct.dataclass
class WithoutExpert:
    """An edit of "expert_weights" that gives an expert the weight 0; the others keep theirs.

    Attributes:
      expert: its id.
    """

    expert: Int[Array, ""]

    def __call__(self, weights: Float[Array, "B T A"], seen: Mapping[str, Array]) -> Float[Array, "B T A"]:
        """Return the weights, 0 where the layer chose the expert."""
        return jnp.where(seen["expert_ids"] == self.expert, 0.0, weights)
