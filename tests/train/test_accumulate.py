"""A gradient over micro-batches: the gradient of their sum, made as they go by, and held once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3jax.train.accumulate import Accumulated


def loss(params, batch):
    """A loss that is not linear in its parameters, and a metric."""
    out = jnp.tanh(batch["x"] @ params) * batch["scale"]
    return jnp.sum(out**2), {"largest": jnp.max(out)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_micro_batches_have_the_gradient_of_their_sum(count):
    draw = np.random.default_rng(count)
    params = jnp.asarray(draw.normal(size=(5, 3)), jnp.float32)
    batch = {"x": jnp.asarray(draw.normal(size=(count, 4, 5)), jnp.float32), "scale": jnp.float32(0.7)}

    def at_once(params, batch):
        each = [loss(params, {"x": x, "scale": batch["scale"]}) for x in batch["x"]]
        return sum(value for value, _ in each), {"largest": sum(metrics["largest"] for _, metrics in each)}

    found, grads = jax.value_and_grad(Accumulated(loss, ("x",)), has_aux=True)(params, batch)
    without_gradient = Accumulated(loss, ("x",))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), without_gradient, found)
    expected, expected_grads = jax.value_and_grad(at_once, has_aux=True)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (found, grads), (expected, expected_grads))


@pytest.mark.parametrize(("count", "sums"), [(1, 0), (2, 1)])
def test_one_micro_batch_has_no_second_gradient_to_be_added_to(count, sums):
    """A sum that begins with zeros holds every gradient twice, which a model that just fits has no memory for."""
    batch = {"x": jnp.zeros((count, 4, 5)), "scale": jnp.float32(1)}
    of_sum = jax.grad(Accumulated(loss, ("x",)), has_aux=True)
    program = jax.make_jaxpr(of_sum)(jnp.zeros((5, 3)), batch)
    assert sum(equation.primitive.name == "scan" for equation in program.eqns) == sums
