"""The programs that the model traces, as hashes of their StableHLO: are they the same as before a change?

    python scripts/lowered_programs.py --out before                     # writes before/programs.json, and each text
    python scripts/lowered_programs.py --out after --against before     # exit status 1 if some program differs

Some 70 programs are lowered, for a CPU (small ones, also over a mesh of 8 devices), for CUDA and for a TPU (of sizes
that kernels run at, with parameters that are shapes alone): calls with a cache and without, steps, verified proposals,
taps, gradients, images; with MXFP8 weights, a float8 cache, layers apart and the invariant mode. Nothing is compiled,
nothing runs.

A line has a name, the hash of the text without its locations, a hash of how often each operation occurs, which forgets
their order, and how many there are. Kernels count as they are called: what is inside of one is left out, since it holds
the lines of its source.
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

SMALL_TOKENS, ROWS = 40, 2
PAYLOAD = re.compile(r'"[^"\n]{400,}"')  # a kernel
LOCATION = re.compile(r"loc\([^\n]*\)|^#loc.*$", re.MULTILINE)
OPERATION = re.compile(r"(?:stablehlo|chlo|sdy|mhlo)\.\w+")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the hashes and the texts")
    parser.add_argument("--against", type=Path, help="folder of an earlier run")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
    before = {}
    if args.against is not None:
        before = json.loads((args.against / "programs.json").read_text(encoding="utf-8"))
    args.out.mkdir(parents=True, exist_ok=True)
    hashes, changed = {}, []
    for name, platform, mesh, fn, operands in programs():
        if args.only not in name:
            continue
        text = lowered(platform, mesh, fn, operands)
        counts = collections.Counter(OPERATION.findall(text))
        hashes[name] = [_hash(text), _hash(json.dumps(sorted(counts.items())))]
        differs = name in before and before[name] != hashes[name]
        changed += [name] if differs else []
        note = ("  another order" if before[name][1] == hashes[name][1] else "  DIFFERS") if differs else ""
        print(f"{name:44} {' '.join(hashes[name])} {sum(counts.values()):6,}{note}", flush=True)
        (args.out / f"{re.sub('[^a-z0-9]+', '_', name)}.txt").write_text(text, encoding="utf-8")
    (args.out / "programs.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    if args.against is not None:
        missing = sorted(name for name in before if name not in hashes and args.only in name)
        print(f"{len(hashes)} programs: {len(changed)} differ, {len(missing)} of the earlier run are not there")
        return int(bool(changed or missing))
    return 0


def programs() -> Iterator[tuple]:
    """Yield (name, platform, abstract mesh or None, function, its operands) of each program."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    import m3jax
    from m3jax.cache import Cache
    from m3jax.decoding import Sampling, device
    from m3jax.decoding.sampling import WORD_TOKENS, SamplingParams
    from m3jax.media import pack
    from m3jax.model import abstract
    from m3jax.train.fused import fuse
    from m3jax.vision import VisionConfig

    def alone(kind: str, platform: str, cores: int) -> AbstractMesh:
        device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
        return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)

    small = m3jax.M3Config.tiny()
    large = dataclasses.replace(
        small, vocab_size=512, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        intermediate_size=256, dense_intermediate_size=512, shared_intermediate_size=256, rotary_dim=64,
        index_n_heads=2, index_head_dim=128, index_block_size=128, num_local_experts=16, max_position_embeddings=4096,
    )  # fmt: skip
    ids = lambda batch, length: jax.ShapeDtypeStruct((batch, length), jnp.int32)
    call = lambda model, tokens: model(tokens)
    values = lambda model, tokens: model.intermediates(tokens)
    cached = lambda model, cache, tokens, at, ends: model(tokens, cache=cache, positions=at, lengths=ends)
    tapped = lambda model, cache, tokens, at, ends: model.run(
        tokens, residual_layers=(0, 2, 4), logits=False, cache=cache, positions=at, lengths=ends
    )
    apart = lambda model, *rest: cached(model.with_layers_apart(4), *rest)
    apart_tapped = lambda model, *rest: tapped(model.with_layers_apart(4), *rest)
    total = lambda model, *args, **options: model.run(*args, logits=False, **options).hidden.astype(jnp.float32).sum()
    gradient = lambda model, tokens: jax.grad(total)(model, tokens)
    remat = lambda model, tokens: jax.grad(lambda model: total(model, tokens, remat=True))(model)

    shown = lambda model, tokens, media: model(tokens, media=media)
    shown_gradient = lambda model, *rest: jax.grad(lambda model: shown(model, *rest).sum())(model)

    def prompt_with_pictures(model):
        """Operands of `device.prefill`: a chunk of a prompt, whose tokens may stand for the engine's features."""
        sampling = SamplingParams.stack([Sampling.greedy()] * ROWS)
        counts = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        uses, recent = ids(ROWS, model.config.vocab_size), ids(ROWS, WORD_TOKENS - 1)
        continuations = device.Continuations(sampling, ids(ROWS, 4), counts, counts, counts, counts, uses, recent)
        _, cache, chunk, *_ = over_cache(model, ROWS, 24)
        state = device.State(cache, continuations, counts, counts, counts)
        features = jax.ShapeDtypeStruct((64, model.config.hidden_size), jnp.float32)
        media = device.PlacedFeatures(features, chunk)
        return model, state, device.Chunk(counts, chunk, counts, counts, continuations, media=media)

    def by_embeddings(model, tokens):
        embeddings = jnp.zeros((*tokens.shape, model.config.hidden_size), model.dtype)
        return jax.grad(lambda x: total(model, tokens, embeddings=x))(embeddings)

    def over_cache(model, batch, length, **types):
        make = lambda: Cache.pool(model.config, 16, batch, 8, str(model.dtype), None, **types)
        cache = jax.eval_shape(make) if model.mesh is None else model.new_cache(16, batch, 8, **types)
        return model, cache, ids(batch, length), ids(batch, length), jax.ShapeDtypeStruct((batch,), jnp.int32)

    tokens = ids(ROWS, SMALL_TOKENS)
    on_cpu = lambda name, fn, *operands: (f"cpu {name}", "cpu", None, fn, operands)
    for dtype in ("float32", "bfloat16"):
        plain = abstract(small, dtype)
        yield on_cpu(f"{dtype} intermediates", values, plain, tokens)
        for mode, model in (("fast", plain), ("invariant", plain.with_invariance())):
            yield on_cpu(f"{dtype} {mode} call", call, model, tokens)
            yield on_cpu(f"{dtype} {mode} step", cached, *over_cache(model, ROWS, 1))
            yield on_cpu(f"{dtype} {mode} chunk", cached, *over_cache(model, ROWS, 24))
            yield on_cpu(f"{dtype} {mode} tapped", tapped, *over_cache(model, ROWS, 4))
    model = abstract(small, "float32")
    yield on_cpu("dense", call, model.with_dense(), tokens)
    yield on_cpu("score lse", call, model.with_score("lse"), tokens)
    yield on_cpu("schedule mask", call, model.with_schedule("mask"), tokens)
    yield on_cpu("gradient", gradient, model, tokens)
    yield on_cpu("gradient, recomputed", remat, model, tokens)
    yield on_cpu("gradient, invariant", gradient, model.with_invariance(), tokens)
    yield on_cpu("gradient, fused", remat, fuse(model), tokens)
    seeing = abstract(VisionConfig.tiny().add_to(small), "float32")
    yield on_cpu("pictures, call", shown, seeing, tokens, pack((), 256))
    yield on_cpu("pictures, gradient", shown_gradient, seeing, tokens, pack((), 256))
    yield on_cpu("pictures, prefill", device.prefill, *prompt_with_pictures(seeing))
    float8 = dict(kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn")
    yield on_cpu("float8 cache", cached, *over_cache(model, ROWS, 4, **float8))
    kept = abstract(small, "bfloat16", weights="mxfp8")
    yield on_cpu("mxfp8", call, kept, tokens)
    yield on_cpu("mxfp8 invariant", call, kept.with_invariance(), tokens)
    yield on_cpu("mxfp8 w8a8", call, kept.with_activations("mxfp8"), tokens)
    for axes in ("data=2,context=2,expert=2", "expert=4,tensor=2", "context=2,tensor=2"):
        plain = abstract(small, "float32", axes)
        for mode, model in (("fast", plain), ("invariant", plain.with_invariance())):
            yield on_cpu(f"{axes} {mode} call", call, model, ids(4, SMALL_TOKENS))
            yield on_cpu(f"{axes} {mode} chunk", cached, *over_cache(model, 4, 8))

    h200, v5p = alone("NVIDIA H200", "gpu", 132), alone("TPU v5p", "tpu", 1)
    on_gpu = lambda name, fn, *operands: (f"cuda {name}", "cuda", h200, fn, operands)
    for weights in ("dequantize", "mxfp8"):
        plain = abstract(large, "bfloat16", weights=weights)
        for mode, model in (("fast", plain), ("invariant", plain.with_invariance())):
            of = f"{'bfloat16' if weights == 'dequantize' else weights} {mode}"
            yield on_gpu(f"{of} call", call, model, ids(1, 256))
            yield on_gpu(f"{of} step", cached, *over_cache(model, 4, 1))
            yield on_gpu(f"{of} proposals", cached, *over_cache(model, 2, 4))
            yield on_gpu(f"{of} chunk", cached, *over_cache(model, 1, 256))
            yield on_gpu(f"{of} step, layers apart", apart, *over_cache(model, 4, 1))
            yield on_gpu(f"{of} tapped step, layers apart", apart_tapped, *over_cache(model, 4, 1))
            yield on_gpu(f"{of} gradient", by_embeddings, model, ids(1, 64))
    model = abstract(large, "bfloat16")
    yield on_gpu("float8 cache", cached, *over_cache(model, 4, 1, **float8))
    on_tpu = lambda name, fn, *operands: (f"tpu {name}", "tpu", v5p, fn, operands)
    yield on_tpu("step", cached, *over_cache(model, 4, 1))
    yield on_tpu("chunk", cached, *over_cache(model, 1, 256))
    yield on_tpu("mxfp8 step", cached, *over_cache(abstract(large, "bfloat16", weights="mxfp8"), 4, 1))


def lowered(platform: str, mesh, fn, operands: tuple) -> str:
    """The text of a program, without its locations and without what is inside of kernels."""
    import contextlib

    import jax

    # A function of its own: what was traced for another platform is not found again.
    run = jax.jit(lambda *operands: fn(*operands))
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        text = run.trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    return PAYLOAD.sub('"kernel"', LOCATION.sub("", text))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
