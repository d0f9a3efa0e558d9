"""What Mosaic's kernel of MXFP8 experts does in registers, run thread by thread on a CPU against the definition."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.warpgroup import Array, Registers, Warpgroup

from m3jax.checkpoint.mxfp8 import dequantize
from pallas_kernels import hopper_registers as registers
from pallas_kernels.mxfp8 import Weights

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
POISON = np.float32(-12345)


@pytest.fixture(autouse=True)
def built_at_once(monkeypatch, unchecked):
    """What a kernel would have inlined is built where it is called."""
    monkeypatch.setattr(registers.plgpu, "inline_mgpu", lambda **_: lambda build: lambda *args: build(None, *args))


def drawn(seed: int, columns: int) -> Weights:
    """Codes [64 C] and scales [2 C] of every kind: NaN, zeros, 2^-127 and the scale that is NaN among them."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(110, 130, (2, columns)).astype(np.uint8)
    scales[rng.integers(2), rng.integers(columns)], scales[rng.integers(2), rng.integers(columns)] = 0, 255
    return Weights(rng.integers(0, 256, (64, columns)).astype(np.uint8), scales)


def finite(seed: int, columns: int) -> Weights:
    weights = drawn(seed, columns)
    codes = np.where(weights.codes & 127 == 127, 0, weights.codes)
    return Weights(codes, np.clip(weights.scales, 110, 130))


def numbers(weights: Weights) -> np.ndarray:
    """The definition's numbers, [64 channels, C columns]."""
    return dequantize(weights.codes, weights.scales.repeat(32, axis=0), BFLOAT16)


def as_fetched(group: Warpgroup, weights: Weights) -> Weights:
    """Put a step's weights into shared memory as a fetch does: pieces of 16 bytes change places with the row.

    They do so from one line of 128 bytes to the next: every row of 128 columns is one, every second row of 64.
    """
    columns = weights.codes.shape[1]
    row, byte = np.indices((64, columns))
    line = row if columns == 128 else row // 2
    codes = np.zeros((64, columns), np.uint8)
    codes[row, (byte // 16 ^ line % (columns // 16)) * 16 + byte % 16] = weights.codes
    codes = codes.reshape(8, 1, 8, columns)
    return Weights(group.put(codes, is_shared=True), group.put(weights.scales, is_shared=True))


def make(first: Weights, second: Weights, part: int) -> np.ndarray:
    """Return the left operand of a step's product, [64 64], as a warpgroup's threads make it of 32 columns."""
    group, columns = Warpgroup(), first.codes.shape[1]
    build = lambda first, second, part: registers.make_numbers(first, second, part, columns)
    (found,) = group.run(build, as_fetched(group, first), as_fetched(group, second), part)
    return found.matrix()


@pytest.mark.parametrize(("columns", "part"), [(64, 0), (64, 1), (128, 0), (128, 1), (128, 2), (128, 3)])
def test_rows_are_the_numbers_of_a_part_s_columns(columns, part):
    """Each of its 32 columns of both matrices is a row, in whatever order; NaN codes and scales are NaN."""
    first, second = drawn(1, columns), drawn(2, columns)
    for weights in (first, second):
        weights.scales[0, 32 * part] = 255
    found = make(first, second, part).astype(np.float32)
    own = slice(32 * part, 32 * part + 32)
    wanted = np.concatenate([numbers(w).astype(np.float32)[:, own].T for w in (first, second)])
    as_rows = lambda x: sorted(tuple(np.where(np.isnan(row), np.inf, row)) for row in x)
    assert as_rows(found) == as_rows(wanted)
    assert np.isnan(found).any() and not np.isnan(found).all()


def columns_of(group: Warpgroup, out: Array, first_row: int, rows: int, first_column: int) -> Array:
    """A reference to 32 columns of some rows of an array."""
    at = out.address + (first_row * out.shape[1] + first_column) * out.dtype.itemsize
    return Array(at, (rows, 32), out.strides, out.dtype, False)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(16, 16), (16, 3), (64, 50), (256, 129)]))
def test_both_matrices_products_meet_in_one_thread(seed, sizes):
    """Sums of gate and up of a token and a column are written to one place each, and only of tokens that count."""
    rows, count = sizes
    first, second = finite(seed, 64), finite(seed + 1, 64)
    x = np.random.default_rng(seed).standard_normal((rows, 64)).astype(BFLOAT16)
    group = Warpgroup(1 << 21)
    outs = [group.put(np.full((rows + 5, 192), POISON)) for _ in range(2)]
    buffer = group.put(np.full((registers.EXCHANGED, 128), POISON), is_shared=True)

    def build(sums, buffer, first_ref, second_ref, count):
        for values, ref in zip(registers.exchange(sums, buffer), (first_ref, second_ref), strict=True):
            registers.write_halves(ref, values, count)

    for warpgroup in (0, 1):
        operand = make(first, second, warpgroup).astype(np.float32)
        refs = [columns_of(group, out, 3, rows, 64 + 32 * warpgroup) for out in outs]
        group.run(build, Registers.of((operand @ x.astype(np.float32).T).astype(np.float32)), buffer, *refs, count)
    for out, weights in zip(outs, (first, second), strict=True):
        wanted = np.full(out.shape, POISON)
        wanted[3 : 3 + count, 64:128] = (x.astype(np.float32) @ numbers(weights).astype(np.float32))[:count]
        np.testing.assert_allclose(group.get(out), wanted, rtol=1e-4, atol=1e-3)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(16, 16), (32, 21), (256, 200)]))
def test_sums_are_written_to_the_rows_of_their_pairs(seed, sizes):
    """Columns of both matrices, half of the width apart; rows of other pairs stay as they are."""
    rows, count = sizes
    first, second = finite(seed, 64), finite(seed + 1, 64)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 64)).astype(BFLOAT16)
    pairs = rng.permutation(300)[:rows].astype(np.int32)
    group = Warpgroup(1 << 21)
    out, pair = group.put(np.full((300, 256), POISON)), group.put(pairs)
    for warpgroup in (0, 1):
        sums = make(first, second, warpgroup).astype(np.float32) @ x.astype(np.float32).T
        ref = columns_of(group, out, 0, 300, 64 + 32 * warpgroup)
        build = lambda ref, sums, count, pair: registers.write_pairs(ref, sums, count, pair, 128)
        group.run(build, ref, Registers.of(sums.astype(np.float32)), count, pair)
    wanted = np.full(out.shape, POISON)
    for column, weights in ((64, first), (192, second)):
        products = x.astype(np.float32) @ numbers(weights).astype(np.float32)
        wanted[pairs[:count], column : column + 64] = products[:count]
    np.testing.assert_allclose(group.get(out), wanted, rtol=1e-4, atol=1e-3)
