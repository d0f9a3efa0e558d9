"""Attention over selected blocks, from index queries on or over a given selection."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from m3jax.msa import SCHEDULES, contiguous, sparse_attention
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal
from m3jax.vectors.groups import selection

AXES = selection.AXES | {
    "q": "B T N H", "k": "B S K H", "v": "B S K H", "given_blocks": "B K T J", "out": "B T N H", "lse": "B T N",
}  # fmt: skip
TOLERANCES = selection.TOLERANCES | {
    "out": "attention", "lse": "lse", "out_bf16": "attention_bf16", "lse_bf16": "lse"
}  # fmt: skip


def cases(large: bool) -> Iterator[Case]:
    """Yield cases of attention over the chosen blocks of rows that are longer than J blocks."""
    if large:
        base = selection.indexed(
            "m3_shapes", "M3's real head shapes: 64 query heads, 4 KV heads, width 128, block 128, 16 blocks of 64", 40,
            rule=dict(block_size=128, top_k=16), queries=((8_187, 5), (4_095, 2)), lengths=(8_192, 4_097), keys=8_192,
            heads=4, width=128, traps=("T17", "T18"),
        )  # fmt: skip
        yield with_heads(base, heads=64, width=128)
        return
    rule = dict(block_size=4, top_k=3)
    base = selection.indexed(
        "prefill", "from index queries to outputs; rows of their own length, NaN behind them", 11, rule=rule,
        queries=((0, 41), (0, 18)), lengths=(41, 18), keys=41, traps=("T3", "T4", "T8", "T10", "T17", "T18", "T40"),
    )  # fmt: skip
    yield with_heads(base, heads=6, width=16)
    yield with_heads(unused_slots(), heads=6, width=16)


def with_heads(base: Case, heads: int, width: int) -> Case:
    """Return a case with queries, keys and values added, and NaN in keys and values behind each row's length."""
    rng = np.random.default_rng(base.seed + 1000)
    lengths, positions = base.inputs["lengths"], base.inputs["positions"]
    kv_heads = base.inputs["index_q"].shape[2] if "index_q" in base.inputs else base.inputs["given_blocks"].shape[1]
    keys = base.inputs["index_k"].shape[1] if "index_k" in base.inputs else int(base.rule["keys"])
    q = normal(rng, *positions.shape, heads, width, scale=1.5)
    k, v = normal(rng, len(lengths), keys, kv_heads, width), normal(rng, len(lengths), keys, kv_heads, width)
    for row, length in enumerate(lengths):
        k[row, length:] = v[row, length:] = np.nan
    return Case(base.name, base.what, base.rule, base.seed, dict(base.inputs) | {"q": q, "k": k, "v": v}, base.traps)


def unused_slots() -> Case:
    """Return a case of a given selection: unused slots anywhere, ids in any order, queries that see nothing."""
    rng = np.random.default_rng(12)
    num_rows, heads, length, slots, block_size = 2, 2, 9, 4, 4
    lengths = np.array([22, 30], np.int32)
    positions = np.stack([np.arange(14, 23), np.arange(21, 30)]).astype(np.int32)  # the first row's last one is padding
    blocks = np.full((num_rows, heads, length, slots), -1, np.int32)
    for row, head, query in np.ndindex(num_rows, heads, length):
        visible = rng.permutation(positions[row, query] // block_size + 1)[: rng.integers(0, slots + 1)]
        blocks[row, head, query, rng.permutation(slots)[: len(visible)]] = visible
    blocks[1, :, 3] = -1  # nothing at all
    blocks[0, 0, 0] = [-1, 4, -1, -1]  # a block of which the query, at 14, sees no token
    inputs = {"given_blocks": blocks, "positions": positions, "lengths": lengths}
    rule = dict(block_size=block_size, keys=30)
    what = "a given selection: -1 in any slot, ids in any order, queries that see nothing have output 0 and lse -inf"
    return Case("unused_slots", what, rule, 12, inputs, ("T8", "T9", "T10"))


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Apply the definitions of selection and of `sparse_attention`."""
    chosen = {} if "given_blocks" in inputs else selection.define(inputs, rule)
    blocks = chosen.get("blocks", inputs.get("given_blocks"))
    arrays = (inputs["q"], inputs["k"], inputs["v"], blocks, inputs["positions"], inputs["lengths"])
    out, lse = sparse_attention(*arrays, block_size=rule["block_size"], return_lse=True)
    return {"out": out, "lse": lse} | chosen


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield a run of each attention schedule over the keys of one call."""

    def under(schedule: Callable, inputs: Arrays, rule: Rule) -> Arrays:
        chosen = {} if "given_blocks" in inputs else selection.define(inputs, rule)
        view = contiguous(inputs["k"], inputs["v"], rule["block_size"])
        blocks = chosen.get("blocks", inputs.get("given_blocks"))
        out, lse = schedule(inputs["q"], view, blocks, inputs["positions"], inputs["lengths"])
        return {"out": out, "lse": lse}

    for dtype in ("float32", "bfloat16"):
        for name, schedule in SCHEDULES.items():
            yield Run(name, dtype, jitted(partial(under, schedule), rule, in_dtype(inputs, dtype)))


GROUP = Group("sparse_attention", cases, define, runs, AXES, TOLERANCES, rounded=("out", "lse"))
