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


def lengths_by_draft_row():
    def part(q, k, v, positions, lengths, blocks, size, rounded, device, count):
        out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
        for b, t in np.argwhere(is_token(positions, lengths)):
            own = np.flatnonzero(np.arange(lengths[b]) // size % count == device)
            seen = own[: max(len(own) - (lengths[b] - 1 - positions[b, t]), 0)]
            for n in range(q.shape[2]):
                group = n // (q.shape[2] // k.shape[2])
                kept = seen[np.isin(seen // size, blocks[b, group, t])]
                if len(kept):
                    score = k[b, kept, group] @ q[b, t, n] / math.sqrt(q.shape[-1])
                    weight = np.exp(score - score.max())
                    value = (m3_numpy.to_bf16(weight) if rounded else weight) @ v[b, kept, group]
                    out[b, t, n], lse[b, t, n] = value / weight.sum(), score.max() + math.log(weight.sum())
        return (m3_numpy.to_bf16(out) if rounded else out), lse

    return {"device_part": part}


# --- cells, pages, float8


def blocks_by_cells():
    def order_of(cell_rows, cell_positions, row):
        return np.flatnonzero(cell_rows == row)

    return {"order_of": order_of}


def heads_behind_tokens():
    def move_heads(shards, count, right=m3_numpy.move_heads):
        pages, heads, tokens, width = shards.shape[1:]
        misread = [shard.reshape(pages, tokens, heads, width).swapaxes(1, 2) for shard in shards]
        return right(np.stack(misread), count)

    return {"move_heads": move_heads}


def heads_in_turn():
    def move_heads(shards, count, right=m3_numpy.move_heads):
        heads = np.concatenate(list(shards), axis=1)
        return [heads[:, r::count] for r in range(count)]

    return {"move_heads": move_heads}


def another_float8(name):
    return lambda: {"e4m3fn": getattr(m3_numpy, name)}


# --- experts, norm, rotary embedding, MXFP8


def another_swiglu(change):
    """`change(gate, up, rule)` gives other operands and another rule, and perhaps a function in the place of up + 1."""

    def mistake():
        def swiglu(gate, up, rule, right=m3_numpy.swiglu):
            return change(gate, up, rule, right)

        return {"swiglu": swiglu}

    return mistake


def halves_of_interleaved(gate, up, rule, right):
    both = np.concatenate([gate, up], axis=-1)
    return right(both[..., ::2], both[..., 1::2], rule)


def interleaved_in_halves(gate, up, rule, right):
    both = np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)
    return right(*np.split(both, 2, axis=-1), rule)


def without_one(gate, up, rule, right):
    up = np.clip(up, -rule["limit"], rule["limit"])
    return right(gate, 0 * up, rule) * up


def clamped_below(gate, up, rule, right):
    return right(np.maximum(gate, -rule["limit"]), up, rule)


def weights_of_biased():
    def weigh(scores, ids, biased, right=m3_numpy.weigh):
        return right(biased, ids, biased)

    return {"weigh": weigh}


def epsilon_in_sum(epsilon):
    def mistake():
        def weigh(scores, ids, biased):
            weights = np.take_along_axis(scores, ids, -1)
            return weights / (weights.sum(-1, keepdims=True) + epsilon)

        return {"weigh": weigh}

    return mistake


def no_factor():
    def experts(x, rule, right=m3_numpy.experts):
        return right(x, dict(rule) | {"routed_scaling_factor": 1.0})

    return {"experts": experts}


def norm_with(more):
    def mistake():
        def norm(x, weight, eps, right=m3_numpy.norm):
            return right(x, weight + more, eps)

        return {"norm": norm}

    return mistake


def whole_head_turned():
    def rope(x, positions, rotary_dim, theta, right=m3_numpy.rope):
        return right(x, positions, x.shape[-1], theta)

    return {"rope": rope}


def another_scale(exponent):
    return lambda: {"scale_of": exponent}


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
    "a device's own length went down by one for each later draft row: its newest keys are not read (T48)":
        lengths_by_draft_row,
    "blocks are counted by a row's cells in the order of memory, not by positions (T41)": blocks_by_cells,
    "pages are read as [tokens, heads] where they are [heads, tokens] (T49)": heads_behind_tokens,
    "device r has heads r, r + R, and so on, where it has heads behind one another (T49)": heads_in_turn,
    "bytes are read as e4m3fnuz: half of each number, and NaN for -0 (T44)": another_float8("e4m3fnuz"),
    "bytes are read as e5m2 (T44)": another_float8("e5m2"),
    "SwiGLU without alpha, as SiLU (T42)": another_swiglu(lambda g, u, rule, f: f(g, u, dict(rule) | {"alpha": 1.0})),
    "SwiGLU without its clamps (T42)": another_swiglu(lambda g, u, rule, f: f(g, u, dict(rule) | {"limit": np.inf})),
    "the gate is clamped on both sides, and not above alone (T42)": another_swiglu(clamped_below),
    "SwiGLU with up in the place of up + 1 (T42)": another_swiglu(without_one),
    "gate and up are taken for each other (T42)": another_swiglu(lambda g, u, rule, f: f(u, g, rule)),
    "the halves gate and up are read as if interleaved (T42)": another_swiglu(halves_of_interleaved),
    "interleaved gate and up are read as halves (T42)": another_swiglu(interleaved_in_halves),
    "experts are weighed by scores with the bias (T45)": weights_of_biased,
    "1e-20 is added to the sum of the scores (T45)": epsilon_in_sum(1e-20),
    "1e-9 is added to the sum of the scores (T45)": epsilon_in_sum(1e-9),
    "the routed sum has no factor (T45)": no_factor,
    "1 is added to the norm's weight twice (T47)": norm_with(1),
    "the norm multiplies with w in the place of 1 + w (T47)": norm_with(-1),
    "the whole head is turned, not `rotary_dim` dims of it (T46)": whole_head_turned,
    "a block's scale lacks the 2^8 of E4M3's last binade (T43)": another_scale(lambda x: math.floor(math.log2(x))),
    "scales are rounded up, so that nothing is cut off at 448 (T43)":
        another_scale(lambda x: math.ceil(math.log2(x / 448))),
}


def outputs_with(mistake, group, x, rule, used=None):
    """All outputs of a case as an engine with the mistake gives them; none if it changes nothing that the case uses."""
    changed = MISTAKES[mistake]()
    return {} if used is not None and not changed.keys() & used else _outputs(changed, group, x, rule)


def used_by(group, x, rule):
    """The names of those functions that a case calls, of all that some mistake replaces."""
    used = set()

    def recorded(name, right):
        def function(*args, **options):
            used.add(name)
            return right(*args, **options)

        return function

    names = {name for mistake in MISTAKES.values() for name in mistake()}
    _outputs({name: recorded(name, getattr(m3_numpy, name)) for name in names}, group, x, rule)
    return used


def _outputs(changed, group, x, rule):
    right = {name: getattr(m3_numpy, name) for name in changed}
    vars(m3_numpy).update(changed)
    try:
        # By its name: the group's own function may be one of those that are replaced.
        return vars(m3_numpy)[m3_numpy.GROUPS[group].__name__](x, rule)
    finally:
        vars(m3_numpy).update(right)
