"""Runs of GRPO: rounds, what they write, what they go on from, and tasks that fail."""

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.embedded import TOKENIZER

import m3jax
from m3jax.assets import embedded_path
from m3jax.decoding import Params, Sampling
from m3jax.model import M3
from m3jax.parallel import parse_mesh
from m3jax.train import __main__ as command
from m3jax.train import grpo
from m3jax.train.grpo import PartedPolicies, Rounds, RunSettings, check_bits, prompts_of_round, train_policy
from m3jax.train.rewards import TaskError, TaskFile
from m3jax.train.rollouts import Episode

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


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 9))
def test_rounds_go_through_all_prompts(count, per_round, seed):
    """Round after round the prompts of pass after pass, each of them an order of all prompts drawn from the seed."""
    passes = [np.random.default_rng((seed, turn)).permutation(count).tolist() for turn in range(30)]
    whole = [prompt for order in passes for prompt in order]
    for number in range(5):
        found = prompts_of_round(number, per_round, count, seed)
        assert found == whole[number * per_round : (number + 1) * per_round]


def test_a_run_reads_the_distribution_that_it_draws_from():
    """The model's own where no knob changes it; else after the knobs, by a record of the drawn log-probabilities."""
    settings = lambda replay=(), **knobs: RunSettings(steps=9, sampling=Sampling(**knobs), replay=replay)
    for plain in (settings(), settings(seed=7), settings(("blocks",))):
        assert (plain.temperature, plain.record) == (None, plain.replay)
    for changed, temperature in (
        (settings(temperature=0.5), 0.5), (settings(top_k=3), 1.0), (settings(top_p=0.5), 1.0),
        (settings(min_p=0.25), 1.0), (settings(("support", "blocks")), 1.0),
    ):  # fmt: skip
        assert changed.temperature == temperature and changed.record == (*changed.replay, "drawn_logprobs")
    decisive = settings(temperature=0.5).decisive
    assert decisive["sampling.temperature"] == 0.5 and decisive["loss.correction.limit"] == 2.0
    assert not {"steps", "save_every", "sampling", "loss"} & decisive.keys() and decisive["replay"] == []
    for warmup, rates in ((0, [1e-5, 1e-5]), (4, [0.0, 2.5e-6])):
        rate = RunSettings(steps=9, warmup_steps=warmup).schedule
        np.testing.assert_allclose([rate(0), rate(1)], rates, rtol=1e-6)
        np.testing.assert_allclose([rate(4), rate(9)], [1e-5, 1e-5], rtol=1e-6)


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


