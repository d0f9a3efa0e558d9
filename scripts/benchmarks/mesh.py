"""Meshes of devices beside one device: what their programs exchange and compute, and how long they take.

    bench.py mesh --what counts                     # 8 CPU devices: the compiled programs' own counts
    bench.py mesh --what counts --h100              # what H100s exchange beside products; it needs none
    bench.py mesh                                   # on GPUs: times, beside one of them in the same run
    bench.py mesh --what index --meshes context=2 --context-tokens 1048576    # one sparse layer's attention
    bench.py mesh --what agree --meshes tensor=2    # log-probabilities beside those of one GPU

The model has 4 layers at M3's own widths, one dense and three sparse, with random weights. Times are of the engine: a
decode step with so many requests live behind a shared prefix, the first chunk of a prompt, and a whole prompt in
chunks; each divided into the time of one device that the same run took. Models are made one after the other, so that a
device holds one at a time.

`--h100` has XLA compile and schedule for H100s that are only described: it needs `jax[cuda13]`, no GPU and no driver,
and some minutes a program. Products count as such where XLA or cuBLAS computes them, not inside of Pallas kernels.
"""

import os
import sys

if "--h100" in sys.argv:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there need not be a driver
if "counts" in sys.argv or "--smoke" in sys.argv:  # before jax looks for devices
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from benchmarks.harness import Option
from benchmarks.models import (
    engine_sizes,
    first_token,
    four_layers,
    greedy,
    prompt,
    random_tokens,
    start,
    step_seconds,
)  # fmt: skip
from m3jax import M3Config
from m3jax.cache import Cache, LayerCall
from m3jax.decoding import Engine
from m3jax.decoding.device import compiler_options
from m3jax.execution import Compute, Fast, OverMesh, Projections, Tap
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
QUICK = {"xla_backend_optimization_level": 0}  # LLVM's; the program is the same
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
OPTIONS = dict(
    what=Option(["times"], "Measurements", smoke=["counts", "agree"], choices=("times", "counts", "index", "agree")),
    meshes=Option(["tensor=2", "expert=2", "context=2"], "Meshes, as data=2,tensor=4", smoke=["tensor=2,context=2"]),
    context_tokens=Option(60_064, "Tokens of the shared prefix, or of the index", smoke=96),
    rows=Option([1, 16], "Requests of an engine, all live; an engine for each number", smoke=[2]),
    chunk=Option(8192, "Tokens of a prefill call", smoke=32),
    steps=Option(16, "Decode steps of a device call", smoke=4),
    h100=Option(False, "Compile the counted programs for H100s that are only described"),
)


def measure(args):
    """Yield what was asked for."""
    config = replace(M3Config.tiny(), vocab_size=512) if args.smoke else four_layers()
    # Under --smoke the mesh stands alone: each more is as many programs to compile.
    args.names = args.meshes if args.smoke else [ONE, *args.meshes]
    args.dtype = "float32" if args.smoke else "bfloat16"
    for what in args.what:
        yield from {"times": times, "counts": counts, "index": index, "agree": agree}[what](config, args)


# Counts


