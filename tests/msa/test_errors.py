"""The arguments that selection refuses; numbers such as T17 are the traps of docs/glossary.md."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.msa_strategies import GROUPED, SPARSE, prefill

from m3jax import msa
from m3jax.ops import attend_all, attend_selected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(score="mean"), "score = 'mean': allowed are 'max', 'lse'$"),
        (dict(block_size=0), "block_size = 0: must be at least 1"),
        (dict(local_blocks=0), "local_blocks = 0"),
        (dict(init_blocks=-1), "init_blocks = -1"),
        (dict(local_blocks=2, init_blocks=2), "both together at most top_k"),
        (dict(top_k=0), "top_k = 0"),
    ],
)
def test_wrong_rules(changes, message):
    """T31: an unknown score type or counts that contradict each other are errors, not another model."""
    case = prefill(GROUPED)
    args = [jnp.asarray(x) for x in (*case.index(), case.positions, case.lengths)]
    with pytest.raises(ValueError, match=message):
        msa.index_topk(*args, **case.rules(**changes))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(block_size=4.0), "block_size = 4.0: must be an integer"),
        pytest.param(dict(block_size="4"), "block_size = '4': must be an integer", marks=pytest.mark.further),
        (dict(block_size=True), "block_size = True: must be an integer"),
        (dict(top_k=3.0), "top_k = 3.0: must be an integer"),
        pytest.param(dict(top_k=None), "top_k = None: must be an integer", marks=pytest.mark.further),
        pytest.param(dict(local_blocks=1.0), "local_blocks = 1.0: must be an integer", marks=pytest.mark.further),
        (dict(init_blocks="0"), "init_blocks = '0': must be an integer"),
    ],
)
def test_counts_that_are_no_integers(changes, message):
    """They are refused by name; 3.0 once reached jit's cache, where the next call with 3 found it and failed too."""
    case = prefill(GROUPED)
    args = [jnp.asarray(x) for x in (*case.index(), case.positions, case.lengths)]
    with pytest.raises(ValueError, match=message):
        msa.index_topk(*args, **case.rules(**changes))
    numpy_counts = {name: np.int64(value) if isinstance(value, int) else value for name, value in case.rules().items()}
    np.testing.assert_array_equal(msa.index_topk(*args, **numpy_counts), msa.index_topk(*args, **case.rules()))


@pytest.mark.usefixtures("unchecked")
def test_index_widths_that_differ():
    """Index queries and keys of different widths are refused (T31)."""
    case = prefill(GROUPED)
    index_q, index_k = case.index()
    args = (index_q[..., :4], index_k, case.positions, case.lengths)
    with pytest.raises(ValueError, match=r"index_k has shape .* with I = 4, as index_q has"):
        msa.index_topk(*map(jnp.asarray, args), **case.rules())
    with pytest.raises(ValueError, match=r"index_k has shape .* with I = 4, as index_q has"):
        msa.block_scores(*map(jnp.asarray, args), case.shape.P)


def test_select_blocks_checks_its_rules():
    """`select_blocks` refuses rules that no selection can follow (T31)."""
    scores = jnp.zeros((1, 1, 1, 5))
    args = (scores, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="block_size = 0: must be at least 1"):
        msa.select_blocks(*args, msa.SelectionRules(top_k=2), block_size=0)


@pytest.mark.usefixtures("unchecked")
def test_scores_are_checked_where_they_are_made():
    """An unknown kind of score is refused (T31)."""
    case = prefill(GROUPED)
    with pytest.raises(ValueError, match=r"score = 'mean': allowed are 'max', 'lse'$"):
        msa.block_scores(*map(jnp.asarray, (*case.index(), case.positions, case.lengths)), GROUPED.P, "mean")


def test_unknown_schedules():
    """An unknown schedule is refused, and the error names those that there are (T31)."""
    case = prefill(GROUPED)
    q, k, v = map(jnp.asarray, case.qkv())
    args = [jnp.asarray(x) for x in (case.any_blocks(), case.positions, case.lengths)]
    view = msa.contiguous(k, v, 4)
    with pytest.raises(ValueError, match="schedule = 'flash': allowed are 'auto', 'mask', 'query_major', 'kv_block_"):
        attend_selected(q, view, *args, schedule="flash")
    with pytest.raises(ValueError, match="schedule = 'kv_block_major': allowed are 'auto', 'mask', 'blockwise'"):
        attend_all(q, view, *args[1:], schedule="kv_block_major")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("schedule", SPARSE)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q=(3, 40, 3, 8)), "q has 3 heads of 8 and k 2 of 8"),
        (dict(q=(3, 40, 4, 4)), "q has 4 heads of 4 and k 2 of 8|k has shape .* with H = 4, as q has"),
        (
            dict(blocks=(3, 1, 40, 3)),
            r"blocks has shape .3, 1, 40, 3..*: must be .*(\[3 2 40 J\]|with K = 2, as k has)",
        ),
        (
            dict(blocks=(3, 40, 2, 3)),
            r"blocks has shape .3, 40, 2, 3..*: must be .*with (K = 2, as k|T = 40, as q) has",
        ),
        (dict(block_size=0), "block_size = 0: must be at least 1"),
    ],
)
def test_operands_that_do_not_fit(schedule, changes, message):
    """T7, T31: not broadcast in silence."""
    shapes = dict(q=(3, 40, 4, 8), k=(3, 40, 2, 8), v=(3, 40, 2, 8), blocks=(3, 2, 40, 3))
    shapes |= {name: x for name, x in changes.items() if name in shapes}
    arrays = {name: jnp.zeros(x, jnp.int32 if name == "blocks" else jnp.float32) for name, x in shapes.items()}
    case = prefill(GROUPED)
    q, k, v, blocks = arrays.values()
    rows, block_size = (jnp.asarray(case.positions), jnp.asarray(case.lengths)), changes.get("block_size", 4)
    with pytest.raises(ValueError, match=message):
        if schedule == "definition":
            msa.sparse_attention(q, k, v, blocks, *rows, block_size=block_size)
        else:
            attend_selected(q, msa.contiguous(k, v, block_size), blocks, *rows, schedule=schedule)


@pytest.mark.usefixtures("unchecked")
def test_dense_operands_that_do_not_fit():
    """Dense attention refuses operands whose heads or widths do not fit together (T31)."""
    case = prefill(GROUPED)
    q, k, v = map(jnp.asarray, case.qkv())
    args = (jnp.asarray(case.positions), jnp.asarray(case.lengths))
    with pytest.raises(ValueError, match="q has 3 heads of 8 and k 2 of 8"):
        msa.dense_attention(q[:, :, :3], k, v, *args)
    with pytest.raises(ValueError, match="q has 3 heads of 8 and k 2 of 8"):
        attend_all(q[:, :, :3], msa.contiguous(k, v, 4), *args, schedule="blockwise")
