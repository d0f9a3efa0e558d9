"""Norm and rotary embedding of a token's heads in Triton: everything is read once, and rounded once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Limits
from pallas_kernels.numbers import power_of_two
from pallas_kernels.qk_norm_rope import Call
from pallas_kernels.triton_common import run_own
from pallas_kernels.triton_heads import head_parts, norm_rope

LIMITS = Limits()
_HEADS = 16  # of a program


def run(call: Call, config: None) -> tuple[Float[Array, "X _ _"], ...]:
    """Run `qk_norm_rope` on a checked call."""
    pieces = [pl.cdiv(x.shape[1], _HEADS) for x in call.heads]
    return tuple(
        pl.pallas_call(
            partial(_kernel, pieces=pieces, eps=call.eps),
            grid=(sum(pieces), len(call.cos)),
            out_shape=[jax.ShapeDtypeStruct(x.shape, call.dtype) for x in call.heads],
            compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
            interpret=call.interpret,
            name="qk_norm_rope",
        )(tuple(call.heads), tuple(call.norms), call.cos, call.sin)
    )


def _kernel(heads: tuple[Any, ...], norms: tuple[Any, ...], cos_ref, sin_ref, *out_refs, pieces: list[int], eps: float):
    token = pl.program_id(1)

    def run(array: int, piece: Int[Array, ""]) -> None:
        x_ref, out_ref = heads[array], out_refs[array]
        num_heads, width = x_ref.shape[1:]
        lane = jnp.arange(min(_HEADS, power_of_two(num_heads)), dtype=jnp.int32)
        head = jnp.minimum(piece * _HEADS + lane, num_heads - 1)  # heads behind the last repeat it
        parts = head_parts(width, cos_ref.shape[1])
        x = [x_ref[token, head, dims] for dims in parts]
        out = norm_rope(x, norms[array], cos_ref[token, :], sin_ref[token, :], eps)
        for dims, part in zip(parts, out, strict=True):
            out_ref[token, head, dims] = part.astype(out_ref.dtype)

    run_own(pl.program_id(0), pieces, run)
