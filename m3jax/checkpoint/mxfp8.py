"""MXFP8 weights: E4M3 codes with a UE8M0 scale byte for every 32 input channels."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from m3jax.config import M3Config
from m3jax.messages import shown
from m3jax.mxfp8 import BLOCK, NAN_SCALE

# The table's index takes 8 bytes a code, so codes are looked up some at a time.
_CHUNK = 1 << 17


def dequantize(
    codes: UInt8[np.ndarray, "*axes"], scales: UInt8[np.ndarray, "*axes"], dtype: np.dtype
) -> Float[np.ndarray, "*axes"]:
    """Return weights from MXFP8: W = e4m3(code) * 2^(scale - 127) in float32, then cast to `dtype`.

    The product has 4 significant bits: it is exact in bfloat16 and wider wherever its exponent is in
    range, rounds to nearest even among the subnormals, and is infinite above.

    Args:
      codes: float8_e4m3fn bit patterns.
      scales: the scale byte of each code, in the same shape; 255 is NaN.
      dtype: of the result.

    Returns:
      Weights of the same shape.

    Source: OCP Microscaling Formats 1.0; transformers `Fp8Dequantize`.
    """
    table = _weight_bits(np.dtype(dtype))
    flat_codes, flat_scales = codes.ravel(), scales.ravel()  # of a weight [F D]: [F*D]
    bits = np.empty(codes.size, table.dtype)
    for start in range(0, codes.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        table_index = flat_scales[chunk].astype(np.intp) << 8 | flat_codes[chunk]
        np.take(table, table_index, out=bits[chunk], mode="clip")
    return bits.view(dtype).reshape(codes.shape)  # [F D]


def check_config(config: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a parsed config.json announces MXFP8 weights, and the faults of its quantization_config."""
    text_config = config.get("text_config") or {}
    given = (config.get("quantization_config"), text_config.get("quantization_config"))
    announced = next((value for value in given if value not in (None, {})), None)
    if announced is None:
        return False, []
    if not isinstance(announced, Mapping):
        return True, [f"config.json: quantization_config must be an object, found {shown(announced)}"]
    expected = {"quant_method": "mxfp8", "weight_block_size": [1, BLOCK]}
    return True, [
        f"config.json: quantization_config.{key} must be {value!r}, found {shown(announced.get(key))}"
        for key, value in expected.items()
        if announced.get(key) != value
    ]


def announcement(config: M3Config) -> dict[str, Any]:
    """Return the quantization_config for a config.json beside MXFP8 weights: the model's own, or the release's.

    Args:
      config: of the model; it remembers what its config.json said.
    """
    if announced := config.extra.get("quantization_config"):
        return announced
    ignored = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp"]
    for stack in config.stacks:
        layers = range(stack.first_layer, stack.first_layer + stack.num_layers) if stack.is_moe else ()
        ignored += [f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in layers]
    return {
        "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, BLOCK],
        "ignored_layers": ignored,
    }  # fmt: skip


@cache
def _weight_bits(dtype: np.dtype) -> Shaped[np.ndarray, "65536"]:
    """Return the bits of the weight of every scale byte and code, at index 256 * scale + code."""
    byte = np.arange(256, dtype=np.uint8)
    code_values = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale_values = np.where(byte == NAN_SCALE, np.nan, np.ldexp(1.0, byte.astype(int) - 127))
    # float64 holds every product, so nothing rounds before the cast to float32 that the format asks for.
    with np.errstate(over="ignore"):
        weights = (scale_values[:, None] * code_values).astype(np.float32).astype(dtype)  # [256 256]
    return weights.reshape(-1).view(f"u{dtype.itemsize}")  # [65536]
