"""Reinforcement learning by groups of answers: an engine draws, a task rewards, a step learns, the engine is updated.

One round is one step. The engine and the trainer share one set of weights where both compute in float32.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from m3jax.decoding import Engine, Params, Sampling
from m3jax.decoding.builder import build_engine
from m3jax.dialogue.answer import stop_ids
from m3jax.model import M3
from m3jax.progress import activity
from m3jax.text import ChatTemplate, Message, OutputParser, Tokenizer
from m3jax.train.keeping import keep, restored
from m3jax.train.policy import PROB_ERROR_ALARM, Baseline, PolicyLoss, group_advantages, mismatch
from m3jax.train.rewards import TaskFile
from m3jax.train.rollouts import Episode, RolloutLoss, as_batch, check_replay, read_logprobs, roll_out
from m3jax.train.step import TrainState, cast_weights, init_state, make_optimizer, train_step


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run.

    Attributes:
      steps: rounds: each draws answers, and takes `epochs` optimiser steps on them.
      prompts: of a round.
      answers: to each prompt, at least 2.
      max_new_tokens: of an answer.
      epochs: optimiser steps on a round's answers; the first is on-policy.
      learning_rate: reached after `warmup_steps` steps, and kept.
      warmup_steps: over which it rises from 0.
      weight_decay: of AdamW.
      baseline: as in `group_advantages`.
      loss: as in `RolloutLoss`.
      replay: choices that the trainer takes from the engine's records: "expert_ids", "blocks".
      invariant: engine and trainer compute in the invariant mode, and the run ends where their log-probabilities
        differ in a bit.
      compute_dtype: of both; the master weights are float32.
      frozen_index: leave the index branch as it is: the loss of a policy has no gradient for it (T32).
      remat: recompute activations in the backward pass.
      rows: answers that are drawn side by side; None for all of a round.
      save_every: rounds after which the state is kept; the last one is kept in any case.
      seed: of the prompts' order and of all draws.
    """

    steps: int
    prompts: int = 8
    answers: int = 8
    max_new_tokens: int = 128
    epochs: int = 1
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    baseline: Baseline = "grpo"
    loss: PolicyLoss = field(default_factory=PolicyLoss)
    replay: tuple[str, ...] = ()
    invariant: bool = False
    compute_dtype: str = "float32"
    frozen_index: bool = True
    remat: bool = False
    rows: int | None = None
    save_every: int = 10
    seed: int = 0

    def __post_init__(self):
        least = dict(steps=1, prompts=1, answers=2, max_new_tokens=1, epochs=1, save_every=1, warmup_steps=0)
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {smallest}")
        check_replay(self.replay)
        if self.loss.kl_weight:
            raise ValueError("loss.kl_weight: a run keeps no reference policy; leave it at 0")

    @property
    def schedule(self) -> optax.Schedule:
        """The learning rate by step."""
        return optax.linear_schedule(0.0 if self.warmup_steps else self.learning_rate, self.learning_rate,
                                     max(1, self.warmup_steps))  # fmt: skip


class PartedPolicies(RuntimeError):
    """Raised where the trainer's log-probabilities are not the engine's bits in the invariant mode."""


