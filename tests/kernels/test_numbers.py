"""The numbers that kernels are cut by, and the small functions that all of them share."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_common, triton_common
from pallas_kernels.mosaic_common import Chip
from pallas_kernels.numbers import can_reach, power_of_two
from pallas_kernels.triton_project import num_splits


def test_sizes_are_rounded_up_and_offsets_of_bytes_stay_within_32_bits():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert [can_reach(2**n + m) for n in (31, 32) for m in (-1, 0, 1)] == [True, False, False, False, False, True]


def test_work_is_cut_in_as_many_equal_parts_as_there_are_programs_for():
    for tiles in (1, 3, 50):
        for steps in (1, 6, 7, 12):
            fits = [n for n in range(1, steps + 1) if steps % n == 0 and tiles * n <= 12]
            assert num_splits(tiles, steps, 12) == max(fits, default=1), (tiles, steps)


def test_a_chip_lends_half_of_its_memory_and_shares_steps_among_its_cores(monkeypatch):
    own = SimpleNamespace(num_cores=2, vmem_capacity_bytes=1 << 27)
    monkeypatch.setattr(mosaic_common.pltpu, "get_tpu_info", lambda: own)
    assert Chip.current(False) == Chip(2, 1 << 26) and Chip.current(True) == Chip(1, 32 << 20)
    assert [Chip(2, 1 << 20).steps_per_core(count) for count in (1, 2, 3)] == [1, 1, 2]
    assert mosaic_common.pad_steps(jnp.ones((2, 1)), 4, 7).tolist() == [[1], [1], [7], [7]]


@pytest.mark.parametrize(
    ("queries", "stored", "product"),
    [("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn", "float16"),
     ("float32", "float32", "float32"), ("float32", "float8_e4m3fn", "float32")],
)  # fmt: skip
def test_a_product_has_a_dtype_that_holds_both_operands(queries, stored, product):
    assert triton_common.matmul_dtype(jnp.dtype(queries), jnp.dtype(stored)) == product


@pytest.mark.parametrize(("module", "unit"), [(mosaic_common, 1.0), (triton_common, np.log2(np.e))])
def test_a_softmax_that_saw_nothing_divides_by_one_and_a_nan_stays(module, unit):
    """Of no key the log-sum-exp is -inf; scores are exponents of base e, or 2."""
    is_seen, total = module.divisor(jnp.array([0.0, 2.0, jnp.nan]))
    assert is_seen.tolist() == [False, True, True] and total[:2].tolist() == [1, 2] and jnp.isnan(total[2])
    lse = module.natural_lse(jnp.full(3, 3 * unit, jnp.float32), is_seen, total)
    np.testing.assert_allclose(lse, [-np.inf, 3 + np.log(2), np.nan], rtol=1e-6)


@pytest.mark.parametrize(("low", "uncut", "tile"), [(64, 64, 128), (16, 16, 32)])
def test_a_tile_is_multiplied_as_high_as_it_needs(low, uncut, tile, unchecked):
    """All rows, or as few as one product takes; a low tile is never cut, and none is multiplied for no row."""
    for rows in (uncut, tile):
        for count in range(rows + 1):
            heights = []
            triton_common.as_high_as_needed(heights.append, count, rows, low)
            assert heights == ([] if count == 0 else [low if count <= low else rows]), (rows, count)
