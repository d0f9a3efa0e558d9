"""The shape of the package: its top level, which way imports run."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from support.house import ALL_THEY_KNOW, ALL_THEY_NEED, EXTRAS_OF, FLOOR_OF, KERNEL_CALLER

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("m3jax", "pallas_kernels")

# Distributions whose import name is another, and where jax itself takes bfloat16 from.
IMPORT_NAMES = {"huggingface-hub": "huggingface_hub", "orbax-checkpoint": "orbax", "Pillow": "PIL"}
IMPORT_NAMES |= {"grpcio": "grpc", "prometheus-client": "prometheus_client", "smg-grpc-proto": "smg_grpc_proto"}
COME_WITH_JAX = {"jaxlib", "ml_dtypes"}
COME_WITH_STUBS = {"smg_grpc_proto": {"google"}}  # protobuf, of which the messages are made

# Folders of one person's machine; the lookbehind leaves web addresses and relative paths alone.
MACHINE_PATH = re.compile(r"(?<![\w.~$}>/-])/(?:work|tmp|root|home|Users|opt|mnt|scratch)/")


class Import(NamedTuple):
    """One import of one file."""

    importer: str
    line: int
    name: str

    def __str__(self):
        return f"{self.importer} imports {self.name} (line {self.line})"


@cache
def tracked_files() -> tuple[Path, ...]:
    """Paths, relative to the root, that git knows; skips the test outside a checkout."""
    git = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if git.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    return tuple(Path(name) for name in git.stdout.split("\0") if name and (ROOT / name).is_file())


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def in_packages(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


def room(module: str) -> str:
    """The room of a module: "m3jax.msa" of m3jax.msa.schedules.blockwise, "m3jax" of the names that a user types."""
    parts = module.split(".")
    return parts[0] if parts[0] != "m3jax" else ".".join(parts[:2])


@cache
def own_names(package: str) -> frozenset[str]:
    """Names that a package's `__init__` defines or takes from a module, which hide submodules of the same name."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    names = set()
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    # What is imported at its first use stands under `if TYPE_CHECKING`.
    body += [line for node in body if isinstance(node, ast.If) for line in node.body]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module != package:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return frozenset(names)


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """The modules that a file imports, by their full names: at any depth, in any branch or function, also by string."""
    importer = module_name(path)
    package = importer if path.name == "__init__.py" else module_name(path.parent)
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [Import(importer, node.lineno, name) for node in nodes for name in names_in(node, package)]
    return tuple(dict.fromkeys(found))


