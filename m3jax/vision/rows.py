"""The schedule of `segment_attention` for kernels that take a batch of rows: cuDNN's, through `jax.nn`.

Such a kernel knows no segments, but lengths of rows. So each segment becomes a row of its own, as long as the longest
may be. How many rows there are and how long they are must be known when the program is compiled, and what segments a
batch has is not: the program holds a few layouts, and takes the smallest that its segments fit in. Where none is large
enough, as with one long image among many small ones, it runs the tiles.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.vision.segments import Runs
from m3jax.vision.tiles import tiled_attention

# Row lengths: with an eighth to spare the usual ones are 80 tokens and less, 160, 320, 576 (M3's largest image), 1536,
# and a chunk of four pairs of frames.
_LENGTHS = (64, 320, 640, 1280, 2560, 6400, 12800)
_SPARE = (1, 3)  # how many times as many rows as would hold all patches, were every row full


def layouts(num_patches: int) -> list[tuple[int, int]]:
    """(rows, length) of each layout, smallest first: one row of everything, then rows of each length.

    Args:
      num_patches: X.
    """
    sizes = [(spare * -(-num_patches // length), length) for spare in _SPARE for length in _LENGTHS]
    shorter = [(rows, length) for rows, length in sizes if length < num_patches]
    return [(1, num_patches), *sorted(shorter, key=lambda size: size[0] * size[1])]


def row_attention(
    q: Float[Array, "X N H"],
    k: Float[Array, "X N H"],
    v: Float[Array, "X N H"],
    segments: Int[Array, " X"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "X N H"]:
    """`segment_attention`, a row for each segment.

    Args:
      q, k, v: queries, keys, values, of the dtypes that the kernel takes.
      segments: as in the definition, but patches of a segment stand together, and padding behind the last.
      implementation: of `jax.nn.dot_product_attention`.
    """
    num_patches = len(segments)
    runs = Runs.of(segments)
    num_segments = jnp.sum(runs.begins)
    longest = jnp.max(jnp.where(runs.is_patch, runs.end - runs.first, 0))
    sizes = layouts(num_patches)
    fits = jnp.stack([(num_segments <= rows) & (longest <= length) for rows, length in sizes] + [jnp.bool_(True)])
    zero_padding = lambda x: jnp.where(runs.is_patch[:, None, None], x, 0)

    def in_rows(rows: int, length: int):
        def attend(q, k, v):
            (starts,) = jnp.nonzero(runs.begins, size=rows, fill_value=num_patches - 1)  # [S]
            lengths = jnp.where(jnp.arange(rows) < num_segments, (runs.end - runs.first)[starts], 0)
            if rows == 1:
                cut = lambda x: x[None]
            else:
                places = starts[:, None] + jnp.arange(length)  # [S L]
                # A kernel may leave anything in the gradient of what is behind a row's end: no gradient goes there.
                is_own = (jnp.arange(length) < lengths[:, None])[:, :, None, None]
                cut = lambda x: jnp.where(is_own, x.at[places].get(mode="clip"), 0)  # [S L N H]
            seen = jnp.maximum(lengths, 1)  # a row that is none sees one zero: no kernel has to average nothing
            out = jax.nn.dot_product_attention(
                cut(q), cut(k), cut(v), query_seq_lengths=seen, key_value_seq_lengths=seen,
                implementation=implementation,
            )  # fmt: skip
            if rows == 1:
                return zero_padding(out[0])
            row = jnp.cumsum(runs.begins) - 1
            column = jnp.arange(num_patches) - runs.first
            return zero_padding(out.reshape(rows * length, *q.shape[1:]).at[row * length + column].get(mode="clip"))

        return attend

    branches = [in_rows(*size) for size in sizes]
    branches.append(lambda q, k, v: tiled_attention(q, k, v, segments))
    return jax.lax.switch(jnp.argmax(fits), branches, *map(zero_padding, (q, k, v)))
