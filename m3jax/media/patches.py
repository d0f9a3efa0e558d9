"""From pixels to the rows that the vision tower reads: normalised, cut into patches, in the order of merge blocks."""

import numpy as np
from jaxtyping import Float, Float32, Int32

from m3jax.media.sizes import MERGE, PATCH, PATCH_VALUES, TEMPORAL

Grid = tuple[int, int, int]  # temporal patches, rows of patches, columns of patches

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's
STD = (0.26862954, 0.26130258, 0.27577711)


def normalized(planes: Float[np.ndarray, "C H W"]) -> Float32[np.ndarray, "C H W"]:
    """Pixels 0 to 255 as the tower takes them: (x - 255 mean) / (255 std), each step rounded to float32.

    Args:
      planes: floats whose values are whole, a plane a colour.
    """
    scaled = lambda values: (np.float32(values) * np.float32(255.0))[:, None, None]  # [C 1 1]
    out = planes.astype(np.float32)
    out -= scaled(MEAN)
    out /= scaled(STD)
    return out


def patch_rows(frames: Float32[np.ndarray, "F C H W"]) -> Float32[np.ndarray, "X P"]:
    """Frames cut into patches, each a row of 1176 numbers: colour, frame of two, row, column.

    Patches that become one token stand together: rows go by temporal patch, then by block of 2 x 2 patches, row by row,
    then by the block's own rows and columns. An odd number of frames is filled up with the last one, so that an image
    is a pair of itself.

    Args:
      frames: normalised [F 3 H W]; H and W multiples of 28.
    """
    if len(frames) % TEMPORAL:
        frames = np.concatenate([frames, frames[-1:]])
    count, colors, height, width = frames.shape
    cut = frames.reshape(
        *(count // TEMPORAL, TEMPORAL, colors),
        *(height // (MERGE * PATCH), MERGE, PATCH),
        *(width // (MERGE * PATCH), MERGE, PATCH),
    )  # [t T C h M P w M P]
    blocks = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)  # [t h w M M C T P P]
    return blocks.reshape(-1, PATCH_VALUES)


def chunk_grids(grid: Grid, most: int) -> tuple[Grid, ...]:
    """The grid of each chunk of a video: at most `most` temporal patches, which attend to one another alone.

    Args:
      grid: (t, h, w) of the clip, in patches.
      most: M3's vision_segment_max_frames, which counts temporal patches, not frames.
    """
    t, h, w = grid
    return tuple((min(most, t - start), h, w) for start in range(0, t, most))


def patch_positions(grid: Grid) -> Int32[np.ndarray, "X 3"]:
    """Each patch's temporal patch, row and column within its image or chunk, in the order of `patch_rows`.

    Args:
      grid: (t, h, w) in patches, of one image or one chunk; t counts from 0 in each chunk.
    """
    t, h, w = grid
    places = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), axis=-1)  # [t h w 3]
    blocks = places.reshape(t, h // MERGE, MERGE, w // MERGE, MERGE, 3).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(-1, 3).astype(np.int32)
