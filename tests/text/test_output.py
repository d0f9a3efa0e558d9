"""Outputs of a model, right and wrong ones, and the message that each is; cut anywhere, it is the same."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_strategies import NAMESPACE, tool
from support.outputs import calls_of, fed, is_beginning, joined, parser, runs, wire

from m3jax.text import OutputParser, ReasoningParser, ToolCallParser
from m3jax.text.output.events import Event, Message
from m3jax.text.output.pieces import Pieces, as_json

EDIT = {"type": "object", "properties": {"old": {"type": "string"}, "line": {"type": "integer"}}}
TOOLS = [
    tool("write", {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}),
    tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    tool(
        "edit",
        {"type": "object", "properties": {"edits": {"type": "array", "items": EDIT}, "all": {"type": "boolean"}}},
    ),
    tool("now", {"type": "object", "properties": {}}),
    tool(
        "sum",
        {
            "type": "object",
            "properties": {
                "item": {"type": "array", "items": {"type": "integer"}},
                "names": {"type": "array", "items": {"type": "string"}},
                "in": {"type": "object", "properties": {"names": {"type": "array"}}},
                "unit": {"type": "string"},
            },
        },
    ),
]
PARIS = '@<invoke name="weather">@<city>Paris@</city>@</invoke>\n'
ROME = '@<invoke name="weather">@<city>Rome@</city>@</invoke>\n'
IN_PARIS, IN_ROME = ("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})


class Case(NamedTuple):
    """An output, with @ for the namespace marker, and what it is."""

    output: str
    content: str = ""
    calls: tuple = ()
    reasoning: str = ""
    mode: str | None = "adaptive"
    are_whole: tuple = ()  # of each call, where one is not


CASES = {
    # What the template writes.
    "an answer": Case("Good day.", "Good day."),
    "nothing": Case(""),
    "an answer without reasoning, as history has it": Case("</mm:think>Good day.", "Good day."),
    "reasoning that the prompt opened": Case("why</mm:think>so", "so", reasoning="why", mode="enabled"),
    "reasoning that the model opened": Case("<mm:think>why</mm:think>so", "so", reasoning="why"),
    "thinking off, as the prompt says": Case("so", "so", mode="disabled"),
    "a call": Case(f"@<tool_call>\n{PARIS}@</tool_call>", calls=(IN_PARIS,)),
    "calls of one block": Case(f"@<tool_call>\n{PARIS}{ROME}@</tool_call>", calls=(IN_PARIS, IN_ROME)),
    "reasoning, text and a call": Case(
        f"<mm:think>hm\n</mm:think>\nWait. @<tool_call>\n{PARIS}@</tool_call>", "\nWait. ", (IN_PARIS,), "hm\n"
    ),
    "a call without arguments": Case(
        '@<tool_call>\n@<invoke name="now">@</invoke>\n@</tool_call>', calls=(("now", {}),)
    ),
    "structures in structures": Case(
        '@<tool_call>\n@<invoke name="edit">@<edits>@<item>@<old>a@</old>@<line>3@</line>@</item>@<item>@<old>@</old>'
        "@</item>@</edits>@<all>true@</all>@</invoke>\n@</tool_call>",
        calls=(("edit", {"edits": [{"old": "a", "line": 3}, {"old": ""}], "all": True}),),
    ),
    "a tool that nobody declared": Case(
        '@<tool_call>\n@<invoke name="ns.un-known">@<a>5@</a>@<o>@<p>@<q>@<item>x@</item>@</q>@</p>@</o>@</invoke>\n'
        "@</tool_call>",
        calls=(("ns.un-known", {"a": "5", "o": {"p": {"q": ["x"]}}}),),
    ),
    "a string of all that is no mark": Case(
        '@<tool_call>\n@<invoke name="write">@<content> <b>&lt; "\\n\\"\n@ @<b>@</b>@<item>1@</item> @<tool_call>'
        '@<invoke name="now"> </content> ]<]minimax[>\n\n @</content>@</invoke>\n@</tool_call>',
        calls=(
            (
                "write",
                {
                    "content": wire(
                        ' <b>&lt; "\\n\\"\n@ @<b>@</b>@<item>1@</item> @<tool_call>@<invoke name="now"> </content> '
                        "]<]minimax[>\n\n "
                    )
                },
            ),
        ),
    ),
    "marks of reasoning in an argument are text": Case(
        '@<tool_call>\n@<invoke name="write">@<content><mm:think>a</mm:think>@</content>@</invoke>\n@</tool_call>',
        calls=(("write", {"content": "<mm:think>a</mm:think>"}),),
    ),
    # Around blocks.
    "text around a block": Case(f"One @<tool_call>\n{PARIS}@</tool_call> two", "One  two", (IN_PARIS,)),
    "a second block": Case(
        f"@<tool_call>{PARIS}@</tool_call>\nand @<tool_call>\n{ROME}@</tool_call>.", "\nand .", (IN_PARIS, IN_ROME)
    ),
    "text between the calls of a block": Case(
        f"@<tool_call>\n{PARIS} if a < b then a < c or so it is, {ROME}@</tool_call>",
        "if a < b then a < c or so it is, ",
        (IN_PARIS, IN_ROME),
    ),
    "thinking again behind a call": Case(
        f"@<tool_call>\n{PARIS}@</tool_call><mm:think>hm</mm:think>so", "so", (IN_PARIS,), "hm"
    ),
    "a block that is not closed": Case(f"@<tool_call>\n{PARIS}<mm:think>hm</mm:think>so", "so", (IN_PARIS,), "hm"),
    "tags without the marker in a text between calls": Case(
        f"@<tool_call>\n{PARIS}so <invoke name=now> and </tool_call>@</tool_call>.",
        "so <invoke name=now> and </tool_call>.",
        (IN_PARIS,),
    ),
    "names in other quotes, or none": Case(
        "@<tool_call>@<invoke name='now'>@</invoke>@<invoke name=now>@</invoke>"
        '@<invoke  name = "now" >@</invoke>@</tool_call>',
        calls=(("now", {}),) * 3,
    ),
    # Reasoning: sglang #28715, smg #2447, vLLM #45718, frontend-crates #133.
    "the end of reasoning again and again": Case(
        "</mm:think></mm:think>so</mm:think></mm:think> on", "so on", reasoning="why", mode="enabled"
    )._replace(output="why</mm:think></mm:think>so</mm:think></mm:think> on"),
    "an end without a beginning, within an answer": Case("One</mm:think> two", "One two"),
    "reasoning opened twice": Case("<mm:think><mm:think>why</mm:think>so", "so", reasoning="why", mode="enabled"),
    "text before reasoning": Case("Hm, <mm:think>why</mm:think>so", "Hm, so", reasoning="why"),
    "thinking that is off and happens": Case("<mm:think>why</mm:think>so", "so", reasoning="why", mode="disabled"),
    "reasoning that does not end": Case("why and wh", reasoning="why and wh", mode="enabled"),
    "no mode is the adaptive one": Case("so", "so", mode=None),
    "a call ends reasoning that was not closed": Case(
        f"why @<tool_call>\n{PARIS}@</tool_call>so", "so", (IN_PARIS,), "why ", "enabled"
    ),
    "other tags are no marks": Case("<think>a</think></thinking><mm:Think>", "<think>a</think></thinking><mm:Think>"),
    # What looks like a call: smg #2423, llama.cpp #24523, MiniMax-M3 #31, xinference #5273.
    "the mark of a block in an answer": Case(
        "Write @<tool_call> and then @<invoke>.", "Write @<tool_call> and then @<invoke>."
    ),
    "the mark of a block in reasoning": Case(
        "is it @<tool_call>\n @</tool_call>?</mm:think>so",
        "so",
        reasoning="is it @<tool_call>\n @</tool_call>?",
        mode="enabled",
    ),
    "a mark of a block and then a call": Case(
        f"@<tool_call>@<tool_call>\n{PARIS}@</tool_call>", "@<tool_call>", (IN_PARIS,)
    ),
    "the marker alone": Case("a @ b @<item>", "a @ b @<item>"),
    "brackets like the marker's": Case("a[b[1]] ]]<]minimax[>", "a[b[1]] ]]<]minimax[>"),
    "the call of another model": Case(
        '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
        '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    ),
    # What models leave out: vLLM #51073, #47001.
    "the first tag is missing, but for its marker": Case(
        '@<tool_call>\n@<invoke name="write">@a.txt@</path>@<content>b@</content>@</invoke>\n@</tool_call>',
        calls=(("write", {"path": "a.txt", "content": "b"}),),
    ),
    "a tag is missing": Case(
        '@<tool_call>\n@<invoke name="write">@<path>a@</path>b c@</content>@</invoke>\n@</tool_call>',
        calls=(("write", {"path": "a", "content": "b c"}),),
    ),
    "a tag is missing within an object": Case(
        '@<tool_call>\n@<invoke name="edit">@<edits>@<item>@7@</line>@</item>@</edits>@</invoke>\n@</tool_call>',
        calls=(("edit", {"edits": [{"line": 7}]}),),
    ),
    "a tag is missing that the schema does not have": Case(
        '@<tool_call>\n@<invoke name="write">@a.txt@</file>@b@</path>@<content>c@</content>@</invoke>\n@</tool_call>',
        calls=(("write", {"path": "b", "content": "c"}),),
    ),
    "tags without the marker": Case(
        '@<tool_call>\n<invoke name="edit">\n<edits><item><old>a</old><line>3</line></item></edits></invoke>'
        "\n</tool_call>so",
        "so",
        (("edit", {"edits": [{"old": "a", "line": 3}]}),),
    ),
    "tags without the marker are text in a string": Case(
        '@<tool_call>\n@<invoke name="write">@<path><content></path>@</path>@</invoke>@</tool_call>',
        calls=(("write", {"path": "<content></path>"}),),
    ),
    "a parameter that is not closed": Case(
        '@<tool_call>\n@<invoke name="weather">@<city>Paris@</invoke>\n@</tool_call>',
        calls=(IN_PARIS,),
    ),
    "an item that is not closed": Case(
        '@<tool_call>\n@<invoke name="edit">@<edits>@<item>@<line>1@</edits>@</invoke>\n@</tool_call>',
        calls=(("edit", {"edits": [{"line": 1}]}),),
    ),
    "a call that is not closed before the block": Case(
        f'@<tool_call>\n@<invoke name="weather">@<city>Paris@</city>@</tool_call>so @<tool_call>{ROME}@</tool_call>',
        "so ",
        (IN_PARIS, IN_ROME),
    ),
    "a call that is not closed before the next": Case(
        f'@<tool_call>\n@<invoke name="weather">@<city>Paris@</city>{ROME}@</tool_call>',
        calls=(IN_PARIS, IN_ROME),
    ),
    "text and tags that belong to nothing": Case(
        '@<tool_call>\n@<invoke name="weather">so: @<tool_call>@<city>Paris@</city>@</town> and <i>that'
        "@</invoke>@</tool_call>",
        calls=(IN_PARIS,),
    ),
    "a parameter that comes again": Case(
        '@<tool_call>\n@<invoke name="weather">@<city>Paris@</city>@<city>Rome@</city>@</invoke>\n@</tool_call>',
        calls=(IN_PARIS,),
    ),
    "an array that comes again": Case(
        '@<tool_call>\n@<invoke name="sum">@<names>one@</names>@<names>two@</names>@<item>@<item>1@</item>@</item>\n'
        "@<item>2@</item>@<item>[3, 4]@</item>@<unit>m@</unit>@</invoke>\n@</tool_call>",
        calls=(("sum", {"names": ["one", "two"], "item": [1, 2, 3, 4], "unit": "m"}),),
    ),
    "an array that comes again behind another parameter": Case(
        '@<tool_call>\n@<invoke name="sum">@<names>@<item>one@</item>@</names>@<unit>m@</unit>@<names>two@</names>'
        "@</invoke>\n@</tool_call>",
        calls=(("sum", {"names": ["one"], "unit": "m"}),),
    ),
    "a member that is an array and comes again": Case(
        '@<tool_call>\n@<invoke name="sum">@<in>@<names>@<item>one@</item>@</names>@<x>1@</x>@<names>two@</names>@</in>'
        "@</invoke>\n@</tool_call>",
        calls=(("sum", {"in": {"names": ["one", "two"], "x": "1"}}),),
    ),
    "an array that is called item and has the text <item>": Case(
        '@<tool_call>\n@<invoke name="sum">@<item><item>@</item>@<unit>m@</unit>@</invoke>\n@</tool_call>',
        calls=(("sum", {"item": [""], "unit": "m"}),),
    ),
    "an array that is called item, and items without markers": Case(
        '@<tool_call>\n@<invoke name="sum">@<item><item>1</item><item>2</item>@</item>@<unit>m@</unit>@</invoke>\n'
        "@</tool_call>",
        calls=(("sum", {"item": [1, 2], "unit": "m"}),),
    ),
    # What ends too early: vLLM #47001.
    "it ends within the mark of a block": Case("so @<tool_ca", "so @<tool_ca"),
    "it ends within a mark of reasoning": Case("why</mm:thi", reasoning="why</mm:thi", mode="enabled"),
    "it ends where a call was to begin": Case("so @<tool_call>\n@<invoke nam", "so "),
    "it ends within a string": Case(
        '@<tool_call>\n@<invoke name="write">@<path>a@</path>@<content>half a fi]<]min',
        calls=(("write", {"path": "a"}),),
        are_whole=(False,),
    ),
    "it ends within the second call": Case(
        f'@<tool_call>\n{PARIS}@<invoke name="edit">@<edits>@<item>',
        calls=(IN_PARIS, ("edit", {})),
        are_whole=(True, False),
    ),
    "it ends before the call is closed": Case(
        '@<tool_call>\n@<invoke name="weather">@<days>3@</days>',
        calls=(("weather", {"days": 3}),),
        are_whole=(False,),
    ),
    "it ends within the end of a block": Case(f"@<tool_call>\n{PARIS}@</tool_", calls=(IN_PARIS,)),
}


def plain(faults: Sequence[str]) -> list[str]:
    """Return faults with @ for the marker."""
    return [line.replace(NAMESPACE, "@") for line in faults]


@pytest.mark.parametrize("name", CASES)
def test_an_output_is_its_message(name):
    case = CASES[name]
    message = parser(TOOLS, case.mode).parse(wire(case.output))
    are_whole = [call.is_whole for call in message.tool_calls]
    found = dict(reasoning=message.reasoning, content=message.content, calls=calls_of(message), are_whole=are_whole)
    assert found == dict(
        reasoning=wire(case.reasoning),
        content=wire(case.content),
        calls=list(case.calls),
        are_whole=list(case.are_whole or [True] * len(case.calls)),
    )
    assert plain(message.faults) == FAULTS.get(name, [])


def places(output: str) -> list[int]:
    """Return the places to cut an output: before each space, and every fifth, offset by the output's length."""
    return [place for place in range(1, len(output)) if output[place] == " " or (place + len(output)) % 5 == 0]


