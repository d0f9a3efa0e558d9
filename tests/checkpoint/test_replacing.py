"""A checkpoint takes another's place: wherever the process dies, the folder holds the old one or the new."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.checkpoint_folders import INDEX, random_tensors, tiny_config, write_folder
from support.drafts import CONFIG as TARGET
from support.drafts import draft

from m3jax import checkpoint
from m3jax.checkpoint import CheckpointError, load_draft, save_draft
from m3jax.checkpoint.reader import read_folder
from m3jax.checkpoint.replacing import Replacement, as_json
from m3jax.config import M3Config
from m3jax.files import current_file
from m3jax.files.pending import SAVE_KEY

SINGLE = "model.safetensors"
TENSORS = ("a", "b", "c")


class Died(BaseException):
    """The end of a process: nothing that comes after it, cleaning up included, reaches the disk."""


@contextlib.contextmanager
def dying(patch: pytest.MonkeyPatch, point: int) -> Iterator[list[str]]:
    """Lets `point` system calls that change the disk through, does half of the next if that is a write, and no more.

    Gives the calls that were made, by name and file.
    """
    calls: list[str] = []

    def deadly(name):
        call = getattr(os, name)

        def run(*arguments, **keywords):
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **keywords)
            if len(calls) < point:
                calls.append(f"{name} {arguments[0] if isinstance(arguments[0], os.PathLike) else ''}")
                return call(*arguments, **keywords)
            if name == "write" and len(calls) == point:
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            calls.extend(["died"] * (len(calls) == point))
            raise Died(f"before {name} {arguments[0]}")

        return run

    with patch.context() as inner:
        for name in ("open", "write", "fsync", "replace", "rename", "unlink", "remove", "mkdir"):
            inner.setattr(os, name, deadly(name))
        yield calls


def write(folder: Path, seed: int, num_files: int, beside: dict[str, bytes]) -> None:
    """Save three tensors of a seed's values, in one file or three."""
    values = {name: np.full((5, 3), seed, np.float32) for name in TENSORS}
    with Replacement(folder, num_files, beside) as new:
        parts = [TENSORS] if num_files == 1 else [(name,) for name in TENSORS]
        for file, names in zip(new.names, parts, strict=True):
            layout = {name: (values[name].dtype, values[name].shape) for name in names}
            new.write_weights(file, layout, (values[name] for name in names), {"format": "pt"})
        if num_files > 1:
            new.write_index(dict(zip(TENSORS, new.names, strict=True)), 180)


def contents(folder: Path, names=("config.json", "tokenizer.json")) -> tuple | str:
    """Return what a reader finds: (the tensors' values, the files beside them), or "none" without a checkpoint."""
    found = read_folder(folder)
    if found.all_lost:
        return "none"
    assert not found.problems, found.problems
    values = {name: float(np.unique(tensor.view()).item()) for name, tensor in found.tensors.items()}
    beside = [file.read_bytes() if (file := current_file(folder, name)).is_file() else None for name in names]
    return values, beside


def config(seed: int) -> dict[str, bytes]:
    return {"config.json": b'{"seed": %d}' % seed, "tokenizer.json": b'{"t": %d}' % seed}


OLD = {"nothing": 0, "a single file": 1, "shards": 3}