def counts(config: M3Config, args):
    """Yield, for each mesh, what the compiled programs of an engine exchange, compute and move, beside one device."""
    for rows in args.rows:
        job = Job(
            config=config, slice=parse_slice("h200:8"), context=args.context_tokens, batch=rows, dtype=args.dtype,
            chunk=args.chunk,
        )  # fmt: skip
        programs = {} if args.smoke else {f"a step of {rows}": (program.decode, rows)}
        if rows == args.rows[0]:
            programs[f"a chunk of {args.chunk}"] = program.prefill, args.chunk
        for what, (trace, tokens) in programs.items():
            alone = None
            for name in args.names:
                if args.h100 and name == ONE:
                    continue  # it exchanges nothing
                mesh = h100_mesh(name) if args.h100 else parse_mesh("" if name == ONE else name)
                text = compiled_text(trace, job, mesh, args.h100)
                exchanged = hlo.collectives(text)
                hidden = [c for c in exchanged if c.is_hidden]
                row = {"program": f"{what}, {name}"}
                for label, of in (("sent", exchanged), ("beside products", hidden)):
                    row |= {f"MB {label}": sum(c.sent for c in of) / 1e6, f"times {label}": sum(c.times for c in of)}
                if not args.h100:  # where kernels of a GPU do not say what they compute and move
                    found = hlo.count(text)
                    alone = alone or found
                    row |= {"GFLOP": found.flops / 1e9, "of one device": found.flops / alone.flops,
                            "GB": found.traffic / 1e9, "of its GB": found.traffic / alone.traffic}  # fmt: skip
                yield row
                # Those that move as much as half of the residual stream, `[tokens, D]` in 16 bits.
                large = Counter()
                for c in exchanged:
                    if c.num_bytes >= tokens * config.hidden_size:
                        large[f"{c.kind} over {c.num_devices}{', beside products' * c.is_hidden}", c.num_bytes] += (
                            c.times
                        )
                for (kind, num_bytes), often in large.items():
                    yield {"collective": kind, "MB": num_bytes / 1e6, "times": often}


