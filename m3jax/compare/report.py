"""The comparison itself: quantity by quantity in the order of computation, and the total effect on the logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from m3jax.compare.flips import block_ranks, find_flips
from m3jax.compare.hints import hint
from m3jax.compare.pairs import Pair, at
from m3jax.compare.quantities import STREAM, Quantity, in_order
from m3jax.compare.sides import Side
from m3jax.config import M3Config
from m3jax.messages import printable
from m3jax.vectors.compare import both_values, farthest, ids_in, other_sets
from m3jax.vectors.tolerances import TOLERANCES

Tensor = Shaped[np.ndarray, "..."]
_SETS = ("blocks", "expert_ids")
# The largest relative error that roundings alone make on the way through a model's layers.
_MOST_ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}
_CHUNK = 256  # tokens whose logits are compared at once


class Difference(NamedTuple):
    """The first quantity beyond its tolerance.

    Attributes:
      name: of the quantity.
      what: two sentences: how much of it differs, then where, with both values.
      kind: the known mistake that the difference looks like, or None.
    """

    name: str
    what: tuple[str, str]
    kind: str | None


@dataclass
class Layer:
    """The errors and flipped selections of one layer.

    Attributes:
      errors: by kind of quantity (`STREAM`), the root mean square of the difference over that of the reference.
      blocks: three counts of block selections: all; those that flipped inside the margin, or at a token where an
        earlier selection had; and those that flipped outside it.
      experts: the same three counts for selections of experts.
    """

    errors: dict[str, float] = field(default_factory=dict)
    blocks: tuple[int, int, int] | None = None
    experts: tuple[int, int, int] | None = None


class Logits(NamedTuple):
    """The effect of all differences on the logits.

    Attributes:
      largest: the largest absolute difference of two logits.
      place: the (prompt, position) of the largest difference, both counted from 0.
      mean_kl, most_kl: of the reference's distribution from the other, in nats, over tokens.
      same: tokens at which both have the same most probable next token.
      count: tokens.
    """

    largest: float
    place: tuple[int, int]
    mean_kl: float
    most_kl: float
    same: int
    count: int


@dataclass
class Report:
    """The result of a comparison: the first quantity beyond its tolerance, and the errors of all that were compared.

    Attributes:
      labels: of the two sides.
      dtypes: likewise.
      tolerances: rtol, atol and the dtype that they are for.
      tokens: the number of tokens that both sides have.
      prompts: the number of prompts of these tokens.
      compared: names of the quantities, in order of computation.
      only: names that one side alone has, for each side.
      unknown: names that no table knows, for each side.
      beyond: names of the quantities beyond their tolerance, in order.
      first: the first of them.
      errors: of each compared quantity of numbers, as in `Layer`.
      layers: by number.
      worst: the largest relative error of any quantity, at the tokens that are judged.
      excused: the number of tokens with a flip inside the margin, which the tolerances do not judge from there on.
      logits: the effect on the logits; None where one side has none.
    """

    labels: tuple[str, str]
    dtypes: tuple[str, str]
    tolerances: tuple[float, float, str]
    tokens: int
    prompts: int
    compared: list[str] = field(default_factory=list)
    only: tuple[Sequence[str], Sequence[str]] = ((), ())
    unknown: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    beyond: list[str] = field(default_factory=list)
    first: Difference | None = None
    errors: dict[str, float] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)
    worst: float = 0.0
    excused: int = 0
    logits: Logits | None = None

    @property
    def verdict(self) -> str:
        """The verdict: "differ", "equal" (in every number and selection), "rounding" or "within tolerance".

        Differences within tolerance are "rounding" if no quantity is off by more, as a whole, than the roundings of
        the narrower dtype make of equal computations.
        """
        if self.beyond:
            return "differ"
        if not self.excused and not self.worst:
            return "equal"
        return "rounding" if self.worst <= _MOST_ROUNDING[self.tolerances[-1]] else "within tolerance"


def compare(a: Side, b: Side, config: M3Config | None, rtol: float | None, atol: float | None) -> Report:
    """Compare each quantity of `b` with the reference `a`, in the order of computation.

    Args:
      a: the reference.
      b: the side in question.
      config: of the model, where it is known; without it no flip of blocks can be told from a rounding.
      rtol, atol: for all numbers, `atol` as a share of `magnitudes`; by default those of `TOLERANCES["model"]` for the
        narrower of the two dtypes.

    Raises:
      ValueError: nothing to compare: no token or no quantity that both have, other tokens, or shapes that differ.
    """
    pair = Pair(a, b, config)
    shared = in_order(name for name in a.values if name in b.values)
    if not shared:
        names = [printable(min(side.values)) for side in (a, b)]
        raise ValueError(f"no quantity that both sides have: A has {names[0]} and others, B {names[1]} and others")
    dtype = min(a.dtype, b.dtype, key=("bfloat16", "float32", "float64").index)
    default = TOLERANCES["model"][dtype]
    tolerances = (default[0] if rtol is None else rtol, default[1] if atol is None else atol, dtype)
    report = Report(
        (a.label, b.label), (a.dtype, b.dtype), tolerances, len(pair.places), len(np.unique(pair.places[:, 0]))
    )
    missing = lambda one, other: [each.name for each in in_order(n for n in one.values if n not in other.values)]
    report.only, report.unknown = (missing(a, b), missing(b, a)), (a.unknown, b.unknown)
    report.compared = [compared.name for compared in shared]
    is_excused = np.zeros(len(pair.places), bool)
    for compared in shared:
        layer = Layer() if compared.layer is None else report.layers.setdefault(compared.layer, Layer())
        if compared.kind in _SETS:
            difference, flipped = _sets(pair, compared, layer, tolerances, is_excused)
            is_excused |= flipped
        else:
            difference, error, judged_error = _numbers(pair, compared, tolerances, is_excused)
            report.errors[compared.name] = error
            report.worst = max(report.worst, judged_error)
            if compared.kind in STREAM:
                layer.errors[compared.kind] = error
        if difference is not None:
            report.beyond.append(compared.name)
            if report.first is None:
                report.first = Difference(compared.name, difference, hint(pair, compared))
    report.excused = int(is_excused.sum())
    if "logits" in report.compared:
        report.logits = _logits(pair)
    return report


def _sets(
    pair: Pair,
    compared: Quantity,
    layer: Layer,
    tolerances: tuple[float, float, str],
    is_excused: Bool[np.ndarray, " X"],
) -> tuple[tuple[str, str] | None, Bool[np.ndarray, " X"]]:
    """Return what is wrong with selections or None, and the tokens with a flip inside the margin and none outside."""
    expected, actual, tokens = pair.arrays(compared.name)
    ranked, (rtol, atol, _) = None, tolerances
    if compared.kind == "blocks":
        scores = pair.block_scores(compared.layer)
        if scores is not None and pair.config is not None:
            config, positions = pair.config, pair.places[:, 1]
            rule = config.index_block_size, config.index_local_blocks, config.index_init_blocks
            ranked = block_ranks(scores, positions, *rule)
            scores = block_ranks(scores, positions, config.index_block_size, 0, 0)  # forced blocks with their scores
    else:
        name = f"layers.{compared.layer}.router_scores"
        sides = [(side, column) for side, column in ((pair.a, 0), (pair.b, 1)) if name in side.values]
        scores = sides[0][0].values[name].array[pair.index[:, sides[0][1]]] if sides else None
    by_query = lambda x: x.reshape(-1, x.shape[-1])
    heads = expected.shape[1] if expected.ndim == 3 else 1
    if scores is not None:
        ranked = by_query((scores if ranked is None else ranked)[tokens])
        atol = np.repeat(_times(atol, magnitudes(scores[tokens])), heads)
    flips = find_flips(by_query(expected), by_query(actual), ranked, rtol, atol)
    by_token = lambda mask: mask.reshape(-1, heads).any(-1)
    # A later flip at a token that had one inside the margin counts as inside, whatever its gap: its inputs differ.
    is_inside = flips.is_inside | (flips.is_other & np.repeat(is_excused[tokens], heads))
    is_outside = flips.is_other & ~is_inside
    inside, outside = int(is_inside.sum()), int(is_outside.sum())
    setattr(layer, "blocks" if compared.kind == "blocks" else "experts", (len(is_inside), inside, outside))
    excused = np.zeros(len(pair.places), bool)
    excused[tokens] = by_token(is_inside) & ~by_token(is_outside)
    if not is_outside.any():
        return None, excused
    query = int(np.argmax(is_outside))
    index = np.unravel_index(query, expected.shape[:-1])
    gap = flips.gap[query]
    apart = f", scores {gap:.3g} apart" if np.isfinite(gap) else ""
    things = "blocks" if compared.kind == "blocks" else "experts"
    summary = f"{outside} of {len(is_outside)} selections differ beyond the margin, {inside} inside it"
    values = f"expected {things} {ids_in(expected[index])}, found {ids_in(actual[index])}{apart}"
    return (summary, f"the first at {pair.where(tokens[index[0]])}{at(compared, index)}: {values}"), excused


def _numbers(
    pair: Pair, compared: Quantity, tolerances: tuple[float, float, str], is_excused: Bool[np.ndarray, " X"]
) -> tuple[tuple[str, str] | None, float, float]:
    """Return what is wrong with numbers at judged tokens or None, and the relative errors at all and at judged ones."""
    expected, actual, tokens = pair.arrays(compared.name)
    is_judged = ~is_excused[tokens]
    if compared.kind == "expert_weights":
        expected, actual, is_same = _by_expert(pair, compared, expected, actual)
        is_judged &= is_same
    rtol, atol, dtype = tolerances
    errors = _relative_error(expected, actual), _relative_error(expected[is_judged], actual[is_judged])
    slack = _times(atol, magnitudes(expected))[is_judged].reshape(-1, *[1] * (expected.ndim - 1))
    close = {"compare": "close", "bfloat16": [rtol, 0.0], dtype: [rtol, 0.0]}
    gap = farthest(expected[is_judged], actual[is_judged], close, dtype, slack)
    if gap is None:
        return None, *errors
    judged = np.flatnonzero(is_judged)
    index = (int(judged[gap.place[0]]), *gap.place[1:])
    wrong_tokens = judged[np.flatnonzero(gap.wrong.reshape(len(judged), -1).any(-1))]
    beyond = f"beyond rtol {rtol:.2g}, atol {atol:.2g} rms ({dtype})"
    wrong_of_all = f"{len(wrong_tokens)} of {len(expected)} tokens"
    summary = f"{gap.wrong.sum()} of {expected.size} numbers differ {beyond}, at {wrong_of_all}"
    first = f"from {pair.where(tokens[wrong_tokens[0]])} on"
    farthest_at = (
        f"the farthest at {pair.where(tokens[index[0]])}{at(compared, index)}: {both_values(expected, actual, index)}"
    )
    return (f"{summary} {first}", farthest_at), *errors


def magnitudes(expected: Tensor) -> Float[np.ndarray, " X"]:
    """Return for each token the size of a quantity there, of which `atol` is a share.

    Args:
      expected: the reference's values [X ...].

    Returns:
      The root mean square of the token's finite numbers, and no less than the median of all tokens'. Against the
      token's own alone, a row of few numbers that happen to be small would be judged too strictly; against that of all
      tokens, one token with huge activations would hide differences at the others.
    """
    flat = np.abs(expected.reshape(len(expected), -1).astype(np.float64))
    is_number = np.isfinite(flat)
    flat[~is_number] = 0.0
    largest = flat.max(-1, initial=0.0)
    flat /= np.where(largest > 0, largest, 1.0)[:, None]  # squares of huge numbers would overflow
    counts = is_number.sum(-1)
    own_rms = largest * np.sqrt(np.square(flat, out=flat).sum(-1) / np.maximum(counts, 1))
    return np.maximum(own_rms, np.median(own_rms[counts > 0]) if counts.any() else 0.0)


def _times(atol: float, of_tokens: Float[np.ndarray, " X"]) -> Float[np.ndarray, " X"]:
    """Return the absolute error that numbers of these sizes may have; an overflow allows every finite error."""
    with np.errstate(over="ignore"):
        return atol * of_tokens


def _by_expert(
    pair: Pair, compared: Quantity, expected: Float[np.ndarray, "X A"], actual: Float[np.ndarray, "X A"]
) -> tuple[Float[np.ndarray, "X A"], Float[np.ndarray, "X A"], Bool[np.ndarray, " X"]]:
    """Return weights in the order of their experts' ids, and the tokens at which both sides have the same experts."""
    name = f"layers.{compared.layer}.expert_ids"
    if name not in pair.a.values or name not in pair.b.values:
        return np.sort(expected, axis=-1), np.sort(actual, axis=-1), np.ones(len(expected), bool)
    ids = pair.arrays(name)[:2]
    orders = [np.argsort(x, axis=-1, kind="stable") for x in ids]
    expected, actual = (np.take_along_axis(x, order, -1) for x, order in zip((expected, actual), orders, strict=True))
    return expected, actual, ~other_sets(*ids)


