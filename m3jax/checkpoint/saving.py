"""Writes a model to a folder in the hub's layout."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
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
    """Write config.json and safetensors files with the hub's names, which every engine reads.

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
    leaves = tree.flatten(model)
    _check(leaves, max_shard_bytes, copy_from)
    shards = _split(leaves, targets(model.config), max_shard_bytes)
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    with _replacing(Path(path)) as new_file:
        for file, shard in shards.items():
            # No name holds the tensors, so that one file's are freed before the next file's are fetched.
            save_file(
                {name: _to_hub(leaves[t.param], t) for name, t in shard.items()},
                new_file(file),
                metadata=metadata,
            )
        if len(shards) > 1:
            _write_json(new_file(INDEX_NAME), _index(leaves, shards))
        _write_json(new_file("config.json"), _config(model))
        for name in COPIED if copy_from is not None else ():
            if (Path(copy_from) / name).is_file():
                shutil.copyfile(Path(copy_from) / name, new_file(name))


def _check(leaves: dict[str, jax.Array], max_shard_bytes: int, copy_from: str | Path | None) -> None:
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be positive")
    if copy_from is not None and not Path(copy_from).is_dir():
        raise ValueError(f"copy_from: no such folder: {copy_from}")
    remote = [path for path, leaf in leaves.items() if not leaf.is_fully_addressable]
    if remote:
        raise ValueError(
            f"{len(remote)} parameters have shards on other processes ({remote[0]}, ...): "
            "use save_orbax, which writes from all of them"
        )


def _nbytes(leaf: jax.Array, target: Target) -> int:
    return prod(target.dims) * leaf.dtype.itemsize


def _split(leaves: dict[str, jax.Array], places: dict[str, Target], limit: int) -> dict[str, dict[str, Target]]:
    """Cut the tensors, in order, into files of at most `limit` bytes."""
    shards, room = [{}], limit
    for name, target in places.items():
        nbytes = _nbytes(leaves[target.param], target)
        if nbytes > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = target
        room -= nbytes
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _index(leaves: dict[str, jax.Array], shards: dict[str, dict[str, Target]]) -> dict[str, Any]:
    places = [(file, name, t) for file, shard in shards.items() for name, t in shard.items()]
    return {
        "metadata": {"total_size": sum(_nbytes(leaves[t.param], t) for _, _, t in places)},
        "weight_map": {name: file for file, name, _ in places},
    }


def _config(model: m3_model.M3) -> dict[str, Any]:
    data = model.config.to_dict()
    key = "dtype" if "dtype" in data else "torch_dtype"
    return data | {key: model.dtype.name}


def _to_hub(leaf: jax.Array, target: Target) -> np.ndarray:
    index = tuple(np.int32(i) for i in target.index)
    return np.ascontiguousarray(_take(leaf, index, target.perm, target.hub_shape))


@partial(jax.jit, static_argnames=("perm", "shape"))
def _take(leaf: jax.Array, index: tuple[jax.Array, ...], perm: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    own = leaf.shape[len(index) :]
    start = (*index, *[np.int32(0)] * len(own))  # one dtype, also where int is 64 bits wide
    piece = lax.dynamic_slice(leaf, start, (*[1] * len(index), *own)).reshape(own)
    return piece.transpose(np.argsort(perm)).reshape(shape)


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _replacing(folder: Path) -> Iterator[Any]:
    """Give unfinished files their names when all are written; on an error remove them."""
    folder.mkdir(parents=True, exist_ok=True)
    started = []

    def new_file(name: str) -> Path:
        started.append(name)
        return folder / (_UNFINISHED + name)

    try:
        yield new_file
        for name in started:
            os.replace(folder / (_UNFINISHED + name), folder / name)
        for old in folder.iterdir():
            stale = _WEIGHTS.fullmatch(old.name) or old.name == INDEX_NAME
            if stale and old.name not in started:
                old.unlink()
    finally:
        for name in started:
            (folder / (_UNFINISHED + name)).unlink(missing_ok=True)
