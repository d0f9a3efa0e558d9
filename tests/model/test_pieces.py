"""The pieces of a model by themselves: axes of parameters, names of values, meshes, divisions of tokens, drafts."""

import itertools
import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int
from support import tiny
from support.parameters import KeepsMade, assert_axes_name_their_sizes, made
from support.pytrees import assert_settings_are_static

from m3jax import M3Config, arrays
from m3jax import model as m3_model
from m3jax.cache import CallPages
from m3jax.execution import Values
from m3jax.media import batch
from m3jax.model import M3, attention, build, calls, eagle3
from m3jax.model.attention import Attention
from m3jax.model.choices import Choices, shapes_of
from m3jax.model.context import Context
from m3jax.model.eagle3 import Eagle3, Eagle3Config
from m3jax.model.layers import MLP, rope_table, swiglu_oai
from m3jax.model.media import WithTower, join_features
from m3jax.model.moe import MoE
from m3jax.model.names import OF_LAYERS, as_pytrees, check_edits, check_names, check_recorded, expand, names_of
from m3jax.model.summary import table
from m3jax.ops import interpret
from m3jax.parallel import mesh as meshes
from m3jax.parallel import place as placing
from m3jax.parallel.mesh import AXES, as_mesh, make_mesh, parse_mesh
from m3jax.parallel.rules import PAGE_AXES, RULES, spec
from m3jax.parallel.tokens import token_axes
from m3jax.weights import StackedLayer

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


def test_a_draft_is_drawn_with_the_scale_of_its_terms():
    """Each matrix from the next numbers of the seed; norms are 1, and a reduced vocabulary is the first ids."""
    module, draw, drawn = eagle3.init(draft_config(fc_norm=True), seed=3), np.random.default_rng(3), []
    for name, parameter in made(Eagle3(draft_config(fc_norm=True), KeepsMade())).items():
        if parameter.fan_in is not None:
            drawn.append((name, parameter.shape, parameter.fan_in))
        elif name != "target_ids":
            np.testing.assert_array_equal(getattr(module, name)[...], np.ones(parameter.shape, np.float32))
    order = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens",
             "lm_head")  # fmt: skip
    for name, shape, fan_in in sorted(drawn, key=lambda each: order.index(each[0])):
        expected = (draw.normal(size=shape) * fan_in**-0.5).astype(np.float32)
        np.testing.assert_array_equal(getattr(module, name)[...], expected, err_msg=name)
    np.testing.assert_array_equal(module.target_ids[...], np.arange(6, dtype=np.int32), strict=True)


def test_random_matrices_have_keys_of_their_own():
    """Matrix i is cut from a draw by key i, of the next size of three, so that its numbers stay those of the seed."""
    assert build._SMALL_SIZES == (2**12, 2**16, 2**20)
    key = jax.random.key(5)
    make = build.MakeRandom(key, "float32", None)
    for number, (shape, size) in enumerate((((2, 2), 2**12), ((2, 2), 2**12), ((64, 64), 2**12), ((17, 241), 2**16))):
        found = make.weight(shape, (None, None), fan_in=4)[...]
        numbers = jax.random.normal(jax.random.fold_in(key, number), (size,))
        np.testing.assert_array_equal(found, 0.5 * numbers[: math.prod(shape)].reshape(shape))


def test_what_reads_the_stream_and_does_not_train_it(monkeypatch, unchecked):
    """T33: the index branch's two products, the last ones; queries, keys and values come first, in their order."""

    def project_each(spec, x, weights, num_detached):
        return [(str(weight), index >= len(weights) - num_detached) for index, weight in enumerate(weights)]

    monkeypatch.setattr(attention, "project_each", project_each)
    kinds = ("q", "k", "v", "index_q", "index_k")
    layer = SimpleNamespace(**{f"{kind}_{part}": np.array(kind) for kind in kinds for part in ("proj", "norm")})
    context = SimpleNamespace(how=SimpleNamespace(heads=lambda projections: projections), config=CONFIG)
    for is_sparse, count in ((False, 3), (True, 5)):
        layer.is_sparse = is_sparse
        found = Attention.project(layer, np.zeros((1, 2, 48), np.float32), "cos", "sin", context)
        assert [*found.raw][:count] == [(kind, i >= 3) for i, kind in enumerate(kinds[:count])]
        assert [str(norm) for norm in found.norms] == [
            kind if kind != "v" and i < count else "None" for i, kind in enumerate(kinds)
        ]
        assert (found.cos, found.sin, found.eps, found.dtype) == ("cos", "sin", CONFIG.rms_norm_eps, np.float32)


