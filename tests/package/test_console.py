"""Streams, signals and errors of every command line; answers that need no jax come within 0.1 s."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import m3jax
from m3jax.__main__ import COMMANDS
from m3jax.console import print_error
from m3jax.interrupts import WAITING

ROOT = Path(__file__).resolve().parents[2]
# Streams are buffered, as for most users: what cannot be written fails at the flush, and again as the process ends.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
LIGHT = (
    "from m3jax.console import *; import m3jax.interrupts as i; "
    "run_program(lambda: run_command('p', Parser('p', ''), lambda args: {body}, []))"
)


def shell(line: str, **variables: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a line of sh, in which `python` is this interpreter."""
    environment = ENVIRONMENT | variables
    finished = subprocess.run(
        ["sh", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {line}'],
        env=environment, capture_output=True, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    return finished.returncode, finished.stdout, finished.stderr


def assert_one_line(err: str, *parts: str) -> None:
    assert err.count("\n") == 1 and "Traceback" not in err, err
    for part in parts:
        assert part in err, (part, err)


def helped(module: str) -> str:
    """The help of a module, for which nothing large is imported."""
    status, out, err = shell(f"python -X importtime -m {module} --help")
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert status == 0 and out.startswith(f"usage: python -m {module} ") and "argparse" in imported
    assert not imported & {"jax", "numpy", "rich", "m3jax.checkpoint"}
    return out


# What the installed script does, as packaging tools write it; the script itself is only there after an install.
[(NAME, VALUE)] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
INSTALLED = (
    f"python -c \"import sys; sys.argv[0] = '/bin/{NAME}'; from importlib.metadata import EntryPoint; "
    f"sys.exit(EntryPoint('{NAME}', '{VALUE}', 'console_scripts').load()())\""
)


@pytest.mark.parametrize(("called", "name"), [(INSTALLED, "m3jax"), ("python -m m3jax", "python -m m3jax")])
def test_the_command_lists_its_commands_and_shows_how_it_was_called(called, name):
    for line in (called, f"{called} --help"):
        status, out, err = shell(line)
        assert (status, err) == (0, "") and out.startswith(f"usage: {name} ")
        listed = re.findall(rf"^  {name} (\w+) +(\S.*)$", out, re.M)
        assert [command for command, _ in listed] == list(COMMANDS)
    assert shell(f"{called} --version") == (0, f"m3jax {m3jax.__version__}\n", "")
    assert helped("m3jax")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_the_module_of_its_name(command):
    """With its help, and its line for wrong arguments; neither needs jax."""
    status, out, err = shell(f"{INSTALLED} {command} --help")
    assert (status, err) == (0, "") and out.startswith(f"usage: m3jax {command} ")
    words = lambda text: text[text.index("options:") :].split()
    assert words(out) == words(helped(f"m3jax.{command}"))
    status, out, err = wrong = shell(f"python -m m3jax.{command} --verboze")
    assert (status, out) == (2, "") and wrong == shell(f"{INSTALLED} {command} --verboze")
    assert_one_line(err, f"m3jax.{command}: error: ")


def test_a_command_sets_in_its_process_what_its_module_does():
    """Planning takes no accelerator, whatever the variables say, and its status tells whether a model fits."""
    line = "plan --topology v5p:2x2x1 --context 9 --no-compile"
    status, out, err = shell(f"python -m m3jax {line}", JAX_PLATFORMS="nowhere")
    assert (status, err) == (1, "") and "HBM" in out, out


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("generate --seed 1", "one of the arguments --prompt"),
        ("generate --prompt a --logprobs", "--logprobs needs --json"),
        ("generate --prompt a --temperature warm", "invalid float value"),
        ("generate --prompt a --model nowhere", "no such model folder: nowhere"),
        ("chat --model nowhere", "no such model folder: nowhere"),
        ("plan --topology h200:8 --context 9 --model nowhere", "no such model folder: nowhere"),
        ("evaluate --task recall --against nowhere", "no such model folder: nowhere"),
        ("evaluate --task recall --tokens 2", "--tokens is for --task perplexity"),
        ("evaluate --task recall --out out", "--out needs matplotlib"),
        ("compare a b --html out.html", "--html needs matplotlib"),
    ],
)
def test_what_can_be_refused_without_jax_is(tmp_path, line, part):
    """`docs/commands.md` lists it. Here jax and matplotlib cannot be imported or found."""
    (tmp_path / "jax.py").write_text("raise SystemExit(77)\n")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    status, out, err = shell(f"cd {tmp_path}; python -m m3jax {line}", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (status, out) == (2, "")
    assert_one_line(err, part)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("genrate --prompt a", ("no such command: genrate (did you mean generate?); python -m m3jax --help",)),
        ("quux", ("no such command: quux; python -m m3jax --help lists them",)),
        ("--verbose plan", ("the command comes first: python -m m3jax plan",)),
        ("--vesion", ("unrecognized arguments: --vesion (did you mean --version?)",)),
        # What is missing because of the slip is not what is said.
        ("generate --promt a --seed 1", ("unrecognized arguments: --promt (did you mean --prompt?); --help",)),
        ("generate --prompt a --temprature=0", ("--temprature=0 (did you mean --temperature?)",)),
        ("vectors make --ot folder", ("unrecognized arguments: --ot (did you mean --out?)",)),
        # These begin with dashes and are no options: a text, as its space shows, and what follows a bare --.
        ("generate --prompt '-- a b' --top-k x", ("argument --top-k: invalid int value",)),
        ("compare -- --a", ("the following arguments are required: B",)),
    ],
)
def test_a_slip_names_what_is_nearest(line, parts):
    status, out, err = shell(f"python -m m3jax {line}")
    assert (status, out) == (2, "")
    assert_one_line(err, *parts)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("generate --prompt a", "jax"),
        pytest.param("generate --prompt a", "tokenizers", marks=pytest.mark.further),
        pytest.param("plan --topology h200:8 --context 9", "flax", marks=pytest.mark.further),
    ],
)
def test_an_interrupt_in_an_import_ends_the_process(tmp_path, module, name):
    """With 130 and without a word, also where the import swallows every exception, as some do."""
    (tmp_path / f"{name}.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\n"
        "except BaseException:\n    print('swallowed')\nos._exit(77)\n"
    )
    assert shell(f"python -m m3jax.{module}", PYTHONPATH=f"{tmp_path}:{ROOT}") == (130, "", "")


