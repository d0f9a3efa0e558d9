"""Gradients of a batch that is too large for one pass: the sum over its micro-batches, as they go by."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from m3jax.train.step import LossFn


@dataclass(frozen=True)
class Accumulated:
    """The sum of a loss over micro-batches, whose gradient is made beside it: nothing of a micro-batch is held longer.

    The loss has to be a share of the whole batch's, as `SFTLoss` divides by the targets of all micro-batches: then the
    sum weighs each token alike, where a mean of means would weigh each micro-batch alike. For
    `m3jax.train.step.train_step`.

    Attributes:
      loss_fn: of one micro-batch; its metrics are summed too.
      names: entries of a batch that have a leading axis of micro-batches; all others go to each of them as they are.
    """

    loss_fn: LossFn
    names: tuple[str, ...]

    def __call__(self, params: PyTree[Array], batch: Mapping[str, Any]) -> tuple[Float[Array, ""], dict[str, Any]]:
        """Return the loss of all micro-batches, and the sums of its metrics.

        Args:
          params: what is trained.
          batch: as the loss reads it, with one more axis in front of what `names` has.
        """
        micro_batches = {name: batch[name] for name in self.names}
        shared = {name: value for name, value in batch.items() if name not in self.names}
        return _sum_of_micro_batches(self.loss_fn, params, micro_batches, shared)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_micro_batches(loss_fn, params, micro_batches, shared):
    """Return (loss, metrics), summed over the micro-batches."""
    of_each = jax.lax.map(lambda micro_batch: loss_fn(params, {**shared, **micro_batch}), micro_batches)
    return jax.tree.map(partial(jnp.sum, axis=0), of_each)


def _forward(loss_fn, params, micro_batches, shared):
    """Return (loss, metrics), and the gradient, which is the sum of the micro-batches'."""

    def add(total, micro_batch):
        grads, (loss, metrics) = jax.grad(_loss_as_aux, has_aux=True, argnums=1)(loss_fn, params, micro_batch, shared)
        return jax.tree.map(jnp.add, total, grads), (loss, metrics)

    if len(jax.tree.leaves(micro_batches)[0]) == 1:  # a sum of one would hold every gradient twice
        only_one = jax.tree.map(partial(jnp.squeeze, axis=0), micro_batches)
        grads, of_one = jax.grad(_loss_as_aux, has_aux=True, argnums=1)(loss_fn, params, only_one, shared)
        return of_one, grads
    grads, of_each = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micro_batches)
    return jax.tree.map(partial(jnp.sum, axis=0), of_each), grads


def _loss_as_aux(loss_fn, params, micro_batch, shared):
    loss, metrics = loss_fn(params, {**shared, **micro_batch})
    return loss, (loss, metrics)


def _backward(loss_fn, grads, cotangents):
    return jax.tree.map(lambda grad: grad * cotangents[0], grads), None, None


_sum_of_micro_batches.defvjp(_forward, _backward)
