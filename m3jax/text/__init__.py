"""Text in and out of the model: the tokenizer and its streaming detokenizer."""

from m3jax.text.tokenizer import TextStream, Tokenizer

__all__ = ["TextStream", "Tokenizer"]
