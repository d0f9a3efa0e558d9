"""Norm, rotation and the write of new keys and values into their pages, all in one kernel."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from m3jax.msa import Paged, PagedIndex
from m3jax.ops.backends import choose, interpreted
from m3jax.ops.cases import PagesCase
from m3jax.ops.kernel_pages import kernel_pages


class Heads(NamedTuple):
    """Queries, keys and values of a layer's new tokens, or one norm weight for each of them.

    q [B T N H], k and v [B T K H], index_q [B T K I], index_k [B T I]; of norm weights [H] or [I], and no v. None
    stands for what there is not: the index branch in dense layers, keys and values once a kernel has written them.
    """

    q: Float[Array, "..."] | None = None
    k: Float[Array, "..."] | None = None
    v: Float[Array, "..."] | None = None
    index_q: Float[Array, "..."] | None = None
    index_k: Float[Array, "..."] | None = None


def insert(
    projections: Heads,
    norms: Heads,
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    view: Paged,
    index: PagedIndex | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    eps: float,
    scales: Float[Array, "3 K"],
    backend: str,
) -> tuple[Array, Array | None, Num[Array, "L X K P H"], Num[Array, "L X K P H"], Num[Array, "L X P I"] | None]:
    """Norm, rotate and write a layer's projections by a kernel (without one the model does it in steps).

    Args:
      projections: before the norm, in float32: q [B T N H], k and v [B T K H], and of the index branch, where there is
        one, index_q [B T K I] and index_k [B T I].
      norms: weights of their norms; v has none, nor have queries that are normed and rotated already.
      cos: cosines of each token's angles.
      sin: sines.
      view: where keys and values go; queries come in its dtype.
      index: where index keys go; None where attention is dense.
      positions: slot of each token; < 0 or >= lengths marks padding, which is not written.
      lengths: valid keys of each row, these tokens included.
      eps: of the norm.
      scales: what stored keys, values and index keys (head 0) are multiplied with when read.
      backend: what `insert_backend` said; not "xla".

    Returns:
      (q, index_q, and the memory of keys, values and index keys with the new tokens).
    """
    from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert

    index_pages = None if index is None else kernel_pages(index, index.k)
    written = qk_norm_rope_insert(
        Projected(**projections._asdict()), Projected(**norms._asdict()), cos, sin, positions, lengths,
        kernel_pages(view, view.k), kernel_pages(view, view.v), index_pages,
        eps=eps, scales=scales, dtype=view.dtype, interpret=interpreted(), backend=backend,
    )  # fmt: skip
    index_k = None if index is None else written.index_k.reshape(index.k.shape)
    return written.q, written.index_q, written.k.reshape(view.k.shape), written.v.reshape(view.v.shape), index_k


def insert_backend(
    q: Float[Array, "B T N H"], view: Paged, index: PagedIndex | None, rotated: int, backend: str = "auto"
) -> str:
    """Return the backend whose kernel inserts a call's tokens; "xla" where none does.

    Args:
      q: projections of the queries.
      view: where keys and values go.
      index: where index keys go.
      rotated: dims of a head that the rotary embedding turns.
      backend: one of `m3jax.ops.BACKENDS`.

    Raises:
      ValueError: a backend that cannot run this.
    """
    width = max(view.k.shape[-1], 0 if index is None else index.k.shape[-1])
    stored = (view.k.dtype, *(() if index is None else (index.k.dtype,)))
    # Of the dtypes of keys and index keys, the one that is less usual decides.
    float8 = jnp.dtype("float8_e4m3fn")
    unusual = next((dtype for dtype in stored if dtype not in (view.dtype, float8)), view.k.dtype)
    case = PagesCase(
        op="insert", queries=q.shape[1], dtype=jnp.dtype(view.dtype), stored=unusual, width=width,
        block_size=view.block_size, num_blocks=view.num_blocks, group=q.shape[2] // view.num_heads, rotated=rotated,
    )  # fmt: skip
    return choose(case, backend)
