"""One image or one video to what the model takes of it: patches, grids, the number of tokens, time stamps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, UInt8

from m3jax.media.frames import choose_frames, timestamps
from m3jax.media.images import decode_image
from m3jax.media.patches import Grid, chunk_grids, normalized, patch_rows
from m3jax.media.presets import preset_named
from m3jax.media.resize import resize_bicubic, resize_planes
from m3jax.media.sizes import (
    FACTOR,
    LIMITS,
    LONG_SIDE_TIERS,
    MERGE,
    PATCH,
    PATCH_VALUES,
    TEMPORAL,
    Size,
    SizeRule,
    TierRule,
    target_stages,
)
from m3jax.media.videos import Clip, Watch, given_frames, read_video, unwatched

SEGMENT = 4  # temporal patches of a chunk: M3's vision_segment_max_frames


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the model takes it.

    Attributes:
      patches: float32 [X 1176], in the order of merge blocks; X = h w.
      grid: (1, h, w) in patches.
      tokens: image tokens that it fills, h w / 4.
    """

    patches: Float32[np.ndarray, "X P"]
    grid: Grid

    @property
    def tokens(self) -> int:
        """The number of image tokens that it fills."""
        return len(self.patches) // MERGE**2


@dataclass(frozen=True, eq=False)
class ProcessedVideo:
    """A video as the model takes it.

    Attributes:
      patches: float32 [X 1176], temporal patch after temporal patch.
      grid: (t, h, w) in patches of each chunk; t is at most 4, and each chunk attends to itself alone.
      timestamps: the second at which each temporal patch begins, or None where no frame rate is known.
      frame_indices: which frames of the source were taken.
    """

    patches: Float32[np.ndarray, "X P"]
    grid: tuple[Grid, ...]
    timestamps: tuple[float, ...] | None
    frame_indices: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The number of video tokens that it fills, all temporal patches together."""
        return len(self.patches) // MERGE**2

    @property
    def temporal_patches(self) -> int:
        """The number of pairs of frames, each of which stands between a start and an end token."""
        return sum(t for t, _, _ in self.grid)


def process_image(image: Any, preset: str = "hub", *, max_long_side: int | None = None) -> ProcessedImage:
    """Decode, resize, normalise an image and cut it into patches.

    Args:
      image: bytes of a file, a `Path`, a Pillow image, or an array, as in `decode_image`.
      preset: whose rule says how large it becomes: "hub", "vllm", "sglang" or "smg".
      max_long_side: a tier instead of that rule: a multiple of 28 to which the long side is shrunk.

    Returns:
      Patches [X 1176] and the grid (1, h, w).

    Raises:
      ValueError: a broken image, a shape that no rule allows, an unknown preset or tier.

    Source: transformers' image processor for minimax_m3_vl, given Pillow images (of a path or an address its
    `load_image` drops alpha instead); the engines where `preset` names one.
    """
    rule = _size_rule(preset_named(preset).image, max_long_side)
    pixels = decode_image(image)
    stages = target_stages(*pixels.shape[:2], rule)
    if max_long_side is not None and stages[-1].area > LIMITS.image_pixels:
        raise ValueError(
            f"the image would have {stages[-1].height} x {stages[-1].width} pixels (H x W): at most "
            f"{LIMITS.image_pixels} in all; give a smaller max_long_side"
        )
    frame = normalized(_resized(pixels, stages))
    return ProcessedImage(patch_rows(frame[None]), (1, *_patch_sides(stages[-1])))


def process_video(
    video: Any,
    preset: str = "hub",
    *,
    frames: str | None = None,
    fps: float | None = None,
    min_frames: int | None = None,
    max_frames: int | None = None,
    source_fps: float | None = None,
    max_long_side: int | None = None,
    segment: int = SEGMENT,
    watch: Watch = unwatched,
) -> ProcessedVideo:
    """Decode a video, choose its frames, resize and normalise them, and cut them into patches of two frames.

    Args:
      video: bytes of an MP4, MOV, AVI or MKV file or of a GIF that moves, a `Path` of one, or frames: uint8 [F H W 3]
        or a sequence of images, each as `process_image` takes one. All frames that are given are taken, unless one of
        the next four says how to choose among them.
      preset: whose rules say how large frames become and which ones are taken.
      frames: a name in `FRAME_RULES` instead of the preset's.
      fps: frames wanted a second, instead of the preset's.
      min_frames, max_frames: bounds of their number, for the rules that have them; 4 and 768 where not given, as
        transformers' processor declares them (it applies neither, see `choose_frames`).
      source_fps: frames a second of frames that are given; without it there are no time stamps. A file has its own.
      max_long_side: a tier instead of the preset's size: a multiple of 28 to which the long side is shrunk.
      segment: most temporal patches of a chunk, vision_segment_max_frames of the model.
      watch: called with two counts after each frame that was gone through: how many, and how many there are. Of a file
        all frames up to the last one that is taken are decoded.

    Returns:
      Patches [X 1176], a grid a chunk, time stamps, and the indices of the frames.

    Raises:
      ValueError: a file that is no video, is broken or has no frames, frames of several sizes, a shape or number that
        no rule allows, or an unknown preset, rule or tier.

    Source: transformers' video processor for minimax_m3_vl with do_resize; the engines where `preset` names one.
    """
    engine = preset_named(preset)
    rule = _size_rule(engine.frame, max_long_side)
    if segment < 1:
        raise ValueError(f"segment = {segment}: a chunk has at least 1 temporal patch")
    choice = dict(rule=frames, fps=fps, min_frames=min_frames, max_frames=max_frames)
    choice = {name: value for name, value in choice.items() if value is not None}
    settings = dict(rule=engine.frames, fps=engine.fps) | choice
    pick = lambda total, rate: choose_frames(total=total, source_fps=rate, **settings)
    if isinstance(video, np.ndarray | list | tuple):
        clip = given_frames(video, source_fps, pick if choice else None, watch)
    elif source_fps is not None:
        raise ValueError(f"source_fps = {source_fps} is for frames that are given: a file has a rate of its own")
    else:
        clip = read_video(video, pick, watch)
    patches, grid = _video_patches(clip, rule, is_tier=max_long_side is not None)
    seconds = None if clip.source_fps is None else timestamps(clip.frame_indices, clip.source_fps)
    return ProcessedVideo(patches, chunk_grids(grid, segment), seconds, clip.frame_indices)


def _video_patches(clip: Clip, rule: SizeRule, is_tier: bool) -> tuple[Float32[np.ndarray, "X P"], Grid]:
    """A clip's patches and its grid before it is cut into chunks; one pair of frames is held at a time."""
    count = len(clip.frame_indices)
    patches, grid, size, pair = None, None, None, []
    for number, pixels in enumerate(clip.frames):
        if patches is None:
            size = Size(*pixels.shape[:2])
            stages = target_stages(*size, rule)
            height, width = stages[-1]
            if is_tier and stages[-1].area * count > LIMITS.video_pixels:
                raise ValueError(
                    f"{count} frames of {height} x {width} pixels (H x W): at most {LIMITS.video_pixels} pixels in "
                    "all; give a smaller max_long_side, fps or max_frames"
                )
            grid = (-(-count // TEMPORAL), *_patch_sides(stages[-1]))
            patches = np.empty((grid[0], grid[1] * grid[2], PATCH_VALUES), np.float32)
        if pixels.shape[:2] != size:
            raise ValueError(
                f"frame {clip.frame_indices[number]} has {pixels.shape[0]} x {pixels.shape[1]} pixels (H x W), "
                f"the first one {size.height} x {size.width}: a video has frames of one size"
            )
        pair.append(normalized(_resized(pixels, stages)))
        if len(pair) == TEMPORAL or number == count - 1:
            patches[number // TEMPORAL] = patch_rows(np.stack(pair))
            pair = []
    return patches.reshape(-1, PATCH_VALUES), grid


def _resized(pixels: UInt8[np.ndarray, "H W 3"], stages: tuple[Size, ...]) -> Float[np.ndarray, "3 h w"]:
    """Resize pixels to each of several sizes in turn; return planes of floats whose values are whole."""
    for stage in stages[:-1]:
        pixels = resize_bicubic(pixels, *stage)
    return resize_planes(pixels, *stages[-1])


def _patch_sides(size: Size) -> tuple[int, int]:
    return size.height // PATCH, size.width // PATCH


def _size_rule(rule: SizeRule, max_long_side: int | None) -> SizeRule:
    """A preset's rule, or that of a tier."""
    if max_long_side is None:
        return rule
    if max_long_side < FACTOR or max_long_side % FACTOR:
        raise ValueError(f"max_long_side = {max_long_side}: must be a multiple of {FACTOR}, as {LONG_SIDE_TIERS} are")
    return TierRule(long_side=max_long_side)
