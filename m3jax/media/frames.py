"""The choice of a video's frames: rules by name, and the time that each temporal patch is stamped with."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from m3jax.media.sizes import TEMPORAL
from m3jax.messages import shown

_SLACK = 1e-4  # seconds by which a frame may come too early


def every_frame(total: int, source_fps: float, fps: float, least: int, most: int) -> list[int]:
    """Choose all frames, as transformers' video processor does by default."""
    return list(range(total))


def spread_frames(total: int, source_fps: float, fps: float, least: int, most: int) -> list[int]:
    """Choose `fps` frames a second, from `least` to `most` of them, each at the beginning of an equal part.

    transformers' video processor has those two bounds among its settings and reads neither: with `do_sample_frames` it
    chooses as many frames as least = 1 gives, and refuses to choose more than there are.
    """
    count = min(max(int(total / source_fps * fps), least), most, total)
    return [i * total // count for i in range(count)]


def ends_frames(total: int, source_fps: float, fps: float, least: int, most: int) -> list[int]:
    """Choose as many frames as `spread_frames`, evenly spaced from the first to the last, as the SMG gateway does."""
    count = min(max(int(total / source_fps * fps), least), most, total)
    return [int(position) for position in np.linspace(0.0, total - 1, count).round()]


def spaced_frames(total: int, source_fps: float, fps: float, least: int, most: int) -> list[int]:
    """Choose the first frame, then each at least 1 / fps seconds after the one chosen before it, as in vLLM."""
    chosen = [0]
    while True:
        due = math.ceil((chosen[-1] / source_fps + 1.0 / fps - _SLACK) * source_fps)
        following = max(due, chosen[-1] + 1)
        if following >= total:
            return chosen
        chosen.append(following)


def spaced_and_last_frames(total: int, source_fps: float, fps: float, least: int, most: int) -> list[int]:
    """Choose `spaced_frames` and the last frame, thinned to `most` such that the last one stays, as in SGLang."""
    chosen = spaced_frames(total, source_fps, fps, least, most)
    if (total - 1 - chosen[-1]) / source_fps > _SLACK:
        chosen.append(total - 1)
    if len(chosen) <= most:
        return chosen
    step = len(chosen) / (most - 1) if most > 1 else 0.0
    return [chosen[int(i * step)] for i in range(most - 1)] + chosen[-1:]


FrameRule = Callable[[int, float, float, int, int], list[int]]
FRAME_RULES: dict[str, FrameRule] = {
    "all": every_frame,
    "hub": spread_frames,
    "vllm": spaced_frames,
    "sglang": spaced_and_last_frames,
    "smg": ends_frames,
}


def choose_frames(
    rule: str, total: int, source_fps: float, fps: float = 1.0, min_frames: int = 4, max_frames: int = 768
) -> list[int]:
    """Return the indices of the frames that a rule chooses from a video.

    Args:
      rule: a name in `FRAME_RULES`.
      total: frames of the video, at least 1.
      source_fps: frames that it shows a second.
      fps: frames wanted a second; "all" does not ask.
      min_frames: fewest frames, where the video has them; of "hub" and "smg". transformers, which does not bound the
        number, chooses as "hub" does with 1.
      max_frames: most frames; of "hub", "smg" and "sglang".

    Returns:
      Their indices, ascending.

    Raises:
      ValueError: no such rule, a video without frames, or numbers that are not positive.
    """
    if rule not in FRAME_RULES:
        raise ValueError(f"no frame rule {shown(rule)}: there are {', '.join(FRAME_RULES)}")
    if total < 1:
        raise ValueError("the video has no frames")
    for name, value in (("source_fps", source_fps), ("fps", fps), ("min_frames", min_frames)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} = {value}: must be a positive number")
    if max_frames < min_frames:
        raise ValueError(f"max_frames = {max_frames}: must be at least min_frames = {min_frames}")
    return FRAME_RULES[rule](total, float(source_fps), float(fps), min_frames, max_frames)


def timestamps(frame_indices: Sequence[int], source_fps: float) -> tuple[float, ...]:
    """The second at which each temporal patch begins: that of the first of its two frames.

    Args:
      frame_indices: which frames of the video were taken, ascending.
      source_fps: frames that the video shows a second.

    Returns:
      One number for each pair of frames; an odd last frame, which is paired with itself, has one too.
    """
    return tuple(frame_indices[first] / source_fps for first in range(0, len(frame_indices), TEMPORAL))
