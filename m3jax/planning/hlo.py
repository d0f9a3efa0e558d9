"""Counts of a compiled program's collectives, operations and memory traffic, with its loops multiplied out.

Not `Compiled.cost_analysis`, which counts a loop's body once and no exchange; jaxlib's HLO reader gives no shapes.

Here a body counts as often as the compiler says that it runs, or as its condition does, where that compares a counter
with a constant; a loop whose end is data counts once. Of the branches of a conditional the most expensive one counts,
but for those that the program itself says to run rarely, and with the part of the devices that it says to take it
(`m3jax.branches`): the counts are those of the average device. A kernel of Pallas counts by its own estimate, without
which it would count all pages that it may read from.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from m3jax.branches import devices_that_take_turns, is_rare

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = dict(
    pred=8, s4=4, u4=4, s8=8, u8=8, s16=16, u16=16, bf16=16, f16=16, s32=32, u32=32, f32=32, s64=64, u64=64, f64=64
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(ROOT )?(%?[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_HEAD = re.compile(r"(ENTRY )?(%?[\w.\-]+) \(.*\) -> .* \{$")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all",
         "partition-id", "replica-id", "iota", "optimization-barrier", "domain", "copy-done", "slice-done",
         "async-done", "all-reduce-done", "all-gather-done", "all-to-all-done", "collective-permute-done",
         "async-start", "async-update"}  # fmt: skip
_READS_PART = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # ops that write in place: index of the update's operand


@dataclass(frozen=True)
class Counts:
    """The work of one device in one run of a compiled program.

    Attributes:
      collectives: by kind, how many.
      collective_bytes: by kind, bytes of their results.
      hidden_collectives: by kind, how many have a product between their beginning and their end.
      flops: of matrix products.
      traffic: bytes read from and written to HBM; what stays in vector memory does not count.
      unknown_loops: loops whose number of turns is data, counted once.
      heaviest: the instructions with the most traffic: (bytes, how often they run, what in Python made them).
    """

    collectives: dict[str, int]
    collective_bytes: dict[str, float]
    hidden_collectives: dict[str, float | int]
    flops: float
    traffic: float
    unknown_loops: int
    heaviest: list[tuple[float, float | int, str]]


@dataclass(frozen=True)
class Collective:
    """One instruction by which devices exchange arrays, as often as a run of the program does it.

    Attributes:
      kind: of `COLLECTIVES`.
      num_bytes: of its result on one device, each time; of a reduce-scatter those of its operand, which is sent.
      times: how often it runs, loops multiplied out.
      num_devices: that exchange with each other; 0 if the text does not say.
      is_hidden: True if the compiler's schedule has a product between its beginning and its end.
      origin: what in Python made it.
    """

    kind: str
    num_bytes: float
    times: float | int
    num_devices: int
    is_hidden: bool
    origin: str

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a run of the program, on a ring: an all-reduce sends its array twice."""
        others = (self.num_devices - 1) / self.num_devices if self.num_devices else 1.0
        passes = {"all-reduce": 2 * others, "collective-permute": 1.0}.get(self.kind, others)
        return self.num_bytes * self.times * passes


@dataclass
class _Instruction:
    """One line of a computation: `name = type op(operands), attributes`."""

    name: str
    type: str
    op: str
    rest: str  # operands and attributes, from behind the bracket
    is_root: bool

    @cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%[\w.\-]+", self.rest.split(")", 1)[0])

    @cached_property
    def op_name(self) -> str:
        """The name of what in Python made it; empty if the text does not say."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def collective(self) -> str | None:
        """The kind of exchange that it is or begins; None for others."""
        kind = self.op.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def result_bytes(self) -> float:
        """Bytes of its result; the type of a start op is a tuple of operand and result, of which the larger counts."""
        sizes = [size for _, size, _ in _arrays(self.type)]
        return float(max(sizes, default=0.0) if self.op.endswith("-start") else sum(sizes))

    @cached_property
    def kernel_estimate(self) -> tuple[float, float] | None:
        """Operations and bytes that a kernel of Pallas is said to take; None for others, and for one that says none."""
        if self.op != "custom-call" or not (estimate := re.search(r'"cost_estimate":\{([^}]*)\}', self.rest)):
            return None
        numbers = dict(re.findall(r'"(\w+)":"?(\d+)', estimate[1]))
        return float(numbers.get("flops", 0)), float(numbers.get("bytes_accessed", 0))

    @property
    def is_library_product(self) -> bool:
        """True for a matrix product that a GPU's program leaves to cuBLAS."""
        return self.op == "custom-call" and 'custom_call_target="__cublas$' in self.rest

    @cached_property
    def branches(self) -> list[str]:
        """The names of a conditional's branch computations, which are numbered, or called true and false."""
        numbered = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        names = re.findall(r"%[\w.\-]+", numbered[1]) if numbered else []
        named = (self.called("true_computation"), self.called("false_computation"))
        return names or [name for name in named if name]

    def called(self, key: str) -> str | None:
        """Return the name of the computation under an attribute, such as "calls" of a fusion; None without it."""
        match = re.search(rf"\b{key}=(%[\w.\-]+)", self.rest)
        return match and match[1]


