"""The log-probabilities of given tokens, read in chunks: nothing of size T x V is made."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Float32, Int, Int32

from m3jax.decoding.device.scores import Scores, score_tokens
from m3jax.decoding.engine.checks import check_sizes
from m3jax.decoding.engine.request import check_ids
from m3jax.decoding.protocols import PagedCache, TargetModel
from m3jax.decoding.sampling import MAX_TOP_LOGPROBS, HostOrDevice
from m3jax.messages import shown
from m3jax.parallel import put, read

_CHUNK = 2048


def score(
    model: TargetModel,
    tokens: Sequence[int] | Int[HostOrDevice, "B T"],
    lengths: Sequence[int] | None = None,
    *,
    chunk: int = _CHUNK,
) -> Float32[np.ndarray, "*Y"]:
    """Return the log-probability of each token but the first, given those before it.

    The rows are read in chunks through a cache of their own, and a chunk's logits exist some rows at a time. Of a model
    in its invariant mode these are to the bit the log-probabilities that an engine reports for tokens that it drew.

    Args:
      model: any M3.
      tokens: ids of one text, or of B texts, right-padded.
      lengths: tokens of each of the B texts; None is all of them.
      chunk: tokens of each text in one call of the device.

    Returns:
      Natural logarithms in float32, [T - 1] for one text and [B T - 1] for several; 0 where a text has ended.

    Raises:
      ValueError: ids outside the vocabulary, no text, fewer than 1 token or more than the model's context.
    """
    return score_with_top(model, tokens, lengths, chunk=chunk)[0]


def score_with_top(
    model: TargetModel,
    tokens: Sequence[int] | Int[HostOrDevice, "B T"],
    lengths: Sequence[int] | None = None,
    *,
    num_top: int = 0,
    chunk: int = _CHUNK,
) -> tuple[Float32[np.ndarray, "*Y"], Int32[np.ndarray, "*Y Z"], Float32[np.ndarray, "*Y Z"]]:
    """Return what `score` does, and the most probable tokens in the place of each.

    Args:
      model, tokens, lengths, chunk: as in `score`.
      num_top: Z, 0 to 20.

    Returns:
      (log-probabilities; ids of the Z most probable tokens, best first; their log-probabilities).

    Raises:
      ValueError: as `score`, or `num_top` outside its range.
    """
    check_sizes(dict(chunk=chunk))
    check_sizes(dict(num_top=num_top), 0)
    if num_top > MAX_TOP_LOGPROBS:
        raise ValueError(f"num_top = {num_top}: at most {MAX_TOP_LOGPROBS}")
    rows, row_lengths = _as_rows(model, tokens, lengths)
    batch, length = rows.shape
    chunk = min(chunk, max(16, 1 << (length - 1).bit_length()))  # short texts of similar lengths share a program
    width = -(-length // chunk) * chunk
    following = np.zeros((batch, width + 1), np.int32)
    following[:, :length] = rows
    blocks = -(-min(width, model.config.max_position_embeddings) // model.config.index_block_size)
    cache = model.new_cache(batch * blocks, batch, blocks)
    # Neighbouring blocks lie `batch` pages apart, so that devices which divide the pages share every row.
    table = np.arange(batch * blocks, dtype=np.int32).reshape(blocks, batch).T
    cache = cache.replace(table=put(table, cache.table.sharding))
    pieces = []
    for start in range(0, width, chunk):
        positions = np.broadcast_to(np.arange(start, start + chunk, dtype=np.int32), (batch, chunk))
        piece = following[:, start : start + chunk], following[:, start + 1 : start + chunk + 1]
        ends = np.minimum(row_lengths, start + chunk).astype(np.int32)
        cache, scores = _score_chunk(model, cache, *piece, positions, ends, num_top=num_top)
        pieces.append(scores)
    joined = [np.concatenate(parts, axis=1)[:, : length - 1] for parts in zip(*read(pieces), strict=True)]
    is_scored = np.arange(1, length) < row_lengths[:, None]  # [B T-1]
    joined = [np.where(is_scored.reshape(*is_scored.shape, *[1] * (x.ndim - 2)), x, 0).astype(x.dtype) for x in joined]
    logprobs, ids, top = joined if np.ndim(tokens) == 2 else (x[0] for x in joined)
    return logprobs, ids, top


@partial(jax.jit, static_argnames=("num_top",), donate_argnames=("cache",))
def _score_chunk(
    model: TargetModel,
    cache: PagedCache,
    tokens: Int32[HostOrDevice, "B X"],
    targets: Int32[HostOrDevice, "B X"],
    positions: Int32[HostOrDevice, "B X"],
    lengths: Int32[HostOrDevice, "B"],
    num_top: int,
) -> tuple[PagedCache, Scores]:
    """Read one chunk; return the cache after it, the log-probability of what follows each token, and the best ones."""
    hidden, cache = model.hidden(tokens, cache=cache, positions=positions, lengths=lengths)  # [B X D]
    return cache, score_tokens(model, hidden, targets, num_top)


def _as_rows(
    model: TargetModel, tokens: Sequence[int] | Int[HostOrDevice, "B T"], lengths: Sequence[int] | None
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Return texts as rows with their lengths; ValueError for what cannot be read."""
    if isinstance(tokens, str | bytes):
        raise ValueError("tokens is text: encode it with the model's tokenizer first")
    array = np.asarray(tokens)
    if array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "iu":
        raise ValueError(f"tokens is {shown(tokens)}: give a list of token ids, or an array [B T] of them")
    if array.ndim == 1 and lengths is not None:
        raise ValueError("lengths with one text: leave it out, or give an array [B T] of texts")
    rows = np.atleast_2d(array)
    check_ids("tokens", np.unique(rows).tolist(), model.config.vocab_size)
    limit = model.config.max_position_embeddings
    if rows.shape[1] > limit:
        raise ValueError(f"tokens has {rows.shape[1]} a row: the model's context is {limit}")
    row_lengths = np.full(len(rows), rows.shape[1]) if lengths is None else np.asarray(lengths)
    if row_lengths.shape != (len(rows),) or row_lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths is {shown(lengths)}: give one number for each of {len(rows)} texts")
    if not np.all((row_lengths >= 1) & (row_lengths <= rows.shape[1])):
        raise ValueError(f"lengths is {shown(lengths)}: each must be from 1 to {rows.shape[1]}")
    return rows, row_lengths
