"""Where the segments of a packed batch lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Runs(NamedTuple):
    """Of each patch: the first row of its segment, the row behind its last, and whether it is a patch, not padding.

    Patches of a segment stand together, and padding behind the last.
    """

    first: Int[Array, " X"]
    end: Int[Array, " X"]
    is_patch: Bool[Array, " X"]

    @classmethod
    def of(cls, segments: Int[Array, " X"]) -> "Runs":
        """The runs of equal numbers; negative ones are padding.

        Args:
          segments: of each patch.
        """
        row = jnp.arange(len(segments), dtype=jnp.int32)
        changes = segments[1:] != segments[:-1]
        begins = jnp.concatenate([jnp.ones(1, bool), changes])
        ends = jnp.concatenate([changes, jnp.ones(1, bool)])
        first = jax.lax.cummax(jnp.where(begins, row, 0))
        end = jax.lax.cummin(jnp.where(ends, row + 1, len(segments)), reverse=True)
        return cls(first, end, segments >= 0)

    @property
    def begins(self) -> Bool[Array, " X"]:
        """Whether a patch is the first of its segment."""
        return self.is_patch & (jnp.arange(len(self.first), dtype=jnp.int32) == self.first)
