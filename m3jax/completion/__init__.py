"""The layer between people and an engine: folders, pictures and texts become tokens, and tokens become text."""

from m3jax.completion.defaults import Defaults
from m3jax.completion.drafts import named_drafter
from m3jax.completion.generate import check_model, generate
from m3jax.completion.media import marked, read_media, read_medium, with_placeholders
from m3jax.completion.stop_strings import generate_text, stream_text
from m3jax.text import StoppableText

__all__ = [
    "Defaults",
    "StoppableText",
    "check_model",
    "generate",
    "generate_text",
    "marked",
    "named_drafter",
    "read_media",
    "read_medium",
    "stream_text",
    "with_placeholders",
]
