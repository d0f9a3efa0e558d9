"""Rollouts as a trainer reads them: rows of tokens, who wrote them, and the choices that drew them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from m3jax.decoding import Engine, Generation, Params
from m3jax.decoding.protocols import CHOICES, DRAWN_LOGPROBS, SUPPORT
from m3jax.execution import Remat
from m3jax.model import M3, Choices
from m3jax.train.losses import token_logprobs
from m3jax.train.policy import PolicyLoss
from m3jax.train.programs import jit_for_training
from m3jax.train.shared_prompts import GroupLayout, answer_logprobs, shared_tokens
from m3jax.train.step import cast_weights, check_trainable


@dataclass(frozen=True)
class Episode:
    """A prompt, and all that was written behind it by the policy and by others, such as tools.

    Attributes:
      tokens: the prompt, and what followed.
      is_drawn: the tokens that the policy drew; nothing else is ever in a loss.
      logprobs: of the drawn tokens under the sampler: after its knobs where that was recorded ("drawn_logprobs"), else
        before them; 0 elsewhere.
      choices: the experts and blocks that drew the tokens, of one row; None where none were recorded.
      support: the tokens that could have been drawn in the place of each, as bits; -1, all, where nothing was drawn.
        None where none was recorded.
      version: of the weights that drew the oldest token.
    """

    tokens: tuple[int, ...]
    is_drawn: Bool[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    choices: Choices | None = None
    support: Int32[np.ndarray, "T W"] | None = None
    version: int = 0

    @classmethod
    def of(cls, prompt: Sequence[int], generation: Generation) -> "Episode":
        """Return the episode of one request.

        Args:
          prompt: its tokens.
          generation: its result.

        Raises:
          ValueError: a request without new tokens.
        """
        if not generation.tokens:
            raise ValueError(f"a request that ended without a token ({generation.stop_reason}) is no episode")
        tokens, before = (*prompt, *generation.tokens), len(prompt)
        is_drawn = np.arange(len(tokens)) >= before
        records = generation.records
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[before:] = records.get(DRAWN_LOGPROBS, generation.logprobs)
        of_choices = {name: record for name, record in records.items() if name in CHOICES}
        choices = Choices.of_records(of_choices, before) if of_choices else None
        support = None
        if SUPPORT in records:
            support = np.full((len(tokens), records[SUPPORT].shape[1]), -1, np.int32)
            support[before:] = records[SUPPORT]
        return cls(tokens, is_drawn, logprobs, choices, support, min(generation.versions))

    def then(self, written: Sequence[int], generation: Generation) -> "Episode":
        """Return the episode after others wrote some tokens behind it and the policy drew more.

        Args:
          written: by a tool or a template; in no loss.
          generation: of a request whose prompt was all tokens so far and what was written.

        Raises:
          ValueError: a request without new tokens, or without the records that this one has.
        """
        longer, count = Episode.of((*self.tokens, *written), generation), len(self.tokens)
        longer.is_drawn[:count], longer.logprobs[:count] = self.is_drawn, self.logprobs
        for name in (*CHOICES, SUPPORT):
            if (earlier := self.record(name)) is None:
                continue
            if (record := longer.record(name)) is None:
                raise ValueError(f"a request of a later turn has no record of {name}, which the first one has")
            is_given = earlier.reshape(count, -1)[:, 0] != -1 if name != SUPPORT else self.is_drawn
            record[:count][is_given] = earlier[is_given]
        return replace(longer, version=min(self.version, longer.version))

    def record(self, name: str) -> Int[np.ndarray, "T ..."] | None:
        """Return what was recorded under a name at each token; None where nothing was."""
        if name == SUPPORT:
            return self.support
        of_choices = None if self.choices is None else getattr(self.choices, name)
        return None if of_choices is None else np.asarray(of_choices[0])


# What stands behind each of some episodes before the policy goes on, by their indices; None ends an episode.
Respond = Callable[[Sequence[tuple[int, Episode]]], Sequence[Sequence[int] | None]]


def roll_out(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Params,
    count: int,
    seed: int = 0,
    respond: Respond | None = None,
    turns: int = 1,
    room: int | None = None,
) -> list[list[Episode]]:
    """Draw some answers to each prompt, each prompt computed once.

    Args:
      engine: serves the policy; with `params.record` it records what a trainer replays.
      prompts: token ids.
      params: of every answer, its seed aside.
      count: answers to each prompt.
      seed: of the whole: answer j to prompt i has seed + i count + j, in all its turns: a draw depends on its position
        too.
      respond: what tools write behind the answers; None where each answer is all of its episode.
      turns: of the policy in an episode, at most.
      room: tokens that an episode can have; one whose next turn has no room for a token ends without it. None is the
        engine's.

    Returns:
      The episodes of each prompt.

    Raises:
      ValueError: what the engine refuses; then no request is left in it.
    """
    handles: list[list[int]] = []
    try:
        for i, prompt in enumerate(prompts):
            sampling = replace(params.sampling, seed=(seed + i * count) % 2**32)
            handles.append(engine.add(prompt, replace(params, sampling=sampling), n=count))
    except ValueError:
        for handle in (handle for of_prompt in handles for handle in of_prompt):
            engine.abort(handle)
        raise
    results = engine.run()
    episodes = [
        Episode.of(prompt, results[handle])
        for prompt, of_prompt in zip(prompts, handles, strict=True)
        for handle in of_prompt
    ]
    going = list(enumerate(episodes)) if respond is not None else []
    room = engine.max_length if room is None else room
    for _ in range(turns - 1):
        asked: dict[int, tuple[int, Sequence[int]]] = {}
        for (i, episode), written in zip(going, respond(going) if going else (), strict=True):
            if written is None or len(episode.tokens) + len(written) >= room:
                continue
            prompt = (*episode.tokens, *written)
            sampling = replace(params.sampling, seed=(seed + i) % 2**32)
            new = min(params.max_new_tokens, room - len(prompt))
            asked[i] = engine.add(prompt, replace(params, sampling=sampling, max_new_tokens=new)), written
        results = engine.run() if asked else {}
        for i, (handle, written) in asked.items():
            episodes[i] = episodes[i].then(written, results[handle])
        going = [(i, episodes[i]) for i in asked]
    return [episodes[i : i + count] for i in range(0, len(episodes), count)]


def as_batch(episodes: Sequence[Episode], length: int, replay: Sequence[str] = ()) -> dict[str, Any]:
    """Return episodes as the rows of a batch.

    Args:
      episodes: B of them.
      length: T, columns of the rows: one number for all batches of a run, since each one has its program.
      replay: what the trainer takes from the records: "expert_ids", "blocks", "support". A token without a record, such
        as those of a prompt, chooses for itself, out of all tokens.

    Returns:
      tokens int32 [B T], right-padded with 0; mask bool [B T-1], the targets (all tokens of a row but the first) that
      the policy drew; sampler float32 [B T-1], their log-probabilities; and, with `replay`, choices, and support int32
      [B T-1 W].

    Raises:
      ValueError: an episode of more tokens, or without what is to be replayed.
    """
    batch = len(episodes)
    tokens, is_drawn = np.zeros((batch, length), np.int32), np.zeros((batch, length), bool)
    logprobs = np.zeros((batch, length), np.float32)
    replayed: dict[str, np.ndarray] = {}
    for row, episode in enumerate(episodes):
        count = len(episode.tokens)
        if count > length:
            raise ValueError(f"an episode has {count} tokens, and the rows of the batch {length}: give more columns")
        tokens[row, :count], is_drawn[row, :count] = episode.tokens, episode.is_drawn
        logprobs[row, :count] = episode.logprobs
        for name in replay:
            record = episode.record(name)
            if record is None:
                raise ValueError(f"replay of {name}: an episode has no record of them; ask for Params(record=...)")
            if name not in replayed:
                replayed[name] = np.full((batch, length, *record.shape[1:]), -1, np.int32)
            replayed[name][row, :count] = record
    out: dict[str, Any] = dict(tokens=tokens, mask=is_drawn[:, 1:], sampler=logprobs[:, 1:])
    if SUPPORT in replayed:
        out[SUPPORT] = replayed.pop(SUPPORT)[:, 1:]
    return out | ({"choices": Choices(**replayed)} if replayed else {})


def as_batch_of_groups(
    groups: Sequence[Sequence[Episode]], layout: GroupLayout, replay: Sequence[str] = ()
) -> dict[str, Any]:
    """Return groups of episodes as a batch in which each prompt stands once (`m3jax.train.shared_prompts`).

    A row is an episode without the part of its prompt that the group shares; all but the prompts is `as_batch`'s, of
    these columns.

    Args:
      groups: G of them, of as many episodes each, B in all; those of a group begin with one prompt.
      layout: one for all batches of a run.
      replay: as in `as_batch`.

    Returns:
      prompts int32 [G S], the shared parts, each at the end of its row; tokens int32 [B W]; positions int32 [B W], of
      these in their episodes, -1 for padding; mask, sampler, choices and support of `tokens`, as of `as_batch`.

    Raises:
      ValueError: groups of different sizes, a group of several prompts, what the layout has no room for, or an episode
        without what is to be replayed.
    """
    if len({len(group) for group in groups}) != 1:
        raise ValueError(f"groups of {sorted({len(group) for group in groups})} episodes: all need as many")
    prompts = np.zeros((len(groups), layout.prompt_slots), np.int32)
    shared: list[int] = []
    for number, group in enumerate(groups):
        count = shared_tokens(min(int(np.argmax(episode.is_drawn)) for episode in group), layout.block_size)
        if len({episode.tokens[:count] for episode in group}) > 1:
            raise ValueError(f"the episodes of group {number} begin with different prompts: they are no group")
        own = max(len(episode.tokens) for episode in group) - count
        if count > layout.prompt_slots or own > layout.width:
            raise ValueError(
                f"group {number} shares {count} tokens and an episode of it has {own} more; the layout has room for "
                f"{layout.prompt_slots} and {layout.width}: make it for longer prompts or more new tokens"
            )
        prompts[number, layout.prompt_slots - count :] = group[0].tokens[:count]
        shared += [count] * len(group)
    episodes = [episode for group in groups for episode in group]
    whole = as_batch(episodes, layout.prompt_slots + layout.width, replay)
    columns = np.array(shared)[:, None] + np.arange(layout.width)  # [B W], of the whole episodes
    is_token = columns < np.array([len(episode.tokens) for episode in episodes])[:, None]
    rows = np.arange(len(episodes))[:, None]

    def of_columns(x: Any) -> np.ndarray:
        """Return what `tokens` have of an array of all tokens, or of all but the first."""
        width = layout.width if x.shape[1] == whole["tokens"].shape[1] else layout.width - 1
        return x[rows, columns[:, :width]]

    positions = np.where(is_token, columns, -1).astype(np.int32)
    return {"prompts": prompts, "positions": positions} | jax.tree.map(of_columns, whole)


def logprobs_of_batch(
    model: M3, batch: dict[str, Any], remat: Remat = False, temperature: float | None = None
) -> Float[Array, "B C"]:
    """Return the log-probabilities of a batch from `as_batch`, or `as_batch_of_groups`: [B T-1], with gradients.

    Args:
      model: as it computes.
      batch: its rows.
      remat, temperature: as in `token_logprobs`.
    """
    tokens, more = jnp.asarray(batch["tokens"]), dict(support=batch.get(SUPPORT), temperature=temperature)
    if "prompts" in batch:
        prompts, positions = jnp.asarray(batch["prompts"]), jnp.asarray(batch["positions"])
        return answer_logprobs(model, prompts, tokens, positions, batch.get("choices"), remat, **more)
    return token_logprobs(model, tokens, batch.get("choices"), remat, **more)


@partial(jit_for_training, static_argnames=("compute_dtype", "temperature"))
def read_batch(
    model: M3, batch: dict[str, Any], compute_dtype: str = "float32", temperature: float | None = None
) -> Float[Array, "B C"]:
    """Return the trainer's own log-probabilities of a batch (`logprobs_of_batch`).

    Args:
      model, compute_dtype: as in `read_logprobs`.
      batch, temperature: as in `logprobs_of_batch`.
    """
    return logprobs_of_batch(cast_weights(model, compute_dtype), batch, temperature=temperature)


def read_logprobs(
    model: M3,
    tokens: Int32[Array, "B T"],
    choices: Choices | None = None,
    compute_dtype: str = "float32",
    support: Int32[Array, "B T-1 W"] | None = None,
    temperature: float | None = None,
) -> Float[Array, "B T-1"]:
    """Return the trainer's own log-probabilities of some rows (`token_logprobs`).

    Args:
      model: master weights, in the mode in which the trainer computes.
      tokens: of the rows.
      choices: replayed, if there are any.
      compute_dtype: that the weights are cast to, as the loss casts them.
      support, temperature: as in `token_logprobs`.
    """
    return read_batch(model, {"tokens": tokens, "choices": choices, SUPPORT: support}, compute_dtype, temperature)


@dataclass(frozen=True)
class RolloutLoss:
    """The loss of a policy over a batch of rollouts, for `m3jax.train.step.train_step`.

    Attributes:
      policy: the loss over log-probabilities.
      compute_dtype: activations and weights of the forward pass; the master weights stay float32.
      remat: what the backward pass recomputes (`m3jax.execution.Compute`): the same choices where they are replayed.
      temperature: as in `token_logprobs`.
    """

    policy: PolicyLoss = field(default_factory=PolicyLoss)
    compute_dtype: str = "float32"
    remat: Remat = False
    temperature: float | None = None

    def __call__(self, model: M3, batch: dict[str, Any]) -> tuple[Float[Array, ""], dict[str, Any]]:
        """Return the loss of a batch and its parts.

        Args:
          model: float32 master weights.
          batch: from `as_batch` or `as_batch_of_groups`, with advantages [B] and old [B T-1], and reference [B T-1]
            where the loss has one. Where there is a flag is_on_policy and it is true, the policy is its own old one,
            whatever old has.

        Returns:
          (loss, parts): those of the policy's loss, and logprobs [B T-1], what the policy read before the step.

        Raises:
          ValueError: weights in MXFP8, which no step could move.
        """
        check_trainable(model)
        model = cast_weights(model, self.compute_dtype)
        new = logprobs_of_batch(model, batch, self.remat, self.temperature)
        names = ("old", "sampler", "advantages", "mask", "reference")
        given = {name: jnp.asarray(batch[name]) for name in names if batch.get(name) is not None}
        own = jax.lax.stop_gradient(new)
        if "is_on_policy" in batch:
            given["old"] = jnp.where(batch["is_on_policy"], own, given["old"])
        loss, parts = self.policy(new, **given)
        return loss, {**parts, "logprobs": own}


def check_replay(names: Sequence[str]) -> tuple[str, ...]:
    """Return what is to be replayed; ValueError for a name that is none."""
    if unknown := [name for name in names if name not in (*CHOICES, SUPPORT)]:
        raise ValueError(f"replay of {unknown[0]!r}: choose of {', '.join((*CHOICES, SUPPORT))}")
    return tuple(names)
