"""The model against itself: one answer, however a sequence is cut, padded, cached, batched or scheduled."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import comparisons, tiny

from m3jax.cache import Cache
from m3jax.model import M3
from m3jax.msa import block_scores, index_topk

CONFIG = tiny.config("dMM")
BATCH, LENGTH = 3, 75
BLOCK = CONFIG.index_block_size
TOLERANCE = 5e-5  # between programs that sum in different orders; logits are about 1
FULL = np.full(BATCH, LENGTH, np.int32)


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def tokens(seed: int = 0) -> np.ndarray:
    return tiny.tokens(CONFIG, BATCH, LENGTH, seed)


def intermediates(model, tokens, lengths):
    return model.intermediates(tokens, lengths=lengths)


run = jax.jit(intermediates)
# Less time to compile, more to run: for a program that runs once.
run_quick = jax.jit(intermediates, compiler_options={"xla_backend_optimization_level": 0})


@jax.jit
def extend(model, tokens, cache, positions, lengths):
    """(logits, selections of the sparse layers [L B K T J], cache)."""
    probe = lambda values, _: values.get("blocks")
    out = model.run(tokens, cache=cache, positions=positions, lengths=lengths, probe=probe)
    return out.logits, jnp.concatenate([blocks for blocks in out.probed if blocks is not None]), out.cache


@cache
def whole() -> dict[str, Any]:
    """All tokens in one call without a cache."""
    return jax.device_get(run(model(), tokens(), FULL))


def sparse_layers(values: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    return [layer for layer in values["layers"] if "blocks" in layer]


def empty_cache() -> Cache:
    return Cache.init(CONFIG, BATCH, LENGTH, "float32")


def feed(cache: Cache, counts: np.ndarray, width: int, start: np.ndarray | None = None):
    """Feed each row its next counts[i, b] tokens in call i of `width` tokens.

    Returns:
      (logits [B T V], selections [L B K T J], cache), with NaN and -2 where no token was fed.
    """
    start = np.zeros(BATCH, np.int32) if start is None else start
    garbage = np.random.default_rng(9)
    logits = np.full((BATCH, LENGTH, CONFIG.vocab_size), np.nan, np.float32)
    blocks = np.full((2, BATCH, 4, LENGTH, CONFIG.index_topk_blocks), -2, np.int32)
    for count in np.asarray(counts, np.int32):
        steps = np.arange(width, dtype=np.int32)
        positions = np.where(steps < count[:, None], start[:, None] + steps, -1).astype(np.int32)
        ids = garbage.integers(0, CONFIG.vocab_size, positions.shape, np.int32)
        for row, (a, n) in enumerate(zip(start, count, strict=True)):
            ids[row, :n] = tokens()[row, a : a + n]
        found, chosen, cache = extend(model(), ids, cache, positions, start + count)
        for row, (a, n) in enumerate(zip(start, count, strict=True)):
            logits[row, a : a + n] = found[row, :n]
            blocks[:, row, :, a : a + n] = chosen[:, row, :, :n]
        start = start + count
    return logits, blocks, cache


def assert_like_whole(logits: np.ndarray, blocks: np.ndarray, fed: np.ndarray = FULL) -> None:
    """Logits within the tolerance of one call's, block sets equal, for the first fed[b] tokens of each row."""
    expected = np.stack([layer["blocks"] for layer in sparse_layers(whole())])
    for row, n in enumerate(fed):
        comparisons.assert_same_sets(blocks[:, row, :, :n], expected[:, row, :, :n], f"blocks of row {row}", "L K T")
        found, of_whole = logits[row, :n], whole()["logits"][row, :n]
        comparisons.assert_close(found, of_whole, f"logits of row {row}", "T V", atol=TOLERANCE)


def assert_same_bits(a: Any, b: Any) -> None:
    named = jax.tree_util.tree_leaves_with_path(a)
    for (path, x), y in zip(named, jax.tree.leaves(b), strict=True):
        comparisons.assert_equal(x, y, jax.tree_util.keystr(path) or "values")


