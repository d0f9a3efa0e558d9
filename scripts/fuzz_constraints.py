"""Has the embedded model answer under random JSON schemas and forced tool calls, and validates every answer.

    python scripts/fuzz_constraints.py --cases 500

Half of the cases are JSON schemas, whose answers jsonschema validates; half are tools, whose forced calls m3jax's own
parser reads and validates. A case is drawn from (seed, number). An answer that meets its limit of tokens is counted
apart: it is whole in no way. The last lines are the times of what a constraint costs on the host: making its matcher,
and a mask.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
from smg_grpc_proto import vllm_engine_pb2 as protocol

from m3jax.serve.constraints import tool_grammar
from m3jax.serve.constraints.guides import GrammarGuide
from m3jax.serve.worker import Worker
from m3jax.text import ToolCallParser

NAMES = ("city", "days", "unit", "tags", "kind", "value")
AT_ONCE = 8
MOST_TOKENS = 160


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return the schema of a value whose texts and arrays have an end."""
    kinds = ["string", "enum", "integer", "number", "boolean", "null", "union"]
    kind = draw.choice(kinds + (["array", "object"] * 2 if depth else []))
    if kind == "string":
        pattern = draw.choice([None, None, "^[a-z]+$", "[0-9]", "^(ab|cd)"])
        bounds = {"minLength": draw.randrange(3), "maxLength": draw.randrange(3, 9)}
        return {"type": "string", **bounds, **({"pattern": pattern} if pattern else {})}
    if kind == "enum":
        return {"enum": draw.sample(["red", "two words", 'a"b', 7, -1.5, True, None], draw.randrange(1, 4))}
    if kind in ("integer", "number"):
        low = draw.randrange(-20, 20)
        return {"type": kind, "minimum": low, "maximum": low + draw.randrange(40)}
    if kind == "union":
        return {"anyOf": [random_schema(draw, 0), random_schema(draw, 0)]}
    if kind == "array":
        fewest = draw.randrange(2)
        return {
            "type": "array",
            "items": random_schema(draw, depth - 1),
            "minItems": fewest,
            "maxItems": fewest + draw.randrange(3),
        }
    return random_object(draw, depth - 1) if kind == "object" else {"type": kind}


def random_object(draw: random.Random, depth: int) -> dict[str, Any]:
    """Return the schema of an object of one to four properties and no others."""
    names = draw.sample(NAMES, draw.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def case(seed: int, number: int) -> tuple[str, str, Callable[[str], None]] | None:
    """Return a case: the constraint's kind, the constraint, and what raises for an answer that is not valid.

    None where the schema is one that a call cannot be forced to.
    """
    draw = random.Random(f"{seed} {number}")
    if number % 2:
        schema = random_schema(draw)
        return "json_schema", json.dumps(schema), lambda text: jsonschema.validate(json.loads(text), schema)
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": random_object(draw, 1)}} for i in range(2)
    ]
    try:
        grammar = tool_grammar(tools, "required", parallel=False)
    except ValueError:
        return None

    def validate(text: str) -> None:
        message = ToolCallParser(tools).parse(text)
        assert len(message.tool_calls) == 1 and not message.faults and not message.content.strip(), message
        assert message.tool_calls[0].is_whole and not message.tool_calls[0].problems, message

    return "grammar", grammar, validate


async def fuzz(worker: Worker, seed: int, count: int, most_tokens: int = MOST_TOKENS) -> tuple[Counter, list[str]]:
    """Run cases 0 to `count` - 1.

    Returns:
      (cases by what came of them: "valid", "refused", "cut" by the limit of tokens, "wrong"; a line for each wrong).
    """
    counts, failures, running = Counter(), [], asyncio.Semaphore(AT_ONCE)

    async def run(number: int) -> None:
        made = case(seed, number)
        if made is None:
            counts["refused"] += 1
            return
        kind, constraint, validate = made
        params = protocol.SamplingParams(temperature=1.0, seed=number, max_tokens=most_tokens, **{kind: constraint})
        prompt = protocol.TokenizedInput(
            input_ids=worker.tokenizer.encode("]~b]user\nSay it.[e~[\n]~b]ai\n</mm:think>")
        )
        request = protocol.GenerateRequest(tokenized=prompt, sampling_params=params)
        async with running:
            try:
                (message,) = [message async for message in worker.Generate(request)]
            except ValueError as error:
                counts["wrong"] += 1
                failures.append(f"case {number}: refused: {error}")
                return
        if message.complete.finish_reason == "length":
            counts["cut"] += 1
            return
        text = worker.tokenizer.decode(list(message.complete.output_ids)[:-1], skip_special_tokens=False)
        try:
            assert message.complete.finish_reason == "stop", message.complete.finish_reason
            validate(text)
            counts["valid"] += 1
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            counts["wrong"] += 1
            failures.append(f"case {number}: {text!r}: {str(error).splitlines()[0]} ({constraint})")

    await asyncio.gather(*(run(number) for number in range(count)))
    return counts, failures


def timed(times: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes the seconds of each of its calls."""

    def call(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args)
        finally:
            times.append(time.perf_counter() - began)

    return call


def main() -> int:
    """Run the cases, print what came of them and what constraints cost, and return 1 if an answer was not valid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    knobs = dict(max_batch=AT_ONCE, pages=512, prefill_chunk=64, max_length=1024, media_patches=())
    worker = Worker.from_pretrained(dtype="float32", **knobs)
    began = time.perf_counter()
    worker.constraints.prepare()
    print(f"vocabulary of {worker.engine.config.vocab_size}: {time.perf_counter() - began:.3f} s")
    masks, matchers = [], []
    GrammarGuide.bits = timed(masks, GrammarGuide.bits)
    worker.constraints.matcher = timed(matchers, worker.constraints.matcher)
    began = time.perf_counter()
    counts, failures = asyncio.run(fuzz(worker, args.seed, args.cases))
    print(f"{args.cases} cases in {time.perf_counter() - began:.0f} s: {dict(counts)}")
    print("\n".join(failures))
    for name, times in (("matcher", matchers), ("mask", masks)):
        p99 = statistics.quantiles(times, n=100)[-1]
        print(f"{name}: p50 {1e6 * statistics.median(times):.0f} us, p99 {1e6 * p99:.0f} us of {len(times)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
