"""The grammar of an output as a machine of four states, which reads each character once.

    outside --<tool_call>--> opening --<invoke name=...>--> call --</invoke>--> block --<invoke name=...>--> call
       ^                        |                             |                   |
       '-----anything else------'                             '---</tool_call>----'--</tool_call>--> outside

A state takes what it can from the text that is there, and returns True to go on. What may be the beginning of a mark
stays until more text comes, so it makes no difference where the text was cut. (A fifth state, `verbatim`, takes all
the rest where calls are not to be read.)
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from m3jax.messages import printable, shortened, shown
from m3jax.text.output.call import Call
from m3jax.text.output.events import Event
from m3jax.text.output.marks import BLOCK, END_THINK, LOOSE, NAMESPACE, OUTSIDE, THINK, invoked
from m3jax.text.output.pieces import FEWEST, Pieces, grains
from m3jax.text.output.shapes import ANYTHING, Shapes

_SPACE = re.compile(r"\s*")
_MOST_FAULTS, _MOST_FAULT = 32, 160


class Tool(NamedTuple):
    """A tool that may be called: the alternatives of its schema for the arguments, and the schema as `Event` has it."""

    shapes: Shapes
    schema: Any


UNDECLARED = Tool(ANYTHING, None)


class Machine:
    """An incremental reader of one output of the model.

    Args:
        tools: the declared tools, by name.
        is_thinking: whether the prompt ended with the mark that opens reasoning.
        has_reasoning: whether reasoning is separated; else its marks are text.
        has_calls: whether calls are read; else everything from the first one on is content, unparsed.
        new_id: makes the id of a call.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        is_thinking: bool,
        has_reasoning: bool,
        has_calls: bool,
        new_id: Callable[[], str],
    ):
        self.tools, self.has_reasoning, self.has_calls, self.new_id = tools, has_reasoning, has_calls, new_id
        self.faults: list[str] = []
        self.state = self.outside
        self.kind = "reasoning" if is_thinking else "content"  # of text that belongs to no call
        self.pieces = Pieces()
        self.marks = OUTSIDE[(THINK, END_THINK, BLOCK) if has_reasoning else (BLOCK,)]
        self.fresh, self.text, self.at = "", "", 0  # text not read yet; text being read; how much of that is consumed
        self.held: list[str] = []  # the mark that opens a block and the space behind it, until a call follows
        self.has_prose = False  # within a block: whether there is text since the last call
        self.calls = 0
        self.open_call: Call | None = None

    def feed(self, text: str) -> list[Event]:
        """Read more text and return the events that are ready; a text shorter than an event waits, which saves time."""
        self.fresh += text
        if len(self.fresh) < FEWEST:
            return []
        self.run()
        return self.pieces.taken()

    def finish(self, is_cut: bool = False) -> list[Event]:
        """End the text: what might have become a mark is text now, except within a call, which stays incomplete.

        Args:
            is_cut: True if more would have come: then the beginning of a call's tag, a marker at the end, is left out.
        """
        self.run()
        if is_cut and self.state == self.outside:
            self.text = self.text[: self.at] + self.text[self.at :].partition(NAMESPACE)[0]
        if self.state == self.opening:
            self.fault("the text ends where a call was to begin")
        elif self.state == self.call:
            self.fault(f"the text ends within call {self.calls - 1} ({shown(self.open_call.name)})")
        elif self.state != self.block or (self.has_prose and NAMESPACE not in self.text[self.at :]):
            self.say(self.text[self.at :])
        self.pieces.end()
        return self.pieces.taken()

    def run(self) -> None:
        """Run the states until the text is used up, or only a possible beginning of a mark is left."""
        # What was consumed is dropped once a run, not once a mark: each character is copied a few times at most.
        self.text, self.at, self.fresh = self.text[self.at :] + self.fresh, 0, ""
        while self.state():
            pass

    def outside(self) -> bool:
        """Read reasoning and content; marks of reasoning are never text, even if they open or close nothing."""
        match = self.next_mark(self.marks, self.say)
        if match is None:
            return False
        if match["tag"] == BLOCK:
            self.held, self.state = [BLOCK], self.opening
        else:
            self.kind = "reasoning" if match["tag"] == THINK else "content"
        return True

    def opening(self) -> bool:
        """Read what follows the mark that opens a block: a call, or else the mark was only mentioned and is text."""
        space = _SPACE.match(self.text, self.at)[0]
        self.held.append(space)
        self.at += len(space)
        # The marker may be missing, so both it and a bare "<invoke" may be beginning here; until one of them is certain
        # or impossible, wait for more text.
        begun = self.text[self.at : self.at + len(NAMESPACE + "<invoke ")].removeprefix(NAMESPACE)
        match = LOOSE.match(self.text, self.at)
        is_unknown = match is not None and match["tag"] is None and begun.startswith("<invoke")
        if is_unknown or NAMESPACE.startswith(begun) or "<invoke".startswith(begun):
            return False
        name = invoked(match["tag"]) if match and match["tag"] else None
        if name is None:
            self.say("".join(self.held))
            self.state = self.outside
            return True
        if self.kind == "reasoning":
            self.fault(f"reasoning was not closed before call {self.calls}")
            self.kind = "content"
        if self.has_calls:
            self.at = match.end()
            self.check_marker(match)
            self.begin_call(name)
        else:
            self.say("".join(self.held))
            self.state = self.verbatim
        return True

    def verbatim(self) -> bool:
        """Take all the rest as text, because calls are not to be read."""
        self.say(self.text[self.at :])
        self.at = len(self.text)
        return False

    def call(self) -> bool:
        """Read text and tags within a call, which decides which tags are valid."""
        match = self.next_mark(self.open_call.pattern(), self.open_call.add)
        if match is None:
            return False
        self.open_call.tag(match)
        if self.open_call.after:
            self.pieces.mark(Event("tool_call_end", index=self.open_call.index))
            self.has_prose = False
        if self.open_call.after == "call":
            self.begin_call(invoked(match["tag"]))
        elif self.open_call.after:
            self.state = self.block if self.open_call.after == "block" else self.outside
        return True

    def block(self) -> bool:
        """Read between calls of a block: space is dropped, and other text is reasoning or content, as outside a block.

        Directly behind a call a tag may lack its marker; behind text it may not.
        """
        match = self.next_mark(LOOSE, self.say_in_block)
        if match is None:
            return False
        is_tag = match["marker"] is not None or not self.has_prose
        if is_tag and (name := invoked(match["tag"])):
            self.check_marker(match)
            self.begin_call(name)
        elif is_tag and match["tag"] == "/tool_call":
            self.check_marker(match)
            self.state = self.outside
        elif match[0] in (THINK, END_THINK) and self.has_reasoning:
            self.kind, self.has_prose = "reasoning" if match[0] == THINK else "content", True
        elif match["marker"] and match["tag"] in ("tool_call", "/invoke"):
            self.fault(f"<{match['tag']}> between calls is ignored")
        else:
            self.say_in_block(match[0])
        return True

    def begin_call(self, name: str) -> None:
        """Emit the event that begins a call, and go to the state that reads it."""
        tool = self.tools.get(name, UNDECLARED)
        self.open_call = Call(name, self.calls, tool.shapes, self.pieces, self.fault)
        self.pieces.mark(Event("tool_call", index=self.calls, id=self.new_id(), name=name, schema=tool.schema))
        self.calls += 1
        self.kind, self.state = "content", self.call

    def next_mark(self, pattern: re.Pattern[str], take: Callable[[str], None]) -> re.Match[str] | None:
        """Hand the text up to the next mark to `take`; return the mark, or None if it is absent or incomplete."""
        match = pattern.search(self.text, self.at)
        end = match.start() if match else len(self.text)
        if end > self.at:
            take(self.text[self.at : end])
        self.at = end
        if match is None or match["tag"] is None:
            return None
        self.at = match.end()
        return match

    def say(self, text: str) -> None:
        """Emit text that belongs to no call."""
        if text:
            self.pieces.add(self.kind, None, grains(text))

    def say_in_block(self, text: str) -> None:
        """Emit text that stands between calls, without the space before it."""
        # Templates write line breaks between calls, which would otherwise become content.
        text = text if self.has_prose else text.lstrip()
        self.has_prose = self.has_prose or bool(text)
        self.say(text)

    def check_marker(self, match: re.Match[str]) -> None:
        """Note a tag that came without the namespace marker."""
        if match["marker"] is None:
            self.fault(f"<{match['tag']}> has no marker")

    def fault(self, line: str) -> None:
        """Note something that was repaired or dropped, in at most 32 lines."""
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(printable(shortened(line, _MOST_FAULT)))
