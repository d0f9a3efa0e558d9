"""The configuration of a vision tower and its projector, to and from the hub's config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from m3jax.config import M3Config
from m3jax.config_keys import LARGEST_INTEGER, LARGEST_REAL, SMALLEST_REAL
from m3jax.messages import listed, note_problems, shown

_TOP_NAMES = {
    "projector_hidden_size": "projector_hidden_size",
    "image_token_index": "image_token_id",
    "video_token_index": "video_token_id",
}
# Keys with one supported value; any other value is another model. An absent key means that value.
_FIXED = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("rope",),
    "rope_mode": ("3d",),
}
_FIXED_TOP = {
    "projector_hidden_act": ("gelu",),
    "multimodal_projector_bias": (True,),
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("full",),
}
_COMPRESSION = "img_token_compression_config"
_CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Every number of the tower and the projector that changes their arithmetic; the defaults are M3's.

    Field names are transformers'. Hashable, so it can be static under `jax.jit`. A key that a config.json does not have
    means M3's value, as it does in transformers.

    Attributes:
      hidden_size: W, the tower's width.
      num_attention_heads: N; a head is hidden_size / N wide.
      patch_size, temporal_patch_size: pixels of a patch's side, and frames.
      spatial_merge_size: patches of a merge block's side; a block becomes one feature.
      vision_segment_max_frames: temporal patches of a video's chunk.
      projector_hidden_size: the hidden width of both of the projector's MLPs.
      image_token_id, video_token_id: the placeholders.

    Raises:
      ValueError: numbers that no tower can have, all of them.

    Source: config.json of MiniMaxAI/MiniMax-M3; transformers `MiniMaxM3VLVisionConfig`.
    """

    hidden_size: int = 1280
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    intermediate_size: int = 5120
    num_channels: int = _CHANNELS
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    vision_segment_max_frames: int = 4
    layer_norm_eps: float = 1e-5
    rope_theta: float = 1e4
    projector_hidden_size: int = 6144
    image_token_id: int = 200025
    video_token_id: int = 200026

    def __post_init__(self):
        problems = []
        for entry in fields(self):
            value, is_integer = getattr(self, entry.name), entry.type is int
            least, most = (1, LARGEST_INTEGER) if is_integer else (SMALLEST_REAL, LARGEST_REAL)
            least = 0 if entry.name.endswith("token_id") else least
            is_number = isinstance(value, int if is_integer else int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):
                expected = f"an integer of 32 bits, at least {least}" if is_integer else "a positive float32 number"
                problems.append(f"{entry.name} = {shown(value)}: must be {expected}")
        if not problems and self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden_size = {self.hidden_size} is no multiple of num_attention_heads = {self.num_attention_heads}"
            )
        if not problems and self.head_dim < 6:
            problems.append(f"heads of {self.head_dim} are too narrow to turn by three axes: at least 6")
        _raise(problems)

    @property
    def head_dim(self) -> int:
        """H, the width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kernel(self) -> tuple[int, int, int, int]:
        """The axes of a patch: colours, frames, rows and columns of pixels."""
        return self.num_channels, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def patch_values(self) -> int:
        """The count of numbers in a patch."""
        return math.prod(self.kernel)

    @property
    def merged_patches(self) -> int:
        """The number of patches of a merge block, which become one feature."""
        return self.spatial_merge_size**2

    @classmethod
    def tiny(cls, **changes: Any) -> "VisionConfig":
        """A small tower for experiments, beside `M3Config.tiny()`: 64 wide, two layers of two heads.

        Args:
          **changes: values of other fields.
        """
        values = dict(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
            projector_hidden_size=64, image_token_id=250, video_token_id=251,
        )  # fmt: skip
        return cls(**(values | changes))

    @classmethod
    def of(cls, config: M3Config) -> "VisionConfig":
        """The tower that a model's configuration describes.

        Args:
          config: with a `vision_config`; the projector's width and the placeholders' ids stand in its `extra`.

        Raises:
          ValueError: no tower, or every key that is wrong, unknown, or would change the arithmetic in a way that is
            not supported.
        """
        if config.vision_config is None:
            raise ValueError("this model has no vision_config: it takes text alone")
        problems: list[str] = []
        values = _read(config.vision_config, problems)
        values |= {ours: config.extra[key] for key, ours in _TOP_NAMES.items() if key in config.extra}
        problems += _unsupported(config.extra, _FIXED_TOP)
        problems += _compression_problems(config.extra.get(_COMPRESSION), values, "")
        _raise(problems)
        return cls(**values)

    def add_to(self, config: M3Config) -> M3Config:
        """A text model's configuration with this tower, in the hub's form.

        Args:
          config: the text model's; a tower that it has is replaced.
        """
        compression = {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": self.spatial_merge_size,
            "temporal_patch_size": self.temporal_patch_size,
        }
        vision = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        top = {key: vision.pop(ours) for key, ours in _TOP_NAMES.items()}
        vision |= {
            "model_type": "clip_vision_model", "hidden_act": "gelu", "position_embedding_type": "rope",
            "rope_mode": "3d", "projection_dim": config.hidden_size, _COMPRESSION: compression,
        }  # fmt: skip
        return replace(config, vision_config=vision, extra=config.extra | top | {_COMPRESSION: compression})


# Keys that do not change a forward pass.
_HARMLESS = frozenset({
    "attention_dropout", "image_size", "initializer_factor", "initializer_range", "vocab_size", "architectures",
    "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id",
    "problem_type", "_attn_implementation", "attn_implementation", "projection_dim",
})  # fmt: skip
_MODEL_TYPES = ("clip_vision_model", "minimax_m3_vl_vision", None)


def _read(vision: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The fields that a vision_config gives; what is wrong with it goes to `problems`."""
    names = {entry.name for entry in fields(VisionConfig)} - set(_TOP_NAMES.values())
    values = {key: vision[key] for key in names if key in vision}
    problems += _unsupported(vision, _FIXED | {"model_type": _MODEL_TYPES})
    rope = vision.get("rope_parameters")
    if rope is not None:
        if not isinstance(rope, Mapping) or set(rope) - {"rope_type", "rope_theta"}:
            problems.append(f"rope_parameters = {shown(rope)}: must have rope_type and rope_theta alone")
        else:
            problems += _unsupported(rope, {"rope_type": ("axial", "default")})
            theta = rope.get("rope_theta", values.get("rope_theta", VisionConfig.rope_theta))
            if values.setdefault("rope_theta", theta) != theta:
                problems.append("rope_theta and rope_parameters.rope_theta disagree; keep one")
    problems += _compression_problems(vision.get(_COMPRESSION), values, "vision_config.")
    if (head_dim := vision.get("head_dim")) is not None:
        width, heads = (values.get(key, getattr(VisionConfig, key)) for key in ("hidden_size", "num_attention_heads"))
        if not (isinstance(width, int) and isinstance(heads, int) and head_dim == width // max(1, heads)):
            problems.append(f"head_dim = {shown(head_dim)}: must be hidden_size / num_attention_heads")
    known = names | set(_FIXED) | _HARMLESS | {"model_type", "rope_parameters", "head_dim", _COMPRESSION}
    unknown = sorted(set(vision) - known)
    problems += [f"unknown key {shown(key)}: remove it if it does not change the arithmetic" for key in unknown]
    return values


def _compression_problems(compression: Any, values: dict[str, Any], prefix: str) -> list[str]:
    """Return the problems of the hub's object that says how patches become tokens; put its sizes into `values`."""
    if compression is None:
        return []
    if not isinstance(compression, Mapping):
        return [f"{prefix}{_COMPRESSION} = {shown(compression)}: must be an object"]
    problems = _unsupported(compression, {"image_token_compression_method": ("patch_merge",)})
    for key in ("spatial_merge_size", "temporal_patch_size"):
        if key in compression and values.setdefault(key, compression[key]) != compression[key]:
            problems.append(f"{prefix}{_COMPRESSION}.{key} = {shown(compression[key])}: {shown(values[key])} elsewhere")
    return problems


def _unsupported(settings: Mapping[str, Any], fixed: Mapping[str, tuple]) -> list[str]:
    return [
        f"{key} = {shown(settings[key])} is not supported (only {' or '.join(map(repr, allowed))})"
        for key, allowed in fixed.items()
        if key in settings
        and not any(type(settings[key]) is type(value) and settings[key] == value for value in allowed)
    ]


def _raise(problems: list[str]) -> None:
    if problems:
        error = ValueError("unsupported vision tower: " + listed(problems))
        note_problems(error, problems)
        raise error
