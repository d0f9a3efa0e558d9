"""The outputs of the chosen experts for each token: several ways to compute one sum, and the choice among them.

A path takes an `ExpertCall`, and gives [X A D] in the accumulator's dtype: what each pair's expert makes of its token.
No pair is dropped. An id of -1 is an expert that is not held here; what stands in its place may be anything.
`choose_path` says which path runs a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from m3jax.branches import on_one_device_of
from m3jax.msa.inversion import Tiles, invert
from m3jax.mxfp8 import MXFP8Array
from m3jax.numerics import accumulator, einsum
from m3jax.ops import measured
from m3jax.ops.backends import check_backend_name, choose, interpreted, kernels_here, why_not
from m3jax.ops.cases import ExpertsCase, Stored
from m3jax.ops.project import operands, project
from m3jax.platform import platform
from m3jax.weights import StackedLayer, Weight

Activation = Callable[[Float[Array, "..."], Float[Array, "..."]], Float[Array, "..."]]

_FIXED_TILE = 8  # tokens that meet an expert at once where a pair's bits may not depend on how many there are


class ExpertWeights(NamedTuple):
    """Projections of the experts of a stack of layers; in MXFP8, a way reads the codes and scales of those chosen."""

    gate: Float[Array, "L E D F"] | MXFP8Array
    up: Float[Array, "L E D F"] | MXFP8Array
    down: Float[Array, "L E F D"] | MXFP8Array


@dataclass(frozen=True)
class ExpertCall:
    """The experts that each token of a call chose.

    Attributes:
      x: tokens.
      weights: of the experts that this device holds, of all layers of a stack.
      expert_ids: the experts that each token chose; -1 for one that another device holds.
      layer: which layer of the stack.
      activate: of gate and up, element by element.
      num_shares: where devices divide the experts, how many do.
      shared: gate, up and down of an expert that all tokens meet, if it is to be run with the others (`joins_shared`).
    """

    x: Float[Array, "X D"]
    weights: ExpertWeights
    expert_ids: Int[Array, "X A"]
    layer: Int[Array, ""]
    activate: Activation
    num_shares: int | None = None
    shared: Sequence[StackedLayer] = ()

    @property
    def num_pairs(self) -> int:
        """Number of (token, expert) pairs."""
        return self.expert_ids.size

    @property
    def num_chosen(self) -> int:
        """A, experts of a token."""
        return self.expert_ids.shape[1]

    @property
    def is_mxfp8(self) -> bool:
        """True if the weights are codes and scales."""
        return isinstance(self.weights.gate, MXFP8Array)


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
    shared: Sequence[StackedLayer] = (),
) -> Float[Array, "X C D"]:
    """Return each (token, expert) pair's output, computed in the way that suits the platform and the number of pairs.

    Args:
      x, weights, expert_ids, layer, activate, num_shares, shared: as of `ExpertCall`.
      path: "auto"; "trained", for the one whose gradients are fastest; or one of `EXPERT_PATHS`.
      backend: where kernels are not wanted, "xla".

    Returns:
      C = A, or A + 1 with a shared expert, whose outputs come last.

    Raises:
      ValueError: a path that is asked for by name and cannot run this, with the reason.
    """
    call = ExpertCall(x, weights, expert_ids, layer, activate, num_shares, shared)
    chosen, _ = choose_path(call, path, backend)
    return _PATHS[chosen](call)


def gathered(call: ExpertCall) -> Float[Array, "X A D"]:
    """Compute the pairs of a few tokens, all at once: each reads its expert's weights."""
    x, gate, up, down = call.x, *(w[call.layer, call.expert_ids] for w in call.weights)  # [X A D F] twice, [X A F D]
    hidden = call.activate(project("xd,xadf->xaf", x, gate), project("xd,xadf->xaf", x, up))
    # Else XLA computes the activation again for every element of `down`: 1 ms instead of 0.05 at M3's widths.
    return project("xaf,xafd->xad", jax.lax.optimization_barrier(hidden), down)


