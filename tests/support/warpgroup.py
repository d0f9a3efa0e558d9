"""An interpreter of what one warpgroup does: the MLIR of a Mosaic kernel's part, for its 128 threads at once in numpy.

Every value is the bits of each thread's own, `[128]`, or `[128 n]` for a vector. Memory is one array of bytes. Shared
memory is watched: what a thread has written another one may not read, and what one has read no other may write, before
a barrier. It knows the operations that `pallas_kernels.hopper_registers` uses, and no others: there
is no branch among them, since what a whole warp has to do at once could get into it.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_kernels.mxfp8_ptx import FOUR_BFLOAT16

THREADS = 128
_DYNAMIC = -(2**31)
_COMPARISONS = {0: operator.eq, 6: operator.lt, 7: operator.le, 8: operator.gt, 9: operator.ge}  # eq, and unsigned
_SIGNED = {2: operator.lt, 3: operator.le, 4: operator.gt, 5: operator.ge}
_OF_TWO = {
    "muli": operator.mul, "addi": operator.add, "subi": operator.sub, "andi": operator.and_, "ori": operator.or_,
    "xori": operator.xor, "shli": np.left_shift, "shrui": np.right_shift, "maxui": np.maximum,
    "remui": operator.mod, "divui": operator.floordiv, "mul": operator.mul, "add": operator.add,
}  # fmt: skip
_STORE_IF = re.compile(r"\{ \.reg \.pred p; setp\.ne\.b32 p, \$3, 0; @p st\.v2\.b(16|32) \[\$0\], \{\$1, \$2\}; \}")


@dataclass(frozen=True)
class Array:
    """An array in memory, or a part of one: what a reference is to a kernel."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: np.dtype
    is_shared: bool

    @property
    def type(self) -> ir.Type:
        """The type of a reference to it, in the context at hand."""
        space = ir.Attribute.parse("#gpu.address_space<workgroup>") if self.is_shared else None
        layout = ir.StridedLayoutAttr.get(0, list(self.strides))
        return ir.MemRefType.get(self.shape, _element(self.dtype), layout, space)


@dataclass(frozen=True)
class Registers:
    """An array in the tensor cores' layout: the bits of two numbers in each of a thread's registers, `[128 n 2]`."""

    bits: np.ndarray
    shape: tuple[int, int]
    dtype: np.dtype

    @classmethod
    def of(cls, matrix: np.ndarray) -> "Registers":
        """Give each thread its numbers of a matrix [64 N], as PTX has it for wgmma."""
        kind = {2: np.uint16, 4: np.uint32}[matrix.itemsize]
        return cls(matrix[_places(matrix.shape[1])].view(kind).astype(np.uint64), matrix.shape, matrix.dtype)

    def matrix(self) -> np.ndarray:
        """Return the matrix that the threads hold."""
        kind = {2: np.uint16, 4: np.uint32}[self.dtype.itemsize]
        out = np.zeros(self.shape, self.dtype)
        out[_places(self.shape[1])] = self.bits.astype(kind).view(self.dtype)
        return out


