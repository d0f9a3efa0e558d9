"""Bugs of docs/compare.md, each planted into an engine that is otherwise right: the report says what it says.

The first part of every report stands in planted_bugs.txt.
"""

import re
import runpy
from pathlib import Path

import pytest

from m3jax.compare.running import compare_sides
from m3jax.compare.text import first_lines, lines_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
ROWS = {row[0]: row for row in re.findall(r"^\| (\w+) \| (.+) \| (\w*) ?\| `?([\w. ]+?)`? \| (.*?) ?\|$", PAGE, re.M)}
REPORTS = dict(
    re.findall(
        r"^## (\w+)\n\n(.*?)\n(?=\n## |\Z)", Path(__file__).with_name("planted_bugs.txt").read_text(), re.M | re.S
    )
)
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "plant_bugs.py"), run_name="plant_bugs")
# The quantity that each bug spoils first: what computes it is where the bug is.
FIRST = {
    "right": None, "misread_topk": "attention", "index_keys_left_behind": "block_scores", "unmasked_tail": "attention",
    "float8_index": "block_scores", "taps_off_by_one": "taps", "dense_fallback": "attention", "one_selection": "blocks",
    "one_block_more": "blocks", "mask_after_pool": "block_scores", "wrong_page": "attention",
    "shared_by_steps": "blocks",
    "scale_forgotten": "attention", "merged_unweighted": "attention", "bias_in_weights": "expert_weights",
    "no_clamp": "ffn_out", "rope_interleaved": "q", "norm_without_one": "q", "scale_byte_off": "ffn_out",
    "selection_of_before": "blocks", "no_factor": "ffn_out",
}  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The dumps that the page's command writes."""
    folder = tmp_path_factory.mktemp("planted")
    SCRIPT["main"](["--out", str(folder)])
    return folder


def test_the_page_has_every_bug():
    names = [bug.__name__ for bug in SCRIPT["BUGS"]]
    assert [name for name in ROWS if name in names] == [*REPORTS] == names and FIRST.keys() == REPORTS.keys()


# One for each quantity that a report may name first.
FEW = ("right", *({first: bug for bug, first in reversed(FIRST.items())}.values()))


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.__name__, marks=() if bug.__name__ in FEW else pytest.mark.further)
        for bug in SCRIPT["BUGS"]
    ],
)
def test_the_report_is_the_pages(bug, planted):
    """The report names the quantity that the bug changes first, in the words of the page and of planted_bugs.txt."""
    report = compare_sides(str(ROOT / "vectors"), str(planted / f"{bug.__name__}.safetensors"))
    found, expected = None if report.first is None else report.first.name.split(".")[-1], FIRST[bug.__name__]
    assert found == expected, f"{bug.__name__}: the first difference is in {found}, expected {expected}"
    lines = first_lines(report)
    assert REPORTS[bug.__name__].splitlines() == lines
    _, is_what, _, first, looks_like = ROWS[bug.__name__]
    assert is_what == bug.__doc__, f"the table says of {bug.__name__}: {is_what}"
    assert first == ("A and B agree" if report.first is None else report.first.name)
    assert looks_like == next((line.removeprefix("  looks like: ") for line in lines if "looks like" in line), "")
    if f"planted/{bug.__name__}.safetensors\n```" in PAGE:
        assert "\n".join(lines) in PAGE, "the page shows the whole report of the bug whose command it gives"


def test_a_bug_of_float8_lies_inside_the_margin_of_float8(planted):
    """Every flip of float8 index keys comes of scores that rtol 0.0625 allows; in float32 each is a bug (T26)."""
    command = re.search(
        r"^\$ python -m m3jax.compare vectors planted/(\S+) --rtol (\S+)\n(.*?)^```$", PAGE, re.M | re.S
    )
    a, b = str(ROOT / "vectors"), str(planted / command[1])
    report = compare_sides(a, b, rtol=float(command[2]))
    labelled = "\n".join(lines_of(report)).replace(a, "vectors").replace(b, f"planted/{command[1]}")
    assert labelled + "\n" == command[3]
    counts = [layer.blocks for layer in report.layers.values() if layer.blocks]
    assert all(inside > 0 and outside == 0 for _, inside, outside in counts), counts
    strict = [layer.blocks for layer in compare_sides(a, b).layers.values() if layer.blocks]
    assert all(inside == 0 and outside > 0 for _, inside, outside in strict), strict
