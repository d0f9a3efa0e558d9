"""Saving: hub folders, Orbax, and transformers as an independent writer and reader of names."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoint_folders import (
    INDEX,
    assert_same,
    expected_parameters,
    load_parameters,
    same_bits,
    tiny_config,
)

from m3jax import checkpoint, parallel, quantize
from m3jax import model as m3_model
from m3jax.checkpoint import names, orbax, tree
from m3jax.config import M3Config
from m3jax.files import NewFile

CONFIG = tiny_config()
further = pytest.mark.further
GATE = "language_model.model.layers.2.block_sparse_moe.gate.weight"


# Saving


def stored_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's files by name."""
    return {name: values for file in path.glob("*.safetensors") for name, values in load_file(file).items()}


@pytest.mark.parametrize("limit", [5_000_000_000, 100_000, 1])
def test_saved_folder_is_byte_identical(limit, folder, tensors, tmp_path):
    checkpoint.save(checkpoint.load(folder, progress=False), tmp_path / "new", max_shard_bytes=limit)
    saved = stored_tensors(tmp_path / "new")
    assert saved.keys() == tensors.keys()
    assert all(same_bits(saved[name], tensors[name]) for name in tensors)
    assert M3Config.from_pretrained(tmp_path / "new") == CONFIG
    files = sorted(file.name for file in (tmp_path / "new").iterdir())
    if limit > 1_000_000_000:
        assert files == ["config.json", "model.safetensors"]
        return
    index = json.loads((tmp_path / "new" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(values.nbytes for values in tensors.values())}
    assert {*index["weight_map"].values(), "config.json", INDEX} == set(files)
    for file in set(index["weight_map"].values()):
        in_file = load_file(tmp_path / "new" / file)
        assert len(in_file) == 1 or sum(values.nbytes for values in in_file.values()) <= limit


def test_a_shard_exactly_at_the_limit_is_one_shard(folder, tensors, tmp_path):
    """The limit is the most that a file may hold, so a tensor that fills it belongs into it; one byte less, and not."""
    order, sizes = list(names.targets(CONFIG)), {name: values.nbytes for name, values in tensors.items()}
    model = checkpoint.load(folder, progress=False)
    limit = sum(sizes[name] for name in order[:7])  # more than any tensor alone
    assert limit >= max(sizes.values())
    for limit_bytes, in_first in ((limit, order[:7]), (limit - 1, order[:6])):
        path = tmp_path / str(limit_bytes)
        checkpoint.save(model, path, max_shard_bytes=limit_bytes)
        first = sorted(path.glob("*.safetensors"))[0]
        held = set(load_file(first))
        assert held == set(in_first), f"{first.name} of at most {limit_bytes} bytes holds {len(held)} tensors"
    whole = sum(sizes.values())
    checkpoint.save(model, tmp_path / "whole", max_shard_bytes=whole)
    checkpoint.save(model, tmp_path / "more", max_shard_bytes=whole - 1)
    assert (tmp_path / "whole" / "model.safetensors").is_file() and not (tmp_path / "whole" / INDEX).exists()
    assert len(list((tmp_path / "more").glob("*.safetensors"))) == 2 and (tmp_path / "more" / INDEX).is_file()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=further) for dtype in ("float32", "float16"))]
)
def test_any_dtype_comes_back(dtype, folder, tmp_path):
    first = load_parameters(folder, dtype=dtype)
    checkpoint.save(checkpoint.load(folder, dtype=dtype, progress=False), tmp_path)
    assert_same(load_parameters(tmp_path, dtype=dtype), first)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    assert stored_tensors(tmp_path)[GATE].dtype == np.float32


@pytest.mark.parametrize(("key", "dtype"), [("torch_dtype", "float32"), ("dtype", "bfloat16")])
def test_config_json_says_the_dtype_of_the_tensors(key, dtype, folder, tmp_path):
    """By whichever name the config that was loaded has, and by no other: two that differ are read differently."""
    shutil.copytree(folder, tmp_path / "given")
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("torch_dtype", "dtype")}
    (tmp_path / "given" / "config.json").write_text(json.dumps(config | {key: "float16"}))
    checkpoint.save(checkpoint.load(tmp_path / "given", dtype=dtype, progress=False), tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "config.json").read_text())
    assert {name: saved[name] for name in ("torch_dtype", "dtype") if name in saved} == {key: dtype}
    stored = {name: values.dtype.name for name, values in stored_tensors(tmp_path / "new").items()}
    assert {kind for name, kind in stored.items() if ".block_sparse_moe." not in name} == {dtype}


