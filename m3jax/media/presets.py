"""The differences between the hub's processor and the engines in preparing images and videos: one table.

It stands here and not with the comparisons of engines (`m3jax.compare`), because `process_image` and `process_video`
take a preset by its name: who serves a model behind one of these engines prepares images as that one does.
"""

from dataclasses import dataclass

from m3jax.media.sizes import FACTOR, AreaRule, CapRule, SizeRule
from m3jax.messages import shown

_FRAME_PIXELS = 768 * FACTOR**2  # 602,112


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The rules of one engine: sizes of images and frames, the choice of a video's frames, and their number a second.

    All else is one rule for all of them: the resize on bytes, normalisation, the order of patches, placeholders.
    """

    image: SizeRule
    frame: SizeRule
    frames: str
    fps: float = 1.0


PRESETS = {
    "hub": Preset(image=AreaRule(), frame=AreaRule(max_pixels=_FRAME_PIXELS), frames="hub"),
    "vllm": Preset(
        image=AreaRule(min_side=FACTOR), frame=AreaRule(min_side=FACTOR, max_pixels=_FRAME_PIXELS), frames="vllm"
    ),
    "sglang": Preset(image=CapRule(cap=672), frame=CapRule(cap=672, raise_first=False), frames="sglang"),
    "smg": Preset(
        image=AreaRule(min_side=FACTOR, short_side=112),
        frame=AreaRule(min_side=FACTOR, max_pixels=_FRAME_PIXELS),
        frames="smg",
        fps=2.0,
    ),
}


def preset_named(name: str) -> Preset:
    """The preset of that name.

    Raises:
      ValueError: there is none; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"no media preset {shown(name)}: there are {', '.join(PRESETS)}")
    return PRESETS[name]
