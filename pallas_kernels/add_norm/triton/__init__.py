"""A residual addition and the norm of its result in Triton: a program has a row, in pieces that stay in registers."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.add_norm import Call
from pallas_kernels.backends import Limits

_LONGEST_PIECE = 8192

LIMITS = Limits()


def run(call: Call, config: None) -> tuple[Float[Array, "X D"], Float[Array, "X D"]]:
    """Run `add_norm` on a checked call."""
    out = jax.ShapeDtypeStruct(call.x.shape, call.x.dtype)
    return pl.pallas_call(
        partial(_kernel, eps=call.eps),
        grid=(len(call.x),),
        out_shape=(out, out),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=call.interpret,
        name="add_norm",
    )(call.x, call.update, call.weight)


def _kernel(x_ref, update_ref, weight_ref, sum_ref, norm_ref, *, eps: float):
    row, width = pl.program_id(0), x_ref.shape[1]
    piece = min(width & -width, _LONGEST_PIECE)  # Triton takes powers of two
    places = [pl.ds(start, piece) for start in range(0, width, piece)]
    sums = [x_ref[row, place] for place in places]
    if update_ref is not None:
        updates = [update_ref[row, place] for place in places]
        pairs = zip(sums, updates, strict=True)
        sums = [(x.astype(jnp.float32) + update).astype(sum_ref.dtype) for x, update in pairs]
    squares = sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in sums)
    scale = jax.lax.rsqrt(squares / width + eps)
    for place, x in zip(places, sums, strict=True):
        sum_ref[row, place] = x
        norm = x.astype(jnp.float32) * scale * (1.0 + weight_ref[place].astype(jnp.float32))
        norm_ref[row, place] = norm.astype(norm_ref.dtype)
