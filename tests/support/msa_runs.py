"""A schedule run on a case, and what its results are compared by."""

import numpy as np
from support import comparisons
from support.msa_strategies import Case, attention, blockwise, dense_attention, index_topk

AXES = {"out": "B T N H", "lse": "B T N"}
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


def assert_close(got, expected, names=("out", "lse"), **tolerance):
    """Outputs and log-sum-exps, or what else is named, are within the tolerance."""
    for name, a, b in zip(names, got, expected, strict=True):
        comparisons.assert_close(a, b, name, AXES.get(name, ""), **(TOLERANCE | tolerance))


def assert_equal(got, expected, names=("out", "lse")):
    """Outputs and log-sum-exps, or what else is named, are the same bits."""
    for name, a, b in zip(names, got, expected, strict=True):
        comparisons.assert_equal(a, b, name, AXES.get(name, ""))
