"""Bugs that nobody chose: changes of the package's syntax trees, drawn by a seed (scripts/mutants.py --draw).

A list of planted bugs (scripts/mutants.toml) is made by who also writes the tests. Here a bug is any place of a room's
sources to which one of OPERATORS applies, so what the tests catch of them says more. Each is one edit of the text: the
rest of the file keeps its form, its comments and its lines. Nothing is changed in what only says or refuses something:
docstrings, annotations, decorators, imports, what an exception is raised with, the `strict` of a `zip`, and the looks
of a picture (`LOOKS`).
Nor is the order of what has none (`without_order`):

- the types of an `except`, of `isinstance` and `issubclass`, and the texts of `startswith` and `endswith`;
- the members of a tuple right of `in` or `not in`, also of one of constants that has a name, if the file does nothing
  else with that name and no other file can: it is a function's, or begins with an underscore;
- what `min` and `max` choose from without a `key`, if no argument writes a fraction, divides or calls what may return
  one, unless it rounds it: a NaN, and a zero with its sign, show which of two came first. A name counts as a whole
  number;
- the two arguments of a symmetric function of numpy, jax.numpy and math (`SYMMETRIC`), and of a `swapaxes` method;
- the two sides of a difference of which the absolute value or the norm is taken;
- what only tells one thing from others, `activity(about=...)`, and the order in which help lists `choices=`.
"""

import ast
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")

# A room: its sources, and the tests nearest to them. The whole suite is not run for one bug.
ROOMS = {
    "msa": ("m3jax/msa m3jax/numerics.py", "tests/msa tests/ops/test_lanes.py"),
    "ops": (
        "m3jax/ops m3jax/execution m3jax/mxfp8.py",
        "tests/ops tests/model tests/kernels/test_mxfp8.py tests/kernels/test_experts.py "
        "tests/kernels/test_few_tokens.py tests/kernels/test_grouped_product.py tests/inside/test_edits.py",
    ),
    "cache": (
        "m3jax/cache",
        "tests/cache tests/kernels/test_insert.py tests/decoding/test_engine_equivalence.py "
        "tests/decoding/test_engine_lives.py",
    ),
    "engine": (
        "m3jax/decoding/engine m3jax/decoding/device",
        "tests/decoding tests/cache/test_offload.py tests/inside/test_engine.py",
    ),
    "sampling": (
        "m3jax/decoding/sampling.py m3jax/decoding/speculation",
        "tests/decoding/test_sampling.py tests/decoding/test_speculative_verify.py tests/decoding/test_speculative.py "
        "tests/decoding/test_engine_sampling.py tests/model/test_eagle3.py",
    ),
    "model": ("m3jax/model m3jax/parallel", "tests/model tests/vision/test_tower.py"),
    "checkpoint": (
        "m3jax/checkpoint m3jax/files",
        "tests/checkpoint tests/package/test_files.py tests/package/test_tensors.py",
    ),
    "text": ("m3jax/text", "tests/text tests/package/test_tokenizer.py"),
    "media": ("m3jax/media", "tests/media"),
    "vision": ("m3jax/vision", "tests/vision"),
    "tools": (
        "m3jax/compare m3jax/evaluate m3jax/config.py m3jax/completion m3jax/dialogue",
        "tests/compare tests/evaluate tests/package/test_config.py tests/dialogue tests/decoding/test_generate.py "
        "tests/decoding/test_defaults.py",
    ),
    "train": ("m3jax/train", "tests/train tests/hosts/test_shared_task.py"),
    "planning": ("m3jax/planning", "tests/planning"),
    "pallas": ("pallas_kernels", "tests/kernels"),
    "inside": ("m3jax/inside", "tests/inside"),
    "serve": ("m3jax/serve", "tests/serve"),
    "hosts": ("m3jax/hosts", "tests/hosts"),
    "transfer": ("m3jax/transfer", "tests/transfer tests/serve/test_worker_prefill.py"),
}


@dataclass(frozen=True)
class Edit:
    """One change of a source text: bytes `start` to `stop` of its UTF-8 are replaced."""

    start: int
    stop: int
    new: str
    operator: str

    def applied(self, source: bytes) -> str:
        """Return the text with the change in it."""
        return (source[: self.start] + self.new.encode() + source[self.stop :]).decode()


