"""Generation, from token ids to token ids: sampling, and the engine with its jitted prefill and decode loop."""

from m3jax.decoding.builder import build_engine, check_logits, engine_for
from m3jax.decoding.engine import Drafting, Engine, Generation, Guide, Media, Params, Storage, Timings, Work
from m3jax.decoding.sampling import DrawContext, Sampling, SamplingParams, filtered_logits, row_keys, sample
from m3jax.decoding.score import score
from m3jax.decoding.speculation import Drafter, Eagle3Drafter, PromptLookup

__all__ = [
    "Drafter",
    "Drafting",
    "DrawContext",
    "Eagle3Drafter",
    "Engine",
    "Generation",
    "Guide",
    "Media",
    "Params",
    "PromptLookup",
    "Sampling",
    "SamplingParams",
    "Storage",
    "Timings",
    "Work",
    "build_engine",
    "check_logits",
    "engine_for",
    "filtered_logits",
    "row_keys",
    "sample",
    "score",
]
