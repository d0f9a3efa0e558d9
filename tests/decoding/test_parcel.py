"""Arrays that reach a call in one: they come out as they went in, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3jax.decoding.device.parcel import Parcel, opened

KINDS = "bool", "int32", "uint32", "float32"
SHAPES = (), (0,), (3,), (2, 1, 3)
arrays = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(SHAPES), st.booleans()), max_size=3)


def drawn(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bits: NaN of every kind, infinities, the largest numbers."""
    words = np.array(rng.integers(0, 2**32, shape, np.uint32))
    return words % 2 == 0 if kind == "bool" else words.view(kind)


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x if x.dtype == bool else x.view(np.uint32)


@given(arrays, st.integers(0, 2**32 - 1))
def test_a_tree_comes_out_of_its_parcel_to_the_bit(kinds, seed):
    """Those on the device stay there; an array may be a transposed one, and a place of the tree may be empty."""
    rng = np.random.default_rng(seed)
    given = [jnp.asarray(x) if on_device else x for *kind, on_device in kinds for x in [drawn(*kind, rng)]]
    tree = {"some": given, "none": None, "turned": drawn("int32", (2, 3), rng).T}
    parcel = Parcel.of(tree)
    assert [x for x in given if isinstance(x, jax.Array)] == list(parcel.others)
    assert isinstance(parcel.words, np.ndarray) and len(jax.tree.leaves(parcel)) == 1 + len(parcel.others)
    with jax.disable_jit():
        found = opened(parcel)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(bits(x), bits(y))


def test_a_program_opens_its_parcels_and_is_one_for_all_of_a_kind():
    """Other numbers compile nothing; another shape does, as it would without a parcel. A plain tree is let through."""
    add = jax.jit(lambda tree: opened(tree)["a"] + opened(tree)["b"])
    tree = lambda n, count=3: {"a": np.full(count, n, np.int32), "b": np.full(count, 0.5, np.float32)}
    assert add(Parcel.of(tree(1))).tolist() == [1.5] * 3 and add(Parcel.of(tree(7))).tolist() == [7.5] * 3
    assert add._cache_size() == 1
    assert add(Parcel.of(tree(1, 2))).tolist() == [1.5] * 2 == add(tree(1, 2)).tolist()


@pytest.mark.parametrize("dtype", ["int64", "float16", "uint8"])
def test_what_a_parcel_has_no_words_for_is_refused(dtype):
    with pytest.raises(TypeError, match=f"an array is {dtype}: a parcel has 32-bit numbers, and bools"):
        Parcel.of([np.zeros(2, dtype)])