# Selection is really partial


def test_visible_blocks_are_dropped():
    """T17: short prompts are dense, and prove nothing."""
    own = np.arange(LENGTH) // BLOCK
    partial = own + 1 > CONFIG.index_topk_blocks
    assert partial.mean() > 0.6
    for layer in sparse_layers(whole()):
        count = (layer["blocks"] >= 0).sum(-1)
        np.testing.assert_array_equal(count, np.broadcast_to(np.minimum(own + 1, 3), count.shape))
        # What is dropped is not merely the oldest: some query keeps an old block and drops a newer one.
        oldest_kept = layer["blocks"][:, :, partial, 0]
        assert np.any(oldest_kept < own[partial] - 2)


def test_heads_and_layers_choose_for_themselves():
    """Selections differ between KV heads (T1) and between layers (T25), for more than half of the queries."""
    first, second = (layer["blocks"][:, :, 40:] for layer in sparse_layers(whole()))
    assert np.mean(np.any(first[:, 0] != first[:, 1], axis=-1)) > 0.5
    assert np.mean(np.any(first != second, axis=-1)) > 0.5


# A sequence cut in pieces


@pytest.mark.parametrize(
    "counts",
    [
        [[75]],
        [[40], [35]],
        [[8], [8], [59]],
        [[3], [10], [1], [61]],
        [[7, 33, 75], [68, 2, 0], [0, 40, 0]],
    ],
    ids=["one", "block", "blocks", "mid-block", "per-row"],
)
def test_chunked_prefill_is_one_shot(counts):
    """T14, T15: any chunking, from a block's middle too, gives the selections of one call."""
    counts = np.broadcast_to(np.asarray(counts), (len(counts), BATCH))
    logits, blocks, _ = feed(empty_cache(), counts, LENGTH)
    assert_like_whole(logits, blocks)


def test_decode_is_teacher_forcing():
    """T18: one token a call, from the first on, chooses the blocks that one call over all tokens chooses."""
    counts = np.ones((LENGTH, BATCH), np.int32)
    assert_like_whole(*feed(empty_cache(), counts, 1)[:2])


@pytest.mark.further  # of the selection alone: tests/msa/test_selection.py
def test_a_few_tokens_across_a_block_boundary():
    """T20: rows stand at different offsets within their blocks, and each call crosses some boundary."""
    counts = np.array([[5, 3, 1], *[[5, 5, 5]] * 14])
    logits, blocks, _ = feed(empty_cache(), counts, 5)
    assert_like_whole(logits, blocks, fed=counts.sum(0))


def test_ragged_rows_decode_as_if_alone():
    """T5, T13: rows of different lengths, each with its own positions and its own number of blocks."""
    prompt = np.array([[9, 70, 31]])
    logits, blocks, cache = feed(empty_cache(), prompt, LENGTH)
    more = np.array([[1, 1, 1]] * 5 + [[1, 0, 1]] * 20)
    decoded, chosen, _ = feed(cache, more, 1, start=prompt[0].astype(np.int32))
    logits, blocks = np.where(np.isnan(logits), decoded, logits), np.maximum(blocks, chosen)
    assert_like_whole(logits, blocks, fed=prompt[0] + more.sum(0))


def test_one_program_for_all_lengths():
    """T11, T21: lengths and positions are data."""
    feed(empty_cache(), [[4, 1, 0]], LENGTH)
    programs = extend._cache_size()
    for count, start in (([5, 5, 5], [0, 9, 40]), ([0, 2, 1], [74, 0, 31])):
        feed(empty_cache(), [count], LENGTH, start=np.array(start, np.int32))
    assert extend._cache_size() == programs


# Padding, poison, companions