@pytest.mark.parametrize(
    "is_same_config", [False, pytest.param(True, marks=pytest.mark.further)], ids=["another config", "the same config"]
)
@pytest.mark.parametrize("new_files", [pytest.param(1, marks=pytest.mark.further), 3])
@pytest.mark.parametrize("old", OLD)
def test_a_death_anywhere_leaves_the_old_checkpoint_or_the_new(old, new_files, is_same_config, tmp_path, monkeypatch):
    """Before each rename, unlink, fsync and open, and in the middle of each write; then the next save tidies up."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a call like another, only slow
    before, beside = tmp_path / "before", config(1) if is_same_config else config(2)
    before.mkdir()
    (before / "notes.txt").write_text("mine")
    if OLD[old]:
        write(before, 1, OLD[old], config(1))
    was, outcomes, point = contents(before), [], 0
    while True:
        folder = tmp_path / f"{point}"
        shutil.copytree(before, folder)
        with dying(monkeypatch, point) as calls, contextlib.suppress(Died):
            write(folder, 2, new_files, beside)
        found = contents(folder)
        is_new = found == (dict.fromkeys(TENSORS, 2.0), list(beside.values()))
        assert is_new or found == was, f"died after {calls[-3:]}: {found} is neither the old one, {was}, nor the new"
        outcomes.append(is_new)
        is_done = "died" not in calls
        if not is_done:
            write(folder, 3, new_files, config(3))
            assert contents(folder) == (dict.fromkeys(TENSORS, 3.0), list(config(3).values())), "the next save"
        assert sorted(os.listdir(folder)) == sorted(expected_files(folder, new_files)), f"died after {calls[-3:]}"
        shutil.rmtree(folder)
        if is_done:
            break
        point += 1
    assert point >= 8 and not outcomes[0] and outcomes[-1]
    assert outcomes == sorted(outcomes), "once it is the new one it stays so"


@pytest.mark.parametrize("new_files", [1, 3])
@pytest.mark.parametrize("old", OLD)
def test_an_interrupt_after_any_step_removes_nothing_that_is_current(old, new_files, tmp_path, monkeypatch):
    """Ctrl-C may come when the commit is done and the code behind it has not run: cleaning up must not take it back."""
    before, point, was_new = tmp_path / "before", 0, False
    before.mkdir()
    if OLD[old]:
        write(before, 1, OLD[old], config(1))
    was = contents(before)
    while not was_new:
        folder, calls = tmp_path / f"{point}", []
        shutil.copytree(before, folder)
        with monkeypatch.context() as patch:
            for name in ("open", "write", "fsync", "replace", "unlink"):
                call = getattr(os, name)

                def interrupted(*arguments, name=name, call=call, calls=calls, last=point, **keywords):
                    result = call(*arguments, **keywords) if name != "fsync" else None
                    calls.append(f"{name} {arguments[0]}")
                    if len(calls) == last + 1:
                        raise KeyboardInterrupt
                    return result

                patch.setattr(os, name, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                write(folder, 2, new_files, config(2))
                was_new = True
        found, step = contents(folder), calls[min(point, len(calls) - 1)]
        assert found in (was, (dict.fromkeys(TENSORS, 2.0), list(config(2).values()))), f"interrupted after {step}"
        point += 1
    assert point > 10


def expected_files(folder: Path, num_files: int) -> set[str]:
    weights = {SINGLE}
    if num_files > 1:
        weights = {INDEX, *json.loads((folder / INDEX).read_text())["weight_map"].values()}
    return {"notes.txt", "config.json", "tokenizer.json"} | weights


def test_every_file_is_synced_before_the_commit_and_old_ones_go_after_it(tmp_path, monkeypatch):
    """A rename that outruns its file's bytes to the disk would be a checkpoint of zeros after a power cut."""
    write(tmp_path, 1, 3, config(1))
    events = []
    for name in ("write", "fsync", "replace", "unlink"):
        call = getattr(os, name)

        def spy(*arguments, name=name, call=call):
            path = arguments[-1] if name in ("replace", "unlink") else os.readlink(f"/proc/self/fd/{arguments[0]}")
            events.append((name, Path(path).name))
            return call(*arguments)

        monkeypatch.setattr(os, name, spy)
    write(tmp_path, 2, 3, config(2))
    commit = events.index(("replace", INDEX))
    written = {path for name, path in events if name == "write"}
    synced = [path for name, path in events[:commit] if name == "fsync"]
    assert len(written) == 6 and written <= set(synced), "shards, index, config.json and tokenizer.json"
    assert synced[-1] == tmp_path.name, "the folder, before the commit"
    assert events[commit + 1] == ("fsync", tmp_path.name), "and after it"
    removed = [i for i, (name, _) in enumerate(events) if name == "unlink"]
    assert len(removed) == 3 and min(removed) > commit + 1, "the old shards go last"


def test_leftovers_of_others_are_not_ours(tmp_path):
    write(tmp_path, 1, 1, config(1))
    others = [".m3jax-notes", "model-a.safetensors", ".m3jax-0123-config.json", "my-model.safetensors", "data.json"]
    ours = [".m3jax-0123456789abcdef-config.json", "model-0123456789abcdef-00001-of-00002.safetensors"]
    for name in [*others, *ours]:
        (tmp_path / name).write_text("x")
    write(tmp_path, 2, 3, config(1))
    left = set(os.listdir(tmp_path))
    assert left >= set(others) and not left & set(ours)


