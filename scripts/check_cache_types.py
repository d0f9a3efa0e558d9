"""What a smaller cache costs: score gap of the selection and error of the output (docs/performance.md).

    python scripts/check_cache_types.py             # the embedded checkpoint on its own kind of text

Selections are compared by the gap in exact scores and not by id: where a block was swapped for one of nearly the same
score nothing was lost. The gap of a query is how far the best block left out lies above the worst one kept (0 where the
choice is right), in standard deviations of the query's scores.
"""

import argparse
import heapq
import inspect

import jax
import jax.numpy as jnp
import numpy as np

import m3jax
from m3jax.assets import embedded_path
from m3jax.cache import Cache, measure_scales
from m3jax.msa import block_scores
from m3jax.text import Tokenizer

TYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float8_e4m3fn", "bfloat16"),
         ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e4m3fn"))  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", help="of the model")
    args = parser.parse_args()
    model = m3jax.load(dtype=args.dtype, progress=False)
    text = Tokenizer.from_pretrained(embedded_path()).encode(inspect.getsource(heapq) + inspect.getsource(argparse))
    tokens = jnp.asarray([text[: args.tokens]], jnp.int32)
    scales = measure_scales(model, tokens[:, : args.tokens // 4])
    exact, _ = run(model, tokens, *TYPES[0], scales)
    print(f"{'keys, values':>14s} {'index keys':>14s} {'bytes/token':>12s} {'output error':>13s} {'gap, mean':>10s} "
          f"{'gap, 99.9%':>11s} {'next token':>11s}")  # fmt: skip
    for kv, index in TYPES:
        logits, (gaps, size) = run(model, tokens, kv, index, scales)
        error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
        same = np.mean(logits.argmax(-1) == exact.argmax(-1))
        print(f"{kv:>14s} {index:>14s} {size:12.0f} {error:13.2e} {gaps.mean():10.2e} {np.quantile(gaps, 0.999):11.3f} "
              f"{same:10.2%}")  # fmt: skip


def run(model, tokens, kv_dtype, index_dtype, scales):
    """Logits through a cache of these types; score gaps of its selections, and bytes a token."""
    types = dict(kv_dtype=kv_dtype, index_dtype=index_dtype, scales=scales)
    cache = Cache.init(model.config, 1, tokens.shape[1], str(model.dtype), **types)
    size = cache.bytes_per_token
    logits, gaps = forward(model, tokens, cache)
    return np.asarray(logits), (np.concatenate([np.asarray(g).ravel() for g in gaps]), size)


@jax.jit
def forward(model, tokens, cache):
    """Logits, and the score gaps [L B K T] of each stack of sparse layers."""
    config, length = model.config, tokens.shape[1]
    positions, lengths = jnp.arange(length, dtype=jnp.int32)[None], jnp.array([length], jnp.int32)

    def probe(values, context):
        if "blocks" not in values:
            return None
        args = values["index_q"], values["index_k"], positions, lengths
        return gap(block_scores(*args, config.index_block_size), values["blocks"], positions, config.index_block_size)

    x, _, kept = model.trunk(tokens, cache=cache, positions=positions, lengths=lengths, probe=probe)
    return model.unembed(model.final_norm(x)), [k for k in kept if k is not None]


def gap(scores, blocks, positions, block_size):
    """How far the best block left out lies above the worst one kept, the own block aside; in standard deviations."""
    ids = jnp.arange(scores.shape[-1])
    chosen = jnp.any(blocks[..., None] == ids, axis=-2)
    past = ids < (positions // block_size)[:, None, :, None]
    left = jnp.max(jnp.where(past & ~chosen, scores, -jnp.inf), axis=-1)
    kept = jnp.min(jnp.where(past & chosen, scores, jnp.inf), axis=-1)
    deviation = jnp.sqrt(jnp.var(scores, axis=-1, where=past))
    return jnp.where(jnp.any(past & ~chosen, axis=-1), jnp.maximum(left - kept, 0.0) / deviation, 0.0)


if __name__ == "__main__":
    main()
