"""Edits and captures of named values, and which layers run together."""

import gc

import jax.numpy as jnp
import numpy as np
import pytest

import m3jax
from m3jax.execution.tap import Tap, Taps, apply_edit


def test_an_edit_is_rounded_to_the_value_s_dtype_and_may_see_others():
    value = jnp.arange(3, dtype="bfloat16")
    assert apply_edit("x", lambda value: value + jnp.float32(0.25), value, {}).dtype == "bfloat16"
    seen = {"layer": jnp.int32(4)}
    found = apply_edit("x", lambda value, seen: value + seen["layer"].astype(value.dtype), value, seen)
    np.testing.assert_array_equal(found, [4, 5, 6])
    optional = lambda value, factor=2: factor * value  # one argument that it must be given
    np.testing.assert_array_equal(apply_edit("x", optional, value, seen), [0, 2, 4])
    np.testing.assert_array_equal(apply_edit("x", jnp.negative, value, seen), [0, -1, -2])


@pytest.fixture
def few_objects():
    """Takes what is there from the garbage collector, which would look through all of it, at seconds a time."""
    gc.freeze()


@pytest.mark.usefixtures("few_objects")
def test_a_value_that_waits_for_the_garbage_collector_is_not_kept():
    def edit(value):
        cycle = [2 * value]
        cycle.append(cycle)
        return cycle[0]

    np.testing.assert_array_equal(apply_edit("x", edit, jnp.arange(3.0), {}), [0, 2, 4])


def test_an_edit_s_own_error_is_its_own():
    def fails(value):
        raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        apply_edit("x", fails, jnp.arange(3.0), {})
    ids = jnp.arange(3, dtype=jnp.int32)
    assert apply_edit("x", lambda value: value + 1, ids, {}).dtype == jnp.int32
    with pytest.raises(ValueError, match="returns float32"):
        apply_edit("x", lambda value: value * 1.0, ids, {})


def edited(name, chosen, old):
    """What `checks()` say of an edit that puts a selection in the place of another, for two rows of three tokens."""
    seen = {"positions": jnp.array([[8, 9, 10], [0, 1, 2]], jnp.int32), "lengths": jnp.array([10, 2], jnp.int32)}
    tap = Tap(edits={name: lambda value: chosen}, seen=seen, prefix="layers.1.", limits=(4, 6))
    try:
        with m3jax.checks():
            new = tap(name, old)
    except ValueError as error:
        return str(error)
    np.testing.assert_array_equal(new, chosen)
    return ""


def test_a_changed_selection_is_looked_at():
    """Position 10 of the first row and 2 of the second are padding, which may hold anything."""
    good = np.full((2, 1, 3, 3), -1, np.int32)
    good[0, 0, :2], good[1, 0, :2, 0] = [0, 2, -1], 0

    def found(index, chosen):
        blocks = good.copy()
        blocks[index] = chosen
        return edited("blocks", jnp.asarray(blocks), jnp.asarray(good))

    assert not found((0, 0, 1), [2, -1, -1]) and not found((0, 0, 0), [0, 1, 2]) and not found((0, 0, 2), [7, 7, 7])
    assert not found((1, 0, 2), [5, 1, -1])
    for chosen in ([2, 0, -1], [0, 0, 2], [0, 1, -1], [-1, 2, -1], [-1, -1, -1], [0, 2, 3], [0, -1, 2]):
        message = found((0, 0, 1), chosen)
        assert f"edits['layers.1.blocks'] gives {chosen} for row 0, KV head 0, token 1: give distinct ids" in message
        assert "the token's own block 2" in message

    def of_experts(index, chosen):
        ids = np.broadcast_to(np.array([0, 5], np.int32), (2, 3, 2)).copy()
        ids[index] = chosen
        return edited("expert_ids", jnp.asarray(ids), jnp.asarray(ids + 0))

    assert not of_experts((0, 1), [5, 0]) and not of_experts((0, 2), [9, 9]) and not of_experts((1, 2), [-1, 0])
    for chosen in ([3, 3], [0, 6], [-1, 2]):
        message = of_experts((1, 1), chosen)
        expected = f"edits['layers.1.expert_ids'] gives {chosen} for row 1, token 1: give distinct ids from 0 to 5"
        assert expected in message


def test_layers_that_are_asked_alike_run_together():
    """Two stacks, of two and three layers: an edit of layer 3, a value of layers 0 and 1, one of all; an early end."""
    identity = lambda value: value
    assert Taps().runs(0, 4) == [(0, 4)]
    taps = Taps(edits={"layers.3.q": identity}, names=("layers.0.k", "layers.1.k", "layers.*.output"))
    assert taps.runs(0, 2) == [(0, 2)] and taps.runs(2, 3) == [(0, 1), (1, 2), (2, 3)]
    assert Taps(names=("layers.*.k",)).runs(2, 3) == [(0, 3)]
    for stop_at, expected in ((0, [0, 0]), (1, [1, 0]), (2, [2, 0]), (3, [2, 1]), (9, [2, 3])):
        ends = [Taps(stop_at=stop_at).runs(before, depth) for before, depth in ((0, 2), (2, 3))]
        assert [sum(end - first for first, end in runs) for runs in ends] == expected
    kept = [{"output": jnp.arange(2)}, *({"output": jnp.array([layer])} for layer in (2, 3, 4))]
    assert taps.by_layer(kept, (2, 3)) == {layer: {"output": layer} for layer in range(5)}


def test_a_tap_returns_its_argument_unless_it_is_edited():
    x, tap = jnp.ones(1), Tap(kept=frozenset({"k"}), edits={"q": jnp.negative})
    assert tap("k", x) is x and tap("v", x) is x
    assert tap("q", x).tolist() == [-1] and tap.values["q"].tolist() == [-1]
    assert tap.kept == {"k": x}
    assert [tap.wants(name) for name in "qkv"] == [True, True, False]
    assert [tap.edits(name) for name in "qkv"] == [True, False, False]
    assert tap.wants("v", "k") and not tap.edits("k", "v")
