"""Prefill and decode on a CPU against transformers, in one run (docs/performance.md).

    python scripts/bench_cpu.py                 # 8,192 tokens, both implementations; decode rounds take turns
    python scripts/bench_cpu.py --growth        # how our prefill grows from 2k to 64k
    python scripts/bench_cpu.py --llama-cpp     # beside llama.cpp: scripts/bench_llama_cpp.py

float32, batch 1, the same random weights: hidden 512, 8 layers of which 2 are dense, 16/4 heads of 64, 32 experts of
which 4 are active, block 128, top-k 16.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Generator

import numpy as np

THREADS = os.cpu_count() or 1
TEXT = dict(
    hidden_size=512, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=4096,
    intermediate_size=256, dense_intermediate_size=1024, shared_intermediate_size=256, num_local_experts=32,
    num_experts_per_tok=4, rotary_dim=32, index_n_heads=4, index_head_dim=64, index_block_size=128,
    index_topk_blocks=16, index_local_blocks=1, layer_types=["full_attention"] * 2 + ["minimax_m3_sparse"] * 6,
    mlp_layer_types=["dense"] * 2 + ["sparse"] * 6, max_position_embeddings=1 << 17, bos_token_id=0, eos_token_id=1,
    rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
)  # fmt: skip


def main() -> None:
    """Run what was asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--new-tokens", type=int, default=64, help="of one round")
    parser.add_argument("--rounds", type=int, default=5, help="of decode steps; the implementations take turns")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--without", default="", help="what to leave out: eager, sdpa or both, comma-separated")
    parser.add_argument("--llama-cpp", action="store_true", help="as scripts/bench_llama_cpp.py, with these sizes")
    args = parser.parse_args()
    if args.growth:
        return growth()
    if args.llama_cpp:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import bench_llama_cpp

        sizes = {"--tokens": args.tokens, "--new-tokens": args.new_tokens, "--rounds": args.rounds}
        sys.exit(bench_llama_cpp.main([str(word) for pair in sizes.items() for word in pair]))
    tokens = np.random.default_rng(0).integers(2, TEXT["vocab_size"], args.tokens).tolist()
    kinds = [kind for kind in ("eager", "sdpa") if kind not in args.without.split(",")]
    runs = {f"transformers {kind}": theirs(kind, tokens) for kind in kinds}
    runs["m3jax"] = ours(tokens, args.rounds * max(args.new_tokens, 64))
    prefill = {name: next(run) for name, run in runs.items()}
    steps = [{name: run.send(args.new_tokens) for name, run in runs.items()} for _ in range(args.rounds)]
    print(f"{'':22s} {'prefill s':>10s} {'ms / new token':>15s} {'prefill x':>10s} {'decode x':>9s}  each round")
    for name, seconds in prefill.items():
        rounds = [row[name] / row["m3jax"] for row in steps]
        each = " ".join(f"{x:.1f}" for x in rounds)
        decode = statistics.median(row[name] for row in steps) * 1e3
        ratios = f"{seconds / prefill['m3jax']:10.1f} {statistics.median(rounds):9.1f}"
        print(f"{name:22s} {seconds:10.2f} {decode:15.1f} {ratios}  {each}")


def theirs(attention: str, tokens: list[int]) -> Generator[float, int]:
    """Time transformers with a dynamic cache, logits of the last token only; yield seconds as `ours` does."""
    import torch
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    model = MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**TEXT, attn_implementation=attention)).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        model(ids[:, :256], logits_to_keep=1)
        begin = time.perf_counter()
        out = model(ids, logits_to_keep=1, use_cache=True)
        new = yield time.perf_counter() - begin
        while True:
            begin = time.perf_counter()
            for _ in range(new):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, logits_to_keep=1, use_cache=True)
            new = yield (time.perf_counter() - begin) / new


def ours(tokens: list[int], new_tokens: int) -> Generator[float, int]:
    """Time what `m3jax.generate` runs, compiled beforehand: yield the prefill's seconds, then those of a token.

    Send how many tokens to decode next. The tokens of one call of the engine are all decoded, even if fewer are asked.
    """
    from m3jax.config import M3Config
    from m3jax.decoding import Params, Sampling, engine_for
    from m3jax.model import init

    params = Params(max_new_tokens=new_tokens + 1, sampling=Sampling.greedy())
    engine = engine_for(init(M3Config.from_dict(TEXT), 0), [tokens], [params])
    engine.add(tokens, params)
    while engine.prefill():
        pass
    timings = engine.timings
    new = yield timings.prefill_seconds
    while True:
        seconds, count = timings.decode_seconds, timings.decoded_tokens
        while engine.busy and timings.decoded_tokens - count < new:
            engine.step()
        new = yield (timings.decode_seconds - seconds) / (timings.decoded_tokens - count)


def growth() -> None:
    """Measure the prefill's time over the prompt's length."""
    print(f"{'tokens':>8s} {'prefill s':>10s} {'us / token':>11s}")
    for power in range(11, 17):
        tokens = np.random.default_rng(0).integers(2, TEXT["vocab_size"], 1 << power).tolist()
        prefill = next(ours(tokens, 1))
        print(f"{1 << power:8d} {prefill:10.2f} {prefill / (1 << power) * 1e6:11.1f}", flush=True)


if __name__ == "__main__":
    main()
