"""The fastest way that can run: kernels where there are some for a call, XLA elsewhere."""

from dataclasses import dataclass

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax import ops
from m3jax.cache import LayerCall
from m3jax.execution import plain
from m3jax.execution.attend import attend, attend_over_mesh
from m3jax.execution.compute import Compute
from m3jax.execution.experts import experts_over_mesh
from m3jax.mxfp8 import MXFP8Array
from m3jax.numerics import einsum
from m3jax.ops.experts import ExpertWeights
from m3jax.weights import StackedLayer

NUM_INPUTS = {"o_proj": 2}  # axes that a product with a layer's matrix sums over; one for all others


@dataclass(frozen=True)
class Fast:
    """All tokens of a call at once, in whatever order of sums is the fastest for so many (`Execution`).

    Attributes:
      compute: the model's settings.
      has_cache: whether the call has a cache; on a mesh its pages are divided over devices.
    """

    compute: Compute
    has_cache: bool = False

    takes_layers_apart = True

    @property
    def remat(self) -> bool:
        """True if the backward pass recomputes activations."""
        return self.compute.remat

    @property
    def product_backend(self) -> str:
        """The backend of a layer's products, norms and routers: XLA alone where devices divide arrays.

        A kernel sees one device's memory.
        """
        return "xla" if self.compute.is_divided else self.compute.backend

    def each_token(self, fn):
        """The function as it is: all tokens at once."""
        return fn

    def add_norm(self, x, update, weight, eps):
        """Residual addition and norm: one kernel for few tokens, XLA elsewhere."""
        by_xla = lambda x, update, weight: plain.add_norm(x, update, weight, eps)
        return ops.add_norm(by_xla, x, update, weight, eps=eps, backend=self.product_backend)

    def heads(self, projections):
        """Projections as they are: a kernel that writes pages may finish them."""
        return projections

    def attend(self, heads, pages, layer, places, positions, lengths, rules):
        """Write, select and attend on this device, or on each that holds pages."""
        call = LayerCall(layer, places, positions, lengths, self.compute.schedule, self.compute.backend)
        if self.has_cache and self.compute.is_divided:  # only a cache on the device is: `pages` is a `StackCache`
            return attend_over_mesh(heads, pages, call, rules, self.compute.mesh)
        return attend(heads, pages, call, rules)

    def choose_experts(self, logits, bias, top_k):
        """The router's choice: one kernel for few tokens, XLA elsewhere."""
        by_xla = lambda logits, bias: plain.choose_experts(logits, bias, top_k)
        return ops.choose_experts(by_xla, logits, bias, top_k=top_k, backend=self.product_backend)

    def experts(self, x, expert_ids, weights, matrices, activate, shared):
        """Experts where they lie, the shared one with them where one kernel runs both."""
        experts, layer = ExpertWeights(*(matrix.stack for matrix in matrices)), matrices[0].layer
        how = dict(path=self.compute.expert_path, backend=self.compute.backend)
        if self.compute.is_divided:
            expert_ids, weights = self.before_mesh(expert_ids, weights)
            routed = experts_over_mesh(
                x, experts, expert_ids, weights, layer, activate, self.sum_of_experts, mesh=self.compute.mesh, **how
            )
            return routed, None
        if not ops.joins_shared(x, experts, shared, **how):
            shared = ()
        out = ops.run_experts(x, experts, expert_ids, layer, activate, shared=shared, **how)  # [X C D]
        routed = self.sum_of_experts(out[:, : expert_ids.shape[1]], weights)
        return routed, out[:, -1] if shared else None

    def before_mesh(self, expert_ids, weights):
        """The choices as a mesh's devices get them."""
        return expert_ids, weights

    def sum_of_experts(self, out: Float[Array, "X A D"], weights: Float[Array, "X A"]) -> Float[Array, "X D"]:
        """The weighted sum over each token's experts."""
        return plain.weighted_sum(out, weights)

    def unembed(self, hidden, head):
        """One product of all tokens."""
        return einsum("...d,vd->...v", hidden, head)

    def reads_in_place(
        self, name: str, stack: Float[Array, "L ..."] | MXFP8Array, num_rows: int, dtype: DTypeLike
    ) -> bool:
        """True where a kernel is faster than XLA's product with a copy of the matrix."""
        if not name.endswith("_proj"):
            return False
        case = ops.ProductCase.of(stack, NUM_INPUTS.get(name, 1), num_rows, dtype)
        return ops.choose(case, self.product_backend) != "xla"

    def stacked(self, stack: Float[Array, "L ..."] | MXFP8Array, layer: Int[Array, ""]) -> StackedLayer:
        """One layer's matrix, where it lies."""
        return StackedLayer(stack, layer, self.compute.backend)

    def prepared(self, layer):
        """The layer as it is."""
        return layer


def quantises_activations(parameters) -> bool:
    """True if some product quantises what it multiplies its matrix with."""
    leaves = jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, MXFP8Array))
    return any(isinstance(x, MXFP8Array) and x.activations for x in leaves)
