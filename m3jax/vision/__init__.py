"""The vision tower and the projector: patches of images and videos to features that stand among a prompt's tokens."""

from m3jax.spec.vision import rotary_angles, segment_attention
from m3jax.vision.config import VisionConfig
from m3jax.vision.schedules import BACKENDS, attend_segments
from m3jax.vision.tower import Vision

__all__ = [
    "BACKENDS",
    "Vision",
    "VisionConfig",
    "attend_segments",
    "rotary_angles",
    "segment_attention",
]
