"""Writes a model to a folder in the hub's layout: all of it, or nothing."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped
from safetensors.numpy import save_file

from m3jax import model as m3_model
from m3jax.checkpoint import tree
from m3jax.checkpoint.names import Target, targets
from m3jax.checkpoint.reader import INDEX_NAME, SINGLE_NAME

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_UNFINISHED = ".unfinished-"


def save(
    model: m3_model.M3,
    path: str | Path,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    copy_from: str | Path | None = None,
) -> None:
    """Write a model's config.json and safetensors files with the hub's names, which every engine reads.

    Values are written as the model holds them, so a checkpoint that was loaded in its own dtype comes
    back byte for byte. Vision tensors are not part of the model and are not written. Host memory
    holds one file at a time. The folder's old files stay until all new ones are complete.

    Args:
      model: the model; all its shards must be on devices of this process.
      path: the folder, which is made if it is not there.
      max_shard_bytes: the most bytes of tensors in one file, unless one tensor alone has more. Weights
        that fit in one file get no index.
      metadata: of each file's header, {"format": "pt"} if not given.
      copy_from: a folder whose tokenizer files and generation_config.json are copied, those it has.

    Raises:
      ValueError: `max_shard_bytes` is not positive, `copy_from` is no folder, or a parameter has
        shards on another process.
    """
    parameters = tree.flatten(model)
    _check(parameters, max_shard_bytes, copy_from)
    files = _deal_out(parameters, targets(model.config), max_shard_bytes)
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    with _replacing(Path(path)) as new_file:
        for file, tensors in files.items():
            # No name holds the values, so that one file's are freed before the next file's are fetched.
            save_file(
                {name: _hub_tensor(parameters[target.param], target) for name, target in tensors.items()},
                new_file(file),
                metadata=metadata,
            )
        if len(files) > 1:
            places = [(file, name, target) for file, tensors in files.items() for name, target in tensors.items()]
            index = {
                "metadata": {"total_size": sum(_nbytes(parameters[target.param], target) for _, _, target in places)},
                "weight_map": {name: file for file, name, _ in places},
            }
            _write_json(new_file(INDEX_NAME), index)
        config = model.config.to_dict()
        config["dtype" if "dtype" in config else "torch_dtype"] = model.dtype.name
        _write_json(new_file("config.json"), config)
        for name in COPIED if copy_from is not None else ():
            if (Path(copy_from) / name).is_file():
                shutil.copyfile(Path(copy_from) / name, new_file(name))


def _check(parameters: dict[str, Shaped[Array, "..."]], max_shard_bytes: int, copy_from: str | Path | None) -> None:
    """Raise ValueError for what `save` cannot do, before it writes anything."""
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


def _nbytes(parameter: Shaped[Array, "..."], target: Target) -> int:
    """Bytes of one hub tensor, in the dtype of the parameter that holds it."""
    return prod(target.dims) * parameter.dtype.itemsize


def _deal_out(
    parameters: dict[str, Shaped[Array, "..."]], places: dict[str, Target], max_shard_bytes: int
) -> dict[str, dict[str, Target]]:
    """The hub tensors of each file, by file name: in order, and as many as stay below the limit."""
    shards, remaining = [{}], max_shard_bytes
    for name, target in places.items():
        tensor_bytes = _nbytes(parameters[target.param], target)
        if tensor_bytes > remaining and shards[-1]:
            shards.append({})
            remaining = max_shard_bytes
        shards[-1][name] = target
        remaining -= tensor_bytes
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _hub_tensor(parameter: Shaped[Array, "..."], target: Target) -> Shaped[np.ndarray, "..."]:
    """One hub tensor of a parameter, on the host, with the axes that it has in the file."""
    index = tuple(np.int32(i) for i in target.index)
    return np.ascontiguousarray(_take(parameter, index, target.perm, target.hub_shape))


@partial(jax.jit, static_argnames=("perm", "hub_shape"))
def _take(
    parameter: Shaped[Array, "..."],
    index: tuple[Int32[Array, ""], ...],
    perm: tuple[int, ...],
    hub_shape: tuple[int, ...],
) -> Shaped[Array, "..."]:
    """What stands at `index` of a parameter's stack, with its axes turned back to the hub's."""
    own_shape = parameter.shape[len(index) :]
    start = (*index, *[np.int32(0)] * len(own_shape))  # one dtype, also where int is 64 bits wide
    piece = lax.dynamic_slice(parameter, start, (*[1] * len(index), *own_shape))  # of q_proj: [1 D N H]
    return piece.reshape(own_shape).transpose(np.argsort(perm)).reshape(hub_shape)  # [N H D], then [N*H D]


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _replacing(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Give files of a folder their names when all are written, and drop old weights; on an error remove the new files.

    Gives a function from a file's name to the path that it is written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = []

    def new_file(name: str) -> Path:
        started.append(name)
        return folder / (_UNFINISHED + name)

    try:
        yield new_file
        for name in started:
            os.replace(folder / (_UNFINISHED + name), folder / name)
        for file in folder.iterdir():
            holds_weights = _WEIGHTS.fullmatch(file.name) or file.name == INDEX_NAME
            if holds_weights and file.name not in started:
                file.unlink()
    finally:
        for name in started:
            (folder / (_UNFINISHED + name)).unlink(missing_ok=True)
