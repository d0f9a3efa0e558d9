"""From token ids to text as they come."""

from m3jax.decoding.text.stop_strings import StoppableText, generate_text, stream_text

__all__ = ["StoppableText", "generate_text", "stream_text"]