def _relative_error(one: Tensor, other: Tensor) -> float:
    """Return the root mean square of the difference over that of the reference, taken where both are finite."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    is_number = np.isfinite(one) & np.isfinite(other)
    size = float(np.linalg.norm(one[is_number]))
    error = float(np.linalg.norm(other[is_number] - one[is_number]))
    if not np.isfinite(other[np.isfinite(one)]).all():
        return float("inf")
    return error / size if size else (0.0 if not error else float("inf"))


def _logits(pair: Pair) -> Logits:
    """Return the largest difference and the KL divergence of the logits, computed a chunk of tokens at a time."""
    one, other, tokens = pair.arrays("logits")
    kl, same, largest, where = [], 0, -1.0, 0
    for start in range(0, len(one), _CHUNK):
        p, q = (x[start : start + _CHUNK].astype(np.float64) for x in (one, other))
        gap = np.abs(p - q).max(-1)
        gap = np.where(np.isnan(gap), np.inf, gap)
        if gap.max() > largest:
            largest, where = float(gap.max()), start + int(gap.argmax())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        log_p, log_q = (x - x.max(-1, keepdims=True) for x in (p, q))
        log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_p, log_q))
        kl.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
    each = np.concatenate(kl)
    place = tuple(int(i) for i in pair.places[tokens[where]])
    return Logits(largest, place, float(each.mean()), float(each.max()), same, len(one))