# A computation: its instructions by name.
_Computation = dict[str, _Instruction]


def count(text: str, heaviest: int = 5) -> Counts:
    """Count what one device does in a run of a compiled program.

    Args:
      text: of the compiled module (`jax.stages.Compiled.as_text`).
      heaviest: the number of instructions with the most traffic to name.
    """
    program = _Program(text)
    number, num_bytes, hidden, runs = Counter(), Counter(), Counter(), []
    for instruction, times, around in program.instructions(program.entry):
        runs.append((times * program.traffic(instruction, around), times, instruction.op_name or instruction.name))
        if kind := instruction.collective:
            number[kind] += times
            num_bytes[kind] += times * instruction.result_bytes
            hidden[kind] += times * program.has_product_before_end(instruction, around)
    flops, traffic = program.cost(program.entry)
    return Counts(
        collectives=dict(number),
        collective_bytes=dict(num_bytes),
        hidden_collectives=dict(hidden),
        flops=flops,
        traffic=traffic,
        unknown_loops=program.unknown_loops(program.entry),
        heaviest=sorted(runs, key=lambda run: -run[0])[:heaviest],
    )


def collectives(text: str) -> list[Collective]:
    """Return the collectives in one run of a compiled program, those that send the most first.

    Exchanges of a device with itself, over mesh axes of one device, are left out.

    Args:
      text: as of `count`. Of a conditional's branches the one with the most traffic is followed.
    """
    program = _Program(text)
    found = []
    for instruction, times, around in program.instructions(program.entry):
        num_devices = _group_size(instruction.rest)
        if (kind := instruction.collective) is None or num_devices == 1:
            continue
        num_bytes = instruction.result_bytes
        if kind == "reduce-scatter":
            num_bytes = float(sum(_size(around[operand].type) for operand in instruction.operands if operand in around))
        is_hidden = program.has_product_before_end(instruction, around)
        origin = instruction.op_name or instruction.name
        found.append(Collective(kind, num_bytes, times, num_devices, is_hidden, origin))
    return sorted(found, key=lambda collective: -collective.sent)


def products(text: str) -> dict[str, float]:
    """Return the operations of matrix products in one run of a compiled program, by what in Python made them.

    Args:
      text: as of `collectives`.
    """
    program, flops = _Program(text), Counter()
    for instruction, times, around in program.instructions(program.entry):
        for product, inside in program.products(instruction, around):
            flops[product.op_name or product.name] += times * program.flops(product, inside)
    return dict(flops)


