"""Several documents in one row: each is computed as if it were alone, with positions and blocks of its own (T29).

A document begins on a block boundary of its row, so that a block of the row lies in one document, and block m of a
document is block `first_block + m` of the row. At most P - 1 tokens behind a document are unused.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int32

from m3jax.cache import CallPages
from m3jax.model import M3
from m3jax.msa import SelectionRules, select_blocks, walk_scores
from m3jax.msa.chunks import elements_at_once, map_chunks, rows_within
from m3jax.msa.views import ContiguousIndex
from m3jax.numerics import attend
from m3jax.platform import platform
from m3jax.spec.msa import chosen_tokens
from m3jax.train.conversations import Example

_SCORE_BUDGET = 1 << 24  # index scores that are held at once
_SCORES_AT_ONCE = 1 << 20  # of attention, on a CPU: what a core's cache holds
_PARTS, _LEAST_PART = 4, 256  # a row's queries meet the keys up to the end of their part of it: parts, tokens of one
_OPEN_ROWS = 64  # that a document may still go into: packing takes time in their number


def pack(lengths: Sequence[int], row_length: int, block_size: int) -> list[list[int]]:
    """Return which documents each row holds, in the order in which rows were begun: first fit among the open rows.

    Args:
      lengths: tokens of each document.
      row_length: tokens of a row, a multiple of P.
      block_size: P.

    Raises:
      ValueError: a document that is longer than a row.
    """
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # of the rows that are open
    for document, length in enumerate(lengths):
        taken = -(-length // block_size) * block_size
        if taken > row_length:
            raise ValueError(f"document {document} has {length} tokens, and a row {row_length}: make rows longer")
        row = next((row for row, left in room.items() if left >= taken), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room[row] = row_length
            if len(room) > _OPEN_ROWS:
                del room[next(iter(room))]
        rows[row].append(document)
        room[row] -= taken
        if room[row] < block_size:
            del room[row]
    return rows


def packed_row(examples: Sequence[Example], row_length: int, block_size: int) -> dict[str, np.ndarray]:
    """Return one row of documents.

    Args:
      examples: its documents, which find room.
      row_length: T.
      block_size: P.

    Returns:
      tokens int32 [T]; positions int32 [T], of each token in its document, -1 where there is none; targets int32 [T],
      the token that follows in the same document; weights float32 [T], 1 where that token was written by the assistant.
    """
    tokens, targets = np.zeros((2, row_length), np.int32)
    positions, weights = np.full(row_length, -1, np.int32), np.zeros(row_length, np.float32)
    start = 0
    for example in examples:
        count = len(example.tokens)
        tokens[start : start + count], positions[start : start + count] = example.tokens, np.arange(count)
        # The last token of a document has no target: what stands behind it is another document's.
        before_end = slice(start, start + count - 1)
        targets[before_end], weights[before_end] = example.tokens[1:], example.is_written[1:]
        start += -(-count // block_size) * block_size
    return {"tokens": tokens, "positions": positions, "targets": targets, "weights": weights}


@struct.dataclass
class PackedPages(CallPages):
    """The keys of a call whose rows hold documents: a query sees its own document alone.

    The call's positions are those in the documents, -1 for what is no token; each document begins at position 0, on a
    block boundary of its row. Selected blocks are blocks of the row.
    """

    read_by_kernels: ClassVar[bool] = False

    def select(self, call, index_q, rules):
        """Return the blocks of the row that each query keeps of its document."""
        blocks = select_in_documents(index_q, self.heads.index_k, call.positions, rules, self.block_size)
        return in_row(blocks, call.positions, self.heads.k.shape[1], self.block_size)

    def attend_selected(self, call, q, blocks):
        """Return attention over the selected blocks, and this object."""
        return attend_to_blocks(q, self.heads.k, self.heads.v, call.positions, blocks, self.block_size), self

    def attend_all(self, call, q):
        """Return attention over all of each query's document, and this object."""
        return attend_to_documents(q, self.heads.k, self.heads.v, call.positions), self


