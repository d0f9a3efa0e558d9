"""Pictures to train a tower with: questions have the answers that the pixels give, features stand where they belong."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.embedded import TOKENIZER
from tiny.losses import TinyLoss
from tiny.pictures import (
    KINDS,
    PictureBatches,
    PictureTask,
    draw_picture_task,
    greedy_answers,
    held_out_tasks,
    naming_loss,
    packed_pictures,
    picture_accuracy,
    task_tokens,
    with_tower,
)
from tiny.pictures.draw import COLOURS, SHAPES
from tiny.pictures.features import normalized_rows
from tiny.pictures.tasks import MOST_PATCHES, is_held_out, is_held_out_number

from m3jax.assets import embedded_path
from m3jax.media import PlaceholderIds, expand_tokens, process_image, process_video
from m3jax.text import ChatTemplate
from m3jax.train.losses import next_token_loss
from m3jax.train.step import init_state, make_optimizer, train_step
from m3jax.vision import VisionConfig

TEMPLATE = ChatTemplate.from_folder(embedded_path())
IDS = PlaceholderIds.of_tokenizer(TOKENIZER)
TOWER = VisionConfig.tiny(
    hidden_size=48, num_hidden_layers=1, intermediate_size=64, image_token_id=IDS.image, video_token_id=IDS.video
)


@pytest.fixture(scope="module")
def model():
    """One that sees, with so few words that its head is small."""
    config = tiny.config("M", vocab_size=2048, index_block_size=16, index_topk_blocks=4, bos_token_id=0)
    return with_tower(tiny.model(config), TOWER, seed=0).with_schedule("mask")


def tasks_of(kind: str | None, count: int, **options) -> list[PictureTask]:
    rng = np.random.default_rng(1)
    return [draw_picture_task(rng, kind, **options) for _ in range(count)]


# What is drawn


def nearest_colour(pixels: np.ndarray) -> str:
    names = list(COLOURS)
    return names[np.argmin([np.abs(pixels - COLOURS[name]).sum() for name in names])]


def test_a_picture_answers_its_questions():
    """Colour and motion are read off the pixels; a shape on its left half is not said to be on the right."""
    for task in tasks_of("what", 12):
        frame, colour = task.frames[0].astype(float), task.questions[0][2].split()[1]
        border = np.median(frame[[0, -1]].reshape(-1, 3), axis=0)
        differs = np.abs(frame - border).sum(axis=-1)
        shape = frame[differs > 0.7 * differs.max()]
        assert nearest_colour(np.median(shape, axis=0)) == colour
    for task in tasks_of("motion", 12, most_turns=1):
        first, last = (np.abs(frame - np.median(task.frames, axis=0)).sum(-1) for frame in task.frames[[0, -1]])
        middle = lambda moved: np.array(
            [np.average(axis, weights=moved.clip(60) - 60) for axis in np.indices(moved.shape)]
        )
        down, right = middle(last) - middle(first)
        way = ("right" if right > 0 else "left") if abs(right) > abs(down) else ("down" if down > 0 else "up")
        _, question, answer = task.questions[0]
        assert question == "What moves?" or answer == f"{way}.".capitalize()


def test_what_is_held_out_is_never_trained_on():
    rng = np.random.default_rng(0)
    pairs = {f"{colour} {shape}" for colour in COLOURS for shape in SHAPES if is_held_out(colour, shape)}
    assert len(pairs) == 6 and sum(is_held_out_number(n) for n in range(100)) == 10
    for number in range(160):
        task = draw_picture_task(rng, KINDS[number % len(KINDS)])
        assert not any(pair in task.reasoning for pair in pairs)
        assert task.kind != "number" or not is_held_out_number(int(task.questions[0][2][:-1]))
    for task in held_out_tasks(3, new_pairs=True):
        is_new = task.kind == "number" and is_held_out_number(int(task.questions[0][2][:-1]))
        assert is_new or sum(pair in task.reasoning for pair in pairs) == 1


def test_features_are_drawn_to_the_names_of_what_they_show():
    """The loss by its definition in numpy; small where each feature lies along its names; it moves no embedding."""
    batch = PictureBatches(TOKENIZER, TEMPLATE, 256, 2, 0)[0]["naming"]
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(2048, 32)).astype(np.float32)
    features = rng.normal(size=(*batch.shown[0].shape[:2], 32)).astype(np.float32)
    size, losses, towards = np.sqrt((embeddings**2).sum(-1).mean()), [], np.zeros_like(features)
    for shown, words in zip(*batch, strict=True):
        names = np.stack([embeddings[row[row >= 0]].mean(axis=0) for row in words])
        names /= np.linalg.norm(names, axis=-1, keepdims=True)
        scores = 16.0 / size * features @ names.T
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        losses += [-scores[s, r][shown[s, r]].mean() for s, r in np.argwhere(shown.any(axis=-1))]
        towards += size * (shown[..., None] * names).sum(axis=-2) / np.maximum(shown.sum(-1), 1)[..., None]
    naming, embeddings = jax.tree.map(jnp.asarray, batch), jnp.asarray(embeddings)
    loss, gradient = jax.value_and_grad(naming_loss, argnums=1)(jnp.asarray(features), embeddings, naming)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5) and not gradient.any()
    assert float(naming_loss(jnp.asarray(towards), embeddings, naming)) < 0.6 < 2.0 < float(loss)


# What the model reads


def test_a_task_is_what_the_processor_makes_of_its_picture():
    """Patches, grids, time stamps and placeholders are those that a user's image or video would have."""
    for task in (*tasks_of("count", 2), *tasks_of("motion", 2)):
        if task.is_clip:
            media = process_video(task.frames, source_fps=task.source_fps)
            kinds, token = {"videos": [media]}, IDS.video
        else:
            media = process_image(task.frames[0])
            kinds, token = {"images": [media]}, IDS.image
        prompt = TEMPLATE.encode(TOKENIZER, task.messages()[:1], thinking_mode=task.thinking_mode)
        expected = expand_tokens(prompt, **kinds, encode=TOKENIZER.encode, ids=IDS)
        tokens, is_written = task_tokens(task, TOKENIZER, TEMPLATE, IDS)
        assert tokens[: np.argmax(is_written)].tolist() == expected and (tokens == token).sum() == media.tokens
        pictures = packed_pictures([task], [np.flatnonzero(tokens == token).astype(np.int32)], 2)
        rows = len(media.patches)
        np.testing.assert_allclose(normalized_rows(jnp.asarray(pictures.patches[0, :rows])), media.patches, atol=2e-6)
        assert (pictures.segments[0] == np.where(np.arange(MOST_PATCHES) < rows, 0, -1)).all()
        assert (pictures.segments[1] == -1).all() and (pictures.places[1] == -1).all()


