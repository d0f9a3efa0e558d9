"""An edit of a named value is that change made by hand in the model's definition, whatever the value and the layer."""

import inspect
import types
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.compilations import compilations
from support.pytrees import assert_settings_are_static

from m3jax import inside
from m3jax.cache import Cache
from m3jax.hub import hub_parameters
from m3jax.inside import Add, PatchAt, Put, WithoutBlock, WithoutExpert, choices_of, gradients
from m3jax.model import M3, Choices
from m3jax.model.names import OF_LAYERS, names_of
from m3jax.spec import model as definition

CONFIG = tiny.config("dDmM")  # each kind of layer; block 8, top-k 3
DEEP = tiny.config("dMM")
SMALL = tiny.config("dM")
TOKENS = jnp.asarray(tiny.tokens(CONFIG, 2, 61))
LENGTHS = jnp.array([61, 43], jnp.int32)
OUTSIDE = ("embedding", "final_norm", "logits")
NAMES = (*OUTSIDE, *OF_LAYERS)


@cache
def model(config=CONFIG, dtype: str = "float32") -> M3:
    return tiny.model(config, dtype=dtype)


def change(name: str, value):
    """What the tests do to a value: any change that is far from nothing, and valid where the value is a selection."""
    if name == "blocks":  # the lowest block goes, where it is not the only one
        fewer = jnp.concatenate([value[..., 1:], jnp.full_like(value[..., :1], -1)], axis=-1)
        return jnp.where(value[..., 1:2] >= 0, fewer, value)
    if name == "expert_ids":
        return (value + 3) % CONFIG.num_local_experts
    if name == "expert_weights":
        return value[..., ::-1] * 0.5
    if name == "block_scores":
        return jnp.where(jnp.isfinite(value), -value, value)
    return 0.6 * jnp.roll(value, 1, axis=-1) - 0.3 * value + 0.1


# Where each change stands in the definition: a line of it, and what takes that line's place.
BY_HAND = {
    'embedding = params[f"{PREFIX}model.embed_tokens.weight"][tokens]  # [B T D]':
        "{line}\n    embedding = EDIT('embedding', embedding)",
    'name = f"{PREFIX}model.layers.{index}."': "{line}\n        AT['layer'] = index",
    'logits = linear(final_norm, params[f"{PREFIX}lm_head.weight"])  # [B T V], not rounded':
        "final_norm = EDIT('final_norm', final_norm)\n    {line}\n    logits = EDIT('logits', logits)",
    'attention_norm = _rounded(norm(x, params["input_layernorm.weight"], config.rms_norm_eps), x)':
        "x = EDIT('input', x)\n    {line}\n    attention_norm = EDIT('attention_norm', attention_norm)",
    'values = {"q": q, "k": k, "v": v}': "q, k, v = EDIT('q', q), EDIT('k', k), EDIT('v', v)\n    {line}",
    "rules = SelectionRules(": "index_q, index_k = EDIT('index_q', index_q), EDIT('index_k', index_k)\n        {line}",
    "blocks = select_blocks(scores, positions, lengths, rules, block_size=size)  # [B K T J]":
        "scores = EDIT('block_scores', scores)\n        {line}\n        blocks = EDIT('blocks', blocks)",
    'return linear(out.reshape(*x.shape[:2], -1), params["o_proj.weight"]), values | {"attention": out}':
        "out = EDIT('attention', out)\n    {line}",
    "middle = _rounded(x + attention_out, x)  # [B T D]; the sum is rounded, its terms are not":
        "attention_out = EDIT('attention_out', attention_out)\n    {line}",
    'if "mlp.gate_proj.weight" in params:': "ffn_norm = EDIT('ffn_norm', ffn_norm)\n    {line}",
    "output = _rounded(middle + ffn_out, x)":
        "ffn_out = EDIT('ffn_out', ffn_out)\n    {line}\n    output = EDIT('output', output)",
    "weights = jnp.take_along_axis(scores, expert_ids, axis=-1)":
        "expert_ids = EDIT('expert_ids', expert_ids)\n    {line}",
    "routed = jnp.zeros(x.shape, _wide(x))  # [B T D]": "weights = EDIT('expert_weights', weights)\n    {line}",
}  # fmt: skip


