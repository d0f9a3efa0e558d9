"""Reading the memory of other GPUs over NVLink.

Before the kernel XLA has all devices of the mesh wait for each other, so that each has written what is read. At its end
a program tells those with its number on other devices that it has read, and waits to hear the same: then the memory of
its operand may be used again::

    each turn      program b: a tile of every device's x ── registers ── the sum, or each device's ── memory
    in the last    program b ── a signal ── b of every other device; b waits for as many
"""

import operator
from functools import reduce
from itertools import product

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Shaped

from pallas_kernels.backends import Limits
from pallas_kernels.read_peers import Call

_THREADS = 128  # a warpgroup
_LOADS = 4  # of 16 bytes that a thread has under way from each device: an answer takes about a microsecond
_PROGRAMS = 128  # at most: all of them run at once on a Hopper GPU

LIMITS = Limits()


def run(call: Call, config: None) -> Shaped[Array, "_ *X"] | Shaped[Array, "devices A *X"]:
    """Run `read_peers` on a checked call.

    Raises:
      ValueError: interpret mode, or a first axis that the devices do not divide.
    """
    if call.interpret:
        raise ValueError("read_peers has no interpret mode: Pallas interprets no memory of other devices")
    x, axes, result = call.x, call.axes, call.result
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    devices = list(product(*map(range, sizes)))
    num_parts = len(devices) if result == "part of sum" else 1
    if num_parts > 1 and x.shape[0] % num_parts:
        raise ValueError(f"x has shape {x.shape}: need a first axis that {num_parts} devices divide")
    size, vector = x.size // num_parts, 16 // x.dtype.itemsize  # vector: numbers of a load
    line = _THREADS * vector
    tile = line * max(1, min(_LOADS, size // (line * _PROGRAMS)))
    tiles = -(-size // tile)
    programs = min(tiles, _PROGRAMS)
    padded = jnp.pad(x.reshape(num_parts, size), ((0, 0), (0, tiles * tile - size))).reshape(num_parts, tiles, tile)

    def kernel(x_ref, out_ref, has_been_read):
        program, place = jax.lax.axis_index("program"), [jax.lax.axis_index(axis) for axis in axes]
        on = lambda device: dict(zip(axes, map(jnp.int32, device), strict=True))
        peers = [plgpu.remote_ref(x_ref, on(device)) for device in devices]
        part = jax.lax.axis_index(axes) if num_parts > 1 else 0

        def read(at):
            return [peer[part, at] for peer in peers]

        def write(at, of_devices):
            if result == "parts":
                for device, one in enumerate(of_devices):
                    out_ref[device, at] = one
                return
            exact = [one.astype(jnp.float32) if x.dtype.itemsize == 2 else one for one in of_devices]
            out_ref[at] = reduce(operator.add, exact).astype(x.dtype)

        def one_turn(turn, _):
            at = program + turn * programs
            write(at, read(at))

        last = (tiles - 1 - program) // programs * programs + program
        jax.lax.fori_loop(0, last // programs, one_turn, None)
        of_devices = read(last)
        # Before the last tile is written: a signal waits until the other devices could see what was written before it.
        for apart in devices[1:]:
            other = [(own + step) % count for own, step, count in zip(place, apart, sizes, strict=True)]
            pl.semaphore_signal(has_been_read, 1, device_id=on(other))
        write(last, of_devices)
        pl.semaphore_wait(has_been_read, len(devices) - 1)

    leading = (len(devices),) if result == "parts" else ()
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*leading, tiles, tile), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        kernel_name="read_peers",
        scratch_types=[plgpu.SemaphoreType.REGULAR],
    )(padded)
    shape = x.shape if result != "part of sum" else (x.shape[0] // num_parts, *x.shape[1:])
    return out.reshape(*leading, -1)[..., :size].reshape(*leading, *shape)
