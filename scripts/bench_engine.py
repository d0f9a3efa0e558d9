"""The engine under the agentic load: a long shared prefix, many requests (docs/performance.md).

    python scripts/bench_engine.py                                    # the embedded checkpoint
    python scripts/bench_engine.py --model bench --rows 8             # the 8 layers of bench_cpu.py, random weights
    python scripts/bench_engine.py --model m3 --verify 3 --chunks 2048,8192    # 4 layers at M3's own widths, on a GPU
    python scripts/bench_engine.py --model m3 --keep before.json      # a second time: what each figure was before
    python scripts/bench_engine.py --model m3 --transformers          # beside transformers on the same GPU

Each line is one kind of call: a decode step of an engine of so many rows, all of them live; a round that verifies K
proposals in each row; a chunk that is a whole prompt; a long prompt in chunks. It has the milliseconds, what bounds it
from below, and the share of that bound. A step is bounded by the bytes that it must read, over the rate at which this
device copies memory; a prompt by its floating-point operations, over the rate of a large product. Both rates are
measured first, and a rate that this device cannot have ends the run. "busy" is the share of the time in which the
device runs a kernel: kernels are traced in calls of their own, and their time is divided by that of calls which are
not traced. "ahead" has the same calls, each launched before the one before it is read (`Work.dispatch_ahead`).
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from bench_cpu import TEXT
from measuring import Kernels, kernel_times, mean, traced

import m3jax
from m3jax import M3Config
from m3jax.decoding import Engine, Params, PromptLookup, Sampling
from m3jax.model import M3, init
from m3jax.planning.chips import CHIPS

SUFFIX = 64  # tokens that each request has of its own
FIRST_TOKEN = 256  # that is drawn: below are the embedded checkpoint's marks and placeholders


def main() -> None:
    """Run what was asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(number) for number in text.split(",") if number]
    parser.add_argument("--model", choices=("tiny", "bench", "m3"), default="tiny")
    parser.add_argument("--prefix", type=int, default=3500, help="tokens of the shared prefix")
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="of an engine, all live; an engine for each")
    parser.add_argument("--verify", type=numbers, default=[], help="proposals of a round, looked up in the prompt")
    parser.add_argument("--verify-rows", type=int, default=1, help="of the engines that verify")
    parser.add_argument("--chunks", type=numbers, default=[256, 2048], help="tokens of a prefill call")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a device call")
    parser.add_argument("--kv-dtype", help="storage type of keys and values")
    parser.add_argument("--index-dtype", help="storage type of index keys")
    parser.add_argument("--device-pages", type=int, help="keys and values in host memory, so many pages on the device")
    parser.add_argument("--weights", choices=("dequantize", "mxfp8"), default="dequantize", help="mxfp8 quantises them")
    parser.add_argument(
        "--ahead", choices=("default", "on", "off", "both"), default="default",
        help="launch a call before the last one is read; both: each kind of call without and with it",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, help="a file of figures: print what they were, and keep these")
    parser.add_argument("--transformers", action="store_true", help="beside transformers on this GPU, which goes first")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each call, by their time")
    args = parser.parse_args()
    if args.transformers:  # in a process of its own: the card does not hold both
        if args.model != "m3":
            parser.error("--transformers runs the layers of --model m3")
        script = Path(__file__).with_name("bench_transformers.py")
        subprocess.run([sys.executable, script, "--prompts", *map(str, args.chunks)], check=False)
    model = build(args.model) if args.weights == "dequantize" else m3jax.quantize(build(args.model))
    # Not by `build_engine`: they are compiled side by side, and its compile cache is a setting of the whole process.
    engines = {(rows, 0): Engine(model, **sizes(model, args, rows)) for rows in args.rows}
    for draft_tokens in args.verify:
        drafting = dict(draft=PromptLookup(), draft_tokens=draft_tokens)
        engines[args.verify_rows, draft_tokens] = Engine(model, **sizes(model, args, args.verify_rows), **drafting)
    of_chunks = Engine(model, **sizes(model, args, 1) | dict(prefill_chunk=args.chunks))
    with ThreadPoolExecutor() as pool:
        warm = [pool.submit(engine.warmup) for engine in engines.values()]
        of_chunks.warmup(programs=["prefill"])
        for done in warm:
            done.result()

    device = jax.devices()[0]
    copied, multiplied = copy_rate(), product_rate(model)
    print(f"{args.model}, {args.weights}, on {device.device_kind}, jax {jax.__version__}: "
          f"{args.prefix} + {SUFFIX} tokens a request, {args.new_tokens} new")  # fmt: skip
    print(f"compiled in {max(engine.timings.compile_seconds for engine in engines.values()):.0f} s, all side by side; "
          f"{of_chunks.bytes_per_token:.0f} bytes of cache a token")  # fmt: skip
    print(f"a copy moves {copied / 1e9:.0f} GB/s, a product computes {multiplied / 1e12:.1f} TFLOP/s")
    table = Table(args.keep, args.kernels)
    prefix = random_tokens(model.config, args.prefix, 0)
    for engine in engines.values():
        first_token(engine, prompt(engine, prefix, 0))  # the prefix, once in each
    for (rows, draft_tokens), engine in engines.items():
        what = f"{rows} rows, step" if not draft_tokens else f"{rows} rows x {1 + draft_tokens} verified tokens, round"
        num_bytes = step_bytes(model, rows, 1 + draft_tokens, args)
        for seed in range(rows):  # so that all runs below find the same pages: a prompt cut elsewhere rounds otherwise
            first_token(engine, prompt(engine, prefix, 1000 * rows + seed))
        default, drawn = engine._scheduler._dispatches_ahead, []
        for is_ahead in {"default": [default], "on": [True], "off": [False], "both": [False, True]}[args.ahead]:
            engine._scheduler._dispatches_ahead = is_ahead
            seconds, kernels, tokens = decode(engine, prefix, rows, args)
            work = what + (", ahead" if is_ahead and args.ahead != "default" else "")
            table.line(work, seconds, num_bytes / copied, f"{num_bytes / 1e9:.2f} GB", kernels)
            drawn.append(tokens)
        if any(tokens != drawn[0] for tokens in drawn):
            raise SystemExit(f"{what}: other tokens where calls are launched ahead")
    for chunk in args.chunks:
        seconds, kernels = prefill(of_chunks, chunk)
        flops = chunk_flops(model, chunk, args)
        table.line(f"prefill, {chunk} tokens", seconds, flops / multiplied, f"{flops / 1e12:.1f} TFLOP", kernels)
    length = args.prefix + SUFFIX
    flops = chunk_flops(model, length, args)
    work, what = f"prompt, {length} in {max(args.chunks)}s", f"{flops / 1e12:.1f} TFLOP"
    long_prompts = (random_tokens(model.config, length, seed) for seed in (1, 2, 3))
    seconds = statistics.median(first_token(of_chunks, tokens) for tokens in long_prompts)
    kernels = traced(lambda: first_token(of_chunks, random_tokens(model.config, length, 4)))
    table.line(work, seconds, flops / multiplied, what, kernels)
    table.keep()
    for engine in engines.values():
        if engine.offload:
            print("offload:", engine.offload)


