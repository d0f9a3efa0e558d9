"""Checks of operands that several ops make: what was given, and what is allowed."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits
from pallas_kernels.numbers import MAX_QUERIES
from pallas_kernels.pages import Pages


def check_pages(name: str, pages: Pages, batch: int, limits: Limits, interpret: Interpret) -> None:
    """Raise ValueError where a table has another number of rows than the queries, or a backend cannot read a pool."""
    if pages.table is not None and pages.table.shape[0] != batch:
        raise ValueError(f"{name}: the table has {pages.table.shape[0]} rows and the queries {batch}")
    limits.check_pages(name, pages, interpret)


def check_few_queries(queries: int, other_op: str) -> None:
    """Raise ValueError where a row has more queries than a decode step."""
    if not 1 <= queries <= MAX_QUERIES:
        raise ValueError(f"{queries} queries a row: need 1 to {MAX_QUERIES} queries ({other_op} takes more)")


def check_attention(q: Float[Array, "B T N H"], k: Pages, v: Pages, limits: Limits, interpret: Interpret) -> None:
    """Raise ValueError where queries, keys and values do not fit together."""
    check_pages("k", k, q.shape[0], limits, interpret)
    check_pages("v", v, q.shape[0], limits, interpret)
    width, stored = q.shape[-1], k.pool.dtype
    if stored not in (q.dtype, *limits.stored) or stored != v.pool.dtype or not width == k.width == v.width:
        raise ValueError(
            f"q is {q.dtype} of width {width}, k {stored} of {k.width}, v {v.pool.dtype} of {v.width}: "
            f"{need_dtypes('keys and values', limits)}"
        )
    if k.pool.shape != v.pool.shape:
        raise ValueError(f"k has pages {k.pool.shape} and v {v.pool.shape}: they must lie in the same way")


def check_selection(q: Float[Array, "B T N H"], blocks: Int[Array, "B2 K T2 J"]) -> None:
    """Raise ValueError where a selection is not that of these queries."""
    batch, length, heads, _ = q.shape
    if blocks.shape[:1] + blocks.shape[2:3] != (batch, length) or heads % blocks.shape[1]:
        raise ValueError(f"blocks has shape {blocks.shape}: must be [{batch} K {length} J], K a divisor of {heads}")


def need_dtypes(what: str, limits: Limits) -> str:
    """Return which dtypes a backend takes, in words."""
    if not limits.stored:
        return "they must be the same"
    others = ", ".join(jnp.dtype(dtype).name for dtype in limits.stored)
    return f"need the same width, and {what} in the queries' dtype or {others}"


def check_expert_weights(
    x: Float[Array, "X D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
) -> None:
    """Raise ValueError for weights of another width than the tokens, or in another dtype."""
    width, hidden = x.shape[1], gate.shape[3]
    if gate.shape != up.shape or gate.shape[2] != width or down.shape != (*gate.shape[:2], hidden, width):
        raise ValueError(
            f"x has width {width}, gate has shape {gate.shape}, up {up.shape}, down {down.shape}: need [L E D F] twice "
            f"and [L E F D] with D = {width}"
        )
    if len({x.dtype, gate.dtype, up.dtype, down.dtype}) > 1:
        raise ValueError(f"x is {x.dtype}, gate {gate.dtype}, up {up.dtype}, down {down.dtype}: need one dtype")


def check_tiles(pair: Int[Array, "Y C"], heights: tuple[int, ...]) -> None:
    """Raise ValueError for tiles of pairs of another height."""
    if pair.shape[1] not in heights:
        allowed = ", ".join(map(str, heights[:-1]))
        raise ValueError(f"tiles of {pair.shape[1]} tokens: need {allowed} or {heights[-1]}")
