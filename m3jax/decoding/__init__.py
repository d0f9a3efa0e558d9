"""Generation: sampling, the engine with its jitted prefill and decode loop, and text as it comes."""

from m3jax.decoding.engine import Engine
from m3jax.decoding.generate import check_logits, engine_for, generate
from m3jax.decoding.request import Generation, Params, Timings
from m3jax.decoding.sampling import Sampling, SamplingParams, filtered_logits, row_keys, sample
from m3jax.decoding.text import StoppableText, generate_text

__all__ = [
    "Engine",
    "Generation",
    "Params",
    "Sampling",
    "SamplingParams",
    "StoppableText",
    "Timings",
    "check_logits",
    "engine_for",
    "filtered_logits",
    "generate",
    "generate_text",
    "row_keys",
    "sample",
]
