"""Time compilation: the full model's tracing, the demo and a prompt, cold and warm.

    bench.py compile                         # 428B: tracing and lowering; nothing is compiled or allocated
    bench.py compile --runs demo             # scripts/demo.py, each program's seconds, cold and then warm
    bench.py compile --runs prompt           # m3jax.generate with four tokens, without a draft and with one

Each measurement but the first is a process of its own, under the XLA_FLAGS of this one. `bench.py engine` says what an
engine's warm-up takes.
"""

import contextlib
import io
import resource
import runpy
import sys
import tempfile
import time
from collections import defaultdict

from benchmarks.harness import HERE, Option, rows_of, start_part

USES_DEVICE = False  # the processes have it
RUNS = {"demo": ("cold", "warm"), "prompt": ("cold", "warm", "with-a-draft")}
OPTIONS = dict(
    runs=Option(["trace"], "Measurements", smoke=["trace"], choices=("trace", *RUNS)),
)


def measure(args):
    """Yield a row for each program that is traced, or compiled in a process of its own."""
    for what in args.runs:
        if what == "trace":
            yield from trace_full_model()
            continue
        with tempfile.TemporaryDirectory() as folder:
            for state in RUNS[what]:
                yield from measure_process(args, f"{what} {state}", folder)


def trace_full_model():
    """Yield the seconds of a prefill chunk and a decode step of all 60 layers; nothing is allocated."""
    import jax
    import jax.numpy as jnp

    from m3jax.cache import Cache
    from m3jax.config import M3Config
    from m3jax.model import abstract

    def step(model, tokens, cache, positions, lengths):
        hidden, cache = model.hidden(tokens, cache=cache, positions=positions, lengths=lengths)
        return model.unembed(hidden[:, -1]), cache

    config = M3Config.m3()
    model = abstract(config)
    for name, length in (("prefill, 2,048", 2048), ("decode, 1", 1)):
        cache = jax.eval_shape(lambda: Cache.init(config, 1, 131_072))
        rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
        began = time.perf_counter()
        traced = jax.jit(step, donate_argnums=2).trace(model, rows, cache, rows, jax.ShapeDtypeStruct((1,), jnp.int32))
        middle = time.perf_counter()
        traced.lower()
        yield {"program": f"{name}, {config.num_hidden_layers} layers", "trace, s": middle - began,
               "lower, s": time.perf_counter() - middle}  # fmt: skip


def measure_process(args, what: str, folder: str):
    """Yield what one run takes in a new process that keeps what it compiles in a folder."""
    environment = dict(M3JAX_CACHE_DIR=folder, M3JAX_PROGRESS="0", JAX_COMPILATION_CACHE_DIR=None)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    rows = rows_of(start_part(args, what, env=environment))
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    yield {"run": what, "program": "the process", "s": seconds, "of CPU time": cpu}
    for row in rows:
        yield {"run": what, **row, "of CPU time": None}


def part(args):
    """Yield the seconds of one run's programs: of each that took a tenth of a second, and of all others together."""
    import jax

    seconds = defaultdict(list)

    def listen(event: str, duration: float, **about: str) -> None:
        if event.endswith("backend_compile_duration"):
            seconds[about.get("fun_name", "a program without a name")].append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    began, out = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        if args.part.startswith("demo"):
            sys.argv = ["demo.py"]
            runpy.run_path(str(HERE.parent / "demo.py"), run_name="__main__")
        else:
            sys.argv = ["m3jax.generate", "--prompt-tokens", "1,2,3,4", "--max-new-tokens", "32", "--temperature", "0"]
            sys.argv += ["--draft", "builtin"] if args.part.endswith("draft") else []
            runpy.run_module("m3jax.generate", run_name="__main__", alter_sys=True)
    if not out.getvalue().strip():
        raise SystemExit(f"{args.part} printed nothing")
    figures = {"all after Python's own start": time.perf_counter() - began}
    for name, durations in seconds.items():
        figures |= {f"compile {name}": duration for duration in durations if duration >= 0.1}
    figures["compile all others"] = sum(x for durations in seconds.values() for x in durations if x < 0.1)
    for name, duration in figures.items():
        yield {"program": name, "s": duration}
