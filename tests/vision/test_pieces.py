"""The pieces of a vision tower by themselves: its layers in numpy, axes of parameters, what a config.json may say."""

import math
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import tiny
from support.parameters import KeepsMade, assert_axes_name_their_sizes, made

from m3jax.media import MediaBatch
from m3jax.media.patches import patch_positions
from m3jax.vision import VisionConfig, tiles
from m3jax.vision.definition import rotary_angles, rotate
from m3jax.vision.layers import LayerNorm, Linear, gelu
from m3jax.vision.rows import Turns, row_lengths
from m3jax.vision.segments import Runs
from m3jax.vision.tower import MLP, Attention, Projector, Vision, _add

TINY = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_channels=3, patch_size=14,
    temporal_patch_size=2, spatial_merge_size=2, vision_segment_max_frames=4, layer_norm_eps=1e-5, rope_theta=1e4,
    projector_hidden_size=64, image_token_id=250, video_token_id=251,
)  # fmt: skip


# Layers


class Filled:
    """A maker of parameters with random numbers, as `m3jax.make.Make`."""

    def weight(self, shape, axes, *, fan_in, dtype=None):
        return nnx.Param(jnp.asarray(np.random.default_rng(fan_in).normal(size=shape), jnp.float32))

    def linear(self, shape, axes, *, inputs=1, outputs=1):
        raise AssertionError("a tower has no matrix that is kept in MXFP8")

    def norm(self, shape, *, dtype=None, start=0.0):
        return nnx.Param(jnp.asarray(start + np.random.default_rng(7).normal(size=shape), jnp.float32))


def test_gelu_is_the_normal_distribution_s():
    """By the error function: not the tanh, nor the sigmoid that come near it; rounded once, to the dtype asked for."""
    x = np.linspace(-4, 4, 33).astype(np.float32)
    expected = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.astype(float)]
    np.testing.assert_allclose(gelu(jnp.asarray(x), jnp.dtype("float32")), expected, rtol=1e-5, atol=3e-7)
    assert gelu(jnp.asarray(x), jnp.dtype("bfloat16")).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_norm_is_rounded_once(dtype):
    norm, x = LayerNorm((6,), Filled()), jnp.asarray(np.random.default_rng(0).normal(3, 2, (4, 6)), dtype)
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 0.1)
    exact = exact * np.asarray(norm.weight[...]) + np.asarray(norm.bias[...])
    found = norm(x, 0.1)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8 if dtype == "bfloat16" else 1e-5)


def test_a_linear_layer_is_a_product_and_a_bias_in_32_bits():
    linear, x = Linear((), (5,), (2, 3), (None, "vision_heads", None), Filled()), np.float32([[1, 2, 3, 4, 5]])
    weight, bias = np.asarray(linear.weight[...]), np.asarray(linear.bias[...])
    expected = np.einsum("xi,inh->xnh", x, weight) + bias
    np.testing.assert_allclose(linear("xi,inh->xnh", jnp.asarray(x)), expected, rtol=1e-6)
    assert linear("xi,inh->xnh", jnp.asarray(x, "bfloat16")).dtype == jnp.float32


def of_one_layer(kind, *args):
    """A module whose every parameter has other numbers, as one of its two layers has them, and those in float64."""
    draws = iter(range(100))

    class Drawn(Filled):
        def weight(self, shape, axes, *, fan_in, dtype=None):
            draw = np.random.default_rng(next(draws))
            return nnx.Param(jnp.asarray(draw.normal(size=shape) / fan_in**0.5, jnp.float32))

        def norm(self, shape, *, dtype=None, start=0.0):
            return nnx.Param(jnp.asarray(start + np.random.default_rng(next(draws)).normal(size=shape), jnp.float32))

    module = kind(*args, Drawn())
    layer = jax.tree.map(lambda x: x[1], module) if kind in (Attention, MLP) else module
    return layer, lambda name: numbers_of(getattr(layer, name))


def numbers_of(part, layer=...):
    """A part's weight and bias in float64; of a stack those of one layer."""
    return [np.asarray(parameter[...], float)[layer] for parameter in (part.weight, part.bias)]