@dataclass(frozen=True)
class Drawn:
    """A bug that was drawn; `scripts/mutants.py` plants it as it does those of the list.

    Attributes:
      group: the room.
      file: relative to the root.
      edit: the change of the file.
      before: the lines that it changes, without indentation and runs of spaces; with `after` they name the bug.
      after: the same lines with the change.
      line: the number of the first of them.
      lines: numbers of the lines of the statement that is changed; of one that has a body, as `if`, those above it.
      tests: the room's tests, those that name the file's module first.
    """

    group: str
    file: str
    edit: Edit
    before: str
    after: str
    line: int
    lines: range
    tests: str

    @property
    def name(self) -> str:
        """The file, the place and the change, in a line."""
        return f"{self.file}: {self.why}"

    @property
    def why(self) -> str:
        """The place and the change, in a line."""
        return f"line {self.line}, {self.edit.operator}: {self.before} -> {self.after}"

    def planted(self, root: Path) -> str:
        """The file's text with the bug in it."""
        return self.edit.applied((root / self.file).read_bytes())


# The operators: each yields (node that is replaced, source of what stands there instead).

Changes = Iterator[tuple[ast.AST, str]]
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
AXES = ("axis", "axes", "dim", "in_axes", "out_axes", "axis1", "axis2", "source", "destination")


def comparison(node: ast.AST) -> Changes:
    """Take the edge to the other side, or the opposite; the condition of an `if` or a `while` is negated."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = f"({ast.unparse(node.left)})", f"({ast.unparse(node.comparators[0])})"
        yield node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def off_by_one(node: ast.AST) -> Changes:
    """Make a whole number one more or one less."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
        yield node, f"({node.value - 1})" if node.value < 1 else str(node.value - 1)


def swapped_operands(node: ast.AST) -> Changes:
    """Swap the two sides of an operation in which their order matters."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ORDERED) and not _is_text(node.left):
        yield node, f"({ast.unparse(ast.BinOp(node.right, node.op, node.left))})"


def swapped_axes(node: ast.AST) -> Changes:
    """Take another axis, or swap two axes of an order, of a shape or of an index."""
    if isinstance(node, ast.keyword) and node.arg in AXES and (axis := _whole_number(node.value)) is not None:
        yield node.value, str({-1: -2, -2: -1, 0: 1}.get(axis, axis - 1))
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        for place in range(len(node.elts) - 1):
            elements = list(node.elts)
            if ast.dump(elements[place]) != ast.dump(elements[place + 1]):
                elements[place : place + 2] = reversed(elements[place : place + 2])
                yield node, f"({', '.join(map(ast.unparse, elements))})"


def dropped_line(node: ast.AST) -> Changes:
    """Leave out a call whose result nobody takes, a sum that grows, or a guard that ends a function or a round."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_guard = (
        isinstance(node, ast.If)
        and not node.orelse
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Return | ast.Continue | ast.Break)
    )
    if is_call or is_guard or isinstance(node, ast.AugAssign):
        yield node, "pass"


def changed_constant(node: ast.AST) -> Changes:
    """Double a number with a fraction, or turn True and False around."""
    if isinstance(node, ast.Constant) and type(node.value) is float:
        yield node, repr(2 * node.value if node.value else 1.0)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, str(not node.value)


def swapped_arguments(node: ast.AST) -> Changes:
    """Swap two neighbouring positional arguments of a call."""
    if not isinstance(node, ast.Call) or any(isinstance(x, ast.Starred) for x in node.args):
        return
    for place in range(len(node.args) - 1):
        first, second = node.args[place : place + 2]
        if ast.dump(first) != ast.dump(second):
            args = [*node.args[:place], second, first, *node.args[place + 2 :]]
            yield node, ast.unparse(ast.Call(node.func, args, node.keywords))


OPERATORS: dict[str, Callable[[ast.AST], Changes]] = {
    "comparison": comparison,
    "off by one": off_by_one,
    "swapped operands": swapped_operands,
    "swapped axes": swapped_axes,
    "dropped line": dropped_line,
    "changed constant": changed_constant,
    "swapped arguments": swapped_arguments,
}
ORDERS = ("swapped axes", "swapped arguments")
LOOKS = ("fontsize", "linewidth", "alpha", "rotation")  # keywords of matplotlib
SYMMETRIC = ("add", "multiply", "minimum", "maximum", "logical_and", "logical_or", "logical_xor", "gcd", "lcm")