def test_padding_is_not_seen_and_is_finite():
    """T6, T8: what stands right of a row's length is invisible; a row of no tokens is finite too."""
    lengths = np.array([0, 33, 75], np.int32)
    padded = np.where(np.arange(LENGTH) < lengths[:, None], tokens(), tokens(1))
    found = jax.device_get(run(model(), padded, lengths))
    other = jax.device_get(run(model(), np.where(padded == tokens(), padded, 5), lengths))
    assert all(np.isfinite(x).all() for x in (found["logits"], found["final_norm"]))
    for row, n in enumerate(lengths):
        assert_same_bits(found["logits"][row, :n], other["logits"][row, :n])
        of_whole = whole()["logits"][row, :n]
        comparisons.assert_close(found["logits"][row, :n], of_whole, f"logits of row {row}", "T V", atol=TOLERANCE)
        for layer in sparse_layers(found):
            assert np.all(layer["blocks"][row, :, n:] == -1)
        for layer in found["layers"]:
            assert np.all(layer["attention"][row, n:] == 0)


def poisoned(cache: Cache, lengths: np.ndarray) -> Cache:
    """NaN in every slot at or past a row's length."""
    slots = (np.arange(cache.max_length) >= lengths[:, None]).reshape(*cache.table.shape, BLOCK)
    stale = np.zeros((cache.num_pages, BLOCK), bool)
    stale[np.asarray(cache.table)] = slots
    keys = lambda x: jnp.where(stale[:, None, :, None], jnp.nan, x)
    index = lambda x: None if x is None else jnp.where(stale[:, :, None], jnp.nan, x)
    stacks = tuple(s.replace(k=keys(s.k), v=keys(s.v), index_k=index(s.index_k)) for s in cache.stacks)
    return cache.replace(stacks=stacks)


def test_what_lies_beyond_the_lengths_is_not_read():
    """T10, T12: NaN in unwritten slots changes no bit, in prefill and in decode."""
    clean = feed(empty_cache(), [[41, 17, 64]], LENGTH)
    dirty = feed(poisoned(empty_cache(), np.zeros(BATCH)), [[41, 17, 64]], LENGTH)
    assert_same_bits(clean[:2], dirty[:2])
    start = np.array([41, 17, 64], np.int32)
    args = ([[1, 1, 1]], 1, start)
    assert_same_bits(feed(clean[2], *args)[:2], feed(poisoned(clean[2], start), *args)[:2])


def test_padding_is_not_written():
    before = poisoned(empty_cache(), np.zeros(BATCH))
    _, _, after = feed(before, [[0, 3, 5]], LENGTH)
    expected = np.arange(after.max_length) < np.array([0, 3, 5])[:, None]
    for stack in after.stacks:
        for x in (stack.k, stack.v) if stack.index_k is None else (stack.k, stack.v, stack.index_k):
            written = ~np.isnan(np.asarray(x))[:, np.asarray(after.table)]  # L B M [K] P H
            written = np.moveaxis(written, -2, 3).reshape(x.shape[0], BATCH, after.max_length, -1)
            assert_same_bits(written, np.broadcast_to(expected[None, :, :, None], written.shape))


def test_a_row_does_not_depend_on_its_companions():
    """T40, bitwise: other tokens and other lengths beside it, another place in the batch."""
    mixed = np.stack([tokens()[0], tokens(1)[1], tokens(1)[2]])
    found = jax.device_get(run(model(), mixed, np.array([75, 20, 51], np.int32)))
    assert_same_bits(row_of(found, 0), row_of(whole(), 0))
    moved = jax.device_get(run(model(), mixed[[1, 2, 0]], np.array([20, 51, 75], np.int32)))
    assert_same_bits(row_of(moved, 2), row_of(whole(), 0))


def test_a_decoded_row_does_not_depend_on_its_companions():
    """T40 for the paths of a decode step."""
    _, _, cache = feed(empty_cache(), [[41, 17, 64]], LENGTH)
    start, step = np.array([41, 17, 64], np.int32), np.array([[1, 1, 1]])
    alone = [feed(cache, step * (np.arange(3) == row), 1, start)[:2] for row in range(3)]
    together = feed(cache, step, 1, start)[:2]
    for row, (logits, blocks) in enumerate(alone):
        assert_same_bits(logits[row], together[0][row])
        assert_same_bits(blocks[:, row], together[1][:, row])


