"""A draft's pages as its attention reads them: single tokens, in runs that need not end where pages do."""

import jax.numpy as jnp
import numpy as np
import pytest

from m3jax.cache.drafted import AfterFirst
from m3jax.msa.views import Paged


@pytest.mark.parametrize("num_pages", [1, 3, pytest.param(5, marks=pytest.mark.further)])
def test_a_run_is_its_tokens_wherever_it_begins(num_pages):
    """Runs that divide a page, that are whole pages, and that begin inside one page and end inside another."""
    size, heads, width = 4, 2, 3
    rng = np.random.default_rng(num_pages)
    k, v = rng.normal(size=(2, 2, num_pages + 2, heads, size, width)).astype(np.float32)  # [L X K P H]
    table = np.array([rng.permutation(num_pages + 2)[:num_pages] for _ in range(2)], np.int32)
    view = AfterFirst(Paged(jnp.asarray(k), jnp.asarray(v), None, 1, jnp.asarray(table), np.dtype("float32")))
    rows = [np.moveaxis(x[1][table], 2, 1).reshape(2, heads, -1, width) for x in (k, v)]  # [B K S H]
    assert view.num_blocks == num_pages * size
    for count in range(1, num_pages * size + 1):
        for first in range(0, num_pages * size - count + 1, count):  # as a loop over pieces asks for them
            for found, row in zip(view.run(first, count), rows, strict=True):
                np.testing.assert_array_equal(found, row[:, :, first : first + count], err_msg=f"{first}, {count}")
