"""The share of dense attention that the selection catches, against the definition in float64."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from support import evaluation, tiny
from support.comparisons import assert_close

from m3jax.evaluate import caught
from m3jax.evaluate.caught import (
    caught_by_distance,
    caught_figures,
    caught_mass,
    caught_table,
    default_first,
    distance_bucket,
    random_like,
)
from m3jax.model import M3
from m3jax.parallel import make_mesh

BATCH, QUERIES, KEYS, HEADS, GROUPS, WIDTH, BLOCK, SLOTS = 3, 13, 26, 6, 2, 8, 4, 3
CONFIG = tiny.config("dM")


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def operands() -> dict[str, np.ndarray]:
    """A chunk at the end of ragged rows, with padding after it and before it; own blocks are always chosen."""
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    lengths = np.array([KEYS, 17, 9], np.int32)
    positions = np.stack([np.arange(QUERIES) + first for first in (KEYS - QUERIES, 10, -3)]).astype(np.int32)
    own = np.maximum(positions, 0)[:, None] // BLOCK
    others = draw.integers(-1, -(-KEYS // BLOCK), (BATCH, GROUPS, QUERIES, SLOTS - 1))
    blocks = np.concatenate([others, np.broadcast_to(own, others.shape[:3])[..., None]], -1).astype(np.int32)
    return {
        "q": 2 * normal(BATCH, QUERIES, HEADS, WIDTH), "k": normal(BATCH, KEYS, GROUPS, WIDTH), "blocks": blocks,
        "positions": positions, "lengths": lengths,
    }  # fmt: skip


def measured(x: dict[str, np.ndarray]) -> np.ndarray:
    """[B K T W Z]: all of the mass, and what the blocks catch."""
    q, k, blocks, positions, lengths = (jnp.asarray(x[name]) for name in ("q", "k", "blocks", "positions", "lengths"))
    return np.asarray(caught_mass(q, k, [blocks], positions, lengths, BLOCK))


@pytest.mark.parametrize("budget", [1 << 26, 2000], ids=["at once", "chunks"])
def test_each_query_by_the_definition(monkeypatch, budget):
    """Group by group and distance by distance; padding catches nothing, for it attends to nothing (T8)."""
    monkeypatch.setattr(caught, "_SCORE_BUDGET", budget)
    x = operands()
    found = measured(x)
    expected = np.zeros_like(found, np.float64)
    for b, t in np.ndindex(BATCH, QUERIES):
        position = int(x["positions"][b, t])
        if not 0 <= position < x["lengths"][b]:
            continue
        # The one query as the last of a row: those before it do not count.
        q = np.zeros((position + 1, HEADS, WIDTH))
        blocks = np.full((GROUPS, position + 1, SLOTS), -1)
        q[position], blocks[:, position] = x["q"][b, t], x["blocks"][b, :, t]
        parts = evaluation.caught(q, x["k"][b, : position + 1], blocks, BLOCK, position, found.shape[-1])
        expected[b, :, t] = np.stack(parts, axis=1)
    assert 0.1 < expected[0, :, :, 1].sum(-1).mean() < 0.9
    assert_close(found, expected, "mass by distance", "BKTWZ", atol=1e-6)


def test_all_blocks_catch_everything():
    x, count = operands(), -(-KEYS // BLOCK)
    every = np.broadcast_to(np.arange(count, dtype=np.int32), (BATCH, GROUPS, QUERIES, count))
    real = (x["positions"] >= 0) & (x["positions"] < x["lengths"][:, None])
    found = measured(x | {"blocks": every})
    for group in np.moveaxis(found.sum(axis=-1), 1, 0):
        assert_close(group, np.stack([real, real], -1), "mass", "BTW", atol=1e-6)


def test_distances_fall_into_one_interval_each():
    """0 to P - 1, then P to 2P - 1, 2P to 4P - 1, and so on, with nothing between."""
    edges = [0, BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK]
    for distance in range(8 * BLOCK):
        (bucket,) = [z for z in range(4) if edges[z] <= distance < edges[z + 1]]
        assert distance_bucket(distance, BLOCK) == bucket, distance


@cache
def of_a_model() -> np.ndarray:
    return caught_by_distance(model(), tiny.tokens(CONFIG, 2, 128))


def test_a_models_layers_by_the_definition():
    """From the model's own q, k and blocks: the mean over rows and queries of each sparse layer."""
    tokens, first = tiny.tokens(CONFIG, 2, 128), default_first(CONFIG)
    layer = model().intermediates(tokens)["layers"][1]
    q, k, blocks = (np.asarray(layer[name]) for name in ("q", "k", "blocks"))
    rows = [evaluation.caught(q[b], k[b], blocks[b], CONFIG.index_block_size, first, 5) for b in range(2)]
    assert first == 96
    assert_close(
        of_a_model()[0, :, :2], np.mean([np.stack(row, axis=1) for row in rows], axis=0), "mass", "KWZ", atol=1e-5
    )


