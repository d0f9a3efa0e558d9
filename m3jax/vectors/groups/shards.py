"""Context parallelism: devices divide a row's blocks, each scores and attends over its own, parts are merged."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from m3jax.msa import SCHEDULES, contiguous, contiguous_index, select_blocks, sparse_attention, walk_scores
from m3jax.numerics import merge_parts
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted
from m3jax.vectors.groups import selection
from m3jax.vectors.groups import sparse_attention as attention_group
from m3jax.vectors.margins import cut

AXES = attention_group.AXES | {
    "shard_scores": "R B K T M", "shard_out": "R B T N H", "shard_lse": "R B T N", "shard_out_bf16": "R B T N H",
}  # fmt: skip
TOLERANCES = attention_group.TOLERANCES | {
    "shard_scores": "scores", "shard_out": "attention", "shard_lse": "lse", "shard_out_bf16": "attention_bf16",
    "shard_lse_bf16": "lse",
}  # fmt: skip


def cases(large: bool) -> Iterator[Case]:
    """Yield cases of four devices with block m on device m mod 4: short rows, and drafts verified at every residue."""
    if large:
        return
    rule = dict(block_size=4, top_k=3, shards=4)
    base = selection.indexed(
        "four_devices", "block m is on device m mod 4; a device that holds nothing a query chose has lse -inf",
        61, rule=rule, queries=((36, 8), (3, 8)), lengths=(44, 11), keys=44, traps=("T28", "T38"),
    )  # fmt: skip
    yield attention_group.with_heads(base, heads=6, width=16)
    # A row of 5 drafted tokens for each residue of its first position by the 16 tokens of a turn over the devices.
    first = tuple(28 + residue for residue in range(16))
    base = selection.indexed(
        "draft_rows", "5 drafted tokens a row, which begins at each residue of 16: each sees all keys up to its own position",
        62, rule=rule, queries=tuple((start, 5) for start in first), lengths=tuple(start + 5 for start in first), keys=48,
        traps=("T19", "T48"),
    )  # fmt: skip
    yield attention_group.with_heads(base, heads=2, width=8)


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Return the scores of each device's blocks, the choice, each device's attention, and the merged output."""
    chosen = selection.define(inputs, rule)
    scores, blocks = chosen["block_scores"], chosen["blocks"]
    shard_scores = jnp.stack([jnp.where(on, scores, -jnp.inf) for on in _held(scores.shape[-1], rule)])
    arrays = inputs["q"], inputs["k"], inputs["v"]
    attend = partial(sparse_attention, block_size=rule["block_size"], return_lse=True)
    where = inputs["positions"], inputs["lengths"]
    parts = [attend(*arrays, ids, *where) for ids in _divided(blocks, rule)]
    outs, lses = jnp.stack([out for out, _ in parts]), jnp.stack([lse for _, lse in parts])  # [R B T N H], [R B T N]
    out, lse = merge_parts(lambda j: jax.lax.dynamic_index_in_dim(outs, j, keepdims=False), lses)
    merged = {"out": out.astype(inputs["q"].dtype), "lse": lse}
    return chosen | {"shard_scores": shard_scores, "shard_out": outs, "shard_lse": lses} | merged


def _held(num_blocks: int, rule: Rule) -> Bool[Array, "R M"]:
    """Return a mask that is True where device r holds block m."""
    return jnp.arange(num_blocks) % rule["shards"] == jnp.arange(rule["shards"])[:, None]


def _divided(blocks: Int[Array, "B K T J"], rule: Rule) -> Int[Array, "R B K T J"]:
    """Return the selection of each device, with -1 in place of the blocks that it does not hold."""
    devices = jnp.arange(rule["shards"], dtype=blocks.dtype)
    return jnp.where((blocks % rule["shards"] == devices[:, None, None, None, None]) & (blocks >= 0), blocks, -1)


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield a run of each attention schedule as a device runs it, on scores from `walk_scores`."""
    for dtype in ("float32", "bfloat16"):
        for name, schedule in SCHEDULES.items():
            yield Run(name, dtype, jitted(partial(_by_schedule, schedule), rule, in_dtype(inputs, dtype)))


def _by_schedule(schedule: Callable, inputs: Arrays, rule: Rule) -> Arrays:
    where, size = (inputs["positions"], inputs["lengths"]), rule["block_size"]
    scores = walk_scores(inputs["index_q"], contiguous_index(inputs["index_k"], size), *where)
    shard_scores = jnp.stack([jnp.where(on, scores, -jnp.inf) for on in _held(scores.shape[-1], rule)])
    scores = jnp.max(shard_scores, axis=0)
    blocks = select_blocks(scores, *where, selection.selection_rules(rule), block_size=size)
    view = contiguous(inputs["k"], inputs["v"], size)
    parts = [schedule(inputs["q"], view, ids, *where) for ids in _divided(blocks, rule)]
    outs, lses = jnp.stack([out for out, _ in parts]), jnp.stack([lse for _, lse in parts])
    out, lse = merge_parts(lambda j: jax.lax.dynamic_index_in_dim(outs, j, keepdims=False), lses)
    outputs = {"shard_scores": shard_scores, "blocks": blocks, "shard_out": outs, "shard_lse": lses, "lse": lse}
    return outputs | {"out": out.astype(inputs["q"].dtype)} | cut(scores, blocks, *where, rule)


GROUP = Group("shards", cases, define, runs, AXES, TOLERANCES, rounded=("out", "lse", "shard_out", "shard_lse"))
