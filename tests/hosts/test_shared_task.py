"""A training task over several processes, without other processes: process 0 asks it, the others are told."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pytest
from support.fake_store import FakeClient, side_by_side

from m3jax.hosts.channel import Channel, Store
from m3jax.train.rewards import TaskError
from m3jax.train.shared_task import shared_task

MESSAGES = [{"role": "user", "content": "add"}]
CALLS = [("add", {"a": 1}, {"messages": MESSAGES, "secret": threading.Lock()})]


@dataclass
class Sums:
    """A task with tools, of which one column is of a type that no message can carry."""

    fails: bool = False
    weights: ClassVar = {"right": 2.0}
    has_tools: ClassVar = True

    def prompts(self):
        return [{"messages": MESSAGES, "thinking_mode": "enabled", "secret": threading.Lock()}, {"prompt": "1 + 1 = "}]

    def reward_parts(self, rows, completions, group=1):
        if self.fails:
            raise TaskError("reward() of task.py: it fails")
        return {"right": [float(len(text)) for text in completions]}

    def answer_calls(self, calls):
        return [f"{name} {arguments['a']}" for name, arguments, _ in calls]


def run_on_two(task, *work):
    """Do what each of two processes does with a task of process 0, which alone opens it."""
    client, opened = FakeClient(), []

    @contextmanager
    def open_task():
        opened.append(task)
        yield task

    def of_process(i):
        with shared_task(open_task, Channel(Store(client, i, 2), "calls")) as shared:
            return work[i](shared)

    results = side_by_side(lambda: of_process(0), lambda: of_process(1))
    assert len(opened) == 1
    return results


def test_all_processes_hear_what_process_0_s_task_says():
    def work(task):
        rows = task.prompts()
        read = [{name: x for name, x in row.items() if name != "secret"} for row in rows]
        return task.weights, task.has_tools, read, task.answer_calls(CALLS), task.reward_parts(rows, ["a", "bcd"], 2)

    first, other = run_on_two(Sums(), work, work)
    rows = [{"messages": MESSAGES, "thinking_mode": "enabled"}, {"prompt": "1 + 1 = "}]
    assert first == other == ({"right": 2.0}, True, rows, ["add 1"], {"right": [1.0, 3.0]})


def test_a_task_s_error_is_raised_on_all():
    for error in run_on_two(Sums(fails=True), *[lambda task: task.reward_parts([], ["a"])] * 2):
        assert isinstance(error, TaskError) and str(error) == "reward() of task.py: it fails"


@pytest.mark.parametrize("name", ["answers", "calls"])
def test_a_process_that_drew_something_else_ends(name):
    """Its engine has parted from process 0's: the rewards are not those of its answers."""
    ask = {
        "answers": lambda task, text: task.reward_parts([], [text]),
        "calls": lambda task, text: task.answer_calls([("add", {"a": text}, {})]),
    }[name]
    first, other = run_on_two(Sums(), lambda task: ask(task, "a"), lambda task: ask(task, "b"))
    assert not isinstance(first, Exception)
    assert isinstance(other, RuntimeError) and "this process drew other answers than process 0" in str(other)


def test_one_process_has_the_task_itself():
    @contextmanager
    def open_task():
        yield task

    task = Sums()
    with shared_task(open_task, None) as shared:
        assert shared is task