@pytest.mark.parametrize("name", CASES)
def test_where_an_output_is_cut_makes_no_difference(name):
    """Cut in two, and into single characters; and what came of a beginning is never taken back."""
    case, output = CASES[name], wire(CASES[name].output)
    reader = OutputParser(TOOLS, case.mode, new_id=lambda: "id")
    whole = fed(reader, [output])
    assert joined(fed(reader, output)) == joined(whole)
    for place in places(output):
        events = reader.feed(output[:place])
        assert is_beginning(events, whole), (place, joined(events), joined(whole))
        assert joined([*events, *reader.feed(output[place:]), *reader.finish()]) == joined(whole), output[:place]


def test_calls_have_numbers_names_and_ids():
    """sglang #36691, #23071, #28923: a wrong index, no name, a call without arguments that is lost."""
    events = fed(OutputParser(TOOLS), [wire(f'@<tool_call>{PARIS}@<invoke name="now">@</invoke>{ROME}@</tool_call>')])
    calls = [event for event in events if event.kind == "tool_call"]
    assert [(call.index, call.name) for call in calls] == [(0, "weather"), (1, "now"), (2, "weather")]
    assert len({call.id for call in calls}) == 3
    for call in calls:
        assert call.id.startswith("call_") and len(call.id) == 29 and set(call.id[5:]) <= set("0123456789abcdef")
    assert [(event.index, event.text) for event in events if event.kind == "arguments"][1] == (1, "{}")
    assert [event.index for event in events if event.kind == "tool_call_end"] == [0, 1, 2]


