"""The common part of the Triton kernels of routed experts: tiles of tokens, and the two calls that run an expert.

A program takes one tile and a piece of the output's width, and walks the input's width.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import TileConfig


@dataclasses.dataclass(frozen=True)
class Piece:
    """The piece of one product that a program computes, and how it computes it.

    Attributes:
      columns: of the output.
      depth: of the input, a step.
      num_warps: of the program.
      num_stages: steps that are under way at once, all but one of them being fetched.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def count(self, inputs: int, outputs: int) -> int:
        """Pieces of a product from so many input channels to so many outputs.

        Raises:
          ValueError: it does not consist of whole pieces.
        """
        if inputs % self.depth or outputs % self.columns:
            raise ValueError(
                f"a product from {inputs} to {outputs} channels: need multiples of {self.depth} and {self.columns}"
            )
        return outputs // self.columns

    @property
    def compiler_params(self) -> plgpu.CompilerParams:
        """The compiler parameters of a call whose programs compute such pieces."""
        return plgpu.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


class Tiles(NamedTuple):
    """The layer and the expert whose weights each tile takes; inside a kernel, references."""

    layer: Any  # [1] of the stack
    expert: Any  # [Y] of each tile
    used: Any  # [Y] 0 where no token of the tile counts

    @classmethod
    def of(cls, layer: Int[Array, ""], expert: Int[Array, " Y"], valid: Bool[Array, "Y C"]) -> "Tiles":
        """Make the tiles from a layer, each tile's expert, and which of its tokens count."""
        return cls(layer.reshape(1).astype(jnp.int32), expert, jnp.any(valid, axis=1).astype(jnp.int32))


def run_tiles(
    operands: tuple[Float[Array, "X D"], Any, Any, Any],
    tiles: Tiles,
    token: Int[Array, "Y C"],
    *,
    widths: Sequence[int],
    kernels: tuple[Callable[..., None], Callable[..., None]],
    config: TileConfig,
    interpret: bool,
    name: str,
) -> Float[Array, "Y C D"]:
    """Return the outputs of all tiles in float32: two kernels, with a hidden value in x's dtype between them.

    Args:
      operands: x, and the weights of gate, up and down, as the kernels read them.
      tiles: which weights each takes.
      token: rows of x that each takes.
      widths: D and F, the model's and the hidden one.
      kernels: from x to the hidden values, and from there to the outputs; they take `config`.
      config: with the sizes of a program's piece, `columns` and `depth`.
      interpret: run on the CPU.
      name: of the calls.

    Raises:
      ValueError: widths that are not whole pieces of a program.
    """
    (x, gate, up, down), (width, hidden_width) = operands, widths
    unit = max(config.columns, config.depth)
    if width % unit or hidden_width % unit:
        raise ValueError(f"widths {width} and {hidden_width}: need multiples of {unit}")
    call = partial(
        pl.pallas_call,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
    )
    hidden_kernel, out_kernel = kernels
    hidden = call(
        partial(hidden_kernel, config=config),
        grid=(len(token), hidden_width // config.columns),
        out_shape=jax.ShapeDtypeStruct((*token.shape, hidden_width), x.dtype),
        name=f"{name}_hidden",
    )(tiles, token, x, gate, up)
    return call(
        partial(out_kernel, config=config),
        grid=(len(token), width // config.columns),
        out_shape=jax.ShapeDtypeStruct((*token.shape, width), jnp.float32),
        name=f"{name}_out",
    )(tiles, hidden, down)
