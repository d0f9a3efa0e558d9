"""The cost of images on one device: the tower's weights, its activations, and the work of one call."""

from functools import cache

import jax
import numpy as np
from flax import nnx

from m3jax.config import M3Config
from m3jax.media.packing import bucket_size
from m3jax.model import abstract
from m3jax.planning.arithmetic import Work, held_bytes, planned_mesh, ring
from m3jax.planning.job import Job
from m3jax.vision import VisionConfig


def held_weights(job: Job, sizes: dict[str, int]) -> float:
    """Return the bytes of the tower and the projector on one device; 0 for a text model."""
    if job.config.vision_config is None:
        return 0.0
    vision = VisionConfig.of(job.config)
    return _held_weights(vision, job.config, job.dtype, tuple(sizes.items()))


@cache
def _held_weights(vision: VisionConfig, config: M3Config, dtype: str, sizes: tuple[tuple[str, int], ...]) -> float:
    # Equality of `M3Config` ignores the tower, so `vision` must be part of the cache's key.
    model: nnx.Module = abstract(vision.add_to(config), dtype, planned_mesh(dict(sizes))).vision
    return held_bytes(jax.tree.leaves(model))


def temporaries(job: Job, sizes: dict[str, int]) -> float:
    """Return a guess at the bytes of a call of the tower besides its weights: patches, and the widest activations."""
    if not job.images:
        return 0.0
    vision, itemsize = VisionConfig.of(job.config), np.dtype(job.dtype).itemsize
    width, hidden = vision.hidden_size, _part(vision.intermediate_size, sizes)
    in_layer = (4 + itemsize) * hidden + (4 * 3 + 2 * itemsize) * width
    in_projector = (4 + itemsize) * (_part(vision.projector_hidden_size, sizes) + job.config.hidden_size)
    patches = bucket_size(job.images * job.image_tokens * vision.merged_patches)
    return patches * (4.0 * vision.patch_values + max(in_layer, in_projector))


def see(job: Job, sizes: dict[str, int]) -> Work:
    """Return the work of one call of the tower for all images of a job, each a segment of its own.

    The tensor axis divides heads and hidden widths where their sizes allow; along the other axes every device does the
    same work. Padding of the bucket is not counted.
    """
    vision, config, tensor = VisionConfig.of(job.config), job.config, sizes["tensor"]
    width, projected = vision.hidden_size, vision.projector_hidden_size
    own_heads = _part(vision.num_attention_heads, sizes) / vision.num_attention_heads
    own_hidden = _part(vision.intermediate_size, sizes)
    own_projected = _part(projected, sizes)
    of_image = job.image_tokens * vision.merged_patches
    patches, features = job.images * of_image, job.images * job.image_tokens
    in_layer = own_heads * (4 * width**2 + 2 * of_image * width) + 2 * width * own_hidden
    per_patch = vision.num_hidden_layers * in_layer + vision.patch_values * width
    per_patch += own_projected * (width + config.hidden_size)
    per_feature = own_projected * (vision.merged_patches + 1) * config.hidden_size
    weights = held_weights(job, sizes)
    moved = 4.0 * patches * vision.patch_values + features * config.hidden_size * np.dtype(job.dtype).itemsize
    is_split = [own_heads < 1, own_hidden < vision.intermediate_size]
    summed_bytes = 4.0 * patches * width * vision.num_hidden_layers * sum(is_split)
    if own_projected < projected:
        summed_bytes += 4.0 * (patches + features) * config.hidden_size
    return Work(2.0 * (patches * per_patch + features * per_feature), weights + moved, ring(summed_bytes, tensor))


def _part(size: int, sizes: dict[str, int]) -> int:
    """Return one device's part of heads or of a hidden width: all of it where the tensor axis does not divide it."""
    return size // sizes["tensor"] if size % sizes["tensor"] == 0 else size
