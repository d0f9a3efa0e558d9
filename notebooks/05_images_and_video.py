# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From pixels to tokens
#
# For whoever wants to see what becomes of an image before a language model reads it, and what the model then makes of
# it. MiniMax-M3 has a [vision tower](../docs/vision.md), whose input is prepared by [`m3jax.media`](../docs/media.md).
# The embedded model has a small one, trained on drawn shapes, on numbers, and on shapes that move
# ([tiny.md](../docs/tiny.md)): it answers a few kinds of questions about such pictures, and knows no others.
#
# 1. patches and blocks: what is cut, and in which order it is read;
# 2. the three axes of the tower's rotary embedding;
# 3. what each token of an image is;
# 4. questions and answers;
# 5. which blocks of several images sparse attention keeps when a question is asked;
# 6. a video: pairs of frames, chunks and time stamps, and what the model sees move.
#
# Each claim is an assertion too.

# %%
import sys

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import m3jax
from m3jax.assets import embedded_path
from m3jax.media import PlaceholderIds, batch, expand_tokens, process_image, process_video, resize_bicubic
from m3jax.media.patches import patch_positions
from m3jax.media.sizes import FACTOR, PATCH
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.vision import rotary_angles

# What the tower was trained on is drawn by scripts/tiny, seen from the repository or from this folder.
sys.path += ["scripts", "../scripts"]
from tiny.pictures.draw import COLOURS, SHAPES, Shape, as_bytes, background, draw_number, draw_shapes

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"


def draw(height: int, width: int, *shapes: Shape, seed: int = 0) -> np.ndarray:
    """A picture of shapes, uint8 [H W 3]."""
    rng = np.random.default_rng(seed)
    colours = [np.array(COLOURS[shape.colour], float) for shape in shapes]
    return as_bytes(rng, draw_shapes(background(rng, height, width, 210.0), shapes, colours), 0.0)


def plain(axes) -> None:
    """No ticks: the picture is what is looked at."""
    axes.set_xticks([])
    axes.set_yticks([])


# %% [markdown]
# ## Patches and blocks
#
# The sides are rounded to multiples of 28. A *patch* is 14 x 14 pixels, the unit of the tower; a *block* of 2 x 2
# patches becomes one token. Patches are read block by block, so that the four rows of a block stand together: the
# numbers on the right are their order.

# %%
photo = draw(130, 200, Shape("circle", "red", 46.0, 46.0, 30.0), Shape("star", "blue", 146.0, 80.0, 40.0))
image = process_image(photo)
_, rows, columns = image.grid
resized = resize_bicubic(photo, rows * PATCH, columns * PATCH)

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 2.9))
for axes, shown, title in (
    (left, photo, f"given: {photo.shape[0]} x {photo.shape[1]} pixels"),
    (middle, resized, f"resized: {resized.shape[0]} x {resized.shape[1]}, {image.tokens} tokens"),
    (right, resized, f"{len(image.patches)} patches, in the order of their rows"),
):
    axes.imshow(shown, alpha=1.0 if axes is not right else 0.25)
    axes.set_title(title)
    plain(axes)
for y in range(0, rows * PATCH, FACTOR):
    for x in range(0, columns * PATCH, FACTOR):
        middle.add_patch(Rectangle((x - 0.5, y - 0.5), FACTOR, FACTOR, fill=False, edgecolor=ORANGE))
for number, (_, row, column) in enumerate(patch_positions(image.grid)):
    is_first = number % 4 == 0
    right.text(
        (column + 0.5) * PATCH, (row + 0.5) * PATCH, str(number), ha="center", va="center", fontsize=5.5,
        color=BLUE if is_first else "black", weight="bold" if is_first else "normal",
    )  # fmt: skip
plt.show()

assert (rows * PATCH % FACTOR, columns * PATCH % FACTOR) == (0, 0) and image.tokens == rows * columns // 4
assert [tuple(p) for p in patch_positions(image.grid)[:5]] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 2)]
# A row of 1,176 numbers: 3 colours of 2 frames of 14 x 14 pixels. A still image is a pair of itself.
assert image.patches.shape == (rows * columns, 3 * 2 * 14 * 14)
one = image.patches[0].reshape(3, 2, 14, 14)
assert np.array_equal(one[:, 0], one[:, 1])

