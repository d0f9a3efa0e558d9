"""Experts and blocks that a call is given in place of its own choice: a record, played again."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from m3jax.config import M3Config
from m3jax.execution.validity import are_blocks, are_experts, is_token

NAMES = ("expert_ids", "blocks")


class LayerChoices(NamedTuple):
    """The choices that layers are given, as they compute with them; None where a layer chooses for itself.

    Attributes:
      expert_ids: [L B T A] of a stack's layers, [B T A] of one.
      blocks: [L B K T J] of a stack's layers, [B K T J] of one.
    """

    expert_ids: Int[Array, "... B T A"] | None = None
    blocks: Int[Array, "... B K T J"] | None = None


@struct.dataclass
class Choices:
    """The experts and the blocks that each token of a call takes, in all layers that choose.

    A token's experts are given if the first id is not -1, else its router chooses; the same for its blocks. Given
    experts are weighed by the router's own scores, which have a gradient; the ids have none. Their order is kept: the
    sum over a token's experts is made in it.

    Attributes:
      expert_ids: of the layers that have experts, in their order, A ids each; None where no token's are given.
      blocks: of the sparse layers, ascending, then -1 (`m3jax.msa.select_blocks`); None where no token's are given.
    """

    expert_ids: Int[Array, "B T L A"] | Int[np.ndarray, "B T L A"] | None = None
    blocks: Int[Array, "B T L K J"] | Int[np.ndarray, "B T L K J"] | None = None

    @classmethod
    def of_records(
        cls, records: Mapping[str, Int[np.ndarray, "X L ..."]], prompt_tokens: int, length: int | None = None
    ) -> "Choices":
        """Return the choices that drew a request's new tokens, for a call over its prompt and these tokens.

        New token i was drawn from the logits at position prompt_tokens - 1 + i: that position is given its choices.
        Tokens of the prompt before it, and the newest token, choose for themselves.

        Args:
          records: X new tokens' of one request, by name (`m3jax.decoding.Generation.records`).
          prompt_tokens: tokens of its prompt.
          length: T, columns of the call; by default as many as the request has tokens.

        Returns:
          A batch of one row.

        Raises:
          ValueError: a record of no choice, or more new tokens than columns.
        """
        choices = {}
        for name, record in records.items():
            if name not in NAMES:
                raise ValueError(f"records has {name!r}: choices are {', '.join(NAMES)}")
            columns = prompt_tokens + len(record) if length is None else length
            if prompt_tokens < 1 or prompt_tokens - 1 + len(record) > columns:
                raise ValueError(
                    f"{len(record)} new tokens behind {prompt_tokens} of the prompt do not fit into {columns} columns"
                )
            given = np.full((1, columns, *record.shape[1:]), -1, np.int32)
            given[0, prompt_tokens - 1 : prompt_tokens - 1 + len(record)] = record
            choices[name] = given
        return cls(**choices)

    def of_layers(self, config: M3Config, first: int, depth: int) -> LayerChoices:
        """Return the choices of some layers with the layer axis first, as a scan over them wants it.

        Args:
          config: says which layers choose.
          first: the first of these layers, among all.
          depth: how many there are, of one kind.
        """
        of_kind = lambda flags: (sum(flags[:first]), flags[first])
        experts_before, has_experts = of_kind(
            [stack.is_moe for stack in config.stacks for _ in range(stack.num_layers)]
        )
        blocks_before, is_sparse = of_kind(
            [stack.is_sparse for stack in config.stacks for _ in range(stack.num_layers)]
        )
        expert_ids = blocks = None
        if self.expert_ids is not None and has_experts:
            own = jnp.asarray(self.expert_ids, jnp.int32)[:, :, experts_before : experts_before + depth]
            expert_ids = jnp.moveaxis(own, 2, 0)  # [B T L A] -> [L B T A]
        if self.blocks is not None and is_sparse:
            own = jnp.asarray(self.blocks, jnp.int32)[:, :, blocks_before : blocks_before + depth]
            blocks = jnp.transpose(own, (2, 0, 3, 1, 4))  # [B T L K J] -> [L B K T J]
        return LayerChoices(expert_ids, blocks)

    def find_problem(
        self, config: M3Config, positions: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"]
    ) -> str | None:
        """Return what is wrong with choices that a model could not have made, in one line; None if nothing is.

        Args:
          config: of the model that is given them.
          positions, lengths: of the call; choices of padding are not looked at.
        """
        of_token = is_token(positions, lengths)[..., None]  # [B T 1]
        if self.expert_ids is not None:
            ids, count = np.asarray(self.expert_ids), config.num_local_experts
            is_wrong = ~are_experts(ids, count) & of_token & (ids[..., 0] != -1)  # [B T L]
            if is_wrong.any():
                row, column, layer = (int(i) for i in np.argwhere(is_wrong)[0])
                return (
                    f"choices.expert_ids[{row}, {column}, {layer}] = {ids[row, column, layer].tolist()}: give distinct "
                    f"ids from 0 to {count - 1}, or -1 first for the router's own choice"
                )
        if self.blocks is not None:
            blocks, own_block = np.asarray(self.blocks), positions // config.index_block_size
            is_valid = are_blocks(blocks, own_block[:, :, None, None])  # [B T L K]
            is_wrong = ~is_valid & of_token[..., None] & (blocks[..., 0] != -1)
            if is_wrong.any():
                row, column, layer, head = (int(i) for i in np.argwhere(is_wrong)[0])
                return (
                    f"choices.blocks[{row}, {column}, {layer}, {head}] = {blocks[row, column, layer, head].tolist()}: "
                    f"give ascending ids up to the token's own block {own_block[row, column]}, which is always among "
                    "them, then -1; or -1 first for the layer's own choice"
                )
        return None


def join_choices(
    name: str, runs: Sequence[Mapping[str, Int[Array, "L ..."]]], config: M3Config, batch: int, length: int
) -> Int[Array, "B T L ..."]:
    """Return the choices of all layers in the layout of `Choices`.

    Args:
      name: Name of the choice, "expert_ids" or "blocks".
      runs: Values of consecutive layers by name, stacked over the layers of each run.
      config: The model's configuration.
      batch: Number of rows.
      length: Number of tokens per row.
    """
    of_runs = [values[name] for values in runs if name in values]  # [L B T A] or [L B K T J]
    if not of_runs:
        return jnp.zeros(shapes_of(config, batch, length)[name], jnp.int32)
    return jnp.transpose(jnp.concatenate(of_runs), (1, 2, 0, 3) if name == "expert_ids" else (1, 3, 0, 2, 4))


def shapes_of(config: M3Config, batch: int, length: int) -> dict[str, tuple[int, ...]]:
    """Return the shape that each kind of choice has for B rows of T tokens: [B T L A] and [B T L K J]."""
    moe_layers = sum(stack.num_layers for stack in config.stacks if stack.is_moe)
    sparse_layers = sum(stack.num_layers for stack in config.stacks if stack.is_sparse)
    return {
        "expert_ids": (batch, length, moe_layers, config.num_experts_per_tok),
        "blocks": (batch, length, sparse_layers, config.num_key_value_heads, config.index_topk_blocks),
    }
