"""`python -m m3jax.compare`: its status, its HTML file, and bad input, which is one line."""

import json
import re
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import tiny
from support.dumps import TINY, VECTORS, golden, written

from m3jax.compare import running
from m3jax.compare.__main__ import main
from m3jax.compare.sides import Source

CONFIG = tiny.config("dMM", hidden_size=12, dense_intermediate_size=24)


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


def test_the_status_says_whether_they_agree(tmp_path, capsys):
    right, wrong = golden(), golden()
    wrong["layers.2.ffn_out"][1, 3, 4] = np.nan
    a, b = written(tmp_path / "a.safetensors", right), written(tmp_path / "b.safetensors", wrong)
    assert run(VECTORS, a) == 0
    assert "A and B agree" in capsys.readouterr().out
    assert run(a, b, "--html", tmp_path / "<b>.html") == 1
    out = capsys.readouterr().out
    assert "first beyond its tolerance: layers.2.ffn_out" in out and "found nan" in out and "1 numbers are NaN" in out
    page = (tmp_path / "<b>.html").read_text(encoding="utf-8")
    assert "<svg" in page and "layers.2.ffn_out" in page
    assert not re.findall(r'(?:src|href)="(?!#)|url\((?!#)|@import|<script', page), "the page asks for other files"
    assert run(a, b, "--rtol", "0.1", "--atol", "inf") == 2
    assert run(a, b, "--atol", "-1") == 2
    assert run(a, b, "--rtol", "0", "--atol", "0") == run(a, b, "--rtol", "1") == 1


def test_names_from_files_are_escaped(tmp_path, capsys):
    """A name is text from elsewhere: neither a terminal nor a browser obeys it."""
    evil = golden(only="logits") | {"<script>alert(1)</script>\x1b[2J": np.zeros(3, np.float32)}
    b = written(tmp_path / "b.safetensors", evil)
    assert run(VECTORS, b, "--html", tmp_path / "r.html") == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script" in page
    assert "\x1b" not in page + capsys.readouterr().out


def test_without_matplotlib_nothing_runs_and_the_line_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("nowhere", "nowhere", "--html", tmp_path / "r.html") == 2
    assert "m3jax[plots]" in capsys.readouterr().err


def test_what_a_live_model_compiles_is_kept_for_the_next_run(monkeypatch, capsys, tmp_path):
    """As by the other commands: in the user's folder, unless it is not wanted or cannot be."""
    folder, seen = tmp_path / "cache", []
    own = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("M3JAX_CACHE_DIR", str(folder))

    def compare_nothing(*_args, **_options):
        seen.append(jax.config.jax_compilation_cache_dir == str(folder / "compiled"))
        raise ValueError("nothing to compare")

    monkeypatch.setattr(running, "compare_sides", compare_nothing)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert run("a", "b") == run("a", "b", "--no-compile-cache") == 2
        assert "note" not in capsys.readouterr().err
        monkeypatch.setenv("M3JAX_CACHE_DIR", __file__)
        assert run("a", "b") == 2
    finally:
        jax.config.update("jax_compilation_cache_dir", own)
    assert seen == [True, False, False]
    assert "m3jax.compare: note: compiled programs are not kept" in capsys.readouterr().err