@pytest.mark.parametrize("weights", ["bfloat16", "mxfp8"])
def test_total_size_is_the_sum_of_bytes(weights, folder, tmp_path):
    """Of tensors of several widths: the router of a bfloat16 model is float32, codes and scales of MXFP8 are bytes."""
    model = checkpoint.load(folder, dtype="bfloat16", progress=False)
    checkpoint.save(quantize(model) if weights == "mxfp8" else model, tmp_path, max_shard_bytes=50_000)
    kinds, num_bytes = set(), 0
    for file in tmp_path.glob("*.safetensors"):  # 8 bytes of the header's length, the header, tensors without gaps
        data = file.read_bytes()
        header_end = 8 + int.from_bytes(data[:8], "little")
        kinds |= {entry["dtype"] for name, entry in json.loads(data[8:header_end]).items() if name != "__metadata__"}
        num_bytes += len(data) - header_end
    assert kinds == {"BF16", "F32"} | ({"F8_E4M3", "U8"} if weights == "mxfp8" else set())
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == num_bytes


@further
def test_float64_comes_back(folder, tmp_path):
    with jax.enable_x64(True):
        model = checkpoint.load(folder, dtype="float64", progress=False)
        checkpoint.save(model, tmp_path)
        assert_same(load_parameters(tmp_path, dtype="float64"), load_parameters(folder, dtype="float64"))
    assert {values.dtype.name for values in stored_tensors(tmp_path).values()} == {"float64"}


def test_a_sharded_model_saves_the_same_bytes(folder, tensors, tmp_path):
    mesh = parallel.make_mesh(expert=2, tensor=2)
    checkpoint.save(checkpoint.load(folder, mesh=mesh, progress=False), tmp_path)
    saved = stored_tensors(tmp_path)
    assert saved.keys() == tensors.keys()
    assert all(same_bits(saved[name], tensors[name]) for name in tensors)


