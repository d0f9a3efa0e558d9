"""A schedule run on a case, and what its results are compared by."""

import numpy as np
from support.msa_strategies import Case, attention, blockwise, dense_attention, index_topk

TOLERANCE = dict(rtol=2e-5, atol=3e-6)  # float32 sums of at most 40 terms near 1


def run(case: Case, schedule: str, blocks=None, qkv=None):
    """(out, lse) of a schedule, "dense" and "blockwise" among them, as NumPy; "in pieces" makes the pieces small."""
    small, schedule = schedule.endswith(" in pieces"), schedule.removesuffix(" in pieces")
    args = (case.positions, case.lengths)
    qkv = case.qkv() if qkv is None else qkv
    if schedule == "dense":
        result = dense_attention(*qkv, *args)
    elif schedule == "blockwise":
        result = blockwise(*qkv, *args, block_size=case.shape.P, small=small)
    else:
        blocks = case.any_blocks() if blocks is None else blocks
        result = attention(*qkv, blocks, *args, block_size=case.shape.P, schedule=schedule, small=small)
    return tuple(np.asarray(x) for x in result)


def selected(case: Case, **changes) -> np.ndarray:
    return np.asarray(index_topk(*case.index(), case.positions, case.lengths, **case.rules(**changes)))


def assert_close(got, expected, **tolerance):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **(TOLERANCE | tolerance))


def assert_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
