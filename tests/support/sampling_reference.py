"""The sampling rule in NumPy."""

from collections.abc import Collection, Sequence

import numpy as np

from m3jax.decoding import Sampling


def edited(
    logits: np.ndarray,
    s: Sampling,
    prompt: Sequence[int] = (),
    new: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    allowed: Collection[int] | None = None,
) -> np.ndarray:
    """Logits of one row after all that acts before the temperature, a token at a time."""
    text, x = [*prompt, *new], logits.astype(np.float64)
    for i in range(len(x)):
        begun = [word for word in s.bad_words or () if text[len(text) - len(word) + 1 :] == list(word[:-1])]
        ends_word = any(word[-1] == i for word in begun)
        if (allowed is not None and i not in allowed) or (i in stop_ids and len(new) < min_tokens) or ends_word:
            x[i] = -np.inf
            continue
        x[i] += dict(s.logit_bias or ()).get(i, 0)
        if i in text and s.repetition_penalty:
            x[i] = x[i] / s.repetition_penalty if x[i] > 0 else x[i] * s.repetition_penalty
        x[i] -= list(new).count(i) * (s.frequency_penalty or 0) + (i in new) * (s.presence_penalty or 0)
    return x


def reference(logits: np.ndarray, s: Sampling, **context) -> np.ndarray:
    """Probabilities of one row, in float64, with the definition written as loops over sorted ids.

    Args:
      logits: of the row.
      s: its settings.
      **context: as in `edited`.
    """
    x = edited(logits, s, **context)
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
