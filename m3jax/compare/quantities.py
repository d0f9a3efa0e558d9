"""Quantities between tokens and logits, by name, in the order in which a model computes them."""

import re
from collections.abc import Iterable
from typing import NamedTuple

# The quantities of each layer. Letters are those of CONTRIBUTING.md; X are all tokens of all prompts, and W is the
# hidden width of the MLP that every token goes through: a dense layer's, or the shared expert's.
_LAYER = {
    "input": "X D", "attention_norm": "X D",
    # before norm and RoPE
    "q_proj": "X N H", "k_proj": "X K H", "v": "X K H", "index_q_proj": "X K I", "index_k_proj": "X I",
    # after the norm, before RoPE
    "q_normed": "X N H", "k_normed": "X K H", "index_q_normed": "X K I", "index_k_normed": "X I",
    "q": "X N H", "k": "X K H", "index_q": "X K I", "index_k": "X I",
    "block_scores": "X K M", "blocks": "X K J", "attention": "X N H", "attention_out": "X D",
    "ffn_input": "X D", "ffn_norm": "X D", "router_logits": "X E", "router_scores": "X E", "expert_ids": "X A",
    "expert_weights": "X A", "gate": "X W", "up": "X W", "ffn_out": "X D", "output": "X D",
}  # fmt: skip
_BEFORE, _AFTER = {"embedding": "X D"}, {"taps": "X C D", "final_norm": "X D", "logits": "X V"}
LAYER_NAMES = tuple(_LAYER)
# The residual stream and the terms that a layer adds to it: an error there propagates to everything after it.
STREAM = ("attention", "attention_out", "ffn_out", "output")
_NAME = re.compile(r"layers\.(\d{1,5})\.(\w+)")


class Quantity(NamedTuple):
    """A named quantity between tokens and logits.

    Attributes:
      name: as in `M3.intermediates`, with the layer before it: "layers.3.blocks".
      axes: a letter for each, tokens first.
      layer: counted from 0; None for a quantity before the first layer or after the last.
      kind: the name without the layer.
    """

    name: str
    axes: tuple[str, ...]
    layer: int | None
    kind: str


def quantity(name: str) -> Quantity | None:
    """Return the quantity of this name; None if there is none."""
    if name in _BEFORE or name in _AFTER:
        return Quantity(name, tuple((_BEFORE | _AFTER)[name].split()), None, name)
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return Quantity(f"layers.{int(match[1])}.{match[2]}", tuple(_LAYER[match[2]].split()), int(match[1]), match[2])


def in_order(names: Iterable[str]) -> list[Quantity]:
    """Return the quantities of these names in the order of computation, each once.

    Args:
      names: of quantities, all of them known.
    """
    kinds = [*_LAYER]

    def place(compared: Quantity) -> tuple[int, int, int]:
        if compared.layer is not None:
            return 1, compared.layer, kinds.index(compared.kind)
        return (0, 0, 0) if compared.kind in _BEFORE else (2, 0, [*_AFTER].index(compared.kind))

    return sorted({name: quantity(name) for name in names}.values(), key=place)
