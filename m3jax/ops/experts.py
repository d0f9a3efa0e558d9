"""What the chosen experts make of each token: several ways to compute one sum, and the choice among them.

Every way takes tokens [X D], the stacked weights of all layers, the experts that each token chose [X A], the layer, and
the activation. It gives [X A D] in the accumulator's dtype: what each pair's expert makes of its token. No pair is
dropped. An id of -1 is an expert that is not held here; what stands in its place may be anything.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax.msa.inversion import invert
from m3jax.mxfp8 import BLOCK, MXFP8Array
from m3jax.numerics import accumulator
from m3jax.ops.backends import interpreted
from m3jax.ops.project import operands, project
from m3jax.platform import platform

Activation = Callable[[Float[Array, "..."], Float[Array, "..."]], Float[Array, "..."]]

_FEW_PAIRS = 16  # (token, expert) pairs up to which each pair fetches its own expert's weights
_MOST_SHARES = 4  # where devices divide experts, skipped pairs cost little: up to 4 x _FEW_PAIRS are walked
_TILE = 64  # tokens that meet an expert at once on a CPU
_KERNEL_TILES = (16, 32, 64)  # likewise in a kernel: as many as an expert has, on average
_FIXED_TILE = 8  # likewise where a pair's bits may not depend on how many there are
_COPIED_TILE = 512  # likewise where experts are copied: more than an expert is wide, so its copies are the smaller part


class ExpertWeights(NamedTuple):
    """Projections of the experts of a stack of layers; in MXFP8, a way reads the codes and scales of those chosen."""

    gate: Float[Array, "L E D F"] | MXFP8Array
    up: Float[Array, "L E D F"] | MXFP8Array
    down: Float[Array, "L E F D"] | MXFP8Array


def run_experts(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
    *,
    path: str = "auto",
    backend: str = "auto",
    num_shares: int | None = None,
) -> Float[Array, "X A D"]:
    """What each pair's expert makes of its token, in the way that suits the platform and the number of pairs.

    Args:
      x: tokens.
      weights: of the experts that this device holds, of all layers of a stack.
      expert_ids: the experts that each token chose; -1 for one that another device holds.
      layer: which layer of the stack.
      activate: of gate and up, element by element.
      path: "auto", or one of `EXPERT_PATHS`.
      backend: where kernels are not wanted, "xla".
      num_shares: where devices divide the experts, how many do.
    """
    if path != "auto":
        return EXPERT_PATHS[path](x, weights, expert_ids, layer, activate)
    where, num_pairs, is_divided = platform(), expert_ids.size, num_shares is not None
    is_few = num_pairs <= _FEW_PAIRS * min(num_shares or 1, _MOST_SHARES)
    if where == "gpu":
        by_kernel = kernel_takes(weights) and kernel_runs_experts(x.dtype, *weights.gate.shape[2:], backend=backend)
        is_mxfp8 = isinstance(weights.gate, MXFP8Array)
        if num_pairs <= _FEW_PAIRS and not (is_mxfp8 and by_kernel):
            return gathered(x, weights, expert_ids, layer, activate)
        return (grouped if by_kernel else tiled)(x, weights, expert_ids, layer, activate)
    if where == "tpu" and not is_few:
        return ragged(x, weights, expert_ids, layer, activate)
    if where == "tpu" and not is_divided:
        return gathered(x, weights, expert_ids, layer, activate)
    if is_few:
        return one_by_one(x, weights, expert_ids, layer, activate, skips_absent=is_divided)
    return tiled(x, weights, expert_ids, layer, activate)


def gathered(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
) -> Float[Array, "X A D"]:
    """A few tokens: each pair reads its expert's weights, all at once."""
    gate, up, down = (w[layer, expert_ids] for w in weights)  # [X A D F] twice, [X A F D]
    hidden = activate(project("xd,xadf->xaf", x, gate), project("xd,xadf->xaf", x, up))
    # Else XLA computes the activation again for every element of `down`: 1 ms instead of 0.05 at M3's widths.
    return project("xaf,xafd->xad", jax.lax.optimization_barrier(hidden), down)


