"""Speculative decoding: the drafters, and the rule by which the target keeps tokens; its loop is `device.rounds`."""

from m3jax.decoding.speculation.drafter import MAX_DRAFT_TOKENS, Drafter
from m3jax.decoding.speculation.eagle3 import Eagle3Drafter
from m3jax.decoding.speculation.prompt_lookup import PromptLookup

__all__ = ["MAX_DRAFT_TOKENS", "Drafter", "Eagle3Drafter", "PromptLookup"]
