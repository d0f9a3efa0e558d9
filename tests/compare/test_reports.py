"""What a comparison says, line by line, and which tokens the arrays of a dump are for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from m3jax.compare import report as report_module
from m3jax.compare.flips import block_ranks, find_flips
from m3jax.compare.hints import _of_sets
from m3jax.compare.report import Difference, Layer, Logits, Report, compare, magnitudes
from m3jax.compare.sides import Source, side
from m3jax.compare.text import lines_of

CONFIG = tiny.config("dMM", hidden_size=12, dense_intermediate_size=24)
REPORT = Report(
    ("one", "two\n"), ("float64", "bfloat16"), (0.01, 0.002, "bfloat16"), 9, 2,
    compared=["embedding", "layers.0.q", "layers.1.blocks", "layers.1.output", "logits"],
    only=(["layers.0.k", "layers.1.k", "taps"], []), unknown=((), ("a", "b", "c")),
    beyond=["layers.1.output", "logits"],
    first=Difference("layers.1.output", ("3 of 9 differ.", "at 1: 2 and 3."), "a known mistake"),
    errors={"embedding": 0.0, "layers.0.q": 0.00123, "layers.1.output": 0.5, "logits": 0.25},
    layers={0: Layer({"attention": 0.0, "output": 1e-4}), 1: Layer({"output": 0.5}, (12, 2, 1), (30, 0, 4))},
    worst=0.5, excused=1, logits=Logits(0.125, (1, 4), 0.25, 0.5, 7, 9),
)  # fmt: skip
LINES = """\
A: one (float64)
B: two\\n (bfloat16)
5 quantities of 9 tokens of 2 prompts, 2 layers
  A alone has k of 2 layers, taps
  no quantity of B's: a, b, c; --map FILE says what they are

first beyond its tolerance: layers.1.output
  3 of 9 differ.
  at 1: 2 and 3.
  looks like: a known mistake
  before it 3 quantities agree (largest relative error: 0.0012, layers.0.q); after it 1 more differ

relative error (root mean square), and flips inside + outside the margin
layer  attention   output  blocks flipped  experts flipped
    0    0.0e+00  1.0e-04
    1             5.0e-01     2 + 1 of 12      0 + 4 of 30
1 token with a flip inside the margin: not judged from there on

