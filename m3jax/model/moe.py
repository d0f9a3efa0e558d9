"""The mixture of experts: a float32 router, and dropless experts (docs/numerics.md)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.make import Make
from m3jax.model.layers import MLP, swiglu_oai
from m3jax.ops import choose_experts, joins_shared, project, run_experts
from m3jax.ops.experts import Activation, ExpertWeights
from m3jax.parallel import spec
from m3jax.tiles import by_tiles
from m3jax.weights import StackedLayer

_UP_AXES, _DOWN_AXES = ("layers", "experts", None, "mlp"), ("layers", "experts", "mlp", None)


def route(
    x: Float[Array, "X D"],
    gate: Float[Array, "D E"] | StackedLayer,
    bias: Float[Array, " E"],
    top_k: int,
    backend: str = "xla",
) -> tuple[Int[Array, "X A"], Float[Array, "X A"]]:
    """Choose experts by sigmoid score plus bias; weigh them by their scores alone, divided by the sum of these.

    Always in float32 (or float64): the checkpoint keeps the router in float32 and vLLM and SGLang compute it so.

    Args:
      x: tokens.
      gate: the router's matrix, not the gate of SwiGLU.
      bias: counts in the choice only.
      top_k: A, experts of a token.
      backend: where kernels are wanted, one of `m3jax.ops.BACKENDS`.

    Returns:
      (ids, weights), best first; of equal scores the lower id. Weights are NaN where a score or its bias is NaN.
    """

    def choose(logits, bias):
        scores = jax.nn.sigmoid(logits)  # [X E]
        expert_ids = checkpoint_name(jax.lax.top_k(scores + bias, top_k)[1], "expert_ids")  # [X A]
        weights = jnp.take_along_axis(scores, expert_ids, axis=-1)  # [X A]
        weights = weights / sum(weights[:, i : i + 1] for i in range(top_k))  # term by term: a sum in one order
        # Top-k puts NaN first or last, as its sign bit is: an expert whose score is none would be passed over in
        # silence.
        is_broken = jnp.any(jnp.isnan(scores + bias), axis=-1, keepdims=True)  # [X 1]
        return expert_ids.astype(jnp.int32), jnp.where(is_broken, jnp.nan, weights)

    logits = project("xd,de->xe", x.astype(gate.dtype), gate)  # [X E]
    return choose_experts(choose, logits, bias, top_k=top_k, backend=backend)


class Experts(nnx.Module):
    """The routed experts of a whole stack of layers: gate_proj and up_proj [L E D F], down_proj [L E F D].

    They stay stacked while the layers are scanned and are read by (layer, expert): a scan over them would copy
    all experts of a layer to use a few.
    """

    def __init__(self, depth: int, config: M3Config, make: Make):
        experts, width, hidden = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_proj = make.linear((depth, experts, width, hidden), _UP_AXES)
        self.up_proj = make.linear((depth, experts, width, hidden), _UP_AXES)
        self.down_proj = make.linear((depth, experts, hidden, width), _DOWN_AXES)

    def __call__(
        self,
        x: Float[Array, "X D"],
        expert_ids: Int[Array, "X A"],
        weights: Float[Array, "X A"],
        layer: Int[Array, ""],
        alpha: float,
        limit: float,
        *,
        backend: str = "auto",
        mesh: Mesh | None = None,
        path: str = "auto",
        token_tile: int | None = None,
        is_ordered: bool = False,
        shared: MLP | None = None,
    ) -> tuple[Float[Array, "X D"], Float[Array, "X D"] | None]:
        """The weighted sum of each token's experts, in the accumulator's dtype; no token is dropped.

        On a mesh every device computes the pairs of a token and an expert whose expert it holds, for the tokens of its
        place on the data axis. Experts are whole on each device of the context axis: those share out the pairs.

        Args:
          x: tokens.
          expert_ids: the A experts that each token chose.
          weights: of these experts in the sum.
          layer: which layer of the stack.
          alpha: of the activation (`swiglu_oai`).
          limit: likewise.
          backend: one of `m3jax.ops.BACKENDS`.
          mesh: where the experts lie.
          path: "auto", or one of `m3jax.ops.EXPERT_PATHS`.
          token_tile: tokens whose sums are computed at once; None for all.
          is_ordered: sums are written term by term instead, so that their order does not depend on how many there are.
          shared: the layer's shared expert, for a kernel that runs it with the others, where there is one.

        Returns:
          (the sum, what the shared expert makes of each token, or None where that is left to the caller).
        """

        def activate(gate, up):
            return swiglu_oai(gate, up, alpha, limit).astype(x.dtype)

        experts = ExpertWeights(self.gate_proj[...], self.up_proj[...], self.down_proj[...])
        if mesh is None or mesh.size == 1:
            how = dict(path=path, backend=backend)
            matrices = () if shared is None else (shared.gate_proj[...], shared.up_proj[...], shared.down_proj[...])
            if matrices and not joins_shared(experts, matrices, x.dtype, expert_ids.shape, **how):
                matrices = ()
            out = run_experts(x, experts, expert_ids, layer, activate, shared=matrices, **how)  # [X C D]
            chosen = out[:, : expert_ids.shape[1]]
            if is_ordered:
                return _sum_in_order(chosen, weights), None
            return by_tiles(_weighted_sum, token_tile, chosen, weights), out[:, -1] if matrices else None

        if token_tile is not None:
            # With a choice or several for each device of the context axis, a token's place does not say who gets which.
            unused = ((0, 0), (0, -expert_ids.shape[1] % mesh.shape["context"]))
            expert_ids, weights = jnp.pad(expert_ids, unused, constant_values=-1), jnp.pad(weights, unused)

        def on_each_device(experts, x, expert_ids, weights, layer):
            return _share_of_device(experts, x, expert_ids, weights, layer, activate, path, backend, mesh, token_tile)

        up_spec, down_spec = spec(experts.up.shape, _UP_AXES, mesh), spec(experts.down.shape, _DOWN_AXES, mesh)
        by_token = P(*spec(x.shape[:1], ("tokens",), mesh))
        routed = jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(ExpertWeights(up_spec, up_spec, down_spec), by_token, by_token, by_token, P()),
            out_specs=by_token,
            check_vma=False,
        )(experts, x, expert_ids, weights, layer)
        return routed, None


def _share_of_device(
    experts: ExpertWeights,
    x: Float[Array, "X D"],
    expert_ids: Int[Array, "X A"],
    weights: Float[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
    path: str,
    backend: str,
    mesh: Mesh,
    token_tile: int | None,
) -> Float[Array, "X D"]:
    """What one device of a mesh does: the pairs dealt to it whose experts, or parts of their width, it holds."""
    num_held = experts.gate.shape[1]
    held_ids = expert_ids - jax.lax.axis_index("expert") * num_held
    held_ids = jnp.where((held_ids >= 0) & (held_ids < num_held), held_ids, -1)  # [X A]; -1 is another device's
    num_tokens, num_chosen = expert_ids.shape
    parts, options = mesh.shape["context"], dict(path=path, backend=backend, num_shares=mesh.shape["expert"])
    if parts == 1:
        out = run_experts(x, experts, held_ids, layer, activate, **options)
        out = jnp.where(held_ids[..., None] >= 0, out, 0.0)  # [X A D]
    else:
        # Pairs are dealt as in a game of cards: this device gets its turn in every round.
        turn = jax.lax.axis_index("context")
        dealt = jnp.pad(held_ids.reshape(-1), (0, -held_ids.size % parts), constant_values=-1)
        dealt = dealt.reshape(-1, parts)  # [rounds parts]
        pair = jnp.arange(len(dealt), dtype=jnp.int32) * parts + turn  # [rounds]
        tokens = x[jnp.minimum(pair // num_chosen, num_tokens - 1)]  # [rounds D]
        own_ids = dealt[:, turn, None]  # [rounds 1]
        out = run_experts(tokens, experts, own_ids, layer, activate, **options)
        out = jnp.where(own_ids[..., None] >= 0, out, 0.0)  # [rounds 1 D]
        every_turn = jnp.zeros((*dealt.shape, out.shape[-1]), out.dtype).at[:, turn].set(out[:, 0])  # [rounds parts D]
        out = every_turn.reshape(-1, out.shape[-1])[: held_ids.size].reshape(num_tokens, num_chosen, -1)  # [X A D]
    return jax.lax.psum(by_tiles(_weighted_sum, token_tile, out, weights), ("context", "expert", "tensor"))


def _weighted_sum(out: Float[Array, "X A D"], weights: Float[Array, "X A"]) -> Float[Array, "X D"]:
    """The sum over each token's experts."""
    return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)


