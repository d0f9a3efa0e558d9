"""The output for a user who waits: a line within 2 s, how long it took last time, and less waiting the second time."""

import io
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pexpect
import pytest
from support.fake_model import FakeModel

from m3jax import cli, compile_cache, progress
from m3jax.cli import generation
from m3jax.compile_cache import cache_folder, why_not_kept
from m3jax.completion import generate
from m3jax.decoding import Engine
from m3jax.progress import activity

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, and the settings of a process that has set none of jax's."""
    monkeypatch.setenv("M3JAX_CACHE_DIR", str(tmp_path / "cache"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # so that what jax may keep is kept
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)


class Notebook(io.StringIO):
    """A stream as a notebook's: a line on it can be written over."""


Notebook.__module__ = "ipykernel.iostream"


@pytest.fixture
def new_stderr(monkeypatch):
    """Makes a stderr that is no terminal, on which waiting is shown after 0.05 s; pytest sets its own before a test."""

    def make(kind: type[io.StringIO] = io.StringIO) -> io.StringIO:
        monkeypatch.setenv("M3JAX_PROGRESS", "1")
        monkeypatch.setattr(progress, "PAUSE", 0.05)
        monkeypatch.setattr(sys, "stderr", kind())
        return sys.stderr

    return make


def wait_for(text: str, stream: io.StringIO) -> None:
    """Wait until the stream holds a text, 10 s at most."""
    for _ in range(1000):
        if text in stream.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {text!r} after 10 s, but {stream.getvalue()!r}")


# What is said


def test_a_line_says_what_is_waited_for_and_how_long_it_took_last_time(folder, new_stderr, caplog):
    stderr = new_stderr()
    folder.mkdir()
    (folder / "durations.json").write_text(json.dumps({}))
    with caplog.at_level(logging.INFO, "m3jax"), activity(about="a model") as line:
        with line.timed("compiling prefill"):
            wait_for("m3jax: compiling prefill\n", stderr)
        line.say("generating: 3 new tokens")
        wait_for("m3jax: generating: 3 new tokens\n", stderr)
    assert "compiling prefill: done in 0." in caplog.text
    (key,) = durations = json.loads((folder / "durations.json").read_text())
    assert key.endswith(" compiling prefill") and 0 < durations[key] < 10
    (folder / "durations.json").write_text(json.dumps({key: 9.2}))
    with activity(about="another model") as line, line.timed("compiling prefill"):
        assert str(line) == "compiling prefill"
    with activity(about="a model") as line, line.timed("compiling prefill"):
        wait_for("m3jax: compiling prefill; last time 9 s\n", stderr)
    line.began -= 3
    assert str(line).startswith("compiling prefill, 3 s")


def test_lines_come_after_twice_as_long_each_time_and_end_with_the_work(new_stderr):
    """What is timed begins anew, so that each piece of work has a line soon."""
    stderr = new_stderr()
    with activity() as line:
        line.say("working")
        time.sleep(1)
        assert 3 <= stderr.getvalue().count("working") <= 5, stderr.getvalue()  # after 0.05, 0.1, 0.2, 0.4, 0.8 s
        with line.timed("compiling"):
            wait_for("compiling", stderr)
            assert time.perf_counter() - line.began < 0.8, "it waited for the line of the work before"
    before = stderr.getvalue()
    time.sleep(0.1)
    assert stderr.getvalue() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "m3jax progress"]


def test_in_a_notebook_one_line_is_written_over_and_taken_away(new_stderr):
    stderr = new_stderr(Notebook)
    with activity() as line:
        line.say("compiling")
        wait_for("\rm3jax: compiling", stderr)
    assert "\n" not in stderr.getvalue() and stderr.getvalue().endswith("\r" + " " * len("m3jax: compiling") + "\r")


@pytest.mark.parametrize("how", ["argument", "variable", "closed"])
def test_it_can_be_turned_off(new_stderr, monkeypatch, how):
    stderr = new_stderr()
    if how == "variable":
        monkeypatch.setenv("M3JAX_PROGRESS", "0")
    if how == "closed":
        monkeypatch.setattr(sys, "stderr", None)
    with activity(shown=how != "argument") as line, line.timed("compiling"):
        time.sleep(0.1)
    assert stderr.getvalue() == ""


