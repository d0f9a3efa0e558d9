"""Meshes of devices beside one device: what their programs exchange and compute, and how long they take.

    python scripts/bench_mesh.py --counts                     # 8 CPU devices: the compiled programs' own counts
    python scripts/bench_mesh.py --counts --h100              # what H100s exchange beside products; it needs none
    python scripts/bench_mesh.py                              # on GPUs: times, beside one of them in the same run
    python scripts/bench_mesh.py --meshes tensor=2 expert=2 --rows 1 16 --context-tokens 60064
    python scripts/bench_mesh.py --index --meshes context=2 --context-tokens 1048576     # one sparse layer's attention
    python scripts/bench_mesh.py --agree --meshes tensor=2    # log-probabilities beside those of one GPU
    python scripts/bench_mesh.py --smoke                      # seconds, on a CPU: sees that it runs

The model has 4 layers at M3's own widths, one dense and three sparse, with random weights. Times are of the engine: a
decode step with so many rows live behind a shared prefix, the first chunk of a prompt, and a whole prompt in chunks;
each divided into the time of one device that the same run took. Every line is printed when it is known. Models are made
one after the other, so that a device holds one at a time.

`--h100` has XLA compile and schedule for H100s that are only described: it needs `jax[cuda13]`, no GPU and no driver,
and some minutes a program. Products count as such where XLA or cuBLAS computes them, not inside of Pallas kernels.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

if "--h100" in sys.argv:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there need not be a driver
if "--counts" in sys.argv or "--smoke" in sys.argv:  # before jax looks for devices
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = " --xla_force_host_platform_device_count=8"
    if "--smoke" in sys.argv:
        flags += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags

import jax
import jax.numpy as jnp
import numpy as np
from bench_engine import SUFFIX, first_token, four_layers, params, prompt, random_tokens
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from measuring import device_times

from m3jax import M3Config
from m3jax.cache import Cache, LayerCall
from m3jax.decoding import Engine, Params, Sampling
from m3jax.decoding.device import compiler_options
from m3jax.execution import Compute, Fast, Values
from m3jax.model import M3, init
from m3jax.model.context import selection_rules
from m3jax.ops import Heads
from m3jax.parallel import AXES, parse_axes, parse_mesh
from m3jax.planning import hlo, program
from m3jax.planning.chips import parse_slice
from m3jax.planning.job import Job
from m3jax.platform import platform

ONE = "one device"
COMPARED = 4  # prompts whose log-probabilities are compared
PROFILED = 16  # kernels and gaps of a profile that are printed
# What XLA's compiler asks of a GPU, as an H100 (SXM, 80 GB) answers.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 2 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
QUICK = {"xla_backend_optimization_level": 0}  # LLVM's; the program is the same


def main() -> int:
    """Count or time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--meshes", nargs="+", default=["tensor=2", "expert=2", "context=2"], help="as in data=2,tensor=4"
    )
    parser.add_argument("--context-tokens", type=int, default=60_064, help="of the shared prefix, or of --index")
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[1, 16], help="of an engine, all live; an engine for each"
    )
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill call")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a device call")
    parser.add_argument("--counts", action="store_true", help="compile for 8 CPU devices and count, run nothing")
    parser.add_argument("--h100", action="store_true", help="with --counts: compile for H100s that are only described")
    parser.add_argument("--index", action="store_true", help="time attention of one sparse layer alone")
    parser.add_argument(
        "--agree", action="store_true", help="compare log-probabilities with one device's, time nothing"
    )
    parser.add_argument("--no-prefill", action="store_true", help="no times of prompts")
    parser.add_argument("--no-baseline", action="store_true", help="no device by itself first")
    parser.add_argument("--profile", action="store_true", help="print how devices spend a step and a chunk")
    parser.add_argument(
        "--options", nargs="+", action="append", default=[], metavar="PROGRAM:OPTION=VALUE",
        help="engines with other options of XLA too, beside those with the usual ones, as in decode:xla_gpu_x=true; a "
        "value that begins with + or - is a list's further part, or one that it loses; may be repeated",
    )  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="a tiny model on one small mesh, on a CPU")
    args = parser.parse_args()
    config = four_layers()
    if args.smoke:
        config = tiny(config)
        args.context_tokens, args.chunk, args.rows, args.steps = 96, 32, [2], 4
        args.names = ["tensor=2,context=2"]  # alone: each more is as many programs to compile
    else:
        args.names = args.meshes if args.no_baseline else [ONE, *args.meshes]
    device = jax.devices()[0]
    print(f"{len(jax.devices())} x {device.device_kind}, jax {jax.__version__}, "
          f"{args.context_tokens} tokens of context, chunks of {args.chunk}")  # fmt: skip
    if args.counts or args.smoke:
        count(config, args)
    if args.index or args.smoke:
        time_index(config, args)
    if args.agree or args.smoke:
        compare(config, args)
    if not (args.counts or args.index or args.agree):
        time_engines(config, args)
    return 0


