"""Tokens on the way to the devices that hold their experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from m3jax.execution.exchange import EXCHANGES
from m3jax.execution.experts import dispatch_capacity, ids_on_device, sums_by_dispatch, sums_by_gathering
from m3jax.execution.tiled_over_mesh import with_even_columns
from m3jax.ops import measured


def test_tokens_are_dispatched_where_that_moves_less():
    """Places for 1.03, 0.62, 0.34 and 0.09 of the tokens, in whole tiles of 8; beyond 3/4 all are gathered."""
    capacity = lambda devices: dispatch_capacity(10_000, 4, devices)
    assert [capacity(devices) for devices in (1, 4, 8, 16, 64)] == [None, None, 6208, 3416, 920]
    assert dispatch_capacity(96, 1, 2) == 72 and dispatch_capacity(95, 1, 2) is None  # 72 of 71.25 in whole tiles


def ragged_all_to_all(rows, out, begin, count, begin_there, count_here, *, axis_name):
    """The definition of `jax.lax.ragged_all_to_all`, which XLA does not have on a CPU; it moves all rows."""
    here = jax.lax.axis_index(axis_name)
    rows, begin, count, begin_there = (jax.lax.all_gather(x, axis_name) for x in (rows, begin, count, begin_there))
    for device in range(len(rows)):
        place = jnp.arange(len(out)) - begin_there[device, here]
        is_sent = (place >= 0) & (place < jnp.minimum(count[device, here], count_here[device]))
        sent = rows[device].at[begin[device, here] + place].get(mode="clip")
        out = jnp.where(is_sent.reshape(-1, *[1] * (out.ndim - 1)), sent, out)
    return out


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    ("way", "capacity"), [("slots", 6), ("slots", 2), ("slots", 5), ("ragged", 6), ("ragged", 5), ("ragged", 1)]
)
def test_tokens_sent_to_their_experts_and_gathered_ones_have_the_same_sums(monkeypatch, way, capacity):
    """Three devices with two experts each; with less room than an uneven choice needs, all tokens are gathered."""
    monkeypatch.setitem(measured.EXPERT_EXCHANGE, "cpu", way)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    devices, tokens, held = 3, 6, 2
    draw = np.random.default_rng(0)
    x = draw.normal(size=(devices, tokens, 2)).astype(np.float32)
    ids = np.array([[draw.permutation(6)[:3] for _ in range(tokens)] for _ in range(devices)], np.int32)
    ids[0, 0], ids[1, 2, 1] = -1, -1
    weights = draw.uniform(size=ids.shape).astype(np.float32)
    scale = np.array([2.0, 3, 5, 7, 11, 13], np.float32)  # what each expert makes of a token: a multiple of it
    mesh, most = Mesh(jax.devices()[:devices], ("expert",)), []

    def part(x, ids, weights, most_pairs):
        most.append(most_pairs)
        own = ids_on_device(ids, held)
        factor = jnp.asarray(scale)[jnp.where(own >= 0, ids, 0)] * jnp.where(own >= 0, weights, 0)
        return x * factor.sum(1, keepdims=True)

    run = lambda x, ids, weights: (
        sums_by_gathering(part, x, ids, weights),
        sums_by_dispatch(part, lambda: 2 * x, x, ids, weights, 3.0, held, capacity, mesh),
    )
    found = jax.jit(jax.vmap(run, axis_name="expert"))(x, ids, weights)
    factor = (np.where(ids >= 0, scale[ids], 0) * weights).sum(-1, keepdims=True)
    np.testing.assert_allclose(found[0], x * factor, rtol=1e-5)
    np.testing.assert_allclose(found[1], 3 * x * factor + 2 * x, rtol=1e-5)  # what stands beside the sums is not scaled
    assert set(most) == {devices * tokens * 3, 27}  # all pairs of the gathered tokens; 1.5 times a device's


@pytest.mark.parametrize(
    ("capacity", "others", "full"), [(3, 2, ("", "")), (2, 1, ("slots", "")), (2, 2, ("slots", "ragged"))]
)
def test_room_for_rows_is_of_a_device_or_of_each_two(capacity, others, full):
    """Two devices send three rows, and one or two, to device 0: 2 C rows for each, or C for each two."""
    rows = np.arange(3)[:, None]
    is_sent = np.stack([(rows < count) & np.array([True, False]) for count in (3, others)])  # [devices X devices]
    for way, where in zip(("slots", "ragged"), full, strict=True):
        lacks_room = jax.vmap(lambda x, way=way: EXCHANGES[way](x, capacity, "d").lacks_room, axis_name="d")(is_sent)
        assert lacks_room.any() == bool(where)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_have_an_operation_for_the_ragged_exchange(platform):
    mesh = Mesh(jax.devices()[:2], ("d",))

    def there_and_back(rows, is_sent):
        exchange = EXCHANGES["ragged"](is_sent, 4, "d")
        return exchange.back(exchange.there(rows, 0))

    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    traced = run.trace(jnp.zeros((16, 2)), jnp.zeros((4, 2), bool))
    assert traced.lower(lowering_platforms=(platform,)).as_text().count("@ragged_all_to_all") == 2


def test_choices_have_as_many_columns_as_devices_divide():
    """In the invariant mode: columns of no expert, with weight 0, behind the others."""
    ids, given = jnp.arange(6, dtype=jnp.int32).reshape(2, 3), jnp.ones((2, 3))
    padded_ids, padded = with_even_columns(ids, given, 2)
    assert padded_ids.tolist() == [[0, 1, 2, -1], [3, 4, 5, -1]] and padded.tolist() == [[1, 1, 1, 0]] * 2
    assert with_even_columns(ids[:, :2], given[:, :2], 2)[0].tolist() == [[0, 1], [3, 4]]