def names_in(node: ast.AST, package: str) -> Iterator[str]:
    """The modules that one node of a file of `package` imports; of `from a import b` a.b where that is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            member = f"{base}.{alias.name}"
            yield member if is_module(member) and alias.name not in own_names(base) else base
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        # Of a name that is computed, f"pallas_kernels.{op}.{backend}", what stands before the first brace.
        written = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
        yield str(written.value).rstrip(".") if isinstance(written, ast.Constant) else "a computed module"


def imports_in(*folders: str) -> list[Import]:
    return [edge for path in sources(*folders) for edge in imports_of(path)]


def imports_of_packages() -> list[Import]:
    return [edge for package in PACKAGES for edge in imports_in(package)]


# Which way imports run


def upward(imports: Iterable[Import]) -> list[str]:
    """Imports between rooms that do not lead down."""
    return [
        f"{edge}: {room(edge.importer)} is on floor {FLOOR_OF[room(edge.importer)]}, {room(edge.name)} on floor "
        f"{FLOOR_OF[room(edge.name)]}"
        for edge in imports
        if in_packages(edge.name) and {room(edge.importer), room(edge.name)} <= FLOOR_OF.keys()
        if room(edge.importer) != room(edge.name) and FLOOR_OF[room(edge.importer)] <= FLOOR_OF[room(edge.name)]
    ]


def too_much(imports: Iterable[Import]) -> list[str]:
    """Imports of the modules that shall know little."""
    known = [
        f"{edge}: of the house {owner} may import {' and '.join(allowed) or 'nothing'}"
        for edge in imports
        for owner, allowed in ALL_THEY_KNOW.items()
        if within(edge.importer, owner) and in_packages(edge.name) and not within(edge.name, owner)
        if edge.name not in allowed
    ]
    return known + [
        f"{edge}: besides the standard library {owner} may import {' and '.join(allowed)}"
        for edge in imports
        for owner, allowed in ALL_THEY_NEED.items()
        if within(edge.importer, owner) and not in_packages(edge.name)
        if edge.name.split(".")[0] not in {*allowed, *sys.stdlib_module_names}
    ]


def kernel_callers(imports: Iterable[Import]) -> list[str]:
    """Imports of kernels from elsewhere than the room that chooses between them."""
    return [
        f"{edge}: only {KERNEL_CALLER} may import kernels"
        for edge in imports
        if within(edge.name, "pallas_kernels") and within(edge.importer, "m3jax")
        if not within(edge.importer, KERNEL_CALLER)
    ]


def test_every_room_has_its_floor():
    rooms = {room(module_name(path)) for path in sources(*PACKAGES)}
    unplaced, gone = sorted(rooms - FLOOR_OF.keys()), sorted(FLOOR_OF.keys() - rooms)
    assert not unplaced, (
        f"no floor for {', '.join(unplaced)}: add the name to FLOORS in tests/package/test_package.py, on the lowest "
        "floor that is above all that it imports"
    )
    assert not gone, f"FLOORS in tests/package/test_package.py names rooms that are not there: {', '.join(gone)}"
    lacking = [name for name in (*ALL_THEY_KNOW, *ALL_THEY_NEED, KERNEL_CALLER) if not is_module(name)]
    assert not lacking, f"rules of tests/package/test_package.py are about modules that are not there: {lacking}"


def test_imports_run_one_way():
    wrong = upward(imports_of_packages())
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports():
    graph: dict[str, set[str]] = {}
    for edge in imports_of_packages():
        if in_packages(edge.name):
            graph.setdefault(edge.importer, set()).add(edge.name)
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_what_stands_alone_imports_no_more_than_it_may():
    wrong = too_much(imports_of_packages())
    assert not wrong, "\n".join(wrong)


def test_one_room_calls_kernels():
    wrong = kernel_callers(imports_of_packages())
    assert not wrong, "\n".join(wrong)


def test_scripts_and_notebooks_import_what_is_public():
    """They are built on the package like a user's program: no private name of it, and no test or helper of tests.

    The exception are the two definitions that the fuzzer of engines holds them to.
    """
    definitions = ("support.pool_definition", "support.service_definition")
    files = [path for path in sources("tests") if "support" not in path.parts and path.stem != "__init__"]
    of_tests = {"tests", "support", "conftest", *(path.stem for path in files)}
    wrong = [
        str(edge)
        for edge in imports_in("scripts", "notebooks")
        if (edge.name.split(".")[0] in of_tests and not edge.name.startswith(definitions))
        or (in_packages(edge.name) and any(part.startswith("_") for part in edge.name.split(".")))
    ]
    for path in sources("scripts", "notebooks"):
        wrong += [
            f"{module_name(path)} imports {alias.name} of {node.module} (line {node.lineno})"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and in_packages(node.module or "")
            for alias in node.names
            if alias.name.startswith("_")
        ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_scripts_or_notebooks():
    """Two scripts may share code; what anything else needs lies in a package, or in tests/support.

    The exception is `tiny`, which trains the embedded checkpoint: it has tests, and a notebook draws with it.
    """
    top_names = lambda folder: {path.relative_to(ROOT / folder).parts[0] for path in sources(folder)}
    programs = {Path(name).stem for folder in ("scripts", "notebooks") for name in top_names(folder)}
    wrong = [
        str(edge)
        for edge in imports_in(*PACKAGES, "tests", "notebooks", "scripts")
        if edge.name.split(".")[0] in {"scripts", "notebooks", *programs} - {"tiny"}
        if not (edge.importer.startswith("scripts.") and is_module(f"scripts.{edge.name}"))
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    imported = lambda lines: {IMPORT_NAMES.get(name, name) for name in (re.match(r"[\w-]+", line)[0] for line in lines)}
    allowed = imported(project["dependencies"]) | COME_WITH_JAX | set(PACKAGES) | sys.stdlib_module_names
    of_extra = {name: imported(lines) for name, lines in project["optional-dependencies"].items()}
    of_extra = {
        name: set().union(found, *map(COME_WITH_STUBS.get, found & COME_WITH_STUBS.keys()))
        for name, found in of_extra.items()
    }
    of_room = {name: set().union(*(of_extra[extra] for extra in extras)) for name, extras in EXTRAS_OF.items()}
    # An op's folder by the name of a backend, one of pallas_kernels; what m3jax has by the name that is asked for.
    computed = {("pallas_kernels.backends", "a computed module"), ("m3jax", "a computed module")}
    edges = (edge for edge in imports_of_packages() if (edge.importer, edge.name) not in computed)
    is_declared = lambda edge: edge.name.split(".")[0] in allowed | of_room.get(room(edge.importer), set())
    wrong = [str(edge) for edge in edges if not is_declared(edge)]
    assert not wrong, "\n".join(wrong)


def test_import_is_light():
    """No module of the package loads PyTorch, transformers or matplotlib, installed or not.

    And none that has a function's name, as `m3jax.generate`, hides the function.
    """
    code = (
        "import importlib, sys, m3jax\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "try: m3jax.generate(None, 'text', max_new_tokens=1)\n"
        "except ValueError as e: assert 'model is a NoneType' in str(e)\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) if heavy else 0)\n"
    )
    names = [module_name(path) for path in sources(*PACKAGES) if path.stem != "__main__"]
    result = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_machine_paths():
    wrong = []
    for path in tracked_files():
        if path.is_relative_to("m3jax/assets"):  # a tokenizer's vocabulary is text from elsewhere
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [f"{path}:{number}" for number, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)]
    assert not wrong


def test_no_test_imports_a_test():
    """Code that two test files share lies in tests/support."""
    tests = {path.stem for path in sources("tests") if path.stem.startswith("test_")}
    wrong = [
        str(edge)
        for edge in imports_in("tests")
        if not edge.name.startswith("jax.") and tests.intersection(edge.name.split("."))
    ]
    assert not wrong, "\n".join(wrong)