def test_the_first_token_that_differs_in_a_bit_is_named():
    """Of those that the policy drew, counted from 1."""
    old = np.float32([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    mask = np.array([[True, False, True], [False, True, True]])
    sampler = np.where(mask, old, np.float32(0))
    check_bits(dict(mask=mask, sampler=sampler, old=old))
    sampler[1, 1:] = np.nextafter(old[1, 1:], np.float32(0))
    said = r"differ in 2 of 4 tokens, first in answer 1, token 2: .*-5\.0.* and .*-4\.99"
    with pytest.raises(PartedPolicies, match=said):
        check_bits(dict(mask=mask, sampler=sampler, old=old))


@pytest.mark.parametrize("old", ["trainer", "engine"])
def test_a_round_draws_rewards_and_learns(old, monkeypatch, unchecked):
    """Rewards are weighted and compared by group; what the first step reads is the trainer's policy for later ones."""
    draw, number, lengths = np.random.default_rng(0), 5, [[4, 6, 5], [3, 6, 6]]
    make = lambda length: Episode(
        tokens=tuple(range(length)), is_drawn=np.arange(length) >= 2,
        logprobs=np.where(np.arange(length) >= 2, -draw.random(length), 0).astype(np.float32),
    )  # fmt: skip
    groups, asked, steps = [[make(length) for length in group] for group in lengths], {}, []
    parts = {"letters": [1.0, 0.0, 2.0, 3.0, 5.0, 4.0], "size": [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]}

    def step(state, batch, **how):
        steps.append(batch)
        metrics = {"kl": 0.25, "policy": 0.5, "grad_norm": 2.0, "clipped": 0.125, "kept": 0.75}
        metrics["logprobs"] = batch["sampler"] + np.float32(0.01) * len(steps)
        return SimpleNamespace(model=state.model, step=state.step + 1), metrics

    monkeypatch.setattr(grpo, "roll_out", lambda *given: asked.update(drawn=given) or groups)
    monkeypatch.setattr(grpo, "train_step", step)
    monkeypatch.setattr(grpo, "cast_weights", lambda model, dtype: (model, dtype))
    monkeypatch.setattr(grpo, "read_batch", lambda model, batch, dtype, temperature: model)
    task = SimpleNamespace(
        weights={"letters": 1.0, "size": 0.1}, has_tools=False,
        reward_parts=lambda *given: asked.update(rewarded=given) or parts,
    )  # fmt: skip
    rows = [{"prompt": letter} for letter in "abcd"]
    encoded, params = [(i, i) for i in range(4)], Params(max_new_tokens=4, sampling=Sampling())
    engine = SimpleNamespace(update=lambda weights: asked.update(served=weights))
    settings = RunSettings(steps=9, prompts=2, answers=3, seed=4, epochs=3, baseline="rloo", old=old)
    rounds = Rounds(
        engine, task, rows, encoded, SimpleNamespace(text=len), params, "adamw", settings, length=8, reference="first"
    )
    begin = SimpleNamespace(model=SimpleNamespace(mesh=None), step=np.int32(15))
    state, line = rounds(number, begin)
    chosen, seed = prompts_of_round(number, 2, 4, 4), (4 * 1_000_003 + number) * 6
    assert asked["drawn"] == (engine, [encoded[i] for i in chosen], params, 3, seed, None, 1, 8)
    answers = [length - 2 for group in lengths for length in group]
    assert asked["rewarded"] == ([rows[i] for i in chosen for _ in range(3)], answers, 3)
    assert state.step == 18 and asked["served"] == (begin.model, "float32")

    rewards = (np.array(parts["letters"]) + 0.1 * np.array(parts["size"])).reshape(2, 3)
    others = (rewards.sum(1, keepdims=True) - rewards) / 2
    sampler = steps[0]["sampler"]
    later = sampler + np.float32(0.01) if old == "trainer" else sampler
    assert [bool(batch["is_on_policy"]) for batch in steps] == [old == "trainer", False, False]
    for batch, expected in zip(steps, (sampler, later, later), strict=True):
        np.testing.assert_allclose(batch["advantages"], (rewards - others).ravel(), rtol=1e-6)
        np.testing.assert_array_equal(batch["old"], expected)
        assert batch["reference"] == "first" and batch["tokens"].shape == (6, 8)
    expected = {
        "step": 6, "reward_mean": rewards.mean(), "reward_std": rewards.std(), "reward_mean.letters": 2.5,
        "reward_mean.size": 35.0, "kl_reference": 0.25, "loss": 0.5, "grad_norm": 2.0, "clipped": 0.125,
        "kept": 0.75, "new_tokens": 18, "tokens_mean": 3.0, "token_mult_prob_error": np.exp(0.01), "kl": -0.01,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 <= line["seconds_drawing"] <= line["seconds"]
    with pytest.raises(PartedPolicies, match="differ in 18 of 18 tokens"):
        replace(rounds, settings=replace(settings, invariant=True))(number, begin)


FAULTS = {
    "prompts = []": "it has no function prompts",
    "raise RuntimeError('no')": "RuntimeError: no (line 1)",
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
        made.reward_parts(made.prompts() * 2, ["a", "b"])
    assert REWARDS[body] in str(raised.value) and "\n" not in str(raised.value)


def test_prompts_that_do_not_fit(task, tmp_path, unchecked):
    with pytest.raises(ValueError, match="are more than the model's context of 1024: shorten one of the two"):
        settings = RunSettings(steps=1, max_new_tokens=1024)
        train_policy(model(), TOKENIZER, None, task, settings, tmp_path, tmp_path / "metrics.jsonl", print)
    for row, message in (
        ({"prompt": 5}, "prompt 0 of the task is int: it must be a text"),
        ({"messages": []}, "prompt 0 of the task has messages, and the model's folder no chat_template.jinja"),
    ):
        with pytest.raises(ValueError, match=message):
            one_row = SimpleNamespace(prompts=lambda row=row: [row], has_tools=False)
            train_policy(model(), TOKENIZER, None, one_row, RunSettings(steps=1), tmp_path)


@pytest.mark.parametrize(("has_tools", "room"), [(False, 20), (True, 3 * 20 + 2 * 5)])
def test_episodes_of_several_turns_need_room_for_all(tmp_path, monkeypatch, unchecked, has_tools, room):
    """Of 1,024 tokens: turns of a policy, and what tools write between them."""

    class Enough(Exception):
        """Ends a run before it begins."""

    def check_same_run(*_):
        raise Enough

    monkeypatch.setattr(grpo, "check_same_run", check_same_run)
    settings = RunSettings(steps=1, max_new_tokens=20, turns=3, tool_tokens=5)
    letters = SimpleNamespace(encode=list)
    words = " in 3 turns and tool_tokens = 5" if has_tools else ""
    for count, error, reason in (
        (1024 - room, Enough, None),
        (
            1025 - room,
            ValueError,
            f"longest prompt has {1025 - room} tokens, which with max_new_tokens = 20{words} are",
        ),
    ):
        task = SimpleNamespace(
            prompts=lambda count=count: [{"prompt": "a"}, {"prompt": "a" * count}], has_tools=has_tools
        )
        with pytest.raises(error, match=reason):
            train_policy(model(), letters, None, task, settings, tmp_path)


def test_settings_that_no_run_has(unchecked):
    """The least of each setting is taken, and nothing below it."""
    least = dict(steps=1, prompts=1, answers=2, max_new_tokens=1, epochs=1, save_every=1, warmup_steps=0, turns=1,
                 tool_tokens=1)  # fmt: skip
    for name, smallest in least.items():
        assert getattr(RunSettings(**{"steps": 9, name: smallest}), name) == smallest
        with pytest.raises(ValueError, match=rf"{name} = {smallest - 1}: must be at least {smallest}"):
            RunSettings(**{"steps": 9, name: smallest - 1})
    with pytest.raises(ValueError, match="old = 'nobody': choose of trainer, engine"):
        RunSettings(steps=1, old="nobody")
    with pytest.raises(ValueError, match="replay of 'logits'"):
        RunSettings(steps=1, replay=("logits",))


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
