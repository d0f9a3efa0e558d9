"""Helpers of the tests of a model's outputs: the marker in short, events put together, texts of the grammar."""

from collections.abc import Iterable, Sequence
from itertools import count

from hypothesis import strategies as st
from support.chat_strategies import END_THINK, NAMESPACE, THINK, tool

from m3jax.text.output import Event, Message, OutputParser

TEXTS = ("reasoning", "content", "arguments")
HEAD = '@<tool_call>\n@<invoke name="f">'
TAIL = "@</invoke>\n@</tool_call>"


def wire(text: str) -> str:
    """The text with the namespace marker in the place of each @."""
    return text.replace("@", NAMESPACE)


def parser(tools: Sequence[dict] | None = None, mode: str | None = "adaptive") -> OutputParser:
    """A parser that numbers the calls: id-0, id-1, ..."""
    numbers = count()
    return OutputParser(tools, mode, new_id=lambda: f"id-{next(numbers)}")


def with_parameters(**properties: object) -> list[dict]:
    """The tool "f" with these parameters, by name and schema."""
    return [tool("f", {"type": "object", "properties": properties})]


def fed(parser: OutputParser, pieces: Iterable[str]) -> list[Event]:
    """All events of an output that comes in pieces."""
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def runs(events: Iterable[Event]) -> list[list[Event]]:
    """Neighbouring events of one text together; the others alone."""
    found: list[list[Event]] = []
    for event in events:
        if event.kind in TEXTS and found and (found[-1][0].kind, found[-1][0].index) == (event.kind, event.index):
            found[-1].append(event)
        else:
            found.append([event])
    return found


def joined(events: Iterable[Event]) -> list[tuple[str, int | None, str | None, str | None, str]]:
    """The texts of events put together, which is what does not depend on how an output was cut."""
    return [
        (run[0].kind, run[0].index, run[0].id, run[0].name, "".join(event.text for event in run))
        for run in runs(events)
    ]


def is_beginning(events: Iterable[Event], whole: Iterable[Event]) -> bool:
    """Return True if events are the first of others; the last text may be cut short."""
    first, all_of_them = joined(events), joined(whole)
    if not first:
        return True
    *before, last = first
    same = all_of_them[: len(before)] == before and len(all_of_them) > len(before)
    return same and all_of_them[len(before)][:4] == last[:4] and all_of_them[len(before)][4].startswith(last[4])


def calls_of(message: Message) -> list[tuple[str, dict]]:
    """Name and arguments of each call."""
    return [(call.name, call.arguments) for call in message.tool_calls]


# A tool with a parameter of every type, and texts of what the grammar knows and what looks like it.
TOOLS = with_parameters(
    s={"type": "string"},
    n={"type": "integer"},
    u={"type": ["string", "null"]},
    o={"type": "object", "properties": {"s": {"type": "string"}, "item": {"type": "number"}}},
    a={"items": {"anyOf": [{"type": "object", "properties": {"s": {"type": "string"}}}, {"type": "string"}]}},
    item={"type": "array", "items": {"type": "integer"}},
    x={},
)
_TAGS = [
    f"{slash}{name}" for name in ("tool_call", "invoke", "s", "n", "u", "o", "a", "item", "x") for slash in ("", "/")
]
ALPHABET = (
    *(NAMESPACE + f"<{tag}>" for tag in _TAGS),
    *(
        NAMESPACE,
        wire('@<invoke name="f">'),
        wire("@<invoke name=g>"),
        "<s>",
        "</s>",
        "<item>",
        "</invoke>",
        '<invoke name="f">',
    ),
    *(THINK, END_THINK, "<mm:", "think>", "]", "]<]", "]<]minimax[>", "<", "</", ">", "a", "5", " ", "\n", "null", '"'),
    *("\\", "\x01", "\ud800", "é", "🦜", "text of more than a few characters, which is an event of its own. "),
)


@st.composite
def outputs(draw, most: int = 2_000) -> str:
    """Any text over the grammar's alphabet; one in two begins within a call."""
    begin = draw(st.sampled_from(["", wire(HEAD)]))
    return (begin + "".join(draw(st.lists(st.sampled_from(ALPHABET), max_size=60))))[:most]


@st.composite
def cuts(draw, text: str) -> list[str]:
    """A text in pieces, of any lengths."""
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
