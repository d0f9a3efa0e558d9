"""Speculative decoding: who proposes tokens, and which of them the target keeps. The loop is in `device.rounds`."""

from m3jax.decoding.speculation.drafter import MAX_DRAFT_TOKENS, Drafter
from m3jax.decoding.speculation.eagle3 import Eagle3Drafter
from m3jax.decoding.speculation.prompt_lookup import PromptLookup

__all__ = ["MAX_DRAFT_TOKENS", "Drafter", "Eagle3Drafter", "PromptLookup"]
