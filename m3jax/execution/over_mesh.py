"""The parts of a call that are computed in another way where several devices divide the parameters."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from m3jax import ops
from m3jax.execution.attend import attend_by_heads, attend_over_mesh
from m3jax.execution.experts import experts_over_mesh
from m3jax.execution.fast import Fast
from m3jax.numerics import einsum
from m3jax.ops import measured
from m3jax.ops.experts import ExpertWeights
from m3jax.parallel import spec
from m3jax.platform import platform


class OverMesh(Fast):
    """An `Execution` of calls without a cache over a mesh, as in training.

    XLA divides products as it likes; attention, experts, embedding and head say what each device does.
    """

    sum_over_devices = staticmethod(jax.lax.psum)

    @property
    def product_backend(self):
        """The backend of products, norms and routers: a kernel sees one device's memory, and XLA divides arrays."""
        return "xla"

    def attend(self, projections, pages, call, rules, tap):
        """Write, select and attend on the devices that hold the pages of a cache, or each with its own heads."""
        over_mesh = attend_over_mesh if self.has_cache else attend_by_heads
        return over_mesh(projections, pages, self.as_set(call), rules, tap, self.compute.mesh)

    def experts(self, x, expert_ids, weights, matrices, activate, shared, scale):
        """Return the sum of each token's experts, computed on the devices that hold them, and the shared one."""
        experts, layer = ExpertWeights(*[matrix.stack for matrix in matrices]), matrices[0].layer
        tokens, expert_ids, weights = (y.reshape(-1, y.shape[-1]) for y in (x, expert_ids, weights))
        routed = scale * experts_over_mesh(
            tokens, experts, expert_ids, weights, layer, activate, self.sum_of_experts, self.sum_over_devices,
            path=self.compute.expert_path, backend=self.compute.backend, mesh=self.compute.mesh,
        )  # fmt: skip
        return self.add_shared(x, routed.reshape(x.shape), shared, activate)

    def embed(self, tokens, table):
        """Return the table's rows: each device reads those that it holds, and a sum joins them."""
        mesh = self.compute.mesh
        table_spec = spec(table.shape, ("vocab", None), mesh)
        if not any(table_spec):
            return table[tokens]

        def on_each_device(tokens, rows):
            row = tokens - jax.lax.axis_index(table_spec[0]) * len(rows)
            is_held = (row >= 0) & (row < len(rows))
            held = jnp.where(is_held[..., None], rows[jnp.where(is_held, row, 0)], 0)
            backend = ops.exchange_backend(tokens.size, self.compute.backend)
            return ops.psum(held, table_spec[0], mesh, backend)

        # Left to itself the compiler of a GPU makes a slice of one token's lookup, and gathers the table for it.
        by_row = PartitionSpec(*spec(tokens.shape[:1], ("tokens",), mesh))
        on_mesh = jax.shard_map(
            on_each_device, mesh=mesh, in_specs=(by_row, table_spec), out_specs=by_row, check_vma=False
        )
        return on_mesh(tokens, table)

    def unembed(self, hidden, head):
        """Return logits: each device multiplies its part of the head.

        Logits of few tokens then go to every device, so that drawing one of them exchanges nothing more.
        """
        product = partial(einsum, "...d,vd->...v")
        if math.prod(hidden.shape[:-1]) >= measured.DIVIDED_TOKENS[platform()]:
            return product(hidden, head)
        return unembed_over_mesh(product, hidden, head, self.compute.mesh, self.compute.backend)


def unembed_over_mesh(
    product: Callable[[Array, Array], Array],
    hidden: Float[Array, "... D"],
    head: Float[Array, "V D"],
    mesh: Mesh,
    backend: str,
) -> Float[Array, "... V"]:
    """Return logits on every device, each of which multiplies its part of the head: the compiler would gather the head.

    Args:
      product: of hidden states and rows of the head.
      hidden, head: as of `Fast.unembed`; every device has the hidden states.
      mesh: of the devices.
      backend: of their exchange (`m3jax.ops.all_gather`).
    """
    by_word = spec(head.shape, ("logits", None), mesh)

    def on_each_device(hidden, head):
        logits = product(hidden, head)  # [... v]
        if by_word[0] is None:
            return logits
        parts = ops.all_gather(logits, by_word[0], mesh, backend)  # [devices ... v]
        return jnp.moveaxis(parts, 0, -2).reshape(*logits.shape[:-1], -1)

    on_mesh = jax.shard_map(
        on_each_device, mesh=mesh, in_specs=(PartitionSpec(), by_word), out_specs=PartitionSpec(), check_vma=False
    )
    return on_mesh(hidden, head)