def row_of(values: dict[str, Any], row: int) -> dict[str, Any]:
    return jax.tree.map(lambda x: x[row], values)


def test_causality():
    """T2: a token changes nothing before it, in its own block's score either."""
    changed = tokens().copy()
    changed[:, 43] = (changed[:, 43] + 1) % CONFIG.vocab_size
    found = jax.device_get(run(model(), changed, FULL))
    assert_same_bits(found["logits"][:, :43], whole()["logits"][:, :43])
    assert np.all(np.any(found["logits"][:, 43:] != whole()["logits"][:, 43:], axis=(0, 2)))
    for mine, before in zip(sparse_layers(found), sparse_layers(whole()), strict=True):
        for name in ("block_scores", "blocks"):
            assert_same_bits(mine[name][:, :, :43], before[name][:, :, :43])


# Layers and schedules


def test_selection_of_a_layer_is_its_own():
    """T25: it follows from the layer's own index queries and keys, and other index weights change it alone."""
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
    for layer in sparse_layers(whole()):
        args = [jnp.asarray(x) for x in (layer["index_q"], layer["index_k"], positions, FULL)]
        rules = dict(block_size=BLOCK, top_k=CONFIG.index_topk_blocks)
        assert_same_bits(index_topk(*args, **rules), layer["blocks"])
        scores = block_scores(*args, BLOCK)
        comparisons.assert_close(layer["block_scores"], scores, "block_scores", "B K T M", rtol=1e-5, atol=1e-5)
    other = jax.tree.map(lambda x: x, model())
    weights = other.stacks[1].self_attn.index_q_proj
    other.stacks[1].self_attn.index_q_proj = nnx.Param(weights[...].at[1].multiply(-1))
    first, second = sparse_layers(jax.device_get(run(other, tokens(), FULL)))
    assert_same_bits(first, sparse_layers(whole())[0])
    assert_same_bits(second["q"], sparse_layers(whole())[1]["q"])
    assert np.any(second["blocks"] != sparse_layers(whole())[1]["blocks"])


@pytest.mark.further
def test_float64_agrees():
    """The definition in float64 chooses the same blocks and agrees with the float32 schedule."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model().with_schedule("mask"))
        found = jax.device_get(run_quick(wide, tokens(), FULL))
        assert wide.dtype == found["logits"].dtype == np.float64
    for mine, before in zip(found["layers"], whole()["layers"], strict=True):
        for name in mine.keys() & {"blocks", "expert_ids"}:
            assert_same_bits(mine[name], before[name])
    comparisons.assert_close(found["logits"], whole()["logits"], "logits", "B T V", atol=TOLERANCE)


# The numbers of a config


SHORT = dict(index_block_size=2, index_topk_blocks=2)
NUMBERS = dict(
    routed_scaling_factor=1.7, rms_norm_eps=0.05, rope_theta=300.0, rotary_dim=4, swiglu_alpha=1.1, swiglu_limit=0.7,
    num_experts_per_tok=1, index_topk_blocks=3, index_block_size=3, index_local_blocks=2, index_init_blocks=1,
    index_score_type="lse",
)  # fmt: skip
# The oracle's cases draw all numbers but these, and agree (test_oracle.py).
NOT_DRAWN = ("index_init_blocks", "index_score_type")


@cache
def logits_of(**changes) -> np.ndarray:
    config = tiny.config("M", **(SHORT | changes))
    model = tiny.model(config).with_schedule("mask")
    call = jax.jit(lambda m, t: m(t), compiler_options={"xla_backend_optimization_level": 0})
    return np.asarray(call(model, tiny.tokens(config, 1, 8, seed=1)))


@pytest.mark.parametrize(
    "name", [*NOT_DRAWN, *(pytest.param(name, marks=pytest.mark.further) for name in NUMBERS if name not in NOT_DRAWN)]
)
def test_every_number_of_the_config_counts(name):
    """T36: none is written into the code."""
    assert np.abs(logits_of(**{name: NUMBERS[name]}) - logits_of()).max() > 100 * 5e-5
