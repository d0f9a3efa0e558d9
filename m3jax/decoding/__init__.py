"""Generation: sampling, the engine with its jitted prefill and decode loop, and text as it comes."""

from m3jax.decoding.builder import build_engine, engine_for
from m3jax.decoding.engine import Drafting, Engine, Generation, Media, Params, Storage, Timings, Work
from m3jax.decoding.generate import check_logits, generate
from m3jax.decoding.sampling import Sampling, SamplingParams, filtered_logits, row_keys, sample
from m3jax.decoding.seen import marked, read_media, read_medium, with_placeholders
from m3jax.decoding.speculation import Drafter, Eagle3Drafter, PromptLookup
from m3jax.decoding.text import StoppableText, generate_text, stream_text

__all__ = [
    "Drafter",
    "Drafting",
    "Eagle3Drafter",
    "Engine",
    "Generation",
    "Media",
    "Params",
    "PromptLookup",
    "Sampling",
    "SamplingParams",
    "StoppableText",
    "Storage",
    "Timings",
    "Work",
    "build_engine",
    "check_logits",
    "engine_for",
    "filtered_logits",
    "generate",
    "generate_text",
    "marked",
    "read_media",
    "read_medium",
    "row_keys",
    "sample",
    "stream_text",
    "with_placeholders",
]
