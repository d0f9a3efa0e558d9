"""The two sides of a comparison: which tokens a dump has, how its files are read, and which places both sides share."""

import io
import zipfile

import ml_dtypes
import numpy as np
import pytest
from support import tiny

from m3jax.compare.dumps import read_dump
from m3jax.compare.pairs import Pair
from m3jax.compare.sides import Source, prompts_in, side

CONFIG = tiny.config("dMM", hidden_size=12, dense_intermediate_size=24)


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
    def of(*kinds):
        arrays = {f"layers.{number}.output": [np.ones((1, 12), kind)] for number, kind in enumerate(kinds)}
        return side(Source("x", arrays | {"tokens": [np.array([1])]}), CONFIG, None, {}).dtype

    assert (of("f8"), of("f8", "f4"), of("f4", "f2")) == ("float64", "float32", "bfloat16")
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