def _sum_in_order(out: Float[Array, "X A D"], weights: Float[Array, "X A"]) -> Float[Array, "X D"]:
    """`_weighted_sum`, one expert after the other."""
    return sum(out[:, i] * weights[:, i : i + 1].astype(out.dtype) for i in range(out.shape[1]))


class MoE(nnx.Module):
    """Router, routed experts and the shared expert of a stack of layers."""

    def __init__(self, depth: int, config: M3Config, make: Make):
        width, experts = config.hidden_size, config.num_local_experts
        self.gate = make.weight((depth, width, experts), ("layers", None, None), fan_in=width, dtype="float32")
        self.e_score_correction_bias = make.norm((depth, experts), dtype="float32")
        self.experts = Experts(depth, config, make)
        self.shared_experts = MLP(depth, width, config.shared_intermediate_size, make)

    def route(
        self, x: Float[Array, "B T D"], config: M3Config, backend: str
    ) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
        """(ids, weights) of the experts that each token chooses, by one layer's router."""
        tokens = x.reshape(-1, x.shape[-1])  # [X D]
        chosen = route(tokens, self.gate[...], self.e_score_correction_bias[...], config.num_experts_per_tok, backend)
        expert_ids, weights = (y.reshape(*x.shape[:2], -1) for y in chosen)
        return expert_ids, weights

    def add_shared(
        self,
        x: Float[Array, "B T D"],
        routed: Float[Array, "B T D"],
        shared: Float[Array, "B T D"] | None,
        config: M3Config,
    ) -> Float[Array, "B T D"]:
        """Routed plus shared experts, in the accumulator's dtype; the latter are run here if they were not before."""
        if shared is None:
            shared = self.shared_experts(x, config.swiglu_alpha, config.swiglu_limit)
        return config.routed_scaling_factor * routed + shared
