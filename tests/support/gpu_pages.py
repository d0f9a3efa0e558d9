"""Random queries, keys and values in shuffled pages, and attention over them in float64, for the tests on a GPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from support.on_gpu import OUT

from pallas_kernels.pages import Pages, paged

# batch, queries, context, query heads, KV heads, slots; width and block where they are not 128. Ragged rows, chunks,
# groups that are no power of two.
PREFILL = [
    (1, 4096, 4096, 64, 4, 16), (2, 700, 3001, 64, 4, 16), (1, 129, 257, 16, 1, 4), (3, 65, 2049, 12, 2, 8),
    (1, 2048, 20000, 32, 2, 32), (4, 33, 385, 64, 4, 16), (1, 1000, 5000, 4, 4, 16), (2, 1, 1500, 64, 4, 5),
    (2, 700, 3001, 64, 4, 16, 64, 64), (1, 129, 2049, 12, 2, 5, 64, 128), (2, 300, 1001, 12, 2, 8, 128, 64),
]  # fmt: skip
DECODE = [
    (1, 1, 131072, 64, 4, 16), (8, 1, 9001, 64, 4, 16), (8, 4, 20000, 64, 4, 16), (3, 16, 2049, 12, 2, 8),
    (32, 1, 4000, 16, 1, 16), (2, 5, 127, 64, 4, 16), (1, 2, 300000, 32, 2, 32), (5, 7, 1025, 4, 4, 4),
    (8, 4, 9001, 64, 4, 16, 64, 64), (3, 1, 2049, 12, 2, 5, 64, 128), (32, 1, 1001, 64, 4, 8, 128, 64),
]  # fmt: skip
LSE = 1e-3
ROWS = 48  # queries of a row that the reference computes


class Inputs:
    """Random operands of a shape: shuffled pages, NaN wherever nothing may look, rows of many lengths."""

    def __init__(self, shape: tuple[int, ...], dtype: jnp.dtype, seed: int, stored: jnp.dtype | None = None):
        self.shape, self.dtype, self.stored = shape, dtype, stored or dtype
        self.B, self.T, self.S, self.N, self.K, self.J = shape[:6]
        self.H, self.P = shape[6:] or (128, 128)
        self.rng = np.random.default_rng(seed)
        self.M = -(-self.S // self.P)
        self.lengths = np.full(self.B, self.S)
        self.lengths[1:] = self.rng.integers(0, self.S + 1, self.B - 1)
        start = np.maximum(self.lengths - self.rng.integers(self.T, self.T + 3, self.B), 0)
        start[0] = self.S - self.T
        self.positions = start[:, None] + np.arange(self.T)
        pages = self.B * self.M + 5
        self.table = self.rng.permutation(pages)[: self.B * self.M].reshape(self.B, self.M)
        self.q = self.normal(self.B, self.T, self.N, self.H)
        self.index_q = self.normal(self.B, self.T, self.K, self.H)
        self.k, self.v = self.pool(pages, self.K), self.pool(pages, self.K)
        # What stored keys and values of each head are multiplied with.
        self.scales = 2.0 ** self.rng.integers(-2, 2, (2, self.K)) if stored else np.ones((2, self.K))
        self.index_k = self.pool(pages, 1)[:, 0]

    def normal(self, *shape: int) -> jax.Array:
        key = jax.random.key(int(self.rng.integers(2**31)))
        return jax.random.normal(key, shape, jnp.float32).astype(self.dtype)

    def pool(self, pages: int, heads: int) -> jax.Array:
        """Return pages in which everything that no row holds is NaN."""
        held = np.zeros((pages, self.P), bool)
        held[self.table] = (np.arange(self.M * self.P) < self.lengths[:, None]).reshape(self.B, self.M, self.P)
        values = self.normal(pages, heads, self.P, self.H).astype(self.stored)
        return jnp.where(jnp.asarray(held)[:, None, :, None], values, jnp.asarray(jnp.nan, self.stored))

    def pages(self, pool: jax.Array) -> Pages:
        return paged(pool, jnp.asarray(self.table, jnp.int32))

    @property
    def at(self) -> tuple[jax.Array, jax.Array]:
        """The queries' positions and the rows' lengths."""
        return jnp.asarray(self.positions, jnp.int32), jnp.asarray(self.lengths, jnp.int32)

    def sample(self) -> list[tuple[int, int]]:
        """Return the (row, query) pairs that the reference computes: the first, the last, and some between."""
        queries = np.unique(np.append(self.rng.integers(0, self.T, ROWS // self.B + 1), [0, self.T - 1]))
        return list(itertools.product(range(self.B), queries))

    def row(self, pool: jax.Array, b: int) -> np.ndarray:
        """Return a row's tokens in float64: `[..., S H]`."""
        x = np.asarray(pool[self.table[b]].astype(jnp.float32), np.float64)
        x = np.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], -1, self.H)[..., : self.lengths[b], :]

    def selection(self) -> np.ndarray:
        """Return random blocks, the own one last; some slots are unused."""
        out = np.full((self.B, self.K, self.T, self.J), -1, np.int32)
        for b, k, t in np.ndindex(out.shape[:3]):
            own = self.positions[b, t] // self.P
            if self.positions[b, t] < self.lengths[b]:
                chosen = self.rng.choice(own, min(self.J - 1, own), replace=False) if own else []
                out[b, k, t, : len(chosen) + 1] = np.append(np.sort(chosen), own)
        return out


