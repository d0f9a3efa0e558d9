"""Two ways in which the devices of an axis send each other rows, and get back what was made of them.

Which rows go to which devices depends on values, and the shapes of a program do not: both ways have room for a number
of rows, and say when it is not enough. They are made and called inside `jax.shard_map`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


@dataclass(frozen=True)
class Slots:
    """A dense all-to-all: every two devices have C places for each other, S = devices * C in all, filled or not.

    Attributes:
      target: Place of each row among the S that are sent to a device; S where it is not sent there.
      lacks_room: True if some row found no place here.
      axis: Mesh axis of the devices.
    """

    target: Int[Array, "X devices"]
    lacks_room: Bool[Array, ""]
    axis: str

    @classmethod
    def of(cls, is_sent: Bool[Array, "X devices"], capacity: int, axis: str) -> "Slots":
        """Return the exchange of rows that are sent to the devices of a mesh axis.

        Args:
          is_sent: which row goes to which device.
          capacity: C.
          axis: of the mesh.
        """
        place, num_devices = _counted(is_sent), is_sent.shape[1]
        target = jnp.where(is_sent, jnp.arange(num_devices) * capacity + place, num_devices * capacity)
        return cls(target, jnp.max(place) >= capacity, axis)

    def there(self, rows: Shaped[Array, "S ..."], fill: int) -> Shaped[Array, "S ..."]:
        """Return the rows that this device receives; unused places bring what the sender put there, not `fill`."""
        return jax.lax.all_to_all(rows, self.axis, split_axis=0, concat_axis=0, tiled=True)

    def back(self, rows: Shaped[Array, "S ..."]) -> Shaped[Array, "S ..."]:
        """Return what others made of the rows that this device sent, each in its `target` place."""
        return self.there(rows, 0)


@dataclass(frozen=True)
class Ragged:
    """A ragged all-to-all: rows lie one behind the other, by device, and only these are moved.

    S = devices * C too, but a place is for a row from anywhere: only what a device sends, or receives, in all has to
    find room. XLA has the operation on GPUs and TPUs, not on CPUs.

    Attributes:
      target, lacks_room, axis: As of `Slots`.
      ways: Offsets and sizes of the exchange there and of the one back, as `jax.lax.ragged_all_to_all` takes them.
    """

    target: Int[Array, "X devices"]
    lacks_room: Bool[Array, ""]
    axis: str
    ways: tuple[tuple[Int[Array, " devices"], ...], tuple[Int[Array, " devices"], ...]]

    @classmethod
    def of(cls, is_sent: Bool[Array, "X devices"], capacity: int, axis: str) -> "Ragged":
        """Return the exchange of rows, with arguments as of `Slots.of`."""
        here, num_rows = jax.lax.axis_index(axis), is_sent.shape[1] * capacity
        sizes = jax.lax.all_gather(jnp.sum(is_sent, axis=0, dtype=jnp.int32), axis)  # [from to]
        at_sender = jnp.cumsum(sizes, axis=1) - sizes  # [from to]; where the rows for a device begin
        at_receiver = jnp.cumsum(sizes, axis=0) - sizes  # [from to]; where the rows of a device begin
        target = jnp.where(is_sent, at_sender[here] + _counted(is_sent), num_rows)
        lacks_room = jnp.maximum(jnp.sum(sizes[here]), jnp.sum(sizes[:, here])) > num_rows
        # Where rows begin here, how many are sent, where they begin there, how many are received.
        there = at_sender[here], sizes[here], at_receiver[here], sizes[:, here]
        back = at_receiver[:, here], sizes[:, here], at_sender[:, here], sizes[here]
        return cls(target, lacks_room, axis, (there, back))

    def there(self, rows: Shaped[Array, "S ..."], fill: int) -> Shaped[Array, "S ..."]:
        """Return the rows that this device receives, and `fill` behind them."""
        return jax.lax.ragged_all_to_all(rows, jnp.full_like(rows, fill), *self.ways[0], axis_name=self.axis)

    def back(self, rows: Shaped[Array, "S ..."]) -> Shaped[Array, "S ..."]:
        """Return what others made of the rows that this device sent, and 0 behind it."""
        return jax.lax.ragged_all_to_all(rows, jnp.zeros_like(rows), *self.ways[1], axis_name=self.axis)


EXCHANGES = {"slots": Slots.of, "ragged": Ragged.of}


def _counted(is_sent: Bool[Array, "X devices"]) -> Int[Array, "X devices"]:
    """Return the number of rows before each that go to the same device."""
    return jnp.cumsum(is_sent, axis=0, dtype=jnp.int32) - 1