PIECE = VisionConfig.tiny(hidden_size=28, num_attention_heads=2, intermediate_size=12, projector_hidden_size=10)
X_PIECE = np.random.default_rng(5).normal(size=(4, 28))


def by_hand(x, weight, bias):
    """A product and a bias, over as many axes as the weight has for its inputs."""
    axes = next(n for n in range(1, weight.ndim) if np.prod(weight.shape[:n]) == np.prod(x.shape[1:]))
    return np.tensordot(x.reshape(len(x), *weight.shape[:axes]), weight, axes) + bias


def gelu_by_hand(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def test_attention_turns_queries_and_keys_and_no_values():
    """Each projection has its own weights and bias; what attends is given them in order, its output is projected."""
    layer, numbers = of_one_layer(Attention, PIECE)
    angles = np.random.default_rng(1).uniform(-3, 3, (4, 6))

    @jax.jit
    def run(layer, x, angles):
        given_to = []
        out = layer(x, jnp.cos(angles), jnp.sin(angles), lambda q, k, v: given_to.extend((q, k, v)) or 2 * v - k)
        return out, given_to

    found, given_to = run(layer, jnp.asarray(X_PIECE, "float32"), jnp.asarray(angles, "float32"))
    expected = [by_hand(X_PIECE, *numbers(f"{name}_proj")) for name in "qkv"]
    for number in (0, 1):
        x = expected[number]
        turned = (x[..., :6] + 1j * x[..., 6:12]) * np.exp(1j * angles)[:, None]
        expected[number] = np.concatenate([turned.real, turned.imag, x[..., 12:]], -1)
    for one, other in zip(given_to, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_allclose(found, by_hand(2 * expected[2] - expected[1], *numbers("out_proj")), atol=1e-4)
    shapes = jax.eval_shape(run, layer, jnp.asarray(X_PIECE, "bfloat16"), jnp.asarray(angles, "float32"))
    assert shapes[0].dtype == jnp.float32 and {x.dtype for x in shapes[1]} == {jnp.dtype("bfloat16")}


def test_an_mlp_and_the_projector_are_products_with_gelu_between():
    """Of the projector one for each patch, then one for each four that stand together."""
    x = jnp.asarray(X_PIECE, "float32")
    layer, numbers = of_one_layer(MLP, PIECE)
    expected = by_hand(gelu_by_hand(by_hand(X_PIECE, *numbers("fc1"))), *numbers("fc2"))
    run = jax.jit(lambda layer, x: layer(x))
    np.testing.assert_allclose(run(layer, x), expected, atol=1e-5)
    projector, numbers = of_one_layer(Projector, PIECE, 5)
    patches = by_hand(gelu_by_hand(by_hand(X_PIECE, *numbers("linear_1"))), *numbers("linear_2"))
    hidden = gelu_by_hand(by_hand(patches.reshape(1, 20), *numbers("merge_linear_1")))
    np.testing.assert_allclose(run(projector, x), by_hand(hidden, *numbers("merge_linear_2")), atol=1e-4)
    assert jax.eval_shape(run, projector, x.astype("bfloat16")).dtype == jnp.bfloat16


def norm_by_hand(x, weight, bias, eps):
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps) * weight + bias


def test_a_tower_by_hand():
    """Patches of two images and padding, through both layers and the projector, as the formulas have them."""
    config = replace(PIECE, patch_size=2, layer_norm_eps=0.1, rope_theta=100.0)
    tower, numbers = of_one_layer(Vision, config, 5)
    draw = np.random.default_rng(3)
    grids, patches = ((1, 2, 2), (2, 2, 2)), draw.normal(size=(16, 24))
    positions = np.concatenate([*(patch_positions(grid) for grid in grids), np.zeros((4, 3), np.int32)])
    segments = np.repeat([0, 1, -1], (4, 8, 4)).astype(np.int32)
    media = MediaBatch(patches.astype(np.float32), segments, positions, np.int32(1), np.int32(2))

    x = norm_by_hand(
        patches @ np.asarray(tower.patch_embedding[...], float).reshape(24, 28), *numbers("pre_layrnorm"), 0.1
    )
    turned_by = (positions[:, :, None] * 100.0 ** -np.array([0, 0.5])).reshape(16, 6)
    expected = []
    for layer in (0, 1):
        part = lambda module, name, layer=layer: numbers_of(getattr(module, name), layer)
        attention, normed = tower.layers.self_attn, norm_by_hand(x, *part(tower.layers, "layer_norm1"), 0.1)
        q, k, v = (by_hand(normed, *part(attention, f"{name}_proj")) for name in "qkv")
        pairs = [(y[..., :6] + 1j * y[..., 6:12]) * np.exp(1j * turned_by)[:, None] for y in (q, k)]
        q, k = (np.concatenate([y.real, y.imag, z[..., 12:]], -1) for y, z in zip(pairs, (q, k), strict=True))
        scores = np.einsum("xnh,ynh->nxy", q, k) / 14**0.5
        weights = np.exp(scores) * ((segments[:, None] == segments) & (segments >= 0))
        out = np.einsum("nxy,ynh->xnh", weights, v) / np.maximum(weights.sum(-1), 1e-9).T[..., None]
        x = x + by_hand(out, *part(attention, "out_proj"))
        normed = norm_by_hand(x, *part(tower.layers, "layer_norm2"), 0.1)
        hidden = gelu_by_hand(by_hand(normed, *part(tower.layers.mlp, "fc1")))
        x = x + by_hand(hidden, *part(tower.layers.mlp, "fc2"))
        expected.append(x)
    projector = lambda name: numbers_of(getattr(tower.projector, name))
    features = by_hand(gelu_by_hand(by_hand(x, *projector("linear_1"))), *projector("linear_2")).reshape(4, 20)
    features = by_hand(gelu_by_hand(by_hand(features, *projector("merge_linear_1"))), *projector("merge_linear_2"))
    features[3] = 0  # of padding

    every = lambda tower, media: tower.tower(*media[:3], "definition", every_layer=True)
    found, (last, each) = jax.jit(lambda *args: (args[0](args[1], "definition"), every(*args)))(tower, media)
    np.testing.assert_allclose(found, features, atol=2e-4)
    np.testing.assert_allclose(each[:, :12], np.stack(expected)[:, :12], atol=1e-4)
    np.testing.assert_array_equal(last, each[-1])
    assert jax.eval_shape(lambda tower, media: tower.tower(*media[:3]), tower, media)[1] is None


def test_a_new_norm_changes_nothing():
    """Its weight begins as 1 and its bias as 0; of a linear layer the bias does too."""

    class Begins(Filled):
        def norm(self, shape, *, dtype=None, start=0.0):
            return nnx.Param(jnp.full(shape, start))

    make = Begins()
    norm, linear = LayerNorm((3, 2), make), Linear((3,), (5,), (2,), (None, None), make)
    assert (
        norm.weight[...].tolist() == [[1, 1]] * 3
        and norm.bias[...].tolist() == linear.bias[...].tolist() == [[0, 0]] * 3
    )


def test_a_residual_is_rounded_once():
    found = _add(jnp.asarray([[1.0, 256.0]], "bfloat16"), jnp.asarray([[2.0**-7, 1.5]], "float32"))
    assert found.dtype == jnp.bfloat16 and found.tolist() == [[1 + 2.0**-7, 258.0]]


def test_runs_are_of_equal_numbers():
    """Also of one patch, and up to the last row."""
    runs_of = jax.jit(lambda segments: (runs := Runs.of(segments), runs.begins))
    for segments in (
        [0, 0, 0, 1, 2, 2, -1, -1],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [-1] * 8,
        [3] * 8,
        [0, 1, 1, 1, 1, 1, 1, -1],
    ):
        runs, found = runs_of(jnp.asarray(segments, jnp.int32))
        first = [segments.index(number) for number in segments]
        assert runs.first.tolist() == first
        assert runs.end.tolist() == [first[row] + segments.count(number) for row, number in enumerate(segments)]
        assert runs.is_patch.tolist() == [number >= 0 for number in segments]
        assert found.tolist() == [number >= 0 and first[row] == row for row, number in enumerate(segments)]


@pytest.mark.parametrize("num_rows", [7, 9, 25])
def test_a_group_has_no_more_tiles_than_there_are(num_rows, monkeypatch):
    """Tiles of eight rows, or of all if they are fewer; three at once at most. Each row is folded with its segment."""
    monkeypatch.setattr(tiles, "TILE", 8)
    monkeypatch.setattr(tiles, "_GROUP", 3)
    sizes = []
    segments = np.sort(np.random.default_rng(num_rows).integers(0, 4, num_rows)).astype(np.int32)
    segments[num_rows - num_rows // 5 :] = -1
    values = np.arange(1.0, num_rows + 1, dtype=np.float32)

    def start(group, tile):
        sizes.append((group, tile))
        return jnp.zeros((group, tile))

    fold = lambda state, own, others: state + own.arrays[0] * jnp.sum(others.arrays[0], axis=1, keepdims=True)
    run = jax.jit(
        lambda x, numbers: tiles._over_tiles(
            Runs.of(numbers), (x,), (x,), start, fold, lambda state: (state,), (jnp.zeros_like(x),)
        )
    )
    (found,) = run(values, segments)
    own = (segments[:, None] == segments) & (segments >= 0)
    np.testing.assert_array_equal(found, values * (own @ values))
    assert {*sizes} == {(min(3, math.ceil(num_rows / 8)), min(8, num_rows))}


def test_angles_are_of_time_row_and_column_in_turn():
    """A head of 14: two frequencies of each axis, so 12 of its dims are turned, and two are not."""
    positions = jnp.array([[0, 0, 0], [1, 2, 3]], jnp.int32)
    expected = [[0] * 6, [1, 0.1, 2, 0.2, 3, 0.3]]
    np.testing.assert_allclose(rotary_angles(positions, 14, 100.0), expected, rtol=1e-6)
    assert rotary_angles(positions, 80, 1e4).shape == (2, 39)
    x = np.random.default_rng(0).normal(size=(2, 1, 14)).astype(np.float32)
    angles = np.float32(expected)
    found = rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles))
    turned = (x[..., :6] + 1j * x[..., 6:12]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag, x[..., 12:]], -1), rtol=1e-5, atol=1e-6)


