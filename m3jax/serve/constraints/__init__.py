"""Constraints on what the model may say, as grammars by llguidance; forced tool calls in M3's own syntax."""

from m3jax.serve.constraints.guides import Constraints
from m3jax.serve.constraints.tool_calls import tool_grammar

__all__ = ["Constraints", "tool_grammar"]
