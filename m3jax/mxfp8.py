"""MXFP8: numbers as E4M3 codes, with one power of two for every 32 of them along the axis that a product sums over.

Bit patterns are put together from integers: compilers flush small numbers to zero where they multiply, and a scale goes
down to 2^-127. All that is defined here has the same bits on every backend.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PyTree

BLOCK = 32
NAN_SCALE = 255  # the one scale byte that is no power of two
LARGEST_CODE = 126  # 448, the largest finite number of E4M3; 127 is NaN
_LARGEST_EXPONENT = 8  # of 448 = 1.75 * 2^8
_SMALLEST_EXPONENT = -6  # of the numbers with a leading bit; those below are multiples of 2^-9
_ACTIVATIONS = (None, "mxfp8")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales"),
    meta_fields=("num_inputs", "num_outputs", "activations"),
)
@dataclass(frozen=True)
class MXFP8Array:
    """A matrix in MXFP8, or a stack of them: a pytree of its codes and scales.

    Attributes:
      codes: uint8 `[*stack *inputs *outputs]`, bit patterns of float8_e4m3fn. As bytes, because XLA's CPU backend
        cannot take a slice of 8-bit floats: it would convert all experts of all layers to get at a few.
      scales: uint8 `[*stack blocks *outputs]`: byte b stands for 2^(b - 127), 255 for NaN. A block is 32 channels of
        all inputs counted as one axis; the last may have fewer.
      num_inputs: how many axes a product sums over.
      num_outputs: how many axes are the product's.
      activations: what a product does to what it is multiplied with: None leaves it, "mxfp8" quantises it too.
    """

    codes: Any
    scales: Any
    num_inputs: int = 1
    num_outputs: int = 1
    activations: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix, or of the stack."""
        return len(self.codes.shape)

    def __getitem__(self, index: Any) -> "MXFP8Array":
        """Return some matrices of a stack, with their scales.

        Raises:
          IndexError: an index into a matrix, whose blocks have to stay whole.
        """
        if index is ...:
            return self
        depth = len(index) if isinstance(index, tuple) else 1
        num_stacked = self.ndim - self.num_inputs - self.num_outputs
        if depth > num_stacked:
            raise IndexError(
                f"{depth} indices into a stack of {num_stacked} axes of MXFP8 matrices: dequantize it first"
            )
        return replace(self, codes=self.codes[index], scales=self.scales[index])

    def with_activations(self, activations: str | None) -> "MXFP8Array":
        """Return the same matrix, set to quantise the activations that it is multiplied with, or to leave them.

        Args:
          activations: None or "mxfp8".

        Raises:
          ValueError: something else.
        """
        if activations not in _ACTIVATIONS:
            raise ValueError(f"activations = {activations!r}: allowed are None and 'mxfp8'")
        return replace(self, activations=activations)


def with_activations(tree: PyTree, activations: str | None) -> PyTree:
    """Return a pytree whose MXFP8 matrices are set to quantise the activations they meet, or to leave them.

    Args:
      tree: of any parameters.
      activations: as of `MXFP8Array.with_activations`.
    """
    is_matrix = lambda x: isinstance(x, MXFP8Array)
    change = lambda x: x.with_activations(activations) if is_matrix(x) else x
    return jax.tree.map(change, tree, is_leaf=is_matrix)


