"""Images and videos as the protocol sends them: patches and grids of several in one tensor each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Int64, Shaped
from smg_grpc_proto import vllm_engine_pb2 as protocol
from smg_grpc_proto.generated import common_pb2

from m3jax.decoding import Media
from m3jax.messages import shown

_DTYPES = {
    **{name: np.dtype(name).newbyteorder("<") for name in ("float32", "float16", "int64", "int32", "uint32", "uint8")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# The tensors of a modality: grids [X 3] in patches, and patches of each picture, which follow from the grids. Seconds
# are in the prompt as text (m3jax.media.expand_tokens).
_GRID = {"image": "image_grid_thw", "video": "video_grid_thw"}
_COUNTS = {"image": "patches_per_image", "video": "patches_per_video"}
_OTHERS = {"image": (), "video": ("video_second_per_grid",)}
_ENCODER_KEYS = {"image": ("pixel_values",), "video": ("pixel_values", "pixel_values_videos")}
_MODALITIES = {common_pb2.MODALITY_UNSPECIFIED: "image", common_pb2.IMAGE: "image", common_pb2.VIDEO: "video"}


@dataclass(frozen=True)
class _Item:
    """An image or a video: its place among others in the prompt, its hash, patches [X 1176] and grids [C 3]."""

    offset: int
    digest: str | None
    patches: Shaped[np.ndarray, "X P"]
    grids: Int64[np.ndarray, "C 3"]


@dataclass(frozen=True)
class SentMedium:
    """An image or a video as the gateway knows it.

    Attributes:
      digest: its entry of `mm_hashes`; None where the gateway has sent none.
      offset: of its first token in the prompt.
      token: id of its placeholders in the prompt as it was sent.
      num_patches: of it, all chunks of a video together.
    """

    digest: str | None
    offset: int
    token: int
    num_patches: int


@dataclass(frozen=True)
class MediaReader:
    """A reader of images and videos for one model.

    Attributes:
      placeholder_ids: of the model, by "image" and "video"; {} for one that does not see.
    """

    placeholder_ids: Mapping[str, int]

    def read(
        self, batches: Sequence[protocol.MultimodalInputs], prompt: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Media | None, tuple[SentMedium, ...]]:
        """Return the prompt with the model's own placeholders, and its images and videos in the order of these.

        The third are the images and then the videos again, as the gateway knows them.

        A video that comes as one grid is cut into chunks by the engine, as the tower reads it.

        Args:
          batches: of the request.
          prompt: token ids, expanded: a placeholder for each feature.

        Raises:
          ValueError: a modality, tensor, type or shape that is not known, or tensors that do not fit one another.
        """
        if not batches:
            return prompt, None, ()
        items: dict[str, list[_Item]] = {"image": [], "video": []}
        id_of: dict[int, int] = {}
        sent_id = dict(self.placeholder_ids)
        for batch in batches:
            modality = _MODALITIES.get(batch.modality)
            if modality is None:
                raise ValueError(f"modality = {batch.modality}: the model sees images and videos")
            if modality not in self.placeholder_ids:
                raise ValueError("mm_inputs: the model has no vision tower and takes text alone")
            if batch.HasField("im_token_id"):
                id_of[batch.im_token_id] = self.placeholder_ids[modality]
                sent_id[modality] = batch.im_token_id
            items[modality] += _items(batch, modality)
        ordered = {modality: sorted(found, key=lambda item: item.offset) for modality, found in items.items()}
        images = [(item.patches, tuple(item.grids[0].tolist())) for item in ordered["image"]]
        videos = [(item.patches, [tuple(grid) for grid in item.grids.tolist()]) for item in ordered["video"]]
        sent = tuple(
            SentMedium(item.digest, item.offset, sent_id[modality], len(item.patches))
            for modality, found in ordered.items()
            for item in found
        )
        return tuple(id_of.get(token, token) for token in prompt), Media(images, videos), sent


def _items(batch: protocol.MultimodalInputs, modality: str) -> list[_Item]:
    """Return the images or videos of a batch."""
    tensors = batch.model_specific_tensors
    known = (_GRID[modality], _COUNTS[modality], *_OTHERS[modality])
    if unknown := sorted(tensors.keys() - set(known)):
        raise ValueError(
            f"model_specific_tensors: {shown(unknown[0])} of {modality}s is not known; {', '.join(known)} are"
        )
    if batch.HasField("encoder_input_key") and batch.encoder_input_key not in _ENCODER_KEYS[modality]:
        raise ValueError(f"encoder_input_key = {shown(batch.encoder_input_key)}: must be {_ENCODER_KEYS[modality][-1]}")
    if not batch.HasField("pixel_values") or _GRID[modality] not in tensors:
        raise ValueError(f"mm_inputs of {modality}s needs pixel_values and {_GRID[modality]}")
    patches = array_of(batch.pixel_values, "pixel_values")
    if patches.ndim != 2 or patches.dtype.kind in "iu":
        raise ValueError(f"pixel_values is {patches.dtype} {list(patches.shape)}: must be floats [patches, 1176]")
    grids = array_of(tensors[_GRID[modality]], _GRID[modality])
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype.kind not in "iu" or not np.all(grids >= 1):
        raise ValueError(
            f"{_GRID[modality]} is {grids.dtype} {list(grids.shape)}: must be integers [n, 3] of at least 1"
        )
    patches, grids = patches.astype(np.float32), grids.astype(np.int64)
    if not np.all(np.isfinite(patches)):
        raise ValueError("pixel_values has a NaN or an infinity: every answer to it would be an error")
    # Patches of each grid; one that is too large to be true is not multiplied in 64 bits.
    sizes = np.array([min(math.prod(grid), len(patches) + 1) for grid in grids.tolist()], np.int64)
    if _COUNTS[modality] in tensors:
        counts = array_of(tensors[_COUNTS[modality]], _COUNTS[modality]).astype(np.int64).reshape(-1)
    else:
        counts = sizes
    ends, item_ends = np.cumsum(sizes), np.cumsum(counts)
    if not len(counts) or ends[-1] != len(patches) or not np.all(np.isin(item_ends, ends)) or item_ends[-1] != ends[-1]:
        raise ValueError(
            f"pixel_values has {len(patches)} patches: {_GRID[modality]} has {sizes.tolist()[:8]}, and "
            f"{_COUNTS[modality]} {counts.tolist()[:8]}"
        )
    offsets = [place.offset for place in batch.mm_placeholders]
    if len(offsets) != len(counts):
        # Several ranges of one video, or none: the order of the tensors is the order in the prompt.
        offsets = [offsets[0] if offsets else 0] * len(counts)
    digests = list(batch.mm_hashes) if len(batch.mm_hashes) == len(counts) else [None] * len(counts)
    first_grids = np.searchsorted(ends, item_ends) + 1  # behind the last grid of each
    return [
        _Item(offset, digest, of_item, of_grids)
        for offset, digest, of_item, of_grids in zip(
            offsets, digests, np.split(patches, item_ends[:-1]), np.split(grids, first_grids[:-1]), strict=True
        )
    ]


def array_of(tensor: protocol.TensorData, name: str) -> Shaped[np.ndarray, "*Y"]:
    """Return a tensor of the protocol as an array over its bytes.

    Args:
      tensor: with its bytes inline.
      name: for errors.

    Raises:
      ValueError: another transport, an unknown type, or bytes that are not of the shape.
    """
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name}: dtype = {shown(tensor.dtype)}: must be one of {', '.join(sorted(_DTYPES))}")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("payload") != "inline" or len(tensor.inline) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{name}: {tensor.dtype} {list(shape)} has {math.prod(shape) * dtype.itemsize} bytes, inline; got "
            f"{len(tensor.inline)}"
        )
    return np.frombuffer(tensor.inline, dtype).reshape(shape)
