"""Tokens in tiles of one fixed size, for arithmetic that has one order whatever else is computed beside it.

How a compiler sums a product, or a norm, depends on the shape of the whole operand: a token's bits then depend on how
many tokens a call has. A loop over tiles runs one and the same program for each, and a token's place in a tile changes
none of its bits (`tests/model/test_invariance.py` looks at both).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from m3jax.platform import platform

# Rows of logits that are computed with at once: what only fills a tile costs more here than in a product.
LOGITS_TILE = 8

# `compiler_options` for `jax.jit` on a GPU: products are cuBLAS's, each in the way that its own heuristic picks. Else
# XLA compiles and times many kernels for each, which is most of what compiling a program takes. Both go together: a
# kernel of XLA's own is slow unless it was chosen by its time.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

# `compiler_options` for `jax.jit` where programs are to give a tile the same bits on a GPU. Else XLA times several ways
# to compute a product, anew in each program, and takes what was fastest; and it leaves a rounding out where it fuses
# what rounds with what reads.
GPU_OPTIONS = UNTUNED | {"xla_allow_excess_precision": False}


def by_tiles(fn: Callable[..., PyTree[Array]], tile: int | None, *arrays: PyTree[Array]) -> PyTree[Array]:
    """`fn(*arrays)`, some rows at a time.

    The gradient is that of a loop which autodiff can reverse.

    Args:
      fn: of arrays [X ...] with X rows, each of which it treats alone; gives arrays [X ...].
      tile: rows at a time; the last tile is filled up with zeros. None is all at once, as if `fn` had been called.
      *arrays: pytrees of arrays [X ...].
    """
    if tile is None:
        return fn(*arrays)
    leaves, structure = jax.tree.flatten(arrays)
    num_rows = len(leaves[0])
    num_tiles = -(-num_rows // tile)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, num_tiles * tile - num_rows),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(num_tiles, tile, *x.shape[1:])

    tiles = [cut(leaf) for leaf in leaves]
    of_leaves = lambda *leaves: fn(*jax.tree.unflatten(structure, leaves))
    of_leaves, closed_over = jax.closure_convert(of_leaves, *(x[0] for x in tiles))
    out = _loop(of_leaves, tiles, closed_over)  # [tiles tile ...]
    return jax.tree.map(lambda x: x.reshape(num_tiles * tile, *x.shape[2:])[:num_rows], out)


def unknown_length(num_turns: int) -> Int[Array, ""]:
    """Return a loop's length as a value that the compiler cannot see.

    XLA would unroll a loop of one turn and fuse it with the operations around it, which can change bits.
    """
    return jax.lax.optimization_barrier(jnp.int32(num_turns))


def _loop(fn: Callable, tiles: list[Array], closed_over: list[Array]) -> PyTree[Array]:
    """Return `fn(*tile, *closed_over)` of each tile, stacked, with a gradient by both."""

    def run(tiles, closed_over):
        if platform() == "gpu":
            return _between_barriers(fn, tiles, closed_over)
        shapes = jax.eval_shape(fn, *(x[0] for x in tiles), *closed_over)
        empty = jax.tree.map(lambda x: jnp.zeros((len(tiles[0]), *x.shape), x.dtype), shapes)

        def step(index, out):
            one_tile = [jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in tiles]
            results = fn(*one_tile, *closed_over)
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), out, results)

        return jax.lax.fori_loop(0, unknown_length(len(tiles[0])), step, empty)

    def backward(residuals, gradient):
        tiles, closed_over = residuals
        differentiable = lambda tiles, closed_over: jax.lax.map(lambda one_tile: fn(*one_tile, *closed_over), tiles)
        return jax.vjp(differentiable, tiles, closed_over)[1](gradient)

    with_gradient = jax.custom_vjp(run)
    with_gradient.defvjp(lambda tiles, closed_over: (run(tiles, closed_over), (tiles, closed_over)), backward)
    return with_gradient(tiles, closed_over)


def _between_barriers(fn: Callable, tiles: list[Array], closed_over: list[Array]) -> PyTree[Array]:
    """Return `fn(*tile, *closed_over)` of each tile, stacked, for a GPU.

    There a loop of unknown length waits for the host in every turn. XLA's GPU compiler fuses nothing across a barrier:
    a tile is the same operations in a loop and without one.
    """
    # Weights of norms and biases too: the operation that cuts a layer's out of its stack would be fused with the tile.
    closed_over = [_behind_barrier(x) if x.ndim < 2 else x for x in closed_over]

    def run(tile):
        return _behind_barrier(fn(*_behind_barrier(tile), *closed_over))

    if len(tiles[0]) == 1:
        return jax.tree.map(lambda x: x[None], run([x[0] for x in tiles]))
    return jax.lax.map(run, tiles)


def _behind_barrier(arrays: PyTree[Array]) -> PyTree[Array]:
    """Return arrays that XLA's GPU compiler writes to memory row by row before anything reads them.

    They pass the barrier in one dimension, which has one order. The compiler fuses nothing across a barrier, but it has
    an array in the order that suits those who read it behind the barrier, and what makes it follows: keys that a step
    scatters into pages, head by head, were normed head by head as well, by another sum than a prompt's.
    """
    flat = jax.lax.optimization_barrier(jax.tree.map(lambda x: x.reshape(-1), arrays))
    return jax.tree.map(lambda x, like: x.reshape(like.shape), flat, arrays)
