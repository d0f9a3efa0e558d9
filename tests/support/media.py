"""Pictures and clips for tests: arrays, files that Pillow and PyAV write, and processed media without pixels."""

import io
import math
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from m3jax.media import ProcessedImage, ProcessedVideo


def picture(height: int, width: int, seed: int = 0, colors: int = 3) -> UInt8[np.ndarray, "H W C"]:
    """Noise: no two patches are alike, and neighbours differ by any number of levels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, colors), dtype=np.uint8)


def image_file(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """A file's bytes, of an array or a Pillow image."""
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def clip(frames: int, height: int = 32, width: int = 64) -> UInt8[np.ndarray, "F H W 3"]:
    """Frame i has the level 8 i, less on the right half, so that a frame and its sides can be told after a codec."""
    levels = 8 * np.arange(frames)[:, None, None, None] * np.ones((1, height, width, 3))
    levels[:, :, width // 2 :] *= 0.25
    return levels.astype(np.uint8)


def video_file(frames: UInt8[np.ndarray, "F H W 3"], kind: str = "mp4", rate: int = 10, sound: bool = False) -> bytes:
    """A file's bytes; `kind` is a muxer of FFmpeg: mp4, mov, avi, matroska."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.codec_context.flags |= av.codec.context.Flags.qscale
        stream.codec_context.global_quality = 118  # the finest: no level is off by more than a few
        track = container.add_stream("pcm_s16le" if kind == "avi" else "aac", rate=8000) if sound else None
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
        if track is not None:
            _write_silence(container, track)
    return file.getvalue()


def sound_file(cover: bool = False) -> bytes:
    """An MP4 file with sound and no moving pictures; `cover` adds the picture of a record."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        track = container.add_stream("aac", rate=8000)
        if cover:
            still = container.add_stream("mjpeg", rate=1)
            still.height, still.width, still.pix_fmt = 32, 32, "yuvj420p"
            still.disposition = av.stream.Disposition.attached_pic
        _write_silence(container, track)
        if cover:
            container.mux(still.encode(av.VideoFrame.from_ndarray(picture(32, 32), format="rgb24")))
            container.mux(still.encode())
    return file.getvalue()


def _write_silence(container: Any, track: Any) -> None:
    """Write half a second of silence."""
    import av

    silence = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
    silence.rate = 8000
    container.mux(track.encode(silence))
    container.mux(track.encode())


def blank_image(height: int, width: int) -> ProcessedImage:
    """An image of height x width patches, without its pixels."""
    return ProcessedImage(np.zeros((height * width, 1176), np.float32), (1, height, width))


def noise_patches(grid: tuple[int, int, int], seed: int = 0) -> tuple[Float32[np.ndarray, "X P"], tuple[int, int, int]]:
    """(patches, grid) of noise."""
    return np.random.default_rng((seed, *grid)).normal(size=(math.prod(grid), 1176)).astype(np.float32), grid


def blank_video(grids: tuple[tuple[int, int, int], ...], timestamps: tuple[float, ...] | None = None) -> ProcessedVideo:
    """A video of those grids, without its pixels."""
    count = sum(t * h * w for t, h, w in grids)
    return ProcessedVideo(np.zeros((count, 1176), np.float32), grids, timestamps, ())