def defined(edit, at) -> types.ModuleType:
    """The definition with a change written into it by hand behind each line that names a value."""
    source = inspect.getsource(definition)
    for line, instead in BY_HAND.items():
        assert source.count(f" {line}\n") == 1, f"the definition has no line {line!r}"
        source = source.replace(f" {line}\n", " " + instead.replace("{line}", line) + "\n")
    module = types.ModuleType("changed_definition")
    vars(module).update(EDIT=edit, AT=at)
    exec(compile(source, "changed_definition", "exec"), vars(module))
    return module


@jax.jit
def by_definition(params, tokens, which, layer):
    at = {}

    def edit(name, value):
        is_here = (which == NAMES.index(name)) & ((layer == at.get("layer", 0)) | (name in OUTSIDE))
        return jnp.where(is_here, change(name, value), value)

    return defined(edit, at).intermediates(params, tokens, CONFIG, lengths=LENGTHS)


@jax.jit
def by_edits(model, tokens, which, layer):
    def edit_of(name):
        if name in OUTSIDE:
            return lambda value: jnp.where(which == NAMES.index(name), change(name, value), value)
        return lambda value, seen: jnp.where(
            (which == NAMES.index(name)) & (seen["layer"] == layer), change(name, value), value
        )

    edits = {name if name in OUTSIDE else f"layers.*.{name}": edit_of(name) for name in NAMES}
    return model.intermediates(tokens, lengths=LENGTHS, edits=edits)


def flat(out: dict) -> dict[str, np.ndarray]:
    """Values of all tokens that are none of padding, by full name, tokens first."""
    values = {name: out[name] for name in OUTSIDE}
    values |= {f"layers.{n}.{name}": x for n, layer in enumerate(out["layers"]) for name, x in layer.items()}
    by_head = lambda name: name.endswith((".blocks", ".block_scores"))
    is_token = np.arange(61) < np.asarray(LENGTHS)[:, None]
    return {name: np.moveaxis(x, 2, 1)[is_token] if by_head(name) else np.asarray(x)[is_token]
            for name, x in jax.device_get(values).items()}  # fmt: skip


@pytest.mark.parametrize("which", NAMES)
@settings(max_examples=1)
@given(seed=st.integers(0, 2**16))
def test_an_edit_is_the_change_made_in_the_definition(which, seed):
    """Each name in each kind of layer: all values behind it, and before it, are those of the changed definition."""
    tokens = jnp.asarray(tiny.tokens(CONFIG, 2, 61, seed))
    plain = flat(by_edits(model(), tokens, len(NAMES), 0))["logits"]
    for layer in [0] if which in OUTSIDE else [n for n, names in enumerate(names_of(CONFIG)) if which in names]:
        arguments = NAMES.index(which), layer
        found = flat(by_edits(model(), tokens, *arguments))
        expected = flat(by_definition(hub_parameters(model()), tokens, *arguments))
        for name, value in expected.items():
            own, where = found[name], f"{name} after an edit of layer {layer}"
            if own.dtype.kind == "i":
                assert (own == value).mean() > 0.98, where  # of scores that nearly tie another may win
            else:
                is_near = np.isclose(own, value, rtol=1e-4, atol=3e-4, equal_nan=True) | (own == value)
                assert is_near.mean() > 0.97, f"{where}: {np.abs(own - value).max()}"
        assert np.abs(found["logits"] - plain).max() > 1e-3, f"an edit of layer {layer} changed nothing"


def test_edits_that_change_nothing_give_the_same_bits():
    """Of one layer, which is then run by itself, and of all; no edit, and the program is the same text."""
    own = model(tiny.config("MM"))
    same = {"layers.1.attention": lambda x: x, "layers.*.blocks": lambda x: x, "layers.0.expert_ids": lambda x: x}
    np.testing.assert_array_equal(own(TOKENS, edits=same), own(TOKENS))
    text = lambda **edits: jax.jit(lambda m, t: m(t, **edits)).lower(model(SMALL), TOKENS).as_text()
    assert text() == text(edits={"layers.*.blocks": lambda x: x})


