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
# For whoever wants to see what becomes of an image before a language model reads it. MiniMax-M3 has a vision tower;
# its input is prepared by [`m3jax.media`](../docs/media.md). The embedded checkpoint has no tower yet: a small random
# one stands in for it, which shows what happens to features, and not what a trained tower sees.
#
# 1. patches and blocks: what is cut, and in which order it is read;
# 2. the three axes of the tower's rotary embedding;
# 3. what each token of an image is;
# 4. which blocks of several images sparse attention keeps when a question is asked;
# 5. a video: pairs of frames, chunks and time stamps.
#
# Each claim is an assertion too.

# %%
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
from m3jax.train.pictures import with_tower
from m3jax.train.pictures.draw import COLOURS, Shape, as_bytes, background, draw_shapes
from m3jax.vision import VisionConfig, rotary_angles

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
# *feature*, takes the place of the placeholder's embedding; what is around it is text. Below, the length of each
# feature, laid over the block that it comes from.

# %%
tokenizer, template = Tokenizer.from_pretrained(embedded_path()), ChatTemplate.from_folder(embedded_path())
ids = PlaceholderIds.of_tokenizer(tokenizer)
model = m3jax.load(dtype="float32")
if model.vision is None:  # a checkpoint without a tower: a random one shows the same mechanics
    model = with_tower(model, VisionConfig.tiny(image_token_id=ids.image, video_token_id=ids.video), seed=0)


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
lengths = np.linalg.norm(features, axis=-1).reshape(seen.grid[1] // 2, seen.grid[2] // 2)
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.2))
left.imshow(picture)
left.set_title("16 blocks of 28 x 28 pixels")
for number in range(seen.tokens):
    y, x = divmod(number, 4)
    left.add_patch(Rectangle((x * FACTOR - 0.5, y * FACTOR - 0.5), FACTOR, FACTOR, fill=False, edgecolor="white"))
    left.text(x * FACTOR + 3, y * FACTOR + 9, str(number), fontsize=8)
shown = right.imshow(lengths, cmap="viridis")
right.set_title("length of each feature")
figure.colorbar(shown, ax=right, shrink=0.8)
for axes in (left, right):
    plain(axes)
plt.show()

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
# ## Which blocks of images are kept
#
# To sparse attention a feature is a token like others: it has an index key, and a block of 16 tokens is kept or not.
# Twenty pictures of 16 tokens, then a question: a sparse layer of the embedded model keeps 8 blocks for the last token
# of the prompt, for each of its two KV heads. Bright pictures have tokens in a kept block.
# The tower is random here: which pictures are kept says nothing of the question.

# %%
NAMES, KINDS = tuple(COLOURS), ("circle", "square", "triangle", "star", "cross")
many = [draw(112, 112, Shape(KINDS[i % 5], NAMES[(3 * i + 1) % 8], 56.0, 56.0, 36.0), seed=i) for i in range(20)]
processed = [process_image(one) for one in many]
prompt = prompt_of(processed, "Which shape is red?")
tokens, media = jnp.asarray([prompt]), batch(processed, config=model.config)
embedded = model.embed(tokens, model.features(media), model.places(tokens, media))
values = model.intermediates(tokens, embeddings=embedded)
P = model.config.index_block_size
sparse = [number for number, layer in enumerate(values["layers"]) if "blocks" in layer]
image_of = np.full(len(prompt), -1)
image_of[np.array(prompt) == ids.image] = np.repeat(np.arange(len(many)), 16)

figure, panels = plt.subplots(len(sparse), len(many), figsize=(11, 0.7 * len(sparse)))
for line, layer in zip(panels, sparse, strict=True):
    kept = np.asarray(values["layers"][layer]["blocks"])[0, :, -1]  # [K J]
    in_kept = np.isin(np.arange(len(prompt)) // P, kept[kept >= 0])
    for number, axes in enumerate(line):
        is_kept = in_kept[image_of == number].any()
        axes.imshow(many[number], alpha=1.0 if is_kept else 0.15)
        plain(axes)
        if number == 0:
            axes.set_ylabel(f"layer {layer}")
    assert (kept == (len(prompt) - 1) // P).any(axis=1).all(), "the last token's own block is always kept"
    assert (kept >= 0).sum(axis=1).max() <= model.config.index_topk_blocks < -(-len(prompt) // P)
plt.show()
print(
    f"{len(prompt)} tokens are {-(-len(prompt) // P)} blocks; each head keeps {model.config.index_topk_blocks} of them"
)

# %% [markdown]
# ## A video
#
# Frames are taken, as the hub's processor has it, about one a second. Two make a *temporal patch*, whose tokens stand
# after the time of its first frame; an odd last frame is paired with itself. Four temporal patches are a *chunk*:
# attention in the tower, and the count of time in its rotation, stay inside it. Here are twelve frames of a circle
# that moves to the right.

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
spelled = expand_tokens([ids.video], videos=[video], encode=tokenizer.encode, ids=ids)
print(
    tokenizer.decode(spelled, skip_special_tokens=False)
    .replace("]<]video[>[" * 6, "]<]video[>[ x 6 ")
    .replace("of image[>[]<]", "of image[>[\n]<]")
)
