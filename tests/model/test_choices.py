"""Given experts and blocks: a record played again is the call itself; gradients are those of fixed choices."""

import math
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from m3jax.execution.validity import are_blocks
from m3jax.hub import hub_parameters
from m3jax.model import M3, Choices
from m3jax.model.choices import NAMES, shapes_of
from m3jax.spec import model as definition

CONFIG = tiny.config("dMM")  # block 8, top-k 3; two of the three layers have experts and an index branch
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 61)), jnp.int32)


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def record() -> dict[str, np.ndarray]:
    choices = model().run(TOKENS, names=NAMES, logits=False).values
    return {name: np.asarray(choice) for name, choice in choices.items()}


def other_choices(seed: int = 1) -> Choices:
    """Valid choices that no router and no index branch made."""
    rng = np.random.default_rng(seed)
    expert_ids = np.argsort(rng.random((*TOKENS.shape, 2, CONFIG.num_local_experts)), axis=-1)
    blocks = np.full_like(record()["blocks"], -1)
    for index in np.ndindex(blocks.shape[:-1]):
        own = index[1] // CONFIG.index_block_size
        count = min(CONFIG.index_topk_blocks, own + 1)
        blocks[index][:count] = [*sorted(rng.permutation(own)[: count - 1]), own]
    return Choices(expert_ids[..., : CONFIG.num_experts_per_tok].astype(np.int32), blocks)


def test_a_record_is_what_the_layers_chose():
    layers = model().intermediates(TOKENS)["layers"][1:]
    for index, layer in enumerate(layers):
        np.testing.assert_array_equal(record()["expert_ids"][:, :, index], layer["expert_ids"])
        np.testing.assert_array_equal(record()["blocks"][:, :, index], jnp.moveaxis(layer["blocks"], 1, 2))


@pytest.mark.parametrize("names", [pytest.param(("expert_ids",), marks=pytest.mark.further), NAMES])
def test_a_record_played_again_is_the_call(names):
    """To the bit, with the experts weighed by live scores in the order that was recorded."""
    choices = Choices(**{name: record()[name] for name in names})
    np.testing.assert_array_equal(model()(TOKENS, choices=choices), model()(TOKENS))


def test_given_choices_are_taken():
    """Against the definition, whose router and selection are made to choose the same."""
    given = other_choices()
    expert_ids, blocks = iter(np.moveaxis(given.expert_ids, 2, 0)), iter(np.moveaxis(given.blocks, 2, 0))

    def top_k(scores, count):
        return None, jnp.asarray(next(expert_ids))

    def select_blocks(*_, **__):
        return jnp.moveaxis(jnp.asarray(next(blocks)), 2, 1)  # [B T K J] -> [B K T J]

    replaced = mock.patch.object(definition, "select_blocks", select_blocks)
    with mock.patch.object(definition.jax.lax, "top_k", top_k), replaced:
        expected = jax.jit(lambda params: definition.forward(params, TOKENS, CONFIG))(hub_parameters(model()))
    found = model()(TOKENS, choices=given)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert np.abs(np.asarray(found) - np.asarray(model()(TOKENS))).max() > 1e-2


def test_minus_one_is_the_models_own_choice():
    """T58: Tokens from 30 on choose for themselves; other choices came before, so they see other keys."""
    given = other_choices()
    mixed = Choices(given.expert_ids.copy(), given.blocks.copy())
    mixed.expert_ids[:, 30:], mixed.blocks[:, 30:] = -1, -1
    made = model().run(TOKENS, names=NAMES, choices=mixed, logits=False).values
    for name in NAMES:
        np.testing.assert_array_equal(made[name][:, :30], getattr(given, name)[:, :30])
    # What was made is a record of the whole call: it gives the call again.
    np.testing.assert_array_equal(model()(TOKENS, choices=Choices(**made)), model()(TOKENS, choices=mixed))
    nothing = Choices(*(np.full_like(getattr(given, name), -1) for name in NAMES))
    np.testing.assert_array_equal(model()(TOKENS, choices=nothing), model()(TOKENS))


