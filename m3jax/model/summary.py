"""A table of a model's parameters."""

import io
import math

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from m3jax.make import dotted_path

_WIDTH = 100


def table(model: nnx.Module) -> str:
    """Return a table of the parameters of a real or an abstract model, one a line, with their totals.

    Args:
      model: any module; a stack of layers has its layer axis first.
    """
    rows = Table("parameter", "shape", "dtype", box=None, pad_edge=False)
    for name in ("numbers", "MiB"):
        rows.add_column(name, justify="right")
    numbers = nbytes = 0
    for keys, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        size = math.prod(leaf.shape)
        leaf_bytes = size * np.dtype(leaf.dtype).itemsize
        numbers, nbytes = numbers + size, nbytes + leaf_bytes
        shape = " ".join(map(str, leaf.shape))
        rows.add_row(dotted_path(keys), shape, str(leaf.dtype), f"{size:,}", f"{leaf_bytes / 2**20:,.2f}")
    rows.add_row("all", "", "", f"{numbers:,}", f"{nbytes / 2**20:,.2f}")
    console = Console(file=io.StringIO(), width=_WIDTH)
    console.print(rows)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
