"""The tower and the whole model with images and videos against transformers, in float32."""

from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from support import oracle
from support.comparisons import assert_close, assert_equal
from support.oracle import CASES, MiniMaxM3VLConfig, m3_vl, torch
from support.vision import IMAGE, VIDEO, Item, batch, item

from m3jax import checkpoint
from m3jax.media import MediaBatch
from m3jax.model import M3

# Two implementations that sum in different orders, relative to the largest number of what is compared.
CLOSE = 2e-4
WIDTH = 64  # tokens of every call
NEW = 8  # tokens that are generated


class Pair(NamedTuple):
    """The same random model twice."""

    ours: M3
    theirs: Any


class Prompt(NamedTuple):
    """Tokens with expanded placeholders, and what they stand for: items and the grids of them."""

    tokens: list[int]
    images: list[Item]
    videos: list[Item]

    @property
    def batch(self) -> MediaBatch:
        return batch(self.images, self.videos)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call of transformers' model."""
        found = {}
        for kind, pixels, items in (
            ("image", "pixel_values", self.images),
            ("video", "pixel_values_videos", self.videos),
        ):
            if items:
                found[pixels] = torch.from_numpy(np.concatenate([patches for patches, _ in items]))
                found[f"{kind}_grid_thw"] = torch.from_numpy(
                    np.concatenate([np.atleast_2d(grids) for _, grids in items])
                )
        return found


@cache
def pair() -> Pair:
    """M3's kinds of layers, and a tower with heads of 20; no norm near an identity, no bias of zero."""
    case = CASES["m3"]
    vision = dict(
        hidden_size=60, num_hidden_layers=3, num_attention_heads=3, intermediate_size=88, image_size=28,
        layer_norm_eps=0.03, rope_parameters=dict(rope_type="axial", rope_theta=50.0),
    )  # fmt: skip
    config = MiniMaxM3VLConfig(
        text_config=case.text_config(), vision_config=vision, projector_hidden_size=72, image_token_index=IMAGE,
        video_token_index=VIDEO,
    )  # fmt: skip
    theirs = m3_vl.MiniMaxM3SparseForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    draw = np.random.default_rng(5)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            is_matrix = weight.ndim > 1 and "embed_tokens" not in name
            scale = 1.5 * np.prod(weight.shape[1:]) ** -0.5 if is_matrix else 1.0 if "embed_tokens" in name else 0.5
            weight.copy_(torch.from_numpy((draw.normal(size=weight.shape) * scale).astype(np.float32)))
    folder = oracle.scratch() / "vision"
    theirs.save_pretrained(folder)
    return Pair(checkpoint.load(folder, dtype="float32", progress=False), theirs)


FIRST, SECOND, THIRD = item(1, (1, 4, 6)), item(2, (1, 2, 8)), item(3, (1, 2, 2))
CLIP = item(4, (4, 4, 4), (1, 4, 4))  # two chunks: four pairs of frames, then one; four features a pair
FRAMES = [token for pair in range(5) for token in (8 + pair, 9, *[VIDEO] * 4, 10)]
PROMPTS = {
    "one image": Prompt([5, 6, 9, *[IMAGE] * 6, 10, 7], [FIRST], []),
    "three images": Prompt(
        [9, *[IMAGE] * 4, 10, 5, 6, 9, *[IMAGE], 10, 7, 8, 9, *[IMAGE] * 6, 10], [SECOND, THIRD, FIRST], []
    ),
    "a video of two chunks": Prompt([5, *FRAMES, 6, 7], [], [CLIP]),
    "both, text between": Prompt([5, *FRAMES, 6, 9, *[IMAGE] * 6, 10, 7, 7, 9, IMAGE, 10, 11], [FIRST, THIRD], [CLIP]),
}


def padded(tokens: list[int]) -> np.ndarray:
    return np.array([tokens + [0] * (WIDTH - len(tokens))], np.int32)


def logits(tokens: list[int], media: MediaBatch) -> np.ndarray:
    """Ours, of each token; one program for all prompts."""
    lengths = np.array([len(tokens)], np.int32)
    return np.asarray(pair().ours(padded(tokens), media=media, lengths=lengths))[0, : len(tokens)]


def close(found: Any, expected: Any, what: str, axes: str) -> None:
    expected = expected.detach().numpy()
    assert_close(found, expected, what, axes, atol=CLOSE * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("name", PROMPTS)
def test_logits(name):
    prompt = PROMPTS[name]
    with torch.no_grad():
        expected = pair().theirs(input_ids=torch.tensor([prompt.tokens]), **prompt.arguments).logits[0]
    close(logits(prompt.tokens, prompt.batch), expected, "logits", "T V")


def test_every_layer_of_the_tower_and_the_projector():
    """Images of three sizes and the chunks of a video in one batch: each layer's output, then the features."""
    prompt = PROMPTS["both, text between"]
    pixels = torch.cat([prompt.arguments[name] for name in ("pixel_values", "pixel_values_videos")])
    grids = torch.cat([prompt.arguments[name] for name in ("image_grid_thw", "video_grid_thw")])
    ours, theirs = pair()
    with torch.no_grad():
        found = theirs.model.vision_tower(pixel_values=pixels, grid_thw=grids, output_hidden_states=True)
        features = theirs.model.multi_modal_projector(found.last_hidden_state.squeeze(0))
    media = prompt.batch
    run = jax.jit(lambda model, media: model.vision.tower(*media[:3], every_layer=True))
    last, layers = run(ours, media)
    outputs = [hidden.reshape(-1, hidden.shape[-1]) for hidden in found.hidden_states[-3:]]
    for layer, expected in enumerate(outputs):
        close(layers[layer][: len(pixels)], expected, f"output of layer {layer}", "X W")
    # The tower has no norm behind its last layer: its output is the residual stream.
    close(last[: len(pixels)], found.last_hidden_state.squeeze(0), "output of the tower", "X W")
    found_features = np.asarray(ours.features(media))
    close(found_features[: len(features)], features, "features", "R D")
    assert_equal(found_features[len(features) :], np.zeros_like(found_features[len(features) :]), "padding", "R D")


def test_greedy_text():
    """The most likely token, again and again, is theirs: positions after an image go on by one."""
    prompt = PROMPTS["both, text between"]
    ids = torch.tensor([prompt.tokens])
    expected = pair().theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        **prompt.arguments,
    )  # fmt: skip
    tokens, media = list(prompt.tokens), prompt.batch
    for _ in range(NEW):
        tokens.append(int(logits(tokens, media)[-1].argmax()))
    assert tokens == expected[0].tolist()
    assert len(set(tokens[-NEW:])) > 2
