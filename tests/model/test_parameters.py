"""The model as a tree of parameters: how they are drawn, their dtypes, logical axes and summary."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import comparisons, tiny
from support.parameters import KeepsMade, assert_axes_name_their_sizes

from m3jax import model as m3_model
from m3jax.model import M3
from m3jax.model.build import parameter_dtype
from m3jax.model.summary import table

TOLERANCE = 5e-5
# For programs whose speed and last bits do not matter: it halves the time to compile them.
QUICK = {"xla_backend_optimization_level": 0}


def test_the_model_is_a_tree():
    """NNX in tree mode: leaves are arrays, and a model made of its leaves computes the same."""
    config = tiny.config("M")
    model, tokens = tiny.model(config), jnp.asarray(tiny.tokens(config, 1, 4))
    leaves, treedef = jax.tree.flatten(model)
    assert all(isinstance(x, jax.Array) for x in leaves)
    call = jax.jit(lambda m, t: m(t))
    expected = call(model, tokens)
    for other in (jax.tree.unflatten(treedef, leaves), nnx.merge(*nnx.split(model))):
        np.testing.assert_array_equal(call(other, tokens), expected)
    assert call._cache_size() == 1
    comparisons.assert_close(model(tokens), expected, "logits", "B T V", atol=TOLERANCE)  # without jit


@pytest.mark.further
def test_the_model_can_be_vmapped():
    config = tiny.config("M")
    model, tokens = tiny.model(config), tiny.tokens(config, 4, 20)
    call = lambda m, t: m(t)
    expected = jax.jit(call, compiler_options=QUICK)(model, tokens)
    over = jax.jit(jax.vmap(call, in_axes=(None, 0)), compiler_options=QUICK)
    found = over(model, tokens.reshape(2, 2, 20))
    comparisons.assert_close(found.reshape(expected.shape), expected, "logits", "B T V", atol=TOLERANCE)


def test_trees_of_one_structure():
    config = tiny.config("dMM")
    trees = [m3_model.abstract(config), tiny.logical_axes(config), m3_model.shardings(config, None)]
    structures = {jax.tree.structure(tree) for tree in trees}
    assert len(structures) == 1
    for leaf, axes in zip(*(jax.tree.leaves(tree) for tree in trees[:2]), strict=True):
        assert len(leaf.shape) == len(axes)


def test_each_axis_of_a_parameter_has_the_size_that_its_name_stands_for():
    """In a model whose sizes all differ: what divides over a mesh is what its name says."""
    sizes = {
        "layers": 1, "vocab": 64, "logits": 64, "heads": 8, "kv_heads": 4, "experts": 6, "mlp": {40, 88, 56},
    }  # fmt: skip
    config = replace(tiny.config("dDmM"), num_local_experts=6)
    assert_axes_name_their_sizes(M3(config, KeepsMade(), None), sizes)


@pytest.mark.parametrize("make", [m3_model.abstract, partial(m3_model.init, seed=0)])
def test_unknown_dtypes_are_refused(make):
    with pytest.raises(ValueError, match="dtype = 'int8': allowed are bfloat16"):
        make(tiny.config(), dtype="int8")
    with pytest.raises(ValueError, match="jax_enable_x64"):
        make(tiny.config(), dtype="float64")


@pytest.mark.parametrize(
    ("least", "of_model", "expected"),
    [
        (None, "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32"), ("float32", "float64", "float64"),
        ("float32", "float16", "float32"), ("uint8", "bfloat16", "uint8"), ("int32", "float64", "int32"),
    ],
)  # fmt: skip
def test_a_parameter_has_the_model_s_dtype_or_the_least_that_it_needs(least, of_model, expected):
    assert str(parameter_dtype(least, of_model)) == expected


def by_name(tree) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}


@pytest.mark.parametrize("vocab_size", [64, 1 << 15], ids=["cut from shared sizes", "drawn in its shape"])
def test_init_is_seeded(vocab_size):
    """The same seed gives the same numbers, another one others; each matrix has numbers of its own."""
    config = tiny.config("d", vocab_size=vocab_size)
    with jax.default_prng_impl("rbg"):  # quicker to compile
        one, same, other = (by_name(m3_model.init(config, seed)) for seed in (0, 0, 1))
    for name, leaf in one.items():
        np.testing.assert_array_equal(leaf, same[name])
        assert np.all(leaf == 0) if "norm" in name else np.any(leaf != other[name])
    k_proj, v_proj = (one[f"stacks.0.self_attn.{name}_proj.value"] for name in "kv")
    assert np.any(k_proj != v_proj)


def test_init_scales_by_fan_in():
    """The standard deviation of each matrix is that of its products' terms; the embedding is read, not summed."""
    fan_in = {
        "embed_tokens": 1, "o_proj": 8 * 16, "mlp.down_proj": 88, "mlp.experts.down_proj": 40,
        "shared_experts.down_proj": 56,
    }  # fmt: skip
    with jax.default_prng_impl("rbg"):
        found = by_name(m3_model.init(tiny.config("dM")))
    for name, leaf in found.items():
        if "norm" in name or "bias" in name:
            assert np.all(leaf == 0), name
        else:
            terms = next((terms for part, terms in fan_in.items() if part in name), 48)
            assert np.std(leaf) == pytest.approx(terms**-0.5, rel=0.08), name


def test_a_summary_is_a_table_of_the_parameters():
    class Two(nnx.Module):
        def __init__(self):
            self.wide = nnx.Param(jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16))
            self.norm = nnx.Param(jax.ShapeDtypeStruct((3,), jnp.float32))

    assert table(Two()).splitlines() == [
        "parameter  shape     dtype     numbers   MiB",
        "norm       3         float32         3  0.00",
        "wide       1024 512  bfloat16  524,288  1.00",
        "all                            524,291  1.00",
    ]


def test_a_line_of_a_summary_has_up_to_100_columns():
    """A name of 69 fills it up, with the least that the other columns take; a longer one is cut."""
    described = lambda width: nnx.Dict({"x" * width: nnx.Param(jax.ShapeDtypeStruct((3,), jnp.float32))})
    lines = table(described(69)).splitlines()
    assert {len(line) for line in lines} == {100} and "x" * 69 in lines[1]
    assert "x" * 68 + "…" in table(described(70)).splitlines()[1]
