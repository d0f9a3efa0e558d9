"""Mistakes that engines have made, each as another function in the place of one of `m3_numpy.py`.

`check_numpy.py` runs them on a case's inputs, and names the one that gives what somebody's engine gave.
"""

import math

import m3_numpy
import numpy as np

# --- selection


def own_left_out():
    def select(scores, positions, lengths, rule, right=m3_numpy.select):
        blocks, *cut = right(scores, positions, lengths, rule)
        return np.where(blocks == (positions // rule["block_size"])[:, None, :, None], -1, blocks), *cut

    return {"select": select}


def own_replaced():
    def select(scores, positions, lengths, rule, right=m3_numpy.select):
        before_own = np.where(
            is_token(positions, lengths), positions // rule["block_size"] * rule["block_size"] - 1, -1
        )
        return right(scores, before_own, lengths, dict(rule) | {"local_blocks": 0})

    return {"select": select}


def own_by_score():
    def select(scores, positions, lengths, rule, right=m3_numpy.select):
        return right(scores, positions, lengths, dict(rule) | {"local_blocks": 0})

    return {"select": select}


def unmasked_own_scores():
    def scores(index_q, index_k, positions, lengths, size, *rest, right=m3_numpy.block_scores):
        last = np.minimum((positions // size + 1) * size, lengths[:, None]) - 1
        return right(index_q, index_k, np.where(is_token(positions, lengths), last, -1), lengths, size, *rest)

    return {"block_scores": scores}


def unmasked_selection():
    def scores(index_q, index_k, positions, lengths, *rest, right=m3_numpy.block_scores):
        return right(index_q, index_k, row_end(positions, lengths), lengths, *rest)

    def select(scores, positions, lengths, rule, right=m3_numpy.select):
        own = (positions // rule["block_size"])[:, None, :, None] == np.arange(scores.shape[-1])
        forced = np.where(own, np.inf, scores)
        return right(forced, row_end(positions, lengths), lengths, dict(rule) | {"local_blocks": 0})

    return {"block_scores": scores, "select": select}


# --- attention


def unmasked_attention():
    def attention(q, k, v, positions, lengths, *rest, right=m3_numpy.attention, **options):
        return right(q, k, v, row_end(positions, lengths), lengths, *rest, **options)

    return {"attention": attention}


def unscaled():
    def attention(q, *rest, right=m3_numpy.attention, **options):
        return right(q * math.sqrt(q.shape[-1]), *rest, **options)

    return {"attention": attention}


def heads_by_remainder():
    def attention(q, k, v, positions, lengths, blocks=None, *rest, right=m3_numpy.attention, **options):
        kv = np.arange(q.shape[2]) % k.shape[2]
        chosen = None if blocks is None else blocks[:, kv]
        return right(q, k[:, :, kv], v[:, :, kv], positions, lengths, chosen, *rest, **options)

    return {"attention": attention}


def keys_by_remainder():
    def attention(q, k, v, positions, lengths, blocks=None, *rest, right=m3_numpy.attention, **options):
        if blocks is None:  # nothing besides keys and values has heads: `heads_by_remainder`
            return right(q, k, v, positions, lengths, None, *rest, **options)
        heads, kv_heads = q.shape[2], k.shape[2]
        kv, chosen = np.arange(heads) % kv_heads, blocks[:, np.arange(heads) // (heads // kv_heads)]
        return right(q, k[:, :, kv], v[:, :, kv], positions, lengths, chosen, *rest, **options)

    return {"attention": attention}


def lse_in_bits():
    def attention(*args, right=m3_numpy.attention, **options):
        out, lse = right(*args, **options)
        return out, lse / math.log(2)

    return {"attention": attention}


def is_token(positions, lengths):
    """[B T]: true but for padding."""
    return (positions >= 0) & (positions < lengths[:, None])


def row_end(positions, lengths):
    """[B T]: of each token the last position of its row, as if it saw all of it."""
    return np.where(is_token(positions, lengths), lengths[:, None] - 1, -1)


# What the report says, and the functions that are put in the place of the right ones.
MISTAKES = {
    "the own block is missing": own_left_out,
    "the own block is missing, and one more of the others is there": own_replaced,
    "the own block is kept only if its score is among the best": own_by_score,
    "tokens after the query count in its own block's score (T2)": unmasked_own_scores,
    "selection has no causal mask: blocks after the query's own are scored and chosen": unmasked_selection,
    "attention has no causal mask: tokens after the query are read": unmasked_attention,
    "the products of q and k are not divided by the root of the head's width": unscaled,
    "query head n reads KV head n % K and its blocks, for n // G": heads_by_remainder,
    "query head n reads the keys and values of KV head n % K, for n // G": keys_by_remainder,
    "the LSE is in units of log 2": lse_in_bits,
}


def outputs_with(mistake, group, x, rule):
    """All outputs of a case as an engine with the mistake gives them."""
    changed = MISTAKES[mistake]()
    right = {name: getattr(m3_numpy, name) for name in changed}
    vars(m3_numpy).update(changed)
    try:
        return m3_numpy.GROUPS[group](x, rule)
    finally:
        vars(m3_numpy).update(right)
