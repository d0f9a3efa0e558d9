"""Conversion of stored bytes to values: the part of a hub tensor that one device holds, in the model's dtype."""

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Shaped, UInt8

from m3jax.checkpoint import mxfp8
from m3jax.checkpoint.names import Target


def cut(
    name: str,
    target: Target,
    weight: Shaped[np.ndarray, "out *in"],
    scale: UInt8[np.ndarray, "out scales"] | None,
    box: tuple[tuple[int, int], ...],
    dtype: np.dtype,
) -> Shaped[np.ndarray, "..."]:
    """Return the values of a hub tensor inside a box of the parameter's axes.

    Args:
      name: the stored tensor's name, for errors.
      target: its place among the parameters.
      weight: [out, in] or [out]; of an MXFP8 weight the codes, or the scales, uint8.
      scale: [out, in/32] scale bytes, uint8, of an MXFP8 weight that is dequantised.
      box: (start, stop) on each of the parameter's own axes (without those of its stack).
      dtype: of the result; uint8 for codes and scales that stay what they are.

    Returns:
      The values with the axes of `target.dims`: a view of `weight` where its dtype is `dtype`.

    Raises:
      ValueError: a finite value does not fit in `dtype`.
    """
    window = [slice(None)] * len(target.dims)
    for hub_axis, (start, stop) in zip(target.perm, box, strict=True):
        window[hub_axis] = slice(start, stop)
    stored = weight.reshape(target.dims)[tuple(window)]  # of q_proj, from [N*H D]: [N H D]
    if scale is None:
        return stored if dtype == np.uint8 else _cast(name, stored, dtype)  # codes and scales are moved as they are
    # A box need not begin or end where the 32 channels of a scale do: each code looks up the scale of its own channel.
    out_axes, in_sizes = target.out_axes, target.dims[target.out_axes :]
    channels = np.arange(weight.shape[-1]).reshape(in_sizes)[tuple(window[out_axes:])]  # of o_proj: [N H]
    scale_rows = scale.reshape(*target.dims[:out_axes], -1)[tuple(window[:out_axes])]  # of o_proj: [D N*H/32]
    scales = scale_rows[..., channels.reshape(-1) // mxfp8.BLOCK].reshape(stored.shape)  # of o_proj: [D N H]
    return _dequantize(name, stored, scales, dtype)


def is_finite(target: Target, values: Shaped[np.ndarray, "*axes"]) -> Bool[np.ndarray, "*axes"]:
    """Return a mask that is True where a value is neither NaN nor infinite; MXFP8 codes are judged as E4M3.

    Args:
      target: the piece's place.
      values: as `cut` gives them.
    """
    return np.isfinite(values.view(ml_dtypes.float8_e4m3fn) if target.holds_codes else values)


def check_range(
    name: str, codes: UInt8[np.ndarray, "out in"], scales: UInt8[np.ndarray, "out scales"], dtype: np.dtype
) -> None:
    """Raise ValueError if a weight that stays in MXFP8 has a value beyond the range of the dtype it is multiplied in.

    Args:
      name: the stored tensor's name.
      codes: of the weight.
      scales: of its blocks.
      dtype: the model's.
    """
    if _may_overflow(scales, dtype):
        repeated = np.repeat(scales, mxfp8.BLOCK, axis=-1)[..., : codes.shape[-1]]
        _dequantize(name, codes, repeated, dtype)


def _may_overflow(scales: UInt8[np.ndarray, "..."], dtype: np.dtype) -> bool:
    """True if the largest code, 1.75 * 2^8, would overflow `dtype`, or float32 on the way there, under some scale."""
    return int(scales.max()) - 127 + 8 >= min(ml_dtypes.finfo(dtype).maxexp, 128)


def _cast(name: str, stored: Shaped[np.ndarray, "*axes"], dtype: np.dtype) -> Float[np.ndarray, "*axes"]:
    """Return stored floats in another dtype; the same array if it has that dtype already."""
    if stored.dtype == dtype:
        return stored
    is_narrower = ml_dtypes.finfo(dtype).max < ml_dtypes.finfo(stored.dtype).max
    # A NaN stays one without a warning; overflow gets an error that names the tensor.
    with np.errstate(over="ignore", invalid="ignore"):
        values = stored.astype(dtype)
        if is_narrower and np.count_nonzero(np.isinf(values)) > np.count_nonzero(np.isinf(stored)):
            raise _overflow(name, dtype)
    return values


def _dequantize(
    name: str, codes: UInt8[np.ndarray, "*axes"], scales: UInt8[np.ndarray, "*axes"], dtype: np.dtype
) -> Float[np.ndarray, "*axes"]:
    """Return MXFP8 weights in `dtype`; raise ValueError if one of them overflows it."""
    values = mxfp8.dequantize(codes, scales, dtype)
    if _may_overflow(scales, dtype) and np.isinf(values).any():
        raise _overflow(name, dtype)
    return values


def _overflow(name: str, dtype: np.dtype) -> ValueError:
    return ValueError(
        f"{name}: a value is beyond the range of {dtype}, at most {ml_dtypes.finfo(dtype).max}; load in a wider dtype"
    )