def test_an_ignored_interrupt_stays_ignored():
    body = "(__import__('os').kill(os.getpid(), 2), write('done'))[1] or 0"
    assert shell(f"trap '' INT; python -c \"{LIGHT.format(body=body)}\"") == (0, "done", "")


def test_the_first_interrupt_raises_and_the_second_ends_the_process():
    kill = "os.kill(os.getpid(), 2)"
    assert shell(f'python -c "{LIGHT.format(body=f"(i.raise_interrupts(), {kill}, write(1))")}"') == (130, "", "")
    code = (
        "from m3jax.console import *\nfrom m3jax.interrupts import raise_interrupts\n"
        "def run(args):\n    raise_interrupts()\n    try: os.kill(os.getpid(), 2)\n"
        "    except BaseException:\n        try: os.kill(os.getpid(), 2)\n        except BaseException: pass\n"
        "    os._exit(77)\n"
        "run_program(lambda: run_command('p', Parser('p', ''), run, []))"
    )
    assert shell(f'python -c "{code}"') == (130, "", "")


HELD = {
    # As long on any machine: a signal would end a sleep.
    "runs C code": "hashlib.pbkdf2_hmac('sha256', b'', b'', int(a_second * {seconds}))",
    "waits for threads": "with ThreadPoolExecutor() as pool: pool.submit(time.sleep, {seconds}).result()",
}


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize(
    ("held", "noted"), [("runs C code", False), ("waits for threads", False), ("waits for threads", True)]
)
def test_an_interrupt_that_can_do_nothing_yet_is_answered(noted, presses, held):
    """As while XLA compiles: the first says that a second ends it, the second does, and the first alone works later."""
    work = HELD[held].format(seconds=2.5 if presses == 1 else 30)
    code = (
        "import hashlib, time\nfrom concurrent.futures import ThreadPoolExecutor\nfrom m3jax.console import *\n"
        "from m3jax.interrupts import *\n"
        "began = time.perf_counter()\nhashlib.pbkdf2_hmac('sha256', b'', b'', 200_000)\n"
        "a_second = 200_000 / (time.perf_counter() - began)\n"
        "def run(args):\n    raise_interrupts()\n    write('held\\n')\n"
        f"    with {'NotedInterrupts()' if noted else 'ThreadPoolExecutor()'} as interrupts:\n        {work}\n"
        "        return 7 if interrupts.noted else 8\n"
        "run_program(lambda: run_command('p', Parser('p', ''), run, []))"
    )
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, encoding="utf-8", **pipes) as process:
        assert process.stdout.readline() == "held\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == f"{WAITING}\n"
        assert process.poll() is None
        if presses == 2:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == (7 if noted and presses == 1 else 130)
        assert process.stderr.read() == ""