def _is_text(node: ast.AST) -> bool:
    """True if a node is a text: then % puts values into it."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _whole_number(node: ast.AST) -> int | None:
    """Return the whole number, negative too, that a node writes, or None."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if type(value) is int else None


def edits(source: str) -> list[Edit]:
    """Return every change that the operators make of a source; `is_another_program` says which of them can be read."""
    tree, encoded = ast.parse(source), source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, free = [], {id(node) for node in without_order(tree)}
    for node in _that_computes(tree):
        for name, operator in OPERATORS.items():
            if id(node) in free and (name in ORDERS or isinstance(node, ast.BinOp)):
                continue
            for target, new in operator(node):
                start = starts[target.lineno - 1] + target.col_offset
                stop = starts[target.end_lineno - 1] + target.end_col_offset
                found.append(Edit(start, stop, new, name))
    return list(dict.fromkeys(found))


def without_order(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the tuples, calls and differences that mean the same in any order; the module's docstring lists them."""
    looked_in: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            looked_in.append(node.type)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.In | ast.NotIn):
            looked_in.append(node.comparators[-1])
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            listed = [x.value for x in node.keywords if x.arg == "choices" or (called, x.arg) == ("activity", "about")]
            yield from (node for node in listed if isinstance(node, ast.Tuple))
            if called in ("isinstance", "issubclass"):
                looked_in += node.args[1:]
            elif called in ("startswith", "endswith"):
                looked_in += node.args[:1]
            elif called in ("abs", "norm") and len(node.args) == 1:
                yield from [x for x in node.args if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Sub)]
            elif called in ("min", "max") and isinstance(node.func, ast.Name) and not node.keywords:
                yield from [node] if all(map(_is_whole, node.args)) else []
            elif len(node.args) == 2:
                is_numpys = _module_of(node.func) in ("np", "jnp", "math")
                yield from [node] if (called in SYMMETRIC and is_numpys) or called == "swapaxes" else []
    yield from (node for node in looked_in if isinstance(node, ast.Tuple) and all(map(_is_plain, node.elts)))
    yield from _named_constants(tree, {id(node) for node in looked_in})


def _named_constants(tree: ast.AST, looked_in: set[int]) -> Iterator[ast.Tuple]:
    """Yield the tuples of constants whose name is bound once, and read only where values are looked for in it."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    in_functions = {id(node) for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) for node in ast.walk(part)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.targets) == 1):
            continue
        (target,) = node.targets
        if not isinstance(target, ast.Name) or not (target.id.startswith("_") or id(node) in in_functions):
            continue
        others = [name for name in names if name.id == target.id and name is not target]
        is_constant = all(isinstance(each, ast.Constant) for each in node.value.elts)
        if is_constant and all(isinstance(name.ctx, ast.Load) and id(name) in looked_in for name in others):
            yield node.value


def _module_of(node: ast.AST) -> str:
    """Return the name left of the dot of a function's name; empty if none stands there."""
    return node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""


def _is_plain(node: ast.AST) -> bool:
    """True if a node is a constant or a name, with dots or a star too: reading it does nothing."""
    is_around = isinstance(node, ast.Attribute | ast.Starred)
    return isinstance(node, ast.Constant | ast.Name) or (is_around and _is_plain(node.value))


def _is_whole(node: ast.AST) -> bool:
    """True if nothing in a node is a fraction, divides, or calls what could give one; what is rounded may."""
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if called == "round" and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
        return True
    return not (
        isinstance(node, ast.Starred | ast.Div | ast.Pow | ast.NamedExpr)
        or (isinstance(node, ast.Constant) and type(node.value) is not int)
        or (isinstance(node, ast.Call) and called not in ("len", "int", "min", "max"))
    ) and all(map(_is_whole, ast.iter_child_nodes(node)))


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def is_another_program(edit: Edit, source: str) -> bool:
    """True if the text with the change is Python, and does not say what it said before."""
    try:
        return ast.dump(ast.parse(edit.applied(source.encode()))) != ast.dump(_parsed(source))
    except SyntaxError:  # as of a name that is bound by := and stands in a comparison
        return False


