"""Damages the JSON files of a model folder at random, and counts what reading them gives: a value, or a usable error.

Each case is drawn from (seed, number), so that `--only NUMBER` repeats one. Cases run in a process of their own: one
that ends it, or stays silent for 40 s, is counted as a failure like any other.

    python scripts/fuzz_config.py --seconds 60
"""

import argparse
import json
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from m3jax.assets import embedded_path
from m3jax.completion import Defaults
from m3jax.config import M3Config
from m3jax.messages import MOST_CHARACTERS
from m3jax.text import Tokenizer

# What makes a case from its random numbers: it damages files in a folder, and returns what reads them.
Case = Callable[[random.Random, Path], Callable[[], object]]

SLOW_SECONDS, SILENT_SECONDS = 5, 20
REFUSED = ("ValueError", "OSError")
DEEP = "deep"  # stands for a value that json.dumps could not write
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**9, 100_000, 10**30, 10**400, 0.5, -0.0, 1e-320,
    1e308, 1e39, float("nan"), float("inf"), float("-inf"), "", "x", "x" * 10_000, "\x1b[31mred", "\u202e", "\ud800",
    "\0", "../../etc/passwd", [], {}, [[]], [0], [1] * 70, [0] * 200_000, ["x"], {"a": 1}, {"type": "x"}, DEEP,
)  # fmt: skip


def damaged_json(draw: random.Random, data: Any) -> bytes:
    """The text of a JSON value with one to three values changed, or with damage to its bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = _changed(draw, data)
    text = json.dumps(data).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    if draw.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + "," + text[1:]  # every key twice
    damaged = text.encode("utf-8", "surrogatepass")
    return damaged_bytes(draw, damaged) if draw.random() < 0.15 else damaged


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return the bytes with one piece cut off, changed, doubled or put in front."""
    place = draw.randrange(len(data) + 1)
    kinds = (
        lambda: data[:place],
        lambda: data[place:],
        lambda: data[:place] + draw.randbytes(draw.choice((1, 4, 64))) + data[place + 4 :],
        lambda: data[:place] + data[place // 2 :],
        lambda: draw.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" " * 100, b"[")) + data,
        lambda: b"",
    )
    return draw.choice(kinds)()


def _changed(draw: random.Random, data: Any) -> Any:
    """A copy of a parsed JSON file with the value, or the key, at one place changed."""
    data = json.loads(json.dumps(data))
    if not isinstance(data, dict | list) or not data or draw.random() < 0.02:
        return draw.choice(VALUES)
    container, key = data, draw.choice(_keys(data))
    while isinstance(container[key], dict | list) and container[key] and draw.random() < 0.7:
        container = container[key]
        key = draw.choice(_keys(container))
    if draw.random() < 0.15:
        del container[key]
    elif draw.random() < 0.1 and isinstance(container, dict):
        container[draw.choice(("", "x" * 5000, "\x1b]0;title\x07", "\ud800", "unknown"))] = container.pop(key)
    elif isinstance(container[key], int) and draw.random() < 0.4:
        container[key] = container[key] * draw.choice((-1, 2, 3, 1000, 10**6)) + draw.choice((-1, 0, 1))
    else:
        container[key] = draw.choice(VALUES)
    return data


def _keys(container: dict | list) -> Sequence:
    return list(container) if isinstance(container, dict) else range(len(container))


# Parts of a tokenizer.json that the embedded one has not; at some the library panics, ends the process or hangs.
_BPE = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]]}
PARTS: dict[str, tuple] = {
    "normalizer": (
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Precompiled", "precompiled_charsmap": ""},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}, {"type": "NFC"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, {"type": "Prepend", "prepend": "_"},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b"}]},
    ),
    "post_processor": (
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [],
         "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["x", 0], "cls": ["y", 10**9]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ),
    "decoder": (
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}, {"type": "ByteFallback"}, None,
        {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}, {"type": "Fuse"},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
    ),
    "truncation": ({"max_length": 0, "stride": 5, "strategy": "LongestFirst", "direction": "Right"},),
    "padding": ({"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"},),
    "model": (
        *(_BPE | {"continuing_subword_prefix": prefix} for prefix in ("#", "éé", "x" * 50)),
        {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False},
        {"type": "WordPiece", "unk_token": "no", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
         "vocab": {"a": 0, "no": 1}},
        {"type": "WordLevel", "unk_token": "no", "vocab": {"a": 0}},
    ),
}  # fmt: skip


def _json_case(name: str, read: Callable[[Path], object], parts: Mapping[str, tuple] = MappingProxyType({})) -> Case:
    """A case that damages one file of the embedded folder, sometimes with another of `parts` in it."""
    original = json.loads((embedded_path() / name).read_text(encoding="utf-8"))

    def make(draw: random.Random, folder: Path) -> Callable[[], object]:
        for other in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(embedded_path() / other, folder / other)
        data = dict(original)
        if parts and draw.random() < 0.5:
            data |= {key: draw.choice(parts[key]) for key in draw.sample(sorted(parts), draw.randint(1, 2))}
            if draw.random() < 0.5:
                (folder / name).write_text(json.dumps(data))
                return lambda: read(folder)
        (folder / name).write_bytes(damaged_json(draw, data))
        return lambda: read(folder)

    return make


def _use_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(folder)
    for text in ("", "def f(x):\n    return 'é🦜'", "]~!b[a[e~["):
        tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)