def test_a_call_is_announced_before_its_arguments_and_a_string_comes_before_its_end():
    """vLLM #47998: arguments that were kept to the end made clients give up on long files."""
    reader = parser(TOOLS)
    assert [event.name for event in reader.feed(wire('@<tool_call>\n@<invoke name="write">')) if event.name] == [
        "write"
    ]
    reader.feed(wire("@<content>"))
    for _ in range(20):
        assert [event.kind for event in reader.feed("a line of a long file\n")] == ["arguments"]


def test_thinking_is_not_on_unless_it_is_asked_for():
    """vLLM #46042, dynamo #10983: the start is the mode's alone; the prompt, which holds marks, is not read."""
    assert parser().parse("so").content == OutputParser().parse("so").content == "so"
    assert parser(mode="enabled").parse("so").reasoning == "so"
    assert ReasoningParser("enabled").parse("so").reasoning == "so"
    assert ToolCallParser().parse("so").content == "so"


def test_a_parser_can_be_used_again():
    """Also after an output that broke off in a call: the next one begins outside, its calls at 0, without a fault."""
    reader = parser(TOOLS)
    fed(reader, [wire('@<tool_call>@<invoke name="write">@<content>half')])
    assert reader.faults and reader.finish() == []
    events = fed(reader, [wire(f"so @<tool_call>{PARIS}@</tool_call>")])
    assert [run[:2] for run in joined(events)] == [
        ("content", None),
        ("tool_call", 0),
        ("arguments", 0),
        ("tool_call_end", 0),
    ]
    assert reader.faults == ()


