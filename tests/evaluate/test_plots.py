"""What a plot shows of a report: its numbers where they belong, its axes with their names."""

import numpy as np
import pytest

from m3jax.evaluate.plots import PLOTS, plot

pytest.importorskip("matplotlib", reason="draws with matplotlib (pip install 'm3jax[evaluate]')")
NAMES = ["one, float32", "two"]


def shown(task, *results):
    """Of each axis: title, names of its axes, scales, tick labels, lines by label, bars, cells and their figures."""
    figure = PLOTS[task](NAMES[: len(results)], results)
    found = []
    for axis in figure.axes:
        ticks = [[label.get_text() for label in each.get_ticklabels()] for each in (axis.xaxis, axis.yaxis)]
        legend = axis.get_legend()
        found.append(
            dict(
                names=(axis.get_title(), axis.get_xlabel(), axis.get_ylabel()),
                scales=(axis.get_xscale(), axis.get_yscale()),
                ticks=ticks,
                lines=[(line.get_label(), *(list(map(float, x)) for x in line.get_data())) for line in axis.lines],
                bars=[(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in axis.patches],
                cells=[np.ma.filled(image.get_array(), -1.0).tolist() for image in axis.images],
                texts=[(text.get_text(), *text.get_position(), text.get_color()) for text in axis.texts],
                limits=axis.get_ylim(),
                powers_of=getattr(axis.xaxis.get_transform(), "base", None),
                has_grid=axis.xaxis.get_gridlines()[0].get_visible(),
                legend=legend and [text.get_text() for text in (legend.get_title(), *legend.get_texts())],
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("count", [1, 12])
def test_pictures_have_room_for_what_they_show(count):
    """At least 0.25 inches a line of figures, and 0.6 a cell; what has few is no smaller than can be read."""
    files = {str(i): dict(perplexity=2.0) for i in range(4 * count)}
    perplexity = dict(by_position=[dict(to=4, loss=3.0)], perplexity=2.0, files=files)
    needle = dict(shares=[[1.0] * count] * (2 * count), mean=1.0)
    recall = dict(lengths=[*range(2 * count)], depths=[0.5] * count, needle=needle)
    for task, result, least in (
        ("perplexity", perplexity, (10, max(3.5, 0.25 * 4 * count))),
        ("recall", recall, (max(3, 0.6 * count), max(2, 0.4 * 2 * count))),
    ):
        size = PLOTS[task](NAMES[:1], [result]).get_size_inches()
        assert all(np.less_equal(least, size)) and all(np.less(size, np.multiply(1.3, least) + 1.5)), (task, size)


def test_perplexity():
    """Losses by position, a line a model; bars of both models for each file, a file that one lacks left out."""
    by_position = [dict(to=4, loss=3.0), dict(to=16, loss=2.0)]
    one = dict(
        by_position=by_position, perplexity=8.5, files={"a": dict(perplexity=7.0), "b" * 40: dict(perplexity=9.0)}
    )
    two = dict(by_position=by_position[::-1], perplexity=7.25, files={"a": dict(perplexity=6.0)})
    left, right = shown("perplexity", one, two)
    assert left["names"] == ("", "tokens seen before, at most", "loss, nats a token")
    assert left["scales"] == ("log", "linear") and right["names"] == ("", "perplexity", "")
    assert left["lines"] == [
        ("one, float32: 8.500", [4, 16], [3, 2]), ("two: 7.250", [16, 4], [2, 3])
    ]  # fmt: skip
    assert left["legend"] == ["perplexity of all", "one, float32: 8.500", "two: 7.250"]
    assert right["ticks"][1] == ["a", "…" + "b" * 30] and right["limits"][0] > right["limits"][1]  # the first on top
    assert left["has_grid"] and left["powers_of"] == 2
    widths = [bar[2] for bar in right["bars"]]
    assert widths[:3] == [7.0, 9.0, 6.0] and np.isnan(widths[3])
    assert [bar[1] for bar in right["bars"]] == pytest.approx([-0.4, 0.6, 0.0, 1.0])
    assert [bar[3] for bar in right["bars"]] == pytest.approx([0.4] * 4)


def test_recall():
    """Depth across, length down: each cell its share, and its figure in a colour that can be read on it."""
    kind = lambda shares, mean: dict(shares=shares, mean=mean)
    result = dict(
        lengths=[1000, 20_000], depths=[0.0, 0.5, 1.0], needle=kind([[1.0, 0.5, 0.6], [0.61, 0.0, None]], 0.6),
        chain=kind([[0.25] * 3] * 2, 0.25),
    )  # fmt: skip
    result["needle"]["shares"][1][2] = float("nan")
    needle, chain = shown("recall", result)
    assert needle["names"] == ("one needle: 60.0%\none, float32", "depth in the prompt", "tokens of the prompt")
    assert chain["names"] == ("a chain of two: 25.0%\none, float32", "depth in the prompt", "")
    assert needle["ticks"] == [["0%", "50%", "100%"], ["1,000", "20,000"]]
    assert needle["cells"] == [[[1.0, 0.5, 0.6], [0.61, 0.0, -1.0]]]
    assert needle["texts"] == [
        ("100%", 0, 0, "black"), ("50%", 1, 0, "white"), ("60%", 2, 0, "white"), ("61%", 0, 1, "black"),
        ("0%", 1, 1, "white"),
    ]  # fmt: skip
    several = dict(several=kind([[0.75] * 3] * 2, 0.75))
    both = shown("recall", result | several, result | several)
    titles = ("one needle: 60.0%", "several needles: 75.0%", "a chain of two: 25.0%")
    assert [axis["names"][0] for axis in both] == [f"{title}\n{name}" for name in NAMES for title in titles]


def test_divergence():
    result = dict(quantiles=[[0.5, 1e-5], [0.999, 0.25], [1.0, 0.5]], mean=0.125, top1_agreement=0.75)
    left, right = shown("kl", result, result | dict(top1_agreement=1.0))
    assert left["names"] == ("dotted: the mean", "share of positions", "KL from the reference at most, nats")
    assert left["scales"] == ("linear", "symlog") and left["ticks"][0] == ["50%", "99.9%", "100%"]
    assert left["lines"][0] == ("one, float32", [0, 1, 2], [1e-5, 0.25, 0.5]) and left["lines"][1][1:] == (
        [0, 1],
        [0.125] * 2,
    )
    assert left["legend"] == ["", *NAMES]
    assert right["names"] == ("", "", "another most probable token, share of positions")
    assert [bar[3] for bar in right["bars"]] == [0.25, 0.0] and right["ticks"][0] == ["one\nfloat32", "two"]
    assert [text[0] for text in right["texts"]] == ["25.00%", "0.00%"]
    assert right["limits"][1] > 0.25 * 1.1  # room for the figure above the highest bar
    assert left["limits"][0] == 0.0 and left["has_grid"]


def test_caught():
    """One row a model: the share caught beside the mass; of many layers no figures, and every other name."""
    result = dict(
        layers=[3, 7], distances=[[0, 128], [128, 2048]], caught=[0.5, 0.7],
        caught_by_distance=[[1.0, None], [0.5, 0.25]], mass_by_distance=[[0.9, 0.1], [0.8, 0.2]],
    )  # fmt: skip
    caught, mass = shown("caught", result)
    assert caught["names"] == (
        "dense attention's mass that selection catches: 60.0%\none, float32", "tokens from key to query", "layer"
    )  # fmt: skip
    assert mass["names"] == ("where that mass lies\none, float32", "tokens from key to query", "")
    assert caught["cells"] == [[[1.0, -1.0], [0.5, 0.25]]] and mass["cells"] == [[[0.9, 0.1], [0.8, 0.2]]]
    assert caught["ticks"] == [["0–\n127", "128–\n2,047"], ["3", "7"]]
    assert [text[0] for text in mass["texts"]] == ["90%", "10%", "80%", "20%"]
    many = {name: [values[0]] * 48 for name, values in result.items() if name.endswith("by_distance")}
    many = shown("caught", result | many | dict(layers=list(range(48)), caught=[0.5] * 48))
    assert many[0]["texts"] == [] and many[0]["ticks"][1] == [str(layer) for layer in range(0, 48, 2)]
    few = {name: [values[0]] * 24 for name, values in result.items() if name.endswith("by_distance")}
    few = shown("caught", result | few | dict(layers=list(range(24)), caught=[0.5] * 24))
    assert len(few[1]["texts"]) == 48 and len(few[1]["ticks"][1]) == 24


def test_acceptance():
    each = [
        dict(temperature=0.0, shares=[0.9, 0.5], mean_length=2.4),
        dict(temperature=0.7, shares=[0.8, 0.3], mean_length=2.1),
    ]
    (axis,) = shown("acceptance", dict(draft_tokens=2, temperatures=each))
    assert axis["names"] == ("", "proposals accepted, at least", "share of verifications")
    assert axis["lines"] == [
        ("one, float32, temperature 0: mean length 2.40", [1, 2], [0.9, 0.5]),
        ("one, float32, temperature 0.7: mean length 2.10", [1, 2], [0.8, 0.3]),
    ]  # fmt: skip
    assert axis["ticks"][0] == ["1", "2"]
    data = plot(PLOTS["acceptance"], NAMES[:1], [dict(draft_tokens=2, temperatures=each)])
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (round(6.4 * 130), round(3.8 * 130))