def scales_shape(shape: tuple[int, ...], num_inputs: int, num_outputs: int) -> tuple[int, ...]:
    """The shape of the scales of a stack of matrices `[*stack *inputs *outputs]`: `[*stack blocks *outputs]`."""
    first_output = len(shape) - num_outputs
    first_input = first_output - num_inputs
    num_channels = prod(shape[first_input:first_output])
    return (*shape[:first_input], -(-num_channels // BLOCK), *shape[first_output:])


def dequantize(weight: MXFP8Array, dtype: DTypeLike) -> Float[Array, "..."]:
    """W = e4m3(code) * 2^(scale - 127) in float32, which holds the product exactly, then cast to `dtype`.

    In bfloat16 nothing rounds under scales of 11 to 246. No gradient goes through it.

    Args:
      weight: of any shape.
      dtype: of the result.

    Returns:
      The numbers, in the shape of the codes; infinite where float32 or `dtype` ends, NaN where code or scale is.

    Source: OCP Microscaling Formats 1.0, section 6.3; transformers `Fp8Dequantize`.
    """
    axis = len(weight.scales.shape) - weight.num_outputs - 1  # of blocks, and of the inputs as one axis
    shape = weight.codes.shape
    num_channels = prod(shape[axis : axis + weight.num_inputs])
    scales = jnp.repeat(weight.scales, BLOCK, axis=axis)  # [*stack blocks*32 *outputs]
    scales = jax.lax.slice_in_dim(scales, 0, num_channels, axis=axis).reshape(shape)
    values = _values(weight.codes.astype(jnp.int32), scales.astype(jnp.int32))
    return jax.lax.stop_gradient(values.astype(dtype))


def _values(codes: Int32[Array, "*X"], scales: Int32[Array, "*X"]) -> Float[Array, "*X"]:
    """e4m3(code) * 2^(scale - 127) of bytes, in float32: exact, also where the result has no leading bit."""
    exponent, fraction = codes >> 3 & 15, codes & 7
    significand = jnp.where(exponent > 0, 8 + fraction, fraction)
    power = jnp.maximum(exponent, 1) - 10 + scales - 127  # |value| = significand * 2^power
    bits = jax.lax.bitcast_convert_type(significand.astype(jnp.float32), jnp.int32)
    exponent = (bits >> 23) + power  # biased, as float32 stores it
    normal = bits + (power << 23)
    # Three bits behind the leading one, shifted by 10 at most: none is lost.
    subnormal = (bits & 0x7FFFFF | 0x800000) >> jnp.clip(1 - exponent, 0, 31)
    product = jnp.where(exponent >= 255, 0x7F800000, jnp.where(exponent >= 1, normal, subnormal))
    product = jnp.where(significand == 0, 0, product)
    product = jnp.where((codes & 127 == 127) | (scales == NAN_SCALE), 0x7FC00000, product)
    return jax.lax.bitcast_convert_type(product | codes >> 7 << 31, jnp.float32)


def quantize(x: Float[Array, "..."], num_inputs: int = 1, num_outputs: int = 1) -> MXFP8Array:
    """The nearest MXFP8 numbers, ties to even.

    The scale of a block is 2^(floor(log2(largest magnitude)) - 8), at least 2^-127, so that the largest number lies in
    the last binade of E4M3: there it is rounded, and what lies above 448 becomes 448. A block of zeros has scale
    byte 0. A block with a number that is not finite is NaN.

    Args:
      x: `[*stack *inputs *outputs]`, taken in float32.
      num_inputs: how many axes a product sums over; blocks of 32 run along all of them counted as one.
      num_outputs: how many axes follow; 0 for activations, whose channels come last.

    Source: OCP Microscaling Formats 1.0, section 6.3. How the released weights were rounded is not published.
    """
    first_output = x.ndim - num_outputs
    axis = first_output - num_inputs
    num_channels = prod(x.shape[axis:first_output])
    flat = x.astype(jnp.float32).reshape(*x.shape[:axis], num_channels, *x.shape[first_output:])
    bits = jax.lax.bitcast_convert_type(flat, jnp.int32)
    num_blocks = -(-num_channels // BLOCK)
    padding = [(0, num_blocks * BLOCK - num_channels if i == axis else 0) for i in range(flat.ndim)]
    bits = jnp.pad(bits, padding).reshape(*flat.shape[:axis], num_blocks, BLOCK, *flat.shape[axis + 1 :])
    # Magnitudes of floats are in the order of their bits.
    largest = jnp.max(bits & 0x7FFFFFFF, axis=axis + 1, keepdims=True)  # [*stack blocks 1 *outputs]
    is_finite = largest < 0x7F800000
    scales = jnp.where(is_finite, jnp.maximum((largest >> 23) - _LARGEST_EXPONENT, 0), NAN_SCALE)
    codes = jnp.where(is_finite, _nearest_codes(bits, scales), LARGEST_CODE + 1)  # [*stack blocks 32 *outputs]
    codes = codes.astype(jnp.uint8).reshape(*flat.shape[:axis], num_blocks * BLOCK, *flat.shape[axis + 1 :])
    codes = jax.lax.slice_in_dim(codes, 0, num_channels, axis=axis).reshape(x.shape)
    return MXFP8Array(codes, jnp.squeeze(scales, axis + 1).astype(jnp.uint8), num_inputs, num_outputs)


def _nearest_codes(bits: Int32[Array, "*X"], scales: Int32[Array, "*Y"]) -> Int32[Array, "*X"]:
    """The E4M3 code nearest to x / 2^(scale - 127), of the bits of finite float32 numbers; 448 beyond it."""
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    # x / 2^(scale - 127) = significand * 2^power
    significand = jnp.where(exponent > 0, magnitude & 0x7FFFFF | 0x800000, magnitude)
    power = jnp.maximum(exponent, 1) - scales - 23
    leading_bit = 31 - jax.lax.clz(significand)
    binade = jnp.maximum(leading_bit + power, _SMALLEST_EXPONENT)  # floor(log2) of the quotient
    # Numbers of a binade are multiples of 2^(binade - 3). Beyond 25 bits all is less than half of one.
    dropped = jnp.minimum(binade - 3 - power, 25)
    is_odd = significand >> dropped & 1
    multiple = significand + (1 << dropped - 1) - 1 + is_odd >> dropped
    # 8 multiples are the leading bit; 16 carry into the next binade, whose codes come next.
    code = (binade - _SMALLEST_EXPONENT) * 8 + multiple
    return jnp.minimum(code, LARGEST_CODE) | (bits < 0) << 7
