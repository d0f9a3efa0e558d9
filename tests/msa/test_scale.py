"""Long documents: nothing of size T x S is held, no count overflows, and walks in pieces take many pieces."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from support import msa_reference as reference
from support.comparisons import assert_same_sets
from support.msa_runs import assert_close
from support.msa_strategies import GROUPED, attention, blockwise, pieces

from m3jax import msa
from m3jax.msa.chunks import rows_within

further = pytest.mark.further
LONG = 65536
WIDTHS = dict(N=16, K=2, H=32, P=128, J=16)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations, those of loops, branches, checkpoints and inner functions among them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def traced(op: str, T: int, S: int, *, B=1, N, K, H, P, J, small=False, grad=False) -> core.Jaxpr:
    """The jaxpr of an operation at a size that is never run."""
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    rows = (of(B, T, dtype=jnp.int32), of(B, dtype=jnp.int32))
    rules = dict(block_size=P, top_k=J)
    if op in ("index_topk", "walk_scores", "block_scores"):
        operands = (of(B, T, K, H), of(B, S, H))
        fn = partial(msa.index_topk, **rules) if op == "index_topk" else partial(msa.block_scores, block_size=P)
        if op == "walk_scores":
            fn = lambda q, k, *rows: msa.walk_scores(q, msa.contiguous_index(k, P), *rows)
    elif op == "blockwise":
        operands = (of(B, T, N, H), of(B, S, K, H), of(B, S, K, H))
        fn = lambda q, k, v, *rows: msa.DENSE_SCHEDULES[op](q, msa.contiguous(k, v, P), *rows)[0]
    else:
        operands = (of(B, T, N, H), of(B, S, K, H), of(B, S, K, H))
        rows = (of(B, K, T, J, dtype=jnp.int32), *rows)
        fn = lambda q, k, v, *rest: msa.SCHEDULES[op](q, msa.contiguous(k, v, P), *rest)[0]
    if grad:
        fn = jax.grad(lambda *args, inner=fn: inner(*args).sum(), argnums=range(len(operands)))
    with pieces(small):
        return jax.make_jaxpr(fn)(*operands, *rows).jaxpr


def largest(jaxpr: core.Jaxpr) -> int:
    """Elements of the largest intermediate."""
    return max(v.aval.size for eqn in equations(jaxpr) for v in eqn.outvars)


LINEAR = ["index_topk", "blockwise", "query_major", "kv_block_major"]


@pytest.mark.parametrize(
    ("op", "grad"),
    [
        *((op, False) for op in LINEAR), ("blockwise", True), ("query_major", True),
        pytest.param("kv_block_major", True, marks=further),
    ],
)  # fmt: skip
def test_nothing_of_size_t_times_s(op, grad):
    """Intermediates stay far below T x S, and grow with T and S no faster than the operands do."""
    size = largest(traced(op, LONG, LONG, grad=grad, **WIDTHS))
    assert size < LONG * LONG // 8
    assert largest(traced(op, 2 * LONG, 2 * LONG, grad=grad, **WIDTHS)) <= 2 * size


@pytest.mark.parametrize("op", ["query_major", "kv_block_major"])
def test_gathered_memory_is_bounded(op):
    """A schedule's memory beyond its operands does not grow with T: it holds one chunk of queries at a time."""
    operands = LONG * WIDTHS["N"] * WIDTHS["H"]
    assert largest(traced(op, LONG, LONG, **WIDTHS)) <= max(operands, 1 << 24)


@pytest.mark.parametrize("op", ["mask", "block_scores", "walk_scores"])
def test_the_walk_over_jaxprs_sees_what_is_large(op):
    """Those that do hold it, T x S scores or T x M block scores, are seen to."""
    width = LONG // WIDTHS["P"] if op == "walk_scores" else LONG
    assert largest(traced(op, LONG, LONG, **WIDTHS)) >= LONG * width


@pytest.mark.parametrize("op", [*LINEAR, "walk_scores"])
def test_small_pieces_are_many(op):
    """The other tests' small pieces do cut: queries, keys and tiles are walked in loops of several steps."""
    s = GROUPED
    sizes = dict(T=s.T, S=s.S, B=s.B, N=s.N, K=s.K, H=s.H, P=s.P, J=s.J)

    def loops(small):
        scans = (eqn for eqn in equations(traced(op, small=small, **sizes)) if eqn.primitive.name == "scan")
        return sum(eqn.params["length"] > 2 for eqn in scans)

    assert loops(small=True) - loops(small=False) == (1 if op == "query_major" else 2)


