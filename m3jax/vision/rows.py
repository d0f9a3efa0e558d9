"""The schedule of `segment_attention` for kernels that take a batch of rows: cuDNN's, through `jax.nn`.

Such a kernel knows no segments, but lengths of rows. So each segment becomes a row of its own. How long rows are must
be known when the program is compiled, and what segments a batch has is not: there are a few row lengths, and a segment
takes the shortest that holds it. Segments of one row length go through the kernel in turns, each turn with as many rows
as would hold all patches, were every row full. Most batches are one turn.

X and a segment's own length so decide which kernel computes it, in rows of which length and how many; what lies beside
it decides in which of these rows it lies. `scripts/gpu_check.py` looks at its bits.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from m3jax.vision.segments import Runs
from m3jax.vision.tiles import tiled_attention

Implementation = Literal["cudnn", "xla"]

# Four times as long from one to the next, and of them M3's largest image, 576 tokens, and a video's largest chunk fill
# a row. Each length is a kernel to compile, half a second and more.
_LENGTHS = (144, 576, 2304, 12288)


def row_lengths(num_patches: int) -> tuple[int, ...]:
    """The lengths that a row can have, ascending; the last holds any segment.

    Args:
      num_patches: X.
    """
    return (*(length for length in _LENGTHS if length < num_patches), num_patches)


class Turns(NamedTuple):
    """The segments in the order in which they become rows: by row length first, C of them.

    Attributes:
      starts, lengths: the first patch of each segment, and how many it has; behind the last segment anything and 0.
      first: of the segments of each row length, the first one's number in this order.
      count: how many segments have that row length.
      until: the number of turns that end with this row length.
      is_one_row: whether there is one segment, and it has the longest rows, of which a turn has one.
    """

    starts: Int[Array, " X"]
    lengths: Int[Array, " X"]
    first: Int[Array, " C"]
    count: Int[Array, " C"]
    until: Int[Array, " C"]
    is_one_row: Bool[Array, ""]

    @classmethod
    def of(cls, segments: Int[Array, " X"]) -> "Turns":
        """The turns of a batch: the same for all layers.

        Args:
          segments: as in the definition, but patches of a segment stand together, and padding behind the last.
        """
        choices = jnp.array(row_lengths(len(segments)), jnp.int32)
        rows_of_turn = -(-len(segments) // choices)
        runs = Runs.of(segments)
        lengths = jnp.where(runs.begins, runs.end - runs.first, 0)  # of a segment where it begins, else 0
        choice = jnp.sum(lengths[:, None] > choices, axis=1, dtype=jnp.int32)
        choice = jnp.where(runs.begins, choice, len(choices))
        starts = jnp.argsort(choice, stable=True).astype(jnp.int32)
        count = jnp.sum(choice[:, None] == jnp.arange(len(choices)), axis=0, dtype=jnp.int32)
        until = jnp.cumsum(-(-count // rows_of_turn), dtype=jnp.int32)
        is_one_row = (count[-1] == 1) & (jnp.sum(count) == 1)
        return cls(starts, lengths[starts], jnp.cumsum(count, dtype=jnp.int32) - count, count, until, is_one_row)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def row_attention(
    q: Float[Array, "X N H"],
    k: Float[Array, "X N H"],
    v: Float[Array, "X N H"],
    segments: Int[Array, " X"],
    turns: Turns,
    implementation: Implementation,
) -> Float[Array, "X N H"]:
    """`segment_attention`, a row for each segment. Where a gradient is asked for, all of it is `tiled_attention`.

    Args:
      q, k, v: queries, keys, values, of the dtypes that the kernel takes; padding may hold anything.
      segments: as in `Turns.of`.
      turns: theirs.
      implementation: of `jax.nn.dot_product_attention`.
    """
    num_patches = len(segments)

    def attend(q, k, v, lengths: Int[Array, " S"]) -> Float[Array, "S L N H"]:
        seen = jnp.maximum(lengths, 1)  # a row that is none sees one zero: no kernel has to average nothing
        return jax.nn.dot_product_attention(
            q, k, v, query_seq_lengths=seen, key_value_seq_lengths=seen, implementation=implementation
        )

    def one_row() -> Float[Array, "X N H"]:
        is_patch = (jnp.arange(num_patches, dtype=jnp.int32) < turns.lengths[0])[:, None, None]
        zero_padding = lambda x: jnp.where(is_patch, x, 0)
        return zero_padding(attend(*(zero_padding(x)[None] for x in (q, k, v)), turns.lengths[:1])[0])

    def of_length(choice: int, length: int):
        """Turns of one row length."""
        rows = -(-num_patches // length)
        column = jnp.arange(length, dtype=jnp.int32)

        def run(turn: Int[Array, ""], out: Float[Array, "X N H"]) -> Float[Array, "X N H"]:
            number = turn * rows + jnp.arange(rows, dtype=jnp.int32)
            segment = jnp.minimum(turns.first[choice] + number, num_patches - 1)
            lengths = jnp.where(number < turns.count[choice], turns.lengths[segment], 0)
            patches = turns.starts[segment][:, None] + column  # [S L]
            is_own = column < lengths[:, None]
            cut = lambda x: jnp.where(is_own[:, :, None, None], x.at[patches].get(mode="clip"), 0)  # [S L N H]
            rows_out = attend(cut(q), cut(k), cut(v), lengths)
            nowhere = num_patches + jnp.arange(rows * length, dtype=jnp.int32).reshape(rows, length)
            return out.at[jnp.where(is_own, patches, nowhere)].set(rows_out, mode="drop", unique_indices=True)

        return run

    branches = [of_length(*choice) for choice in enumerate(row_lengths(num_patches))]

    def in_turns() -> Float[Array, "X N H"]:
        def run(number: Int[Array, ""], out: Float[Array, "X N H"]) -> Float[Array, "X N H"]:
            choice = jnp.sum(turns.until <= number)
            before = jnp.where(choice > 0, turns.until[choice - 1], 0)
            return jax.lax.switch(choice, branches, number - before, out)

        return jax.lax.fori_loop(0, turns.until[-1], run, jnp.zeros_like(q))

    return jax.lax.cond(turns.is_one_row, one_row, in_turns)


def _with_residuals(q, k, v, segments, turns, implementation):
    return jax.vjp(lambda q, k, v: tiled_attention(q, k, v, segments), q, k, v)


def _gradient(implementation, pull_back, d_out):
    return *pull_back(d_out), None, None


row_attention.defvjp(_with_residuals, _gradient)
