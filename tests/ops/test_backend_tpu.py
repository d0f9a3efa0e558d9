"""Whole models on the TPU kernels, in TPU interpret mode: nothing races, and XLA gives the same."""

import importlib
import itertools
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import comparisons, tiny
from support.tpu_interpreter import STRICT

from m3jax.cache import Cache
from m3jax.ops import interpret
from m3jax.parallel import parse_mesh


@contextmanager
def counted(*names):
    """Run in interpret mode, and count the traced calls of each kernel.

    Index kernels have buffers of a few pages: each page is copied by code of its own, and the 32 of a chip would be
    most of a program to compile.
    """
    modules = [importlib.import_module(f"pallas_kernels.{name}.mosaic_tpu") for name in names]
    with ExitStack() as stack:
        for module in modules:
            if "index" in module.__name__:
                stack.enter_context(mock.patch.object(module, "Config", partial(module.Config, lanes=16, pages=2)))
        stack.enter_context(interpret(STRICT))
        yield [stack.enter_context(mock.patch.object(module, "run", wraps=module.run)) for module in modules]


CONFIG = tiny.config("M")  # blocks of 8, of which a query keeps 3
PROMPT, NEW = 31, 2  # the second new token is the first of a page
TOKENS = tiny.tokens(CONFIG, 1, PROMPT + NEW)


@jax.jit
def extend(model, tokens, cache, start):
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return model(tokens, cache=cache, positions=positions, lengths=positions[:, -1] + 1)


def logits(of_prompt, of_steps) -> np.ndarray:
    """Return the logits of a prompt in one call of a model, and of the tokens behind it in a call each of another."""
    cache, found = Cache.init(CONFIG, 1, 40, "float32", of_steps.mesh), []
    for start, stop in itertools.pairwise([0, *range(PROMPT, PROMPT + NEW + 1)]):
        model = of_steps if start else of_prompt
        out, cache = extend(model, TOKENS[:, start:stop], cache, np.int32(start))
        found.append(np.asarray(out[0]))
    return np.concatenate(found)


@cache
def by_xla() -> np.ndarray:
    return logits(tiny.model(CONFIG), tiny.model(CONFIG))


@pytest.mark.further  # tests/ops/test_backends.py has the steps of a GPU's kernels, tests/kernels each of a TPU's
def test_steps_are_those_of_xla():
    """Behind a prompt by XLA, since the test below computes one by the kernels."""
    model = tiny.model(CONFIG)
    with counted("index_topk_decode", "sparse_decode", "qk_norm_rope_insert") as spies:
        found = logits(model, model.with_backend("mosaic_tpu"))
    assert all(spy.call_count for spy in spies)
    comparisons.assert_close(found, by_xla(), "logits", "T V", atol=1e-4)


@pytest.mark.further
def test_inside_shard_map_a_prompt_and_steps_are_those_of_xla():
    """Each of two devices names candidates among the pages that are its own, and attends over them."""
    model = tiny.model(CONFIG, mesh=parse_mesh("context=2")).with_backend("mosaic_tpu")
    names = ("index_topk", "index_topk_decode", "sparse_prefill", "sparse_decode", "qk_norm_rope_insert")
    with counted(*names) as spies:
        found = logits(model, model)
    assert all(spy.call_count for spy in spies)
    comparisons.assert_close(found, by_xla(), "logits", "T V", atol=1e-4)
