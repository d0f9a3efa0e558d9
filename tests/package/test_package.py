"""The shape of the package: its top level, which way imports run, the size of its files."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("m3jax", "pallas_kernels")
TOP_LEVEL = {
    *(".ci", ".gitignore", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
    *("docs", "m3jax", "notebooks", "pallas_kernels", "scripts", "tests"),
}
MAX_LINES = 450

# (importer, imported): no module within the first imports a module within the second.
FORBIDDEN = (
    ("pallas_kernels", "m3jax"),
    ("m3jax.msa", "m3jax.model"),
    ("m3jax.msa", "m3jax.cache"),
    ("m3jax.msa", "m3jax.decoding"),
    ("m3jax.msa", "m3jax.checkpoint"),
    ("m3jax.msa", "m3jax.generate"),
    ("m3jax.model", "m3jax.decoding"),
    ("m3jax.model", "m3jax.checkpoint"),
    ("m3jax.model", "m3jax.generate"),
    ("m3jax.cache", "m3jax.decoding"),
    ("m3jax.cache", "m3jax.checkpoint"),
    ("m3jax.cache", "m3jax.generate"),
    ("m3jax.checkpoint", "m3jax.decoding"),
    ("m3jax.checkpoint", "m3jax.generate"),
    ("m3jax.decoding", "m3jax.generate"),
)
KERNEL_CALLER = "m3jax.msa.api"

# Distributions whose import name is another, and where jax itself takes bfloat16 from.
IMPORT_NAMES = {"orbax-checkpoint": "orbax"}
COME_WITH_JAX = {"ml_dtypes"}

# Folders of one person's machine; the lookbehind leaves web addresses and relative paths alone.
MACHINE_PATH = re.compile(r"(?<![\w.~$}>/-])/(?:work|tmp|root|home|Users|opt|mnt|scratch)/")


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


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, at any depth, in any branch or function."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path.parent)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package)
            for alias in node.names:
                member = f"{base}.{alias.name}"
                yield member if base.split(".")[0] in PACKAGES and is_module(member) else base


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_top_level_is_as_designed():
    assert {path.parts[0] for path in tracked_files()} == TOP_LEVEL


def test_imports_run_one_way():
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in sources(*PACKAGES)
        for name in imported_modules(path)
        for importer, imported in FORBIDDEN
        if within(module_name(path), importer) and within(name, imported)
    ]
    assert not wrong


def test_lower_layers_do_not_import_the_root():
    """`from m3jax import load` in a lower layer would reach the upper ones."""
    upper = {"m3jax", "m3jax.generate"}
    wrong = [
        f"{module_name(path)} imports a public name of m3jax"
        for path in sources(*PACKAGES)
        if module_name(path) not in upper and "m3jax" in imported_modules(path)
    ]
    assert not wrong


def test_config_stands_alone():
    names = set(imported_modules(ROOT / "m3jax" / "config.py"))
    assert not {name for name in names if within(name, "m3jax") and "config" not in name}


def test_one_module_calls_kernels():
    wrong = [
        module_name(path)
        for path in sources("m3jax")
        if module_name(path) != KERNEL_CALLER and any(within(name, "pallas_kernels") for name in imported_modules(path))
    ]
    assert not wrong


def test_imports_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    distributions = (re.match(r"[\w-]+", line)[0] for line in project["dependencies"])
    allowed = {IMPORT_NAMES.get(name, name) for name in distributions} | COME_WITH_JAX
    allowed |= set(PACKAGES) | sys.stdlib_module_names
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in sources(*PACKAGES)
        for name in imported_modules(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_import_is_light():
    """No module of the package loads PyTorch, transformers or matplotlib, installed or not."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) if heavy else 0)\n"
    )
    names = [module_name(path) for path in sources(*PACKAGES) if path.stem != "__main__"]
    result = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_public_names_resolve():
    import m3jax

    missing = [name for name in m3jax.__all__ if not hasattr(m3jax, name)]
    assert not missing


def test_files_are_short():
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources(*PACKAGES, "scripts", "tests")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


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
    """What two tests share lies in tests/support."""
    tests = {path.stem for path in sources("tests") if path.stem.startswith("test_")}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("tests")
        for name in imported_modules(path)
        if not name.startswith("jax.") and tests.intersection(name.split("."))
    ]
    assert not wrong