def train_policy(
    model: M3,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    task: TaskFile,
    settings: RunSettings,
    folder: str | Path,
    metrics: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> M3:
    """Train a model on a task, and return it with float32 weights.

    The state is kept in `folder`/states; a run whose folder has one goes on from there, and draws and learns what it
    would have without the stop.

    Args:
      model: to begin with, in any float dtype.
      tokenizer, template: of the model; a task whose prompts are texts needs no template.
      task: prompts and rewards.
      settings: of the run.
      folder: of the states.
      metrics: a file of JSON lines, one a round; lines of rounds that are repeated after a stop are replaced.
      say: is told a line a round.

    Returns:
      The trained model.

    Raises:
      ValueError: a prompt that does not fit the context, or a reward that is none (`TaskError`).
      PartedPolicies: in the invariant mode, trainer and engine differ.
    """
    rows = task.prompts()
    encoded = [_encode(row, number, tokenizer, template) for number, row in enumerate(rows)]
    longest = max(map(len, encoded))
    length = -(-(longest + settings.max_new_tokens) // model.config.index_block_size) * model.config.index_block_size
    if length > model.config.max_position_embeddings:
        raise ValueError(
            f"the longest prompt has {longest} tokens, which with max_new_tokens = {settings.max_new_tokens} are more "
            f"than the model's context of {model.config.max_position_embeddings}: shorten one of the two"
        )
    if settings.invariant:
        model = model.with_invariance()
    optimizer = make_optimizer(settings.schedule, settings.weight_decay, frozen_index=settings.frozen_index)
    state = init_state(model, optimizer)
    kept = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager((Path(folder) / "states").resolve(), options=kept) as keeper:
        state = restored(keeper, state)
        lines = MetricLines(metrics, int(state.step) // settings.epochs)
        engine = build_engine(
            cast_weights(state.model, settings.compute_dtype),
            rows=settings.rows or settings.prompts * settings.answers,
            length=length,
            records=settings.replay,
            steps_per_call=16,
        )
        ends = stop_ids(tokenizer, model.config.eos_token_id)
        asked = Params(
            max_new_tokens=settings.max_new_tokens, sampling=Sampling(), stop_ids=ends, record=settings.replay
        )
        do_round = Rounds(engine, task, rows, encoded, tokenizer, asked, optimizer, settings, length)
        round_number = int(state.step) // settings.epochs
        try:
            while round_number < settings.steps:
                state, line = do_round(round_number, state)
                round_number += 1
                lines.write(line)
                say(_shown(line, settings.steps))
                if round_number % settings.save_every == 0 or round_number == settings.steps:
                    keep(keeper, int(state.step), state)
        except KeyboardInterrupt:
            # A step that was interrupted has taken the state with it: then what was kept last is gone on from.
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)) and int(state.step):
                if keeper.latest_step() != int(state.step):
                    keep(keeper, int(state.step), state)
                say(f"stopped after round {int(state.step) // settings.epochs}: the same command goes on from there")
            raise
    return state.model


@dataclass(frozen=True)
class Rounds:
    """The parts that all rounds of a run have in common; called with a state, it does a round.

    Attributes:
      engine: serves the policy.
      task: rewards answers.
      rows: of the task's prompts.
      encoded: their tokens.
      tokenizer: of the model.
      asked: parameters of each answer.
      optimizer: of the steps.
      settings: of the run.
      length: columns of a batch.
    """

    engine: Engine
    task: TaskFile
    rows: Sequence[Mapping[str, Any]]
    encoded: Sequence[tuple[int, ...]]
    tokenizer: Tokenizer
    asked: Params
    optimizer: optax.GradientTransformation
    settings: RunSettings
    length: int

    def __call__(self, number: int, state: TrainState) -> tuple[TrainState, dict[str, int | float]]:
        """Draw, reward and learn once.

        Args:
          number: of the round, from 0; with the settings' seed it decides all draws.
          state: whose weights the engine serves; donated.

        Returns:
          The state after it, and the round's figures.
        """
        settings, began = self.settings, time.perf_counter()
        chosen = prompts_of_round(number, settings.prompts, len(self.rows), settings.seed)
        asked_rows = [self.rows[i] for i in chosen for _ in range(settings.answers)]
        with activity(about="a round") as line:
            line.say(f"round {number + 1}: drawing {len(chosen)} x {settings.answers} answers")
            seed = (settings.seed * 1_000_003 + number) * settings.prompts * settings.answers
            groups = roll_out(self.engine, [self.encoded[i] for i in chosen], self.asked, settings.answers, seed)
            drawn = time.perf_counter()
            line.say(f"round {number + 1}: rewarding")
            episodes = [episode for group in groups for episode in group]
            answers = [self._decoded(*pair) for pair in zip(asked_rows, episodes, strict=True)]
            rewards = np.array(self.task.reward(asked_rows, answers)).reshape(len(chosen), settings.answers)
            line.say(f"round {number + 1}: learning")
            batch = as_batch(episodes, self.length, settings.replay)
            batch["advantages"] = group_advantages(rewards, settings.baseline).reshape(-1)
            tokens, dtype = jnp.asarray(batch["tokens"]), settings.compute_dtype
            batch["old"] = np.asarray(read_logprobs(state.model, tokens, batch.get("choices"), dtype))
            away = mismatch(batch["sampler"], batch["old"], batch["mask"])
            if settings.invariant:
                check_bits(batch)
            loss_fn = RolloutLoss(settings.loss, dtype, settings.remat)
            for _ in range(settings.epochs):
                state, metrics = train_step(state, batch, optimizer=self.optimizer, loss_fn=loss_fn, balance_rate=0.0)
            self.engine.update(cast_weights(state.model, dtype))
            jax.block_until_ready(state.step)
        new_tokens = int(batch["mask"].sum())
        out: dict[str, int | float] = {"step": number + 1}
        out |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        out |= {"loss": float(metrics["policy"]), "grad_norm": float(metrics["grad_norm"])}
        out |= {"clipped": float(metrics["clipped"]), "kept": float(metrics["kept"])}
        out |= away | {"new_tokens": new_tokens, "tokens_mean": new_tokens / len(episodes)}
        return state, out | {"seconds": time.perf_counter() - began, "seconds_drawing": drawn - began}

    def _decoded(self, row: Mapping[str, Any], episode: Episode) -> Any:
        """Return an answer as the task reads it: a text, or, behind messages, the message that the model wrote."""
        tokens = np.array(episode.tokens)[episode.is_drawn].tolist()
        is_whole = tokens[-1] in self.asked.stop_ids
        tokens = tokens[:-1] if is_whole else tokens
        if "prompt" in row:
            return self.tokenizer.decode(tokens)
        parser = OutputParser(tools=row.get("tools"), thinking_mode=row.get("thinking_mode"))
        events = list(parser.feed(self.tokenizer.decode(tokens, skip_special_tokens=False)))
        return Message.of([*events, *parser.finish(is_cut=not is_whole)]).as_dict()


def prompts_of_round(number: int, per_round: int, count: int, seed: int) -> list[int]:
    """Return the prompts of a round: each pass over all `count` of them has an order of its own, from the seed."""
    places = range(number * per_round, (number + 1) * per_round)
    order = lambda turn: np.random.default_rng((seed, turn)).permutation(count)
    orders = {turn: order(turn) for turn in {place // count for place in places}}
    return [int(orders[place // count][place % count]) for place in places]


def check_bits(batch: Mapping[str, Any]) -> None:
    """Raise PartedPolicies unless the trainer's log-probabilities are the engine's bits."""
    differs = batch["mask"] & (batch["sampler"] != batch["old"])
    if differs.any():
        row, column = (int(i) for i in np.argwhere(differs)[0])
        raise PartedPolicies(
            f"trainer and engine differ in {int(differs.sum())} of {int(batch['mask'].sum())} tokens, first in answer "
            f"{row}, token {column + 1}: {batch['old'][row, column]!r} and {batch['sampler'][row, column]!r}"
        )


def _encode(
    row: Mapping[str, Any], number: int, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[int, ...]:
    """Return the tokens of a task's prompt."""
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise ValueError(f"prompt {number} of the task is {type(row['prompt']).__name__}: it must be a text")
        return tuple(tokenizer.encode(row["prompt"]))
    if template is None:
        raise ValueError(f"prompt {number} of the task has messages, and the model's folder no chat_template.jinja")
    return tuple(
        template.encode(tokenizer, row["messages"], tools=row.get("tools"), thinking_mode=row.get("thinking_mode"))
    )


def _shown(line: Mapping[str, int | float], steps: int) -> str:
    text = (
        f"round {line['step']} of {steps}: reward {line['reward_mean']:.3f}, {line['tokens_mean']:.0f} tokens an "
        f"answer, k3_kl {line['k3_kl']:.2g}, {line['seconds']:.1f} s"
    )
    if line["token_mult_prob_error"] > PROB_ERROR_ALARM:
        text += f"; token_mult_prob_error {line['token_mult_prob_error']:.3f} is above {PROB_ERROR_ALARM}: engine and "
        text += "trainer differ by more than rounding"
    return text


class MetricLines:
    """A file of JSON lines, one a round; a run that goes on writes over the lines of rounds that it repeats.

    Args:
      path: of the file; None writes nothing.
      keep: rounds whose lines stay.
    """

    def __init__(self, path: str | Path | None, keep: int):
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in lines if _is_before(line, keep)]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, line: Mapping[str, int | float]) -> None:
        """Append a line, at once on disk."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(line)) + "\n")


def _is_before(line: str, keep: int) -> bool:
    try:
        return json.loads(line)["step"] <= keep
    except (ValueError, KeyError, TypeError):
        return False  # half a line, of a process that was killed