def test_parse_leaves_an_output_alone_that_is_being_fed():
    reader = parser(TOOLS)
    events = reader.feed(wire('@<tool_call>@<invoke name="write">@<content>half'))
    assert reader.parse("so").content == "so"
    events += [*reader.feed(wire(" done@</content>@</invoke>@</tool_call>")), *reader.finish()]
    assert joined(events)[1][4] == '{"content":"half done"}'


@pytest.mark.parametrize("mode", ["enabled", "adaptive"])
def test_reasoning_alone_leaves_calls_as_they_are(mode):
    """The content of the reasoning parser is the input of the call parser; a call ends reasoning there too."""
    output = wire(f"why @<tool_call>\n{PARIS}@</tool_call> <mm:think>")
    first = ReasoningParser(mode).parse(output)
    rest = output[4:] if mode == "enabled" else output
    assert (first.reasoning, first.content) == ("why " if mode == "enabled" else "", rest)
    second = ToolCallParser(TOOLS).parse(first.content)
    assert calls_of(second) == [IN_PARIS] and second.content.endswith(" <mm:think>")


def test_a_message_is_a_turn_of_a_conversation():
    message = parser(TOOLS).parse(wire(f"<mm:think>hm</mm:think>so@<tool_call>\n{PARIS}{ROME[:-18]}"))
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    calls = [{"id": "id-0", "type": "function", "function": function}]
    assert message.as_dict() == {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls}
    assert parser().parse("so").as_dict() == {"role": "assistant", "content": "so"}


