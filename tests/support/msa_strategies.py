"""Inputs for the tests of m3jax.msa: shapes from a small set, so that compiled functions are shared, the rest free."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import jax
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from m3jax import msa
from m3jax.msa.schedules import DENSE_SCHEDULES, SCHEDULES, walk_scores
from m3jax.spec.msa import SelectionRules


@dataclass(frozen=True)
class Shape:
    """Static sizes, in the letters of the code."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    P: int
    J: int

    @property
    def M(self) -> int:
        return -(-self.S // self.P)


GROUPED = Shape(B=3, T=40, S=40, N=4, K=2, H=8, P=4, J=3)
RAGGED = Shape(B=2, T=17, S=37, N=3, K=1, H=8, P=8, J=2)  # the last block is not whole
FOURS = Shape(B=4, T=4, S=32, N=4, K=4, H=4, P=4, J=4)  # T7: no axis can be told by its size
ONE_SLOT = Shape(B=2, T=7, S=16, N=8, K=2, H=4, P=4, J=1)
ROOMY = Shape(B=2, T=20, S=20, N=4, K=2, H=8, P=8, J=6)  # more slots than blocks: everything is selected
PARTIAL = (GROUPED, RAGGED, FOURS, ONE_SLOT)
SHAPES = (*PARTIAL, ROOMY)
CUT = (GROUPED, RAGGED)  # large enough to be walked in pieces
# For what must not matter, beside tests of the same programs against an oracle, which take the profile's examples.
few = settings(max_examples=10)


@dataclass(frozen=True)
class Case:
    """A shape with positions and lengths; the arrays follow from the seed."""

    shape: Shape
    positions: np.ndarray  # [B T]
    lengths: np.ndarray  # [B]
    seed: int

    @property
    def valid(self) -> np.ndarray:
        """[B T]: False for padding."""
        return (self.positions >= 0) & (self.positions < self.lengths[:, None])

    def qkv(self, dtype=np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries [B T N H], keys and values [B S K H]; float32 numbers in any dtype."""
        s, rng = self.shape, np.random.default_rng(self.seed)
        shapes = ((s.B, s.T, s.N, s.H), (s.B, s.S, s.K, s.H), (s.B, s.S, s.K, s.H))
        return tuple(rng.normal(size=x).astype(np.float32).astype(dtype) for x in shapes)

    def index(self, exact: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Index queries [B T K H] and keys [B S H].

        Exact ones are small integers: a score is the same in any order of summation, and ties abound.
        """
        s, rng = self.shape, np.random.default_rng((self.seed, 1))
        shapes = ((s.B, s.T, s.K, s.H), (s.B, s.S, s.H))
        draw = (lambda x: rng.integers(-3, 4, x)) if exact else (lambda x: rng.normal(size=x))
        return tuple(draw(x).astype(np.float32) for x in shapes)

    def any_blocks(self) -> np.ndarray:
        """A selection that no rule made: distinct ids in any order, unused slots anywhere, unseen blocks too."""
        s, rng = self.shape, np.random.default_rng((self.seed, 2))
        ids = np.argsort(rng.random((s.B, s.K, s.T, s.M)), axis=-1)[..., : s.J]
        ids = np.pad(ids, [(0, 0)] * 3 + [(0, s.J - ids.shape[-1])], constant_values=-1)
        return np.where(rng.random(ids.shape) < 0.3, -1, ids).astype(np.int32)

    def rules(self, **changes) -> dict:
        """Keyword arguments of `index_topk`."""
        return dict(block_size=self.shape.P, top_k=self.shape.J) | changes


@st.composite
def cases(draw, shapes: tuple[Shape, ...] = SHAPES) -> Case:
    """Rows of any length, empty ones too; queries that run from any position on, or stand anywhere.

    One row is full, and its last query stands at the end: where slots are fewer than blocks, it drops some.
    """
    s = draw(st.sampled_from(shapes))
    seed = draw(st.integers(0, 2**16))
    full = draw(st.integers(0, s.B - 1))
    lengths = np.array([s.S if b == full else draw(st.integers(0, s.S)) for b in range(s.B)], np.int32)
    if draw(st.booleans()):
        starts = [s.S - s.T if b == full else draw(st.integers(0, s.S - 1)) for b in range(s.B)]
        positions = np.array(starts)[:, None] + np.arange(s.T)
    else:
        positions = np.random.default_rng((seed, 3)).integers(-2, s.S + 2, (s.B, s.T))
        positions[full, -1] = s.S - 1
    return Case(s, positions.astype(np.int32), lengths, seed)


def prefill(shape: Shape, seed: int = 0, lengths=None) -> Case:
    """Queries at the first T positions of every row."""
    positions = np.broadcast_to(np.arange(shape.T, dtype=np.int32), (shape.B, shape.T))
    lengths = np.full(shape.B, shape.S, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    return Case(shape, positions, lengths, seed)


def assert_partial(case: Case, blocks: np.ndarray) -> None:
    """T17: somewhere a block that the query could see was dropped; else nothing was selected at all."""
    visible = np.where(case.valid, case.positions // case.shape.P + 1, 0)[:, None]
    assert (visible > (np.asarray(blocks) >= 0).sum(-1)).any()


_SMALL = {
    "index_walk": dict(_SCORE_BUDGET=200, _KEY_CHUNK=12, _FEW_ROWS=0),
    "blockwise": dict(_SCORE_BUDGET=400, _KEY_CHUNK=16),
    "query_major": dict(_GATHER_BUDGET=2000),
    "kv_block_major": dict(_QUERY_CHUNK=5, _STEP_SCORES=150),
}


@contextmanager
def pieces(small: bool) -> Iterator[None]:
    """Makes every walk in pieces take many of them, as it does at full size (in force while a function is traced)."""
    with ExitStack() as stack:
        for name, values in _SMALL.items() if small else ():
            stack.enter_context(mock.patch.multiple(f"m3jax.msa.schedules.{name}", **values))
        yield


_RULES = ("block_size", "top_k", "local_blocks", "init_blocks")


# How scores and selections are computed: as they are defined, or by the walk over the keys, whole or in small pieces.
WAYS = ("definition", "walk", "pieces")
# Sparse attention as it is defined, and the schedules that compute it otherwise.
SPARSE = ("definition", "query_major", "kv_block_major")


@partial(jax.jit, static_argnames=("block_size", "score", "way"))
def block_scores(index_q, index_k, positions, lengths, *, block_size, score="max", way="definition"):
    if way == "definition":
        return msa.block_scores(index_q, index_k, positions, lengths, block_size, score)
    with pieces(way == "pieces"):
        return walk_scores(index_q, msa.contiguous_index(index_k, block_size), positions, lengths, score)


@partial(jax.jit, static_argnames=_RULES)
def select_blocks(scores, positions, lengths, *, block_size, **rules):
    return msa.select_blocks(scores, positions, lengths, SelectionRules(**rules), block_size=block_size)


@partial(jax.jit, static_argnames=(*_RULES, "score", "way"))
def index_topk(index_q, index_k, positions, lengths, *, block_size, way="walk", **rules):
    if way == "definition":
        rules = SelectionRules(**rules)
        scores = msa.block_scores(index_q, index_k, positions, lengths, block_size, rules.score)
        return msa.select_blocks(scores, positions, lengths, rules, block_size=block_size)
    with pieces(way == "pieces"):
        return msa.index_topk(index_q, index_k, positions, lengths, block_size=block_size, **rules)


@jax.jit
def dense_attention(*args):
    """Return dense attention and its LSE, compiled."""
    return msa.dense_attention(*args, return_lse=True)


@partial(jax.jit, static_argnames=("block_size", "small"))
def blockwise(q, k, v, positions, lengths, *, block_size, small=False):
    with pieces(small):
        return DENSE_SCHEDULES["blockwise"](q, msa.contiguous(k, v, block_size), positions, lengths)


@partial(jax.jit, static_argnames=("block_size", "schedule", "small"))
def attention(q, k, v, blocks, positions, lengths, *, block_size, schedule, small=False):
    """Sparse attention by the definition, or by a schedule over a view of the same arrays."""
    if schedule == "definition":
        return msa.sparse_attention(q, k, v, blocks, positions, lengths, block_size=block_size, return_lse=True)
    with pieces(small):
        return SCHEDULES[schedule](q, msa.contiguous(k, v, block_size), blocks, positions, lengths)
