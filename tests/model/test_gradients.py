"""Gradients of the whole model: what is trained, what is recomputed, and what is not chosen again."""

from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import comparisons, tiny

from m3jax.model import M3

GRADIENT = tiny.config("MM")
# For programs whose speed and last bits do not matter: it halves the time to compile them.
QUICK = {"xla_backend_optimization_level": 0}


def loss(model: M3, tokens, remat: bool | str):
    log_p = jax.nn.log_softmax(model.run(tokens, remat=remat).logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1))


@cache
def gradient(schedule: str, remat: bool | str):
    grad = jax.jit(jax.grad(loss), static_argnames="remat", compiler_options=QUICK)
    model = tiny.model(GRADIENT).with_schedule(schedule)
    return jax.device_get(grad(model, tiny.tokens(GRADIENT, 2, 50), remat=remat))


def by_name(tree) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}


@pytest.mark.further  # as trained: tests/train/test_losses.py
def test_language_loss_does_not_train_the_index_branch():
    """T33; the routing bias, which only chooses, gets no gradient either, and all else does."""
    for name, grad in by_name(gradient("auto", remat=True)).items():
        if "index_" in name or "e_score_correction_bias" in name:
            assert np.all(grad == 0), name
        else:
            assert np.all(np.isfinite(grad)) and np.any(grad != 0), name


@pytest.mark.further
@pytest.mark.parametrize("remat", [True, "products"])
def test_remat_and_schedule_do_not_change_the_gradient(remat):
    """T30: recomputed activations of the fast schedule against stored ones of the definition."""
    expected = by_name(gradient("mask", remat=False))
    for name, grad in by_name(gradient("auto", remat=remat)).items():
        comparisons.assert_close(grad, expected[name], f"gradient of {name}", atol=1e-6)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_remat_keeps_the_selection():
    """T30: the backward pass reads the blocks and experts that the forward pass chose, and chooses none of its own."""
    tokens, model = tiny.tokens(GRADIENT, 2, 50), tiny.model(GRADIENT)
    blocks = -(-50 // GRADIENT.index_block_size)
    for remat in (False, True, "products"):
        jaxpr = jax.make_jaxpr(partial(jax.grad(loss), remat=remat))(model, tokens)
        top_k = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "top_k"]
        assert sorted(e.invars[0].aval.shape[-1] for e in top_k) == sorted([blocks, GRADIENT.num_local_experts])


def test_kept_products_are_not_made_again():
    """But attention's scores, which a backward pass without a kernel never keeps."""
    tokens, model = tiny.tokens(GRADIENT, 2, 50), tiny.model(GRADIENT)

    def products(remat):
        jaxpr = jax.make_jaxpr(partial(jax.grad(loss), remat=remat))(model, tokens)
        of_products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
        return Counter(tuple(x.aval.shape for x in e.invars) for e in of_products)

    made_again = (products("products") - products(False)).elements()
    assert not [shapes for shapes in made_again if GRADIENT.hidden_size in shapes[1]]
    assert (products(True) - products(False)).total() > 10
