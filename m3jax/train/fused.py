"""The model as training runs it: rows without padding or cache, with what a GPU does fast (docs/tiny.md).

The same function of the same parameters. Away from a GPU the definitions of m3jax.msa run, row by row.
"""

import copy

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.model import M3
from m3jax.model.attention import Attention
from m3jax.model.moe import Experts
from m3jax.msa import dense_attention, index_topk, select_blocks, sparse_attention
from m3jax.msa.chunks import map_chunks
from m3jax.msa.csr import invert
from m3jax.msa.sparse import expand_blocks
from m3jax.numerics import einsum
from m3jax.platform import platform

_TILE = 512  # tokens that meet an expert at once: more than an expert is wide, so its copies are the smaller part


def fuse(model: M3) -> M3:
    """The same parameters, run as this module does.

    Args:
      model: not changed. Under the schedule "dense" nothing is selected; all others are alike.

    Returns:
      A model for calls without a cache and without padding.
    """
    model = jax.tree.map(lambda p: p, model)
    for stack in model.stacks:
        stack.self_attn = _as(_Attention, stack.self_attn)
        if hasattr(stack.mlp, "experts"):
            stack.mlp.experts = _as(_Experts, stack.mlp.experts)
    return model


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    blocks: Int[Array, "B K T J"] | None,
    block_size: int,
) -> Float[Array, "B T N H"]:
    """Attention of whole rows from position 0 on: dense, or over the selected blocks.

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
        return _by_kernel(q, k, v, blocks, block_size, "cudnn")

    def dense(q, k, v):
        return dense_attention(q, k, v, *_rows(*q.shape[:2]))

    def sparse(q, k, v, blocks):
        return sparse_attention(q, k, v, blocks, *_rows(*q.shape[:2]), block_size=block_size)

    return map_chunks(dense, 1, 0, q, k, v) if blocks is None else map_chunks(sparse, 1, 0, q, k, v, blocks)


def _by_kernel(q, k, v, blocks, block_size, implementation):
    """KV heads become rows of the batch, so that one mask serves all heads of a group."""
    batch, length, heads, width = k.shape
    split = lambda x: x.reshape(batch, length, heads, -1, width).swapaxes(1, 2)
    apart = lambda x: split(x).reshape(batch * heads, length, -1, width)
    mask = None if blocks is None else expand_blocks(blocks, length, block_size).reshape(-1, 1, length, length)
    out = jax.nn.dot_product_attention(
        apart(q), apart(k), apart(v), mask=mask, is_causal=True, implementation=implementation
    )
    return out.reshape(batch, heads, length, -1, width).swapaxes(1, 2).reshape(q.shape)


def select(index_q: Float[Array, "B T K I"], index_k: Float[Array, "B T I"], config: M3Config) -> Int[Array, "B K T J"]:
    """`m3jax.msa.index_topk` of whole rows from position 0 on; a GPU holds all token scores at once.

    Args:
      index_q: index queries.
      index_k: index keys.
      config: the rules of selection.
    """
    rules = dict(
        block_size=config.index_block_size, top_k=config.index_topk_blocks, local_blocks=config.index_local_blocks,
        init_blocks=config.index_init_blocks,
    )  # fmt: skip
    rows, index_q, index_k = _rows(*index_k.shape[:2]), *jax.lax.stop_gradient((index_q, index_k))
    if platform() == "gpu" and config.index_score_type == "max" and index_k.shape[1] % config.index_block_size == 0:
        return select_blocks(_block_maxima(index_q, index_k, config.index_block_size), *rows, **rules)
    return index_topk(index_q, index_k, *rows, **rules, score=config.index_score_type)


def _block_maxima(index_q, index_k, block_size):
    """`m3jax.msa.block_scores` without chunks: [B K T M]."""
    at = jnp.arange(index_k.shape[1], dtype=jnp.int32)
    scores = jnp.where(at <= at[:, None], einsum("btkh,bsh->bkts", index_q, index_k), -jnp.inf)
    return jnp.max(scores.reshape(*scores.shape[:-1], -1, block_size), axis=-1)


def _rows(batch: int, length: int) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Positions and lengths of rows without padding."""
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)), jnp.full(batch, length, jnp.int32)


def _as(kind: type, module):
    """A copy of a module that is of a subclass: the parameters stay where they are."""
    module = copy.copy(module)
    module.__class__ = kind
    return module


class _Attention(Attention):
    def __call__(self, x, context, cache, layer, config):
        values = self.values(x, context, config)
        if "index_q" in values and context.schedule != "dense":
            blocks = select(values["index_q"], values["index_k"], config)
            values["blocks"] = checkpoint_name(blocks, "msa_blocks")
        args = (values[name] for name in ("q", "k", "v"))
        values["attention"] = causal_attention(*args, values.get("blocks"), config.index_block_size)
        return einsum("btnh,nhd->btd", values["attention"], self.o_proj[...]), cache, values


class _Experts(Experts):
    def _on_gpu(self, x, ids, layer, act, backend="xla"):
        """One batched product over tiles of tokens, each with a copy of its expert: training has the memory."""
        gate, up, down = (w[layer] for w in self._weights())
        tiles = invert(ids[None, None], gate.shape[0], min(_TILE, ids.size))
        rows = x[tiles.query]
        project = lambda w: einsum("xcd,xdf->xcf", rows, w[tiles.block])
        out = einsum("xcf,xfd->xcd", act(project(gate), project(up)), down[tiles.block])
        return out.reshape(-1, x.shape[1])[tiles.slot_of[0, 0]]