# %% [markdown]
# ## Three axes of rotation
#
# Inside the tower a patch's position turns its queries and keys: a third of a head's pairs by the time, a third by
# the row, a third by the column. M3's heads have 80 dims: 13 frequencies an axis, 78 dims turned, the last two left
# as they are. Below, the cosine of an angle at each patch of a chunk of two temporal patches: the fastest frequency
# of each axis, then a slower one.
#
# How to read the maps: each is a chunk, its two temporal patches side by side with a white gap between, 16 rows by 24
# columns of patches each. Where two patches have one colour in a map, that pair of dims does not tell them apart. So
# the maps of "time" change only across the gap, those of "row" only downwards, those of "column" only to the right; the
# upper ones change with each patch and come round again after 6, the lower ones change slowly over the whole picture.

# %%
HEAD_DIM, THETA = 80, 10_000.0
chunk = (2, 16, 24)
positions = patch_positions(chunk)
angles = np.asarray(rotary_angles(jnp.asarray(positions), HEAD_DIM, THETA))  # [X 39]
per_axis = angles.shape[1] // 3


def on_grid(values: np.ndarray) -> np.ndarray:
    """Values of patches, at their places: the temporal patches side by side."""
    picture = np.full((chunk[1], chunk[0] * (chunk[2] + 1) - 1), np.nan)
    picture[positions[:, 1], positions[:, 2] + positions[:, 0] * (chunk[2] + 1)] = values
    return picture


figure, panels = plt.subplots(2, 3, figsize=(11, 4.2))
for line, frequency in zip(panels, (0, 4), strict=True):
    for number, (axes, axis) in enumerate(zip(line, ("time", "row", "column"), strict=True)):
        shown = axes.imshow(on_grid(np.cos(angles[:, number * per_axis + frequency])), cmap="PuOr", vmin=-1, vmax=1)
        axes.set_title(f"{axis}, theta^(-{frequency}/{per_axis})")
        plain(axes)
figure.colorbar(shown, ax=panels, shrink=0.7, label="cosine of the angle")
plt.show()

assert per_axis == 13 and 2 * angles.shape[1] == 78
same_column = positions[:, 2] == 5
assert len(np.unique(angles[same_column][:, 2 * per_axis :], axis=0)) == 1, "the last third asks for the column alone"

# %% [markdown]
# ## What each token of an image is
#
# In the prompt an image is a start, a placeholder for each block, an end. The projector's output for a block, a
# *feature*, takes the place of the placeholder's embedding; what is around it is text. In training a feature was also
# drawn to the embeddings of the words for what its block shows ([`naming_loss`](../scripts/tiny/pictures/features.py)),
# so it can be read without the layers above: below, the product of each feature with the direction of each colour's
# and each shape's word. The largest is shown, and the word where it is over 3.

# %%
tokenizer, template = Tokenizer.from_pretrained(embedded_path()), ChatTemplate.from_folder(embedded_path())
ids = PlaceholderIds.of_tokenizer(tokenizer)
model = m3jax.load(dtype="float32")


def prompt_of(images: list, question: str) -> list[int]:
    """A dialogue of images and a question, with all placeholders."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    prompt = template.encode(tokenizer, [{"role": "user", "content": parts}], thinking_mode="disabled")
    return expand_tokens(prompt, images, ids=ids)


picture = draw(112, 112, Shape("circle", "green", 30.0, 34.0, 19.0), Shape("square", "red", 80.0, 80.0, 18.0))
seen = process_image(picture)
prompt = prompt_of([seen], "What colour is the circle?")
print(
    tokenizer.decode(prompt, skip_special_tokens=False).replace(
        "]<]image[>[" * seen.tokens, f"]<]image[>[ x {seen.tokens} "
    )
)

features = np.asarray(model.features(batch([seen], config=model.config)))[: seen.tokens]


def named(words: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """Of each feature the word that it is nearest to, and its product with that word's direction."""
    spelled = [model.embed(jnp.asarray([tokenizer.encode(f" {word}")]))[0].mean(axis=0) for word in words]
    directions = np.stack([vector / np.linalg.norm(vector) for vector in map(np.asarray, spelled)])  # [N D]
    products = features @ directions.T  # [R N]
    return [words[number] for number in products.argmax(axis=1)], products.max(axis=1)


