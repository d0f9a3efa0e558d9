"""The engine under the agentic load: a long shared prefix, many requests (docs/performance.md).

    python scripts/bench_engine.py                      # the embedded checkpoint
    python scripts/bench_engine.py --model bench        # the 8 layers of bench_cpu.py, random weights
    python scripts/bench_engine.py --model m3           # 4 layers at M3's own widths, for a GPU of 80 GB or more

Prints prefill speed, time to the first token with and without the prefix cache, and the time of a decode step over the
number of live requests.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np
from bench_cpu import TEXT

import m3jax
from m3jax import M3Config
from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3, init

SUFFIX = 64  # tokens that each request has of its own


def main() -> None:
    """Run what was asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "bench", "m3"), default="tiny")
    parser.add_argument("--prefix", type=int, default=3500, help="tokens of the shared prefix")
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--concurrency", default="1,8,32", help="live requests, one run each")
    parser.add_argument("--chunks", default="256,2048", help="tokens of a prefill call")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a device call")
    parser.add_argument("--kv-dtype", help="storage type of keys and values")
    parser.add_argument("--index-dtype", help="storage type of index keys")
    parser.add_argument("--device-pages", type=int, help="keys and values in host memory, so many pages on the device")
    parser.add_argument("--weights", choices=("dequantize", "mxfp8"), default="dequantize", help="mxfp8 quantises them")
    args = parser.parse_args()
    model = build(args.model) if args.weights == "dequantize" else m3jax.quantize(build(args.model))
    counts = [int(n) for n in args.concurrency.split(",")]
    engine = Engine(model, **sizes(model, args, max(counts)))
    engine.warmup()
    print(f"{args.model} on {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.prefix} + {SUFFIX} tokens a "
          f"request, {args.new_tokens} new; compiled in {engine.timings.compile_seconds:.0f} s")  # fmt: skip
    print(f"cache: {engine.cache_bytes / 2**30:.2f} GiB, {engine.bytes_per_token:.0f} bytes a token")
    prefix = np.random.default_rng(0).integers(2, model.config.vocab_size, args.prefix).tolist()
    fresh, again = first_token(engine, prefix, 0), first_token(engine, prefix, 1)
    print(f"prefill: {(args.prefix + SUFFIX) / fresh:.0f} tokens/s; to the first token {fresh:.2f} s, "
          f"{again * 1e3:.0f} ms with the prefix in the cache")  # fmt: skip
    print(f"{'live':>5s} {'ms a step':>10s} {'tokens/s':>9s} {'to first token, s (last)':>25s}")
    for count in counts:
        step, speed, last = decode(engine, prefix, count, args.new_tokens)
        print(f"{count:5d} {step * 1e3:10.2f} {speed:9.1f} {last:25.2f}", flush=True)
    if engine.offload:
        print("offload:", engine.offload)


def build(name: str) -> M3:
    """The model that `--model` names."""
    if name == "tiny":
        return m3jax.load()
    if name == "bench":
        return init(M3Config.from_dict(TEXT), 0)
    full = M3Config.m3()
    first = full.layer_types.index("minimax_m3_sparse") - 1
    layer_types = full.layer_types[first : first + 4]
    mlp_layer_types = full.mlp_layer_types[first : first + 4]
    four_layers = dataclasses.replace(
        full, num_hidden_layers=4, vision_config=None, layer_types=layer_types, mlp_layer_types=mlp_layer_types
    )
    return init(four_layers, 0, "bfloat16")


def sizes(model: M3, args: argparse.Namespace, max_requests: int) -> dict:
    """An engine that holds the prefix once, and what each request adds."""
    block_size = model.config.index_block_size
    pages_of_request = -(-(SUFFIX + args.new_tokens) // block_size) + 2
    return dict(
        pages=-(-args.prefix // block_size) + (max_requests + 1) * pages_of_request, max_batch=max_requests,
        prefill_chunk=[int(n) for n in args.chunks.split(",")],
        steps_per_call=args.steps, max_length=args.prefix + SUFFIX + args.new_tokens,
        kv_dtype=args.kv_dtype, index_dtype=args.index_dtype, device_pages=args.device_pages,
    )  # fmt: skip


def prompt(engine: Engine, prefix: list[int], seed: int) -> list[int]:
    """The prefix and a suffix that no other request has."""
    return prefix + np.random.default_rng(seed + 1).integers(2, engine.config.vocab_size, SUFFIX).tolist()


def params(new_tokens: int) -> Params:
    """Greedy decoding of so many tokens."""
    return Params(max_new_tokens=new_tokens, sampling=Sampling.greedy())


def first_token(engine: Engine, prefix: list[int], seed: int) -> float:
    """Seconds from `add` to the first token of a request that is alone."""
    begin = time.perf_counter()
    engine.add(prompt(engine, prefix, seed), params(1))
    engine.run()
    return time.perf_counter() - begin


def decode(engine: Engine, prefix: list[int], count: int, new_tokens: int) -> tuple[float, float, float]:
    """(seconds a step, new tokens a second, seconds until the last request had its first token)."""
    begin = time.perf_counter()
    for seed in range(count):
        engine.add(prompt(engine, prefix, 1000 * count + seed), params(new_tokens))
    while engine.prefill():
        pass
    last_first_token = time.perf_counter() - begin
    decode_before = engine.timings.decode_seconds
    engine.run()
    decode_seconds = engine.timings.decode_seconds - decode_before
    return decode_seconds / (new_tokens - 1), count * (new_tokens - 1) / decode_seconds, last_first_token


if __name__ == "__main__":
    main()
