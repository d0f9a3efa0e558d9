"""A draft's pages as its attention reads them, single tokens and runs of them, and the features beside the pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from m3jax.cache import Cache
from m3jax.cache.drafted import AfterFirst, DraftedCache
from m3jax.msa.share import Share
from m3jax.msa.views import Paged

SIZE = 8  # tokens of a page in `tiny.config`


def ints(*values: object) -> jax.Array:
    return jnp.array(values, jnp.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def draft_pages(num_pages=3, share=None):
    """A view of two rows, their keys and values [2 B K S H], and the pages that they have."""
    k, v = normal(2, 2, num_pages + 2, 2, 4, 3)  # [L X K P H]
    table = np.array([np.random.default_rng(row).permutation(num_pages + 2)[:num_pages] for row in range(2)], np.int32)
    view = AfterFirst(Paged(jnp.asarray(k), jnp.asarray(v), None, 1, jnp.asarray(table), jnp.float32, share))
    rows = [np.moveaxis(x[1][table], 2, 1).reshape(2, 2, -1, 3) for x in (k, v)]
    return view, rows, table


@pytest.mark.parametrize("num_pages", [1, 3, pytest.param(5, marks=pytest.mark.further)])
def test_a_run_is_its_tokens_wherever_it_begins(num_pages):
    """Runs that divide a page, that are whole pages, and that begin inside one page and end inside another."""
    view, rows, _ = draft_pages(num_pages)
    assert view.num_blocks == num_pages * 4
    for count in range(1, view.num_blocks + 1):
        for first in range(0, view.num_blocks - count + 1, count):  # as a loop over pieces asks for them
            for found, row in zip(view.run(first, count), rows, strict=True):
                np.testing.assert_array_equal(found, row[:, :, first : first + count], err_msg=f"{first}, {count}")


def test_single_tokens_are_read_wherever_they_stand():
    view, rows, _ = draft_pages()
    assert (view.block_size, view.num_blocks, view.num_heads, view.width, view.share) == (1, 12, 2, 3, None)
    tokens = ints([0, 3, 4, 11], [5, 7, 8, 1])
    found = view.blocks(jnp.arange(2, dtype=jnp.int32)[:, None], jnp.int32(1), tokens)
    for x, row in zip(found, rows, strict=True):
        np.testing.assert_array_equal(x[:, :, 0], np.take_along_axis(row[:, 1], np.asarray(tokens)[..., None], axis=1))


def test_the_first_slot_of_a_row_has_no_key():
    """Of a device that holds the row's second block first, its own slot 0 has one."""
    view, _, table = draft_pages()
    assert view.present(0, 3).tolist() == [[False, True, True]] * 2
    assert view.present(3, 6).tolist() == [[True] * 6] * 2
    lacking = view.replace(pages=view.pages.replace(table=jnp.asarray(np.where([[0, 1, 0]], -1, table))))
    assert lacking.present(3, 6).tolist() == [[True, False, False, False, False, True]] * 2
    shared, *_ = draft_pages(share=Share(ints(1, 0), 4, 2, ("context",)))
    assert shared.present(0, 2).tolist() == [[True, True], [False, True]]
    assert view.of_row(jnp.int32(1), 8).pages.table.tolist() == [[*table[1].tolist(), -1]]
    assert view.of_row(jnp.int32(0), 6).pages.table.shape == (1, 3) and view.of_row(jnp.int32(0)).num_blocks == 12


def test_a_page_keeps_the_feature_of_its_last_token():
    """And lends it to the first slot of the page behind it; copied, read and written with its page."""
    cache, layer = Cache.pool(tiny.config("d"), 5, 2, 3), tiny.config("d", hidden_size=6, num_hidden_layers=1)
    cache = DraftedCache.join(cache.replace(table=ints([4, 0, 2], [1, 3, -1])), layer, "float32", None)
    assert cache.edges.shape == (5, 6) and cache.draft.k.shape == (1, 5, 4, SIZE, 16) and cache.draft.index_k is None
    of_target = 2 * 4 * 16 * 2
    assert cache.bytes_per_token == of_target + 2 * 4 * 16 * 4 + 6 * 4 / SIZE
    features = normal(2, 3, 6)
    places = cache.places(ints([6, 7, 15], [7, 8, -1]), ints(16, 9))
    cache = cache.with_edges(jnp.asarray(features), places)
    expected = np.zeros((5, 6), np.float32)
    expected[[4, 0, 1]] = features[0, 1], features[0, 2], features[1, 0]
    np.testing.assert_array_equal(cache.edges, expected)
    np.testing.assert_array_equal(cache.edge(ints(8, 15)), expected[[4, 1]])
    np.testing.assert_array_equal(cache.edge(ints(16, 8)), expected[[0, 1]])
    copied = cache.copy_pages(ints(4, 0, 1), ints(0, -1, 2))
    expected[[0, 2]] = expected[[4, 1]]
    np.testing.assert_array_equal(copied.edges, expected)
    target, (k, v, edges) = copied.read_pages(ints(2, 4))
    np.testing.assert_array_equal(edges, expected[[2, 4]])
    back = copied.write_pages(ints(3, -1), (target, (k + 1, v + 2, edges + 3)))
    expected[3] = expected[2] + 3
    np.testing.assert_allclose(back.edges, expected)
    assert float(back.draft.k[0, 3].min()) == 1 and float(back.draft.v[0, 3].min()) == 2
    assert not back.draft.k[0, :3].any() and not back.draft.v[0, 4].any()
