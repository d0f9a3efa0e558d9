"""Block selection: index scores and the choice of blocks."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from m3jax.msa import SelectionRules, block_scores, contiguous_index, index_topk, select_blocks, walk_scores
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal
from m3jax.vectors.margins import cut

AXES = {
    "index_q": "B T K I", "index_k": "B S I", "positions": "B T", "lengths": "B", "scores": "B K T M",
    "block_scores": "B K T M", "blocks": "B K T J", "last_kept": "B K T", "first_dropped": "B K T",
}  # fmt: skip
TOLERANCES = {"block_scores": "scores", "blocks": "blocks", "last_kept": "scores", "first_dropped": "scores"}


def cases(large: bool) -> Iterator[Case]:
    """Yield cases in which selection drops blocks, because rows are longer than J blocks."""
    if large:
        yield indexed(
            "m3_shapes",
            "M3's head shapes and block, 4 KV heads, 8,192 keys",
            40,
            rule=dict(block_size=128, top_k=16),
            queries=((8_187, 5), (8_191, 1)),
            lengths=(8_192, 8_192),
            keys=8_192,
            heads=4,
            width=128,
        )
        return
    rule = dict(block_size=4, top_k=3)
    yield indexed(
        "ragged",
        "rows of their own length, padding behind",
        1,
        rule=rule,
        queries=((0, 41), (0, 17), (0, 5)),
        lengths=(41, 17, 5),
        keys=41,
        traps=("T1", "T2", "T3", "T5", "T13", "T17"),
    )
    yield indexed(
        "chunk",
        "queries of a chunk that begins inside a block, elsewhere in each row",
        2,
        rule=rule,
        queries=((30, 7), (18, 7), (37, 4)),
        lengths=(37, 25, 41),
        keys=44,
        traps=("T5", "T15", "T28"),
    )
    yield indexed(
        "heads_as_queries",
        "as many queries as heads: swapped axes have the same shape",
        3,
        rule=rule,
        queries=((28, 4),),
        lengths=(32,),
        keys=32,
        heads=4,
        traps=("T1", "T7"),
    )
    yield indexed(
        "ties",
        "scores are small integers: many are equal, and the lower id stays",
        4,
        rule=rule,
        queries=((0, 48),),
        lengths=(48,),
        keys=48,
        integers=True,
        traps=("T23",),
    )
    yield indexed(
        "nan_and_infinity",
        "index keys with an infinity and a NaN: NaN ranks last, also behind -inf",
        5,
        rule=rule,
        queries=((0, 40),),
        lengths=(40,),
        keys=40,
        special=True,
        traps=("T23", "T24"),
    )
    yield indexed(
        "local_and_init",
        "the last two blocks and the first are forced, within J",
        6,
        rule=rule | dict(top_k=5, local_blocks=2, init_blocks=1),
        queries=((0, 48),),
        lengths=(48,),
        keys=48,
        traps=("T3", "T4"),
    )
    yield indexed(
        "lse",
        "blocks scored by the log of the sum of exponentials, scaled by I^-1/2",
        7,
        rule=rule | dict(score="lse"),
        queries=((0, 48),),
        lengths=(48,),
        keys=48,
        traps=("T31",),
    )
    yield from given_scores()


def indexed(
    name: str,
    what: str,
    seed: int,
    *,
    rule: Rule,
    queries: tuple[tuple[int, int], ...],
    lengths: tuple[int, ...],
    keys: int,
    heads: int = 2,
    width: int = 16,
    integers: bool = False,
    special: bool = False,
    traps: tuple[str, ...] = (),
) -> Case:
    """Return a case of index queries and keys.

    Args:
      queries: the first position of each row's queries, and how many there are; behind them is padding, at -1.
      lengths: valid keys of each row; behind them index keys are NaN.
      integers: scores are small integers, so that equal ones are equal in every dtype.
      special: an infinity and a NaN stand among the keys.
    """
    rng = np.random.default_rng(seed)
    num_rows, most = len(queries), max(count for _, count in queries)
    positions = np.full((num_rows, most), -1, np.int32)
    for row, (first, count) in enumerate(queries):
        positions[row, :count] = first + np.arange(count)
    index_q, index_k = normal(rng, num_rows, most, heads, width), normal(rng, num_rows, keys, width)
    if integers:
        index_q, index_k = (rng.integers(-1, 2, x.shape).astype(x.dtype) for x in (index_q, index_k))
        index_q[..., 4:] = 0
    if special:
        index_k[0, 6, 0], index_k[0, 17, 3] = np.inf, np.nan
    for row, length in enumerate(lengths):
        index_k[row, length:] = np.nan
    inputs = {"index_q": index_q, "index_k": index_k, "positions": positions, "lengths": np.asarray(lengths, np.int32)}
    return Case(name, what, {"local_blocks": 1, "init_blocks": 0, "score": "max"} | dict(rule), seed, inputs, traps)


def given_scores() -> Iterator[Case]:
    """Yield a case whose input is block scores, to test a top-k alone: NaN, infinities, zeros and ties."""
    rng = np.random.default_rng(8)
    num_rows, heads, length, block_size, blocks = 2, 2, 12, 4, 16
    positions = np.stack([np.arange(52, 64), np.arange(13, 25)]).astype(np.int32)
    pool = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, 1.0, -1.0, 3e38, -3e38, 1e-30], np.float32)
    scores = rng.choice(pool, (num_rows, heads, length, blocks)).astype(np.float32)
    own_block = positions // block_size
    beyond = np.arange(blocks) > own_block[:, None, :, None]
    scores = np.where(beyond, rng.choice(np.array([np.nan, np.inf, 9.0], np.float32), scores.shape), scores)
    inputs = {"scores": scores, "positions": positions, "lengths": np.array([64, 25], np.int32)}
    rule = dict(block_size=block_size, top_k=4, local_blocks=1, init_blocks=0)
    what = "given scores with NaN, infinities, both zeros and ties; what lies behind the own block is poison"
    yield Case("given_scores", what, rule, 8, inputs, ("T12", "T23", "T24"))


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Score the blocks by `block_scores` and choose them by `select_blocks`."""
    positions, lengths, size = inputs["positions"], inputs["lengths"], rule["block_size"]
    if "scores" in inputs:
        return {"blocks": select_blocks(inputs["scores"], positions, lengths, selection_rules(rule), block_size=size)}
    scores = block_scores(inputs["index_q"], inputs["index_k"], positions, lengths, size, rule["score"])
    blocks = select_blocks(scores, positions, lengths, selection_rules(rule), block_size=size)
    return {"block_scores": scores, "blocks": blocks} | cut(scores, blocks, positions, lengths, rule)