logits: the largest difference is 0.125, at prompt 2, position 4; KL(A || B) 0.25 on average,
  0.5 at most; the most probable token is the same for 7 of 9"""


def test_the_lines_of_a_report():
    assert lines_of(REPORT) == LINES.splitlines()
    assert REPORT.verdict == "differ"
    agreeing = Report(("a", "b"), ("float32",) * 2, (0.01, 0.002, "float32"), 1, 1, compared=["logits"])
    assert agreeing.verdict == "equal" and "1 quantities of 1 tokens of 1 prompt" in "\n".join(lines_of(agreeing))
    agreeing.worst, agreeing.errors = 0.009, {"logits": 0.009}
    assert agreeing.verdict == "within tolerance"
    assert "  the largest relative error is 0.009, of logits" in lines_of(agreeing)
    agreeing.worst = 1e-9
    assert agreeing.verdict == "rounding"


def test_long_lists_of_names_are_cut():
    for names, line in (
        ("abcdef", "a, b, c, d, e, f"), ("abcdefg", "a, b, c, d, e, f and 1 more"),
        ("abcdefgh", "a, b, c, d, e, f and 2 more"),
    ):  # fmt: skip
        lines = lines_of(replace(REPORT, unknown=((), tuple(names))))
        assert f"  no quantity of B's: {line}; --map FILE says what they are" in lines


def made(**arrays) -> Source:
    return Source("dump", {name.replace("_", "."): [np.asarray(array)] for name, array in arrays.items()})


def test_what_one_side_alone_has_is_listed_for_that_side():
    tokens, stream = np.array([[1, 2, 3]]), np.ones((1, 3, 8), np.float32)
    arrays = {"tokens": tokens, "embedding": stream, "final_norm": stream, "mine": stream}
    a = side(Source("dump", {name: [array] for name, array in arrays.items()}), None, None, {})
    b = side(made(tokens=tokens, embedding=stream, layers_0_output=stream), None, None, {})
    report = compare(a, b, None, None, None)
    assert report.only == (["final_norm"], ["layers.0.output"]) and report.unknown == (("mine",), ())
    assert (report.compared, report.tokens, report.prompts, report.verdict) == (["embedding"], 3, 1, "equal")
    with pytest.raises(ValueError, match="no quantity that both sides have: A has final_norm and others, B embedding"):
        compare(side(Source("a", {"tokens": [tokens], "final_norm": [stream]}), None, None, {}), b, None, None, None)


@pytest.mark.parametrize(
    ("shape", "places"),
    [((5, 8), [(0, t) for t in range(5)]), ((2, 3, 8), [(p, t) for p in range(2) for t in range(3)])],
)
def test_without_ids_the_residual_stream_says_how_many_tokens_there_are(shape, places):
    found = side(made(embedding=np.zeros(shape, np.float32)), None, None, {})
    assert found.places.tolist() == [list(place) for place in places]


def test_without_ids_and_stream_the_user_says_how_many():
    queries = np.zeros((5, 4, 2), np.float32)
    with pytest.raises(ValueError, match=r"dump: nothing says how many tokens each prompt has; dump the ids as tokens"):
        side(made(layers_0_q=queries), None, None, {})
    found = side(made(layers_0_q=queries), None, [2, 3], {})
    assert found.places.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    for axes, name, hint in (((3, 3, 2), "layers.0.q", True), ((3, 8), "embedding", False)):
        source = Source("dump", {"tokens": [np.zeros((1, 4), int)], name: [np.zeros(axes, np.float32)]})
        with pytest.raises(ValueError, match="cannot be aligned with") as caught:
            side(source, None, None, {})
        assert str(caught.value).endswith("; --config FOLDER says the model's sizes") == hint


def changed(x, index, value):
    x = x.copy()
    x[index] = value
    return x


# Selections


def test_ranks_of_blocks_by_the_definition():
    """Forced blocks are the query's own, those just before it, and the first of the row; later ones are never seen."""
    scores = np.arange(24.0).reshape(3, 1, 8)
    positions = np.array([0, 17, 63])  # of blocks of 8: the first, the third, the last
    for local, init in ((1, 0), (2, 1), (3, 0), (1, 2)):
        found = block_ranks(scores, positions, 8, local, init)
        for token, position in enumerate(positions):
            own = position // 8
            for block in range(8):
                forced = own - local < block <= own or block < init
                expected = -np.inf if block > own else np.inf if forced else scores[token, 0, block]
                assert found[token, 0, block] == expected, (local, init, token, block)


def test_a_margin_is_twice_what_a_score_may_be_off_by():
    """Also by a share of the larger score; more ids, an id twice or one that is none come from no rounding."""
    scores = np.array([[4.0, 3.0, 2.0, np.nan]])
    flips = lambda actual, rtol=0.0, atol=0.0: find_flips(np.array([[0, 1]]), np.array([actual]), scores, rtol, atol)
    same = flips([1, 0])
    assert (same.is_other.tolist(), same.gap.tolist(), same.is_inside.tolist()) == ([False], [0.0], [False])
    for atol, is_inside in ((0.5, True), (0.499, False)):
        found = flips([0, 2], atol=atol)
        assert (found.gap.tolist(), found.is_inside.tolist()) == ([1.0], [is_inside])
    for rtol, is_inside in ((0.1667, True), (0.1666, False)):  # of 3, the larger of the two
        assert flips([0, 2], rtol=rtol).is_inside.tolist() == [is_inside]
    for odd in ([0], [0, 1, 2], [0, 0], [0, 9], [0, -1], [0, 3]):
        found = flips(odd, atol=100.0)
        assert found.is_other.tolist() == [True] and found.gap.tolist() == [np.inf] and not found.is_inside[0], odd
    unknown = find_flips(np.array([[0, 1]]), np.array([[0, 2]]), None, 0.0, 1.0)
    assert unknown.gap.tolist() == [np.inf] and not unknown.is_inside[0]


def test_what_a_selection_of_another_size_looks_like():
    wanted = np.array([[0, 1, -1], [2, 3, -1]])
    for actual, line in (
        ([[0, 0, -1], [2, 3, -1]], "1 selections have an id twice (T4)"),
        ([[0, 1, 2], [2, 3, 4]], "2 selections have more blocks than the reference's (T3)"),
        ([[0, -1, -1], [2, 3, -1]], "1 selections have fewer blocks than the reference's (T23)"),
        ([[-1, -1, -1], [2, 3, -1]], "1 selections have fewer blocks than the reference's (T23)"),
    ):
        assert next(_of_sets(wanted, np.array(actual), "blocks")) == line
    assert list(_of_sets(wanted, wanted[::-1], "blocks")) == []


