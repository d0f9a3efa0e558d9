"""The names of a model's values: which there are, in what shapes, and what else is refused."""

import jax
import jax.numpy as jnp
import pytest
from support import tiny

from m3jax import model as m3_model
from m3jax.model.names import OF_LAYERS, as_pytrees, check_edits, check_names, expand, names_of

CONFIG = tiny.config("dDmM")


def test_intermediates_have_names_and_shapes():
    config = tiny.config("dM")
    b, t, n, k, h, i, d = 2, 20, 8, 4, 16, 20, 48
    model = m3_model.abstract(config, "bfloat16")
    tokens = jax.ShapeDtypeStruct((b, t), jnp.int32)
    out = jax.eval_shape(lambda m, x: m.intermediates(x), model, tokens)
    dense = dict.fromkeys(("input", "attention_norm", "attention_out", "ffn_norm", "ffn_out", "output"), (b, t, d))
    dense |= {"q": (b, t, n, h), "k": (b, t, k, h), "v": (b, t, k, h), "attention": (b, t, n, h)}
    sparse = {"index_q": (b, t, k, i), "index_k": (b, t, i)}
    sparse |= {"block_scores": (b, k, t, 3), "blocks": (b, k, t, 3)}
    moe = dict.fromkeys(("expert_ids", "expert_weights"), (b, t, 2))
    shapes = [{name: x.shape for name, x in layer.items()} for layer in out["layers"]]
    assert shapes == [dense, dense | sparse | moe]
    assert out.keys() == {"embedding", "layers", "final_norm", "logits"}
    assert out["embedding"].shape == out["final_norm"].shape == (b, t, d)
    assert (out["logits"].shape, out["logits"].dtype) == ((b, t, 64), jnp.float32)
    assert out["layers"][1]["output"].dtype == out["layers"][1]["q"].dtype == jnp.bfloat16
    assert out["layers"][1]["block_scores"].dtype == jnp.float32


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
    check_names(("final_norm", "blocks"), "names", CONFIG, dense=False, also=("blocks",))
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