def test_each_axis_of_a_tower_s_parameter_has_the_size_that_its_name_stands_for():
    """All sizes differ; what is fed forward and the projector's hidden width divide as "vision_mlp"."""
    config = VisionConfig(**TINY | dict(hidden_size=60, num_attention_heads=5, projector_hidden_size=96, patch_size=4))
    module = Vision(config, 20, KeepsMade())
    assert_axes_name_their_sizes(module, {"layers": 2, "vision_heads": 5, "vision_mlp": {128, 96}})
    weights = {name.removesuffix(".weight"): x for name, x in made(module).items() if name.endswith(".weight")}
    heads, hidden = "vision_heads", "vision_mlp"
    expected = {
        "layers.mlp.fc1": ((2, 60, 128), ("layers", None, hidden), 60),
        "layers.mlp.fc2": ((2, 128, 60), ("layers", hidden, None), 128),
        "layers.self_attn.out_proj": ((2, 5, 12, 60), ("layers", heads, None, None), 60),
        "projector.linear_1": ((60, 96), (None, hidden), 60), "projector.linear_2": ((96, 20), (hidden, None), 96),
        "projector.merge_linear_1": ((80, 96), (None, hidden), 80),
        "projector.merge_linear_2": ((96, 20), (hidden, None), 96),
    }  # fmt: skip
    for name in "qkv":
        expected[f"layers.self_attn.{name}_proj"] = ((2, 60, 5, 12), ("layers", None, heads, None), 60)
    assert {name: (x.shape, x.axes, x.fan_in) for name, x in weights.items() if any(x.axes)} == expected
    patch = made(module)["patch_embedding"]
    assert (patch.shape, patch.axes, patch.fan_in) == ((3, 2, 4, 4, 60), (None,) * 5, 96)