def test_save_replaces_a_whole_checkpoint_or_nothing(folder, tmp_path, monkeypatch):
    model = checkpoint.load(folder, progress=False)
    checkpoint.save(model, tmp_path, max_shard_bytes=100_000)
    (tmp_path / "notes.txt").write_text("mine")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    opened = []

    def open_two_files(path):
        opened.append(path)
        if len(opened) == 3:
            raise KeyboardInterrupt
        return NewFile(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("m3jax.checkpoint.replacing.NewFile", open_two_files)
        checkpoint.save(model, tmp_path, max_shard_bytes=150_000)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    checkpoint.save(model, tmp_path)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["config.json", "model.safetensors", "notes.txt"]
    load_parameters(tmp_path)


def test_save_copies_the_tokenizer_and_checks_its_arguments(folder, tmp_path):
    model = checkpoint.load(folder, progress=False)
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        (source / name).write_text(name)
    checkpoint.save(model, tmp_path / "new", copy_from=source, metadata={"a": "b"})
    files = {file.name for file in (tmp_path / "new").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "tokenizer.json"
    with pytest.raises(ValueError, match="max_shard_bytes = 0"):
        checkpoint.save(model, tmp_path / "other", max_shard_bytes=0)
    with pytest.raises(ValueError, match="copy_from"):
        checkpoint.save(model, tmp_path / "other", copy_from=tmp_path / "nowhere")
    assert not (tmp_path / "other").exists()


def test_orbax_restores_onto_another_mesh(folder, tensors, tmp_path):
    mesh = parallel.make_mesh(expert=2, tensor=2)
    checkpoint.save_orbax(checkpoint.load(folder, mesh=mesh, progress=False), tmp_path / "orbax")
    expected = expected_parameters(CONFIG, tensors)
    other_mesh = parallel.make_mesh(tensor=4)
    leaves = tree.flatten(checkpoint.load_orbax(tmp_path / "orbax", mesh=other_mesh))
    assert_same({path: np.asarray(leaf) for path, leaf in leaves.items()}, expected)
    expected_sharding = tree.flatten(m3_model.shardings(CONFIG, other_mesh))
    assert all(leaves[path].sharding == expected_sharding[path] for path in leaves)
    with pytest.raises(ValueError, match="already exists"):
        checkpoint.save_orbax(checkpoint.load(folder, progress=False), tmp_path / "orbax")
    with pytest.raises(ValueError, match="save_orbax wrote"):
        checkpoint.load_orbax(folder)


def test_orbax_that_dies_leaves_no_checkpoint_and_the_next_save_is_whole(folder, tmp_path, monkeypatch):
    """Before each step that is ours: config.json gets its name, parameters do; in between there is nothing to load."""

    class Died(BaseException):
        pass

    model, real = checkpoint.load(folder, progress=False), os.rename
    replace, point = os.replace, tmp_path / "orbax"

    def die(*arguments):
        raise Died

    for name in ("replace", "rename"):
        with monkeypatch.context() as patch, pytest.raises(Died):
            # Orbax renames too: only the last rename is the commit.
            last = lambda source, target: die() if Path(target).name == "parameters" else real(source, target)
            patch.setattr(os, name, die if name == "replace" else last)
            checkpoint.save_orbax(model, point)
        with pytest.raises(ValueError, match=r"has no config\.json|has no folder 'parameters'"):
            checkpoint.load_orbax(point)
    (point / ".m3jax-0123456789abcdef-config.json").write_text("of a process that ended as it wrote")
    assert os.replace is replace and any(path.name.startswith("parameters.unfinished") for path in point.iterdir())
    checkpoint.save_orbax(model, point)
    assert sorted(path.name for path in point.iterdir()) == ["config.json", "parameters"]
    loaded = tree.flatten(checkpoint.load_orbax(point))
    assert_same({path: np.asarray(leaf) for path, leaf in loaded.items()}, load_parameters(folder))
    for dtype in (None, "int8", ["bfloat16"]):
        data = json.loads((point / "config.json").read_text()) | {"torch_dtype": dtype}
        (point / "config.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match="torch_dtype = "):
            checkpoint.load_orbax(point)


def test_orbax_is_on_the_disk_before_it_has_its_name(folder, tmp_path, monkeypatch):
    synced, at_commit, real_sync, real_rename = set(), [], os.fsync, os.rename

    def sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        real_sync(descriptor)

    def rename(source, target):
        if Path(target).name == "parameters":
            written = [*Path(source).rglob("*"), Path(source), Path(target).parent / "config.json"]
            at_commit.extend((path.name, path.stat().st_ino in synced) for path in written)
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    points, opened = [], os.listdir("/proc/self/fd")
    wait = lambda point: points.append((point.removeprefix("m3jax.save_orbax: "), sorted(os.listdir(target))))
    monkeypatch.setattr(orbax, "sync_global_devices", wait)
    target = tmp_path / "new" / "orbax"  # both folders are made
    checkpoint.save_orbax(checkpoint.load(folder, progress=False), target)
    assert len(os.listdir("/proc/self/fd")) == len(opened)
    # Every process waits for the others before each step that needs the one before it, and before it returns.
    assert points == [
        ("folder is ready", ["config.json"]), ("parameters are written", ["config.json", "parameters.unfinished"]),
        ("parameters have their name", ["config.json", "parameters"]),
    ]  # fmt: skip
    assert len(at_commit) > 3 and all(is_synced for _, is_synced in at_commit), at_commit


# The independent writer


@further
def test_names_and_bytes_are_those_that_transformers_saves(tmp_path):
    from support.oracle import pair

    theirs = pair("groups1")  # with a tower, and every kind of layer
    checkpoint.save(theirs.ours, tmp_path, max_shard_bytes=60_000)
    saved, expected = stored_tensors(tmp_path), stored_tensors(theirs.folder)
    assert saved.keys() == expected.keys() and any("vision" in name for name in saved)
    assert all(same_bits(saved[name], expected[name]) for name in expected)
