"""One training step: gradients of any loss, optimiser, and the balancing of the router."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Int, PyTree

from m3jax.model import M3
from m3jax.parallel import put
from m3jax.train.programs import jit_for_training
from m3jax.train.units import in_source_units, map_names, source_gradients

# What a step minimises: (model, batch) -> (loss, metrics).
LossFn = Callable[[M3, dict[str, Any]], tuple[Float[Array, ""], dict[str, Any]]]

# Names of parameters: the tower and the projector, and what moves the router's choice.
VISION, ROUTING_BIAS = "vision.", "e_score_correction_bias"


class TrainState(NamedTuple):
    """Everything that a training run resumes from: the step, float32 master weights, the optimiser."""

    step: Int[Array, ""]
    model: M3
    opt_state: optax.OptState


def make_optimizer(
    learning_rate: optax.Schedule,
    weight_decay: float = 0.1,
    frozen_index: bool = False,
    vision_rate: optax.Schedule | None = None,
    frozen_text: bool = False,
    frozen_vision: bool = False,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Return AdamW with clipping by the global norm, for all parameters that an optimiser moves.

    Norms and biases are not decayed. The routing biases are not the optimiser's: `balance` alone moves them. A model
    that was made of a Llama is moved in the Llama's units (`m3jax.train.units`).

    Args:
      learning_rate: by step, of the text model.
      weight_decay: of AdamW.
      frozen_index: leave the index branch out. For training without the index loss: a gradient of zero would not
        keep weight decay from moving it (T32).
      vision_rate: by step, of the tower and the projector, which are clipped by a norm of their own; None is
        `learning_rate`.
      frozen_text: leave all of the text model as it is, to the bit.
      frozen_vision: leave the tower and the projector as they are, as `frozen_text` does with the rest.
      clip_norm: the largest norm of the gradients of all parameters of one learning rate together.
    """

    def group(name: str) -> str:
        if name.startswith(VISION):
            return "freeze" if frozen_vision else "vision"
        is_frozen = frozen_text or name.endswith(ROUTING_BIAS) or (frozen_index and ".index_" in name)
        return "freeze" if is_frozen else "text"

    decayed = partial(map_names, lambda name, leaf: "norm" not in name and not name.endswith("bias"))

    def adamw(rate: optax.Schedule) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(clip_norm),
            optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-10, weight_decay=weight_decay, mask=decayed),
        )

    groups = {"text": adamw(learning_rate), "vision": adamw(vision_rate or learning_rate)}
    labels = partial(map_names, lambda name, leaf: group(name))
    return in_source_units(optax.multi_transform(groups | {"freeze": optax.set_to_zero()}, labels))


def init_state(model: M3, optimizer: optax.GradientTransformation) -> TrainState:
    """A state at step 0 with float32 master weights, copied: steps donate the state, the given model stays usable.

    Every array is committed to its devices as a step returns it; a mix of committed and uncommitted ones would
    compile the step again at its second call.

    Args:
      model: with weights in any float dtype.
      optimizer: from `make_optimizer`.

    Raises:
      ValueError: weights in MXFP8, which no step could move.
    """
    check_trainable(model)
    return first_state(cast_weights(model, "float32"), optimizer, model)


def first_state(params: PyTree[Array], optimizer: optax.GradientTransformation, model: M3) -> TrainState:
    """Return a state at step 0 of a model or of a part of one, whose arrays are copied and committed to their devices.

    Args:
      params: float32 arrays, each where the model has it.
      optimizer: of the parameters.
      model: of whose devices all have the state's numbers.
    """
    if model.mesh is None:
        everywhere = SingleDeviceSharding(*model.embed_tokens[...].devices())
    else:
        everywhere = NamedSharding(model.mesh, PartitionSpec())
    place = lambda x: jax.device_put(x, x.sharding if x.ndim else everywhere, may_alias=False)
    return jax.tree.map(place, TrainState(jnp.int32(0), params, optimizer.init(params)))


