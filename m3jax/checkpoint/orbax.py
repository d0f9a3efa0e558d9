"""Sharded checkpoints by Orbax: every process writes and reads its own shards."""

import os
import shutil
from pathlib import Path

import jax
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh

from m3jax import model as m3_model
from m3jax.checkpoint import tree
from m3jax.checkpoint.mxfp8 import announcement, check_config
from m3jax.checkpoint.replacing import as_json
from m3jax.config import read_config
from m3jax.files import replace_file, sync_folder
from m3jax.messages import printable, shown
from m3jax.model.build import DTYPES

# The folder of a save's parameters, and its name until the save is complete, to which Orbax adds a suffix as it writes.
_PARAMETERS, _UNFINISHED = "parameters", "parameters.unfinished"


def save_orbax(model: m3_model.M3, path: str | Path) -> None:
    """Write a model's config.json and parameters, each shard by the process that holds it.

    Unlike the hub's layout this works when no process holds the whole model, and the parameters keep
    the package's own stacked layout. The folder gets its name `parameters` by one rename, when all that is
    in it, and config.json beside it, are on the disk; until then there is no checkpoint. What a save that
    was cut short left is removed by the next one.

    Args:
      model: the model.
      path: a new folder, the same for all processes.

    Raises:
      ValueError: the folder holds a checkpoint already.
      OSError: names the path at fault.
    """
    path = Path(path).absolute()
    if (path / _PARAMETERS).exists():
        raise ValueError(f"{path / _PARAMETERS} already exists: give a new folder")
    is_first = jax.process_index() == 0
    if is_first:
        path.mkdir(parents=True, exist_ok=True)
        for folder in path.glob(_UNFINISHED + "*"):
            shutil.rmtree(folder)
        for file in path.glob(".m3jax-*-config.json"):
            file.unlink()
        config = model.config.to_dict() | {"torch_dtype": model.dtype.name}
        if model.is_mxfp8:
            config["quantization_config"] = announcement(model.config)
        replace_file(path / "config.json", as_json(config))
    sync_global_devices("m3jax.save_orbax: folder is ready")
    import orbax.checkpoint as ocp  # 0.2 s, of which most programs have no use

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / _UNFINISHED, tree.flatten(model))
    sync_global_devices("m3jax.save_orbax: parameters are written")
    if is_first:
        _sync_tree(path / _UNFINISHED)
        os.rename(path / _UNFINISHED, path / _PARAMETERS)
        sync_folder(path)
    sync_global_devices("m3jax.save_orbax: parameters have their name")


def _sync_tree(folder: Path) -> None:
    """Return when all files under a folder are on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


def load_orbax(path: str | Path, mesh: Mesh | None = None) -> m3_model.M3:
    """Read a model that `save_orbax` wrote, in its dtype or in MXFP8, onto any mesh.

    Args:
      path: the folder.
      mesh: devices to shard over, or None for the default device.

    Returns:
      The model.

    Raises:
      ValueError: the folder is not one that `save_orbax` wrote.
    """
    path = Path(path).absolute()
    config, data = read_config(path)
    shown_path = printable(str(path))
    if not (path / _PARAMETERS).is_dir():
        raise ValueError(f"{shown_path} has no folder {_PARAMETERS!r}: give one that save_orbax wrote")
    dtype = data.get("torch_dtype")
    if dtype not in DTYPES:
        raise ValueError(
            f"{shown_path}: torch_dtype = {shown(dtype)} in config.json: give a folder that save_orbax wrote"
        )
    is_quantized, problems = check_config(data)
    if problems:
        raise ValueError(f"{shown_path}: {problems[0]}")
    weights = "mxfp8" if is_quantized else "dequantize"
    abstract = m3_model.abstract(config, dtype, mesh, weights)
    shardings = tree.flatten(m3_model.shardings(config, mesh, weights))
    placed_shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in tree.flatten(abstract).items()
    }
    import orbax.checkpoint as ocp  # 0.2 s, of which most programs have no use

    with ocp.StandardCheckpointer() as checkpointer:
        return tree.replace(abstract, checkpointer.restore(path / _PARAMETERS, placed_shapes))
