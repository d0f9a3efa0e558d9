"""Comparison of two engines: find the first quantity between tokens and logits that differs (docs/compare.md)."""
