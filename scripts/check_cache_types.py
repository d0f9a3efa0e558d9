"""Measures the cost of a smaller cache: score gap of the selection, error of the output (docs/performance.md).

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
from jaxtyping import Array, Float, Int

import m3jax
from m3jax.assets import embedded_path
from m3jax.cache import Cache, measure_scales
from m3jax.model import M3
from m3jax.msa import block_scores
from m3jax.text import Tokenizer

TYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float8_e4m3fn", "bfloat16"),
         ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e4m3fn"))  # fmt: skip


def main() -> None:
    """Print the cost of each storage type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", help="of the model")
    args = parser.parse_args()
    model = m3jax.load(dtype=args.dtype, progress=False)
    text = Tokenizer.from_pretrained(embedded_path()).encode(inspect.getsource(heapq) + inspect.getsource(argparse))
    tokens = jnp.asarray([text[: args.tokens]], jnp.int32)
    scales = measure_scales(model, tokens[:, : args.tokens // 4])
    exact_logits, _, _ = run(model, tokens, "float32", "float32", scales)
    print(f"{'keys, values':>14s} {'index keys':>14s} {'bytes/token':>12s} {'output error':>13s} {'gap, mean':>10s} "
          f"{'gap, 99.9%':>11s} {'next token':>11s}")  # fmt: skip
    for kv_dtype, index_dtype in TYPES:
        logits, gaps, bytes_per_token = run(model, tokens, kv_dtype, index_dtype, scales)
        error = np.linalg.norm(logits - exact_logits) / np.linalg.norm(exact_logits)
        same = np.mean(logits.argmax(-1) == exact_logits.argmax(-1))
        print(f"{kv_dtype:>14s} {index_dtype:>14s} {bytes_per_token:12.0f} {error:13.2e} {gaps.mean():10.2e} "
              f"{np.quantile(gaps, 0.999):11.3f} {same:10.2%}")  # fmt: skip


def run(
    model: M3, tokens: Int[Array, "1 T"], kv_dtype: str, index_dtype: str, scales
) -> tuple[Float[np.ndarray, "1 T V"], Float[np.ndarray, " gaps"], float]:
    """Run a model through a cache of these types: logits, the score gaps of all selections, and bytes a token."""
    types = dict(kv_dtype=kv_dtype, index_dtype=index_dtype, scales=scales)
    cache = Cache.init(model.config, 1, tokens.shape[1], str(model.dtype), **types)
    bytes_per_token = cache.bytes_per_token
    logits, stack_gaps = forward(model, tokens, cache)
    return np.asarray(logits), np.concatenate([np.asarray(gaps).ravel() for gaps in stack_gaps]), bytes_per_token


@jax.jit
def forward(
    model: M3, tokens: Int[Array, "1 T"], cache: Cache
) -> tuple[Float[Array, "1 T V"], list[Float[Array, "L 1 K T"]]]:
    """Return the logits, and the score gaps of each stack of sparse layers."""
    block_size, length = model.config.index_block_size, tokens.shape[1]
    positions, lengths = jnp.arange(length, dtype=jnp.int32)[None], jnp.array([length], jnp.int32)

    def probe(values, context):
        if "blocks" not in values:
            return None
        scores = block_scores(values["index_q"], values["index_k"], positions, lengths, block_size)  # [B K T M]
        return score_gap(scores, values["blocks"], positions, block_size)

    x, _, stacks = model.trunk(tokens, cache=cache, positions=positions, lengths=lengths, probe=probe)
    return model.unembed(model.final_norm(x)), [gaps for gaps in stacks if gaps is not None]


def score_gap(
    scores: Float[Array, "B K T M"], blocks: Int[Array, "B K T J"], positions: Int[Array, "B T"], block_size: int
) -> Float[Array, "B K T"]:
    """Return how far the best past block left out scores above the worst one kept, in standard deviations."""
    block_ids = jnp.arange(scores.shape[-1])
    is_chosen = jnp.any(blocks[..., None] == block_ids, axis=-2)  # [B K T M]
    is_past = block_ids < (positions // block_size)[:, None, :, None]  # [B 1 T M]
    best_dropped = jnp.max(jnp.where(is_past & ~is_chosen, scores, -jnp.inf), axis=-1)
    worst_chosen = jnp.min(jnp.where(is_past & is_chosen, scores, jnp.inf), axis=-1)
    deviation = jnp.sqrt(jnp.var(scores, axis=-1, where=is_past))
    drops_any = jnp.any(is_past & ~is_chosen, axis=-1)
    return jnp.where(drops_any, jnp.maximum(best_dropped - worst_chosen, 0.0) / deviation, 0.0)


if __name__ == "__main__":
    main()