def test_flips_of_experts_are_judged_by_the_references_scores():
    """Else by the other side's; what follows at a token with a flip inside the margin is not judged."""
    scores = np.full((4, 8), 0.1) + np.arange(8) * 0.1
    scores[2, 5] = scores[2, 6] - 1e-7  # nearly a tie, at the third token
    ids = np.tile(np.array([6, 7]), (4, 1)).astype(np.int32)
    turned = changed(ids, (2, 0), 5)
    out = np.ones((4, 12))
    off = changed(out, 2, 3.0)

    def of(ids, out, positions=(0, 1, 2, 3), **more):
        rows = list(positions)
        arrays = {"layers.1.expert_ids": ids, "layers.1.ffn_out": out} | more
        arrays = {name: [x[rows].astype(x.dtype)] for name, x in arrays.items()} | {"positions": [np.array(rows)]}
        return side(Source("x", arrays), CONFIG, None, {})

    known = {"layers.1.router_scores": scores.astype(np.float32)}
    sides = [
        (of(ids, out, **known), of(turned, off)), (of(ids, out), of(turned, off, **known)),
        (of(ids, out, (1, 2, 3), **known), of(turned, off, **known)),
        (of(ids, out, **known), of(turned, off, (1, 2), **known)),
    ]  # fmt: skip
    for a, b in sides:
        found = compare(a, b, CONFIG, None, None)
        count = min(len(a.places), len(b.places))
        assert found.layers[1].experts == (count, 1, 0) and (found.beyond, found.excused) == ([], 1)
    far = changed(ids, (1, 0), 0)
    found = compare(of(ids, out, **known), of(far, changed(out, 1, 3.0)), CONFIG, None, None)
    assert found.layers[1].experts == (4, 0, 1) and found.excused == 0
    assert found.beyond == ["layers.1.expert_ids", "layers.1.ffn_out"]
    assert found.first.what[0] == "1 of 4 selections differ beyond the margin, 0 inside it"
    assert found.first.what[1].startswith("the first at prompt 1, position 1: expected experts ")
    assert found.first.what[1].endswith(", scores 0.6 apart")


def test_selections_of_different_widths_are_sets():
    """An unused slot is -1 and no part of a set, wherever it stands and however many there are."""
    narrow, wide = np.array([[2, 5], [3, 1], [4, -1]]), np.array([[5, -1, 2, -1], [1, 3, 0, -1], [-1, -1, -1, 4]])
    for one, other in ((narrow, wide), (wide, narrow)):
        assert find_flips(one, other, None, 0.0, 0.0).is_other.tolist() == [False, True, False]


def test_weights_without_ids_are_compared_in_ascending_order():
    """With ids in their experts' order, and at tokens that have the same experts on both sides."""
    weights, ids = np.array([[0.2, 0.5], [0.1, 0.6]]), np.array([[7, 2], [1, 3]], np.int32)

    def beyond(weights_of_b, ids_of_b=None):
        of_a, of_b = ({} if ids_of_b is None else {"layers.1.expert_ids": [x]} for x in (ids, ids_of_b))
        made = lambda x, more: Source("x", {"tokens": [np.arange(2)], "layers.1.expert_weights": [x]} | more)
        sides = [side(made(*of), CONFIG, None, {}) for of in ((weights, of_a), (weights_of_b, of_b))]
        return compare(*sides, CONFIG, None, None).beyond

    turned, wrong = weights[:, ::-1], changed(weights, 1, 0.3)
    assert beyond(turned) == beyond(weights) == beyond(turned, ids[:, ::-1]) == beyond(weights, ids) == []
    assert beyond(wrong) == beyond(turned, ids) == beyond(wrong, ids) == ["layers.1.expert_weights"]
    other = np.array([[7, 2], [1, 4]], np.int32)  # of the second token the weights are of other experts
    assert beyond(wrong, other) == beyond(weights, other) == ["layers.1.expert_ids"]


def softmax(x):
    return np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (1, 3), (2, 7), (3, 9), (4, 9)])
