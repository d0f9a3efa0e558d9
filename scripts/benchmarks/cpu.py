"""Prefill and decode on a CPU beside transformers or llama.cpp, in one process and by turns.

    bench.py cpu                                             # 8,192 tokens in float32, beside transformers' sdpa
    bench.py cpu --beside llama.cpp --models bench embedded --dtypes float32 bfloat16
    taskset -c 0 python scripts/bench.py cpu --beside llama.cpp --clock cpu --tokens 4096 --repeats 2

Batch 1, the same tokens. The bench model is random: hidden 512, 8 layers of which 2 are dense, 16/4 heads of 64, 32
experts of which 4 are active, block 128, top-k 16. llama.cpp (`pip install 'm3jax[llama-cpp]'`) gets the same weights
and its best settings: flash attention, without which it has no MSA, the `n_ubatch` that reads a prompt fastest, keys
and values in each of the dtypes that it can hold; the best of these counts, of prefill and of decode each for itself,
in the same round.

`bench.py engine --model bench` says what bounds our figures on a machine.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peer_llama_cpp import LlamaCpp, convert, imported, prompts_of

from benchmarks import models
from benchmarks.harness import CORES, Option
from benchmarks.transformers_peer import TransformersText
from m3jax.decoding import engine_for
from m3jax.model import M3

REPEATS, PACKAGES = 5, ("torch", "transformers", "llama-cpp-python")
# Threads of llama.cpp wait for each other in a loop: its processor time says something of one thread alone.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
UBATCHES = (128, 256, 512, 1024, 2048)
CACHES = {"float32": ("f32", "f16"), "bfloat16": ("f32", "f16", "bf16")}
OPTIONS = dict(
    beside=Option(["sdpa"], "Peers", smoke=["sdpa"], choices=("sdpa", "llama.cpp")),
    models=Option(["bench"], "Weights", choices=("bench", "embedded")),
    dtypes=Option(["float32"], "Dtypes of weights and of our activations; llama.cpp's are float32", choices=[*CACHES]),
    tokens=Option(8192, "Tokens of a prompt, as far as the embedded model's context holds them", smoke=300),
    new_tokens=Option(64, "New tokens of one round", smoke=8),
    clock=Option("wall", "Wall time, or processor time of one thread", choices=[*CLOCKS]),
)


class Ours:
    """The engine that `m3jax.generate` runs, compiled beforehand, with one request at a time."""

    name = "m3jax"

    def __init__(self, model: M3, prompt: Sequence[int], new_tokens: int, clock: Callable[[], float]):
        self._clock = clock
        self._params = models.greedy(new_tokens + 1, stop_ids=())
        self._engine = engine_for(model, [prompt], [self._params], steps_per_call=min(new_tokens, 64))

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the first new token of a prompt whose first block no earlier one had."""
        self._handle = self._engine.add(prompt, self._params)
        began = self._clock()
        while self._engine.prefill():
            pass
        return self._clock() - began

    def decode(self, new_tokens: int) -> float:
        """Return the seconds of a new token, of all that were asked for; the request ends."""
        count, began = self._engine.timings.decoded_tokens, self._clock()
        self._engine.run()
        seconds, count = self._clock() - began, self._engine.timings.decoded_tokens - count
        self._engine.forget(self._handle)
        return seconds / count


class LlamaCppText:
    """llama.cpp with one dtype of keys and values."""

    def __init__(self, path: Path, length: int, new_tokens: int, args: Any, ubatch: int, cache: str):
        self._clock, self.name = CLOCKS[args.clock], f"llama.cpp {cache} n_ubatch {ubatch}"
        self._peer = LlamaCpp(path, length + new_tokens + 1, threads=CORES, ubatch=ubatch, cache=cache)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the logits of the prompt's last token."""
        self._peer.forget()
        began = self._clock()
        self._logits = self._peer.read(prompt)
        return self._clock() - began

    def decode(self, new_tokens: int) -> float:
        """Return the seconds of a new token, each the most probable one."""
        began = self._clock()
        self._peer.greedy(self._logits, new_tokens)
        return (self._clock() - began) / new_tokens

    def close(self) -> None:
        """Free its memory."""
        self._peer.close()


