"""Selection by kernels on several devices, in interpret mode, against the scores of all blocks on one."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from support.comparisons import assert_same_sets
from support.lowering import H200, array, lower

from m3jax.cache import LayerCall, Places, Scales, StackCache
from m3jax.execution import Projections, Tap
from m3jax.execution.attend import attend_over_mesh
from m3jax.msa import PagedIndex, SelectionRules, block_scores, select_blocks
from m3jax.ops import Heads, interpret, select
from m3jax.parallel import AXES, parse_mesh

DEVICES, P, BLOCKS, SLOTS = 4, 4, 10, 3  # a device holds two or three blocks of a row
ROWS, HEADS, WIDTH = 2, 2, 16


@cache
def selected():
    """Return a jitted selection over four devices: of index_q, all devices' pages, table, positions and lengths."""
    rules, axes = SelectionRules(SLOTS), ("context",)

    def on_each_device(index_q, pages, table, positions, lengths):
        nowhere = jnp.full(positions.shape, -1, jnp.int32)
        places = Places(table, nowhere, nowhere).on_this_device(axes, pages.shape[1], P)
        view = PagedIndex(pages, None, jnp.int32(0), places.table, index_q.dtype, places.share)
        with interpret():
            return select(index_q, view, positions, lengths, rules, backend="triton")

    on_all, by_page = PartitionSpec(), PartitionSpec(None, axes)
    return jax.jit(
        jax.shard_map(
            on_each_device, mesh=parse_mesh("context=4"), in_specs=(on_all, by_page, *[on_all] * 3), out_specs=on_all,
            check_vma=False,
        )
    )  # fmt: skip


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    ("num_queries", "cases"), [*(pytest.param(*case, marks=pytest.mark.further) for case in ((1, 1), (2, 6))), (17, 3)]
)
def test_kernels_name_candidates_that_choose_as_all_scores_do(num_queries, cases):
    """T9, T28, T48: equal scores on different devices, rows of every length, queries whose own block others hold.

    An engine runs those of a TPU over two devices (tests/ops/test_backend_tpu.py).
    """
    for seed in range(cases):
        draw = np.random.default_rng(seed)
        index_q, index_k = (
            jnp.float32(draw.integers(-1, 2, size=shape))  # few values: most maxima are equal
            for shape in ((ROWS, num_queries, HEADS, WIDTH), (ROWS, BLOCKS * P, WIDTH))
        )
        lengths = draw.integers(1, BLOCKS * P + 1, size=ROWS).astype(np.int32)
        positions = lengths[:, None] - draw.integers(0, num_queries + 1, size=(ROWS, num_queries)).astype(np.int32)
        # Two pages of each device belong to no row, and hold NaN.
        on_device = ROWS * -(-BLOCKS // DEVICES) + 2
        free = [(device * on_device + draw.permutation(on_device)).tolist() for device in range(DEVICES)]
        turns = (draw.integers(DEVICES, size=(ROWS, 1)) + np.arange(BLOCKS)) % DEVICES
        table = np.vectorize(lambda device: free[device].pop(), otypes=[np.int32])(turns)  # noqa: B023
        pages = np.full((1, DEVICES * on_device, P, WIDTH), np.nan, np.float32)
        pages[0, table] = np.asarray(index_k).reshape(ROWS, BLOCKS, P, WIDTH)
        at = jnp.asarray(positions), jnp.asarray(lengths)
        found = selected()(index_q, pages, table, *at)
        scores = block_scores(index_q, index_k, *at, P)
        assert_same_sets(np.asarray(found), select_blocks(scores, *at, SelectionRules(SLOTS), block_size=P))


def lowered_for_two_gpus(tokens: int, is_sparse: bool) -> str:
    """A layer's attention at M3's widths, lowered for two H200s that divide the pages; nothing is compiled."""
    mesh = AbstractMesh((1, 2, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4, abstract_device=H200.abstract_device)
    heads, blocks, halves = (2, tokens), 1024, jnp.bfloat16
    keys = array(halves, 1, 2 * blocks, 4, 128, 128)
    index_k = array(halves, 1, 2 * blocks, 128, 128) if is_sparse else None
    scales = Scales(array(jnp.float32, 1, 4), array(jnp.float32, 1, 4), array(jnp.float32, 1))
    projected = Heads(*(array(halves, *heads, count, 128) for count in (64, 4, 4)))
    if is_sparse:
        projected = projected._replace(index_q=array(halves, *heads, 4, 128), index_k=array(halves, *heads, 128))
    places = Places(array(jnp.int32, 2, blocks), array(jnp.int32, *heads), array(jnp.int32, *heads))
    call = LayerCall(array(jnp.int32), places, array(jnp.int32, *heads), array(jnp.int32, 2))
    rules = SelectionRules(16) if is_sparse else None
    attend = lambda heads, *args: attend_over_mesh(Projections.of_heads(heads), *args, rules, Tap(), mesh)
    return lower(attend, projected, StackCache(keys, keys, index_k, scales), call, mesh=mesh)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("tokens", "is_sparse", "kernels"),
    [
        (1, True, ("index_score_decode", "index_topk_decode", "sparse_decode")),
        pytest.param(64, True, ("index_topk", "query_union", "kv_block_major"), marks=pytest.mark.further),
        (1, False, ("dense_decode",)),
        (64, False, ("dense_causal",)),
    ],
)
def test_every_kernel_runs_where_devices_divide_the_pages(tokens, is_sparse, kernels):
    text = lowered_for_two_gpus(tokens, is_sparse)
    assert all(f'name = "{name}"' in text for name in kernels)
