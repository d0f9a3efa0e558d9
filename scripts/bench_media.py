"""Images a second on one core, from a file to patches, beside transformers and torchvision where they can run.

    python scripts/bench_media.py                  # 1080p, 4K, 720p and a small picture, 5 seconds each
    python scripts/bench_media.py --seconds 1

One thread each, in one process, in turns; times are the process's, so that other work on the machine is not in them.
"theirs" is torchvision's resize of bytes (torch's own where only that is installed), and transformers' processor for
all else, which needs torch and torchvision (pip install torchvision, of the build that torch is of); without them our
own columns stand alone. Where both run, their patches are compared.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# One thread each: read when numpy and torch are imported.
os.environ |= dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
from PIL import Image

from m3jax.media import process_image, resize_bicubic, smart_resize

SIZES = {"1080p": (1080, 1920), "4K": (2160, 3840), "720p": (720, 1280), "small": (300, 400)}


def main() -> int:
    """Print a line for each size and step; ends with 1 where the two make other patches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each line (default: 5)")
    args = parser.parse_args()
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds}: must be positive")
    theirs, is_equal = transformers_processor(), True
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"{'picture':8s} {'step':22s} {'ours, ms':>9s} {'a second':>9s} {'theirs, ms':>11s} {'a second':>9s}")
    for name, size in SIZES.items():
        pixels = scene(*size)
        files = {kind: encoded(pixels, kind) for kind in ("JPEG", "PNG")}
        target = smart_resize(*size)
        steps = {"resize": (lambda: resize_bicubic(pixels, *target), their_resize(pixels, target))}  # noqa: B023
        steps["pixels to patches"] = (lambda: process_image(pixels), theirs and (lambda: theirs(pixels)))  # noqa: B023
        for kind, data in files.items():
            ours = lambda data=data: process_image(data)
            steps[f"{kind} to patches"] = (ours, theirs and (lambda data=data: theirs(decoded(data))))
        for step, (ours, other) in steps.items():
            mine, his = medians(ours, other, args.seconds)
            columns = f"{1e3 * mine:9.1f} {1 / mine:9.1f}"
            if his is not None:
                columns += f" {1e3 * his:11.1f} {1 / his:9.1f}"
            print(f"{name:8s} {step:22s} {columns}", flush=True)
        if theirs is not None:
            is_equal &= np.array_equal(process_image(files["PNG"]).patches, theirs(decoded(files["PNG"])))
    if theirs is not None:
        print(f"patches of both are equal in every bit: {'yes' if is_equal else 'NO'}")
    return 0 if is_equal else 1


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


def medians(ours: Callable[[], Any], other: Callable[[], Any] | None, seconds: float) -> tuple[float, float | None]:
    """The median time of each, called in turns, so that what else the machine does falls on both."""
    times: tuple[list[float], list[float]] = ([], [])
    calls = [call for call in (ours, other) if call is not None]
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for call, taken in zip(calls, times, strict=False):
            began = time.process_time()
            call()
            taken.append(time.process_time() - began)
    return float(np.median(times[0])), float(np.median(times[1])) if times[1] else None


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are measured, as far as they are installed."""
    found = {}
    for name in ("numpy", "pillow", "torch", "torchvision", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def their_resize(pixels: np.ndarray, target: tuple[int, int]) -> Callable[[], Any] | None:
    """torchvision's resize of the same bytes, or torch's, if there is one."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    torch.set_num_threads(1)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    try:
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2.functional import resize_image
    except ModuleNotFoundError:
        return lambda: torch.nn.functional.interpolate(planes, tuple(target), mode="bicubic", antialias=True)
    return lambda: resize_image(planes, list(target), InterpolationMode.BICUBIC, antialias=True)


def transformers_processor() -> Callable[[np.ndarray], np.ndarray] | None:
    """Return transformers' function from pixels to patches; if it cannot be imported, None, and print why."""
    try:
        from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import MiniMaxM3VLImageProcessor
    except (ImportError, RuntimeError) as error:
        print(f"without transformers' processor: {error}".splitlines()[0], file=sys.stderr)
        return None
    processor = MiniMaxM3VLImageProcessor()
    return lambda pixels: processor(pixels, input_data_format="channels_last", return_tensors="np")["pixel_values"]


if __name__ == "__main__":
    sys.exit(main())