def test_inside_another_activity_there_is_one_line(new_stderr):
    new_stderr()
    with activity() as outer, activity() as inner:
        assert inner is outer


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "x"}', "[" * 100_000, '{"a": null}'])
def test_a_damaged_file_of_durations_is_replaced(folder, new_stderr, content):
    new_stderr()
    folder.mkdir()
    (folder / "durations.json").write_text(content)
    with activity() as line, line.timed("compiling"):
        pass
    assert len(json.loads((folder / "durations.json").read_text())) == 1
    assert os.listdir(folder) == ["durations.json"]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
def test_a_terminal_gets_a_moving_line_that_goes_away():
    code = (
        "import time\nfrom m3jax.progress import activity\n"
        "with activity() as line, line.timed('compiling prefill'):\n    time.sleep(1.3)\n    print('out')\n"
    )
    ours, theirs = os.openpty()
    variables = dict(M3JAX_PROGRESS="1", TERM="xterm", COLUMNS="80", PYTHONPATH=str(ROOT))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, env=os.environ | variables, text=True
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.communicate()[0] == "out\n" and process.returncode == 0
    assert b"compiling prefill" in shown and b"compiling prefill, 1 s" in shown
    assert shown.endswith(b"\x1b[2K") and b"\x1b[?25h" in shown, shown[-40:]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
# pexpect forks, and then executes another program at once: nothing of jax runs in between.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("is_ended", [False, True])
def test_what_is_typed_meanwhile_waits_for_the_next_prompt(tmp_path, is_ended):
    """It is not seen beside the moving line; the terminal shows what is typed afterwards, also after Ctrl-C."""
    (tmp_path / "wait.py").write_text(
        "import time\nfrom m3jax.interrupts import end_at_interrupts\nfrom m3jax.progress import activity\n"
        "end_at_interrupts()\n"
        "with activity() as line:\n    line.say('working')\n    time.sleep(1.5)\nprint('read', input().upper())\n"
    )
    environment = os.environ | dict(M3JAX_PROGRESS="1", TERM="xterm", PYTHONPATH=str(ROOT))
    shell = f"trap : INT; {sys.executable} {tmp_path / 'wait.py'}; stty -a"
    child = pexpect.spawn("sh", ["-c", shell], env=environment, encoding="utf-8", timeout=30, dimensions=(40, 120))
    child.expect("working")
    child.sendintr() if is_ended else child.sendline("typed")
    if not is_ended:
        child.expect("read TYPED")
        assert "typed" not in child.before, child.before
    child.expect(r"isig.*[; ](-?)echo ")
    assert child.match[1] == "", "the terminal shows no longer what is typed"
    child.expect(pexpect.EOF)
    child.close()


