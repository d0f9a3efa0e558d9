"""The diff tool: layouts, names, margins and verdicts, on arrays small enough to look at."""

import itertools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dumps import TINY, VECTORS, golden, written

from m3jax.compare.flips import find_flips
from m3jax.compare.layouts import Rows, aligned, layouts
from m3jax.compare.names import TABLES, meanings
from m3jax.compare.quantities import LAYER_NAMES, in_order, quantity
from m3jax.compare.report import compare
from m3jax.compare.running import compare_sides
from m3jax.compare.sides import Source, side
from m3jax.config import M3Config
from m3jax.vectors.groups import model as model_group

ROOT = Path(__file__).resolve().parents[2]
CONFIG = M3Config.from_pretrained(TINY)
SIZES = {"D": 7, "N": 6, "K": 3, "H": 5, "I": 4, "E": 8, "A": 2, "V": 9, "W": 10}


def test_quantities_have_the_axes_of_the_golden_vectors():
    """One letter, one meaning: [B T ...] there, tokens in one axis here."""
    for name, axes in model_group.AXES.items():
        if name == "tokens" or name.endswith(("last_kept", "first_dropped")):
            continue
        letters = axes.replace("B T", "X").replace("B K T", "X K").split()
        assert [*quantity(name).axes] == letters, name


def test_quantities_come_in_the_order_of_computation():
    names = ["logits", "layers.10.q", "layers.2.output", "taps", "layers.2.input", "embedding", "final_norm"]
    found = [each.name for each in in_order(names)]
    assert found == ["embedding", "layers.2.input", "layers.2.output", "layers.10.q", "taps", "final_norm", "logits"]


# Layouts


def spelled(array: np.ndarray, axes: tuple[str, ...], spelling: tuple[str, ...], rows: Rows, pad: int) -> np.ndarray:
    """An array [X ...] laid out in another way: written without a look at how `aligned` goes back."""
    prompts = len(rows.is_token)
    is_padded = any("B" in axis.split("*") for axis in spelling)
    if is_padded:
        whole = np.full((prompts, rows.is_token.shape[1] + pad, *array.shape[1:]), 99.0)
        for x, (prompt, position) in zip(array, rows.places, strict=True):
            whole[prompt, position] = x
        array, names = whole, ["B", "T", *axes[1:]]
    else:
        names = ["X", *axes[1:]]
    order = [name for axis in spelling for name in axis.split("*") if name != "1"]
    array = np.transpose(array, [names.index(name) for name in order])
    shape, sizes = [], dict(zip(order, array.shape, strict=True)) | {"1": 1}
    for axis in spelling:
        shape.append(int(np.prod([sizes[name] for name in axis.split("*")])))
    return array.reshape(shape)


def test_the_usual_layouts_are_tried_first():
    """Padded rows, then tokens; heads flat, as projections leave them, or first, as kernels and llama.cpp have them."""
    spelled = lambda text: [tuple(order.split()) for order in text.split(", ")]
    assert [*layouts(("X", "D"))] == spelled("B T D, X D, 1 X D, B*T D")
    rows, first = "B T N H, X N H, 1 X N H, B*T N H", "B N T H, N X H, 1 N X H, N B*T H"
    assert [*layouts(("X", "N", "H"))] == spelled(f"{rows}, B T N*H, X N*H, 1 X N*H, B*T N*H, {first}")
    free = "B T K J, X K J, 1 X K J, B*T K J, B K T J, K X J, 1 K X J, K B*T J"
    assert [*layouts(("X", "K", "J"))] == spelled(free)
    of_one = "B T 1 I, X 1 I, 1 X 1 I, B*T 1 I, B 1 T I, 1 X I, 1 1 X I, 1 B*T I"
    assert [*layouts(("X", "I"))] == spelled(f"B T I, X I, 1 X I, B*T I, {of_one}")


