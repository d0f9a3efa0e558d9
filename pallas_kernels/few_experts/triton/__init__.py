"""Gate, up and down projections of routed experts in two Triton kernels, for so few tokens that reading weights is all.

A program takes one pair of a token and an expert, and a piece of the output's columns. The first pair of an expert
takes all tokens of the call through it and writes those that chose it; programs of its other pairs end at once. So each
weight is read once, by one of hundreds of programs, and no pair has to be sorted before.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.numbers import power_of_two
from pallas_kernels.triton_common import div, dot, rem, store_rows
from pallas_kernels.triton_experts import Piece

_LEAST_ROWS = 16  # tokens of a product on tensor cores


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece of both products."""

    hidden: Piece  # of gate and of up each
    out: Piece


LIMITS = Limits(config=Config)


def run(
    x: Float[Array, "X D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    expert_ids: Int[Array, "X A"],
    *,
    activate: Callable[[Array, Array], Array],
    config: Config | None,
    interpret: bool,
) -> Float[Array, "X A D"]:
    """The op, of checked operands.

    Raises:
      ValueError: widths that are not whole pieces of a program.
    """
    (width, hidden_width), num_pairs = gate.shape[2:], expert_ids.size
    config = default_config(gate.dtype, gate.shape[2:], num_pairs) if config is None else config
    layer = layer.reshape(1).astype(jnp.int32)
    hidden = pl.pallas_call(
        partial(_hidden_kernel, activate=activate, piece=config.hidden, interpret=interpret),
        grid=(config.hidden.count(width, hidden_width), num_pairs),
        out_shape=jax.ShapeDtypeStruct((num_pairs, hidden_width), x.dtype),
        compiler_params=config.hidden.compiler_params,
        interpret=interpret,
        name="few_experts_hidden",
    )(layer, expert_ids, x, gate, up)
    out = pl.pallas_call(
        partial(_out_kernel, piece=config.out, interpret=interpret),
        grid=(config.out.count(hidden_width, width), num_pairs),
        out_shape=jax.ShapeDtypeStruct((num_pairs, width), jnp.float32),
        compiler_params=config.out.compiler_params,
        interpret=interpret,
        name="few_experts_out",
    )(layer, expert_ids, hidden, down)
    return out.reshape(*expert_ids.shape, width)


def default_config(dtype: jax.typing.DTypeLike, widths: tuple[int, int], num_pairs: int) -> Config:
    """What was fastest of what fits in shared memory and divides the widths."""
    if jnp.dtype(dtype).itemsize == 4:
        return Config(Piece(64, 64, 4, 2), Piece(64, 64, 4, 2))
    if any(width % 128 for width in widths):
        return Config(Piece(64, 64, 4, 4), Piece(64, 64, 4, 4))
    if 1 < num_pairs <= 8:
        return Config(Piece(128, 32, 4, 5), Piece(128, 32, 4, 5))
    return Config(Piece(64, 128, 4, 4), Piece(128, 64, 8, 5))


class _Share(NamedTuple):
    """What a program does for the expert of its pair, if it is the first of that expert's."""

    expert: Int[Array, ""]
    is_first: Bool[Array, ""]
    token: Int[Array, " R"]  # of each row of the products; rows behind the last token repeat it
    pair: Int[Array, " R"]  # of each token that chose the expert, its first such pair; else any
    chose: Sequence[Bool[Array, " R"]]  # for each of a token's choices, whether it is the expert


def _share(ids_ref) -> _Share:
    num_tokens, num_chosen = ids_ref.shape
    own_pair = pl.program_id(1)
    expert = ids_ref[div(own_pair, num_chosen), rem(own_pair, num_chosen)]
    row = jnp.arange(max(_LEAST_ROWS, power_of_two(num_tokens)), dtype=jnp.int32)
    token = jnp.minimum(row, num_tokens - 1)
    chose = [(row < num_tokens) & (ids_ref[token, choice] == expert) for choice in range(num_chosen)]
    pair, is_taken = token * num_chosen, jnp.zeros_like(token)
    for choice in reversed(range(num_chosen)):
        pair_of_choice = token * num_chosen + choice
        pair = jnp.where(chose[choice], pair_of_choice, pair)
        is_taken = is_taken | (chose[choice] & (pair_of_choice < own_pair)).astype(jnp.int32)
    return _Share(expert, (expert >= 0) & (jnp.max(is_taken) == 0), token, pair, chose)


def _hidden_kernel(
    layer_ref,
    ids_ref,
    x_ref,
    gate_ref,
    up_ref,
    hidden_ref,
    *,
    activate: Callable[[Array, Array], Array],
    piece: Piece,
    interpret: bool,
):
    share, columns = _share(ids_ref), pl.ds(pl.program_id(0) * piece.columns, piece.columns)

    @pl.when(share.is_first)
    def _():
        layer = layer_ref[0]

        def take_depth(i, sums):
            gate_sum, up_sum = sums
            depth = pl.ds(i * piece.depth, piece.depth)
            x = x_ref[share.token, depth]  # [R depth]
            gate_sum = gate_sum + _product(gate_ref[layer, share.expert, depth, columns], x)
            return gate_sum, up_sum + _product(up_ref[layer, share.expert, depth, columns], x)

        zero = jnp.zeros((piece.columns, len(share.token)), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // piece.depth, take_depth, (zero, zero))
        chose_it = sum(chose.astype(jnp.int32) for chose in share.chose) > 0
        store_rows(hidden_ref, share.pair, columns, activate(gate, up).T, chose_it, interpret)


def _out_kernel(layer_ref, ids_ref, hidden_ref, down_ref, out_ref, *, piece: Piece, interpret: bool):
    share, columns = _share(ids_ref), pl.ds(pl.program_id(0) * piece.columns, piece.columns)
    num_chosen = ids_ref.shape[1]

    @pl.when(share.is_first)
    def _():
        layer = layer_ref[0]

        def take_depth(i, out):
            depth = pl.ds(i * piece.depth, piece.depth)
            return out + _product(down_ref[layer, share.expert, depth, columns], hidden_ref[share.pair, depth])

        zero = jnp.zeros((piece.columns, len(share.token)), jnp.float32)
        out = jax.lax.fori_loop(0, hidden_ref.shape[1] // piece.depth, take_depth, zero).T  # [R columns]
        for choice, chose in enumerate(share.chose):  # a token may have chosen an expert twice
            store_rows(out_ref, share.token * num_chosen + choice, columns, out, chose, interpret)


def _product(weight: Float[Array, "depth W"], rows: Float[Array, "R depth"]) -> Float[Array, "W R"]:
    """Columns by rows: the side of which tensor cores want 64 at once is the weights', where there are so many."""
    return dot(weight, rows, transpose_a=True, transpose=True)
