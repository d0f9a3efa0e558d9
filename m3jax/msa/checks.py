"""Checks of the arguments of MSA's functions."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from m3jax import arrays
from m3jax.spec.msa import SCORES, check_integer

Function = TypeVar("Function", bound=Callable)


def check_block_size(block_size: int) -> None:
    """Raise ValueError if a block would hold no token."""
    check_integer("block_size", block_size)
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}: must be at least 1")


def check_heads(q: Float[Array, "B T N H"], num_kv_heads: int, width: int) -> None:
    """Raise ValueError if query heads cannot be divided among KV heads, or differ from them in width."""
    if q.shape[2] % num_kv_heads or q.shape[-1] != width:
        raise ValueError(
            f"q has {q.shape[2]} heads of {q.shape[-1]} and k {num_kv_heads} of {width}: need the same width, "
            "and as many query heads as a multiple of the KV heads"
        )


def check_selection(q: Float[Array, "B T N H"], num_kv_heads: int, blocks: Int[Array, "B K T J"]) -> None:
    """Raise ValueError unless each row, KV head and query has a selection of its own: none is shared (T1, T19)."""
    batch, num_queries = q.shape[:2]
    if blocks.shape[:3] != (batch, num_kv_heads, num_queries):
        raise ValueError(
            f"blocks has shape {blocks.shape}: must be [{batch} {num_kv_heads} {num_queries} J] for these operands"
        )


def check_score(score: str) -> None:
    """Raise ValueError for a score that is not in `SCORES`."""
    if score not in SCORES:
        raise ValueError(f"score = {score!r}: allowed are {', '.join(map(repr, SCORES))}")


def check_stored_dtypes(k: Shaped[Array, "..."], v: Shaped[Array, "..."]) -> None:
    """Raise ValueError if keys and values differ in dtype; both may be narrower than the queries, as in a cache."""
    if k.dtype != v.dtype:
        raise ValueError(
            f"k has dtype {k.dtype} and v {v.dtype}: must have one dtype; convert one of them with .astype"
        )


def check_flag(name: str, value: object) -> None:
    """Raise ValueError for a flag that is neither True nor False, and would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} = {value!r}: must be True or False")


def checked(function: Function) -> Function:
    """Make a public function of MSA check its arguments by their names and the letters of their annotations.

    Shapes, dtypes, block size, score and flags at every call; under `m3jax.checks()` lengths, selections, positions
    and NaN too.
    """

    def check(arguments: dict[str, Any], sizes: dict[str, int]) -> None:
        block_size = arguments.get("block_size", 1)
        check_block_size(block_size)
        check_score(arguments.get("score", "max"))
        check_flag("return_lse", arguments.get("return_lse", False))
        if {"k", "v"} <= arguments.keys():
            check_stored_dtypes(arguments["k"], arguments["v"])
        if {"N", "K", "S"} <= sizes.keys():
            check_heads(arguments["q"], sizes["K"], sizes["H"])
        if view := arguments.get("view"):
            devices = 1 if view.share is None else view.share.num_devices
            num_keys, block_size = devices * view.num_blocks * view.block_size, view.block_size
            if "q" in arguments:
                check_heads(arguments["q"], view.num_heads, view.width)
                if "blocks" in arguments:
                    check_selection(arguments["q"], view.num_heads, arguments["blocks"])
        elif "key_positions" in arguments:  # they may be those of a piece of the keys alone
            return
        else:
            num_keys = sizes["S"] if "S" in sizes else sizes["M"] * block_size
        if "lengths" in arguments:
            check_lengths(arguments["lengths"], num_keys)
            if {"blocks", "T"} <= arguments.keys() | sizes.keys():  # `virtual_pages` takes one query a row
                check_chosen(*(arguments[name] for name in ("blocks", "positions", "lengths")), num_keys, block_size)
        if {"N", "S", "T"} <= sizes.keys():  # attention over whole rows: of a chunk, all queries may be padding
            check_rows(arguments["positions"], arguments["lengths"])
            check_numbers(arguments)

    return arrays.checked(function, check)


# What is in the arrays, where `m3jax.checks()` asks for it.


