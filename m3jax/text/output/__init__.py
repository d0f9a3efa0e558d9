"""A model's output as a client wants it: reasoning, content and calls of tools, as it streams.

`marks` has the wire, `machine` its grammar; `shapes` and `values` type what it carries, `pieces` cuts the events.
"""

from m3jax.text.output.events import Event, Message, ToolCall
from m3jax.text.output.parsers import OutputParser, ReasoningParser, ToolCallParser

__all__ = ["Event", "Message", "OutputParser", "ReasoningParser", "ToolCall", "ToolCallParser"]
