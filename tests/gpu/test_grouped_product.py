"""Products of tiles with their experts' matrices, and the sums that are their gradients, on a GPU against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from support.on_gpu import OUT, distance, exact, shapes_and_dtypes, twice

from pallas_kernels.grouped_outer import grouped_outer
from pallas_kernels.grouped_product import grouped_product

# tiles of 128 rows, groups, inputs, outputs
SHAPES = [(12, 3, 6144, 3072), (12, 3, 3072, 6144), (40, 8, 512, 256), (5, 4, 256, 256), (9, 1, 1024, 512)]


def draw(shape, dtype, seed: int):
    """(rows, other rows, matrices, group of each tile, first tile and tiles of each group, used tiles).

    The last tile is not used, and the second group, where there are more, has none: both are NaN.
    """
    tiles, groups, inputs, outputs = shape
    rng = np.random.default_rng(seed)
    taken = [group for group in range(groups) if group != 1]
    group = np.sort(np.append(taken, rng.choice(taken, tiles - 1 - len(taken)))).astype(np.int32)
    count = np.bincount(group, minlength=groups).astype(np.int32)
    keys = jax.random.split(jax.random.key(seed), 3)
    rows, others = (
        jax.random.normal(key, (tiles, 128, width)).at[-1].set(jnp.nan).astype(dtype)
        for key, width in zip(keys[:2], (inputs, outputs), strict=True)
    )
    weight = jax.random.normal(keys[2], (groups, inputs, outputs)) * inputs**-0.5
    weight = (weight.at[1].set(jnp.nan) if groups > 1 else weight).astype(dtype)
    of_tiles = np.append(group, group[-1]).astype(np.int32)
    first, used = np.cumsum(count, dtype=np.int32) - count, np.int32(tiles - 1)
    return rows, others, weight, *map(jnp.asarray, (of_tiles, first, count, used))


@shapes_and_dtypes(SHAPES)
def test_products_and_their_gradients_are_those_of_float64(shape, dtype, backend, seed):
    rows, others, weight, group, first, count, used = draw(shape, dtype, seed)

    @jax.jit
    def run(rows, others, weight):
        options = dict(backend=backend)
        forward = grouped_product(rows, weight, group, used, **options)
        back = grouped_product(others, weight, group, used, transposed=True, **options)
        return forward[:-1], back[:-1], grouped_outer(rows, others, first, count, **options)

    forward, back, sums = twice(partial(run, rows, others), weight)
    is_few = jnp.finfo(dtype).bits == 32
    close = lambda found, expected: distance(found, expected) < (2e-5 if is_few else OUT)
    for tile in (0, len(group) // 2, len(group) - 2):
        matrix = exact(weight[group[tile]])
        assert close(forward[tile], exact(rows[tile]) @ matrix), f"products of tile {tile}"
        assert close(back[tile], exact(others[tile]) @ matrix.T), f"products of tile {tile} with the transposed matrix"
    for one in {0, len(count) - 1}:
        own = slice(int(first[one]), int(first[one] + count[one]))
        left, right = (exact(y[own]).reshape(-1, y.shape[-1]) for y in (rows, others))
        assert close(sums[one], left.T @ right), f"sums of group {one}"
    assert not sums[count == 0].any(), "the sum of a group without tiles"
