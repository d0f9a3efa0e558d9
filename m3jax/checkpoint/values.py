"""Stored bytes to values: the part of a hub tensor that one device holds, in the model's dtype."""

import ml_dtypes
import numpy as np

from m3jax.checkpoint import mxfp8
from m3jax.checkpoint.names import Target


def cut(
    name: str,
    target: Target,
    weight: np.ndarray,
    scale: np.ndarray | None,
    box: tuple[tuple[int, int], ...],
    dtype: np.dtype,
) -> np.ndarray:
    """The values of a hub tensor inside a box of the parameter's axes.

    Args:
      name: the stored tensor's name, for errors.
      target: its place among the parameters.
      weight: [out, in] or [out]; of an MXFP8 weight the codes, uint8.
      scale: [out, in/32] scale bytes, uint8, of an MXFP8 weight.
      box: (start, stop) on each of the parameter's own axes (without those of its stack).
      dtype: of the result.

    Returns:
      The values with the axes of `target.dims`: a view of `weight` where its dtype is `dtype`.

    Raises:
      ValueError: a finite value does not fit in `dtype`.
    """
    window = [slice(None)] * len(target.dims)
    for axis, (start, stop) in zip(target.perm, box, strict=True):
        window[axis] = slice(start, stop)
    stored = weight.reshape(target.dims)[tuple(window)]
    if scale is None:
        return _cast(name, stored, dtype)
    out = target.out_axes
    columns = np.arange(weight.shape[-1]).reshape(target.dims[out:])[tuple(window[out:])]
    rows = scale.reshape(*target.dims[:out], -1)[tuple(window[:out])]
    scales = rows[..., columns.reshape(-1) // mxfp8.BLOCK].reshape(stored.shape)
    return _dequantize(name, stored, scales, dtype)


def _cast(name: str, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if stored.dtype == dtype:
        return stored
    narrower = ml_dtypes.finfo(dtype).max < ml_dtypes.finfo(stored.dtype).max
    # A NaN stays one without a warning; overflow gets an error that names the tensor.
    with np.errstate(over="ignore", invalid="ignore"):
        out = stored.astype(dtype)
        if narrower and np.count_nonzero(np.isinf(out)) > np.count_nonzero(np.isinf(stored)):
            raise _overflow(name, dtype)
    return out


def _dequantize(name: str, codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = mxfp8.dequantize(codes, scales, dtype)
    # The largest code is 1.75 * 2^8, and the product passes through float32.
    largest = min(ml_dtypes.finfo(dtype).maxexp, 128)
    if int(scales.max()) - 127 + 8 >= largest and np.isinf(out).any():
        raise _overflow(name, dtype)
    return out


def _overflow(name: str, dtype: np.dtype) -> ValueError:
    return ValueError(
        f"{name}: a value is beyond the range of {dtype}, at most {ml_dtypes.finfo(dtype).max}; load in a wider dtype"
    )
