"""A chat's terminal without a terminal: typed lines go in, and what the screen shows comes out."""

import io

from rich.console import Console
from support.embedded import TOKENIZER

from m3jax.cli.chat.display import Display
from m3jax.cli.chat.terminal import Terminal
from m3jax.dialogue import Dialogue


class Screen:
    """A terminal whose user types some lines.

    Args:
      monkeypatch: pytest's, which puts the lines in place of `input`.
      model: answers.

    Attributes:
      talk: the dialogue.
    """

    def __init__(self, monkeypatch, model):
        self.talk = Dialogue(model, TOKENIZER, context=1024, max_new_tokens=32)
        self._monkeypatch = monkeypatch
        self._terminal = Terminal(self.talk, "a model")
        self._file = io.StringIO()
        self._terminal.display = Display(Console(file=self._file, width=200))

    def after(self, *lines: str) -> str:
        """Type these lines, and return what the screen then shows; the chat goes on with the next ones."""
        typed = iter([*lines, "/quit"])
        self._monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
        self._terminal.run()
        text = self._file.getvalue()
        self._file.truncate(self._file.seek(0))
        return text
