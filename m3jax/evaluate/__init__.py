"""Evaluation: measurements of a model, with the meaning of each figure in docs/evaluate.md."""
