"""Attention of packed rows in training, which cuDNN computes on a GPU: whole rows, and the last queries of longer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.on_gpu import OUT, distance, exact

from m3jax.train.packing import attend_to_blocks, attend_to_documents

BLOCK, KV_HEADS, HEADS, WIDTH = 128, 2, 8, 128


def in_float64(q, k, v, wanted, mask):
    """Return outputs, and the gradients of q, k and v of their product with `wanted`; mask is [B K T S]."""
    q, k, v, wanted = (np.asarray(x, np.float64) for x in (q, k, v, wanted))
    groups = lambda x: x.reshape(*x.shape[:2], KV_HEADS, -1, WIDTH)
    q, wanted = groups(q), groups(wanted)
    scores = np.where(mask[:, :, None], np.einsum("btxgh,bsxh->bxgts", q, k) * WIDTH**-0.5, -np.inf)
    sees = mask.any(-1)[:, :, None, :, None]
    weights = np.where(sees, np.exp(scores - np.where(sees, scores.max(-1, keepdims=True), 0)), 0)
    weights /= np.where(sees, weights.sum(-1, keepdims=True), 1)
    of_weights = np.einsum("btxgh,bsxh->bxgts", wanted, v)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * WIDTH**-0.5
    flat = lambda x: x.reshape(*x.shape[:2], -1, WIDTH)
    return (
        flat(np.einsum("bxgts,bsxh->btxgh", weights, v)),
        flat(np.einsum("bxgts,bsxh->btxgh", of_scores, k)),
        np.einsum("bxgts,btxgh->bsxh", of_scores, q),
        np.einsum("bxgts,btxgh->bsxh", weights, wanted),
    )


@pytest.mark.parametrize("num_queries", [1024, 640])
@pytest.mark.parametrize("is_selected", [False, True])
def test_outputs_and_gradients_are_those_of_float64(num_queries, is_selected, seed):
    """T29, T35: documents of 384 and 640 tokens in rows of 1,024; queries of padding see nothing and give 0."""
    batch, length = 2, 1024
    draw = np.random.default_rng(seed)
    shapes = (num_queries, HEADS), (length, KV_HEADS), (length, KV_HEADS), (num_queries, HEADS)
    q, k, v, wanted = (jnp.asarray(draw.normal(size=(batch, n, heads, WIDTH)), jnp.bfloat16) for n, heads in shapes)
    first = np.where(np.arange(length) < 384, 0, 384)
    positions = np.tile(np.arange(length, dtype=np.int32) - first, (batch, 1))
    positions[1, -100:] = -1
    positions, first = positions[:, -num_queries:], first[-num_queries:]
    slots = np.arange(length)[-num_queries:]
    keys = np.arange(length)
    mask = (keys >= first[:, None]) & (keys <= slots[:, None]) & (positions[..., None] >= 0)  # [B T S]
    mask = np.repeat(mask[:, None], KV_HEADS, axis=1)
    if is_selected:  # two of the blocks that a query may see, its own among them
        own = slots // BLOCK
        other = np.maximum(own - draw.integers(1, 3, (batch, KV_HEADS, num_queries)), first // BLOCK)
        blocks = np.stack([np.broadcast_to(own, other.shape), np.where(other == own, -1, other)], -1).astype(np.int32)
        mask &= (keys // BLOCK == blocks[..., :1]) | (keys // BLOCK == blocks[..., 1:])
        attend = partial(
            attend_to_blocks, positions=jnp.asarray(positions), blocks=jnp.asarray(blocks), block_size=BLOCK
        )
    else:
        attend = partial(attend_to_documents, positions=jnp.asarray(positions))

    @jax.jit
    def outputs_and_gradients(q, k, v):
        out, pull = jax.vjp(partial(attend, positions=jnp.asarray(positions)), q, k, v)
        return out, *pull(wanted)

    found = outputs_and_gradients(q, k, v)
    expected = in_float64(*map(exact, (q, k, v, wanted)), mask)
    for name, one, other in zip(("outputs", "q", "k", "v"), found, expected, strict=True):
        assert distance(exact(one), other) < 2 * OUT, f"{name}: {distance(exact(one), other)}"
    assert not np.asarray(found[0].astype(jnp.float32))[positions < 0].any()
