"""Streams a hub checkpoint into sharded parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, Sharding
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from m3jax import model as m3_model
from m3jax.assets import embedded_path
from m3jax.checkpoint import tree
from m3jax.checkpoint.names import Target
from m3jax.checkpoint.plan import Plan, Source, make_plan
from m3jax.checkpoint.values import cut
from m3jax.model.params import check_dtype

# A parameter up to this size is put together on the host and moved at once; a larger one is written
# in place on its devices, a hub tensor at a time.
_HOST_BYTES = 16 << 20

_Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    `bytes_read` are the bytes of stored weights that each device was sent, by device id; `vision` and `mtp` the
    names of stored tensors that were not loaded.
    """

    bytes_read: dict[int, int] = field(default_factory=dict)
    vision: tuple[str, ...] = ()
    mtp: tuple[str, ...] = ()


def load(
    path: str | Path | None = None,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
    progress: bool = True,
) -> m3_model.M3:
    """Load a text model from a folder in the hub's layout.

    Peak host memory is that of one stored tensor, besides the model's share where devices are the
    host's own. Each device is sent only what it holds. MXFP8 weights are dequantised. Vision and
    `mtp.*` tensors are not loaded, which is logged.

    Args:
      path: a folder with config.json and safetensors files, or None for the embedded checkpoint.
      dtype: "bfloat16", "float32", "float64" (needs jax_enable_x64) or "float16". The router's weight
        and bias are float32 at least.
      mesh: devices to shard over, or None for the default device.
      progress: whether to show a bar, if standard error is a terminal.

    Returns:
      The model.

    Raises:
      CheckpointError: the folder does not fit; it lists every fault.
      ValueError: a dtype that is not allowed, or a config.json that is not supported.
    """
    return load_with_report(path, dtype, mesh, progress)[0]


def load_with_report(
    path: str | Path | None = None,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
    progress: bool = True,
) -> tuple[m3_model.M3, LoadReport]:
    """`load`, and an account of what was read and what was left."""
    check_dtype(dtype)
    plan = make_plan(embedded_path() if path is None else path)
    abstract = m3_model.abstract(plan.config, dtype, mesh)
    shardings = tree.flatten(m3_model.shardings(plan.config, mesh))
    parameters = _gather(tree.flatten(abstract), shardings, plan)
    report = LoadReport({}, plan.vision, plan.mtp)
    with _progress_bar(sum(p.stored_bytes for p in parameters), progress) as advance:
        arrays = {p.path: p.assemble(report.bytes_read, advance) for p in parameters}
    return tree.replace(abstract, arrays), report


def _gather(
    leaves: dict[str, jax.ShapeDtypeStruct],
    shardings: dict[str, Sharding],
    plan: Plan,
) -> "list[_Parameter]":
    out = {k: _Parameter(k, leaf.shape, leaf.dtype, shardings[k]) for k, leaf in leaves.items()}
    for name, target in plan.targets.items():
        out[target.param].pieces.append((target, plan.sources[name]))
    return list(out.values())


@dataclass
class _Parameter:
    """One parameter and the hub tensors that it is made of."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    pieces: list[tuple[Target, Source]] = field(default_factory=list)

    @property
    def boxes(self) -> dict[_Box, list[jax.Device]]:
        """The distinct shards of this process: (start, stop) on each axis, and who holds them."""
        out = {}
        index_map = self.sharding.addressable_devices_indices_map(self.shape)
        for device, index in index_map.items():
            box = tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))
            out.setdefault(box, []).append(device)
        return out

    @property
    def stored_bytes(self) -> int:
        """How much of the files this process reads for it."""
        share = sum(prod(b - a for a, b in box) for box in self.boxes) / prod(self.shape)
        itemsizes = (source.weight.itemsize for _, source in self.pieces)
        return round(share * prod(self.pieces[0][0].dims) * sum(itemsizes))

    def assemble(self, bytes_read: dict[int, int], advance: Callable[[int], None]) -> jax.Array:
        """Read and place every piece, once for all the devices that hold it."""
        stacked = len(self.pieces[0][0].index)
        held = prod(self.shape) * self.dtype.itemsize
        kind = _DeviceBuffer if stacked and held > _HOST_BYTES else _HostBuffer
        buffers = [kind(box, devices, self.dtype) for box, devices in self.boxes.items()]
        for target, source in self.pieces:
            weight, scale = source.read()
            for buffer in buffers:
                lead, rest = buffer.box[:stacked], buffer.box[stacked:]
                if not all(a <= i < b for i, (a, b) in zip(target.index, lead, strict=True)):
                    continue
                start = tuple(i - a for i, (a, _) in zip(target.index, lead, strict=True))
                piece = cut(source.weight.name, target, weight, scale, rest, self.dtype)
                buffer.write(start, piece, target.perm)
                nbytes = piece.size * weight.itemsize
                advance(nbytes)
                for device in buffer.devices:
                    bytes_read[device.id] = bytes_read.get(device.id, 0) + nbytes
        arrays = [array for buffer in buffers for array in buffer.arrays()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


class _HostBuffer:
    """A shard that is put together in host memory, then sent to its devices."""

    def __init__(self, box: _Box, devices: list[jax.Device], dtype: np.dtype):
        self.box, self.devices = box, devices
        self._array = np.empty([b - a for a, b in box], dtype)

    def write(self, start: tuple[int, ...], piece: np.ndarray, perm: tuple[int, ...]) -> None:
        if start:
            self._array[start] = piece.transpose(perm)
        else:
            self._array = piece.transpose(perm)  # the whole shard: no need for a copy

    def arrays(self) -> list[jax.Array]:
        return [jax.device_put(self._array, device, may_alias=False) for device in self.devices]


class _DeviceBuffer:
    """A shard that is written in place on its devices."""

    def __init__(self, box: _Box, devices: list[jax.Device], dtype: np.dtype):
        self.box, self.devices = box, devices
        shape = [b - a for a, b in box]
        self._arrays = [jnp.zeros(shape, dtype, device=device) for device in devices]

    def write(self, start: tuple[int, ...], piece: np.ndarray, perm: tuple[int, ...]) -> None:
        for i, device in enumerate(self.devices):
            sent = jax.device_put(piece, device, may_alias=False)
            self._arrays[i] = _write(self._arrays[i], sent, tuple(map(np.int32, start)), perm)
        # Without the wait, pieces that are still on their way would pile up in host memory.
        jax.block_until_ready(self._arrays)

    def arrays(self) -> list[jax.Array]:
        return self._arrays


@partial(jax.jit, donate_argnums=0, static_argnames="perm")
def _write(buffer: jax.Array, piece: jax.Array, start: tuple[jax.Array, ...], perm: tuple[int, ...]) -> jax.Array:
    piece = lax.expand_dims(piece.transpose(perm), range(len(start)))
    return lax.dynamic_update_slice(buffer, piece, (*start, *[np.int32(0)] * len(perm)))


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    shown = shown and console.is_terminal
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("loading", total=total))
