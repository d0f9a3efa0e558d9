"""Products through the ops, by XLA."""

import math
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.lowering import equations

from m3jax.ops import project, project_each


@pytest.mark.parametrize(
    ("where", "rows", "channels", "outputs", "dtype", "parts"),
    [("gpu", 63, 2048, 128, "float32", 1), ("gpu", 64, 2048, 128, "float32", 16), ("gpu", 4095, 1024, 8, "float32", 16),
     ("gpu", 4096, 1024, 8, "float32", 4), ("gpu", 64, 2112, 128, "float32", 1), ("gpu", 64, 2048, 129, "float32", 1),
     ("gpu", 64, 2048, 128, "bfloat16", 1), ("cpu", 64, 2048, 128, "float32", 1)],
)  # fmt: skip
def test_a_narrow_float32_product_is_summed_in_parts_on_a_gpu(
    where, rows, channels, outputs, dtype, parts, monkeypatch
):
    """From 64 rows on, and where the parts are whole steps; of integers the sum is the same in any order."""
    monkeypatch.setattr(import_module("m3jax.ops.project"), "platform", lambda: where)
    draw = np.random.default_rng(rows)
    x, matrix = (
        jnp.asarray(draw.integers(-3, 4, shape), dtype) for shape in ((1, rows, channels), (channels, outputs))
    )
    multiply = jax.jit(partial(project, "btd,de->bte"))
    [product] = (e for e in equations(multiply.trace(x, matrix).jaxpr.jaxpr) if e.primitive.name == "dot_general")
    assert math.prod(product.outvars[0].aval.shape) == parts * rows * outputs
    np.testing.assert_array_equal(multiply(x, matrix), np.float32(x) @ np.float32(matrix))


def test_no_gradient_goes_to_the_activations_of_detached_products():
    x, matrices = jnp.arange(3.0), [jnp.eye(3) * factor for factor in (1, 10, 100)]
    for options, expected in (({}, 111), (dict(num_detached=1), 11), (dict(num_detached=2), 1)):
        total = lambda x, options=options: sum(y.sum() for y in project_each("i,io->o", x, matrices, **options))
        np.testing.assert_array_equal(jax.grad(total)(x), [expected] * 3)
