"""Images a second on one core, from a file to patches, beside transformers and torchvision where they can run.

    bench.py media                  # 1080p, 4K, 720p and a small picture, 5 seconds each

One thread each, by turns; times are the process's, so that other work on the machine is not in them. "theirs" is
torchvision's resize of bytes, and transformers' processor for all else; without torch and torchvision (pip install
torchvision, of the build that torch is of) our own columns stand alone. Where both run, their patches are compared: the
status is 1 where they differ.
"""

import os

# One thread each: read when numpy and torch are imported.
os.environ |= dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import Option
from benchmarks.timing import medians
from m3jax.media import process_image, resize_bicubic, smart_resize

USES_DEVICE, PACKAGES = False, ("pillow", "torch", "torchvision", "transformers")
SIZES = {"1080p": (1080, 1920), "4K": (2160, 3840), "720p": (720, 1280), "small": (300, 400)}
OPTIONS = dict(
    seconds=Option(5.0, "Seconds for each row", smoke=0.1),
    sizes=Option([*SIZES], "Pictures", smoke=["small"], choices=[*SIZES]),
)


def measure(args):
    """Yield a row for each picture and step."""
    if not args.seconds > 0:
        raise ValueError(f"--seconds is {args.seconds}; it must be positive")
    theirs, is_equal = transformers_processor(), True
    if theirs is None:
        yield "without transformers' processor, which needs torch and torchvision"
    for name in args.sizes:
        size = SIZES[name]
        pixels, target = scene(*size), smart_resize(*size)
        files = {kind: encoded(pixels, kind) for kind in ("JPEG", "PNG")}
        steps: dict[str, tuple] = {
            "resize": (lambda: resize_bicubic(pixels, *target), their_resize(pixels, target)),  # noqa: B023
            "pixels to patches": (lambda: process_image(pixels), theirs and (lambda: theirs(pixels))),  # noqa: B023
        }
        for kind, data in files.items():
            ours = lambda data=data: process_image(data)
            steps[f"{kind} to patches"] = (ours, theirs and (lambda data=data: theirs(decoded(data))))
        for step, calls in steps.items():
            ours, *other = medians([call for call in calls if call is not None], args.seconds, time.process_time)
            yield {"picture": f"{name}, {step}", "ms": 1e3 * ours, "a second": 1 / ours,
                   "theirs, ms": 1e3 * other[0] if other else None}  # fmt: skip
        if theirs is not None:
            is_equal &= np.array_equal(process_image(files["PNG"]).patches, theirs(decoded(files["PNG"])))
    if not is_equal:
        raise SystemExit("the patches of both differ")


def scene(height: int, width: int) -> np.ndarray:
    """A picture that compresses as photographs do: smooth shades, edges, and some noise."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    shades = np.stack([np.sin(x / 97 + y / 211), np.cos(x / 53 - y / 89), np.sin(x * y / 90_000)], axis=-1)
    edges = ((x // 60 + y // 45) % 5 == 0)[..., None]
    return np.clip(110 + 60 * shades + 40 * edges + rng.normal(0, 4, shades.shape), 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    """Encode pixels as a file's bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"quality": 90} if kind == "JPEG" else {"compress_level": 1}))
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    """Pixels, as those who call transformers' processor get them."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def their_resize(pixels: np.ndarray, target: tuple[int, int]) -> Callable[[], Any] | None:
    """torchvision's resize of the same bytes, if it is installed."""
    try:
        import torch
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2.functional import resize_image
    except ModuleNotFoundError:
        return None
    torch.set_num_threads(1)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    return lambda: resize_image(planes, list(target), InterpolationMode.BICUBIC, antialias=True)


def transformers_processor() -> Callable[[np.ndarray], np.ndarray] | None:
    """Return transformers' function from pixels to patches, if it can be imported."""
    try:
        from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import MiniMaxM3VLImageProcessor
    except (ImportError, RuntimeError):
        return None
    processor = MiniMaxM3VLImageProcessor()
    return lambda pixels: processor(pixels, input_data_format="channels_last", return_tensors="np")["pixel_values"]
