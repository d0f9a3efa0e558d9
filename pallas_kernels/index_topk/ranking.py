"""A running list of the best blocks, held in registers: one vector over queries for each place of the list."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import ABOVE, LOWEST

_LAST = 2**30  # an id behind every block


def empty(places: int, rows: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Nothing listed yet: (keys, ids)."""
    keys = tuple(jnp.full((1, rows), -jnp.inf, jnp.float32) for _ in range(places))
    return keys, tuple(jnp.full((1, rows), _LAST, jnp.int32) for _ in range(places))


def ordered(score: Float[Array, "*X"]) -> Float[Array, "*X"]:
    """Scores as finite sort keys: NaN below -inf, and room at both ends for forced and unlisted blocks."""
    key = jnp.maximum(jnp.minimum(score, -ABOVE), ABOVE)
    return jnp.where(score != score, LOWEST, key)


def insert(keys, ids, key: Float[Array, "1 R"], block: Int[Array, "1 R"]):
    """Take one block into the list, best first. Blocks come in ascending order, so a tie goes to the one listed."""
    better = [key > held for held in keys]  # true from the block's place on

    def shifted(places, new):
        out = []
        for j, held in enumerate(places):
            moved = jnp.where(better[j - 1], places[j - 1], new) if j else new
            out.append(jnp.where(better[j], moved, held))
        return tuple(out)

    return shifted(keys, key), shifted(ids, block)


def selection(ids, own: Int[Array, "1 R"]) -> list[Array]:
    """The list as J ascending ids and then -1, the own block last; padding (own = -1) has -1 throughout."""
    ids = _sorted(list(ids))
    count = jnp.minimum(own, len(ids))
    out = []
    for j in range(len(ids) + 1):
        last = jnp.where((count == j) & (own >= 0), own, -1)
        out.append(jnp.where(count > j, ids[j], last) if j < len(ids) else last)
    return out


def _sorted(x: list[Array]) -> list[Array]:
    """Ascending, by Batcher's merge exchange (Knuth, volume 3, algorithm 5.2.2M)."""
    n = len(x)
    p = top = 1 << max(0, (n - 1).bit_length() - 1)
    while p > 0:
        q, r, d = top, 0, p
        while True:
            for i in range(n - d):
                if i & p == r:
                    x[i], x[i + d] = jnp.minimum(x[i], x[i + d]), jnp.maximum(x[i], x[i + d])
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return x
