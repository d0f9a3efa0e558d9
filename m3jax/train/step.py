"""One training step: losses, gradients, optimiser, and the balancing of the router."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Int, PyTree

from m3jax.config import M3Config
from m3jax.model import M3
from m3jax.model.context import Context
from m3jax.train.fused import fuse
from m3jax.train.losses import index_kl, kept_loss, next_token_loss
from m3jax.train.pictures.features import Naming, Pictures, naming_loss, picture_features

# Names of parameters: the tower and the projector, and what moves the router's choice.
VISION, ROUTING_BIAS = "vision.", "e_score_correction_bias"


@dataclass(frozen=True)
class TrainOptions:
    """What a step does besides predicting the next token.

    Attributes:
      compute_dtype: activations and weights of the forward pass; the master weights stay float32.
      kl_weight: weight of the index loss; 0 leaves it out.
      kl_stride: every how many queries the index loss looks at, from a random offset.
      recall_weight: extra weight of the targets that are recalled values.
      naming_weight: weight of `naming_loss`, where a batch has what pictures show.
      balance_rate: step of the routing bias towards equal expert loads; 0 leaves the biases as they are.
      remat: recompute activations in the backward pass.
      fused: attention by `m3jax.train.fused`, for rows without padding; otherwise by the model's schedule.
    """

    compute_dtype: str = "bfloat16"
    kl_weight: float = 1.0
    kl_stride: int = 8
    recall_weight: float = 0.0
    naming_weight: float = 1.0
    balance_rate: float = 1e-3
    remat: bool = True
    fused: bool = False


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
) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm, for all but the parameters that are not the optimiser's.

    Norms and biases are not decayed. The routing biases are not the optimiser's: `balance` alone moves them.

    Args:
      learning_rate: by step, of the text model.
      weight_decay: of AdamW.
      frozen_index: leave the index branch out. For training without the index loss: a gradient of zero would not
        keep weight decay from moving it (T32).
      vision_rate: by step, of the tower and the projector, which are clipped by a norm of their own; None is
        `learning_rate`.
      frozen_text: leave all of the text model as it is, to the bit.
    """

    def group(name: str) -> str:
        if name.startswith(VISION):
            return "vision"
        is_frozen = frozen_text or name.endswith(ROUTING_BIAS) or (frozen_index and ".index_" in name)
        return "freeze" if is_frozen else "text"

    decayed = partial(_map_names, lambda name, leaf: "norm" not in name and not name.endswith("bias"))

    def adamw(rate: optax.Schedule) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-10, weight_decay=weight_decay, mask=decayed),
        )

    groups = {"text": adamw(learning_rate), "vision": adamw(vision_rate or learning_rate)}
    return optax.multi_transform(
        groups | {"freeze": optax.set_to_zero()}, partial(_map_names, lambda name, leaf: group(name))
    )


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
    model = cast_weights(model, "float32")
    if model.mesh is None:
        everywhere = SingleDeviceSharding(*model.embed_tokens[...].devices())
    else:
        everywhere = NamedSharding(model.mesh, PartitionSpec())
    place = lambda x: jax.device_put(x, x.sharding if x.ndim else everywhere, may_alias=False)
    return jax.tree.map(place, TrainState(jnp.int32(0), model, optimizer.init(model)))


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


