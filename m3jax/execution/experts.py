"""The routed experts of a layer, computed where their matrices lie: on one device, or divided over a mesh."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.branches import rarely
from m3jax.execution.exchange import EXCHANGES
from m3jax.ops import measured, run_experts
from m3jax.ops.experts import Activation, ExpertWeights
from m3jax.parallel import spec
from m3jax.platform import platform
from m3jax.weights import Weight

# Logical axes of the experts' matrices (`m3jax.parallel.RULES`): gate and up [L E D F], down [L E F D].
UP_AXES, DOWN_AXES = ("layers", "experts", None, "mlp"), ("layers", "experts", "mlp", None)

# Returns the weighted sum over each token's experts, given their outputs [X A D] and weights [X A].
Sum = Callable[[Float[Array, "X A D"], Float[Array, "X A"]], Float[Array, "X D"]]
# Returns the sum of an array of each device, given the mesh axes of the devices.
SumOverDevices = Callable[[Float[Array, "X D"], tuple[str, ...]], Float[Array, "X D"]]


def experts_over_mesh(
    x: Float[Array, "X D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "X A"],
    weights: Float[Array, "X A"],
    layer: Int[Array, ""],
    activate: Activation,
    sum_of_experts: Sum,
    sum_over_devices: SumOverDevices,
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
      sum_over_devices: of these sums, given the mesh axes of the devices.
      path: "auto", "trained", or one of `m3jax.ops.EXPERT_PATHS`, as of `run_experts`.
      backend: one of `m3jax.ops.BACKENDS`.
      mesh: where the experts lie.
    """

    def on_each_device(experts, x, expert_ids, weights, layer):
        out = outputs_of_device(
            experts, x, expert_ids, layer, activate, mesh=mesh, turns=("context",), path=path, backend=backend
        )
        return sum_over_devices(sum_of_experts(out, weights), ("context", "expert", "tensor"))

    up_spec, down_spec = spec(experts.up.shape, UP_AXES, mesh), spec(experts.down.shape, DOWN_AXES, mesh)
    by_token = P(*spec(x.shape[:1], ("tokens",), mesh))
    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(ExpertWeights(up_spec, up_spec, down_spec), by_token, by_token, by_token, P()),
        out_specs=by_token,
        check_vma=False,
    )(experts, x, expert_ids, weights, layer)


# Returns this device's part of the weighted sums [X D] of tokens [X D], given their experts and weights [X A] twice,
# and how many of the pairs, at most, are of its own experts.
Part = Callable[[Float[Array, "X D"], Int[Array, "X A"], Float[Array, "X A"], int], Float[Array, "X D"]]

ROOM = 1.5  # places for tokens from one device to another, and for pairs of one, over what an even choice needs
# Places for tokens from one device to another are a multiple of this, the rows of a TPU's tile: else its compiler
# copies all tokens into another layout before each exchange, and back after it.
_ROWS_OF_TILE = 8


def sums_by_gathering(
    part: Part, x: Float[Array, "X D"], expert_ids: Int[Array, "X A"], weights: Float[Array, "X A"]
) -> Float[Array, "X D"]:
    """Return the sums of a device's tokens: each device of the expert axis has all of theirs, and adds its part.

    Args:
      part: what one device's experts make of tokens.
      x, expert_ids, weights: of this device's tokens, inside `jax.shard_map`.
    """
    gather = lambda y: jax.lax.all_gather(y, "expert", tiled=True)
    x, expert_ids, weights = gather(x), gather(expert_ids), gather(weights)
    sums = part(x, expert_ids, weights, expert_ids.size)
    return jax.lax.psum_scatter(sums, "expert", scatter_dimension=0, tiled=True)


