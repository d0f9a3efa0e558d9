"""Runs README's Python blocks and commands as after `pip install -e .`: what only the tests install is not found.

A program of its own: `python documented_install.py README.md`. Each command goes on in this process, as the programs of
its name would. `python documented_install.py demo.py chat,media` runs a script instead, as after an install with those
extras, until it makes an engine: by then all has been found that it needs.
"""

import gc
import importlib.machinery
import importlib.metadata
import re
import runpy
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement


def installed_with(distribution: str, extras: tuple[str, ...] = ()) -> set[str]:
    """A distribution and all that it requires, without extras nobody asks for, by their normalised names."""
    normalised = lambda name: re.sub(r"[-_.]+", "-", name).lower()
    found, waiting = set(), [(distribution, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (normalised(name), extra) in found:
            continue
        found.add((normalised(name), extra))
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                with suppress(importlib.metadata.PackageNotFoundError):
                    importlib.metadata.distribution(requirement.name)
                    waiting += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]
    return {name for name, _ in found}


def hide_all_but(distributions: set[str]) -> set[str]:
    """Make the modules of other distributions impossible to find; the names that are hidden."""
    normalised = lambda name: re.sub(r"[-_.]+", "-", name).lower()
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not distributions & set(map(normalised, owners))
    }
    find = importlib.machinery.PathFinder.find_spec

    def find_others(name, path=None, target=None):
        return None if name.split(".")[0] in hidden else find(name, path, target)

    importlib.machinery.PathFinder.find_spec = find_others
    return hidden


def main(file: str, extras: str = "") -> None:
    """Run what the file holds; the first that fails ends the process."""
    gc.set_threshold(50_000, 20, 20)  # as in tests/conftest.py
    hidden = hide_all_but(installed_with("m3jax", tuple(filter(None, extras.split(",")))))
    assert {"pytest", "matplotlib", "hypothesis"} <= hidden, sorted(hidden)
    assert not {"jax", "flax", "m3jax", "tokenizers", "rich"} & hidden, sorted(hidden)
    if Path(file).suffix == ".py":
        run_script(file)
    else:
        run_document(file)
    print("== all ran", flush=True)


def run_script(file: str) -> None:
    """Run a script until it makes an engine."""
    from m3jax import decoding

    class EngineReached(Exception):
        pass

    def engine_for(*_, **__):
        raise EngineReached

    decoding.engine_for, sys.argv = engine_for, [file]
    try:
        sys.path[0] = str(Path(file).parent)  # as `python FILE` has it: a script imports what lies beside it
        runpy.run_path(file, run_name="__main__")
    except EngineReached:
        return
    raise SystemExit(f"{file} made no engine")


def run_document(document: str) -> None:
    """Run a document's blocks, then its commands."""
    text = Path(document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    fenced = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S))
    commands = [line for line in fenced.splitlines() if line.startswith("m3jax ")]
    names = {"__name__": document}
    for number, block in enumerate(blocks, 1):
        print(f"== block {number}", flush=True)
        exec(compile(block, f"{document}, block {number}", "exec"), names)
    for line in commands:
        print(f"== {line}", flush=True)
        sys.argv = shlex.split(line, comments=True)
        try:
            runpy.run_module("m3jax", run_name="__main__")
        except SystemExit as end:
            assert end.code in (None, 0), f"{line}: exit status {end.code}"


if __name__ == "__main__":
    main(*sys.argv[1:])
