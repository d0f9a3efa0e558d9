"""Prefill and decode on a CPU beside llama.cpp, in one process and by turns (docs/performance.md).

    python scripts/bench_llama_cpp.py                                   # 8,192 tokens, both models, both dtypes
    python scripts/bench_llama_cpp.py --model bench --dtype float32 --tokens 4096
    taskset -c 0 python scripts/bench_llama_cpp.py --clock cpu          # one core, where others use the machine too

Needs `pip install 'm3jax[llama-cpp]'`. The models are that of bench_cpu.py and the embedded one.

Both get the same weights and tokens, batch 1. llama.cpp has its best settings: flash attention, without which it has no
MSA, the `n_ubatch` that reads a prompt fastest, keys and values in each of the dtypes it can hold. What is compared is
the best of these, of prefill and of decode each for itself, in the same round.

Below each table stands what bounds the figures on this machine: the operations of the prompt at the rate of XLA's own
matrix products, of a size that fits the caches and of this model's sizes, and the bytes of a new token at the rate of a
copy. numpy's products (its BLAS) stand beside them.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_cpu import TEXT
from peer_llama_cpp import ERROR, LlamaCpp, convert, imported, prompts_of

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Threads of llama.cpp wait for each other in a loop: its processor time says something of one thread alone.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
UBATCHES = (128, 256, 512, 1024, 2048)
CACHES = {"float32": ("f32", "f16"), "bfloat16": ("f32", "f16", "bf16")}


class Ours:
    """The engine that `m3jax.generate` runs, compiled beforehand, with one request at a time."""

    name = "m3jax"

    def __init__(self, model: Any, prompt: Sequence[int], new_tokens: int, clock: Callable[[], float]):
        """Compile for a prompt's length and that many new tokens."""
        from m3jax.decoding import Params, Sampling, engine_for

        self._clock = clock
        self._params = Params(max_new_tokens=new_tokens + 1, sampling=Sampling.greedy(), stop_ids=())
        self._engine = engine_for(model, [prompt], [self._params], steps_per_call=min(new_tokens, 64))

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the first new token of a prompt whose first block no earlier one had."""
        self._handle = self._engine.add(prompt, self._params)
        begin = self._clock()
        while self._engine.prefill():
            pass
        return self._clock() - begin

    def decode(self) -> float:
        """Return the seconds of a new token, of all that were asked for; the request ends."""
        count, begin = self._engine.timings.decoded_tokens, self._clock()
        self._engine.run()
        seconds, count = self._clock() - begin, self._engine.timings.decoded_tokens - count
        self._engine.forget(self._handle)
        return seconds / count


class Theirs:
    """llama.cpp with one dtype of keys and values."""

    def __init__(
        self, path: Path, length: int, new_tokens: int, args: argparse.Namespace, ubatch: int, cache: str
    ):  # fmt: skip
        """Load the file; `length` is that of the prompt."""
        self._clock = CLOCKS[args.clock]
        self.name = f"llama.cpp {cache} n_ubatch {ubatch}"
        self._new_tokens = new_tokens
        self._peer = LlamaCpp(path, length + new_tokens + 1, threads=args.threads, ubatch=ubatch, cache=cache)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the logits of the prompt's last token."""
        self._peer.forget()
        begin = self._clock()
        self._logits = self._peer.read(prompt)
        return self._clock() - begin

    def decode(self) -> float:
        """Return the seconds of a new token, each the most probable one."""
        begin = self._clock()
        self._peer.greedy(self._logits, self._new_tokens)
        return (self._clock() - begin) / self._new_tokens

    def close(self) -> None:
        """Free its memory."""
        self._peer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each model and dtype; return 2 where llama.cpp is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("bench", "embedded"), nargs="+", default=["bench", "embedded"])
    parser.add_argument("--dtype", choices=tuple(CACHES), nargs="+", default=[*CACHES],
                        help="of weights, and of our activations; llama.cpp's are float32")  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=8192, help="of a prompt, or what the embedded model's context holds"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="of one round")
    parser.add_argument("--rounds", type=int, default=5, help="each of another prompt; the implementations take turns")
    parser.add_argument("--threads", type=int, default=THREADS, help="llama.cpp's; XLA takes what the process may use")
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="wall time, or processor time of one thread"
    )
    args = parser.parse_args(argv)
    try:
        if args.clock == "cpu" and max(args.threads, THREADS) > 1:
            raise ValueError(
                f"--clock cpu with {max(args.threads, THREADS)} threads: give one core, as taskset -c 0 does"
            )
        for package in ("gguf", "llama_cpp"):
            imported(package)
        measure(args)
    except ValueError as error:
        print(f"bench_llama_cpp: {error}", file=sys.stderr)
        return ERROR
    return 0


def measure(args: argparse.Namespace) -> None:
    """Measure each model in each dtype."""
    import m3jax
    from m3jax.assets import embedded_path
    from m3jax.config import M3Config
    from m3jax.model import init

    for name in args.model:
        for dtype in args.dtype:
            is_bench = name == "bench"
            model = init(M3Config.from_dict(TEXT), 0, dtype) if is_bench else m3jax.load(embedded_path(), dtype=dtype)
            length = min(args.tokens, model.config.max_position_embeddings - args.new_tokens - 1)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.gguf"
                convert(model, path, dtype)
                print(f"\n{name} model, {dtype}, {length:,} tokens, {args.threads} threads", flush=True)
                one_table(model, path, dtype, length, args)