def _places(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of each number of each register of each thread, `[128 n 2]`."""
    warp, lane = np.divmod(np.arange(THREADS)[:, None, None], 32)
    eight, half = np.divmod(np.arange(columns // 4)[:, None], 2)
    row, column = 16 * warp + 8 * half + lane // 4, 8 * eight + 2 * (lane % 4) + np.arange(2)
    return np.broadcast_arrays(row, column)


class Warpgroup:
    """The threads of one warpgroup, and the memory that they see."""

    def __init__(self, size: int = 1 << 20):
        self.memory, self._end = np.zeros(size, np.uint8), 16
        self._shared = np.zeros(size, bool)
        self._forget()

    def put(self, x: np.ndarray, is_shared: bool = False) -> Array:
        """Put an array into memory."""
        address, self._end = self._end, self._end + -(-x.nbytes // 16) * 16
        self.memory[address : address + x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
        self._shared[address : address + x.nbytes] = is_shared
        strides = tuple(stride // x.itemsize for stride in x.strides)
        return Array(address, x.shape, strides, x.dtype, is_shared)

    def get(self, array: Array) -> np.ndarray:
        """Return what an array holds; it must be whole."""
        size = int(np.prod(array.shape)) * array.dtype.itemsize
        return self.memory[array.address : array.address + size].view(array.dtype).reshape(array.shape)

    def run(self, build: Callable[..., Any], *arguments: Any) -> list[Registers]:
        """Have a function build a program of its arguments, run it, and return the arrays in registers that it returns.

        Args:
          build: takes a reference for each `Array`, an array for each `Registers`, and a scalar for each int.
          arguments: these, in any nesting that JAX knows.
        """
        is_leaf = lambda x: isinstance(x, Array | Registers | int)
        leaves, tree = jax.tree.flatten(arguments, is_leaf=is_leaf)
        with mlir.make_ir_context(), ir.Location.unknown():
            types = [kind for leaf in leaves for kind in _types_of(leaf)]
            module = ir.Module.create()
            for name, number in (("major", 9), ("minor", 0)):  # a Hopper, as jax 0.11 asks
                number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
                module.operation.attributes[f"mosaic_gpu.arch_{name}"] = number
            with ir.InsertionPoint(module.body):
                block = func.FuncOp("program", (types, [])).add_entry_block()
            with ir.InsertionPoint(block):
                values, given = iter(block.arguments), []
                for leaf in leaves:
                    given.append(_as_argument(leaf, values))
                returned = build(*jax.tree.unflatten(tree, given))
            self._values = {}
            bits = [each for leaf in leaves for each in _bits_of(leaf)]
            for value, each in zip(block.arguments, bits, strict=True):
                self._values[value] = each
            self._forget()
            self._run(block)
            found = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
            return [self._read(array) for array in found]

    def _read(self, array: fragments.FragmentedArray) -> Registers:
        bits = np.stack([self._values[value] for value in array.registers.reshape(-1)], axis=1)
        dtype = {"f32": np.dtype("float32"), "bf16": np.dtype(ml_dtypes.bfloat16)}[str(array.mlir_dtype)]
        return Registers(bits, array.shape, dtype)

    def _run(self, block: ir.Block) -> None:
        for operation in block.operations:
            of = [self._values[x] for x in operation.operands]
            out = self._evaluate(operation.operation.name, operation.operation, of)
            if len(operation.results):
                self._values[operation.results[0]] = out

    def _evaluate(self, name: str, operation: ir.Operation, of: list) -> Any:
        dialect, _, short = name.partition(".")
        attributes = operation.attributes
        if short in _OF_TWO and dialect in ("arith", "llvm"):
            return _cut(_OF_TWO[short](*of), operation.results[0].type)
        match name:
            case "arith.constant":
                return _all(attributes["value"].value)
            case "llvm.mlir.constant":
                return _all(attributes["value"].value)
            case "gpu.thread_id":
                return np.arange(THREADS, dtype=np.uint64) if _is_first(attributes["dimension"]) else _all(0)
            case "gpu.block_dim":
                return _all(THREADS if _is_first(attributes["dimension"]) else 1)
            case "arith.index_cast" | "arith.extui" | "arith.bitcast" | "llvm.inttoptr" | "llvm.ptrtoint":
                return of[0]
            case "arith.cmpi":
                predicate, (a, b) = attributes["predicate"].value, of
                if predicate in _SIGNED:
                    return _SIGNED[predicate](a.astype(np.int32), b.astype(np.int32)).astype(np.uint64)
                return _COMPARISONS[predicate](a, b).astype(np.uint64)
            case "arith.select":
                chosen = of[0] != 0
                return np.where(chosen if of[1].ndim == 1 else chosen[:, None], of[1], of[2])
            case "builtin.unrealized_conversion_cast":
                return of[0]
            case "llvm.extractvalue":
                (position,) = list(attributes["position"])
                if isinstance(of[0], Array):  # the aligned pointer, and the offset in elements
                    return _all({1: of[0].address, 2: 0}[position])
                return of[0][position]
            case "llvm.getelementptr":
                (index,) = list(attributes["rawConstantIndices"])
                index = of[1].astype(np.int64) if index == _DYNAMIC else index
                return (of[0].astype(np.int64) + index * (_width(attributes["elem_type"].value) // 8)).astype(np.uint64)
            case "llvm.load":
                return self._load(of[0], operation.results[0].type)
            case "llvm.store":
                self._store(of[1], of[0], operation.operands[0].type, np.ones(THREADS, bool))
            case "vector.broadcast":
                return of[0][:, None]
            case "vector.bitcast":
                whole = of[0][:, 0]
                return np.stack([whole & 0xFFFF, whole >> 16], axis=1)
            case "vector.extract":
                (position,) = list(attributes["static_position"])
                return of[0][:, position]
            case "llvm.inline_asm":
                return self._asm(attributes["asm_string"].value, of)
            case _:
                raise NotImplementedError(name)

    def _asm(self, text: str, of: list) -> Any:
        if text.startswith("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"):
            # Lane l has the address of row l % 8 of matrix l // 8, and gets column l // 4 of rows 2 p and 2 p + 1.
            self._check_reads((of[0][:, None] + np.arange(16, dtype=np.uint64)).astype(int))
            rows = self.memory[(of[0][:, None] + np.arange(16, dtype=np.uint64)).astype(int)].view("<u2")
            rows = rows.reshape(4, 4, 8, 8).astype(np.uint64)  # [warp matrix row column]
            lane = np.arange(32)
            low, high = (rows[:, :, 2 * (lane % 4) + i, lane // 4] for i in range(2))  # [warp matrix lane]
            words = (low | high << np.uint64(16)).swapaxes(0, 1).reshape(4, THREADS)
            return list(words)
        if text.startswith("prmt.b32 $0, $1, 0, "):
            selector = int(text.rstrip(";").rsplit(" ", 1)[1], 16)
            digits = [selector >> 4 * i & 15 for i in range(4)]
            assert all(digit < 4 for digit in digits)
            return sum((of[0] >> np.uint64(8 * d) & np.uint64(255)) << np.uint64(8 * i) for i, d in enumerate(digits))
        if text == FOUR_BFLOAT16:
            code = [(of[0] >> np.uint64(8 * i)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn) for i in range(4)]
            power = [(x & np.uint64(0xFFFF)).astype(np.uint16).view(ml_dtypes.bfloat16) for x in of[1:]]
            assert all((x >> np.uint64(16) == x & np.uint64(0xFFFF)).all() for x in of[1:])
            times = lambda i: (code[i].astype(np.float32) * power[i // 2].astype(np.float32)).astype(ml_dtypes.bfloat16)
            halves = [times(i).view(np.uint16).astype(np.uint64) for i in range(4)]
            return [halves[0] | halves[1] << np.uint64(16), halves[2] | halves[3] << np.uint64(16)]
        if text.startswith("bar.sync"):
            self._forget()
            return None
        if store := _STORE_IF.fullmatch(text):
            self._store(of[0], np.stack(of[1:3], axis=1), f"vector<2xi{store[1]}>", of[3] != 0)
            return None
        raise NotImplementedError(text)

    def _load(self, address: np.ndarray, kind: ir.Type) -> np.ndarray:
        places, count = self._places(address, kind)
        self._check_reads(places)
        values = sum(self.memory[places[..., i]].astype(np.uint64) << np.uint64(8 * i) for i in range(places.shape[2]))
        return values if count else values[:, 0]

    def _store(self, address: np.ndarray, value: np.ndarray, kind: ir.Type | str, active: np.ndarray) -> None:
        places, count = self._places(address, kind)
        value = value if count else value[:, None]
        own, thread = self._own(places, active)
        assert len(np.unique(own)) == len(own), "two threads write to one place"
        shared, thread = own[self._shared[own]], thread[self._shared[own]]
        for who in (self._writer[shared], self._reader[shared]):
            assert ((who == -1) | (who == thread)).all(), "a thread writes what another uses, before a barrier"
        self._writer[shared] = thread
        for i in range(places.shape[2]):
            byte = value[active] >> np.uint64(8 * i) & np.uint64(255)
            self.memory[places[active][..., i]] = byte.astype(np.uint8)

    def _check_reads(self, places: np.ndarray) -> None:
        own, thread = self._own(places, np.ones(THREADS, bool))
        shared, thread = own[self._shared[own]], thread[self._shared[own]]
        writer, reader = self._writer[shared], self._reader[shared]
        assert ((writer == -1) | (writer == thread)).all(), "a thread reads what another wrote, before a barrier"
        self._reader[shared] = np.where((reader == -1) | (reader == thread), thread, -2)

    def _own(self, places: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(bytes that active threads use, the thread of each)."""
        own = places.reshape(THREADS, -1)[active]
        assert ((own > 0) & (own < self._end)).all(), "a thread uses what is outside of memory"
        return own.reshape(-1), np.nonzero(active)[0].repeat(own.shape[1])

    def _places(self, address: np.ndarray, kind: ir.Type | str) -> tuple[np.ndarray, int]:
        """The bytes of each element, `[128 n bytes]`, and how many elements a vector has; 0 for a scalar."""
        vector = re.fullmatch(r"vector<(\d+)x(\w+)>", str(kind))
        count, size = (int(vector[1]), _width(vector[2]) // 8) if vector else (0, _width(kind) // 8)
        assert (address % np.uint64(max(count, 1) * size) == 0).all(), "an access is not aligned"
        offsets = np.arange(max(count, 1) * size).reshape(-1, size)
        return address.astype(int)[:, None, None] + offsets, count

    def _forget(self) -> None:
        self._writer, self._reader = (np.full(len(self.memory), -1, np.int16) for _ in range(2))


def _is_first(dimension: ir.Attribute) -> bool:
    """Return True for the dimension x, as jax 0.10 and 0.11 write it."""
    return re.search(r"\bx\b", str(dimension)) is not None


def _all(value: int) -> np.ndarray:
    return np.full(THREADS, value & 0xFFFFFFFFFFFFFFFF, np.uint64)


def _cut(bits: np.ndarray, kind: ir.Type) -> np.ndarray:
    """Keep as many bits as a type has."""
    width = _width(kind) if str(kind).startswith("i") and str(kind) != "index" else 64
    return bits & np.uint64((1 << width) - 1)


def _width(kind: ir.Type | str) -> int:
    """The bits of a number, by its type's name: i32, bf16."""
    return int("".join(filter(str.isdigit, str(kind))))


def _element(dtype: np.dtype) -> ir.Type:
    names = {"uint8": "i8", "int32": "i32", "float32": "f32", "bfloat16": "bf16"}
    return ir.Type.parse(names[dtype.name])


def _types_of(leaf: Array | Registers | int) -> list[ir.Type]:
    if isinstance(leaf, Array):
        return [leaf.type]
    if isinstance(leaf, Registers):
        return [ir.VectorType.get((2,), _element(leaf.dtype))] * leaf.bits.shape[1]
    return [ir.IntegerType.get_signless(32)]


def _as_argument(leaf: Array | Registers | int, values: Any) -> Any:
    if isinstance(leaf, Array):
        return next(values)
    if isinstance(leaf, Registers):
        registers = np.empty(fragments.WGMMA_LAYOUT.registers_shape(leaf.shape), object)
        registers.reshape(-1)[:] = [next(values) for _ in range(leaf.bits.shape[1])]
        return fragments.FragmentedArray(_registers=registers, _layout=fragments.WGMMA_LAYOUT, _is_signed=None)
    return fragments.FragmentedArray.splat(next(values), (), is_signed=True)


def _bits_of(leaf: Array | Registers | int) -> list[Any]:
    if isinstance(leaf, Array):
        return [leaf]
    if isinstance(leaf, Registers):
        return list(leaf.bits.swapaxes(0, 1).astype(np.uint64))
    return [_all(leaf)]
