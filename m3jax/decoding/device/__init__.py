"""The device side: a chunk of prompts, a run of decode steps or of rounds, whole pages; each one jitted call.

Nothing here reads a value on the host. The rows that run, their lengths, pages, sampling and stop conditions are data,
so the shapes (rows, chunk, pages, buffer) alone decide what is compiled.
"""

from m3jax.decoding.device.compiler_options import Mode
from m3jax.decoding.device.media import read_media
from m3jax.decoding.device.pages import copy_pages, read_pages, write_pages
from m3jax.decoding.device.parcel import Parcel
from m3jax.decoding.device.programs import PROGRAMS, program
from m3jax.decoding.device.rounds import decode_in_rounds
from m3jax.decoding.device.start import start_rows
from m3jax.decoding.device.state import (
    BAD_LOGITS,
    IDLE,
    LENGTH,
    LIVE,
    NOTHING_ALLOWED,
    STOP_ID,
    STOP_STRING,
    Chunk,
    Continuations,
    Layout,
    Masks,
    NewTokens,
    PlacedFeatures,
    State,
)
from m3jax.decoding.device.step import decode, prefill

__all__ = [
    "BAD_LOGITS",
    "IDLE",
    "LENGTH",
    "LIVE",
    "NOTHING_ALLOWED",
    "PROGRAMS",
    "STOP_ID",
    "STOP_STRING",
    "Chunk",
    "Continuations",
    "Layout",
    "Masks",
    "Mode",
    "NewTokens",
    "Parcel",
    "PlacedFeatures",
    "State",
    "copy_pages",
    "decode",
    "decode_in_rounds",
    "prefill",
    "program",
    "read_media",
    "read_pages",
    "start_rows",
    "write_pages",
]
