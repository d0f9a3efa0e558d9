"""A task for `m3jax.train grpo`: a sum that is asked for in words that the embedded checkpoint was not trained on.

It learned to answer "What is 864 + 394?" by a call of a tool that adds. Here the same is asked as "Add 864 and 394." or
"What do 864 and 394 make?": the call comes, but often with another number in it. Tools and parameters have several
names. An answer is rewarded if it is one call of the declared tool with both numbers, in either order.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

WORDINGS = ("Add {} and {}.", "Add {} to {}.", "What do {} and {} make?", "The sum of {} and {}?")
NAMES, TERMS = ("add", "sum", "plus"), (("a", "b"), ("x", "y"), ("first", "second"))
COUNT = 1024


def prompts() -> list[dict[str, Any]]:
    """Return the questions, each with its tool and the two numbers of the right call: always the same ones."""
    rng = random.Random(35)
    rows = []
    for wording, _ in zip(itertools.cycle(WORDINGS), range(COUNT), strict=False):
        terms, numbers = rng.choice(TERMS), (rng.randrange(1000), rng.randrange(1000))
        tool = {
            "name": rng.choice(NAMES),
            "description": "the sum of two numbers",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "integer"} for name in terms},
                "required": list(terms),
            },
        }
        rows.append(
            {
                "messages": [{"role": "user", "content": wording.format(*numbers)}],
                "tools": [{"type": "function", "function": tool}],
                "thinking_mode": "disabled",
                "numbers": numbers,
            }
        )
    return rows


def reward(
    prompts: Sequence[Any],
    completions: Sequence[Mapping[str, Any]],
    tools: Sequence[Sequence[Mapping[str, Any]]],
    numbers: Sequence[tuple[int, int]],
    **_: Any,
) -> list[float]:
    """Return 1 for each answer that is the right call and nothing else, else 0."""
    return [float(_is_right(*row)) for row in zip(completions, tools, numbers, strict=True)]


def _is_right(answer: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> bool:
    calls, declared = answer.get("tool_calls") or [], tools[0]["function"]
    if len(calls) != 1 or calls[0]["function"]["name"] != declared["name"]:
        return False
    arguments = calls[0]["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    is_named = set(arguments) == set(declared["parameters"]["required"])
    return is_named and sorted(map(str, arguments.values())) == sorted(map(str, numbers))
