"""Images and videos, from a file to what the model takes: patches, grids, placeholders. numpy, Pillow, PyAV; no jax."""

from m3jax.media.bicubic import resize_definition
from m3jax.media.frames import FRAME_RULES, choose_frames, timestamps
from m3jax.media.images import decode_image, is_moving
from m3jax.media.packing import MediaBatch, Segment, batch, bucket_size, pack, segments
from m3jax.media.placeholders import PlaceholderIds, expand_text, expand_tokens
from m3jax.media.places import feature_places, find_places, segment_places
from m3jax.media.presets import PRESETS, Preset
from m3jax.media.process import ProcessedImage, ProcessedVideo, process_image, process_video
from m3jax.media.resize import resize_bicubic
from m3jax.media.sizes import LIMITS, LONG_SIDE_TIERS, MERGE, smart_resize, target_stages
from m3jax.media.sources import media_source, names_file

__all__ = [
    "FRAME_RULES",
    "LIMITS",
    "LONG_SIDE_TIERS",
    "MERGE",
    "PRESETS",
    "MediaBatch",
    "PlaceholderIds",
    "Preset",
    "ProcessedImage",
    "ProcessedVideo",
    "Segment",
    "batch",
    "bucket_size",
    "choose_frames",
    "decode_image",
    "expand_text",
    "expand_tokens",
    "feature_places",
    "find_places",
    "is_moving",
    "media_source",
    "names_file",
    "pack",
    "process_image",
    "process_video",
    "resize_bicubic",
    "resize_definition",
    "segment_places",
    "segments",
    "smart_resize",
    "target_stages",
    "timestamps",
]
