"""Times compilation: the full model's tracing, the demo cold and warm, an engine over four layers of M3.

    python scripts/bench_compile.py                # 428B: tracing and lowering; nothing is compiled or allocated
    python scripts/bench_compile.py demo           # scripts/demo.py, each program's seconds, cold and then warm
    python scripts/bench_compile.py prompt         # m3jax.generate with four tokens, without a draft and with one
    python scripts/bench_compile.py slice          # 4 layers at M3's own widths, for a GPU of 80 GB or more
    python scripts/bench_compile.py demo slice --flags none no-autotuning --seconds 170

Each measurement but the first is a process of its own, once under each of the sets of XLA's flags. Whatever has not
begun when the seconds are over is left out, which a line says.
"""

import argparse
import contextlib
import io
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = {"demo": ("cold", "warm"), "prompt": ("cold", "warm", "with-a-draft"), "slice": ("cold",)}
FLAGS = {
    "none": "",
    "no-autotuning": "--xla_gpu_autotune_level=0",
    "no-triton-gemm": "--xla_gpu_enable_triton_gemm=false",
}
TOKENS, STEPS = 8192, 64  # of the slice's prompt, and decode steps after it


def main() -> None:
    """Print a table for each thing that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=("trace", *RUNS), default="trace")
    parser.add_argument("--flags", nargs="+", choices=tuple(FLAGS), default=["none"], help="under which to measure")
    parser.add_argument("--seconds", type=float, default=600, help="for all processes together")
    parser.add_argument("--inside", choices=[f"{what} {state}" for what, states in RUNS.items() for state in states],
                        help="do one measurement's work in this process")  # fmt: skip
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    if args.inside is not None:
        run(args.inside)
        return
    for what in [args.what] if isinstance(args.what, str) else args.what:
        if what == "trace":
            trace_full_model()
            continue
        for flags in args.flags:
            with tempfile.TemporaryDirectory() as folder:
                for state in RUNS[what]:
                    measure(f"{what} {state}", flags, folder, deadline)


# Tracing


def trace_full_model() -> None:
    """Print seconds for a prefill chunk and a decode step of all 60 layers; nothing is allocated."""
    import jax
    import jax.numpy as jnp

    from m3jax.cache import Cache
    from m3jax.config import M3Config
    from m3jax.model import abstract
    from m3jax.model.build import num_bytes

    def step(model, tokens, cache, positions, lengths):
        hidden, cache = model.hidden(tokens, cache=cache, positions=positions, lengths=lengths)
        return model.unembed(hidden[:, -1]), cache

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


# Compiling, in processes of their own


def measure(what: str, flags: str, folder: str, deadline: float) -> None:
    """Run one of them in a new process that keeps what it compiles in a folder, and print what that took."""
    heading = f"{what}, flags: {flags}"
    if (remaining := deadline - time.perf_counter()) < 5:
        print(f"{heading}: left out, no time is left")
        return
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    all_flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[flags]}".strip()
    environment |= dict(M3JAX_CACHE_DIR=folder, M3JAX_PROGRESS="0", XLA_FLAGS=all_flags)
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, __file__, "--inside", what]
    try:
        done = subprocess.run(command, env=environment, timeout=remaining, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        print(f"{heading}: not done after {remaining:.0f} s", flush=True)
        return
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{heading}: {seconds:.1f} s, {cpu:.1f} s of CPU time{'' if done.returncode == 0 else ', FAILED'}")
    for line in (done.stdout if done.returncode == 0 else done.stderr[-2000:]).splitlines():
        print(f"    {line}", flush=True)


@contextlib.contextmanager
def compile_times() -> Iterator[dict[str, list[float]]]:
    """Collect the seconds of each program that is compiled inside, or brought from the cache, by its name."""
    import jax

    seconds = defaultdict(list)

    def listen(event: str, duration: float, **about: str) -> None:
        if event.endswith("backend_compile_duration"):
            seconds[about.get("fun_name", "a program without a name")].append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


def print_times(seconds: dict[str, list[float]]) -> None:
    """Print the programs that took a tenth of a second and more, and all others in one line."""
    small = [duration for durations in seconds.values() for duration in durations if duration < 0.1]
    for name, durations in seconds.items():
        if longer := [duration for duration in durations if duration >= 0.1]:
            print(f"{name}: {', '.join(f'{duration:.2f}' for duration in longer)} s")
    print(f"{len(small)} other programs: {sum(small):.2f} s")


def run(what: str) -> None:
    """One measurement's work, and the seconds of its programs."""
    if what == "slice cold":
        run_slice()
        return
    began, out = time.perf_counter(), io.StringIO()
    with compile_times() as seconds, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        if what.startswith("demo"):
            sys.argv = ["demo.py"]
            runpy.run_path(str(HERE / "demo.py"), run_name="__main__")
        else:
            sys.argv = ["m3jax.generate", "--prompt-tokens", "1,2,3,4", "--max-new-tokens", "32", "--temperature", "0"]
            sys.argv += ["--draft", "builtin"] if what.endswith("draft") else []
            runpy.run_module("m3jax.generate", run_name="__main__", alter_sys=True)
    if not out.getvalue().strip():
        raise SystemExit(f"{what} printed nothing")
    print_times(seconds)
    print(f"in all {time.perf_counter() - began:.1f} s after Python's own start")


def run_slice() -> None:
    """Warm-up of an engine over four layers, and what the programs so compiled then do."""
    import jax
    from bench_engine import build, first_token, params, random_tokens

    from m3jax.decoding import Engine

    began = time.perf_counter()
    model = build("m3")
    jax.block_until_ready(jax.tree.leaves(model))
    print(f"weights made in {time.perf_counter() - began:.1f} s")
    pages = TOKENS // model.config.index_block_size
    # Not by `build_engine`, whose compile cache would hide what is timed here.
    engine = Engine(model, pages=4 * pages, max_batch=8, max_length=2 * TOKENS)
    with compile_times() as seconds:
        engine.warmup()
    print(f"warm-up: {engine.timings.compile_seconds:.1f} s")
    print_times(seconds)
    prompts = [random_tokens(model.config, TOKENS, seed) for seed in range(3)]
    firsts = [first_token(engine, tokens) for tokens in prompts]
    print(f"prefill of {TOKENS} tokens: {', '.join(f'{TOKENS / first:.0f}' for first in firsts)} tokens/s")
    before = engine.timings.decode_seconds
    engine.add(prompts[-1], params(1 + STEPS))
    engine.run()
    print(f"a decode step: {1e3 * (engine.timings.decode_seconds - before) / STEPS:.2f} ms")


if __name__ == "__main__":
    main()
