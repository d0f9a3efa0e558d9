"""The API reference: a page for each room of the package, made from its public names and their docstrings."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx

from sitebuild.writing import write_folder

FOLDER = "docs/api"
KERNELS = "pallas_kernels"
# Command lines, and what only they and the package itself use.
NOT_SHOWN = {
    "__main__",
    "assets",
    "chat",
    "cli",
    "config_keys",
    "console",
    "generate",
    "hub",
    "interrupts",
    "messages",
    "plan",
}
# Rooms whose names users call; the others are what these are built of, and their names may move.
PUBLIC = (
    *(
        "m3jax",
        "m3jax.spec",
        "m3jax.text_model",
        "m3jax.dialogue",
        "m3jax.decoding",
        "m3jax.text",
        "m3jax.media",
        "m3jax.msa",
    ),
    *("m3jax.model", "m3jax.vision", "m3jax.config", "m3jax.checkpoint", "m3jax.mxfp8", "m3jax.cache"),
    *("m3jax.parallel", "m3jax.planning", "m3jax.train", "m3jax.vectors", "m3jax.compare", "m3jax.evaluate"),
    "m3jax.inside",
    *("m3jax.compile_cache", KERNELS),
)
INTERNAL = "Internal: what the rooms for users are built of. Names here may change without a notice."


def rooms() -> list[str]:
    """The modules that have a page: the package, each room of it but those of NOT_SHOWN, and the kernels."""
    found = pkgutil.iter_modules(importlib.import_module("m3jax").__path__)
    return ["m3jax", *(f"m3jax.{room.name}" for room in found if room.name not in NOT_SHOWN), KERNELS]


def modules_of(name: str) -> Iterator[ModuleType]:
    """The modules whose names a page lists: one with `__all__` alone, else it and all below it; of kernels the ops."""
    module = importlib.import_module(name)
    yield module
    if not hasattr(module, "__all__"):
        for below in pkgutil.iter_modules(getattr(module, "__path__", ())):
            if not below.name.startswith("_") and (below.ispkg or name != KERNELS):
                yield from modules_of(f"{name}.{below.name}")


def public_names(module: ModuleType) -> list[str]:
    """Return the names in `__all__`, else the functions and classes that the module itself defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_") and is_code(getattr(module, name))]


def is_code(value: object) -> bool:
    """True of a class or a function, compiled ones too; other public names are constants."""
    return inspect.isclass(value) or (callable(value) and inspect.isfunction(inspect.unwrap(value)))


def page(name: str, documented: dict[int, str]) -> str:
    """The page of a room, in reStructuredText.

    Args:
      name: the room's module.
      documented: the full name of each object that some page describes, by the object's id. This page's are added to
        it; those that are in it already, because two rooms export them, become a link.
    """
    lines = []
    for module in modules_of(name):
        lines += [module.__name__, ("=" if module.__name__ == name else "-") * len(module.__name__), ""]
        if module.__name__ == name and name not in PUBLIC:
            lines += [f".. note:: {INTERNAL}", ""]
        lines += [f".. automodule:: {module.__name__}", ""]
        members = [(f"{module.__name__}.{member}", getattr(module, member)) for member in public_names(module)]
        for full_name, value in sorted(members, key=lambda member: not is_code(member[1])):  # constants last
            if not is_code(value):
                lines += [f".. py:data:: {full_name}", *constant(value), ""]
            elif id(value) in documented:
                lines += [f"``{full_name}`` is :py:obj:`{documented[id(value)]}`.", ""]
            else:
                documented[id(value)] = full_name
                options = [".. autoclass:: " + full_name, "   :members:"]
                lines += [*(options if inspect.isclass(value) else [f".. autofunction:: {full_name}"]), ""]
    return "\n".join(lines)


def constant(value: object) -> list[str]:
    """Describe a constant: its number or text, or the names in its table or list."""
    if isinstance(value, int | float | str):
        return [f"   :value: {value!r}"]
    if isinstance(value, dict | tuple | list) and all(isinstance(entry, str) for entry in value):
        return ["", "   " + ("A table of " if isinstance(value, dict) else "") + ", ".join(f"``{x}``" for x in value)]
    return []


