"""Counting in a compiled program: what its loops multiply, collectives, operations, memory traffic.

XLA's own cost analysis counts the body of a loop once. Here a body counts as often as its condition says, where that
compares a counter with a constant; a loop whose end is data counts once. Of the branches of a conditional the most
expensive one counts.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = dict(
    pred=8, s4=4, u4=4, s8=8, u8=8, s16=16, u16=16, bf16=16, f16=16, s32=32, u32=32, f32=32, s64=64, u64=64, f64=64
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(ROOT )?(%?[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_HEAD = re.compile(r"(ENTRY )?(%?[\w.\-]+) \(.*\) -> .* \{$")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all",
         "partition-id", "replica-id", "iota", "optimization-barrier", "domain", "copy-done", "slice-done",
         "async-done", "all-reduce-done", "all-gather-done", "collective-permute-done", "async-update"}  # fmt: skip
_READS_PART = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class Counts:
    """What one device does in one run of a program.

    Attributes:
      collectives: by kind, how many.
      collective_bytes: by kind, bytes of their results.
      flops: of matrix products.
      traffic: bytes read from and written to HBM; what stays in vector memory does not count.
      unknown_loops: loops whose number of turns is data, counted once.
      heaviest: the instructions with the most traffic: (bytes, how often they run, what in Python made them).
    """

    collectives: dict[str, int]
    collective_bytes: dict[str, float]
    flops: float
    traffic: float
    unknown_loops: int
    heaviest: list[tuple[float, int, str]]


@dataclass
class _Cost:
    count: Counter = field(default_factory=Counter)
    size: Counter = field(default_factory=Counter)
    flops: float = 0.0
    traffic: float = 0.0
    unknown: int = 0

    def add(self, other: "_Cost", times: int = 1) -> None:
        for name, n in other.count.items():
            self.count[name] += n * times
            self.size[name] += other.size[name] * times
        self.flops += other.flops * times
        self.traffic += other.traffic * times
        self.unknown += other.unknown


@dataclass
class _Instruction:
    name: str
    type: str
    op: str
    rest: str
    root: bool

    @cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%[\w.\-]+", self.rest.split(")", 1)[0])

    def called(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=(%[\w.\-]+)", self.rest)
        return found and found[1]

    @cached_property
    def branches(self) -> list[str]:
        found = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        names = re.findall(r"%[\w.\-]+", found[1]) if found else []
        return names or [n for n in (self.called("true_computation"), self.called("false_computation")) if n]


def count(text: str, heaviest: int = 5) -> Counts:
    """Count in the text of a compiled module (`jax.stages.Compiled.as_text`)."""
    program = _Program(text)
    cost = program.cost(program.entry)
    found = sorted(program.runs(program.entry), key=lambda run: -run[0])[:heaviest]
    return Counts(dict(cost.count), dict(cost.size), cost.flops, cost.traffic, cost.unknown, found)


class _Program:
    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.entry, self._known = "", {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations.setdefault(_name(head[2]), {})
                self.entry = _name(head[2]) if head[1] else self.entry
            elif found := _LINE.match(line):
                root, name, kind, op, rest = found.groups()
                current[_name(name)] = _Instruction(_name(name), kind, op, rest, bool(root))

    def cost(self, name: str) -> _Cost:
        """Of one run of a computation."""
        if name not in self._known:
            out = _Cost()
            for instruction in self.computations[name].values():
                out.add(self._one(instruction, self.computations[name]))
            self._known[name] = out
        return self._known[name]

    def runs(self, name: str, times: int = 1) -> Iterator[tuple[float, int, str]]:
        """(bytes, times, origin) of each instruction that one run of a computation comes to."""
        for i in self.computations[name].values():
            if i.op == "while":
                turns = self._turns(i.called("condition")) or 1
                yield from self.runs(i.called("body"), times * turns)
            elif i.op == "conditional":
                yield from self.runs(self._dearest(i), times)
            elif i.op not in _FREE and i.op != "async-start":
                origin = re.search(r'op_name="([^"]*)"', i.rest)
                yield times * self._traffic(i, self.computations[name]), times, origin[1] if origin else i.name

    def _dearest(self, i: _Instruction) -> str:
        return max(i.branches, key=lambda b: (self.cost(b).traffic, self.cost(b).flops))

    def _one(self, i: _Instruction, around: dict[str, _Instruction]) -> _Cost:
        out = _Cost()
        if i.op == "while":
            turns = self._turns(i.called("condition"))
            out.add(self.cost(i.called("body")), turns or 1)
            out.unknown += turns is None
        elif i.op == "conditional":
            out.add(self.cost(self._dearest(i)))
        elif i.op in ("call", "async-start") and (inner := i.called("to_apply") or i.called("calls")):
            out.add(self.cost(inner))
        kind = i.op.removesuffix("-start")
        if kind in COLLECTIVES:
            out.count[kind], out.size[kind] = 1, _largest(i.type) if i.op != kind else _size(i.type)
        out.flops += self._flops(i, around)
        if i.op not in _FREE and i.op != "async-start":
            out.traffic += self._traffic(i, around)
        return out

    def _turns(self, name: str) -> int | None:
        """How often a loop runs whose condition is `counter < constant`."""
        condition = self.computations[name]
        root = next(i for i in condition.values() if i.root)
        if root.op != "compare" or "direction=LT" not in root.rest:
            return None
        for operand in root.operands:
            bound = condition[operand]
            if bound.op == "constant" and (number := re.match(r"(\d+)\)", bound.rest)):
                return int(number[1])
        return None

    def _flops(self, i: _Instruction, around: dict[str, _Instruction]) -> float:
        if i.op == "fusion":
            inner = self.computations[i.called("calls")]
            return float(sum(self._flops(x, inner) for x in inner.values()))
        if i.op not in ("dot", "convolution"):
            return 0.0
        return 2.0 * _elements(i.type) * _contracted(i, [around[o].type for o in i.operands])

    def _traffic(self, i: _Instruction, around: dict[str, _Instruction]) -> float:
        if i.op != "fusion":
            reads = sum(_hbm(around[o].type) for o in i.operands if o in around)
            if i.op in _READS_PART:
                reads = _size(i.type)
            elif i.op in ("dynamic-update-slice", "scatter"):
                return 2.0 * _hbm(around[i.operands[-1 if i.op == "scatter" else 1]].type)
            return reads + (_hbm(i.type) if not i.op.endswith("-start") else 0.0)
        inner = self.computations[i.called("calls")]
        parameters = {int(x.rest.split(")")[0]): x for x in inner.values() if x.op == "parameter"}
        reads = sum(
            min(_hbm(around[o].type), self._read(parameters[n], inner)) for n, o in enumerate(i.operands) if o in around
        )
        return reads + self._written(i, inner)

    def _read(self, parameter: _Instruction, inner: dict[str, _Instruction]) -> float:
        """Bytes of a fusion's operand that are read: a part, where only parts of it are taken."""
        total = 0.0
        for user in _users(parameter, inner):
            place = user.operands.index(parameter.name)
            if user.op in _READS_PART and place == 0:
                total += _size(user.type)
            elif user.op in ("dynamic-update-slice", "scatter") and place == 0:
                continue
            elif user.op == "bitcast":
                total += self._read(user, inner)
            elif user.op == "fusion":
                nested = self.computations[user.called("calls")]
                own = next(x for x in nested.values() if x.op == "parameter" and x.rest.startswith(f"{place})"))
                total += self._read(own, nested)
            else:
                return _size(parameter.type)
        return total

    def _written(self, i: _Instruction, inner: dict[str, _Instruction]) -> float:
        """Bytes of a fusion's result: an update in place writes the update alone."""
        root = next(x for x in inner.values() if x.root)
        roots = [inner[o] for o in root.operands] if root.op == "tuple" else [root]
        updates = [self._update(x, inner) for x in roots]
        if any(updates):
            return float(sum(u or _hbm(x.type) for u, x in zip(updates, roots, strict=True)))
        return _hbm(i.type)

    def _update(self, i: _Instruction, inner: dict[str, _Instruction]) -> float:
        """Bytes of the update, if this is one."""
        if i.op == "bitcast" and i.operands[0] in inner:
            return self._update(inner[i.operands[0]], inner)
        if i.op == "fusion":
            nested = self.computations[i.called("calls")]
            return self._update(next(x for x in nested.values() if x.root), nested)
        if i.op not in ("dynamic-update-slice", "scatter"):
            return 0.0
        return _size(inner[i.operands[-1 if i.op == "scatter" else 1]].type)