def sums_by_dispatch(
    part: Part,
    beside: Callable[[], Float[Array, "X D"]],
    x: Float[Array, "X D"],
    expert_ids: Int[Array, "X A"],
    weights: Float[Array, "X A"],
    scale: float,
    num_held: int,
    capacity: int,
    mesh: Mesh,
) -> Float[Array, "X D"]:
    """Return the scaled sums of a device's tokens, plus `beside`; each is sent once to each device with its experts.

    The exchange has as many places whatever the tokens choose, so that its shape is known. If they choose so unevenly
    that somewhere a token finds none, all devices take `sums_by_gathering` instead: no token is dropped.

    Args:
      part, x, expert_ids, weights: as of `sums_by_gathering`.
      beside: computes what is added to the scaled sums and waits for no other device, such as the shared expert. A
        compiler can put it between the beginning and the end of an exchange only if both are in one branch.
      scale: of the sums.
      num_held: experts of each device.
      capacity: C, places for tokens from one device to another.
      mesh: of the devices.
    """
    num_devices, num_tokens = mesh.shape["expert"], len(x)
    owners = jnp.where(expert_ids >= 0, expert_ids // num_held, num_devices)  # [X A]
    goes_to = owners[:, :, None] == jnp.arange(num_devices)  # [X A devices]
    is_sent = jnp.any(goes_to, axis=1)  # [X devices]
    exchange = EXCHANGES[measured.EXPERT_EXCHANGE[platform()]](is_sent, capacity, "expert")
    # Pairs that meet on each device: as many as a device has of its own where all experts are chosen alike.
    most_pairs = math.ceil(ROOM * expert_ids.size)
    num_pairs = jax.lax.psum(jnp.sum(goes_to, axis=(0, 1), dtype=jnp.int32), "expert")  # [devices]
    lacks_room = exchange.lacks_room | (jnp.max(num_pairs) > most_pairs)
    lacks_room = jax.lax.pmax(lacks_room, tuple(mesh.axis_names))  # all devices take one branch

    def by_dispatch(x, expert_ids, weights):
        num_rows = num_devices * capacity
        token_of = jnp.full(num_rows, num_tokens, jnp.int32)  # behind the last token: nobody's place
        token_of = token_of.at[exchange.target].set(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], mode="drop")
        # In a place that is nobody's lies some token, of which no expert is asked for: zeros would be one more pass
        # over all places.
        tokens_sent = x.at[token_of].get(mode="clip")  # [devices*C D]
        taken = lambda y, fill: exchange.there(y.at[token_of].get(mode="fill", fill_value=fill), fill)  # [devices*C A]
        # Experts of other devices are none here: an id that is not held, and so on.
        # The experts wait for `own` too: it is computed while the tokens are on their way, not behind all exchanges.
        tokens, own = jax.lax.optimization_barrier((exchange.there(tokens_sent, 0), beside()))
        sums = exchange.back(part(tokens, taken(expert_ids, -1), taken(weights, 0), most_pairs))  # [devices*C D]
        # A token's parts in the order of its experts; a device that has two of them gave one sum.
        is_first = jnp.cumsum(goes_to, axis=1) * goes_to == 1  # [X A devices]
        place_of = jnp.where(is_first, exchange.target[:, None], num_rows)  # [X A devices]
        place_of = jnp.min(place_of, axis=2)  # [X A]; an expert is on one device
        # All tokens' first parts, then all second ones: rows of [A*X D] as they are gathered, in no other layout.
        parts = sums.at[place_of.T].get(mode="fill", fill_value=0)  # [A X D]
        return scale * jnp.sum(parts, axis=0) + own  # [X D]

    def by_gathering(x, expert_ids, weights):
        with rarely():
            return scale * sums_by_gathering(part, x, expert_ids, weights) + beside()

    return jax.lax.cond(lacks_room, by_gathering, by_dispatch, x, expert_ids, weights)


def dispatch_capacity(num_tokens: int, num_chosen: int, num_devices: int) -> int | None:
    """Return the places of `sums_by_dispatch`; None where gathering moves as few bytes.

    Gathering moves every token to every device, and a sum back. Dispatch moves a token to the devices that have its
    experts: of n devices, n (1 - (1 - 1/n)^A) if all are chosen as often, and `ROOM` times as many places, in whole
    tiles. With M3's 4 experts a token that is 1.03 of all at 4 devices, 0.62 at 8, 0.34 at 16 and 0.09 at 64.

    Args:
      num_tokens: of a device.
      num_chosen: A, experts of a token.
      num_devices: of the expert axis.
    """
    even = num_tokens * (1 - (1 - 1 / num_devices) ** num_chosen)
    capacity = math.ceil(ROOM * even / _ROWS_OF_TILE) * _ROWS_OF_TILE
    return capacity if capacity <= 3 / 4 * num_tokens else None


def ids_on_device(expert_ids: Int[Array, "X A"], num_held: int) -> Int[Array, "X A"]:
    """Return experts by this device's numbers, inside `jax.shard_map`; -1 for one that another device holds.

    Args:
      expert_ids: by their numbers in the layer; -1 for none.
      num_held: experts of each device.
    """
    held_ids = expert_ids - jax.lax.axis_index("expert") * num_held
    return jnp.where((expert_ids >= 0) & (held_ids >= 0) & (held_ids < num_held), held_ids, -1)


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
    held_ids = ids_on_device(expert_ids, experts.gate.shape[1])  # [X A]
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