# Segments as rows


def test_each_segment_takes_the_shortest_row_that_holds_it():
    assert row_lengths(100) == (100,) and row_lengths(144) == (144,) and row_lengths(145) == (144, 145)
    assert row_lengths(5000) == (144, 576, 2304, 5000) and row_lengths(12288) == (144, 576, 2304, 12288)
    assert row_lengths(12289) == (144, 576, 2304, 12288, 12289) and (tiles.TILE, tiles._GROUP) == (128, 16)
    lengths = (144, 1, 145, 300, 10)  # two of the second length
    segments = np.repeat(np.arange(5), lengths)
    segments = np.concatenate([segments, np.full(700 - len(segments), -1)]).astype(np.int32)
    turns = Turns.of(jnp.asarray(segments))  # rows of 144, 576 and 700
    assert turns.count.tolist() == [3, 2, 0] and turns.first.tolist() == [0, 3, 5]
    assert turns.lengths.tolist()[:6] == [144, 1, 10, 145, 300, 0]
    begins = np.cumsum([0, *lengths])
    assert turns.starts.tolist()[:5] == [begins[i] for i in (0, 1, 4, 2, 3)]
    assert turns.until.tolist() == [1, 2, 2] and int(turns.only) == 3  # a turn of the first has 5 rows, of the second 2
    patches = np.flatnonzero(segments >= 0)
    np.testing.assert_array_equal(np.asarray(turns.number)[patches], np.array([0, 1, 3, 4, 2])[segments[patches]])
    np.testing.assert_array_equal(np.asarray(turns.column)[patches], patches - begins[segments[patches]])
    assert set(np.asarray(turns.column)[segments < 0].tolist()) == {-1}
    assert int(Turns.of(jnp.zeros(700, jnp.int32)).only) == 2
    one, several = jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    assert (int(Turns.of(one).only), int(Turns.of(several).only)) == (0, 1)


