"""Each part of a comparison by its definition: what a difference looks like, which tokens a dump has, what is drawn."""

import contextlib
import io
import re
import sys
import warnings
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from m3jax.compare import __main__ as entry
from m3jax.compare import live, pairs, report, running
from m3jax.compare.dumps import read_dump
from m3jax.compare.flips import find_flips
from m3jax.compare.hints import are_float8, hint
from m3jax.compare.names import TABLES, Meaning, _by_table
from m3jax.compare.pairs import Pair, are_close
from m3jax.compare.quantities import quantity
from m3jax.compare.report import Difference, Layer, Report, compare
from m3jax.compare.sides import Source, _narrowest, prompts_in, side
from m3jax.compare.text import _names

CONFIG = tiny.config("dMM", hidden_size=12, dense_intermediate_size=24)
LENGTHS = (27, 13)
T = sum(LENGTHS)
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])
DRAW = np.random.default_rng(5)
STREAM = DRAW.normal(size=(T, 12))
HEADS = DRAW.normal(size=(T, 8, 16))


def side_of(arrays, config=CONFIG, lengths=LENGTHS):
    ids = {"tokens": [np.zeros(sum(lengths), np.int32)], "lengths": [np.array(lengths)]}
    axes = {"blocks": "X K J", "block_scores": "X K M"}
    by_name = {name: Meaning((name,), axes[kind]) for name in arrays if (kind := name.split(".")[-1]) in axes}
    return side(Source("a test", {name: [x] for name, x in arrays.items()} | ids), config, None, by_name)


def said(name, expected, actual, config=CONFIG, lengths=LENGTHS, both=None, mine=None) -> str | None:
    """The hint for a quantity of two sides, which have `both` besides; the reference alone has `mine`."""
    sides = [side_of({name: x, **(both or {}), **more}, config, lengths) for x, more in
             ((expected, mine or {}), (actual, {}))]  # fmt: skip
    return hint(Pair(*sides, config), quantity(name))


def changed(x, index, value):
    x = x.copy()
    x[index] = value
    return x


def shifted(x, by):
    """Each token has what the token `by` before it has; what has none before it has other numbers."""
    out = x[::-1].copy()
    begin = 0
    for length in LENGTHS:
        part = x[begin : begin + length]
        out[begin:][max(by, 0) : length + min(by, 0)] = part[max(-by, 0) : length - max(by, 0)]
        begin += length
    return out


def turned(x, lengths=1.0):
    """Vectors of these lengths in other directions."""
    other = DRAW.permutation(x.reshape(-1)).reshape(x.shape)
    norm = lambda x: np.linalg.norm(x, axis=-1, keepdims=True)
    return other / norm(other) * norm(x) * lengths