def check_lengths(lengths: Int[Array, " B"], num_keys: int) -> None:
    """Under `checks()`, refuse rows with a negative number of keys, or with more than there are."""
    if not arrays.is_checking():
        return

    def find_problem(lengths):
        bad = np.flatnonzero((lengths < 0) | (lengths > num_keys))
        if len(bad):
            return f"lengths[{bad[0]}] = {lengths[bad[0]]}: a row has 0 to {num_keys} keys here"

    arrays.check_values(find_problem, lengths)


def check_rows(positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> None:
    """Under `checks()`, refuse a call in which no query is a token though rows have keys and positions are given.

    All of it would be padding, with outputs of 0. Where that is meant, positions are -1.
    """
    if not arrays.is_checking():
        return

    def find_problem(positions, lengths):
        is_behind = (positions >= lengths[:, None]) & (lengths[:, None] > 0)  # [B T]
        is_token = (positions >= 0) & (positions < lengths[:, None])  # [B T]
        if is_behind.any() and not is_token.any():
            row, query = (int(i) for i in np.argwhere(is_behind)[0])
            return (
                f"positions[{row}, {query}] = {positions[row, query]} of a row with {lengths[row]} keys: all queries "
                "are padding, behind the keys of their rows; positions count from 0 in each row, and padding may be -1"
            )

    arrays.check_values(find_problem, positions, lengths)


def check_numbers(arguments: Mapping[str, Any]) -> None:
    """Under `checks()`, refuse NaN in queries, keys and values; what only fills rows up may hold anything.

    Args:
      arguments: of a call, with positions [B T] and lengths [B]; looked into are those named q, k, v.
        In the index branch NaN has a place in the order of blocks.
    """
    if not arrays.is_checking():
        return
    names = [name for name in ("q", "k", "v") if name in arguments]

    def find_problem(positions, lengths, *operands):
        is_token = (positions >= 0) & (positions < lengths[:, None])  # [B T]
        for name, operand in zip(names, operands, strict=True):
            is_key = np.arange(operand.shape[1]) < lengths[:, None]  # [B S]
            is_used = is_token if name.endswith("q") else is_key
            is_bad = np.isnan(operand) & is_used.reshape(*is_used.shape, *[1] * (operand.ndim - 2))
            if is_bad.any():
                place = ", ".join(str(i) for i in np.argwhere(is_bad)[0])
                return f"{name}[{place}] is NaN, one of {is_bad.sum()} in {name}: look for it in what computed {name}"

    arrays.check_values(find_problem, *(arguments[name] for name in ("positions", "lengths", *names)))


def check_chosen(
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    num_keys: int,
    block_size: int,
) -> None:
    """Under `checks()`, refuse a selection that `select_blocks` cannot have made for these queries.

    The ids of each query that is a token must be distinct, none may lie behind its own block or below -1, and its own
    block must be among them. If not, the selection was made with another block size, for other queries, or is a part of
    one.
    """
    if not arrays.is_checking():
        return

    def find_problem(blocks, positions, lengths):
        is_token = (positions >= 0) & (positions < lengths[:, None])  # [B T]
        own_block = np.where(is_token, positions // block_size, -1)[:, None, :, None]  # [B 1 T 1]
        in_order = np.sort(blocks, axis=-1)  # [B K T J]
        is_repeated = np.any((in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] != -1), axis=-1)
        problems = (
            (f"names a block that there is not: ids are -1 to {-(-num_keys // block_size) - 1} for {num_keys} keys in "
             f"blocks of {block_size}", np.any((blocks < -1) | (blocks * block_size >= num_keys), axis=-1)),
            ("names a block twice", is_repeated),
            (f"names a block behind the query's own, in blocks of {block_size}",
             np.any(blocks > own_block, axis=-1) & is_token[:, None]),
            (f"lacks the query's own block, in blocks of {block_size}",
             ~np.any(blocks == own_block, axis=-1) & is_token[:, None]),
        )  # fmt: skip
        for problem, is_bad in problems:
            if is_bad.any():
                row, head, query = (int(i) for i in np.argwhere(is_bad)[0])
                chosen = blocks[row, head, query].tolist()
                return (
                    f"blocks[{row}, {head}, {query}] = {chosen}, of a query at position {positions[row, query]} of "
                    f"{lengths[row]}, {problem}"
                )

    arrays.check_values(find_problem, blocks, positions, lengths)
