"""A task of its user's: a Python file that gives prompts and rewards answers, run in a process of its own."""

import importlib.util
import math
import multiprocessing
import queue
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m3jax.messages import shown

_FIRST_SECONDS = 60.0  # for the file's imports, beside the time of a call


class TaskError(ValueError):
    """Raised for a task's file that cannot be used, or whose functions fail."""


class TaskFile:
    """A task file in a process of its own, which may hang or end without harm. Leaving it as a context ends it.

    The file has two functions. `prompts()` gives a list of dictionaries, each with "prompt" (a text) or "messages" (a
    dialogue), and with any columns. `reward` is called with the prompts and the answers, and with each column by its
    name, all lists of one length; it gives a list of numbers, one an answer.

    Args:
      path: of the file.
      seconds: that one call may take.

    Raises:
      TaskError: a file that is not there, cannot be run, or has no such functions.
    """

    def __init__(self, path: str | Path, seconds: int | float = 60.0):
        self.path, self._seconds = Path(path), seconds
        if not self.path.is_file():
            raise TaskError(f"no task at {self.path}: give a Python file with prompts() and reward(...)")
        context = multiprocessing.get_context("spawn")
        self._asked, self._answers = context.Queue(), context.Queue()
        self._process = context.Process(target=_serve, args=(str(self.path), self._asked, self._answers), daemon=True)
        self._process.start()
        try:
            self._receive("the file", seconds + _FIRST_SECONDS)
        except BaseException:
            self.close()
            raise

    def prompts(self) -> list[dict[str, Any]]:
        """Return the task's prompts.

        Raises:
          TaskError: none, or one without "prompt" and "messages", with both, or with an empty one.
        """
        rows, name = self._call("prompts"), f"prompts() of {self.path}"
        if not isinstance(rows, list) or not rows:
            raise TaskError(f"{name} gave {shown(rows)}: it must give a list of dictionaries")
        for number, row in enumerate(rows):
            if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
                raise TaskError(f"{name}, row {number}: {shown(row)} must have 'prompt' or 'messages'")
            if not row.get("prompt", row.get("messages")):
                raise TaskError(f"{name}, row {number}: its prompt is empty")
        return rows

    def reward(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[Any]) -> list[float]:
        """Return the rewards of some answers.

        Args:
          rows: of `prompts()`, one an answer.
          completions: the answers.

        Raises:
          TaskError: the function raised, took too long, or gave no list of as many finite numbers.
        """
        names = sorted({name for row in rows for name in row} - {"prompt", "messages"})
        columns = {name: [row.get(name) for row in rows] for name in names}
        prompts = [row.get("prompt", row.get("messages")) for row in rows]
        rewards, name = self._call("reward", prompts, list(completions), **columns), f"reward() of {self.path}"
        if not isinstance(rewards, list | tuple) or len(rewards) != len(completions):
            given = f"{len(rewards)} numbers" if isinstance(rewards, list | tuple) else shown(rewards)
            raise TaskError(f"{name} gave {given} for {len(completions)} answers: give a list, one each")
        for number, reward in enumerate(rewards):
            is_number = isinstance(reward, int | float) and math.isfinite(reward)  # True and False are 1 and 0
            if not is_number:
                raise TaskError(f"{name} gave {shown(reward)} for answer {number}: give finite numbers")
        return [float(reward) for reward in rewards]

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        for of_process in (self._asked, self._answers):
            of_process.cancel_join_thread()
            of_process.close()

    def __enter__(self) -> "TaskFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._asked.put((name, args, kwargs))
        return self._receive(f"{name}()", self._seconds)

    def _receive(self, what: str, seconds: int | float) -> Any:
        """Return what the process answers within some seconds; it is looked after while it is waited for."""
        waited, name = 0.0, f"{what} of {self.path}"
        while True:
            try:
                problem, value = self._answers.get(timeout=0.2)
            except queue.Empty:
                waited += 0.2
                if not self._process.is_alive() and self._answers.empty():
                    raise TaskError(f"{name} ended its process (exit code {self._process.exitcode})") from None
                if waited >= seconds:
                    raise TaskError(f"{name} took more than {seconds:g} s: it was given up") from None
                continue
            if problem:
                raise TaskError(f"{name}: {problem}")
            return value


def _serve(path: str, asked: Any, answers: Any) -> None:
    """Run a task's functions as they are asked for, in its process."""
    try:
        spec = importlib.util.spec_from_file_location("m3jax_task", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if missing := [name for name in ("prompts", "reward") if not callable(getattr(module, name, None))]:
            answers.put((f"it has no function {missing[0]}", None))
            return
        answers.put((None, None))
        while True:
            name, args, kwargs = asked.get()
            try:
                answers.put((None, getattr(module, name)(*args, **kwargs)))
            except Exception as error:
                answers.put((_said(error), None))
    except Exception as error:
        answers.put((_said(error), None))


def _said(error: Exception) -> str:
    """Return an error of a task in one line, with the line of its file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.name != "_serve"]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"