FLOAT8 = STREAM.astype(ml_dtypes.float8_e4m3fn).astype(float)
SHARED = "all of it is {0} times the reference's, as if summed once more over {0} devices (T52)"
FACTORS = "every dim that RoPE leaves alone has a factor of its own: another weight of the norm, or w for 1 + w"
LENGTHS_AGREE = "every vector has its length and another direction: RoPE (pairs, theta, rotated width or positions)"
OTHER_FACTORS = np.concatenate([turned(HEADS)[..., :8] * 3, HEADS[..., 8:] * DRAW.uniform(0.5, 2, 8)], axis=-1)
NUMBERS = {
    "twice": ("ffn_out", STREAM, 2 * STREAM, SHARED.format(2)),
    "thrice": ("attention_out", STREAM, 3.0005 * STREAM, SHARED.format(3)),
    "no whole number": ("ffn_out", STREAM, 2.002 * STREAM, "all of it is 2.002 times the reference's"),
    "no sum of devices": ("input", STREAM, 2 * STREAM, "all of it is 2 times the reference's"),
    "half": ("ffn_out", STREAM, 0.5 * STREAM, "all of it is 0.5 times the reference's"),
    "minus": ("ffn_out", STREAM, -STREAM, "all of it is -1 times the reference's"),
    "hardly": ("ffn_out", STREAM, 1.0009 * STREAM, None),
    "nearly nothing": ("ffn_out", STREAM, 0.0009 * STREAM, None),
    "nothing to scale": ("ffn_out", np.zeros((T, 12)), STREAM, None),
    "NaN": ("ffn_out", changed(STREAM, 0, np.nan), changed(STREAM, (slice(0, 4), 3), np.nan), "3 numbers are NaN"),
    "zeros": ("ffn_out", changed(STREAM, 30, 0.0), changed(STREAM, [4, 8, 30], 0.0),
              f"0 at 2 of {T} tokens, the first at prompt 1, position 4"),
    "zeros of the second": ("ffn_out", STREAM, changed(STREAM, 29, 0.0), f"0 at 1 of {T} tokens, the first at prompt "
                            "2, position 2"),
    "one late": ("ffn_out", STREAM, shifted(STREAM, 1), "each token has what the one before it should have: off by "
                 "one"),
    "one early": ("ffn_out", STREAM, shifted(STREAM, -1), "each token has what the one after it should have: off by "
                  "one"),
    "two late": ("ffn_out", STREAM, shifted(STREAM, 2), None),
    "float8": ("ffn_out", STREAM, FLOAT8, "every number of it is one of float8_e4m3fn, times a power of two at most "
               "(T26)"),
    "float8 on both sides": ("ffn_out", FLOAT8, FLOAT8[::-1], None),
    "directions": ("q", HEADS, turned(HEADS), LENGTHS_AGREE),
    "lengths within 1%": ("k_proj", HEADS[:, :4], turned(HEADS[:, :4], 1.009), None),
    "directions, not quite": ("index_q", HEADS[:, :4], turned(HEADS[:, :4], 1.009), LENGTHS_AGREE),
    "lengths too": ("q", HEADS, turned(HEADS, 1.015), None),
    "a factor a dim": ("q", HEADS, OTHER_FACTORS, FACTORS),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_what_numbers_look_like(case):
    kind, expected, actual, sentence = NUMBERS[case]
    config = tiny.config("dMM", index_head_dim=16) if kind == "index_q" else CONFIG
    assert said(f"layers.1.{kind}", expected, actual, config) == sentence


def test_parts_that_are_taken_for_each_other():
    """Gate for up and k for v, either way, where both sides have the other one."""
    gate, up = DRAW.normal(size=(2, T, 24))
    for kind, other, x in (("gate", "up", up), ("up", "gate", gate)):
        right = {"gate": gate, "up": up}
        found = said(f"layers.0.{kind}", right[kind], x, both={f"layers.0.{other}": x})
        assert found == f"the reference's {other}: the parts of a fused projection are taken for each other"
    k, v = DRAW.normal(size=(2, T, 4, 16))
    for kind, other, own, x in (("k", "v", k, v), ("v", "k", v, k)):
        found = said(f"layers.1.{kind}", own, x, both={f"layers.1.{other}": x})
        assert found == f"the reference's {other}: the parts of a fused projection are taken for each other"
    assert said("layers.1.v", v, k) is None


def unit(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)


@pytest.mark.parametrize("name", ["layers.1.attention_norm", "layers.1.ffn_norm", "sum", "final_norm"])
def test_the_weight_of_a_norm(name):
    """Where the reference has what is normed: of the last norm the last layer's output, of the second also a sum."""
    weight = 0.3 * DRAW.normal(size=12)
    mine = {
        "layers.1.attention_norm": {"layers.1.input": STREAM}, "layers.1.ffn_norm": {"layers.1.ffn_input": STREAM},
        "sum": {"layers.1.input": STREAM - 0.25, "layers.1.attention_out": np.full((T, 12), 0.25)},
        "final_norm": {"layers.2.output": STREAM, "layers.1.output": STREAM[::-1]},
    }[name]  # fmt: skip
    name = "layers.1.ffn_norm" if name == "sum" else name
    right = unit(STREAM) * (1 + weight)
    twice, plain = unit(STREAM) * (2 + weight), unit(STREAM) * weight
    assert said(name, right, twice, mine=mine) == "1 is added to the norm's weight twice, 1 + (1 + w) (T47)"
    assert said(name, right, plain, mine=mine) == "the norm multiplies with w in the place of 1 + w (T47)"
    assert said(name, right, twice) is None and said(name, right, unit(STREAM) * (3 + weight), mine=mine) is None


def test_a_matrix_is_solved_for_where_there_are_tokens_enough():
    """Eight more than it has inputs; numbers that are none on either side say nothing, and stop nothing."""
    gate, up = DRAW.normal(size=(2, T, 24))
    down, alpha, limit = DRAW.normal(size=(24, 12)), CONFIG.swiglu_alpha, CONFIG.swiglu_limit
    act = lambda gate, up, one=1.0: (np.clip(up, -limit, limit) + one) * np.minimum(gate, limit) / (
        1 + np.exp(-alpha * np.minimum(gate, limit))
    )  # fmt: skip
    wanted = "SwiGLU with up in the place of up + 1 (T42)"
    for count, sentence in ((32, wanted), (31, None)):
        g, u = gate[:count], up[:count]
        parts = {"layers.0.gate": g, "layers.0.up": u}
        found = said("layers.0.ffn_out", act(g, u) @ down, act(g, u, 0.0) @ down, lengths=(count,), mine=parts)
        assert found == sentence, count
    parts = {"layers.0.gate": gate, "layers.0.up": up}
    right, wrong = act(gate, up) @ down, act(gate, up, 0.0) @ down
    assert said("layers.0.ffn_out", right, wrong, mine=parts) == wanted
    assert said("layers.0.ffn_out", right, wrong, mine={"layers.0.gate": gate}) is None
    # What no matrix explains is a ten-thousandth at most; tokens more than inputs leave room for it.
    x, rest = act(gate, up), DRAW.normal(size=right.shape)
    rest -= x @ np.linalg.lstsq(x, rest, rcond=None)[0]
    rest *= np.linalg.norm(right) / np.linalg.norm(rest)
    for share, found in ((0.9e-4, wanted), (1.1e-4, None)):
        assert said("layers.0.ffn_out", right + share * rest, wrong, mine=parts) == found
    for value in (np.nan, np.inf):
        assert said("layers.0.ffn_out", changed(right, (3, 5), value), wrong, mine=parts) is None
        broken = parts | {"layers.0.up": changed(up, (3, 5), np.nan)}
        assert said("layers.0.ffn_out", right, wrong, mine=broken) is None


# Selections, scores, attention and taps

BLOCKS = np.sort(DRAW.permuted(np.tile(np.arange(6), (T, 4, 1)), axis=-1)[..., :3], axis=-1)  # [X K J]


def grouped(x, step):
    """Each token has the selection of the first one of its group of a step."""
    return x[np.arange(T) - POSITIONS % step]


@pytest.mark.parametrize(
    ("actual", "both", "sentence"),
    [
        (np.broadcast_to(BLOCKS[:, :1], BLOCKS.shape).copy(), None, "every KV head has the same selection (T1)"),
        (BLOCKS[::-1], {"layers.1.blocks": BLOCKS[::-1]}, "the selection of layer 1 (T25)"),
        (BLOCKS[::-1], {"layers.3.blocks": BLOCKS[::-1]}, "the selection of layer 3 (T25)"),
        (BLOCKS[::-1], {"layers.0.blocks": BLOCKS[::-1]}, None),
        *[(grouped(BLOCKS, n), None, f"every {n} tokens share the selection of the first of them (T19)")
          for n in (2, 3, 16)],
        (grouped(BLOCKS, 17), None, None),
        (np.concatenate([part.reshape(4, -1, 3).swapaxes(0, 1) for part in (BLOCKS[:27], BLOCKS[27:])]), None,
         "the axes of heads and tokens are taken for each other (T7)"),
        (BLOCKS.swapaxes(0, 1).reshape(BLOCKS.shape), None,
         "the axes of heads and tokens are taken for each other (T7)"),
    ],
)  # fmt: skip
def test_what_a_selection_looks_like(actual, both, sentence):
    """A buffer whose axes are taken for each other is turned back, of one prompt or of all."""
    assert said("layers.2.blocks", BLOCKS, actual, both=both) == sentence


def scores_of():
    scores = DRAW.normal(size=(T, 4, 4))
    return np.where(np.arange(4) <= (POSITIONS // 8)[:, None, None], scores, -np.inf)


def test_what_block_scores_look_like():
    """Blocks without index keys, by their first and last; scores that differ in queries' own blocks alone."""
    right = scores_of()
    name, seen = "layers.1.block_scores", lambda x: np.where(np.isneginf(right), -np.inf, x)
    none = lambda *blocks: seen(np.where(np.isin(np.arange(4), blocks), 0.0, right))
    for blocks, words in (((1,), "block 1"), ((0, 1, 2), "blocks 0 to 2"), ((0, 2), "blocks 0, 2")):
        sentence = f"the score is 0 for every query in {words}: no index keys are there (T16)"
        assert said(name, right, none(*blocks)) == sentence
    is_own = np.arange(4) == (POSITIONS // 8)[:, None, None]
    behind = seen(np.where(is_own, right + 0.5, right))
    sentence = "only queries' own blocks score otherwise: tokens behind the query speak in them (T2)"
    assert said(name, right, behind) == sentence
    rounded = seen(right * (1 + 9e-4))  # what rounding makes of the others is no difference
    assert said(name, right, np.where(is_own, behind, rounded)) == sentence
    assert said(name, right, seen(right * (1 + 2e-3))) != sentence
    zero = changed(right, (20, 1, 0), 0.0)  # of which a share is nothing: a millionth is
    for near, found in ((0.9e-6, sentence), (1.1e-6, None)):
        assert said(name, zero, changed(np.where(is_own, behind, zero), (20, 1, 0), near)) == found
    assert said(name, right, changed(behind, (20, 1, 0), 9.0)) is None


def test_tokens_that_end_a_block_agree_where_the_mask_is_missing():
    right = DRAW.normal(size=(T, 8, 16))
    is_last = (POSITIONS + 1) % CONFIG.index_block_size == 0
    off = np.where(is_last[:, None, None], right, right + 0.1)
    sentence = "no mask behind a row's last token (T10): tokens that end a block agree, others do not"
    assert said("layers.1.attention", right, off) == sentence
    assert said("layers.1.attention", right, np.where(is_last[:, None, None], right * (1 + 9e-4), off)) == sentence
    assert said("layers.1.attention", right, np.where(is_last[:, None, None], right * (1 + 2e-3), off)) is None
    assert said("layers.1.attention", right, off, config=None, lengths=LENGTHS) is None


def test_taps_are_named_by_the_layers_that_they_are_of():
    streams = {"embedding": DRAW.normal(size=(T, 12))}
    streams |= {f"layers.{layer}.output": DRAW.normal(size=(T, 12)) for layer in range(3)}
    of = lambda *numbers: np.stack([[*streams.values()][number] for number in numbers], axis=1)  # [X C D]
    found = said("taps", of(0, 2, 3), of(1, 2, 2), mine=streams)
    assert found == "the streams after [1, 2, 2] layers, the reference's those after [0, 2, 3]"
    assert said("taps", of(0, 2, 3), changed(of(0, 2, 3), (slice(None), 1), 9.0), mine=streams) is None


def test_four_significant_bits():
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    assert are_float8(numbers) and are_float8(numbers * 2.0**-40) and not are_float8(np.zeros(3))
    for wrong in (17.0, 1 + 1 / 16, 449.0):
        assert not are_float8(np.append(numbers, wrong))
    assert are_float8(np.append(numbers, [np.inf, 15.0, 18.0]))


@given(st.floats(1e-4, 0.5), st.floats(0.5, 2.0))
def test_closeness_is_a_share_of_the_norm(share, times):
    x = np.array([3.0, 4.0])
    assert are_close(x, x + np.array([0.0, 5.0 * share * times]), share) == (times <= 1 + 1e-12) or times == 1
    assert not are_close(x, np.array([3.0, np.inf]), share) and not are_close(x, x[:1], share)
    assert not are_close(np.array([3.0, np.inf]), x, share) and not are_close(np.array([3.0, np.nan]), x, share)


# Sides


def test_two_sides_are_of_the_same_tokens():
    """A token that differs is named, and so are sides of which one lacks some; where positions are known it may."""

    def of(ids, **more):
        source = Source("x", {"tokens": [np.array(ids)], "embedding": [np.ones((*np.shape(ids), 12))]} | more)
        return side(source, CONFIG, None, {})

    whole = of([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(ValueError, match="other tokens: at prompt 2, position 1 A has 5 and B has 9"):
        Pair(whole, of([[1, 2, 3], [4, 9, 6]]), CONFIG)
    with pytest.raises(ValueError, match="A has 6 tokens of 2 prompts, B 3 tokens of 1 prompts"):
        Pair(whole, of([[1, 2, 3]]), CONFIG)
    some = of([[2, 3], [5, 6]], positions=[np.array([[1, 2], [1, 2]])])
    for pair, column in ((Pair(whole, some, CONFIG), 0), (Pair(some, whole, CONFIG), 1)):
        assert pair.places.tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
        assert pair.index[:, column].tolist() == [1, 2, 4, 5] and pair.index[:, 1 - column].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="A has 4 tokens of 2 prompts, B 1 tokens"):
        Pair(some, of([[1]]), CONFIG)
    assert pair.where(2) == "prompt 2, position 1" and pair.has("embedding") and not pair.has("logits")


def places_of(**arrays) -> list[list[int]]:
    count = sum(len(x) for x in arrays.values() if x.ndim == 1)
    source = Source(
        "dump", {name: [x] for name, x in arrays.items()} | {"embedding": [np.ones((count, 8), np.float32)]}
    )
    return side(source, None, None, {}).places.tolist()


def test_a_position_that_is_not_above_the_one_before_begins_a_prompt():
    found = places_of(positions=np.array([3, 4, 0, 1, 2, 2, 7, 7]))
    assert found == [[0, 3], [0, 4], [1, 0], [1, 1], [1, 2], [2, 2], [2, 7], [3, 7]]


def test_padded_positions_are_no_tokens():
    positions = np.array([[0, 1, 2, -1], [5, 6, -1, -1]])
    source = Source("dump", {"positions": [positions], "embedding": [np.ones((2, 4, 8), np.float32)]})
    found = side(source, None, None, {})
    assert found.places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 5], [1, 6]] and found.has_some


def test_two_parts_of_one_width_are_cut_in_the_middle_without_a_configuration():
    """Three parts, parts of other axes and an odd number of columns need one."""
    name, ids = "model.layers.0.mlp.gate_up_proj", {"tokens": [np.array([1, 2, 3])]}
    fused = np.arange(24.0).reshape(3, 8).astype(np.float32)
    found = side(Source("dump", {name: [fused]} | ids), None, None, {}).values
    np.testing.assert_array_equal(found["layers.0.gate"].array, fused[:, :4])
    np.testing.assert_array_equal(found["layers.0.up"].array, fused[:, 4:])
    for wrong, array in ((name, fused[:, :7]), ("model.layers.0.self_attn.qkv_proj", fused)):
        with pytest.raises(ValueError, match=r"it holds \d quantities, and --config FOLDER says where to cut"):
            side(Source("dump", {wrong: [array]} | ids), None, None, {})


def test_prompts_of_a_dump():
    """By its lengths, in a row or padded; none where positions may leave some of their tokens out."""
    of = lambda **arrays: prompts_in(Source("dump", {name: [np.array(x)] for name, x in arrays.items()}))
    assert of(tokens=[5, 6, 7]) == [[5, 6, 7]] and of(embedding=[1.0]) is None
    assert of(input_ids=[5, 6, 7], lengths=[2, 1]) == [[5, 6], [7]]
    assert of(tokens=[[5, 6, 7], [8, 9, 0]]) == [[5, 6, 7], [8, 9, 0]]
    assert of(tokens=[[5, 6, 7], [8, 9, 0]], lengths=[3, 1]) == [[5, 6, 7], [8]]
    assert of(tokens=[[5, 6]], positions=[[0, 1]]) is None
    for wrong in ([4, 1], [-1, 2], [3]):
        with pytest.raises(ValueError, match=r"dump: lengths .* of tokens of shape \[2, 3\]"):
            of(tokens=[[5, 6, 7], [8, 9, 0]], lengths=wrong)


def test_the_narrowest_dtype_says_which_tolerance_holds():
    of = lambda *kinds: _narrowest([np.dtype(kind) for kind in kinds])
    assert (of("f8"), of("f8", "f4", "i1"), of("f4", "f2"), of("i8", "?"), of("c16", "u1")) == (
        "float64", "float32", "bfloat16", "float32", "float64"
    )  # fmt: skip
    assert of("f4", ml_dtypes.bfloat16) == of(ml_dtypes.float8_e4m3fn) == "bfloat16"


def test_npz_files_of_both_versions_are_read_and_no_other(tmp_path):
    """An array's header may be of version 1 or 2; what claims more than there is is refused unread."""
    array, name = np.arange(6, dtype=np.float32).reshape(2, 3), tmp_path / "x.npz"

    def written(version, value=array, cut=0):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, value, version=version, allow_pickle=False)
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("a.npy", stream.getvalue()[: len(stream.getvalue()) - cut])
        return read_dump(tmp_path)["a"].ranks[0]

    for version in ((1, 0), (2, 0)):
        np.testing.assert_array_equal(written(version), array, strict=True)
    brain = array.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(written((1, 0), brain.view("V2")), brain, strict=True)
    for arguments, reason in (
        (((3, 0),), r"has a header of version \(3, 0\)"), (((1, 0), array, 1), "24 bytes claimed, 23 there"),
        (((1, 0), array + 1j), "has dtype complex64, which are no real numbers"),
        (((1, 0), np.array(["ab"])), "which are no real numbers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            written(*arguments)


def test_ranks_of_one_name_are_put_in_their_order(tmp_path):
    """By the number behind rank or tp in a file's name; each from 0 on, once."""
    array = lambda n: np.full(2, n, np.float32)
    write = lambda folder, **files: [
        (folder.mkdir(exist_ok=True), np.savez(folder / f"{name.replace('_', '-')}.npz", a=array(n)))
        for name, n in files.items()
    ]
    write(tmp_path / "a", tp10=10, **{f"tp{n}": n for n in range(10)})
    assert [int(x[0]) for x in read_dump(tmp_path / "a")["a"].ranks] == [*range(11)]
    write(tmp_path / "b", dump_rank_1=1, dump_RANK0=0)
    assert [int(x[0]) for x in read_dump(tmp_path / "b")["a"].ranks] == [0, 1]
    write(tmp_path / "c", whole=5)
    assert [int(x[0]) for x in read_dump(tmp_path / "c")["a"].ranks] == [5]
    for folder, files, reason in (
        ("d", dict(rank0=0, other=1), "both have 'a'; call the files of ranks"),
        ("e", dict(rank0=0, tp0=1), "both have 'a'"),
        ("f", dict(rank0=0, rank2=1), r"'a' is there for ranks \[0, 2\], not for every one from 0 on"),
        ("g", dict(rank1=0, rank2=1), r"for ranks \[1, 2\]"),
    ):  # fmt: skip
        write(tmp_path / folder, **files)
        with pytest.raises(ValueError, match=reason):
            read_dump(tmp_path / folder)


# What is recomputed, with numpy in the place of a compiled definition


def dots(q, k):
    """Scores of blocks of 8: the largest product of a query and a key of the block that it sees."""
    q, k = np.asarray(q)[0], np.asarray(k)[0]  # [T K I], [T I]
    scores = np.full((q.shape[1], len(q), -(-len(k) // 8)), -np.inf)  # [K T M]
    for head, t, block in np.ndindex(scores.shape):
        seen = k[8 * block : min(8 * block + 8, t + 1)]
        scores[head, t, block] = max((q[t, head] @ key for key in seen), default=-np.inf)
    return scores


def test_scores_are_recomputed_prompt_by_prompt(monkeypatch, unchecked):
    """Of the reference first, stored or from its index queries and keys; of a side that lacks tokens there are none."""
    monkeypatch.setattr(pairs, "contiguous_index", lambda k, size: (np.asarray(k, np.float32), size))
    seen = []

    def walk_scores(q, index, positions, lengths, score):
        seen.append((np.asarray(positions)[0].tolist(), np.asarray(lengths).tolist(), score, index[1]))
        return [dots(q, index[0])]

    monkeypatch.setattr(pairs, "walk_scores", walk_scores)
    q, k = DRAW.normal(size=(T, 4, 20)).astype(np.float32), DRAW.normal(size=(T, 20)).astype(np.float32)
    parts = {"layers.1.index_q": q, "layers.1.index_k": k}
    expected = np.full((T, 4, 4), -np.inf)
    for begin, end in ((0, 27), (27, T)):
        found = dots(q[None, begin:end], k[None, begin:end])
        expected[begin:end, :, : found.shape[-1]] = found.swapaxes(0, 1)
    with_parts, other = side_of(parts), side_of({"layers.1.q": HEADS})
    for pair in (Pair(with_parts, other, CONFIG), Pair(other, with_parts, CONFIG)):
        np.testing.assert_array_equal(pair.block_scores(1), expected)
        assert pair.block_scores(2) is None
    score = CONFIG.index_score_type
    assert seen[:2] == [([*range(27)], [27], score, 8), ([*range(13)], [13], score, 8)]
    stored = scores_of()
    pair = Pair(side_of({"layers.1.block_scores": stored}), with_parts, CONFIG)
    np.testing.assert_array_equal(pair.block_scores(1), stored)
    rounded = pair.scores_of(pair.b, 1, in_float8=True)
    by_hand = dots(q[None, :27], k[None, :27].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).swapaxes(0, 1)
    np.testing.assert_array_equal(rounded[:27], by_hand)
    assert pair.scores_of(pair.a, 1) is None and Pair(with_parts, other, None).scores_of(with_parts, 1) is None
    places = np.stack([np.zeros(T, int), np.arange(T) + 1], axis=1)
    assert pair.scores_of(replace(with_parts, places=places), 1) is None  # its prompt does not begin at 0


def test_attention_is_recomputed_from_a_sides_own_parts(monkeypatch, unchecked):
    """Prompt by prompt, over all keys or chosen blocks; a prompt that is too long is left out with all others."""
    calls = []

    def noted(name):
        return lambda *given, **named: calls.append((name, given, named)) or [np.asarray(given[0])[0] * len(calls)]

    monkeypatch.setattr(pairs, "dense_attention", noted("dense"))
    monkeypatch.setattr(pairs, "sparse_attention", noted("sparse"))
    q, k, v = HEADS.astype(np.float32), HEADS[:, :4].astype(np.float32), HEADS[:, 4:].astype(np.float32)
    whole = side_of({"layers.1.q": q, "layers.1.k": k, "layers.1.v": v})
    pair = Pair(whole, whole, CONFIG)
    for blocks, name in ((None, "dense"), (BLOCKS, "sparse")):
        calls.clear()
        found = pair.attention_of(whole, 1, blocks)
        np.testing.assert_array_equal(found, np.concatenate([q[:27], 2 * q[27:]]))
        for (kind, handed, named), part in zip(calls, (slice(0, 27), slice(27, T)), strict=True):
            arrays, rest = handed[:3], list(handed[3:])
            for x, expected in zip(arrays, (q, k, v), strict=True):
                np.testing.assert_array_equal(np.asarray(x), expected[part][None])
            if blocks is not None:
                np.testing.assert_array_equal(np.asarray(rest.pop(0)), blocks[part].swapaxes(0, 1)[None])
            count = len(q[part])
            assert kind == name and [np.asarray(x).tolist() for x in rest] == [[[*range(count)]], [count]]
            assert named == ({} if blocks is None else {"block_size": 8})
    monkeypatch.setattr(pairs, "_MOST_TOKENS", 27)
    assert pair.attention_of(whole, 1, None) is not None and pair.attention_of(whole, 2, None) is None
    monkeypatch.setattr(pairs, "_MOST_TOKENS", 26)
    assert pair.attention_of(whole, 1, None) is None


# Reports


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


def test_weights_without_ids_are_compared_in_ascending_order():
    """With ids in their experts' order, and at tokens that have the same experts on both sides."""
    weights, ids = np.array([[0.2, 0.5], [0.1, 0.6]]), np.array([[7, 2], [1, 3]], np.int32)
    name, compared = "layers.1.expert_weights", quantity("layers.1.expert_weights")

    def by_expert(weights_of_b, ids_of_b=None):
        of_a, of_b = ({} if ids_of_b is None else {"layers.1.expert_ids": x} for x in (ids, ids_of_b))
        sides = side_of({name: weights} | of_a, lengths=(2,)), side_of({name: weights_of_b} | of_b, lengths=(2,))
        return [x.tolist() for x in report._by_expert(Pair(*sides, CONFIG), compared, weights, weights_of_b)]

    turned, ascending, by_id = weights[:, ::-1], [[0.2, 0.5], [0.1, 0.6]], [[0.5, 0.2], [0.1, 0.6]]
    assert by_expert(turned) == by_expert(weights) == [ascending, ascending, [True, True]]
    assert by_expert(turned, ids[:, ::-1]) == by_expert(weights, ids) == [by_id, by_id, [True, True]]
    assert by_expert(weights, np.array([[7, 2], [1, 4]], np.int32)) == [by_id, by_id, [True, False]]


def test_selections_of_different_widths_are_sets():
    """An unused slot is -1 and no part of a set, wherever it stands and however many there are."""
    narrow, wide = np.array([[2, 5], [3, 1], [4, -1]]), np.array([[5, -1, 2, -1], [1, 3, 0, -1], [-1, -1, -1, 4]])
    for one, other in ((narrow, wide), (wide, narrow)):
        assert find_flips(one, other, None, 0.0, 0.0).is_other.tolist() == [False, True, False]


def test_a_table_of_names_goes_from_modules_to_quantities():
    """Each row of each engine's table: its second column are quantities of this package, its third their axes."""
    for engine, rows in TABLES.items():
        assert len({module for module, *_ in rows}) == len(rows), engine
        for module, kinds, *axes in rows:
            where = "layers.0." if re.search(r"(\.|-)N(\.|$)", module) else ""
            meant = [quantity(where + kind) for kind in kinds.split()]
            assert all(meant) and quantity(module.replace("N", "0")) in (None, *meant), (engine, module, kinds)
            name = module.replace("N", "17")
            (meaning,) = _by_table([name], engine).values()
            assert meaning.names == tuple(f"layers.17.{kind}" if where else kind for kind in kinds.split()), engine
            for letters in axes:
                parts = set(letters.split())
                assert set(meant[0].axes) - {"X"} <= parts <= set(meant[0].axes) | {"B", "T"}, (engine, module, letters)


@pytest.mark.parametrize("has_bar", [True, False])
def test_transformers_says_nothing_and_then_what_it_said_before(has_bar, monkeypatch):
    """No warning, no bar and no message below an error, until the block ends or fails; then all as it was."""
    state = {"level": 30, "bar": has_bar}
    logging = SimpleNamespace(
        get_verbosity=lambda: state["level"], set_verbosity=lambda level: state.update(level=level),
        set_verbosity_error=lambda: state.update(level=40), is_progress_bar_enabled=lambda: state["bar"],
        disable_progress_bar=lambda: state.update(bar=False), enable_progress_bar=lambda: state.update(bar=True),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "transformers.utils", SimpleNamespace(logging=logging))
    with pytest.raises(KeyError), live._quiet():
        assert state == {"level": 40, "bar": False}
        warnings.warn("not shown", stacklevel=1)  # would be an error here
        raise KeyError
    assert state == {"level": 30, "bar": has_bar}


def softmax(x):
    return np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (1, 3), (2, 7), (3, 9), (4, 9)])
def test_the_effect_on_logits(seed, count, monkeypatch, unchecked):
    """Over chunks of three tokens: the largest difference and its place, the divergence, the most probable tokens."""
    draw = np.random.default_rng(seed)
    one, other = draw.normal(size=(2, count, 5)).round(1)
    places = np.stack([np.arange(count) % 2, np.arange(count)], axis=1)
    tokens = draw.permutation(count)
    pair = SimpleNamespace(arrays=lambda name: (one, other, tokens), places=places)
    monkeypatch.setattr(report, "_CHUNK", 3)
    found = report._logits(pair)
    broken = changed(other, (count - 1, 2), np.nan)
    pair.arrays = lambda name: (one, broken, tokens)
    at_nan = report._logits(pair)
    gap, p, q = np.abs(one - other).max(-1), softmax(one), softmax(other)
    kl = (p * np.log(p / q)).sum(-1)
    assert found.largest == gap.max() and found.place == tuple(places[tokens[gap.argmax()]])
    np.testing.assert_allclose((found.mean_kl, found.most_kl), (kl.mean(), kl.max()), atol=1e-12)
    assert (found.same, found.count) == ((one.argmax(-1) == other.argmax(-1)).sum(), count)
    assert at_nan.largest == np.inf and at_nan.place == tuple(places[tokens[count - 1]])


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
    np.testing.assert_allclose(report.magnitudes(x), expected, rtol=1e-12)
    np.testing.assert_allclose(report.magnitudes(x * 1e200), np.array(expected) * 1e200, rtol=1e-12)
    assert report.magnitudes(np.full((2, 3), np.inf)).tolist() == [0.0, 0.0]


def test_a_relative_error_is_of_the_numbers_that_are_finite():
    of = lambda one, other: report._relative_error(np.array(one), np.array(other))
    assert of([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.1)
    assert of([3.0, 4.0, np.inf], [3.0, 4.5, np.inf]) == pytest.approx(0.1)
    assert of([3.0, 4.0], [3.0, np.nan]) == np.inf and of([0.0], [0.0]) == 0.0 and of([0.0], [1e-9]) == np.inf


def test_long_lists_of_names_are_cut():
    assert _names(tuple("abcdef")) == "a, b, c, d, e, f" and _names(tuple("abcdefgh")) == "a, b, c, d, e, f and 2 more"
    assert _names(tuple("abcdefg")) == "a, b, c, d, e, f and 1 more"


def test_what_a_plot_shows():
    """Errors by layer without what is 0 or infinite, the first difference, and flips in bars side by side."""
    figure = pytest.importorskip("matplotlib.figure", reason="draws with matplotlib (pip install 'm3jax[compare]')")
    from m3jax.compare.page import _draw_errors, _draw_flips, _svg

    layers = {
        2: Layer({"attention": 0.5, "output": 0.0}, (200, 1, 4), None),
        3: Layer({"attention": 0.25, "output": float("inf")}, (50, 5, 0), (40, 0, 10)),
        7: Layer({"output": 0.125}),
    }
    first = Difference("layers.3.output", ("", ""), None)
    found = Report(("a", "b"), ("float32",) * 2, (0.1, 0.1, "float32"), 1, 1, layers=layers, first=first)
    errors, flips = figure.Figure().subplots(2, 1)
    _draw_errors(errors, found)
    _draw_flips(flips, found)
    lines = {line.get_label(): [list(map(float, x)) for x in line.get_data()] for line in errors.lines}
    assert lines == {
        "attention": [[2, 3], [0.5, 0.25]], "output": [[7], [0.125]], "first beyond: layers.3.output": [[3, 3], [0, 1]]
    }  # fmt: skip
    assert (errors.get_yscale(), errors.get_ylabel(), flips.get_ylabel()) == ("log", "relative error", "flipped, %")
    assert errors.xaxis.get_gridlines()[0].get_visible() and errors.get_legend() and flips.get_legend()
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
    assert len({bar.get_facecolor() for bar in flips.patches}) == 4
    svg = _svg(found)
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>") and "date" not in svg.lower()
    assert 'height="432pt"' in svg  # two plots of three inches each
    assert all(f"<!-- {words} -->" in svg for words in ("relative error", "flipped, %", "layer", "attention"))
    without = _svg(replace(found, layers={2: Layer({"attention": 0.5})}))
    assert 'height="252pt"' in without and "<!-- relative error -->" in without and "flipped" not in without


def test_what_a_comparison_reads_and_runs(monkeypatch, unchecked):
    """Dumps first: what they say of prompts and of the model holds for what runs live; each wait is named."""
    told, calls = [], []
    line = SimpleNamespace(
        say=told.append, timed=lambda text: told.append(f"({text})") or contextlib.nullcontext()
    )  # fmt: skip
    monkeypatch.setattr(running, "activity", lambda about: contextlib.nullcontext(line))
    ids = {"tokens": [np.array([[1, 2, 3]])]}
    monkeypatch.setattr(running, "from_files", lambda path: Source(path, ids if "with" in path else {}))
    run = lambda engine: lambda *given: calls.append((engine, *given)) or Source(given[0], {}, CONFIG)
    monkeypatch.setattr(running, "run_m3jax", run("ours"))
    monkeypatch.setattr(running, "run_transformers", run("theirs"))
    monkeypatch.setattr(running, "side", lambda source, config, lengths, user_map: (source.label, config, lengths))
    monkeypatch.setattr(running, "compare", lambda *given: given)
    compare_sides = running.compare_sides
    found = compare_sides("m3jax:folder", "with", dtype="float64", mesh="tensor=2", rtol=0.5)
    assert found == (("m3jax:folder", CONFIG, [3]), ("with", CONFIG, [3]), CONFIG, 0.5, None)
    assert calls == [("ours", "m3jax:folder", "folder", [[1, 2, 3]], "float64", "tensor=2")]
    assert told == [
        "reading m3jax:folder", "reading with", "(compiling and running m3jax:folder)",
        "(comparing m3jax:folder with with)",
    ]  # fmt: skip
    calls.clear()
    found = compare_sides("with", "transformers:other", [[7, 8], [9]], atol=0.25)
    assert found[0] == ("with", CONFIG, [2, 1]) and found[3:] == (None, 0.25)
    assert calls == [("theirs", "transformers:other", "other", [[7, 8], [9]], "float32")]
    with pytest.raises(ValueError, match=r"transformers:other: which prompts\? give --prompt-tokens"):
        compare_sides("none", "transformers:other")
    assert compare_sides("none", "with:out")[:2] == (("none", None, [3]), ("with:out", None, [3]))


def test_a_command_compares_what_it_was_asked_for(monkeypatch, unchecked):
    """What a page needs is checked first; the exit status says whether something is beyond what was allowed."""
    done = []
    note = lambda name, result=None: lambda *given, **named: done.append((name, given, named)) or result
    report = SimpleNamespace(beyond=[])
    monkeypatch.setattr(entry, "check_plots", note("plots"))
    monkeypatch.setattr(entry, "raise_interrupts", note("interrupts"))
    monkeypatch.setattr(entry, "write", note("write"))
    monkeypatch.setattr("m3jax.cli.settings.settings", lambda *given: contextlib.nullcontext(note("settings")(*given)))
    monkeypatch.setattr("m3jax.compare.running.compare_sides", note("compare", report))
    monkeypatch.setattr("m3jax.compare.text.lines_of", lambda found: ["one", "two"] if found is report else [])
    monkeypatch.setattr("m3jax.compare.page.write_html", note("html"))
    words = ["A", "B", "--prompt-tokens", "1,2", "--prompt-tokens", "3", "--rtol", "0.5", "--atol", "0.25", "--dtype",
             "bfloat16", "--mesh", "data=2", "--map", "names.json", "--config", "folder"]  # fmt: skip
    for more, beyond in (([], []), (["--html", "page.html"], ["something"])):
        done.clear()
        report.beyond[:] = beyond
        args = entry.parser().parse_args([*words, *more])
        assert entry.run(args) == len(beyond)
        compared = ("A", "B", [[1, 2], [3]]), dict(
            rtol=0.5, atol=0.25, names=args.map, config=args.config, dtype="bfloat16", mesh="data=2"
        )  # fmt: skip
        expected = [
            ("interrupts", (), {}), ("settings", (args, "m3jax.compare"), {}), ("compare", *compared),
            ("write", ("one\ntwo\n",), {}),
        ]  # fmt: skip
        if more:
            expected = [("plots", ("--html",), {}), *expected, ("html", (args.html, report), {})]
        assert done == expected
