"""Parsing of a model's output, as it streams, into reasoning, content and tool calls.

`marks` has the marks of the output format and `machine` its grammar; `shapes` and `values` give arguments their types
by the tools' schemas, and `pieces` cuts text into events.
"""

from m3jax.text.output.events import Event, Message, ToolCall
from m3jax.text.output.parsers import OutputParser, ReasoningParser, ToolCallParser

__all__ = ["Event", "Message", "OutputParser", "ReasoningParser", "ToolCall", "ToolCallParser"]
