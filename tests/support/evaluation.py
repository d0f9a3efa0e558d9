"""The definition of each figure of an evaluation: numpy, float64, a position at a time."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from m3jax.evaluate.caught import distance_bucket


def log_probabilities(logits: Float[np.ndarray, "*X V"]) -> Float[np.ndarray, "*X V"]:
    """Log-softmax over the vocabulary, in float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def token_loss(logits: Float[np.ndarray, " V"], target: int) -> float:
    """Surprise at the token that came, in nats; its mean over tokens is the loss, and exp of that the perplexity."""
    return float(-log_probabilities(logits)[target])


def divergence(reference: Float[np.ndarray, " V"], logits: Float[np.ndarray, " V"]) -> float:
    """KL(reference || model) of two distributions of the next token, in nats; 0 where they are the same.

    Source: llama.cpp's --kl-divergence, which takes the mean and quantiles of it over the positions of a text.
    """
    log_p, log_q = log_probabilities(reference), log_probabilities(logits)
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def agrees(reference: Float[np.ndarray, " V"], logits: Float[np.ndarray, " V"]) -> bool:
    """Return True if both have the same most probable token; of equal logits the first counts."""
    return int(np.argmax(reference)) == int(np.argmax(logits))


def caught(
    q: Float[np.ndarray, "T N H"], k: Float[np.ndarray, "T K H"], blocks: Int[np.ndarray, "K T J"], block_size: int,
    first: int, num_buckets: int,
) -> tuple[Float[np.ndarray, "K Z"], Float[np.ndarray, "K Z"]]:  # fmt: skip
    """Return dense attention's probability by distance, and the part of it that lies in the selected blocks.

    Args:
      q: queries of a row without padding.
      k: its keys.
      blocks: what each query selected; -1 is none.
      block_size: P.
      first: position from which queries count.
      num_buckets: Z, of distances.

    Returns:
      Of each group and bucket of distances the probability that dense attention has there, and the part of it that is
      in selected blocks: means over queries and the group's heads.
    """
    num_queries, num_heads, width = q.shape
    group = num_heads // k.shape[1]
    mass, in_selection = np.zeros((2, k.shape[1], num_buckets))
    for t in range(first, num_queries):
        for n in range(num_heads):
            scores = k[: t + 1, n // group].astype(np.float64) @ q[t, n].astype(np.float64) / np.sqrt(width)
            probability = np.exp(log_probabilities(scores))
            for s in range(t + 1):
                bucket = distance_bucket(t - s, block_size)
                mass[n // group, bucket] += probability[s]
                in_selection[n // group, bucket] += probability[s] * (s // block_size in blocks[n // group, t])
    count = (num_queries - first) * group
    return mass / count, in_selection / count


def acceptance(accepted: Sequence[int], draft_tokens: int) -> tuple[list[float], float]:
    """Return the statistics of a draft's proposals: shares accepted, and the mean length of a verification.

    Args:
      accepted: how many of its K proposals each verification accepted.
      draft_tokens: K.

    Returns:
      The share of verifications that accepted at least 1, 2, ..., K proposals, and the mean length of one: what it
      accepted and the target's own token.
    """
    lengths = np.asarray(accepted)
    shares = [float(np.mean(lengths >= k)) for k in range(1, draft_tokens + 1)]
    return shares, float(1 + np.mean(lengths))