def test_gradients_go_through_weights_and_not_through_ids():
    """T58: Exactly zero for experts that no token was given, and not for the router, whose scores weigh them.

    With activations that are computed again: a second forward pass with choices of its own would give to all experts.
    """
    ids = other_choices().expert_ids.copy()
    ids[ids == 0] = -2  # nobody is given expert 0
    for index in np.argwhere((ids == -2).any(-1)):
        free = next(e for e in range(1, CONFIG.num_local_experts) if e not in ids[tuple(index)])
        ids[tuple(index)][ids[tuple(index)] == -2] = free
    choices = Choices(ids, other_choices().blocks)
    shallow = tiny.model(tiny.config("M"))
    choices = Choices(*(x[:, :, :1] for x in (choices.expert_ids, choices.blocks)))

    def loss(model):
        logits = model.run(TOKENS, choices=choices, remat=True).logits
        return jnp.sum(jax.nn.log_softmax(logits)[..., 3])

    gradient = jax.jit(jax.grad(loss), compiler_options={"xla_backend_optimization_level": 0})(shallow)
    moe = gradient.stacks[0].mlp
    for matrix in (moe.experts.gate_proj, moe.experts.down_proj):
        sizes = jnp.abs(matrix[...]).max(axis=(2, 3))  # [L E]
        assert (sizes[:, 0] == 0).all() and (sizes[:, 1:] > 0).all()
    assert (jnp.abs(moe.gate[...]).max(axis=1) > 0).any(axis=-1).all()


def test_the_weights_are_those_of_the_given_experts():
    """T58: Divided by the sum of these alone, not of the router's own choice (no stale weights)."""
    given = other_choices()
    layer = model().intermediates(TOKENS, choices=given)["layers"][1]
    scores = jax.nn.sigmoid(layer["ffn_norm"] @ model().stacks[1].mlp.gate[...][0])
    expected = jnp.take_along_axis(scores, jnp.asarray(given.expert_ids[:, :, 0]), axis=-1)
    expected = expected / expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(layer["expert_weights"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, blocks: (ids[:, :, :1], None), r"choices.expert_ids has shape \(2, 61, 1, 2\), and this call"),
        (lambda ids, blocks: (None, blocks[:, 1:]), r"choices.blocks has shape \(2, 60, 2, 4, 3\), and this call"),
        (lambda ids, blocks: (np.where(ids == 1, 9, ids), None), "give distinct ids from 0 to 7, or -1 first"),
        (lambda ids, blocks: (np.zeros_like(ids), None), r"choices.expert_ids\[0, 0, 0\] = \[0, 0\]: give distinct"),
        (lambda ids, blocks: (None, blocks[..., ::-1]), "give ascending ids up to the token's own block"),
        (lambda ids, blocks: (None, np.where(blocks >= 0, blocks + 1, -1)), "the token's own block 0"),
    ],
)
def test_choices_of_another_model_are_refused(change, message, unchecked):
    given = other_choices()
    with pytest.raises(ValueError, match=message):
        model()(TOKENS, choices=Choices(*change(given.expert_ids, given.blocks)))


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


def test_blocks_ascend_up_to_the_own_one_and_end_there():
    """Of a token in block 4: -1 stands behind it alone."""
    right = [[0, 2, 4, -1, -1], [4, -1, -1, -1, -1], [0, 1, 2, 3, 4]]
    wrong = [[0, 2, 3, -1, -1], [0, 4, 2, -1, -1], [0, 0, 4, -1, -1], [-1, 4, -1, 5, -1], [0, -1, 4, -1, 5]]
    assert are_blocks(np.array(right), np.full(3, 4)).tolist() == [True] * 3
    assert are_blocks(np.array(wrong), np.full(5, 4)).tolist() == [False] * 5
