"""A server that drafts: its answers are those without a draft, and /metrics says what the draft brought."""

import asyncio
import json
import re

import pytest
from support.serving import running
from support.workers import SHAPE, shared_worker, text_model

from m3jax.decoding import Engine
from m3jax.serve.worker import Worker

BODY = {
    "messages": [{"role": "user", "content": "What is a context manager?"}],
    "temperature": 0, "max_tokens": 24, "ignore_eos": True,
}  # fmt: skip


@pytest.mark.further  # drafted answers: tests/decoding; their counts: test_figures.py
def test_drafted_answers_are_those_without_a_draft():
    """The counts of the draft go by request, so /metrics has them by route.

    That sampled answers have the same bits in the invariant mode is the engine's: `decoding/test_invariance.py`.
    """
    drafting = Worker(Engine(text_model().model, draft="builtin", draft_tokens=2, **SHAPE), text_model())
    found = []
    for worker in (shared_worker(), drafting):
        with running(worker) as server:
            message = json.loads(server.ask("/v1/chat/completions", BODY)[2])["choices"][0]["message"]
            text = server.ask("/metrics")[2]
        counts = [
            float(re.search(rf'm3jax_{name}_total{{route="/v1/chat/completions"}} (\S+)', text)[1])
            for name in ("draft_tokens", "accepted_draft_tokens")
        ]
        found.append((message, counts))
    asyncio.run(drafting.close("abort"))
    (plain, nothing), (drafted, counts) = found
    assert plain == drafted
    assert nothing == [0, 0] and 0 < counts[1] < counts[0]
