"""Matrices in MXFP8 as kernels read them, whatever the backend."""

from typing import NamedTuple

from jaxtyping import Array, Float, UInt8

from pallas_kernels.numbers import can_reach

BLOCK = 32  # input channels that share a scale
NAN_SCALE = 255  # the one scale that is no power of two


class Weights(NamedTuple):
    """A stack of matrices: W = e4m3(code) * 2^(scale - 127).

    Attributes:
      codes: bit patterns of float8_e4m3fn, I input channels of O outputs.
      scales: exponents, one for every 32 input channels; 255 is NaN.
    """

    codes: UInt8[Array, "*stack I O"]
    scales: UInt8[Array, "*stack I32 O"]


def check_weights(name: str, weights: Weights) -> None:
    """Raise ValueError for scales that are not one for every 32 input channels.

    Args:
      name: of the weights, for the message.
      weights: codes and scales.
    """
    *stack, inputs, outputs = weights.codes.shape
    if inputs % BLOCK or weights.scales.shape != (*stack, inputs // BLOCK, outputs):
        raise ValueError(
            f"{name} has codes {weights.codes.shape} and scales {weights.scales.shape}: need a scale for every {BLOCK} "
            "input channels"
        )


def check_reach(*stacks: Weights, advice: str = "divide the stack") -> None:
    """Raise ValueError for codes among which the offsets of a Triton kernel overflow.

    Args:
      stacks: of matrices.
      advice: what else to do than to use XLA, for the message.
    """
    for stack in stacks:
        if not can_reach(stack.codes.size):
            raise ValueError(f"{stack.codes.size} codes: need below 2**31 or above 2**32; {advice}, or use XLA")


def check_experts(x: Float[Array, "X D"], gate: Weights, up: Weights, down: Weights) -> None:
    """Raise ValueError where tokens and the matrices of experts do not fit together.

    Args:
      x: the tokens.
      gate: of shape [L E D F].
      up: likewise.
      down: of shape [L E F D].
    """
    width = x.shape[1]
    layers, experts, inputs, hidden = gate.codes.shape
    if gate.codes.shape != up.codes.shape or inputs != width or down.codes.shape != (layers, experts, hidden, width):
        raise ValueError(
            f"x has width {width}, gate has shape {gate.codes.shape}, up {up.codes.shape}, down {down.codes.shape}: "
            f"need [L E D F] twice and [L E F D] with D = {width}"
        )
    for name, weights in (("gate", gate), ("up", up), ("down", down)):
        check_weights(name, weights)
    if x.dtype.itemsize != 2:
        raise ValueError(f"x is {x.dtype}: need bfloat16 or float16")