def measure(args):
    """Yield a row for each implementation, of each model in each dtype."""
    is_llama = "llama.cpp" in args.beside
    if args.clock == "cpu" and CORES > 1:
        raise ValueError(f"--clock cpu with {CORES} cores: give one, as taskset -c 0 does")
    if not is_llama and (args.models, args.dtypes) != (["bench"], ["float32"]):
        raise ValueError("transformers runs the bench model in float32 alone")
    for package in ("gguf", "llama_cpp") if is_llama else ():
        imported(package)
    for name in args.models:
        for dtype in args.dtypes:
            model = models.build("tiny" if name == "embedded" else name, dtype=dtype)
            with tempfile.TemporaryDirectory() as folder:
                yield from compare(name, model, dtype, Path(folder) / "model.gguf", args)


def compare(name: str, model: M3, dtype: str, path: Path, args):
    """Yield the rows of one model in one dtype."""
    length = min(args.tokens, model.config.max_position_embeddings - args.new_tokens - 1)
    prompts = prompts_of([length] * (args.repeats + 1), model.config.vocab_size, name == "embedded")
    ours = Ours(model, prompts[0], args.new_tokens, CLOCKS[args.clock])
    peers = [TransformersText(model.config, dtype)] if "sdpa" in args.beside else []
    if "llama.cpp" in args.beside:
        convert(model, path, dtype)
        ubatch = fastest_ubatch(path, prompts[0][: min(length, 2048)], args)
        peers += [LlamaCppText(path, length, args.new_tokens, args, ubatch, cache) for cache in CACHES[dtype]]
    sides = [ours, *peers]
    for side in sides:  # a round that does not count: memory is touched for the first time
        side.prefill(prompts[0][:256] if isinstance(side, TransformersText) else prompts[0])
        side.decode(1)
    prefills, steps = [], []  # a row a round, a column a side
    for prompt in prompts[1:]:
        prefills.append([side.prefill(prompt) for side in sides])
        steps.append([side.decode(args.new_tokens) for side in sides])
    medians = [np.median(times, axis=0) for times in (prefills, steps)]
    times_ours = [np.median(np.array(times) / np.array(times)[:, :1], axis=0) for times in (prefills, steps)]
    for i, side in enumerate(sides):
        yield {
            f"{length} tokens": f"{side.name}, {name}, {dtype}", "prefill, s": float(medians[0][i]),
            "ms a token": 1e3 * float(medians[1][i]), "times ours": float(times_ours[0][i]),
            "times ours, decode": float(times_ours[1][i]),
        }  # fmt: skip
    if "llama.cpp" in args.beside:
        of_llama = [i for i, side in enumerate(sides) if isinstance(side, LlamaCppText)]
        for what, times in (("prefill", prefills), ("decode", steps)):
            ratios = [min(row[i] for i in of_llama) / row[0] for row in times]
            each = " ".join(f"{ratio:.2f}" for ratio in ratios)
            yield f"{what}: llama.cpp's best takes {statistics.median(ratios):.2f} times ours (rounds: {each})"
    for side in sides:
        if isinstance(side, LlamaCppText):
            side.close()


def fastest_ubatch(path: Path, prompt: Sequence[int], args) -> int:
    """Return the `n_ubatch` of `UBATCHES` that reads a prompt fastest, each at its better of two times."""
    seconds = {}
    for ubatch in UBATCHES:
        one = LlamaCppText(path, len(prompt), 1, args, ubatch, "f32")
        seconds[ubatch] = min(one.prefill(prompt) for _ in range(2))
        one.close()
    return min(seconds, key=seconds.get)
