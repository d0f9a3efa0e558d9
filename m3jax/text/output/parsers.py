"""The parsers of outputs; one may be fed one output after another."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from m3jax.messages import printable, shown
from m3jax.text.chat import ordered_tools
from m3jax.text.output.events import Event, Message
from m3jax.text.output.machine import Machine, Tool
from m3jax.text.output.shapes import shapes_of

MODES = ("enabled", "disabled", "adaptive")


def new_call_id() -> str:
    """Return a random id for a call: `call_` and 24 hexadecimal digits."""
    return "call_" + secrets.token_hex(12)


class OutputParser:
    """Parser of a model's output into reasoning, content and tool calls, as it streams or at once.

    It never raises for what a model wrote: what is not as the grammar has it is repaired, dropped or left as text by
    the rules of docs/chat_output.md, and `faults` says so. How the text is cut makes no difference to the texts of the
    events put together. Time is linear in the text; what is kept is the value that is open.

    Args:
        tools: the tools of the request, as `ChatTemplate.render` takes them; their schemas type the arguments.
        thinking_mode: the request's, "enabled", "disabled" or "adaptive"; None is "adaptive". Where it is "enabled" the
            prompt ended with the mark that opens reasoning.
        new_id: makes the id of each call.

    Raises:
        ValueError: another mode, or tools that are none, or whose parameters are no JSON schema.
    """

    _has_reasoning = _has_calls = True

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        thinking_mode: str | None = "adaptive",
        new_id: Callable[[], str] = new_call_id,
    ):
        if thinking_mode not in (None, *MODES):
            raise ValueError(f"thinking_mode = {shown(thinking_mode)}: must be one of {', '.join(MODES)}")
        self._tools = _tools_of(tools)
        self._is_thinking = thinking_mode == "enabled"
        self._new_id = new_id
        self._machine, self._is_through = self._new_machine(), False

    def _new_machine(self) -> Machine:
        return Machine(self._tools, self._is_thinking, self._has_reasoning, self._has_calls, self._new_id)

    @property
    def faults(self) -> tuple[str, ...]:
        """The repairs and drops in the current output, or in the last one until the next begins; at most 32 lines."""
        return tuple(self._machine.faults)

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of an output; after `finish`, the first piece of another.

        Args:
            text: the model's output from the first character behind the prompt, with special tokens as their text.

        Returns:
            The events that are ready. Up to 13 characters wait for more, and what may be the beginning of a mark.

        Raises:
            ValueError: something that is no text.
        """
        _check_text(text)
        if self._is_through:
            self._machine, self._is_through = self._new_machine(), False
        return self._machine.feed(text)

    def finish(self, is_cut: bool = False) -> list[Event]:
        """End the output: the parser can be used for another.

        Args:
            is_cut: True if a limit or a user ended it: then a marker at its end, with which a call would have begun, is
                left out. Else it is text.

        Returns:
            The events of what waited. A call that did not come to its end gets none: what was sent of its arguments is
            all that there is, and no "tool_call_end" follows.
        """
        events = [] if self._is_through else self._machine.finish(is_cut)
        self._is_through = True
        return events

    def parse(self, text: str) -> Message:
        """Read a whole output; one that is being fed is not disturbed.

        Args:
            text: as in `feed`.

        Returns:
            The message that the events of `feed` and `finish` make.

        Raises:
            ValueError: something that is no text.
        """
        _check_text(text)
        machine = self._new_machine()
        return Message.of([*machine.feed(text), *machine.finish()], machine.faults)


class ReasoningParser(OutputParser):
    """Parser that separates reasoning from content alone: from the first call on, everything is content, unparsed.

    Args:
        thinking_mode: as in `OutputParser`.
    """

    _has_calls = False

    def __init__(self, thinking_mode: str | None = "adaptive"):
        super().__init__(thinking_mode=thinking_mode)


class ToolCallParser(OutputParser):
    """Parser of calls alone: the marks of reasoning are content.

    Args:
        tools: as in `OutputParser`.
        new_id: as in `OutputParser`.
    """

    _has_reasoning = False

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        new_id: Callable[[], str] = new_call_id,
    ):
        super().__init__(tools, new_id=new_id)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"an output is text, got {shown(text)}; decode tokens with skip_special_tokens=False")


def _tools_of(tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None) -> dict[str, Tool]:
    """Return the tools by name."""
    declared = {}
    for number, tool in enumerate(ordered_tools(tools), 1):
        name, schema = tool["function"]["name"], tool["function"].get("parameters", True)
        declared[name] = Tool(shapes_of(schema, f"tool {number} ({printable(name)}): parameters"), schema)
    return declared