class Table:
    """Prints a line for each kind of call, with what it took when the file was written."""

    def __init__(self, path: Path | None, num_kernels: int):
        self.path, self.num_kernels, self.now = path, num_kernels, {}
        self.before = json.loads(path.read_text()) if path is not None and path.exists() else {}
        print(
            f"{'':42s} {'ms':>8s} {'bound':>12s} {'ms':>7s} {'of it':>6s} {'busy':>6s} {'kernels':>8s} {'before':>8s}"
        )

    def line(self, work: str, seconds: float, bound: float, what: str, kernels: Kernels) -> None:
        """One kind of call: its time, the bound's, the share of it in which the device was busy, its kernels."""
        self.now[work] = seconds * 1e3
        before = f"{self.before[work]:8.2f}" if work in self.before else ""
        device = f"{kernels.busy / seconds:6.1%} {kernels.calls.total():8d}" if kernels.calls else f"{'':15s}"
        of_bound = f"{what:>12s} {bound * 1e3:7.2f} {bound / seconds:6.1%}"
        print(f"{work:42s} {seconds * 1e3:8.2f} {of_bound} {device} {before}", flush=True)
        for name, of_kernel in kernels.seconds.most_common(self.num_kernels):
            print(f"{of_kernel * 1e6:12.0f} us {kernels.calls[name]:5d} x  {name[:90]}")

    def keep(self) -> None:
        """Write the figures to the file, if there is one."""
        if self.path is not None:
            self.path.write_text(json.dumps(self.before | self.now, indent=1))