@dataclass(frozen=True)
class Described:
    """What `MakeEach` asks of its function: an array, and its axes in place of a sharding."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None

    def __getitem__(self, index):
        return self


def test_a_matrix_in_mxfp8_has_a_scale_for_every_32_inputs_and_their_axes(unchecked):
    """Inputs of several axes are one, which lies as the first of them does; what is no matrix of a layer is as ever."""
    make = build.MakeEach(Described, "mxfp8")
    to_heads = ("layers", None, "heads", None)
    for shape, axes, sizes, scales, of_scales in (
        ((2, 64, 3, 5), ("layers", None, "heads", None), dict(outputs=2), (2, 2, 3, 5), to_heads),
        ((2, 3, 16, 64), ("layers", "heads", None, None), dict(inputs=2), (2, 2, 64), ("layers", "heads", None)),
        ((2, 4, 33, 5), ("layers", "experts", None, "mlp"), {}, (2, 4, 2, 5), ("layers", "experts", None, "mlp")),
    ):  # fmt: skip
        matrix = make.linear(shape, axes, **sizes)[...]
        assert (matrix.codes.shape, matrix.codes.axes, matrix.codes.dtype) == (shape, axes, "uint8")
        assert (matrix.scales.shape, matrix.scales.axes, matrix.scales.dtype) == (scales, of_scales, "uint8")
        assert (matrix.num_inputs, matrix.num_outputs) == (sizes.get("inputs", 1), sizes.get("outputs", 1))
        whole = build.MakeEach(Described).linear(shape, axes, **sizes)[...]
        assert (whole.shape, whole.axes, whole.dtype) == (shape, axes, None)
    weight, norm = make.weight((4, 2), ("vocab", None), fan_in=1, dtype="float32")[...], make.norm((3, 2))[...]
    assert (weight.shape, weight.axes, weight.dtype) == ((4, 2), ("vocab", None), "float32")
    assert (norm.shape, norm.axes, norm.dtype) == ((3, 2), (None, None), None)


@pytest.mark.usefixtures("eight_devices")
def test_a_mesh_leaves_blocks_of_32_inputs_whole(unchecked):
    make = build.MakeEach(Described, "mxfp8", make_mesh(tensor=2))
    make.linear((1, 64, 4), ("layers", "mlp", None))
    make.linear((1, 2, 32, 4), ("layers", "heads", None, None), inputs=2)
    make.linear((1, 33, 6), ("layers", None, "mlp"))  # the outputs are divided
    for shape, axes, inputs, channels in (
        ((1, 32, 4), ("layers", "mlp", None), 1, 32), ((1, 96, 4), ("layers", "mlp", None), 1, 96),
        ((1, 2, 16, 4), ("layers", "heads", None, None), 2, 32),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"mesh axis 'tensor' of size 2 cuts {channels} input channels"):
            make.linear(shape, axes, inputs=inputs)


def test_dtypes_of_parameters():
    names = [build.dtype_name(dtype) for dtype in ("float16", jnp.bfloat16, jnp.dtype("float32"))]
    assert names == ["float16", "bfloat16", "float32"]
    for least, of_model, expected in (
        (None, "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32"), ("float32", "float64", "float64"),
        ("float32", "float16", "float32"), ("uint8", "bfloat16", "uint8"), ("int32", "float64", "int32"),
    ):  # fmt: skip
        assert str(build.parameter_dtype(least, of_model)) == expected
    for name in build.WEIGHTS:
        build.check_weights(name)
    with pytest.raises(ValueError, match="weights = 'int8': allowed are 'dequantize', 'mxfp8'"):
        build.check_weights("int8")
    model = m3_model.abstract(tiny.config("d"), "bfloat16")
    assert build.num_bytes(model) == 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


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
    with pytest.raises(ValueError) as refused:  # all of them at once, in the order of the fields
        replace(smallest, **dict.fromkeys((*counts, "head_dim"), 0))
    fields = [name for name in Eagle3Config.__dataclass_fields__ if name in (*counts, "head_dim")]
    assert re.findall(r"(\w+) = 0", str(refused.value)) == fields
    defaults = dict(rms_norm_eps=1e-6, rope_theta=1e4, fc_norm=False, norm_output=False, norm_before_residual=False,
                    own_embedding=True, own_head=True)  # fmt: skip
    assert {name: getattr(smallest, name) for name in defaults} == defaults
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


def test_a_line_of_a_summary_has_up_to_100_columns():
    """A name of 69 fills it up, with the least that the other columns take; a longer one is cut."""
    described = lambda width: nnx.Dict({"x" * width: nnx.Param(jax.ShapeDtypeStruct((3,), jnp.float32))})
    lines = table(described(69)).splitlines()
    assert {len(line) for line in lines} == {100} and "x" * 69 in lines[1]
    assert "x" * 68 + "…" in table(described(70)).splitlines()[1]


# Ways to compute


def test_a_model_is_changed_in_what_a_method_says_alone(unchecked):
    model = m3_model.abstract(tiny.config("M"), "float32")
    in_tiles = dict(schedule="invariant", expert_path="in_fixed_tiles", invariant=True, call_pages=CallPages)
    for changed, expected in (
        (model.with_schedule("mask"), dict(schedule="mask")), (model.with_backend("triton"), dict(backend="triton")),
        (model.with_invariance(), in_tiles), (model.with_invariance().with_invariance(False), {}),
        (model.with_training_paths(CallPages, "copied"), dict(call_pages=CallPages, expert_path="copied")),
        (model.with_dense(), {}), (model.with_score("lse"), {}),
    ):  # fmt: skip
        assert changed.compute == replace(model.compute, **expected), expected
    assert [model.dense, model.with_dense().dense, model.with_dense().with_dense(False).dense] == [False, True, False]
    assert (model.score, model.with_score("lse").score) == ("max", "lse")
    for refused, message in (
        (lambda: model.with_backend("cuda"), "backend = 'cuda': allowed are 'auto', 'xla', 'triton', 'mosaic_tpu'"),
        (lambda: model.with_score("mean"), "score = 'mean'"),
        (lambda: model.with_score(lambda scores: scores), "it returned shape"),
        (lambda: model.with_activations("mxfp8"), "no weight is in MXFP8"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


def test_layers_apart_leave_in_their_stacks_what_a_kernel_of_a_step_reads():
    """By XLA each layer has matrices of its own; kernels of one order have a stack, which stays where it lies."""
    whole_pieces = dict(
        hidden_size=128, head_dim=64, index_head_dim=64, rotary_dim=32, intermediate_size=128, vocab_size=128,
        dense_intermediate_size=128, shared_intermediate_size=64, num_local_experts=16,
    )  # fmt: skip
    model = m3_model.abstract(tiny.config("DD", **whole_pieces), "bfloat16")
    first_layer = lambda model: jax.eval_shape(lambda model: model.with_layers_apart(1), model).stacks[0].apart[0]
    by_xla = first_layer(model)
    with interpret():
        by_kernels = first_layer(model.with_invariance())
    for layer, stays in ((by_xla, False), (by_kernels, True)):
        matrix, norm = layer.self_attn.q_proj.get_value(), layer.input_layernorm.get_value()
        assert isinstance(matrix, StackedLayer) == stays and norm.shape == (128,)
        assert (matrix.stack if stays else matrix).shape == (*[2] * stays, 128, 8, 64)


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


@pytest.mark.usefixtures("eight_devices")
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
    with pytest.raises(ValueError, match=r"needs 8 devices, there are 8; .* whose product is at most that$"):
        make_mesh(data=-2, context=-4)


@pytest.mark.usefixtures("eight_devices")
def test_what_one_process_can_read_is_not_copied():
    """Numpy's memory, an array of one device, and one that is divided over this process's devices."""
    divided = jax.device_put(np.arange(8.0), NamedSharding(make_mesh(data=4), P("data")))
    for array in (np.ones(2), jnp.ones(2), divided):
        assert placing._readable(array) is array
    assert placing.read([divided])[0].tolist() == [*range(8)]


@pytest.mark.usefixtures("eight_devices")
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


@pytest.mark.usefixtures("eight_devices")
def test_several_processes_take_all_devices(monkeypatch):
    monkeypatch.setattr(meshes.jax, "process_count", lambda: 2)
    assert make_mesh(tensor=8).size == 8
    with pytest.raises(
        ValueError, match=r"mesh data=1,context=1,expert=1,tensor=4 has 4 devices, the 2 processes have 8"
    ):
        make_mesh(tensor=4)


@pytest.mark.usefixtures("eight_devices")
def test_arrays_of_one_process_take_no_detour(monkeypatch, unchecked):
    """They are put where they shall lie as they are, and a program leaves them where they lie."""
    mesh = make_mesh(tensor=8)
    divided_by_8, everywhere = NamedSharding(mesh, P("tensor")), NamedSharding(mesh, P())
    with monkeypatch.context() as patch:
        patch.setattr(placing, "np", None)  # no copy of it on the host
        patch.setattr(placing.jax, "make_array_from_callback", None)
        array = placing.put(jnp.arange(16), divided_by_8)
    assert array.sharding == divided_by_8 and [*map(int, array)] == [*range(16)]
    tree = {"a": array}
    for like in (None, divided_by_8, jax.sharding.SingleDeviceSharding(jax.devices()[0])):
        assert placing.whole(tree, like) is tree
    # Of several processes each fills its own part, and a program gives every device all of it.
    of_several = SimpleNamespace(is_fully_addressable=False, mesh=mesh)
    (found,) = placing.whole({"a": array}, of_several).values()
    assert found.sharding == everywhere
    asked = []
    note = lambda shape, where, part_of: asked.append((shape, where, part_of((slice(2, 4),)).tolist()))
    monkeypatch.setattr(placing.jax, "make_array_from_callback", note)
    placing.put(np.arange(6), of_several)
    assert asked == [((6,), of_several, [2, 3])]


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


@pytest.mark.usefixtures("eight_devices")
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


@pytest.mark.usefixtures("eight_devices")
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


# Choices


def test_recorded_choices_stand_where_their_tokens_were_drawn():
    """Of new token i at the position before it; all columns before the prompt's last choose for themselves."""
    records = {"expert_ids": np.arange(12).reshape(3, 2, 2), "blocks": np.arange(12).reshape(3, 2, 2, 1)}
    choices = Choices.of_records(records, prompt_tokens=4)
    assert choices.expert_ids.shape == (1, 7, 2, 2) and choices.blocks.shape == (1, 7, 2, 2, 1)
    for name, record in records.items():
        found = getattr(choices, name)
        np.testing.assert_array_equal(found[0, 3:6], record)
        assert found.dtype == np.int32 and (found[0, [0, 1, 2, 6]] == -1).all()
    assert Choices.of_records({"blocks": records["blocks"]}, 1, length=3).blocks.shape == (1, 3, 2, 2, 1)
    for given, message in (
        (({"x": np.zeros((1, 1, 1), int)}, 1), "records has 'x': choices are expert_ids, blocks"),
        (({"blocks": records["blocks"]}, 0), "3 new tokens behind 0 of the prompt do not fit into 3 columns"),
        (({"blocks": records["blocks"]}, 2, 3), "3 new tokens behind 2 of the prompt do not fit into 3 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            Choices.of_records(*given)


def test_layers_get_the_choices_of_their_kind():
    """Of dense and sparse layers with and without experts: each counts among those that choose."""
    config = tiny.config("dmMMD")  # experts in 1, 2, 3; blocks in 2, 3, 4
    shapes = shapes_of(config, 2, 5)
    assert shapes == {"expert_ids": (2, 5, 3, 2), "blocks": (2, 5, 3, 4, 3)}
    ids, blocks = (np.arange(math.prod(shape), dtype=np.int32).reshape(shape) for shape in shapes.values())
    choices = Choices(ids, blocks)
    for first, depth, experts, sparse in ((0, 1, None, None), (1, 1, 0, None), (2, 2, 1, 0), (4, 1, None, 2)):
        found = choices.of_layers(config, first, depth)
        expected_ids = None if experts is None else np.moveaxis(ids[:, :, experts : experts + depth], 2, 0)
        of_layers = None if sparse is None else np.moveaxis(blocks[:, :, sparse : sparse + depth], 2, 0)
        expected_blocks = None if of_layers is None else np.swapaxes(of_layers, 2, 3)  # [L B T K J] -> [L B K T J]
        for x, expected in ((found.expert_ids, expected_ids), (found.blocks, expected_blocks)):
            assert (x is None) == (expected is None)
            if expected is not None:
                np.testing.assert_array_equal(x, expected)
    assert Choices(ids).of_layers(config, 2, 2).blocks is None


def test_choices_that_no_model_can_have_made_are_found():
    """Three tokens, the last of which is padding; blocks of 8, of which token 9 has 0 and its own, 1."""
    config, at = tiny.config("M"), (np.array([[9, 7, 12]]), np.array([12]))

    def of_experts(token, chosen):
        ids = np.broadcast_to(np.array([0, 7]), (1, 3, 1, 2)).copy()
        ids[0, token, 0] = chosen
        return Choices(expert_ids=ids).find_problem(config, *at)

    assert not any(of_experts(*x) for x in ((0, [7, 0]), (0, [-1, 9]), (2, [9, 9]), (1, [3, 4])))
    for chosen in ([3, 3], [0, 8], [0, -1]):
        found = of_experts(1, chosen)
        assert found.startswith(f"choices.expert_ids[0, 1, 0] = {chosen}: give distinct ids from 0 to 7, or -1 first")

    three = lambda *ids: Choices(expert_ids=np.full((1, 3, 1, 3), ids)).find_problem(config, *at)
    assert not three(5, 3, 4) and not three(7, 0, 3)
    for twice in ((3, 5, 3), (3, 3, 5), (5, 3, 3)):
        assert f"choices.expert_ids[0, 0, 0] = {list(twice)}: give distinct ids" in three(*twice)

    def of_blocks(token, chosen, head=3):
        blocks = np.full((1, 3, 1, 4, 3), -1)
        blocks[0, 0, 0, :, :2], blocks[0, 1, 0, :, 0] = [0, 1], 0
        blocks[0, token, 0, head] = chosen
        return Choices(blocks=blocks).find_problem(config, *at)

    assert not any(of_blocks(*x) for x in ((0, [1, -1, -1]), (0, [-1, 5, 0]), (2, [9, 3, 3]), (1, [0, -1, -1])))
    for chosen in ([0, -1, -1], [1, 0, -1], [0, 1, 1], [0, -1, 1], [0, 1, 2], [1, 1, -1]):
        found = of_blocks(0, chosen)
        assert found.startswith(
            f"choices.blocks[0, 0, 0, 3] = {chosen}: give ascending ids up to the token's own block 1"
        )
    assert "own block 0" in of_blocks(1, [0, 1, -1], head=0)
    assert Choices().find_problem(config, *at) is None


# Calls


def test_a_call_is_refused_by_its_numbers(unchecked):
    """Each limit used up passes, and one more is refused; what fills a row up may hold anything."""
    config = tiny.config("d", max_position_embeddings=16)
    model = SimpleNamespace(config=config, check_media=lambda *_: None)
    tokens = np.zeros((2, 4), np.int32)

    def found(tokens=tokens, **changes):
        arguments = {"self": model, "tokens": jnp.asarray(tokens)} | changes
        try:
            calls._check_call(arguments, {})
        except ValueError as error:
            return str(error)
        return ""

    rows = lambda *values: jnp.array(values, jnp.int32)
    assert not found() and not found(np.full((2, 16), 63)) and not found(lengths=rows(0, 4))
    assert "tokens has 17 columns and the model's context is 16 tokens" in found(np.zeros((1, 17), np.int32))
    assert "lengths[1] = 17: the model's context is 16 tokens" in found(lengths=rows(16, 17))
    assert "lengths[0] = -1" in found(lengths=rows(-1, 17))
    wrong = tokens.copy()
    wrong[1, 2] = 64
    assert "tokens[1, 2] = 64: token ids are 0 to 63" in found(wrong)
    assert "tokens[1, 2] = 64" in found(wrong, lengths=rows(4, 3)) and not found(wrong, lengths=rows(4, 2))
    assert not found(wrong, positions=rows([0, 1, 2, 3], [0, 1, -1, 2]), lengths=rows(4, 4))
    wrong[1, 2] = -1
    assert "tokens[1, 2] = -1" in found(wrong)
    cache = SimpleNamespace(table=np.zeros((2, 1)), page_size=8)
    at = dict(cache=cache, positions=rows([4, 5, 6, 7], [0, 1, 2, 3]))
    assert not found(**at, lengths=rows(8, 4))
    assert "lengths[0] = 9: a row of this cache has room for 8 tokens" in found(**at, lengths=rows(9, 4))
    roomy = at | {"cache": SimpleNamespace(table=np.zeros((2, 2)), page_size=8)}
    assert "lengths[0] = 17: the model's context is 16 tokens" in found(**roomy, lengths=rows(17, 4))
    assert "a call with a cache needs positions" in found(cache=cache, lengths=rows(4, 4))
    assert "media or embeddings, not both" in found(media=(), embeddings=jnp.zeros((2, 4, 48)))
    config_of = SimpleNamespace(config=tiny.config("M"), check_media=None)
    given = Choices(expert_ids=np.zeros((2, 3, 1, 2), np.int32))
    shapes = "choices.expert_ids has shape (2, 3, 1, 2), and this call of this model needs (2, 4, 1, 2)"
    assert shapes in found(**{"self": config_of, "choices": given})


@struct.dataclass
class Called:
    """A model that says of each of its programs whether values are looked into in it."""

    config: M3Config = struct.field(pytree_node=False)
    looks: list = struct.field(pytree_node=False)
    dense: bool = struct.field(pytree_node=False, default=False)

    def __hash__(self):
        return id(self)

    @calls.model_call("names", "stop_at")
    def run(self, tokens: Int[Array, "B T"], *, edits=None, names=None, stop_at=None) -> tuple:
        self.looks.append((arrays.is_checking(), names, stop_at))
        return tokens, {name: edit(tokens) for name, edit in (edits or {}).items()}


def test_values_are_looked_into_where_a_selection_is_changed_and_nowhere_else():
    """A program takes edits as pytrees and names as a tuple; that of one call is that of the next."""
    tokens, looks = jnp.zeros((1, 2), jnp.int32), Looks()
    model = Called(tiny.config("M"), looks)
    for options, expected in (
        ({}, (False, None, None)), (dict(edits={"layers.0.q": jnp.negative}), (False, None, None)),
        (dict(edits={"layers.0.blocks": jnp.negative}), (True, None, None)),
        (dict(edits={"embedding": abs, "layers.*.expert_ids": jnp.negative}), (True, None, None)),
        (dict(names=["layers.0.q"], stop_at=1), (False, ("layers.0.q",), 1)), (dict(stop_at=1), (False, None, 1)),
    ):  # fmt: skip
        found = model.run(tokens, **options)
        model.run(tokens, **options)  # nothing is traced again
        assert looks.pop() == expected and not looks, options
        assert found[1].keys() == options.get("edits", {}).keys()


class Looks(list):
    """A list that a program may be compiled for."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


# Layers and features


def test_tables_of_angles_and_the_clamped_product():
    cos, sin = rope_table(jnp.array([[0, 3]], jnp.int32), 4, 100.0, jnp.dtype("float32"))
    np.testing.assert_allclose(cos, np.cos([[[0, 0], [3, 0.3]]]), rtol=1e-6)
    np.testing.assert_allclose(sin, np.sin([[[0, 0], [3, 0.3]]]), rtol=1e-6)
    assert rope_table(jnp.array([[1]], jnp.int32), 4, 100.0, jnp.dtype("bfloat16"))[0].dtype == jnp.float32
    gate, up = np.float32([-9, -1, 0.5, 9]), np.float32([-9, -1, 0.5, 9])
    clamped = np.minimum(gate, 2), np.clip(up, -2, 2)
    expected = (clamped[1] + 0.5) * clamped[0] / (1 + np.exp(-1.5 * clamped[0]))
    np.testing.assert_allclose(swiglu_oai(jnp.asarray(gate), jnp.asarray(up), 1.5, 2.0, 0.5), expected, rtol=1e-5)
    np.testing.assert_allclose(swiglu_oai(jnp.ones(1), jnp.ones(1), 1.0, 9.0), 2 / (1 + np.exp(-1)), rtol=1e-6)


def test_the_clamps_of_the_product_pass_the_gradient_at_their_limits():
    """As PyTorch's do, which transformers trains with: a number is cut off beyond its limit, and not on it."""
    limit, alpha = 2.0, 1.5
    points = np.array([-3, -2, -1, 1, 2, 3], np.float32)
    gate, up = (x.ravel() for x in np.meshgrid(points, points))
    total = lambda gate, up: swiglu_oai(gate, up, alpha, limit).sum()
    of_gate, of_up = jax.grad(total, argnums=(0, 1))(jnp.asarray(gate), jnp.asarray(up))
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    sigmoid = 1 / (1 + np.exp(-alpha * g))
    slope = sigmoid * (1 + alpha * g * (1 - sigmoid))
    np.testing.assert_allclose(of_gate, (u + 1) * slope * (gate <= limit), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_up, g * sigmoid * (np.abs(up) <= limit), rtol=1e-5, atol=1e-6)


def test_features_stand_in_place_of_their_tokens():
    x, features = jnp.arange(12.0).reshape(2, 3, 2), 100 + jnp.arange(4.0).reshape(2, 2)
    found = join_features(x, features, jnp.array([[-1, 1, 0], [0, -1, -1]], jnp.int32))
    assert found.tolist() == [[[0, 1], [102, 103], [100, 101]], [[100, 101], [8, 9], [10, 11]]]


def test_places_of_media_that_are_not_the_tokens_are_refused(unchecked):
    """Where the arrays are at hand: 2 x 4 patches are two placeholders. A model without a tower has no places."""
    image = batch([(np.zeros((8, 1176), np.float32), (1, 2, 4))])
    model = WithTower()
    model.vision = SimpleNamespace(config=SimpleNamespace(image_token_id=7, video_token_id=8))
    found = model.places(jnp.array([[1, 7, 7, 2]], jnp.int32), image)
    assert found.tolist()[:2] == [1, 2] and set(found.tolist()[2:]) <= {-1}
    for tokens in ([1, 7, 3, 2], [7, 7, 7, 2], [1, 8, 8, 2]):
        with pytest.raises(ValueError, match="placeholder"):
            model.places(jnp.array([tokens], jnp.int32), image)
    model.vision = None
    with pytest.raises(ValueError, match="this model has no vision tower: it takes text alone"):
        model.places(jnp.array([[1, 7, 7, 2]], jnp.int32), image)


def test_a_feature_goes_to_its_place_among_all_rows_tokens():
    """The first and the last place too; one below 0 is none, and the first token keeps its embedding."""
    table = jnp.arange(12.0).reshape(6, 2)
    model = SimpleNamespace(
        embed_tokens=table, execution=lambda: SimpleNamespace(embed=lambda tokens, table: table[tokens])
    )
    tokens, features = jnp.array([[0, 1, 2], [3, 4, 5]], jnp.int32), 100 + jnp.arange(8.0).reshape(4, 2)
    embed = WithTower.embed.__wrapped__
    np.testing.assert_array_equal(embed(model, tokens), table.reshape(2, 3, 2))
    for places in ([5, -1, 0, 3], [-1, 2, -7, 4]):
        expected = np.array(table)
        for feature, place in zip(features, places, strict=True):
            if place >= 0:
                expected[place] = feature
        found = embed(model, tokens, features, jnp.array(places, jnp.int32))
        np.testing.assert_array_equal(found, expected.reshape(2, 3, 2))
