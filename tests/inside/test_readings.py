"""Readings of small models against the same numbers found by hand, and of the embedded one: what is known of it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from m3jax import inside
from m3jax.hub import hub_parameters
from m3jax.model import M3
from m3jax.spec import model as definition
from m3jax.spec.msa import dense_attention

CONFIG = tiny.config("dM")
SIZE = CONFIG.index_block_size
TOKENS, OTHER = (jnp.asarray(tiny.tokens(CONFIG, 1, 43, seed)) for seed in (0, 1))
METRIC = inside.logit_difference(3, 5)
NAMES = ("layers.*.q", "layers.*.k", "layers.*.v", "layers.*.blocks", "layers.*.attention", "layers.1.output")


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@jax.jit
def by_definition(params, tokens):
    return definition.intermediates(params, tokens, CONFIG)


@cache
def defined(seed: int = 0) -> dict:
    """All values by the definition, which no reading uses."""
    return by_definition(hub_parameters(model()), TOKENS if seed == 0 else OTHER)


@cache
def values() -> dict:
    return model().intermediates(TOKENS, names=NAMES)


def test_parts_of_a_logit_difference_add_up_to_it():
    """Layers' parts to the whole, and heads' parts to that of their layer's attention."""
    parts = inside.direct_logits(model(), TOKENS, 3, 5)
    expected = defined()["logits"][0, -1, 3] - defined()["logits"][0, -1, 5]
    np.testing.assert_allclose(sum(float(part[0]) for part in parts.values()), expected, atol=1e-4)
    heads = inside.head_logits(model(), TOKENS, 3, 5)[0]
    for layer in range(2):
        np.testing.assert_allclose(heads[layer].sum(), parts[f"layers.{layer}.attention_out"][0], atol=1e-4)


def test_the_lens_ends_in_the_models_own_logits():
    lens = inside.logit_lens(model(), TOKENS, position=20)
    np.testing.assert_allclose(lens[-1, 0], defined()["logits"][0, 20], atol=1e-4)
    first = definition.norm(defined()["embedding"][0, 20], model().norm[...], CONFIG.rms_norm_eps)
    np.testing.assert_allclose(lens[0, 0], first @ model().lm_head[...].T, atol=1e-4)
    last = inside.logit_lens(model(), TOKENS)  # where no position is said
    np.testing.assert_allclose(last[-1, 0], defined()["logits"][0, -1], atol=1e-4)