def test_faults_are_few_short_and_on_one_line():
    name = "a\n" * 200
    faults = parser(TOOLS).parse(wire('@<tool_call>@<invoke name="now">' + f"@</{name}>" * 50)).faults
    assert len(faults) == 32 and all(len(line) <= 400 and "\n" not in line for line in faults)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OutputParser(thinking_mode="on"), "thinking_mode = 'on': must be one of enabled, disabled, adaptive"),
        (lambda: OutputParser({"name": "f"}), "tools is a list of tools"),
        (lambda: OutputParser([{"name": "f"}]), "tool 1: write it as"),
        (lambda: OutputParser().feed(b"so"), "an output is text, got b'so'"),
        (lambda: OutputParser().parse(None), "an output is text, got None"),
        (lambda: ToolCallParser([tool("f", {"type": "string"})]), "tool 1 (f): parameters"),
    ],
)
def test_what_is_no_use_is_refused_in_one_line(make, message, unchecked):
    with pytest.raises(ValueError) as refusal:
        make()
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_pieces_of_a_text_have_5_to_200_characters():
    """However the output comes, at once or in single characters; a shorter piece is a whole text."""
    begin, end = wire('@<tool_call>@<invoke name="write">@<path>'), wire("@</path>@</invoke>")
    for length in (1, 4, 5, 9, 31, 33, *range(184, 202), 229):
        for output in ("x" * length, begin + "x" * length + end):
            for pieces in ([output], output):
                for run in runs(fed(parser(TOOLS), pieces)):
                    sizes = [len(event.text) for event in run]
                    assert max(sizes) <= 200 and (len(run) == 1 or min(sizes) >= 5), (length, run[0].kind, sizes)
    for name, case in CASES.items():
        for run in runs(fed(parser(TOOLS, case.mode), wire(case.output))):
            assert len(run) == 1 or min(len(event.text) for event in run) >= 5, (name, run)


