"""Generation with the real model: dense, sparse and MoE layers, far more blocks than are selected."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.engines import QUICK, quick, runner_of
from support.generation import params, run, tokens

from m3jax.decoding import Engine, engine_for
from m3jax.decoding.device import step
from m3jax.model import M3, abstract, shardings
from m3jax.parallel import make_mesh

CONFIG = tiny.config("dMM")
RNG = np.random.default_rng(0)
# Block 8 and top-k 3: beyond 24 tokens selection is partial.
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (5, 1, 133, 64)]
NEW = 12


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    with quick():
        yield


@pytest.fixture(scope="module")
def model():
    return tiny.model(CONFIG)


def copied(model, dtype="float32", mesh=None):
    """The same weights in another dtype, or over a mesh."""
    like = abstract(CONFIG, dtype, mesh)
    places = jax.tree.leaves(shardings(CONFIG, mesh))
    kinds = [x.dtype for x in jax.tree.leaves(like)]
    leaves = [jax.device_put(x.astype(k), s) for x, k, s in zip(jax.tree.leaves(model), kinds, places, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def engine(model, **options) -> Engine:
    """In the shapes that `generate` chooses for PROMPTS, so that both share programs."""
    shapes = dict(pages=128, max_batch=4, prefill_rows=4, prefill_chunk=256, max_length=1024, steps_per_call=64)
    return Engine(model, **shapes | options, max_stop_ids=4)


def best_of_one_call(model, news):
    """Return the best token in the place of each new one, from one forward pass over prompts and new tokens."""
    rows = np.zeros((4, 160), np.int32)
    for row, prompt, new in zip(rows, PROMPTS, news, strict=True):
        row[: len(prompt) + NEW] = prompt + new
    forward = jax.jit(lambda model, tokens: model(tokens).argmax(-1), compiler_options=QUICK)
    best = np.asarray(forward(model, rows))
    return [row[len(prompt) - 1 : len(prompt) + NEW - 1].tolist() for row, prompt in zip(best, PROMPTS, strict=True)]


@pytest.mark.parametrize(("sizes", "rows"), [({"data": 2, "tensor": 2, "expert": 2}, 4), ({"data": 4}, 1)], ids=str)
def test_a_mesh_has_the_rows_that_it_divides(model, monkeypatch, sizes, rows):
    """Where the mesh divides the rows there are as many as it needs. What they compute is in test_records.py."""
    monkeypatch.setattr(Engine, "warmup", lambda *_, **__: None)
    sharded, asked = copied(model, mesh=make_mesh(**sizes)), params(NEW, temperature=0)
    served = engine_for(sharded, PROMPTS[:rows], [asked] * rows)
    assert len(runner_of(served).state.lengths) == 4


def test_pages_of_a_bfloat16_model_are_float32_where_a_cpu_serves_them(model, monkeypatch):
    """`engine_for` chooses them for a CPU, which has no bfloat16; an engine has those that its model has."""
    monkeypatch.setattr(Engine, "warmup", lambda *_, **__: None)
    half, asked = copied(model, "bfloat16"), params(NEW, temperature=0)
    pages_of = lambda served: {x.dtype.name for x in jax.tree.leaves(runner_of(served).state.cache) if x.ndim == 5}
    assert pages_of(engine_for(half, PROMPTS, [asked] * len(PROMPTS))) == {"float32"}
    assert pages_of(engine(half)) == {"bfloat16"}


# Last: jax knows the 2,048 calls that it traced latest, and these trace many.


def test_layers_apart_give_the_same_tokens(model, monkeypatch):
    """Steps on a GPU run layer after layer; here their program does, in a shape that no other test has.

    That rounds are lowered so too is in test_device_on_gpu.py.
    """
    monkeypatch.setattr(step, "platform", lambda: "gpu")
    with mock.patch.object(M3, "with_layers_apart", autospec=True, side_effect=M3.with_layers_apart) as cut:
        served = engine(model, pages=64, prefill_chunk=64, max_length=256, steps_per_call=5)
        news = tokens(run(served, PROMPTS, params(NEW, temperature=0)))
        assert cut.called
    assert news == best_of_one_call(model, news)


@pytest.mark.further
def test_layers_apart_have_the_same_taps():
    model, rows, layers = tiny.model(tiny.config("MM")), jnp.array(PROMPTS[2:3], jnp.int32), (1, 2)

    def taps(model):
        out = model.run(rows, residual_layers=layers, logits=False)
        return out.hidden, out.residuals

    whole = jax.jit(taps, compiler_options=QUICK)
    apart = jax.jit(lambda model: taps(model.with_layers_apart(rows.size)), compiler_options=QUICK)
    for found, expected in zip(apart(model), whole(model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