def spoiled(kind: str, folder: Path) -> tuple[list, str]:
    """Arguments of a command that cannot be done, and what its line has to say."""
    good = golden(only=r"layers\.1\.q$|logits")
    a = written(folder / "a.safetensors", good)
    b = folder / "b.safetensors"
    match kind:
        case "no file":
            return [a, folder / "b"], "b: there is no such file or folder"
        case "truncated":
            b.write_bytes(Path(a).read_bytes()[:-100])
            return [a, b], "damaged"
        case "empty file":
            b.write_bytes(b"")
            return [a, b], "0 bytes are no safetensors file"
        case "foreign file":
            (folder / "b.pt").write_bytes(b"x")
            return [a, folder / "b.pt"], "neither a .safetensors nor a .npz"
        case "foreign npz":
            (folder / "b.npz").write_bytes(b"PK\x03\x04 no archive")
            return [a, folder / "b.npz"], "no npz file"
        case "pickled npz":
            with zipfile.ZipFile(folder / "b.npz", "w") as archive:
                np.lib.format.write_array(archive.open("x.npy", "w"), np.array([{}]), allow_pickle=True)
            return [a, folder / "b.npz"], "no npz file of arrays"
        case "npz that claims more than it has":
            with zipfile.ZipFile(folder / "b.npz", "w") as archive, archive.open("x.npy", "w") as stream:
                header = {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**5)}
                np.lib.format.write_array_header_1_0(stream, header)
                stream.write(bytes(1000))
            return [a, folder / "b.npz"], "400000000000 bytes claimed, 1000 there"
        case "npz of text":
            with zipfile.ZipFile(folder / "b.npz", "w") as archive:
                archive.writestr("x.npy", "no array")
            return [a, folder / "b.npz"], "no npz file of arrays"
        case "empty folder":
            (folder / "dump").mkdir()
            return [a, folder / "dump"], "dump: an empty dump"
        case "empty dump":
            return [a, written(b, {})], "an empty dump"
        case "missing names":
            return [
                a,
                written(b, {"layers.1.k": good["layers.1.q"], "tokens": good["tokens"]}),
            ], "no quantity that both"
        case "foreign names":
            return [a, written(b, {"tokens": good["tokens"], "x": good["logits"]})], "--map FILE"
        case "other shapes":
            return [a, written(b, good | {"layers.1.q": good["layers.1.q"][..., :3]})], "layers.1.q"
        case "no size fits":
            wrong = good | {"layers.1.q": good["layers.1.q"][:, :7]}
            return [a, written(b, wrong), "--config", TINY], "cannot be aligned"
        case "fused without sizes":
            fused = {"tokens": good["tokens"], "model.layers.1.self_attn.qkv_proj": good["logits"]}
            return [a, written(b, fused)], "--config FOLDER"
        case "other width of a fused projection":
            fused = {"tokens": good["tokens"], "model.layers.1.self_attn.qkv_proj": good["logits"]}
            return [a, written(b, fused), "--config", TINY], "48 columns are not"
        case "other tokens":
            return [a, written(b, good | {"tokens": good["tokens"] + 1})], "other tokens: at prompt 1, position 0"
        case "other lengths":
            short = {name: x[:, :40] for name, x in good.items()}
            return [a, written(b, short)], "positions"
        case "no tokens":
            return ["m3jax:", written(b, {"logits": good["logits"]})], "--prompt-tokens"
        case "tokens of no model":
            return ["m3jax:", a, "--prompt-tokens", "1,2,999999"], "prompt 1: token 999999"
        case "no such mesh":
            return [f"m3jax:{TINY}", a, "--mesh", "tensor=3"], "tensor"
        case "no ids":
            return ["m3jax:", a, "--prompt-tokens", "1,b"], "as in 1,2,3"
        case "ids that are floats":
            wrong = {"tokens": good["tokens"], "layers.1.blocks": np.zeros((2, 2, 44, 3), np.float32)}
            return [a, written(b, wrong)], "dump them as integers"
        case "ranks that disagree":
            for rank in (0, 1):
                written(folder / "dump" / f"rank{rank}.safetensors", good | {"logits": good["logits"] + rank})
            return [a, folder / "dump", "--config", TINY], "ranks 0 and 1 both have all of it"
        case "a name in two files":
            for name in ("x", "y"):
                written(folder / "dump" / f"{name}.safetensors", good)
            return [a, folder / "dump"], "call the files of ranks rank0, rank1"
        case "a rank is missing":
            for rank in (0, 2):
                written(folder / "dump" / f"tp{rank}.safetensors", good)
            return [a, folder / "dump"], "ranks [0, 2]"
        case "other schema version":
            (folder / "vectors").mkdir()
            (folder / "vectors" / "manifest.json").write_text('{"schema": 99, "cases": []}')
            return [folder / "vectors", a], "schema version 99"
        case "a map to nowhere":
            (folder / "map.json").write_text(json.dumps({"x-{layer}": "layers.{layer}.nothing"}))
            return [a, a, "--map", folder / "map.json"], "no quantity"
        case "no map":
            return [a, a, "--map", folder / "map.json"], "no such file"
        case _:
            raise AssertionError(kind)


KINDS = [
    "no file", "truncated", "empty file", "foreign file", "foreign npz", "pickled npz",
    "npz that claims more than it has", "npz of text", "empty folder", "empty dump",
    "missing names", "foreign names", "other shapes", "no size fits", "fused without sizes",
    "other width of a fused projection", "other tokens", "other lengths", "no tokens", "tokens of no model", "no ids",
    "ids that are floats", "ranks that disagree", "a name in two files", "a rank is missing", "other schema version",
    "a map to nowhere", "no map", "no such mesh",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_one_line(kind, tmp_path, capsys, unchecked):
    args, words = spoiled(kind, tmp_path)
    assert run(*args) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1, streams.err
    assert streams.err.startswith("m3jax.compare: error: ") and words in streams.err, streams.err


def test_what_a_comparison_reads_and_runs(monkeypatch, unchecked):
    """Dumps first: what they say of prompts and of the model holds for what runs live; each wait is named."""
    told, calls = [], []
    line = SimpleNamespace(
        say=told.append, timed=lambda text: told.append(f"({text})") or nullcontext()
    )  # fmt: skip
    monkeypatch.setattr(running, "activity", lambda about: nullcontext(line))
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
