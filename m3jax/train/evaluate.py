"""What is measured of a trained model: loss on held-out code, recall by distance, what selection catches."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from m3jax.model import M3
from m3jax.train.data import Batch, Corpus, recall_probe
from m3jax.train.losses import caught_mass, next_token_loss


def validation_loss(model: M3, batches: Iterable[Batch]) -> float:
    """Mean cross-entropy of the next token, in nats, over batches of code; at least one batch is needed."""
    losses = [_loss_and_weight(model, jnp.asarray(b["tokens"]), jnp.asarray(b["weights"])) for b in batches]
    means, weights = np.asarray(losses, np.float64).T
    return float(np.average(means, weights=weights))


@jax.jit
def _loss_and_weight(
    model: M3, tokens: Int[Array, "B T1"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """A batch's mean loss, and what that mean weighs among other batches."""
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:], weights), jnp.sum(weights)


def recall_accuracy(
    model: M3, corpus: Corpus, distances: Iterable[int], count: int, seq_len: int, seed: int = 0, batch: int = 16
) -> dict[int, float]:
    """Share of values recalled exactly, by tokens from the value's definition to the answer.

    Args:
      model: any M3 whose tokenizer is the corpus's.
      corpus: held-out code that the records stand in.
      distances: as for `recall_probe`; each value is defined once.
      count: questions a distance.
      seq_len: tokens of a prompt.
      seed: of the questions.
      batch: prompts of one call.

    Returns:
      Share from 0 to 1 by distance.
    """
    accuracy = {}
    for distance in distances:
        prompts, answers = recall_probe(corpus, distance, count, seq_len, seed)
        found = [_best_next_token(model, jnp.asarray(prompts[i : i + batch])) for i in range(0, count, batch)]
        accuracy[distance] = float(np.mean(np.concatenate(found) == answers))
    return accuracy


@jax.jit
def _best_next_token(model: M3, tokens: Int[Array, "B T"]) -> Int[Array, " B"]:
    """The most probable token after each row."""
    hidden, _ = model.hidden(tokens)
    return jnp.argmax(model.unembed(hidden[:, -1]), axis=-1)


def attention_caught(
    model: M3, tokens: Int[np.ndarray, "B T"], random: bool = False, first: int | None = None
) -> Float[np.ndarray, "L K"]:
    """Share of dense attention's mass in the selected blocks, per sparse layer and KV group.

    Args:
      model: one with sparse layers, under a sparse schedule.
      tokens: [B T], without padding.
      random: take as many random blocks instead, the own one included, for comparison.
      first: position from which queries count; four times the budget by default, so that most blocks are dropped.

    Raises:
      ValueError: no query counts.
    """
    config = model.config
    first = 4 * config.index_topk_blocks * config.index_block_size if first is None else first
    if not 0 <= first < tokens.shape[1]:
        raise ValueError(f"first = {first}: rows of {tokens.shape[1]} tokens need one from 0 to {tokens.shape[1] - 1}")
    return np.concatenate([np.asarray(mass) for mass in _caught_by_stack(model, jnp.asarray(tokens), random, first)])


@partial(jax.jit, static_argnames=("random", "first"))
def _caught_by_stack(model: M3, tokens: Int[Array, "B T"], random: bool, first: int) -> list[Float[Array, "L K"]]:
    """`attention_caught` of each stack that has sparse layers."""

    def probe(values, context):
        if "blocks" not in values:
            return {}
        blocks = values["blocks"]
        if random:
            blocks = _random_like(blocks, model.config.index_block_size, context.positions)
        mass = caught_mass(values["q"], values["k"], blocks, context.positions, context.lengths, model.config)
        return {"mass": jnp.mean(mass[:, :, first:], axis=(0, 2))}  # [K]

    _, _, stacks = model.trunk(tokens, probe=probe)
    return [values["mass"] for values in stacks if "mass" in values]


def _random_like(blocks: Int[Array, "B K T J"], block_size: int, positions: Int[Array, "B T"]) -> Int[Array, "B K T J"]:
    """The own block, and distinct random ones before it: fewer than J - 1 where there are no more."""
    own_block = (positions // block_size)[:, None, :, None]  # [B 1 T 1]
    num_blocks = -(-positions.shape[1] // block_size)
    scores = jax.random.uniform(jax.random.key(0), (*blocks.shape[:-1], num_blocks))
    scores = jnp.where(jnp.arange(num_blocks) < own_block, scores, -1.0)  # [B K T M]
    score, ids = jax.lax.top_k(scores, min(blocks.shape[-1] - 1, num_blocks))
    ids = jnp.where(score >= 0, ids, -1).astype(jnp.int32)  # [B K T J-1]
    own_block = jnp.broadcast_to(own_block, (*ids.shape[:-1], 1)).astype(jnp.int32)
    return jnp.concatenate([ids, own_block], axis=-1)
