"""Answers that can be checked: what serves is named by hashes, and a logged request is replayed bit for bit.

In the invariant mode an answer depends on the request, the weights and the settings alone: not on what was cached, what
ran beside it or what was drafted (docs/numerics.md). So whoever has the log, the weights and the same kind of machine
can see that an answer came from them.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from m3jax.messages import printable, shown
from m3jax.serve.gateway.journal import in_order, note_response
from m3jax.version import VERSION

_HASHED = ("config.json", "generation_config.json", "tokenizer.json")


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of a model folder: of its weights, and of the files that say how they are computed."""
    names = sorted({*(path.name for path in folder.glob("*.safetensors")), *_HASHED})
    total = hashlib.sha256()
    for name in names:
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def identity(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what serves: hashes of weights and settings, and the settings themselves.

    Args:
      folder: of the model.
      settings: of the engine, as JSON can hold them.
    """
    import jax

    device = jax.local_devices()[0]
    all_settings = {
        **settings,
        "m3jax": VERSION,
        "jax": jax.__version__,
        "device": f"{device.platform} {device.device_kind}",
    }
    text = json.dumps(all_settings, sort_keys=True)
    return {
        "weights": weights_hash(folder),
        "settings": all_settings,
        "settings_hash": hashlib.sha256(text.encode()).hexdigest(),
    }


def identity_header(found: Mapping[str, Any]) -> str:
    """Return the value of the header X-M3JAX-Invariant."""
    return f"weights={found['weights']}, settings={found['settings_hash']}"


def logged(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield a log's lines with their numbers from 1.

    Raises:
      ValueError: a line that is no JSON object.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{printable(str(path))}, line {number}: {error}") from None
            if not isinstance(value, dict):
                raise ValueError(f"{printable(str(path))}, line {number}: {shown(value)} is no line of a request log")
            yield number, value


async def replayed(worker: Any, request: pb.GenerateRequest) -> list[dict[str, Any]]:
    """Return a request's continuations as a worker gives them now, in the form of the log."""
    found: dict[int, dict[str, Any]] = {}
    async for response in worker.Generate(request):
        note_response(found, response)
    return in_order(found)


def difference(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str | None:
    """Return where two lists of continuations differ first, in words; None where they are equal to the bit."""
    if len(then) != len(now):
        return f"{len(then)} continuations were logged, {len(now)} came"
    for index, (logged_answer, answer) in enumerate(zip(then, now, strict=True)):
        for name in ("tokens", "logprobs"):
            if logged_answer[name] != answer[name]:
                pairs = zip(logged_answer[name], answer[name], strict=False)
                shorter = min(len(logged_answer[name]), len(answer[name]))
                place = next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
                at = lambda values, place=place: values[place] if place < len(values) else "nothing"
                return (
                    f"continuation {index}: {name} differ from token {place} on: logged "
                    f"{at(logged_answer[name])}, now {at(answer[name])}"
                )
        if logged_answer["finish_reason"] != answer["finish_reason"]:
            return f"continuation {index} ended with {logged_answer['finish_reason']}, now {answer['finish_reason']}"
    return None


async def verify(worker: Any, lines: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, str | None]]:
    """Return for each logged request the number of its line and its difference, None for none.

    Args:
      worker: with the weights and the settings of the log.
      lines: of the log, those of servers left out.
    """
    results = []
    for number, line in lines:
        request = pb.GenerateRequest.FromString(base64.b64decode(line["request"]))
        results.append((number, difference(line["answers"], await replayed(worker, request))))
    return results