def test_old_weights_are_the_hub_s_and_those_that_the_index_lists(tmp_path):
    """Of the folder itself: no folder of such a name, no path elsewhere, and no other kind of file is removed."""
    folder = tmp_path / "saves"
    (folder / "folder.safetensors").mkdir(parents=True)
    for name in ("other.safetensors", "model-00001-of-00002.safetensors", "mine.safetensors", "config.json", "../up"):
        (folder / name).write_bytes(b"")
    listed = ["other.safetensors", "gone.safetensors", "folder.safetensors", "../up", "config.json", 7]
    for index in (json.dumps({"weight_map": dict(enumerate(listed))}), "{", "[]", '{"weight_map": 3}'):
        (folder / INDEX).write_text(index)
        write(folder, 1, 1, {})
        assert set(os.listdir(folder)) == {"folder.safetensors", "mine.safetensors", "config.json", SINGLE}, index
        assert (tmp_path / "up").is_file()


@pytest.mark.parametrize("num_files", [1, 3])
def test_nothing_is_written_through_a_link(num_files, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    names = [
        "config.json",
        "tokenizer.json",
        SINGLE,
        INDEX,
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    ]
    for name in names:
        (folder / name).symlink_to(outside)
    write(folder, 2, num_files, config(2))
    assert outside.read_text() == "precious"
    assert contents(folder) == (dict.fromkeys(TENSORS, 2.0), list(config(2).values()))
    assert not [name for name in os.listdir(folder) if (folder / name).is_symlink()]


def test_files_have_the_hub_s_names_unless_one_is_taken(tmp_path):
    """Then all of them carry the save's token; one file, which is renamed when it is whole, never does."""
    hub = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert Replacement(tmp_path / "new", 3, {}).names == hub
    for name in hub:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to("nowhere")
        names = Replacement(folder, 3, {}).names
        token = names[0].split("-")[1]
        assert len(token) == 16 and names == [each.replace("model-", f"model-{token}-") for each in hub]
        assert Replacement(tmp_path / f"single {name}", 1, {}).names == [SINGLE]


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch):
    """Some file systems have no locks, and a save goes on; any other error is one, with the folder's name."""
    for number in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.EIO):

        def fails(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("m3jax.checkpoint.replacing.fcntl.flock", fails)
        opened = os.listdir("/proc/self/fd")
        if number != errno.EIO:
            assert Replacement(tmp_path, 1, {}).names == [SINGLE]
        else:
            with pytest.raises(OSError, match="Input/output error") as caught:
                Replacement(tmp_path, 1, {})
            assert caught.value.filename == str(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == len(opened)
    monkeypatch.setattr("m3jax.checkpoint.replacing.fcntl", None)  # as on Windows
    assert Replacement(tmp_path, 1, {}).names == [SINGLE]


def test_weights_beside_an_unchanged_config_belong_to_no_save(tmp_path):
    """Only where both are replaced could a reader mix old and new, so only there the file names its save."""
    for seed, names_save in ((0, False), (0, False), (1, True)):
        write(tmp_path, 1, 1, config(seed))
        with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
            assert (SAVE_KEY in (file.metadata() or {})) == names_save, seed


def test_equal_data_are_equal_bytes():
    """As of a config whose keys come in another order, which would seem to change."""
    assert as_json({"b": 1, "a": {"d": 2, "c": "é"}}) == as_json({"a": {"c": "é", "d": 2}, "b": 1})
    assert json.loads(as_json({"a": "é"})) == {"a": "é"} and as_json({"a": 1}) == b'{\n  "a": 1\n}\n'


def test_a_second_save_at_once_is_refused_and_harms_nothing(tmp_path):
    with Replacement(tmp_path, 1, config(1)) as first:
        with pytest.raises(ValueError, match=r"another save into .* is running: wait for it"):
            Replacement(tmp_path, 1, config(2))
        layout = {"a": (np.dtype(np.float32), (1,))}
        first.write_weights(SINGLE, layout, [np.ones(1, np.float32)], {})
    assert contents(tmp_path) == ({"a": 1.0}, list(config(1).values()))


def test_a_full_disk_names_the_path_and_costs_nothing(tmp_path, monkeypatch):
    write(tmp_path, 1, 1, config(1))
    was, files = contents(tmp_path), sorted(os.listdir(tmp_path))
    real = os.write

    def full(descriptor, data):
        if len(data) == 60:  # a tensor
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(os, "write", full)
        write(tmp_path, 2, 3, config(2))
    assert caught.value.errno == errno.ENOSPC and Path(caught.value.filename).parent == tmp_path
    assert contents(tmp_path) == was and sorted(os.listdir(tmp_path)) == files


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_commit_that_is_refused_costs_nothing(num_files, tmp_path, monkeypatch):
    """The one rename that would make the new files current."""
    write(tmp_path, 1, num_files, config(1))
    was, files, real = contents(tmp_path), sorted(os.listdir(tmp_path)), os.replace

    def refuse(source, target):
        if Path(target).name in (SINGLE, INDEX):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(os, "replace", refuse)
        write(tmp_path, 2, num_files, config(2))
    assert contents(tmp_path) == was and sorted(os.listdir(tmp_path)) == files


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is a folder, where a file has to be"):
        Replacement(tmp_path, 1, config(1))
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_tensor_that_is_not_as_announced_is_refused(tmp_path):
    layout = {"a": (np.dtype(np.float32), (2,))}
    with pytest.raises(ValueError, match=r"a: float32 .*3.*, and the header says"), Replacement(tmp_path, 1, {}) as new:
        new.write_weights(SINGLE, layout, [np.ones(3, np.float32)], {})
    assert os.listdir(tmp_path) == []


# Models


CONFIG = tiny_config()


def test_between_two_models_of_different_shapes(tmp_path, monkeypatch):
    """config.json changes with the weights: a death right after the commit leaves what loads as the new model."""
    other = tiny_config(vocab_size=112)
    for name, settings in (("first", CONFIG), ("second", other)):
        write_folder(tmp_path / name, settings, random_tensors(settings))
    models = [checkpoint.load(tmp_path / name, progress=False) for name in ("first", "second")]
    checkpoint.save(models[0], tmp_path / "folder", max_shard_bytes=300_000)
    real = os.replace

    def die_after_the_commit(source, target):
        if Path(target).name == "config.json":
            raise Died
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(os, "replace", die_after_the_commit)
        checkpoint.save(models[1], tmp_path / "folder")
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["text_config"]["vocab_size"] == 96
    assert M3Config.from_pretrained(tmp_path / "folder") == other
    assert checkpoint.load(tmp_path / "folder", progress=False).config == other


def test_between_two_drafts(tmp_path, monkeypatch):
    first, second = draft(), draft(seed=1, draft_vocab_size=40, own_head=True)
    save_draft(first, tmp_path)
    real = os.replace

    def die(when):
        def replace(source, target):
            if Path(target).name == when:
                raise Died
            real(source, target)

        return replace

    for when, expected in ((SINGLE, first), ("config.json", second)):
        with monkeypatch.context() as patch, pytest.raises(Died):
            patch.setattr(os, "replace", die(when))
            save_draft(second, tmp_path)
        loaded = load_draft(tmp_path, TARGET, "float32")
        assert loaded.config == expected.config, f"died before {when} got its name"
        np.testing.assert_array_equal(loaded.fc[...], expected.fc[...])


def test_weights_that_are_replaced_while_they_are_read_are_not_mixed(tmp_path):
    write_folder(tmp_path, CONFIG, random_tensors(CONFIG))
    stored = read_folder(tmp_path).tensors["language_model.model.norm.weight"]
    save_file(random_tensors(CONFIG, seed=1), tmp_path / "new.safetensors")
    os.replace(tmp_path / "new.safetensors", tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: replaced while it was read; load again"):
        stored.view()


def test_a_config_of_other_weights_is_noticed(tmp_path, monkeypatch):
    """A save commits after config.json was read and before the weights are."""
    write_folder(tmp_path, CONFIG, random_tensors(CONFIG))
    save_file(load_file(tmp_path / SINGLE), tmp_path / "new.safetensors")
    real = M3Config.from_dict

    def read_and_replace(data):
        os.replace(tmp_path / "new.safetensors", tmp_path / SINGLE)
        return real(data)

    monkeypatch.setattr(M3Config, "from_dict", read_and_replace)
    with pytest.raises(CheckpointError, match="replaced by a save while it was read; load again"):
        checkpoint.load(tmp_path, progress=False)
