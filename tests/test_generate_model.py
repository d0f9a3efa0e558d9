"""The decode loop over the real model: dense, sparse and MoE layers, far more blocks than are selected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_generate import compilations, requests, run

from m3jax.decoding import Batch, generate
from m3jax.model import abstract, shardings
from m3jax.parallel import make_mesh

CONFIG = tiny.config("dMM")
RNG = np.random.default_rng(0)
# Block 8 and top-k 3: beyond 24 tokens selection is partial.
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (5, 1, 133, 64)]
NEW = 20


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


@pytest.fixture(scope="module")
def greedy(model):
    return generate(model, PROMPTS, max_new_tokens=NEW, temperature=0, stop_ids=[])


@pytest.fixture(scope="module")
def sampled(model):
    return generate(model, PROMPTS, max_new_tokens=NEW, temperature=1.2, top_p=0.9, seed=4, stop_ids=[])


def test_greedy_is_teacher_forcing(model, greedy):
    """Every token is the argmax of one forward over what came before it."""
    tokens = np.zeros((4, 160), np.int32)
    for row, (prompt, new) in enumerate(zip(PROMPTS, greedy, strict=True)):
        tokens[row, : len(prompt) + NEW] = prompt + new
    best = np.asarray(jax.jit(lambda model, tokens: model(tokens).argmax(-1))(model, jnp.asarray(tokens)))
    for row, (prompt, new) in enumerate(zip(PROMPTS, greedy, strict=True)):
        assert new == best[row, len(prompt) - 1 : len(prompt) + NEW - 1].tolist()


def test_rows_do_not_depend_on_their_companions(model, greedy, sampled):
    for row, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], max_new_tokens=NEW, temperature=0, stop_ids=[]) == [greedy[row]]
        knobs = {"temperature": 1.2, "top_p": 0.9, "seed": 4, "stop_ids": []}
        assert generate(model, [prompt], max_new_tokens=NEW, **knobs) == [sampled[row]]


@pytest.mark.parametrize(("chunk", "steps"), [(13, 1000), (16, 7), (512, 1)])
def test_any_chunks_and_slices_give_the_same_tokens(model, sampled, chunk, steps):
    work = Batch(model, requests(PROMPTS, new=NEW, temperature=1.2, top_p=0.9, seed=4), prefill_chunk=chunk)
    assert run(work, steps) == sampled


def test_nothing_compiles_after_warm_up(model, greedy, sampled):
    with compilations() as seen:
        shorter = generate(model, [p[:130] for p in PROMPTS[:3]], max_new_tokens=17, top_k=7, seed=[1, 2, 3])
        longer = [PROMPTS[3] * 3, PROMPTS[2], PROMPTS[1], PROMPTS[0]]
        run(Batch(model, requests(longer, new=30, temperature=0)), steps=4)
    assert seen == []
    assert [len(row) for row in shorter] == [17] * 3


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2, "expert": 2}, {"data": 4}], ids=str)
def test_a_mesh_gives_the_same_tokens(model, greedy, sizes):
    """Sharded over host devices; the layout of the state is steady, so no later slice compiles."""
    work = Batch(copied(model, mesh=make_mesh(**sizes)), requests(PROMPTS, new=NEW, temperature=0))
    work.prefill()
    places = [x.sharding for x in jax.tree.leaves(work._state)]
    with compilations() as seen:
        while work.live:
            work.advance(8)
    assert seen == []
    assert work.tokens() == greedy
    assert [x.sharding for x in jax.tree.leaves(work._state)] == places


def test_rows_are_added_where_the_mesh_needs_them(model, greedy):
    over = copied(model, mesh=make_mesh(data=4))
    assert generate(over, PROMPTS[2:3], max_new_tokens=NEW, temperature=0, stop_ids=[]) == greedy[2:3]


def test_half_precision(model):
    """A bfloat16 model gives tokens of its own, the same for any chunks."""
    half = copied(model, "bfloat16")
    whole = generate(half, PROMPTS, max_new_tokens=NEW, temperature=0, stop_ids=[])
    assert run(Batch(half, requests(PROMPTS, new=NEW, temperature=0), prefill_chunk=64), 5) == whole
