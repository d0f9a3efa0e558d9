"""A layer's projections on their way to queries, keys and values: per-head norm, rotary embedding, rounding."""

from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax.execution.plain import apply_rope, gemma_norm
from m3jax.ops import Heads, norm_rope_in_order


@struct.dataclass
class Projections:
    """Projections before norm and rotation, with what these two need.

    Attributes:
      raw: Arrays q [B T N H], k and v [B T K H], index_q [B T K I] and index_k [B T I], in the accumulator's dtype, or
        finished.
      norms: Weights of their norms, [H] or [I]. v has none, and neither have heads that are finished.
      cos: Cosines of each token's angles.
      sin: Sines of each token's angles.
      eps: Epsilon of the norm.
      dtype: Dtype that finished heads are rounded to, once.
    """

    raw: Heads
    norms: Heads
    cos: Float[Array, "B T R"] | None = None
    sin: Float[Array, "B T R"] | None = None
    eps: float = struct.field(pytree_node=False, default=0.0)
    dtype: DTypeLike = struct.field(pytree_node=False, default=None)

    @classmethod
    def of_heads(cls, heads: Heads) -> "Projections":
        """Return projections with nothing left to do."""
        return cls(heads, Heads(q=None, k=None), dtype=heads.q.dtype)

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to do."""
        return self.norms.k is None

    def finish(self) -> Heads:
        """Return queries, keys and values: normed, rotated, rounded."""
        return self.raw if self.is_finished else self._heads_by(self._norm_and_rotate)

    def finish_queries(self) -> "Projections":
        """Return the same with queries, and index queries, that are normed, rotated and rounded already."""
        names = [name for name in ("q", "index_q") if getattr(self.raw, name) is not None]
        heads, norms = ([getattr(of, name) for name in names] for of in (self.raw, self.norms))
        finished = dict(zip(names, self._norm_and_rotate(heads, norms, self.cos, self.sin), strict=True))
        return self.replace(raw=self.raw._replace(**finished), norms=self.norms._replace(q=None, index_q=None))

    def finish_in_order(self) -> Heads:
        """Compute `finish` by a kernel that gives a token the same bits in any call (`m3jax.ops.ordered`)."""
        return self._heads_by(
            lambda *arrays: norm_rope_in_order(self._norm_and_rotate, *arrays, eps=self.eps, dtype=self.dtype)
        )

    def _norm_and_rotate(self, heads, norms, cos, sin):
        finished = []
        for x, weight in zip(heads, norms, strict=True):
            # Rounded once, after both: between the norm and the rotation numbers stay in the accumulator's dtype.
            finished.append(apply_rope(gemma_norm(x, weight, self.eps), cos, sin).astype(self.dtype))
        return tuple(finished)

    def _heads_by(self, norm_and_rotate) -> Heads:
        """Return all heads, by one call of a function of (heads, norms, cos, sin); values are only rounded."""
        raw, norms = self.raw, self.norms
        heads, weights = {"q": raw.q, "k": raw.k}, {"q": norms.q, "k": norms.k}
        if raw.index_q is not None:
            # All index queries share one key, which is normed and rotated as a single head: [B T I] -> [B T 1 I].
            heads |= {"index_q": raw.index_q, "index_k": raw.index_k[:, :, None]}
            weights |= {"index_q": norms.index_q, "index_k": norms.index_k}
        names = [name for name in heads if weights[name] is not None]  # finished queries have no weights
        named = [[of[name] for name in names] for of in (heads, weights)]
        heads |= zip(names, norm_and_rotate(*named, self.cos, self.sin), strict=True)
        if raw.index_q is not None:
            heads["index_k"] = heads["index_k"][:, :, 0]
        return Heads(v=raw.v.astype(self.dtype), **heads)
