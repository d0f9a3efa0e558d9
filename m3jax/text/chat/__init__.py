"""A conversation to the text that a model reads: a request put in order, then the checkpoint's own template."""

from m3jax.text.chat.request import ordered_messages, ordered_tools
from m3jax.text.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "ordered_messages", "ordered_tools"]