# What is kept


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (dict(M3JAX_CACHE_DIR="/a"), "/a"),
        (dict(M3JAX_CACHE_DIR=""), None),
        (dict(M3JAX_CACHE_DIR="~/a", HOME="/h"), "/h/a"),
        (dict(XDG_CACHE_HOME="/c"), "/c/m3jax"),
        (dict(XDG_CACHE_HOME="c", HOME="/h"), "/h/.cache/m3jax"),  # the standard: a relative path is ignored
        (dict(HOME="/h"), "/h/.cache/m3jax"),
    ],
)
def test_where_the_folder_is(monkeypatch, variables, expected):
    for name in ("M3JAX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (None if expected is None else Path(expected))


def compile_something(seed: int) -> float:
    """Compile and run a program that no other seed compiles."""
    return float(jax.jit(lambda x: jnp.sin(x) * seed + seed)(jnp.ones(())))


def entries(folder: Path) -> set[str]:
    return {path.name for path in (folder / "compiled").glob("*-cache")}


def test_what_is_compiled_is_kept_and_jax_is_as_before(folder):
    settings = lambda: [
        getattr(jax.config, name) for name in dir(jax.config) if name.startswith("jax_") and "cache" in name
    ]
    before = settings()
    with compile_cache.compile_cache():
        assert jax.config.jax_compilation_cache_max_size == compile_cache.MAX_BYTES
        value = compile_something(2)
    kept = entries(folder)
    assert settings() == before and any("lambda" in name for name in kept)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    compile_something(3)
    assert entries(folder) == kept, "what is compiled outside got into the folder"
    jax.clear_caches()
    times = {name: (folder / "compiled" / name).stat().st_mtime_ns for name in kept}
    with compile_cache.compile_cache():
        assert compile_something(2) == value
    assert {name: (folder / "compiled" / name).stat().st_mtime_ns for name in kept} == times


def test_what_is_compiled_is_kept_where_the_user_wants_it(folder, monkeypatch, capsys):
    """Both doors: the command line, and the function."""
    seen = []
    keeps = lambda: jax.config.jax_compilation_cache_dir == str(folder / "compiled")
    monkeypatch.setattr(generation, "on_hosts", lambda *_: seen.append(keeps()))
    assert cli.main(["--prompt", "a"]) == 0
    assert cli.main(["--prompt", "a", "--no-compile-cache"]) == 0
    module = sys.modules["m3jax.decoding.builder"]
    monkeypatch.setattr(module, "Engine", lambda *args, **options: (seen.append(keeps()), Engine(*args, **options))[1])
    generate(FakeModel.random(), [[1, 2, 3]], max_new_tokens=3)
    assert seen == [True, False, True] and not keeps()
    assert capsys.readouterr() == ("", "")
    (folder / "file").write_text("")
    monkeypatch.setenv("M3JAX_CACHE_DIR", str(folder / "file"))
    assert cli.main(["--prompt", "a", "--no-compile-cache"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main(["--prompt", "a"]) == 0
    assert (
        capsys.readouterr().err == f"m3jax.generate: note: compiled programs are not kept: {folder}/file: File exists\n"
    )


def test_the_users_own_cache_is_left_alone(folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with compile_cache.compile_cache():
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with compile_cache.compile_cache():
            assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    with compile_cache.compile_cache(wanted=False):
        assert jax.config.jax_compilation_cache_dir is None
        with compile_cache.compile_cache():
            assert jax.config.jax_compilation_cache_dir is None, "an engine's builder asks for it in the command line"
    assert not folder.exists()
    with compile_cache.compile_cache():
        assert jax.config.jax_compilation_cache_dir is not None


def test_damaged_and_unfinished_entries_are_replaced(folder):
    with compile_cache.compile_cache():
        compile_something(5)
    kept = list((folder / "compiled").glob("*lambda*-cache"))
    for path in kept:
        path.write_bytes(b"damaged")
    unfinished = folder / "compiled" / "jit_other-00-cache"
    unfinished.write_bytes(b"a process died here")
    jax.clear_caches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with compile_cache.compile_cache():
            warnings.warn("of somebody else", stacklevel=1)
            compile_something(5)
    assert [str(warning.message) for warning in caught] == ["of somebody else"]
    assert not unfinished.exists()
    assert kept and all(path.read_bytes() != b"damaged" for path in kept), "jax leaves a damaged entry where it is"


def test_a_folder_that_cannot_be_written_is_no_error(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("M3JAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert re.search("file/cache: Not a directory", why_not_kept())
    with compile_cache.compile_cache():
        compile_something(7)


@pytest.mark.further  # jax's own locks, under a load
def test_processes_share_the_folder(folder):
    """Four at once compile the same, and a size limit makes them remove each other's entries; none says a word."""
    code = (
        "import jax, jax.numpy as jnp, sys\nfrom m3jax import compile_cache\n"
        "compile_cache.MAX_BYTES = 20_000\n"
        "with compile_cache.compile_cache():\n"
        "    for i in range(12): print(float(jax.jit(lambda x: jnp.sin(x) * i)(jnp.ones(()))))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= dict(M3JAX_CACHE_DIR=str(folder), PYTHONPATH=str(ROOT))
    command = [sys.executable, "-W", "error", "-c", code]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    results = [(*process.communicate(), process.returncode) for process in processes]
    assert [result[1:] for result in results] == [("", 0)] * 3
    assert len({result[0] for result in results}) == 1
    assert sum(path.stat().st_size for path in (folder / "compiled").glob("*-cache")) <= 20_000
