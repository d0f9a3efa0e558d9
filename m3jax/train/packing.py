"""Several documents in one row: each is computed as if it were alone, with positions and blocks of its own (T29).

A document begins on a block boundary of its row, so that a block of the row lies in one document, and block m of a
document is block `first_block + m` of the row. At most P - 1 tokens behind a document are unused.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int32

from m3jax.cache import CallPages
from m3jax.model import M3
from m3jax.msa import select_blocks, walk_scores
from m3jax.msa.chunks import elements_at_once, map_chunks, rows_within
from m3jax.msa.definition import chosen_tokens
from m3jax.numerics import attend
from m3jax.platform import platform
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

    def select(self, call, index_q, rules):
        """Return the blocks of the row that each query keeps of its document."""
        index = jax.lax.stop_gradient(self.index_view(call.layer, call.places, index_q.dtype))
        index_q, num_blocks = jax.lax.stop_gradient(index_q), -(-self.heads.k.shape[1] // self.block_size)

        def select_for(index_q, positions, slots):
            scores = walk_scores(index_q, index, slots, call.lengths, rules.score)  # [B K T M], M blocks of the row
            first_block = ((slots - positions) // self.block_size)[:, None, :, None]  # [B 1 T 1]
            # Scores by block of the document. What lies behind the row's end is behind the query's own block too.
            in_document = jnp.minimum(first_block + jnp.arange(num_blocks, dtype=jnp.int32), num_blocks - 1)
            scores = jnp.take_along_axis(scores, in_document, axis=-1)  # [B K T M]
            blocks = select_blocks(scores, positions, call.lengths, rules, block_size=self.block_size)
            return jnp.where(blocks >= 0, blocks + first_block, -1).swapaxes(1, 2)  # [B T K J]

        batch, _, kv_heads, _ = index_q.shape
        chunk = rows_within(_SCORE_BUDGET, batch * kv_heads * num_blocks, index_q.shape[1])
        blocks = map_chunks(select_for, chunk, 1, index_q, call.positions, slots_of(call.positions))
        return blocks.swapaxes(1, 2)  # [B K T J]

    def attend_selected(self, call, q, blocks):
        """Return attention over the selected blocks, and this object."""

        def visible(slots, blocks, num_keys):
            # The blocks are the document's own, so that only the order within the row is left to see to.
            is_seen = jnp.arange(num_keys, dtype=jnp.int32) <= slots[..., None]  # [B T S]
            return is_seen[:, None] & chosen_tokens(blocks.swapaxes(1, 2), num_keys, self.block_size)

        k, v = self.heads.k, self.heads.v
        return attend_by_chunks(q, k, v, visible, slots_of(call.positions), blocks.swapaxes(1, 2)), self

    def attend_all(self, call, q):
        """Return attention over all of each query's document, and this object."""

        def visible(slots, positions, num_keys):
            key_slots = jnp.arange(num_keys, dtype=jnp.int32)
            first = jnp.where(slots < 0, 0, slots - positions)[..., None]  # [B T 1], slot of the document's first token
            return ((key_slots >= first) & (key_slots <= slots[..., None]))[:, None]  # [B 1 T S]

        k, v = self.heads.k, self.heads.v
        return attend_by_chunks(q, k, v, visible, slots_of(call.positions), call.positions), self


def with_fast_gradients(model: M3) -> M3:
    """Return the model with the same parameters, computed as training wants it: rows of whole documents, no cache.

    Args:
      model: not changed.
    """
    # One batched product has the faster gradient, on a CPU too; experts that a mesh divides are run in other ways.
    experts = "auto" if model.compute.is_divided or platform() == "tpu" else "copied"
    return model.with_training_paths(PackedPages, experts)


def slots_of(positions: Int[Array, "B T"]) -> Int32[Array, "B T"]:
    """Return the place of each token in its row, -1 for what is no token.

    Args:
      positions: of the tokens in their documents, -1 for what is no token.
    """
    return jnp.where(positions < 0, -1, jnp.arange(positions.shape[1], dtype=jnp.int32))


def attend_by_chunks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visible: Callable[..., Bool[Array, "B #K T S"]],
    *of_queries: Int[Array, "B T ..."],
) -> Float[Array, "B T N H"]:
    """Compute grouped-query attention of whole rows, where no query sees a key behind it; 0 for one that sees none.

    On a GPU, in a 16-bit dtype, cuDNN computes it and holds no scores. Elsewhere a few queries are taken at a time,
    with the keys up to the end of their part of the row, and the backward pass computes their scores again.

    Args:
      q: queries; head n reads KV head n // (N // K).
      k: keys.
      v: values.
      visible: of (a piece of each of `of_queries`, S), says which of the row's first S keys a query sees, by KV head or
        for all of them.
      of_queries: what it reads of each query.

    Returns:
      Outputs in q's dtype.
    """
    length, heads = k.shape[1:3]
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

    part = max(_LEAST_PART, -(-length // _PARTS))
    outs = []
    for begin in range(0, length, part):
        end = min(begin + part, length)
        chunk = rows_within(elements_at_once(_SCORES_AT_ONCE), q.shape[0] * q.shape[2] * end, end - begin)
        pieces = (x[:, begin:end] for x in (q, *of_queries))
        outs.append(map_chunks(partial(attend_up_to, end), chunk, 1, *pieces))
    return jnp.concatenate(outs, axis=1)
