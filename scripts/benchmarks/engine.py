"""Time the engine under the agentic load: a long shared prefix, many requests (docs/performance.md).

    bench.py engine                                    # the embedded checkpoint
    bench.py engine --model bench --rows 8             # the 8 layers of `bench.py cpu`, random weights
    bench.py engine --model m3 --verify 3 --chunks 2048 8192    # 4 layers at M3's own widths, on a GPU
    bench.py engine --model m3 --transformers          # beside transformers on the same GPU, which goes first

A row is one kind of call: a decode step of an engine of so many requests, all of them live; a round that verifies K
proposals in each; a chunk that is a whole prompt; a long prompt in chunks. It has the milliseconds, what bounds it from
below, and the share of that bound. A step is bounded by the bytes that it must read, over the rate at which this device
copies memory; a prompt by its floating-point operations, over the rate of a large product. Both rates are measured
first, and a rate that this device cannot have ends the run. "busy" is the share of the time in which the device runs a
kernel: kernels are traced in calls of their own, and their time is divided by that of calls which are not traced.
"ahead" has the same calls, each launched before the one before it is read (`Work.dispatch_ahead`).
"""

import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from benchmarks.harness import Option, rows_of, start_part
from benchmarks.models import (
    NAMES,
    SUFFIX,
    build,
    engine_sizes,
    first_token,
    four_layers,
    greedy,
    prompt,
    random_tokens,
    start,
    step_seconds,
)  # fmt: skip
from benchmarks.timing import Kernels, copy_rate, mean, product_rate, traced
from m3jax import M3Config
from m3jax.decoding import Engine, PromptLookup
from m3jax.model import M3

USES_DEVICE = False  # transformers goes first; `measure` names the device
OPTIONS = dict(
    model=Option("tiny", "Weights", choices=NAMES),
    prefix=Option(3500, "Tokens of the shared prefix", smoke=300),
    new_tokens=Option(100, "New tokens of a request", smoke=12),
    rows=Option([1, 8, 32], "Requests of an engine, all live; an engine for each number", smoke=[2]),
    verify=Option([], "Proposals of a round, looked up in the prompt", type=int),
    chunks=Option([256, 2048], "Tokens of a prefill call", smoke=[256]),
    steps=Option(16, "Decode steps of a device call", smoke=4),
    weights=Option("dequantize", "Storage of weights", choices=("dequantize", "mxfp8")),
    ahead=Option("default", "Launch of a call before the last one is read", choices=("default", "on", "off", "both")),
    transformers=Option(False, "Run transformers on the prompts first"),
)


def measure(args):
    """Yield a row for each kind of call."""
    if args.transformers:  # in a process of its own: the card does not hold both
        if args.model != "m3":
            raise ValueError("--transformers runs the layers of --model m3")
        with start_part(args, "transformers") as process:
            yield from rows_of(process)
    model = build(args.model, args.weights)
    config = model.config
    make = lambda rows, **more: Engine(
        model, steps_per_call=args.steps,
        **engine_sizes(config, args.prefix, args.new_tokens, rows) | dict(prefill_chunk=max(args.chunks)) | more,
    )  # fmt: skip
    # Not by `build_engine`: they are compiled side by side, and its compile cache is a setting of the whole process.
    engines = {(rows, 0): make(rows) for rows in args.rows}
    for draft_tokens in args.verify:
        drafting = dict(draft=PromptLookup(), draft_tokens=draft_tokens)
        engines[1, draft_tokens] = make(1, **drafting)
    of_chunks = make(1, prefill_chunk=args.chunks)
    with ThreadPoolExecutor() as pool:
        warm = [pool.submit(engine.warmup) for engine in engines.values()]
        of_chunks.warmup(programs=["prefill"])
        for done in warm:
            done.result()

    copied, multiplied = copy_rate(), product_rate(model.dtype)
    yield (
        f"{jax.devices()[0].device_kind}: a copy moves {copied / 1e9:.0f} GB/s, a product computes "
        f"{multiplied / 1e12:.2f} TFLOP/s; {of_chunks.bytes_per_token:.0f} bytes of cache a token; compiled in "
        f"{max(engine.timings.compile_seconds for engine in engines.values()):.0f} s, all side by side"
    )

    def row(work: str, seconds: float, kernels: Kernels, num_bytes: float = 0.0, flops: float = 0.0) -> dict:
        bound = num_bytes / copied or flops / multiplied
        return {
            "call": work, "ms": 1e3 * seconds, "bound, ms": 1e3 * bound, "of bound": bound / seconds,
            "GB": num_bytes / 1e9 or None, "TFLOP": flops / 1e12 or None,
            "busy": kernels.busy / seconds if kernels.calls else None, "kernels": kernels.calls.total() or None,
        }  # fmt: skip

    prefix = random_tokens(config, args.prefix, 0)
    for engine in engines.values():
        first_token(engine, prompt(config, prefix, 0))  # the prefix, once in each
    for (rows, draft_tokens), engine in engines.items():
        what = f"{rows} rows, step" if not draft_tokens else f"{rows} rows x {1 + draft_tokens} verified tokens, round"
        for seed in range(rows):  # so that all runs below find the same pages: a prompt cut elsewhere rounds otherwise
            first_token(engine, prompt(config, prefix, 1000 * rows + seed))
        default, drawn = engine._scheduler._dispatches_ahead, []
        for is_ahead in {"default": [default], "on": [True], "off": [False], "both": [False, True]}[args.ahead]:
            engine._scheduler._dispatches_ahead = is_ahead
            seconds, kernels, tokens = decode(engine, prefix, rows, args)
            work = what + (", ahead" if is_ahead and args.ahead != "default" else "")
            yield row(work, seconds, kernels, num_bytes=step_bytes(model, rows, 1 + draft_tokens, args))
            drawn.append(tokens)
        if any(tokens != drawn[0] for tokens in drawn):
            raise SystemExit(f"{what}: other tokens where calls are launched ahead")
    for length in (*args.chunks, args.prefix + SUFFIX):
        what = f"prefill, {length} tokens" if length in args.chunks else f"prompt, {length} in {max(args.chunks)}s"
        run = lambda seed, length=length: first_token(of_chunks, random_tokens(config, length, length + seed))
        run(0)
        seconds, kernels = statistics.median(run(seed) for seed in (1, 2, 3)), traced(lambda run=run: run(4))
        yield row(what, seconds, kernels, flops=chunk_flops(model, length))


