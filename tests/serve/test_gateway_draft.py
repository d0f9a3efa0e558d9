"""A server that drafts: its answers are those without a draft, to the bit, and /metrics says what the draft brought."""

import json
import re

from support.serving import running
from support.workers import text_model

from m3jax.decoding import Engine
from m3jax.serve.worker import Worker

SHAPE = dict(
    pages=16, max_batch=2, prefill_chunk=32, steps_per_call=2, max_length=256, max_stop_ids=4, media_patches=()
)
BODY = {
    "messages": [{"role": "user", "content": "What is a context manager?"}],
    "temperature": 0.7, "seed": 3, "max_tokens": 24, "logprobs": True, "ignore_eos": True,
}  # fmt: skip


def test_drafted_answers_have_the_same_bits():
    """Sampled, in the invariant mode; the counts of the draft go by request, so /metrics has them by route."""
    found = {}
    for draft in (None, "builtin"):
        worker = Worker(Engine(text_model().model, invariant=True, draft=draft, draft_tokens=2, **SHAPE), text_model())
        with running(worker) as server:
            whole = json.loads(server.ask("/v1/chat/completions", BODY)[2])["choices"][0]
            text = server.ask("/metrics")[2]
        worker._loop.close("abort")
        worker._submitters.shutdown()
        counts = [
            float(re.search(rf'm3jax_{name}_total{{route="/v1/chat/completions"}} (\S+)', text)[1])
            for name in ("draft_tokens", "accepted_draft_tokens")
        ]
        found[draft] = whole["message"], whole["logprobs"], counts
    plain, drafted = found[None], found["builtin"]
    assert plain[:2] == drafted[:2]
    assert plain[2] == [0, 0] and 0 < drafted[2][1] < drafted[2][0]
