"""The pieces of a model by themselves: axes of parameters, names of values, meshes, divisions of tokens, drafts."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import tiny
from support.parameters import KeepsMade, assert_axes_name_their_sizes, made
from support.pytrees import assert_settings_are_static

from m3jax import model as m3_model
from m3jax.execution import Values
from m3jax.model import M3, eagle3
from m3jax.model.attention import Attention
from m3jax.model.context import Context
from m3jax.model.eagle3 import Eagle3, Eagle3Config
from m3jax.model.layers import MLP
from m3jax.model.moe import MoE
from m3jax.model.names import OF_LAYERS, as_pytrees, check_edits, check_names, check_recorded, expand, names_of
from m3jax.model.summary import table
from m3jax.parallel import mesh as meshes
from m3jax.parallel.mesh import AXES, as_mesh, make_mesh, parse_mesh
from m3jax.parallel.rules import PAGE_AXES, RULES, spec
from m3jax.parallel.tokens import token_axes

CONFIG = tiny.config("dDmM")


def test_settings_of_a_context_are_no_arrays():
    assert_settings_are_static(m3_model)
    assert {"config", "rules", "dense", "how"} <= {field.name for field in Context.__dataclass_fields__.values()}


# Parameters


def test_each_axis_of_a_parameter_has_the_size_that_its_name_stands_for():
    """In a model whose sizes all differ: what divides over a mesh is what its name says."""
    sizes = {
        "layers": 1, "vocab": 64, "logits": 64, "heads": 8, "kv_heads": 4, "experts": 6, "mlp": {40, 88, 56},
    }  # fmt: skip
    module = M3(replace(CONFIG, num_local_experts=6), KeepsMade(), None)
    assert_axes_name_their_sizes(module, sizes)
    named = {name.split(".")[-1]: parameter.axes for name, parameter in made(module).items() if any(parameter.axes)}
    to_heads, to_kv_heads = ("layers", None, "heads", None), ("layers", None, "kv_heads", None)
    assert {name: named[name] for name in ("q_proj", "k_proj", "v_proj", "index_q_proj", "o_proj", "lm_head")} == {
        "q_proj": to_heads, "k_proj": to_kv_heads, "v_proj": to_kv_heads, "index_q_proj": to_kv_heads,
        "o_proj": ("layers", "heads", None, None), "lm_head": ("logits", None),
    }  # fmt: skip


def test_parts_of_a_layer_have_their_shapes():
    """[L D N H] and the like, as the docstrings say, of three layers."""
    shapes = lambda module: {name: parameter.shape for name, parameter in made(module).items()}
    d, n, k, h, i = 48, 8, 4, 16, 20
    attention = {"q_proj": (3, d, n, h), "k_proj": (3, d, k, h), "v_proj": (3, d, k, h), "o_proj": (3, n, h, d)}
    attention |= {"q_norm": (3, h), "k_norm": (3, h)}
    assert shapes(Attention(3, CONFIG, False, KeepsMade())) == attention
    index = {"index_q_proj": (3, d, k, i), "index_k_proj": (3, d, i), "index_q_norm": (3, i), "index_k_norm": (3, i)}
    assert shapes(Attention(3, CONFIG, True, KeepsMade())) == attention | index
    assert shapes(MLP(3, d, 7, KeepsMade())) == {"gate_proj": (3, d, 7), "up_proj": (3, d, 7), "down_proj": (3, 7, d)}
    moe = shapes(MoE(3, CONFIG, KeepsMade()))
    assert {name: moe[name] for name in ("gate", "e_score_correction_bias")} == {
        "gate": (3, d, 8), "e_score_correction_bias": (3, 8),
    }  # fmt: skip
    experts = {name.split(".")[1]: shape for name, shape in moe.items() if name.startswith("experts.")}
    assert experts == {"gate_proj": (3, 8, d, 40), "up_proj": (3, 8, d, 40), "down_proj": (3, 8, 40, d)}


def draft_config(**changes) -> Eagle3Config:
    """A draft whose sizes all differ."""
    values = dict(
        hidden_size=5, vocab_size=7, draft_vocab_size=6, num_attention_heads=3, num_key_value_heads=1, head_dim=4,
        intermediate_size=9, taps=(0, 2),
    )  # fmt: skip
    return Eagle3Config(**values | changes)


def test_a_draft_s_parameters_have_their_shapes_and_scales():
    """Queries, keys and values read the embedding and the feature, twice the width; so many terms are summed."""
    parameters = made(Eagle3(draft_config(fc_norm=True), KeepsMade()))
    sizes = {"vocab": 7, "logits": 6, "heads": 3, "kv_heads": 1, "mlp": 9}
    assert_axes_name_their_sizes(Eagle3(draft_config(), KeepsMade()), sizes)
    expected = {
        "fc": ((2, 5, 5), 10), "q_proj": ((10, 3, 4), 10), "k_proj": ((10, 1, 4), 10), "v_proj": ((10, 1, 4), 10),
        "o_proj": ((3, 4, 5), 12), "gate_proj": ((5, 9), 5), "up_proj": ((5, 9), 5), "down_proj": ((9, 5), 9),
        "embed_tokens": ((7, 5), 1), "lm_head": ((6, 5), 5), "fc_norm": ((2, 5), None), "target_ids": ((6,), None),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm", "norm"), ((5,), None)),
    }  # fmt: skip
    assert {name: (parameter.shape, parameter.fan_in) for name, parameter in parameters.items()} == expected
    without = draft_config(draft_vocab_size=7, own_embedding=False, own_head=False)
    missing = {"embed_tokens", "lm_head", "fc_norm", "target_ids"}
    assert made(Eagle3(without, KeepsMade())).keys() == expected.keys() - missing
    assert {leaf.dtype for leaf in jax.tree.leaves(eagle3.abstract(draft_config()))} == {
        jnp.dtype("bfloat16"),
        jnp.dtype("int32"),
    }


def test_the_smallest_draft_and_what_is_smaller():
    counts = ("hidden_size", "vocab_size", "draft_vocab_size", "num_attention_heads", "num_key_value_heads",
              "intermediate_size")  # fmt: skip
    smallest = Eagle3Config(**dict.fromkeys(counts, 1), head_dim=2, taps=(0,))
    smallest.check_fits(tiny.config("d", hidden_size=1, vocab_size=1))
    for name in (*counts, "head_dim"):
        with pytest.raises(ValueError, match=f"{name} = 0: must be at least 1"):
            replace(smallest, **{name: 0})
    for changes, message in (
        (dict(head_dim=3), "head_dim = 3: must be even"),
        (dict(taps=()), r"tapped layers \[\]"),
        (dict(taps=(-1, 0)), r"tapped layers \[-1, 0\]"),
        (dict(taps=(2, 1)), r"tapped layers \[2, 1\]"),
        (dict(taps=(1, 1)), r"tapped layers \[1, 1\]"),
        (dict(vocab_size=2, own_head=False), "needs a head of the draft's own"),
        (dict(num_attention_heads=3, num_key_value_heads=2), "3 is no multiple of num_key_value_heads = 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(smallest, **changes)
    target = tiny.config("dM", hidden_size=5, vocab_size=7)
    draft_config().check_fits(target)  # reads the last layer's output
    for changes, message in (
        (dict(taps=(3,)), r"after layers \[3\], and the target has 2 layers"),
        (dict(draft_vocab_size=8), "it proposes 8 tokens of a vocabulary of 7"),
        (dict(hidden_size=4), "its hidden_size is 4, the target's 5$"),
    ):
        with pytest.raises(ValueError, match=message):
            draft_config(**changes).check_fits(target)


def test_a_draft_s_norm_is_the_ordinary_one():
    x, weight = np.float32([[1, -2, 3], [0, 0, 0]]), np.float32([1, 2, 0.5])
    expected = x / np.sqrt((x**2).mean(1, keepdims=True) + 0.25) * weight
    np.testing.assert_allclose(eagle3.rms_norm(jnp.asarray(x), jnp.asarray(weight), 0.25), expected, rtol=1e-6)
    narrow = eagle3.rms_norm(jnp.asarray(x, "bfloat16"), jnp.asarray(weight, "bfloat16"), 0.25)
    assert narrow.dtype == jnp.float32  # the caller rounds
    module = eagle3.init(draft_config())
    hidden = jnp.asarray(np.float32([[1, 2, 3, 4, 5]]))
    normed = eagle3.rms_norm(hidden, module.norm[...], 1e-6)
    np.testing.assert_array_equal(module.recur(hidden), hidden)
    np.testing.assert_allclose(replaced(module, norm_output=True).recur(hidden), normed, rtol=1e-6)
    targets = jnp.zeros((7, 5))  # not read: the draft has a head
    np.testing.assert_allclose(module.logits(hidden, targets), normed @ module.lm_head[...].T, rtol=1e-5, atol=1e-6)


def replaced(module: Eagle3, **changes) -> Eagle3:
    """A draft of the same parameters with another configuration."""
    other = nnx.clone(module)
    other.config = replace(module.config, **changes)
    return other


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


# Names


def test_names_stand_in_the_order_in_which_values_arise(monkeypatch):
    model, written = m3_model.abstract(tiny.config("dM"), "float32"), []

    def note(values, name, value):
        if not values:
            written.append([])
        written[-1].append(name)
        dict.__setitem__(values, name, value)

    monkeypatch.setattr(Values, "__setitem__", note, raising=False)
    jax.eval_shape(lambda m, t: m.intermediates(t), model, jax.ShapeDtypeStruct((1, 9), jnp.int32))
    assert written == [list(names) for names in names_of(model.config)]
    assert sorted(OF_LAYERS) == sorted(written[1])


def test_names_of_each_kind_of_layer():
    index, selection, routing = {"index_q", "index_k"}, {"block_scores", "blocks"}, {"expert_ids", "expert_weights"}
    for dense, lacking in ((False, set()), (True, selection)):
        missing = [set(OF_LAYERS) - set(names) for names in names_of(CONFIG, dense)]
        assert missing == [index | selection | routing, routing | lacking, index | selection, lacking]


def test_a_star_is_written_out_for_the_layers_that_have_the_value():
    given = ("layers.*.blocks", "embedding", "layers.0.q", "layers.*.expert_ids", "layers.1.blocks")
    expected = ("layers.1.blocks", "layers.3.blocks", "embedding", "layers.0.q", "layers.2.expert_ids",
                "layers.3.expert_ids")  # fmt: skip
    assert expand(given, CONFIG, False) == expected
    assert expand(("layers.*.q",), CONFIG, True) == tuple(f"layers.{n}.q" for n in range(4))


def test_only_values_of_the_call_have_names(unchecked):
    for names in (("embedding", "final_norm", "logits"), ("layers.0.q", "layers.3.blocks", "layers.*.index_k")):
        check_names(names, "names", CONFIG, dense=False)
    check_names(("layers.3.index_q", "layers.1.output"), "names", CONFIG, dense=True)
    check_names(("embedding", "layers.1.blocks", "layers.*.blocks"), "names", CONFIG, dense=False, stop_at=2)
    check_names((), "names", CONFIG, dense=False, stop_at=4)
    check_recorded(("final_norm", "layers.0.q"), CONFIG, dense=False)
    for name, options, message in (
        ("layers.0.blocks", {}, "has not: nearest are layers.3.blocks, layers.1.blocks, layers.*.blocks"),
        ("layers.4.q", {}, "which the model has not"),
        ("layers.3.blocks", dict(dense=True), "which the model has not"),
        ("layers.2.q", dict(stop_at=2), "which a call with stop_at = 2 has not"),
        ("layers.*.expert_ids", dict(stop_at=2), "which a call with stop_at = 2 has not"),
        ("logits", dict(stop_at=4), "which a call with stop_at = 4 has not"),
        ("zzzz", {}, "nearest are layers.0.output, embedding"),
        ("embedding", dict(stop_at=5), "stop_at = 5: layers that run, 0 to 4"),
        ("embedding", dict(stop_at=-1), "stop_at = -1: layers that run, 0 to 4"),
        ("embedding", dict(stop_at=True), "stop_at = True: layers that run, 0 to 4"),
        ("embedding", dict(stop_at=1.0), "stop_at = 1.0: layers that run, 0 to 4"),
    ):
        with pytest.raises(ValueError) as refused:
            check_names((name,), "names", CONFIG, **({"dense": False} | options))
        assert message in str(refused.value)
    with pytest.raises(ValueError, match="names has 'embedding' twice: give it once"):
        check_names(("embedding", "logits", "embedding"), "names", CONFIG, dense=False)
    with pytest.raises(ValueError, match="a call that records does not compute: ask for 'final_norm'"):
        check_recorded(("logits",), CONFIG, dense=False)


def test_an_edit_is_one_function_for_a_value(unchecked):
    edit = jnp.negative
    check_edits({"layers.*.q": edit, "layers.1.k": edit, "embedding": edit}, CONFIG, dense=False)
    for edits, message in (
        ([edit], "edits is a list: give functions by name"),
        ({"layers.0.q": 3}, r"edits\['layers.0.q'\] = 3: give a function of the value"),
        ({"layers.1.q": edit, "layers.*.q": edit}, "edits has 'layers.1.q' and 'layers.*.q': give one function"),
        ({"layers.*.q": edit, "layers.1.q": edit}, "edits has 'layers.1.q' and 'layers.*.q': give one function"),
    ):
        with pytest.raises(ValueError, match=message):
            check_edits(edits, CONFIG, dense=False)
    partial = jax.tree_util.Partial(jnp.add, jnp.ones(2))
    trees = as_pytrees({"a": partial, "b": jnp.negative})
    assert trees["a"] is partial and jax.tree.leaves(trees["b"]) == [] and trees["b"](1) == -1


# Meshes


def test_a_mesh_has_its_axes_in_order_and_no_device_more():
    assert dict(make_mesh().shape) == dict.fromkeys(AXES, 1)
    for axis in AXES:
        assert dict(make_mesh(**{axis: 2}).shape) == dict.fromkeys(AXES, 1) | {axis: 2}
    assert dict(make_mesh(1, 2, 1, 4).shape) == dict(data=1, context=2, expert=1, tensor=4)
    assert list(make_mesh(data=2, tensor=2).devices.flat) == jax.devices()[:4]
    assert dict(parse_mesh("tensor=2,data=4").shape) == dict(data=4, context=1, expert=1, tensor=2)
    assert as_mesh(None) is None and as_mesh("expert=2") == make_mesh(expert=2) == as_mesh(make_mesh(expert=2))
    needed = r"mesh data=1,context=1,expert=3,tensor=3 needs 9 devices, there are 8; .*device_count=9 to divide the CPU"
    with pytest.raises(ValueError, match=needed):
        make_mesh(expert=3, tensor=3)


def test_another_mesh_is_refused_with_the_nearest_one(unchecked):
    devices = np.array(jax.devices())
    other = lambda shape, names: jax.sharding.Mesh(devices[: math.prod(shape)].reshape(shape), names)
    for mesh, nearest in (
        (other((2, 2), ("dp", "model")), "make_mesh(data=2, tensor=2)"),
        (other((2, 2, 2), ("fsdp", "sp", "ep")), "make_mesh(data=2, context=2, expert=2)"),
        (other((2, 2, 2), ("batch", "cp", "tp")), "make_mesh(data=2, context=2, tensor=2)"),
        (other((2, 2), ("x", "y")), "make_mesh(tensor=4)"),
        (other((2, 4), ("data", "tensor")), "make_mesh(data=2, tensor=4)"),
    ):
        with pytest.raises(ValueError) as refused:
            as_mesh(mesh)
        assert str(refused.value).endswith(f"m3jax.{nearest} is the nearest")
    with pytest.raises(ValueError, match="mesh is a tuple: make one with"):
        as_mesh((2, 4))


def test_several_processes_take_all_devices(monkeypatch):
    monkeypatch.setattr(meshes.jax, "process_count", lambda: 2)
    assert make_mesh(tensor=8).size == 8
    with pytest.raises(
        ValueError, match=r"mesh data=1,context=1,expert=1,tensor=4 has 4 devices, the 2 processes have 8"
    ):
        make_mesh(tensor=4)


SHAPES = [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 2, 4), (1, 4, 1, 2), (8, 1, 1, 1)]


def divided(size: int, name: str | None, shape: dict[str, int]) -> tuple[str, ...] | None:
    """The axes that divide a dimension, by their definition; None where it is refused."""
    rule = RULES.get(name, ())
    axes = rule if isinstance(rule, tuple) else (rule,)
    last_ones = [axes[first:] for first in range(len(axes) + 1)]
    fits = [x for x in last_ones if size % math.prod(shape[axis] for axis in x) == 0]
    if name not in ("kv_heads", "tokens", "logits", "vision_heads", "vision_mlp") and axes not in fits:
        return None
    return fits[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dimension_lies_over_the_axes_of_its_rule(shape):
    """Over all of them, or the last ones that divide it where the rule says so; over axes of one device it is whole."""
    mesh = make_mesh(*shape)
    for name, size in itertools.product((*RULES, None, "layers"), (1, 2, 3, 4, 6, 8, 12, 16)):
        axes = divided(size, name, dict(mesh.shape))
        if axes is None:
            with pytest.raises(ValueError, match=f"axis {name!r} of size {size} does not divide over"):
                spec((5, size), (None, name), mesh)
            continue
        parts = math.prod(mesh.shape[axis] for axis in axes)
        expected = None if parts == 1 else axes if isinstance(RULES[name], tuple) else axes[0]
        assert spec((5, size), (None, name), mesh) == P(None, expected), (name, size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_lie_over_the_axes_that_divide_them(shape):
    """From the least number on; one row's columns, several rows' rows; the stream over the tensor axis too."""
    mesh = make_mesh(*shape)
    for of_tokens in ((4,), (7,), (8,), (12,), (16,), (1, 8), (1, 12), (2, 8), (6, 4), (8, 1)):
        found = token_axes(of_tokens, mesh, least=8)
        dim = 1 if of_tokens[0] == 1 and len(of_tokens) == 2 else 0
        axes, parts = [], 1
        for axis in PAGE_AXES if math.prod(of_tokens) >= 8 else ():
            if mesh.shape[axis] > 1 and of_tokens[dim] % (parts * mesh.shape[axis]) == 0:
                axes, parts = [*axes, axis], parts * mesh.shape[axis]
        tensor = mesh.shape["tensor"]
        is_scattered = math.prod(of_tokens) >= 8 and tensor > 1 and of_tokens[dim] // parts % tensor == 0
        expected = (tuple(axes), is_scattered, dim, len(of_tokens))
        assert (found.products, found.is_scattered, found.dim, found.num_leading) == expected, of_tokens
        assert found.whole == tuple(x for x in PAGE_AXES if mesh.shape[x] > 1 and x not in axes)
        leading = [None] * len(of_tokens)
        leading[dim] = tuple(axes) or None
        assert found.of_products("tensor", None) == P(*leading, "tensor", None)
        leading[dim] = (*axes, "tensor") if is_scattered else tuple(axes) or None
        assert found.of_stream() == P(*leading)
