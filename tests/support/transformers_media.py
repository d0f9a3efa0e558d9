"""transformers' processors of images and videos, run by themselves: `-m support.transformers_media IN.npz OUT.npz`.

They need torchvision, of which they call five functions. Where it is installed it is used; where it is not, those five
stand here, on torch alone: what is compared is transformers' own code (sizes, order of patches, chunks, prompts), and
torch's resize of uint8, which is what torchvision calls. A process of its own, since others import transformers
without torchvision, which it remembers.
"""

import base64
import io
import json
import sys
import types
from enum import Enum
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import numpy as np
import PIL.Image
import torch
from support.transformers_import import without_what_is_unused


class InterpolationMode(Enum):
    """torchvision's names of ways to resize."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def stand_in() -> None:
    """Put modules in torchvision's place."""

    def resize(image: torch.Tensor, size: Any, interpolation: InterpolationMode, antialias: bool) -> torch.Tensor:
        if tuple(size) == tuple(image.shape[-2:]):
            return image
        flat = image.reshape(-1, *image.shape[-3:])
        resized = torch.nn.functional.interpolate(flat, tuple(size), mode=interpolation.value, antialias=antialias)
        return resized.reshape(*image.shape[:-2], *size)

    def normalize(image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, inplace: bool) -> torch.Tensor:
        return (image - mean[:, None, None]) / std[:, None, None]

    functional = types.SimpleNamespace(
        InterpolationMode=InterpolationMode,
        resize=resize,
        normalize=normalize,
        grayscale_to_rgb=lambda image: image.expand(*image.shape[:-3], 3, -1, -1) if image.shape[-3] == 1 else image,
        pil_to_tensor=lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1),
    )
    names = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
    for name in (f"torchvision{inner}" for inner in names):
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__, module.__path__, module.__version__, module.__file__ = (
            ModuleSpec(name, None),
            [],
            "0.28.0",
            name,
        )
        for key, value in vars(functional).items():
            setattr(module, key, value)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def video_inputs(processor: Any, pixels: np.ndarray, chosen: dict[str, Any]) -> dict[str, Any]:
    """Run the video processor on frames [F H W 3]; return its arrays and the prompt's part for them."""
    from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=len(pixels), fps=chosen.pop("source_fps", None))
    made = processor(
        [pixels], video_metadata=[metadata], input_data_format="channels_last", return_metadata=True, **chosen
    )
    metadata = made["video_metadata"][0]
    if metadata.frames_indices is None:
        metadata.frames_indices = list(range(len(pixels)))
    # The whole processor wants a tokenizer. The part of it that writes a video out reads these alone.
    names = ("VISION_START_TOKEN", "VIDEO_TOKEN", "VISION_END_TOKEN")
    strings = {name: getattr(MiniMaxM3VLProcessor, name) for name in names}
    whole = types.SimpleNamespace(video_processor=processor, **strings)
    return {
        "patches": made["pixel_values_videos"].numpy(),
        "grid": made["video_grid_thw"].numpy(),
        "indices": np.asarray(metadata.frames_indices),
        "text": np.asarray(MiniMaxM3VLProcessor.replace_video_token(whole, made, 0)),
    }


def main(source: str, target: str) -> None:
    """Process what the file IN holds.

    `image.NAME` [H W 3] and `video.NAME` [F H W 3] are pixels, `options` is a JSON text with settings of each video,
    `sizes` [Y 2] are heights and widths. `alpha` [H W 4] is given as a Pillow image, and as text for `load_image`.
    """
    if find_spec("torchvision") is None:
        stand_in()
    with without_what_is_unused():
        import transformers.models.minimax_m3_vl.processing_minimax_m3_vl  # noqa: F401 (for `video_inputs`)
        from transformers.image_utils import load_image
        from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import (
            MiniMaxM3VLImageProcessor,
            smart_resize,
        )
        from transformers.models.minimax_m3_vl.video_processing_minimax_m3_vl import MiniMaxM3VLVideoProcessor

    torch.set_num_threads(1)
    given = np.load(source)
    options = json.loads(str(given["options"]))
    images, videos = MiniMaxM3VLImageProcessor(), MiniMaxM3VLVideoProcessor()
    bounds = dict(min_pixels=images.size["shortest_edge"], max_pixels=images.size["longest_edge"])
    out = {"sizes": np.array([smart_resize(*size, **bounds) for size in given["sizes"].tolist()])}
    with_alpha, file = PIL.Image.fromarray(given["alpha"]), io.BytesIO()
    with_alpha.save(file, "PNG")
    loaded = load_image(base64.b64encode(file.getvalue()).decode())
    for name, image in (("alpha.pillow", with_alpha), ("alpha.loaded", loaded)):
        out[name] = images(image, return_tensors="np")["pixel_values"]
    for name in given.files:
        made = {}
        if name.startswith("image."):
            result = images(given[name], input_data_format="channels_last", return_tensors="np")
            made = {"patches": result["pixel_values"], "grid": result["image_grid_thw"]}
        elif name.startswith("video."):
            made = video_inputs(videos, given[name], options[name])
        out |= {f"{name}.{key}": value for key, value in made.items()}
    np.savez(target, **out)


if __name__ == "__main__":
    main(*sys.argv[1:])