def _that_computes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree whose change changes what is computed."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            is_strict = called == "zip" and isinstance(child, ast.keyword)
            is_looks = isinstance(child, ast.keyword) and child.arg in LOOKS
            if isinstance(child, ast.AST) and called != "cast" and not (is_strict or is_looks):
                yield from _that_computes(child)


def draw(room: str, count: int, seed: int, root: Path = ROOT) -> list[Drawn]:
    """Draw bugs of a room: as many of each operator, as far as there are, the same for the same seed and sources.

    Raises:
      ValueError: there is no such room.
    """
    if room not in ROOMS:
        raise ValueError(f"room {room!r}: there are {', '.join(ROOMS)}")
    rng = random.Random(f"{room} {seed}")
    waiting: dict[str, list[tuple[str, Edit]]] = {name: [] for name in OPERATORS}
    for file in _files(ROOMS[room][0], root):
        for edit in edits((root / file).read_text(encoding="utf-8")):
            waiting[edit.operator].append((file, edit))
    for places in waiting.values():
        rng.shuffle(places)
    drawn = []
    while len(drawn) < count and any(waiting.values()):
        for places in waiting.values():
            while places and len(drawn) < count:
                file, edit = places.pop()
                if is_another_program(edit, (root / file).read_text(encoding="utf-8")):
                    drawn.append(_described(room, file, edit, root))
                    break
    return drawn


def _files(paths: str, root: Path) -> list[str]:
    """Return the Python files under paths, separated by spaces, in an order that no file system decides."""
    found = []
    for path in paths.split():
        whole = root / path
        found += sorted(x.relative_to(root).as_posix() for x in ([whole] if whole.is_file() else whole.rglob("*.py")))
    return found


def _described(room: str, file: str, edit: Edit, root: Path) -> Drawn:
    """Return the bug with its lines before and after, and its tests in their order."""
    source = (root / file).read_bytes()
    begin = source.rfind(b"\n", 0, edit.start) + 1
    end = source.find(b"\n", edit.stop)
    end = len(source) if end < 0 else end
    changed = source[begin : edit.start] + edit.new.encode() + source[edit.stop : end]
    plain = lambda lines: " ".join(lines.decode().split())
    line = source.count(b"\n", 0, begin) + 1
    lines = lines_of_statement(source.decode(), line, source.count(b"\n", 0, edit.stop) + 1)
    return Drawn(room, file, edit, plain(source[begin:end]), plain(changed), line, lines, tests_of(room, file, root))


def lines_of_statement(source: str, first: int, last: int) -> range:
    """Return the numbers of the lines of the smallest statement around two lines, without its body if it has one."""
    around = [
        x for x in ast.walk(_parsed(source)) if isinstance(x, ast.stmt) and x.lineno <= first <= last <= x.end_lineno
    ]
    statement = min(around, key=lambda x: x.end_lineno - x.lineno)
    body = getattr(statement, "body", None)
    return range(statement.lineno, max(body[0].lineno, statement.lineno + 1) if body else statement.end_lineno + 1)


@cache
def tests_of(room: str, file: str, root: Path) -> str:
    """Return the room's files of tests, separated by spaces: nearest first, for the first failure ends a run.

    Near is who imports the module of a file, then who imports a package that it is in, the innermost first; of those
    who carries its name, as tests/text/test_stream.py does.
    """
    module = file.removesuffix(".py").removesuffix("/__init__").split("/")

    def distance(test: str) -> tuple[int, bool]:
        source = (root / test).read_text(encoding="utf-8")
        imported = [name.split(".") for name in re.findall(r"^(?:from|import) ([\w.]+)", source, re.MULTILINE)]
        shared = max((len(name) for name in imported if name == module[: len(name)]), default=0)
        return -shared, module[-1] not in Path(test).stem

    tests = [name for name in _files(ROOMS[room][1], root) if Path(name).name.startswith("test_")]
    return " ".join(sorted(tests, key=distance))


def equivalent() -> dict[tuple[str, str, str], str]:
    """Return the reason why a change changes no result, by (file, its lines before, its lines after).

    They are drawn as others are, so that marking one changes no draw, and are neither run nor counted.
    """
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {(entry["file"], entry["before"], entry["after"]): entry["reason"] for entry in entries}
