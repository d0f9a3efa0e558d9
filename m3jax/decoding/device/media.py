"""Images and videos on the device: the tower's call, whose features the device keeps."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from m3jax.decoding.device.state import Layout, pin
from m3jax.decoding.protocols import SeeingModel
from m3jax.decoding.sampling import HostOrDevice
from m3jax.media.packing import MediaBatch

READ_MEDIA_ARGUMENTS = dict(donate_argnames=("features",), static_argnames=("layout", "types"))


@partial(jax.jit, **READ_MEDIA_ARGUMENTS)
def read_media(
    model: SeeingModel,
    features: Float[Array, "F D"],
    media: MediaBatch,
    rows: Int32[HostOrDevice, "R"],
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> Float[Array, "F D"]:
    """Run the tower on X patches and write its R = X / 4 features into some of the rows that the device keeps.

    Args:
      model: the target.
      features: all that the device keeps; donated.
      media: the patches; their number alone decides what is compiled.
      rows: where each feature goes; -1 is dropped.
      layout: as in `prefill`.
      types: as in `prefill`.
    """
    target_rows = jnp.where(rows >= 0, rows, len(features))
    found = model.features(media).astype(features.dtype)  # [R D]
    return pin(features.at[target_rows].set(found, mode="drop"), layout)
