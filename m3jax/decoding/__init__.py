"""Generation: sampling, prefill, the jitted decode loop, and text as it comes."""

from m3jax.decoding.batch import Batch, generate
from m3jax.decoding.request import Generation, Request, Timings
from m3jax.decoding.sampling import Sampling, SamplingParams, filtered_logits, row_keys, sample
from m3jax.decoding.text import StoppableText, generate_text

__all__ = [
    "Batch",
    "Generation",
    "Request",
    "Sampling",
    "SamplingParams",
    "StoppableText",
    "Timings",
    "filtered_logits",
    "generate",
    "generate_text",
    "row_keys",
    "sample",
]
