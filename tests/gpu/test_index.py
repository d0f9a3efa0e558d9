"""Index kernels on a GPU: the blocks that they keep are those of the best scores in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from support.gpu_pages import DECODE, PREFILL, Inputs
from support.on_gpu import exact, shapes_and_dtypes, twice

from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk_decode import index_topk_decode

GAP = 5e-3  # how far a block that is dropped may score above one that is kept, in 16 bits


def check_selection(x: Inputs, op, backend: str) -> None:
    fn = jax.jit(lambda q, k, *at: op(q, x.pages(k), *at, top_k=x.J, backend=backend))
    (got,) = twice(fn, x.index_q, x.index_k, *x.at)
    worst, rows = 0.0, {}
    for b, t in x.sample():
        keys = rows.setdefault(b, x.row(x.index_k, b))
        for head in range(x.K):
            ids, position, where = got[b, head, t], x.positions[b, t], f"row {b}, head {head}, query {t}"
            if position >= x.lengths[b]:
                assert (ids == -1).all(), f"{where}: padding keeps blocks {ids}"
                continue
            own = position // x.P
            count = min(x.J, own + 1)
            kept = ids[:count]
            assert (ids[count:] == -1).all(), f"{where}: more than {count} blocks: {ids}"
            assert (np.diff(kept) > 0).all() and kept[0] >= 0, f"{where}: not in order: {ids}"
            assert kept[-1] == own, f"{where}: the own block, {own}, is not the last: {ids}"
            scores = keys[: own * x.P] @ exact(x.index_q[b, t, head])
            best = scores.reshape(own, x.P).max(-1) if own else np.zeros(0)
            dropped = np.setdiff1d(np.arange(own), kept)
            if len(dropped) and count > 1:
                worst = max(worst, best[dropped].max() - best[kept[:-1]].min())
    assert worst <= (1e-4 if x.dtype == jnp.float32 else GAP), f"a dropped block scores {worst:.1e} above a kept one"


@shapes_and_dtypes(PREFILL)
def test_index_topk_keeps_the_best_blocks(shape, dtype, backend, seed):
    check_selection(Inputs(shape, dtype, seed), index_topk, backend)


@shapes_and_dtypes(DECODE)
def test_index_topk_decode_keeps_the_best_blocks(shape, dtype, backend, seed):
    check_selection(Inputs(shape, dtype, seed), index_topk_decode, backend)
