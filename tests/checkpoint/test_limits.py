"""Limits of what is read, dtypes of what is stored, and what a device reads of a parameter, each at its edge."""

import json
from argparse import Namespace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import tiny, vision

from m3jax import make_mesh
from m3jax.checkpoint import loading, mxfp8, names, plan, reader, replacing, saving
from m3jax.checkpoint.draft import draft_config, load_draft
from m3jax.checkpoint.loading import _DeviceBuffer, _HostBuffer, _Parameter
from m3jax.checkpoint.names import Target
from m3jax.checkpoint.reader import CheckpointError, StoredTensor
from m3jax.checkpoint.values import _cast, _may_overflow, cut
from m3jax.files import json_file, pending, tensors


def test_limits_of_files():
    """Far above what checkpoints have, so that a hostile file costs little: 256 MiB of an index, 16 MiB of JSON."""
    assert (pending.MOST_INDEX_BYTES, pending.MOST_INDEX_ENTRIES) == (268_435_456, 4_000_000)
    assert saving._MOST_COPIED_BYTES == 268_435_456 and loading._HOST_BYTES == 16_777_216
    assert (json_file.MOST_BYTES, json_file.MOST_ITEMS, json_file.MOST_DEPTH) == (16_777_216, 100_000, 64)
    assert float(np.finfo(np.float32).max) == json_file.LARGEST and json_file._MOST_DIGITS == 60
    assert (tensors.MOST_HEADER_BYTES, tensors._MOST_AXES) == (100_000_000, 32)
    assert (plan._LISTED, mxfp8._CHUNK) == (100_000, 131_072)  # faults that are listed, elements decoded at once


def test_dtypes_that_are_read_and_written():
    """By the names of safetensors; bytes of an element."""
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I32": 4, "I64": 8}
    assert {code: dtype.itemsize for code, dtype in reader._DTYPES.items()} == sizes
    assert set(reader.INTEGERS) | set(reader.FLOATS) < set(sizes)
    assert plan._A_FLOAT == "BF16, F16, F32 or F64"
    assert set(reader.FLOATS) == {code for code, dtype in reader._DTYPES.items() if "float" in dtype.name}
    for code, dtype in tensors.DTYPES.items():
        assert tensors.dtype_code(dtype) == code
        name = str(dtype).replace("bool", "B1")
        bits = 8 * dtype.itemsize
        assert str(bits) in code or code == "BOOL" or "e4m3" in name or "e5m2" in name, code
    assert tensors.DTYPES["BF16"] == ml_dtypes.bfloat16 and tensors.DTYPES["F8_E4M3"] == ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("axes", [(), ("tensor",), (None, "tensor")])
def test_bytes_that_a_process_reads_of_a_parameter(unchecked, axes):
    """Each distinct shard once, however many devices hold it, whether it has one axis or three."""
    mesh = make_mesh(data=2, tensor=4)
    for shape in ((8,), (8, 4), (8, 4, 3)):
        target = Target("w", (), shape, tuple(range(len(shape))), 1)
        source = Namespace(weight=StoredTensor("w", Path("f"), "BF16", shape, 0, (0, 0, 0, 0)))
        sharding = NamedSharding(mesh, PartitionSpec(*axes[: len(shape)]))
        parameter = _Parameter(shape, np.dtype(np.float32), sharding, [(target, source)])
        assert parameter.stored_bytes == 2 * np.prod(shape), shape
        assert sum(len(devices) for devices in parameter.boxes.values()) == 8


def test_a_shard_is_put_together_of_its_pieces(monkeypatch, unchecked):
    """On the host and on its devices: each piece at its place, turned; a write ends when its devices have the piece."""
    pieces = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)  # [L E out in]
    devices, waited = jax.devices()[:2], []
    real_wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: waited.append(arrays) or real_wait(arrays))
    for buffer_type in (_HostBuffer, _DeviceBuffer):
        buffer = buffer_type(((4, 6), (0, 3), (10, 15), (0, 4)), devices, np.dtype(np.float32))
        for index in np.ndindex(2, 3):
            buffer.write(index, pieces[index], (1, 0))
            assert len(waited) == (buffer_type is _DeviceBuffer) * (1 + 3 * index[0] + index[1])
        arrays = buffer.arrays()
        assert [array.devices() for array in arrays] == [{device} for device in devices]
        for array in arrays:
            np.testing.assert_array_equal(array, pieces.swapaxes(2, 3))
    whole = _HostBuffer(((0, 5), (0, 4)), devices[:1], np.dtype(np.float32))
    whole.write((), pieces[0, 0], (1, 0))
    np.testing.assert_array_equal(whole.arrays()[0], pieces[0, 0].T)


