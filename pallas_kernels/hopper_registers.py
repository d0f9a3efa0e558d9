"""The registers of a warpgroup of 128 threads: numbers of the weights, sums, and the outputs that it writes.

Hopper's tensor cores multiply 64 rows at a time, 16 of each of the four warps. Of the left operand and of the sums a
thread has rows g and g + 8 of its warp's 16, and of every 8 columns those at 2 p and 2 p + 1, where g = lane // 4 and
p = lane % 4. Products are turned, so these rows are columns of the weights; which ones is free. Here warps 0 and 1
have 16 neighbouring columns each of a first matrix, warps 2 and 3 of a second one, and rows g and g + 8 are the
neighbours 2 g and 2 g + 1. The columns are tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Int

from pallas_kernels.mxfp8 import BLOCK, NAN_SCALE, Weights
from pallas_kernels.mxfp8_ptx import FOUR_BFLOAT16

DEPTH = 64  # input channels of a step
PART = 32  # columns of each matrix whose sums a warpgroup has at a time
WARPGROUPS = 2  # that multiply
EXCHANGED = 16  # registers that a thread leaves to another one at a time

_ROWS_OF_PRODUCT = 64  # of a matrix product: columns of both matrices
_LINE = 128  # bytes of shared memory in which all of its banks are
ROWS = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(2 * DEPTH))  # of tokens

_SCALAR = plgpu.Layout.WG_SPLAT(())
_DYNAMIC = -(2**31)  # LLVM's word for an index that is a value


def layout_of_codes(columns: int) -> tuple:
    """Return how shared memory has codes of 64 or 128 columns.

    The pieces of 16 bytes of a row are permuted from one line of 128 bytes to the next, so that 8 rows of a piece meet
    all banks.
    """
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns)


def make_numbers(first: Weights, second: Weights, part: Int[Array, ""], columns: int) -> Float[Array, "64 64"]:
    """Return the numbers of a step, `[columns channels]`, in the registers from which tensor cores take them.

    One instruction of a warp reads 16 columns of 32 channels and turns them: a thread gets four words, each with two
    neighbouring columns of two neighbouring channels.

    Args:
      first: references to codes [64 C] and scales [2 C] in shared memory.
      second: likewise, of the other matrix.
      part: which 32 of the columns.
      columns: C, 64 or 128.
    """
    of_matrix = Weights(plgpu.RefType(layout_of_codes(columns)), plgpu.RefType())
    numbers = plgpu.ShapeDtypeStruct((_ROWS_OF_PRODUCT, DEPTH), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(of_matrix, of_matrix, _SCALAR), return_type=numbers)
    def make(_, first: Weights, second: Weights, part):
        i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
        thread = _Thread.here()
        pick = lambda a, b: arith.select(thread.is_of_second, utils.memref_ptr(b), utils.memref_ptr(a))
        codes, scales = pick(first.codes, second.codes), pick(first.scales, second.scales)
        piece = arith.addi(arith.muli(part.registers.item(), _c(2)), arith.andi(thread.warp, _c(1)))
        line = arith.divui(thread.lane, _c(_LINE // columns))
        permuted = arith.xori(piece, arith.remui(line, _c(columns // 16)))
        own_row = arith.addi(arith.muli(thread.lane, _c(columns)), arith.muli(permuted, _c(16)))
        own_scales = arith.addi(arith.muli(piece, _c(16)), arith.muli(thread.group, _c(2)))
        registers = []  # [eight channels, row half], as the layout has them
        for block in range(DEPTH // BLOCK):
            two = arith.extui(i32, llvm.load(i16, _at(scales, own_scales, "i8", block * columns)))
            powers = _power(arith.andi(two, _c(255))), _power(arith.shrui(two, _c(8)))
            row = llvm.ptrtoint(i32, _at(codes, own_row, "i8", block * BLOCK * columns))
            words = _asm("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", [row], 4, reads=True)
            for word in words:
                (by_column,) = _asm("prmt.b32 $0, $1, 0, 0x3120;", [word], 1)
                registers += [_pair(x) for x in _asm(FOUR_BFLOAT16, [by_column, *powers], 2)]
        return _array(registers, (_ROWS_OF_PRODUCT, DEPTH))

    return make(first, second, part)


def exchange(sums: Float[Array, "64 R"], buffer_ref) -> tuple[Float[Array, "64 R2"], Float[Array, "64 R2"]]:
    """Return the sums of the first and of the second matrix, both in one thread for half of the tokens each.

    A thread has sums of one matrix. It keeps those of half of the tokens, the first one in warps 0 and 1, and gets the
    other matrix's for them from the thread two warps away.

    Args:
      sums: of both matrices.
      buffer_ref: [EXCHANGED 128] float32 in shared memory, of this warpgroup alone.
    """
    half = plgpu.ShapeDtypeStruct((sums.shape[0], sums.shape[1] // 2), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=(half, half))
    def swap(_, sums: fragments.FragmentedArray, buffer):
        thread, buffer = _Thread.here(), utils.memref_ptr(buffer)
        kept = sums.registers.reshape(-1)  # [eight tokens, row half] of two tokens each
        count = len(kept) // 2
        place = lambda i, index: _at(buffer, arith.muli(index, _c(2)), "f32", i * 2 * utils.WARPGROUP_SIZE)
        other = arith.xori(thread.index, _c(64))
        first, second = [], []
        for begin in range(0, count, EXCHANGED // 2):
            part = range(begin, min(begin + EXCHANGED // 2, count))
            for i in part:
                llvm.store(arith.select(thread.is_of_second, kept[i], kept[count + i]), place(i - begin, thread.index))
            utils.warpgroup_barrier()
            for i in part:
                got = llvm.load(kept[i].type, place(i - begin, other))
                first.append(arith.select(thread.is_of_second, got, kept[i]))
                second.append(arith.select(thread.is_of_second, kept[count + i], got))
            utils.warpgroup_barrier()
        return _array(first, half.shape), _array(second, half.shape)

    return swap(sums, buffer_ref)


def write_halves(ref, values: Float[Array, "64 R2"], count: Int[Array, ""]) -> None:
    """Write what was made of `exchange`'s sums to rows of memory, those of the first `count` tokens.

    Args:
      ref: [R 32] of memory, whose columns are the warpgroup's.
      values: of which warps 2 and 3 have the second half of the tokens.
      count: tokens that count.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, _SCALAR))
    def write(_, ref, values, count):
        thread = _Thread.here()
        second_half = arith.muli(arith.extui(_i32(), thread.is_of_second), _c(values.shape[1]))
        first_row = arith.addi(arith.muli(thread.position, _c(2)), second_half)
        _write(ref, values, thread.column, first_row, count.registers.item(), lambda row: row)

    write(ref, values, count)