# Executed past the sizes at which other engines' counters end (T37, T39).

PAST = 66_000


@further
@pytest.mark.parametrize("schedule", ["query_major", "kv_block_major"])
def test_more_than_65535_queries(schedule):
    """T37: selection and attention of all rows at once; some rows checked against the oracle."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, PAST, n, 4)).astype(np.float32) for n in (4, 1, 1))
    positions, lengths = np.arange(PAST, dtype=np.int32)[None], np.array([PAST], np.int32)
    own = positions // 16
    blocks = np.stack([own, own // 2, own // 3, own * 0], -1)
    blocks = np.where((np.diff(blocks, axis=-1, prepend=-1) == 0), -1, blocks)[:, None].astype(np.int32)
    got = attention(q, k, v, blocks, positions, lengths, block_size=16, schedule=schedule)
    at = np.array([0, 15, 16, 65_535, 65_536, PAST - 1])
    expected = reference.attention(q[:, at], k, v, positions[:, at], lengths, blocks[:, :, at], 16)
    assert_close([np.asarray(x)[:, at] for x in got], expected)


@further
def test_more_than_65535_queries_select():
    """T37: many queries over few keys."""
    rng = np.random.default_rng(1)
    index_q, index_k = (rng.integers(-3, 4, x).astype(np.float32) for x in ((1, PAST, 1, 4), (1, 512, 4)))
    positions, lengths = (np.arange(PAST, dtype=np.int32) % 512)[None], np.array([512], np.int32)
    rules = dict(block_size=16, top_k=4)
    got = np.asarray(jax.jit(partial(msa.index_topk, **rules))(index_q, index_k, positions, lengths))
    at = np.array([0, 511, 65_535, 65_536, 65_537, PAST - 1])
    scores = reference.block_scores(index_q[:, at], index_k, positions[:, at], lengths, 16)
    assert_same_sets(got[:, :, at], reference.select_blocks(scores, positions[:, at], lengths, **rules))
    assert ((got >= 0).sum(-1) == np.minimum(4, positions // 16 + 1)[:, None]).all()
    assert (got[..., -1] > 3).any()


@pytest.mark.parametrize("schedule", ["query_major", pytest.param("kv_block_major", marks=further)])
def test_more_than_8192_blocks(schedule):
    """T37: few queries over 16,500 blocks, more than a million-token context of M3 has."""
    rng = np.random.default_rng(2)
    size, last = 66_000, np.array([7, 40_000, 65_535, 65_536, 65_999], np.int32)
    index_q, index_k = (rng.integers(-3, 4, x).astype(np.float32) for x in ((1, 5, 1, 4), (1, size, 4)))
    q, k, v = (rng.normal(size=x).astype(np.float32) for x in ((1, 5, 2, 4), (1, size, 1, 4), (1, size, 1, 4)))
    rows = (last[None], np.array([size], np.int32))
    blocks = np.asarray(jax.jit(partial(msa.index_topk, block_size=4, top_k=4))(index_q, index_k, *rows))
    scores = reference.block_scores(index_q, index_k, *rows, 4)
    assert_same_sets(blocks, reference.select_blocks(scores, *rows, block_size=4, top_k=4))
    got, _ = attention(q, k, v, blocks, *rows, block_size=4, schedule=schedule)
    expected, _ = reference.attention(q, k, v, *rows, blocks, 4)
    assert_close([got], [expected], ["out"])


def test_blockwise_over_a_long_context():
    """T37: a decode step and a chunk at the end of a long row."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(1, n, 2 if n < 9 else 1, 4)).astype(np.float32) for n in (5, PAST, PAST))
    rows = (np.array([[0, 511, 512, 65_536, PAST - 1]], np.int32), np.array([PAST], np.int32))
    got = blockwise(q, k, v, *rows, block_size=128)
    assert_close(got[:1], reference.attention(q, k, v, *rows)[:1], ["out"], rtol=1e-4, atol=1e-5)


def test_pieces_are_powers_of_two_within_the_budget():
    for elements, per_row, num_rows in np.ndindex(40, 9, 12):
        rows = rows_within(elements, per_row, num_rows)
        allowed = [n for n in (1, 2, 4, 8, 16, 32, 64) if n * max(1, per_row) <= elements] or [1]
        assert rows == min(max(allowed), max(1, num_rows)), (elements, per_row, num_rows)
