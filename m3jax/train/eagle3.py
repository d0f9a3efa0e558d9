"""Training an EAGLE3 draft: on the target's own continuations, with the draft steps unrolled (training-time test)."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from m3jax.decoding import Params, Sampling, build_engine
from m3jax.model import M3
from m3jax.model.eagle3 import Eagle3
from m3jax.numerics import einsum
from m3jax.progress import activity
from m3jax.train.programs import jit_for_training

STEP_WEIGHT = 0.8  # of a draft step's loss, relative to the step before

KeysAndValues = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]  # of one draft step


class DraftState(NamedTuple):
    """Everything that a draft's training goes on from: the step, float32 weights, the optimiser."""

    step: Int[Array, ""]
    draft: Eagle3
    opt_state: optax.OptState


def continuations(
    model: M3,
    beginnings: Sequence[Sequence[int]],
    length: int,
    temperatures: tuple[float, ...],
    batch: int,
    progress: bool = True,
) -> Int[np.ndarray, "R T"]:
    """Return what a target writes after some beginnings, beginnings included.

    Args:
      model: the target.
      beginnings: R rows of token ids, each at most half of a row long.
      length: T tokens of a row.
      temperatures: of the rows in turn; 0 is greedy.
      batch: rows that decode together.
      progress: whether to show how far it is (`m3jax.progress`).

    Returns:
      Token ids.
    """
    engine = build_engine(
        model, rows=batch, length=length, prefill_chunk=length // 2, prefill_rows=min(batch, 128), steps_per_call=64,
        prefix_cache=False, progress=progress,
    )  # fmt: skip
    prompt_of: dict[int, Sequence[int]] = {}
    for row, prompt in enumerate(beginnings):
        sampling = Sampling(temperature=temperatures[row % len(temperatures)], seed=row)
        prompt_of[engine.add(prompt, Params(max_new_tokens=length - len(prompt), sampling=sampling))] = prompt
    texts: dict[int, list[int]] = {}
    with activity(progress) as line:
        while engine.busy:
            for event in engine.step():
                if event.generation is not None:
                    texts[event.handle] = [*prompt_of[event.handle], *event.generation.tokens]
            line.say(f"writing continuations: {len(texts)} of {len(beginnings)}")
    return np.asarray([texts[handle] for handle in prompt_of], np.int32)


def draft_losses(
    draft: Eagle3, taps: Float[Array, "B T A D"], logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], model: M3,
    steps: int, lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, " S"], Float[Array, " S"]]:  # fmt: skip
    """Return the cross-entropy to the target's distribution after each unrolled draft step, and how often both agree.

    Step j of the chain that begins at position t goes with the token at t + j + 1, at position t + j. It sees what the
    draft made of the target's own features up to t, and the steps of its chain: as it will when it drafts.

    Args:
      draft: shares the target's embedding or head where it has none.
      taps: of the target, on these tokens.
      logits: the target's, after each token.
      tokens: right from the first position on.
      model: the target.
      steps: S, draft steps.
      lengths: tokens of each row, behind which there is padding; all of them by default.

    Returns:
      (losses in nats, share of positions where the most probable tokens are the same), one a step.
    """
    features = draft.features(taps)  # [B T D]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    chain_step = jax.checkpoint(partial(_chain_step, draft, model))
    ends = tokens.shape[1] if lengths is None else lengths[:, None]
    past, losses, agreements = [], [], []
    for step in range(steps):
        tokens_ahead = jnp.roll(tokens, -(step + 1), axis=1)
        features, draft_logits, past = chain_step(features, tokens_ahead, positions + step, past)
        target_logits = jnp.roll(logits, -(step + 1), axis=1)  # [B T V]
        cross_entropy = -jnp.sum(jax.nn.softmax(target_logits) * jax.nn.log_softmax(draft_logits), axis=-1)
        agrees = jnp.argmax(target_logits, axis=-1) == jnp.argmax(draft_logits, axis=-1)
        # Padding, and what is rolled in from the front at a row's end, is no target.
        is_target = positions < ends - step - 1
        count = jnp.maximum(jnp.sum(is_target), 1)
        mean = lambda x, is_target=is_target, count=count: jnp.sum(jnp.where(is_target, x, 0)) / count
        losses.append(mean(cross_entropy))
        agreements.append(mean(agrees.astype(cross_entropy.dtype)))
    return jnp.stack(losses), jnp.stack(agreements)


def _chain_step(
    draft: Eagle3, model: M3, features: Float[Array, "B T D"], tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"], past: list[KeysAndValues],
) -> tuple[Float[Array, "B T D"], Float[Array, "B T V"], list[KeysAndValues]]:  # fmt: skip
    """Take one draft step of every position's chain: (next step's features, logits, all steps' keys and values)."""
    x, residual = draft.inputs(features, tokens, model.embed_tokens[...], model.compute)
    projected = draft.project(x, positions)
    past = [*past, (projected["k"], projected["v"])]
    output = draft.outputs(_chain_attention(projected["q"], past), residual)
    return draft.recur(output), draft.logits(output, model.lm_head[...], model.compute), past


