"""The fastest implementation: kernels where there are some for a call, XLA elsewhere."""

from dataclasses import dataclass

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax import ops
from m3jax.cache import LayerCall
from m3jax.execution import plain
from m3jax.execution.attend import attend
from m3jax.execution.compute import Compute, Remat
from m3jax.mxfp8 import MXFP8Array
from m3jax.numerics import einsum
from m3jax.ops.experts import Activation, ExpertWeights
from m3jax.weights import StackedLayer, Weight

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

    @property
    def remat(self) -> Remat:
        """The activations that the backward pass recomputes, as of `Compute`."""
        return self.compute.remat

    @property
    def product_backend(self) -> str:
        """The backend of a layer's products, norms and routers."""
        return self.compute.backend

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

    def attend(self, projections, pages, call, rules, tap):
        """Write new tokens, select and attend."""
        return attend(projections, pages, self.as_set(call), rules, tap)

    def as_set(self, call: LayerCall) -> LayerCall:
        """Return a layer's call with the schedule and backend of the settings."""
        return call.replace(schedule=self.compute.schedule, backend=self.compute.backend)

    def choose_experts(self, logits, bias, top_k):
        """Return the router's choice: by one kernel for few tokens, by XLA elsewhere."""
        by_xla = lambda logits, bias: plain.choose_experts(logits, bias, top_k)
        return ops.choose_experts(by_xla, logits, bias, top_k=top_k, backend=self.product_backend)

    def experts(self, x, expert_ids, weights, matrices, activate, shared, scale):
        """Return the sum of each token's experts and the shared one; one kernel may run all of them."""
        # Experts stay in the stack of all layers: cut out, a layer's would be copied whole to use a few of them.
        experts, layer = ExpertWeights(*[matrix.stack for matrix in matrices]), matrices[0].layer
        how = dict(path=self.compute.expert_path, backend=self.compute.backend)
        # An expert takes its tokens wherever in the batch they are: to it all rows are one.
        tokens, expert_ids, weights = (y.reshape(-1, y.shape[-1]) for y in (x, expert_ids, weights))  # [X D], [X A]
        joined = shared if ops.joins_shared(tokens, experts, shared, **how) else ()
        out = ops.run_experts(tokens, experts, expert_ids, layer, activate, shared=joined, **how)  # [X C D]
        routed = scale * self.sum_of_experts(out[:, : expert_ids.shape[1]], weights)
        if joined:
            return (routed + out[:, -1]).reshape(x.shape)
        return self.add_shared(x, routed.reshape(x.shape), shared, activate)

    def add_shared(
        self, x: Float[Array, "B T D"], routed: Float[Array, "B T D"], shared: tuple[Weight, ...], activate: Activation
    ) -> Float[Array, "B T D"]:
        """Return the scaled routed sum plus the shared expert, in the accumulator's dtype."""
        return self.each_token(lambda x, routed: routed + plain.mlp(x, shared, activate))(x, routed)

    def sum_of_experts(self, out: Float[Array, "X A D"], weights: Float[Array, "X A"]) -> Float[Array, "X D"]:
        """Return the weighted sum over each token's experts."""
        return plain.weighted_sum(out, weights)

    def embed(self, tokens, table):
        """Return the table's rows."""
        return table[tokens]

    def unembed(self, hidden, head):
        """Return logits, by one product of all tokens."""
        return einsum("...d,vd->...v", hidden, head)

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


def quantises_activations(parameters) -> bool:
    """Return True if some product quantises the activations that it multiplies its matrix with."""
    leaves = jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, MXFP8Array))
    return any(isinstance(x, MXFP8Array) and x.activations for x in leaves)
