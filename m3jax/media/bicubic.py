"""The definition of resizing: antialiased bicubic interpolation of bytes, in integers, as torchvision's on uint8.

Pixels that reach the tower depend on the last bit of this: a resize in floating point, or Pillow's, which keeps 22 bits
of a weight, gives other bytes. This file is the definition; `m3jax.media.resize` is the way it is computed.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, UInt8

_CUBIC = -0.5  # the cubic's free parameter
_SUPPORT = 2.0  # pixels to each side of the centre that the cubic reaches, where nothing is reduced
_LIMIT, _MOST_BITS = 1 << 15, 22  # weights are 16-bit integers


class Taps(NamedTuple):
    """The input pixels and weights of each output pixel along one axis: Q taps, of which the last may have weight 0.

    Output pixel i is the sum over q of weights[q, i] times input pixel starts[i] + q, divided by 2**bits.
    """

    starts: Int64[np.ndarray, " O"]
    weights: Int64[np.ndarray, "Q O"]
    bits: int


def cubic(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """Keys' cubic with a = -0.5: 1 at 0, 0 at every other integer, 0 beyond 2."""
    x, a = np.abs(x), _CUBIC
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


@lru_cache(maxsize=64)
def bicubic_taps(size: int, target: int) -> Taps:
    """The integer weights that take an axis of `size` pixels to `target` pixels.

    Args:
      size: input pixels O' of the axis, at least 1.
      target: output pixels O of the axis, at least 1.

    Returns:
      Starts [O], weights [Q O], and the number of bits that weights are scaled by. Read only: they are shared.

    Source: torch's antialiased upsampling of uint8 on CPU, compared with it in tests/media/test_resize.py.
    """
    scale = size / target
    stretch = max(scale, 1.0)  # where an image shrinks, the cubic is widened: that is the antialiasing
    centers = (np.arange(target) + 0.5) * scale  # [O]
    starts = np.maximum((centers - _SUPPORT * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + _SUPPORT * stretch + 0.5).astype(np.int64), size)
    taps = np.arange((ends - starts).max())[:, None]  # [Q 1]
    reals = cubic((taps + starts - centers + 0.5) * (1.0 / stretch))  # [Q O]
    reals = np.where(taps < ends - starts, reals, 0.0)
    reals = reals / np.cumsum(reals, axis=0)[-1]  # added in order: numpy's `sum` would add in another
    largest = float(reals.max())
    bits = next((n for n in range(_MOST_BITS) if int(0.5 + largest * (1 << (n + 1))) >= _LIMIT), _MOST_BITS)
    weights = np.trunc(reals * (1 << bits) + np.where(reals < 0.0, -0.5, 0.5)).astype(np.int64)
    starts.flags.writeable = weights.flags.writeable = False
    return Taps(starts, weights, bits)


def resize_rows(image: UInt8[np.ndarray, "H W C"], height: int) -> UInt8[np.ndarray, "h W C"]:
    """Resize along the first axis: sums in integers, half of a unit added, shifted, clipped to bytes.

    Args:
      image: bytes [H W C].
      height: rows of the result.
    """
    starts, weights, bits = bicubic_taps(len(image), height)
    resized = []
    for start, column in zip(starts, weights.T, strict=True):
        window = image[start : start + len(column)].astype(np.int64)  # fewer than Q at the end, where weights are 0
        total = np.tensordot(column[: len(window)], window, axes=1)  # [W C]
        resized.append(np.clip((total + (1 << bits >> 1)) >> bits, 0, 255))
    return np.stack(resized).astype(np.uint8)


def resize_definition(image: UInt8[np.ndarray, "H W C"], height: int, width: int) -> UInt8[np.ndarray, "h w C"]:
    """Resize an image: its width first, rounded to bytes, then its height.

    Args:
      image: bytes [H W C].
      height, width: the size of the result, at least 1.
    """
    turned = resize_rows(image.transpose(1, 0, 2), width)  # [w H C]
    return resize_rows(turned.transpose(1, 0, 2), height)  # [h w C]
