"""The divergence of a model's next-token distributions from a reference's."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from m3jax.config import M3Config
from m3jax.evaluate.dumps import Dump, fitting
from m3jax.evaluate.reading import Reading, read
from m3jax.model import M3

# The quantiles of the divergence over positions that are reported.
FRACTIONS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


def score_reference(
    logits: Float[Array, "B X V"], reference: Float[Array, "B X V"]
) -> tuple[Float[Array, "B X"], Bool[Array, "B X"]]:
    """Return KL(reference || model) at each position, in nats, and whether both have the same most probable token.

    Args:
      logits: the model's.
      reference: the other's; it may have -inf.
    """
    log_p = jax.nn.log_softmax(reference.astype(logits.dtype), axis=-1)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    p = jnp.exp(log_p)
    kl = jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
    is_broken = jnp.any(jnp.isnan(reference) | (reference == jnp.inf), axis=-1)
    return jnp.where(is_broken, jnp.nan, kl), jnp.argmax(reference, axis=-1) == jnp.argmax(logits, axis=-1)


def divergence(model: M3, dumps: Sequence[Dump], skip: int | None = None, how: Reading | None = None) -> dict[str, Any]:
    """Return KL(reference || model) over the positions of some prompts, summarised as llama.cpp's --kl-divergence does.

    Args:
      model: any M3 with the reference's vocabulary.
      dumps: of the reference (`read_dump`).
      skip: positions at the start of each prompt that do not count; half of them by default, as in llama.cpp.
      how: sizes and dtypes.

    Returns:
      "positions" counted, "mean" and its "standard_error" in nats, "median", "p99", "p99.9", "max", "top1_agreement"
      (share of positions), and "quantiles", pairs of a share and the divergence that it does not exceed.

    Raises:
      ValueError: as in `check_reference`.
      FloatingPointError: a divergence that is no number; names where.
    """
    check_reference(dumps, model.config, skip)
    firsts = [_first(dump, skip) for dump in dumps]
    how = fitting(how or Reading(), model.config.vocab_size)
    beside = lambda row, start, end: (dumps[row].logits[start:end],)
    kl, agreement = [np.zeros(len(d.tokens)) for d in dumps], [np.zeros(len(d.tokens), bool) for d in dumps]
    rows = [dump.tokens.astype(np.int32) for dump in dumps]
    for row, start, (divergences, agrees) in read(model, rows, score_reference, beside, how):
        kl[row][start : start + len(agrees)] = divergences
        agreement[row][start : start + len(agrees)] = agrees
    for dump, values in zip(dumps, kl, strict=True):
        if not np.isfinite(values).all():
            position = int(np.flatnonzero(~np.isfinite(values))[0])
            raise FloatingPointError(f"{dump.name}: position {position}: the divergence is {values[position]}")
    counted = np.concatenate([values[first:] for values, first in zip(kl, firsts, strict=True)])
    return _summary(counted, np.concatenate([a[first:] for a, first in zip(agreement, firsts, strict=True)]))


def check_reference(dumps: Sequence[Dump], config: M3Config, skip: int | None) -> None:
    """Raise ValueError if a model cannot be compared with a reference.

    Args:
      dumps: of the reference.
      config: of the model.
      skip: as in `divergence`.

    Raises:
      ValueError: another vocabulary, ids that the model does not have, prompts beyond its context, or no position that
        counts.
    """
    vocab, limit = config.vocab_size, config.max_position_embeddings
    for dump in dumps:
        if dump.logits.shape[1] != vocab:
            raise ValueError(f"{dump.name}: logits of {dump.logits.shape[1]} tokens, and the model has {vocab}")
        low, high = dump.tokens.min(), dump.tokens.max()
        if low < 0 or high >= vocab:
            raise ValueError(f"{dump.name}: token ids from {low} to {high}, and the model has 0 to {vocab - 1}")
        if len(dump.tokens) > limit:
            raise ValueError(f"{dump.name}: {len(dump.tokens)} tokens, and the model reads {limit} at most")
    longest = max(len(dump.tokens) for dump in dumps)
    if skip is not None and skip >= longest:
        raise ValueError(f"--skip {skip}: the longest prompt has {longest} tokens, so no position counts; give fewer")


def _first(dump: Dump, skip: int | None) -> int:
    """Return the first position of a prompt that counts."""
    return len(dump.tokens) // 2 if skip is None else skip


def _summary(kl: Float[np.ndarray, " X"], agreement: Bool[np.ndarray, " X"]) -> dict[str, Any]:
    """Return the mean, quantiles and agreement over all positions that count."""
    quantile = lambda share: float(np.quantile(kl, share))
    return {
        "positions": len(kl),
        "mean": float(kl.mean()),
        "standard_error": float(kl.std(ddof=1) / np.sqrt(len(kl))) if len(kl) > 1 else None,
        "median": quantile(0.5),
        "p99": quantile(0.99),
        "p99.9": quantile(0.999),
        "max": float(kl.max()),
        "top1_agreement": float(agreement.mean()),
        "quantiles": [[share, quantile(share)] for share in FRACTIONS],
    }


def divergence_table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the figures as lines of a table, a column for each result."""
    small = lambda x: "" if x is None else f"{x:.3g}"
    shown = {"mean": small, "standard_error": small, "median": small, "p99": small, "p99.9": small, "max": small,
             "top1_agreement": lambda x: f"{x:.2%}", "positions": lambda x: f"{x:,}"}  # fmt: skip
    names = {"mean": "mean KL, nats", "standard_error": "its standard error", "p99": "99%", "p99.9": "99.9%",
             "max": "largest", "top1_agreement": "same most probable token",
             "positions": "positions counted"}  # fmt: skip
    return [[names.get(key, key), *(show(result[key]) for result in results)] for key, show in shown.items()]
