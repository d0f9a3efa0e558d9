"""The log-probabilities of given tokens, from the hidden states before them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from m3jax.decoding.protocols import TargetModel, is_invariant
from m3jax.decoding.sampling import HostOrDevice, log_normaliser, logprob_of, top_logits
from m3jax.tiles import LOGITS_TILE, by_tiles

_LOGITS_AT_ONCE = 1 << 25  # 128 MiB of float32


class Scores(NamedTuple):
    """The log-probabilities of the tokens that stand in some places, and the most probable tokens there.

    Attributes:
      logprobs: of the tokens that stand there, natural logarithms under the model's own logits.
      top_ids: of the Z most probable tokens in each place, best first; -1 where the vocabulary has fewer.
      top_logprobs: of these.
    """

    logprobs: Float32[HostOrDevice, "B X"]
    top_ids: Int32[HostOrDevice, "B X Z"]
    top_logprobs: Float32[HostOrDevice, "B X Z"]


def score_tokens(
    model: TargetModel, hidden: Float[Array, "B X D"], targets: Int32[HostOrDevice, "B X"], num_top: int
) -> Scores:
    """Return the scores of the tokens that follow some places, a few places at a time: no B x X x V array is made.

    Args:
      model: unembeds the hidden states. One in its invariant mode gives the bits that it gives to drawn tokens.
      hidden: of each place.
      targets: the token that follows it; what a negative one gets means nothing.
      num_top: Z.
    """
    batch, width = targets.shape
    logits_tile = LOGITS_TILE if is_invariant(model) else None

    def of_tokens(hidden: Float[Array, "Y D"], targets: Int32[Array, "Y"]) -> Scores:
        logits = model.unembed(hidden).astype(jnp.float32)  # [Y V]
        log_total = by_tiles(log_normaliser, logits_tile, logits)
        ids, top = top_logits(logits, num_top)
        return Scores(logprob_of(targets, logits, log_total), ids, top - log_total[:, None])

    tile = getattr(getattr(model, "compute", None), "token_tile", None)
    if tile is None:
        tile = max(1, min(batch * width, _LOGITS_AT_ONCE // model.config.vocab_size))
    rows = hidden.reshape(batch * width, -1), jnp.asarray(targets).reshape(-1)
    return jax.tree.map(lambda x: x.reshape(batch, width, *x.shape[1:]), by_tiles(of_tokens, tile, *rows))
