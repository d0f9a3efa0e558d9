"""Rewards of a task: several with weights, of groups, of coroutines; and tools that answer."""

import textwrap
from pathlib import Path

import pytest

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
        made.reward_parts([row for row in made.prompts() for _ in range(3)], ["a"] * 6, group=3)
    assert WRONG[text] in str(raised.value) and "\n" not in str(raised.value)


# Without the process


class Asked(TaskFile):
    """A task whose process is none: it answers what it was made with, and keeps what it was asked."""

    def __init__(self, answer, weights=None):
        self.path, self.answer, self.asked, self.weights = Path("task.py"), answer, [], weights or {}

    def _call(self, name, *args):
        self.asked.append((name, *args))
        return self.answer


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
    """A column that a row lacks is None there."""
    rows = [{"prompt": "x", "b": 1}, {"messages": [1], "a": 2, "b": 3}]
    task = Asked({"one": [True, 0.5], "two": (3, -1)}, {"one": 2.0, "two": 0.5})
    assert task.reward_parts(rows, ("p", "q"), 2) == {"one": [1.0, 0.5], "two": [3.0, -1.0]}
    assert task.asked == [("reward", ["x", [1]], ["p", "q"], {"a": [None, 2], "b": [1, 3]}, 2)]
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
