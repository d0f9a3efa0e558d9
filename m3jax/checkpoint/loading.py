"""Streaming of a hub checkpoint into sharded parameters: each device gets its part of each stored tensor in turn."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Shaped
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from m3jax import model as m3_model
from m3jax.assets import embedded_path
from m3jax.checkpoint import tree
from m3jax.checkpoint.names import Target
from m3jax.checkpoint.plan import Plan, Source, make_plan
from m3jax.checkpoint.reader import CheckpointError
from m3jax.checkpoint.values import check_range, cut, is_finite
from m3jax.model.build import check_weights, dtype_name
from m3jax.parallel import as_mesh

# A parameter up to this size is put together on the host and moved at once; a larger one is written
# in place on its devices, a hub tensor at a time.
HOST_BYTES = 16 << 20

# A shard of an array: (start, stop) on each axis.
_Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LoadReport:
    """The bytes that a load read, and the names of the tensors that it left in the files.

    Attributes:
      bytes_read: of stored weights, by the id of the device that was sent them.
      vision: names of the stored tensors of the vision tower, where it was left out.
      mtp: names of the stored tensors of multi-token prediction, which are not loaded.
    """

    bytes_read: dict[int, int] = field(default_factory=dict)
    vision: tuple[str, ...] = ()
    mtp: tuple[str, ...] = ()


def load(
    path: str | Path | None = None,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | str | None = None,
    progress: bool = True,
    check_finite: bool = False,
    vision: bool | None = None,
    weights: str = "dequantize",
) -> m3_model.M3:
    """Load a model from a folder in the hub's layout.

    Peak host memory is that of one stored tensor, besides the model's share where devices are the
    host's own. Each device is sent only what it holds. `mtp.*` tensors are not loaded, which is logged.

    Args:
      path: a folder with config.json and safetensors files, or None for the embedded checkpoint.
      dtype: "bfloat16", "float32", "float64" (needs jax_enable_x64) or "float16", as a name or as `jnp.float32`. The
        router's weight and bias and the tower's patch embedding are float32 at least.
      mesh: devices to shard over: from `m3jax.make_mesh`, or text such as "expert=2,tensor=4"; None for the default
        device.
      progress: whether to show a bar, if standard error is a terminal.
      check_finite: whether to look at every value, and refuse weights that are NaN or infinite. Without it they are
        loaded as they are stored; generating with them ends in a FloatingPointError where they reach the logits.
      vision: whether to load the vision tower. None loads it where the files hold it; False leaves it out, and the
        model has neither a tower nor a `vision_config`; with True a folder that does not hold it does not fit.
      weights: the form of MXFP8 weights: "dequantize" gives them `dtype`, "mxfp8" keeps their codes and scales, in
        half the memory of bfloat16 and with the same results on XLA, to the bit (docs/mxfp8.md).

    Returns:
      The model.

    Raises:
      CheckpointError: the folder does not fit, or holds NaN or infinite weights under `check_finite`; it lists every
        fault.
      ValueError: a dtype or `weights` that is not allowed, a mesh with other axes or one that cuts through MXFP8's
        blocks, or a config.json that is not supported.
      OSError: a file that cannot be read.
    """
    return load_with_report(path, dtype, mesh, progress, check_finite, vision, weights)[0]


def load_with_report(
    path: str | Path | None = None,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | str | None = None,
    progress: bool = True,
    check_finite: bool = False,
    vision: bool | None = None,
    weights: str = "dequantize",
) -> tuple[m3_model.M3, LoadReport]:
    """Load a model as `load` does, and report which bytes were read and which tensors were left.

    Args:
      path, dtype, mesh, progress, check_finite, vision, weights: as in `load`.

    Returns:
      The model and the report.

    Raises:
      CheckpointError, ValueError, OSError: as `load`.
    """
    dtype, mesh = dtype_name(dtype), as_mesh(mesh)
    path = embedded_path() if path is None else path
    check_weights(weights)
    plan = make_plan(path, vision)
    abstract = m3_model.abstract(plan.config, dtype, mesh, weights)
    places = _dequantized(plan) if weights == "dequantize" else _kept(path, plan, np.dtype(dtype))
    report = LoadReport({}, plan.vision, plan.mtp)
    not_finite: Counter[str] | None = Counter() if check_finite else None
    shardings = m3_model.shardings(plan.config, mesh, weights)
    arrays = read_parameters(abstract, shardings, places, report.bytes_read, progress, not_finite)
    if not_finite:
        raise CheckpointError(path, [f"{name}: {n} values are NaN or infinite" for name, n in not_finite.items()])
    return tree.replace(abstract, arrays), report


def read_parameters(
    abstract: m3_model.M3,
    shardings: m3_model.M3,
    places: Iterable[tuple[Target, Source]],
    bytes_read: dict[int, int],
    progress: bool = True,
    not_finite: Counter[str] | None = None,
) -> dict[str, Shaped[Array, "..."]]:
    """Read a model's parameters from stored tensors, of which each device is sent only what it holds.

    Args:
      abstract: the model's shapes and dtypes.
      shardings: of its parameters.
      places: the place and source of each hub tensor.
      bytes_read: grows by what each device is sent, by device id.
      progress: whether to show a bar, if standard error is a terminal.
      not_finite: grows by the number of NaN or infinite values of each hub tensor; None to count nothing.

    Returns:
      The parameters by name; those that no hub tensor has a place in are left out.

    Raises:
      ValueError: a finite value that does not fit in a parameter's dtype.
      OSError: a file that cannot be read.
    """
    sharding_of = tree.flatten(shardings)
    parameters = {
        name: _Parameter(leaf.shape, leaf.dtype, sharding_of[name]) for name, leaf in tree.flatten(abstract).items()
    }
    for target, source in places:
        parameters[target.param].pieces.append((target, source))
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.pieces}
    with _progress_bar(sum(parameter.stored_bytes for parameter in parameters.values()), progress) as advance:
        return {name: parameter.assemble(bytes_read, advance, not_finite) for name, parameter in parameters.items()}


def _dequantized(plan: Plan) -> Iterator[tuple[Target, Source]]:
    """Yield the place and source of each hub tensor where MXFP8 weights are dequantised."""
    for name, target in plan.targets.items():
        yield target, plan.sources[name]


def _kept(path: str | Path, plan: Plan, dtype: np.dtype) -> Iterator[tuple[Target, Source]]:
    """Yield the place and source of each hub tensor where MXFP8 weights stay codes and scales.

    Raises:
      CheckpointError: weights that are not in MXFP8 where they could be.
      ValueError: a weight beyond the range of `dtype`, which activations have.
    """
    quantizable = {name for name, target in plan.targets.items() if target.quantizable}
    if others := [name for name in sorted(quantizable) if plan.sources[name].scale is None]:
        raise CheckpointError(
            path,
            [f"{name}: {plan.sources[name].weight.dtype}, and weights = 'mxfp8' needs MXFP8" for name in others]
            if len(others) < len(quantizable)
            else ["no weight is in MXFP8: load it with weights = 'dequantize', then m3jax.quantize(model)"],
        )
    for name, target in plan.targets.items():
        source = plan.sources[name]
        if name not in quantizable:
            yield target, source
            continue
        check_range(source.weight.name, *source.read(), dtype)
        yield target.codes, Source(source.weight, None, source.part)
        yield target.scales, Source(source.scale, None, source.part)


@dataclass
class _Parameter:
    """One parameter, its sharding, and the hub tensors that it is made of."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    pieces: list[tuple[Target, Source]] = field(default_factory=list)

    @property
    def boxes(self) -> dict[_Box, list[jax.Device]]:
        """The distinct shards of this process, each with the devices that hold it."""
        devices_of: dict[_Box, list[jax.Device]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            box = tuple(part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True))
            devices_of.setdefault(box, []).append(device)
        return devices_of

    @property
    def stored_bytes(self) -> int:
        """The number of bytes of the files that this process reads for the parameter."""
        share = sum(prod(stop - start for start, stop in box) for box in self.boxes) / prod(self.shape)
        itemsizes = (source.weight.itemsize for _, source in self.pieces)
        return round(share * prod(self.pieces[0][0].dims) * sum(itemsizes))

    def assemble(
        self, bytes_read: dict[int, int], advance: Callable[[int], None], not_finite: Counter[str] | None
    ) -> Shaped[Array, "..."]:
        """Read every piece once, place it on all the devices that hold it, and return the sharded array.

        Args:
          bytes_read: grows by what each device is sent, by device id.
          advance: called with the bytes of each piece that was placed.
          not_finite: grows by the number of NaN or infinite values of each hub tensor; None to count nothing.
        """
        # Axes of the parameter in front of those of a piece: [L ...], of experts [L E ...].
        stack_axes = len(self.pieces[0][0].index)
        is_large = prod(self.shape) * self.dtype.itemsize > HOST_BYTES
        buffer_type = _DeviceBuffer if stack_axes and is_large else _HostBuffer
        buffers = [buffer_type(box, devices, self.dtype) for box, devices in self.boxes.items()]
        for target, source in self.pieces:
            weight, scale = source.read()
            for buffer in buffers:
                stack_box, piece_box = buffer.box[:stack_axes], buffer.box[stack_axes:]
                if not all(start <= i < stop for i, (start, stop) in zip(target.index, stack_box, strict=True)):
                    continue  # a layer or an expert of other devices
                piece = cut(source.weight.name, target, weight, scale, piece_box, self.dtype)
                if not_finite is not None and (broken := np.count_nonzero(~is_finite(target, piece))):
                    not_finite[source.part.name] += int(broken)
                index = tuple(i - start for i, (start, _) in zip(target.index, stack_box, strict=True))
                buffer.write(index, piece, target.perm)
                sent_bytes = piece.size * weight.itemsize
                advance(sent_bytes)
                for device in buffer.devices:
                    bytes_read[device.id] = bytes_read.get(device.id, 0) + sent_bytes
        arrays = [array for buffer in buffers for array in buffer.arrays()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


class _HostBuffer:
    """A shard that is put together in host memory, then sent to its devices."""

    def __init__(self, box: _Box, devices: list[jax.Device], dtype: np.dtype):
        self.box, self.devices = box, devices
        self._array = np.empty([stop - start for start, stop in box], dtype)

    def write(self, index: tuple[int, ...], piece: Shaped[np.ndarray, "..."], perm: tuple[int, ...]) -> None:
        """Write a piece with the hub's axes, turned to the parameter's, at its place in the stack."""
        turned = piece.transpose(perm)  # of q_proj, from [N H D]: [D N H]
        if index:
            self._array[index] = turned
        else:
            self._array = turned  # the whole shard: no need for a copy

    def arrays(self) -> list[Shaped[Array, "..."]]:
        """Send the finished shard to each of its devices and return it."""
        array = self._array
        # A CPU takes numpy's memory as it is, whatever `may_alias` says, and a piece lies in the file's pages: whoever
        # writes into the file would write into the model.
        if not array.flags.owndata and self.devices[0].platform == "cpu":
            array = array.copy()
        return [jax.device_put(array, device) for device in self.devices]


class _DeviceBuffer:
    """A shard that is written in place on its devices, a piece at a time."""

    def __init__(self, box: _Box, devices: list[jax.Device], dtype: np.dtype):
        self.box, self.devices = box, devices
        shape = [stop - start for start, stop in box]
        self._arrays = [jnp.zeros(shape, dtype, device=device) for device in devices]

    def write(self, index: tuple[int, ...], piece: Shaped[np.ndarray, "..."], perm: tuple[int, ...]) -> None:
        """Send a piece with the hub's axes to each device, which turns it and writes it at its place in the stack."""
        start = tuple(map(np.int32, index))
        for i, device in enumerate(self.devices):
            sent = jax.device_put(piece, device)
            self._arrays[i] = _write_piece(self._arrays[i], sent, start, perm)
        # Without the wait, pieces that are still on their way would pile up in host memory.
        jax.block_until_ready(self._arrays)

    def arrays(self) -> list[Shaped[Array, "..."]]:
        """Return the finished shard on each of its devices."""
        return self._arrays


@partial(jax.jit, donate_argnums=0, static_argnames="perm")
def _write_piece(
    shard: Shaped[Array, "*shard"],
    piece: Shaped[Array, "*hub_axes"],
    index: tuple[Int32[Array, ""], ...],
    perm: tuple[int, ...],
) -> Shaped[Array, "*shard"]:
    """Return the shard with a piece, transposed to the parameter's axes, written at `index` of its stack."""
    piece = lax.expand_dims(piece.transpose(perm), range(len(index)))  # of an expert, from [F D]: [1 1 D F]
    return lax.dynamic_update_slice(shard, piece, (*index, *[np.int32(0)] * len(perm)))


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of `total` bytes on standard error, if that is a terminal; yield the function that advances it."""
    console = Console(stderr=True)
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    is_shown = shown and console.is_terminal
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("loading", total=total))
