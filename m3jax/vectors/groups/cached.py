"""Attention over pages: shuffled, cut into chunks, decoded, in float8, and moved to another engine.

All of these write new keys into pages through a table, and select and attend over what the row then has. `k_pages`,
`v_pages` [X K P H] and `index_pages` [X P I] are the pool before the call, with NaN in all that no row of the table has
written; `table` [B M] names the page of each block, -1 for none.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from m3jax.cache import Cache, LayerCall, Scales, StackCache
from m3jax.msa import sparse_attention
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal
from m3jax.vectors.groups import selection

AXES = selection.AXES | {
    "q": "B T N H", "k": "B T K H", "v": "B T K H", "index_k": "B T I", "table": "B M", "target_table": "B M",
    "k_pages": "X K P H", "v_pages": "X K P H", "index_pages": "X P I",
    "exact_index_pages": "X P I", "k_scale": "K", "v_scale": "K",
    "index_scale": "", "k_pages_after": "Y K P H", "v_pages_after": "Y K P H", "index_pages_after": "Y P I",
    "blocks_of_exact_keys": "B K T J", "out": "B T N H", "lse": "B T N",
    "k_shards": "R X C P H", "v_shards": "R X C P H", "k_shards_after": "U Y L P H", "v_shards_after": "U Y L P H",
    "bytes": "Z", "e4m3fn": "Z", "e4m3fnuz": "Z", "e5m2": "Z",
}  # fmt: skip
TOLERANCES = selection.TOLERANCES | {
    "k_pages_after": "bits", "v_pages_after": "bits", "index_pages_after": "bits", "blocks_of_exact_keys": "blocks",
    "out": "attention", "lse": "lse", "out_bf16": "attention_bf16", "lse_bf16": "lse",
    "k_shards_after": "bits", "v_shards_after": "bits", "e4m3fn": "bits", "e4m3fnuz": "bits", "e5m2": "bits",
}  # fmt: skip
_PAGES = ("k_pages", "v_pages", "index_pages")
_HEADS, _GROUP, _WIDTH, _SIZE, _POOL = 2, 3, 16, 4, 31


def paged(
    name: str,
    what: str,
    seed: int,
    queries: tuple[tuple[int, int], ...],
    traps: tuple[str, ...],
    rule: Rule = {},  # noqa: B006
    scales: dict[str, Any] | None = None,
    heads: int = _HEADS,
) -> Case:
    """Return a case over a pool of pages, some of which belong to rows, in shuffled order.

    Args:
      queries: of each row how many tokens its pages hold, and how many are new.
      rule: entries that are added to the default rule or replace its own.
      scales: of a float8 pool: "k" and "v" [K], "index" [], where these are float8.
      heads: KV heads.
    """
    rng = np.random.default_rng(seed)
    num_rows, length = len(queries), max(count for _, count in queries)
    positions = np.full((num_rows, length), -1, np.int32)
    for row, (first, count) in enumerate(queries):
        positions[row, :count] = first + np.arange(count)
    lengths = np.array([first + count for first, count in queries], np.int32)
    # Page 0 and the last one stay free: an unused slot's -1 that is followed into memory leads to one of them (T9).
    order = rng.permutation(np.arange(1, _POOL - 1))
    table = np.full((num_rows, max(lengths) // _SIZE + 2), -1, np.int32)
    pages = {"k": normal(rng, _POOL, heads, _SIZE, _WIDTH), "v": normal(rng, _POOL, heads, _SIZE, _WIDTH)}
    pages["index"] = normal(rng, _POOL, _SIZE, _WIDTH)
    exact = {}
    is_written, used = np.zeros((_POOL, _SIZE), bool), 0
    for row, (first, _) in enumerate(queries):
        count = -(-int(lengths[row]) // _SIZE)
        table[row, :count], used = order[used : used + count], used + count
        for s in range(first):
            is_written[table[row, s // _SIZE], s % _SIZE] = True
    for tensor, x in pages.items():
        scale = (scales or {}).get(tensor)
        if scale is not None:
            scale = np.asarray(scale, np.float32)
            exact = {"exact_index_pages": x.copy()} if tensor == "index" else {}
            pages[tensor] = x = in_float8(x.astype(np.float32), scale[:, None, None] if scale.ndim else scale)
        # NaN wherever no row has written, so that reading it shows.
        x[~is_written if tensor == "index" else np.broadcast_to(~is_written[:, None], x.shape[:3])] = np.nan
    inputs = {f"{tensor}_pages": x for tensor, x in pages.items()} | exact
    inputs |= {"q": normal(rng, num_rows, length, heads * _GROUP, _WIDTH, scale=1.5)}
    inputs |= {"k": normal(rng, num_rows, length, heads, _WIDTH), "v": normal(rng, num_rows, length, heads, _WIDTH)}
    index_q = normal(rng, num_rows, length, heads, _WIDTH)
    inputs |= {"index_q": index_q, "index_k": normal(rng, num_rows, length, _WIDTH)}
    inputs |= {f"{tensor}_scale": np.asarray(scale, np.float32) for tensor, scale in (scales or {}).items()}
    inputs |= {"table": table, "positions": positions, "lengths": lengths}
    basis = {"block_size": _SIZE, "top_k": 3, "local_blocks": 1, "init_blocks": 0, "score": "max"}
    return Case(name, what, basis | dict(rule), seed, inputs, traps)


def in_float8(x: Float[np.ndarray, "..."], scale: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return numbers as a float8 pool stores them: divided by the scale, clipped to 448, and rounded."""
    return np.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn)


