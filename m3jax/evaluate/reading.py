"""Reading of texts by a model in chunks, with a measure applied to the logits of each position."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from m3jax.cache import Cache, Scales
from m3jax.model import M3
from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.parallel import read as on_host
from m3jax.progress import activity

_LOGITS_AT_ONCE = 1 << 25  # numbers: 128 MiB of float32, however long the text and large the vocabulary

Row = Int[np.ndarray, "_"]  # of any length
# A function of the logits of some positions and of arrays beside them, to the values kept of each position.
Measure = Callable[..., PyTree[Array]]
# A function of (row, start, end) to arrays whose first axis are the row's positions from start to end.
Beside = Callable[[int, int, int], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Reading:
    """Sizes and dtypes with which a model reads rows of tokens.

    Attributes:
      chunk: tokens of a row in one call; 0 is whole rows in calls without a cache, which then must be of one length.
      batch: rows of a call.
      kv_dtype: of cached keys and values; the model's by default.
      index_dtype: of cached index keys; the model's by default.
      scales: for float8 (`m3jax.cache.measure_scales`).
    """

    chunk: int = 512
    batch: int = 4
    kv_dtype: str | None = None
    index_dtype: str | None = None
    scales: tuple[Scales, ...] | None = None


def read(
    model: M3, rows: Sequence[Row], measure: Measure, beside: Beside | None = None, how: Reading | None = None
) -> Iterator[tuple[int, int, PyTree[np.ndarray]]]:
    """Yield the values that a measure gives for the logits at each position of some rows.

    Rows of like length share calls. No more logits are held than `_LOGITS_AT_ONCE` and what the measure keeps.

    Args:
      model: any M3, on one device or a mesh.
      rows: token ids, each row by itself from position 0.
      measure: of logits [B X V] and what lies beside them [B X ...] to a pytree of [B X ...]; one function, compiled
        once.
      beside: of (row, start, end) to the arrays beside these positions.
      how: sizes and dtypes.

    Yields:
      (row, first position, what the measure kept of the chunk's positions from there on [X ...]), a row's chunks in
      order.

    Raises:
      ValueError: a row without tokens, one beyond the model's context, or whole rows of several lengths.
    """
    how = how or Reading()
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    longest = len(rows[order[0]]) if order else 0
    limit = model.config.max_position_embeddings
    if wrong := [len(row) for row in rows if not 1 <= len(row) <= limit]:
        raise ValueError(f"a row of {wrong[0]} tokens: the model reads 1 to {limit}")
    if not how.chunk and len({len(row) for row in rows}) > 1:
        raise ValueError("whole rows are read together, and these are of several lengths: give a chunk's size")
    chunk = longest if not how.chunk else min(how.chunk, longest)
    batch = min(how.batch, len(rows))
    cache = None
    if how.chunk and rows:
        types = dict(kv_dtype=how.kv_dtype, index_dtype=how.index_dtype, scales=how.scales)
        cache = Cache.init(model.config, batch, longest, str(model.dtype), model.mesh, **types)
    total, done = sum(map(len, rows)), 0
    with activity(about=(model.config, str(model.dtype), batch, chunk, how.kv_dtype, how.index_dtype)) as line:
        line.say(f"reading: 0 of {total:,} tokens, and compiling")
        for first in range(0, len(order), batch):
            group = order[first : first + batch]
            for start in range(0, len(rows[group[0]]), chunk):
                # Without a cache the last group may be smaller; a cache's number of rows is fixed, so it is padded.
                size = len(group) if cache is None else batch
                tokens, positions, lengths = _chunk_of([rows[row] for row in group], size, start, chunk)
                ends = [min(start + chunk, len(rows[row])) for row in group]
                pieces = [beside(row, start, end) for row, end in zip(group, ends, strict=True)] if beside else []
                cache, kept = _read_chunk(
                    model, cache, tokens, positions, lengths, _stacked(pieces, size, chunk), measure
                )
                kept = on_host(kept)
                for slot, (row, end) in enumerate(zip(group, ends, strict=True)):
                    if end > start:
                        yield row, start, jax.tree.map(lambda x, p=slot, n=end - start: x[p, :n], kept)
                        done += end - start
                line.say(f"reading: {done:,} of {total:,} tokens")


def _chunk_of(
    rows: list[Row], batch: int, start: int, chunk: int
) -> tuple[Int[np.ndarray, "B X"], Int[np.ndarray, "B X"], Int[np.ndarray, " B"]]:
    """Return the tokens, positions and lengths of one call; padding has positions at or behind its row's length."""
    tokens, lengths = np.zeros((batch, chunk), np.int32), np.zeros(batch, np.int32)
    for slot, row in enumerate(rows):
        piece = row[start : start + chunk]
        tokens[slot, : len(piece)] = piece
        lengths[slot] = min(start + chunk, len(row))
    positions = np.broadcast_to(np.arange(start, start + chunk, dtype=np.int32), (batch, chunk))
    return tokens, positions, lengths


def _stacked(pieces: list[tuple[np.ndarray, ...]], batch: int, chunk: int) -> tuple[np.ndarray, ...]:
    """Return the arrays beside the rows of a call, stacked and padded with zeros to its shape."""
    stacked = []
    for arrays in zip(*pieces, strict=True):
        padded = np.zeros((batch, chunk, *arrays[0].shape[1:]), arrays[0].dtype)
        for slot, array in enumerate(arrays):
            padded[slot, : len(array)] = array
        stacked.append(padded)
    return tuple(stacked)


@partial(jax.jit, static_argnames=("measure",), donate_argnames=("cache",))
def _read_chunk(
    model: M3,
    cache: Cache | None,
    tokens: Int[Array, "B X"],
    positions: Int[Array, "B X"],
    lengths: Int[Array, " B"],
    beside: tuple[Array, ...],
    measure: Measure,
) -> tuple[Cache | None, PyTree[Array]]:
    """Read one chunk; return the cache after it, and the values that the measure keeps."""
    if cache is None:
        hidden, _ = model.hidden(tokens)
    else:
        hidden, cache = model.hidden(tokens, cache=cache, positions=positions, lengths=lengths)  # [B X D]
    num_positions = rows_within(_LOGITS_AT_ONCE, tokens.shape[0] * model.config.vocab_size, tokens.shape[1])
    kept = map_chunks(
        lambda hidden, *beside: measure(model.unembed(hidden), *beside), num_positions, 1, hidden, *beside
    )
    return cache, kept


# What is measured where the next token is known


def score_targets(
    logits: Float[Array, "B X V"], targets: Int[Array, "B X"]
) -> tuple[Float[Array, "B X"], Bool[Array, "B X"]]:
    """Return the loss of the token that comes next, in nats, and whether it is the most probable one.

    Args:
      logits: of each position.
      targets: the token after it.
    """
    loss = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return loss, jnp.argmax(logits, axis=-1) == targets


def token_scores(
    model: M3, rows: Sequence[Row], how: Reading | None = None
) -> list[tuple[Float[np.ndarray, "_"], Bool[np.ndarray, "_"]]]:
    """Return the loss of each token of some rows given those before it, and whether it was the most probable one.

    Args:
      model: any M3.
      rows: token ids, two or more each; the last one of a row is predicted and not read.
      how: sizes and dtypes.

    Returns:
      Of each row the losses of its tokens but the first, in nats, and whether each was the most probable one.
    """
    losses = [np.zeros(len(row) - 1, np.float64) for row in rows]
    hits = [np.zeros(len(row) - 1, bool) for row in rows]
    targets = lambda row, start, end: (rows[row][start + 1 : end + 1].astype(np.int32),)
    for row, start, (loss, is_best) in read(model, [row[:-1] for row in rows], score_targets, targets, how):
        losses[row][start : start + len(loss)] = loss
        hits[row][start : start + len(loss)] = is_best
    return list(zip(losses, hits, strict=True))