def tiny(config: M3Config) -> M3Config:
    """The same layers, a thousandth as wide."""
    return replace(
        config, hidden_size=64, vocab_size=512, num_attention_heads=8, head_dim=16, rotary_dim=8, index_head_dim=16,
        intermediate_size=32, dense_intermediate_size=64, shared_intermediate_size=32, num_local_experts=8,
        num_experts_per_tok=2, index_block_size=8, index_topk_blocks=3, max_position_embeddings=1024,
        eos_token_id=(1,), bos_token_id=0,
    )  # fmt: skip


# Counts


def count(config: M3Config, args: argparse.Namespace) -> None:
    """Print, for each mesh, what the compiled programs of an engine exchange, compute and move, beside one device."""
    dtype = "float32" if args.smoke else "bfloat16"
    for rows in args.rows:
        job = Job(
            config=config, slice=parse_slice("h200:8"), context=args.context_tokens, batch=rows, dtype=dtype,
            chunk=args.chunk,
        )  # fmt: skip
        programs = {} if args.smoke else {f"a step of {rows}": program.decode}
        if rows == args.rows[0]:
            programs[f"a chunk of {args.chunk}"] = program.prefill
        for what, trace in programs.items():
            alone = None
            for name in args.names:
                if args.h100 and name == ONE:
                    continue  # it exchanges nothing
                mesh = h100_mesh(name) if args.h100 else parse_mesh("" if name == ONE else name)
                text = compiled_text(trace, job, mesh, args.h100)
                exchanged, work = hlo.collectives(text), ""
                if not args.h100:  # where kernels of a GPU do not say what they compute and move
                    counts = hlo.count(text)
                    alone = alone or counts
                    work = (
                        f"{counts.flops / 1e9:.4g} GFLOP ({counts.flops / alone.flops:.3f} of one device), "
                        f"{counts.traffic / 1e9:.4g} GB ({counts.traffic / alone.traffic:.3f}), "
                    )
                hidden = [c for c in exchanged if c.is_hidden]
                sent, times = (lambda of: sum(c.sent for c in of) / 1e6), (lambda of: sum(c.times for c in of))
                print(
                    f"{what}, {name}: {work}{sent(exchanged):.4g} MB sent in {times(exchanged)} collectives, "
                    f"{sent(hidden):.4g} MB of them in {times(hidden)} beside products",
                    flush=True,
                )
                for line in large_collectives(exchanged, job, rows if "step" in what else args.chunk):
                    print(line, flush=True)