def page_cases(large: bool) -> Iterator[Case]:
    """Yield cases of shuffled pages, of a prefix that ends inside a block, and of a prompt fed in chunks."""
    if large:
        return
    yield paged(
        "shuffled",
        "two rows decode a token over pages in no order; every other page is NaN, page 0 and the last one too",
        21,
        ((41, 1), (26, 1)),
        ("T9", "T10", "T13"),
    )
    yield paged(
        "partial_prefix",
        "a prefix hit that ends inside a block, at another place in each row",
        22,
        ((22, 9), (17, 6)),
        ("T14", "T15", "T5"),
    )
    yield paged(
        "chunked",
        "a whole prompt: one call, and any chunks, give the same; ours end inside blocks",
        23,
        ((0, 43),),
        ("T14", "T18"),
        dict(chunks=[5, 9, 2, 16, 11]),
    )
    yield paged(
        "one_token_suffix",
        "a prefix hit of all tokens but the last, at every residue of a block: one token is computed",
        24,
        ((24, 1), (25, 1), (26, 1), (27, 1)),
        ("T15", "T57"),
    )


def decode_cases(large: bool) -> Iterator[Case]:
    """Yield cases of 1 to 16 tokens in one call, as in verifying a draft, on both sides of a block's border."""
    for index, count in enumerate(() if large else (1, 5, 16)):
        what = "a token of each row" if count == 1 else f"{count} tokens of each row at once, over a block's border"
        yield paged(f"rows_{count}", what, 31 + index, ((24 - count // 2, count), (33, count)), ("T19", "T20"))


def float8_cases(large: bool) -> Iterator[Case]:
    """Yield float8 keys and values with exact index keys, the other way round, and what each byte stands for."""
    if large:
        return
    yield paged(
        "kv",
        "keys and values in float8_e4m3fn with a scale for each head; index keys as they are",
        41,
        ((37, 3), (26, 3)),
        ("T26",),
        scales={"k": [0.015625, 0.0078125], "v": [0.01171875, 0.015625]},
    )
    what = "what each byte means in three kinds of float8: e4m3fn, which M3 and its caches use, e4m3fnuz and e5m2"
    yield Case("kinds", what, {}, 0, {"bytes": np.arange(256, dtype=np.uint8)}, ("T44",))
    yield paged(
        "index",
        "index keys in float8_e4m3fn; blocks_of_exact_keys are those that exact keys choose",
        45,
        ((20, 20), (9, 20)),
        ("T26",),
        scales={"index": 0.0078125},
    )


def exchange_cases(large: bool) -> Iterator[Case]:
    """Yield a case in which pages move from one engine to another, whose pool has another size."""
    if large:
        return
    case = paged(
        "import",
        "rows move to a pool of 20 pages, NaN before, into target_table; then they decode",
        51,
        ((38, 2), (29, 2)),
        ("T16",),
        dict(target_pages=20),
    )
    rng = np.random.default_rng(1051)
    target = np.where(case.inputs["table"] >= 0, 0, -1).astype(np.int32)
    target[target == 0] = rng.permutation(20)[: int((target == 0).sum())]
    yield Case(case.name, case.what, case.rule, case.seed, dict(case.inputs) | {"target_table": target}, case.traps)
    yield resharded(52, 1, 4)
    yield resharded(53, 4, 2)


def resharded(seed: int, source_shards: int, target_shards: int) -> Case:
    """Return a case in which pages move between engines whose devices hold other numbers of heads.

    `k_shards` and `v_shards` are what each of the source's devices holds: [pages, heads of it, P, H]; every device has
    all index keys. `target_table` names the rows' pages in the receiving engine, which has 20.
    """
    name = f"resharded_{source_shards}_to_{target_shards}"
    what = f"pages of 4 KV heads on {source_shards} devices move to {target_shards}; device r holds heads of its own alone"
    rule = dict(target_pages=20, source_shards=source_shards, target_shards=target_shards)
    case = paged(name, what, seed, ((38, 1), (29, 1)), ("T16", "T49"), rule, heads=4)
    rng = np.random.default_rng(seed + 1000)
    target = np.where(case.inputs["table"] >= 0, 0, -1).astype(np.int32)
    target[target == 0] = rng.permutation(20)[: int((target == 0).sum())]
    inputs = dict(case.inputs) | {"target_table": target}
    for tensor in ("k", "v"):
        pool = inputs.pop(f"{tensor}_pages")
        inputs[f"{tensor}_shards"] = np.stack(np.split(pool, source_shards, axis=1))
    return Case(name, what, case.rule, seed, inputs, case.traps)


def with_joined_shards(inputs: Arrays) -> Arrays:
    """Return inputs in which devices' shards are one pool of all heads again."""
    if "k_shards" not in inputs:
        return inputs
    joined = {f"{x}_pages": jnp.concatenate(list(inputs[f"{x}_shards"]), axis=1) for x in ("k", "v")}
    return dict(inputs) | joined


def in_target_shards(outputs: Arrays, rule: Rule) -> Arrays:
    """Return outputs in which the pools of keys and values are divided as the receiving engine divides them."""
    if "target_shards" not in rule:
        return outputs
    divide = lambda pool: jnp.stack(jnp.split(pool, rule["target_shards"], axis=1))
    divided = {f"{x}_shards_after": divide(outputs[f"{x}_pages_after"]) for x in ("k", "v")}
    kept = {name: x for name, x in outputs.items() if name not in ("k_pages_after", "v_pages_after")}
    return kept | divided


def values_of_bytes(code: UInt8[Array, " Z"]) -> dict[str, Float[Array, " Z"]]:
    """Return the number of each byte in three kinds of float8, in float32, which holds all of them."""
    kinds = {"e4m3fn": jnp.float8_e4m3fn, "e4m3fnuz": jnp.float8_e4m3fnuz, "e5m2": jnp.float8_e5m2}
    return {name: jax.lax.bitcast_convert_type(code, kind).astype(jnp.float32) for name, kind in kinds.items()}


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Write new keys into the pages, read each row through the table as one array, and apply the definitions."""
    if "bytes" in inputs:
        return values_of_bytes(inputs["bytes"])
    inputs = with_joined_shards(inputs)
    pages, table, where = moved(inputs, rule), inputs.get("target_table", inputs["table"]), _where(inputs)
    written = {}
    for tensor in ("k", "v", "index"):
        new = inputs["index_k" if tensor == "index" else tensor]
        written[tensor] = _written(
            pages[f"{tensor}_pages"], new, table, inputs["positions"], inputs.get(f"{tensor}_scale")
        )
    read = {tensor: _row(x, table, inputs.get(f"{tensor}_scale"), inputs["q"].dtype) for tensor, x in written.items()}
    choose = lambda keys: selection.define({"index_q": inputs["index_q"], "index_k": keys, **where}, rule)
    chosen = choose(read["index"])
    operands = (inputs["q"], read["k"], read["v"], chosen["blocks"], where["positions"], where["lengths"])
    out, lse = sparse_attention(*operands, block_size=rule["block_size"], return_lse=True)
    # Stored as the pool holds them; whatever dtype this is computed in, the numbers are the same.
    kept = lambda x: x if x.dtype == jnp.float8_e4m3fn else x.astype(jnp.bfloat16)
    outputs = chosen | {f"{tensor}_pages_after": kept(x) for tensor, x in written.items()} | {"out": out, "lse": lse}
    if "exact_index_pages" in inputs:
        exact = _written(inputs["exact_index_pages"], inputs["index_k"], table, inputs["positions"], None)
        outputs["blocks_of_exact_keys"] = choose(_row(exact, table, None, inputs["q"].dtype))["blocks"]
    return in_target_shards(outputs, rule)


def moved(inputs: Arrays, rule: Rule) -> dict[str, Array]:
    """Return the pools of a call; where rows move, those of the receiving engine after the import."""
    pools = {name: inputs[name] for name in _PAGES}
    if "target_table" not in inputs:
        return pools
    source, target = inputs["table"].reshape(-1), inputs["target_table"].reshape(-1)

    def imported(pool):
        empty = jnp.full((rule["target_pages"], *pool.shape[1:]), jnp.nan, pool.dtype)
        return empty.at[jnp.where(target < 0, len(empty), target)].set(pool[source], mode="drop")

    return {name: imported(pool) for name, pool in pools.items()}


def _where(inputs: Arrays) -> dict[str, Array]:
    return {name: inputs[name] for name in ("positions", "lengths")}


def _written(
    pool: Float[Array, "X ..."], new: Float[Array, "B T ..."], table: Int[Array, "B M"],
    positions: Int[Array, "B T"], scale: Float[Array, "..."] | None,
) -> Float[Array, "X ..."]:  # fmt: skip
    """Return the pool with new tokens written into their pages; padding is written nowhere."""
    size = pool.shape[-2]
    page = jnp.take_along_axis(table, jnp.maximum(positions, 0) // size, axis=1)  # [B T]
    page = jnp.where(positions < 0, len(pool), page)
    if scale is not None:
        scale = scale[:, None] if scale.ndim else scale  # [K 1] of a head, [] of all index keys
        new = jnp.clip(new.astype(scale.dtype) / scale, -448, 448).astype(pool.dtype)
    slot = (page, positions % size) if pool.ndim == 3 else (page, slice(None), positions % size)
    return pool.at[slot].set(new.astype(pool.dtype), mode="drop")


def _row(
    pool: Float[Array, "X ..."], table: Int[Array, "B M"], scale: Float[Array, "..."] | None, dtype: Any
) -> Float[Array, "B S ..."]:
    """Return the keys or values of each row as one array, with NaN at blocks that the row does not have."""
    x = pool.astype(dtype)
    if scale is not None:
        scale = scale[:, None, None] if scale.ndim else scale
        x = (pool.astype(scale.dtype) * scale).astype(dtype)
    x = jnp.where((table >= 0).reshape(*table.shape, *[1] * (pool.ndim - 1)), x[table], jnp.nan)  # [B M (K) P H]
    x = x if pool.ndim == 3 else x.swapaxes(2, 3)  # [B M P (K) H]
    return x.reshape(len(table), -1, *x.shape[3:])


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield runs that write, select and attend over a `StackCache` as the engine does, whole and in chunks."""
    if "bytes" in inputs:
        yield Run("a float8 array", "float32", jitted(define, rule, in_dtype(inputs, "float32")))
        return
    for dtype in ("float32", "bfloat16"):
        given = in_dtype(inputs, dtype)
        for chunks in dict.fromkeys([(), tuple(rule.get("chunks", ()))]):
            label = f"the cache in chunks of {list(chunks)}" if chunks else "the cache"
            yield Run(label, dtype, jitted(partial(_by_cache, chunks), rule, given))


def _by_cache(chunks: tuple[int, ...], inputs: Arrays, rule: Rule) -> Arrays:
    inputs = with_joined_shards(inputs)
    pools, table, lengths = moved(inputs, rule), inputs.get("target_table", inputs["table"]), inputs["lengths"]
    ones = jnp.ones((1, pools["k_pages"].shape[1]), jnp.float32)
    scales = Scales(*(inputs.get(f"{tensor}_scale", ones[0])[None] for tensor in ("k", "v")),
                    inputs.get("index_scale", jnp.float32(1))[None])  # fmt: skip
    cache = Cache((StackCache(*(pools[name][None] for name in _PAGES), scales),), table)
    layer, outs, blocks, start = jnp.int32(0), [], [], 0
    for count in chunks or (inputs["q"].shape[1],):
        part = lambda name, first=start, count=count: inputs[name][:, first : first + count]
        positions = part("positions")
        chunk_lengths = jnp.minimum(lengths, jnp.max(positions, axis=1) + 1)
        call = LayerCall(layer, cache.places(positions, chunk_lengths), positions, chunk_lengths, backend="xla")
        stack = cache.stacks[0].write(call, part("k"), part("v"), part("index_k"))
        chosen = stack.select(call, part("index_q"), selection.selection_rules(rule))
        out, stack = stack.attend_selected(call, part("q"), chosen)
        outs, blocks, cache, start = [*outs, out], [*blocks, chosen], cache.replace(stacks=(stack,)), start + count
    after = {f"{name}_after": getattr(cache.stacks[0], name.removesuffix("_pages")) for name in _PAGES[:2]}
    after |= {"index_pages_after": cache.stacks[0].index_k}
    outputs = {"out": jnp.concatenate(outs, axis=1), "blocks": jnp.concatenate(blocks, axis=2)}
    return in_target_shards(outputs | {name: x[0] for name, x in after.items()}, rule)


def group(name: str, cases: Callable[[bool], Iterator[Case]]) -> Group:
    """Return one of this file's groups, which differ only in their cases."""
    return Group(name, cases, define, runs, AXES, TOLERANCES, rounded=("out", "lse"))


GROUPS = (
    group("pages", page_cases), group("decode", decode_cases), group("float8", float8_cases),
    group("exchange", exchange_cases),
)  # fmt: skip