figure, (left, *others) = plt.subplots(1, 3, figsize=(11, 3.4))
left.imshow(picture)
left.set_title("16 blocks of 28 x 28 pixels")
for number in range(seen.tokens):
    y, x = divmod(number, 4)
    left.add_patch(Rectangle((x * FACTOR - 0.5, y * FACTOR - 0.5), FACTOR, FACTOR, fill=False, edgecolor="white"))
    left.text(x * FACTOR + 3, y * FACTOR + 9, str(number), fontsize=8)
read = {}
for axes, what, words in zip(others, ("colour", "shape"), (tuple(COLOURS), SHAPES), strict=True):
    nearest, products = named(words)
    shown = axes.imshow(products.reshape(4, 4), cmap="viridis", vmin=0, vmax=7)
    for number, word in enumerate(nearest):
        if products[number] > 3:
            read[what, number] = word
            axes.text(number % 4, number // 4, word, ha="center", va="center", color="white", fontsize=9)
    axes.set_title(f"product with the nearest {what}'s word")
figure.colorbar(shown, ax=others, shrink=0.8)
for axes in (left, *others):
    plain(axes)
plt.show()

assert {read["colour", number] for number in (0, 1, 4, 5)} == {"green"}
assert {read["shape", number] for number in (0, 1, 4, 5)} == {"circle"}
assert {read["colour", number] for number in (10, 11, 14, 15)} == {"red"}
assert {read["shape", number] for number in (10, 11, 14, 15)} == {"square"}
assert prompt.count(ids.image) == seen.tokens == 16
tokens = jnp.asarray([prompt])
embedded = model.embed(
    tokens, model.features(batch([seen], config=model.config)), model.places(tokens, batch([seen], config=model.config))
)
is_image = np.array(prompt) == ids.image
assert np.array_equal(embedded[0, is_image], features) and np.array_equal(
    embedded[0, ~is_image], model.embed(tokens)[0, ~is_image]
)

# %% [markdown]
# ## Questions and answers
#
# The kinds of questions that it was trained on, on pictures that it has not seen. How many of each it gets right is in
# [tiny.md](../docs/tiny.md); these are examples.

# %%
number = draw_number(background(np.random.default_rng(5), 112, 112, 60.0), 68, 56.0, 56.0, 56.0, 4.0, 0.1,
                     np.array(COLOURS["yellow"], float))  # fmt: skip
scene = draw(
    112, 112, Shape("star", "orange", 28.0, 82.0, 20.0), Shape("ring", "black", 84.0, 30.0, 20.0),
    Shape("star", "purple", 84.0, 84.0, 18.0), seed=3,
)  # fmt: skip
examples = [
    (draw(84, 84, Shape("cross", "blue", 40.0, 44.0, 26.0), seed=2), {"What is this?": "A blue cross."}),
    (as_bytes(np.random.default_rng(6), number, 2.0), {"What number is this?": "68.", "What colour is it?": "Yellow."}),
    (scene, {"How many stars are there?": "2.", "Where is the ring?": "Top right."}),
]


def ask(*parts: dict) -> str:
    """The answer to a message, without reasoning: the most probable tokens."""
    reply = m3jax.chat(
        model, tokenizer, [{"role": "user", "content": list(parts)}], thinking_mode="disabled",
        stream=False, temperature=0, max_new_tokens=16, progress=False,
    )  # fmt: skip
    return reply.content


figure, panels = plt.subplots(1, 3, figsize=(11, 3.8))
for axes, (shown, questions) in zip(panels, examples, strict=True):
    axes.imshow(shown)
    plain(axes)
    said = {text: ask({"type": "image", "image": shown}, {"type": "text", "text": text}) for text in questions}
    axes.set_title("\n".join(f"{text} {answer}" for text, answer in said.items()), fontsize=10)
    assert said == questions
plt.show()

# %% [markdown]
# ## Which blocks of images are kept
#
# To sparse attention a feature is a token like others: it has an index key, and a block of 16 tokens is kept or not.
# Twelve pictures of 16 tokens, then a question about the ring: a sparse layer of the embedded model keeps 8 blocks for
# the last token of the prompt, for each of its two KV heads. Bright pictures have tokens in a kept block.
#
# The model has seen one picture a dialogue in training. Where the ring is the last picture it answers right. Where it
# is the first, the lower sparse layers keep no block of it; the upper two do, and the answer is wrong all the same: to
# keep a block is not to read the right thing from it.

# %%
NAMES, KINDS, QUESTION = tuple(COLOURS), ("circle", "square", "triangle", "star", "cross"), "What colour is the ring?"
P, RING = model.config.index_block_size, draw(112, 112, Shape("ring", "blue", 56.0, 56.0, 36.0), seed=99)
others = [draw(112, 112, Shape(KINDS[i % 5], NAMES[(3 * i + 1) % 8], 56.0, 56.0, 36.0), seed=i) for i in range(1, 12)]
for place, many in (("first", [RING, *others]), ("last", [*others, RING])):
    processed = [process_image(one) for one in many]
    prompt = prompt_of(processed, QUESTION)
    tokens, media = jnp.asarray([prompt]), batch(processed, config=model.config)
    embedded = model.embed(tokens, model.features(media), model.places(tokens, media))
    values = model.intermediates(tokens, embeddings=embedded)
    sparse = [number for number, layer in enumerate(values["layers"]) if "blocks" in layer]
    image_of = np.full(len(prompt), -1)
    image_of[np.array(prompt) == ids.image] = np.repeat(np.arange(len(many)), 16)

    figure, panels = plt.subplots(len(sparse), len(many), figsize=(11, 0.95 * len(sparse)))
    for line, layer in zip(panels, sparse, strict=True):
        kept = np.asarray(values["layers"][layer]["blocks"])[0, :, -1]  # [K J]
        in_kept = np.isin(np.arange(len(prompt)) // P, kept[kept >= 0])
        for number, axes in enumerate(line):
            axes.imshow(many[number], alpha=1.0 if in_kept[image_of == number].any() else 0.15)
            plain(axes)
            if number == 0:
                axes.set_ylabel(f"layer {layer}")
        assert (kept == (len(prompt) - 1) // P).any(axis=1).all(), "the last token's own block is always kept"
        assert (kept >= 0).sum(axis=1).max() <= model.config.index_topk_blocks < -(-len(prompt) // P)
    answer = ask(*({"type": "image", "image": one} for one in many), {"type": "text", "text": QUESTION})
    figure.suptitle(f"the ring is the {place} picture. {QUESTION} {answer}", fontsize=11)
    plt.show()
assert answer == "Blue.", "the last picture's"
print(
    f"{len(prompt)} tokens are {-(-len(prompt) // P)} blocks; each head keeps {model.config.index_topk_blocks} of them"
)

# %% [markdown]
# ## A video
#
# Frames are taken, as the hub's processor has it, about one a second. Two make a *temporal patch*, whose tokens stand
# after the time of its first frame; an odd last frame is paired with itself. Four temporal patches are a *chunk*:
# attention in the tower, and the count of time in its rotation, stay inside it. Here are twelve frames of a circle
# that moves to the right; the clips of training had up to eight.

# %%
frames = np.stack([draw(56, 84, Shape("circle", "purple", 14.0 + 5.0 * i, 28.0, 11.0)) for i in range(12)])
video = process_video(frames, source_fps=1.0)

figure, panels = plt.subplots(2, 6, figsize=(11, 3.2))
for pair in range(6):
    for row in range(2):
        axes = panels[row][pair]
        axes.imshow(frames[2 * pair + row])
        plain(axes)
    chunk_number, place = divmod(pair, 4)
    panels[0][pair].set_title(f"{video.timestamps[pair]:.1f} s: chunk {chunk_number}, t = {place}", fontsize=9)
    for axes in panels[:, pair]:
        axes.patch.set_edgecolor((BLUE, GREEN)[chunk_number])
        for spine in axes.spines.values():
            spine.set(edgecolor=(BLUE, GREEN)[chunk_number], linewidth=3)
plt.show()

assert video.grid == ((4, 4, 6), (2, 4, 6)) and video.timestamps == (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
assert video.tokens == 6 * (4 * 6) // 4
for text, expected in (("Which way does it move?", "Right."), ("What moves?", "A purple circle.")):
    answer = ask({"type": "video", "video": video}, {"type": "text", "text": text})
    print(text, answer)
    assert answer == expected
spelled = expand_tokens([ids.video], videos=[video], encode=tokenizer.encode, ids=ids)
print(
    tokenizer.decode(spelled, skip_special_tokens=False)
    .replace("]<]video[>[" * 6, "]<]video[>[ x 6 ")
    .replace("of image[>[]<]", "of image[>[\n]<]")
)
