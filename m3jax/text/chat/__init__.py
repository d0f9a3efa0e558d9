"""From a conversation to the text that a model reads: the request is normalised, then the template renders it."""

from m3jax.text.chat.request import ordered_messages, ordered_tools
from m3jax.text.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "ordered_messages", "ordered_tools"]
