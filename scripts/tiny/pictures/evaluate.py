"""The share of questions about pictures that a model answers right: greedily, compared character by character."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tiny.dialogues import MODES
from tiny.pictures.batches import packed_pictures, task_places, task_tokens
from tiny.pictures.features import Pictures, picture_features
from tiny.pictures.tasks import KINDS, PictureTask, draw_picture_task

from m3jax.media import PlaceholderIds
from m3jax.model import M3
from m3jax.text import ChatTemplate, OutputParser, Tokenizer

HELD_OUT_SEED = 2**31  # no training run has it
_LENGTH = 256  # tokens of a prompt and its answer
_NEW_TOKENS = 64  # the longest answer, which lists four shapes before it counts them, has about 50


def held_out_tasks(count: int, *, new_pairs: bool = False) -> list[PictureTask]:
    """Pictures that no training batch has, a question each: so many of each kind, in all thinking modes.

    Args:
      count: of each kind.
      new_pairs: show pairs of colour and shape, and numbers, that are kept out of training; else new pictures of those
        that are in it.
    """
    rng = np.random.default_rng([HELD_OUT_SEED, int(new_pairs)])
    return [
        draw_picture_task(rng, kind, MODES[number % len(MODES)], held_out=new_pairs, most_turns=1)
        for kind in KINDS
        for number in range(count)
    ]


def picture_accuracy(
    model: M3, tokenizer: Tokenizer, template: ChatTemplate, tasks: Sequence[PictureTask], batch: int = 64
) -> dict[str, float]:
    """The share of first questions that are answered right.

    An answer is right if its text is that of the task, character by character, and its turn ends; what is thought does
    not matter.

    Args:
      model: with a tower; it runs without a cache.
      tokenizer: the model's.
      template: its chat template.
      tasks: that it was not trained on.
      batch: questions that are answered at once.

    Returns:
      From 0 to 1 by kind, and for "all".
    """
    answers: list[str | None] = []
    for begin in range(0, len(tasks), batch):
        answers += greedy_answers(model, tokenizer, template, tasks[begin : begin + batch], batch)
    is_right = np.array([answer == task.questions[0][2] for task, answer in zip(tasks, answers, strict=True)])
    kinds = np.array([task.kind for task in tasks])
    shares = {kind: is_right[kinds == kind].mean() for kind in dict.fromkeys(kinds.tolist())}
    return {kind: round(float(share), 4) for kind, share in (shares | {"all": is_right.mean()}).items()}


def greedy_answers(
    model: M3, tokenizer: Tokenizer, template: ChatTemplate, tasks: Sequence[PictureTask], batch: int
) -> list[str | None]:
    """Return the model's answer to the first question of each task; None where the turn does not end.

    Args:
      model, tokenizer, template: as in `picture_accuracy`.
      tasks: `batch` of them at most.
      batch: rows of the one program that is compiled.
    """
    ids = PlaceholderIds.of_tokenizer(tokenizer)
    tokens, lengths = np.full((batch, _LENGTH), tokenizer.eos_id, np.int32), np.ones(batch, np.int32)
    places = []
    for number, task in enumerate(tasks):
        whole, is_written = task_tokens(task, tokenizer, template, ids)
        prompt = whole[: np.argmax(is_written)]
        tokens[number, : len(prompt)], lengths[number] = prompt, len(prompt)
        places.append(number * _LENGTH + task_places(task, prompt, ids))
    pictures = packed_pictures(tasks, places, batch)
    features = _features(model, jax.tree.map(jnp.asarray, pictures))
    written = np.asarray(_greedy(model, tokens, lengths, features, pictures.places.reshape(-1), tokenizer.eos_id))
    answers: list[str | None] = []
    for number, task in enumerate(tasks):
        new = written[number, lengths[number] : lengths[number] + _NEW_TOKENS].tolist()
        if tokenizer.eos_id not in new:
            answers.append(None)
            continue
        text = tokenizer.decode(new[: new.index(tokenizer.eos_id)], skip_special_tokens=False)
        answers.append(OutputParser(thinking_mode=task.thinking_mode).parse(text).content)
    return answers


@jax.jit
def _features(model: M3, pictures: Pictures) -> Float[Array, "SR D"]:
    features = picture_features(model, pictures)
    return features.reshape(-1, features.shape[-1])


@partial(jax.jit, static_argnames="end")
def _greedy(
    model: M3,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    features: Float[Array, "R D"],
    places: Int[Array, " R"],
    end: int,
) -> Int[Array, "B T"]:
    """Return rows with their most probable continuations: the whole model runs for each token, without a cache."""
    rows = jnp.arange(tokens.shape[0])

    def is_open(carry: tuple[Array, Array, Array]) -> Array:
        _, count, ended = carry
        return (count < _NEW_TOKENS) & ~jnp.all(ended)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tokens, count, ended = carry
        hidden, _ = model.hidden(tokens, embeddings=model.embed(tokens, features, places))
        last = jnp.minimum(lengths + count, tokens.shape[1]) - 1  # [B]
        chosen = jnp.argmax(model.unembed(hidden[rows, last]), axis=-1).astype(tokens.dtype)  # [B]
        return tokens.at[rows, last + 1].set(chosen, mode="drop"), count + 1, ended | (chosen == end)

    return jax.lax.while_loop(is_open, step, (tokens, jnp.int32(0), jnp.zeros(len(rows), bool)))[0]