@pytest.mark.further
def test_an_edit_of_one_layer_is_that_of_all_where_the_layer_is_asked_for():
    one = model(DEEP)(TOKENS, edits={"layers.2.q": lambda x: 0.5 * x})
    every = model(DEEP)(TOKENS, edits={"layers.*.q": lambda x, seen: jnp.where(seen["layer"] == 2, 0.5 * x, x)})
    np.testing.assert_allclose(one, every, rtol=0, atol=1e-5)
    assert np.abs(one - model(DEEP)(TOKENS)).max() > 1e-3


def test_edits_change_what_they_name():
    value = jnp.arange(6.0).reshape(1, 3, 2)
    np.testing.assert_array_equal(Add(jnp.array([1.0, 2.0]))(value), value + jnp.array([1.0, 2.0]))
    put = Put(jnp.float32(9), jnp.array([[[True], [False], [True]]]))(value.astype(jnp.bfloat16))
    assert put.dtype == jnp.bfloat16 and put.tolist() == [[[9, 9], [2, 3], [9, 9]]]
    other = jnp.stack([value + 10, value + 20])  # of layers 0 and 1
    seen = {"positions": jnp.array([[4, 5, 6]], jnp.int32), "layer": jnp.int32(1)}
    patch = PatchAt(other, jnp.int32(1), jnp.int32(5))
    assert patch(value, seen).tolist() == [[[0, 1], [22, 23], [4, 5]]]
    assert patch(value, seen | {"layer": jnp.int32(0)}).tolist() == value.tolist()
    weights = jnp.array([[[0.25, 0.75]]])
    found = WithoutExpert(jnp.int32(3))(weights, {"expert_ids": jnp.array([[[3, 1]]], jnp.int32)})
    assert found.tolist() == [[[0, 0.75]]]
    blocks = jnp.array([[[[0, 1, 2], [0, 2, -1]], [[0, 1, 2], [0, -1, -1]]]], jnp.int32)  # [B K T J]
    found = WithoutBlock(jnp.int32(0), jnp.array([True, True]))(blocks)
    assert found.tolist() == [[[[1, 2, -1], [2, -1, -1]], [[1, 2, -1], [0, -1, -1]]]]  # the own block stays
    found = WithoutBlock(jnp.int32(2), jnp.array([False, True]))(blocks)
    assert found.tolist() == blocks.tolist()
    found = WithoutBlock(jnp.int32(1), jnp.array([False, True]))(blocks)
    assert found[0, 0].tolist() == blocks[0, 0].tolist() and found[0, 1, 0].tolist() == [0, 2, -1]


def test_settings_of_edits_are_no_arrays():
    assert_settings_are_static(inside)


def test_arrays_of_an_edit_are_arguments():
    """Another vector, or another block, runs the program of the first."""
    run = lambda size: model(SMALL)(TOKENS, edits={"layers.1.output": Add(jnp.full(CONFIG.hidden_size, size))})
    first = run(1.0)
    with compilations() as seen:
        second = run(2.0)
    assert seen == [] and np.abs(first - second).max() > 1e-3