def part(args):
    """Yield the time of transformers' prompts, read twice of which the second counts, and of a token behind each."""
    from benchmarks.transformers_peer import TransformersText

    config, draw = four_layers(), np.random.default_rng(0)
    peer = TransformersText(config, "bfloat16", "cuda")
    for length in args.chunks:
        prompt = draw.integers(2, config.vocab_size, length).tolist()
        try:
            seconds = [peer.prefill(prompt) for _ in range(2)][1]
            step = peer.decode(16)
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            print(f"{length} tokens: {str(error).splitlines()[0][:200]}", file=sys.stderr)
            continue
        yield {"transformers": f"{length} tokens", "ms": 1e3 * seconds, "tokens/s": length / seconds,
               "ms a token": 1e3 * step}  # fmt: skip


def decode(engine: Engine, prefix: list[int], rows: int, args) -> tuple[float, Kernels, list]:
    """Return the seconds of a decode step or a round of verification, its kernels, and each row's tokens."""
    prompts = [prompt(engine.config, prefix, 1000 * rows + seed) for seed in range(rows)]
    asked = greedy(args.new_tokens)
    handles = start(engine, prompts, asked)
    seconds = step_seconds(engine, rows, args.steps)
    tokens = [engine.result(handle).tokens for handle in handles]
    # Of a loop in a CUDA graph a profiler sees the first turn alone. So those of all calls of a request are traced,
    # and a call of none: tokens of a round that nothing was proposed for meet fewer experts than others.
    engine._scheduler._dispatches_ahead = False  # each `step` is a call of its own
    start(engine, prompts, asked)
    of_call = traced(lambda: engine._runner.read(engine._runner.launch(0)))
    of_turns = []
    while engine.busy:
        of_turns.append(traced(engine.step) - of_call)
    of_step = mean(of_turns)
    of_step.busy += of_call.busy / args.steps
    return seconds, of_step, tokens


# Bounds


def step_bytes(model: M3, rows: int, tokens: int, args) -> float:
    """Return the bytes that a step must read: weights that its tokens use, keys and values that each row attends to.

    Random weights choose experts evenly: of E experts, n tokens that choose A each use E (1 - (1 - A/E)^n).
    """
    config, length = model.config, args.prefix + SUFFIX
    unused = (1 - config.num_experts_per_tok / config.num_local_experts) ** (rows * tokens)
    every_token, experts = sum_weights(model, lambda x: x.nbytes)
    pair = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize  # a key and a value
    selected = min(length, config.index_topk_blocks * config.index_block_size)
    of_row = 0
    for stack in config.stacks:
        index = length * config.index_head_dim * model.dtype.itemsize
        of_row += stack.num_layers * (index + selected * pair if stack.is_sparse else length * pair)
    return every_token + model.lm_head.nbytes + experts * (1 - unused) + rows * of_row


def chunk_flops(model: M3, chunk: int) -> float:
    """Return the floating-point operations of a chunk at the start of a prompt."""
    config, visible = model.config, chunk / 2  # tokens that a query sees, on average
    every_token, experts = sum_weights(model, lambda x: x.size)
    linear = every_token + experts * config.num_experts_per_tok / config.num_local_experts
    return 2 * chunk * (linear + attention_flops(config, visible))


def attention_flops(config: M3Config, visible: float) -> float:
    """Return the products of a query in all layers' attention and index branches."""
    heads = config.num_attention_heads * config.head_dim
    selected = min(visible, config.index_topk_blocks * config.index_block_size)
    index = config.num_key_value_heads * config.index_head_dim * visible
    of_stack = lambda stack: index + 2 * heads * selected if stack.is_sparse else 2 * heads * visible
    return sum(stack.num_layers * of_stack(stack) for stack in config.stacks)


def sum_weights(model: M3, size: Callable[[jax.Array], int]) -> tuple[int, int]:
    """Return the sums of a size over weights: of the layers' weights that every token meets, and of the experts'."""
    all_of = lambda tree: sum(size(x) for x in jax.tree.leaves(tree))
    experts = sum(all_of(stack.mlp.experts) for stack in model.stacks if hasattr(stack.mlp, "experts"))
    return all_of(model.stacks) - experts, experts
