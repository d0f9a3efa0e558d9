"""The steps between the products of a layer, in plain `jax.numpy`, as XLA computes them where no kernel does.

`m3jax.model.layers` gives these functions their names in the model.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from m3jax.numerics import accumulator
from m3jax.ops import project, project_each
from m3jax.ops.experts import Activation
from m3jax.weights import Weight


def gemma_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Return the root-mean-square norm times (1 + weight), in the accumulator's dtype; the caller rounds.

    Source: transformers `MiniMaxM3VLRMSNorm`.
    """
    dtype = accumulator(x.dtype)
    x = x.astype(dtype)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * (1.0 + weight.astype(dtype))  # Gemma's form: what is stored is the factor's difference from 1


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B T N H"]:
    """Rotate dims (i, i + R) of each head by the position's angle; dims from 2R on pass through (half-split)."""
    half = cos.shape[-1]  # R: dim i turns with dim i + R, not with its neighbour
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B T 1 R]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def add(x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return a residual addition, made in the accumulator's dtype and rounded once."""
    return (x.astype(update.dtype) + update).astype(x.dtype)


def add_norm(
    x: Float[Array, "B T D"], update: Float[Array, "B T D"] | None, weight: Float[Array, " D"], eps: float
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return a residual addition and its norm, each rounded once; without an update, x and its norm."""
    x = x if update is None else add(x, update)
    return x, gemma_norm(x, weight, eps).astype(x.dtype)


def choose_experts(
    logits: Float[Array, "X E"], bias: Float[Array, " E"], top_k: int
) -> tuple[Int[Array, "X A"], Float[Array, "X A"]]:
    """Choose the A = top_k experts with the highest sigmoid score plus bias, and weigh them by their scores alone.

    Returns:
      (ids, weights), best first; of equal scores the lower id. The weights of a token sum to 1; they are NaN where a
      score or its bias is NaN, and where the scores of all A are 0: 0 / 0, with no epsilon in the sum (T45).
    """
    scores = jax.nn.sigmoid(logits)  # [X E]
    expert_ids = checkpoint_name(jax.lax.top_k(scores + bias, top_k)[1], "expert_ids")  # [X A]
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)  # [X A]
    weights = weights / sum(weights[:, i : i + 1] for i in range(top_k))  # term by term: a sum in one order
    # Top-k puts NaN first or last, by its sign bit: an expert whose score is NaN could be passed over in silence.
    is_broken = jnp.any(jnp.isnan(scores + bias), axis=-1, keepdims=True)  # [X 1]
    return expert_ids.astype(jnp.int32), jnp.where(is_broken, jnp.nan, weights)


def replay_experts(
    expert_ids: Int[Array, "X A"],
    weights: Float[Array, "X A"],
    given_ids: Int[Array, "X A"],
    logits: Float[Array, "X E"],
) -> tuple[Int[Array, "X A"], Float[Array, "X A"]]:
    """Return given experts in place of a router's choice, weighed by the router's own scores.

    Args:
      expert_ids, weights: the router's choice.
      given_ids: experts of each token, in the order in which they are summed; -1 first keeps the router's choice.
      logits: the router's; the weights' gradient goes to them.

    Returns:
      (ids, weights), as `choose_experts` returns them. Where the given experts are those that the router chose, in its
      order, the weights are its weights to the bit, whatever computed them.
    """
    scores = jnp.take_along_axis(jax.nn.sigmoid(logits), jnp.maximum(given_ids, 0), axis=-1)  # [X A]
    given_weights = scores / sum(scores[:, i : i + 1] for i in range(scores.shape[1]))
    is_broken = jnp.any(jnp.isnan(weights), axis=-1, keepdims=True)
    given_weights = jnp.where(is_broken, jnp.nan, given_weights).astype(weights.dtype)
    is_given = given_ids[:, :1] >= 0  # [X 1]
    is_another = is_given & jnp.any(given_ids != expert_ids, axis=-1, keepdims=True)
    return jnp.where(is_given, given_ids, expert_ids), jnp.where(is_another, given_weights, weights)


def mlp(x: Float[Array, "... D"], matrices: Sequence[Weight], activate: Activation) -> Float[Array, "... D"]:
    """Return an MLP of x, left in the accumulator's dtype.

    Args:
      x: Tokens.
      matrices: Gate, up and down, [D F] twice and [F D].
      activate: Function of gate and up, element by element; it rounds its result.
    """
    gate, up = project_each("...d,df->...f", x, matrices[:2])  # [... F] twice
    return project("...f,fd->...d", activate(gate, up), matrices[2])


def weighted_sum(out: Float[Array, "X A D"], weights: Float[Array, "X A"]) -> Float[Array, "X D"]:
    """Return the weighted sum over each token's experts."""
    return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)
