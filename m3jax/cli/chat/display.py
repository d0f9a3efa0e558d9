"""Display of a dialogue on a terminal: dim reasoning above a rule, calls in boxes, token counts after an answer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from m3jax.cli.chat.shown import visible
from m3jax.dialogue import Reply
from m3jax.media import names_file
from m3jax.messages import counted, printable
from m3jax.text import Event

_RULE = "\u2500" * 8  # between reasoning and answer
_REMARKS = {"length": "; cut there, --max-new-tokens allows more", "interrupted": "; stopped"}


class Display:
    """A terminal that shows answers as they stream, earlier messages, notes and errors.

    Args:
      console: rich's; standard output by default.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self._ends_line = True
        self._is_reasoning = False  # True if what was printed last is an answer's reasoning
        self._box: Live | None = None
        self._call: tuple[str, str] = "", ""  # the name and the arguments so far of the call in the box

    def show(self, events: Iterable[Event | Reply]) -> Reply:
        """Show an answer as it streams.

        Args:
          events: of one answer.

        Returns:
          The whole answer.
        """
        try:
            for event in events:
                if event.kind == "reasoning":
                    self._close()
                    self._reason(event.text)
                elif event.kind == "content":
                    self._close()
                    self._write(event.text)
                elif event.kind == "tool_call":
                    self._open(event.name)
                elif event.kind == "arguments":
                    self._fill(event.text)
                elif event.kind == "tool_call_end":
                    self._close()
                else:
                    reply = event
        finally:
            self._close()
            self.end_line()
        return reply

    def counts(self, reply: Reply, seconds: float) -> None:
        """Print an answer's tokens and seconds, the prompt tokens found in the prefix cache, and whether it was cut.

        What is wrong with its calls comes before.
        """
        for line in problems_of_calls(reply):
            self.warn(line)
        self.note(
            f"{counted(reply.new_tokens, 'token')} in {seconds:.1f} s; {reply.cached_tokens} of the "
            f"{reply.prompt_tokens} before them from the prefix cache{_REMARKS.get(reply.finish_reason, '')}"
        )

    def history(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Show messages again, each under its role."""
        for message in messages:
            self.note(f"[{message['role']}]")
            self._reason(message.get("reasoning_content") or "")
            self._write(as_text(message.get("content")))
            self.end_line()
            for call in message.get("tool_calls") or ():
                function = call["function"]
                self._open(function["name"])
                self._fill(json.dumps(function["arguments"], ensure_ascii=False))
                self._close()

    def note(self, text: str) -> None:
        """Print a remark of the program itself on a line."""
        self.console.out(visible(text), style="dim italic", highlight=False)

    def warn(self, text: str) -> None:
        """Print a remark that asks for attention on a line."""
        self.console.out(visible(text), style="yellow", highlight=False)

    def error(self, error: Exception) -> None:
        """Print an error's message on a line."""
        is_of_file = isinstance(error, OSError) and error.filename is not None
        text = f"{error.filename}: {error.strerror}" if is_of_file else str(error)
        self.console.out(f"error: {printable(text)}", style="red", highlight=False)

    def end_line(self) -> None:
        """Begin a new line unless the output is at the start of one."""
        if not self._ends_line:
            self.console.out("")
        self._ends_line, self._is_reasoning = True, False

    def _reason(self, text: str) -> None:
        """Print a piece of an answer's reasoning."""
        if text:
            self._print(text, "dim")
            self._is_reasoning = True

    def _write(self, text: str) -> None:
        """Print a piece of an answer; a rule parts it from the reasoning before it."""
        if text and self._is_reasoning:
            self.end_line()
            self.console.out(_RULE, style="dim", highlight=False)
        self._print(text, None)

    def _print(self, text: str, style: str | None) -> None:
        if text:
            self.console.out(visible(text), style=style, end="", highlight=False)
            self.console.file.flush()
            self._ends_line = text.endswith("\n")

    def _open(self, name: str) -> None:
        """Open the box of a tool call."""
        self._close()
        self.end_line()
        self._call = name, ""
        self._box = Live(self._panel(), console=self.console, refresh_per_second=8)
        self._box.start()

    def _fill(self, arguments: str) -> None:
        """Append to the arguments shown in the open box."""
        self._call = self._call[0], self._call[1] + arguments
        self._box.update(self._panel())

    def _close(self) -> None:
        """Close the box, if one is open; it stays on the screen as it is."""
        if self._box is not None:
            self._box.stop()
            self._box = None

    def _panel(self) -> Panel:
        name, arguments = self._call
        return Panel(Text(visible(arguments)), title=Text(printable(name)), title_align="left", expand=False)


def problems_of_calls(reply: Reply) -> list[str]:
    """Return a line for each problem of an answer's calls: no such tool, or arguments that break its schema."""
    return [f"{printable(call.name)}: {problem}" for call in reply.tool_calls for problem in call.problems]


def as_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a message's content; an image or a video becomes its kind and the name of its file."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] if part["type"] == "text" else f"[{_medium(part)}] " for part in content)


def _medium(part: Mapping[str, Any]) -> str:
    """Return the kind of an image or video part, with the name of its file if it has one."""
    part_type = part["type"]
    return f"{part_type} {Path(part[part_type]).name}" if names_file(part[part_type]) else part_type


def headline(message: Mapping[str, Any]) -> str:
    """Return the beginning of a message's text on one line, at most 60 characters."""
    text = " ".join(as_text(message.get("content")).split())
    return text if len(text) <= 60 else text[:57] + "..."
