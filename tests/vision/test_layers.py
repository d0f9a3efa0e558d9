"""The layers of a tower: where they round, and the logical axes of their parameters."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.parameters import KeepsMade, assert_axes_name_their_sizes, made

from m3jax.vision import VisionConfig
from m3jax.vision.layers import LayerNorm, gelu
from m3jax.vision.tower import Vision


def test_gelu_is_the_normal_distribution_s():
    """By the error function: not the tanh, nor the sigmoid that come near it; rounded once, to the dtype asked for."""
    x = np.linspace(-4, 4, 33).astype(np.float32)
    expected = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.astype(float)]
    np.testing.assert_allclose(gelu(jnp.asarray(x), jnp.dtype("float32")), expected, rtol=1e-5, atol=3e-7)
    assert gelu(jnp.asarray(x), jnp.dtype("bfloat16")).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_norm_is_rounded_once(dtype):
    draw = np.random.default_rng(0)
    norm, x = LayerNorm((6,), KeepsMade()), jnp.asarray(draw.normal(3, 2, (4, 6)), dtype)
    norm.weight, norm.bias = (nnx.Param(jnp.asarray(draw.normal(size=6), jnp.float32)) for _ in range(2))
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 0.1)
    exact = exact * np.asarray(norm.weight[...]) + np.asarray(norm.bias[...])
    found = norm(x, 0.1)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8 if dtype == "bfloat16" else 1e-5)


def test_each_axis_of_a_tower_s_parameter_has_the_size_that_its_name_stands_for():
    """All sizes differ; what is fed forward and the projector's hidden width divide as "vision_mlp"."""
    config = VisionConfig.tiny(hidden_size=60, num_attention_heads=5, projector_hidden_size=96, patch_size=4)
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
