"""Inversion of a choice, by sorting and by comparison: each block's queries from each query's blocks."""

import jax
import numpy as np
import pytest
from hypothesis import given
from support import comparisons
from support.msa_strategies import FOURS, GROUPED, cases

from m3jax.msa import inversion

further = pytest.mark.further


_INVERT = {
    way.__name__: jax.jit(way, static_argnames=("num_blocks", "tile"))
    for way in (inversion.invert, inversion.by_sorting, inversion.by_comparison)
}


@pytest.mark.parametrize(("way", "tile"), [("by_sorting", 1), ("by_sorting", 8), ("by_comparison", 8)])
@given(case=cases((GROUPED, FOURS)))
def test_inversion_is_exact(way, tile, case):
    """T9: each chosen (query, block) pair stands in one lane, its own, of a tile of that block; -1 stands nowhere."""
    s, blocks = case.shape, case.any_blocks()
    tiles = _INVERT[way](blocks, num_blocks=s.M, tile=tile)
    row, head, block, query, pair, valid, place_of = (np.asarray(x) for x in tiles)
    lanes = {(row[x], head[x], query[x, c], block[x]): x * tile + c for x, c in zip(*np.nonzero(valid), strict=True)}
    pairs = [(b, k, t, blocks[b, k, t, j]) for b, k, t, j in np.argwhere(blocks >= 0)]
    assert len(lanes) == valid.sum() == len(pairs) == len(set(pairs))
    assert [lanes[x] for x in pairs] == place_of[blocks >= 0].tolist()
    assert (blocks.reshape(-1)[pair] == block[:, None])[valid].all()
    assert (pair.reshape(-1)[place_of[blocks >= 0]] == np.flatnonzero(blocks >= 0)).all()
    used = valid.any(-1)
    order = (row * s.K + head) * s.M + block
    assert (np.diff(order[used]) >= 0).all() and not used[used.sum() :].any()
    bins = [(b * s.K + k) * s.M + m for b, k, _, m in pairs]
    by_bin = place_of[blocks >= 0][np.argsort(bins, kind="stable")]
    assert (np.diff(by_bin) > 0).all(), "the queries of a bin do not ascend"


# On both sides of where a key and a place no longer fit one 32-bit number.
@pytest.mark.parametrize(
    ("queries", "num_blocks"),
    [(1025, 1_047_552), (1025, 1_047_553), pytest.param(1025, 1_048_600, marks=further)],
    ids=["below", "the last pair above", "several above"],
)
def test_inversion_where_keys_and_places_fill_32_bits(queries, num_blocks):
    """T37: blocks x pairs on both sides of 2**31, where the last query chose the last block."""
    draw = np.random.default_rng(queries + num_blocks)
    blocks = draw.integers(0, num_blocks, (1, 1, queries, 2)).astype(np.int32)
    blocks[0, 0, :, 1] = np.where(draw.random(queries) < 0.5, num_blocks - 1, -1)
    blocks[0, 0, ::7, 0] = -1
    blocks[0, 0, -1] = -1, num_blocks - 1
    tiles = _INVERT["invert"](blocks, num_blocks=num_blocks, tile=8)
    block, query, valid, place_of = (np.asarray(x) for x in (tiles.block, tiles.query, tiles.valid, tiles.place_of))
    pairs = np.argwhere(blocks[0, 0] >= 0)
    assert valid.sum() == len(pairs), f"{valid.sum()} places are used, expected {len(pairs)}"
    place = place_of[0, 0][tuple(pairs.T)]
    comparisons.assert_equal(query.reshape(-1)[place], pairs[:, 0], "query in the place of a pair", "pair")
    comparisons.assert_equal(block[place // 8], blocks[0, 0][tuple(pairs.T)], "block of a pair's tile", "pair")
    assert valid.reshape(-1)[place].all()
