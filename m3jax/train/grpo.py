"""Reinforcement learning by groups of answers: an engine draws, a task rewards, a step learns, the engine is updated.

One round is one step. The engine and the trainer share one set of weights where both compute in float32.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from jaxtyping import Float32

from m3jax.decoding import Engine, Params, Sampling
from m3jax.decoding.builder import build_engine
from m3jax.decoding.protocols import DRAWN_LOGPROBS, SUPPORT
from m3jax.dialogue.answer import stop_ids
from m3jax.execution import Remat
from m3jax.messages import shown
from m3jax.model import M3
from m3jax.parallel import read
from m3jax.progress import activity
from m3jax.text import ChatTemplate, Message, OutputParser, Tokenizer
from m3jax.train.keeping import keep, keep_whole, restored, states_in
from m3jax.train.metric_lines import MetricLines
from m3jax.train.policy import PROB_ERROR_ALARM, Baseline, PolicyLoss, group_advantages, mismatch
from m3jax.train.rewards import TaskError, TrainingTask
from m3jax.train.rollouts import (
    Episode,
    RolloutLoss,
    as_batch,
    as_batch_of_groups,
    check_replay,
    read_batch,
    roll_out,
)
from m3jax.train.sft import check_same_run
from m3jax.train.shared_prompts import GroupLayout
from m3jax.train.step import TrainState, cast_weights, init_state, make_optimizer, on_data_axis, train_step


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
      replay: what the trainer takes from the engine's records: "expert_ids", "blocks", "support".
      sampling: temperature, top-k, top-p and min-p of the draws. The engine's log-probabilities are then those after
        these knobs, and the trainer divides its logits by the same temperature; it divides by the tokens that the knobs
        left where their record is replayed ("support"), else by all of them.
      old: the policy that ratios are taken against: the "trainer"'s own reading of the weights that drew (three
        policies, and `loss.correction` for the engine's), or the "engine" (two policies, which bypasses that reading).
      turns: of the policy in an episode, at most, where the task has tools.
      tool_tokens: for which an episode has room between two turns; one that needs more ends with the earlier turn if
        its room is used up.
      invariant: engine and trainer compute in the invariant mode, and the run ends where their log-probabilities
        differ in a bit.
      compute_dtype: of both; the master weights are float32.
      remat: what the backward pass recomputes (`m3jax.execution.Compute`).
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
    sampling: Sampling = field(default_factory=Sampling)
    old: Literal["trainer", "engine"] = "trainer"
    turns: int = 4
    tool_tokens: int = 64
    invariant: bool = False
    compute_dtype: str = "float32"
    remat: Remat = False
    rows: int | None = None
    save_every: int = 10
    seed: int = 0

    def __post_init__(self):
        least = dict(steps=1, prompts=1, answers=2, max_new_tokens=1, epochs=1, save_every=1, warmup_steps=0)
        least |= dict(turns=1, tool_tokens=1)
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {smallest}")
        check_replay(self.replay)
        if self.old not in ("trainer", "engine"):
            raise ValueError(f"old = {shown(self.old)}: choose of trainer, engine")
        knobs = {name: getattr(self.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        if replace(self.sampling, seed=0) != Sampling(**knobs) or not self.sampling.temperature > 0:
            raise ValueError(
                "sampling: a run draws by a temperature above 0, top_k, top_p and min_p, and by no other knob"
            )

    @property
    def temperature(self) -> float | None:
        """The temperature as `token_logprobs` takes it; None where the model's own distribution is drawn from."""
        is_plain = replace(self.sampling, seed=0) == Sampling() and SUPPORT not in self.replay
        return None if is_plain else float(self.sampling.temperature)

    @property
    def record(self) -> tuple[str, ...]:
        """Names of what the engine records of each new token."""
        return self.replay if self.temperature is None else (*self.replay, DRAWN_LOGPROBS)

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide draws and weights, by name, as JSON has them: a run goes on with the same."""

        def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
            out = {}
            for name, value in values.items():
                out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
            return out

        values = dataclasses.asdict(self)
        del values["steps"], values["save_every"]
        return json.loads(json.dumps(flat(values)))

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
    task: TrainingTask,
    settings: RunSettings,
    folder: str | Path,
    metrics: str | Path | None = None,
    say: Callable[[str], None] = print,
    origin: Mapping[str, str] | None = None,
) -> M3:
    """Train a model on a task, and return it with float32 weights.

    The state is kept in `folder`/states; a run whose folder has one goes on from there, and draws and learns what it
    would have without the stop. An error of the task keeps the state too. A folder's run goes on with the settings that
    it began with alone, but for `steps` and `save_every`.

    On several hosts every process calls this alike, with the task that `m3jax.train.shared_task` gives it: all draw,
    learn and keep their parts of the state.

    Args:
      model: to begin with, in any float dtype; with `settings.loss.kl_weight` it is the reference policy throughout.
      tokenizer, template: of the model; a task whose prompts are texts needs no template.
      task: prompts and rewards.
      settings: of the run.
      folder: of the states.
      metrics: a file of JSON lines, one a round; lines of rounds that are repeated after a stop are replaced. None
        writes none, as on all hosts but one.
      say: is told a line a round.
      origin: what the run begins with and reads, by name; a folder's run goes on with the same alone.

    Returns:
      The trained model.

    Raises:
      ValueError: a prompt that does not fit the context, a folder of another run, a reward that is none
        (`TaskError`), answers that a mesh's data axis does not divide, or the invariant mode on one.
      PartedPolicies: in the invariant mode, trainer and engine differ.
    """
    data = 1 if model.mesh is None else model.mesh.shape["data"]
    if settings.prompts * settings.answers % data:
        raise ValueError(
            f"prompts = {settings.prompts} and answers = {settings.answers}: their product must be a multiple of the "
            f"mesh's data={data}"
        )
    if settings.invariant and data > 1:
        # A request's pages lie on all devices of the axis, so its attention is a sum of their parts; the trainer's rows
        # are one device's each, and their attention is not.
        raise ValueError(f"invariant on a mesh with data={data}: trainer and engine add in other orders there; give "
                         "the devices to its other axes")  # fmt: skip
    rows = task.prompts()
    encoded = [_encode(row, number, tokenizer, template) for number, row in enumerate(rows)]
    longest = max(map(len, encoded))
    turns = settings.turns if task.has_tools else 1
    new = turns * settings.max_new_tokens + (turns - 1) * settings.tool_tokens
    length = -(-(longest + new) // model.config.index_block_size) * model.config.index_block_size
    if length > model.config.max_position_embeddings:
        of_turns = f" in {turns} turns and tool_tokens = {settings.tool_tokens}" if turns > 1 else ""
        raise ValueError(
            f"the longest prompt has {longest} tokens, which with max_new_tokens = {settings.max_new_tokens}{of_turns} "
            f"are more than the model's context of {model.config.max_position_embeddings}: shorten one of the two"
        )
    check_same_run(Path(folder), dict(origin or {}) | settings.decisive)
    if settings.invariant:
        model = model.with_invariance()
    reference = cast_weights(model, "float32") if settings.loss.kl_weight else None
    # The loss of a policy has no gradient for the index branch, which weight decay would move all the same (T32).
    optimizer = make_optimizer(settings.schedule, settings.weight_decay, frozen_index=True)
    state = init_state(model, optimizer)
    with states_in(folder) as keeper:
        state = restored(keeper, state)
        lines = MetricLines(metrics, int(state.step) // settings.epochs)
        engine = build_engine(
            cast_weights(state.model, settings.compute_dtype),
            rows=settings.rows or settings.prompts * settings.answers,
            length=length,
            records=settings.record,
            all_record=True,
            steps_per_call=16,
        )
        ends = stop_ids(tokenizer, model.config.eos_token_id)
        asked = Params(
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            stop_ids=ends,
            record=settings.record,
        )
        writer = TurnWriter(tokenizer, template, ends)
        layout = layout_of_groups(list(map(len, encoded)), new, length, settings, model)
        do_round = Rounds(
            engine, task, rows, encoded, writer, asked, optimizer, settings, length, turns, reference, layout
        )
        round_number = int(state.step) // settings.epochs
        try:
            while round_number < settings.steps:
                state, line = do_round(round_number, state)
                round_number += 1
                lines.write(line)
                say(_shown(line, settings.steps))
                if round_number % settings.save_every == 0 or round_number == settings.steps:
                    keep(keeper, int(state.step), state)
        except (KeyboardInterrupt, TaskError) as error:
            # Each host is told of a task's error, none of an interrupt.
            if keep_whole(keeper, state, is_told=isinstance(error, TaskError)):
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
      writer: reads answers, and writes what stands between turns.
      asked: parameters of each answer.
      optimizer: of the steps.
      settings: of the run.
      length: tokens of an episode, at most.
      turns: of an episode, at most.
      reference: the policy that the loss measures a divergence from; None for none.
      layout: of groups whose prompt is computed once (`layout_of_groups`); None computes each episode alone.
    """

    engine: Engine
    task: TrainingTask
    rows: Sequence[Mapping[str, Any]]
    encoded: Sequence[tuple[int, ...]]
    writer: "TurnWriter"
    asked: Params
    optimizer: optax.GradientTransformation
    settings: RunSettings
    length: int
    turns: int = 1
    reference: M3 | None = None
    layout: GroupLayout | None = None

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
            written: dict[int, list[dict[str, Any]]] = {i: [] for i in range(len(asked_rows))}
            respond = partial(self._respond, asked_rows, written) if self.turns > 1 else None
            prompts = [self.encoded[i] for i in chosen]
            groups = roll_out(
                *(self.engine, prompts, self.asked, settings.answers, seed, respond, self.turns, self.length)
            )
            drawn = time.perf_counter()
            line.say(f"round {number + 1}: rewarding")
            episodes = [episode for group in groups for episode in group]
            answers = [self._answer(asked_rows[i], episode, written[i]) for i, episode in enumerate(episodes)]
            parts = self.task.reward_parts(asked_rows, answers, settings.answers)
            weighted = [self.task.weights[name] * np.array(values) for name, values in parts.items()]
            rewards = np.sum(weighted, axis=0).reshape(len(chosen), settings.answers)
            line.say(f"round {number + 1}: learning")
            if self.layout is None:
                batch = as_batch(episodes, self.length, settings.replay)
            else:
                batch = as_batch_of_groups(groups, self.layout, settings.replay)
            batch["advantages"] = group_advantages(rewards, settings.baseline).reshape(-1)
            state, metrics, own = self._learn(state, batch)
            away = mismatch(batch["sampler"], own, batch["mask"])
            if settings.invariant:
                check_bits(batch | {"old": own})
            self.engine.update(cast_weights(state.model, settings.compute_dtype))
            jax.block_until_ready(state.step)
        new_tokens = int(batch["mask"].sum())
        out: dict[str, int | float] = {"step": number + 1}
        out |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        if len(parts) > 1:
            out |= {f"reward_mean.{name}": float(np.mean(values)) for name, values in parts.items()}
        if self.reference is not None:
            out["kl_reference"] = float(metrics["kl"])
        out |= {"loss": float(metrics["policy"]), "grad_norm": float(metrics["grad_norm"])}
        out |= {"clipped": float(metrics["clipped"]), "kept": float(metrics["kept"])}
        out |= away | {"new_tokens": new_tokens, "tokens_mean": new_tokens / len(episodes)}
        return state, out | {"seconds": time.perf_counter() - began, "seconds_drawing": drawn - began}

    def _learn(
        self, state: TrainState, batch: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any], Float32[np.ndarray, "B T"]]:
        """Take the optimiser steps of a round.

        The first step of a round has the weights that drew: what it reads is the trainer's old policy, which later
        steps take their ratio against, so that the tokens are read once a step.

        Args:
          state: donated.
          batch: from `as_batch` or `as_batch_of_groups`, with advantages; not changed.

        Returns:
          (state, metrics of the last step, the trainer's log-probabilities of the tokens before the first step).
        """
        settings, own, mesh = self.settings, None, state.model.mesh
        loss_fn = RolloutLoss(settings.loss, settings.compute_dtype, settings.remat, settings.temperature)
        batch = batch | {"old": batch["sampler"], "is_on_policy": np.array(settings.old == "trainer")}
        batch = on_data_axis(batch, mesh)
        if self.reference is not None:
            batch["reference"] = read_batch(self.reference, batch, settings.compute_dtype, settings.temperature)
        for _ in range(settings.epochs):
            state, metrics = train_step(state, batch, optimizer=self.optimizer, loss_fn=loss_fn, balance_rate=0.0)
            if own is None:
                own = read(metrics["logprobs"])
                changes = {"is_on_policy": np.array(False)} | ({"old": own} if settings.old == "trainer" else {})
                batch = batch | on_data_axis(changes, mesh)
        return state, metrics, own

    def _answer(self, row: Mapping[str, Any], episode: Episode, written: list[dict[str, Any]]) -> Any:
        """Return an answer as the task reads it: a text; behind messages the message, or, with tools, all messages."""
        tokens = np.array(episode.tokens)[last_turn(episode)].tolist()
        if "prompt" in row:
            return self.writer.text(tokens)
        message = self.writer.message(row, tokens)
        return [*written, message] if self.task.has_tools else message

    def _respond(
        self,
        rows: Sequence[Mapping[str, Any]],
        written: dict[int, list[dict[str, Any]]],
        going: Sequence[tuple[int, Episode]],
    ) -> list[tuple[int, ...] | None]:
        """Return what tools write behind the answers that call some; None behind the others.

        Args:
          rows: of all episodes' prompts.
          written: by the index of an episode, its messages behind the prompt; those of this turn are added.
          going: episodes with their indices.
        """
        messages = {
            i: self.writer.message(rows[i], np.array(episode.tokens)[last_turn(episode)].tolist())
            for i, episode in going
            if "messages" in rows[i]
        }
        calls = [(i, call) for i, message in messages.items() for call in message.get("tool_calls") or ()]
        asked = [(call["function"]["name"], arguments_of(call), rows[i]) for i, call in calls]
        texts = self.task.answer_calls(asked) if asked else []
        results: dict[int, list[dict[str, Any]]] = {}
        for (i, call), text in zip(calls, texts, strict=True):
            results.setdefault(i, []).append({"role": "tool", "tool_call_id": call["id"], "content": text})
        out: list[tuple[int, ...] | None] = []
        for i, episode in going:
            if i not in results or episode.tokens[-1] not in self.asked.stop_ids:
                out.append(None)
                continue
            earlier = [*rows[i]["messages"], *written[i]]
            out.append(self.writer.between(rows[i], earlier, messages[i], results[i], episode.tokens[-1]))
            if len(episode.tokens) + len(out[-1]) >= self.length:
                out[-1] = None
            else:
                written[i] += [messages[i], *results[i]]
        return out