def test_the_effect_on_logits(seed, count, monkeypatch):
    """Over chunks of three tokens: the largest difference and its place, the divergence, the most probable tokens."""
    monkeypatch.setattr(report_module, "_CHUNK", 3)
    draw = np.random.default_rng(seed)
    one, other = draw.normal(size=(2, count, 5)).round(1)

    def effect(logits):
        sides = [
            side(Source("x", {"tokens": [np.arange(count)], "logits": [x]}), None, None, {}) for x in (one, logits)
        ]
        return compare(*sides, None, None, None).logits

    found, at_nan = effect(other), effect(changed(other, (count - 1, 2), np.nan))
    gap, p, q = np.abs(one - other).max(-1), softmax(one), softmax(other)
    kl = (p * np.log(p / q)).sum(-1)
    assert found.largest == gap.max() and found.place == (0, gap.argmax())
    np.testing.assert_allclose((found.mean_kl, found.most_kl), (kl.mean(), kl.max()), atol=1e-12)
    assert (found.same, found.count) == ((one.argmax(-1) == other.argmax(-1)).sum(), count)
    assert at_nan.largest == np.inf and at_nan.place == (0, count - 1)


@given(st.integers(0, 99))
def test_the_size_of_a_quantity_at_a_token(seed):
    """The root mean square of its numbers, and no less than the median of all tokens'; infinities are no numbers."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(6, 2, 3)) * 10.0 ** draw.integers(-3, 4, (6, 1, 1))
    x[draw.random(x.shape) < 0.2] = np.inf
    x[1] = np.nan
    x[4] = 0.0
    own = [np.sqrt(np.mean(row[np.isfinite(row)] ** 2)) if np.isfinite(row).any() else None for row in x]
    middle = np.median([size for size in own if size is not None])
    expected = [max(middle, size or 0.0) for size in own]
    np.testing.assert_allclose(magnitudes(x), expected, rtol=1e-12)
    np.testing.assert_allclose(magnitudes(x * 1e200), np.array(expected) * 1e200, rtol=1e-12)
    assert magnitudes(np.full((2, 3), np.inf)).tolist() == [0.0, 0.0]


def test_what_a_plot_shows(monkeypatch, tmp_path):
    """Errors by layer without what is 0 or infinite, the first difference, and flips in bars side by side."""
    figure = pytest.importorskip("matplotlib.figure", reason="draws with matplotlib (pip install 'm3jax[compare]')")
    from m3jax.compare.page import write_html

    drawn, save = [], figure.Figure.savefig

    def saved(self, *given, **how):
        drawn.append(self)
        save(self, *given, **how)

    monkeypatch.setattr(figure.Figure, "savefig", saved)
    layers = {
        2: Layer({"attention": 0.5, "output": 0.0}, (200, 1, 4), None),
        3: Layer({"attention": 0.25, "output": float("inf")}, (50, 5, 0), (40, 0, 10)),
        7: Layer({"output": 0.125}),
    }
    first = Difference("layers.3.output", ("", ""), None)
    found = Report(
        ("a", "b"), ("float32",) * 2, (0.1, 0.1, "float32"), 1, 1, compared=[first.name], beyond=[first.name],
        first=first, layers=layers,
    )  # fmt: skip
    write_html(tmp_path / "page.html", found)
    errors, flips = drawn[0].axes
    lines = {line.get_label(): [list(map(float, x)) for x in line.get_data()] for line in errors.lines}
    assert lines == {
        "attention": [[2, 3], [0.5, 0.25]], "output": [[7], [0.125]], "first beyond: layers.3.output": [[3, 3], [0, 1]]
    }  # fmt: skip
    assert (errors.get_yscale(), errors.get_ylabel(), flips.get_ylabel()) == ("log", "relative error", "flipped, %")
    assert errors.get_legend() and flips.get_legend()
    bars = {}
    for container in flips.containers:
        bars[container.get_label()] = [
            tuple(round(float(x), 6) for x in (bar.get_x() + bar.get_width() / 2, bar.get_width(), bar.get_height()))
            for bar in container
        ]
    assert bars == {
        "blocks, inside the margin": [(1.7, 0.2, 0.5), (2.7, 0.2, 10.0)],
        "blocks, outside the margin": [(1.9, 0.2, 2.0), (2.9, 0.2, 0.0)],
        "experts, inside the margin": [(3.1, 0.2, 0.0)], "experts, outside the margin": [(3.3, 0.2, 25.0)],
    }  # fmt: skip
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "date" not in svg.lower()
    assert all(f"<!-- {words} -->" in svg for words in ("relative error", "flipped, %", "layer", "attention"))
    write_html(tmp_path / "page.html", replace(found, layers={2: Layer({"attention": 0.5})}))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<!-- relative error -->" in page and "<!-- flipped" not in page
