"""Evaluation: what is measured of a model, and what each figure means (docs/evaluate.md)."""