def write_pairs(ref, values: Float[Array, "64 R"], count: Int[Array, ""], pair_ref, apart: int) -> None:
    """Write the sums of both matrices to rows of memory, each token's where its pair belongs.

    Args:
      ref: [pairs 32] of memory, the warpgroup's columns of the first matrix.
      values: the sums.
      count: tokens that count.
      pair_ref: [R] of memory, the pair of each token.
      apart: columns from those of the first matrix to those of the second.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, _SCALAR, plgpu.RefType()))
    def write(_, ref, values, count, pair):
        thread, pair = _Thread.here(), utils.memref_ptr(pair)
        of_second = arith.muli(arith.extui(_i32(), thread.is_of_second), _c(apart))
        column, first_row = arith.addi(thread.column, of_second), arith.muli(thread.position, _c(2))
        where = lambda row: llvm.load(_i32(), _at(pair, row, "i32"))
        _write(ref, values, column, first_row, count.registers.item(), where)

    write(ref, values, count, pair_ref)


class _Thread(NamedTuple):
    """The place of a thread in its warpgroup, as values of the program."""

    index: ir.Value
    warp: ir.Value
    lane: ir.Value
    group: ir.Value  # of four threads
    position: ir.Value  # in its group
    is_of_second: ir.Value  # whether its rows are columns of the second matrix
    column: ir.Value  # the first of its two, of a warpgroup's 32

    @classmethod
    def here(cls) -> "_Thread":
        index = arith.remui(utils.thread_idx(), _c(utils.WARPGROUP_SIZE))
        warp, lane = arith.divui(index, _c(32)), arith.remui(index, _c(32))
        group = arith.divui(lane, _c(4))
        column = arith.addi(arith.muli(arith.andi(warp, _c(1)), _c(16)), arith.muli(group, _c(2)))
        is_of_second = arith.cmpi(arith.CmpIPredicate.uge, warp, _c(2))
        return cls(index, warp, lane, group, arith.remui(lane, _c(4)), is_of_second, column)


def _write(ref, values: fragments.FragmentedArray, column, first_row, count, where) -> None:
    """Write a thread's two columns of each of its tokens, from `first_row` on, to the row that `where` gives for it.

    What does not count is stored by no thread, and no branch is taken. Between two branches on one condition a compiler
    may put what it finds there into both of them; but waiting for products and for other threads is for whole warps.
    """
    i64, number = ir.IntegerType.get_signless(64), values.mlir_dtype
    (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    memory = utils.memref_ptr(ref)
    for eight, (low, high) in enumerate(values.registers.reshape(-1, 2)):
        for token in range(2):
            row = arith.addi(first_row, _c(8 * eight + token))
            # In 64 bits: outputs of many pairs are beyond 2^31.
            first = arith.muli(arith.extui(i64, where(row)), utils.c(stride, i64))
            place = _at(memory, arith.addi(first, arith.extui(i64, column)), number)
            own = [vector.extract(x, [], [token]) for x in (low, high)]
            _store_if(arith.cmpi(arith.CmpIPredicate.slt, row, count), place, own)


def _store_if(condition: ir.Value, place: ir.Value, two: list[ir.Value]) -> None:
    """Store two numbers side by side where a condition is true, without a branch."""
    bits = utils.bitwidth(two[0].type)
    words = [arith.bitcast(ir.IntegerType.get_signless(bits), number) for number in two]
    text = f"{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.v2.b{bits} [$0], {{$1, $2}}; }}"
    kind = {16: "h", 32: "r"}[bits]
    operands, constraints = [place, *words, arith.extui(_i32(), condition)], f"l,{kind},{kind},r,~{{memory}}"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, asm_dialect=0, has_side_effects=True)


def _power(scale: ir.Value) -> ir.Value:
    """Return 2^(scale - 127) in bfloat16, twice: 2^-127 is subnormal, and 255 means NaN."""
    bits = arith.maxui(arith.shli(scale, _c(7)), _c(0x0040))
    bits = arith.select(arith.cmpi(arith.CmpIPredicate.eq, scale, _c(NAN_SCALE)), _c(0x7FC0), bits)
    return arith.muli(bits, _c(0x10001))


def _array(registers: list[ir.Value], shape: tuple[int, ...]) -> fragments.FragmentedArray:
    """Return an array in the tensor cores' layout from a thread's registers, in the layout's order."""
    layout = fragments.WGMMA_LAYOUT
    own = np.empty(layout.registers_shape(shape), object)
    own.reshape(-1)[:] = registers
    return fragments.FragmentedArray(_registers=own, _layout=layout, _is_signed=None)


