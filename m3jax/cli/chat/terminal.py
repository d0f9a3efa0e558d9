"""A chat on a terminal: it reads typed messages and commands, and shows the answers."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from glob import escape as glob_escape
from glob import glob
from pathlib import Path
from time import perf_counter
from typing import Any

from m3jax.cli.chat.attachments import KINDS, Attachments
from m3jax.cli.chat.display import Display, headline
from m3jax.cli.chat.setup import SETTINGS, set_system, set_tools, set_value
from m3jax.dialogue import Dialogue, open_calls
from m3jax.files import NewFile, read_json_list
from m3jax.interrupts import NotedInterrupts, end_at_interrupts, raise_interrupts
from m3jax.messages import counted, printable
from m3jax.text import ordered_messages

PROMPT, QUOTES = "> ", '"""'
SETUP = {"/set": set_value, "/system": set_system, "/tools": set_tools}
TAKE_FILES = (*KINDS, "/tools", "/save", "/load")
COMMANDS = sorted((*TAKE_FILES, "/help", "/history", "/quit", "/regenerate", "/sample", "/set", "/system", "/undo"))
# What the embedded model answers right: it recalls a record of a document, and reads the picture that comes with it.
EXAMPLES = ("# harbor -> lantern What is harbor?", "/sample, and then: Which shape is blue?")
HELP = f"""Type a message. One that begins with {QUOTES} goes on over several lines, to one that ends with {QUOTES}.

  /image FILE  show an image (PNG, JPEG, GIF, WEBP) with your next message; several times for several
  /sample      the same for a picture that comes with m3jax: a circle, a star and a square
  /video FILE  the same for a video (MP4, MOV, AVI, MKV), or a GIF that moves
  /history     the dialogue so far
  /regenerate  answer your last message anew, with the next seed
  /undo        take back the last file to be shown, else your last message and all that followed
  /set         the settings of the answers; /set NAME VALUE changes one, as in /set temperature 0
  /system TEXT replace the system message; without TEXT show it, with "" remove it
  /tools FILE  replace the tools that the model may call; without FILE name them
  /save FILE   write the dialogue into a new file, as a JSON list of messages
  /load FILE   go on with a dialogue that was saved, in place of this one
  /help        this; the tab key completes commands and names of files
  /quit        end, as Ctrl-D does

Ctrl-C stops an answer, which stays as far as it came; a second one at once ends the chat. Where the result of a call is
asked for, Ctrl-C takes the turn back."""


