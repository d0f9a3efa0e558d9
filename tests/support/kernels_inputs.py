"""Operands for the tests of pallas_kernels: keys and values in memory that holds NaN wherever nothing may look."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from support import comparisons
from support.msa_strategies import Case
from support.msa_strategies import attention as definition

from m3jax.msa import SelectionRules, block_scores
from m3jax.spec.msa import selection_keys
from pallas_kernels.pages import Pages, contiguous, paged


def in_chunks(schedule: Callable[..., tuple], call_class: type, chunk: int, *operands, config, **options) -> tuple:
    """Attention by the schedule kv_block_major, as an op, with the partial outputs of so many queries at once."""
    return schedule(call_class(*operands, **options), config, chunk=chunk)


def lay_out(layout: str, x: np.ndarray, case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    """(memory, table) of keys `[B S K H]` or index keys `[B S H]`, as the second layer of a stack of two.

    The first layer, every slot behind a row's length, and every page that no row owns are NaN (T9, T10). A block
    behind a row's length has a page or -1.
    """
    s, rng = case.shape, np.random.default_rng((case.seed, 7))
    seen = np.arange(s.M * s.P) < case.lengths[:, None]
    whole = np.full((s.B, s.M * s.P, *x.shape[2:]), np.nan, x.dtype)
    whole[:, : s.S] = x
    whole[~seen] = np.nan
    head_major = whole if x.ndim == 3 else whole.swapaxes(1, 2)
    if layout == "contiguous":
        return np.stack([np.full_like(head_major, np.nan), head_major]), None
    count = s.B * s.M + 3
    table = rng.permutation(count)[: s.B * s.M].reshape(s.B, s.M).astype(np.int32)
    pages = np.moveaxis(head_major.reshape(*head_major.shape[:-2], s.M, s.P, x.shape[-1]), -3, 1)
    pool = np.full((2, count, *pages.shape[2:]), np.nan, x.dtype)
    pool[1, table] = pages
    behind = np.arange(s.M) * s.P >= case.lengths[:, None]
    table[behind & (rng.random(table.shape) < 0.5)] = -1
    return pool, table


def view(memory: jax.Array, table: jax.Array | None, block_size: int) -> Pages:
    """The second layer of what `lay_out` made."""
    return contiguous(memory, block_size, layer=1) if table is None else paged(memory, table, layer=1)


@partial(jax.jit, static_argnames=("op", "block_size", "options"))
def run_index(op, q, k, table, positions, lengths, *, block_size, options):
    """An index kernel in interpret mode; options are (name, value) pairs."""
    pages = view(k, table, block_size)
    return op(q, pages, positions, lengths, interpret=True, **dict(options))


@partial(jax.jit, static_argnames=("op", "block_size", "options"))
def run_attention(op, q, k, v, table, blocks, positions, lengths, *, block_size, options):
    """An attention kernel in interpret mode, with its LSE; without `blocks` a dense one."""
    chosen = () if blocks is None else (blocks,)
    pages = (view(x, table, block_size) for x in (k, v))
    return op(q, *pages, *chosen, positions, lengths, return_lse=True, interpret=True, **dict(options))


def index(op, case: Case, layout: str, arrays=None, **options) -> np.ndarray:
    """The selection that an index kernel makes for a case."""
    q, k = arrays or case.index()
    memory, table = lay_out(layout, k, case)
    options.setdefault("top_k", case.shape.J)
    args = (jnp.asarray(q), memory, table, case.positions, case.lengths)
    return np.asarray(run_index(op, *args, block_size=case.shape.P, options=tuple(options.items())))


def check_keys(op, case: Case, selection: np.ndarray, **options) -> None:
    """An index kernel that returns keys names the same blocks, each with its score; +inf marks a query's own one."""
    q, k = (jnp.asarray(x) for x in case.index())
    memory, table = lay_out("paged", np.asarray(k), case)
    options = dict(top_k=case.shape.J, return_keys=True) | options
    args = (q, memory, table, case.positions, case.lengths)
    found = run_index(op, *args, block_size=case.shape.P, options=tuple(options.items()))
    blocks, keys = (np.asarray(x) for x in found)
    by_id = np.argsort(np.where(blocks < 0, case.shape.M, blocks), axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(blocks, by_id, -1), selection)
    scores = block_scores(q, k, *map(jnp.asarray, (case.positions, case.lengths)), case.shape.P)
    own_block = np.where(case.positions < case.lengths[:, None], case.positions // case.shape.P, -1)[:, None, :, None]
    block_ids = jnp.arange(scores.shape[-1])
    expected = selection_keys(scores, block_ids, jnp.asarray(own_block), SelectionRules(case.shape.J))
    expected = np.take_along_axis(np.asarray(expected), np.maximum(blocks, 0), -1)
    comparisons.assert_close(keys, np.where(blocks < 0, -np.inf, expected), "keys", "B K T J", rtol=1e-5, atol=1e-5)


def attention(op, case: Case, layout: str, blocks=None, dtype=np.float32, **options) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE of an attention kernel for a case."""
    q, k, v = case.qkv(dtype)
    memory, table = lay_out(layout, k, case)
    args = (q, memory, lay_out(layout, v, case)[0], table, blocks, case.positions, case.lengths)
    out, lse = run_attention(op, *args, block_size=case.shape.P, options=tuple(options.items()))
    return np.asarray(out, np.float32), np.asarray(lse)


def check(got, expected) -> None:
    """Equal up to rounding; where nothing is seen exactly 0, with an LSE of exactly -inf."""
    (out, lse), (want, want_lse) = got, expected
    comparisons.assert_close(out, want, "out", "B T N H", atol=2e-6)
    comparisons.assert_close(lse, want_lse, "lse", "B T N", rtol=2e-6, atol=2e-6)
    is_unseen = np.isneginf(np.asarray(want_lse))
    assert not out[is_unseen].any(), f"out of queries that see nothing is {np.abs(out[is_unseen]).max()}, expected 0"


def of_definition(case: Case, blocks: np.ndarray):
    args = (*case.qkv(), blocks, case.positions, case.lengths)
    return definition(*args, block_size=case.shape.P, schedule="definition")


class NanKey(Case):
    """A case in which the first key of each row is NaN."""

    def qkv(self, dtype=np.float32):
        q, k, v = super().qkv(dtype)
        k[:, 0] = np.nan
        return q, k, v
