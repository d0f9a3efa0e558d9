"""The bicubic resize of `m3jax.media.bicubic`, computed by matrix products.

The weights of an axis are a matrix that is zero but for a band around its diagonal. It is cut into blocks of output
pixels; each block meets only the input pixels that it reaches, in one product of floats. Those floats hold integers
that are small enough to be exact, whatever order a BLAS adds them in, so that the bytes are the definition's.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from m3jax.media.bicubic import Taps, bicubic_taps

_BLOCK = 24  # output pixels of a block: a wider one multiplies by more zeros, a narrower one calls BLAS more often
_STRIPE = 64  # input rows of a stripe, so that what is read, converted and multiplied stays in a core's cache
_CENTER = 128  # taken off the bytes before a product and given back after it: sums are half as large


class _Block(NamedTuple):
    """Weights of some output pixels, and the range of input pixels that they reach."""

    targets: slice
    sources: slice
    band: Float[np.ndarray, "o i"]


class _Pass(NamedTuple):
    """One axis of a resize: the blocks, and what is added to each output pixel [O] before the fraction is dropped."""

    blocks: tuple[_Block, ...]
    offsets: Float[np.ndarray, " O"]


def resize_bicubic(image: UInt8[np.ndarray, "H W 3"], height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """An image at another size, in every byte as torchvision makes it from uint8 with bicubic and antialias.

    Args:
      image: uint8 [H W 3].
      height, width: the size of the result in pixels, at least 1.

    Returns:
      uint8 [h w 3].

    Raises:
      ValueError: an array of another kind or without pixels, or a size below 1.

    Source: a schedule of `m3jax.media.bicubic.resize_definition`.
    """
    planes = resize_planes(_checked(image), height, width)
    return np.ascontiguousarray(planes.transpose(1, 2, 0).astype(np.uint8))


def resize_planes(image: UInt8[np.ndarray, "H W C"], height: int, width: int) -> Float[np.ndarray, "C h w"]:
    """`resize_bicubic` that leaves its result as a plane a channel, of floats whose values are whole, 0 to 255.

    Args:
      image: uint8 [H W C], H and W at least 1.
      height, width: the size of the result.

    Returns:
      float32, or float64 where an axis shrinks so far that float32 could not hold its sums.
    """
    if min(height, width) < 1:
        raise ValueError(f"an image of {height} x {width} pixels (H x W): both must be at least 1")
    size, old_width, channels = image.shape
    horizontal, vertical = _axis(old_width, width), _axis(size, height)
    middle = np.empty((channels, size, width), vertical.offsets.dtype)
    for top in range(0, size, _STRIPE):
        stripe = slice(top, min(top + _STRIPE, size))
        planes = image[stripe].transpose(2, 0, 1).astype(horizontal.offsets.dtype)  # [C stripe W]
        planes -= _CENTER
        wide = np.empty((*planes.shape[:2], width), planes.dtype)
        for block in horizontal.blocks:
            np.matmul(planes[..., block.sources], block.band.T, out=wide[..., block.targets])
        wide += horizontal.offsets
        np.floor(wide, out=wide)
        np.clip(wide, 0.0, 255.0, out=wide)
        np.subtract(wide, _CENTER, out=middle[:, stripe])
    out = np.empty((channels, height, width), middle.dtype)
    for block in vertical.blocks:
        part = out[:, block.targets]
        np.matmul(block.band, middle[:, block.sources], out=part)
        part += vertical.offsets[block.targets, None]
        np.floor(part, out=part)
        np.clip(part, 0.0, 255.0, out=part)
    return out


@lru_cache(maxsize=32)
def _axis(size: int, target: int) -> _Pass:
    """The blocks of one axis, in the narrowest floats that hold its sums exactly."""
    taps = bicubic_taps(size, target)
    dtype = _exact_dtype(taps)
    unit = 2.0**-taps.bits  # a power of two: scaling by it rounds nothing
    blocks = []
    for first in range(0, target, _BLOCK):
        targets = np.arange(first, min(first + _BLOCK, target))
        start = int(taps.starts[targets].min())
        sources = taps.starts[targets] + np.arange(len(taps.weights))[:, None] - start  # [Q o]
        band = np.zeros((len(targets), int(sources.max()) + 1))
        np.put_along_axis(band, sources.T, taps.weights[:, targets].T * unit, axis=1)
        band = band[:, : size - start].astype(dtype)  # what lies behind the last pixel weighs nothing
        blocks.append(_Block(slice(first, first + len(targets)), slice(start, start + band.shape[1]), band))
    offsets = (_CENTER * taps.weights.sum(axis=0) * unit + 0.5).astype(dtype)
    return _Pass(tuple(blocks), offsets)


def _exact_dtype(taps: Taps) -> type[np.floating]:
    """float32 where no partial sum needs more than its 24 bits, else float64.

    A sum that is to be clipped may be rounded: one of 256 and more stays above 255.
    """
    largest_sum = _CENTER * int(np.abs(taps.weights).sum(axis=0).max())
    return np.float32 if largest_sum <= 1 << 24 and taps.bits <= 16 else np.float64


def _checked(image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "H W 3"]:
    """Return the image; raise ValueError for an array of another kind."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        given = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ValueError(f"an image of {given}: must be uint8 [H W 3]")
    if 0 in image.shape:
        raise ValueError(f"an image of {image.shape[0]} x {image.shape[1]} pixels (H x W) has none to resize")
    return image
