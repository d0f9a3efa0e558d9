"""Sharded checkpoints by Orbax: every process writes and reads its own shards."""

import json
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from m3jax import model as m3_model
from m3jax.checkpoint import tree
from m3jax.config import M3Config

_PARAMETERS = "parameters"


def save_orbax(model: m3_model.M3, path: str | Path) -> None:
    """Write a model's config.json and parameters, each shard by the process that holds it.

    Unlike the hub's layout this works when no process holds the whole model, and the parameters keep
    the package's own stacked layout.

    Args:
      model: the model.
      path: a new folder.

    Raises:
      ValueError: the folder holds a checkpoint already.
    """
    path = Path(path).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / _PARAMETERS, tree.flatten(model))
    if jax.process_index() == 0:
        config = model.config.to_dict() | {"torch_dtype": model.dtype.name}
        (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_orbax(path: str | Path, mesh: Mesh | None = None) -> m3_model.M3:
    """Read a model that `save_orbax` wrote, in its dtype, onto any mesh.

    Args:
      path: the folder.
      mesh: devices to shard over, or None for the default device.

    Returns:
      The model.

    Raises:
      ValueError: the folder is not one that `save_orbax` wrote.
    """
    path = Path(path).absolute()
    config = M3Config.from_pretrained(path)
    if not (path / _PARAMETERS).is_dir():
        raise ValueError(f"{path} has no folder {_PARAMETERS!r}: give one that save_orbax wrote")
    dtype = json.loads((path / "config.json").read_text(encoding="utf-8"))["torch_dtype"]
    abstract = m3_model.abstract(config, dtype, mesh)
    shardings = tree.flatten(m3_model.shardings(config, mesh))
    placed_shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in tree.flatten(abstract).items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        return tree.replace(abstract, checkpointer.restore(path / _PARAMETERS, placed_shapes))
