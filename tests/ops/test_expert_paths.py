"""A path of experts that is asked for by name: it runs, or says why it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3jax.ops import EXPERT_PATHS, interpret, measured, run_experts
from m3jax.ops.experts import ExpertWeights, why_not_path
from m3jax.vectors.groups import experts as group

KERNELS = ("few", "grouped", "products")


def gate(width: int, hidden: int) -> jax.Array:
    return jnp.zeros((1, 8, width, hidden), jnp.bfloat16)


@pytest.mark.parametrize(
    ("path", "width", "hidden", "tokens", "reason"),
    [
        ("few", 32, 24, 24, "experts of 32 by 24 channels (it has multiples of 64)"),
        ("few", 192, 192, 64, None),
        ("few", 192, 192, 65, "65 tokens (it has up to 64)"),
        ("grouped", 192, 192, 24, "experts of 192 by 192 channels (it has multiples of 128)"),
        ("grouped", 128, 256, 2048, None),
    ],
)
def test_a_kernel_by_name_runs_or_says_why_not(path, width, hidden, tokens, reason):
    x = jnp.zeros((tokens, width), jnp.bfloat16)
    wrong_platform = f"it needs a GPU, and JAX runs on a {jax.default_backend().upper()}"
    assert why_not_path(path, x, gate(width, hidden)) == wrong_platform
    with interpret():
        assert why_not_path(path, x, gate(width, hidden)) == reason


@pytest.mark.parametrize("path", [path for path in EXPERT_PATHS if path not in KERNELS])
def test_what_xla_runs_has_no_reason_against_it(path):
    assert why_not_path(path, jnp.zeros((2048, 32)), gate(32, 24)) is None


@pytest.mark.parametrize("path", KERNELS)
def test_a_path_that_cannot_run_is_one_line(path):
    weights = ExpertWeights(*(jnp.zeros((1, 8, *shape)) for shape in ((32, 24), (32, 24), (24, 32))))
    call = lambda: run_experts(
        jnp.zeros((4, 32)), weights, jnp.zeros((4, 2), jnp.int32), jnp.int32(0), jnp.multiply, path=path
    )
    with pytest.raises(ValueError, match=f"^path = '{path}' cannot run these experts: it needs a GPU"):
        call()
    with interpret(), pytest.raises(ValueError, match="experts of 32 by 24 channels"):
        call()


@pytest.mark.further
def test_the_vectors_check_only_what_can_run():
    (case,) = (case for case in group.cases(large=False) if case.name == "layer")
    names = {run.label for run in group.runs(case.inputs, case.rule)}
    assert names == set(EXPERT_PATHS) - set(KERNELS)


def test_the_backward_pass_of_training_keeps_no_copy_of_a_layers_experts():
    """Of weights the stack is kept, which is there anyway: three layers at M3's widths would be 5 GB of copies."""
    weights = ExpertWeights(*(jnp.ones((2, 3, *shape)) for shape in ((8, 4), (8, 4), (4, 8))))
    ids = jnp.zeros((5, 2), jnp.int32)
    copied = lambda x: run_experts(x, weights, ids, jnp.int32(1), jnp.multiply, path="copied")
    kept = jax.eval_shape(lambda x: jax.vjp(copied, x)[1], jnp.ones((5, 8)))
    shapes = {x.shape for x in jax.tree.leaves(kept)}
    assert (2, 3, 8, 4) in shapes, "the stacks were not found"
    assert not {shape for shape in shapes if shape[-3:] in ((3, 8, 4), (3, 4, 8)) and shape[0] != 2}


def test_gradients_of_copied_experts_are_sums_over_their_tiles(monkeypatch):
    """In tiles of two pairs, so that an expert has several; the last expert has none, and one pair is elsewhere."""
    monkeypatch.setattr(measured, "COPIED_TILE", 2)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
    x, weights = draw(7, 8), ExpertWeights(draw(2, 4, 8, 4), draw(2, 4, 8, 4), draw(2, 4, 4, 8))
    ids = jnp.asarray([[0, 1], [0, 2], [1, 0], [2, 1], [-1, 1], [1, 2], [0, 2]])
    factors = jnp.where(ids[..., None] < 0, 0, draw(7, 2, 8))

    def by_copies(x, weights):
        return jnp.sum(factors * run_experts(x, weights, ids, jnp.int32(1), jnp.multiply, path="copied"))

    def of_all_experts(x, weights):
        gate, up, down = (weight[1] for weight in weights)
        hidden = jnp.einsum("xd,edf->xef", x, gate) * jnp.einsum("xd,edf->xef", x, up)
        of_each = jnp.einsum("xef,efd->xed", hidden, down)  # [X E D]
        return jnp.sum(factors * jnp.take_along_axis(of_each, ids[:, :, None], axis=1))

    got, want = (jax.jit(jax.grad(fn, argnums=(0, 1)))(x, weights) for fn in (by_copies, of_all_experts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
    assert not np.asarray(got[1].gate)[1, 3].any()
