"""Gate, up and down projections of routed experts in two Triton kernels, over tiles of tokens that share an expert.

A program takes one tile and a piece of the output's width, and walks the input's width. Weights are read where they lie
in the stack of layers. Programs that run side by side share what they read: those of a few neighbouring tiles, which
are mostly of one or two experts, take all pieces of the width before those of the next tiles begin.

In M3's sizes::

    pairs of one expert ── x [128 tokens, 64 of 6,144] ── walks ──┐
                                                                  ├── [128, 128] twice ── activation ── hidden, memory
    gate, up in the stack ── [64, 128 columns] each ── walk ──────┘
    hidden [128, 64 of 3,072] and down [64, 256 columns] ── walk ── a float32 row where its (token, expert) pair belongs
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.grouped_experts import Call
from pallas_kernels.triton_common import as_high_as_needed, div, dot, in_groups, store_rows
from pallas_kernels.triton_experts import Piece

_LEAST_ROWS = 64  # of a product that the tensor cores take at once; lower ones save nothing in a tall tile


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece of both products, and in which order programs start."""

    hidden: Piece  # of gate and of up each
    out: Piece
    group: int = 8  # tiles whose programs start before those of the next


LIMITS = Limits(config=Config)


def run(call: Call, config: Config | None) -> Float[Array, "X A D"]:
    """Run `grouped_experts` on a checked call.

    Raises:
      ValueError: widths that are not whole pieces of a program.
    """
    config = default_config(call.gate.dtype, call.pair.shape[1], call.gate.shape[2:]) if config is None else config
    (num_tiles, tile_tokens), (width, hidden_width) = call.pair.shape, call.gate.shape[2:]
    layer = call.layer.reshape(1).astype(jnp.int32)

    def start(kernel, piece: Piece, inputs: int, outputs: int, out_shape, name: str):
        num_pieces = piece.count(inputs, outputs)
        return pl.pallas_call(
            partial(kernel, piece=piece, num_pieces=num_pieces, group=config.group, interpret=call.interpret),
            grid=(num_tiles * num_pieces,),
            out_shape=out_shape,
            compiler_params=piece.compiler_params,
            interpret=call.interpret,
            name=name,
        )

    hidden_kernel = partial(_hidden_kernel, num_chosen=call.num_chosen, activate=call.activate)
    hidden_shape = jax.ShapeDtypeStruct((num_tiles, tile_tokens, hidden_width), call.x.dtype)
    hidden = start(hidden_kernel, config.hidden, width, hidden_width, hidden_shape, "experts_hidden")(
        layer, call.expert, call.pair, call.count, call.x, call.gate, call.up
    )
    out_shape = jax.ShapeDtypeStruct((len(call.x) * call.num_chosen, width), jnp.float32)
    out = start(_out_kernel, config.out, hidden_width, width, out_shape, "experts_out")(
        layer, call.expert, call.pair, call.count, hidden, call.down
    )
    return out.reshape(len(call.x), call.num_chosen, width)


def default_config(dtype: jax.typing.DTypeLike, tile_tokens: int, widths: tuple[int, int]) -> Config:
    """Return the sizes that were fastest among those that fit in shared memory and divide the widths."""
    if jnp.dtype(dtype).itemsize == 4:
        piece = Piece(64, 32, 8, 2) if tile_tokens > 32 else Piece(128, 64, 4, 2)
        return Config(piece, piece)
    is_wide = not any(width % 256 for width in widths)
    if tile_tokens > 64:
        return Config(Piece(128, 64, 8, 4), Piece(256 if is_wide else 128, 64, 8, 4))
    piece = Piece(256, 64, 8, 3) if is_wide else Piece(128, 64, 4, 3)
    return Config(piece, piece)


def _hidden_kernel(
    layer_ref,
    expert_ref,
    pair_ref,
    count_ref,
    x_ref,
    gate_ref,
    up_ref,
    hidden_ref,
    *,
    num_chosen: int,
    activate: Callable[[Array, Array], Array],
    piece: Piece,
    num_pieces: int,
    group: int,
    interpret: bool,
):
    num_tiles, tile_tokens = pair_ref.shape
    tile, columns = _place(num_tiles, num_pieces, group, piece)
    layer, expert, count = layer_ref[0], expert_ref[tile], count_ref[tile]

    def take(rows: int) -> None:
        token = div(pair_ref[tile, pl.ds(0, rows)], num_chosen)

        def take_depth(i, sums):
            gate_sum, up_sum = sums
            depth = pl.ds(i * piece.depth, piece.depth)
            x = x_ref[token, depth]  # [rows depth]
            gate_sum = gate_sum + dot(x, gate_ref[layer, expert, depth, columns])
            return gate_sum, up_sum + dot(x, up_ref[layer, expert, depth, columns])

        zero = jnp.zeros((rows, piece.columns), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // piece.depth, take_depth, (zero, zero))
        hidden_ref[tile, pl.ds(0, rows), columns] = activate(gate, up).astype(hidden_ref.dtype)

    as_high_as_needed(take, count, tile_tokens, _LEAST_ROWS)


def _out_kernel(
    layer_ref,
    expert_ref,
    pair_ref,
    count_ref,
    hidden_ref,
    down_ref,
    out_ref,
    *,
    piece: Piece,
    num_pieces: int,
    group: int,
    interpret: bool,
):
    num_tiles, tile_tokens = pair_ref.shape
    tile, columns = _place(num_tiles, num_pieces, group, piece)
    layer, expert, count = layer_ref[0], expert_ref[tile], count_ref[tile]

    def take(rows: int) -> None:
        def take_depth(i, out):
            depth = pl.ds(i * piece.depth, piece.depth)
            return out + dot(hidden_ref[tile, pl.ds(0, rows), depth], down_ref[layer, expert, depth, columns])

        zero = jnp.zeros((rows, piece.columns), jnp.float32)
        out = jax.lax.fori_loop(0, hidden_ref.shape[2] // piece.depth, take_depth, zero)
        is_used = jnp.arange(rows, dtype=jnp.int32) < count
        store_rows(out_ref, pair_ref[tile, pl.ds(0, rows)], columns, out, is_used, interpret)

    as_high_as_needed(take, count, tile_tokens, _LEAST_ROWS)


def _place(num_tiles: int, num_pieces: int, group: int, piece: Piece) -> tuple[Int[Array, ""], pl.Slice]:
    """Return the (tile, columns) that this program computes."""
    tile, index = in_groups(num_tiles, num_pieces, group)
    return tile, pl.ds(index * piece.columns, piece.columns)