def with_fast_gradients(model: M3, call_pages: Callable[..., CallPages] = PackedPages) -> M3:
    """Return the model with the same parameters, computed as training wants it: rows of whole documents, no cache.

    Args:
      model: not changed.
      call_pages: as of `M3.with_training_paths`, for rows that hold something else.
    """
    # Experts that a mesh divides, and those of a TPU, are run in the ways of any call.
    experts = "auto" if model.compute.is_divided or platform() == "tpu" else "trained"
    return model.with_training_paths(call_pages, experts)


def slots_of(positions: Int[Array, "B T"], num_slots: int | None = None) -> Int32[Array, "B T"]:
    """Return the place of each token in its row, -1 for what is no token.

    Args:
      positions: of the tokens in their documents, -1 for what is no token.
      num_slots: S, of the row, whose last T the tokens take; T by default.
    """
    first = 0 if num_slots is None else num_slots - positions.shape[1]
    return jnp.where(positions < 0, -1, first + jnp.arange(positions.shape[1], dtype=jnp.int32))


def select_in_documents(
    index_q: Float[Array, "B T K I"],
    index_k: Float[Array, "B S I"],
    positions: Int[Array, "B T"],
    rules: SelectionRules,
    block_size: int,
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps of its document, counted from the document's first.

    Args:
      index_q: of the row's last T tokens.
      index_k: of the whole row.
      positions: of the queries in their documents, -1 for what is no token.
      rules: of selection.
      block_size: P.
    """
    index_q, index_k = jax.lax.stop_gradient((index_q, index_k))
    index, num_blocks = ContiguousIndex.of_tokens(index_k, block_size), -(-index_k.shape[1] // block_size)
    lengths = jnp.full(index_k.shape[0], index_k.shape[1], jnp.int32)

    def select_for(index_q, positions, slots):
        scores = walk_scores(index_q, index, slots, lengths, rules.score)  # [B K T M], M blocks of the row
        first_block = ((slots - positions) // block_size)[:, None, :, None]  # [B 1 T 1]
        # Scores by block of the document. What lies behind the row's end is behind the query's own block too.
        in_document = jnp.minimum(first_block + jnp.arange(num_blocks, dtype=jnp.int32), num_blocks - 1)
        scores = jnp.take_along_axis(scores, in_document, axis=-1)  # [B K T M]
        blocks = select_blocks(scores, positions, lengths, rules, block_size=block_size)
        return blocks.swapaxes(1, 2)  # [B T K J]

    batch, num_queries, kv_heads, _ = index_q.shape
    chunk = rows_within(_SCORE_BUDGET, batch * kv_heads * num_blocks, num_queries)
    blocks = map_chunks(select_for, chunk, 1, index_q, positions, slots_of(positions, index_k.shape[1]))
    return blocks.swapaxes(1, 2)  # [B K T J]


def in_row(
    blocks: Int[Array, "B K T J"], positions: Int[Array, "B T"], num_slots: int, block_size: int
) -> Int[Array, "B K T J"]:
    """Return blocks of documents as blocks of the rows that hold them.

    Args:
      blocks: counted from the first of each query's document; -1 for none.
      positions: of the queries in their documents.
      num_slots: S, of the row, whose last T the queries take.
      block_size: P.
    """
    first_block = ((slots_of(positions, num_slots) - positions) // block_size)[:, None, :, None]  # [B 1 T 1]
    return jnp.where(blocks >= 0, blocks + first_block, -1)


def attend_to_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    blocks: Int[Array, "B K T J"],
    block_size: int,
) -> Float[Array, "B T N H"]:
    """Compute attention over the selected blocks of rows of documents.

    Args:
      q: of the row's last T tokens.
      k, v: of the whole row.
      positions: of the queries in their documents, -1 for what is no token.
      blocks: of the row, all of them of the query's own document.
      block_size: P.
    """

    def visible(slots, blocks, num_keys):
        # The blocks are the document's own, so that only the order within the row is left to see to.
        is_seen = jnp.arange(num_keys, dtype=jnp.int32) <= slots[..., None]  # [B T S]
        return is_seen[:, None] & chosen_tokens(blocks.swapaxes(1, 2), num_keys, block_size)

    return attend_by_chunks(q, k, v, visible, slots_of(positions, k.shape[1]), blocks.swapaxes(1, 2))


def attend_to_documents(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Compute attention over all that each query sees of its document.

    Args:
      q, k, v, positions: as in `attend_to_blocks`.
    """

    def visible(slots, positions, num_keys):
        key_slots = jnp.arange(num_keys, dtype=jnp.int32)
        first = jnp.where(slots < 0, 0, slots - positions)[..., None]  # [B T 1], slot of the document's first token
        return ((key_slots >= first) & (key_slots <= slots[..., None]))[:, None]  # [B 1 T S]

    return attend_by_chunks(q, k, v, visible, slots_of(positions, k.shape[1]), positions)


def attend_by_chunks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visible: Callable[..., Bool[Array, "B #K T S"]],
    *of_queries: Int[Array, "B T ..."],
) -> Float[Array, "B T N H"]:
    """Compute grouped-query attention of rows, where no query sees a key behind it; 0 for one that sees none.

    On a GPU, in a 16-bit dtype, cuDNN computes it and holds no scores. Elsewhere a few queries are taken at a time,
    with the keys up to the end of their part of the row, and the backward pass computes their scores again.

    Args:
      q: queries of the row's last T tokens; head n reads KV head n // (N // K).
      k: keys of the whole row.
      v: values.
      visible: of (a piece of each of `of_queries`, S), says which of the row's first S keys a query sees, by KV head or
        for all of them.
      of_queries: what it reads of each query.

    Returns:
      Outputs in q's dtype.
    """
    num_queries, (length, heads) = q.shape[1], k.shape[1:3]
    if platform() == "gpu" and q.dtype.itemsize == 2:
        mask = visible(*of_queries, length)
        by_head = repeat(mask, "b x t s -> (b x y) 1 t s", y=heads // mask.shape[1])
        rows = (rearrange(x, "b t (x g) h -> (b x) t g h", x=heads) for x in (q, k, v))
        out = jax.nn.dot_product_attention(*rows, mask=by_head, implementation="cudnn")
        out = jnp.where(jnp.any(by_head, axis=-1)[:, 0, :, None, None], out, 0)
        return rearrange(out, "(b x) t g h -> b t (x g) h", x=heads)

    def attend_up_to(end, q, *of_queries):
        mask = visible(*of_queries, end)  # [B #K T S]
        mask = repeat(mask, "b x t s -> b (x y) (g t) s", y=heads // mask.shape[1], g=q.shape[2] // heads)
        # The queries of a group are rows of one product, whose result then lies as the softmax reads it.
        queries = rearrange(q, "b t (x g) h -> b x (g t) h", x=heads)
        keys, values = (rearrange(x[:, :end], "b s x h -> b x s h") for x in (k, v))
        out, _ = attend(queries, keys, values, mask)
        return rearrange(out.astype(q.dtype), "b x (g t) h -> b t (x g) h", t=q.shape[1])

    part, first = max(_LEAST_PART, -(-num_queries // _PARTS)), length - num_queries  # slot of the first query
    outs = []
    for begin in range(0, num_queries, part):
        end = min(begin + part, num_queries)
        chunk = rows_within(elements_at_once(_SCORES_AT_ONCE), q.shape[0] * q.shape[2] * (first + end), end - begin)
        pieces = (x[:, begin:end] for x in (q, *of_queries))
        outs.append(map_chunks(partial(attend_up_to, first + end), chunk, 1, *pieces))
    return jnp.concatenate(outs, axis=1)
