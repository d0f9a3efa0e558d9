"""The text of a comparison's report, as the command line prints it."""

from m3jax.compare.quantities import STREAM, quantity
from m3jax.compare.report import Layer, Report
from m3jax.messages import listed, printable

_FEW = 6  # names that a line lists
_AGREE = {
    "equal": " in every number",
    "rounding": ": their differences are what rounding in {2} gives",
    "within tolerance": " within rtol {0:.2g}, atol {1:.2g} rms",
}


def lines_of(report: Report) -> list[str]:
    """Return the report's lines: what was compared, the first difference, errors by layer, and the effect on logits.

    Args:
      report: as `compare` makes it.
    """
    lines = [
        f"{side}: {printable(label)} ({dtype})"
        for side, label, dtype in zip("AB", report.labels, report.dtypes, strict=True)
    ]
    layers = f", {len(report.layers)} layers" if report.layers else ""
    lines.append(
        f"{len(report.compared)} quantities of {report.tokens} tokens of {_count(report.prompts, 'prompt')}{layers}"
    )
    for side, names, unknown in zip("AB", report.only, report.unknown, strict=True):
        lines += [f"  {side} alone has {_kinds(names)}"] if names else []
        lines += [f"  no quantity of {side}'s: {_names(unknown)}; --map FILE says what they are"] if unknown else []
    lines += ["", *first_lines(report), "", *_table(report)]
    if report.excused:
        lines.append(f"{_count(report.excused, 'token')} with a flip inside the margin: not judged from there on")
    if report.logits is not None:
        logits, (prompt, position) = report.logits, report.logits.place
        lines += [
            "",
            f"logits: the largest difference is {logits.largest:.3g}, at prompt {prompt + 1}, position {position}; "
            f"KL(A || B) {logits.mean_kl:.3g} on average,",
            f"  {logits.most_kl:.3g} at most; the most probable token is the same for {logits.same} of {logits.count}",
        ]
    return lines


def first_lines(report: Report) -> list[str]:
    """Return lines on the first quantity that differs, and on the quantities before and after it.

    Args:
      report: as `compare` makes it.
    """
    if report.first is None:
        lines = [f"A and B agree{_AGREE[report.verdict].format(*report.tolerances)}"]
        worst = max(report.errors, key=report.errors.get, default=None)
        seen = worst is not None and report.verdict != "equal"
        return [*lines, f"  the largest relative error is {report.errors[worst]:.2g}, of {worst}"] if seen else lines
    first, before = report.first, report.compared[: report.compared.index(report.first.name)]
    lines = [f"first beyond its tolerance: {first.name}", *(f"  {line}" for line in first.what)]
    lines += [f"  looks like: {first.kind}"] if first.kind else []
    errors = {name: report.errors[name] for name in before if name in report.errors}
    worst = max(errors, key=errors.get, default=None)
    seen = "" if worst is None else f" (largest relative error: {errors[worst]:.2g}, {worst})"
    after = len(report.beyond) - 1
    lines.append(f"  before it {_count(len(before), 'quantity')} agree{seen}; after it {after} more differ")
    return lines


def _table(report: Report) -> list[str]:
    """Return the lines of a table of relative errors and flips, layer by layer."""
    if not report.layers:
        return []
    columns = [kind for kind in STREAM if any(kind in layer.errors for layer in report.layers.values())]
    flips = [
        (title, kind)
        for title, kind in (("blocks flipped", "blocks"), ("experts flipped", "experts"))
        if any(getattr(layer, kind) for layer in report.layers.values())
    ]
    head = ["layer", *columns, *(title for title, _ in flips)]
    table_rows = [
        [str(number), *_cells(layer, columns, [kind for _, kind in flips])] for number, layer in report.layers.items()
    ]
    widths = [max(len(row[i]) for row in [head, *table_rows]) for i in range(len(head))]
    note = "relative error (root mean square)" + (", and flips inside + outside the margin" if flips else "")
    return [
        note,
        *("  ".join(map(str.rjust, row, widths)).rstrip() for row in [head, *table_rows]),
    ]


def _cells(layer: Layer, columns: list[str], flips: list[str]) -> list[str]:
    errors = [f"{layer.errors[kind]:.1e}" if kind in layer.errors else "" for kind in columns]
    counts = [getattr(layer, kind) for kind in flips]
    return errors + ["" if count is None else f"{count[1]} + {count[2]} of {count[0]}" for count in counts]


def _kinds(names: list[str]) -> str:
    """Return names grouped by kind, as in "q of 3 layers"."""
    counts: dict[str, int] = {}
    for name in names:
        kind = quantity(name).kind
        counts[kind] = counts.get(kind, 0) + (quantity(name).layer is not None)
    return ", ".join(f"{kind} of {_count(count, 'layer')}" if count else kind for kind, count in counts.items())


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return listed(names[:_FEW], ", ") + more


def _count(number: int, thing: str) -> str:
    plural = thing[:-1] + "ies" if thing.endswith("y") else thing + "s"
    return f"{number} {thing if number == 1 else plural}"