class _Program:
    """A compiled module: its computations by name, and what a run of each costs."""

    def __init__(self, text: str):
        self.computations: dict[str, _Computation] = {}
        self.entry = ""
        self._costs: dict[str, tuple[float, float]] = {}
        with_mark = lambda name: name if name.startswith("%") else f"%{name}"
        for line in text.splitlines():
            if head := _HEAD.match(line):
                is_entry, name = head.groups()
                current = self.computations.setdefault(with_mark(name), {})
                self.entry = with_mark(name) if is_entry else self.entry
            elif match := _LINE.match(line):
                root, name, result_type, op, rest = match.groups()
                current[with_mark(name)] = _Instruction(with_mark(name), result_type, op, rest, bool(root))
        for computation in self.computations.values():
            fusions = [one for one in computation.values() if one.op == "fusion"]
            computation |= {one.name: self._as_exchange(one) for one in fusions}

    def _as_exchange(self, fusion: _Instruction) -> _Instruction:
        """Return a fusion; one in which devices add up and keep a part each, as on a TPU, as a reduce-scatter."""
        inside = self.computations.get(fusion.called("calls") or "", {}).values()
        exchange = next((one for one in inside if one.op == "all-reduce"), None)
        if exchange is None:
            return fusion
        _, _, who = exchange.rest.partition(")")
        return replace(fusion, op="reduce-scatter", rest=fusion.rest + who)

    def cost(self, name: str) -> tuple[float, float]:
        """Return the operations of matrix products, and the bytes of traffic, in one run of a computation."""
        if name not in self._costs:
            flops, traffic = 0.0, 0.0
            for instruction, times, around in self.instructions(name):
                of_kernel, _ = instruction.kernel_estimate or (0.0, 0.0)
                products = (self.flops(product, inside) for product, inside in self.products(instruction, around))
                flops += times * (of_kernel + sum(products))
                traffic += times * self.traffic(instruction, around)
            self._costs[name] = flops, traffic
        return self._costs[name]

    def unknown_loops(self, name: str) -> int:
        """Return how many loops of a computation, and of what it runs, end by data."""
        count = 0
        for instruction in self.computations[name].values():
            count += instruction.op == "while" and self._turns(instruction) is None
            if inner := self._run_by(instruction):
                count += self.unknown_loops(inner)
        return count

    def instructions(
        self, name: str, times: float | int = 1
    ) -> Iterator[tuple[_Instruction, float | int, _Computation]]:
        """Yield (instruction, times, the computation it is in) for each one that does something, loops included."""
        for instruction in self.computations[name].values():
            if inner := self._run_by(instruction):
                turns = (self._turns(instruction) or 1) if instruction.op == "while" else 1
                num_devices = devices_that_take_turns(instruction.op_name) if instruction.op == "conditional" else 1
                taken = times * turns
                yield from self.instructions(inner, taken if num_devices == 1 else taken / num_devices)
            elif instruction.op not in _FREE:
                yield instruction, times, self.computations[name]

    def _run_by(self, instruction: _Instruction) -> str | None:
        """Return the computation whose instructions an instruction runs one by one; None where it works by itself."""
        if instruction.op == "while":
            return instruction.called("body")
        if instruction.op == "conditional":
            return self._dearest_branch(instruction)
        if instruction.op in ("call", "async-start"):
            return instruction.called("to_apply") or instruction.called("calls")
        return None

    def _dearest_branch(self, conditional: _Instruction) -> str:
        """Return the branch with the most traffic, of those that do not run rarely."""
        often = [
            name
            for name in conditional.branches
            if not any(is_rare(instruction.op_name) for instruction in self.computations[name].values())
        ]
        return max(often or conditional.branches, key=lambda branch: self.cost(branch)[::-1])  # traffic, then flops

    def _turns(self, loop: _Instruction) -> int | None:
        """Return a loop's number of turns if the compiler knows it, or if it ends by `counter < constant`; else None.

        In a program that is divided over devices the comparison may be hidden in a fusion.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition = self.computations[loop.called("condition")]
        root = _root(condition)
        if root.op != "compare" or "direction=LT" not in root.rest:
            return None
        for operand in root.operands:
            bound = condition[operand]
            if bound.op == "constant" and (number := re.match(r"(\d+)\)", bound.rest)):
                return int(number[1])
        return None

    def products(self, instruction: _Instruction, around: _Computation) -> Iterator[tuple[_Instruction, _Computation]]:
        """Yield the matrix products that an instruction computes, each with the computation that it is in."""
        if instruction.op == "fusion":
            fused = self.computations[instruction.called("calls")]
            for inner in fused.values():
                yield from self.products(inner, fused)
        elif instruction.op in ("dot", "convolution") or instruction.is_library_product:
            yield instruction, around

    def has_product_before_end(self, start: _Instruction, around: _Computation) -> bool:
        """Return True if a product stands between the beginning of an exchange and the one that waits for its end.

        The text of a compiled module has instructions in the order in which the device begins them.
        """
        scheduled = list(around.values())
        for instruction in scheduled[scheduled.index(start) + 1 :] if start.op.endswith("-start") else ():
            if instruction.op.endswith("-done") and start.name in instruction.operands:
                return False
            called = [*instruction.branches, instruction.called("body")]
            inner = [name for name in called if name and self.cost(name)[0]]
            if inner or instruction.kernel_estimate or any(self.products(instruction, around)):
                return True
        return False

    def flops(self, product: _Instruction, around: _Computation) -> float:
        """Return the operations of a matrix product: two for each product of numbers that is summed."""
        elements = next(elements for elements, _, _ in _arrays(product.type))  # cuBLAS has its own memory behind it
        operand_types = [around[operand].type for operand in product.operands]
        return 2.0 * elements * _contracted(product, operand_types)

    def traffic(self, instruction: _Instruction, around: _Computation) -> float:
        """Return the bytes that an instruction reads from HBM and writes to it."""
        op, operands = instruction.op, instruction.operands
        if instruction.kernel_estimate:
            return instruction.kernel_estimate[1]
        if op == "fusion":
            fused = self.computations[instruction.called("calls")]
            parameters = {int(inner.rest.split(")")[0]): inner for inner in fused.values() if inner.op == "parameter"}
            read = sum(
                min(_hbm_size(around[operand].type), self._read_of(parameters[number], fused))
                for number, operand in enumerate(operands)
                if operand in around
            )
            return read + self._written_by(instruction, fused)
        if op in _UPDATES:
            return 2.0 * _hbm_size(around[operands[_UPDATES[op]]].type)
        if op in _READS_PART:
            read = _size(instruction.type)
        else:
            read = sum(_hbm_size(around[operand].type) for operand in operands if operand in around)
        return read + (0.0 if op.endswith("-start") else _hbm_size(instruction.type))

    def _read_of(self, parameter: _Instruction, fused: _Computation) -> float:
        """Return the bytes that a fusion reads of one operand: less than all if every use takes only a slice of it."""
        total = 0.0
        for user in fused.values():
            if parameter.name not in user.operands:
                continue
            operand_index = user.operands.index(parameter.name)
            if user.op in _READS_PART and operand_index == 0:
                total += _size(user.type)
            elif user.op in _UPDATES and operand_index == 0:
                continue  # it is written in place
            elif user.op == "bitcast":
                total += self._read_of(user, fused)
            elif user.op == "fusion":
                nested = self.computations[user.called("calls")]
                inner_parameter = next(
                    inner
                    for inner in nested.values()
                    if inner.op == "parameter" and inner.rest.startswith(f"{operand_index})")
                )
                total += self._read_of(inner_parameter, nested)
            else:
                return _size(parameter.type)
        return total

    def _written_by(self, fusion: _Instruction, fused: _Computation) -> float:
        """Return the bytes that a fusion writes: all of its result, or only the update where that is done in place."""
        root = _root(fused)
        results = [fused[operand] for operand in root.operands] if root.op == "tuple" else [root]
        updates = [self._update_size(result, fused) for result in results]
        if any(updates):
            pairs = zip(updates, results, strict=True)
            return float(sum(update or _hbm_size(result.type) for update, result in pairs))
        return _hbm_size(fusion.type)

    def _update_size(self, instruction: _Instruction, around: _Computation) -> float:
        """Return the bytes of the update that an instruction writes in place; 0 if it does not update."""
        if instruction.op == "bitcast" and instruction.operands[0] in around:
            return self._update_size(around[instruction.operands[0]], around)
        if instruction.op == "fusion":
            nested = self.computations[instruction.called("calls")]
            return self._update_size(_root(nested), nested)
        if instruction.op not in _UPDATES:
            return 0.0
        return _size(around[instruction.operands[_UPDATES[instruction.op]]].type)


def _group_size(attributes: str) -> int:
    """Return the number of devices that a collective's attributes put into a group; 0 where they say nothing."""
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])  # a part of an axis has a size of its own
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return len(listed[1].split(",")) if listed else 0


