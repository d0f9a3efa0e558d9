"""Gate, up and down projections of routed experts in two Triton kernels, for so few tokens that reading weights is all.

A program takes one pair of a token and an expert, and a piece of the output's columns. The first pair of an expert
takes all tokens of the call through it and writes those that chose it; programs of its other pairs end at once. So each
weight is read once, by one of hundreds of programs, and no pair has to be sorted before. An expert that all tokens
share has programs of its own, before those of the pairs.

In M3's sizes::

  pair p: expert e = ids[p] ── is an earlier pair's ── the program ends
                            └─ is not ── x [all tokens of the call, 128 of 6,144] ── walks ──┐
                 gate, up of e in the stack ── [128, 64 columns] each ── walk ────────────── ┴── hidden of pairs with e
                                               down of e ── [64, 128 columns] ── walk ────────── out of pairs with e
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.few_experts import Call
from pallas_kernels.numbers import power_of_two
from pallas_kernels.triton_common import div, dot_columns, rem, store_rows
from pallas_kernels.triton_experts import Piece

_LEAST_ROWS = 16  # tokens of a product on tensor cores


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece of both products."""

    hidden: Piece  # of gate and of up each
    out: Piece


LIMITS = Limits(config=Config)


def run(call: Call, config: Config | None) -> Float[Array, "X C D"]:
    """Run `few_experts` on a checked call.

    Raises:
      ValueError: widths that are not whole pieces of a program.
    """
    (width, hidden_width), (num_tokens, num_chosen) = call.gate.shape[2:], call.expert_ids.shape
    config = default_config(call.gate.dtype, call.gate.shape[2:], call.expert_ids.size) if config is None else config
    layer = call.layer.reshape(1).astype(jnp.int32)
    shared, has_shared = call.shared, call.shared is not None
    num_choices = num_chosen + has_shared
    num_runs = call.expert_ids.size + has_shared  # of an expert for its tokens; those that are not needed end
    hidden = pl.pallas_call(
        partial(_hidden_kernel, activate=call.activate, piece=config.hidden, interpret=call.interpret),
        grid=(config.hidden.count(width, hidden_width), num_runs),
        out_shape=jax.ShapeDtypeStruct((num_tokens * num_choices, hidden_width), call.x.dtype),
        compiler_params=config.hidden.compiler_params,
        interpret=call.interpret,
        name="few_experts_hidden",
    )(layer, call.expert_ids, call.x, (call.gate, call.up), (shared.gate, shared.up) if has_shared else None)
    out = pl.pallas_call(
        partial(_out_kernel, piece=config.out, interpret=call.interpret),
        grid=(config.out.count(hidden_width, width), num_runs),
        out_shape=jax.ShapeDtypeStruct((num_tokens * num_choices, width), jnp.float32),
        compiler_params=config.out.compiler_params,
        interpret=call.interpret,
        name="few_experts_out",
    )(layer, call.expert_ids, hidden, call.down, shared.down if has_shared else None)
    return out.reshape(num_tokens, num_choices, width)


