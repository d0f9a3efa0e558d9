"""A task of its user's: a Python file that gives prompts and rewards answers, run in a process of its own."""

import asyncio
import importlib.util
import inspect
import math
import multiprocessing
import queue
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from m3jax.messages import shown

_FIRST_SECONDS = 60.0  # for the file's imports, beside the time of a call


class TaskError(ValueError):
    """Raised for a task's file that cannot be used, or whose functions fail."""


@runtime_checkable
class TrainingTask(Protocol):
    """A task as a run asks it; `TaskFile` says what each of these gives, and raises.

    Attributes:
      weights: of each reward, by its name.
      has_tools: whether `answer_calls` can be asked.
    """

    weights: dict[str, float]
    has_tools: bool

    def prompts(self) -> list[dict[str, Any]]: ...

    def reward_parts(
        self, rows: Sequence[Mapping[str, Any]], completions: Sequence[Any], group: int = 1
    ) -> dict[str, list[float]]: ...

    def answer_calls(self, calls: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[str]: ...


class TaskFile:
    """A task file in a process of its own, which may hang or end without harm. Leaving it as a context ends it.

    The file has two functions. `prompts()` gives a list of dictionaries, each with "prompt" (a text) or "messages" (a
    dialogue), and with any columns. `reward` is called with the prompts and the answers, and with each column by its
    name, all lists of one length; it gives a list of numbers, one an answer.

    In place of `reward` there may be REWARDS, a dictionary of several by their names: each a function, or a dictionary
    of "function", "weight" (1 where it is left out) and "grouped" (True for a function that is called with the answers
    to one prompt at a time, to compare them). The answer's reward is their weighted sum.

    `answer_call(name, arguments, **columns)` makes an episode go on where an answer calls a tool: the text that it
    gives is what the tool wrote. All of these functions may be coroutines; those of one call run at the same time.

    Args:
      path: of the file.
      seconds: that one call may take.

    Attributes:
      has_tools: whether there is an `answer_call`.

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
            self.weights, self.has_tools = self._receive("the file", seconds + _FIRST_SECONDS)
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

    def reward_parts(
        self, rows: Sequence[Mapping[str, Any]], completions: Sequence[Any], group: int = 1
    ) -> dict[str, list[float]]:
        """Return what each of the task's rewards gives some answers, before its weight; by name.

        Args:
          rows: of `prompts()`, one an answer.
          completions: the answers.
          group: how many answers, one behind the other, each prompt has.

        Raises:
          TaskError: a function raised, took too long, or gave no list of as many finite numbers.
        """
        names = sorted({name for row in rows for name in row} - {"prompt", "messages"})
        columns = {name: [row.get(name) for row in rows] for name in names}
        prompts = [row.get("prompt", row.get("messages")) for row in rows]
        found = self._call("reward", prompts, list(completions), columns, group)
        return {name: self._checked(name, rewards, len(completions)) for name, rewards in found.items()}

    def answer_calls(self, calls: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
        """Return what the task's tools write.

        Args:
          calls: names, arguments, and rows of `prompts()`.

        Raises:
          TaskError: a function raised, took too long, or gave no text.
        """
        is_column = lambda name: name not in ("prompt", "messages")
        given = [(name, dict(args), {k: v for k, v in row.items() if is_column(k)}) for name, args, row in calls]
        texts = self._call("answer_call", given)
        for (name, *_), text in zip(given, texts, strict=True):
            if not isinstance(text, str):
                raise TaskError(f"answer_call() of {self.path} gave {shown(text)} for {name}: give a text")
        return texts

    def _checked(self, name: str, rewards: Any, count: int) -> list[float]:
        """Return what one reward gave as numbers."""
        name = f"{name if name == 'reward' else f'reward {name}'}() of {self.path}"
        if not isinstance(rewards, list | tuple) or len(rewards) != count:
            given = f"{len(rewards)} numbers" if isinstance(rewards, list | tuple) else shown(rewards)
            raise TaskError(f"{name} gave {given} for {count} answers: give a list, one each")
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

    def _call(self, name: str, *args: Any) -> Any:
        self._asked.put((name, args))
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
        if not callable(getattr(module, "prompts", None)):
            raise TaskError("it has no function prompts")
        rewards, answer_call = _rewards_of(module), getattr(module, "answer_call", None)
        weights = {name: weight for name, (_, weight, _) in rewards.items()}
        answers.put((None, (weights, callable(answer_call))))
        functions = {
            "prompts": module.prompts,
            "reward": lambda *args: asyncio.run(_reward(rewards, *args)),
            "answer_call": lambda calls: asyncio.run(_answer(answer_call, calls)),
        }
        while True:
            name, args = asked.get()
            try:
                answers.put((None, functions[name](*args)))
            except TaskError as error:
                answers.put((str(error), None))
            except Exception as error:
                answers.put((_said(error, path), None))
    except TaskError as error:
        answers.put((str(error), None))
    except Exception as error:
        answers.put((_said(error, path), None))


def _rewards_of(module: ModuleType) -> dict[str, tuple[Callable[..., Any], float, bool]]:
    """Return a task's rewards by name: function, weight, and whether it is called with one group at a time."""
    given = getattr(module, "REWARDS", None)
    if given is None:
        if not callable(getattr(module, "reward", None)):
            raise TaskError("it has no function reward")
        return {"reward": (module.reward, 1.0, False)}
    if not isinstance(given, Mapping) or not given:
        raise TaskError(f"REWARDS is {shown(given)}: give functions by name")
    rewards = {}
    for name, reward in given.items():
        knobs = dict(reward) if isinstance(reward, Mapping) else {"function": reward}
        function, weight, grouped = knobs.pop("function", None), knobs.pop("weight", 1.0), knobs.pop("grouped", False)
        is_number = isinstance(weight, int | float) and math.isfinite(weight)
        if not callable(function) or not is_number or not isinstance(grouped, bool) or knobs:
            raise TaskError(f"REWARDS[{name!r}] is {shown(reward)}: give a function, or a dictionary of function, "
                             "weight (a number) and grouped (True or False)")  # fmt: skip
        rewards[str(name)] = (function, float(weight), grouped)
    return rewards


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _reward(
    rewards: Mapping[str, tuple[Callable[..., Any], float, bool]],
    prompts: list[Any],
    completions: list[Any],
    columns: Mapping[str, list[Any]],
    group: int,
) -> dict[str, Any]:
    """Return what each reward gives; coroutines run at the same time."""

    async def one(name, function, grouped):
        cuts = [slice(i, i + group) for i in range(0, len(prompts), group)] if grouped else [slice(None)]
        of_cut = lambda cut: {name: values[cut] for name, values in columns.items()}
        calls = [_value(function(prompts[cut], completions[cut], **of_cut(cut))) for cut in cuts]
        parts = await asyncio.gather(*calls)
        if not grouped:
            return parts[0]
        for part in parts:  # a group that is short must not be made up for by another
            if not isinstance(part, list | tuple) or len(part) != group:
                given = f"{len(part)} numbers" if isinstance(part, list | tuple) else shown(part)
                raise TaskError(f"reward {name} gave {given} for a group of {group} answers: give a list, one each")
        return [value for part in parts for value in part]

    found = await asyncio.gather(*(one(name, function, grouped) for name, (function, _, grouped) in rewards.items()))
    return dict(zip(rewards, found, strict=True))


async def _answer(answer_call: Callable[..., Any], calls: Sequence[tuple[str, dict, dict]]) -> list[Any]:
    """Return what a task's tools write; coroutines run at the same time."""
    return list(await asyncio.gather(*(_value(answer_call(name, args, **row)) for name, args, row in calls)))


def _said(error: Exception, path: str) -> str:
    """Return an error of a task in one line, with the line of its file where it was raised under one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"
