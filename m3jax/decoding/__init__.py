"""Generation, from token ids to token ids: sampling, and the engine with its jitted prefill and decode loop."""

from m3jax.decoding.builder import build_engine, check_logits, engine_for
from m3jax.decoding.engine import (
    Drafting,
    Engine,
    Generation,
    Guide,
    Media,
    Params,
    RequestTimings,
    Storage,
    Timings,
    TokenEvent,
    Work,
)
from m3jax.decoding.loop import EngineLoop, RequestStream
from m3jax.decoding.sampling import DrawContext, Sampling, SamplingParams, filtered_logits, row_keys, sample
from m3jax.decoding.score import score
from m3jax.decoding.speculation import Drafter, Eagle3Drafter, PromptLookup
from m3jax.decoding.steering import Steer

__all__ = [
    "Drafter",
    "Drafting",
    "DrawContext",
    "Eagle3Drafter",
    "Engine",
    "EngineLoop",
    "Generation",
    "Guide",
    "Media",
    "Params",
    "PromptLookup",
    "RequestStream",
    "RequestTimings",
    "Sampling",
    "SamplingParams",
    "Steer",
    "Storage",
    "Timings",
    "TokenEvent",
    "Work",
    "build_engine",
    "check_logits",
    "engine_for",
    "filtered_logits",
    "row_keys",
    "sample",
    "score",
]
