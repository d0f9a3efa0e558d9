"""Perplexity of texts, by file and by the number of tokens that the model has seen before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from m3jax.evaluate.reading import Reading, token_scores
from m3jax.model import M3


@dataclass(frozen=True)
class Text:
    """A text whose tokens a model predicts.

    Attributes:
      name: of its file.
      tokens: its ids, the BOS id first where the tokenizer has one.
      num_bytes: UTF-8 bytes of the text of all tokens but the first.
    """

    name: str
    tokens: Int[np.ndarray, " T"]
    num_bytes: int


def perplexity(model: M3, texts: Sequence[Text], context: int, skip: int, how: Reading | None = None) -> dict[str, Any]:
    """Return the loss, perplexity and top-1 accuracy of a model on texts.

    Args:
      model: any M3.
      texts: two tokens or more each.
      context: tokens that are read at once; a longer text is read in windows (`windows`).
      skip: tokens of each window but a text's first that are context alone.
      how: sizes and dtypes.

    Returns:
      "tokens" counted, "loss" (mean, nats a token) and "standard_error" of it, "perplexity", "bits_per_byte",
      "top1" (share of tokens that were the most probable one); "files", the same of each, and "by_position", the loss
      by how many tokens of its window a prediction had before it: from, to, tokens, loss.

    Raises:
      ValueError: sizes that cannot be.
    """
    if not 0 <= skip < context:
        raise ValueError(f"skip = {skip}: of a window of {context} tokens it must be 0 to {context - 1}")
    places = [(i, *window) for i, text in enumerate(texts) for window in windows(len(text.tokens), context, skip)]
    scores = token_scores(model, [texts[i].tokens[start : end + 1] for i, start, end, _ in places], how)
    losses: list[list] = [[] for _ in texts]
    hits: list[list] = [[] for _ in texts]
    seen: list[list] = [[] for _ in texts]
    for (i, start, end, counted), (loss, is_best) in zip(places, scores, strict=True):
        losses[i].append(loss[counted - start :])
        hits[i].append(is_best[counted - start :])
        seen[i].append(np.arange(counted, end) - start + 1)
    joined = [tuple(np.concatenate(part) for part in parts) for parts in zip(losses, hits, seen, strict=True)]
    files = {text.name: _summary(loss, hit, text.num_bytes) for text, (loss, hit, _) in zip(texts, joined, strict=True)}
    loss, hit, before = (np.concatenate(part) for part in zip(*joined, strict=True))
    whole = _summary(loss, hit, sum(text.num_bytes for text in texts))
    return whole | {"files": files, "by_position": _by_position(loss, before)}


def windows(num_tokens: int, context: int, skip: int) -> list[tuple[int, int, int]]:
    """Return the parts of a text that a model reads, each alone, so that each token but the first is predicted once.

    Args:
      num_tokens: of the text.
      context: tokens that the model reads at most.
      skip: the number of these, in all windows but the first, that serve as context alone.

    Returns:
      (first token read, end of what is read, first position that counts) of each window. Position p predicts token
      p + 1, so what is read ends before the last token.
    """
    spans, counted = [], 0
    while counted < num_tokens - 1:
        start = max(0, counted - skip)  # reads the last `skip` tokens again, as context
        end = min(start + context, num_tokens - 1)
        spans.append((start, end, counted))
        counted = end
    return spans


def _summary(loss: Float[np.ndarray, " X"], hit: Bool[np.ndarray, " X"], num_bytes: int) -> dict[str, Any]:
    """Return the figures of some tokens: mean loss and its error, perplexity, bits per byte, and top-1 accuracy."""
    mean, count = float(np.mean(loss)), len(loss)
    return {
        "tokens": count,
        "loss": mean,
        "standard_error": float(np.std(loss, ddof=1) / np.sqrt(count)) if count > 1 else None,
        "perplexity": float(np.exp(mean)),
        "bits_per_byte": float(np.sum(loss) / np.log(2) / num_bytes) if num_bytes else None,
        "top1": float(np.mean(hit)),
    }


def _by_position(loss: Float[np.ndarray, " X"], seen: Int[np.ndarray, " X"]) -> list[dict[str, Any]]:
    """Return the mean loss by tokens seen before: 1, 2, 3 to 4, 5 to 8, and so on; empty intervals are left out."""
    spans, first, last = [], 1, 1
    while first <= seen.max():
        inside = (seen >= first) & (seen <= last)
        if inside.any():
            spans.append({"from": first, "to": last, "tokens": int(inside.sum()), "loss": float(loss[inside].mean())})
        first, last = last + 1, 2 * last
    return spans


def perplexity_table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the figures as lines of a table, a column for each result."""
    per_cent = lambda share: f"{share:.1%}"
    number = lambda digits: lambda x: "" if x is None else f"{x:,.{digits}f}"
    shown = {"perplexity": number(3), "loss": number(4), "standard_error": number(4), "bits_per_byte": number(4),
             "top1": per_cent, "tokens": number(0)}  # fmt: skip
    names = {"loss": "loss, nats a token", "standard_error": "its standard error", "bits_per_byte": "bits a byte",
             "top1": "most probable token right", "tokens": "tokens counted"}  # fmt: skip
    lines = [[names.get(key, key), *(show(result[key]) for result in results)] for key, show in shown.items()]
    for name in results[0]["files"]:
        spans = [result["files"].get(name) for result in results]
        lines.append([f"  {name}", *("" if each is None else number(3)(each["perplexity"]) for each in spans)])
    by_position = [{each["to"]: each["loss"] for each in result["by_position"]} for result in results]
    for last in sorted(set().union(*by_position)):
        name = f"  loss after {f'{last // 2 + 1:,} to ' if last > 2 else ''}{last:,} tokens"
        lines.append([name, *(number(4)(losses.get(last)) for losses in by_position)])
    return lines