def test_batches_are_those_of_their_seed_and_number():
    make = partial(PictureBatches, TOKENIZER, TEMPLATE, 512, 2)
    first, again, other = make(seed=3)[2], make(seed=3)[2], make(seed=4)[2]
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first["tokens"], other["tokens"])
    with pytest.raises(ValueError, match="seq_len 128"):
        PictureBatches(TOKENIZER, TEMPLATE, 128, 2, 0)


def test_only_answers_count_and_every_placeholder_has_a_feature():
    batch = PictureBatches(TOKENIZER, TEMPLATE, 512, 2, 0)[0]
    places = batch["pictures"].places[batch["pictures"].places >= 0]
    flat = batch["tokens"][:, :-1].reshape(-1)
    is_placeholder = (flat == IDS.image) | (flat == IDS.video)
    assert sorted(places) == np.flatnonzero(is_placeholder).tolist()
    per_picture = (batch["pictures"].places >= 0).sum(axis=1)
    assert (per_picture * 4 == (batch["pictures"].segments == 0).sum(axis=1)).all()
    text = TOKENIZER.decode(batch["tokens"][:, 1:][batch["weights"] > 0], skip_special_tokens=False)
    assert set(np.unique(batch["weights"])) == {0.0, 1.0} and "?" not in text and "]<]image[>[" not in text
    assert text.count("[e~[") == (batch["tokens"] == TOKENIZER.encode("</mm:think>")[0]).sum()
    counts = batch["weights"] > 0
    is_last = counts[:, :-1] & ~counts[:, 1:]
    assert (batch["tokens"][:, 1:-1][is_last] == TOKENIZER.eos_id).all(), "an answer counts to the end of its turn"


