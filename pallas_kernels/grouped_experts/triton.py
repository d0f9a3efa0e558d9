"""Gate, up and down projections of routed experts in two Triton kernels, over tiles of tokens that share an expert.

A program takes one tile and a piece of the output's width, and walks the input's width.
Weights are read where they lie in the stack of layers. Tiles of one expert are neighbours in the grid, so that what one
of them reads the others find in the cache.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common import dot


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    columns: int = 256  # of the output, a program
    depth: int = 64  # of the input, a step
    num_warps: int = 8
    num_stages: int = 3


def grouped_experts(
    x: Float[Array, "X D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    expert: Int[Array, " Y"],
    token: Int[Array, "Y C"],
    valid: Bool[Array, "Y C"],
    *,
    activate: Callable[[Array, Array], Array],
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "Y C D"]:
    """What each expert makes of each of its tokens: `activate(x gate, x up) down`.

    Args:
      x: tokens; bfloat16, float16 or float32.
      gate: weights of a stack of layers, in x's dtype.
      up: likewise.
      down: likewise.
      layer: which layer of the stack; it is not copied.
      expert: of each tile.
      token: rows of x that a tile takes, C one of 16, 32 and 64.
      valid: which of them count. A tile with none is skipped, and its output is anything, as that of invalid rows.
      activate: of two arrays in float32, element by element.
      config: tile sizes.
      interpret: run on the CPU.

    Returns:
      Outputs in float32, not yet weighted.

    Raises:
      ValueError: operands that do not fit together.
    """
    config = config or _fitting(gate)
    _check(x, gate, up, down, token, config)
    used = jnp.any(valid, axis=1).astype(jnp.int32)
    places = layer.reshape(1).astype(jnp.int32), expert, used
    call = partial(_call, interpret=interpret, config=config)
    hidden = jax.ShapeDtypeStruct((*token.shape, gate.shape[-1]), x.dtype)
    first = call(partial(_hidden_kernel, activate=activate, config=config), hidden, "experts_hidden")
    hidden = first(*places, token, x, gate, up)
    out = jax.ShapeDtypeStruct((*token.shape, x.shape[1]), jnp.float32)
    return call(partial(_out_kernel, config=config), out, "experts_out")(*places, hidden, down)


def _fitting(gate) -> Config:
    """What fits in shared memory and divides the widths."""
    if gate.dtype.itemsize == 4:
        return Config(columns=128, num_warps=4, num_stages=2)
    narrow = any(width % Config.columns for width in gate.shape[2:])
    return Config(columns=128, num_warps=4) if narrow else Config()


def _call(kernel, out: jax.ShapeDtypeStruct, name: str, interpret: bool, config: Config):
    return pl.pallas_call(
        kernel,
        grid=(out.shape[0], out.shape[2] // config.columns),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=name,
    )


def _hidden_kernel(
    layer_ref, expert_ref, used_ref, token_ref, x_ref, gate_ref, up_ref, out_ref, *, activate, config: Config
):
    tile, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(used_ref[tile] > 0)
    def _():
        layer, expert = layer_ref[0], expert_ref[tile]
        rows = token_ref[tile, :]
        columns = pl.ds(piece * config.columns, config.columns)

        def body(i, state):
            depth = pl.ds(i * config.depth, config.depth)
            x = x_ref[rows, depth]
            read = lambda ref: ref[layer, expert, depth, columns]
            return state[0] + dot(x, read(gate_ref)), state[1] + dot(x, read(up_ref))

        zero = jnp.zeros((token_ref.shape[1], config.columns), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // config.depth, body, (zero, zero))
        out_ref[tile, :, columns] = activate(gate, up).astype(out_ref.dtype)


def _out_kernel(layer_ref, expert_ref, used_ref, hidden_ref, down_ref, out_ref, *, config: Config):
    tile, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(used_ref[tile] > 0)
    def _():
        layer, expert = layer_ref[0], expert_ref[tile]
        columns = pl.ds(piece * config.columns, config.columns)

        def body(i, state):
            depth = pl.ds(i * config.depth, config.depth)
            return state + dot(hidden_ref[tile, :, depth], down_ref[layer, expert, depth, columns])

        zero = jnp.zeros((hidden_ref.shape[1], config.columns), jnp.float32)
        out_ref[tile, :, columns] = jax.lax.fori_loop(0, hidden_ref.shape[2] // config.depth, body, zero)


def _check(x, gate, up, down, token, config: Config) -> None:
    rows, width, hidden = token.shape[1], x.shape[1], gate.shape[3]
    if gate.shape != up.shape or gate.shape[2] != width or down.shape != (*gate.shape[:2], hidden, width):
        raise ValueError(
            f"x has width {width}, gate has shape {gate.shape}, up {up.shape}, down {down.shape}: need [L E D F] twice "
            f"and [L E F D] with D = {width}"
        )
    if len({x.dtype, gate.dtype, up.dtype, down.dtype}) > 1:
        raise ValueError(f"x is {x.dtype}, gate {gate.dtype}, up {up.dtype}, down {down.dtype}: need one dtype")
    unit = max(config.columns, config.depth)
    if rows not in (16, 32, 64) or width % unit or hidden % unit:
        raise ValueError(
            f"tiles of {rows} tokens, widths {width} and {hidden}: need 16, 32 or 64 tokens, and multiples of {unit}"
        )
