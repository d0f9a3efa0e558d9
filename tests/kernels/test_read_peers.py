"""The kernel that reads other devices' memory: its programs run by numpy, all devices in one process."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support import lowering

from pallas_kernels.read_peers import mosaic_gpu, read_peers


class Memory:
    """What a reference of a kernel needs to have: memory of one device, as numpy has it."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __getitem__(self, place) -> jax.Array:
        return jnp.asarray(self.array[place])

    def __setitem__(self, place, value):
        self.array[place] = value


def by_programs(arrays: list[np.ndarray], sizes: dict[str, int], result: str) -> list[np.ndarray]:
    """What each device of a mesh gets, its programs run one after the other; what they say to each other is checked."""
    places = [dict(zip(sizes, place, strict=True)) for place in np.ndindex(*sizes.values())]
    number_of = lambda place: places.index({axis: int(place[axis]) for axis in sizes})
    operands, outs, calls = [], [], []

    def gather_calls(body, *, out_type, grid, **_):
        outs.append(Memory(np.full(out_type.shape, -99, out_type.dtype)))
        calls.append((body, *grid))
        return lambda padded: operands.append(Memory(np.asarray(padded))) or jnp.asarray(outs[-1].array)

    def run(kernel) -> list[np.ndarray]:
        with mock.patch.object(mosaic_gpu.plgpu, "kernel", kernel), mock.patch.object(jax.lax, "axis_size", sizes.get):
            return [read_peers(jnp.asarray(x), tuple(sizes), result, backend="mosaic_gpu") for x in arrays]

    run(gather_calls)  # all operands lie in memory before a program runs, as behind the barrier
    for mine, (place, (body, num_programs)) in enumerate(zip(places, calls, strict=True)):
        for program in range(num_programs):
            told, waited = [], []
            with (
                mock.patch.object(jax.lax, "axis_index", {**place, tuple(sizes): mine, "program": program}.get),
                mock.patch.object(
                    jax.lax, "fori_loop", lambda low, high, turn, _: [turn(i, _) for i in range(low, high)]
                ),
                mock.patch.object(mosaic_gpu.plgpu, "remote_ref", lambda ref, place: operands[number_of(place)]),
                mock.patch.multiple(
                    mosaic_gpu.pl,
                    semaphore_signal=lambda ref, by, device_id, told=told: told.append(number_of(device_id)),
                    semaphore_wait=lambda ref, count, waited=waited: waited.append(count),
                ),
            ):
                body(operands[mine], outs[mine], None)
            assert sorted([*told, mine]) == list(range(len(arrays))) and waited == [len(arrays) - 1]
    written = iter(outs)
    return run(lambda *_, **__: lambda padded: jnp.asarray(next(written).array))


@pytest.mark.parametrize("sizes", [dict(a=2), dict(a=2, b=2), dict(a=1, b=3)], ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((12, 7), "float32"), ((12, 128, 3), "bfloat16"), ((12, 999), "int32"), ((12, 24, 2048), "float32")],
)
@pytest.mark.parametrize("result", ["parts", "sum", "part of sum"])
def test_programs_read_and_write_each_number_once(result, shape, dtype, sizes):
    """One tile and less, and more tiles than programs; every program tells its partners and waits for them."""
    count = int(np.prod(list(sizes.values())))
    arrays = [np.asarray(jnp.asarray(np.random.default_rng(i).integers(-9, 9, shape), dtype)) for i in range(count)]
    with mock.patch.object(mosaic_gpu, "_PROGRAMS", 4):
        found = by_programs(arrays, sizes, result)
    total = np.sum([x.astype(np.float32) for x in arrays], axis=0)
    expected = {"parts": [np.stack(arrays)] * count, "sum": [total] * count, "part of sum": np.split(total, count)}
    for one, other in zip(found, expected[result], strict=True):
        np.testing.assert_array_equal(one.astype(np.float32), other.astype(np.float32))


def test_parts_are_added_up_in_the_order_of_the_devices_and_narrow_ones_in_float32():
    arrays = [np.asarray(jnp.full((1, 4), value, jnp.bfloat16)) for value in (1.0, 2.0**-8, 2.0**-8)]
    for out in by_programs(arrays, dict(a=3), "sum"):  # in bfloat16 each half of a last place would be rounded off
        np.testing.assert_array_equal(out.astype(np.float32), 1 + 2.0**-7)
    large = [np.full((1, 4), value, np.float32) for value in (1e8, -1e8, 1.0)]
    for out in by_programs(large, dict(a=3), "sum"):
        np.testing.assert_array_equal(out, 1.0)


def test_a_kernel_that_reads_other_devices_lowers_for_cuda():
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,), abstract_device=lowering.H200.abstract_device)
    for result in ("parts", "sum", "part of sum"):
        read = partial(read_peers, axes=("a",), result=result, backend="mosaic_gpu")
        over_mesh = jax.shard_map(read, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        text = lowering.lower(over_mesh, lowering.array(jnp.float32, 16, 6144), mesh=mesh)
        assert text.count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(result="total"), "result = 'total': need one of 'parts', 'sum', 'part of sum'"),
        (dict(x=np.zeros((2, 3), np.int8)), "x is int8: need numbers of 16 or 32 bits"),
        (dict(backend="triton"), "backend = 'triton': read_peers has 'mosaic_gpu'"),
        (dict(interpret=True), "no interpret mode"),
        (dict(x=np.zeros((3, 2), np.float32), result="part of sum"), "need a first axis that 2 devices divide"),
    ],
)
def test_what_a_kernel_cannot_read_is_said(changes, match, unchecked):
    given = dict(x=np.zeros((2, 3), np.float32), axes=("a",), result="sum", backend="mosaic_gpu") | changes
    with mock.patch.object(jax.lax, "axis_size", lambda axis: 2), pytest.raises(ValueError, match=match):
        read_peers(**given)
