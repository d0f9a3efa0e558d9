"""The definition of the model, beside all that computes the same function: the Flax model under every schedule."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import comparisons, tiny

from m3jax import quantize
from m3jax.checkpoint.names import targets
from m3jax.hub import hub_parameters
from m3jax.msa import SCHEDULES
from m3jax.spec import model as definition

CONFIG = tiny.config("dM")  # one dense and one sparse layer
LENGTH = 40


@partial(jax.jit, static_argnames="config")
def defined(params, tokens, lengths, config):
    return definition.intermediates(params, tokens, config, lengths=lengths)


@cache
def model(dtype: str = "float32"):
    return tiny.model(CONFIG, dtype=dtype)


@cache
def params(dtype: str = "float32"):
    return hub_parameters(model(dtype))


def drops_a_block(values: dict, lengths) -> bool:
    """Return True if the last token of some row leaves a visible block out, in some head (T17)."""
    blocks = np.asarray(values["layers"][-1]["blocks"])  # [B K T J]
    last = [blocks[row, :, length - 1] for row, length in enumerate(np.asarray(lengths))]
    size = CONFIG.index_block_size
    return any((kept >= 0).sum(-1).min() < -(-int(n) // size) for kept, n in zip(last, lengths, strict=True))


HOW = {
    "auto": lambda m: m,
    **{name: (lambda m, name=name: m.with_schedule(name)) for name in sorted(SCHEDULES) if name != "kv_block_major"},
    "invariant": lambda m: m.with_invariance(),
}


@pytest.mark.parametrize(
    "how",
    ["auto", *(pytest.param(name, marks=pytest.mark.further) for name in HOW if name != "auto")],
)
def test_every_way_to_compute_the_model_computes_the_definition(how):
    """All values on the way to the logits, in float32; for so many queries "auto" is "kv_block_major"."""
    tokens, lengths = tiny.tokens(CONFIG, 2, LENGTH), jnp.asarray([LENGTH, 29], jnp.int32)
    expected, found = (
        defined(params(), tokens, lengths, CONFIG),
        HOW[how](model()).intermediates(tokens, lengths=lengths),
    )
    assert drops_a_block(expected, lengths)
    assert_same_values(found, expected, lengths)


@given(seed=st.integers(0, 2**31 - 1), lengths=st.lists(st.integers(1, LENGTH), min_size=2, max_size=2))
def test_the_model_is_the_definition_for_all_tokens_and_lengths(seed, lengths):
    """Ragged rows of any tokens: what stands behind a row changes nothing in it."""
    tokens = jax.random.randint(jax.random.key(seed), (2, LENGTH), 0, CONFIG.vocab_size, jnp.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    expected = defined(params(), tokens, lengths, CONFIG)
    assert_same_values(model().intermediates(tokens, lengths=lengths), expected, lengths)


def assert_same_values(found: dict, expected: dict, lengths, rtol: float = 1e-5) -> None:
    """Every value that `expected` names, of the tokens that rows have; padding means nothing."""
    pairs = [(name, found[name], expected[name]) for name in ("embedding", "final_norm", "logits")]
    for index, (ours, theirs) in enumerate(zip(found["layers"], expected["layers"], strict=True)):
        assert ours.keys() == theirs.keys()
        pairs += [(f"layers.{index}.{name}", ours[name], theirs[name]) for name in theirs]
    is_token = np.arange(LENGTH) < np.asarray(lengths)[:, None]  # [B T]
    for name, mine, other in pairs:
        token_axis = 2 if name.endswith("blocks") or name.endswith("block_scores") else 1
        mine, other = (np.moveaxis(np.asarray(x), token_axis, 1)[is_token] for x in (mine, other))
        if np.issubdtype(other.dtype, np.integer):
            comparisons.assert_equal(mine, other, name)
        else:
            finite = np.isfinite(other)
            np.testing.assert_array_equal(finite, np.isfinite(mine), err_msg=name)
            atol = rtol * max(1.0, np.abs(other[finite]).max(initial=0.0))
            np.testing.assert_allclose(mine[finite], other[finite], rtol=0, atol=atol, err_msg=name)


@pytest.mark.further
@pytest.mark.parametrize("index", range(2))
def test_a_bfloat16_layer_rounds_where_the_definition_does(index):
    """Each layer by itself, of the same input: a number differs where a sum fell to the other side of a rounding."""
    computed, tokens = model("bfloat16"), tiny.tokens(CONFIG, 2, LENGTH)
    found = computed.intermediates(tokens)["layers"][index]
    prefix, lengths = f"{definition.PREFIX}model.layers.{index}.", jnp.full(2, LENGTH, jnp.int32)
    of_layer = {name.removeprefix(prefix): x for name, x in params("bfloat16").items() if name.startswith(prefix)}
    run = jax.jit(lambda p, x: definition.layer(p, x, lengths, CONFIG)[1])
    expected = run(of_layer, found["input"])
    for name in ("attention_norm", "q", "k", "v"):
        same = np.asarray(found[name] == expected[name])
        assert same.mean() > 0.999, (name, same.mean())
    for name in ("blocks", "expert_ids"):
        if name in expected:
            comparisons.assert_equal(found[name], expected[name], name)
    for name in ("attention", "attention_out", "ffn_norm", "ffn_out", "output"):
        ours, theirs = (np.asarray(x[name], np.float64) for x in (found, expected))
        assert np.sqrt(np.mean((ours - theirs) ** 2)) < 2.0**-7 * np.sqrt(np.mean(theirs**2)), name


@pytest.mark.further  # the configuration's score: test_model.py
def test_the_score_of_a_block_can_be_replaced():
    """`with_score` and the configuration's kind of score mean the same."""
    tokens, lengths = tiny.tokens(CONFIG, 2, LENGTH), jnp.asarray([LENGTH, LENGTH], jnp.int32)
    expected = defined(params(), tokens, lengths, replace(CONFIG, index_score_type="lse"))
    assert_same_values(model().with_score("lse").intermediates(tokens), expected, lengths)
    by_maximum = defined(params(), tokens, lengths, CONFIG)
    assert np.any(expected["layers"][1]["block_scores"] != by_maximum["layers"][1]["block_scores"])


def test_a_score_that_is_nan_reaches_the_output():
    """An expert whose score is no number is not passed over in silence: tokens are NaN from that layer on."""
    name = f"{definition.PREFIX}model.layers.1.block_sparse_moe.e_score_correction_bias"
    broken = params() | {name: params()[name].at[3].set(jnp.nan)}
    values = defined(broken, tiny.tokens(CONFIG, 2, LENGTH), jnp.asarray([LENGTH, LENGTH], jnp.int32), CONFIG)
    assert np.isnan(values["layers"][1]["expert_weights"]).all() and np.isnan(values["logits"]).all()


def test_padding_attends_to_nothing():
    """Its attention is 0, whatever its token is, and it selects no block."""
    values = defined(params(), tiny.tokens(CONFIG, 2, LENGTH), jnp.asarray([17, 17], jnp.int32), CONFIG)
    for layer in values["layers"]:
        assert not np.asarray(layer["attention"][:, 17:]).any() and np.asarray(layer["attention"][:, :17]).any()
    assert (np.asarray(values["layers"][1]["blocks"][:, :, 17:]) == -1).all()


def test_names_are_the_hubs():
    """A saved model has these tensors and no others."""
    assert set(params()) == set(targets(CONFIG))


def test_mxfp8_weights_are_refused():
    with pytest.raises(ValueError, match=r"in MXFP8: give m3jax.model.dequantize"):
        hub_parameters(quantize(model()))
