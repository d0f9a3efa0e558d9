"""Steering of single requests: vectors that change named values of one row of a batch, and of no other.

A request brings a `Steer` for each value that it changes. An engine was made for the names of some values
(`Work.edits`); a call of the device gets the vectors of all its rows for each of them, so that a new vector compiles
nothing. On the way through the model they are edits like any other (`m3jax.model.M3.__call__`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from m3jax.decoding.sampling import HostOrDevice
from m3jax.messages import shown
from m3jax.tiles import LOGITS_TILE, by_tiles

KEYS_APART = 1 << 40  # how far the keys of equal prompts lie apart whose requests are steered otherwise

# What an edit of the residual stream can be made at: values [B T D].
STEERED = ("embedding", "input", "attention_norm", "attention_out", "ffn_norm", "ffn_out", "output", "final_norm")


@dataclass(frozen=True, eq=False)
class Steer:
    """A change of a value x of width D: `scale` (x - (x . u) u) + `add`, u the unit vector along `without`.

    It is computed in float32 and rounded once to x's dtype, for every token of the request.

    Attributes:
      add: vector to add; None for none.
      scale: factor of x.
      without: direction that is projected out of x, of any length but 0; None for none.
    """

    add: Float[HostOrDevice, "D"] | Sequence[float] | None = None
    scale: float = 1.0
    without: Float[HostOrDevice, "D"] | Sequence[float] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steering:
    """The `Steer` of each of B rows at one value, as arrays; a function of that value.

    Attributes:
      is_steered: rows that have one; the others' values keep their bits.
      add: 0 for none.
      scale: 1 for none.
      without: unit vectors, or 0.
      is_invariant: whether tokens are computed in tiles of one size, so that a token's bits depend on its row alone.
    """

    is_steered: Bool[HostOrDevice, "B"]
    add: Float32[HostOrDevice, "B D"]
    scale: Float32[HostOrDevice, "B"]
    without: Float32[HostOrDevice, "B D"]
    is_invariant: bool = field(metadata=dict(static=True), default=False)

    def __call__(self, value: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the value with the rows that have a `Steer` changed."""
        batch, num_tokens, width = value.shape
        of_tokens = lambda x: jnp.repeat(jnp.asarray(x), num_tokens, axis=0)  # [B ...] -> [B*T ...]

        def change(x, add, scale, without):
            along = jnp.sum(x * without, axis=-1, keepdims=True)
            return scale[:, None] * (x - along * without) + add

        rows = value.reshape(-1, width).astype(jnp.float32)
        vectors = (of_tokens(x) for x in (self.add, self.scale, self.without))
        changed = by_tiles(change, LOGITS_TILE if self.is_invariant else None, rows, *vectors)
        changed = changed.reshape(batch, num_tokens, width).astype(value.dtype)
        return jnp.where(jnp.asarray(self.is_steered)[:, None, None], changed, value)


def steering_of(
    edits: Sequence[Mapping[str, Steer] | None], names: Sequence[str], width: int, is_invariant: bool
) -> dict[str, Steering]:
    """Return the vectors of some rows for each name, on the host.

    Args:
      edits: of each row; None for none.
      names: of the values that any row can change.
      width: D.
      is_invariant: as of `Steering`.
    """

    def unit(vector):
        vector = np.asarray(vector, np.float64)
        return (vector / np.linalg.norm(vector)).astype(np.float32)

    found = {}
    for name in names:
        of_rows = [(of_row or {}).get(name) for of_row in edits]
        add, without = (np.zeros((len(edits), width), np.float32) for _ in range(2))
        scale = np.ones(len(edits), np.float32)
        for row, steer in enumerate(of_rows):
            if steer is not None:
                add[row] = 0.0 if steer.add is None else np.asarray(steer.add, np.float32)
                scale[row] = steer.scale
                without[row] = 0.0 if steer.without is None else unit(steer.without)
        is_steered = np.array([steer is not None for steer in of_rows])
        found[name] = Steering(is_steered, add, scale, without, is_invariant)
    return found


def check_steering(edits: Mapping[str, Steer], names: Sequence[str], width: int) -> None:
    """Raise ValueError for a request's edits that an engine cannot make.

    Args:
      edits: by full name.
      names: of the values that requests of the engine can change.
      width: D.
    """
    for name, steer in edits.items():
        if name not in names:
            raise ValueError(f"edits has {name!r}: requests of this engine can change {', '.join(names)} (Work.edits)")
        if not isinstance(steer, Steer):
            raise ValueError(f"edits[{name!r}] = {shown(steer)}: requests of an engine are steered by Steer objects")
        for field_name in ("add", "without"):
            vector = getattr(steer, field_name)
            if vector is None:
                continue
            array = np.asarray(vector, np.float64)
            if array.shape != (width,) or not np.isfinite(array).all():
                raise ValueError(
                    f"edits[{name!r}].{field_name} has shape {list(array.shape)}: give {width} finite numbers"
                )
            if field_name == "without" and not array.any():
                raise ValueError(f"edits[{name!r}].without is 0: it has no direction; leave it out")
        if not np.isfinite(steer.scale):
            raise ValueError(f"edits[{name!r}].scale = {steer.scale}: must be a finite number")


class KeyOffsets:
    """The offsets of the keys of pages, one for each way to steer: pages that were steered otherwise are not shared."""

    def __init__(self) -> None:
        self._of_digest: dict[bytes, int] = {}

    def offset(self, edits: Mapping[str, Steer] | None) -> int:
        """Return what is added to the key of a request's first token, which tells all its pages apart; 0 for no edits.

        Args:
          edits: of the request.
        """
        if not edits:
            return 0
        digest = blake2b(digest_size=16)
        for name in sorted(edits):
            steer = edits[name]
            parts = (np.asarray(x, np.float64).tobytes() for x in (steer.add, steer.without) if x is not None)
            which = steer.add is not None, steer.without is not None, float(steer.scale)
            digest.update(repr((name, which)).encode() + b"".join(parts))
        return KEYS_APART * self._of_digest.setdefault(digest.digest(), len(self._of_digest) + 1)