def test_an_event_is_as_large_as_fits():
    """196 characters in grains, and a rest of less than 5 besides; of another kind the next one is an event anew."""
    sizes = lambda *parts: [len(event.text) for event in ended(parts)]

    def ended(parts):
        pieces = Pieces()
        pieces.add("content", None, parts)
        pieces.end()
        return pieces.taken()

    singles = {1: [1], 196: [196], 200: [200], 201: [196, 5], 392: [196, 196], 396: [196, 200], 397: [196, 196, 5]}
    assert {count: sizes(*"x" * count) for count in singles} == singles
    assert sizes("x" * 100, "x" * 96, "x" * 32) == [196, 32] and sizes("x" * 100, "x" * 97, "x" * 32) == [100, 129]
    assert sizes("7" * 300) == [300] and sizes("7" * 300, "xxxx") == [304] and sizes() == []


@given(st.lists(st.integers(1, 33), max_size=12))
def test_what_waits_is_the_least_end_that_can_be_an_event(sizes):
    """By the definition, after each grain: the rest was given out as soon as it was an event too."""
    pieces, given_out, waiting, text = Pieces(), "", [], ""
    for number, size in enumerate(sizes):
        grain = chr(97 + number) * size
        text += grain
        waiting.append(grain)
        pieces.add("content", None, [grain])
        given_out += "".join(event.text for event in pieces.taken())
        cut = max((c for c in range(len(waiting)) if sum(map(len, waiting[c:])) >= 5), default=0)
        if sum(map(len, waiting[:cut])) >= 5:
            waiting = waiting[cut:]
        assert given_out + "".join(waiting) == text
    pieces.mark(Event("tool_call", index=0))
    *rest, last = pieces.taken()
    assert given_out + "".join(event.text for event in rest) == text and last.kind == "tool_call"


# Every fault of an output, in order; those of CASES that are not here have none.
FAULTS = {
    "a call ends reasoning that was not closed": ["reasoning was not closed before call 0"],
    "the first tag is missing, but for its marker": ["<path> was missing in call 0"],
    "a tag is missing": ["<content> was missing in call 0"],
    "a tag is missing within an object": ["<line> was missing in call 0"],
    "a tag is missing that the schema does not have": [
        "</file> in call 0 closes nothing", "<path> was missing in call 0"
    ],
    "tags without the marker": [
        '<invoke name="edit"> has no marker', *(
            f"<{name}> in call 0 has no marker"
            for name in ("edits", "item", "old", "/old", "line", "/line", "/item", "/edits", "/invoke")
        ), "</tool_call> has no marker",
    ],
    "a parameter that is not closed": ["<city> was not closed in call 0"],
    "an item that is not closed": ["<line> was not closed in call 0", "<item> was not closed in call 0"],
    "a call that is not closed before the block": ["call 0 was not closed before its block"],
    "a call that is not closed before the next": ["call 0 was not closed before the next"],
    "text and tags that belong to nothing": [
        "<tool_call> within call 0 is ignored", "text beside <city> in call 0 is dropped",
        "</town> in call 0 closes nothing", "text beside the parameters of call 0 is dropped",
    ],
    "a parameter that comes again": ["a second <city> in call 0 is dropped"],
    "an array that comes again": [
        f"a second <{name}> in call 0 is joined to the first" for name in ("names", "item", "item")
    ],
    "an array that comes again behind another parameter": ["a second <names> in call 0 is dropped"],
    "a member that is an array and comes again": ["a second <names> in call 0 is joined to the first"],
    "an array that is called item and has the text <item>": [
        "<item> in call 0 has no marker", "<item> was not closed in call 0"
    ],
    "an array that is called item, and items without markers": [
        f"<{slash}item> in call 0 has no marker" for slash in ("", "/") * 2
    ],
    "it ends where a call was to begin": ["the text ends where a call was to begin"],
    "it ends within a string": ["the text ends within call 0 ('write')"],
    "it ends within the second call": ["the text ends within call 1 ('edit')"],
    "it ends before the call is closed": ["the text ends within call 0 ('weather')"],
}  # fmt: skip
# What is within the block of a call to "edit" or "sum": the arguments, the text behind the call, the faults.
WITHIN = {
    '"edit">@<tool_call>@<all>true@</all>@</invoke>': ('{"all":true}', "", ["<tool_call> within call 0 is ignored"]),
    '"edit">@</invoke>@<tool_call>@</invoke>@</tool_call>': (
        "{}", "", ["<tool_call> between calls is ignored", "</invoke> between calls is ignored"]
    ),
    '"edit">words@<all>true@</all>@</invoke>': ('{"all":true}', "", ["text beside <all> in call 0 is dropped"]),
    '"edit">@<edits>@<item>words@<old>a@</old>@<line>3@</line>@</item>@</edits>@</invoke>': (
        '{"edits":[{"old":"a","line":3}]}', "", ["text beside <old> in call 0 is dropped"]
    ),
    '"edit">@<all>true@</all></nothing>@</invoke>': (
        '{"all":true}', "", ["text beside the parameters of call 0 is dropped"]
    ),
    # A tag without a marker closes the innermost element alone, and that only if it was opened so.
    '"edit">@<edits><item><old>x</item>y</old></item>@</edits>@</invoke>': (
        '{"edits":[{"old":"x</item>y"}]}', "",
        [f"<{name}> in call 0 has no marker" for name in ("item", "old", "/old", "/item")],
    ),
    '"edit">@<edits><item></item></edits>@</edits>@</invoke>': (
        '{"edits":[{}]}', "",
        [
            "<item> in call 0 has no marker", "</item> in call 0 has no marker",
            "text within <edits> in call 0 is dropped",
        ],
    ),
    '"sum">@<in></in>@<names>a@</names>@</in>@</invoke>': (
        '{"in":{"names":"a"}}', "", ["text beside <names> in call 0 is dropped"]
    ),
    '"sum"><in>@<names>a@</names>@</in></invoke></in>': (
        '{"in":{"names":"a"}}', "</in>", ["<in> in call 0 has no marker", "</invoke> in call 0 has no marker"]
    ),
}  # fmt: skip


