"""A report with a plot of the error over depth, in one HTML file that loads nothing else."""

import io
from html import escape
from pathlib import Path
from typing import Any

from m3jax.compare.quantities import STREAM, quantity
from m3jax.compare.report import Report
from m3jax.compare.text import lines_of
from m3jax.files import replace_file

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em }}
pre {{ overflow-x: auto; background: #f4f4f4; padding: 1em }} svg {{ max-width: 100%; height: auto }}</style></head>
<body><h1>{title}</h1>
{plot}
<pre>{text}</pre></body></html>
"""


def write_html(file: Path, report: Report) -> None:
    """Write a report and its plot; a file of this name is replaced.

    Args:
      file: the HTML file to write.
      report: as `compare` makes it.

    Raises:
      OSError: it cannot be written.
    """
    first = "A and B agree" if report.first is None else f"A and B part at {report.first.name}"
    text = escape("\n".join(lines_of(report)))
    page = _PAGE.format(title=escape(first), plot=_svg(report) if report.layers else "", text=text)
    replace_file(file, page.encode("utf-8"))


def _svg(report: Report) -> str:
    """Return an SVG of relative errors by layer on a logarithmic axis, with flips by layer below if there are any."""
    from matplotlib.figure import Figure  # with no window, and none of pyplot's state

    has_flips = any(layer.blocks or layer.experts for layer in report.layers.values())
    figure = Figure(figsize=(9, 6 if has_flips else 3.5), layout="constrained")
    axes = figure.subplots(2 if has_flips else 1, 1, sharex=True, squeeze=False)[:, 0]
    _draw_errors(axes[0], report)
    if has_flips:
        _draw_flips(axes[1], report)
    axes[-1].set_xlabel("layer")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()[stream.getvalue().index("<svg") :]


def _draw_errors(axis: Any, report: Report) -> None:
    """Draw a line for each quantity of the stream; an error of 0 is left out, since the axis is logarithmic."""
    for kind in STREAM:
        points = [(number, layer.errors[kind]) for number, layer in report.layers.items() if layer.errors.get(kind)]
        finite = [(number, error) for number, error in points if error < float("inf")]
        if finite:
            axis.plot(*zip(*finite, strict=True), marker="o", markersize=4, label=kind)
    axis.set_yscale("log")
    axis.set_ylabel("relative error")
    axis.grid(color="0.9")
    first = None if report.first is None else quantity(report.first.name).layer
    if first is not None:
        axis.axvline(first, color="0.4", linestyle="--", label=f"first beyond: {report.first.name}")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")


def _draw_flips(axis: Any, report: Report) -> None:
    """Draw four bars for each layer: the shares of blocks and experts that flipped inside and outside the margin."""
    shades = {("blocks", 1): "#9ecae1", ("blocks", 2): "#08519c", ("experts", 1): "#fdd0a2", ("experts", 2): "#d94801"}
    for offset, ((kind, which), color) in enumerate(shades.items()):
        counts = {number: getattr(layer, kind) for number, layer in report.layers.items() if getattr(layer, kind)}
        shares = [100 * count[which] / count[0] for count in counts.values()]
        where = "inside" if which == 1 else "outside"
        if counts:
            x = [number + 0.2 * (offset - 1.5) for number in counts]
            axis.bar(x, shares, width=0.2, color=color, label=f"{kind}, {where} the margin")
    axis.set_ylabel("flipped, %")
    axis.legend(fontsize="small")