def h100_mesh(name: str) -> Mesh:
    """Return a mesh, as in tensor=2, of H100s that are only described.

    Raises:
      ValueError: XLA's compiler for CUDA is missing.
    """
    sizes = parse_axes(name)
    shape = [sizes.get(axis, 1) for axis in AXES]
    try:
        described = topologies.get_topology_desc(
            "h100", platform="cuda", target_config=H100, topology=f"1x1x{np.prod(shape)}"
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        needs = "--h100 needs XLA's compiler for CUDA (pip install 'jax[cuda13]'; no GPU)"
        raise ValueError(f"{needs}: {str(error).splitlines()[0]}") from None
    return Mesh(np.array(described.devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compiled_text(trace: Callable, job: Job, mesh: Mesh, is_h100: bool) -> str:
    """Return the scheduled text of one of an engine's programs, compiled for the devices of the mesh."""
    if not is_h100:
        return trace(job, mesh).lower().compile(QUICK).as_text()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # so that the model is traced for a GPU
        lowered = trace(job, mesh).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


# Times


class Ratios:
    """Rows of times, with what each took on the first mesh of the run."""

    def __init__(self):
        self._alone: dict[str, float] = {}

    def row(self, mesh: str, what: str, seconds: float, note: str | None = None) -> dict:
        """Return the row of one measurement; the first one of a kind is what the others are divided into."""
        ratio = self._alone.setdefault(what, seconds) / seconds
        return {"mesh": f"{mesh}, {what}", "ms": 1e3 * seconds, "times as fast": ratio, "note": note}


def model_of(config: M3Config, name: str, args) -> M3:
    """Return a random model on a mesh."""
    return init(config, 0, args.dtype, None if name == ONE else name)


def times(config: M3Config, args):
    """Yield the times of steps and prompts of engines on each mesh."""
    ratios, new_tokens, drawn = Ratios(), 5 * args.steps + 2, {}  # five calls of so many steps
    prefix = random_tokens(config, args.context_tokens, 0)
    for name in args.names:
        model = model_of(config, name, args)
        engines = {}
        for rows in args.rows:
            sizes = engine_sizes(config, args.context_tokens, new_tokens, rows)
            sizes["max_length"] = min(sizes["max_length"], config.max_position_embeddings)
            engines[rows] = Engine(model, **sizes, prefill_chunk=[args.chunk], steps_per_call=args.steps)
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(engine.warmup, programs=["prefill", "decode"]) for engine in engines.values()]:
                done.result()
        for rows, engine in engines.items():
            if rows == args.rows[0]:
                yield from prompts(name, engine, args, ratios)
            first_token(engine, prefix)
            handles = start(engine, [prompt(config, prefix, seed) for seed in range(rows)], greedy(new_tokens))
            seconds = step_seconds(engine, rows, args.steps)
            tokens = [engine.result(handle).tokens for handle in handles]
            pairs = zip(tokens, drawn.setdefault(rows, tokens), strict=True)
            same = sum(a == b for row, other in pairs for a, b in zip(row, other, strict=True))
            note = f"{same} of {sum(map(len, tokens))} tokens the same"
            yield ratios.row(name, f"step of {rows}", seconds, note)
        del model, engines, engine  # before the next mesh's weights are made
        gc.collect()


def prompts(name: str, engine: Engine, args, ratios: Ratios):
    """Yield the time of a prompt of one chunk, and that of one as long as the context, to their first tokens."""
    chunk = min(args.chunk, args.context_tokens)
    run = lambda length, seed: first_token(engine, random_tokens(engine.config, length, seed))
    run(chunk, 1)
    yield ratios.row(name, f"prompt of {chunk}", statistics.median(run(chunk, seed) for seed in (2, 3, 4)))
    seconds = min(run(args.context_tokens, seed) for seed in (5, 6))
    yield ratios.row(name, f"prompt of {args.context_tokens}", seconds)


# What they compute


def agree(config: M3Config, args):
    """Yield how far log-probabilities of meshes lie from one device's, beside one device's own in shorter chunks.

    In 16 bits sums of another order round to other numbers, and these choose other experts and blocks: what a mesh
    changes is to be held against what a chunk of another length changes. The model has a quarter of M3's experts.
    """
    config = config if args.smoke else replace(config, num_local_experts=config.num_local_experts // 4)
    asked, first = [random_tokens(config, args.chunk, seed) for seed in range(COMPARED)], None
    ways = [(ONE, args.chunk), (ONE, args.chunk // 4), *((name, args.chunk) for name in args.meshes)]
    for name, chunk in ways:
        found = log_probabilities(config, name, chunk, asked, args)
        first = first or found
        off = np.abs(found[0] - first[0])
        differs = np.pad(found[1] != first[1], ((0, 0), (0, 1)), constant_values=True)
        yield {
            "off by": f"{name}, chunks of {chunk}", "median": float(np.median(off)),
            "99%": float(np.quantile(off, 0.99)), "root mean square": float(np.sqrt(np.mean(off**2))),
            "tokens": off.size, "greedy tokens before another": ", ".join(map(str, differs.argmax(1))),
        }  # fmt: skip


def log_probabilities(
    config: M3Config, mesh: str, chunk: int, asked: list[list[int]], args
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities of the prompts' tokens, [prompts, length - 1], and the greedy tokens behind them."""
    length, new = len(asked[0]), 3 * args.steps + 1
    pages = len(asked) * (-(-(length + new) // config.index_block_size) + 2)
    engine = Engine(
        model_of(config, mesh, args), pages=pages, max_batch=len(asked), prefill_chunk=[chunk],
        steps_per_call=args.steps, max_length=length + new,
    )  # fmt: skip
    handles = [engine.add(tokens, greedy(new, prompt_logprobs=0, ignore_eos=True)) for tokens in asked]
    engine.run()
    results = [engine.result(handle) for handle in handles]
    read = [[next(iter(of_token.values())) for of_token in result.prompt_logprobs] for result in results]
    return np.array(read), np.array([result.tokens for result in results])


# Attention of one sparse layer


def index(config: M3Config, args):
    """Yield the time of one sparse layer's attention, of steps and of a chunk at the end of the context.

    Index keys are random; keys and values are zeros, which takes no less time. At 1,048,576 tokens nearly all of it is
    the index part: what is attended to is 16 blocks, whatever the context.
    """
    ratios = Ratios()
    for name in args.names:
        mesh = None if name == ONE else parse_mesh(name)
        chunks = [] if args.smoke else [(1, args.chunk)]
        for rows, tokens in [*((rows, 1) for rows in args.rows), *chunks]:
            run = attention_of_layer(config, mesh, rows, tokens, args)
            few, many = (1, 3) if tokens > 1 else (4, 24)  # repeats: what a call itself costs is subtracted
            run(1), run(few), run(many)
            taken = {n: min(run(n) for _ in range(3)) for n in (few, many)}
            what = f"attention, step of {rows}" if tokens == 1 else f"attention, chunk of {tokens}"
            yield ratios.row(name, what, (taken[many] - taken[few]) / (many - few))
            del run
            gc.collect()


def attention_of_layer(
    config: M3Config, mesh: Mesh | None, rows: int, tokens: int, args
) -> Callable[[int], float]:  # fmt: skip
    """Return a function that runs the attention of one sparse layer so often, and returns the seconds."""
    sparse = next(kind for kind in config.layer_types if "sparse" in kind)
    one_layer = replace(config, num_hidden_layers=1, layer_types=(sparse,), mlp_layer_types=("sparse",))
    # Rows share their pages, as those of one long prefix do.
    blocks = -(-args.context_tokens // config.index_block_size)
    cache = Cache.pool(one_layer, blocks, rows, blocks, args.dtype, mesh=mesh)
    layout, num_pages = jax.tree.map(lambda leaf: leaf.sharding, cache), cache.num_pages
    block = jnp.arange(blocks, dtype=jnp.int32)
    if mesh is not None:  # neighbouring blocks on different devices, as the allocator has them
        parts = num_pages // cache.stacks[0].k.sharding.shard_shape(cache.stacks[0].k.shape)[1]
        block = block % parts * (num_pages // parts) + block // parts
    cache = jax.device_put(cache.replace(table=jnp.broadcast_to(block, (rows, blocks))), layout)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, args.dtype)
    positions = jnp.arange(args.context_tokens - tokens, args.context_tokens, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, (rows, tokens))
    lengths = jnp.full(rows, args.context_tokens, jnp.int32)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width, index_width = config.head_dim, config.index_head_dim
    of_tokens = Heads(
        q=draw(0, rows, tokens, heads, width), k=draw(1, rows, tokens, kv_heads, width),
        v=draw(2, rows, tokens, kv_heads, width), index_q=draw(3, rows, tokens, kv_heads, index_width),
        index_k=draw(4, rows, tokens, index_width),
    )  # fmt: skip
    compute, rules = Compute(mesh=mesh), selection_rules(config, config.index_score_type)
    how = OverMesh(compute, has_cache=True) if compute.is_divided else Fast(compute, has_cache=True)

    def fill(cache):
        pages = cache.stacks[0]
        keys = jax.random.normal(jax.random.key(5), pages.index_k.shape, pages.index_k.dtype)
        return cache.replace(stacks=(pages.replace(index_k=keys),))

    cache = jax.jit(fill, donate_argnums=0, out_shardings=layout)(cache)

    def repeat(cache, of_tokens, positions, lengths, times):
        call = LayerCall(jnp.int32(0), cache.places(positions, lengths), positions, lengths, None)

        def once(_, carry):
            of_tokens, pages = carry
            attention, pages = how.attend(Projections.of_heads(of_tokens), pages, call, rules, Tap())
            # The next turn waits for this one: its queries are this one's, to which nothing is added.
            return of_tokens._replace(index_q=of_tokens.index_q + 0 * attention[..., :1, :1]), pages

        of_tokens, pages = jax.lax.fori_loop(0, times, once, (of_tokens, cache.stacks[0]))
        return cache.replace(stacks=(pages,)), jnp.sum(of_tokens.index_q, dtype=jnp.float32)

    # As an engine compiles it: a step on a GPU is one CUDA graph.
    options = compiler_options.OPTIONS.get(("decode" if tokens == 1 else "prefill", platform(), "wide"))
    compiled = jax.jit(repeat, donate_argnums=0, out_shardings=(layout, None), compiler_options=options)

    def run(times: int) -> float:
        nonlocal cache
        began = time.perf_counter()
        cache, total = compiled(cache, of_tokens, positions, lengths, jnp.int32(times))
        jax.block_until_ready(total)
        return time.perf_counter() - began

    return run
