"""A task over several processes: process 0 asks it, the others are told what it answers.

Every process of a run draws the same answers, so each knows which question comes next; what a task's own code says, and
how long it takes, is process 0's alone (docs/scale.md).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from m3jax.hosts.channel import Channel
from m3jax.hosts.wire import from_bytes, to_bytes
from m3jax.train.rewards import TaskError, TaskFile, TrainingTask

# Columns of a prompt that are more than the task's own: what the model reads of it.
_READ = ("prompt", "messages", "tools", "thinking_mode")


@contextmanager
def shared_task(open_task: Callable[[], TaskFile], channel: Channel | None) -> Iterator[TrainingTask]:
    """Yield a task to every process of a run.

    Args:
      open_task: called on process 0 alone.
      channel: of the run; None in a single process, which gets the task as it is.

    Raises:
      TaskError: as `open_task`, on process 0.
    """
    if channel is not None and not channel.is_sender:
        yield HeardTask(channel)
        return
    with open_task() as task:
        yield task if channel is None else ToldTask(task, channel)


class ToldTask:
    """A task of process 0, whose answers the other processes are told.

    Args:
      task: that is asked.
      channel: of the run.

    Attributes:
      weights, has_tools: the task's.
    """

    def __init__(self, task: TrainingTask, channel: Channel):
        self._task, self._channel = task, channel
        self.weights, self.has_tools = task.weights, task.has_tools
        channel.send(to_bytes({"weights": dict(task.weights), "has_tools": task.has_tools}))

    def prompts(self) -> list[dict[str, Any]]:
        """Return the task's prompts; the other processes get what the model reads of them."""
        read = lambda row: {name: row[name] for name in _READ if name in row}
        return self._told((), self._task.prompts, lambda rows: [read(row) for row in rows])

    def reward_parts(
        self, rows: Sequence[Mapping[str, Any]], completions: Sequence[Any], group: int = 1
    ) -> dict[str, list[float]]:
        """Return what each of the task's rewards gives some answers, by name."""
        return self._told(completions, lambda: self._task.reward_parts(rows, completions, group))

    def answer_calls(self, calls: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
        """Return what the task's tools write."""
        return self._told([call[:2] for call in calls], lambda: self._task.answer_calls(calls))

    def _told(self, about: Any, ask: Callable[[], Any], sent: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return what the task answers, and send it, or the task's error."""
        try:
            value = ask()
        except TaskError as error:
            self._channel.send(to_bytes({"error": str(error)}))
            raise
        self._channel.send(to_bytes({"answer": sent(value), "about": _fingerprint(about)}))
        return value


class HeardTask:
    """The task of a run in a process that follows: what it says is what process 0's said.

    Args:
      channel: of the run.

    Attributes:
      weights, has_tools: of process 0's task.

    Raises:
      RuntimeError: by every method, where this process asks about other answers than process 0 did.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        told = from_bytes(channel.receive())
        self.weights, self.has_tools = told["weights"], told["has_tools"]

    def prompts(self) -> list[dict[str, Any]]:
        """Return what the model reads of the task's prompts."""
        return self._heard(())

    def reward_parts(
        self, rows: Sequence[Mapping[str, Any]], completions: Sequence[Any], group: int = 1
    ) -> dict[str, list[float]]:
        """Return what each of the task's rewards gave the same answers on process 0."""
        return self._heard(completions)

    def answer_calls(self, calls: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
        """Return what the task's tools wrote on process 0."""
        return self._heard([call[:2] for call in calls])

    def _heard(self, about: Any) -> Any:
        """Return what process 0 was answered, or raise the task's error."""
        told = from_bytes(self._channel.receive())
        if "error" in told:
            raise TaskError(told["error"])
        if told["about"] != _fingerprint(about):
            raise RuntimeError("this process drew other answers than process 0: their engines have parted")
        return told["answer"]


def _fingerprint(about: Any) -> str:
    """Return a hash of answers or calls, which are values that JSON has."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
