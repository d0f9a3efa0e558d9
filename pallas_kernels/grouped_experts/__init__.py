"""The feed-forward experts of a mixture, each for the tokens that chose it."""

from pallas_kernels.grouped_experts.triton import Config, grouped_experts

__all__ = ["Config", "grouped_experts"]