@given(st.data())
def test_every_layout_leads_back(data):
    """Tokens or heads first, flat heads, padded or in a row, divided over ranks: the same numbers in their places."""
    name = data.draw(
        st.sampled_from([f"layers.0.{kind}" for kind in LAYER_NAMES if kind not in ("blocks", "block_scores")])
    )
    found = quantity(name)
    lengths = data.draw(st.sampled_from([(11,), (13, 2), (1, 12, 4)]))
    is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]
    rows = Rows(is_token, np.argwhere(is_token))
    shape = [len(rows.places), *(SIZES[letter] for letter in found.axes[1:])]
    array = np.arange(np.prod(shape), dtype=float).reshape(shape)
    spelling = data.draw(st.sampled_from([*layouts(found.axes)]))
    lying = spelled(array, found.axes, spelling, rows, data.draw(st.integers(0, 2)))
    ranks = [lying]
    divided = next((letter for letter in "NKWE" if letter in found.axes), None)
    if divided is not None and data.draw(st.booleans()):
        axis = next(i for i, part in enumerate(spelling) if divided in part.split("*"))
        parts = SIZES[divided] if divided == "K" else 2
        ranks = [x.copy() for x in np.split(lying, parts, axis)]
        if divided == "K":  # more ranks than KV heads
            ranks = [x for x in ranks for _ in range(2)]
    back = aligned(found, ranks, rows, SIZES, axes=" ".join(spelling))
    assert back.shape == array.shape and (back == array).all(), (name, spelling, len(ranks))
    again = aligned(found, ranks, rows, SIZES)  # by shape alone: no two sizes here are equal
    assert (again == array).all(), (name, spelling, len(ranks))


def test_ranks_of_unequal_shapes_are_not_joined():
    rows = Rows(np.ones((1, 4), bool), np.argwhere(np.ones((1, 4))))
    whole = np.ones((4, SIZES["N"], SIZES["H"]))
    for ranks in ([whole[:, :3], whole[:, :4]], [whole[:, :3], whole], [whole, whole[:, :3]]):
        with pytest.raises(ValueError, match="on each of 2 ranks, which cannot be aligned with"):
            aligned(quantity("layers.0.q"), ranks, rows, SIZES)


# Margins