def test_all_that_is_wrong_with_a_draft_is_in_the_notes():
    """The line has the first of many faults; --verbose prints the notes, which have all."""
    wrong = dict(
        hidden_size=0, vocab_size=-1, draft_vocab_size=0, num_attention_heads="8", num_key_value_heads=0, head_dim=True,
        intermediate_size=1.5, rms_norm_eps=-1, rope_theta=0, fc_norm=1, norm_output="yes", norm_before_residual=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="unsupported draft: ") as caught:
        draft_config(wrong, tiny.config("dM"), {})
    assert [note.partition(" = ")[0] for note in caught.value.__notes__] == list(wrong)
    missing = "hidden_size is missing; vocab_size is missing; num_attention_heads is missing; intermediate_size is mis"
    with pytest.raises(ValueError, match=f"^unsupported draft: {missing}"):
        draft_config({}, tiny.config("dM"), {})


def test_the_largest_value_that_a_dtype_holds():
    """A float64 may round to the largest float32 and no further; a scale of MXFP8 may reach the largest exponent."""
    largest = float(np.finfo(np.float32).max)
    found = _cast("w", np.array([largest, -largest, np.inf, np.nan]), np.dtype(np.float32))
    np.testing.assert_array_equal(found, np.array([largest, -largest, np.inf, np.nan], np.float32))
    with pytest.raises(ValueError, match=r"w: a value is beyond the range of float32, at most 3\.40"):
        _cast("w", np.array([1.01 * largest, np.inf]), np.dtype(np.float32))
    same = np.ones(2, np.float32)
    assert _cast("w", same, np.dtype(np.float32)) is same
    for dtype, exponent in ((np.float16, 16), (ml_dtypes.bfloat16, 128), (np.float32, 128), (np.float64, 128)):
        scales = lambda e: np.array([0, e + 127], np.uint8)
        assert not _may_overflow(scales(exponent - 9), np.dtype(dtype)), dtype
        assert _may_overflow(scales(exponent - 8), np.dtype(dtype)), dtype


