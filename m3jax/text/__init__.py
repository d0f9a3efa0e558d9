"""Text in and out of the model: the tokenizer and its streaming detokenizer."""

from m3jax.text.stream import TextStream
from m3jax.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