def default_config(dtype: jax.typing.DTypeLike, widths: tuple[int, int], num_pairs: int) -> Config:
    """Return the sizes that were fastest among those that fit in shared memory and divide the widths."""
    if jnp.dtype(dtype).itemsize == 4:
        return Config(Piece(64, 64, 4, 2), Piece(64, 64, 4, 2))
    if any(width % 128 for width in widths):
        return Config(Piece(64, 64, 4, 4), Piece(64, 64, 4, 4))
    if 1 < num_pairs <= 8:
        # A device's part of an expert has fewer columns: in narrower pieces there are enough programs for all of a GPU.
        programs = num_pairs * (widths[1] // 128)
        narrow = Piece(64, 32, 4, 8) if programs >= 48 else Piece(64, 128, 4, 4)
        return Config(Piece(128, 32, 4, 5) if programs >= 96 else narrow, Piece(128, 32, 4, 5))
    return Config(Piece(64, 128, 4, 4), Piece(128, 64, 8, 5))


class _Share(NamedTuple):
    """The rows that a program multiplies with the weights of its pair's expert, or of the shared expert.

    Of all pairs with one expert only the first one's program works, so that each expert is read once.

    A token has a row of hidden values and of outputs for each choice; the shared expert's is the last.
    """

    expert: Int[Array, ""]
    is_first: Bool[Array, ""]
    is_shared: Bool[Array, ""] | bool
    token: Int[Array, " R"]  # of each row of the products; rows behind the last token repeat it
    place: Int[Array, " R"]  # the row of each token's hidden values: that of its first choice of the expert, else any
    chose: Sequence[Bool[Array, " R"]]  # for each of a token's choices, whether it is the expert


def _share(ids_ref, has_shared: bool) -> _Share:
    num_tokens, num_chosen = ids_ref.shape
    num_choices = num_chosen + has_shared
    is_shared = (pl.program_id(1) == 0) if has_shared else False
    own_pair = jnp.maximum(pl.program_id(1) - has_shared, 0)
    expert = ids_ref[div(own_pair, num_chosen), rem(own_pair, num_chosen)]
    row = jnp.arange(max(_LEAST_ROWS, power_of_two(num_tokens)), dtype=jnp.int32)
    token, is_token = jnp.minimum(row, num_tokens - 1), row < num_tokens
    chose = [is_token & (ids_ref[token, choice] == expert) for choice in range(num_chosen)]
    place, is_taken = token * num_choices, jnp.zeros_like(token)
    for choice in reversed(range(num_chosen)):
        place = jnp.where(chose[choice], token * num_choices + choice, place)
        is_earlier = token * num_chosen + choice < own_pair
        is_taken = is_taken | (chose[choice] & is_earlier).astype(jnp.int32)
    is_first = (expert >= 0) & (jnp.max(is_taken) == 0)
    if has_shared:
        place = jnp.where(is_shared, token * num_choices + num_chosen, place)
        chose = [*(some & ~is_shared for some in chose), is_token & is_shared]
        is_first = is_first & ~is_shared
    return _Share(expert, is_first, is_shared, token, place, chose)


def _hidden_kernel(
    layer_ref,
    ids_ref,
    x_ref,
    experts: tuple[Any, Any],
    shared: tuple[Any, Any] | None,
    hidden_ref,
    *,
    activate: Callable[[Array, Array], Array],
    piece: Piece,
    interpret: bool,
):
    columns = pl.ds(pl.program_id(0) * piece.columns, piece.columns)
    share, layer = _share(ids_ref, shared is not None), layer_ref[0]

    def run(gate_ref, up_ref, *where):
        def take_depth(i, sums):
            gate_sum, up_sum = sums
            depth = pl.ds(i * piece.depth, piece.depth)
            x = x_ref[share.token, depth]  # [R depth]
            gate_sum = gate_sum + dot_columns(gate_ref[(*where, depth, columns)], x)
            return gate_sum, up_sum + dot_columns(up_ref[(*where, depth, columns)], x)

        zero = jnp.zeros((piece.columns, len(share.token)), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // piece.depth, take_depth, (zero, zero))
        chose_it = sum(chose.astype(jnp.int32) for chose in share.chose) > 0
        store_rows(hidden_ref, share.place, columns, activate(gate, up).T, chose_it, interpret)

    pl.when(share.is_first)(lambda: run(*experts, layer, share.expert))
    if shared is not None:
        pl.when(share.is_shared)(lambda: run(*shared, layer))


def _out_kernel(layer_ref, ids_ref, hidden_ref, down_ref, shared_ref, out_ref, *, piece: Piece, interpret: bool):
    columns = pl.ds(pl.program_id(0) * piece.columns, piece.columns)
    share, layer = _share(ids_ref, shared_ref is not None), layer_ref[0]

    def run(weight_ref, *where):
        def take_depth(i, out):
            depth = pl.ds(i * piece.depth, piece.depth)
            return out + dot_columns(weight_ref[(*where, depth, columns)], hidden_ref[share.place, depth])

        zero = jnp.zeros((piece.columns, len(share.token)), jnp.float32)
        out = jax.lax.fori_loop(0, hidden_ref.shape[1] // piece.depth, take_depth, zero).T  # [R columns]
        for choice, chose in enumerate(share.chose):  # a token may have chosen an expert twice
            store_rows(out_ref, share.token * len(share.chose) + choice, columns, out, chose, interpret)

    pl.when(share.is_first)(lambda: run(down_ref, layer, share.expert))
    if shared_ref is not None:
        pl.when(share.is_shared)(lambda: run(shared_ref, layer))
