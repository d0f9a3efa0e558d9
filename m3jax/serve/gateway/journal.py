"""A log of requests and what came of them, from which each can be replayed and compared bit for bit."""

import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from m3jax.serve.gateway.answers import news_of


class Journal:
    """A file of JSON lines: first what serves (hashes, settings), then one line for each request that ended by itself.

    A line has the request in the worker's protocol, so that nothing has to be rendered again, and of each continuation
    its tokens and its log-probabilities, these as hexadecimal floats: nothing is rounded.

    Args:
      path: of the file; lines are added.
      identity: of the server, as `m3jax.serve.identity` has it.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self._file = path.open("a", encoding="utf-8")
        self._write({"server": dict(identity)})

    async def kept(
        self, request: pb.GenerateRequest, responses: AsyncIterator[pb.GenerateResponse]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yield a worker's responses as they are, and log the request with them once it has ended."""
        found: dict[int, dict[str, Any]] = {}
        async with aclosing(responses) as stream:
            async for response in stream:
                note_response(found, response)
                yield response
        if all("finish_reason" in each for each in found.values()) and len(found) == request.sampling_params.n:
            encoded = base64.b64encode(request.SerializeToString(deterministic=True)).decode()
            self._write({"request": encoded, "id": request.request_id, "answers": in_order(found)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def note_response(found: dict[int, dict[str, Any]], response: pb.GenerateResponse) -> None:
    """Add a worker's response to what is known of a request's continuations.

    Args:
      found: by the number of the continuation, changed in place.
      response: the next one.
    """
    kind = response.WhichOneof("response")
    news = getattr(response, kind)
    answer = found.setdefault(news.index, {"tokens": [], "logprobs": []})
    tokens, logprobs = news_of(news, kind, len(answer["tokens"]))
    answer["tokens"] += tokens
    answer["logprobs"] += [each.logprob.hex() for each in logprobs]
    if kind == "complete":
        answer["finish_reason"] = news.finish_reason


def in_order(found: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a request's continuations by their numbers."""
    return [found[index] for index in sorted(found)]
