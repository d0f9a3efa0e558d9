"""The model as training runs it: rows without padding or cache, with what a GPU does fast (docs/tiny.md).

The same function of the same parameters. Away from a GPU the definitions of m3jax.msa run, row by row.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jaxtyping import Array, Float, Int

from m3jax.cache import CallPages
from m3jax.model import M3
from m3jax.msa import SelectionRules, block_scores, dense_attention, select_blocks, sparse_attention
from m3jax.msa.chunks import map_chunks
from m3jax.msa.schedules import index_walk
from m3jax.msa.views import contiguous_index
from m3jax.platform import platform
from m3jax.spec.msa import chosen_tokens


def fuse(model: M3) -> M3:
    """Return the model with the same parameters and this module's schedules.

    Args:
      model: not changed. All its schedules are alike here; with `with_dense` nothing is selected.

    Returns:
      A model for calls without a cache and without padding.
    """
    return model.with_training_paths(WholeRows, "trained" if platform() == "gpu" else "auto")


@struct.dataclass
class WholeRows(CallPages):
    """The keys of a call whose rows begin at position 0 and have no padding."""

    read_by_kernels: ClassVar[bool] = False

    def select(self, call, index_q, rules):
        """Return the blocks that each query keeps."""
        return select_in_whole_rows(index_q, self.heads.index_k, rules, self.block_size)

    def attend_selected(self, call, q, blocks):
        """Return attention over the selected blocks, and this object."""
        return causal_attention(q, self.heads.k, self.heads.v, blocks, self.block_size), self

    def attend_all(self, call, q):
        """Return attention over every visible key, and this object."""
        return causal_attention(q, self.heads.k, self.heads.v, None, self.block_size), self


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    blocks: Int[Array, "B K T J"] | None,
    block_size: int,
) -> Float[Array, "B T N H"]:
    """Compute attention of whole rows from position 0 on: dense, or over the selected blocks.

    On a GPU, in a 16-bit dtype, cuDNN computes it and holds a mask but no scores.

    Args:
      q: queries; head n reads KV head n // (N // K).
      k: keys.
      v: values.
      blocks: the selection, or None for dense attention.
      block_size: P.

    Returns:
      Outputs in q's dtype.
    """
    if platform() == "gpu" and q.dtype.itemsize == 2:
        return attend_under_mask(q, k, v, blocks, block_size, "cudnn")

    def dense(q, k, v):
        return dense_attention(q, k, v, *_whole_rows(*q.shape[:2]))

    def sparse(q, k, v, blocks):
        return sparse_attention(q, k, v, blocks, *_whole_rows(*q.shape[:2]), block_size=block_size)

    return map_chunks(dense, 1, 0, q, k, v) if blocks is None else map_chunks(sparse, 1, 0, q, k, v, blocks)


def attend_under_mask(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    blocks: Int[Array, "B K T J"] | None,
    block_size: int,
    implementation: str,
) -> Float[Array, "B T N H"]:
    """Compute `causal_attention` by `jax.nn.dot_product_attention`.

    KV heads become rows of the batch, so that one mask serves all query heads of a group.

    Args:
      q, k, v, blocks, block_size: as in `causal_attention`.
      implementation: "cudnn", or "xla" to test the layout without a GPU.
    """
    length, heads = k.shape[1:3]
    rows_of_heads = (rearrange(x, "b t (k g) h -> (b k) t g h", k=heads) for x in (q, k, v))
    mask = None
    if blocks is not None:
        mask = rearrange(chosen_tokens(blocks, length, block_size), "b k t s -> (b k) 1 t s")
    out = jax.nn.dot_product_attention(*rows_of_heads, mask=mask, is_causal=True, implementation=implementation)
    return rearrange(out, "(b k) t g h -> b t (k g) h", k=heads)


def select_in_whole_rows(
    index_q: Float[Array, "B T K I"], index_k: Float[Array, "B T I"], rules: SelectionRules, block_size: int
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps in rows from position 0 on; a GPU holds all token scores at once.

    Args:
      index_q: index queries.
      index_k: index keys.
      rules: of selection.
      block_size: P.
    """
    positions, lengths = _whole_rows(*index_k.shape[:2])
    index_q, index_k = jax.lax.stop_gradient((index_q, index_k))
    if platform() == "gpu":
        scores = block_scores(index_q, index_k, positions, lengths, block_size, rules.score)
        return select_blocks(scores, positions, lengths, rules, block_size=block_size)
    return index_walk(index_q, contiguous_index(index_k, block_size), positions, lengths, rules)


def _whole_rows(batch: int, length: int) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Return the positions and lengths of rows without padding."""
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return positions, jnp.full(batch, length, jnp.int32)
