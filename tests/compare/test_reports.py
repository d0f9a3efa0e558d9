"""What a comparison says, line by line, and which tokens the arrays of a dump are for."""

import numpy as np
import pytest

from m3jax.compare.flips import block_ranks, find_flips
from m3jax.compare.hints import _of_sets
from m3jax.compare.report import Difference, Layer, Logits, Report, compare
from m3jax.compare.sides import Source, side
from m3jax.compare.text import lines_of

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