def _asm(text: str, operands: list[ir.Value], outputs: int, reads: bool = False) -> list[ir.Value]:
    """Return the 32-bit outputs of PTX whose operands are 32-bit words; `reads` if it reads memory."""
    kind = _i32() if outputs == 1 else ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * outputs)})>")
    constraints = ",".join(["=r"] * outputs + ["r"] * len(operands) + ["~{memory}"] * reads)
    out = llvm.inline_asm(kind, operands, text, constraints, asm_dialect=0, has_side_effects=reads)
    return [out] if outputs == 1 else [llvm.extractvalue(_i32(), out, [i]) for i in range(outputs)]


def _pair(word: ir.Value) -> ir.Value:
    """Return a word as two numbers in bfloat16."""
    one = vector.broadcast(ir.VectorType.get((1,), _i32()), word)
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), one)


def _at(pointer: ir.Value, index: ir.Value, element: str | ir.Type, offset: int = 0) -> ir.Value:
    """Return a pointer some elements behind another one: a value, and a number that is known."""
    element = ir.Type.parse(element) if isinstance(element, str) else element
    for values, known in (([index], [_DYNAMIC]), ([], [offset])):
        if values or offset:
            pointer = llvm.getelementptr(pointer.type, pointer, values, known, element, llvm.GEPNoWrapFlags.none)
    return pointer


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _c(number: int) -> ir.Value:
    return utils.c(number, _i32())