CASES: dict[str, Case] = {
    "config.json": _json_case("config.json", M3Config.from_pretrained),
    "generation_config.json": _json_case("generation_config.json", Defaults.from_pretrained),
    "tokenizer_config.json": _json_case("tokenizer_config.json", Tokenizer.from_pretrained),
    "tokenizer.json": _json_case("tokenizer.json", _use_tokenizer, PARTS),
}


# What runs cases


def outcome(cases: Mapping[str, Case], seed: int, number: int) -> tuple[str, str, str]:
    """Read one damaged folder, and return what came of it.

    Returns:
      Its kind, "loaded", the error's type, or "failure", and the error's message or what failed.
    """
    draw = random.Random(f"{seed}:{number}")
    kind = draw.choice(sorted(cases))
    folder = Path(tempfile.mkdtemp(prefix="m3jax-fuzz-"))

    def too_slow(*_: object) -> None:
        raise TimeoutError(f"more than {SLOW_SECONDS} s of work, or {SILENT_SECONDS} s in all")

    handlers = {alarm: signal.signal(alarm, too_slow) for alarm in (signal.SIGPROF, signal.SIGALRM)}
    try:
        read = cases[kind](draw, folder)
        signal.setitimer(signal.ITIMER_PROF, SLOW_SECONDS)  # of the processor: another load is not the file's fault
        signal.setitimer(signal.ITIMER_REAL, SILENT_SECONDS)
        read()
        return kind, "loaded", ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return kind, *_judged(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for alarm, handler in handlers.items():
            signal.signal(alarm, handler)
        shutil.rmtree(folder)


def _judged(error: BaseException) -> tuple[str, str]:
    """Return an error's verdict and its text; the verdict is "failure" for an error that a user cannot act on."""
    text = str(error)
    if isinstance(error, TimeoutError) or not isinstance(error, ValueError | OSError):
        return "failure", f"{type(error).__name__}: {text[:300]}"
    if isinstance(error, UnicodeError) or not text:
        return "failure", f"a bare {type(error).__name__}: {text[:300]}"
    if len(text) > MOST_CHARACTERS:
        return "failure", f"a message of {len(text)} characters: {text[:100]}"
    if not text.replace("\n", "").isprintable():
        return "failure", f"control characters in the message: {text[:300]!r}"
    return "OSError" if isinstance(error, OSError) else "ValueError", text


def fuzz(cases: Mapping[str, Case], seed: int, seconds: float, most: int = 10**9) -> tuple[Counter, list[str]]:
    """Run cases in this process.

    Args:
      cases: what makes a case, by kind.
      seed: of all cases.
      seconds: after which no more is begun.
      most: cases.

    Returns:
      How often each (kind, outcome) came, and a line for each failure.
    """
    counts, failures, end, number = Counter(), [], time.monotonic() + seconds, 0
    while number < most and time.monotonic() < end:
        kind, result, text = outcome(cases, seed, number)
        counts[kind, result] += 1
        if result == "failure":
            failures.append(f"case {number}, {kind}: {text}")
        number += 1
    return counts, failures


def _work(cases: Mapping[str, Case], seed: int, first: int, seconds: float) -> None:
    """Run cases and print each one's outcome on a line: the child's half of `_watch`."""
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        print(json.dumps(outcome(cases, seed, number)), flush=True)
        number += 1


def _watch(seed: int, seconds: float) -> tuple[Counter, list[str]]:
    """Run cases in a child, and in another one where a case ends it."""
    counts, failures, end, number = Counter(), [], time.monotonic() + seconds, 0
    while (remaining := end - time.monotonic()) > 0:
        arguments = [sys.argv[0], "--seed", str(seed), "--seconds", str(remaining), "--first", str(number)]
        child = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        silence = 6 * SILENT_SECONDS  # its imports
        while select.select([child.stdout], [], [], silence)[0] and (line := child.stdout.readline()):
            kind, result, text = json.loads(line)
            counts[kind, result] += 1
            if result == "failure":
                failures.append(f"case {number}, {kind}: {text}")
            number, silence = number + 1, 2 * SILENT_SECONDS
        child.stdout.close()
        is_silent = child.poll() is None and time.monotonic() < end
        child.kill()
        status = child.wait()
        if is_silent or status not in (0, -signal.SIGKILL):
            counts["(the process)", "failure"] += 1
            failures.append(f"case {number}: " + ("silent" if is_silent else f"the process ended with {status}"))
            number += 1
    return counts, failures


def table(counts: Counter) -> str:
    """The counts, a line for each kind."""
    columns = ("loaded", *REFUSED, "failure")
    rows = [("kind", "cases", *columns)]
    for kind in sorted({kind for kind, _ in counts}):
        numbers = [counts[kind, column] for column in columns]
        rows.append((kind, f"{sum(numbers):,}", *(f"{number:,}" for number in numbers)))
    totals = [sum(n for (_, result), n in counts.items() if result == column) for column in columns]
    rows.append(("all", f"{sum(totals):,}", *(f"{number:,}" for number in totals)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


def main(description: str, cases: Mapping[str, Case]) -> int:
    """The command line of a fuzzer: its exit status is 1 after any failure."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run one case, and show what it gives")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first is not None:
        _work(cases, args.seed, args.first, args.seconds)
        return 0
    if args.only is not None:
        kind, result, text = outcome(cases, args.seed, args.only)
        print(f"case {args.only}, {kind}: {result} {text}")
        return result == "failure"
    counts, failures = _watch(args.seed, args.seconds)
    print(table(counts))
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    print(f"{len(failures)} failures in {args.seconds:g} s, seed {args.seed}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], CASES))