@dataclass(frozen=True)
class TurnWriter:
    """Answers as messages, and the tokens that stand between a call of a tool and the next answer.

    Attributes:
      tokenizer, template: of the model; a task whose prompts are texts needs no template.
      stop_ids: that end an answer.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_ids: tuple[int, ...]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer."""
        return self.tokenizer.decode(tokens[:-1] if tokens[-1] in self.stop_ids else tokens)

    def message(self, row: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
        """Return the message that the model wrote, parsed; its calls are numbered.

        Args:
          row: of the prompt.
          tokens: of one answer.
        """
        is_whole = tokens[-1] in self.stop_ids
        parser = OutputParser(tools=row.get("tools"), thinking_mode=row.get("thinking_mode"))
        text = self.tokenizer.decode(tokens[:-1] if is_whole else tokens, skip_special_tokens=False)
        return Message.of([*parser.feed(text), *parser.finish(is_cut=not is_whole)]).as_dict()

    def between(
        self,
        row: Mapping[str, Any],
        earlier: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        stop_id: int,
    ) -> tuple[int, ...]:
        """Return the tokens behind an answer up to the next one: what tools wrote, as the template has it.

        The answer's own tokens stay as they were drawn: nothing is rendered or encoded again.

        Args:
          row: of the prompt.
          earlier: messages before the answer.
          message: the answer.
          results: the tools' messages.
          stop_id: the token that the answer ended with.

        Raises:
          ValueError: a template that changes earlier turns, or writes an answer without its last token.
        """
        render = partial(self.template.render, tools=row.get("tools"), thinking_mode=row.get("thinking_mode"))
        before = render([*earlier, message], add_generation_prompt=False)
        after, stop = render([*earlier, message, *results]), self.tokenizer.decode([stop_id], skip_special_tokens=False)
        if not after.startswith(before) or stop not in before:
            raise ValueError(
                f"{self.template.name} writes an earlier answer in another way once a tool has answered: episodes of "
                "several turns need one that does not"
            )
        return tuple(self.tokenizer.encode(after[before.rindex(stop) + len(stop) :]))


def last_turn(episode: Episode) -> slice:
    """Return the columns of an episode's last answer: its tokens behind the last one that others wrote."""
    return slice(int(np.flatnonzero(~episode.is_drawn)[-1]) + 1, None)


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in OpenAI's layout."""
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else dict(arguments)


def layout_of_groups(
    prompt_lengths: Sequence[int], new_tokens: int, length: int, settings: RunSettings, model: M3
) -> GroupLayout | None:
    """Return the layout in which a run's groups share their prompts, or None where each episode is computed alone.

    That is so in the invariant mode, where a token's bits are those of its sequence alone; where groups are not whole
    rows of a mesh's data axis; and where prompts are too short to spare tokens.

    Args:
      prompt_lengths: of all prompts of the task.
      new_tokens: of an episode behind its prompt, at most.
      length: tokens of an episode that is computed alone.
      settings: of the run.
      model: its first policy.
    """
    data = 1 if model.mesh is None else model.mesh.shape["data"]
    layout = GroupLayout.of(prompt_lengths, new_tokens, model.config.index_block_size)
    spares = layout.prompt_slots > 0 and layout.tokens(settings.answers) < settings.answers * length
    return layout if spares and not settings.invariant and settings.prompts % data == 0 else None


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