def one_by_one(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
    skips_absent: bool = False,
) -> Float[Array, "X A D"]:
    """A few tokens: one pair after the other, whose weights then stay in the cache of a CPU's core."""

    def run_pair(token, expert):
        gate = project("d,df->f", token, weights.gate[layer, expert])
        up = project("d,df->f", token, weights.up[layer, expert])
        return project("f,fd->d", activate(gate, up), weights.down[layer, expert])

    def skip_pair(token, expert):
        return jnp.zeros(token.shape, accumulator(token.dtype))

    def step(_, pair):
        token, expert = pair
        if not skips_absent:
            return None, run_pair(token, expert)
        return None, jax.lax.cond(expert >= 0, run_pair, skip_pair, token, expert)

    tokens = jnp.repeat(x, expert_ids.shape[1], axis=0)  # [X*A D]
    _, out = jax.lax.scan(step, None, (tokens, expert_ids.reshape(-1)))
    return out.reshape(*expert_ids.shape, -1)  # [X A D]


def ragged(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
) -> Float[Array, "X A D"]:
    """Many tokens on a TPU: sort the pairs by expert, three ragged products, sort back."""
    # ragged_dot can be vmapped only with all its operands batched, so the weights follow the choice of experts.
    gate, up, down = (w[layer + 0 * expert_ids[0, 0]] for w in weights)  # [E D F] twice, [E F D]
    num_experts = gate.shape[0]
    sort_key = jnp.where(expert_ids < 0, num_experts, expert_ids).reshape(-1)  # what is not held comes last
    order = jnp.argsort(sort_key, stable=True)  # [X*A]
    sizes = jnp.bincount(sort_key, length=num_experts).astype(jnp.int32)  # [E]
    # A TPU multiplies 16-bit numbers exactly, and refuses to be told so.
    precision = None if x.dtype.itemsize == 2 else "highest"

    def product(rows, weight):
        rows, weight = operands(rows, weight)
        dtype = accumulator(rows.dtype)
        return jax.lax.ragged_dot(rows, weight, sizes, precision=precision, preferred_element_type=dtype)

    tokens = x[order // expert_ids.shape[1]]  # [X*A D], by expert
    out = product(activate(product(tokens, gate), product(tokens, up)), down)
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*expert_ids.shape, -1)


