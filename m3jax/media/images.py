"""Images as bytes, files, Pillow's objects or arrays, to one kind of array: uint8 [H W 3], upright, without alpha."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import UInt8

from m3jax.messages import printable, shortened

_TOO_LARGE = "PIL.Image.MAX_IMAGE_PIXELS is the limit, since a small file can hold an image that fills the memory"
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_warnings_lock = Lock()


class MediaError(ValueError):
    """An image or a video that cannot be used; the message is one line."""


@contextmanager
def media_extra(library: str) -> Iterator[None]:
    """Turn the failed import of a library that only media needs into an error that says what to install.

    Args:
      library: the name by which it is imported.

    Raises:
      ValueError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != library:
            raise  # it is there, and lacks something of its own
        raise MediaError("images and videos need Pillow and PyAV: pip install 'm3jax[media]'") from error


def pillow() -> ModuleType:
    """Import and return Pillow, with its modules `Image` and `ImageOps`."""
    with media_extra("PIL"):
        import PIL.Image
        import PIL.ImageOps
    return PIL


def decode_image(source: Any) -> UInt8[np.ndarray, "H W 3"]:
    """Return an image's pixels: upright by EXIF orientation, transparent parts over white, first frame of a moving one.

    Args:
      source: the bytes of a PNG, JPEG, GIF or WEBP file, a `Path` of one, a Pillow image of any mode, or an array:
        uint8 [H W 3], [H W 4] with alpha last, [H W 1] or [H W].

    Returns:
      uint8 [H W 3].

    Raises:
      ValueError: the source is none of these, is broken or cut short, has no pixels, or has more than Pillow's limit
        (`PIL.Image.MAX_IMAGE_PIXELS`).
    """
    if isinstance(source, np.ndarray):
        return _array_image(source)
    images = pillow().Image
    if isinstance(source, images.Image):
        return _pillow_image(source)
    if isinstance(source, Path):
        source = read_file(source)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise MediaError(f"an image as {type(source).__name__}: give bytes, a Path, a Pillow image or an array")
    with _one_line():
        try:
            # The first of Pillow's two limits only warns; `check_pixels` refuses what is beyond it. Filters of warnings
            # are the process's: two threads that change them at once could leave them changed.
            with _warnings_lock, warnings.catch_warnings():
                warnings.simplefilter("ignore", images.DecompressionBombWarning)
                image = images.open(io.BytesIO(source), formats=_FORMATS)
        except pillow().UnidentifiedImageError as error:
            known = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
            raise MediaError(f"these {len(source)} bytes are no image: must be a whole {known}, with pixels") from error
        with image:
            return _pillow_image(image)


def is_moving(source: Any) -> bool:
    """Return True for an image file of several frames, a GIF or WEBP, of which `decode_image` gives the first alone.

    Args:
      source: as `decode_image` takes it, and known to be an image.
    """
    if isinstance(source, Path):
        source = read_file(source)
    if not isinstance(source, bytes | bytearray | memoryview):
        return bool(getattr(source, "is_animated", False))
    with _one_line(), pillow().Image.open(io.BytesIO(source), formats=_FORMATS) as image:
        return bool(getattr(image, "is_animated", False))


def read_file(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise MediaError(f"{printable(str(path))} cannot be read: {error.strerror}") from error


def check_pixels(height: int, width: int) -> None:
    """Refuse an image without pixels, or with more of them than Pillow decodes.

    Raises:
      ValueError: says how many it has.
    """
    most = pillow().Image.MAX_IMAGE_PIXELS
    if min(height, width) < 1:
        raise MediaError(f"an image of {height} x {width} pixels (H x W) has none")
    if most is not None and height * width > most:
        raise MediaError(f"an image of {height} x {width} pixels (H x W), more than {most}: {_TOO_LARGE}")


def _pillow_image(image: Any) -> UInt8[np.ndarray, "H W 3"]:
    """The pixels of a Pillow image."""
    images = pillow().Image
    check_pixels(image.height, image.width)
    with _one_line():
        image = pillow().ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey at 255
            image = images.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if {"A", "a"} & set(image.getbands()) or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = images.new("RGBA", image.size, "white")
            image = images.alpha_composite(white, image)
        return np.array(image.convert("RGB"))


@contextmanager
def _one_line() -> Iterator[None]:
    """Raise MediaError of one line for whatever Pillow raises for a broken file, which is nearly anything."""
    try:
        yield
    except MediaError:
        raise
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
        reason = printable(str(error)) or type(error).__name__
        raise MediaError(shortened(f"the image cannot be decoded: {reason}; it is broken or cut short")) from error
    except pillow().Image.DecompressionBombError as error:
        # Pillow's own message names twice its limit, and this room keeps to the limit itself.
        raise MediaError(f"an image of more than {pillow().Image.MAX_IMAGE_PIXELS} pixels: {_TOO_LARGE}") from error


def _array_image(array: np.ndarray) -> UInt8[np.ndarray, "H W 3"]:
    """Return the pixels of an array: RGB, RGB with alpha, or grey."""
    shape = array.shape
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        raise MediaError(f"an image of {array.dtype} {list(shape)}: must be uint8 [H W 3], [H W 4], [H W 1] or [H W]")
    if 0 in shape:
        raise MediaError(f"an image of {shape[0]} x {shape[1]} pixels (H x W) has none")
    if array.ndim == 2 or shape[2] == 1:
        return np.repeat(array.reshape(*shape[:2], 1), 3, axis=2)
    if shape[2] == 4:
        alpha = array[..., 3:] / np.float32(255.0)
        return np.round(array[..., :3] * alpha + 255.0 * (1.0 - alpha)).astype(np.uint8)
    return array