def selection_rules(rule: Rule) -> SelectionRules:
    """Return a case's rule as `SelectionRules`."""
    return SelectionRules(
        top_k=rule["top_k"], local_blocks=rule.get("local_blocks", 1), init_blocks=rule.get("init_blocks", 0),
        score=rule.get("score", "max"),
    )  # fmt: skip


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield runs of `index_topk` and `walk_scores`, which work in chunks, or of `select_blocks` for given scores."""
    for dtype in ("float32", "bfloat16"):
        given = in_dtype(inputs, dtype)
        if "scores" in given:
            if dtype == "float32":
                yield Run("select_blocks", dtype, jitted(define, rule, given))
            continue
        yield Run("index_topk", dtype, jitted(_walked, rule, given))


def _walked(inputs: Arrays, rule: Rule) -> Arrays:
    options = {name: rule[name] for name in ("block_size", "top_k", "local_blocks", "init_blocks", "score")}
    rest = inputs["positions"], inputs["lengths"]
    view = contiguous_index(inputs["index_k"], rule["block_size"])
    return {
        "blocks": index_topk(inputs["index_q"], inputs["index_k"], *rest, **options),
        "block_scores": walk_scores(inputs["index_q"], view, *rest, rule["score"]).astype(jnp.float32),
    }


GROUP = Group("selection", cases, define, runs, AXES, TOLERANCES)
