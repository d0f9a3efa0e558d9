"""Whole models on the TPU kernels, in TPU interpret mode: nothing races, and XLA gives the same."""

import importlib
from contextlib import contextmanager
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from support import comparisons, tiny
from support.engines import CONFIG, engine, params, prompt, quick, serve

from m3jax.ops import interpret
from m3jax.parallel import parse_mesh

STRICT = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")


@cache
def model(layers="dM"):
    return tiny.model(tiny.config(layers))


@contextmanager
def counted(*names):
    """Run in interpret mode, and count the traced calls of each kernel."""
    modules = {name: importlib.import_module(f"pallas_kernels.{name}.mosaic_tpu") for name in names}
    patches = [mock.patch.object(module, "run", wraps=module.run) for module in modules.values()]
    with interpret(STRICT), quick():
        spies = [patch.start() for patch in patches]
        try:
            yield spies
        finally:
            for patch in patches:
                patch.stop()


def test_a_forward_pass_is_that_of_xla():
    tokens = jnp.asarray(tiny.tokens(CONFIG, 2, 45))
    with counted("index_topk", "sparse_prefill") as spies:
        found = jax.jit(lambda m, t: m.intermediates(t))(model().with_backend("mosaic_tpu"), tokens)
    assert all(spy.call_count for spy in spies)
    expected = jax.jit(lambda m, t: m.intermediates(t))(model(), tokens)
    comparisons.assert_same_sets(found["layers"][1]["blocks"], expected["layers"][1]["blocks"])
    comparisons.assert_close(found["logits"], expected["logits"], "logits", "B T V", atol=1e-4)


# An engine of one row, and a prompt that is one chunk: the third new token is the first of a page.
SHAPE, PROMPT, NEW = dict(max_batch=1, prefill_rows=1, prefill_chunk=40), prompt(38, 1), 4


@cache
def by_xla():
    """Return the greedy tokens of an engine with XLA's schedules."""
    (expected,) = serve(engine(model("M"), **SHAPE), (PROMPT, params(NEW)))
    return expected


def test_greedy_tokens_are_those_of_xla():
    """Decode alone: XLA computes the prompt, since the two tests beside this one prefill by the kernels."""
    served = engine(model("M"), **SHAPE)
    handle = served.add(PROMPT, params(NEW))
    while served.prefill():
        pass
    served._runner.model = model("M").with_backend("mosaic_tpu")
    with counted("index_topk_decode", "sparse_decode", "qk_norm_rope_insert") as spies:
        found = served.run()[handle]
    assert all(spy.call_count for spy in spies)
    assert len(found.tokens) == NEW and found.tokens == by_xla().tokens
    np.testing.assert_allclose(found.logprobs, by_xla().logprobs, rtol=0, atol=1e-4)


def test_inside_shard_map_selection_and_attention_are_those_of_xla():
    """Each of two devices names candidates of the pages that are its own, and attends over them."""
    divided = tiny.model(tiny.config("M"), mesh=parse_mesh("context=2")).with_backend("mosaic_tpu")
    names = ("index_topk", "index_topk_decode", "sparse_prefill", "sparse_decode", "qk_norm_rope_insert")
    with counted(*names) as spies:
        (found,) = serve(engine(divided, **SHAPE), (PROMPT, params(2)))
    assert all(spy.call_count for spy in spies)
    assert found.tokens == by_xla().tokens[:2]
    np.testing.assert_allclose(found.logprobs, by_xla().logprobs[:2], rtol=0, atol=1e-4)
