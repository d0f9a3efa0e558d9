"""The checks of MSA's arguments: of shapes and dtypes at every call, of values under `m3jax.checks()`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.msa_strategies import GROUPED, prefill

import m3jax
from m3jax import msa

CASE = prefill(GROUPED)
INDEX_Q, INDEX_K = map(jnp.asarray, CASE.index())
Q, K, V = map(jnp.asarray, CASE.qkv())
POSITIONS, LENGTHS = jnp.asarray(CASE.positions), jnp.asarray(CASE.lengths)
# The latest three blocks of each query: made by numpy, for every test process collects this file.
OWN = np.arange(GROUPED.T) // 4
LATEST = np.maximum(OWN - 2, 0)[:, None] + np.arange(3)
LATEST = np.where(OWN[:, None] >= LATEST, LATEST, -1).astype(np.int32)
BLOCKS = jnp.asarray(np.broadcast_to(LATEST, (GROUPED.B, GROUPED.K, *LATEST.shape)))

CALLS = {
    "block_scores": (partial(msa.block_scores, block_size=4), dict(index_q=INDEX_Q, index_k=INDEX_K)),
    "index_topk": (partial(msa.index_topk, block_size=4, top_k=3), dict(index_q=INDEX_Q, index_k=INDEX_K)),
    "dense_attention": (msa.dense_attention, dict(q=Q, k=K, v=V)),
    "sparse_attention": (partial(msa.sparse_attention, block_size=4), dict(q=Q, k=K, v=V, blocks=BLOCKS)),
}
ROWS = dict(positions=POSITIONS, lengths=LENGTHS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lengths=LENGTHS[:1]), r"lengths has shape \[1\] .*with B = 3, as (index_)?q has"),
        (dict(lengths=[40, 40, 40]), r"lengths is a list: must be an array of signed integers \[B\]"),
        (dict(lengths=LENGTHS.astype(jnp.uint32)), "lengths has shape .* and dtype uint32: must be signed integers"),
        (dict(positions=POSITIONS[0]), r"positions has shape \[40\] .*: must be signed integers \[B T\]"),
        (dict(positions=POSITIONS.astype(jnp.float32)), "positions .* dtype float32: must be signed integers"),
        (dict(positions=POSITIONS[:, :0]), r"positions has shape \[3, 0\] .*(no axis|with T = 40)"),
    ],
)
def test_rows_that_do_not_fit(name, changes, message):
    """T5, T13: the lengths of one row are not those of three, and positions are whole numbers."""
    call, operands = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(**(operands | ROWS | changes))


def test_a_view_of_keys_and_values_of_two_dtypes():
    """A view has one dtype, as what is stored has."""
    with pytest.raises(ValueError, match="k has dtype float32 and v bfloat16: must have one dtype"):
        msa.contiguous(K, V.astype(jnp.bfloat16), 4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("index_topk", dict(index_q=INDEX_Q[0]), r"index_q has shape \[40, 2, 8\] .*: must be floats \[B T K I\]"),
        ("index_topk", dict(index_q=INDEX_Q[:, :0]), r"index_q .*: no axis of floats \[B T K I\] may be empty"),
        ("index_topk", dict(index_q=INDEX_Q.astype(jnp.int32)), "index_q .* dtype int32: must be floats"),
        ("block_scores", dict(index_k=INDEX_K[:2]), r"index_k has shape \[2, 40, 8\] .* with B = 3, as index_q has"),
        ("sparse_attention", dict(blocks=BLOCKS * 1.0), "blocks .* dtype float32: must be signed integers"),
        ("sparse_attention", dict(v=V[:, :39]), r"v has shape \[3, 39, 2, 8\] .* with S = 40, as k has"),
        ("sparse_attention", dict(k=K.astype(jnp.bfloat16)), "k has dtype bfloat16 and v float32: must have one dtype"),
        ("dense_attention", dict(v=V.astype(jnp.bfloat16)), "k has dtype float32 and v bfloat16: must have one dtype"),
        ("sparse_attention", dict(return_lse="x"), "return_lse = 'x': must be True or False"),
        ("dense_attention", dict(return_lse=1), "return_lse = 1: must be True or False"),
        ("dense_attention", dict(q=None), "q is a NoneType: must be an array of floats"),
    ],
)
def test_operands_of_another_rank_dtype_or_size(name, changes, message):
    call, operands = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(**(operands | ROWS | changes))


WRONG_VALUES = {
    "another block size, too small": (dict(block_size=2), {}, "lacks the query's own block, in blocks of 2"),
    "another block size, too large": (dict(block_size=8), {}, "names a block that there is not: ids are -1 to 4"),
    "no such id": ({}, dict(blocks=BLOCKS.at[1, 1, 30, 0].set(10)), r"blocks\[1, 1, 30\] .* ids are -1 to 9"),
    "a block twice": ({}, dict(blocks=BLOCKS.at[2, 0, 39, 0].set(9)), r"blocks\[2, 0, 39\] .* names a block twice"),
    "a later block": ({}, dict(blocks=BLOCKS.at[0, 1, 20, 0].set(7)), "a block behind the query's own"),
    "of other queries": ({}, dict(positions=POSITIONS + 4), "lacks the query's own block"),
    "more keys than there are": ({}, dict(lengths=LENGTHS.at[1].set(41)), r"lengths\[1\] = 41: a row has 0 to 40 keys"),
}  # fmt: skip


NAN_KEY = K.at[2, 39, 1, 0].set(jnp.nan)
WRONG_VALUES |= {
    "NaN in q": ({}, dict(q=Q.at[1, 2, 0, 3].set(jnp.nan)), r"q\[1, 2, 0, 3\] is NaN, one of 1 in q"),
    "NaN in a key": ({}, dict(k=NAN_KEY), r"k\[2, 39, 1, 0\] is NaN"),
    "positions beyond every key": ({}, dict(positions=POSITIONS + 40, blocks=BLOCKS * 0 - 1),
                                   r"positions\[0, 0\] = 40 of a row with 40 keys: all queries are padding"),
}  # fmt: skip


# What is said of ids, tests/msa/test_pieces.py has too.
ABOUT_IDS = ("another block size, too large", "no such id", "a later block", "of other queries")


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        pytest.param(*case, marks=pytest.mark.further if name in ABOUT_IDS else (), id=name)
        for name, case in WRONG_VALUES.items()
    ],
)
def test_wrong_numbers_are_found_under_checks(options, changes, message):
    """Each changes what is attended to without an error; a compiled function finds it too, and is found as it was."""
    arrays = dict(q=Q, k=K, v=V, blocks=BLOCKS) | ROWS | changes
    attend = partial(msa.sparse_attention, **(dict(block_size=4) | options))
    with m3jax.checks(), pytest.raises(ValueError, match=message):
        attend(**arrays)

    traced = []

    @jax.jit
    def compiled(arrays):
        traced.append(None)
        return attend(**arrays)

    silent = compiled(arrays)
    with pytest.raises(ValueError, match=message), m3jax.checks():
        compiled(arrays)
    np.testing.assert_array_equal(compiled(arrays), silent)
    assert len(traced) == 2  # without checks, and with them


def test_what_is_right_passes_checks():
    """Also inside a program, and where padding holds anything."""
    padded = POSITIONS.at[:, 35:].set(-1), LENGTHS.at[0].set(20)
    run = lambda blocks, *rows: msa.sparse_attention(Q, K, V, blocks, *rows, block_size=4)
    with m3jax.checks():
        args = msa.index_topk(INDEX_Q, INDEX_K, *padded, block_size=4, top_k=3), *padded
        np.testing.assert_allclose(run(*args), jax.jit(run)(*args), rtol=1e-5, atol=1e-6)
        of_padding = Q.at[:, 35:].set(jnp.nan), K.at[0, 20:].set(jnp.nan), V.at[0, 20:].set(jnp.nan)
        out = msa.sparse_attention(*of_padding, *args, block_size=4)
        assert not jnp.any(jnp.isnan(out))
        nobody = jnp.full_like(POSITIONS, -1), LENGTHS
        assert not jnp.any(msa.dense_attention(Q, K, V, *nobody))


def test_an_error_in_a_block_of_checks_names_what_was_found():
    """The error of `checks()` comes first, with the later error as its cause: the finding likely made that one fail."""
    compiled = jax.jit(lambda blocks: msa.sparse_attention(Q, K, V, blocks, POSITIONS, LENGTHS, block_size=4))
    with pytest.raises(ValueError, match="names a block that there is not") as raised, m3jax.checks():
        compiled(BLOCKS + 100)
        raise KeyError("tensor")
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="tensor"), m3jax.checks():
        raise KeyError("tensor")


def test_a_score_of_ones_own():
    """Definition and walk agree on a custom score; one that is the maximum selects as "max" does."""
    second_best = lambda scores: jnp.sort(scores, axis=-1)[..., -2]
    for score in (second_best, lambda scores: jnp.max(scores, axis=-1)):

        @jax.jit
        def by_definition(index_q, index_k, score=score):
            scores = msa.block_scores(index_q, index_k, POSITIONS, LENGTHS, 4, score)
            return msa.select_blocks(scores, POSITIONS, LENGTHS, msa.SelectionRules(3, score=score), block_size=4)

        select = partial(msa.index_topk, INDEX_Q, INDEX_K, POSITIONS, LENGTHS, block_size=4, top_k=3)
        found = select(score=score)
        np.testing.assert_array_equal(found, by_definition(INDEX_Q, INDEX_K))
        assert bool(jnp.all(found == select())) == (score is not second_best)
