"""The parts that every kind of cache shares: places of tokens, scales, storage types."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from m3jax.config import M3Config
from m3jax.msa.share import Share

FLOAT8 = "float8_e4m3fn"
DTYPES = ("bfloat16", "float16", "float32", "float64", FLOAT8)


@runtime_checkable
class HostPages(Protocol):
    """The virtual pages of a stack of layers in host memory."""

    def read(self, layer: Int[Array, ""], pages: Int[Array, " F"]) -> Num[Array, "F 2 P H"]:
        """Return keys and values of some virtual pages, on the device; called within a jitted function."""
        ...


@struct.dataclass
class Places:
    """The slots that a call's tokens are written to, and the pages that hold their rows' past.

    Attributes:
      table: the page of each block of each row; one outside [0, pages) is no page.
      page: that each token is written to; one outside [0, pages) for a token that is not written here.
      offset: of the token in its page.
      host: the host pages of the stack that runs, if its keys and values are in host memory.
      share: inside `shard_map`, the blocks of each row that this device holds: the table has those alone. None where it
        has all.
    """

    table: Int[Array, "B M"]
    page: Int[Array, "B T"]
    offset: Int[Array, "B T"]
    host: HostPages | None = None
    share: Share | None = None

    @classmethod
    def nowhere(cls, positions: Int[Array, "B T"]) -> "Places":
        """Return the places of a call without a cache: its tokens go into no page, and its rows have no past."""
        no_page = jnp.full(positions.shape, -1, jnp.int32)
        return cls(jnp.zeros((positions.shape[0], 0), jnp.int32), no_page, no_page)

    def on_this_device(
        self,
        mesh_axes: tuple[str, ...],
        num_pages: int,
        page_size: int,
        divided: int | None = None,
        mesh: Mesh | None = None,
    ) -> "Places":
        """Return the part of this device, inside `shard_map`; pages are counted from its first one.

        The blocks of a row lie on the devices in turn (`m3jax.cache.PageAllocator`), from that of its first page on. So
        each device holds one of any n in a row, and its table has a column for every n of them.

        Args:
          mesh_axes: over which devices divide the pages.
          num_pages: of each device.
          page_size: P.
          divided, mesh: as of `m3jax.msa.share.Share`.
        """
        device, num_devices = jax.lax.axis_index(mesh_axes), jax.lax.axis_size(mesh_axes)
        if num_devices == 1:  # the mesh divides heads, but no pages
            return self
        begins_on = jnp.maximum(self.table[:, 0], 0) // num_pages  # [B]; a row without pages begins anywhere
        share = Share((device - begins_on) % num_devices, page_size, num_devices, mesh_axes, divided, mesh)
        padding = ((0, 0), (0, -self.table.shape[1] % num_devices))
        by_turn = jnp.pad(self.table, padding, constant_values=-1).reshape(len(self.table), -1, num_devices)  # [B m n]
        table = jnp.take_along_axis(by_turn, share.first[:, None, None], axis=2)[..., 0]  # [B m]
        # What is no page, or another device's, is then below 0 or behind the last page.
        first_page = device * num_pages
        return self.replace(table=table - first_page, page=self.page - first_page, share=share)


@struct.dataclass
class Scales:
    """The factors of stored float8 numbers: one per layer and head, one per layer for index keys."""

    k: Float[Array, "L K"]
    v: Float[Array, "L K"]
    index_k: Float[Array, " L"]


def held_page(places: Places, num_pages: int) -> Int[Array, "B T"]:
    """Return the page that each token is written to; `num_pages`, where a write is dropped, if it is not held here."""
    # "drop" leaves out what lies behind the end of an array, but -1 would be its last page (T9).
    is_held = (places.page >= 0) & (places.page < num_pages)
    return jnp.where(is_held, places.page, num_pages)


def stored(x: Float[Array, "..."], dtype: DTypeLike, scale: Float[Array, "..."]) -> Num[Array, "..."]:
    """Return new numbers as they are stored; float8 is scaled, and clipped so that nothing overflows into NaN."""
    if dtype != FLOAT8:
        return x.astype(dtype)
    largest = float(jnp.finfo(dtype).max)  # float8_e4m3fn has no infinity: what overflows would be NaN
    return jnp.clip(x.astype(scale.dtype) / scale, -largest, largest).astype(dtype)


def unit_scales(config: M3Config) -> list[Scales]:
    """Return scales that change nothing, one for each stack of layers."""
    heads = config.num_key_value_heads
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    return [Scales(ones(s.num_layers, heads), ones(s.num_layers, heads), ones(s.num_layers)) for s in config.stacks]
