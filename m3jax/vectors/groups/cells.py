"""Keys in cells: memory in which a token stands anywhere, so that only its position says which block it belongs to.

`cell_rows` [C] names the row whose token a cell holds, -1 for none, and `cell_positions` [C] the token's position in it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from m3jax.msa import SCHEDULES, contiguous, contiguous_index, select_blocks, walk_scores
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal
from m3jax.vectors.groups import selection
from m3jax.vectors.groups import sparse_attention as attention_group
from m3jax.vectors.margins import cut

AXES = attention_group.AXES | {
    "cell_rows": "C", "cell_positions": "C", "k_cells": "C K H", "v_cells": "C K H", "index_cells": "C I",
}  # fmt: skip
TOLERANCES = attention_group.TOLERANCES
_HEADS, _GROUP, _WIDTH, _SIZE = 2, 2, 16, 4


def cases(large: bool) -> Iterator[Case]:
    """Yield cells of two rows between one another, with holes that were filled again, and pages smaller than a block."""
    if large:
        return
    rng, lengths = np.random.default_rng(15), (39, 30)
    # Tokens came in turns of 1 to 3; a third sequence left holes, into some of which later tokens were written.
    rows, positions, counts, free = [], [], [0, 0], []
    while counts != list(lengths):
        row = int(rng.choice([b for b in (0, 1) if counts[b] < lengths[b]]))
        for _ in range(min(int(rng.integers(1, 4)), lengths[row] - counts[row])):
            if rng.random() < 0.3:
                free.append(len(rows))
                rows.append(-1)
                positions.append(-1)
            cell = free.pop(0) if len(free) > 3 and rng.random() < 0.6 else len(rows)
            if cell == len(rows):
                rows.append(-1)
                positions.append(-1)
            rows[cell], positions[cell] = row, counts[row]
            counts[row] += 1
    what = "two rows' tokens between one another, with holes, some of them filled later: blocks are counted by position"
    yield in_cells("interleaved", what, 15, rows, positions, lengths, {})
    rng, lengths, page = np.random.default_rng(16), (41, 26), 2
    pages = [(row, m) for row, length in enumerate(lengths) for m in range(-(-length // page))]
    order = [pages[i] for i in rng.permutation(len(pages))]
    rows = [row if m * page + i < lengths[row] else -1 for row, m in order for i in range(page)]
    positions = [m * page + i if m * page + i < lengths[row] else -1 for row, m in order for i in range(page)]
    what = "pages of 2 cells in no order under blocks of 4: half a block each"
    yield in_cells("small_pages", what, 16, rows, positions, lengths, {"page_size": page})


def in_cells(name, what, seed: int, rows: list[int], positions: list[int], lengths: tuple[int, int], rule: Rule) -> Case:
    """Return a case of two rows whose last 5 and 3 tokens ask; cells that hold no token are NaN."""
    rng = np.random.default_rng(seed + 1000)
    counts = (5, 3)
    asked = np.full((2, max(counts)), -1, np.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        asked[row, :count] = np.arange(length - count, length)
    shape = (len(rows), _HEADS, _WIDTH)
    cells = {"k_cells": normal(rng, *shape), "v_cells": normal(rng, *shape), "index_cells": normal(rng, len(rows), _WIDTH)}
    for array in cells.values():
        array[np.array(rows) < 0] = np.nan
    inputs = cells | {
        "cell_rows": np.array(rows, np.int32), "cell_positions": np.array(positions, np.int32),
        "q": normal(rng, *asked.shape, _HEADS * _GROUP, _WIDTH, scale=1.5),
        "index_q": normal(rng, *asked.shape, _HEADS, _WIDTH), "positions": asked, "lengths": np.array(lengths, np.int32),
    }  # fmt: skip
    basis = {"block_size": _SIZE, "top_k": 3, "local_blocks": 1, "init_blocks": 0, "score": "max"}
    return Case(name, what, basis | dict(rule), seed, inputs, ("T41",))


def in_order(inputs: Arrays) -> dict[str, Array]:
    """Return the inputs with each row's cells in the order of their positions, as `k`, `v` and `index_k`."""
    num_rows, most = len(inputs["lengths"]), len(inputs["cell_rows"])
    most += -most % _SIZE
    row, position = jnp.arange(num_rows)[:, None, None], jnp.arange(most)[:, None]
    is_there = (inputs["cell_rows"] == row) & (inputs["cell_positions"] == position)  # [B S C]
    cell = jnp.argmax(is_there, axis=-1)  # [B S]

    def gathered(x: Float[Array, "C ..."]) -> Float[Array, "B S ..."]:
        exists = jnp.any(is_there, axis=-1).reshape(*cell.shape, *[1] * (x.ndim - 1))
        return jnp.where(exists, x[cell], jnp.nan)

    keys = {"k": "k_cells", "v": "v_cells", "index_k": "index_cells"}
    return dict(inputs) | {name: gathered(inputs[source]) for name, source in keys.items()}


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Put the cells in order and apply the definitions."""
    return attention_group.define(in_order(inputs), rule)


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield a run of each attention schedule over the cells in order, on scores from `walk_scores`."""
    for dtype in ("float32", "bfloat16"):
        for name, schedule in SCHEDULES.items():
            yield Run(name, dtype, jitted(partial(_by_schedule, schedule), rule, in_dtype(inputs, dtype)))


def _by_schedule(schedule: Callable, inputs: Arrays, rule: Rule) -> Arrays:
    inputs, size = in_order(inputs), rule["block_size"]
    where = inputs["positions"], inputs["lengths"]
    scores = walk_scores(inputs["index_q"], contiguous_index(inputs["index_k"], size), *where)
    blocks = select_blocks(scores, *where, selection.selection_rules(rule), block_size=size)
    out, lse = schedule(inputs["q"], contiguous(inputs["k"], inputs["v"], size), blocks, *where)
    return {"block_scores": scores, "blocks": blocks, "out": out, "lse": lse} | cut(scores, blocks, *where, rule)


GROUP = Group("cells", cases, define, runs, AXES, TOLERANCES, rounded=("out", "lse"))
