"""Pictures to train a tower with: questions have the answers that the pixels give, features stand where they belong."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.embedded import TOKENIZER
from tiny.dialogues import MODES
from tiny.losses import TinyLoss
from tiny.pictures import (
    KINDS,
    NAMES,
    Alternating,
    PictureBatches,
    PictureTask,
    draw_picture_task,
    greedy_answers,
    held_out_tasks,
    naming_loss,
    packed_pictures,
    picture_accuracy,
    picture_features,
    shown_names,
    task_tokens,
    with_tower,
)
from tiny.pictures.draw import COLOURS, SHAPES, Shape, draw_number, draw_shapes
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


def area(shape: Shape) -> float:
    """Pixels that a white shape covers of a black canvas."""
    return float(draw_shapes(np.zeros((60, 60, 3)), [shape], [np.full(3, 1.0)])[..., 0].sum())


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_its_area_wherever_and_however_it_is_turned(name):
    """By geometry: areas over the square of the radius, which no drawing knows."""
    star = 5 * np.sin(np.pi * 0.2) * np.sin(np.pi * 0.1) / np.sin(np.pi * 0.7)
    areas = {
        "circle": np.pi, "ring": np.pi * (1 - 0.5**2), "square": 1.6**2, "triangle": 0.75 * 3**0.5,
        "cross": 4 * 0.28 * (2 * 0.95 - 0.28), "star": star,
    }  # fmt: skip
    for x, y, angle in ((30.0, 30.0, 0.0), (25.3, 33.7, 0.2)):
        found = area(Shape(name, "red", x, y, 20.0, angle)) / 20.0**2
        assert found == pytest.approx(areas[name], rel=0.03)


def test_shapes_and_digits_all_differ():
    canvases = [draw_shapes(np.zeros((40, 40, 3)), [Shape(s, "red", 20.0, 20.0, 15.0)], [np.ones(3)]) for s in SHAPES]
    canvases += [draw_number(np.zeros((40, 40, 3)), n, 20.0, 20.0, 24.0, 2.0, 0.1, np.ones(3)) for n in range(10)]
    for place, one in enumerate(canvases):
        assert all(np.abs(one - other).mean() > 0.01 for other in canvases[:place])
    points_up = draw_shapes(np.zeros((40, 40, 3)), [Shape("star", "red", 20.0, 20.0, 15.0)], [np.ones(3)])[..., 0]
    assert points_up[:12].sum() < points_up[28:].sum(), "a star stands on two of its points"


def test_digits_are_those_of_a_display():
    """The segment in the middle is lit in 2, 3, 4, 5, 6, 8 and 9; upper left in all but 1, 2, 3 and 7."""
    lit = lambda n, y, x: draw_number(np.zeros((40, 40, 3)), n, 20.0, 20.0, 24.0, 2.0, 0.0, np.ones(3))[y, x, 0] > 0.5
    assert [n for n in range(10) if lit(n, 20, 20)] == [2, 3, 4, 5, 6, 8, 9]
    assert [n for n in range(10) if lit(n, 14, 14)] == [0, 4, 5, 6, 8, 9]
    assert [n for n in range(10) if lit(n, 26, 14)] == [0, 2, 6, 8]


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


def test_questions_of_all_kinds_and_modes_have_many_answers():
    tasks = tasks_of(None, 200)
    assert {task.kind for task in tasks} == set(KINDS) and {task.thinking_mode for task in tasks} == set(MODES)
    for kind in KINDS:
        answers = [answer for task in tasks for k, _, answer in task.questions if k == kind]
        most = max(answers.count(answer) for answer in answers)
        assert most < 0.75 * len(answers), f"{kind}: one answer is nearly always right"
    assert {len(task.questions) for task in tasks} == {1, 2, 3} and {task.is_first for task in tasks} == {True, False}


def names_shown(task: PictureTask) -> list[set[str]]:
    """Return the names that each token of a picture shows."""
    shown = shown_names(task)
    return [
        {
            name
            for group, found in zip(NAMES, shown, strict=True)
            for name, is_shown in zip(group, found[i], strict=True)
            if is_shown
        }
        for i in range(len(shown[0]))
    ]


def test_a_token_shows_what_its_pixels_show():
    """Its 28 x 28 pixels have the colour that it names, and where nothing is named no shape has its middle."""
    for task in tasks_of("what", 20):
        _, colour, shape = task.questions[0][2].lower().rstrip(".").split()
        frame, tokens = task.frames[0].astype(float), names_shown(task)
        cells = frame.reshape(frame.shape[0] // 28, 28, frame.shape[1] // 28, 28, 3).swapaxes(1, 2).reshape(-1, 784, 3)
        is_painted = np.abs(cells - COLOURS[colour]).max(axis=-1).mean(axis=-1)  # by token
        assert {colour, shape} <= tokens[np.argmin(is_painted)]
        assert all(names == set() or {colour, shape, "first"} <= names for names in tokens)


def test_names_of_places_are_those_of_the_answers():
    for task in tasks_of("place", 12, most_turns=1) + tasks_of("side", 12, most_turns=1):
        kind, question, answer = task.questions[0]
        about = [shape for shape in SHAPES if f"the {shape}" in question]
        where = {mark.names[1]: mark.names for mark in task.marks}
        if kind == "place":
            assert set(answer.lower().rstrip(".").split()) == set(where[about[0]][3:])
        else:
            one, other = (NAMES[-1].index(where[shape][2]) for shape in sorted(about, key=question.index))
            assert (one < other) == (answer == "Yes.")
    number = next(task for task in tasks_of("number", 9) if len(task.questions[0][2]) == 3)
    assert [mark.names[1:] for mark in number.marks] == list(
        zip(number.questions[0][2], ("first", "second"), strict=False)
    )


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


def test_one_batch_of_a_few_is_text():
    batches = Alternating(pictures=[{"picture": i} for i in range(6)], text=[{"text": 0}, {"text": 1}], every=3)
    assert [batches[i] for i in range(6)] == [
        {"picture": 0}, {"picture": 1}, {"text": 0}, {"picture": 3}, {"picture": 4}, {"text": 1},
    ]  # fmt: skip


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


@pytest.mark.further  # a clip too; of pictures the loss is compared below
def test_features_of_a_picture_are_those_that_the_model_has_for_it(model):
    """By `M3.features` on one packed batch, as a user runs it: the order of pictures and of their rows is kept."""
    from m3jax import media

    tasks = [*tasks_of("what", 2), *tasks_of("motion", 1)]
    processed = [process_image(task.frames[0]) for task in tasks[:2]]
    clip = process_video(tasks[2].frames, source_fps=1.0)
    expected = model.features(media.batch(processed, [clip], model.config))
    rows = [m.tokens for m in (*processed, clip)]
    pictures = jax.tree.map(jnp.asarray, packed_pictures(tasks, [np.arange(n, dtype=np.int32) for n in rows], 4))
    found = picture_features(model, pictures)
    np.testing.assert_allclose(
        np.concatenate([found[i, :n] for i, n in enumerate(rows)]), expected[: sum(rows)], atol=1e-4
    )
    assert not found[3].any() and not found[0, rows[0] :].any()


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


def test_the_text_model_may_stay_as_it_is(model):
    """An update for gradients of 1: of the text nothing moves, of the tower all, its biases too; and the reverse."""
    ones = jax.tree.map(jnp.ones_like, model)

    def moved(**options) -> dict[str, bool]:
        optimizer = make_optimizer(lambda step: 1e-2, weight_decay=0.0, **options)
        updates = jax.jit(optimizer.update)(ones, optimizer.init(model), model)[0]
        leaves, _ = jax.tree_util.tree_flatten_with_path(updates)
        return {jax.tree_util.keystr(path): bool(np.asarray(leaf).any()) for path, leaf in leaves}

    assert all(is_moved == (".vision" in name) for name, is_moved in moved(frozen_text=True).items())
    still = {name for name, is_moved in moved(vision_rate=lambda step: 1e-3).items() if not is_moved}
    assert still and all("e_score_correction_bias" in name for name in still)
