"""The distribution that a token was drawn from: the tokens that the knobs left, as bits, and its log-probability.

A trainer that divides by the whole vocabulary reads another policy than the one that drew, as soon as top-k, top-p or
min-p leave tokens out. Both read the same one here: the model's logits over the temperature, within the support.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from m3jax.decoding.protocols import DRAWN_LOGPROBS, SUPPORT
from m3jax.decoding.sampling import MASK_BITS, log_normaliser, logprob_of
from m3jax.tiles import by_tiles


def pack_support(is_in: Bool[Array, "*X V"]) -> Int32[Array, "*X W"]:
    """Return a set of tokens as bits: token i is bit i % 32 of word i // 32, as in `Guide.bits`; the last are 0."""
    words = -(-is_in.shape[-1] // MASK_BITS)
    padding = [(0, 0)] * (is_in.ndim - 1) + [(0, words * MASK_BITS - is_in.shape[-1])]
    bits = jnp.pad(is_in, padding).reshape(*is_in.shape[:-1], words, MASK_BITS).astype(jnp.uint32)
    packed = jnp.sum(bits << jnp.arange(MASK_BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def unpack_support(bits: Int32[Array, "*X W"], vocab: int) -> Bool[Array, "*X V"]:
    """Return the set of tokens that bits stand for; words of -1, which a token without a record has, are all tokens.

    Args:
      bits: from `pack_support`.
      vocab: V.
    """
    words = lax.bitcast_convert_type(bits, jnp.uint32)
    is_in = (words[..., None] >> jnp.arange(MASK_BITS, dtype=jnp.uint32) & 1).astype(bool)  # [*X W 32]
    return is_in.reshape(*bits.shape[:-1], -1)[..., :vocab]


def record_draws(
    filtered: Float32[Array, "X V"], tokens: Int32[Array, "X"], records: tuple[str, ...], tile: int | None = None
) -> dict[str, Shaped[Array, "X ..."]]:
    """Return what a request can have recorded of the distributions that its tokens were drawn from, by name.

    Args:
      filtered: from `filtered_logits`.
      tokens: that were drawn.
      records: names; those that are not of a draw are passed over.
      tile: rows at a time, for bits that do not depend on X.

    Returns:
      "support" [X W], the tokens that could be drawn, as bits; "drawn_logprobs" [X], of the drawn token among these.
    """
    made = {}
    if SUPPORT in records:
        made[SUPPORT] = pack_support(filtered > -jnp.inf)
    if DRAWN_LOGPROBS in records:
        made[DRAWN_LOGPROBS] = logprob_of(tokens, filtered, by_tiles(log_normaliser, tile, filtered))
    return made


def logits_within(
    logits: Float[Array, "*X V"], bits: Int32[Array, "*X W"] | None, temperature: float = 1.0
) -> Float32[Array, "*X V"]:
    """Return logits over a temperature within a support, as `filtered_logits` has them: -inf outside, the largest 0.

    The gradient for a token outside of the support is exactly 0.

    Args:
      logits: the model's.
      bits: of the support, recorded when a token was drawn; None for all tokens.
      temperature: above 0.
    """
    x = logits.astype(jnp.float32)
    if bits is not None:
        x = jnp.where(unpack_support(bits, x.shape[-1]), x, -jnp.inf)
    # A shift changes no probability: it needs no gradient.
    x = x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    return x / jnp.float32(temperature)
