"""The schedule of `segment_attention` for kernels that take a batch of rows: cuDNN's, through `jax.nn`.

Such a kernel knows no segments, but lengths of rows. So each segment becomes a row of its own. How long rows are must
be known when the program is compiled, and what segments a batch has is not: there are a few row lengths, and a segment
takes the shortest that holds it. Segments of one row length go through the kernel in turns, each turn with as many rows
as would hold all patches, were every row full. Most batches are one turn: which one is the only thing that the host
reads of such a batch, once a layer, before it launches kernels. A loop over turns makes it wait three times for each.

X and a segment's own length so decide which kernel computes it, in rows of which length and how many; what lies beside
it decides in which of these rows it lies. `tests/gpu/test_vision.py` looks at its bits.
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
      only: if all segments are one turn, the number of its row length; otherwise C.
      number: of each patch, its segment's number in this order; of padding anything.
      column: of each patch, its place in its segment; -1 for padding.
    """

    starts: Int[Array, " X"]
    lengths: Int[Array, " X"]
    first: Int[Array, " C"]
    count: Int[Array, " C"]
    until: Int[Array, " C"]
    only: Int[Array, ""]
    number: Int[Array, " X"]
    column: Int[Array, " X"]

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
        only = jnp.where(until[-1] == 1, jnp.argmax(until), len(choices))  # argmax: the first that has a turn
        patch = jnp.arange(len(segments), dtype=jnp.int32)
        number = jnp.zeros_like(starts).at[starts].set(patch, unique_indices=True)[runs.first]
        column = jnp.where(runs.is_patch, patch - runs.first, -1)
        first = jnp.cumsum(count, dtype=jnp.int32) - count
        return cls(starts, lengths[starts], first, count, until, only, number, column)


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
    choices = row_lengths(num_patches)

    def attend(q, k, v, is_own: Bool[Array, "S L"], lengths: Int[Array, " S"]) -> Float[Array, "S L N H"]:
        q, k, v = (jnp.where(is_own[..., None, None], x, 0) for x in (q, k, v))
        seen = jnp.maximum(lengths, 1)  # an empty row sees one zero: no kernel has to average nothing
        return jax.nn.dot_product_attention(
            q, k, v, query_seq_lengths=seen, key_value_seq_lengths=seen, implementation=implementation
        )

    def run_turn(choice: int, turn: int | Int[Array, ""]) -> tuple[Float[Array, "S L N H"], Int[Array, "S L"]]:
        """Return a turn's output, and the index of the patch in each place of it, X and more where there is none."""
        length = choices[choice]
        rows, column = -(-num_patches // length), jnp.arange(length, dtype=jnp.int32)
        number = turn * rows + jnp.arange(rows, dtype=jnp.int32)
        segment = jnp.minimum(turns.first[choice] + number, num_patches - 1)
        lengths = jnp.where(number < turns.count[choice], turns.lengths[segment], 0)
        patches = turns.starts[segment][:, None] + column  # [S L]
        is_own = column < lengths[:, None]
        out = attend(*(x.at[patches].get(mode="clip") for x in (q, k, v)), is_own, lengths)
        nowhere = num_patches + jnp.arange(rows * length, dtype=jnp.int32).reshape(rows, length)
        return out, jnp.where(is_own, patches, nowhere)

    def one_turn(choice: int) -> Float[Array, "X N H"]:
        out, _ = run_turn(choice, 0)
        slot = turns.number * choices[choice] + turns.column  # all segments have this row length
        out = out.reshape(-1, *out.shape[2:]).at[slot].get(mode="clip")
        return jnp.where((turns.column >= 0)[:, None, None], out, 0)

    def one_segment() -> Float[Array, "X N H"]:
        """Return the output of the only turn, which has one row of all X places: the arrays are that row already."""
        is_patch = turns.column >= 0
        out = attend(q[None], k[None], v[None], is_patch[None], turns.lengths[:1])[0]
        return jnp.where(is_patch[:, None, None], out, 0)

    def add_turn(choice: int, turn: Int[Array, ""], out: Float[Array, "X N H"]) -> Float[Array, "X N H"]:
        rows, patches = run_turn(choice, turn)
        return out.at[patches].set(rows, mode="drop", unique_indices=True)

    def several_turns() -> Float[Array, "X N H"]:
        def run(number: Int[Array, ""], out: Float[Array, "X N H"]) -> Float[Array, "X N H"]:
            choice = jnp.sum(turns.until <= number)
            before = jnp.where(choice > 0, turns.until[choice - 1], 0)
            branches = [partial(add_turn, choice) for choice in range(len(choices))]
            return jax.lax.switch(choice, branches, number - before, out)

        return jax.lax.fori_loop(0, turns.until[-1], run, jnp.zeros_like(q))

    one_turns = [partial(one_turn, choice) for choice in range(len(choices) - 1)]
    return jax.lax.switch(turns.only, [*one_turns, one_segment, several_turns])


def _with_residuals(q, k, v, segments, turns, implementation):
    return jax.vjp(lambda q, k, v: tiled_attention(q, k, v, segments), q, k, v)


def _gradient(implementation, pull_back, d_out):
    return *pull_back(d_out), None, None


row_attention.defvjp(_with_residuals, _gradient)
