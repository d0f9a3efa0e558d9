"""Runs of GRPO: rounds, what they write, what they go on from, and tasks that fail."""

import json
from functools import cache

import jax
import numpy as np
import pytest
from support import tiny
from support.embedded import TOKENIZER

import m3jax
from m3jax.assets import embedded_path
from m3jax.model import M3
from m3jax.parallel import parse_mesh
from m3jax.train import __main__ as command
from m3jax.train import grpo
from m3jax.train.grpo import PartedPolicies, RunSettings, check_bits, prompts_of_round, train_policy
from m3jax.train.rewards import TaskError, TaskFile

TASK = """
def prompts():
    return [{"prompt": f"x{i} = sorted(x for x in x{i} if x is not None) # ", "wanted": i} for i in range(5)]


def reward(prompts, completions, wanted):
    assert len(prompts) == len(completions) == len(wanted) and isinstance(completions[0], str)
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]
"""


@cache
def model() -> M3:
    return tiny.model(tiny.config("dM", vocab_size=TOKENIZER.vocab_size))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "letters.py"
    path.write_text(TASK, encoding="utf-8")
    with TaskFile(path) as made:
        yield made


def test_every_prompt_is_drawn_once_in_a_pass():
    chosen = [place for number in range(5) for place in prompts_of_round(number, 2, 5, seed=7)]
    assert sorted(chosen[:5]) == sorted(chosen[5:]) == list(range(5))
    assert chosen[:5] != chosen[5:] and prompts_of_round(0, 7, 5, seed=7)[:5] == chosen[:5]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (RunSettings(steps=1, prompts=1, answers=3), "their product must be a multiple of the mesh's data=2"),
        (RunSettings(steps=1, prompts=1, answers=4, invariant=True), "invariant on a mesh with data=2: .* other axes"),
    ],
)
def test_what_a_data_axis_cannot_do_is_refused(task, tmp_path, settings, problem):
    divided = tiny.model(tiny.config("d", vocab_size=TOKENIZER.vocab_size), mesh=parse_mesh("data=2"))
    with pytest.raises(ValueError, match=problem):
        train_policy(divided, TOKENIZER, None, task, settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bit_that_differs_ends_an_invariant_run():
    batch = dict(mask=np.array([[True, True]]), sampler=np.float32([[-1, -2]]), old=np.float32([[-1, -2]]))
    check_bits(batch)
    batch["old"][0, 1] = np.nextafter(np.float32(-2), np.float32(0))
    with pytest.raises(PartedPolicies, match="differ in 1 of 2 tokens, first in answer 0, token 2"):
        check_bits(batch)


FAULTS = {
    "prompts = []": "it has no function prompts",
    "raise RuntimeError('no')": "RuntimeError: no (line 1)",
    "def prompts(): return []\ndef reward(*_, **__): return []": "prompts() of .* gave []: it must give a list",
    "def prompts(): return [{'text': 'x'}]\ndef reward(*_, **__): return []": "must have 'prompt' or 'messages'",
    "def prompts(): return [{'prompt': ''}]\ndef reward(*_, **__): return []": "row 0: its prompt is empty",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_task_that_cannot_be_used_is_said_in_a_line(text, tmp_path):
    path = tmp_path / "task.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TaskError) as raised, TaskFile(path) as made:
        made.prompts()
    assert all(part.strip() in str(raised.value) for part in FAULTS[text].split(".*"))
    assert "\n" not in str(raised.value)


REWARDS = {
    "return []": "gave 0 numbers for 2 answers: give a list, one each",
    "return [1.0, float('nan')]": "gave nan for answer 1: give finite numbers",
    "return None": "gave None for 2 answers",
    "return [1, 'two']": "gave 'two' for answer 1",
    "return 1 / 0": "ZeroDivisionError: division by zero (line 4)",
    "import time; time.sleep(60)": "took more than 1 s: it was given up",
    "import os; os._exit(3)": "ended its process (exit code 3)",
}


@pytest.mark.parametrize("body", REWARDS)
def test_a_reward_that_is_none_is_said_in_a_line(body, tmp_path):
    path = tmp_path / "task.py"
    path.write_text(
        f"def prompts():\n    return [dict(prompt='x')]\ndef reward(*_, **__):\n    {body}\n", encoding="utf-8"
    )
    with TaskFile(path, seconds=1) as made, pytest.raises(TaskError) as raised:
        made.reward(made.prompts() * 2, ["a", "b"])
    assert REWARDS[body] in str(raised.value) and "\n" not in str(raised.value)


def test_prompts_and_settings_that_do_not_fit(task, tmp_path):
    with pytest.raises(ValueError, match="are more than the model's context of 1024: shorten one of the two"):
        settings = RunSettings(steps=1, max_new_tokens=1024)
        train_policy(model(), TOKENIZER, None, task, settings, tmp_path, tmp_path / "metrics.jsonl", print)
    for knobs, message in ((dict(steps=0), "steps = 0"), (dict(steps=1, answers=1), "answers = 1: must be at least 2"),
                           (dict(steps=1, replay=("logits",)), "replay of 'logits'")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            RunSettings(**knobs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "none.py"], "--task none.py: no such file"),
        (["--task", __file__, "--replay", "logits"], "--replay logits: choose of experts, blocks"),
        (["--task", __file__, "--steps", "0"], "steps = 0: must be at least 1"),
        (["--task", __file__, "--clip", "2,0"], "clip_low = 2.0"),
    ],
)
def test_what_is_wrong_on_the_command_line(arguments, message, tmp_path, capsys):
    words = ["grpo", "--out", str(tmp_path), *([] if "--steps" in arguments else ["--steps", "1"]), *arguments]
    assert command.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


@pytest.mark.further  # runs: test_runs.py; a command of training: test_lora.py
def test_the_command_trains_a_folder(task, tmp_path, capsys, monkeypatch):
    """As docs/training.md says it: states, a line a round, and at the end a model that loads; prompts are shared."""
    monkeypatch.setattr(grpo, "as_batch", None)  # the rows of episodes that are computed alone
    folder = tmp_path / "model"
    m3jax.save(model(), folder, copy_from=embedded_path())
    words = ["grpo", "--model", str(folder), "--task", str(task.path), "--out", str(tmp_path / "run"), "--steps", "2"]
    sizes = ["--prompts", "2", "--answers", "2", "--max-new-tokens", "4", "--learning-rate", "1e-3", "--kl", "0.1"]
    assert command.main([*words, *sizes]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(line["k3_kl"] < 1e-8 for line in lines)
    # The reference is the first policy, read by another program: they part where the policy has moved.
    assert abs(lines[0]["kl_reference"]) < 1e-8 < lines[1]["kl_reference"]
    assert "round 2 of 2: reward" in capsys.readouterr().err
    trained = m3jax.load(tmp_path / "run" / "model", dtype="float32")
    assert not np.array_equal(trained.lm_head[...], model().lm_head[...])
    before = dict(jax.tree_util.tree_flatten_with_path(model())[0])
    after = dict(jax.tree_util.tree_flatten_with_path(trained)[0])
    of_index = [path for path in after if "index_" in jax.tree_util.keystr(path)]
    assert of_index
    for path in of_index:  # T32: no loss trains it, and nothing else moves it
        np.testing.assert_array_equal(after[path], before[path])
