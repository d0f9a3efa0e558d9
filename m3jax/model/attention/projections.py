"""From the projections of a layer to its queries, keys and values: per-head norm, rotary embedding, rounding."""

from functools import partial

from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax.model.layers import apply_rope, gemma_norm
from m3jax.ops import Heads, norm_rope_in_order


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

    def finish(self, is_ordered: bool = False) -> Heads:
        """Queries, keys and values: normed, rotated, rounded.

        Args:
          is_ordered: by a kernel that gives a token the same bits whatever else a call has (`m3jax.ops.ordered`).
        """

        def norm_and_rotate(heads, norms, cos, sin):
            pairs = zip(heads, norms, strict=True)
            return tuple(
                apply_rope(gemma_norm(x, weight, self.eps), cos, sin).astype(self.dtype) for x, weight in pairs
            )

        raw, norms = self.raw, self.norms
        heads, weights = [raw.q, raw.k], [norms.q, norms.k]
        if raw.index_q is not None:
            heads += [raw.index_q, raw.index_k[:, :, None]]  # [B T I] -> [B T 1 I]
            weights += [norms.index_q, norms.index_k]
        if is_ordered:
            norm_and_rotate = partial(norm_rope_in_order, norm_and_rotate, eps=self.eps, dtype=self.dtype)
        q, k, *index = norm_and_rotate(heads, weights, self.cos, self.sin)
        index_q, index_k = (index[0], index[1][:, :, 0]) if index else (None, None)
        return Heads(q, k, raw.v.astype(self.dtype), index_q, index_k)
