"""The share of dense attention that block selection catches: by layer, KV group, and distance from query to key."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.model import M3
from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.parallel import read
from m3jax.spec.msa import chosen_tokens, sees
from m3jax.train.losses import mean_attention

_SCORE_BUDGET = 1 << 26  # probabilities of one chunk of queries


def distance_bucket(distance: int, block_size: int) -> int:
    """Return the bucket of distances that a key is in: 0 below one block, then each twice as wide (P to 2P, ...)."""
    return 0 if distance < block_size else int(np.log2(distance // block_size)) + 1


def caught_mass(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    blocks: Sequence[Int[Array, "B K T _"]],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    block_size: int,
) -> Float[Array, "B K T W Z"]:
    """Return dense attention's probability by distance, of all keys and of selected blocks; mean of a group's heads.

    Args:
      q: queries.
      k: keys of the whole rows.
      blocks: selections of the same queries, to compare.
      positions: absolute position of each query; < 0 or >= lengths marks padding, which attends to nothing.
      lengths: valid keys of each row.
      block_size: P.

    Returns:
      W = 1 + the number of selections: the probability of all keys first; Z intervals of distance
      (`distance_bucket`), as many as S needs.
    """
    key_positions = jnp.arange(k.shape[1], dtype=jnp.int32)
    num_buckets = distance_bucket(k.shape[1] - 1, block_size) + 1
    edges = [0, *(block_size << z for z in range(num_buckets))]

    def masses(q, positions, *blocks):
        visible = sees(positions, lengths, key_positions)[:, None]  # [B 1 T S]
        attention = mean_attention(q, k, visible)  # [B K T S]
        chosen = [chosen_tokens(x.swapaxes(1, 2), k.shape[1], block_size) for x in blocks]  # each [B K T S]
        parts = [attention, *(attention * x for x in chosen)]
        distance = (positions[..., None] - key_positions)[:, None]  # [B 1 T S]
        by_bucket = [
            [jnp.sum(jnp.where((distance >= low) & (distance < high), part, 0.0), axis=-1) for part in parts]
            for low, high in pairwise(edges)
        ]
        return jnp.moveaxis(jnp.array(by_bucket), (0, 1), (-1, -2)).swapaxes(1, 2)  # [B T K W Z]

    chunk = rows_within(_SCORE_BUDGET, q.shape[0] * 2 * q.shape[2] * k.shape[1], q.shape[1])
    by_query = map_chunks(masses, chunk, 1, q, positions, *(x.swapaxes(1, 2) for x in blocks))
    return by_query.swapaxes(1, 2)


def caught_by_distance(
    model: M3, tokens: Int[np.ndarray, "B T"], first: int | None = None
) -> Float[np.ndarray, "L K W Z"]:
    """Return dense attention's probability by distance in a model's sparse layers, and the part that selection catches.

    Args:
      model: one with sparse layers, under a sparse schedule.
      tokens: without padding.
      first: position from which queries count; four times the budget by default, so that most blocks are dropped.

    Returns:
      Means over rows and queries; W is all keys, those in selected blocks, and those in as many random blocks, the own
      one among them.

    Raises:
      ValueError: no query counts, or no layer selects.
    """
    config = model.config
    first = default_first(config) if first is None else first
    if not 0 <= first < tokens.shape[1]:
        raise ValueError(f"first = {first}: rows of {tokens.shape[1]} tokens need one from 0 to {tokens.shape[1] - 1}")
    if model.dense or not any(stack.is_sparse for stack in config.stacks):
        raise ValueError("no layer of this model selects blocks: there is nothing that could be left out")
    return np.concatenate(read(list(_caught_by_stack(model, jnp.asarray(tokens), first))))


def default_first(config: M3Config) -> int:
    """Return the position from which queries count: four times the tokens that a query selects."""
    return 4 * config.index_topk_blocks * config.index_block_size


@partial(jax.jit, static_argnames=("first",))
def _caught_by_stack(model: M3, tokens: Int[Array, "B T"], first: int) -> list[Float[Array, "L K W Z"]]:
    """Return `caught_by_distance` for each stack that has sparse layers."""
    block_size = model.config.index_block_size

    def probe(values, context):
        if "blocks" not in values:
            return {}
        # Queries that do not count are left out before anything of size T x S is made.
        late = lambda x, axis: jax.lax.slice_in_dim(x, first, None, axis=axis)
        blocks, positions = values["blocks"], context.positions
        selections = [late(x, 2) for x in (blocks, random_like(blocks, block_size, positions))]
        mass = caught_mass(
            late(values["q"], 1), values["k"], selections, late(positions, 1), context.lengths, block_size
        )  # [B K T W Z]
        return {"mass": jnp.mean(mass, axis=(0, 2))}  # [K W Z]

    stacks = model.run(tokens, probe=probe, logits=False).probed
    return [values["mass"] for values in stacks if "mass" in values]


def random_like(blocks: Int[Array, "B K T J"], block_size: int, positions: Int[Array, "B T"]) -> Int[Array, "B K T _"]:
    """Return for each query its own block and J - 1 distinct random ones before it, or all of them if there are fewer.

    Args:
      blocks: a selection.
      block_size: P.
      positions: of the queries, all of their row's.
    """
    own_block = (positions // block_size)[:, None, :, None]  # [B 1 T 1]
    num_blocks = -(-positions.shape[1] // block_size)
    # A fixed key: the same command gives the same figures. The largest of uniform scores are a draw without repetition.
    scores = jax.random.uniform(jax.random.key(0), (*blocks.shape[:-1], num_blocks))
    scores = jnp.where(jnp.arange(num_blocks) < own_block, scores, -1.0)  # [B K T M]
    score, ids = jax.lax.top_k(scores, min(blocks.shape[-1] - 1, num_blocks))
    ids = jnp.where(score >= 0, ids, -1).astype(jnp.int32)  # [B K T J-1]
    own_block = jnp.broadcast_to(own_block, (*ids.shape[:-1], 1)).astype(jnp.int32)
    return jnp.concatenate([ids, own_block], axis=-1)


def caught_figures(config: M3Config, mass: Float[np.ndarray, "L K W Z"], first: int, context: int) -> dict[str, Any]:
    """Return the figures that an evaluation reports of `caught_by_distance`.

    Args:
      config: of the model that was measured.
      mass: from `caught_by_distance`.
      first: position from which queries counted.
      context: tokens of a row.

    Returns:
      "layers" (numbers of the sparse ones, from 0), "distances" ([from, end) in tokens), "caught" (share of the whole
      mass, a list of KV groups for each layer), "by_chance" (the same of random blocks), "caught_by_distance" (share of
      the mass at that distance, None where there is none) and "mass_by_distance" (a list of distances for each layer).
    """
    layers, start = [], 0
    for stack in config.stacks:
        layers += range(start, start + stack.num_layers) if stack.is_sparse else ()
        start += stack.num_layers
    block_size, num_buckets = config.index_block_size, mass.shape[-1]
    edges = [0, *(block_size << z for z in range(num_buckets - 1)), context]
    of_layer = mass.astype(np.float64).mean(axis=1)  # [L W Z]
    shares = [
        [float(part / whole) if whole > 0 else None for whole, part in zip(*layer[:2], strict=True)]
        for layer in of_layer
    ]
    return {
        "layers": layers, "first": first, "context": context,
        "distances": [[low, high] for low, high in pairwise(edges)],
        "caught": mass[:, :, 1].sum(axis=-1).astype(float).tolist(),
        "by_chance": mass[:, :, 2].sum(axis=-1).astype(float).tolist(),
        "caught_by_distance": shares,
        "mass_by_distance": of_layer[:, 0].tolist(),
    }  # fmt: skip


def caught_table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the shares as lines of a table: for each layer the KV groups, random blocks, then the distances."""
    per_cent = lambda share: "-" if share is None else f"{share:.1%}"
    lines = []
    for i, layer in enumerate(results[0]["layers"]):
        caught_shares = [" ".join(map(per_cent, result["caught"][i])) for result in results]
        chance = [" ".join(map(per_cent, result["by_chance"][i])) for result in results]
        lines.append([f"layer {layer}, by KV group", *caught_shares])
        lines.append(["  as many random blocks", *chance])
        for z, (low, high) in enumerate(results[0]["distances"]):
            cells = [
                f"{per_cent(result['caught_by_distance'][i][z])} of {per_cent(result['mass_by_distance'][i][z])}"
                for result in results
            ]
            lines.append([f"  {low:,} to {high - 1:,} tokens back", *cells])
    return lines