def _name(name: str) -> str:
    return name if name.startswith("%") else f"%{name}"


def _users(i: _Instruction, inner: dict[str, _Instruction]) -> Iterator[_Instruction]:
    return (x for x in inner.values() if i.name in x.operands)


def _arrays(kind: str) -> Iterator[tuple[int, float, str]]:
    """(elements, bytes, layout) of each array of a type."""
    for dtype, shape, layout in _ARRAY.findall(kind):
        elements = math.prod(int(n) for n in shape.split(",") if n)
        yield elements, elements * _BITS.get(dtype, 8 if dtype.startswith("f8") else 0) / 8, layout


def _elements(kind: str) -> int:
    return sum(n for n, _, _ in _arrays(kind))


def _size(kind: str) -> float:
    return float(sum(size for _, size, _ in _arrays(kind)))


def _largest(kind: str) -> float:
    return float(max((size for _, size, _ in _arrays(kind)), default=0.0))


def _hbm(kind: str) -> float:
    """Bytes that lie in HBM: memory space 0, which is not written out."""
    return float(sum(size for _, size, layout in _arrays(kind) if not re.search(r"S\([1-9]\d*\)", layout)))


def _contracted(i: _Instruction, operands: list[str]) -> int:
    """Products that each element of the result sums."""
    shape = lambda kind: [int(n) for n in _ARRAY.search(kind)[2].split(",") if n]
    if i.op == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)[1]
        return math.prod(shape(operands[0])[int(n)] for n in dims.split(",") if n)
    # A product of matrices is a convolution here, whose window is one place wide where it stands for a batch.
    kernel = re.search(r"dim_labels=\w+_(\w+)->", i.rest)[1]
    sizes = dict(zip(kernel, shape(operands[1]), strict=True))
    batched = "lhs_dilate" in i.rest or "rhs_reversal" in i.rest
    window = 1 if batched else math.prod(n for label, n in sizes.items() if label.isdigit())
    return window * sizes["i"]