# Training


def one_each(tasks: list[PictureTask]) -> dict:
    """A batch with a row for each dialogue."""
    tokens, weights, places = np.full((len(tasks), 129), TOKENIZER.eos_id, np.int32), np.zeros((len(tasks), 128)), []
    for row, task in enumerate(tasks):
        ids, is_written = task_tokens(task, TOKENIZER, TEMPLATE, IDS)
        tokens[row, : len(ids)], weights[row, : len(ids) - 1] = ids, is_written[1:]
        places.append(row * 128 + np.flatnonzero((ids == IDS.image) | (ids == IDS.video)).astype(np.int32))
    arrays = {"tokens": tokens, "weights": weights.astype(np.float32), "recall": np.zeros(weights.shape, bool)}
    return jax.tree.map(jnp.asarray, arrays | {"pictures": packed_pictures(tasks, places, len(tasks))})


def three_of_one_question() -> list[PictureTask]:
    """The same question on three pictures, whose answers differ."""
    drawn = tasks_of("what", 60, thinking_mode="disabled", most_turns=1)
    small = [task for task in drawn if task.frames.shape[1:3] == (56, 56)][:3]
    tasks = [replace(task, is_first=True) for task in small]
    assert len({task.questions for task in tasks}) == 3
    return tasks


def test_a_loss_is_of_each_row_s_own_picture(model):
    """That of the model's logits where a user gives it the pictures; and its gradient reaches the tower."""
    from m3jax import media

    tasks, loss_fn = three_of_one_question(), TinyLoss(compute_dtype="float32", kl_weight=0.0, remat=False)
    batch = one_each(tasks)
    (_, parts), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(model, batch)
    packed = media.batch([process_image(task.frames[0]) for task in tasks], config=model.config)
    logits = jax.jit(lambda model, tokens, media: model(tokens, media=media))(model, batch["tokens"][:, :-1], packed)
    expected = next_token_loss(logits, batch["tokens"][:, 1:], batch["weights"])
    np.testing.assert_allclose(parts["lm"], expected, rtol=1e-5)
    assert all(np.any(grad) for grad in jax.tree.leaves(grads.vision))


@pytest.mark.further
def test_pictures_alone_tell_answers_apart(model):
    """Answers go with the pictures when these change places.

    A tower whose features go to other rows, or that has no gradient, leaves one answer for all.
    """
    tasks = three_of_one_question()
    optimizer = make_optimizer(lambda step: 5e-3)
    loss_fn = TinyLoss(compute_dtype="float32", kl_weight=0.0, remat=False)
    batch, state, losses = one_each(tasks), init_state(model, optimizer), []
    for _ in range(45):
        state, metrics = train_step(state, batch, optimizer, loss_fn)
        losses.append(float(metrics["lm"]))
    assert losses[-1] < 0.01 * losses[0]
    answers = greedy_answers(state.model, TOKENIZER, TEMPLATE, tasks[::-1], 3)
    assert answers[::-1] == [task.questions[0][2] for task in tasks]
    wrong = replace(tasks[-1], questions=(("what", "What is this?", "A grey dot."),))
    found = picture_accuracy(state.model, TOKENIZER, TEMPLATE, [tasks[0], wrong, tasks[1]], 3)
    assert found == pytest.approx({"what": 2 / 3, "all": 2 / 3}, abs=1e-3)