def test_a_box_that_cuts_through_blocks_of_a_scale():
    """Each code has the scale of its own channel, wherever a device's part begins: value by value."""
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 120, (6, 96), np.uint8)
    scales = draw.integers(120, 134, (6, 3), np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (np.repeat(scales, 32, 1) - 127.0)
    for dims, perm, box in (
        ((6, 96), (1, 0), ((20, 70), (1, 5))),
        ((6, 4, 24), (1, 2, 0), ((1, 3), (5, 24), (0, 6))),  # as of o_proj: heads of 24 channels
    ):
        target = Target("w", (), dims, perm, 1)
        found = cut("w", target, codes, scales, box, np.dtype(np.float64))
        whole = values.reshape(dims)
        window = [slice(None)] * len(dims)
        for axis, (start, stop) in zip(perm, box, strict=True):
            window[axis] = slice(start, stop)
        np.testing.assert_array_equal(found, whole[tuple(window)])


def test_a_shard_s_name_is_that_of_a_file_beside_the_index():
    names = ["a" * 188 + ".safetensors", ".safetensors"]
    assert [reader._wrong_name(name) for name in names] == [None, None] and len(names[0]) == 200
    for name in ("", "a" + names[0], "a/b.safetensors", "a\\b.safetensors", "a:b.safetensors", "a\n.safetensors"):
        assert reader._wrong_name(name) == "a shard is the plain name of a file in the folder of the index", name
    assert reader._wrong_name("a.bin") == "a shard's name ends in .safetensors"


def test_an_error_of_a_checkpoint_counts_its_problems():
    assert str(CheckpointError("a", ["x"])).startswith("cannot load the checkpoint a: 1 problem\n  x")
    assert "a" * 160 in str(CheckpointError("a" * 160, ["x"])) and "a" * 160 not in str(
        CheckpointError("a" * 161, ["x"])
    )
    many = CheckpointError("a", [f"p{number}" for number in range(9)])
    assert "9 problems\n  p0" in str(many) and len(many.__notes__) == 9 == len(many.problems)


def test_of_a_lost_file_nothing_is_missing():
    """A scale or a weight in a file that cannot be read is not missed beside the other one; else each needs both."""
    config = tiny.config("d", hidden_size=64)
    name = next(name for name, target in names.targets(config).items() if target.quantizable)
    shape = names.targets(config)[name].hub_shape
    values = np.zeros((*shape[:-1], -(-shape[-1] // 32)), np.uint8)

    class Tensor(StoredTensor):
        def view(self):
            return values

    tensor = lambda name, dtype, shape: Tensor(name, Path("f"), dtype, shape, 0, (0, 0, 0, 0))
    weight, scale = tensor(name, "F8_E4M3", shape), tensor(names.scale_name(name), "U8", values.shape)
    faults = lambda tensors, lost: [
        problem
        for problem in plan._Match(config, reader.Folder({x.name: x for x in tensors}, lost=lost), (True, [])).problems
        if problem.startswith((f"{name}: ", f"{scale.name}: "))
    ]
    assert faults([weight, scale], set()) == faults([weight], {scale.name}) == faults([scale], {name}) == []
    assert faults([], {name}) == faults([], {name, scale.name}) == []
    for lost in (set(), {"another"}, {name}):
        expected = [f"{name}: F8_E4M3 without a scale, expected {scale.name}"]
        assert faults([weight], lost) == expected, lost
    for lost in (set(), {scale.name}):
        assert f"{scale.name}: a scale without its weight" in faults([scale], lost), lost


def test_files_of_weights_are_the_hub_s_and_those_that_the_index_lists(tmp_path):
    """Of the folder itself: no folder of such a name, no path elsewhere, and no other kind of file."""
    for name in ("model-00001-of-00002.safetensors", "other.safetensors", "mine.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.safetensors").mkdir()
    hub = {"model-00001-of-00002.safetensors"}
    assert replacing._weights(tmp_path) == hub
    listed = ["other.safetensors", "gone.safetensors", "../up.safetensors", "folder.safetensors", "config.json", 7]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(listed))}))
    index = {"model.safetensors.index.json"}
    assert replacing._weights(tmp_path) == hub | index | {"other.safetensors", "gone.safetensors"}
    for broken in ("{", "[]", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        assert replacing._weights(tmp_path) == hub | index


def test_what_is_no_folder_is_no_draft(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "none", tmp_path / "file", str(tmp_path / "none")):
        with pytest.raises(CheckpointError, match=r"no config.json; give a folder of an EAGLE3 draft in the hub's"):
            load_draft(path, tiny.config("dM"))


def test_totals_count_a_tower_s_layers():
    """Each layer's tensors once a layer, the tower's own and the projector's once."""
    config = vision.config("dM", num_hidden_layers=3)
    places = names.targets(config)
    values = sum(int(np.prod(target.hub_shape)) for target in places.values())
    assert names.totals(config) == (len(places), values)
    assert sum(names.is_vision(name) for name in places) > 0


@pytest.mark.parametrize("prefix", ["", "model."])
def test_spellings_of_the_towers_names(prefix):
    """Without a prefix they are spelled as with one."""
    for name, spelled in {
        "vision_tower.embeddings.proj.weight": "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "vision_tower.layers.0.mlp.fc1.weight": "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "multi_modal_projector.merge_linear_1.bias": "patch_merge_mlp.linear_1.bias",
    }.items():
        assert names.canonical(prefix + name) == (spelled, False)


def test_a_shard_is_a_copy_of_what_was_read():
    """Also where a device could read the host's memory in its place, which is the file's."""
    memory = np.zeros(1024 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4  # where a CPU device would take the memory as it is
    piece = memory[start : start + 1024].reshape(32, 32)
    buffer = _HostBuffer(((0, 32), (0, 32)), jax.devices()[:1], np.dtype(np.float32))
    buffer.write((), piece, (0, 1))
    (array,) = jax.block_until_ready(buffer.arrays())
    memory[:] = 1
    np.testing.assert_array_equal(array, np.zeros((32, 32)))


def test_a_release_leaves_the_gates_of_its_experts_alone():
    """And of no dense layer, which has none."""
    ignored = mxfp8.announcement(tiny.config("dMm"))["ignored_layers"]
    assert [name for name in ignored if "layers" in name] == [
        f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in (1, 2)
    ]
