"""The router from its logits on in Triton: a program has a token, and finds one expert after the other."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.backends import Limits
from pallas_kernels.choose_experts import Call

LIMITS = Limits()


def run(call: Call, config: None) -> tuple[Int32[Array, "X A"], Float32[Array, "X A"]]:
    """Run `choose_experts` on a checked call.

    Raises:
      ValueError: a number of experts that is no power of two.
    """
    num_tokens, num_experts = call.logits.shape
    if num_experts & num_experts - 1:
        raise ValueError(f"{num_experts} experts: need a power of two")
    shape = num_tokens, call.top_k
    return pl.pallas_call(
        partial(_kernel, top_k=call.top_k),
        grid=(num_tokens,),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=call.interpret,
        name="choose_experts",
    )(call.logits, call.bias)


def _kernel(logits_ref, bias_ref, ids_ref, weights_ref, *, top_k: int):
    token, num_experts = pl.program_id(0), logits_ref.shape[1]
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    scores = jax.nn.sigmoid(logits_ref[token, :])
    ranked = scores + bias_ref[:]
    is_broken = jnp.max((ranked != ranked).astype(jnp.int32)) > 0
    ranked = jnp.where(ranked != ranked, -jnp.inf, ranked)
    ids, chosen = [], []
    for _ in range(top_k):
        best = jnp.max(ranked)
        ids.append(jnp.min(jnp.where(ranked == best, expert, num_experts - 1)))
        chosen.append(jnp.sum(jnp.where(expert == ids[-1], scores, 0.0)))
        ranked = jnp.where(expert == ids[-1], -jnp.inf, ranked)
    total = sum(chosen)
    for choice in range(top_k):
        ids_ref[token, choice] = ids[choice]
        weights_ref[token, choice] = jnp.where(is_broken, jnp.nan, chosen[choice] / total)
