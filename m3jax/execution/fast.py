"""The fastest implementation: kernels where there are some for a call, XLA elsewhere."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax import ops
from m3jax.execution import plain
from m3jax.execution.attend import attend, attend_by_heads, attend_over_mesh
from m3jax.execution.compute import Compute, Remat
from m3jax.execution.experts import experts_over_mesh
from m3jax.mxfp8 import MXFP8Array
from m3jax.numerics import einsum
from m3jax.ops import measured
from m3jax.ops.experts import ExpertWeights
from m3jax.parallel import spec
from m3jax.platform import platform
from m3jax.weights import StackedLayer

NUM_INPUTS = {"o_proj": 2}  # axes that a product with a layer's matrix sums over; one for all others


@dataclass(frozen=True)
class Fast:
    """An `Execution` of all tokens at once, in whatever order of sums is the fastest for so many.

    Attributes:
      compute: the model's settings.
      has_cache: whether the call has a cache; on a mesh its pages are divided over devices.
    """

    compute: Compute
    has_cache: bool = False

    takes_layers_apart = True

    sum_over_devices = staticmethod(jax.lax.psum)

    @property
    def remat(self) -> Remat:
        """The activations that the backward pass recomputes, as of `Compute`."""
        return self.compute.remat

    @property
    def product_backend(self) -> str:
        """The backend of a layer's products, norms and routers: XLA alone where devices divide arrays.

        A kernel sees one device's memory.
        """
        return "xla" if self.compute.is_divided else self.compute.backend

    def call_pages(self, block_size):
        """Return empty pages as the settings make them."""
        return self.compute.call_pages(block_size=block_size)

    def each_token(self, fn):
        """Return the function as it is: it computes all tokens at once."""
        return fn

    def norm(self, x, weight, eps):
        """Return a norm, by what computes `add_norm`."""
        return self.add_norm(x, None, weight, eps)[1]

    def add_norm(self, x, update, weight, eps):
        """Return a residual addition and its norm: by one kernel for few tokens, by XLA elsewhere."""
        by_xla = lambda x, update, weight: plain.add_norm(x, update, weight, eps)
        return ops.add_norm(by_xla, x, update, weight, eps=eps, backend=self.product_backend)

    def heads(self, projections):
        """Return projections as they are: a kernel that writes pages may finish them."""
        return projections

    def attend(self, heads, pages, call, rules, values):
        """Write new tokens, select and attend: on this device, or on each device that holds pages."""
        call = call.replace(schedule=self.compute.schedule, backend=self.compute.backend)
        if not self.compute.is_divided:
            return attend(heads, pages, call, rules, values)
        # Keys of a call by itself are divided by their heads; pages of a cache lie where they are.
        over_mesh = attend_over_mesh if self.has_cache else attend_by_heads
        return over_mesh(heads, pages, call, rules, values, self.compute.mesh)

    def choose_experts(self, logits, bias, top_k):
        """Return the router's choice: by one kernel for few tokens, by XLA elsewhere."""
        by_xla = lambda logits, bias: plain.choose_experts(logits, bias, top_k)
        return ops.choose_experts(by_xla, logits, bias, top_k=top_k, backend=self.product_backend)

    def experts(self, x, expert_ids, weights, matrices, activate, shared, scale):
        """Return the sum of each token's experts, computed where they lie; one kernel may run the shared expert too."""
        experts, layer = ExpertWeights(*[matrix.stack for matrix in matrices]), matrices[0].layer
        how = dict(path=self.compute.expert_path, backend=self.compute.backend)
        # Experts stay in the stack of all layers: cut out, a layer's would be copied whole to use a few of them.
        if self.compute.is_divided:
            sums = self.sum_of_experts, self.sum_over_devices
            routed = experts_over_mesh(
                x, experts, expert_ids, weights, layer, activate, *sums, mesh=self.compute.mesh, **how
            )
            return scale * routed, False
        if not ops.joins_shared(x, experts, shared, **how):
            shared = ()
        out = ops.run_experts(x, experts, expert_ids, layer, activate, shared=shared, **how)  # [X C D]
        routed = scale * self.sum_of_experts(out[:, : expert_ids.shape[1]], weights)
        return (routed + out[:, -1], True) if shared else (routed, False)

    def sum_of_experts(self, out: Float[Array, "X A D"], weights: Float[Array, "X A"]) -> Float[Array, "X D"]:
        """Return the weighted sum over each token's experts."""
        return plain.weighted_sum(out, weights)

    def embed(self, tokens, table):
        """Return the table's rows. On a mesh each device reads those that it holds, and a sum joins them."""
        mesh = self.compute.mesh
        table_spec = PartitionSpec() if mesh is None else spec(table.shape, ("vocab", None), mesh)
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
        """Return logits, by one product of all tokens.

        On a mesh each device multiplies its part of the head. Logits of few tokens then go to every device, so that
        drawing one of them exchanges nothing more.
        """
        product, mesh = partial(einsum, "...d,vd->...v"), self.compute.mesh
        if not self.compute.is_divided or math.prod(hidden.shape[:-1]) >= measured.DIVIDED_TOKENS[platform()]:
            return product(hidden, head)
        return unembed_over_mesh(product, hidden, head, mesh, self.compute.backend)

    def reads_in_place(
        self, name: str, stack: Float[Array, "L ..."] | MXFP8Array, num_rows: int, dtype: DTypeLike
    ) -> bool:
        """Return True if a kernel is faster than XLA's product with a copy of the matrix."""
        # Norms, biases and the router's gate are small: a scan's copy of them costs little.
        if not name.endswith("_proj"):
            return False
        case = ops.ProductCase.of(stack, NUM_INPUTS.get(name, 1), num_rows, dtype)
        return ops.choose(case, self.product_backend) != "xla"

    def stacked(self, stack: Float[Array, "L ..."] | MXFP8Array, layer: Int[Array, ""]) -> StackedLayer:
        """Return one layer's matrix, read where it lies."""
        return StackedLayer(stack, layer, self.compute.backend)

    def prepared(self, layer):
        """Return the layer as it is."""
        return layer


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


def quantises_activations(parameters) -> bool:
    """Return True if some product quantises the activations that it multiplies its matrix with."""
    leaves = jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, MXFP8Array))
    return any(isinstance(x, MXFP8Array) and x.activations for x in leaves)
