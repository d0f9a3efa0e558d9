"""Few rows in which every pair of values of two factors occurs: what goes wrong mostly goes wrong between two."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]

_TRIES = 12  # rows that are made for each that is kept


def covering_rows(factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool]) -> list[Row]:
    """Return rows, a value of each factor, that have every pair of values that go together.

    Greedy: a row begins with a pair that no row has yet, and each further factor takes the value that adds most such
    pairs; of a few rows made so the best is kept. It is no smallest set, but the same one on every run.

    Args:
      factors: their values, by name.
      is_possible: says of a row, or of a part of one, whether its values go together.
    """
    missing = dict.fromkeys(pairs_of(factors, is_possible))  # a set in order
    rows = []
    while missing:
        begun = list(missing)[:: -(-len(missing) // _TRIES)]
        made = [_row_from(dict(pair), factors, is_possible, missing, rows) for pair in begun]
        best = max(made, key=lambda row: sum(pair in missing for pair in pairs_in(row)))
        for pair in pairs_in(best):
            missing.pop(pair, None)
        rows.append({name: best[name] for name in factors})
    return rows


def _row_from(
    row: Row, factors: Mapping[str, Sequence[Any]], is_possible: Callable, missing: Mapping, rows: Sequence[Row]
) -> Row:
    """Return a whole row from a pair; of values that add as many pairs it takes the one that fewest rows have."""
    for name in [name for name in factors if name not in row]:
        possible = [value for value in factors[name] if is_possible(row | {name: value})]
        news = [sum(frozenset([(name, value), item]) in missing for item in row.items()) for value in possible]
        uses = [sum(other[name] == value for other in rows) for value in possible]
        row[name] = max(zip(news, [-count for count in uses], possible, strict=True), key=lambda each: each[:2])[2]
    return row


def pairs_of(factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool]) -> list[Pair]:
    """Return every pair of values of two factors that go together."""
    both = (
        frozenset([(a, x), (b, y)])
        for (a, of_a), (b, of_b) in combinations(factors.items(), 2)
        for x, y in product(of_a, of_b)
    )
    return [pair for pair in both if is_possible(dict(pair))]


def pairs_in(row: Row) -> set[Pair]:
    """Return the pairs of values of a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}