def chosen(scores: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest scores of each query; of equal ones the lower id."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :count], axis=-1)


@given(st.integers(0, 10_000), st.floats(0.0, 0.3))
def test_every_flip_that_roundings_make_is_inside(seed, size):
    """Scores that are off by no more than the tolerance flip selections inside the margin alone (T26)."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(40, 9)).round(1)  # with ties
    noisy = scores + draw.uniform(-size, size, scores.shape)
    flips = find_flips(chosen(scores, 3), chosen(noisy, 3), scores, 0.0, size + 1e-12)
    assert (flips.is_inside == flips.is_other).all(), flips.gap[flips.is_other]


@given(st.integers(0, 10_000))
def test_a_gap_is_what_scores_must_be_wrong_by(seed):
    """No smaller error of two scores gives a flipped selection: by search over all exchanges of a small case."""
    draw = np.random.default_rng(seed)
    scores, other = draw.normal(size=(1, 6)), np.sort(draw.permutation(6)[:3])[None]
    expected = chosen(scores, 3)
    flips = find_flips(expected, other, scores, 0.0, 0.0)
    pairs = itertools.product(set(expected[0]) - set(other[0]), set(other[0]) - set(expected[0]))
    needed = max((scores[0, lost] - scores[0, new] for lost, new in pairs), default=0.0)
    assert flips.gap[0] == needed and flips.is_other[0] == (set(expected[0]) != set(other[0]))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([0, 1, 2, 4], "a block more (T3)"),
        ([2, 4, -1, -1], "one too few (T23)"),
        ([0, 4, 4, -1], "an id twice (T4)"),
        ([0, 1, 2, -1], "the own block is not in (T3)"),
        ([0, 2, 7, -1], "a block that there is not"),
        ([2, 4, 5, -1], "a block behind the query"),
    ],
)
def test_no_tolerance_excuses_another_kind_of_set(found, why):
    """Only an exchange of scored blocks can be a rounding, however wide the tolerance."""
    scores = np.array([[0.5, 0.5, 0.5, 0.1, np.inf, -np.inf]])
    flips = find_flips(np.array([[0, 2, 4]]), np.array([found]), scores, 1.0, 10.0)
    assert flips.is_other[0] and not flips.is_inside[0], f"inside the margin although {why}"


def near_tie() -> tuple[dict, dict]:
    """Golden values, and those of an engine that chose the other of two blocks whose scores nearly tie."""
    right = golden(only=r"layers\.1\.(block_scores|blocks|attention|output)$|logits")
    wrong = {name: array.copy() for name, array in right.items()}
    blocks, scores = right["layers.1.blocks"], right["layers.1.block_scores"]
    kept, own = blocks[0, 0, 20], 5
    lost = min((m for m in kept if m != own), key=lambda m: scores[0, 0, 20, m])
    new = next(m for m in range(own) if m not in kept)
    scores[0, 0, 20, lost] = wrong["layers.1.block_scores"][0, 0, 20, lost] = scores[0, 0, 20, new] + 1e-5
    wrong["layers.1.blocks"][0, 0, 20] = sorted([m for m in kept if m != lost] + [new])
    wrong["layers.1.attention"][0, 20] += 1.0
    wrong["logits"][0, 20] += 3.0
    return right, wrong


def test_what_follows_a_flip_inside_the_margin_is_not_judged(tmp_path):
    """Of two near-equal blocks either is right, and so are the different numbers that follow at that token."""
    right, wrong = near_tie()
    a, b = written(tmp_path / "a.safetensors", right), written(tmp_path / "b.safetensors", wrong)
    report = compare_sides(a, b, config=TINY)
    assert report.beyond == [] and report.excused == 1 and report.layers[1].blocks == (176, 1, 0)
    assert report.logits.largest == pytest.approx(3.0), "the effect on logits is told all the same"
    wrong["layers.1.attention"][1, 7] += 1.0  # at a token that did not flip
    written(tmp_path / "b.safetensors", wrong)
    assert compare_sides(a, b, config=TINY).first.name == "layers.1.attention"


def test_a_flip_outside_the_margin_is_not_excused_by_one_inside(tmp_path):
    """At the same token, in the other KV head: the flip is a difference, and what follows there is judged."""
    right, wrong = near_tie()
    scores, blocks = right["layers.1.block_scores"][0, 1, 20], right["layers.1.blocks"][0, 1, 20]
    best = max((m for m in blocks if m != 5), key=lambda m: scores[m])
    worst = min((m for m in range(5) if m not in blocks), key=lambda m: scores[m])
    wrong["layers.1.blocks"][0, 1, 20] = sorted([m for m in blocks if m != best] + [worst])
    files = written(tmp_path / "a.safetensors", right), written(tmp_path / "b.safetensors", wrong)
    report = compare_sides(*files, config=TINY)
    assert report.layers[1].blocks == (176, 1, 1) and report.first.name == "layers.1.blocks"
    assert report.excused == 0, "a token with a wrong selection is not one that rounding explains"


# Tolerances and verdicts


def of_numbers(expected: np.ndarray, found: np.ndarray, **tolerances: float):
    """The report on one quantity [X D] of one prompt."""
    tokens = np.arange(len(expected))[None]
    make = lambda x: Source("x", {"layers.1.ffn_out": [x[None]], "tokens": [tokens]})
    sides = [side(make(x), None, None, {}) for x in (expected, found)]
    return compare(*sides, None, tolerances.get("rtol"), tolerances.get("atol"))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 50.0, 1e30])
def test_the_same_error_has_the_same_verdict_at_every_size(size):
    """An engine that agrees agrees where numbers are large, and one that does not is found where they are small."""
    draw = np.random.default_rng(0)
    right = draw.normal(size=(60, 128))
    noise = draw.normal(size=right.shape)
    found = [of_numbers(*((size * x).astype(np.float32) for x in (right, right + off * noise))) for off in (4e-6, 4e-4)]
    assert [report.verdict for report in found] == ["rounding", "differ"]


def test_huge_activations_of_one_token_do_not_hide_errors_at_others():
    """One token of 1000 times the size, as a model's first often is; the bug is at another one."""
    right = np.random.default_rng(0).normal(size=(60, 128)).astype(np.float32)
    right[0] *= 1000
    wrong = right.copy()
    wrong[0] *= 1 + 4e-6
    assert of_numbers(right, wrong).verdict == "rounding"
    wrong[7, 5] += 1e-3
    assert "position 7, dim 5" in of_numbers(right, wrong).first.what[1]


def test_a_number_that_happens_to_be_small_is_judged_by_the_size_of_the_others():
    """Of sums that nearly cancel, what is left has the error of what cancelled."""
    right = np.random.default_rng(0).normal(size=(60, 1)).astype(np.float32)
    right[3] = 1e-6
    assert of_numbers(right, right + np.float32(2e-6)).verdict == "rounding"


def test_verdicts_tell_rounding_from_more_that_a_tolerance_allows():
    right = np.random.default_rng(0).normal(size=(60, 128)).astype(np.float32)
    assert of_numbers(right, right).verdict == "equal"
    assert of_numbers(right, right * np.float32(1.01)).verdict == "differ"
    assert of_numbers(right, right * np.float32(1.01), rtol=0.02).verdict == "within tolerance"
    assert of_numbers(right, right * np.float32(1 + 1e-6), rtol=0.0, atol=0.0).verdict == "differ"
    rounded = right.astype(ml_dtypes.bfloat16)
    assert of_numbers(right, rounded).verdict == "rounding"
    assert of_numbers(right, rounded.astype(np.float32)).verdict == "differ", "float32 files are held to float32"
    assert of_numbers(right, (1.06 * right).astype(ml_dtypes.bfloat16)).verdict == "within tolerance"


def test_a_relative_error_is_of_the_numbers_that_are_finite():
    of = lambda one, other: of_numbers(np.array([one]), np.array([other])).errors["layers.1.ffn_out"]
    assert of([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.1)
    assert of([3.0, 4.0, np.inf], [3.0, 4.5, np.inf]) == pytest.approx(0.1)
    assert of([3.0, 4.0], [3.0, np.nan]) == np.inf and of([0.0], [0.0]) == 0.0 and of([0.0], [1e-9]) == np.inf


@pytest.mark.parametrize("size", [1.0, 1e150])
def test_an_infinity_agrees_with_itself_alone(size):
    """Whatever the tolerance, and where numbers are so large that a tolerance overflows."""
    right = size * np.random.default_rng(0).normal(size=(8, 4))
    right[2, 1] = np.inf
    assert of_numbers(right, right, rtol=0.0, atol=0.0).verdict == "equal"
    for wrong in (-np.inf, np.nan, 1.0):
        other = right.copy()
        other[2, 1] = wrong
        assert of_numbers(right, other, rtol=1e100, atol=1e300).verdict == "differ"
        assert of_numbers(other, right, rtol=1e100, atol=1e300).verdict == "differ"


def test_the_margin_of_a_flip_grows_with_the_scores(tmp_path):
    """Scores of a thousand times the size may be a thousand times as far apart, and small ones only as little.

    The score of the token's own block counts among them, though it is kept whatever it is.
    """
    right, wrong = near_tie()
    for times, gap, of_own, is_inside in (
        (1000.0, 1e-2, None, True), (1e-3, 1e-5, None, False), (1.0, 1e-2, None, False), (1.0, 1e-2, 1e6, True)
    ):  # fmt: skip
        a, b = dict(right), dict(wrong)
        kept, other = (set(x["layers.1.blocks"][0, 0, 20].tolist()) for x in (right, wrong))
        ((lost,), (new,)) = kept - other, other - kept
        scores = np.float32(times) * right["layers.1.block_scores"]
        scores[0, 0, 20, lost] = scores[0, 0, 20, new] + gap
        scores[0, 0, 20, 5] = scores[0, 0, 20, 5] if of_own is None else of_own
        a["layers.1.block_scores"] = b["layers.1.block_scores"] = scores
        files = written(tmp_path / "a.safetensors", a), written(tmp_path / "b.safetensors", b)
        report = compare_sides(*files, config=TINY)
        assert (report.layers[1].blocks == (176, 1, 0)) == is_inside, report.layers[1]


# Names and whole dumps of other engines


def as_vllm(values: dict[str, np.ndarray], ranks: int) -> list[dict[str, np.ndarray]]:
    """The values of a live m3jax model as vLLM's modules have them on each rank: fused, flat, heads divided."""
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    out: list[dict[str, np.ndarray]] = [{} for _ in range(ranks)]
    part = lambda x, rank, axis=-1: np.array_split(x, ranks, axis)[rank]
    for rank, own in enumerate(out):
        own |= {"language_model.model.embed_tokens": flat(values["embedding"]), "tokens": flat(values["tokens"])}
        own |= {"language_model.model.norm.0": flat(values["final_norm"])}
        own |= {"language_model.lm_head": part(flat(values["logits"]), rank)}  # a slice of the vocabulary
        for layer in range(3):
            v = {name.removeprefix(f"layers.{layer}."): flat(x) for name, x in values.items() if f"s.{layer}." in name
                 and "block" not in name}  # fmt: skip
            is_sparse, at = "index_q" in v, f"language_model.model.layers.{layer}."
            mlp = at + ("block_sparse_moe." if is_sparse else "mlp.")
            heads = [part(v[name], rank, 1).reshape(88, -1) for name in ("q_proj", "k_proj", "v")]
            if is_sparse:
                heads += [part(v["index_q_proj"], rank, 1).reshape(88, -1), v["index_k_proj"]]
                blocks = np.concatenate(np.moveaxis(values[f"layers.{layer}.blocks"], 1, 2))  # [X K J]
                own[at + "self_attn.indexer"] = part(blocks.swapaxes(0, 1), rank, 0)  # [K X J]
                own[mlp + "gate.0"] = v["router_logits"]
            own[at + "self_attn.qkv_proj.0"] = np.concatenate(heads, -1)
            own[at + "self_attn.attn"] = part(v["attention"], rank, 1).reshape(88, -1)
            own[at + "self_attn.attn.input.0"] = part(v["q"], rank, 1).reshape(88, -1)
            own[at + "input_layernorm.0"], own[at + "input_layernorm.1"] = v["attention_norm"], v["input"]
            own[at + "0"] = v["ffn_out"]
            up = mlp + ("shared_experts." if is_sparse else "")
            own[up + "gate_up_proj.0"] = np.concatenate([part(v["gate"], rank), part(v["up"], rank)], -1)
    return out


@pytest.fixture(scope="module")
def live():
    """All values of the tiny model on the golden prompts, as the tool's live side gives them."""
    from m3jax.compare.live import run_m3jax

    source = run_m3jax("live", str(TINY), golden(only="^$")["tokens"].tolist(), "float32", None)
    return {name: ranks[0] for name, ranks in source.arrays.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vllms_dump_is_read_whole(ranks, live, tmp_path):
    """Fused projections, two streams, heads of each rank, more ranks than KV heads: every quantity is compared."""
    if ranks == 4:  # two KV heads: ranks 0 and 1 have the first one
        dumps = as_vllm(live, 2)
        fused = "language_model.model.layers.1.self_attn.attn"
        halves = [np.split(dump[fused].reshape(88, 2, 16), 2, 1) for dump in dumps]
        dumps = [{fused: half.reshape(88, -1), "tokens": dumps[0]["tokens"]} for pair in halves for half in pair]
        key = "language_model.model.layers.1.self_attn.indexer"
        for rank, dump in enumerate(dumps):
            dump[key] = as_vllm(live, 2)[rank // 2][key]
    else:
        dumps = as_vllm(live, ranks)
    for rank, dump in enumerate(dumps):
        written(tmp_path / "dump" / f"rank{rank}.safetensors", dump)
    tokens = [row.tolist() for row in live["tokens"]]
    report = compare_sides(f"m3jax:{TINY}", str(tmp_path / "dump"), tokens)
    assert report.beyond == [] and report.unknown == ((), ()), report
    expected = {1: 41, 2: 41, 4: 2}[ranks]
    assert len(report.compared) == expected, report.compared
    if ranks == 2:
        dumps[1]["language_model.model.layers.2.self_attn.qkv_proj.0"][5, 48:64] *= -1  # v of the second KV head
        written(tmp_path / "dump" / "rank1.safetensors", dumps[1])
        first = compare_sides(f"m3jax:{TINY}", str(tmp_path / "dump"), tokens).first
        assert first.name == "layers.2.v" and "position 5, KV head 1" in first.what[1], first


def test_each_engines_names_are_told_apart():
    """The table that knows most names is used: `layers.0.0` is a layer's output for one engine, not for another."""
    stem = "model.layers.3."
    found = meanings([stem + "0", stem + "1", stem + "self_attn.qkv_proj.0"])
    assert [found[stem + tail].names for tail in ("0", "1")] == [("layers.3.ffn_out",), ("layers.3.ffn_input",)]
    assert len(found[stem + "self_attn.qkv_proj.0"].names) == 5
    found = meanings([stem + "0", stem + "mlp.gate.2", "model.vision_tower.layers.3.self_attn.q_proj"])
    assert found[stem + "0"].names == ("layers.3.output",) and found[stem + "mlp.gate.2"].names == (
        "layers.3.expert_ids",
    )
    assert len(found) == 2
    found = meanings([stem + "mlp.topk.1", stem + "self_attn.index_qkv_proj.0", stem + "mlp"])
    assert found[stem + "self_attn.index_qkv_proj.0"].names == ("layers.3.index_q_proj", "layers.3.index_k_proj")


def test_a_table_of_names_goes_from_modules_to_quantities():
    """Each row of each engine's table: its second column are quantities of this package, its third their axes."""
    for engine, rows in TABLES.items():
        assert len({module for module, *_ in rows}) == len(rows), engine
        for module, kinds, *axes in rows:
            where = "layers.0." if re.search(r"(\.|-)N(\.|$)", module) else ""
            meant = [quantity(where + kind) for kind in kinds.split()]
            assert all(meant) and quantity(module.replace("N", "0")) in (None, *meant), (engine, module, kinds)
            for letters in axes:
                parts = set(letters.split())
                assert set(meant[0].axes) - {"X"} <= parts <= set(meant[0].axes) | {"B", "T"}, (engine, module, letters)


def test_the_map_of_the_page_is_read(tmp_path):
    """docs/compare.md's map names another engine's tensors, gives the axes of one and leaves one out."""
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "names.json").write_text(names)
    right = golden(only=r"layers\.\d\.(output|blocks)$|logits")
    flat = lambda name: right[name].reshape(88, -1)
    theirs = {"tokens": flat("tokens")[:, 0], "head": flat("logits"), "scratch": np.zeros(3)}
    for layer in range(3):
        theirs[f"hidden_{layer}"] = flat(f"layers.{layer}.output")
        if layer:
            blocks = right[f"layers.{layer}.blocks"].transpose(1, 0, 2, 3)  # [B K T J] -> [K B T J]
            theirs[f"top_{layer}"] = blocks.reshape(2, 88, -1)
    np.savez(tmp_path / "theirs.npz", **theirs)
    tokens = [row.tolist() for row in right["tokens"]]
    report = compare_sides(str(VECTORS), str(tmp_path / "theirs.npz"), tokens, names=tmp_path / "names.json")
    assert report.beyond == [] and len(report.compared) == 6, report


def test_bfloat16_survives_npz(tmp_path):
    """numpy forgets what two bytes meant; the tool takes them for bfloat16, and its tolerance with them."""
    right = golden(only="output$|logits")
    kept = {name: x.astype(ml_dtypes.bfloat16) if x.dtype.kind == "f" else x for name, x in right.items()}
    np.savez(tmp_path / "b.npz", **kept)
    report = compare_sides(str(VECTORS), str(tmp_path / "b.npz"))
    assert report.dtypes == ("float64", "bfloat16") and report.beyond == []
    assert 1e-4 < report.errors["logits"] < 2**-8


def test_some_tokens_alone_are_compared_with_theirs(tmp_path):
    """A decode instance's tokens by their positions, padding among them, and logits of each prompt's last token."""
    right = golden(only=r"layers\.\d\.(q|output)$")
    some = {name: x[:, 30:] for name, x in right.items()}
    some["positions"] = np.tile(np.arange(30, 44), (2, 1))
    some["positions"][1, 9:] = -1
    for name in ("layers.0.q", "layers.2.output"):
        some[name] = some[name].copy()
        some[name][1, 9:] = np.nan  # padding may be anything
    report = compare_sides(str(VECTORS), written(tmp_path / "some.safetensors", some))
    assert report.beyond == [] and report.tokens == 23
    last = golden(only="^$") | {"logits": golden(only="logits")["logits"][:, -1]}
    last["lengths"] = np.array([44, 44])
    report = compare_sides(str(VECTORS), written(tmp_path / "last.safetensors", last))
    assert report.beyond == [] and report.logits.count == 2
    last["logits"] = last["logits"][::-1]
    report = compare_sides(str(VECTORS), written(tmp_path / "last.safetensors", last))
    assert report.first.name == "logits" and "prompt 1, position 43" in report.first.what[0]


def test_a_tie_of_axes_is_told(tmp_path):
    """As many tokens as KV heads: a buffer whose axes are swapped has the right shape, and the report says it (T7)."""
    blocks = np.array([[[0, 1], [0, 2]], [[1, 2], [0, 1]]])  # [T K J]
    make = lambda x: Source("x", {"layers.1.blocks": [x[None]], "tokens": [np.array([[1, 2]])]}, CONFIG)
    sides = [side(make(x), CONFIG, None, {}) for x in (blocks.swapaxes(0, 1), blocks)]
    report = compare(*sides, CONFIG, None, None)
    assert "heads and tokens" in report.first.kind