# Configurations


def test_a_number_that_is_not_given_is_m3s():
    """config.json of MiniMaxAI/MiniMax-M3."""
    assert {field.name: field.default for field in fields(VisionConfig)} == dict(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, num_channels=3,
        patch_size=14, temporal_patch_size=2, spatial_merge_size=2, vision_segment_max_frames=4, layer_norm_eps=1e-5,
        rope_theta=10_000.0, projector_hidden_size=6144, image_token_id=200_025, video_token_id=200_026,
    )  # fmt: skip


def test_the_tiny_tower_is_the_documented_one():
    assert {field.name: getattr(VisionConfig.tiny(), field.name) for field in fields(VisionConfig)} == TINY
    assert VisionConfig.tiny(hidden_size=32).hidden_size == 32
    config = VisionConfig(**TINY)
    assert (config.head_dim, config.kernel, config.patch_values) == (32, (3, 2, 14, 14), 1176)
    assert config.merged_patches == 4 and VisionConfig.tiny(spatial_merge_size=3).merged_patches == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=11, num_attention_heads=2), "hidden_size = 11 is no multiple of num_attention_heads = 2"),
        (dict(hidden_size=10), "heads of 5 are too narrow to turn by three axes: at least 6"),
        (dict(num_hidden_layers=0), "num_hidden_layers = 0: must be an integer of 32 bits, at least 1"),
        (dict(patch_size=1 << 31), "patch_size = 2147483648: must be an integer of 32 bits, at least 1"),
        (dict(image_token_id=-1), "image_token_id = -1: must be an integer of 32 bits, at least 0"),
        (dict(hidden_size=True), "hidden_size = True: must be an integer"),
        (dict(rope_theta=0), "rope_theta = 0: must be a positive float32 number"),
        (dict(layer_norm_eps=math.inf), "layer_norm_eps = inf: must be a positive float32 number"),
    ],
)
def test_numbers_that_no_tower_can_have(changes, message, unchecked):
    with pytest.raises(ValueError) as refused:
        VisionConfig.tiny(**changes)
    assert str(refused.value) == "unsupported vision tower: " + str(refused.value).partition(": ")[2]
    assert message in str(refused.value)


def test_the_smallest_numbers_that_a_tower_can_have():
    ones = {field.name: 1 for field in fields(VisionConfig) if field.type is int}
    config = VisionConfig(**ones | dict(hidden_size=6, image_token_id=0, video_token_id=0))
    assert config.head_dim == 6 and VisionConfig.tiny(patch_size=(1 << 31) - 1).patch_size == (1 << 31) - 1