def test_attention_weights_give_attention():
    """Times the values they are what attention gave; dense ones what it would have given without a selection."""
    for layer in range(2):
        own = {name: values()[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "attention")}
        by_head = jnp.repeat(own["v"], CONFIG.num_attention_heads // CONFIG.num_key_value_heads, axis=2)
        weights = inside.attention_weights(values(), layer, SIZE)
        np.testing.assert_allclose(jnp.einsum("bnts,bsnh->btnh", weights, by_head), own["attention"], atol=1e-5)
        weights = inside.attention_weights(values(), layer, SIZE, is_dense=True)
        lengths = jnp.array([43], jnp.int32)
        dense = dense_attention(own["q"], own["k"], own["v"], jnp.arange(43, dtype=jnp.int32)[None], lengths)
        np.testing.assert_allclose(jnp.einsum("bnts,bsnh->btnh", weights, by_head), dense, atol=1e-5)


def test_reads_by_block_are_sums_of_weights():
    weights = np.asarray(inside.attention_weights(values(), 1, SIZE))[0]
    reads = np.asarray(inside.block_reads(values(), 1, SIZE))[0]
    assert reads.shape == (8, 6, 6)
    np.testing.assert_allclose(reads[2, 5, 1], weights[2, 40:, 8:16].sum(-1).mean(), rtol=1e-5)  # three tokens
    on = inside.weights_on(values(), SIZE, query=42, keys=[8, 9], layers=(0, 1))
    np.testing.assert_allclose(on[0, 1], weights[:, 42, 8:10].sum(-1), atol=1e-6)

    dense = np.asarray(inside.attention_weights(values(), 1, SIZE, is_dense=True))[0]
    by_block, caught = (np.asarray(x)[0] for x in inside.dense_reads(values(), 1, SIZE))
    np.testing.assert_allclose(by_block[3, 42, 5], dense[3, 42, 40:].sum(), rtol=1e-5)
    kept = [block for block in values()["layers.1.blocks"][0, 3 // 2, 42].tolist() if block >= 0]  # 2 heads a KV head
    np.testing.assert_allclose(caught[3, 42], by_block[3, 42, kept].sum(), rtol=1e-5)
    assert caught[:, 42].min() < 0.99


def test_a_patch_is_that_value_of_the_other_run():
    """At a layer and a token that no other patch has, against the layers of the definition run from there."""
    effects = np.asarray(inside.patch_effects(model(), TOKENS, OTHER, METRIC, positions=(11, 42)))
    assert effects.shape == (2, 2)
    params, lengths = hub_parameters(model()), jnp.array([43], jnp.int32)
    below = lambda n: {key.split(f"layers.{n}.")[1]: x for key, x in params.items() if f"layers.{n}." in key}
    last_layer = jax.jit(lambda stream: definition.layer(below(1), stream, lengths, CONFIG)[0])
    for column, position in enumerate((11, 42)):
        taken = defined(1)["layers"][0]["output"][:, position]
        last = last_layer(defined()["layers"][0]["output"].at[:, position].set(taken))
        logits = definition.norm(last[0, -1], model().norm[...], CONFIG.rms_norm_eps) @ model().lm_head[...].T
        np.testing.assert_allclose(effects[0, column], logits[3] - logits[5], atol=1e-3)
    whole = defined(1)["logits"][0, -1]
    np.testing.assert_allclose(effects[1, 1], whole[3] - whole[5], atol=1e-3)  # the last layer's last token is all


def test_choices_of_a_run_are_given_whole(unchecked):
    """By shape alone: of the layer that has experts and of the one that selects, each token's."""
    found = jax.eval_shape(inside.choices_of, model(), TOKENS)
    shapes = {name: x.shape for name, x in vars(found).items()}
    slots = values()["layers.1.blocks"].shape[-1]
    assert shapes == {
        "expert_ids": (1, 43, 1, CONFIG.num_experts_per_tok),
        "blocks": (1, 43, 1, CONFIG.num_key_value_heads, slots),
    }


@pytest.mark.further  # patches: test_a_patch_is_that_value_of_the_other_run
def test_attributions_are_patches_to_first_order():
    """The slope at a token along what a patch would move there, as by a small step; the choices are given."""
    names, choices = ("layers.0.output",), inside.choices_of(model(), TOKENS)
    effects = inside.attributions(model(), TOKENS, OTHER, METRIC, names, choices)["layers.0.output"]  # [B T]
    moved = defined(1)["layers"][0]["output"] - defined()["layers"][0]["output"]
    run = jax.jit(lambda step: METRIC(model()(TOKENS, edits={names[0]: inside.Add(step)}, choices=choices)).sum())
    for token in (11, 42):
        step = jnp.zeros_like(moved).at[:, token].set(0.01 * moved[:, token])
        np.testing.assert_allclose((run(step) - run(-step)) / 0.02, effects[0, token], rtol=0.03, atol=2e-3)
    assert np.abs(effects[0, [11, 42]]).max() > 0.05


def test_an_expert_that_no_token_chose_has_no_effect_and_others_have():
    plain = METRIC(model()(TOKENS))
    effects = np.asarray(inside.expert_effects(model(), TOKENS, 1, METRIC))
    last = set(defined()["layers"][1]["expert_ids"][0, -1].tolist())  # of the last layer only the last token counts
    changed = {expert for expert in range(8) if abs(effects[expert] - plain) > 1e-4}
    assert changed == last
