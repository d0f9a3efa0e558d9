"""The steps between products, against NumPy."""

import jax.numpy as jnp
import numpy as np

from m3jax.execution import plain

BF16 = jnp.dtype("bfloat16")


def test_steps_between_products_are_those_of_numpy():
    x, update = np.float32([[[3, -4], [0, 0]]]), np.float32([[[1, 1], [0, 0]]])
    weight = np.float32([0.5, -0.5])
    normed = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * (1 + weight)
    np.testing.assert_allclose(plain.gemma_norm(jnp.asarray(x), jnp.asarray(weight), 0.1), normed(x), rtol=1e-6)
    for added in (None, update):
        given = None if added is None else jnp.asarray(added)
        stream, norm = plain.add_norm(jnp.asarray(x), given, jnp.asarray(weight), 0.1)
        expected = x if added is None else x + added
        np.testing.assert_array_equal(stream, expected)
        np.testing.assert_allclose(norm, normed(expected), rtol=1e-6)
    narrow = jnp.full((1, 1, 1), 256, BF16)  # 257 is no bfloat16: rounded once, the sum of two terms is
    found = plain.add(narrow, jnp.full((1, 1, 1), 1.5))
    assert found.dtype == BF16 and found == 258
    heads = np.arange(6, dtype=np.float32).reshape(1, 1, 1, 6)
    cos, sin = np.float32([[[0, 1]]]), np.float32([[[1, 0]]])
    found = plain.apply_rope(*map(jnp.asarray, (heads, cos, sin)))
    assert found[0, 0, 0].tolist() == [-2, 1, 0, 3, 4, 5]  # 0 and 2 turn by a right angle, 1 and 3 by none
    logits, bias = jnp.log(jnp.array([[1.0, 3.0, 1.0, 1.0]])), jnp.array([0.0, 0.0, 0.0, 1.0])
    ids, weights = plain.choose_experts(logits, bias, 3)  # scores of 0.5, 0.75, 0.5, 0.5
    assert ids.tolist() == [[3, 1, 0]]
    np.testing.assert_allclose(weights, [[2 / 7, 3 / 7, 2 / 7]], rtol=1e-6)