@pytest.mark.parametrize("module", ["m3jax", "m3jax.generate --help"])
def test_streams_that_cannot_be_written(module):
    status, _, err = shell(f"python -m {module} >/dev/full")
    assert status == 2
    assert_one_line(err, "/dev/full", "No space left on device")
    status, _, err = shell(f"python -m {module} >&-")
    assert status == 2
    assert_one_line(err, "standard output", "closed")
    read_end, write_end = os.pipe()
    os.close(read_end)  # the reader is gone before the first byte
    command = [sys.executable, "-m", *module.split()]
    finished = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False)
    os.close(write_end)
    assert (finished.returncode, finished.stderr) == (141, b"")


def test_closed_streams_that_are_not_needed():
    assert shell("python -m m3jax.plan --what 2>&-") == (2, "", "")
    assert shell("python -m m3jax.plan --what 2>/dev/full") == (2, "", "")
    status, out, err = shell("python -m m3jax <&- 2>&-")
    assert (status, err) == (0, "") and "m3jax generate" in out
    # A file that is opened later does not become a standard stream, on which messages would land.
    body = "write(str(open('README.md').fileno()) + '\\n') or 0"
    assert int(shell(f'cd {ROOT}; python -c "{LIGHT.format(body=body)}" <&- 2>&-')[1]) > 2


def test_text_that_stdout_cannot_encode_is_escaped():
    body = "write(chr(233) + chr(0xd800) + chr(0x4e2d)) or 0"
    line = f'python -c "{LIGHT.format(body=body)}"'
    assert shell(line, PYTHONIOENCODING="ascii") == (0, "\\xe9\\ud800\\u4e2d", "")
    assert shell(line, PYTHONIOENCODING="utf-8") == (0, "é\\ud800中", "")


def test_an_error_is_one_short_line_unless_all_of_it_is_asked_for(capsys):
    error = ValueError("12 problems: \x1b[31mone;\ntwo\x07; and 10 more")
    for number in range(12):
        error.add_note(f"problem {number}\r\x9b")
    print_error("p", error)
    err = capsys.readouterr().err
    assert_one_line(err, "p: error: 12 problems: ", "\\x1b[31mone;; two\\x07", "--verbose")
    assert "problem 3" not in err
    print_error("p", error, verbose=True)
    assert capsys.readouterr().err.splitlines()[1:] == [f"  problem {number}\\r\\x9b" for number in range(12)]
    print_error("p", OSError(28, "No space left on device", "a\nfile"))
    assert capsys.readouterr().err == "p: error: a\\nfile: No space left on device\n"
    print_error("p", ValueError("x" * 5000))
    err = capsys.readouterr().err
    assert 1900 < len(err) <= 2001 and err.endswith("--verbose prints all of it\n")
    print_error("p", MemoryError())
    assert capsys.readouterr().err == "p: error: MemoryError\n"
