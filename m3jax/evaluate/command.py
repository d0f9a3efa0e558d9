"""The work of `python -m m3jax.evaluate` after its arguments are parsed."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from m3jax.cli.settings import settings
from m3jax.config import M3Config
from m3jax.console import write
from m3jax.evaluate.dumps import ABOUT, write_dump
from m3jax.evaluate.plots import PLOTS, plot
from m3jax.evaluate.reading import Reading
from m3jax.evaluate.subjects import Subject, each_loaded, read_texts, spread, subjects, tokenised
from m3jax.evaluate.tasks import ALL_TOKENS, TASKS, Figures, context_of
from m3jax.files import NewFile
from m3jax.hosts.run import is_first, on_hosts
from m3jax.messages import printable
from m3jax.parallel import parse_mesh
from m3jax.progress import activity
from m3jax.text import Tokenizer

PROG = "m3jax.evaluate"
SCHEMA = 1


def evaluate(args: argparse.Namespace) -> None:
    """Measure what the arguments ask for, print the figures, and write the files that the arguments name.

    Args:
      args: of `m3jax.evaluate.__main__`, with the task's defaults.

    Raises:
      ValueError: a bad argument, or a folder or file that cannot be used.
      OSError: a file that cannot be written.
      FloatingPointError: logits that are no numbers.
    """
    with settings(args, PROG):
        on_hosts(args, PROG, lambda _: _evaluate(args))


def _evaluate(args: argparse.Namespace) -> None:
    """Measure on every process, and print and write on the first."""
    # Everything that can be refused is refused before weights are read.
    folders = [args.model, *([] if args.against is None else [args.against])]
    asked = subjects(folders, args.dtype, args.cache_dtype, args.index_dtype, args.backend)
    mesh = None if args.mesh is None else parse_mesh(args.mesh)
    if args.write_reference is not None:
        return _write_reference(args, asked, mesh)
    paths = [args.out / f"{args.task}{end}" for end in (".json", ".png")] if args.out is not None else []
    _check_new(paths, args.out)
    task, prepared = TASKS[args.task], {}
    with activity() as line:
        line.say("reading texts")
        for subject in asked:
            if (subject.folder, subject.dtype) not in prepared:
                prepared[subject.folder, subject.dtype] = task.prepare(args, subject, mesh)
    figures = [
        task.measure(args, subject, model, prepared[subject.folder, subject.dtype])
        for subject, model in each_loaded(asked, mesh)
    ]
    report = {
        "schema": SCHEMA, "task": args.task, "jax": jax.__version__,
        "device": jax.local_devices()[0].device_kind, "mesh": args.mesh, "settings": _settings(args),
        "results": [subject.settings() | measured for subject, measured in zip(asked, figures, strict=True)],
    }  # fmt: skip
    if not is_first():
        return None
    names = column_names(report["results"])
    write(as_text([["", *names], *task.table(report["results"])]))
    if paths:
        _write_new(paths[0], (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
        _write_new(paths[1], plot(PLOTS[args.task], names, report["results"]))
        write(f"{paths[0]}\n{paths[1]}\n")
    return None


def _write_reference(args: argparse.Namespace, asked: Sequence[Subject], mesh: Mesh | None) -> None:
    """Write the logits of one subject for `--task kl --reference`."""
    if len(asked) > 1:
        raise ValueError("--write-reference: a reference is of one model in one way; give one name to each option")
    if jax.process_count() > 1:
        raise ValueError("--write-reference writes on one host: leave --coordinator out")
    folder = args.write_reference
    _check_new([folder / ABOUT], folder)
    if stale := sorted(folder.glob("*.safetensors")):
        raise ValueError(
            f"--write-reference {printable(str(folder))}: {stale[0].name} is there already; name another folder"
        )
    (path,) = {subject.path for subject in asked}
    with activity() as line:
        line.say("reading texts")
        texts = tokenised(Tokenizer.from_pretrained(path), read_texts(args.text), ALL_TOKENS)
    rows = spread(texts, args.prompts, context_of(args, M3Config.from_pretrained(path), 512))
    for subject, model in each_loaded(asked, mesh):
        how = subject.reading(model, Reading(args.chunk, args.batch), rows[0])
        about = {"jax": jax.__version__, "device": jax.local_devices()[0].device_kind}
        write_dump(model, rows, folder, about | subject.settings(), how)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        write(f"{folder}: logits of {len(rows)} prompts of {len(rows[0])} tokens, {size / 2**20:.1f} MiB\n")


# What is written


def column_names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each result: its model, and the settings that differ between the results.

    Args:
      results: of a report.
    """
    keys = ("model", "dtype", "kv_dtype", "index_dtype", "backend")
    differing = [key for key in keys if len({result[key] for result in results}) > 1]
    always = ["model", "dtype"] if not differing else [] if {"model", "dtype"} & {*differing} else ["dtype"]
    telling = [*always, *differing]

    def parts(result):
        for key in telling:
            value = result[key]
            if key == "model":
                yield Path(value).name or value
            elif key not in ("kv_dtype", "index_dtype"):
                yield value
            elif value != result["dtype"]:  # a cache in the model's own dtype goes without saying
                yield f"{'cache' if key == 'kv_dtype' else 'index'} {value}"

    return [", ".join(parts(result)) for result in results]


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table: the first column aligned to the left, the others to the right.

    Args:
      lines: of as many cells each; the first is the heading.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded) + "\n"


def _settings(args: argparse.Namespace) -> Figures:
    """Return the arguments that a report repeats: those that the figures depend on besides the models."""
    names = ("text", "tokens", "context", "skip", "prompts", "lengths", "depths", "repeats", "kinds", "seed",
             "reference", "draft", "draft_tokens", "temperatures", "max_new_tokens", "batch", "chunk")  # fmt: skip
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _check_new(paths: Sequence[Path], folder: Path | None) -> None:
    """Raise ValueError if a file that is to be written exists already; else make the folder."""
    if folder is None:
        return
    if taken := [path for path in paths if path.exists()]:
        raise ValueError(f"{printable(str(taken[0]))} is there already; name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)


def _write_new(path: Path, data: bytes) -> None:
    with NewFile(path) as file:
        file.write(data)