class Terminal:
    """A dialogue between the model and the user at the terminal.

    Args:
      dialogue: the messages so far and the engine.
      title: a line that describes the model.
      examples: what the user may type to see what the model can do; shown at the beginning.
    """

    def __init__(self, dialogue: Dialogue, title: str, examples: Sequence[str] = ()):
        self.dialogue, self.title, self.examples = dialogue, title, examples
        self.display, self.attachments = Display(), Attachments(dialogue)

    def run(self) -> None:
        """Read and answer messages until the input ends or /quit is typed."""
        with suppress(ImportError):  # with it `input` has line editing and history
            import readline

            readline.set_completer(_completion)
            readline.set_completer_delims("")  # the whole line is completed
            readline.parse_and_bind("tab: complete")
        self.display.note(f"{self.title}; /help lists the commands")
        if self.examples:
            self.display.note("it is a very small model; what it can do, for example:")
        for line in self.examples:
            self.display.note(f"  {line}")
        while True:
            try:
                line = _typed(PROMPT)
                if line.split(" ")[0].strip() == "/quit":
                    return
                self._obey(line) if line.startswith("/") else self._talk(line)
            except EOFError:
                self.display.console.out("")
                return
            except KeyboardInterrupt:
                self.display.console.out("")
                self.display.note("Ctrl-D or /quit ends the chat")
            except (ValueError, OSError, FloatingPointError) as error:
                self.display.error(error)

    def _obey(self, line: str) -> None:
        """Carry out a command, a line that begins with a slash."""
        command, _, argument = line.strip().partition(" ")
        if command == "/help":
            self.display.console.out(HELP, highlight=False)
        elif command in KINDS:
            self.display.note(self.attachments.add(command, argument))
        elif command == "/sample":
            self.display.note(self.attachments.add_sample())
        elif command == "/history":
            self.display.history(self.dialogue.messages)
            for name in self.attachments.names:
                self.display.note(f"[with your next message] {name}")
        elif command == "/undo":
            self._undo()
        elif command == "/regenerate":
            self._regenerate()
        elif command in SETUP:
            self.display.note(SETUP[command](self.dialogue, argument))
        elif command == "/save":
            self._save(argument.strip())
        elif command == "/load":
            self._load(argument.strip())
        else:
            raise ValueError(f"no command {command}: /help lists them; a space before it makes it a message")

    def _undo(self) -> None:
        """Take back the last file that no message has shown yet, else the user's last message and all that followed."""
        taken_back = self.attachments.drop() or headline(self.dialogue.undo()[0])
        self.display.note(f"taken back: {taken_back}")

    def _save(self, name: str) -> None:
        """Write the messages into a new file."""
        if not name:
            raise ValueError("/save needs the name of a file that is not there yet")
        messages = self.dialogue.messages
        data = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
        with NewFile(Path(os.path.expanduser(name))) as file:
            file.write(data.encode())
        self.display.note(f"{counted(len(messages), 'message')} in {printable(name)}")

    def _load(self, name: str) -> None:
        """Replace the dialogue by the messages in a file."""
        if not name:
            raise ValueError("/load needs the name of a file that /save wrote")
        messages = read_json_list(Path(os.path.expanduser(name)), called="a saved dialogue")
        # With a message behind it, so that calls without results are refused as in a message that is sent.
        *messages, _ = ordered_messages([*messages, {"role": "user", "content": "?"}])
        if messages and messages[-1]["role"] in ("user", "tool"):
            raise ValueError(f"{printable(name)}: the dialogue ends before an answer; /save writes those that do not")
        replaced, self.dialogue.messages = len(self.dialogue.messages), messages
        self.display.note(
            f"{counted(len(messages), 'message')} from {printable(name)} in place of {replaced}; /history shows them"
        )

    def _regenerate(self) -> None:
        """Answer the user's last message anew, with the next seed; if no answer comes, the dialogue stays as it was."""
        before = self.dialogue.messages
        message = self.dialogue.undo()[0]
        # With the same seed, an answer that was drawn would be drawn again.
        self.dialogue.sampling = replace(self.dialogue.sampling, seed=(self.dialogue.sampling.seed + 1) % 2**32)
        without = len(self.dialogue.messages)
        try:
            self._answer(message)
        finally:
            if len(self.dialogue.messages) == without:  # no answer came, so the dialogue took the message back
                self.dialogue.messages = before
        self._give_results()

    def _talk(self, line: str) -> None:
        """Send a message and show the answer; ask for the results of its calls, and go on until there are none."""
        if not line.strip():
            return
        before = len(self.dialogue.messages)
        self._answer(self.attachments.message(line))
        if len(self.dialogue.messages) > before:  # else the message was taken back, and its files are still to be shown
            self.attachments.clear()
        self._give_results()

    def _give_results(self) -> None:
        """Ask for the results of the last answer's calls and show what is answered, until there are no more calls."""
        while calls := open_calls(self.dialogue.messages):
            try:
                self._answer(*(_result(call, f"{i} of {len(calls)}") for i, call in enumerate(calls, 1)))
            except (KeyboardInterrupt, EOFError):
                self.display.console.out("")
                self._undo()
            except (ValueError, FloatingPointError) as error:
                self.display.error(error)  # the loop asks for the results again

    def _answer(self, *messages: dict[str, Any]) -> None:
        """Send messages, show the answer as it streams, then print its counts and seconds."""
        began = perf_counter()
        with NotedInterrupts() as interrupts:
            reply = self.display.show(self.dialogue.send(*messages, is_interrupted=lambda: interrupts.noted))
        self.display.counts(reply, perf_counter() - began)


def _completion(line: str, number: int) -> str | None:
    """Return the completion of a typed line with this number, from 0; None after the last, as readline wants it.

    Commands are completed, and after those that take a file its name.
    """
    command, space, name = line.partition(" ")
    if not space:
        choices = [f"{each} " for each in COMMANDS if each.startswith(command)] if line else []
    elif command == "/set":
        choices = [f"/set {each} " for each in SETTINGS if each.startswith(name)]
    elif command in TAKE_FILES:
        paths = sorted(glob(glob_escape(os.path.expanduser(name)) + "*"))
        choices = [f"{command} {path}{'/' if os.path.isdir(path) else ''}" for path in paths]
    else:
        choices = []
    return choices[number] if number < len(choices) else None


def _typed(prompt: str) -> str:
    """Read a message from the terminal; one that begins with three quotes goes on to a line that ends with three."""
    end_at_interrupts()
    raise_interrupts()  # anew for each message, so that the first Ctrl-C while it is typed raises KeyboardInterrupt
    text = input(prompt)
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            text += "\n" + input("  ")
        text = text.removesuffix(QUOTES)
    return text


def _result(call: dict[str, Any], which: str) -> dict[str, Any]:
    """Ask for the result of a call, and return it as a message of the role "tool"."""
    text = _typed(f"result of {printable(call['function']['name'])} ({which})> ")
    return {"role": "tool", "tool_call_id": call["id"], "content": text}
