"""The engine: requests come and go on the host, while the device runs the same few programs."""

from m3jax.decoding.engine.engine import Engine
from m3jax.decoding.engine.exchange import Snapshot
from m3jax.decoding.engine.media import Media
from m3jax.decoding.engine.options import EngineKnobs, Storage, Work
from m3jax.decoding.engine.report import Drafting, Timings
from m3jax.decoding.engine.request import (
    Generation,
    Guide,
    Params,
    RequestTimings,
    TokenEvent,
    as_prompts,
    check_prompt,
)
from m3jax.decoding.engine.runner import PROGRAMS
from m3jax.decoding.engine.scheduler import UnknownPages
from m3jax.decoding.engine.shapes import DRAFT_TOKENS, PREFILL_CHUNKS, prefill_chunks

__all__ = [
    "DRAFT_TOKENS",
    "PREFILL_CHUNKS",
    "PROGRAMS",
    "Drafting",
    "Engine",
    "EngineKnobs",
    "Generation",
    "Guide",
    "Media",
    "Params",
    "RequestTimings",
    "Snapshot",
    "Storage",
    "Timings",
    "TokenEvent",
    "UnknownPages",
    "Work",
    "as_prompts",
    "check_prompt",
    "prefill_chunks",
]
