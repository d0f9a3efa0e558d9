"""Rewards of a task: several with weights, of groups, of coroutines; and tools that answer."""

import asyncio
import queue
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from m3jax.train import rewards
from m3jax.train.rewards import TaskError, TaskFile

TASK = """
import asyncio

def prompts():
    return [dict(prompt="x", wanted="a"), dict(prompt="y", wanted="b")]

def right(prompts, completions, wanted):
    return [float(text == word) for text, word in zip(completions, wanted)]

async def longest(prompts, completions, wanted):
    assert len(set(prompts)) == 1 and len(completions) == len(wanted) == 3
    await asyncio.sleep(0.3)
    best = max(map(len, completions))
    return [len(text) == best for text in completions]

async def answer_call(name, arguments, wanted):
    await asyncio.sleep(0.3)
    if name == "fail":
        raise KeyError(name)
    return f"{name}{arguments['n']}{wanted}" if name != "none" else None

REWARDS = {"right": right, "longest": dict(function=longest, weight=0.5, grouped=True)}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "task.py"
    path.write_text(TASK, encoding="utf-8")
    with TaskFile(path, seconds=0.9) as made:  # four coroutines of 0.3 s one after the other would take longer
        yield made


def test_rewards_are_weighed_and_groups_are_compared_alone(task):
    rows = [row for row in task.prompts() for _ in range(3)]
    answers = ["a", "aaa", "a", "b", "", "a"]
    assert task.weights == {"right": 1.0, "longest": 0.5} and task.has_tools
    parts = task.reward_parts(rows, answers, group=3)
    assert parts == {"right": [1, 0, 1, 1, 0, 0], "longest": [0, 1, 0, 1, 0, 1]}
    assert task.reward(rows, answers, group=3) == [1, 0.5, 1, 1.5, 0, 0.5]
    alone = ModuleType("task")  # a file with one reward counts it once, each row by itself
    alone.reward = len
    assert rewards._rewards_of(alone) == {"reward": (len, 1.0, False)}


def test_tools_answer_at_the_same_time(task):
    rows = task.prompts()
    calls = [("add", {"n": i}, rows[i % 2]) for i in range(4)]
    assert task.answer_calls(calls) == ["add0a", "add1b", "add2a", "add3b"]
    with pytest.raises(TaskError, match=r"answer_call\(\) of .*task.py: KeyError: 'fail' \(line 19\)"):
        task.answer_calls([("fail", {}, rows[0])])
    with pytest.raises(TaskError, match="gave None for none: give a text"):
        task.answer_calls([("none", {"n": 1}, rows[0])])


WRONG = {
    "REWARDS = {}": "REWARDS is {}: give functions by name",
    "REWARDS = {'a': 3}": "REWARDS['a'] is 3: give a function, or a dictionary of function, weight",
    "REWARDS = {'a': dict(function=right, weight=float('nan'))}": "REWARDS['a'] is",
    "REWARDS = {'a': dict(function=right, wait=1)}": "REWARDS['a'] is",
    "REWARDS = {'a': right, 'b': lambda *_, **__: [1]}": "reward b() of",
    "REWARDS = {'a': dict(function=lambda *_, **__: [1] * 6, grouped=True)}": "reward a gave 6 numbers for a group",
    "async def hang(*_, **__):\n    await asyncio.sleep(9)\nREWARDS = {'a': hang}": "took more than 1 s",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_reward_is_said_in_a_line(text, tmp_path):
    path = tmp_path / "task.py"
    path.write_text(textwrap.dedent(TASK) + text, encoding="utf-8")
    with pytest.raises(TaskError) as raised, TaskFile(path, seconds=1) as made:
        made.reward([row for row in made.prompts() for _ in range(3)], ["a"] * 6, group=3)
    assert WRONG[text] in str(raised.value) and "\n" not in str(raised.value)


# Without the process


class Asked(TaskFile):
    """A task whose process is none: it answers what it was made with, and keeps what it was asked."""

    def __init__(self, answer, weights=None):
        self.path, self.answer, self.asked, self.weights = Path("task.py"), answer, [], weights or {}

    def _call(self, name, *args):
        self.asked.append((name, *args))
        return self.answer


@pytest.mark.parametrize("answer", [(None, ({"reward": 1.0}, True)), ("it has no function reward", None)])
def test_a_task_s_process_is_ended_with_all_that_waits_for_it(answer, monkeypatch, tmp_path):
    """It is no fork, does not outlive this process, and has ended once its file is refused or the context is left."""
    ended, made = [], []
    pipes = iter("AB")

    def queue_of_process():
        name = next(pipes)
        note = lambda what: lambda: ended.append(f"{what} {name}")
        return SimpleNamespace(name=name, get=lambda timeout: answer, cancel_join_thread=note("no waiting for"),
                               close=note("close"))  # fmt: skip

    def process(target, args, daemon):
        made.append((target, args[0], [pipe.name for pipe in args[1:]], daemon))
        note = lambda what: lambda: ended.append(what)
        return SimpleNamespace(start=note("start"), kill=note("kill"), join=note("join"))

    context = SimpleNamespace(Queue=queue_of_process, Process=process)
    monkeypatch.setattr(rewards.multiprocessing, "get_context", lambda kind: context if kind == "spawn" else None)
    (tmp_path / "task.py").write_text("")
    if answer[0]:
        with pytest.raises(TaskError, match=r"the file of .*task.py: it has no function reward"):
            TaskFile(tmp_path / "task.py")
    else:
        with TaskFile(tmp_path / "task.py") as task:
            assert ended == ["start"] and (task.weights, task.has_tools) == ({"reward": 1.0}, True)
    assert made == [(rewards._serve, str(tmp_path / "task.py"), ["A", "B"], True)]
    assert ended == ["start", "kill", "join", "no waiting for A", "close A", "no waiting for B", "close B"]


def test_a_row_has_a_prompt_or_messages():
    rows = [{"prompt": "x", "wanted": 1}, {"messages": [1]}]
    assert Asked(rows).prompts() == rows
    for wrong, message in (
        ([], r"gave \[\]: it must give a list"), ((rows[0],), "it must give a list"), ([rows[0], 3], "row 1: 3 must"),
        ([{}], "row 0: .* must have 'prompt' or 'messages'"), ([rows[0] | rows[1]], "row 0: .* must have"),
        ([rows[1], {"prompt": ""}], "row 1: its prompt is empty"), ([{"messages": []}], "row 0: its prompt is empty"),
    ):  # fmt: skip
        with pytest.raises(TaskError, match=rf"prompts\(\) of task.py.*{message}"):
            Asked(wrong).prompts()


def test_a_reward_gets_columns_and_gives_a_number_an_answer():
    """A column that a row lacks is None there; rewards are summed with their weights."""
    rows = [{"prompt": "x", "b": 1}, {"messages": [1], "a": 2, "b": 3}]
    task = Asked({"one": [True, 0.5], "two": (3, -1)}, {"one": 2.0, "two": 0.5})
    assert task.reward_parts(rows, ("p", "q"), 2) == {"one": [1.0, 0.5], "two": [3.0, -1.0]}
    assert task.asked == [("reward", ["x", [1]], ["p", "q"], {"a": [None, 2], "b": [1, 3]}, 2)]
    assert task.reward(rows, ("p", "q")) == [3.5, 0.5] and task.asked[1][-1] == 1
    for given, message in (
        ([1.0], r"reward one\(\) of task.py gave 1 numbers for 2 answers"), (7, "gave 7 for 2 answers"),
        ([1.0, float("nan")], "gave nan for answer 1"), ([None, 1.0], "gave None for answer 0"),
    ):  # fmt: skip
        with pytest.raises(TaskError, match=message):
            Asked({"one": given}).reward_parts(rows, ("p", "q"))
    with pytest.raises(TaskError, match=r"^reward\(\) of task.py gave 0 numbers"):
        Asked({"reward": []}).reward_parts(rows, ("p", "q"))
    calls = Asked(["t"])
    assert calls.answer_calls([("f", {"n": 1}, rows[1])]) == ["t"]
    assert calls.asked == [("answer_call", [("f", {"n": 1}, {"a": 2, "b": 3})])]


def test_a_reward_of_groups_is_called_for_each_with_its_part_of_all_columns():
    calls = []

    def plain(prompts, completions, **columns):
        calls.append((prompts, completions, columns))
        return [*range(len(completions))]

    given = (["x", "x", "y", "y"], ["a", "b", "c", "d"], {"n": [1, 2, 3, 4]}, 2)
    every = {"plain": (plain, 1.0, False), "grouped": (plain, 0.5, True)}
    assert asyncio.run(rewards._reward(every, *given)) == {"plain": [0, 1, 2, 3], "grouped": [0, 1, 0, 1]}
    cuts = (slice(0, 4), slice(0, 2), slice(2, 4))
    assert calls == [(given[0][cut], given[1][cut], {"n": given[2]["n"][cut]}) for cut in cuts]
    assert asyncio.run(rewards._reward({"plain": every["plain"]}, [], [], {}, 2)) == {"plain": []}


def test_a_process_is_waited_for_and_looked_after():
    """In steps of a fifth of a second; what it said before it ended is read."""
    task, said, left = Asked(None), [], [(None, 5)]

    def get(timeout):
        said.append(timeout)
        if len(said) <= 3 or not left:
            raise queue.Empty
        return left.pop()

    task._answers = SimpleNamespace(get=get, empty=lambda: not left)
    task._process = SimpleNamespace(is_alive=lambda: False, exitcode=7)
    assert task._receive("it", 60.0) == 5 and said == [0.2] * 4
    with pytest.raises(TaskError, match=r"it of task.py ended its process \(exit code 7\)"):
        task._receive("it", 60.0)
    task._process = SimpleNamespace(is_alive=lambda: True)
    said.clear()
    with pytest.raises(TaskError, match=r"it of task.py took more than 1 s: it was given up"):
        task._receive("it", 1.0)
    assert len(said) == 5
    left, said[:] = [("KeyError: 'x'", None)], [0] * 3
    with pytest.raises(TaskError, match=r"it of task.py: KeyError: 'x'"):
        task._receive("it", 1.0)