def h100_mesh(name: str) -> Mesh:
    """Return a mesh, as in tensor=2, of H100s that are only described; end the script without XLA's CUDA compiler."""
    sizes = parse_axes(name)
    shape = [sizes.get(axis, 1) for axis in AXES]
    try:
        described = topologies.get_topology_desc(
            "h100", platform="cuda", target_config=H100, topology=f"1x1x{np.prod(shape)}"
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        sys.exit(
            f"--h100 needs XLA's compiler for CUDA (pip install 'jax[cuda13]'; no GPU): {str(error).splitlines()[0]}"
        )
    return Mesh(np.array(described.devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compiled_text(trace: Callable, job: Job, mesh: Mesh, is_h100: bool) -> str:
    """Return the scheduled text of one of an engine's programs, compiled for the devices of the mesh."""
    if not is_h100:
        return trace(job, mesh).lower().compile(QUICK).as_text()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # so that the model is traced for a GPU
        lowered = trace(job, mesh).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


def large_collectives(exchanged: Iterable[hlo.Collective], job: Job, tokens: int) -> list[str]:
    """Lines of the collectives that move as much as half of the residual stream, `[tokens, D]` in 16 bits."""
    runs = Counter()
    for c in exchanged:
        if c.num_bytes >= tokens * job.config.hidden_size:
            runs[c.kind, c.num_bytes, c.num_devices, c.is_hidden] += c.times
    return [
        f"    {times:4d} x {kind} of {num_bytes / 1e6:.4g} MB over {devices}{', beside products' if is_hidden else ''}"
        for (kind, num_bytes, devices, is_hidden), times in runs.items()
    ]


# Times


class Ratios:
    """Prints a line a measurement, with what it took on one device.

    Attributes:
      alone: seconds of the first measurement of a kind.
      drawn: greedy tokens of each row of the first engine with so many rows.
    """

    def __init__(self):
        self.alone: dict[str, float] = {}
        self.drawn: dict[int, list[list[int]]] = {}

    def line(self, mesh: str, what: str, seconds: float, note: str = "") -> None:
        """One measurement; the first one of a kind, of one device, is what the others are divided into."""
        ratio = self.alone.setdefault(what, seconds) / seconds
        print(f"{mesh:24s} {what:34s} {seconds * 1e3:10.3f} ms {ratio:7.2f} x {note}", flush=True)

    def same(self, tokens: list[list[int]]) -> str:
        """Say how many tokens of an engine's rows are those of the first engine with so many rows."""
        first = self.drawn.setdefault(len(tokens), tokens)
        same = sum(a == b for row, other in zip(first, tokens, strict=True) for a, b in zip(row, other, strict=True))
        return f"{same} of {sum(map(len, tokens))} tokens the same"


def time_engines(config: M3Config, args: argparse.Namespace) -> None:
    """Print the times of steps and prompts of engines on each mesh, with the usual options of XLA and with others."""
    ratios, began = Ratios(), time.perf_counter()
    prefix = random_tokens(config, args.context_tokens, 0)
    for name in args.names:
        model = init(config, 0, "float32" if args.smoke else "bfloat16", None if name == ONE else name)
        jax.block_until_ready(model)
        print(f"{name}: weights after {time.perf_counter() - began:.0f} s of the run", flush=True)
        for changes in [[], *args.options]:
            try:
                with mock.patch.dict(compiler_options.OPTIONS, changed_options(changes)):
                    time_model(" ".join([name, *changes]), model, prefix, args, ratios)
            except jax.errors.JaxRuntimeError as error:  # an option that this version or this device does not have
                print(f"{name} {' '.join(changes)}: {str(error).splitlines()[0]}", flush=True)
            gc.collect()
        del model  # before the next mesh's weights are made
        gc.collect()


def changed_options(changes: Iterable[str]) -> dict:
    """Return the entries of `OPTIONS` for models in 16 bits on a GPU that have some of them changed."""
    changed = {}
    for change in changes:
        program, _, setting = change.partition(":")
        key, _, value = setting.partition("=")
        entry = (program, "gpu", "narrow")
        options = changed.setdefault(entry, dict(compiler_options.OPTIONS[entry]))
        if value[:1] in ("+", "-"):
            parts = [part for part in options.get(key, "").split(",") if part and part != value[1:]]
            options[key] = ",".join([*parts, value[1:]] if value[0] == "+" else parts)
        else:
            options[key] = {"true": True, "false": False}.get(value, int(value) if value.isdecimal() else value)
    return changed


def time_model(name: str, model: M3, prefix: list[int], args: argparse.Namespace, ratios: Ratios) -> None:
    """Print the times of a model's steps and prompts."""
    config, began = model.config, time.perf_counter()
    engines = {rows: Engine(model, **sizes(config, args, rows)) for rows in args.rows}
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(engine.warmup, programs=["prefill", "decode"]) for engine in engines.values()]:
            done.result()
    print(f"{name}: compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for rows, engine in engines.items():
        if not args.no_prefill and rows == args.rows[0]:
            time_prompts(name, engine, config, args, ratios)
        first_token(engine, prefix)
        time_steps(name, engine, prefix, rows, args, ratios)


def sizes(config: M3Config, args: argparse.Namespace, rows: int) -> dict:
    """The sizes of an engine that holds the prefix once and what each request adds."""
    block, new = config.index_block_size, new_tokens(args)
    length = args.context_tokens + SUFFIX + new
    pages = -(-args.context_tokens // block) + (rows + 1) * (-(-(SUFFIX + new) // block) + 2)
    return dict(
        pages=pages, max_batch=rows, prefill_chunk=[args.chunk], steps_per_call=args.steps,
        max_length=min(length, config.max_position_embeddings),
    )  # fmt: skip


def new_tokens(args: argparse.Namespace) -> int:
    """Tokens of a request: enough for five calls of so many steps."""
    return 5 * args.steps + 2


def time_prompts(name: str, engine: Engine, config: M3Config, args: argparse.Namespace, ratios: Ratios) -> None:
    """Print the time of a prompt of one chunk, and that of one as long as the context, to their first tokens."""
    chunk = min(args.chunk, args.context_tokens)
    run = lambda length, seed: first_token(engine, random_tokens(config, length, seed))
    run(chunk, 1)
    ratios.line(name, f"prompt of {chunk}", statistics.median(run(chunk, seed) for seed in (2, 3, 4)))
    seconds = min(run(args.context_tokens, seed) for seed in (5, 6))
    ratios.line(name, f"prompt of {args.context_tokens}", seconds)
    if args.profile:
        print_profile(name, f"prompt of {chunk}", lambda: run(chunk, 7))


def time_steps(
    name: str, engine: Engine, prefix: list[int], rows: int, args: argparse.Namespace, ratios: Ratios
) -> None:
    """Print the time of a decode step with all rows live."""
    start = lambda: [engine.add(prompt(engine, prefix, seed), params(new_tokens(args))) for seed in range(rows)]

    def prefilled():
        handles = start()
        while engine.prefill():
            pass
        return handles

    handles, seconds = prefilled(), []
    while engine.busy:
        began, before = engine.timings.decode_seconds, engine.timings.decoded_tokens
        engine.step()
        if engine.timings.decoded_tokens - before == rows * args.steps:  # in the last call rows end
            seconds.append((engine.timings.decode_seconds - began) / args.steps)
    tokens = [engine.result(handle).tokens for handle in handles]
    ratios.line(name, f"step of {rows}", statistics.median(seconds), ratios.same(tokens))
    if args.profile:
        prefilled()
        print_profile(name, f"{args.steps} steps of {rows}", lambda: engine.step())
        engine.run()


def print_profile(name: str, what: str, run: Callable[[], object]) -> None:
    """Print how each device spends a call: in kernels, in collectives, how much of these others hide, and in gaps."""
    began = time.perf_counter()
    devices = device_times(run)
    taken = time.perf_counter() - began  # with the profiler's own time
    for device in devices:
        print(f"    {name}, {what}, {device.name}: {device.total * 1e3:.2f} ms, busy {device.busy * 1e3:.2f}, "
              f"collectives {device.collectives * 1e3:.2f}, of which hidden {device.hidden * 1e3:.2f}; "
              f"{taken:.1f} s under the profiler", flush=True)  # fmt: skip
    for device in devices[:1]:
        largest = lambda times: sorted(times.items(), key=lambda item: -item[1][0])[:PROFILED]
        for kernel, (seconds, calls) in largest(device.kernels):
            print(f"      {seconds * 1e3:9.3f} ms {calls:6d} x {kernel[:90]}", flush=True)
        for (before, behind), (seconds, calls) in largest(device.gaps):
            print(
                f"      {seconds * 1e3:9.3f} ms {calls:6d} x nothing between {before[:50]} and {behind[:50]}",
                flush=True,
            )


# What they compute


def compare(config: M3Config, args: argparse.Namespace) -> None:
    """Print how far log-probabilities of meshes lie from one device's, beside one device's own in shorter chunks.

    In 16 bits sums of another order round to other numbers, and these choose other experts and blocks: what a mesh
    changes is to be held against what a chunk of another length changes. The model has a quarter of M3's experts.
    """
    config = config if args.smoke else replace(config, num_local_experts=config.num_local_experts // 4)
    prompts = [random_tokens(config, args.chunk, seed) for seed in range(COMPARED)]
    meshes = [name for name in args.names if name != ONE]
    first = None
    for name, chunk in [(ONE, args.chunk), (ONE, args.chunk // 4), *((name, args.chunk) for name in meshes)]:
        found = log_probabilities(config, name, chunk, prompts, args)
        first = first or found
        read = np.abs(found[0] - first[0])
        same = [first_difference(row, other) for row, other in zip(found[1], first[1], strict=True)]
        print(
            f"{name}, chunks of {chunk}: log-probabilities of {read.size} tokens of prompts are off by "
            f"{np.median(read):.4f} (median), {np.quantile(read, 0.99):.4f} (99%), {np.sqrt(np.mean(read**2)):.4f} "
            f"(root mean square); greedy tokens before another one: {', '.join(map(str, same))} of {len(first[1][0])}",
            flush=True,
        )


def log_probabilities(
    config: M3Config, mesh: str, chunk: int, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Return the log-probabilities of the prompts' tokens [prompts, length - 1], and the greedy tokens behind them."""
    model = init(config, 0, "float32" if args.smoke else "bfloat16", None if mesh == ONE else mesh)
    length, new = len(prompts[0]), 3 * args.steps + 1
    pages = len(prompts) * (-(-(length + new) // config.index_block_size) + 2)
    engine = Engine(
        model, pages=pages, max_batch=len(prompts), prefill_chunk=[chunk], steps_per_call=args.steps,
        max_length=length + new,
    )  # fmt: skip
    asked = Params(max_new_tokens=new, sampling=Sampling.greedy(), prompt_logprobs=0, ignore_eos=True)
    handles = [engine.add(prompt, asked) for prompt in prompts]
    engine.run()
    results = [engine.result(handle) for handle in handles]
    read = [[next(iter(of_token.values())) for of_token in result.prompt_logprobs] for result in results]
    return np.array(read), [result.tokens for result in results]


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens stand before the first that is another one."""
    return next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))


# Attention of one sparse layer


def time_index(config: M3Config, args: argparse.Namespace) -> None:
    """Print the time of one sparse layer's attention, of steps and of a chunk at the end of the context.

    Index keys are random; keys and values are zeros, which takes no less time. At 1,048,576 tokens nearly all of it is
    the index part: what is attended to is 16 blocks, whatever the context.
    """
    ratios = Ratios()
    for name in args.names:
        mesh = None if name == ONE else parse_mesh(name)
        chunks = [] if args.smoke else [(1, args.chunk)]
        for rows, tokens in [*((rows, 1) for rows in args.rows), *chunks]:
            run = attention_of_layer(config, mesh, rows, tokens, args)
            run(1)
            few, many = (1, 3) if tokens > 1 else (4, 24)  # repeats: what a call itself costs is subtracted
            run(few), run(many)
            taken = lambda n, run=run: min(_seconds(partial(run, n)) for _ in range(3))
            what = f"attention, step of {rows}" if tokens == 1 else f"attention, chunk of {tokens}"
            ratios.line(name, what, (taken(many) - taken(few)) / (many - few))
            del run
            gc.collect()


def attention_of_layer(
    config: M3Config, mesh: Mesh | None, rows: int, tokens: int, args: argparse.Namespace
) -> Callable[[int], None]:
    """Return a function that runs the attention of one sparse layer so often, one after the other."""
    sparse = next(kind for kind in config.layer_types if "sparse" in kind)
    one_layer = replace(config, num_hidden_layers=1, layer_types=(sparse,), mlp_layer_types=("sparse",))
    dtype = "float32" if args.smoke else "bfloat16"
    # Rows share their pages, as those of one long prefix do.
    blocks = -(-args.context_tokens // config.index_block_size)
    cache = Cache.pool(one_layer, blocks, rows, blocks, dtype, mesh=mesh)
    layout, num_pages = jax.tree.map(lambda leaf: leaf.sharding, cache), cache.num_pages
    table = jnp.broadcast_to(jnp.arange(num_pages, dtype=jnp.int32).reshape(-1)[:blocks], (rows, blocks))
    if mesh is not None:  # neighbouring blocks on different devices, as the allocator has them
        parts = num_pages // cache.stacks[0].k.sharding.shard_shape(cache.stacks[0].k.shape)[1]
        block = jnp.arange(blocks, dtype=jnp.int32)
        table = jnp.broadcast_to(block % parts * (num_pages // parts) + block // parts, (rows, blocks))
    cache = jax.device_put(cache.replace(table=table), layout)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, dtype)
    positions = jnp.broadcast_to(
        jnp.arange(args.context_tokens - tokens, args.context_tokens, dtype=jnp.int32), (rows, tokens)
    )
    lengths = jnp.full(rows, args.context_tokens, jnp.int32)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width, index_width = config.head_dim, config.index_head_dim
    of_tokens = Heads(
        q=draw(0, rows, tokens, heads, width), k=draw(1, rows, tokens, kv_heads, width),
        v=draw(2, rows, tokens, kv_heads, width), index_q=draw(3, rows, tokens, kv_heads, index_width),
        index_k=draw(4, rows, tokens, index_width),
    )  # fmt: skip
    how = Fast(Compute(mesh=mesh), has_cache=True)
    rules = selection_rules(config, config.index_score_type)

    def fill(cache):
        pages = cache.stacks[0]
        keys = jax.random.normal(jax.random.key(5), pages.index_k.shape, pages.index_k.dtype)
        return cache.replace(stacks=(pages.replace(index_k=keys),))

    cache = jax.jit(fill, donate_argnums=0, out_shardings=layout)(cache)

    def repeat(cache, of_tokens, positions, lengths, times):
        call = LayerCall(jnp.int32(0), cache.places(positions, lengths), positions, lengths, None)

        def once(_, carry):
            of_tokens, pages = carry
            attention, pages = how.attend(of_tokens, pages, call, rules, Values())
            # The next turn waits for this one: its queries are this one's, to which nothing is added.
            return of_tokens._replace(index_q=of_tokens.index_q + 0 * attention[..., :1, :1]), pages

        of_tokens, pages = jax.lax.fori_loop(0, times, once, (of_tokens, cache.stacks[0]))
        return cache.replace(stacks=(pages,)), jnp.sum(of_tokens.index_q, dtype=jnp.float32)

    # As an engine compiles it: a step on a GPU is one CUDA graph.
    options = compiler_options.OPTIONS.get(("decode" if tokens == 1 else "prefill", platform(), "wide"))
    program = jax.jit(repeat, donate_argnums=0, out_shardings=(layout, None), compiler_options=options)
    held = [cache]

    def run(times: int) -> None:
        held[0], total = program(held[0], of_tokens, positions, lengths, jnp.int32(times))
        jax.block_until_ready(total)

    return run


def _seconds(run: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
