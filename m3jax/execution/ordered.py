"""The invariant mode by kernels, on a GPU: all tokens of a call at once, each in one order of sums."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax import ops
from m3jax.config import M3Config
from m3jax.execution import plain
from m3jax.execution.fast import NUM_INPUTS, Fast
from m3jax.execution.projections import Projections
from m3jax.execution.tiled import Tiled
from m3jax.mxfp8 import MXFP8Array
from m3jax.weights import StackedLayer


@dataclass(frozen=True)
class Ordered(Fast):
    """An `Execution` whose kernels each sum in one order, so that a token's bits depend on no other token.

    The kernels are those of `m3jax.ops.ordered`.
    """

    product_backend = "xla"  # for products without a kernel of one order

    def add_norm(self, x, update, weight, eps):
        """Return a residual addition and its norm, by the kernel for any number of tokens."""
        by_xla = lambda x, update, weight: plain.add_norm(x, update, weight, eps)
        return ops.add_norm(by_xla, x, update, weight, eps=eps, backend="xla", is_ordered=True)

    def attend(self, projections, pages, call, rules, tap):
        """Norm and rotate by the kernel for any number of tokens, then write, select and attend."""
        heads = Projections.of_heads(projections.finish_in_order())
        return super().attend(heads, pages, call, rules, tap)

    def sum_of_experts(self, out, weights):
        """Return the weighted sum, adding one expert after the other."""
        return sum(out[:, i] * weights[:, i : i + 1].astype(out.dtype) for i in range(out.shape[1]))

    def unembed(self, hidden, head):
        """Return logits by the kernel's product if it takes the vocabulary, else tile by tile."""
        if head.shape[0] % 64:
            return Tiled(self.compute, self.has_cache).unembed(hidden, head)
        return ops.unembed_in_order(hidden, head)

    def reads_in_place(
        self, name: str, stack: Float[Array, "L ..."] | MXFP8Array, num_rows: int, dtype: DTypeLike
    ) -> bool:
        """Return True for all matrices of a call with a cache: gradients are those of layers, not of stacks."""
        if not (self.has_cache and (name.endswith("_proj") or name == "gate")):
            return False
        case = ops.ProductCase.of(stack, NUM_INPUTS.get(name, 1), num_rows, dtype, is_ordered=True)
        return ops.choose(case, self.compute.backend) != "xla"

    def stacked(self, stack, layer):
        """Return one layer's matrix, read where it lies."""
        return replace(super().stacked(stack, layer), is_ordered=True)

    def prepared(self, layer):
        """Return the layer with all matrices in stacks, even if of one layer: the kernel reads no others."""

        def prepare(parameter):
            if isinstance(parameter, StackedLayer) or parameter.ndim < 2:  # norms and biases are not matrices
                return parameter
            return self.stacked(jax.tree.map(lambda x: x[None], parameter), jnp.int32(0))

        return jax.tree.map(prepare, layer, is_leaf=lambda x: isinstance(x, MXFP8Array | StackedLayer))


def kernels_order(config: M3Config, dtype: DTypeLike, backend: str) -> bool:
    """Return True if kernels run all layers of a model in its invariant mode, for a device by itself.

    Args:
      config: the model's.
      dtype: of the activations.
      backend: one of `m3jax.ops.BACKENDS`.
    """
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads
    widths = heads, kv_heads * config.head_dim, kv_heads * config.index_head_dim, config.index_head_dim
    widths += config.shared_intermediate_size, config.dense_intermediate_size
    router, head = (config.hidden_size, config.num_local_experts), (config.head_dim, config.rotary_dim)
    case = ops.OrderedCase(dtype=dtype, widths=widths, router=router, head=head)
    return ops.choose(case, backend) != "xla"
