"""Recall of a record's value by its key: the share of exact answers by the depth of the record and prompt length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3jax.evaluate.prompts import KINDS, Haystack, Prompt, recall_prompts
from m3jax.evaluate.reading import Reading, token_scores
from m3jax.model import M3


@dataclass(frozen=True)
class Grid:
    """Prompts of several lengths and depths.

    Attributes:
      kinds: of `prompts.KINDS`.
      lengths: of prompts, in tokens.
      depths: 0 is the beginning of a prompt, 1 its end.
      count: prompts of a length and depth; of "several" each has all depths.
      prompts: (kind, which length, prompt).
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    count: int
    prompts: list[tuple[str, int, Prompt]]

    @classmethod
    def of(
        cls,
        haystack: Haystack,
        kinds: Sequence[str],
        lengths: Sequence[int],
        depths: Sequence[float],
        count: int,
        seed: int,
    ) -> "Grid":
        """Draw a grid's recall prompts.

        Args:
          haystack: in the tokens of the model's tokenizer.
          kinds, lengths, depths, count: as above; each value once.
          seed: of the prompts.

        Raises:
          ValueError: arguments out of range, or a haystack that is too short.
        """
        for name, values in (("kinds", kinds), ("lengths", lengths), ("depths", depths)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} {', '.join(map(str, values))}: give at least one, each once")
        prompts = [
            (kind, i, prompt)
            for kind in kinds
            for i, length in enumerate(lengths)
            for prompt in recall_prompts(haystack, kind, length, depths, count, seed)
        ]
        return cls(tuple(kinds), tuple(lengths), tuple(depths), count, prompts)


def recall(model: M3, grid: Grid, how: Reading | None = None) -> dict[str, Any]:
    """Return the share of questions that a model answers exactly, by length and depth.

    The right answers stand in the prompt and each token of them must be the model's most probable one: that is what
    greedy decoding would write, for it sees the same tokens as long as it is right. Of several questions each is thus
    asked after right answers to those before; a chain counts where both its steps are right.

    Args:
      model: any M3 with the tokenizer of the grid's haystack.
      grid: the prompts.
      how: sizes and dtypes.

    Returns:
      "lengths", "depths", "count"; of each kind "shares", a list of depths for each length, and their "mean".
    """
    lengths, depths, kinds = grid.lengths, grid.depths, grid.kinds
    scores = token_scores(model, [prompt.tokens for _, _, prompt in grid.prompts], how)
    right = {kind: np.zeros((len(lengths), len(depths))) for kind in kinds}
    asked = {kind: np.zeros((len(lengths), len(depths))) for kind in kinds}
    column = {depth: i for i, depth in enumerate(depths)}
    for (kind, i, prompt), (_, is_best) in zip(grid.prompts, scores, strict=True):
        # Token t of the row is predicted at t - 1.
        answered = [bool(is_best[begin - 1 : end - 1].all()) for begin, end in prompt.answers]
        questions = (
            [(prompt.depths[0], all(answered))] if kind == "chain" else zip(prompt.depths, answered, strict=True)
        )
        for depth, is_right in questions:
            right[kind][i, column[depth]] += is_right
            asked[kind][i, column[depth]] += 1
    shares = {kind: right[kind] / asked[kind] for kind in kinds}
    by_kind = {kind: {"shares": share.tolist(), "mean": float(share.mean())} for kind, share in shares.items()}
    return {"lengths": list(lengths), "depths": list(depths), "count": grid.count, **by_kind}


def recall_table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the shares as lines of a table, a column for each result and in it one for each depth."""
    row = lambda shares: "".join(f"{share:6.0%}" for share in shares)
    lines = [["depth", *(row(result["depths"]) for result in results)]]
    for kind in KINDS:
        if kind not in results[0]:
            continue
        lines.append([kind, *(f"mean {result[kind]['mean']:.1%}" for result in results)])
        for i, length in enumerate(results[0]["lengths"]):
            lines.append([f"  {length:,} tokens", *(row(result[kind]["shares"][i]) for result in results)])
    return lines
