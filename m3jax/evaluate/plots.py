"""The plots of an evaluation, drawn from its report alone; matplotlib is imported when the first one is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Sequence[Mapping[str, Any]]
_DPI, _MOST_LAYERS = 130, 24


def plot(draw: Callable[[Sequence[str], Results], Figure], names: Sequence[str], results: Results) -> bytes:
    """Return the contents of a PNG file with the plot of a report's results.

    Args:
      draw: of `PLOTS`.
      names: of the results.
      results: of a report.
    """
    figure = draw(names, results)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI)
    return data.getvalue()


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """Return a figure and its axes [rows columns], each of the given size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw_perplexity(names: Sequence[str], results: Results) -> Figure:
    """Draw the loss by tokens seen before, and the perplexity of each file."""
    files = list(dict.fromkeys(name for result in results for name in result["files"]))
    figure, ((left, right),) = _figure(1, 2, 5.5, max(3.6, 0.28 * len(files) + 1.2))
    for name, result in zip(names, results, strict=True):
        places = [each["to"] for each in result["by_position"]]
        losses = [each["loss"] for each in result["by_position"]]
        left.plot(places, losses, marker="o", label=f"{name}: {result['perplexity']:.3f}")
    left.set_xscale("log", base=2)
    left.set_xlabel("tokens seen before, at most")
    left.set_ylabel("loss, nats a token")
    left.legend(title="perplexity of all", fontsize=8)
    left.grid(alpha=0.3)
    height = 0.8 / len(results)
    for i, result in enumerate(results):
        values = [result["files"][name]["perplexity"] if name in result["files"] else np.nan for name in files]
        right.barh(np.arange(len(files)) + (i - (len(results) - 1) / 2) * height, values, height)
    right.set_yticks(
        np.arange(len(files)), [name if len(name) < 32 else "…" + name[-30:] for name in files], fontsize=8
    )
    right.invert_yaxis()
    right.set_xlabel("perplexity")
    return figure


def draw_recall(names: Sequence[str], results: Results) -> Figure:
    """Draw a heat map for each kind and result: depth across, length down."""
    kinds = [kind for kind in ("needle", "several", "chain") if kind in results[0]]
    titles = {"needle": "one needle", "several": "several needles", "chain": "a chain of two"}
    lengths, depths = results[0]["lengths"], results[0]["depths"]
    width, height = max(3.4, 0.62 * len(depths) + 1.2), max(2.4, 0.42 * len(lengths) + 1.3)
    figure, axes = _figure(len(results), len(kinds), width, height)
    for row, (name, result) in enumerate(zip(names, results, strict=True)):
        for column, kind in enumerate(kinds):
            axis = axes[row, column]
            _heat_map(axis, np.array(result[kind]["shares"]), lambda x: f"{x:.0%}")
            axis.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
            axis.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
            axis.set_title(f"{titles[kind]}: {result[kind]['mean']:.1%}\n{name}", fontsize=9)
            axis.set_xlabel("depth in the prompt", fontsize=8)
            if column == 0:
                axis.set_ylabel("tokens of the prompt", fontsize=8)
    return figure


def draw_divergence(names: Sequence[str], results: Results) -> Figure:
    """Draw the quantiles of the divergence, and the share of positions whose most probable token differs."""
    figure, ((left, right),) = _figure(1, 2, 5.0, 3.8)
    for name, result in zip(names, results, strict=True):
        shares, values = np.array(result["quantiles"]).T
        line = left.plot(range(len(shares)), values, marker="o", label=name)[0]
        left.axhline(result["mean"], color=line.get_color(), linestyle=":", linewidth=1)
    left.set_yscale("symlog", linthresh=1e-7)  # shows 0 too: the divergence of logits with equal bits
    left.set_ylim(bottom=0)
    left.set_xticks(
        range(len(shares)), [f"{share:.1%}".replace(".0%", "%") for share in shares], fontsize=7, rotation=45
    )
    left.set_xlabel("share of positions")
    left.set_ylabel("KL from the reference at most, nats")
    left.set_title("dotted: the mean", fontsize=9)
    left.legend(fontsize=8)
    left.grid(alpha=0.3)
    differing = [1 - result["top1_agreement"] for result in results]
    bars = right.bar(range(len(names)), differing, color=[f"C{i % 10}" for i in range(len(names))])
    right.bar_label(bars, [f"{share:.2%}" for share in differing], fontsize=8)
    right.margins(y=0.15)
    right.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7)
    right.set_ylabel("another most probable token, share of positions", fontsize=8)
    return figure


def draw_caught(names: Sequence[str], results: Results) -> Figure:
    """Draw the share that selection catches by layer and distance, and beside it dense attention's mass."""
    num_layers = max(len(result["layers"]) for result in results)
    figure, axes = _figure(len(results), 2, 5.6, max(2.8, 0.34 * min(num_layers, _MOST_LAYERS) + 1.5))
    for row, (name, result) in enumerate(zip(names, results, strict=True)):
        caught = np.array(
            [[np.nan if share is None else share for share in layer] for layer in result["caught_by_distance"]]
        )
        mass = np.array(result["mass_by_distance"])
        whole = np.mean(result["caught"])
        titles = (f"dense attention's mass that selection catches: {whole:.1%}", "where that mass lies")
        for axis, values, title in zip(axes[row], (caught, mass), titles, strict=True):
            # With many layers cells are too small for figures, which the report has.
            _heat_map(axis, values, (lambda x: f"{x:.0%}") if len(values) <= _MOST_LAYERS else None)
            axis.set_title(f"{title}\n{name}", fontsize=9)
            every = max(1, len(values) // _MOST_LAYERS)
            axis.set_yticks(range(0, len(values), every), result["layers"][::every], fontsize=8)
            labels = [f"{low:,}–\n{high - 1:,}" for low, high in result["distances"]]
            axis.set_xticks(range(len(labels)), labels, fontsize=7)
            axis.set_xlabel("tokens from key to query", fontsize=8)
        axes[row, 0].set_ylabel("layer", fontsize=8)
    return figure


def draw_acceptance(names: Sequence[str], results: Results) -> Figure:
    """Draw the share of verifications that accepted at least 1, 2, ..., K proposals."""
    figure, ((axis,),) = _figure(1, 1, 6.4, 3.8)
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        for j, each in enumerate(result["temperatures"]):
            places = range(1, len(each["shares"]) + 1)
            label = f"{name}, temperature {each['temperature']:g}: mean length {each['mean_length']:.2f}"
            axis.plot(places, each["shares"], marker="o", color=f"C{i % 10}", alpha=1 / (1 + 0.5 * j), label=label)
    axis.set_xticks(range(1, results[0]["draft_tokens"] + 1))
    axis.set_ylim(0, 1)
    axis.set_xlabel("proposals accepted, at least")
    axis.set_ylabel("share of verifications")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def _heat_map(axis: Axes, shares: np.ndarray, label: Callable[[float], str] | None) -> None:
    """Draw shares from 0 to 1 [rows columns] as colours, each with its figure if `label` is given; NaN is white."""
    axis.imshow(np.ma.masked_invalid(shares), vmin=0, vmax=1, cmap="viridis", aspect="auto")
    if label is None:
        return
    for (row, column), share in np.ndenumerate(shares):
        if np.isfinite(share):
            colour = "black" if share > 0.6 else "white"
            axis.text(column, row, label(share), ha="center", va="center", color=colour, fontsize=7)


PLOTS = {
    "perplexity": draw_perplexity,
    "recall": draw_recall,
    "kl": draw_divergence,
    "caught": draw_caught,
    "acceptance": draw_acceptance,
}