def losses(
    model: M3,
    batch: dict[str, Array | Pictures | Naming],
    offset: Int[Array, ""],
    options: TrainOptions,
    teacher: M3 | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The training loss of one batch and its parts.

    Args:
      model: float32 master weights; its schedule says whether attention is dense or sparse.
      batch: tokens [B T+1], weights and recall [B T]; "pictures" where some tokens stand for them, and "naming" where
        the tower is to learn what they show.
      offset: first query of the index loss, below `options.kl_stride`.
      options: weights of the parts.
      teacher: whose predictions are to be kept where the batch's "kept" [B T] says so: a target there is the teacher's
        distribution, not the one token that followed. None takes the tokens everywhere, as a batch without "kept" does.

    Returns:
      (loss, {"lm", "recall", "kl", "loads"}), losses in nats: lm with the batch's weights and the extra weight of
      recalled values, recall of those values alone, kl the mean over sparse layers. loads is a list over stacks of
      [L E], the share of routed pairs that each expert got; None where the MLP is dense. A batch with "naming" has
      "naming" too.
    """
    check_trainable(model)
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    probe = partial(_layer_measures, config=model.config, offset=offset, options=options)
    compute_model = cast_weights(model, options.compute_dtype)
    compute_model = fuse(compute_model) if options.fused else compute_model
    features, embeddings = None, None
    if "pictures" in batch:
        features = picture_features(compute_model, batch["pictures"])  # [S R D]
        places = batch["pictures"].places.reshape(-1)
        embeddings = compute_model.embed(tokens, features.reshape(-1, features.shape[-1]), places)
    x, _, stacks = compute_model.trunk(tokens, embeddings=embeddings, probe=probe, remat=options.remat)
    logits = compute_model.unembed(compute_model.final_norm(x))  # [B T V]
    weights = batch["weights"] * (1.0 + options.recall_weight * batch["recall"])
    if teacher is None or "kept" not in batch:
        lm = next_token_loss(logits, targets, weights)
    else:
        teacher = cast_weights(teacher, options.compute_dtype)
        hidden, _, _ = (fuse(teacher) if options.fused else teacher).trunk(tokens)
        expected = jax.lax.stop_gradient(teacher.unembed(teacher.final_norm(hidden)))
        lm = kept_loss(logits, targets, weights, expected, batch["kept"])
    recall = next_token_loss(jax.lax.stop_gradient(logits), targets, batch["recall"].astype(logits.dtype))
    layer_kls = [measures["kl"] for measures in stacks if "kl" in measures]  # [L] of each sparse stack
    kl = sum(jnp.sum(kls) for kls in layer_kls) / max(1, sum(kls.shape[0] for kls in layer_kls))
    loads = [measures.get("load") for measures in stacks]
    parts = {"lm": lm, "recall": recall, "kl": jnp.asarray(kl, jnp.float32), "loads": loads}
    # Rows of pictures are short: nearly all blocks are selected there, and which are says little.
    loss = lm if "pictures" in batch else lm + options.kl_weight * parts["kl"]
    if features is not None and "naming" in batch:
        parts["naming"] = naming_loss(features, compute_model.embed_tokens[...], batch["naming"])
        loss = loss + options.naming_weight * parts["naming"]
    return loss, parts


@partial(jax.jit, static_argnames=("optimizer", "options"), donate_argnames="state")
def train_step(
    state: TrainState,
    batch: dict[str, Array | Pictures | Naming],
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
    teacher: M3 | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step.

    Args:
      state: donated.
      batch: as for `losses`.
      optimizer: from `make_optimizer`; static, so make it once.
      options: static.
      teacher: as for `losses`; not donated.

    Returns:
      (new state, metrics): lm, recall, kl and naming as from `losses`, grad_norm before clipping, and imbalance, the
      load of the busiest expert of any layer relative to an equal share (in a model with experts).
    """
    offset = jax.random.randint(jax.random.fold_in(jax.random.key(0), state.step), (), 0, options.kl_stride)
    grads, parts = jax.grad(losses, has_aux=True)(state.model, batch, offset, options, teacher)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.model)
    model = optax.apply_updates(state.model, updates)
    if options.balance_rate:
        model = balance(model, parts["loads"], options.balance_rate)
    measured = [name for name in ("lm", "recall", "kl", "naming") if name in parts]
    metrics = {name: parts[name] for name in measured} | {"grad_norm": optax.tree.norm(grads)}
    if imbalances := [jnp.max(load) * load.shape[-1] for load in parts["loads"] if load is not None]:
        metrics["imbalance"] = jnp.max(jnp.stack(imbalances))
    return TrainState(state.step + 1, model, opt_state), metrics


def balance(model: M3, loads: list[Float[Array, "L E"] | None], rate: float) -> M3:
    """Move each routing bias against its expert's load, which balances the choice of experts without a loss term.

    Args:
      model: not changed.
      loads: per stack, as from `losses`.
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


def _layer_measures(
    values: dict[str, Array], context: Context, config: M3Config, offset: Int[Array, ""], options: TrainOptions
) -> dict[str, Array]:
    """What the losses need of one layer: "kl", its index loss, and "load" [E], each expert's share of the pairs."""
    measures = {}
    if "index_q" in values and options.kl_weight:
        stride, length = options.kl_stride, context.positions.shape[1]
        queries = offset + jnp.arange(length // stride, dtype=jnp.int32) * stride
        pick_queries = lambda x, axis=1: jnp.take(x, queries, axis=axis)
        measures["kl"] = index_kl(
            pick_queries(values["q"]),
            values["k"],
            pick_queries(values["index_q"]),
            values["index_k"],
            blocks=pick_queries(values["blocks"], 2) if "blocks" in values else None,
            positions=pick_queries(context.positions),
            lengths=context.lengths,
            block_size=config.index_block_size,
        )
    if "expert_ids" in values:
        counts = jnp.bincount(values["expert_ids"].reshape(-1), length=config.num_local_experts)
        measures["load"] = counts / values["expert_ids"].size
    return measures


def cast_weights(model: M3, dtype: str) -> M3:
    """The weights in another dtype, as a checkpoint stores them: router and patch embedding keep their own.

    None may be in MXFP8.
    """
    keep = lambda name: name.endswith((".gate", ROUTING_BIAS, "patch_embedding"))
    return _map_names(lambda name, leaf: leaf if keep(name) else leaf.astype(dtype), model)


def _map_names(fn: Callable[[str, Array], object], tree: PyTree) -> PyTree:
    """Map over leaves with their attribute path, as in "stacks.0.mlp.gate"."""

    def apply(path, leaf):
        entries = (getattr(p, "name", getattr(p, "key", getattr(p, "idx", ""))) for p in path)
        return fn(".".join(map(str, entries)).removesuffix(".value"), leaf)

    return jax.tree_util.tree_map_with_path(apply, tree)
