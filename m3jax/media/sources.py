"""The sources of an image or a video: a file, a data URL, or what `decode_image` and `read_video` take as it is."""

import base64
from pathlib import Path
from typing import Any

from m3jax.media.images import MediaError
from m3jax.media.sizes import LIMITS
from m3jax.messages import shown


def media_source(source: Any, most_bytes: int = LIMITS.video_bytes) -> Any:
    """Return what a text names: a path, or a data URL's bytes. Anything but text is returned as it is.

    Args:
      source: a path or a data URL as text, or what needs no reading: bytes, a `Path`, a Pillow image, an array, frames.
      most_bytes: of a data URL's content.

    Returns:
      Bytes for a data URL, a `Path` for another text, else what was given.

    Raises:
      ValueError: a data URL that is no base64 or too large, an address (nothing is fetched), or an empty text.
    """
    if not isinstance(source, str):
        return source
    if _is_data_url(source):
        return _content(source, most_bytes)
    if _is_address(source):
        raise MediaError(f"{shown(source)} is an address, and nothing is fetched: give the file, or a data URL")
    if not source or "\0" in source:
        raise MediaError(f"{shown(source)} is no name of a file")
    return Path(source)


def names_file(source: Any) -> bool:
    """Return True for the name of a file: a `Path`, or a text that is neither a data URL nor an address.

    Args:
      source: as in `media_source`.
    """
    if isinstance(source, str):
        return not (_is_data_url(source) or _is_address(source))
    return isinstance(source, Path)


def _is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def _is_address(text: str) -> bool:
    return "://" in text


def _content(url: str, most_bytes: int) -> bytes:
    """Return the bytes of a data URL, whose header must end in ;base64; the media type in it is ignored."""
    header, comma, body = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError("a data URL has the form data:image/png;base64,...: this one is not base64")
    too_large = MediaError(f"the data URL has {len(body)} characters: at most {most_bytes} bytes can be given so")
    if len(body) > -(-most_bytes // 3) * 4:
        raise too_large  # before it is decoded
    try:
        content = base64.b64decode(body, validate=True)
    except ValueError as error:
        raise MediaError(f"the data URL is not valid base64: {error}") from error
    if len(content) > most_bytes:  # by a byte or two: four characters are three bytes, or fewer
        raise too_large
    return content
