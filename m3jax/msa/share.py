"""A device's share of the blocks of rows, where devices hold them in turn (docs/cache.md, "On a mesh").

A device holds every n-th block of a row and numbers those that it has 0, 1, 2 and so on. It knows nothing of the
others: a query stands, for it, at the last of those of its keys that the query sees. Schedules and kernels then compute
a share as they compute a whole row, and what they make of the shares is joined: candidates for the selection by
`m3jax.msa.candidates`, outputs by `m3jax.numerics.merge_over_devices`.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int


@struct.dataclass
class Share:
    """The blocks of each row that this device holds, inside `shard_map`: its `first` one, and every n-th behind it.

    Attributes:
      first: number in its row of the first block that this device holds, 0 to n - 1.
      block_size: P.
      num_devices: n.
      axes: the mesh axes over which the n devices lie.
      divided: the axis of attention's [B T ...] that the n devices divide, so that each gets outputs of its own tokens;
        None where each gets all.
      mesh: of the devices; None where nobody asks which these are.
    """

    first: Int[Array, " B"]
    block_size: int = struct.field(pytree_node=False)
    num_devices: int = struct.field(pytree_node=False)
    axes: tuple[str, ...] = struct.field(pytree_node=False)
    divided: int | None = struct.field(pytree_node=False, default=None)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    def held(self, blocks: Int[Array, "B K T J"]) -> Int[Array, "B K T J"]:
        """Return blocks of rows by this device's numbers; -1 for one that it does not hold, and where there is none."""
        first = self.first.reshape(-1, 1, 1, 1)
        is_held = (blocks >= 0) & (blocks % self.num_devices == first)
        return jnp.where(is_held, blocks // self.num_devices, -1)

    def in_rows(self, held_blocks: Int[Array, "#B #K #T J"]) -> Int[Array, "_ #K #T J"]:
        """Return blocks by their numbers in their rows, from this device's numbers; -1 stays."""
        return jnp.where(held_blocks >= 0, self.first.reshape(-1, 1, 1, 1) + held_blocks * self.num_devices, -1)

    def positions(self, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Int[Array, "B T"]:
        """Return the last of the keys held here that each query sees; -1 for one that sees none, and for padding."""
        is_token = (positions >= 0) & (positions < lengths[:, None])
        seen = jnp.where(is_token, positions + 1, 0)
        return self._count(seen, self.first[:, None]) - 1

    def slots(self, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Int[Array, "B T"]:
        """Return the place of each token among the keys held here; -1 for one of another device, and for padding."""
        is_held = positions // self.block_size % self.num_devices == self.first[:, None]
        return jnp.where(is_held, self.positions(positions, lengths), -1)

    def lengths(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """Return the number of keys that this device holds of each row."""
        return self._count(jnp.maximum(lengths, 0), self.first)

    def of_row(self, row: Int[Array, ""]) -> "Share":
        """Return the share of one row."""
        return self.replace(first=jax.lax.dynamic_slice_in_dim(self.first, row, 1))

    def _count(self, num_keys: Int[Array, "..."], first: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return how many of a row's first keys this device holds: whole blocks, and a part of one that it may have."""
        whole, rest = num_keys // self.block_size, num_keys % self.block_size
        held = (whole - first + self.num_devices - 1) // self.num_devices  # of the row's first `whole` blocks
        return held * self.block_size + jnp.where(whole % self.num_devices == first, rest, 0)
