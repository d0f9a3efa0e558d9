"""Videos as bytes, files or frames, to a stream of frames: uint8 [H W 3], one at a time, upright."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from m3jax.media.images import MediaError, check_pixels, decode_image, media_extra, read_file
from m3jax.messages import printable, shortened

_DEMUXERS = "mov,avi,matroska,gif"  # MP4 and MOV are one format, MKV and WebM another
_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")  # that an MP4 or MOV file begins with
_NO_VIDEO = "must be a video: MP4, MOV, AVI, MKV, or a GIF that moves"

Pick = Callable[[int, float], Sequence[int]]  # frames of the source, frames a second -> the indices to take
Watch = Callable[[int, int], None]  # frames that were gone through, and how many there are to go through


def unwatched(done: int, total: int) -> None:
    """A `Watch` that tells nobody."""


class Clip(NamedTuple):
    """The chosen frames of a video. `frames` can be gone through once."""

    frames: Iterator[UInt8[np.ndarray, "H W 3"]]
    frame_indices: tuple[int, ...]
    source_fps: float | None


def read_video(source: Any, pick: Pick, watch: Watch = unwatched) -> Clip:
    """A video file's frames; only chosen ones are kept, and no more than one is held at a time.

    Args:
      source: the bytes of an MP4, MOV, AVI or MKV file or of a GIF that moves, or a `Path` of one.
      pick: chooses frames from their number and the frames a second.
      watch: told after each frame that is decoded, of those up to the last one that is chosen.

    Returns:
      The frames; going through them raises ValueError where the file turns out to be broken.

    Raises:
      ValueError: no such file, no video in it (an image, or sound alone), no frames, more pixels than Pillow's limit,
        a broken file, or one that ends before its own index says.
    """
    if isinstance(source, Path):
        source = read_file(source)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise MediaError(f"a video as {type(source).__name__}: give bytes, a Path, or frames")
    data = bytes(source)
    if _is_gif(data) and not data.rstrip(b"\0").endswith(b";"):  # its last byte, but for padding
        raise MediaError("the GIF has no end: it is cut short")
    if len(data) < (size := declared_bytes(data)):
        raise MediaError(f"the video has {len(data)} bytes of {size}: it is cut short")
    with _opened(data) as (container, stream):
        declared = stream.frames
        total = sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate or stream.guessed_rate
        check_pixels(stream.codec_context.height, stream.codec_context.width)
    if total < declared:
        raise MediaError(f"the video ends after {total} of {declared} frames: it is cut short")
    if total == 0:
        raise MediaError("the video has no frames")
    if total == 1 and _is_gif(data):
        raise MediaError("a GIF of one frame is an image, no video")
    if not rate:
        raise MediaError("the video does not say how many frames a second it has; decode it and give its frames")
    indices = tuple(pick(total, float(rate)))
    return Clip(_decoded(data, indices, watch), indices, float(rate))


def given_frames(frames: Any, source_fps: float | None, pick: Pick | None, watch: Watch = unwatched) -> Clip:
    """Return the clip of the chosen ones among frames that are given as images, not as a video file.

    Args:
      frames: uint8 [F H W 3], or a sequence of images as `decode_image` takes one.
      source_fps: frames that they show a second, or None.
      pick: chooses among them; None takes all.
      watch: told after each chosen frame, of all that are chosen.

    Raises:
      ValueError: no frames, or frames that are to be chosen by time where no frame rate is given.
    """
    if len(frames) == 0:
        raise MediaError("the video has no frames")
    if source_fps is not None and not 0 < source_fps < float("inf"):
        raise MediaError(f"source_fps = {source_fps}: must be a positive number")
    if pick is not None and source_fps is None:
        raise MediaError("frames are chosen by their time: give source_fps, the frames a second of those given")
    indices = tuple(range(len(frames))) if pick is None else tuple(pick(len(frames), source_fps))
    return Clip(_given(frames, indices, watch), indices, source_fps)


def _given(frames: Any, indices: tuple[int, ...], watch: Watch) -> Iterator[UInt8[np.ndarray, "H W 3"]]:
    for done, index in enumerate(indices, 1):
        yield decode_image(frames[index])
        watch(done, len(indices))


def declared_bytes(data: bytes) -> int:
    """Return a lower bound of the size that a file declares; at most the length of `data` where it declares none.

    FFmpeg reads the frames that are left in a truncated file, of some kinds without a warning.

    Args:
      data: the beginning of an AVI, MKV or MP4 file, or anything else.
    """
    if data[:4] == b"RIFF":
        return 8 + int.from_bytes(data[4:8], "little")
    if data[:4] == b"\x1a\x45\xdf\xa3":  # Matroska: a header and one segment, each an id of 4 bytes, a size, a body
        header = _matroska_size(data, 4)
        segment = _matroska_size(data, sum(header) + 4)
        return 0 if 0 in (*header, *segment) else sum(segment)
    end = 0 if data[4:8] in _FIRST_BOXES else len(data)
    while data[end + 4 : end + 8].isalnum():  # boxes: a size of 4 bytes that counts itself, a name of 4, a body
        size = int.from_bytes(data[end : end + 4], "big")
        size = int.from_bytes(data[end + 8 : end + 16], "big") if size == 1 else size
        if size < 8:  # 0 is up to the end
            break
        end += size
    return end


def _matroska_size(data: bytes, start: int) -> tuple[int, int]:
    """Return (start, size) of the body whose size field stands at `start`; zeros where no size is given.

    The zero bits before the first one say how many bytes follow; all ones are a size that its writer did not know.
    """
    if start >= len(data) or data[start] == 0:
        return 0, 0
    width = 9 - data[start].bit_length()
    unknown = (1 << 7 * width) - 1
    size = int.from_bytes(data[start : start + width], "big") & unknown
    return (0, 0) if size == unknown else (start + width, size)


def _is_gif(data: bytes) -> bool:
    return data.startswith((b"GIF87a", b"GIF89a"))


def _decoded(data: bytes, indices: tuple[int, ...], watch: Watch) -> Iterator[UInt8[np.ndarray, "H W 3"]]:
    """The frames of those indices, which ascend; those between them are decoded too, for others are made from them."""
    wanted, last, is_gif = set(indices), max(indices), _is_gif(data)
    with _opened(data) as (container, stream):
        stream.thread_type = "AUTO"
        for index, frame in enumerate(container.decode(stream)):
            if index in wanted:
                # Where no frame of a GIF has painted, it is transparent.
                pixels = decode_image(frame.to_ndarray(format="rgba")) if is_gif else frame.to_ndarray(format="rgb24")
                # A phone that is held upright writes frames that lie on their side, and how to turn them.
                yield np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90))
            watch(index + 1, last + 1)
            if index == last:
                return
    raise MediaError(f"the video's frames end before frame {last}: it is broken or cut short")


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """A container and the stream of its moving pictures; what the library raises becomes one line."""
    with media_extra("av"):
        import av
    is_open = False
    try:
        with av.open(io.BytesIO(data), options={"format_whitelist": _DEMUXERS}) as container:
            is_open = True
            cover = av.stream.Disposition.attached_pic  # the picture of a record, in a file of sound
            streams = [stream for stream in container.streams.video if not stream.disposition & cover]
            if not streams:
                raise MediaError(f"the file has no moving pictures, only sound or data: {_NO_VIDEO}")
            if streams[0].codec_context is None:  # no decoder: PyAV gives a stream without one
                raise MediaError("the video's codec is none that FFmpeg knows here: convert it, to H.264 for example")
            yield container, streams[0]
    except (av.FFmpegError, EOFError, MemoryError, IndexError) as error:
        reason = printable(getattr(error, "strerror", None) or type(error).__name__)
        if not is_open and isinstance(error, av.ArgumentError):  # FFmpeg's word for a format that is not asked for
            reason = "it has another format"
        raise MediaError(shortened(f"the video cannot be read: {reason}; {_NO_VIDEO}, whole")) from error