def on_data_axis(batch: Mapping[str, PyTree[Any]], mesh: Mesh | None, rows_axis: int = 0) -> dict[str, PyTree[Any]]:
    """Return a batch with its rows divided over the data axis of a mesh; on one device as it is.

    Args:
      batch: Pytrees of arrays, by name.
      mesh: Mesh of the model; None for one device.
      rows_axis: Axis of the rows. An array without that axis is on every device.
    """
    if mesh is None:
        return dict(batch)
    rows = PartitionSpec(*[None] * rows_axis, "data")
    where = lambda x: NamedSharding(mesh, rows if np.ndim(x) > rows_axis else PartitionSpec())
    return jax.tree.map(lambda x: put(x, where(x)), dict(batch))


def check_trainable(model: M3) -> None:
    """Raise ValueError for weights that no gradient moves.

    Args:
      model: to be trained.
    """
    if model.is_mxfp8:
        raise ValueError(
            "the model's linear layers are in MXFP8, which is frozen: train m3jax.load(folder, dtype='float32', "
            "weights='dequantize'), then m3jax.quantize(model)"
        )


@partial(jit_for_training, static_argnames=("optimizer", "loss_fn", "balance_rate"), donate_argnames="state")
def train_step(
    state: TrainState,
    batch: dict[str, Any],
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    balance_rate: float = 1e-3,
) -> tuple[TrainState, dict[str, Array]]:
    """Take one optimiser step.

    Args:
      state: donated.
      batch: what `loss_fn` reads: a dictionary of pytrees of arrays. A model that the loss compares with goes here too:
        what `loss_fn` closes over becomes a constant of the compiled program.
      optimizer: from `make_optimizer`; static, so make it once.
      loss_fn: (model, batch) -> (loss, metrics), as `m3jax.train.losses.MSALoss`; static, so make it once, or let it
        compare equal. Its batch has "step" besides, the state's, for a loss that draws at random or anneals. A metric
        "loads" is the share of routed pairs that each expert got, a list over stacks of [L E], None where the MLP is
        dense.
      balance_rate: step of the routing bias towards equal loads, where the loss measures "loads"; 0 leaves the biases
        as they are. Static.

    Returns:
      (new state, metrics): those of the loss without "loads", grad_norm before clipping, and imbalance, the load of the
      busiest expert of any layer relative to an equal share (where there are loads).
    """
    grads, metrics = jax.grad(loss_fn, has_aux=True)(state.model, {**batch, "step": state.step})
    updates, opt_state = optimizer.update(grads, state.opt_state, state.model)
    model = optax.apply_updates(state.model, updates)
    metrics = dict(metrics)
    loads = metrics.pop("loads", [])
    if balance_rate and loads:
        model = balance(model, loads, balance_rate)
    metrics["grad_norm"] = optax.tree.norm(source_gradients(grads, state.model))
    if imbalances := [jnp.max(load) * load.shape[-1] for load in loads if load is not None]:
        metrics["imbalance"] = jnp.max(jnp.stack(imbalances))
    return TrainState(state.step + 1, model, opt_state), metrics


def balance(model: M3, loads: list[Float[Array, "L E"] | None], rate: float) -> M3:
    """Move each routing bias against its expert's load, which balances the choice of experts without a loss term.

    Args:
      model: not changed.
      loads: per stack, as a loss measures them.
      rate: how far a bias moves; afterwards the biases of a layer are shifted to mean 0, which changes no choice.

    Source: auxiliary-loss-free balancing, which `e_score_correction_bias` is the trace of.
    """
    model = jax.tree.map(lambda p: p, model)
    for stack, load in zip(model.stacks, loads, strict=True):
        if load is not None:
            bias = stack.mlp.e_score_correction_bias
            moved = bias[...] + rate * jnp.sign(1.0 / load.shape[-1] - load)
            stack.mlp.e_score_correction_bias = type(bias)(moved - jnp.mean(moved, axis=-1, keepdims=True))
    return model


def cast_weights(model: M3, dtype: str) -> M3:
    """Cast the weights as a checkpoint stores them: router and patch embedding keep their own dtype.

    None may be in MXFP8.
    """
    keep = lambda name: name.endswith((".gate", ROUTING_BIAS, "patch_embedding"))
    return map_names(lambda name, leaf: leaf if keep(name) else leaf.astype(dtype), model)