@pytest.mark.further
def test_chunks_over_a_cache_have_the_values_of_the_whole():
    """By name and with an edit; a chunk begins within a page, and its scores are those of all blocks so far.

    Steps, of an engine, are in test_engine.py.
    """
    names, edits = ("layers.0.output", "layers.*.block_scores", "final_norm"), {"layers.1.attention_out": lambda x: -x}
    own, row = model(SMALL), TOKENS[:1]
    whole = own.intermediates(row, names=names, edits=edits)
    cache = own.new_cache(8, 1, 8)
    cache = cache.replace(table=jnp.arange(8, dtype=jnp.int32)[None])
    cache = jax.device_put(cache, jax.devices()[0])  # as calls return it: both chunks run one program
    parts = []
    for start, end in ((0, 20), (20, 40)):
        positions = jnp.arange(start, end, dtype=jnp.int32)[None]
        call = dict(cache=cache, positions=positions, lengths=jnp.array([end], jnp.int32))
        values, cache = own.intermediates(row[:, start:end], names=names, edits=edits, **call)
        parts.append(values)
    assert isinstance(cache, Cache) and set(parts[0]) == set(whole)
    for name, expected in whole.items():
        axis = 2 if name.endswith("block_scores") else 1
        found = np.concatenate([part[name] for part in parts], axis=axis)
        expected = np.asarray(expected)[(slice(None),) * axis + (slice(0, 40),)]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.further
def test_only_what_is_asked_for_is_held():
    """By the compiled program's own account, one layer's value in place of all."""
    tokens, own = jnp.zeros((1, 512), jnp.int32), model(tiny.config("dMMM"))

    def bytes_of(**asked):
        run = jax.jit(lambda model, tokens: model.intermediates(tokens, **asked))
        memory = run.lower(own, tokens).compile().memory_analysis()
        return memory.output_size_in_bytes + memory.temp_size_in_bytes, memory.output_size_in_bytes

    value = 512 * own.config.hidden_size * 4
    everything, _ = bytes_of()
    one, held = bytes_of(names=("layers.1.output",))
    assert held <= value + 64 and one < everything / 2
    of_all = jax.eval_shape(lambda model, tokens: model.intermediates(tokens, names=("layers.*.output",)), own, tokens)
    assert sum(x.size for x in jax.tree.leaves(of_all)) * 4 == 4 * value


def test_layers_behind_a_stop_are_not_run():
    stopped = model().intermediates(TOKENS, lengths=LENGTHS, stop_at=2)
    assert set(stopped) == {"embedding", "layers"} and len(stopped["layers"]) == 2
    whole = by_edits(model(), TOKENS, len(NAMES), 0)  # an edit of nothing
    np.testing.assert_allclose(stopped["layers"][1]["output"], whole["layers"][1]["output"], rtol=0, atol=1e-5)


@pytest.mark.further
def test_gradients_to_values_are_slopes():
    """To values of two layers by one backward pass, the choices given: as by small steps; of the values' own dtypes."""
    wide, names = model(SMALL), ("layers.0.attention", "layers.1.input")
    choices, weights = choices_of(wide, TOKENS), np.random.default_rng(1).normal(size=(2, 61, CONFIG.vocab_size))
    metric = jax.tree_util.Partial(lambda weights, logits: jnp.sum(weights * logits), jnp.asarray(weights, jnp.float32))
    slopes = gradients(wide, TOKENS, metric, names, choices)
    run = jax.jit(lambda deltas: metric(wide(TOKENS, edits={n: Add(d) for n, d in deltas.items()}, choices=choices)))
    for name in names:
        direction = {n: jnp.sign(slope) * (2e-4 if n == name else 0.0) for n, slope in slopes.items()}
        rise = (run(direction) - run(jax.tree.map(jnp.negative, direction))) / 4e-4
        np.testing.assert_allclose(rise, jnp.abs(slopes[name]).sum(), rtol=2e-2, err_msg=name)
    of_shapes = jax.eval_shape(
        partial(gradients, names=names), model(SMALL, "bfloat16"), TOKENS, metric, choices=choices
    )
    assert {name: (x.dtype, x.shape) for name, x in of_shapes.items()} == {
        name: (jnp.bfloat16, x.shape) for name, x in slopes.items()
    }


def test_a_block_is_taken_from_the_heads_that_are_named():
    heads = jnp.array([True, False, True, False])
    names = ("layers.1.blocks",)
    without = lambda of: model(SMALL).intermediates(
        TOKENS, names=names, edits={names[0]: WithoutBlock(jnp.int32(1), of)}
    )
    plain, found = without(jnp.zeros(4, bool))[names[0]], without(heads)[names[0]]
    assert all((plain[0, head] == 1).any() for head in range(4)), "block 1 is taken from no head that is not named"
    own = np.arange(61) // 8
    for head, loses in enumerate(heads.tolist()):
        for token in range(61):
            kept = [i for i in plain[0, head, token].tolist() if i >= 0 and not (loses and i == 1 and own[token] != 1)]
            assert found[0, head, token].tolist() == kept + [-1] * (3 - len(kept))


