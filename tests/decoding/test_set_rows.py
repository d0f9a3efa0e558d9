"""Rows of the device's state are those of requests, and no other row changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3jax.decoding.device import state as device_state


@pytest.mark.parametrize("few_elements", [0, 1 << 16], ids=["scattered", "rewritten"])
@settings(max_examples=10)
@given(data=st.data())
def test_rows_are_those_of_the_requests_and_others_stay(few_elements, data):
    batch, count = data.draw(st.sampled_from([(1, 1), (3, 2), (5, 5)]), label="rows, requests")
    free = st.integers(0, batch)  # batch is one past the last: no row
    rows = data.draw(st.lists(free, min_size=count, max_size=count).filter(_differ(batch)), label="rows")
    old = np.arange(batch, dtype=np.int32), np.arange(batch * 6, dtype=np.float32).reshape(batch, 2, 3)
    new = -1 - np.arange(count, dtype=np.int32), -1 - np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_state, "_FEW_ELEMENTS", few_elements)
        found = device_state.set_rows(jax.tree.map(jnp.asarray, old), np.array(rows, np.int32), new)
    for of_rows, of_requests, result in zip(old, new, found, strict=True):
        expected = of_rows.copy()
        for request, row in enumerate(rows):
            if row < batch:
                expected[row] = of_requests[request]
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == of_rows.dtype


def _differ(batch):
    return lambda rows: len({row for row in rows if row < batch}) == sum(row < batch for row in rows)
