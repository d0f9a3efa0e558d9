"""Gradients, attributions and metrics against slopes by hand, of a model of two values."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilations import compilations

from m3jax import inside

pytestmark = pytest.mark.usefixtures("unchecked")  # the model here is no M3
B, T, D, V = 2, 3, 4, 6
RNG = np.random.default_rng(0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Squares:
    """A model whose "second" value is the square of its "first", times what was chosen, of which logits are linear."""

    table: jax.Array  # [V D]
    head: jax.Array  # [D V]

    def run(self, tokens, edits=None, choices=None):
        values, edits = {}, edits or {}
        edited = lambda name, value: edits[name](value) if name in edits else value
        values["first"] = edited("first", self.table[tokens])  # [B T D]
        values["second"] = edited("second", (2.0 if choices is None else choices) * values["first"] ** 2)
        return values, values["second"] @ self.head

    def intermediates(self, tokens, names):
        return {name: value for name, value in self.run(tokens)[0].items() if name in names}

    def __call__(self, tokens, edits=None, choices=None):
        return self.run(tokens, edits, choices)[1]


MODEL = Squares(jnp.asarray(RNG.normal(size=(V, D)), jnp.float32), jnp.asarray(RNG.normal(size=(D, V)), jnp.float32))
TOKENS, SOURCE = jnp.array([[0, 1, 2], [3, 4, 5]]), jnp.array([[0, 5, 4], [1, 4, 2]])
TABLE, HEAD = (np.asarray(x, np.float64) for x in (MODEL.table, MODEL.head))


def slopes(answer: int, other: int, position: int, chosen: float) -> dict[str, np.ndarray]:
    """Of the mean over rows of a difference of two logits at a position: none elsewhere."""
    second = np.zeros((B, T, D))
    second[:, position] = (HEAD[:, answer] - HEAD[:, other]) / B
    return {"first": 2 * chosen * TABLE[TOKENS] * second, "second": second}


def test_gradients_are_the_slopes_of_the_metric():
    """Of all names from one pass, under choices that are given too; another metric of its kind compiles nothing."""
    for answer, other, position in ((3, 5, -1), (0, 2, 1)):
        found = inside.gradients(MODEL, TOKENS, inside.logit_difference(answer, other, position), ("first", "second"))
        for name, slope in slopes(answer, other, position, 2.0).items():
            np.testing.assert_allclose(found[name], slope, atol=1e-5)
    with compilations() as seen:
        inside.gradients(MODEL, TOKENS, inside.logit_difference(1, 4, 0), ("first", "second"))
    assert not [event for event in seen if event.endswith("backend_compile_duration")]
    found = inside.gradients(MODEL, TOKENS, inside.logit_difference(3, 5), ("first",), jnp.float32(7.0))
    assert found.keys() == {"first"}
    np.testing.assert_allclose(found["first"], slopes(3, 5, -1, 7.0)["first"], atol=1e-4)


def test_a_metric_may_be_any_function_of_logits():
    found = inside.gradients(MODEL, TOKENS, lambda logits: jnp.sum(logits**2) / 2, ("second",))
    logits = 2 * TABLE[TOKENS] ** 2 @ HEAD
    np.testing.assert_allclose(found["second"], logits @ HEAD.T, rtol=1e-4)


@pytest.mark.parametrize("chosen", [None, 7.0])
def test_attributions_are_slopes_times_what_a_patch_moves(chosen):
    """Summed over all but rows and tokens, from the tokens' values to the source's."""
    choices = None if chosen is None else jnp.float32(chosen)
    metric, names = inside.logit_difference(3, 5), ("first", "second")
    found = inside.attributions(MODEL, TOKENS, SOURCE, metric, names, choices)
    moved = {"first": TABLE[SOURCE] - TABLE[TOKENS], "second": 2 * (TABLE[SOURCE] ** 2 - TABLE[TOKENS] ** 2)}
    for name, slope in slopes(3, 5, -1, chosen or 2.0).items():
        assert found[name].shape == (B, T)
        np.testing.assert_allclose(found[name], (moved[name] * slope).sum(-1), atol=1e-4)
    assert np.abs(found["first"]).max() > 0.1


def test_a_difference_of_logits_is_that_of_the_last_column_unless_it_is_said():
    logits = jnp.arange(B * T * V, dtype=jnp.float32).reshape(B, T, V) ** 2
    for options, column in (({}, 2), ({"position": 0}, 0), ({"position": 1}, 1)):
        expected = np.mean([float(logits[b, column, 4] - logits[b, column, 1]) for b in range(B)])
        assert float(inside.logit_difference(4, 1, **options)(logits)) == expected