HUB = VisionConfig.tiny().add_to(tiny.config("dM"))


def test_a_configuration_comes_back_from_the_hub_s_form():
    """With every field other than M3's; what is said twice may be, in agreement."""
    other = VisionConfig(**TINY | dict(
        num_channels=1, patch_size=3, temporal_patch_size=5, spatial_merge_size=3, vision_segment_max_frames=7,
        layer_norm_eps=1e-3, rope_theta=5.0, projector_hidden_size=33, image_token_id=1, video_token_id=2,
    ))  # fmt: skip
    assert VisionConfig.of(other.add_to(tiny.config("dM"))) == other
    assert HUB.extra["image_token_index"] == 250 and HUB.vision_config["projection_dim"] == 48
    twice = HUB.vision_config | {"head_dim": 32, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
    assert VisionConfig.of(replace(HUB, vision_config=twice)) == VisionConfig.tiny()
    without = {key: value for key, value in twice.items() if key != "rope_theta"}
    assert VisionConfig.of(replace(HUB, vision_config=without)).rope_theta == 1e4
    lacking = {key: value for key, value in HUB.vision_config.items() if key != "temporal_patch_size"}
    assert VisionConfig.of(replace(HUB, vision_config=lacking)).temporal_patch_size == 2  # from the compression's
    with pytest.raises(ValueError, match="this model has no vision_config: it takes text alone"):
        VisionConfig.of(tiny.config("dM"))


COMPRESSION = "img_token_compression_config"


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("extra", {"projector_hidden_act": "relu"}, "projector_hidden_act = 'relu' is not supported (only 'gelu')"),
        ("extra", {"multimodal_projector_bias": 1}, "multimodal_projector_bias = 1 is not supported (only True)"),
        ("extra", {"vision_feature_layer": -2}, "vision_feature_layer = -2 is not supported (only -1)"),
        ("extra", {"vision_feature_select_strategy": "default"}, "is not supported (only 'full')"),
        ("extra", {COMPRESSION: [1]}, f"{COMPRESSION} = [1]: must be an object"),
        ("extra", {COMPRESSION: {"spatial_merge_size": 3}}, f": {COMPRESSION}.spatial_merge_size = 3: 2 elsewhere"),
        ("vision", {COMPRESSION: {"temporal_patch_size": 1}},
         f"vision_config.{COMPRESSION}.temporal_patch_size = 1: 2 elsewhere"),
        ("vision", {COMPRESSION: {"image_token_compression_method": "pool"}}, "= 'pool' is not supported"),
        ("vision", {"model_type": "siglip"}, "(only 'clip_vision_model' or 'minimax_m3_vl_vision' or None)"),
        ("vision", {"position_embedding_type": "learned"}, "(only 'rope')"),
        ("vision", {"rope_parameters": [1]}, "rope_parameters = [1]: must have rope_type and rope_theta alone"),
        ("vision", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported (only 'axial' or 'default')"),
        ("vision", {"head_dim": 33}, "head_dim = 33: must be hidden_size / num_attention_heads"),
        ("vision", {"num_attention_heads": 0, "head_dim": 33}, "head_dim = 33: must be hidden_size"),
        ("vision", {"zeal": 1, "anger": 2}, "unknown key 'anger': remove it if it does not change the arithmetic"),
    ],
)  # fmt: skip
def test_a_config_json_of_another_tower_is_refused(where, changes, message):
    """With all that is wrong: as notes too where it is more than a line holds."""
    if where == "extra":
        config = replace(HUB, extra=HUB.extra | changes)
    else:
        config = replace(HUB, vision_config=HUB.vision_config | changes)
    with pytest.raises(ValueError) as refused:
        VisionConfig.of(config)
    assert message in str(refused.value)


def test_many_problems_are_notes_of_the_error():
    config = replace(HUB, vision_config=HUB.vision_config | {f"key_{n:02}": n for n in range(40)})
    with pytest.raises(ValueError) as refused:
        VisionConfig.of(config)
    assert [note.split(":")[0] for note in refused.value.__notes__] == [f"unknown key 'key_{n:02}'" for n in range(40)]