def _attention(x: Inputs, blocks: np.ndarray | None, b: int, t: int, keys, values) -> tuple[np.ndarray, np.ndarray]:
    """Return output [N H] and LSE [N] of one query in float64; without `blocks`, over all that it may see."""
    scale = x.scales * [[x.H**-0.5], [1.0]]
    q = np.asarray(x.q[b, t].astype(jnp.float32), np.float64).reshape(x.K, -1, x.H)
    token = np.arange(min(x.positions[b, t] + 1, x.lengths[b]))
    out, lse = [], []
    for head in range(x.K):
        seen = token if blocks is None else token[np.isin(token // x.P, blocks[b, head, t])]
        s = q[head] @ keys[head, seen].T * scale[0, head]
        top = s.max(-1, keepdims=True)
        p = np.exp(s - top)
        out.append(p @ values[head, seen] / p.sum(-1, keepdims=True) * scale[1, head])
        lse.append(top[:, 0] + np.log(p.sum(-1)))
    return np.concatenate(out), np.concatenate(lse)


def check_attention(x: Inputs, blocks: np.ndarray | None, out: np.ndarray, lse: np.ndarray | None) -> None:
    """Compare outputs, and the LSE if there is one, with float64; those of padding must be 0 and -inf."""
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all(), "an output is not finite"
    error, norm, worst, rows = 0.0, 0.0, 0.0, {}
    for b, t in x.sample():
        if x.positions[b, t] >= x.lengths[b]:
            assert not out[b, t].any(), f"padding (row {b}, query {t}) gives something else than 0"
            assert lse is None or np.isneginf(lse[b, t]).all(), f"LSE of padding (row {b}, query {t}) is not -inf"
            continue
        keys, values = rows.setdefault(b, (x.row(x.k, b), x.row(x.v, b)))
        want, want_lse = _attention(x, blocks, b, t, keys, values)
        error += ((out[b, t] - want) ** 2).sum()
        norm += (want**2).sum()
        if lse is not None:
            worst = max(worst, np.abs(lse[b, t] - want_lse).max())
    error = (error / norm) ** 0.5
    assert error < (2e-5 if x.dtype == jnp.float32 else OUT), f"outputs: error {error:.1e}"
    assert worst < LSE, f"LSE: error {worst:.1e}"
