"""Pages in host memory: in JAX's `pinned_host` memory, or in numpy arrays."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import io_callback
from jaxtyping import Array, Int, Num

from m3jax.cache.device import Cache
from m3jax.cache.offload.pool import OffloadedStack

KINDS = ("pinned_host", "numpy")
_PAGES_A_CALL = 8


@struct.dataclass
class PinnedPages:
    """Virtual pages in pinned host memory, which the device reads itself."""

    kv: Num[Array, "L V 2 P H"]

    def read(self, layer: Int[Array, ""], pages: Int[Array, " F"]) -> Num[Array, "F 2 P H"]:
        """Copy some virtual pages to the device."""
        shape = (1, 1, *self.kv.shape[2:])
        take = lambda page: jax.lax.dynamic_slice(self.kv, (layer, page, 0, 0, 0), shape)[0]
        return jnp.concatenate([jax.device_put(take(page), jax.memory.Space.Device) for page in pages])

    def get(self, pages: Int[np.ndarray, " F"]) -> Num[Array, "L F 2 P H"]:
        """Return the contents of virtual pages, all layers."""
        return _pinned_get(self.kv, pages)

    def put(self, pages: Int[np.ndarray, " F"], new: Num[Array | np.ndarray, "L F 2 P H"]) -> "PinnedPages":
        """Return the pages with some virtual pages of all layers replaced; `self` is donated."""
        return PinnedPages(_pinned_put(self.kv, pages, new))


@jax.tree_util.register_static
class NumpyPages:
    """Virtual pages in a numpy array, read by a callback. Static to jit: a compiled function has one array."""

    def __init__(self, kv: Num[np.ndarray, "L V 2 P H"]):
        self.kv = kv

    def read(self, layer: Int[Array, ""], pages: Int[Array, " F"]) -> Num[Array, "F 2 P H"]:
        """Copy some virtual pages to the device."""
        result = jax.ShapeDtypeStruct((*pages.shape, *self.kv.shape[2:]), self.kv.dtype)
        return io_callback(lambda layer, pages: self.kv[int(layer), np.asarray(pages)], result, layer, pages)

    def get(self, pages: Int[np.ndarray, " F"]) -> Num[np.ndarray, "L F 2 P H"]:
        """Return the contents of virtual pages, all layers."""
        return self.kv[:, pages]

    def put(self, pages: Int[np.ndarray, " F"], new: Num[Array | np.ndarray, "L F 2 P H"]) -> "NumpyPages":
        """Replace virtual pages of all layers, in place, and return `self`."""
        self.kv[:, pages] = np.asarray(new)
        return self


class HostMemory:
    """The host's side of an offloaded cache: its pages, and what is moved between device calls.

    A call writes only the device's pool. `flush` moves what is new to host memory afterwards, so between calls the
    pool is a mere copy, and whole pages are copied, read and written here.

    Args:
      cache: from `Cache.pool` with `device_pages`.
      kind: "pinned_host", "numpy", or "auto": the first of them that the device has.

    Attributes:
      pages: an entry for each stack of layers, for `Cache.host`; None where keys and values are on the device.
      bytes_out: bytes moved to host memory so far.

    Raises:
      ValueError: no stack of the cache is offloaded, or a kind that the device does not have.
    """

    def __init__(self, cache: Cache, kind: str = "auto"):
        device = next(iter(cache.table.devices()))
        kinds = {memory.kind for memory in device.addressable_memories()} & {"pinned_host"} | {"numpy"}
        if kind not in ("auto", *kinds):
            raise ValueError(f"host_memory = {kind!r}: this device has {', '.join(sorted(kinds))}, or say 'auto'")
        if not any(isinstance(s, OffloadedStack) for s in cache.stacks):
            raise ValueError("no layer of this model is sparse: nothing is selected, so nothing can be offloaded")
        self.kind = max(kinds) if kind == "auto" else kind
        self._device = device
        self.heads = next(s.num_kv_heads for s in cache.stacks if isinstance(s, OffloadedStack))
        self.pages: Any = tuple(self._empty(s, device) if isinstance(s, OffloadedStack) else None for s in cache.stacks)
        self.bytes_out = 0

    def _empty(self, stack: OffloadedStack, device: Any) -> PinnedPages | NumpyPages:
        shape = (*stack.slots.slot_of.shape, 2, *stack.k.shape[2:])
        if self.kind == "numpy":
            return NumpyPages(np.zeros(shape, stack.k.dtype))
        place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        return PinnedPages(jax.device_put(np.zeros(shape, stack.k.dtype), place))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(p.kv.nbytes for p in self.pages if p is not None)

    @property
    def page_bytes(self) -> int:
        """Bytes of one virtual page."""
        kv = next(p.kv for p in self.pages if p is not None)
        return kv.nbytes // (kv.shape[0] * kv.shape[1])

    def flush(self, cache: Cache) -> Cache:
        """Move what the last call wrote to host memory; the cache is donated."""
        pages, dirty = jax.device_get(_written(cache))
        pages = sorted({int(page) // self.heads for page in pages[dirty]})
        for group in _groups(pages):
            self._put(group, _read_slots(cache, group))
        layers = sum(len(p.kv) for p in self.pages if p is not None)
        self.bytes_out += len(pages) * self.heads * layers * self.page_bytes
        return _clean(cache) if pages else cache

    def warmup(self, cache: Cache) -> Cache:
        """Compile what the other methods run."""
        page = np.zeros(_PAGES_A_CALL, np.int32)
        jax.block_until_ready(_read_slots(cache, page))
        self._put(page, self._get(page))
        jax.block_until_ready(_written(cache))
        return _clean(cache)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target), all layers."""
        for group in _groups([pair for pair in pairs if pair[1] >= 0]):
            self._put(group[:, 1], self._get(group[:, 0]))

    def read(self, pages: Int[np.ndarray, " C"]) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Return keys and values of pages, per stack of layers: k, v [L C K P H], or None if they are on the device."""
        split = lambda x: x.reshape(x.shape[0], len(pages), self.heads, *x.shape[2:])
        # A virtual page has its keys and values side by side: one read brings both.
        by_stack = [None if x is None else split(np.asarray(x)) for x in self._get(pages)]  # [L C K 2 P H]
        return [None if x is None else (x[..., 0, :, :], x[..., 1, :, :]) for x in by_stack]

    def write(self, pages: Int[np.ndarray, " C"], contents: Sequence[tuple[np.ndarray, np.ndarray, Any]]) -> None:
        """Put back what `read` gave; a page of -1 is left out."""
        kept = [i for i, page in enumerate(pages) if page >= 0]
        for group in _groups(kept):
            join = lambda k, v, g=group: np.stack([k[:, g], v[:, g]], axis=3).reshape(len(k), -1, 2, *k.shape[3:])
            new = [None if p is None else join(c[0], c[1]) for p, c in zip(self.pages, contents, strict=True)]
            # From the device, as in a flush: the program that puts pages is then the same, and is compiled already.
            self._put(pages[group], jax.device_put(new, self._device) if self.kind == "pinned_host" else new)

    def _get(self, pages):
        return [None if p is None else p.get(self._virtual(pages)) for p in self.pages]

    def _put(self, pages, contents):
        put = lambda p, new: None if p is None else p.put(self._virtual(pages), new)
        self.pages = tuple(put(p, new) for p, new in zip(self.pages, contents, strict=True))

    def _virtual(self, pages):
        return (pages[:, None] * self.heads + np.arange(self.heads)).reshape(-1).astype(np.int32)


def _groups(items: Sequence[Any]) -> list[np.ndarray]:
    """Return items in groups of one size, so that one program serves all; the last group repeats its first item."""
    groups = [items[i : i + _PAGES_A_CALL] for i in range(0, len(items), _PAGES_A_CALL)]
    return [np.array([*g, *[g[0]] * (_PAGES_A_CALL - len(g))], np.int32) for g in groups]


@jax.jit
def _written(cache):
    """Return each slot's virtual page, and True where it is dirty, in layer 0: all layers write the same pages."""
    slots = next(s.slots for s in cache.stacks if isinstance(s, OffloadedStack))
    return slots.page_of[0], slots.dirty[0]


@jax.jit
def _read_slots(cache, pages):
    return [s.read_slots(pages) if isinstance(s, OffloadedStack) else None for s in cache.stacks]


@partial(jax.jit, donate_argnums=0)
def _clean(cache):
    stacks = (s.clean() if isinstance(s, OffloadedStack) else s for s in cache.stacks)
    return cache.replace(stacks=tuple(stacks))


@jax.jit
def _pinned_get(kv, pages):
    return jnp.concatenate([jax.device_put(_page(kv, page), jax.memory.Space.Device) for page in pages], axis=1)


def _page(kv, page):
    return jax.lax.dynamic_slice_in_dim(kv, page, 1, axis=1)


@partial(jax.jit, donate_argnums=0)
def _pinned_put(kv, pages, new):
    for i in range(len(pages)):
        part = jax.device_put(new[:, i : i + 1], jax.memory.Space.Host)
        kv = jax.lax.dynamic_update_slice_in_dim(kv, part, pages[i], axis=1)
    return kv
