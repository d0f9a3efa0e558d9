"""Text in and out of the model: tokenizer, streaming detokenizer, chat template, and parsers of the output."""

from m3jax.text.chat import ChatTemplate, ordered_messages
from m3jax.text.output import Event, Message, OutputParser, ReasoningParser, ToolCall, ToolCallParser
from m3jax.text.stops import StoppableText
from m3jax.text.stream import TextStream
from m3jax.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Event",
    "Message",
    "OutputParser",
    "ReasoningParser",
    "StoppableText",
    "TextStream",
    "Tokenizer",
    "ToolCall",
    "ToolCallParser",
    "ordered_messages",
]
