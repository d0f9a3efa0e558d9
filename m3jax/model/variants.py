"""The model with the same parameters and another function or another way to compute it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from flax import nnx

from m3jax.cache import CallPages
from m3jax.config import M3Config
from m3jax.execution import Compute, take_apart
from m3jax.make import Frozen
from m3jax.msa import SCHEDULES
from m3jax.msa.checks import check_score
from m3jax.mxfp8 import with_activations
from m3jax.ops import check_backend_name, check_schedule


class WithVariants(nnx.Module):
    """A model whose `with_` methods return copies that share its parameters."""

    config: M3Config
    dense: bool
    score: str
    compute: Compute
    stacks: nnx.List

    def with_schedule(self, schedule: str) -> "Self":
        """Return the model with the same parameters under another schedule.

        Args:
          schedule: "auto", or one of `m3jax.msa.SCHEDULES`.

        Raises:
          ValueError: an unknown one.
        """
        if schedule == "dense":
            raise ValueError("schedule = 'dense': attention to every block is another function; use with_dense()")
        check_schedule(schedule, SCHEDULES)
        return self._computed(schedule=schedule)

    def with_backend(self, backend: str) -> "Self":
        """Return the model with the same parameters on another backend.

        Args:
          backend: one of `m3jax.ops.BACKENDS`.

        Raises:
          ValueError: an unknown one.
        """
        check_backend_name(backend)
        return self._computed(backend=backend)

    def with_dense(self, dense: bool = True) -> "Self":
        """Return the model attending to every block, without selection, as in the dense warm-up of training.

        The parameters are the same, but that is another function: a model trained sparse does not work dense (T18).

        Args:
          dense: False selects again.
        """
        return self._with(dense=dense)

    def with_score(self, score: str) -> "Self":
        """Return the model with the same parameters and blocks that are scored in another way.

        Args:
          score: Score of a block, "max" or "lse" (`m3jax.msa.SelectionRules`).

        Raises:
          ValueError: An unknown score.
        """
        check_score(score)
        return self._with(score=score)

    def with_invariance(self, invariant: bool = True) -> "Self":
        """Return the model in its invariant mode: a token's own row alone decides the order of its sums.

        A token's bits are then the same alone and in a batch, in one chunk and in many, in a decode step and among
        proposals, on one backend. `Engine(..., invariant=True)` does the same for whole requests.

        Args:
          invariant: False computes as it is fastest again.
        """
        if not invariant:
            return self._computed(schedule="auto", expert_path="auto", invariant=False)
        return self._computed(schedule="invariant", expert_path="in_fixed_tiles", invariant=True, call_pages=CallPages)

    def with_activations(self, activations: str | None) -> "Self":
        """Return the model with the same MXFP8 weights and products that quantise activations too, or do not.

        With "mxfp8" each token's channels are rounded to MXFP8, in blocks of 32, before they are multiplied by a weight
        in MXFP8. That is another function ("W8A8"): the one of engines on chips that multiply MXFP8 numbers.

        Args:
          activations: "mxfp8", or None for the model's dtype.

        Raises:
          ValueError: something else, or a model whose weights are not in MXFP8.
        """
        if not self.is_mxfp8:
            raise ValueError(f"activations = {activations!r}: no weight is in MXFP8; see m3jax.quantize")
        return with_activations(self, activations)

    @property
    def is_mxfp8(self) -> bool:
        """True if the matrices of linear layers are in MXFP8."""
        return isinstance(self.stacks[0].self_attn.q_proj, Frozen)

    def with_training_paths(self, call_pages: Callable[..., CallPages], expert_path: str) -> "Self":
        """Return the model with calls without a cache computed in other ways, as training wants them.

        Args:
          call_pages: called with block_size in place of `m3jax.cache.CallPages`, for each stack in each call.
          expert_path: "auto", "trained", or one of `m3jax.ops.EXPERT_PATHS`, as of `run_experts`.
        """
        return self._computed(call_pages=call_pages, expert_path=expert_path)

    def with_layers_apart(self, num_rows: int) -> "Self":
        """Return the model with separate parameters for each layer, so that a call does not scan over them.

        For a program that runs many decode steps in a loop, before the loop: what is cut out of the stacks is copied
        once, where a scan copies it in each step. What a kernel reads where it lies stays there, experts too. The
        program grows with the number of layers.

        Args:
          num_rows: tokens of a call.
        """
        how = self.execution(has_cache=True)
        return self._with(stacks=nnx.List([take_apart(stack, how, num_rows, self.dtype) for stack in self.stacks]))

    def _computed(self, **settings: object) -> "Self":
        """Return a copy that shares the parameters, computed in another way."""
        return self._with(compute=replace(self.compute, **settings))

    def _with(self, **fields: object) -> "Self":
        """Return a copy that shares the parameters, with some static fields set."""
        other = copy.copy(self)
        for name, value in fields.items():
            setattr(other, name, value)
        return other
