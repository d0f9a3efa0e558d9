"""Saving of a model to a folder in the hub's layout: all of it, or nothing."""

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from m3jax import model as m3_model
from m3jax.checkpoint import tree
from m3jax.checkpoint.mxfp8 import announcement
from m3jax.checkpoint.names import Target, scale_name, targets
from m3jax.checkpoint.replacing import Replacement, as_json
from m3jax.files import current_file, read_bytes
from m3jax.files.tensors import by_width

COPIED = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
}
_MOST_COPIED_BYTES = 256 << 20  # of one file, the most that is read of a tokenizer


def save(
    model: m3_model.M3,
    path: str | Path,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    copy_from: str | Path | None = None,
) -> None:
    """Write a model's config.json and safetensors files with the hub's names, which every engine reads.

    Values are written as the model holds them, so a checkpoint that was loaded in its own dtype comes back byte for
    byte, and so does one in MXFP8 that was loaded with weights="mxfp8". The vision tower is written where the
    model has one. Host memory holds one tensor at a time. A checkpoint that the folder has is replaced by one rename,
    all of it or nothing, whatever ends the process (docs/reliability.md); its files of weights are removed then, other
    files stay.

    Args:
      model: the model; all its shards must be on devices of this process.
      path: the folder, which is made if it is not there.
      max_shard_bytes: the most bytes of tensors in one file, unless one tensor alone has more. Weights
        that fit in one file get no index.
      metadata: of each file's header, {"format": "pt"} if not given.
      copy_from: a folder whose tokenizer files and generation_config.json are copied, those it has.

    Raises:
      ValueError: `max_shard_bytes` is not positive, `copy_from` is no folder, or has a file of more than 256 MiB or a
        link out of it, or a parameter has shards on another process, or another save into the folder is running.
      OSError: names the path, also where the disk is full. The folder's checkpoint is the old one then, or, where only
        the removal of old files failed, the new one.
    """
    parameters = tree.flatten(model)
    _check(parameters, max_shard_bytes, copy_from)
    places = _places(parameters, targets(model.config))
    shards = _deal_out(parameters, places, max_shard_bytes)
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    config = model.config.to_dict()
    config["dtype" if "dtype" in config else "torch_dtype"] = model.dtype.name
    if model.is_mxfp8:
        config["quantization_config"] = announcement(model.config)
    beside = _copies(copy_from) | {"config.json": as_json(config)}
    with Replacement(Path(path), len(shards), beside) as new:
        files = dict(zip(new.names, shards, strict=True))
        for file, names in files.items():
            layout = {name: (_stored_dtype(parameters, places[name]), places[name].hub_shape) for name in names}
            layout = by_width(layout)
            tensors = (_hub_tensor(parameters[places[name].param], places[name]) for name in layout)
            new.write_weights(file, layout, tensors, metadata)
        if len(files) > 1:
            total_size = sum(_nbytes(parameters[target.param], target) for target in places.values())
            new.write_index({name: file for file, names in files.items() for name in names}, total_size)


def _places(parameters: Mapping[str, Shaped[Array, "..."]], hub: Mapping[str, Target]) -> dict[str, Target]:
    """Return the place of each tensor to write, by name; an MXFP8 weight has two, its codes and then its scales."""
    places = {}
    for name, target in hub.items():
        if target.param in parameters:
            places[name] = target
        else:
            places |= {name: target.codes, scale_name(name): target.scales}
    return places


def _copies(folder: str | Path | None) -> dict[str, bytes]:
    """Return the contents of a folder's tokenizer files and generation_config.json by name, as far as it has them."""
    if folder is None:
        return {}
    files = {name: current_file(Path(folder), name) for name in sorted(COPIED)}
    return {name: read_bytes(file, _MOST_COPIED_BYTES) for name, file in files.items() if file.is_file()}


def _check(parameters: dict[str, Shaped[Array, "..."]], max_shard_bytes: int, copy_from: str | Path | None) -> None:
    """Raise ValueError for arguments that `save` cannot serve, before anything is written."""
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be positive")
    if copy_from is not None and not Path(copy_from).is_dir():
        raise ValueError(f"copy_from: no such folder: {copy_from}")
    remote = [name for name, parameter in parameters.items() if not parameter.is_fully_addressable]
    if remote:
        raise ValueError(
            f"{len(remote)} parameters have shards on other processes ({remote[0]}, ...): "
            "use save_orbax, which writes from all of them"
        )


def _stored_dtype(parameters: Mapping[str, Shaped[Array, "..."]], target: Target) -> np.dtype:
    """Return the dtype of a hub tensor in the file."""
    return np.dtype(ml_dtypes.float8_e4m3fn) if target.holds_codes else parameters[target.param].dtype


def _nbytes(parameter: Shaped[Array, "..."], target: Target) -> int:
    """Return the bytes of one hub tensor, in the dtype of the parameter that holds it."""
    return prod(target.dims) * parameter.dtype.itemsize


def _deal_out(
    parameters: dict[str, Shaped[Array, "..."]], places: dict[str, Target], max_shard_bytes: int
) -> list[list[str]]:
    """Return the hub tensors' names for each file: in order, at most `max_shard_bytes` unless one tensor is larger."""
    shards, remaining = [[]], max_shard_bytes
    for name, target in places.items():
        tensor_bytes = _nbytes(parameters[target.param], target)
        if tensor_bytes > remaining and shards[-1]:
            shards.append([])
            remaining = max_shard_bytes
        shards[-1].append(name)
        remaining -= tensor_bytes
    return shards


def _hub_tensor(parameter: Shaped[Array, "..."], target: Target) -> Shaped[np.ndarray, "..."]:
    """Return one hub tensor of a parameter, on the host, with the axes that it has in the file."""
    index = tuple(np.int32(i) for i in target.index)
    tensor = np.ascontiguousarray(_take(parameter, index, target.perm, target.hub_shape))
    return tensor.view(ml_dtypes.float8_e4m3fn) if target.holds_codes else tensor


@partial(jax.jit, static_argnames=("perm", "hub_shape"))
def _take(
    parameter: Shaped[Array, "..."],
    index: tuple[Int32[Array, ""], ...],
    perm: tuple[int, ...],
    hub_shape: tuple[int, ...],
) -> Shaped[Array, "..."]:
    """Return the tensor at `index` of a parameter's stack, with its axes transposed back to the hub's."""
    own_shape = parameter.shape[len(index) :]
    start = (*index, *[np.int32(0)] * len(own_shape))  # one dtype, also where int is 64 bits wide
    piece = lax.dynamic_slice(parameter, start, (*[1] * len(index), *own_shape))  # of q_proj: [1 D N H]
    return piece.reshape(own_shape).transpose(np.argsort(perm)).reshape(hub_shape)  # [N H D], then [N*H D]