def _root(computation: _Computation) -> _Instruction:
    """Return the root: the instruction whose result is that of the computation."""
    return next(instruction for instruction in computation.values() if instruction.is_root)


def _arrays(type_text: str) -> Iterator[tuple[int, float, str]]:
    """Yield (elements, bytes, layout) for each array of a type, which may be a tuple."""
    for dtype, shape, layout in _ARRAY.findall(type_text):
        elements = math.prod(int(size) for size in shape.split(",") if size)
        yield elements, elements * _BITS.get(dtype, 8 if dtype.startswith("f8") else 0) / 8, layout


def _size(type_text: str) -> float:
    """Return the bytes of all arrays of a type."""
    return float(sum(size for _, size, _ in _arrays(type_text)))


def _hbm_size(type_text: str) -> float:
    """Return the bytes of a type's arrays in HBM: memory space 0, which a layout does not write out as S(n)."""
    return float(sum(size for _, size, layout in _arrays(type_text) if not re.search(r"S\([1-9]\d*\)", layout)))


def _contracted(instruction: _Instruction, operand_types: list[str]) -> int:
    """Return how many products are summed in each element of a matrix product's result."""
    shape = lambda type_text: [int(size) for size in _ARRAY.search(type_text)[2].split(",") if size]
    if instruction.op in ("dot", "custom-call"):
        axes = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', instruction.rest)[1]
        return math.prod(shape(operand_types[0])[int(axis)] for axis in re.findall(r"\d+", axes))
    # The TPU's compiler writes matrix products as convolutions; a window axis that stands for a batch counts as 1.
    kernel_labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)[1]
    kernel_sizes = dict(zip(kernel_labels, shape(operand_types[1]), strict=True))
    is_batched = "lhs_dilate" in instruction.rest or "rhs_reversal" in instruction.rest
    window = 1 if is_batched else math.prod(size for label, size in kernel_sizes.items() if label.isdigit())
    return window * kernel_sizes["i"]
