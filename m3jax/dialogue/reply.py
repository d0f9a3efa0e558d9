"""The record of an answer that has ended."""

from dataclasses import dataclass
from typing import Any, ClassVar

from m3jax.text import Message, ToolCall


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole answer; in a stream of events it is the last one, of kind "reply".

    Attributes:
      parsed: reasoning, content and tool calls of its text.
      finish_reason: "stop", "tool_calls", "length" (cut at the limit of new tokens) or "interrupted".
      prompt_tokens: tokens of the dialogue before the answer.
      cached_tokens: of these, those that were in the prefix cache: they were not computed again.
      new_tokens: tokens of the answer, the end of the turn included.
    """

    kind: ClassVar[str] = "reply"
    parsed: Message
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int

    @property
    def reasoning(self) -> str:
        """The reasoning, "" for none."""
        return self.parsed.reasoning

    @property
    def content(self) -> str:
        """The text after the reasoning, "" for none."""
        return self.parsed.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that are complete."""
        return tuple(call for call in self.parsed.tool_calls if call.is_whole)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a history, which `m3jax.chat` takes back."""
        return self.parsed.as_dict()
