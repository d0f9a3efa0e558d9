"""Norm and rotary embedding of queries and keys, and the write of keys and values into their pages."""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_pages
from pallas_kernels.pages import Pages

__all__ = ["Projected", "Written", "qk_norm_rope_insert"]


class Projected(NamedTuple):
    """Projections of a layer before norm, or the weights of their norms (then one vector each, and no `v`)."""

    q: Float[Array, "..."] | None
    k: Float[Array, "..."]
    v: Float[Array, "..."] | None
    index_q: Float[Array, "..."] | None = None
    index_k: Float[Array, "..."] | None = None


class Written(NamedTuple):
    """Queries ready for attention, and the pools with the new tokens in them."""

    q: Float[Array, "B T N H"]
    index_q: Float[Array, "B T K I"] | None
    k: Float[Array, "X P H"]
    v: Float[Array, "X P H"]
    index_k: Float[Array, "Y P I"] | None


@dataclass(frozen=True)
class Call(backends.Call):
    """Norm, rotate and write a layer's new tokens.

    Args:
      x: q `[B T N H]`, k and v `[B T K H]`, and for a sparse layer index_q `[B T K I]` and index_k `[B T I]`; best in
        float32, as the projections accumulate, and with "mosaic_tpu" finite.
      norms: weights of the norms, `[H]` and `[I]`; applied as 1 + weight. None for queries, or index queries, that are
        normed and rotated already: they are returned as they came.
      cos: cosines of each token's angles, R of them; dims (i, i + R) of a head are rotated, those from 2R on are not.
      sin: sines.
      positions: slot of each token, counted in its row; < 0 or >= lengths marks padding, which is not written.
      lengths: valid keys of each row, these tokens included.
      k: where keys go; the pool is donated if the caller's jit donates it.
      v: where values go.
      index_k: where index keys go.
      eps: of the norm.
      dtype: of the queries.
      scales: what stored keys, values and index keys (head 0) are multiplied with when read: they are stored divided
        by it.

    Returns:
      Written. The pools keep their shapes `[pages P H]`.

    Source: transformers `MiniMaxM3VLRMSNorm`, rotary embedding over half-split dims.
    """

    x: Projected
    norms: Projected
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    k: Pages
    v: Pages
    index_k: Pages | None = None
    _: KW_ONLY
    eps: float
    dtype: jax.typing.DTypeLike
    scales: Float[Array, "3 K"] | None = None

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        _check_together(self.x, self.k, self.v, self.index_k, self.cos)
        for name, pages in (("k", self.k), ("v", self.v), ("index_k", self.index_k)):
            if pages is not None:
                check_pages(name, pages, self.x.q.shape[0], limits, self.interpret)


qk_norm_rope_insert = op(Call)


def _check_together(x: Projected, k: Pages, v: Pages, index_k: Pages | None, cos: Float[Array, "B T R"]) -> None:
    """Raise ValueError where projections, pages and angles do not fit together."""
    if (x.index_q is None) != (index_k is None) or (x.index_k is None) != (index_k is None):
        raise ValueError("index_q, index_k and index pages come together: give all three, or none")
    widths = (x.q.shape[-1], x.k.shape[-1], k.width, v.width)
    if len(set(widths)) > 1 or x.q.shape[2] % x.k.shape[2] or 2 * cos.shape[-1] > widths[0]:
        raise ValueError(
            f"q has shape {x.q.shape}, k {x.k.shape}, pages width {k.width} and {v.width}, cos {cos.shape}: need one "
            "width, query heads a multiple of KV heads, and at most half as many angles as dims"
        )
    if index_k is not None and (x.index_q.shape[-1] != index_k.width or x.index_q.shape[2] != x.k.shape[2]):
        raise ValueError(
            f"index_q has shape {x.index_q.shape} and index pages width {index_k.width}: need {x.k.shape[2]} heads of "
            "that width"
        )
