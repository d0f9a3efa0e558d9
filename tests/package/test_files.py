"""Files from elsewhere: JSON within limits, and new files that never are old ones."""

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from m3jax.files import (
    NewFile,
    committed_save,
    current_file,
    pending_name,
    read_bytes,
    read_json,
    read_json_list,
    replace_file,
    sync_folder,
)

TOKEN = "0123456789abcdef"
# What a file holds, and what its error says after the file's path.
REFUSED = {
    "empty": (b"", "is not valid JSON: Expecting value"),
    "no object": (b"[1]", ": a config is a JSON object, got list"),
    "null": (b"null", ": a config is a JSON object, got null"),
    "cut short": (b'{"a": ', "is not valid JSON: Expecting value"),
    "a mark": (b"\xef\xbb\xbf{}", "is not valid JSON: it begins with a byte order mark; save it as UTF-8 without one"),
    "UTF-16": (b"\xff\xfe{\0}\0", "is not valid JSON: it begins with a byte order mark; save it as UTF-8 without one"),
    "no UTF-8": (b'{"a": "\xff"}', "is not valid JSON: byte 7 is not UTF-8; download it again"),
    "twice": (
        b'{"x": {"a": 1, "b": 2, "a": 1}}',
        "is not valid JSON: the key 'a' stands twice in one object, keep one",
    ),
    "NaN": (b'{"a": {"b": NaN}}', ": a.b = nan: beyond the largest number of float32, 3.4e+38"),
    "infinite": (b'{"a": [0, -Infinity]}', ": a.1 = -inf: beyond the largest number of float32, 3.4e+38"),
    "1e308": (b'{"a": 1e308}', ": a = 1e+308: beyond the largest number of float32, 3.4e+38"),
    "1e999": (b'{"a": 1e999}', ": a = inf: beyond the largest number of float32, 3.4e+38"),
    "10**400": (b'{"a": 1%s}' % (b"0" * 400), ": a = inf: beyond the largest number of float32, 3.4e+38"),
    "a million digits": (b'{"a": 9%s}' % (b"0" * 10**6), ": a = inf: beyond the largest number of float32, 3.4e+38"),
    "3e39": (b'{"a": 3%s}' % (b"0" * 39), f": a = 3{'0' * 39}: beyond the largest number of float32, 3.4e+38"),
    "deep": (b'{"a": %s1%s}' % (b"[" * 64, b"]" * 64), ": lists and objects nest deeper than 64"),
    "very deep": (b'{"a": %s1%s}' % (b"[" * 10**5, b"]" * 10**5), ": lists and objects nest deeper than 64"),
    "a long list": (b'{"a": {"b": [%s0]}}' % (b"0," * 10**5), ": a.b has 100,001 entries, at most 100,000 are read"),
    "a surrogate": (b'{"a": "x\\ud800"}', r": a = 'x\\ud800': holds a lone surrogate"),
    "a surrogate's key": (b'{"\\ud800": 1}', r": the key '\\ud800' holds a lone surrogate"),
    "large": (b'{"a": "%s"}' % (b"x" * (16 << 20)), ": larger than 16,777,216 bytes, the most that is read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_beyond_a_limit_is_refused_with_the_file_and_the_key(case, tmp_path):
    data, message = REFUSED[case]
    file = tmp_path / "config\n.json"
    file.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_json(file)
    text = str(caught.value)
    assert text.startswith(str(tmp_path)) and text.isprintable() and len(text) <= 2000
    assert text.split("config\\n.json")[1].removeprefix(" ").startswith(message.replace("\\\\", "\\"))


def test_what_is_within_the_limits_is_read(tmp_path):
    """tokenizer_config.json of many models says int(1e30); 64 levels, the largest floats, every character."""
    nested = 1
    for _ in range(63):
        nested = [nested]
    values = {
        "a": int(1e30),
        "b": 3.4028234663852886e38,
        "c": -1e38,
        "d": "日本 \x1b é",
        "e": nested,
        "f": None,
        "": True,
    }
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert read_json(tmp_path / "a.json") == values
    (tmp_path / "b.json").write_text(json.dumps({"x": [0] * 100_000}))
    assert len(read_json(tmp_path / "b.json")["x"]) == 100_000
    assert math.isfinite(read_json(tmp_path / "a.json")["b"])


def test_a_file_may_be_as_large_as_its_limit(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"[1, 2, 3]")
    assert read_bytes(file, 9) == b"[1, 2, 3]" and read_json_list(file, "a list") == [1, 2, 3]
    with pytest.raises(ValueError, match=r"a\.json: larger than 8 bytes, the most that is read"):
        read_bytes(file, 8)
    file.write_bytes(b'{"a": [1, 2, 3]}')
    assert read_json(file, 16, 3) == {"a": [1, 2, 3]}
    for limits, message in (((15, 3), "larger than 15 bytes"), ((16, 2), "a has 3 entries, at most 2 are read")):
        with pytest.raises(ValueError, match=message):
            read_json(file, *limits)
    with pytest.raises(ValueError, match="a list is a JSON list, got dict"):
        read_json_list(file, "a list")


def test_a_folder_that_cannot_be_synced(tmp_path, monkeypatch):
    """Some file systems cannot promise that names are on the disk; any other error is one, with the folder's name."""
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO):

        def fails(descriptor, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fails)
        if number != errno.EIO:
            sync_folder(tmp_path)
            continue
        with pytest.raises(OSError, match="Input/output error") as caught:
            sync_folder(tmp_path)
        assert caught.value.filename == str(tmp_path)


def test_a_windows_folder_is_not_synced(monkeypatch):
    """Windows opens no folders."""
    monkeypatch.setattr("m3jax.files.durable.os", SimpleNamespace(name="nt"))
    sync_folder(Path("nowhere"))


def test_a_replaced_file_is_synced_named_and_its_name_synced(tmp_path, monkeypatch):
    """In this order; with the rights that the user's mask leaves, and nothing stays open."""
    events = []

    def spy(name):
        call = getattr(os, name)

        def run(*arguments):
            path = arguments[-1] if name == "replace" else os.readlink(f"/proc/self/fd/{arguments[0]}")
            events.append((name, Path(path).name.partition("-")[0]))
            return call(*arguments)

        monkeypatch.setattr(os, name, run)

    spy("fsync")
    spy("replace")
    before, mask = os.listdir("/proc/self/fd"), os.umask(0)
    try:
        replace_file(tmp_path / "a", b"new")
    finally:
        os.umask(mask)
    assert events == [("fsync", ".m3jax"), ("replace", "a"), ("fsync", tmp_path.name.partition("-")[0])]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 and len(os.listdir("/proc/self/fd")) == len(before)


def test_a_new_file_is_never_an_old_one_or_a_link(tmp_path):
    (tmp_path / "old").write_text("precious")
    for name, target in (("link", "old"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for name in ("old", "link", "dangling"):
        with pytest.raises(FileExistsError) as caught:
            NewFile(tmp_path / name)
        assert Path(caught.value.filename).name == name
    assert (tmp_path / "old").read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_a_write_that_takes_several_calls_is_whole(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    with NewFile(tmp_path / "a") as file:
        file.write(b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_pending_file_counts_only_with_its_save(tmp_path):
    """A pending file is read only if the weights name its save; one left before the commit is ignored."""
    pending = tmp_path / pending_name(TOKEN, "config.json")
    pending.write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    assert current_file(tmp_path, "config.json") == tmp_path / "config.json"
    for metadata in ({}, {"m3jax_save": "f" * 16}, {"m3jax_save": 1}, [], None):
        index.write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
        assert current_file(tmp_path, "config.json") == tmp_path / "config.json"
    index.write_text(json.dumps({"metadata": {"m3jax_save": TOKEN}, "weight_map": {}}))
    assert committed_save(tmp_path) == TOKEN
    assert current_file(tmp_path, "config.json") == pending
    assert current_file(tmp_path, "tokenizer.json") == tmp_path / "tokenizer.json"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a"
    (tmp_path / "other").write_text("precious")
    file.symlink_to(tmp_path / "other")
    replace_file(file, b"old")
    assert not file.is_symlink() and (tmp_path / "other").read_text() == "precious"
    real = os.write

    def full(descriptor, data):
        real(descriptor, data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(os, "write", full)
        replace_file(file, b"new")
    assert str(tmp_path) in str(caught.value)
    assert file.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["a", "other"]
