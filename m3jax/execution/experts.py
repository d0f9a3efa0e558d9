"""The routed experts of a layer, computed where their matrices lie: on one device, or divided over a mesh."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.ops import run_experts
from m3jax.ops.experts import Activation, ExpertWeights
from m3jax.parallel import spec
from m3jax.weights import Weight

# Logical axes of the experts' matrices (`m3jax.parallel.RULES`): gate and up [L E D F], down [L E F D].
UP_AXES, DOWN_AXES = ("layers", "experts", None, "mlp"), ("layers", "experts", "mlp", None)

# Returns the weighted sum over each token's experts, given their outputs [X A D] and weights [X A].
Sum = Callable[[Float[Array, "X A D"], Float[Array, "X A"]], Float[Array, "X D"]]


def experts_over_mesh(
    x: Float[Array, "X D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    weights: Float[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
    sum_of_experts: Sum,
    *,
    path: str,
    backend: str,
    mesh: Mesh,
) -> Float[Array, "X D"]:
    """Return the weighted sum of each token's experts, in the accumulator's dtype, where a mesh divides them.

    Every device computes the pairs of a token and an expert whose expert it holds, for the tokens of its place on the
    data axis. Devices of the context axis hold the same experts, and divide the pairs among them.

    Args:
      x: tokens.
      experts: of the whole stack of layers.
      expert_ids: the A experts that each token chose; -1 for none.
      weights: of these experts in the sum.
      layer: which layer of the stack.
      activate: of gate and up, element by element.
      sum_of_experts: of the outputs that this device computed; those of others are 0.
      path: "auto", or one of `m3jax.ops.EXPERT_PATHS`.
      backend: one of `m3jax.ops.BACKENDS`.
      mesh: where the experts lie.
    """

    def on_each_device(experts, x, expert_ids, weights, layer):
        out = outputs_of_device(
            experts, x, expert_ids, layer, activate, mesh=mesh, turns=("context",), path=path, backend=backend
        )
        return jax.lax.psum(sum_of_experts(out, weights), ("context", "expert", "tensor"))

    up_spec, down_spec = spec(experts.up.shape, UP_AXES, mesh), spec(experts.down.shape, DOWN_AXES, mesh)
    by_token = P(*spec(x.shape[:1], ("tokens",), mesh))
    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(ExpertWeights(up_spec, up_spec, down_spec), by_token, by_token, by_token, P()),
        out_specs=by_token,
        check_vma=False,
    )(experts, x, expert_ids, weights, layer)


def outputs_of_device(
    experts: ExpertWeights,
    x: Float[Array, "X D"],
    expert_ids: Int[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
    *,
    mesh: Mesh,
    turns: tuple[str, ...],
    path: str,
    backend: str,
    shared: Sequence[Weight] = (),
) -> Float[Array, "X C D"]:
    """Return the outputs of the pairs of a token and an expert that one device computes, and 0 for all other pairs.

    Args:
      experts: those that the device holds, of the whole stack of layers.
      x, expert_ids, layer, activate, path, backend: as of `experts_over_mesh`, inside `jax.shard_map`.
      mesh: where the experts lie.
      turns: axes whose devices have the same tokens and the same experts, and take turns with the pairs.
      shared: as of `m3jax.ops.run_experts`, where no turns are taken.
    """
    num_held = experts.gate.shape[1]
    held_ids = expert_ids - jax.lax.axis_index("expert") * num_held
    held_ids = jnp.where((held_ids >= 0) & (held_ids < num_held), held_ids, -1)  # [X A]; -1 is another device's
    num_tokens, num_chosen = expert_ids.shape
    parts = math.prod(mesh.shape[axis] for axis in turns)
    options = dict(path=path, backend=backend, num_shares=mesh.shape["expert"])
    if parts == 1:
        out = run_experts(x, experts, held_ids, layer, activate, shared=shared, **options)  # [X C D]
        routed = jnp.where(held_ids[..., None] >= 0, out[:, :num_chosen], 0.0)  # [X A D]
        return jnp.concatenate([routed, out[:, num_chosen:]], axis=1) if shared else routed
    # Pair i is computed by device i mod `parts`.
    turn = jax.lax.axis_index(turns)
    dealt = jnp.pad(held_ids.reshape(-1), (0, -held_ids.size % parts), constant_values=-1)
    dealt = dealt.reshape(-1, parts)  # [rounds parts]
    pair = jnp.arange(len(dealt), dtype=jnp.int32) * parts + turn  # [rounds]
    tokens = x[jnp.minimum(pair // num_chosen, num_tokens - 1)]  # [rounds D]
    own_ids = dealt[:, turn, None]  # [rounds 1]
    out = run_experts(tokens, experts, own_ids, layer, activate, **options)
    out = jnp.where(own_ids[..., None] >= 0, out, 0.0)  # [rounds 1 D]
    every_turn = jnp.zeros((*dealt.shape, out.shape[-1]), out.dtype).at[:, turn].set(out[:, 0])  # [rounds parts D]
    return every_turn.reshape(-1, out.shape[-1])[: held_ids.size].reshape(num_tokens, num_chosen, -1)  # [X A D]
