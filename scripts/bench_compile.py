"""How long tracing and lowering the full 428B model takes: layers of one kind are scanned, so depth costs nothing.

python scripts/bench_compile.py
"""

import argparse
import time

import jax
import jax.numpy as jnp

from m3jax.cache import Cache
from m3jax.config import M3Config
from m3jax.model import abstract
from m3jax.model.build import num_bytes


def main() -> None:
    """Print seconds for a prefill chunk and a decode step of all 60 layers; nothing is allocated."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    config = M3Config.m3()
    model = abstract(config)
    print(f"{config.num_hidden_layers} layers, {num_bytes(model) / 2**30:.1f} GiB of weights in bfloat16")
    print(f"{'':16s} {'trace s':>8s} {'lower s':>8s}")
    for name, length in (("prefill, 2,048", 2048), ("decode, 1", 1)):
        cache = jax.eval_shape(lambda: Cache.init(config, 1, 131_072))
        rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
        begin = time.perf_counter()
        traced = jax.jit(step, donate_argnums=2).trace(model, rows, cache, rows, jax.ShapeDtypeStruct((1,), jnp.int32))
        middle = time.perf_counter()
        traced.lower()
        print(f"{name:16s} {middle - begin:8.2f} {time.perf_counter() - middle:8.2f}", flush=True)


def step(model, tokens, cache, positions, lengths):
    """One forward over a cache, with the logits of the last token."""
    hidden, cache = model.hidden(tokens, cache=cache, positions=positions, lengths=lengths)
    return model.unembed(hidden[:, -1]), cache


if __name__ == "__main__":
    main()