def one_table(model: Any, path: Path, dtype: str, length: int, args: argparse.Namespace) -> None:
    """Measure one model in one dtype and print the table."""
    is_embedded = model.config.vision_config is not None
    prompts = prompts_of([length] * (args.rounds + 1), model.config.vocab_size, is_embedded)
    ubatch = fastest_ubatch(path, prompts[0][: min(length, 2048)], args)
    ours = Ours(model, prompts[0], args.new_tokens, CLOCKS[args.clock])
    others = [Theirs(path, length, args.new_tokens, args, ubatch, cache) for cache in CACHES[dtype]]
    everyone = [ours, *others]
    for one in everyone:  # a round that does not count: memory is touched for the first time
        one.prefill(prompts[0])
        one.decode()
    prefill, decode = ({one.name: [] for one in everyone} for _ in range(2))
    for prompt in prompts[1:]:
        for one in everyone:
            prefill[one.name].append(one.prefill(prompt))
        for one in everyone:
            decode[one.name].append(one.decode())
    print(f"{'':28s} {'prefill s':>10s} {'tokens/s':>9s} {'ms / new token':>15s} {'tokens/s':>9s}")
    for one in everyone:
        seconds, step = statistics.median(prefill[one.name]), statistics.median(decode[one.name])
        print(f"{one.name:28s} {seconds:10.2f} {length / seconds:9.0f} {step * 1e3:15.2f} {1 / step:9.1f}")
    bound(model, dtype, length, statistics.median(prefill[ours.name]), statistics.median(decode[ours.name]))
    for what, measured in (("prefill", prefill), ("decode", decode)):
        best = [min(row) for row in zip(*(measured[one.name] for one in others), strict=True)]
        ratios = [theirs / own for theirs, own in zip(best, measured[ours.name], strict=True)]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{what}: its best takes {statistics.median(ratios):.2f} times ours (rounds: {each})", flush=True)
    for one in others:
        one.close()


def bound(model: Any, dtype: str, length: int, prefill: float, decode: float) -> None:
    """Print the rate of products and of a copy here, and the share of each that prefill and decode reach."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def rate(work: float, run: Callable[[], Any]) -> float:
        run()
        seconds = []
        for _ in range(7):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        return work / min(seconds)

    def products(rows: int, inner: int, columns: int) -> tuple[float, float]:
        a, b = (np.random.default_rng(i).normal(size=shape).astype(np.float32)
                for i, shape in enumerate(((rows, inner), (inner, columns))))  # fmt: skip
        on_device, multiply = [jnp.asarray(x, dtype) for x in (a, b)], jax.jit(jnp.matmul)
        work = 2.0 * rows * inner * columns
        return rate(work, lambda: multiply(*on_device).block_until_ready()), rate(work, lambda: a @ b)

    operations, numbers = operations_of(model, length)
    width, most = model.config.hidden_size, min(length, 2048)
    own, large = products(most, width, width), products(2048, 2048, 2048)
    source = jnp.zeros(1 << 26, jnp.uint8)
    copy = rate(2.0 * source.size, lambda: jnp.copy(source).block_until_ready())
    bytes_read = numbers * jnp.dtype(dtype).itemsize
    print(
        f"products of {most} x {width} x {width}: XLA {own[0] / 1e9:.0f} GFLOP/s in {dtype}, "
        f"numpy {own[1] / 1e9:.0f} in float32; "
        f"of 2048 x 2048 x 2048: {large[0] / 1e9:.0f}, {large[1] / 1e9:.0f}; a copy {copy / 1e9:.1f} GB/s"
    )
    print(
        f"prefill: {operations / 1e9:.0f} GFLOP in {prefill:.2f} s are {operations / prefill / 1e9:.0f} GFLOP/s; "
        f"at XLA's rate of this model's products they take {operations / own[0]:.2f} s, "
        f"of large ones {operations / large[0]:.2f} s"
    )
    print(
        f"a new token: {bytes_read / 1e6:.1f} MB of weights, keys and values in {decode * 1e3:.1f} ms are "
        f"{bytes_read / decode / 1e9:.1f} GB/s",
        flush=True,
    )


def operations_of(model: Any, length: int) -> tuple[float, float]:
    """Return the operations of a prompt's matrix products, and the numbers that a new token behind it reads.

    Operations of a causal product over positions 0 to `length` are those of the mean position; a query of a sparse
    layer reads what it selects. Weights of experts are those of the experts that a token takes.
    """
    c = model.config
    products = keys = 0.0
    numbers = c.hidden_size * c.vocab_size
    for kind, mlp in zip(c.layer_types, c.mlp_layer_types, strict=True):
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        projections = c.hidden_size * (2 * q + 2 * kv)
        selected, index = length, 0
        if "sparse" in kind:
            index = c.index_n_heads * c.index_head_dim
            projections += c.hidden_size * (index + c.index_head_dim)
            selected = min(length, c.index_topk_blocks * c.index_block_size)
            numbers += length * c.index_head_dim
        if mlp == "sparse":
            ffn = 3 * c.hidden_size * (c.num_experts_per_tok * c.intermediate_size + c.shared_intermediate_size)
        else:
            ffn = 3 * c.hidden_size * c.dense_intermediate_size
        products += projections + ffn
        # The mean over positions of min(position, selected) keys.
        mean = selected - selected**2 / (2 * length)
        keys += 2 * q * mean + index * length / 2
        numbers += projections + ffn + 2 * kv * selected
    return 2.0 * length * (products + keys), numbers


def fastest_ubatch(path: Path, prompt: Sequence[int], args: argparse.Namespace) -> int:
    """Return the `n_ubatch` of `UBATCHES` that reads a prompt fastest, each at its better of two times."""
    seconds = {}
    for ubatch in UBATCHES:
        one = Theirs(path, len(prompt), 1, args, ubatch, "f32")
        seconds[ubatch] = min(one.prefill(prompt) for _ in range(2))
        one.close()
    return min(seconds, key=seconds.get)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
