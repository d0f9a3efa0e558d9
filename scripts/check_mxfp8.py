"""Measures MXFP8's divergence from bfloat16's next tokens, by the number of layers in MXFP8 (docs/mxfp8.md).

    python scripts/check_mxfp8.py                    # the embedded checkpoint on its own kind of text
    python scripts/check_mxfp8.py --model DIR --tokens 512

The first n layers get MXFP8 weights, then activations are quantised too ("W8A8"). Beside them stands what float32
activations and sums change of the same bfloat16 weights.
"""

import argparse
import heapq
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import m3jax
from m3jax.assets import embedded_path
from m3jax.evaluate.divergence import score_reference
from m3jax.model import M3, dequantize, quantize
from m3jax.text import Tokenizer
from m3jax.train.step import cast_weights


def main() -> None:
    """Print the divergence by the number of layers in MXFP8."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder in the hub's layout (default: the embedded checkpoint)")
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    model = m3jax.load(args.model, progress=False)
    folder = embedded_path() if args.model is None else args.model
    text = Tokenizer.from_pretrained(folder).encode(inspect.getsource(heapq) + inspect.getsource(argparse))
    tokens = jnp.asarray([text[: args.tokens]], jnp.int32)
    reference = model(tokens)
    kept = quantize(model)
    numbers = dequantize(kept)
    print(f"{tokens.shape[1]} tokens; KL(bfloat16 || it) in nats: mean, median, 99%, largest; same most probable token")
    report("float32, bfloat16 weights", cast_weights(model, "float32")(tokens), reference)
    for num_layers in range(1, model.config.num_hidden_layers + 1):
        report(f"{num_layers} layers in MXFP8", mixed(model, numbers, num_layers)(tokens), reference)
    report("all, activations too", kept.with_activations("mxfp8")(tokens), reference)
    assert (kept(tokens) == numbers(tokens)).all(), "codes and scales are not the numbers that they stand for"


def report(name: str, logits: jax.Array, reference: jax.Array) -> None:
    """Print a line of the table."""
    kl, agrees = map(np.asarray, score_reference(logits, reference))
    figures = kl.mean(), np.median(kl), np.quantile(kl, 0.99), kl.max()
    print(f"{name:26s}", *(f"{x:9.2e}" for x in figures), f"{agrees.mean():8.2%}", flush=True)


def mixed(model: M3, numbers: M3, num_layers: int) -> M3:
    """A model whose first layers are another's, which differs in the numbers of linear layers alone."""
    stacks = jax.tree.map(lambda leaf: leaf, model)
    for stack, (mine, other) in zip(model.config.stacks, zip(model.stacks, numbers.stacks, strict=True), strict=True):
        is_taken = np.arange(stack.first_layer, stack.first_layer + stack.num_layers) < num_layers  # [L]
        take = lambda a, b, is_taken=is_taken: jnp.where(is_taken.reshape(-1, *[1] * (a.ndim - 1)), b, a)
        stacks.stacks[model.config.stacks.index(stack)] = jax.tree.map(take, mine, other)
    return stacks


if __name__ == "__main__":
    main()
