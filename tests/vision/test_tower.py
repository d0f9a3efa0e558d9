"""The tower as a part of the model: what it gives, what it does not depend on, where it is put, what is refused."""

import dataclasses
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import tiny, vision
from support.comparisons import assert_close, assert_equal
from support.compilations import compilations
from support.vision import IMAGE, VIDEO, batch, item

from m3jax import checkpoint, media
from m3jax import model as m3_model
from m3jax.checkpoint import CheckpointError, names, tree
from m3jax.config import M3Config
from m3jax.media import PlaceholderIds
from m3jax.model import M3
from m3jax.parallel import make_mesh
from m3jax.train.step import cast_weights, make_optimizer
from m3jax.vision import VisionConfig, tower
from m3jax.vision.schedules import schedule_of

CONFIG = vision.config()
A, B, C = item(1, (1, 4, 6)), item(2, (1, 2, 2)), item(3, (1, 6, 8))
CLIP = item(4, (4, 2, 2), (2, 2, 2))


@pytest.fixture(scope="module")
def model() -> M3:
    return tiny.model(CONFIG)


@pytest.fixture(scope="module")
def features(model):
    """A function of images to the features of each, in one packed batch of 256 patches."""

    def run(*images, videos=()):
        counts = [len(patches) // 4 for patches, _ in (*images, *videos)]
        rows = np.asarray(model.features(batch(list(images), list(videos))))
        return np.split(rows[: sum(counts)], np.cumsum(counts)[:-1])

    return run


# What an image's features depend on


def test_other_images_change_no_bit(features):
    """Before, behind, between others, or alone: in batches of one size an image's features are the same bits."""
    alone = [features(image)[0] for image in (A, B, C)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        together = features(*([A, B, C][i] for i in order))
        for i, found in zip(order, together, strict=True):
            assert_equal(found, alone[i], f"features of image {i} in order {order}", "R D")


def test_chunks_of_a_video_are_segments_of_their_own(features):
    """A chunk counts its pairs of frames from 0 and sees itself alone; within it a pair sees the others."""
    (whole,) = features(videos=[CLIP])
    first = features(videos=[(CLIP[0][:16], (4, 2, 2))])[0]
    assert_equal(whole[:4], first, "first chunk", "R D")
    later = (CLIP[0][16:], (2, 2, 2))
    assert_equal(whole[4:], features(videos=[later])[0], "second chunk", "R D")
    frame = (CLIP[0][:4], (1, 2, 2))
    assert np.abs(features(frame)[0] - whole[:1]).max() > 1e-2


def test_padding_may_hold_anything(model):
    """NaN in rows of padding reaches no image, and no feature of padding: those are zero."""
    packed = batch([A])
    broken = packed._replace(patches=np.where(packed.segments[:, None] < 0, np.nan, packed.patches).astype(np.float32))
    expected = np.asarray(model.features(packed))
    assert not expected[6:].any() and np.abs(expected[:6]).min(axis=-1).max() > 0
    assert_equal(model.features(broken), expected, "features", "R D")


def test_a_model_that_keeps_to_xla_has_a_tower_that_does(model, monkeypatch):
    """cuDNN's kernels are neither XLA's programs nor the invariant mode's, and have not been tried on a mesh."""
    asked, packed = [], batch([A])
    monkeypatch.setattr(tower, "schedule_of", lambda *args: asked.append(args[-1]) or schedule_of(*args))
    divided = tiny.model(CONFIG, mesh=make_mesh(tensor=2))
    for other in (model.with_schedule("mask"), model.with_backend("xla"), model.with_invariance(), divided):
        jax.eval_shape(other.features, packed)
    assert asked == ["auto", "xla", "xla", "xla"]


def test_no_compilation_for_new_sizes(model):
    """Images of any number and size in one bucket run one program."""
    model.features(batch([A]))
    batches = [batch([B, C]), batch([item(7, (1, 2, 10))] * 4), batch([A], [CLIP])]
    with compilations() as compiled:
        for packed in batches:
            model.features(packed)
    assert not compiled


def test_bfloat16(model):
    """A bfloat16 tower keeps the patch embedding in float32, and is a few roundings away."""
    half = jax.tree.map(lambda x: x, tiny.model(CONFIG, dtype="bfloat16"))
    assert half.vision.patch_embedding.dtype == jnp.float32 and half.vision.dtype == jnp.bfloat16
    exact, found = model.features(batch([A])), half.features(batch([A]))
    assert found.dtype == jnp.bfloat16
    size = float(jnp.linalg.norm(exact))
    assert 1e-3 < float(jnp.linalg.norm(found.astype(jnp.float32) - exact)) / size < 0.05


# Among the tokens

TOKENS = np.array([[5, IMAGE, 7, *[VIDEO] * 4, 8, *[VIDEO] * 2, 9], [*[IMAGE] * 6, *[IMAGE] * 4, 3]], np.int32)
MEDIA = batch([B, A, item(5, (1, 4, 4))], [CLIP])


def test_places_are_the_definition(model):
    """Inside a program and outside: each feature at its kind's next placeholder, over rows, images and videos."""
    ids = PlaceholderIds(IMAGE, VIDEO)
    flat, images, videos = TOKENS.reshape(-1), int(MEDIA.image_features), int(MEDIA.video_features)
    placeholders = [*np.flatnonzero(flat == IMAGE), *np.flatnonzero(flat == VIDEO)]
    expected = np.full(len(MEDIA.segments) // 4, -1, np.int32)
    expected[: images + videos] = placeholders
    assert_equal(media.feature_places(TOKENS, MEDIA, ids), expected, "places on the host", "R")
    found = jax.jit(lambda tokens, batch: media.find_places(tokens, batch, ids))(TOKENS, MEDIA)
    assert_equal(found, expected, "places", "R")
    assert_equal(model.places(TOKENS, MEDIA), expected, "places outside of a program", "R")


def test_embed_puts_features_in_place_of_placeholders(model):
    """Each at its own place, the rest the tokens' own; rows with a negative place go nowhere."""
    rows = np.asarray(model.features(MEDIA))
    places = np.array(model.places(TOKENS, MEDIA))
    places[:2] = 0, TOKENS.size - 1  # the first and the last token's too
    found = np.asarray(model.embed(TOKENS, rows, places))
    expected = np.asarray(model.embed_tokens[...])[TOKENS].reshape(-1, rows.shape[-1])
    assert_equal(model.embed(TOKENS), expected.reshape(found.shape), "embeddings of text", "B T D")
    for row, place in zip(rows, places, strict=True):
        if place >= 0:
            expected[place] = row
    assert_equal(found, expected.reshape(found.shape), "embeddings", "B T D")
    order = np.random.default_rng(0).permutation(len(places))
    assert_equal(model.embed(TOKENS, rows[order], places[order]), found, "embeddings in another order", "B T D")


@pytest.mark.further
def test_a_call_with_media_is_a_call_with_their_embeddings(model):
    embeddings = model.embed(TOKENS, model.features(MEDIA), model.places(TOKENS, MEDIA))
    logits = model(TOKENS, media=MEDIA)
    assert_close(model(TOKENS, embeddings=embeddings), logits, "logits", "B T V", atol=1e-5)
    in_program = jax.jit(lambda model, tokens, media: model(tokens, media=media))(model, TOKENS, MEDIA)
    assert_close(in_program, logits, "logits in a program", "B T V", atol=1e-5)
    assert float(jnp.abs(model(TOKENS) - logits).max()) > 0.1


def test_the_gradient_reaches_the_tower(model):
    """Of a loss over text, by every parameter of the tower."""
    loss = lambda model, tokens, media: jnp.sum(jax.nn.log_softmax(model(tokens, media=media))[:, :, 5])
    gradient = tree.flatten(jax.jit(jax.grad(loss))(model, TOKENS, MEDIA))
    of_tower = {name: np.asarray(value) for name, value in gradient.items() if name.startswith("vision.")}
    assert len(of_tower) > 20
    for name, value in of_tower.items():
        # A key bias moves all scores of a query alike but for the rotation, so its gradient is the smallest.
        assert np.isfinite(value).all() and np.abs(value).max() > 1e-4, name


@pytest.mark.further
def test_training_treats_the_tower_as_its_files_do(model):
    """In a bfloat16 copy its patch embedding stays float32. Biases are trained, and matrices alone are decayed."""
    half = tree.flatten(cast_weights(model, "bfloat16"))
    wide = {name for name, leaf in half.items() if leaf.dtype == jnp.float32}
    assert "vision.patch_embedding" in wide and "vision.layers.mlp.fc1.bias" not in wide
    optimizer = make_optimizer(lambda step: 0.1)
    update = jax.jit(lambda model, slope: optimizer.update(
        jax.tree.map(lambda leaf: jnp.full_like(leaf, slope), model), optimizer.init(model), model
    )[0])  # fmt: skip
    still, moved = update(model, 0.0), update(model, 1.0)
    for name, decay in tree.flatten(still).items():
        is_matrix = "norm" not in name and not name.endswith("bias")
        assert bool(jnp.any(decay != 0)) == is_matrix, name
        assert bool(jnp.all(tree.flatten(moved)[name] != 0)), name


# What is refused


def test_refusals(model):
    text = tiny.model(tiny.config("d"))
    for call, expected in (
        (lambda: text.features(MEDIA), "this model has no vision tower: it takes text alone"),
        (lambda: text(TOKENS, media=MEDIA), "this model has no vision tower: it takes text alone"),
        (lambda: model(TOKENS[:, :-4], media=MEDIA), "the tokens have 8 image placeholders (id 60) for 11 features"),
        (
            lambda: model(TOKENS, media=MEDIA, embeddings=model.embed(TOKENS)),
            "a call has media or embeddings",
        ),
        (lambda: model(TOKENS[::-1], media=MEDIA), "segment 2 (images, then chunks of videos, from 0)"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' is not supported (only 'gelu')"),
        ({"rope_mode": "2d"}, "rope_mode = '2d' is not supported (only '3d')"),
        ({"num_attention_heads": 7}, "hidden_size = 60 is no multiple of num_attention_heads = 7"),
        ({"num_attention_heads": 15}, "heads of 4 are too narrow to turn by three axes: at least 6"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be an integer of 32 bits, at least 1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps = 0.0: must be a positive float32 number"),
        ({"post_norm": True}, "unknown key 'post_norm': remove it if it does not change the arithmetic"),
        ({"head_dim": 16}, "head_dim = 16: must be hidden_size / num_attention_heads"),
        ({"rope_parameters": {"rope_theta": 1e3}}, "rope_theta and rope_parameters.rope_theta disagree; keep one"),
        ({"rope_parameters": {"mrope_section": [1]}}, "rope_parameters = {'mrope_section': [1]}: must have"),
    ],
)
def test_a_tower_of_another_kind_is_refused(changes, expected):
    config = dataclasses.replace(CONFIG, vision_config=CONFIG.vision_config | changes)
    with pytest.raises(ValueError) as error:
        m3_model.abstract(config)
    assert str(error.value).startswith("unsupported vision tower:") and expected in str(error.value)


# Making, placing, and files


def test_the_hubs_configuration_is_the_default():
    """The published vision_config, its projector and placeholders; written in the hub's form and read again."""
    config = VisionConfig().add_to(M3Config.m3())
    assert VisionConfig.of(M3Config.from_dict(config.to_dict())) == VisionConfig()
    places = names.targets(config)
    assert len(places) == 23_416
    assert round(sum(int(np.prod(target.hub_shape)) for target in places.values()) / 1e9, 2) == 427.04
    assert names.totals(config)[0] == 23_416
    kernel = places["vision_tower.vision_model.embeddings.patch_embedding.weight"]
    assert kernel.hub_shape == (1280, 3, 2, 14, 14)
    assert VisionConfig.of(vision.config()) == vision.vision_config()


def test_models_with_and_without_a_tower():
    """The text weights of a seed are the same; abstract, shardings and logical axes follow; layer norms begin at 1."""
    one_layer = dict(num_hidden_layers=1, layer_types=("full_attention",), mlp_layer_types=("dense",))
    config = VisionConfig.tiny(num_hidden_layers=1).add_to(M3Config.tiny(**one_layer))
    seeing, text = m3_model.init(config), m3_model.init(dataclasses.replace(config, vision_config=None))
    assert text.vision is None
    ours, theirs = tree.flatten(seeing), tree.flatten(text)
    for name, value in theirs.items():
        assert_equal(ours[name], value, name)
    of_tower = ours.keys() - theirs.keys()
    assert of_tower and all(name.startswith("vision.") for name in of_tower)
    described = lambda leaves: {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    assert described(tree.flatten(m3_model.abstract(config, "float32"))) == described(ours)
    assert tree.flatten(m3_model.shardings(config, None)).keys() == ours.keys()
    assert float(ours["vision.pre_layrnorm.weight"].min()) == 1.0
    assert "vision.projector.merge_linear_2.weight" in seeing.summary()
    assert seeing.with_dense().vision is not None


def test_a_tower_on_a_mesh(model):
    """Two devices share its MLPs; its three heads do not divide, so each device has them all."""
    mesh = make_mesh(tensor=2)
    divided = tiny.model(CONFIG, mesh=mesh)
    place = lambda part: tuple(part.weight[...].sharding.spec)
    assert place(divided.vision.layers.mlp.fc1) == (None, None, "tensor")
    assert set(place(divided.vision.layers.self_attn.q_proj)) <= {None}
    packed = batch([A, B], [CLIP])
    assert_close(divided.features(packed), model.features(packed), "features", "R D", atol=2e-5)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """Save the model as the hub has it: bfloat16, but for the patch embedding."""
    path = tmp_path_factory.mktemp("vision")
    checkpoint.save(tiny.model(CONFIG, dtype="bfloat16"), path)
    return path


def stored(path: Path) -> dict[str, np.ndarray]:
    return {name: values for file in sorted(path.glob("*.safetensors")) for name, values in load_file(file).items()}


def test_folders_come_back_to_the_byte(folder, tmp_path):
    before = stored(folder)
    kernel = before["vision_tower.vision_model.embeddings.patch_embedding.weight"]
    assert kernel.dtype == np.float32 and kernel.shape == (60, 3, 2, 14, 14)
    assert before["patch_merge_mlp.linear_1.weight"].shape == (72, 4 * 48)
    loaded = checkpoint.load(folder, progress=False)
    assert loaded.vision.patch_embedding.dtype == jnp.float32
    checkpoint.save(loaded, tmp_path)
    after = stored(tmp_path)
    assert after.keys() == before.keys()
    for name, values in before.items():
        assert after[name].dtype == values.dtype and after[name].tobytes() == values.tobytes(), name


def test_orbax_keeps_the_tower(model, tmp_path):
    checkpoint.save_orbax(model, tmp_path / "orbax")
    again, expected = tree.flatten(checkpoint.load_orbax(tmp_path / "orbax")), tree.flatten(model)
    assert again.keys() == expected.keys()
    for name, value in expected.items():
        assert_equal(again[name], value, name)


def test_the_tower_is_left_out_on_request(folder, tmp_path):
    """Then the model is a text model, and so is the folder that it is saved to."""
    loaded, report = checkpoint.load_with_report(folder, progress=False, vision=False)
    assert loaded.vision is None and loaded.config.vision_config is None
    assert len(report.vision) == len([name for name in stored(folder) if not name.startswith("language_model.")])
    checkpoint.save(loaded, tmp_path)
    assert checkpoint.load(tmp_path, progress=False).vision is None
    with pytest.raises(CheckpointError, match="no vision_config: this model has no tower; load with vision=False"):
        checkpoint.load(tmp_path, progress=False, vision=True)


def test_a_folder_without_the_towers_tensors(folder, tmp_path, caplog):
    """It is a text model, with a warning; where the tower is asked for, or some of it is there, all is missed."""
    text = {name: values for name, values in stored(folder).items() if name.startswith("language_model.")}
    write(tmp_path, text, folder)
    with caplog.at_level(logging.WARNING, "m3jax.checkpoint"):
        assert checkpoint.load(tmp_path, progress=False).vision is None
    assert "no file holds it: the model takes text alone" in caplog.text
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path, progress=False, vision=True)
    assert len(error.value.problems) == len(stored(folder)) - len(text)
    name = "patch_merge_mlp.linear_2.bias"
    write(tmp_path, text | {name: stored(folder)[name]}, folder)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path, progress=False)
    assert not any(problem.startswith(name) for problem in error.value.problems)


def test_a_tower_of_another_kind_can_be_left_out(folder, tmp_path):
    write(tmp_path, stored(folder), folder)
    data = json.loads((folder / "config.json").read_text())
    data["vision_config"]["rope_mode"] = "2d"
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"rope_mode = '2d' is not supported .* load with vision=False"):
        checkpoint.load(tmp_path, progress=False)
    assert checkpoint.load(tmp_path, progress=False, vision=False).vision is None


def test_the_tower_is_never_quantized(folder, tmp_path):
    """The MXFP8 release leaves it in bfloat16: a tensor in 8 bits is no weight of it."""
    tensors = stored(folder)
    name = "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"
    write(tmp_path, tensors | {name: tensors[name].astype(ml_dtypes.float8_e4m3fn)}, folder)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path, progress=False)
    assert error.value.problems[0].startswith(f"{name}: expected")


def write(path: Path, tensors: dict[str, np.ndarray], like: Path) -> None:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_bytes((like / "config.json").read_bytes())
