"""Flips: selections that differ from the reference's as sets, with the score gap that rounding must explain."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from m3jax.vectors.compare import other_sets


class Flips(NamedTuple):
    """The selections of one quantity that differ from the reference's; Q runs over tokens, or tokens and KV heads.

    Attributes:
      is_other: True for a selection that is another set than the reference's.
      gap: for those, the reference's highest score of a dropped id minus its lowest score of an id chosen instead: the
        total error that two scores need for the flip. Infinite where the number of ids differs, an id is there twice,
        a forced one is missing, or no scores are known; 0 for selections that agree.
      is_inside: True for a flip whose gap roundings explain.
    """

    is_other: Bool[np.ndarray, " Q"]
    gap: Float[np.ndarray, " Q"]
    is_inside: Bool[np.ndarray, " Q"]


def find_flips(
    expected: Int[np.ndarray, "Q J"],
    actual: Int[np.ndarray, "Q L"],
    scores: Float[np.ndarray, "Q M"] | None,
    rtol: float,
    atol: float | Float[np.ndarray, " Q"],
) -> Flips:
    """Find the selections of two sides that differ as sets.

    Args:
      expected: the reference's, -1 for an unused slot.
      actual: the other side's; it may have another number of slots.
      scores: the reference's scores of everything that a query may choose from, inf for what it must choose, -inf for
        what it must not. None where they are not known.
      rtol, atol: the error that one score may have, `atol` for each query or for all. Two of them decide a flip, so
        the margin is twice that.
    """
    slots = max(expected.shape[-1], actual.shape[-1])
    pad = lambda ids: np.pad(ids, ((0, 0), (0, slots - ids.shape[-1])), constant_values=-1)
    is_other = other_sets(pad(expected), pad(actual))
    gap, is_inside = np.zeros(len(is_other)), np.zeros(len(is_other), bool)
    queries = np.flatnonzero(is_other)
    if scores is None or not len(queries):
        gap[queries] = np.inf
        return Flips(is_other, gap, is_inside)
    ranked = scores[queries].astype(np.float64)
    ranked = np.where(np.isnan(ranked), -np.inf, ranked)  # NaN ranks below all numbers
    count = ranked.shape[-1]
    given = actual[queries]
    kept, taken = _counts(expected[queries], count), _counts(np.where(given < count, given, -1), count)  # [Q M]
    # Roundings exchange blocks at the cut alone: compare the best block that was lost with the worst that came in.
    highest_lost = np.max(np.where((kept > 0) & (taken == 0), ranked, -np.inf), axis=-1)
    lowest_new = np.min(np.where((taken > 0) & (kept == 0), ranked, np.inf), axis=-1)
    # Only an exchange of equally many ids, each there once, can come from roundings.
    is_exchange = (kept.sum(-1) == taken.sum(-1)) & (taken.max(-1) <= 1)
    with np.errstate(invalid="ignore"):  # inf - inf of two forced blocks
        difference = np.maximum(highest_lost - lowest_new, 0.0)
        size = np.maximum(np.abs(highest_lost), np.abs(lowest_new))
        gap[queries] = np.where(is_exchange & np.isfinite(difference), difference, np.inf)
        allowed = 2 * (np.broadcast_to(atol, len(is_other))[queries] + rtol * size)
        is_inside[queries] = np.isfinite(gap[queries]) & (gap[queries] <= allowed)
    return Flips(is_other, gap, is_inside)


def _counts(ids: Int[np.ndarray, "Q J"], count: int) -> Int[np.ndarray, "Q M"]:
    """Return how often each id from 0 to `count` - 1 stands in each selection; -1, an unused slot, is not counted."""
    counts = np.zeros((len(ids), count + 1), np.int64)
    np.add.at(counts, (np.arange(len(ids))[:, None], np.where(ids < 0, count, ids)), 1)
    return counts[:, :count]


def block_ranks(
    scores: Float[np.ndarray, "X K M"], positions: Int[np.ndarray, " X"], block_size: int, local: int, init: int
) -> Float[np.ndarray, "X K M"]:
    """Return scores as selection ranks them: inf for forced blocks, -inf for blocks that a query does not see.

    Args:
      scores: of blocks.
      positions: of the tokens.
      block_size: P.
      local, init: the number of forced blocks at the query's end, and at the beginning of the row.
    """
    ids, own_block = np.arange(scores.shape[-1]), (positions // block_size)[:, None, None]
    ranked = np.where((ids > own_block - local) | (ids < init), np.inf, scores)
    return np.where(ids <= own_block, ranked, -np.inf)
