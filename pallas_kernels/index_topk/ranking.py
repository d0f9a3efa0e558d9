"""A running list of the best blocks, held in registers: one vector over queries for each place of the list."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.numbers import BEHIND_ALL

KEY_OF_NAN = float(np.finfo(np.float32).min)
KEY_OF_MINUS_INF = float(np.nextafter(np.float32(KEY_OF_NAN), np.float32(0)))


class BestBlocks(NamedTuple):
    """The list: sort keys and block ids, best first, each place a vector over the queries of a tile."""

    keys: tuple[Float[Array, "1 R"], ...]
    ids: tuple[Int[Array, "1 R"], ...]


def empty_list(places: int, queries: int) -> BestBlocks:
    """Return a list of `places` places, all of them unlisted."""
    keys = tuple(jnp.full((1, queries), -jnp.inf, jnp.float32) for _ in range(places))
    return BestBlocks(keys, tuple(jnp.full((1, queries), BEHIND_ALL, jnp.int32) for _ in range(places)))


def sort_key(score: Float[Array, "*X"]) -> Float[Array, "*X"]:
    """Return scores as finite sort keys: NaN below -inf, and room at both ends for forced and unlisted blocks."""
    key = jnp.maximum(jnp.minimum(score, -KEY_OF_MINUS_INF), KEY_OF_MINUS_INF)
    return jnp.where(score != score, KEY_OF_NAN, key)


def insert(best: BestBlocks, key: Float[Array, "1 R"], block: Int[Array, "1 R"]) -> BestBlocks:
    """Take one block into the list. Blocks come in ascending order, so a tie goes to the one listed."""
    is_better = [key > listed for listed in best.keys]  # true from the block's place on

    def shift_in(listed: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
        """Each place keeps its entry, takes the new one, or takes the entry of the place before."""
        places = []
        for j, entry in enumerate(listed):
            moved = jnp.where(is_better[j - 1], listed[j - 1], new) if j else new
            places.append(jnp.where(is_better[j], moved, entry))
        return tuple(places)

    return BestBlocks(shift_in(best.keys, key), shift_in(best.ids, block))


def selection(ids: tuple[Int[Array, "1 R"], ...], own_block: Int[Array, "1 R"]) -> list[Int[Array, "1 R"]]:
    """The listed ids as J ascending ones and then -1, the own block last; padding (own block -1) has -1 throughout."""
    ids = _sorted(list(ids))
    count = jnp.minimum(own_block, len(ids))
    slots = []
    for j in range(len(ids) + 1):
        last = jnp.where((count == j) & (own_block >= 0), own_block, -1)
        slots.append(jnp.where(count > j, ids[j], last) if j < len(ids) else last)
    return slots


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
