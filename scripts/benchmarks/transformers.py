"""transformers' speed on the layers of `bench.py engine --model m3`, on the same GPU.

    bench.py transformers                                      # prompts of 2,048, 8,192 and 16,384, then decoding
    bench.py transformers --model tiny --prompts 256 --device cpu

Random weights in bfloat16, attention by sdpa. Each prompt is read twice, and the second time counts.
"""

import numpy as np

from benchmarks.harness import Option
from benchmarks.models import four_layers
from benchmarks.transformers_peer import TransformersText
from m3jax import M3Config

USES_DEVICE, PACKAGES = False, ("torch", "transformers")  # torch alone has the GPU
NEW_TOKENS = 16
OPTIONS = dict(
    model=Option("m3", "Widths of the layers", smoke="tiny", choices=("tiny", "m3")),
    prompts=Option([2048, 8192, 16384], "Tokens of each prompt", smoke=[256]),
    device=Option("cuda", "Device of torch", smoke="cpu"),
)


def measure(args):
    """Yield the time of each prompt, and of a token behind it."""
    config = four_layers() if args.model == "m3" else M3Config.tiny()
    model, draw = TransformersText(config, "bfloat16", args.device), np.random.default_rng(0)
    for length in args.prompts:
        prompt = draw.integers(2, config.vocab_size, length).tolist()
        try:
            seconds = [model.prefill(prompt) for _ in range(2)][1]
            step = model.decode(NEW_TOKENS)
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            yield f"{length} tokens: {str(error).splitlines()[0][:200]}"
            continue
        rates = {"tokens/s": length / seconds, "ms a token": 1e3 * step}
        yield {"prompt": f"{length} tokens", "ms": 1e3 * seconds, **rates}
