"""From the projections of a layer to its queries, keys and values: per-head norm, rotary embedding, rounding."""

from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax.model.layers import apply_rope, gemma_norm
from m3jax.ops import Heads


@struct.dataclass
class Projections:
    """Projections before norm and rotation, with what these two need.

    Attributes:
      raw: q [B T N H], k and v [B T K H], index_q [B T K I] and index_k [B T I], in the accumulator's dtype.
      norms: weights of their norms, [H] or [I]; v has none.
      cos: cosines of each token's angles.
      sin: sines.
      eps: of the norm.
      dtype: what is computed in the accumulator's dtype is rounded to this, once.
    """

    raw: Heads
    norms: Heads
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    eps: float = struct.field(pytree_node=False)
    dtype: DTypeLike = struct.field(pytree_node=False)

    def finish(self) -> Heads:
        """Queries, keys and values: normed, rotated, rounded."""

        def norm_and_rotate(x: Float[Array, "B T N H"], weight: Float[Array, " H"]) -> Float[Array, "B T N H"]:
            return apply_rope(gemma_norm(x, weight, self.eps), self.cos, self.sin).astype(self.dtype)

        raw, norms = self.raw, self.norms
        q, k = norm_and_rotate(raw.q, norms.q), norm_and_rotate(raw.k, norms.k)
        if raw.index_q is None:
            return Heads(q, k, raw.v.astype(self.dtype), None, None)
        index_q = norm_and_rotate(raw.index_q, norms.index_q)
        index_k = norm_and_rotate(raw.index_k[:, :, None], norms.index_k)[:, :, 0]  # [B T I] -> [B T 1 I] -> [B T I]
        return Heads(q, k, raw.v.astype(self.dtype), index_q, index_k)
