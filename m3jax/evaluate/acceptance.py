"""Acceptance of a draft's proposals by a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from m3jax.decoding import Drafter, Params, Sampling, build_engine
from m3jax.evaluate.reading import Reading, Row
from m3jax.model import M3
from m3jax.progress import activity


def acceptance(
    model: M3,
    draft: Drafter,
    prompts: Sequence[Row],
    *,
    max_new_tokens: int,
    draft_tokens: int,
    temperatures: Sequence[float],
    seed: int,
    how: Reading | None = None,
) -> list[dict[str, Any]]:
    """Return how many of a draft's proposals an engine accepts while it generates from some prompts.

    Args:
      model: the target.
      draft: a drafter that fits it.
      prompts: token ids.
      max_new_tokens: of each prompt; EOS does not end one, so that all weigh alike.
      draft_tokens: K, proposals of a verification.
      temperatures: 0 is greedy; all prompts once at each.
      seed: prompt i draws with seed + i.
      how: rows that decode together, tokens of a prefill call, dtypes of the cache.

    Returns:
      For each temperature: "temperature", "verifications", "accepted" (how many of these accepted at least 1, 2, ..., K
      proposals), "shares" of them, and "mean_length", tokens of a verification with the target's own.
    """
    how = how or Reading()
    longest = max(map(len, prompts)) + max_new_tokens
    batch = min(how.batch, len(prompts))
    engine = build_engine(
        model, rows=batch, length=longest, prefill_chunk=min(how.chunk, longest), prefill_rows=1,
        prefix_cache=False, kv_dtype=how.kv_dtype, index_dtype=how.index_dtype, scales=how.scales,
        draft=draft, draft_tokens=draft_tokens,
    )  # fmt: skip
    by_temperature = []
    with activity() as line:
        verifications, accepted = 0, np.zeros(draft_tokens, int)
        for temperature in temperatures:
            for i, prompt in enumerate(prompts):
                sampling = Sampling(temperature=temperature, seed=seed + i)
                engine.add(prompt, Params(max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=()))
            before = engine.timings.decoded_tokens
            while engine.busy:
                engine.step()
                done = engine.timings.decoded_tokens - before
                line.say(f"temperature {temperature:g}: {done:,} of {len(prompts) * max_new_tokens:,} new tokens")
            new_verifications = engine.drafting.forwards - verifications
            new_accepted = np.array(engine.drafting.accepted or accepted) - accepted
            verifications, accepted = verifications + new_verifications, accepted + new_accepted
            by_temperature.append({"temperature": temperature, **figures(new_verifications, new_accepted.tolist())})
    return by_temperature


def figures(verifications: int, accepted: Sequence[int]) -> dict[str, Any]:
    """Return the figures of some verifications: the share that accepted each number of proposals, and the mean length.

    Args:
      verifications: the number of verifications.
      accepted: the numbers of those that accepted at least 1, 2, ..., K proposals.

    Raises:
      ValueError: there were none.
    """
    if not verifications:
        raise ValueError("nothing was verified: --max-new-tokens must be at least 2")
    shares = [count / verifications for count in accepted]
    counts = {"verifications": verifications, "accepted": list(accepted)}
    return {**counts, "shares": shares, "mean_length": 1 + sum(shares)}


def acceptance_table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the figures as lines of a table, a column for each result."""
    lines = []
    for columns in zip(*(result["temperatures"] for result in results), strict=True):
        (temperature,) = {each["temperature"] for each in columns}
        lines.append([f"temperature {temperature:g}", *("" for _ in columns)])
        lines.append(["  mean length", *(f"{each['mean_length']:.2f}" for each in columns)])
        lines.append(["  accepted by position", *(", ".join(f"{x:.0%}" for x in each["shares"]) for each in columns)])
        lines.append(["  verifications", *(f"{each['verifications']:,}" for each in columns)])
    return lines
