"""The sampling rule in NumPy."""

import numpy as np

from m3jax.decoding import Sampling


def reference(logits: np.ndarray, s: Sampling, seen: np.ndarray | None = None) -> np.ndarray:
    """Probabilities of one row, in float64, with the definition written as loops over sorted ids."""
    x = logits.astype(np.float64)
    if seen is not None and s.repetition_penalty:
        x = np.where(seen, np.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty), x)
    if s.temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    p = np.exp((x - x.max()) / s.temperature)
    kept = order[: s.top_k] if s.top_k else order
    if s.top_p is not None and s.top_p < 1:
        total, mass, prefix = p[kept].sum(), 0.0, []
        for i in kept:
            if mass / total >= s.top_p:
                break
            prefix.append(i)
            mass += p[i]
        kept = prefix
    if s.min_p:
        kept = [i for i in kept if p[i] >= s.min_p]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()
