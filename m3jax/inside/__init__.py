"""Looking inside a model: edits of named values, and readings made of edits and captures (docs/inside.md)."""

from m3jax.inside.edits import Add, PatchAt, Put, WithoutBlock, WithoutExpert
from m3jax.inside.readings import (
    attention_weights,
    attributions,
    block_reads,
    choices_of,
    dense_reads,
    direct_logits,
    expert_effects,
    gradients,
    head_logits,
    logit_difference,
    logit_lens,
    patch_effects,
    weights_on,
)

__all__ = [
    "Add",
    "PatchAt",
    "Put",
    "WithoutBlock",
    "WithoutExpert",
    "attention_weights",
    "attributions",
    "block_reads",
    "choices_of",
    "dense_reads",
    "direct_logits",
    "expert_effects",
    "gradients",
    "head_logits",
    "logit_difference",
    "logit_lens",
    "patch_effects",
    "weights_on",
]
