"""A call with a cache over a mesh: each device computes its tokens by its parts of the matrices."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from m3jax import ops
from m3jax.execution import plain
from m3jax.execution.attend import attend_over_mesh
from m3jax.execution.compute import Compute
from m3jax.execution.experts import (
    DOWN_AXES,
    UP_AXES,
    dispatch_capacity,
    ids_on_device,
    outputs_of_device,
    sums_by_dispatch,
    sums_by_gathering,
)
from m3jax.execution.fast import NUM_INPUTS
from m3jax.execution.over_mesh import OverMesh
from m3jax.execution.projections import Projections
from m3jax.make import dotted_path
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import measured
from m3jax.ops.cases import Stored
from m3jax.ops.experts import Activation, ExpertWeights
from m3jax.parallel import TokenAxes, spec, token_axes
from m3jax.platform import platform
from m3jax.weights import DividedWeight, StackedLayer, Weight

# The logical axes `[*inputs *outputs]` of a layer's matrices, by the names of the parameters.
_TO_HEADS, _TO_KV_HEADS, _TO_HIDDEN = (None, "heads", None), (None, "kv_heads", None), (None, "mlp")
MATRIX_AXES = {
    "q_proj": _TO_HEADS, "k_proj": _TO_KV_HEADS, "v_proj": _TO_KV_HEADS, "index_q_proj": _TO_KV_HEADS,
    "index_k_proj": (None, None), "o_proj": ("heads", None, None),
    "gate_proj": _TO_HIDDEN, "up_proj": _TO_HIDDEN, "down_proj": ("mlp", None),
}  # fmt: skip


def divided_layer(layer: PyTree, compute: Compute, least_tokens: int, is_ordered: bool = False) -> PyTree:
    """Return a layer whose matrices say how they lie on a mesh; experts are left as they are.

    Args:
      layer: a module with the parameters of one layer.
      compute: the model's settings, with the mesh of the devices that hold them.
      least_tokens, is_ordered: as of `m3jax.weights.DividedWeight`.
    """

    def on_mesh(path, parameter):
        *_, room, name = ["", *dotted_path(path).split(".")]
        if room == "experts" or name not in MATRIX_AXES:
            return parameter
        shape = parameter.stack.shape[1:] if isinstance(parameter, StackedLayer) else parameter.shape
        partition = tuple(spec(shape, MATRIX_AXES[name], compute.mesh))
        return DividedWeight(parameter, partition, compute.mesh, least_tokens, compute.backend, is_ordered)

    is_matrix = lambda leaf: isinstance(leaf, MXFP8Array | StackedLayer)
    return jax.tree_util.tree_map_with_path(on_mesh, layer, is_leaf=is_matrix)


class Divided(OverMesh):
    """An `Execution` in which devices exchange what `TokenAxes` says and no more, and run kernels on what they hold.

    A layer has two sums over the tensor axis, of attention's and of the feed-forward part's `[tokens, D]`. Where tokens
    are many they are divided over all axes of the mesh for everything but attention; where they are few every device
    has them all, and the sums are all-reduces.
    """

    @property
    def product_backend(self):
        """The backend of a layer's products, norms and routers: a kernel sees what one device holds."""
        return self.compute.backend

    def token_axes(self, *shape: int) -> TokenAxes:
        """Return how the mesh divides tokens of a call, [X] or [B T]."""
        return token_axes(shape, self.compute.mesh, measured.DIVIDED_TOKENS[platform()])

    def finish_queries(self, projections: Projections, tokens: TokenAxes) -> Projections:
        """Return projections with queries finished where their tokens are: every device then gets them in 16 bits."""
        mesh = self.compute.mesh
        if not tokens.products:
            return projections
        projections = projections.finish_queries()
        raw = projections.raw._asdict()
        for name, axis in (("q", "heads"), ("index_q", "kv_heads")):
            if raw[name] is not None:  # else XLA may move the exchange before the norm, where numbers have 32 bits
                partition = tokens.of_products(*spec(raw[name].shape[2:], (axis, None), mesh))
                raw[name] = jax.lax.with_sharding_constraint(raw[name], NamedSharding(mesh, partition))
        return projections.replace(raw=ops.Heads(**raw))

    def attend(self, projections, pages, call, rules, tap):
        """Write, select and attend on the devices that hold the pages; each gets the outputs of its own tokens."""
        mesh, tokens = self.compute.mesh, self.token_axes(*call.positions.shape)
        projections = self.finish_queries(projections, tokens)
        return attend_over_mesh(projections, pages, self.as_set(call), rules, tap, mesh, tokens)

    def add_norm(self, x, update, weight, eps):
        """Return a residual addition and its norm, each token on one device."""
        stream = self.token_axes(*x.shape[:2]).of_stream()
        on_each_device = lambda x, update, weight: super(Divided, self).add_norm(x, update, weight, eps)
        return self._over_mesh(on_each_device, (stream, stream, P()), (stream, stream))(x, update, weight)

    def choose_experts(self, logits, bias, top_k):
        """Return the router's choice, each token's on one device."""
        stream = self.token_axes(len(logits)).of_stream()
        on_each_device = lambda logits, bias: super(Divided, self).choose_experts(logits, bias, top_k)
        return self._over_mesh(on_each_device, (stream, P()), (stream, stream))(logits, bias)

    def experts(self, x, expert_ids, weights, matrices, activate, shared, scale):
        """Return the sum of each token's experts and the shared one, each device's part of which is its own experts'.

        Few tokens are on all devices: each computes what its experts make of them, and one sum joins all parts. Many
        are divided, over the expert axis too, whose devices then exchange them: each gets all of the others', or those
        that chose its experts, whichever moves fewer bytes (`dispatch_capacity`).
        """
        shape = x.shape
        x, expert_ids, weights = (y.reshape(-1, y.shape[-1]) for y in (x, expert_ids, weights))  # [X D], [X A] twice
        mesh, tokens = self.compute.mesh, self.token_axes(len(x))
        experts, layer = ExpertWeights(*[matrix.stack for matrix in matrices]), matrices[0].layer
        up_spec, down_spec = spec(experts.up.shape, UP_AXES, mesh), spec(experts.down.shape, DOWN_AXES, mesh)

        def on_each_device(experts, shared, x, expert_ids, weights, layer):
            part = self._part_of_sums(tokens, experts, shared, x, expert_ids, weights, layer, activate, scale)
            part = ops.psum(part, tokens.whole, mesh, self.compute.backend) if tokens.whole else part
            return ops.sum_of_parts(part, tokens, self.compute.backend)

        of_matrices = ExpertWeights(up_spec, up_spec, down_spec), [one.specs for one in shared]
        in_specs = (*of_matrices, *[tokens.of_products()] * 3, P())
        run = self._over_mesh(on_each_device, in_specs, tokens.of_stream())
        return run(experts, [one.weight for one in shared], x, expert_ids, weights, layer).reshape(shape)

    def _part_of_sums(
        self,
        tokens: TokenAxes,
        experts: ExpertWeights,
        shared: list[Weight],
        x: Float[Array, "X D"],
        expert_ids: Int[Array, "X A"],
        weights: Float[Array, "X A"],
        layer: Int[Array, ""],
        activate: Activation,
        scale: float,
    ) -> Float[Array, "X D"]:
        """Return, on one device, its part of its tokens' scaled sums of experts, the shared one added."""
        mesh, how = self.compute.mesh, dict(path=self.compute.expert_path, backend=self.compute.backend)
        turns = tuple(axis for axis in tokens.whole if axis != "expert")
        outputs = partial(outputs_of_device, experts, layer=layer, activate=activate, mesh=mesh, turns=turns, **how)
        is_divided = "expert" in tokens.products
        # T52: of the devices that have the same tokens one adds the shared expert.
        once = lambda own: jnp.where(jax.lax.axis_index(tokens.whole) == 0, own, 0.0) if tokens.whole else own
        if not (is_divided or turns) and ops.joins_shared(x, experts, shared, **how):
            out = outputs(x, expert_ids, shared=shared)  # [X A+1 D]
            return scale * plain.weighted_sum(out[:, :-1], weights) + once(out[:, -1])
        of_tokens, num_held = (x, expert_ids, weights), experts.gate.shape[1]

        def part(x, expert_ids, weights, most_pairs):
            case = ops.experts_case("tiles", x, experts.gate)
            if turns or how["path"] != "auto" or ops.choose(case, how["backend"]) == "xla":
                return plain.weighted_sum(outputs(x, expert_ids), weights)
            held_ids = ids_on_device(expert_ids, num_held)
            return ops.sums_in_tiles(x, experts, held_ids, weights, layer, activate, most_pairs)

        def shared_outputs():
            return once(plain.mlp(x, shared, activate))

        if not is_divided:
            return scale * part(*of_tokens, expert_ids.size) + shared_outputs()
        if capacity := dispatch_capacity(*expert_ids.shape, mesh.shape["expert"]):
            return sums_by_dispatch(part, shared_outputs, *of_tokens, scale, num_held, capacity, mesh)
        return scale * sums_by_gathering(part, *of_tokens) + shared_outputs()

    def reads_in_place(self, name, stack, num_rows, dtype):
        """Return True if a kernel is faster than XLA's product with a copy of what a device holds of the matrix."""
        if name not in MATRIX_AXES:
            return False
        mesh, tokens = self.compute.mesh, self.token_axes(num_rows)
        parts = [1 if axis is None else mesh.shape[axis] for axis in spec(stack.shape[1:], MATRIX_AXES[name], mesh)]
        of_device = [size // count for size, count in zip(stack.shape[1:], parts, strict=True)]
        num_inputs = NUM_INPUTS.get(name, 1)
        case = ops.ProductCase(
            rows=num_rows // math.prod(mesh.shape[axis] for axis in tokens.products),
            dtype=dtype,
            inputs=math.prod(of_device[:num_inputs]),
            outputs=math.prod(of_device[num_inputs:]),
            stored=replace(Stored.of(stack), size=stack.shape[0] * math.prod(of_device)),
        )
        if ops.choose(case, self.product_backend) != "xla":
            return True
        # A scan cuts a layer's matrices out before the layer begins. Of this one, which is multiplied last, a TPU's
        # compiler then writes a copy, and moves it once more: three times its bytes.
        return name == "o_proj" and bool(tokens.products) and self._is_cut_out_late(stack)

    def stacked(self, stack, layer):
        """Return one layer's matrix in its stack, for a kernel, or for XLA to read when it multiplies."""
        return StackedLayer(stack, layer, "xla" if self._is_cut_out_late(stack) else self.compute.backend)

    def _is_cut_out_late(self, stack) -> bool:
        """True for matrices that no kernel of a TPU multiplies: those in MXFP8 have one."""
        return platform() == "tpu" and not isinstance(stack, MXFP8Array)

    def prepared(self, layer):
        """Return the layer with matrices that say how they lie on the mesh; `experts` knows it of its own."""
        return divided_layer(layer, self.compute, measured.DIVIDED_TOKENS[platform()])

    def _over_mesh(self, fn, in_specs, out_specs):
        return jax.shard_map(fn, mesh=self.compute.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
