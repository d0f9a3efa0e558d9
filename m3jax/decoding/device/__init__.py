"""The device side: a chunk of prompts, a run of decode steps or of rounds, whole pages; each one jitted call.

Nothing here reads a value on the host. Which rows, how long, where their pages lie, how they are sampled and when they
stop is data, so the shapes (rows, chunk, pages, buffer) alone decide what is compiled.
"""

from m3jax.decoding.device.media import invariant_read_media_on_gpu, read_media, read_media_on_gpu
from m3jax.decoding.device.pages import copy_pages, read_pages, write_pages
from m3jax.decoding.device.rounds import (
    decode_in_rounds,
    invariant_rounds_on_gpu,
    rounds_on_gpu,
    untuned_rounds_on_gpu,
)
from m3jax.decoding.device.state import (
    BAD_LOGITS,
    IDLE,
    LENGTH,
    LIVE,
    STOP_ID,
    STOP_STRING,
    Chunk,
    Continuations,
    Layout,
    NewTokens,
    Pictures,
    State,
)
from m3jax.decoding.device.step import (
    decode,
    decode_on_cpu,
    decode_on_gpu,
    invariant_decode_on_gpu,
    invariant_prefill_on_gpu,
    prefill,
    prefill_on_cpu,
    prefill_on_gpu,
    untuned_decode_on_gpu,
)

__all__ = [
    "BAD_LOGITS",
    "IDLE",
    "LENGTH",
    "LIVE",
    "STOP_ID",
    "STOP_STRING",
    "Chunk",
    "Continuations",
    "Layout",
    "NewTokens",
    "Pictures",
    "State",
    "copy_pages",
    "decode",
    "decode_in_rounds",
    "decode_on_cpu",
    "decode_on_gpu",
    "invariant_decode_on_gpu",
    "invariant_prefill_on_gpu",
    "invariant_read_media_on_gpu",
    "invariant_rounds_on_gpu",
    "prefill",
    "prefill_on_cpu",
    "prefill_on_gpu",
    "read_media",
    "read_media_on_gpu",
    "read_pages",
    "rounds_on_gpu",
    "untuned_decode_on_gpu",
    "untuned_rounds_on_gpu",
    "write_pages",
]
