"""What is measured of a trained model: loss on held-out code, recall by distance, what selection catches."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from m3jax.model import M3
from m3jax.train.data import Batch, Corpus, recall_probe
from m3jax.train.losses import caught_mass


@jax.jit
def _nll(model: M3, tokens, weights):
    hidden, _ = model.hidden(tokens[:, :-1])
    logits = model.unembed(hidden)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(losses * weights), jnp.sum(weights)


def validation_loss(model: M3, batches: Iterable[Batch]) -> float:
    """Mean cross-entropy of the next token, in nats, over batches of code."""
    sums = [_nll(model, jnp.asarray(b["tokens"]), jnp.asarray(b["weights"])) for b in batches]
    total, weight = (float(sum(x)) for x in zip(*sums, strict=True))
    return total / weight


@jax.jit
def _next(model: M3, tokens):
    hidden, _ = model.hidden(tokens)
    return jnp.argmax(model.unembed(hidden[:, -1]), axis=-1)


def recall_accuracy(
    model: M3, corpus: Corpus, distances: Iterable[int], count: int, seq_len: int, seed: int = 0, batch: int = 16
) -> dict[int, float]:
    """Share of values recalled exactly, by tokens between the definition and the question.

    Args:
      model: any M3 whose tokenizer is the corpus's.
      corpus: held-out code that the records stand in.
      distances: tokens back to the only definition.
      count: questions a distance; a multiple of `batch`.
      seq_len: tokens of a prompt.
      seed: of the questions.
      batch: prompts of one call.
    """
    out = {}
    for distance in distances:
        prompts, answers = recall_probe(corpus, distance, count, seq_len, seed)
        found = [_next(model, jnp.asarray(prompts[i : i + batch])) for i in range(0, count, batch)]
        out[distance] = float(np.mean(np.concatenate(found) == answers))
    return out


@partial(jax.jit, static_argnames="random")
def _caught(model: M3, tokens, random: bool):
    def probe(values, context):
        if "blocks" not in values:
            return {}
        blocks = _random_like(values["blocks"], model.config.index_block_size, context) if random else values["blocks"]
        mass = caught_mass(values["q"], values["k"], blocks, context.positions, context.lengths, model.config)
        budget = model.config.index_topk_blocks * model.config.index_block_size
        return {"mass": jnp.mean(mass[:, :, 4 * budget :], axis=(0, 2))}

    _, _, kept = model.trunk(tokens, probe=probe)
    return [k["mass"] for k in kept if "mass" in k]


def attention_caught(model: M3, tokens: np.ndarray, random: bool = False) -> np.ndarray:
    """Share of dense attention's mass in the selected blocks, per sparse layer and KV group [L K].

    Only positions beyond four times the budget count, so that most blocks are dropped. `random` gives the share of
    a random selection (own block included) for comparison.
    """
    return np.concatenate([np.asarray(x) for x in _caught(model, jnp.asarray(tokens), random)])


def _random_like(blocks, block_size, context):
    """Random earlier blocks with the own block last; duplicates are dropped."""
    own = (context.positions // block_size)[:, None, :, None]
    draw = jax.random.uniform(jax.random.key(0), (*blocks.shape[:-1], blocks.shape[-1] - 1))
    ids = jnp.sort(jnp.floor(draw * own).astype(jnp.int32), axis=-1)
    repeated = jnp.pad(ids[..., 1:] == ids[..., :-1], ((0, 0),) * 3 + ((1, 0),))
    own = jnp.broadcast_to(own, (*ids.shape[:-1], 1)).astype(jnp.int32)
    return jnp.concatenate([jnp.where(repeated, -1, ids), own], axis=-1)