# Models and engines


def build(name: str) -> M3:
    """The model that `--model` names."""
    if name == "tiny":
        return m3jax.load()
    if name == "bench":
        return init(M3Config.from_dict(TEXT), 0)
    return init(four_layers(), 0, "bfloat16")


def four_layers() -> M3Config:
    """M3's last dense layer and its first three sparse ones."""
    full = M3Config.m3()
    first = full.layer_types.index("minimax_m3_sparse") - 1
    layer_types = full.layer_types[first : first + 4]
    mlp_layer_types = full.mlp_layer_types[first : first + 4]
    return dataclasses.replace(
        full, num_hidden_layers=4, vision_config=None, layer_types=layer_types, mlp_layer_types=mlp_layer_types
    )


def sizes(model: M3, args: argparse.Namespace, rows: int) -> dict:
    """An engine that holds the prefix once, what each request adds, and a prompt for `prefill`."""
    block_size = model.config.index_block_size
    pages_of_request = -(-(SUFFIX + args.new_tokens) // block_size) + 2
    length = args.prefix + SUFFIX + args.new_tokens
    return dict(
        pages=-(-args.prefix // block_size) + (rows + 1) * pages_of_request, max_batch=rows,
        prefill_chunk=max(args.chunks), steps_per_call=args.steps, max_length=length,
        kv_dtype=args.kv_dtype, index_dtype=args.index_dtype, device_pages=args.device_pages,
    )  # fmt: skip


def random_tokens(config: M3Config, count: int, seed: int) -> list[int]:
    """Tokens that are neither marks nor placeholders."""
    return np.random.default_rng(seed).integers(FIRST_TOKEN, config.vocab_size, count).tolist()


def prompt(engine: Engine, prefix: list[int], seed: int) -> list[int]:
    """The prefix and a suffix that no other request has."""
    return prefix + random_tokens(engine.config, SUFFIX, seed + 1)


def params(new_tokens: int) -> Params:
    """Greedy decoding of so many tokens."""
    return Params(max_new_tokens=new_tokens, sampling=Sampling.greedy())


# Measurements


def first_token(engine: Engine, tokens: list[int]) -> float:
    """Seconds from `add` to the first token of a request that is alone."""
    begin = time.perf_counter()
    engine.add(tokens, params(1))
    engine.run()
    return time.perf_counter() - begin


def decode(
    engine: Engine, prefix: list[int], rows: int, args: argparse.Namespace
) -> tuple[float, Kernels, list[list[int]]]:
    """Return (seconds of a decode step or a round of verification, its kernels, each row's tokens)."""

    def start(new_tokens: int) -> list[int]:
        handles = [engine.add(prompt(engine, prefix, 1000 * rows + seed), params(new_tokens)) for seed in range(rows)]
        while engine.prefill():
            pass
        return handles

    def steps_done() -> float:
        if engine.drafting.draft_tokens:
            return engine.drafting.forwards / rows
        return engine.timings.decoded_tokens / rows

    handles, seconds = start(args.new_tokens), []
    while engine.busy:
        began, before = engine.timings.decode_seconds, steps_done()
        engine.step()
        if steps_done() - before == args.steps:  # in the last call rows end
            seconds.append((engine.timings.decode_seconds - began) / args.steps)
    tokens = [engine.result(handle).tokens for handle in handles]
    if not seconds:
        raise SystemExit(f"--new-tokens {args.new_tokens}: need more, for a call of {args.steps} steps")
    second = statistics.median(seconds)
    # Of a loop in a CUDA graph a profiler sees the first turn alone. So those of all calls of a request are traced,
    # and a call of none: tokens of a round that nothing was proposed for meet fewer experts than others.
    engine._scheduler._dispatches_ahead = False  # each `step` is a call of its own
    start(args.new_tokens)
    of_call = traced(lambda: engine._runner.read(engine._runner.launch(0)))
    of_turns = []
    while engine.busy:
        of_turns.append(traced(engine.step) - of_call)
    of_step = mean(of_turns)
    of_step.busy += of_call.busy / args.steps
    return second, of_step, tokens


def prefill(engine: Engine, chunk: int) -> tuple[float, Kernels]:
    """Return (seconds of a chunk at the start of a prompt, its kernels)."""

    def run(seed: int) -> float:
        return first_token(engine, random_tokens(engine.config, chunk, seed))

    run(chunk)
    second = statistics.median(run(chunk + seed) for seed in (1, 2, 3))
    return second, traced(lambda: run(chunk + 4))


# Bounds


def copy_rate() -> float:
    """Return the bytes a second that a copy reads and writes.

    Raises:
      SystemExit: a rate that this device cannot have: more than its maker says, or less than a tenth of it.
    """
    x = jnp.arange(1 << (26 if jax.default_backend() == "cpu" else 29), dtype=jnp.int32)
    if jax.default_backend() == "cpu":
        return 2 * x.nbytes / _seconds(jnp.copy, x)
    # On the device's own clock: the host's has what stands between two calls, which can be longer than a copy.
    microseconds, _ = kernel_times(jnp.copy, [(x,)], 6)
    rate, kind = 2 * x.nbytes / microseconds * 1e6, jax.devices()[0].device_kind
    known = [chip.hbm_rate for chip in CHIPS.values() if chip.name in kind.lower()]
    if known and not known[0] / 10 <= rate <= known[0]:
        raise SystemExit(f"a copy moves {rate / 1e9:.0f} GB/s, and a {kind} {known[0] / 1e9:.0f}: this is no bound")
    return rate


def product_rate(model: M3) -> float:
    """Floating-point operations a second of a large product, in the model's dtype."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jax.random.normal(jax.random.key(0), (size, size)).astype(model.dtype)
    if jax.default_backend() == "cpu":
        return 2 * size**3 / _seconds(jax.jit(jnp.dot), x, x)
    return 2 * size**3 / kernel_times(jax.jit(jnp.dot), [(x, x)], 10)[0] * 1e6


def _seconds(fn: Callable, *args: jax.Array, calls: int = 10) -> float:
    """Return the seconds of one call among some that the device runs one after the other."""
    jax.block_until_ready(fn(*args))
    begin = time.perf_counter()
    jax.block_until_ready([fn(*args) for _ in range(calls)][-1])
    return (time.perf_counter() - begin) / calls


def step_bytes(model: M3, rows: int, tokens: int, args: argparse.Namespace) -> float:
    """Return the bytes that a step must read: weights that its tokens use, keys and values that each row attends to.

    Random weights choose experts evenly: of E experts, n tokens that choose A each use E (1 - (1 - A/E)^n).
    """
    config, length = model.config, args.prefix + SUFFIX
    unused = (1 - config.num_experts_per_tok / config.num_local_experts) ** (rows * tokens)
    every_token, experts = _weights(model, lambda x: x.nbytes)
    item = lambda dtype: jnp.dtype(dtype or model.dtype).itemsize
    pair = 2 * config.num_key_value_heads * config.head_dim * item(args.kv_dtype)  # a key and a value
    selected = min(length, config.index_topk_blocks * config.index_block_size)
    of_row = 0
    for stack in config.stacks:
        index = length * config.index_head_dim * item(args.index_dtype)
        of_row += stack.num_layers * (index + selected * pair if stack.is_sparse else length * pair)
    return every_token + model.lm_head.nbytes + experts * (1 - unused) + rows * of_row


def chunk_flops(model: M3, chunk: int, args: argparse.Namespace) -> float:
    """Floating-point operations of a chunk at the start of a prompt."""
    config, visible = model.config, chunk / 2  # tokens that a query sees, on average
    every_token, experts = _weights(model, lambda x: x.size)
    linear = every_token + experts * config.num_experts_per_tok / config.num_local_experts
    heads = config.num_attention_heads * config.head_dim
    selected = min(visible, config.index_topk_blocks * config.index_block_size)
    attention = 0.0
    for stack in config.stacks:
        index = config.num_key_value_heads * config.index_head_dim * visible
        attention += stack.num_layers * (index + 2 * heads * selected if stack.is_sparse else 2 * heads * visible)
    return 2 * chunk * (linear + attention)


def _weights(model: M3, measure: Callable[[jax.Array], int]) -> tuple[int, int]:
    """Return the sums of a size over weights: (of the layers' weights that every token meets, of the experts')."""
    all_of = lambda tree: sum(measure(x) for x in jax.tree.leaves(tree))
    experts = sum(all_of(stack.mlp.experts) for stack in model.stacks if hasattr(stack.mlp, "experts"))
    return all_of(model.stacks) - experts, experts


if __name__ == "__main__":
    main()
