"""Plots of readings, drawn into axes of matplotlib, which the extra `plots` brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_heads(axes: Axes, values: Float[np.ndarray, "L N"], title: str, layers: Sequence[int] | None = None) -> None:
    """Draw a number for each head: layers upwards, heads to the right, zero white.

    Args:
      axes: to draw into.
      values: of each layer and head.
      title: above.
      layers: their indices; 0, 1, 2, ... by default.
    """
    limit = float(np.abs(values).max()) or 1.0
    image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower", aspect="auto")
    axes.set(xlabel="query head", ylabel="layer", title=title, xticks=range(values.shape[1]))
    axes.set_yticks(range(len(values)), range(len(values)) if layers is None else layers)
    axes.figure.colorbar(image, ax=axes)


def draw_blocks(axes: Axes, reads: Float[np.ndarray, "M M"], title: str) -> None:
    """Draw who read which block: queries downwards, blocks to the right, darker for more attention.

    Args:
      axes: to draw into.
      reads: of one head, from `m3jax.inside.block_reads`.
      title: above.
    """
    axes.imshow(np.sqrt(reads), cmap="Greys", vmin=0, vmax=1)  # of the root, or small shares would not be seen
    axes.set(xlabel="block read", ylabel="block of the query", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)


def draw_patches(axes: Axes, effects: Float[np.ndarray, "L P"], labels: Sequence[str], title: str) -> None:
    """Draw the effect of a patch at each layer and token.

    Args:
      axes: to draw into.
      effects: from `m3jax.inside.patch_effects`.
      labels: of the tokens.
      title: above.
    """
    image = axes.imshow(effects, cmap="viridis", origin="lower", aspect="auto")
    axes.set(ylabel="layer", title=title, yticks=range(len(effects)))
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right")
    axes.figure.colorbar(image, ax=axes)
