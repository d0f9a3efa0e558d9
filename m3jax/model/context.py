"""The values that all layers of one call share, and the results of a call."""

from typing import NamedTuple

import jax
from flax import struct
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import Cache, Places
from m3jax.config import M3Config
from m3jax.execution import NO_TAPS, Execution, Taps
from m3jax.model.choices import Choices, LayerChoices
from m3jax.msa import SelectionRules


@struct.dataclass
class Context:
    """Positions, rotary tables and places of one call, what its layers compute, and how.

    Attributes:
      positions: absolute position of each token; < 0 or >= lengths marks padding.
      lengths: valid tokens of each row after this call.
      cos: cosines of each token's angles.
      sin: sines.
      places: where the tokens go in the cache; nowhere in a call without one.
      config: the model's.
      rules: of selection.
      dense: whether sparse layers attend to every block, as in the dense warm-up of training.
      how: what computes the call.
      choices: experts and blocks that the call is given: of all layers, or, layer axis first, of one stack.
      taps: Named values that the call edits and keeps.
    """

    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    places: Places
    config: M3Config = struct.field(pytree_node=False)
    rules: SelectionRules = struct.field(pytree_node=False)
    dense: bool = struct.field(pytree_node=False)
    how: Execution = struct.field(pytree_node=False)
    choices: Choices | LayerChoices | None = None
    taps: Taps = NO_TAPS

    def of_stack(self, index: int, cache: Cache | None) -> "Context":
        """Return the context with what is one stack's own: host memory of its keys, and given choices."""
        context = self
        # The table of pages is one for all stacks; the memory of the host is one for each.
        if cache is not None and cache.host is not None:
            context = context.replace(places=self.places.replace(host=cache.host[index]))
        if self.choices is not None:
            depths = [stack.num_layers for stack in self.config.stacks]
            of_layers = self.choices.of_layers(self.config, sum(depths[:index]), depths[index])
            context = context.replace(choices=of_layers)
        return context

    def given(self, layer: Int[Array, ""]) -> LayerChoices:
        """Return the choices that one layer of the stack is given."""
        return jax.tree.map(lambda of_stack: of_stack[layer], self.choices or LayerChoices())


def selection_rules(config: M3Config, score: str) -> SelectionRules:
    """Return the model's rules of selection, with a score that may be another than the configuration's."""
    return SelectionRules(
        top_k=config.index_topk_blocks, local_blocks=config.index_local_blocks, init_blocks=config.index_init_blocks,
        score=score,
    )  # fmt: skip


class Output(NamedTuple):
    """The results of `M3.run`.

    Attributes:
      logits: Logits in float32 (float64 for a float64 model); None if not requested.
      hidden: Residual stream after the final norm, in the model's dtype; None if the call stops before it.
      cache: The cache with the new tokens; None in a call without one.
      values: Requested values, by full name.
      residuals: Residual stream, before any norm, at the A requested layers; None without any.
      probed: Results of the probe, a list with one item for each stack of layers, stacked over its layers.
    """

    logits: Float[Array, "B T V"] | None
    hidden: Float[Array, "B T D"] | None
    cache: Cache | None
    values: dict[str, Array]
    residuals: Float[Array, "B T A D"] | None
    probed: list[PyTree[Array]]
