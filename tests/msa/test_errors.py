"""The arguments that selection refuses; numbers such as T17 are the traps of docs/glossary.md."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.msa_strategies import GROUPED, prefill

from m3jax import msa


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(score="mean"), "score = 'mean': allowed are 'max', 'lse', and a function"),
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