def _chain_attention(q: Float[Array, "B T N H"], past: list[KeysAndValues]) -> Float[Array, "B T N H"]:
    """Attend to the first step's keys up to the query's position, and to the later steps' keys of its own chain."""
    batch, length, _, width = q.shape
    (first_k, first_v), chain = past[0], past[1:]
    grouped = q.reshape(batch, length, first_k.shape[2], -1, width)  # [B T K G H]
    first_scores = einsum("btkgh,bskh->bkgts", grouped, first_k)
    # Chain t has seen the target's features up to position t; the later steps are its own draft's, one key a step.
    first_scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), first_scores, -jnp.inf)  # [B K G T T]
    chain_scores = [einsum("btkgh,btkh->bkgt", grouped, k)[..., None] for k, _ in chain]  # each [B K G T 1]
    scores = jnp.concatenate([first_scores, *chain_scores], axis=-1)  # [B K G T T+C]
    weights = jax.nn.softmax(scores * width**-0.5, axis=-1).astype(q.dtype)
    out = einsum("bkgts,bskh->btkgh", weights[..., :length], first_v)  # [B T K G H]
    for step, (_, v) in enumerate(chain):
        out += einsum("bkgt,btkh->btkgh", weights[..., length + step], v)
    return out.reshape(q.shape).astype(q.dtype)


def init_draft_state(draft: Eagle3, optimizer: optax.GradientTransformation) -> DraftState:
    """Return the state of a draft's training at step 0, with float32 weights."""
    draft = jax.tree.map(lambda x: x.astype(jnp.float32), draft)
    return DraftState(jnp.int32(0), draft, optimizer.init(draft))


@partial(jit_for_training, static_argnames=("optimizer", "steps", "dtype"), donate_argnames="state")
def draft_train_step(
    state: DraftState,
    model: M3,
    tokens: Int[Array, "B T"],
    optimizer: optax.GradientTransformation,
    steps: int,
    dtype: str = "bfloat16",
    lengths: Int[Array, " B"] | None = None,
) -> tuple[DraftState, dict[str, Array]]:
    """Take one optimiser step on rows of a target's tokens.

    Args:
      state: donated.
      model: the target, which is not trained.
      tokens: rows, right-padded.
      optimizer: static, so make it once.
      steps: draft steps that are unrolled.
      dtype: that the draft computes in.
      lengths: tokens of each row; all of them by default.

    Returns:
      (new state, {"loss": nats, "agreement": of each draft step, "grad_norm"}).
    """
    out = model.run(tokens, residual_layers=state.draft.config.taps)
    taps, logits = out.residuals, out.logits

    def mean_loss(draft):
        compute_draft = jax.tree.map(lambda x: x.astype(dtype), draft)
        losses, agreement = draft_losses(compute_draft, taps, logits, tokens, model, steps, lengths)
        return _mean_of_steps(losses), agreement

    (loss, agreement), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.draft)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.draft)
    metrics = {"loss": loss, "agreement": agreement, "grad_norm": optax.tree.norm(grads)}
    return DraftState(state.step + 1, optax.apply_updates(state.draft, updates), opt_state), metrics


def _mean_of_steps(losses: Float[Array, " C"]) -> Float[Array, ""]:
    """Return the mean of the losses of C draft steps, in which each counts `STEP_WEIGHT` as much as the one before."""
    step_weights = STEP_WEIGHT ** jnp.arange(len(losses))
    return jnp.sum(losses * step_weights) / jnp.sum(step_weights)


def draft_optimizer(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Return AdamW with clipping by the global norm, for a draft; norms are not decayed."""
    is_decayed = lambda draft: jax.tree.map(lambda x: x.ndim > 1, draft)
    adamw = optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.01, mask=is_decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def refresh_draft(
    draft: Eagle3,
    model: M3,
    rows: Sequence[Sequence[int]],
    *,
    steps: int = 100,
    batch: int = 16,
    unroll: int = 3,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: bool = True,
) -> Eagle3:
    """Return a draft that was trained further, on what its target writes by now, such as a policy that has moved.

    Whatever draft an engine has, its tokens are the target's; one that knows an older target has fewer accepted.

    Args:
      draft: not changed.
      model: the target, as it is served.
      rows: what the target wrote, prompts included, such as `Episode.tokens` of the last rounds.
      steps: of the optimiser.
      batch: rows of a step; each pass over the rows has an order of its own.
      unroll: draft steps that are unrolled.
      learning_rate: of the first step; it falls to 0 as a cosine.
      seed: of the order.
      progress: whether to show how far it is (`m3jax.progress`).

    Returns:
      The draft, in the dtype that it had.

    Raises:
      ValueError: no rows, or one of fewer than two tokens.
    """
    shortest = min(map(len, rows), default=0)
    if shortest < 2:
        raise ValueError(f"{len(rows)} rows, the shortest of {shortest} tokens: give some, of 2 tokens at least")
    lengths = np.array([len(row) for row in rows], np.int32)
    size = model.config.index_block_size
    tokens = np.zeros((len(rows), -(-lengths.max() // size) * size), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    optimizer = draft_optimizer(optax.cosine_decay_schedule(learning_rate, steps))
    state, dtype, rng = init_draft_state(draft, optimizer), draft.dtype, np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(-(-steps * batch // len(rows)))])
    with activity(progress, about=(len(rows), tokens.shape[1], batch, unroll)) as line:
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch]
            state, _ = draft_train_step(
                state, model, jnp.asarray(tokens[chosen]), optimizer, unroll, str(dtype), jnp.asarray(lengths[chosen])
            )
            line.say(f"refreshing the draft: step {step + 1} of {steps}")
    return jax.tree.map(lambda x: x.astype(dtype), state.draft)