BAD = {
    "unknown": ({"layers.1.atention": lambda x: x}, "nearest are layers.1.attention"),
    "layer": ({"layers.9.attention": lambda x: x}, "edits has 'layers.9.attention', which the model has not"),
    "dense": ({"layers.0.blocks": lambda x: x}, "edits has 'layers.0.blocks'"),
    "shape": ({"layers.1.attention": lambda x: x[:, :1]}, r"returns float32 \[2, 1, 8, 16\]: must be float32 \[2, 61"),
    "kind": ({"layers.1.blocks": lambda x: x * 1.0}, r"returns float32 \[2, 4, 61, 3\]: must be int32"),
    "nothing": ({"layers.1.output": lambda x: None}, "returns a NoneType"),
    "branch": ({"layers.1.output": lambda x: x if x.sum() > 0 else -x}, "asks for numbers while its program is traced"),
    "numpy": ({"layers.1.output": np.asarray}, "asks for numbers while its program is traced"),
    "twice": ({"layers.*.q": lambda x: x, "layers.1.q": lambda x: x}, "give one function for a value"),
    "no function": ({"layers.1.q": 3}, "give a function of the value"),
    "no mapping": ([("layers.1.q", lambda x: x)], "give functions by name"),
    "future": ({"layers.1.blocks": Put(jnp.array([0, 1, 7]), jnp.array(True))}, "up to the token's own block 0"),
    "double": ({"layers.1.blocks": lambda x: jnp.where(x >= 0, x[..., :1], x)}, "give distinct ids, ascending"),
    "experts": ({"layers.1.expert_ids": lambda x: x * 0}, r"gives \[0, 0\] for row 0, token 0: give distinct ids"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.further if name in ("double", "experts") else ()) for name in BAD]
)
def test_a_wrong_edit_is_one_line(case, unchecked):
    edits, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        model(SMALL)(TOKENS, edits=edits)
    assert "\n" not in str(caught.value)


def test_an_edit_that_keeps_what_it_gets_is_refused(unchecked):
    kept = []
    with pytest.raises(ValueError, match="keeps what it was given: an edit must be pure"):
        model(tiny.config("D"))(TOKENS, edits={"layers.0.output": lambda x: kept.append(x) or x})


def test_wrong_names_and_stops_are_one_line(unchecked):
    with pytest.raises(ValueError, match=r"names has 'layers.2.blokcs', .* nearest are layers.2.blocks"):
        model(DEEP).intermediates(TOKENS, names=("layers.2.blokcs",))
    with pytest.raises(ValueError, match="a call with stop_at = 2 has not"):
        model(DEEP).intermediates(TOKENS, names=("layers.2.output",), stop_at=2)
    with pytest.raises(ValueError, match="stop_at = 5: layers that run, 0 to 3"):
        model(DEEP).intermediates(TOKENS, stop_at=5)
    with pytest.raises(ValueError, match="twice: give it once"):
        model(DEEP).intermediates(TOKENS, names=("embedding", "embedding"))


def test_choices_and_edits_meet():
    """Given experts are what an edit then sees, and a selection of both is that of the edit."""
    given_ids = np.full((2, 61, 1, 2), -1, np.int32)
    given_ids[..., 0], given_ids[..., 1] = 5, 2
    names, choices = ("layers.1.expert_ids",), Choices(expert_ids=given_ids)
    found = model(SMALL).intermediates(
        TOKENS, names=names, choices=choices, edits={names[0]: lambda ids: ids[..., ::-1]}
    )
    np.testing.assert_array_equal(found[names[0]], given_ids[:, :, 0, ::-1])
