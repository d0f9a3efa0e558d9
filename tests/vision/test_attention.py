"""Attention inside segments, and the rotation: the definition, and its schedules held to it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.comparisons import assert_close, assert_equal
from support.vision import segments

from m3jax.media.patches import patch_positions
from m3jax.spec.vision import rotate
from m3jax.vision import attend_segments, rotary_angles, rows, schedules, segment_attention, tiles

X, N, H = 48, 2, 12


def inputs(seed: int, size: int = X) -> list[jax.Array]:
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.standard_normal((size, N, H)), jnp.float32) for _ in range(3)]


def loss_of(attend):
    """A scalar of the output, with a gradient that differs from element to element."""
    weights = jnp.asarray(np.random.default_rng(9).standard_normal((X, N, H)), jnp.float32)
    return lambda q, k, v, of: jnp.sum(attend(q, k, v, of) * weights)


def in_rows(q, k, v, of):
    return rows.row_attention(q, k, v, of, rows.Turns.of(of), "xla")


@pytest.fixture(scope="module")
def compiled():
    """The definition and the schedules, tiles of 5 patches, 3 at a time, and rows of 4, 12 and 48: (out, gradients)."""

    def with_gradients(attend):
        return jax.jit(lambda *args: (attend(*args), jax.grad(loss_of(attend), (0, 1, 2))(*args)))

    table = {
        "definition": with_gradients(segment_attention),
        "tiles": with_gradients(tiles.tiled_attention),
        "rows": with_gradients(in_rows),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", 5)
        patch.setattr(tiles, "_GROUP", 3)
        patch.setattr(rows, "_LENGTHS", (4, 12))
        for run in table.values():
            run(*inputs(0), jnp.asarray(segments(7, size=X)))  # traced while the sizes are set
    return table


@given(st.lists(st.integers(1, 23), min_size=1, max_size=12), st.integers(0, 99))
@example([1] * X, 0)
def test_schedules_are_the_definition(compiled, lengths, seed):
    """One image or a dozen, one patch or 23, full to the last row or not; gradients too."""
    while sum(lengths) > X:
        lengths = lengths[:-1]
    args = (*inputs(seed), jnp.asarray(segments(*lengths, size=X)))
    expected, expected_gradients = compiled["definition"](*args)
    for name in ("tiles", "rows"):
        found, gradients = compiled[name](*args)
        assert_close(found, expected, f"out of {name}", "X N H", atol=2e-6)
        for letter, one, other in zip("qkv", gradients, expected_gradients, strict=True):
            assert_close(one, other, f"gradient of {name} by {letter}", "X N H", atol=2e-5)


@pytest.mark.parametrize("name", ["tiles", "rows"])
def test_padding_is_zero_and_harmless(compiled, name):
    """Rows behind the last segment may hold anything: their outputs are zero, and nobody sees them."""
    of = jnp.asarray(segments(11, 6, size=X))
    q, k, v = inputs(1)
    garbage = [x.at[17:].set(bad) for x, bad in ((q, jnp.inf), (k, jnp.nan), (v, jnp.nan))]
    found = compiled[name](*garbage, of)[0]
    assert_equal(found[17:], np.zeros((X - 17, N, H)), "padding", "X N H")
    assert_equal(found, compiled[name](q, k, v, of)[0], "out", "X N H")


def test_a_patch_does_not_see_another_image():
    """Without the mask, packed images are one image: their features change with their neighbours."""
    q, k, v = inputs(2)
    attend = jax.jit(segment_attention)
    out = attend(q, k, v, jnp.asarray(segments(10, 14, size=X)))
    alone = attend(*(x[10:24] for x in (q, k, v)), jnp.zeros(14, jnp.int32))
    assert_close(out[10:24], alone, "out", "X N H", atol=1e-6)
    together = attend(q, k, v, jnp.asarray(segments(24, size=X)))
    assert float(jnp.abs(together[10:24] - alone).max()) > 0.1


@pytest.mark.parametrize("name", ["tiles", "rows"])
def test_an_image_is_the_same_to_the_bit_wherever_it_lies(compiled, name):
    """Tiles are counted from the image's own first patch, and its row is as long as itself demands: what is summed with
    what depends on nothing beside it, also where that takes rows of its own or is NaN."""
    image, other, small = inputs(3, 11), inputs(4, 26), inputs(7, 3)
    broken = [x.at[:].set(jnp.nan) for x in inputs(5, 4)]
    pad = inputs(6, X)

    def packed(*parts):
        rows_of = [jnp.concatenate([*(part[i] for part in parts), pad[i]])[:X] for i in range(3)]
        return compiled[name](*rows_of, jnp.asarray(segments(*(len(part[0]) for part in parts), size=X)))[0]

    alone = packed(image)[:11]
    assert_equal(packed(other, image)[26:37], alone, "behind another", "X N H")
    assert_equal(packed(image, other)[:11], alone, "before another", "X N H")
    assert_equal(packed(small, small, image, image, small)[17:28], alone, "among others and itself", "X N H")
    assert_equal(packed(broken, image)[4:15], alone, "beside one that is NaN", "X N H")


def test_each_segment_takes_the_shortest_row_that_holds_it():
    assert rows.row_lengths(100) == (100,) and rows.row_lengths(144) == (144,) and rows.row_lengths(145) == (144, 145)
    assert rows.row_lengths(5000) == (144, 576, 2304, 5000) and rows.row_lengths(12288) == (144, 576, 2304, 12288)
    assert rows.row_lengths(12289) == (144, 576, 2304, 12288, 12289)
    lengths = (144, 1, 145, 300, 10)  # two of the second length
    of = segments(*lengths, size=700)
    turns = rows.Turns.of(jnp.asarray(of))  # rows of 144, 576 and 700
    assert turns.count.tolist() == [3, 2, 0] and turns.first.tolist() == [0, 3, 5]
    assert turns.lengths.tolist()[:6] == [144, 1, 10, 145, 300, 0]
    begins = np.cumsum([0, *lengths])
    assert turns.starts.tolist()[:5] == [begins[i] for i in (0, 1, 4, 2, 3)]
    assert turns.until.tolist() == [1, 2, 2] and int(turns.only) == 3  # a turn of the first has 5 rows, of the second 2
    patches = np.flatnonzero(of >= 0)
    np.testing.assert_array_equal(np.asarray(turns.number)[patches], np.array([0, 1, 3, 4, 2])[of[patches]])
    np.testing.assert_array_equal(np.asarray(turns.column)[patches], patches - begins[of[patches]])
    assert set(np.asarray(turns.column)[of < 0].tolist()) == {-1}
    assert int(rows.Turns.of(jnp.zeros(700, jnp.int32)).only) == 2
    one, several = jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    assert (int(rows.Turns.of(one).only), int(rows.Turns.of(several).only)) == (0, 1)


def test_usual_batches_are_one_turn():
    """64 images of 576 tokens in their bucket; one of them in a call of its own is one row, as in an engine's. Then the
    host waits once a layer, for the number of the turn, and not three times a turn."""
    turns_of = jax.jit(rows.Turns.of)
    many = turns_of(np.arange(64, dtype=np.int32).repeat(2304))
    assert many.count.tolist() == [0, 0, 64, 0, 0] and many.until.tolist() == [0, 0, 1, 1, 1]
    assert many.only == 2
    assert rows.row_lengths(2304) == (144, 576, 2304)
    assert turns_of(np.zeros(2304, np.int32)).only == 2
    assert turns_of(np.full(2304, -1, np.int32)).only == 3, "no segment is no turn"


@pytest.mark.parametrize(
    ("on", "dtype", "head_dim", "takes"),
    [
        ("gpu", "bfloat16", 80, "rows"), ("gpu 12.0", "float16", 128, "rows"),
        ("gpu 8.0", "bfloat16", 8, "rows"),
        ("gpu 7.5", "float16", 80, "a card of compute capability 7.5 (it takes 8.0 and newer)"),
        ("gpu", "float32", 80, "it takes bfloat16 and float16, and this is float32"),
        ("gpu", "bfloat16", 20, "heads of 20 (it takes multiples of 8 up to 128)"),
        ("gpu", "bfloat16", 136, "heads of 136 (it takes multiples of 8 up to 128)"),
        ("cpu", "bfloat16", 80, "it needs a GPU, and JAX runs on a CPU"),
        ("tpu", "bfloat16", 80, "it needs a GPU, and JAX runs on a TPU"),
    ],
)  # fmt: skip
def test_cudnn_is_taken_where_it_can_run(monkeypatch, unchecked, on, dtype, head_dim, takes):
    """On a GPU in 16 bits "auto" is cuDNN's rows; elsewhere tiles, and who asks for cuDNN is told why not."""
    platform, *capability = on.split()
    card = SimpleNamespace(compute_capability=capability[0]) if capability else object()
    monkeypatch.setattr(schedules, "platform", lambda: platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [card, SimpleNamespace(compute_capability="7.0")])
    monkeypatch.setattr(schedules, "row_attention", lambda *args: ("rows", *map(id, args[:4]), args[-1]))
    monkeypatch.setattr(schedules, "tiled_attention", lambda *args: ("tiles", *map(id, args)))
    monkeypatch.setattr(schedules, "segment_attention", lambda *args, segments: ("definition", *map(id, args)))
    of, operand = jnp.asarray(segments(7, size=X)), jnp.zeros((X, 2, head_dim), dtype)
    q, k, v = operand, operand + 1, operand + 2
    run = lambda backend: schedules.schedule_of(of, operand.dtype, head_dim, backend)(q, k, v)
    tiled = ("tiles", id(q), id(k), id(v), id(of))
    assert run("xla") == tiled and run("definition") == ("definition", id(q), id(k), id(v))
    assert attend_segments(q, k, v, of) == run("auto")
    if takes == "rows":
        assert run("auto") == run("cudnn") == ("rows", *tiled[1:], "cudnn")
    else:
        assert run("auto") == tiled
        with pytest.raises(ValueError) as error:
            run("cudnn")
        assert str(error.value) == f"backend = 'cudnn' cannot run this attention: {takes}; choose 'auto' or 'xla'"


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend = 'flash': allowed are 'auto', 'definition', 'xla', 'cudnn'"):
        attend_segments(*inputs(0), jnp.asarray(segments(7, size=X)), "flash")


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
        found = np.asarray(rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles)))
    pairs = x[..., :39] + 1j * x[..., 39:78]
    turned = pairs * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 78:]], axis=-1)
    assert_close(found, expected, "turned", "X N H", atol=1e-15)
    assert_equal(found[..., 78:], x[..., 78:], "dims that stay", "X N H")


@pytest.mark.further  # a whole tower in test_tower.py
def test_bfloat16_rounds_what_is_multiplied_with_values():
    """Each schedule is within a few roundings of the float32 definition, and not nearer to it than bfloat16 can be."""
    of = jnp.asarray(segments(20, 9, size=X))
    halves = [x.astype(jnp.bfloat16) for x in inputs(7)]
    exact = segment_attention(*(x.astype(jnp.float32) for x in halves), of)
    for backend in ("definition", "xla"):
        found = attend_segments(*halves, of, backend)
        assert found.dtype == jnp.bfloat16
        assert 1e-4 < float(jnp.abs(found.astype(jnp.float32) - exact).max()) < 0.02