def as_written(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """The signature of an object as its source has it: `Float[Array, 'B T']`, where Python would say what that is."""
    if signature is None:
        return None
    value = inspect.unwrap(getattr(value, "__func__", value))
    if inspect.isfunction(value) and hasattr(value, "__signature__"):  # it takes the fields of a class
        return None
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    except (OSError, TypeError):  # made by a decorator, as what a dataclass adds is
        return None
    if isinstance(node, ast.ClassDef):
        methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
        if "__init__" not in methods:
            return fields_of(node), None
        node = methods["__init__"]
    if not isinstance(node, ast.FunctionDef):
        return None
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        del node.args.args[0]
    result = None if node.returns is None or what == "class" else without_spaces(node.returns).strip("'")
    return f"({without_spaces(node.args)})", result


def without_spaces(node: ast.AST) -> str:
    """The text of annotations, with the one-axis shapes of jaxtyping as 'B', where the code must write ' B'."""
    return re.sub(r"' (\w+)'", r"'\1'", ast.unparse(node))


def fields_of(node: ast.ClassDef) -> str:
    """The arguments that make an object of a class with fields, a dataclass or a named tuple; "" of any other."""
    kinds = " ".join(ast.unparse(kind) for kind in (*node.decorator_list, *node.bases))
    if not re.search(r"dataclass|NamedTuple", kinds):
        return ""
    fields = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
            if isinstance(field.value, ast.Call) and ast.unparse(field.value.func).endswith("field"):
                settings = {setting.arg: setting.value for setting in field.value.keywords}
                made = ast.Constant(...) if "default_factory" in settings else None
                field.value = settings.get("default", made)
            fields.append(without_spaces(field))
    return f"({', '.join(['*'] * ('kw_only=True' in kinds) + fields)})"


def show_examples(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Show the text under "Example:" as code."""
    lines[:] = "\n".join(lines).replace("Example:\n", "Example::\n\n").split("\n")


def from_markdown(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings write code and pages of docs/ as Markdown does."""
    for number, line in enumerate(lines):
        line = re.sub(r"(?<![`:])`([^`]+)`(?!`)", r"``\1``", line)
        line = re.sub(r"^(\s*(?::[^:]+: )?[A-Za-z])\.(?=\s|$)", r"\1\\.", line)  # "P." would begin a list
        lines[number] = re.sub(r"\bdocs/([\w/]+)\.md\b", r":doc:`\g<0> </docs/\1>`", line)


def write_pages(app: Sphinx) -> None:
    """Writes the pages, before Sphinx looks for pages."""
    documented: dict[int, str] = {}
    write_folder(Path(app.srcdir) / FOLDER, {f"{name}.rst": page(name, documented) for name in rooms()})


def before_parsing(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add tables of the pages to docs/api.md, public ones first, each with the first sentence of its module."""
    if docname != FOLDER:
        return
    internal = [name for name in rooms() if name not in PUBLIC]
    for title, names in (("For users", PUBLIC), ("Inside", internal)):
        says = {name: (importlib.import_module(name).__doc__ or "").strip().partition("\n")[0] for name in names}
        says = {name: re.sub(r" \(docs/[\w/]+\.md\)", "", first) for name, first in says.items()}
        rows = "\n".join(f"| [{name}](api/{name}.rst) | {first} |" for name, first in says.items())
        pages = "\n".join(f"api/{name}" for name in names)
        source[0] += f"\n## {title}\n\n{INTERNAL if title == 'Inside' else ''}\n\n| | |\n|---|---|\n{rows}\n"
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> dict:
    """Register the API reference with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", before_parsing)
    app.connect("autodoc-process-signature", as_written)
    app.connect("autodoc-process-docstring", show_examples, priority=400)
    app.connect("autodoc-process-docstring", from_markdown, priority=600)  # after napoleon, which reads Args
    return {"parallel_read_safe": True, "parallel_write_safe": True}