def tiled(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
) -> Float[Array, "X A D"]:
    """Many tokens on a CPU or GPU, where XLA computes a ragged product as a dense one per expert: tiles of tokens.

    The same inversion as attention's: token -> experts becomes expert -> tokens.
    """
    num_experts = weights.gate.shape[1]
    tile = min(_TILE, max(8, expert_ids.size // num_experts))
    tiles = invert(expert_ids[None, None], num_experts, tile)

    def run_tile(expert, token_ids, valid):
        tokens = x[token_ids]  # [C D]
        gate = project("cd,df->cf", tokens, weights.gate[layer, expert])
        up = project("cd,df->cf", tokens, weights.up[layer, expert])
        return project("cf,fd->cd", activate(gate, up), weights.down[layer, expert])

    def idle(expert, token_ids, valid):
        return jnp.zeros((tile, x.shape[1]), accumulator(x.dtype))

    def step(_, expert_tile):
        *_, valid = expert_tile
        return None, jax.lax.cond(jnp.any(valid), run_tile, idle, *expert_tile)

    _, out = jax.lax.scan(step, None, (tiles.block, tiles.query, tiles.valid))  # [tiles C D]
    return out.reshape(-1, x.shape[1])[tiles.place_of[0, 0]]  # [X A D]


def in_fixed_tiles(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
) -> Float[Array, "X A D"]:
    """The same bits for a pair whatever other pairs there are: `tiled` in tiles of one size, with its gradients.

    The loop ends with the last tile that some expert filled; a compiler does not know how long it is (`m3jax.tiles`).
    """
    from pallas_kernels.gradient import with_gradient

    def forward(x, gate, up, down, expert_ids, layer):
        tiles = invert(expert_ids[None, None], gate.shape[1], _FIXED_TILE)

        def run_tile(index, out):
            expert, tokens = tiles.block[index], x[tiles.query[index]]  # [C D]
            hidden = activate(
                project("cd,df->cf", tokens, gate[layer, expert]), project("cd,df->cf", tokens, up[layer, expert])
            )
            one_tile = project("cf,fd->cd", hidden, down[layer, expert])
            return jax.lax.dynamic_update_index_in_dim(out, one_tile, index, 0)

        out = jnp.zeros((len(tiles.block), _FIXED_TILE, x.shape[1]), accumulator(x.dtype))
        used_tiles = jnp.sum(jnp.any(tiles.valid, axis=1), dtype=jnp.int32)
        out = jax.lax.fori_loop(0, used_tiles, run_tile, out)  # [tiles C D]
        return out.reshape(-1, x.shape[1])[tiles.place_of[0, 0]]  # [X A D]

    def differentiable(x, gate, up, down, expert_ids, layer):
        return tiled(x, ExpertWeights(gate, up, down), expert_ids, layer, activate)

    return with_gradient(forward, differentiable, 4)(x, *weights, expert_ids, layer)


def grouped(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
) -> Float[Array, "X A D"]:
    """Many tokens on a GPU: a kernel, with the gradients of `tiled`. Training has another way, `copied`.

    Experts in MXFP8 go this way with few tokens too: what XLA gathers it would write as 16-bit numbers, and read again.
    """
    from pallas_kernels.gradient import with_gradient
    from pallas_kernels.grouped_experts import grouped_experts
    from pallas_kernels.mxfp8_experts import Weights, mxfp8_experts

    def by_kernel(x, gate, up, down, expert_ids, layer):
        num_experts = gate.shape[1]
        tokens_per_expert = expert_ids.size // num_experts
        tile = next((size for size in _KERNEL_TILES if size >= tokens_per_expert), _KERNEL_TILES[-1])
        tiles = invert(expert_ids[None, None], num_experts, tile)
        kernel = grouped_experts
        if isinstance(gate, MXFP8Array):
            kernel, (gate, up, down) = mxfp8_experts, (Weights(w.codes, w.scales) for w in (gate, up, down))
        out = kernel(
            x, gate, up, down, layer, tiles.block, tiles.query, tiles.valid,
            activate=activate, interpret=interpreted(), backend="triton",
        )  # fmt: skip
        return out.reshape(-1, x.shape[1])[tiles.place_of[0, 0]]  # [X A D]

    def by_xla(x, gate, up, down, expert_ids, layer):
        return tiled(x, ExpertWeights(gate, up, down), expert_ids, layer, activate)

    return with_gradient(by_kernel, by_xla, 4)(x, weights.gate, weights.up, weights.down, expert_ids, layer)


def copied(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
) -> Float[Array, "X A D"]:
    """Training on a GPU, which has the memory: one batched product over tiles, each with a copy of its expert."""
    gate, up, down = (w[layer] for w in weights)  # [E D F] twice, [E F D]
    tiles = invert(expert_ids[None, None], gate.shape[0], min(_COPIED_TILE, expert_ids.size))
    tokens = x[tiles.query]  # [tiles C D]
    into_hidden = lambda weight: project("xcd,xdf->xcf", tokens, weight[tiles.block])
    out = project("xcf,xfd->xcd", activate(into_hidden(gate), into_hidden(up)), down[tiles.block])
    return out.reshape(-1, x.shape[1])[tiles.place_of[0, 0]]  # [X A D]


EXPERT_PATHS = {
    "gathered": gathered,
    "one_by_one": one_by_one,
    "ragged": ragged,
    "tiled": tiled,
    "grouped": grouped,
    "copied": copied,
    "in_fixed_tiles": in_fixed_tiles,
}


def kernel_takes(weights: ExpertWeights) -> bool:
    """Whether `grouped` can read these weights.

    Not MXFP8 whose activations are quantised too, or with a block that is not whole, or in between 2 and 4 GiB.
    """
    from pallas_kernels.numbers import can_reach

    if not isinstance(weights.gate, MXFP8Array):
        return True
    is_whole = all(width % BLOCK == 0 for width in weights.gate.shape[2:])
    return weights.gate.activations is None and is_whole and can_reach(prod(weights.gate.shape))


def kernel_runs_experts(dtype: DTypeLike, *widths: int, backend: str = "auto") -> bool:
    """Whether `grouped` can run: 16-bit numbers, widths in whole pieces, on one GPU whose backend is not "xla".

    There is nothing to ask for by name: what a kernel cannot take, XLA's tiles do.
    """
    is_gpu = platform() == "gpu" or bool(interpreted())
    is_wanted = backend in ("auto", "triton")
    return is_gpu and is_wanted and jnp.dtype(dtype).itemsize == 2 and not any(width % 128 for width in widths)