def one_by_one(call: ExpertCall) -> Float[Array, "X A D"]:
    """Compute the pairs of a few tokens one after the other: a pair's weights stay in the cache of a CPU's core.

    Where devices divide the experts each skips the pairs of the others' experts.
    """
    weights, layer, num_shares = call.weights, call.layer, call.num_shares or 1

    def run_pair(token, expert):
        gate = project("d,df->f", token, weights.gate[layer, expert])
        up = project("d,df->f", token, weights.up[layer, expert])
        return project("f,fd->d", call.activate(gate, up), weights.down[layer, expert])

    def skip_pair(token, expert):
        return jnp.zeros(token.shape, accumulator(token.dtype))

    def step(_, pair):
        token, expert = pair
        # 16-bit weights are read inside a branch even where no expert is absent: outside of one XLA's CPU backend makes
        # 32-bit numbers of the experts of all layers, once a call, into memory of twice their size.
        if num_shares > 1 or is_narrow:
            with on_one_device_of(num_shares):
                return None, jax.lax.cond(expert >= 0, run_pair, skip_pair, token, expert)
        return None, run_pair(token, expert)

    is_narrow = not call.is_mxfp8 and weights.gate.dtype != accumulator(call.x.dtype)
    tokens = jnp.repeat(call.x, call.num_chosen, axis=0)  # [X*A D]
    _, out = jax.lax.scan(step, None, (tokens, call.expert_ids.reshape(-1)))
    return out.reshape(*call.expert_ids.shape, -1)  # [X A D]


def ragged(call: ExpertCall) -> Float[Array, "X A D"]:
    """Compute the pairs of many tokens on a TPU: sort them by expert, three ragged products, sort back."""
    x, expert_ids = call.x, call.expert_ids
    # ragged_dot can be vmapped only with all its operands batched, so the weights follow the choice of experts.
    gate, up, down = (w[call.layer + 0 * expert_ids[0, 0]] for w in call.weights)  # [E D F] twice, [E F D]
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

    tokens = x[order // call.num_chosen]  # [X*A D], by expert
    out = product(call.activate(product(tokens, gate), product(tokens, up)), down)
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*expert_ids.shape, -1)