def test_selection_and_chance():
    """Blocks are dropped, and as many random ones catch something else."""
    of_all, selected, random = np.moveaxis(of_a_model().sum(axis=-1), -1, 0)  # each [L K]
    assert of_all.shape == (1, CONFIG.num_key_value_heads)
    assert_close(of_all, np.ones_like(of_all), "all of the mass", "LK", atol=1e-5)
    assert np.all((selected > 0.05) & (selected < 0.95)) and np.all((random > 0.05) & (random < 0.95))
    assert not np.allclose(selected, random)
    everything = tiny.model(tiny.config("dM", index_topk_blocks=16))
    found = caught_by_distance(everything, tiny.tokens(CONFIG, 2, 128), first=0).sum(axis=-1)
    assert_close(found[:, :, 1], found[:, :, 0], "mass in all blocks", "LK", atol=1e-6)


@pytest.mark.further  # what a mesh computes: tests/model
def test_a_mesh_catches_the_same():
    mesh = make_mesh(data=2, context=1, expert=2, tensor=2)
    found = caught_by_distance(tiny.model(CONFIG, mesh=mesh), tiny.tokens(CONFIG, 2, 128))
    assert_close(found, of_a_model(), "mass on a mesh", "LKWZ", atol=1e-5)


def test_figures_of_what_selection_catches_and_their_table():
    """Layers are numbered through all stacks; of a distance without mass there is no share."""
    config = tiny.config("dMMdM")
    draw = np.random.default_rng(0)
    mass = draw.random((3, 2, 3, 3))  # [L K W Z]
    mass[1, :, :, 2] = 0.0
    found = caught_figures(config, mass, 40, 50)
    assert (found["layers"], found["first"], found["context"]) == ([1, 2, 4], 40, 50)
    assert found["distances"] == [[0, 8], [8, 16], [16, 50]]
    for i in range(3):
        whole, part = mass[i].mean(axis=0)[:2]
        np.testing.assert_allclose(found["mass_by_distance"][i], whole)
        shares = [part[z] / whole[z] if whole[z] else None for z in range(3)]
        np.testing.assert_allclose(*(np.array(x, float) for x in (found["caught_by_distance"][i], shares)))
        assert [share is None for share in found["caught_by_distance"][i]] == [False, False, i == 1]
        np.testing.assert_allclose(found["caught"][i], mass[i, :, 1].sum(-1))
        np.testing.assert_allclose(found["by_chance"][i], mass[i, :, 2].sum(-1))
    result = dict(
        layers=[7], distances=[[0, 8], [8, 5000]], caught=[[0.5, 0.25]], by_chance=[[0.125, 0.0]],
        caught_by_distance=[[1.0, None]], mass_by_distance=[[0.75, 0.0]],
    )  # fmt: skip
    other = result | dict(caught=[[1.0, 0.5]], mass_by_distance=[[0.5, 0.5]])
    assert caught_table([result, other]) == [
        ["layer 7, by KV group", "50.0% 25.0%", "100.0% 50.0%"],
        ["  as many random blocks", "12.5% 0.0%", "12.5% 0.0%"],
        ["  0 to 7 tokens back", "100.0% of 75.0%", "100.0% of 50.0%"],
        ["  8 to 4,999 tokens back", "- of 0.0%", "- of 50.0%"],
    ]  # fmt: skip


@pytest.mark.parametrize("first", [None, 96, -1])
def test_there_must_be_queries_that_count(first):
    with pytest.raises(ValueError, match=r"rows of 96 tokens need one from 0 to 95"):
        caught_by_distance(model(), tiny.tokens(CONFIG, 1, 96), first=first)


def test_there_must_be_a_selection():
    with pytest.raises(ValueError, match="no layer of this model selects blocks"):
        caught_by_distance(model().with_dense(), tiny.tokens(CONFIG, 1, 128))


def test_random_blocks_are_distinct_and_keep_the_own_one():
    """As many as a selection has, or all that there are."""
    positions = np.broadcast_to(np.arange(64, dtype=np.int32), (2, 64))
    drawn = np.asarray(random_like(jnp.zeros((2, 3, 64, 4), jnp.int32), 8, jnp.asarray(positions)))
    for b, k, t in np.ndindex(2, 3, 64):
        ids = drawn[b, k, t][drawn[b, k, t] >= 0]
        assert ids[-1] == t // 8 and len(set(ids)) == len(ids) == min(4, t // 8 + 1) and np.all(ids <= t // 8)
    assert len({tuple(x) for x in drawn[..., -1, :].reshape(-1, 4)}) > 1
