"""Runs one MSA layer over a long document and reports time and memory: nothing of size T x S may be held.

    python scripts/check_long_context.py                    # 131,072 tokens must fit in 24 GiB
    python scripts/check_long_context.py --tokens 8192      # a quick look

A small layer on its own: hidden 512, 16/4 heads of 64, block 128, top-k 16, 32 experts of which 4 are active; random
weights and tokens. Ends with 1 where the process took more memory than it may, or the output is not finite.
"""

import argparse
import resource
import sys
import time

import jax
import jax.numpy as jnp

from m3jax import M3Config
from m3jax.model import init

LAYER = dict(
    hidden_size=512, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=4096,
    intermediate_size=256, dense_intermediate_size=1024, shared_intermediate_size=256, num_local_experts=32,
    num_experts_per_tok=4, rotary_dim=32, index_n_heads=4, index_head_dim=64, index_block_size=128,
    index_topk_blocks=16, index_local_blocks=1, layer_types=["minimax_m3_sparse"], mlp_layer_types=["sparse"],
    max_position_embeddings=1 << 20, bos_token_id=0, eos_token_id=1,
    rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
)  # fmt: skip
GIB = 1 << 30


def main() -> int:
    """Run, print one line a step, and say whether it fitted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--limit-gib", type=float, default=24.0)
    args = parser.parse_args()
    if not 1 <= args.tokens <= LAYER["max_position_embeddings"]:
        parser.error(f"--tokens {args.tokens}: must be 1 to {LAYER['max_position_embeddings']}")

    model = init(M3Config.from_dict(LAYER), seed=0, dtype=args.dtype)
    tokens = jax.random.randint(jax.random.key(0), (1, args.tokens), 2, LAYER["vocab_size"])
    before = peak()
    begin = time.perf_counter()
    run = jax.jit(lambda model, tokens: model.hidden(tokens)[0]).lower(model, tokens).compile()
    compile_s = time.perf_counter() - begin
    begin = time.perf_counter()
    out = run(model, tokens).block_until_ready()
    run_s = time.perf_counter() - begin
    finite = bool(jnp.isfinite(out).all())
    fits = peak() <= args.limit_gib * GIB
    print(f"{args.tokens:,} tokens of one layer in {args.dtype} on {jax.devices()[0].platform}, jax {jax.__version__}")
    print(f"compile {compile_s:.1f} s, run {run_s:.1f} s, {args.tokens / run_s:,.0f} tokens/s")
    print(f"peak resident memory {peak() / GIB:.2f} GiB, {before / GIB:.2f} GiB before the call")
    print(f"limit {args.limit_gib:g} GiB: {'kept' if fits else 'EXCEEDED'}")
    if not finite:
        print("the output is not finite")
    return 0 if fits and finite else 1


def peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


if __name__ == "__main__":
    sys.exit(main())
