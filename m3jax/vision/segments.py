"""The first and the last patch of each segment in a packed batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Runs(NamedTuple):
    """For each row: the first row of its segment, the row behind its last, and True unless it is padding.

    Patches of a segment stand together, and padding behind the last.
    """

    first: Int[Array, " X"]
    end: Int[Array, " X"]
    is_patch: Bool[Array, " X"]

    @classmethod
    def of(cls, segments: Int[Array, " X"]) -> "Runs":
        """Return the runs of equal segment numbers; rows with a negative number are padding.

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
        """For each row, True if it is the first patch of a segment."""
        return self.is_patch & (jnp.arange(len(self.first), dtype=jnp.int32) == self.first)
