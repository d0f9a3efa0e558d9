"""MSA once more, in float64 NumPy, a query at a time: an oracle that shares nothing with m3jax.msa."""

import math

import numpy as np


def block_scores(index_q, index_k, positions, lengths, block_size, score="max"):
    """Return the score of each block for each query and index head: [B K T M]."""
    batch, length, heads, width = index_q.shape
    index_q, index_k = index_q.astype(np.float64), index_k.astype(np.float64)
    out = np.full((batch, heads, length, -(-index_k.shape[1] // block_size)), -np.inf)
    for b, k, t in np.ndindex(out.shape[:3]):
        if not 0 <= positions[b, t] < lengths[b]:
            continue
        scores = index_k[b, : positions[b, t] + 1] @ index_q[b, t, k]
        starts = np.arange(0, len(scores), block_size)
        if score == "max":
            out[b, k, t, : len(starts)] = np.maximum.reduceat(scores, starts)
        else:
            out[b, k, t, : len(starts)] = np.logaddexp.reduceat(scores / math.sqrt(width), starts)
    return out


def chosen(scores, position, length, block_size, top_k, local_blocks=1, init_blocks=0):
    """Ascending ids that one query keeps of the blocks scored `scores` [M]."""
    if not 0 <= position < length:
        return []
    own = position // block_size
    visible = range(own + 1)
    forced = [m for m in visible if m > own - local_blocks or m < init_blocks]
    rest = [m for m in visible if m not in forced]
    rest.sort(key=lambda m: (math.isnan(scores[m]), 0.0 if math.isnan(scores[m]) else -scores[m], m))
    return sorted((forced + rest)[:top_k])


def select_blocks(scores, positions, lengths, *, block_size, top_k, local_blocks=1, init_blocks=0):
    """[B K T J], ascending ids and then -1."""
    scores = np.asarray(scores, np.float64)
    out = np.full((*scores.shape[:3], top_k), -1)
    for b, k, t in np.ndindex(out.shape[:3]):
        rules = (block_size, top_k, local_blocks, init_blocks)
        ids = chosen(scores[b, k, t], positions[b, t], lengths[b], *rules)
        out[b, k, t, : len(ids)] = ids
    return out


def attention(q, k, v, positions, lengths, blocks=None, block_size=None):
    """(out [B T N H], lse [B T N]); every visible token where `blocks` is None."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    block_of = np.arange(k.shape[1]) // (block_size or 1)
    for b, t, head in np.ndindex(*q.shape[:2], k.shape[2]):
        seen = np.arange(positions[b, t] + 1) if 0 <= positions[b, t] < lengths[b] else np.arange(0)
        if blocks is not None:
            seen = seen[(block_of[: len(seen), None] == blocks[b, head, t]).any(-1)]
        for n in range(q.shape[2]) if len(seen) else ():
            if n * k.shape[2] // q.shape[2] == head:
                x = k[b, seen, head] @ q[b, t, n] / math.sqrt(q.shape[-1])
                p = np.exp(x - x.max())
                out[b, t, n] = p @ v[b, seen, head] / p.sum()
                lse[b, t, n] = x.max() + math.log(p.sum())
    return out, lse
