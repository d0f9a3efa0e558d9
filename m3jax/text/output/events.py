"""The results of parsing an output: events while it streams, and a message at its end."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from m3jax.messages import shown
from m3jax.text.chat.schemas import problems_of

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of an output.

    Attributes:
        kind: "reasoning" or "content": `text` is the next piece of it.
            "tool_call": a call begins; it has `index`, `id` and `name`.
            "arguments": `text` is the next piece of the JSON object of the arguments of call `index`.
            "tool_call_end": call `index` is whole, and the pieces of its arguments are valid JSON.
        text: "" where the kind has none.
        index: the number of the call in this output, from 0.
        id: of the call.
        name: of the tool that is called, declared or not.
        schema: of the arguments, with which a `Message` checks them: the tool's parameters, True if it takes anything,
            None if no such tool was declared.
    """

    kind: str
    text: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    schema: Any = field(default=True, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: names the call among all others.
        name: of the tool.
        arguments: by name. Of a call that the output broke off in, those that were whole.
        is_whole: True if the call came to its end.
        problems: a line if no such tool was declared, or for each way in which the arguments of a whole call break the
            tool's schema. The arguments are as the model wrote them all the same.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    is_whole: bool = True
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """An output of the model, parsed to its end.

    Attributes:
        reasoning: the text of the reasoning, "" for none.
        content: the text outside reasoning and calls, "" for none.
        tool_calls: in order.
        faults: a line for each repair or drop; none where the output follows the grammar.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, events: Iterable[Event], faults: Iterable[str] = ()) -> "Message":
        """Join events into a message.

        Args:
            events: all of an output, or those so far.
            faults: of the parser that made them.
        """
        texts: dict[tuple[str, int | None], list[str]] = {}
        calls: list[Event] = []
        ended = set()
        for event in events:
            if event.kind == "tool_call":
                calls.append(event)
            elif event.kind == "tool_call_end":
                ended.add(event.index)
            else:
                texts.setdefault((event.kind, event.index), []).append(event.text)
        joined = {key: "".join(pieces) for key, pieces in texts.items()}
        tool_calls = []
        for call in calls:
            arguments, is_whole = joined.get(("arguments", call.index), ""), call.index in ended
            members = json.loads(arguments) if is_whole else _whole_members(arguments)
            problems = problems_of(members, call.schema) if is_whole and call.schema is not None else ()
            if call.schema is None:
                problems = (f"no tool is called {shown(call.name)}",)
            tool_calls.append(ToolCall(call.id or "", call.name or "", members, is_whole, problems))
        reasoning, content = (joined.get((kind, None), "") for kind in ("reasoning", "content"))
        return cls(reasoning, content, tuple(tool_calls), tuple(faults))

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a conversation has it, for the next turn's prompt, without incomplete calls."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
            if call.is_whole
        ]
        optional = {"reasoning_content": self.reasoning, "tool_calls": calls}
        given = {name: value for name, value in optional.items() if value}
        return {"role": "assistant", "content": self.content, **given}


def _whole_members(text: str) -> dict[str, Any]:
    """Return the complete members of an object whose JSON breaks off."""
    members: dict[str, Any] = {}
    position = 1
    try:
        while position < len(text):
            name, position = _DECODER.raw_decode(text, position)
            value, position = _DECODER.raw_decode(text, position + 1)  # behind the colon
            members[name] = value
            position += 1  # behind the comma
    except (ValueError, IndexError):
        pass
    return members
