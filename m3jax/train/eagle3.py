"""Training an EAGLE3 draft: on the target's own continuations, with the draft steps unrolled (training-time test)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3
from m3jax.model.eagle3 import Eagle3
from m3jax.numerics import einsum
from m3jax.train.corpus import Corpus

STEP_WEIGHT = 0.8  # of a draft step's loss, relative to the step before


class DraftState(NamedTuple):
    """Everything that a run goes on from: the step, float32 weights, the optimiser."""

    step: Int[Array, ""]
    draft: Eagle3
    opt_state: optax.OptState


def continuations(
    model: M3, corpus: Corpus, count: int, length: int, temperatures: tuple[float, ...], seed: int, batch: int
) -> Int[np.ndarray, "R T"]:
    """What a target writes after beginnings of code, beginnings included.

    Args:
      model: the target.
      corpus: where the beginnings come from: a sixteenth to a half of a row each.
      count: R rows.
      length: T tokens of a row.
      temperatures: of the rows in turn; 0 is greedy.
      seed: of beginnings and draws.
      batch: rows that decode together.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-length // model.config.index_block_size)
    rows_a_call = min(batch, 128)
    engine = Engine(
        model, pages=batch * blocks, max_batch=batch, prefill_chunk=length // 2, prefill_rows=rows_a_call,
        max_length=blocks * model.config.index_block_size, steps_per_call=64, prefix_cache=False,
    )  # fmt: skip
    handles = []
    for row in range(count):
        size = int(rng.integers(max(1, length // 16), length // 2 + 1))
        start = corpus.draw_start(rng, size)
        sampling = Sampling(temperature=temperatures[row % len(temperatures)], seed=row)
        asked = Params(max_new_tokens=length - size, sampling=sampling)
        handles.append((engine.add(corpus.tokens[start : start + size].tolist(), asked), start, size))
    results = engine.run()
    rows = [[*corpus.tokens[start : start + size], *results[handle].tokens] for handle, start, size in handles]
    return np.asarray(rows, np.int32)


def draft_losses(
    draft: Eagle3, taps: Float[Array, "B T A D"], logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], model: M3,
    steps: int,
) -> tuple[Float[Array, " S"], Float[Array, " S"]]:  # fmt: skip
    """Cross-entropy to the target's distribution after each of the unrolled draft steps, and how often both agree.

    Step j of the chain that begins at position t goes with the token at t + j + 1, at position t + j. It sees what the
    draft made of the target's own features up to t, and the steps of its chain: as it will when it drafts.

    Args:
      draft: shares the target's embedding or head where it has none.
      taps: of the target, on these tokens.
      logits: the target's, after each token.
      tokens: right from the first position on, without padding.
      model: the target.
      steps: S, draft steps.

    Returns:
      (losses in nats, share of positions where the most probable tokens are the same), one a step.
    """
    feature = draft.features(taps)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    past, losses, agreements = [], [], []
    one = jax.checkpoint(partial(_chain_step, draft, model))
    for step in range(steps):
        ahead = lambda x, step=step: jnp.roll(x, -(step + 1), axis=1)
        feature, found, past = one(feature, ahead(tokens), positions + step, past)
        valid = positions < tokens.shape[1] - step - 1
        target = ahead(logits)
        cross = -jnp.sum(jax.nn.softmax(target) * jax.nn.log_softmax(found), axis=-1)
        agree = jnp.argmax(target, axis=-1) == jnp.argmax(found, axis=-1)
        mean = lambda x, valid=valid: jnp.sum(jnp.where(valid, x, 0)) / jnp.sum(valid)
        losses.append(mean(cross))
        agreements.append(mean(agree.astype(cross.dtype)))
    return jnp.stack(losses), jnp.stack(agreements)


def _chain_step(draft, model, feature, tokens, positions, past):
    """(features of the next step, logits, keys and values of all steps so far) of every position's chain."""
    x, residual = draft.inputs(feature, tokens, model.embed_tokens[...])
    new = draft.project(x, positions)
    past = [*past, (new["k"], new["v"])]
    output = draft.outputs(_chain_attention(new["q"], past), residual)
    return draft.recur(output), draft.logits(output, model.lm_head[...]), past


def _chain_attention(q, past):
    """Queries [B T N H] over the first step's keys up to their own, and over the later steps' of their own chain."""
    batch, length, _, width = q.shape
    (k, v), chain = past[0], past[1:]
    rows = q.reshape(batch, length, k.shape[2], -1, width)
    far = einsum("btkgh,bskh->bkgts", rows, k)
    far = jnp.where(jnp.tril(jnp.ones((length, length), bool)), far, -jnp.inf)
    near = [einsum("btkgh,btkh->bkgt", rows, k)[..., None] for k, _ in chain]
    weights = jax.nn.softmax(jnp.concatenate([far, *near], axis=-1) * width**-0.5, axis=-1).astype(q.dtype)
    out = einsum("bkgts,bskh->btkgh", weights[..., :length], v)
    for step, (_, v) in enumerate(chain):
        out += einsum("bkgt,btkh->btkgh", weights[..., length + step], v)
    return out.reshape(q.shape).astype(q.dtype)


def init_draft_state(draft: Eagle3, optimizer: optax.GradientTransformation) -> DraftState:
    """A state at step 0 with float32 weights."""
    draft = jax.tree.map(lambda x: x.astype(jnp.float32), draft)
    return DraftState(jnp.int32(0), draft, optimizer.init(draft))


@partial(jax.jit, static_argnames=("optimizer", "steps", "dtype"), donate_argnames="state")
def draft_train_step(
    state: DraftState,
    model: M3,
    tokens: Int[Array, "B T"],
    optimizer: optax.GradientTransformation,
    steps: int,
    dtype: str = "bfloat16",
) -> tuple[DraftState, dict[str, Array]]:
    """One optimiser step on rows of a target's tokens.

    Args:
      state: donated.
      model: the target, which is not trained.
      tokens: rows without padding.
      optimizer: static, so make it once.
      steps: draft steps that are unrolled.
      dtype: that the draft computes in.

    Returns:
      (new state, {"loss": nats, "agreement": of each draft step, "grad_norm"}).
    """
    hidden, taps, _ = model.tapped(tokens, state.draft.config.taps)
    logits = model.unembed(hidden)

    def loss(draft):
        compute = jax.tree.map(lambda x: x.astype(dtype), draft)
        losses, agreement = draft_losses(compute, taps, logits, tokens, model, steps)
        weights = STEP_WEIGHT ** jnp.arange(steps)
        return jnp.sum(losses * weights) / jnp.sum(weights), agreement

    (value, agreement), grads = jax.value_and_grad(loss, has_aux=True)(state.draft)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.draft)
    metrics = {"loss": value, "agreement": agreement, "grad_norm": optax.tree.norm(grads)}
    return DraftState(state.step + 1, optax.apply_updates(state.draft, updates), opt_state), metrics


def draft_optimizer(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm; norms are not decayed."""
    decayed = lambda draft: jax.tree.map(lambda x: x.ndim > 1, draft)
    adamw = optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.01, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)
