"""The request log: what is kept of a request is enough to repeat it, and a changed bit is found."""

import asyncio
import base64
import json
from importlib.resources import files
from pathlib import Path

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from support.serving import running
from support.workers import new_worker

from m3jax.serve.gateway.journal import Journal
from m3jax.serve.replay import difference, identity, identity_header, logged, replayed, verify, weights_hash

FOLDER = Path(str(files("m3jax.assets"))) / "tiny"


def test_log_and_replay(tmp_path: Path):
    """Sampled and greedy, cached or not: a logged request gives the same tokens and log-probabilities again."""
    worker = new_worker()
    found = identity(FOLDER, {"dtype": "float32"})
    path = tmp_path / "requests.jsonl"
    with running(worker) as server:
        server.gateway.headers = {"X-M3JAX-Invariant": identity_header(found)}
        server.gateway.journal = Journal(path, found)
        body = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 6}
        _, headers, text = server.ask("/v1/chat/completions", body)
        assert headers["x-m3jax-invariant"] == f"weights={weights_hash(FOLDER)}, settings={found['settings_hash']}"
        server.ask("/v1/chat/completions", {**body, "n": 2, "seed": 5, "stream": True})
        assert server.ask("/v1/chat/completions", {**body, "temperature": 9})[0] == 400  # nothing to log
        server.gateway.journal.close()
    lines = [line for _, line in logged(path)]
    assert lines[0]["server"]["weights"] == weights_hash(FOLDER) and len(lines) == 3
    assert lines[1]["id"] == json.loads(text)["id"]
    assert json.loads(text)["choices"][0]["logprobs"] is None  # the log's own, and not the client's
    again = new_worker()
    requests = list(logged(path))[1:]
    assert asyncio.run(verify(again, requests)) == [(2, None), (3, None)]
    # One bit of one log-probability, one token, one reason: each is found and named.
    request = pb.GenerateRequest.FromString(base64.b64decode(lines[2]["request"]))
    now = asyncio.run(replayed(again, request))
    for change, says in (
        (
            lambda answer: answer["logprobs"].__setitem__(1, (-0.5).hex()),
            "continuation 1: logprobs differ from token 1",
        ),
        (lambda answer: answer["tokens"].pop(), "continuation 1: tokens differ from token 5 on"),
        (lambda answer: answer.update(finish_reason="abort"), "continuation 1 ended with abort"),
    ):
        changed = json.loads(json.dumps(lines[2]["answers"]))
        change(changed[1])
        assert says in difference(changed, now)
    asyncio.run(worker.close("abort"))
    asyncio.run(again.close("abort"))


def test_hashes(tmp_path: Path):
    """A folder's hash changes with any byte of its weights or its configuration, and with nothing else."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = weights_hash(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert weights_hash(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    second = weights_hash(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert len({first, second, weights_hash(tmp_path)}) == 3
    one, other = (identity(tmp_path, {"dtype": dtype})["settings_hash"] for dtype in ("float32", "bfloat16"))
    assert one != other
    broken = tmp_path / "log"
    broken.write_text("{}\nno json\n")
    with pytest.raises(ValueError, match="line 2"):
        list(logged(broken))