def test_each_repair_and_each_drop_is_one_line_in_order():
    assert FAULTS.keys() <= CASES.keys()
    for inner, (arguments, content, faults) in WITHIN.items():
        reader = parser(TOOLS)
        found = joined(fed(reader, [wire(f"@<tool_call>@<invoke name={inner}")]))
        texts = {kind: text for kind, _, _, _, text in found}
        assert (texts["arguments"], texts.get("content", "")) == (arguments, content), inner
        assert plain(reader.faults) == faults, inner


def test_events_are_equal_without_the_schema_that_checks_them():
    assert Event("tool_call", schema=None) == Event("tool_call", schema={"type": "object"}) == Event("tool_call")
    assert Event("tool_call", name="a") != Event("tool_call", name="b")
    (call,) = Message.of(
        [Event("tool_call", "", 0, "x", "f"), Event("arguments", "{}", 0), Event("tool_call_end", index=0)]
    ).tool_calls
    assert call.problems == ()  # an event that says nothing of a schema takes anything


def test_a_call_that_breaks_off_has_the_arguments_that_were_whole():
    """Also where one is a structure, and where the cut is within a name or behind a comma."""
    text = as_json({"a": 1.5, "b": [1, {"c": "}"}], "d": "x,\n"})
    for end, names in (
        (1, ""),
        (4, ""),
        (5, ""),
        (8, "a"),
        (9, "a"),
        (11, "a"),
        (13, "a"),
        (25, "a"),
        (26, "ab"),
        (38, "abd"),
    ):
        events = [Event("tool_call", "", 0, "x", "f"), Event("arguments", text[:end], 0)]
        (call,) = Message.of(events).tool_calls
        assert not call.is_whole and call.arguments == {name: json.loads(text)[name] for name in names}, text[:end]


def test_arguments_are_json_that_every_reader_takes():
    assert as_json({"é": ["\ud800", True, None]}) == '{"é":["\\ud800",true,null]}'
    for value in (float("nan"), float("inf"), [-float("inf")]):
        with pytest.raises(ValueError):
            as_json(value)


def test_the_name_of_a_string_is_written_before_its_text_comes():
    tags = "".join(f"@<{name}>@</{name}>" for name in ("path", "content"))
    begin = wire('@<tool_call>@<invoke name="write">' + tags[: -len("@</content>")])
    *_, arguments = joined(fed(parser(TOOLS), [begin]))
    assert arguments[-1] == '{"path":"","content":"'