def sums_in_tiles(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    pair_weights: Float[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
    most_pairs: int,
) -> Float[Array, "X D"]:
    """Return the weighted sums of the pairs that a device computes, of many tokens on a TPU, by a kernel.

    No more is gathered, and no more outputs are written, than there are places for pairs of this device; an expert's
    matrices are read where they lie, once for each tile of its tokens.

    Args:
      x, weights, layer, activate: as of `run_experts`.
      expert_ids: the experts that each token chose; -1 for one that another device holds.
      pair_weights: of these experts in the sum.
      most_pairs: of them, at most so many are held here.
    """
    from pallas_kernels.expert_tiles import expert_tiles

    num_experts, num_tokens = weights.gate.shape[1], len(x)
    tile = measured.TPU_EXPERT_TILE
    tiles = invert(expert_ids[None, None], num_experts, tile)
    # Tiles come in order of their experts, those without a pair last.
    most_tiles = min(len(tiles.block), most_pairs // tile + num_experts)
    expert, token, pair, valid = (y[:most_tiles] for y in (tiles.block, tiles.query, tiles.pair, tiles.valid))
    used = jnp.sum(jnp.any(valid, axis=1), dtype=jnp.int32)
    weighted = expert_tiles(  # [Y C D]
        x[token], *weights, layer, expert, used, pair_weights.reshape(-1)[pair],
        activate=activate, interpret=interpreted(), backend="mosaic_tpu",
    )  # fmt: skip
    # What stands in a place without a pair may be anything: its target lies behind the last token, and is dropped.
    target = jnp.where(valid, token, num_tokens).reshape(-1)  # [Y*C]
    # Put in order here, where places without a pair are left out: XLA would order all places.
    order = jnp.argsort(target, stable=True)[:most_pairs]
    weighted = weighted.reshape(-1, x.shape[-1])[order]  # [p D]
    sums = jnp.zeros((num_tokens, x.shape[-1]), weighted.dtype)
    return sums.at[target[order]].add(weighted, mode="drop", indices_are_sorted=True)


def tiled(call: ExpertCall) -> Float[Array, "X A D"]:
    """Compute the pairs of many tokens in tiles, each of tokens that chose one expert.

    For a CPU or GPU, where XLA computes a ragged product as a dense one per expert. The inversion is attention's: token
    -> experts becomes expert -> tokens.
    """
    x, layer, num_experts = call.x, call.layer, call.weights.gate.shape[1]
    tile = min(measured.CPU_TILE, max(8, call.num_pairs // num_experts))
    tiles = invert(call.expert_ids[None, None], num_experts, tile)

    def run_tile(expert, token_ids, valid):
        tokens = x[token_ids]  # [C D]
        gate = project("cd,df->cf", tokens, call.weights.gate[layer, expert])
        up = project("cd,df->cf", tokens, call.weights.up[layer, expert])
        return project("cf,fd->cd", call.activate(gate, up), call.weights.down[layer, expert])

    def idle(expert, token_ids, valid):
        return jnp.zeros((tile, x.shape[1]), accumulator(x.dtype))

    def step(_, expert_tile):
        *_, valid = expert_tile
        return None, jax.lax.cond(jnp.any(valid), run_tile, idle, *expert_tile)

    _, out = jax.lax.scan(step, None, (tiles.block, tiles.query, tiles.valid))  # [tiles C D]
    return _outputs_of_pairs(out, tiles)


def in_fixed_tiles(call: ExpertCall) -> Float[Array, "X A D"]:
    """Compute `tiled` in tiles of one size, so that a pair has the same bits whatever other pairs there are.

    The loop ends with the last tile that some expert filled; a compiler does not know how long it is (`m3jax.tiles`).
    """

    def forward(x, gate, up, down, expert_ids, layer):
        tiles = invert(expert_ids[None, None], gate.shape[1], _FIXED_TILE)

        def run_tile(index, out):
            expert, tokens = tiles.block[index], x[tiles.query[index]]  # [C D]
            hidden = call.activate(
                project("cd,df->cf", tokens, gate[layer, expert]), project("cd,df->cf", tokens, up[layer, expert])
            )
            one_tile = project("cf,fd->cd", hidden, down[layer, expert])
            return jax.lax.dynamic_update_index_in_dim(out, one_tile, index, 0)

        out = jnp.zeros((len(tiles.block), _FIXED_TILE, x.shape[1]), accumulator(x.dtype))
        used_tiles = jnp.sum(jnp.any(tiles.valid, axis=1), dtype=jnp.int32)
        out = jax.lax.fori_loop(0, used_tiles, run_tile, out)  # [tiles C D]
        return _outputs_of_pairs(out, tiles)

    return _with_gradient_of_tiled(forward, call)


def few(call: ExpertCall) -> Float[Array, "X C D"]:
    """Compute the pairs of a few tokens on a GPU by a kernel that reads each chosen expert once.

    Gradients are those of `tiled`. Experts in MXFP8 go to `grouped`, whose kernel knows few tokens too.
    """
    if call.is_mxfp8:
        return grouped(call)
    from pallas_kernels.few_experts import SharedExpert, few_experts
    from pallas_kernels.gradient import with_gradient

    def by_kernel(x, weights, shared, expert_ids, layer):
        together = SharedExpert(*shared) if shared else None
        options = dict(activate=call.activate, shared=together, backend="triton", interpret=interpreted())
        return few_experts(x, *weights, layer, expert_ids, **options)

    def by_xla(x, weights, shared, expert_ids, layer):
        out = tiled(replace(call, x=x, weights=weights, expert_ids=expert_ids, layer=layer))
        if not shared:
            return out
        gate, up, down = (stack[layer] for stack in shared)
        hidden = call.activate(project("xd,df->xf", x, gate), project("xd,df->xf", x, up))
        return jnp.concatenate([out, project("xf,fd->xd", hidden, down)[:, None]], axis=1)

    stacks = tuple(matrix.stack for matrix in call.shared)
    return with_gradient(by_kernel, by_xla, 3)(call.x, call.weights, stacks, call.expert_ids, call.layer)


def grouped(call: ExpertCall, least_tile: int = 1) -> Float[Array, "X A D"]:
    """Compute the pairs of many tokens on a GPU by a kernel, with the gradients of `tiled`; training has `copied`.

    Experts in MXFP8 go this way with few tokens too: what XLA gathers it would write as 16-bit numbers, and read again.
    In tiles of at least 64 a pair's bits are the same whatever other pairs there are: a program walks an expert's width
    for one tile, in one order.
    """
    from pallas_kernels.grouped_experts import grouped_experts
    from pallas_kernels.mxfp8_experts import Weights, mxfp8_experts
    from pallas_kernels.mxfp8_grouped import mxfp8_grouped

    num_experts, options = call.weights.gate.shape[1], dict(activate=call.activate, interpret=interpreted())
    num_pairs, num_chosen = call.num_pairs, call.num_chosen
    tokens_per_expert = num_pairs // num_experts

    def tile_of(sizes: tuple[int, ...], wanted: int) -> int:
        """Return the smallest size that is as large as wanted; the largest where none is."""
        return next((size for size in sizes if size >= wanted), sizes[-1])

    def by_kernel(x, gate, up, down, expert_ids, layer):
        # Twice the average, so that few experts need a second tile and are read by it again.
        wanted = max(2 * tokens_per_expert, least_tile)
        sizes = measured.MXFP8_MOSAIC_TILES if is_mosaic else measured.KERNEL_TILES
        tiles = invert(expert_ids[None, None], num_experts, tile_of(sizes, wanted))
        count = jnp.sum(tiles.valid, axis=1, dtype=jnp.int32)
        return kernel_of_pairs(
            x, gate, up, down, layer, tiles.block, tiles.pair, count,
            num_chosen=num_chosen, backend="mosaic_gpu" if is_mosaic else "triton", **options,
        )  # fmt: skip

    def by_mxfp8_kernel(x, gate, up, down, expert_ids, layer):
        kept = [Weights(weight.codes, weight.scales) for weight in (gate, up, down)]
        if kernel_of_pairs is mxfp8_grouped:
            return by_kernel(x, *kept, expert_ids, layer)
        run = partial(mxfp8_experts, x, *kept, layer, backend=kernels_here("auto"), **options)
        # A GPU finds in its cache what the pair before has read of the same expert.
        most_pairs = num_experts * 3 // 2 if kernels_here("auto") == "triton" else measured.FEW_PAIRS
        if num_pairs <= most_pairs and least_tile == 1:
            token = jnp.arange(num_pairs, dtype=jnp.int32)[:, None] // num_chosen  # [X*A 1]
            expert, valid = jnp.maximum(expert_ids, 0).reshape(-1), expert_ids.reshape(-1, 1) >= 0
            return run(expert, token, valid).reshape(*expert_ids.shape, -1)
        wanted = max(tokens_per_expert, least_tile)
        tiles = invert(expert_ids[None, None], num_experts, tile_of(measured.MXFP8_TILES, wanted))
        out = run(tiles.block, tiles.query, tiles.valid)
        return _outputs_of_pairs(out, tiles)

    def runs(path: str) -> bool:
        """Return True if a kernel of many tokens runs; in the invariant mode bits may not depend on which one does."""
        case = replace(experts_case(path, call.x, call.weights.gate), expert_pairs=num_pairs / num_experts)
        return least_tile == 1 and choose(case) != "xla"

    is_mosaic = runs("mxfp8_mosaic")
    kernel_of_pairs = mxfp8_grouped if is_mosaic or runs("mxfp8_grouped") else grouped_experts
    return _with_gradient_of_tiled(by_mxfp8_kernel if call.is_mxfp8 else by_kernel, call)


def _with_gradient_of_tiled(kernel: Callable[..., Float[Array, "X A D"]], call: ExpertCall) -> Float[Array, "X A D"]:
    """Return a kernel's outputs with the gradients of `tiled`, which computes the same."""
    from pallas_kernels.gradient import with_gradient

    def by_xla(x, gate, up, down, expert_ids, layer):
        weights = ExpertWeights(gate, up, down)
        return tiled(replace(call, x=x, weights=weights, expert_ids=expert_ids, layer=layer))

    return with_gradient(kernel, by_xla, 4)(call.x, *call.weights, call.expert_ids, call.layer)


def copied(call: ExpertCall) -> Float[Array, "X A D"]:
    """Compute the pairs of a training step by one batched product over tiles, each with a copy of its expert.

    For a GPU, which has the memory.
    """
    tiles = invert(call.expert_ids[None, None], call.weights.gate.shape[1], min(measured.COPIED_TILE, call.num_pairs))

    def product(rows, weight):
        return project("xck,xkn->xcn", rows, _of_each_tile(weight, tiles.block))

    return _with_gradients_of_tiles(product, tiles, call)


def products(call: ExpertCall) -> Float[Array, "X A D"]:
    """Compute the pairs of a training step on a GPU by kernels that read a tile's expert where it lies.

    Its gradients are products by kernels too: no expert is copied for a tile, as `copied` does.
    """
    num_experts = call.weights.gate.shape[1]
    tiles = invert(call.expert_ids[None, None], num_experts, measured.PRODUCT_TILE)
    is_of_expert = tiles.block == jnp.arange(num_experts)[:, None]  # [E Y]
    count = jnp.sum(is_of_expert & jnp.any(tiles.valid, axis=1), axis=1, dtype=jnp.int32)
    groups = _Groups(tiles.block, jnp.sum(count, dtype=jnp.int32), jnp.cumsum(count, dtype=jnp.int32) - count, count)
    product = partial(_product_of_groups, groups=groups)
    return _with_gradients_of_tiles(product, tiles, call)


def _with_gradients_of_tiles(
    product: Callable[[Float[Array, "Y C K"], Float[Array, "E K N"]], Float[Array, "Y C N"]],
    tiles: Tiles,
    call: ExpertCall,
) -> Float[Array, "X A D"]:
    """Compute the pairs of a training step in tiles, and keep for the backward pass what the products gave.

    Args:
      product: of the rows of tiles, each with its expert's matrix among those of a layer.
      tiles: the pairs of each expert.
      call: the call.
    """

    # What a product makes of the weights, copies or a layer that is cut out of its stack, is made again: kept, it would
    # be the most of what a layer leaves. Products are kept by name: a kernel's, and those with a gradient of their own,
    # are not known as products.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("product of experts"))
    def run_tiles(x, weights, layer):
        kept = lambda rows, weight: checkpoint_name(product(rows, weight[layer]), "product of experts")
        tokens = _tokens_of_places(x, tiles, call.expert_ids)  # [Y C D]
        hidden = call.activate(kept(tokens, weights.gate), kept(tokens, weights.up)).astype(x.dtype)  # [Y C F]
        return kept(hidden, weights.down)

    return _outputs_of_pairs(run_tiles(call.x, call.weights, call.layer), tiles)


class _Groups(NamedTuple):
    """The tiles of each expert, which stand next to each other."""

    expert: Int[Array, " Y"]  # of each tile
    used: Int[Array, ""]  # tiles, the first ones
    first: Int[Array, " E"]  # tile of each expert
    count: Int[Array, " E"]  # tiles of each expert


@jax.custom_vjp
def _product_of_groups(
    rows: Float[Array, "Y C K"], weight: Float[Array, "E K N"], groups: _Groups
) -> Float[Array, "Y C N"]:
    """Return the products of tiles with their experts' matrices; those of unused tiles may be anything."""
    from pallas_kernels.grouped_product import grouped_product

    return grouped_product(rows, weight, groups.expert, groups.used, backend="triton", interpret=interpreted())


def _gradient_of_groups(residuals, gradient):
    from pallas_kernels.grouped_outer import grouped_outer
    from pallas_kernels.grouped_product import grouped_product

    rows, weight, groups = residuals
    options = dict(backend="triton", interpret=interpreted())
    gradient = gradient.astype(rows.dtype)  # as of every product (`m3jax.numerics.einsum`)
    of_rows = grouped_product(gradient, weight, groups.expert, groups.used, transposed=True, **options)
    of_weight = grouped_outer(rows, gradient, groups.first, groups.count, **options)
    return of_rows.astype(rows.dtype), of_weight, None


_product_of_groups.defvjp(
    lambda rows, weight, groups: (_product_of_groups(rows, weight, groups), (rows, weight, groups)),
    _gradient_of_groups,
)


# A place has one pair and a pair one place, so both gradients read what the other direction reads. JAX, which does not
# know that, would scatter them: one number after the other on a CPU, and added up in bfloat16.
@jax.custom_vjp
def _tokens_of_places(x: Float[Array, "X D"], tiles: Tiles, expert_ids: Int[Array, "X A"]) -> Float[Array, "tiles C D"]:
    """Return the token of the pair in each place of the tiles; any token in a place without a pair."""
    return x[tiles.query]


def _gradient_of_tokens(residuals, gradient):
    tiles, expert_ids = residuals
    of_pairs = _outputs_of_pairs(gradient, tiles)
    of_pairs = jnp.where(expert_ids[..., None] >= 0, of_pairs, 0)
    return jnp.sum(of_pairs, axis=1, dtype=accumulator(gradient.dtype)).astype(gradient.dtype), None, None


_tokens_of_places.defvjp(
    lambda x, tiles, expert_ids: (_tokens_of_places(x, tiles, expert_ids), (tiles, expert_ids)), _gradient_of_tokens
)


@jax.custom_vjp
def _outputs_of_pairs(outputs: Float[Array, "tiles C D"], tiles: Tiles) -> Float[Array, "X A D"]:
    """Return the output in each pair's place."""
    return outputs.reshape(-1, outputs.shape[-1])[tiles.place_of[0, 0]]


def _gradient_of_outputs(tiles, gradient):
    of_places = gradient.reshape(-1, gradient.shape[-1])[tiles.pair]  # [tiles C D]
    return jnp.where(tiles.valid[..., None], of_places, 0), None


_outputs_of_pairs.defvjp(lambda outputs, tiles: (_outputs_of_pairs(outputs, tiles), tiles), _gradient_of_outputs)


def _of_each_tile(
    weight: Float[Array, "E K N"] | MXFP8Array, experts: Int[Array, " X"]
) -> Float[Array, "X K N"] | MXFP8Array:
    """Return a copy of the weight of each tile's expert, whose gradient is the sum over the tiles of an expert."""
    if isinstance(weight, MXFP8Array):
        return weight[experts]
    from pallas_kernels.gradient import with_gradient

    def by_product(weight, experts):
        # Its gradient is a product with ones, at the speed of memory: a GPU scatters numbers one by one, in ten times
        # the time.
        is_expert = experts[:, None] == jnp.arange(weight.shape[0])  # [X E]
        return einsum("xe,ekn->xkn", is_expert.astype(weight.dtype), weight).astype(weight.dtype)

    return with_gradient(lambda weight, experts: weight[experts], by_product, 1)(weight, experts)


EXPERT_PATHS = {
    "gathered": gathered,
    "one_by_one": one_by_one,
    "ragged": ragged,
    "tiled": tiled,
    "few": few,
    "grouped": grouped,
    "copied": copied,
    "products": products,
    "in_fixed_tiles": in_fixed_tiles,
}
# Tensor cores add what they multiply to what they are given, channel by channel, in a tile of any height: so a kernel
# can take the place of fixed tiles.
_PATHS = EXPERT_PATHS | {"grouped in order": partial(grouped, least_tile=measured.ORDERED_TILE)}
# By platform, the fastest first; the last one runs whatever the others do not.
_PREFERRED = {
    "gpu": ("few", "grouped", "gathered", "tiled"),
    "tpu": ("grouped", "ragged", "gathered", "one_by_one"),
    "cpu": ("grouped", "one_by_one", "tiled"),
}


def choose_path(call: ExpertCall, path: str = "auto", backend: str = "auto") -> tuple[str, dict[str, str]]:
    """Return the path that runs a call, by its shapes and dtypes alone, and why others do not.

    Args:
      call: the call.
      path: as of `run_experts`.
      backend: likewise.

    Raises:
      ValueError: a path that is asked for by name and cannot run this, with the reason.
    """

    def why_no_kernel(path: str) -> str | None:
        kernels, case = kernels_here(backend), experts_case(path, call.x, call.weights.gate)
        return "kernels are not wanted, or do not run here" if kernels is None else case.why_not(kernels)

    check_backend_name(backend)
    if call.shared:
        return "few", {}
    if path == "in_fixed_tiles" and kernels_here(backend) == "triton" and not why_no_kernel("grouped"):
        is_few = not call.is_mxfp8 and len(call.x) <= measured.few_tokens(*call.weights.gate.shape[2:])
        return "few" if is_few else "grouped in order", {}
    if path == "trained":
        reason = why_no_kernel("products")
        return ("copied", {"products": reason}) if reason else ("products", {})
    if path != "auto":
        if reason := why_not_path(path, call.x, call.weights.gate):
            raise ValueError(f"path = {path!r} cannot run these experts: {reason}; choose 'auto' or another path")
        return path, {}
    where, is_divided = platform(), call.num_shares is not None
    most = measured.FEW_PAIRS * (1 if where == "gpu" else min(call.num_shares or 1, measured.MOST_SHARES))
    is_few, pairs = call.num_pairs <= most, f"{call.num_pairs} pairs"
    reasons = {
        "few": "experts in MXFP8 have one kernel for all" if call.is_mxfp8 else why_no_kernel("few"),
        "grouped": "it is for MXFP8 alone" if where == "cpu" and not call.is_mxfp8 else why_no_kernel("grouped"),
        "ragged": f"{pairs} (it has more than {most})" if is_few else None,
        "gathered": None if is_few and not (is_divided and where == "tpu") else f"{pairs} (it has {most}, undivided)",
        "one_by_one": None if is_few else f"{pairs} (it has up to {most})",
        "tiled": None,
    }
    chosen = next(name for name in _PREFERRED[where] if reasons[name] is None)
    return chosen, {name: reason for name, reason in reasons.items() if reason}


def joins_shared(
    x: Float[Array, "X D"],
    weights: ExpertWeights,
    shared: Sequence[Weight],
    *,
    path: str = "auto",
    backend: str = "auto",
) -> bool:
    """Return True if one kernel runs the shared expert with the routed ones: `few`, where it is as wide as they are.

    Args:
      x: tokens.
      weights: of the routed experts, of all layers of a stack.
      shared: gate, up and down of the layer's shared expert, or none if it is run elsewhere.
      path: as of `run_experts`.
      backend: likewise.
    """
    if path != "auto" or not shared or isinstance(weights.gate, MXFP8Array):
        return False
    for one, routed in zip(shared, weights, strict=True):
        if not isinstance(one, StackedLayer) or one.stack.shape[1:] != routed.shape[2:]:
            return False
    return choose(experts_case("few", x, weights.gate), backend) != "xla"


def experts_case(
    path: str, x: Float[Array, "X D"], gate: Float[Array, "L E D F"] | MXFP8Array, *, by_name: bool = False
) -> ExpertsCase:
    """Return what decides where a path of experts can run.

    Args:
      path: "few", "grouped" or "products".
      x: tokens.
      gate: the experts' first matrices, of all layers of a stack.
      by_name: True if the path is asked for by name.
    """
    width, hidden = gate.shape[2:]
    return ExpertsCase(
        path=path, tokens=len(x), dtype=x.dtype, width=width, hidden=hidden, stored=Stored.of(gate), by_name=by_name
    )


def why_not_path(path: str, x: Float[Array, "X D"], gate: Float[Array, "L E D F"] | MXFP8Array) -> str | None:
    """Return why a path that is asked for by name cannot run, in words; None if it can.

    Args:
      path: one of `EXPERT_PATHS`.
      x: tokens.
      gate: the experts' first matrices, of all layers of a stack.
    """
    if path not in ("few", "grouped", "products"):
        return None  # XLA's paths run everywhere
    return why_not(experts_case(path, x, gate, by_name=True), kernels_here("auto") or "triton")
