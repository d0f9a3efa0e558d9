"""Runs of GRPO with everything on: knobs, a reference, all replays; and what becomes of them when something fails."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from support import tiny
from support.embedded import TOKENIZER

import m3jax.train.grpo as grpo
from m3jax.decoding import Sampling
from m3jax.decoding.engine.scheduler import Scheduler
from m3jax.model import M3
from m3jax.train import __main__ as command
from m3jax.train.grpo import PartedPolicies, RunSettings, train_policy
from m3jax.train.policy import Correction, PolicyLoss
from m3jax.train.rewards import TaskError, TaskFile

SETTINGS = RunSettings(
    steps=3, prompts=2, answers=3, max_new_tokens=5, learning_rate=1e-2, save_every=1, invariant=True,
    compute_dtype="bfloat16", replay=("expert_ids", "blocks", "support"),
    sampling=Sampling(temperature=0.8, top_p=0.9, top_k=200), loss=PolicyLoss(kl_weight=0.1),
)  # fmt: skip


@cache
def model() -> M3:
    return tiny.model(tiny.config("M", vocab_size=TOKENIZER.vocab_size))


class Task(TaskFile):
    """A task in this process, whose two prompts come in every round; each fills pages of its own."""

    has_tools, weights = False, {"letters": 1.0, "length": 0.01}

    def __init__(self, error: BaseException | None = None):
        self.calls, self.error = 0, error

    def prompts(self):
        return [{"prompt": f"{name} = sorted(x for x in {name}s if x is not None) # "} for name in ("row", "line")]

    def reward_parts(self, rows, completions, group):
        self.calls += 1
        if self.error and self.calls == 2:
            raise self.error
        letters = [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]
        return {"letters": letters, "length": [float(len(text)) for text in completions]}


@pytest.fixture(autouse=True, scope="module")
def _one_optimizer():
    """Runs of this module have one optimiser, so that their step is compiled once."""
    made = grpo.make_optimizer(SETTINGS.schedule, frozen_index=True, weight_decay=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "make_optimizer", lambda *_, **__: made)
        yield


def trained(folder: Path, task: Task | None = None, say=lambda text: None, **changes) -> M3:
    metrics = folder / "metrics.jsonl"
    return train_policy(model(), TOKENIZER, None, task or Task(), replace(SETTINGS, **changes), folder, metrics, say)


def train(folder: Path, *args, **changes) -> list[dict]:
    trained(folder, *args, **changes)
    return lines(folder)


def lines(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith("seconds")} for line in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[list[dict], list[Path], M3]:
    """An undisturbed run, what its folder was like after each round, as a killed process leaves it, and its model."""
    folder, copies = tmp_path_factory.mktemp("policy_run", numbered=False), []

    def say(text):
        copies.append(folder.parent / f"after{len(copies) + 1}")
        shutil.copytree(folder, copies[-1])  # a state that is being written is copied as far as it has come

    model_at_end = trained(folder, say=say)
    return lines(folder), copies, model_at_end


def test_trainer_and_engine_read_one_policy_with_all_knobs_on(whole):
    """Temperature, top-k, top-p and three replays: not a bit is off; the policy leaves its reference step by step."""
    found = whole[0]
    assert [line["step"] for line in found] == [1, 2, 3]
    for line in found:
        assert line.keys() >= {"reward_mean", "loss"}
        assert (line["rollout_probs_diff_max"], line["k3_kl"], line["kl"], line["chi2_token"]) == (0, 0, 0, 0)
        assert line["token_mult_prob_error"] == line["ess"] == 1
        parts = line["reward_mean.letters"] + 0.01 * line["reward_mean.length"]
        assert line["reward_mean"] == pytest.approx(parts)
    assert found[0]["kl_reference"] == 0 < found[1]["kl_reference"]
    states = whole[1][0].parent / "policy_run" / "states"
    assert sorted(int(state.name) for state in states.iterdir()) == [2, 3], "the last two, of one step a round"


def test_a_run_goes_on_from_wherever_it_was_killed(whole, tmp_path):
    """The same draws, rewards and weights to the bit, and one line a round, also where a line was half written."""
    for number, copy in enumerate(whole[1][:2]):
        folder = tmp_path / str(number)
        shutil.copytree(copy, folder)
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 3, "rewa' if number else "")
        again = trained(folder)
        assert lines(folder) == whole[0]
        for one, other in zip(jax.tree.leaves(whole[2]), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_run_goes_on_with_the_settings_it_began_with(whole, tmp_path):
    """More rounds are the same run; another loss, sampling or learning rate is another, and is refused by its name."""
    shutil.copytree(whole[1][0], tmp_path / "run")
    before = lines(tmp_path / "run")
    for changes, named in (
        (dict(learning_rate=1e-3), "learning_rate = 0.01"),
        (dict(loss=PolicyLoss(kl_weight=0.2)), "loss.kl_weight = 0.1"),
        (dict(sampling=Sampling(temperature=0.8, top_p=0.9, top_k=100)), "sampling.top_k = 200"),
        (dict(replay=("expert_ids",)), r"replay = \['expert_ids', 'blocks', 'support'\]"),
    ):
        with pytest.raises(ValueError, match=f"run has a run with {named}: give the same, or another --out"):
            train(tmp_path / "run", **changes)
    assert lines(tmp_path / "run") == before
    assert replace(SETTINGS, steps=9, save_every=2).decisive == SETTINGS.decisive


@pytest.mark.parametrize("error", [TaskError("reward() of task.py: it fails"), KeyboardInterrupt()], ids=type)
def test_a_round_that_is_cut_short_loses_nothing(whole, tmp_path, error):
    """By a reward that fails, or by Ctrl-C: the round before it is kept, though no state was due yet."""
    said = []
    with pytest.raises(type(error)):
        train(tmp_path, Task(error), said.append, save_every=10)
    assert lines(tmp_path) == whole[0][:1]
    assert re.fullmatch(r"round 1 of 3: reward \d\.\d{3}, \d tokens an answer, k3_kl 0, \d+\.\d s", said[0])
    assert said[1:] == ["stopped after round 1: the same command goes on from there"]
    assert train(tmp_path, again := Task(), steps=2) == whole[0][:2]
    assert again.calls == 1, "the first round was drawn again"


def test_against_the_engine_as_old_policy_an_invariant_run_is_the_same(whole, tmp_path):
    """Two policies or three: where engine and trainer agree to the bit there is nothing between them."""
    assert train(tmp_path, steps=2, old="engine") == whole[0][:2]


def test_old_pages_under_new_weights_are_caught(tmp_path, monkeypatch):
    """An engine that keeps its pages over an update (NeMo-RL #3743): prompts are read by the weights of a round ago."""
    monkeypatch.setattr(Scheduler, "drop_prefixes", lambda self: None)
    with pytest.raises(PartedPolicies, match="trainer and engine differ"):
        train(tmp_path, steps=2)
    assert len(lines(tmp_path)) == 1  # round 1 had no old pages


def test_the_command_s_options_are_the_loss_s(tmp_path, monkeypatch):
    """Each option of the command line is the setting of the pure function that its name says."""
    given = []

    def note(model, tokenizer, template, task, settings, *_):
        given.append(settings)
        raise ValueError("enough")

    task = tmp_path / "task.py"
    task.write_text("def prompts(): return [dict(prompt='x')]\ndef reward(*_, **__): return []\n", encoding="utf-8")
    monkeypatch.setattr(grpo, "train_policy", note)
    monkeypatch.setattr("m3jax.checkpoint.load", lambda *_, **__: model())
    words = (
        "--kl 0.2 --dual-clip none --ratio sequence --clip 0.1,0.3 --mean constant --max-new-tokens 9 --old engine "
        "--tis sequence --reject token,k1,0.5 --temperature 0.7 --top-k 20 --top-p 0.9 --min-p 0.1 --turns 2 "
        "--tool-tokens 7 --replay experts,support --baseline rloo --epochs 2 --save-every 3 --prompts 3 --answers 4 "
        "--rows 6 --learning-rate 0.5 --warmup-steps 2 --weight-decay 0.25 --seed 5 --dtype bfloat16 --invariant "
        "--keep-products"
    )
    arguments = ["grpo", "--task", str(task), "--out", str(tmp_path), "--steps", "1", *words.split()]
    assert command.main(arguments) == 2
    (settings,) = given
    assert (settings.save_every, settings.prompts, settings.answers, settings.rows) == (3, 3, 4, 6)
    assert (settings.learning_rate, settings.warmup_steps, settings.weight_decay) == (0.5, 2, 0.25)
    assert (settings.seed, settings.compute_dtype) == (5, "bfloat16") and settings.invariant
    assert settings.remat == "products"
    correction = Correction(weigh="sequence", reject="token", divergence="k1", reject_above=0.5)
    assert settings.loss == PolicyLoss(
        clip_low=0.1, clip_high=0.3, dual_clip=None, level="sequence", mean="constant", tokens=9, kl_weight=0.2,
        correction=correction,
    )  # fmt: skip
    assert settings.sampling == Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1)
    assert (settings.old, settings.turns, settings.tool_tokens, settings.baseline) == ("engine", 2, 7, "rloo")
    assert settings.replay == ("expert_ids", "support") and settings.epochs == 2
    assert settings.record == ("expert_ids", "support", "drawn_logprobs") and settings.temperature == 0.7


def test_knobs_that_the_trainer_does_not_model_are_refused(unchecked):
    assert SETTINGS.temperature == 0.8 and RunSettings(steps=1).record == ()
    for sampling in (Sampling(temperature=0), Sampling(repetition_penalty=1.1), Sampling(logit_bias={3: 1.0})):
        with pytest.raises(ValueError, match="a run draws by a temperature above 0, top_k, top_p and min_p"):
            replace(SETTINGS, sampling=sampling)
