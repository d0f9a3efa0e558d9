"""Models and prompts that several subjects measure."""

import dataclasses
import statistics
import time

import numpy as np

import m3jax
from m3jax import M3Config
from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3, init

SUFFIX = 64  # tokens that each request has of its own behind a shared prefix
FIRST_TOKEN = 256  # that is drawn: below are the embedded checkpoint's marks and placeholders
NAMES = ("tiny", "bench", "m3")  # the embedded checkpoint, `TEXT`, `four_layers`
TEXT = dict(
    hidden_size=512, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=4096,
    intermediate_size=256, dense_intermediate_size=1024, shared_intermediate_size=256, num_local_experts=32,
    num_experts_per_tok=4, rotary_dim=32, index_n_heads=4, index_head_dim=64, index_block_size=128,
    index_topk_blocks=16, index_local_blocks=1, layer_types=["full_attention"] * 2 + ["minimax_m3_sparse"] * 6,
    mlp_layer_types=["dense"] * 2 + ["sparse"] * 6, max_position_embeddings=1 << 17, bos_token_id=0, eos_token_id=1,
    rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
)  # fmt: skip


def build(name: str, weights: str = "dequantize", dtype: str | None = None) -> M3:
    """Return a model of `NAMES` in a dtype, or in its usual one; with `weights` "mxfp8" it is quantized."""
    if name == "tiny":
        model = m3jax.load(progress=False, **({"dtype": dtype} if dtype else {}))
    else:
        config, usual = (M3Config.from_dict(TEXT), "float32") if name == "bench" else (four_layers(), "bfloat16")
        model = init(config, 0, dtype or usual)
    return m3jax.quantize(model) if weights == "mxfp8" else model


def four_layers() -> M3Config:
    """Return M3's last dense layer and its first three sparse ones."""
    full = M3Config.m3()
    first = full.layer_types.index("minimax_m3_sparse") - 1
    return dataclasses.replace(
        full, num_hidden_layers=4, vision_config=None, layer_types=full.layer_types[first : first + 4],
        mlp_layer_types=full.mlp_layer_types[first : first + 4],
    )  # fmt: skip


def engine_sizes(config: M3Config, prefix: int, new_tokens: int, rows: int) -> dict:
    """Return the sizes of an engine that holds a prefix once, and what each request adds."""
    pages_of_request = -(-(SUFFIX + new_tokens) // config.index_block_size) + 2
    pages = -(-prefix // config.index_block_size) + (rows + 1) * pages_of_request
    return dict(pages=pages, max_batch=rows, max_length=prefix + SUFFIX + new_tokens)


def random_tokens(config: M3Config, count: int, seed: int) -> list[int]:
    """Return tokens that are neither marks nor placeholders."""
    return np.random.default_rng(seed).integers(FIRST_TOKEN, config.vocab_size, count).tolist()


def prompt(config: M3Config, prefix: list[int], seed: int) -> list[int]:
    """Return the prefix and a suffix that no other request has."""
    return prefix + random_tokens(config, SUFFIX, seed + 1)


def greedy(new_tokens: int, **more) -> Params:
    """Return the parameters of greedy decoding."""
    return Params(max_new_tokens=new_tokens, sampling=Sampling.greedy(), **more)


def start(engine: Engine, prompts: list[list[int]], params: Params) -> list[int]:
    """Add requests side by side, and return their handles when all are past their prompts."""
    handles = [engine.add(tokens, params) for tokens in prompts]
    while engine.prefill():
        pass
    return handles


def step_seconds(engine: Engine, rows: int, steps: int) -> float:
    """Return the median seconds of a decode step, or of a round of verification, until all requests have ended.

    Raises:
      ValueError: The requests ended before a whole call of `steps`.
    """

    def done() -> float:
        return (engine.drafting.forwards if engine.drafting.draft_tokens else engine.timings.decoded_tokens) / rows

    seconds = []
    while engine.busy:
        began, before = engine.timings.decode_seconds, done()
        engine.step()
        if done() - before == steps:  # in the last call rows end
            seconds.append((engine.timings.decode_seconds - began) / steps)
    if not seconds:
        raise ValueError(f"the requests are too short for a call of {steps} steps")
    return statistics.median(seconds)


def first_token(engine: Engine, tokens: list[int]) -> float:
    """Return the seconds from `add` to the first token of a request that is alone."""
    began = time.perf_counter()
    engine.add(tokens, greedy(1))
    engine.run()
    return time.perf_counter() - began
