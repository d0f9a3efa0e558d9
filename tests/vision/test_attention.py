"""Attention inside segments, and the rotation: the definition, and its schedules held to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparisons import assert_close, assert_equal
from support.vision import segments

from m3jax.media.patches import patch_positions
from m3jax.vision import attend_segments, rotary_angles, rows, segment_attention, tiles
from m3jax.vision.definition import rotate

X, N, H = 48, 2, 12


def inputs(seed: int, size: int = X) -> list[jax.Array]:
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.standard_normal((size, N, H)), jnp.float32) for _ in range(3)]


def loss_of(attend):
    """A scalar of the output, with a gradient that differs from element to element."""
    weights = jnp.asarray(np.random.default_rng(9).standard_normal((X, N, H)), jnp.float32)
    return lambda q, k, v, of: jnp.sum(attend(q, k, v, of) * weights)


@pytest.fixture(scope="module")
def schedules():
    """The definition and the schedules, with tiles of 5 patches, 3 at a time, and rows of 12: (out, gradients)."""

    def with_gradients(attend):
        return jax.jit(lambda *args: (attend(*args), jax.grad(loss_of(attend), (0, 1, 2))(*args)))

    table = {
        "definition": with_gradients(segment_attention),
        "tiles": with_gradients(tiles.tiled_attention),
        "rows": jax.jit(lambda *args: (rows.row_attention(*args, implementation="xla"), ())),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", 5)
        patch.setattr(tiles, "_GROUP", 3)
        patch.setattr(rows, "_LENGTHS", (12,))
        for run in table.values():
            run(*inputs(0), jnp.asarray(segments(7, size=X)))  # traced while the sizes are set
    return table


@given(st.lists(st.integers(1, 23), min_size=1, max_size=12), st.integers(0, 99))
def test_schedules_are_the_definition(schedules, lengths, seed):
    """One image or a dozen, one patch or 23, full to the last row or not; gradients too."""
    while sum(lengths) > X:
        lengths = lengths[:-1]
    args = (*inputs(seed), jnp.asarray(segments(*lengths, size=X)))
    expected, expected_gradients = schedules["definition"](*args)
    for name in ("tiles", "rows"):
        found, gradients = schedules[name](*args)
        assert_close(found, expected, f"out of {name}", "X N H", atol=2e-6)
        for letter, one, other in zip("qkv", gradients, expected_gradients, strict=False):
            assert_close(one, other, f"gradient of {name} by {letter}", "X N H", atol=2e-5)


@pytest.mark.parametrize("name", ["tiles", "rows"])
def test_padding_is_zero_and_harmless(schedules, name):
    """Rows behind the last segment may hold anything: their outputs are zero, and nobody sees them."""
    of = jnp.asarray(segments(11, 6, size=X))
    q, k, v = inputs(1)
    garbage = [x.at[17:].set(bad) for x, bad in ((q, jnp.inf), (k, jnp.nan), (v, jnp.nan))]
    found = schedules[name](*garbage, of)[0]
    assert_equal(found[17:], np.zeros((X - 17, N, H)), "padding", "X N H")
    assert_equal(found, schedules[name](q, k, v, of)[0], "out", "X N H")


def test_a_patch_does_not_see_another_image():
    """Without the mask, packed images are one image: their features change with their neighbours."""
    q, k, v = inputs(2)
    out = segment_attention(q, k, v, jnp.asarray(segments(10, 14, size=X)))
    alone = segment_attention(*(x[10:24] for x in (q, k, v)), jnp.zeros(14, jnp.int32))
    assert_close(out[10:24], alone, "out", "X N H", atol=1e-6)
    together = segment_attention(q, k, v, jnp.asarray(segments(24, size=X)))
    assert float(jnp.abs(together[10:24] - alone).max()) > 0.1


def test_an_image_is_the_same_to_the_bit_wherever_it_lies(schedules):
    """Tiles are counted from the image's own first patch: what is summed with what depends on nothing beside it."""
    image, other = inputs(3, 17), inputs(4, 26)
    broken = [x.at[:].set(jnp.nan) for x in inputs(5, 4)]
    pad = inputs(6, X)
    run = schedules["tiles"]

    def packed(*parts):
        rows_of = [jnp.concatenate([*(part[i] for part in parts), pad[i]])[:X] for i in range(3)]
        return run(*rows_of, jnp.asarray(segments(*(len(part[0]) for part in parts), size=X)))[0]

    alone = packed(image)[:17]
    assert_equal(packed(other, image)[26:43], alone, "behind another", "X N H")
    assert_equal(packed(image, other)[:17], alone, "before another", "X N H")
    assert_equal(packed(broken, image)[4:21], alone, "beside one that is NaN", "X N H")


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("flash", "backend = 'flash': allowed are 'auto', 'definition', 'xla', 'cudnn'"),
        ("cudnn", "backend = 'cudnn' cannot run this attention: it needs a GPU, and JAX runs on a CPU"),
    ],
)
def test_backends_that_cannot_run_say_so(backend, expected):
    with pytest.raises(ValueError) as error:
        attend_segments(*inputs(0), jnp.asarray(segments(7, size=X)), backend)
    assert str(error.value).startswith(expected)


def test_row_layouts_fit_the_usual_batches():
    """64 images of 576 tokens in their bucket take rows of 2560 with none to spare; one image is one row."""
    assert rows.layouts(2560)[0] == (1, 2560)
    fitting = [size for size in rows.layouts(163_840) if size[0] >= 64 and size[1] >= 2304]
    assert fitting[0] == (64, 2560)


# The rotation


def test_angles_are_the_formula():
    """Spec: 13 frequencies 10000**(-2 i / 26) for each of t, h and w, in this order; not a bit off in float64."""
    positions = patch_positions((4, 6, 8))
    with jax.enable_x64(True):
        found = np.asarray(rotary_angles(jnp.asarray(positions), 80, 1e4, jnp.float64))
    frequencies = 1 / 10000.0 ** (np.arange(0, 26, 2) / 26)
    expected = np.concatenate([positions[:, axis, None] * frequencies for axis in range(3)], axis=-1)
    assert found.shape == (192, 39) and found.dtype == np.float64
    assert_equal(found, expected, "angles", "X R")


def test_pairs_are_half_a_rotation_apart_and_two_dims_stay():
    """Dims i and i + 39 turn by angle i; the last 2 of 80 are not turned (transformers 5.17 turned the whole head)."""
    draw = np.random.default_rng(0)
    angles, x = draw.uniform(-3, 3, (5, 39)), draw.standard_normal((5, 2, 80))
    with jax.enable_x64(True):
        found = np.asarray(rotate(jnp.asarray(x), jnp.asarray(angles)))
    pairs = x[..., :39] + 1j * x[..., 39:78]
    turned = pairs * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 78:]], axis=-1)
    assert_close(found, expected, "turned", "X N H", atol=1e-15)
    assert_equal(found[..., 78:], x[..., 78:], "dims that stay", "X N H")


def test_bfloat16_rounds_what_is_multiplied_with_values():
    """Each schedule is within a few roundings of the float32 definition, and not nearer to it than bfloat16 can be."""
    of = jnp.asarray(segments(20, 9, size=X))
    halves = [x.astype(jnp.bfloat16) for x in inputs(7)]
    exact = segment_attention(*(x.astype(jnp.float32) for x in halves), of)
    for backend in ("definition", "xla"):
        found = attend_segments(*halves, of, backend)
        assert found.dtype == jnp.bfloat16
        assert 1e-4 < float(jnp.abs(found.astype(jnp.float32) - exact).max()) < 0.02
