"""What a request asks for, field by field and without a server: constraints, formats, and the replay of a log."""

import asyncio
import hashlib
import io
import json
import re
import shlex
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from support.embedded import TOKENIZER

from m3jax.serve import apart, command, together
from m3jax.serve.constraints import guides
from m3jax.serve.gateway.app import ENDPOINTS
from m3jax.serve.gateway.chat_completions import includes_usage, tool_choice
from m3jax.serve.gateway.completions import fields_of_completions
from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.fields import Fields, FixedField, IntegerField, ListField, TextField, object_schema
from m3jax.serve.gateway.gateway import thinking_mode
from m3jax.serve.gateway.http import OPENAI
from m3jax.serve.gateway.messages import fields_of_messages
from m3jax.serve.gateway.prompts import tokens_of
from m3jax.serve.gateway.responses import fields_of_responses
from m3jax.serve.gateway.sampling import (
    CONSTRAINT_FIELDS,
    Model,
    check_constraints,
    response_format,
    sampling_fields,
    sampling_params,
    set_constraints,
)
from m3jax.serve.worker.tokenizer_files import PIECE_BYTES, pieces, tokenizer_archive

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("unchecked")  # what JSON gives is no annotation's
MODEL = Model("m", 100, 50, (1,), can_see=False, block_size=8, defaults={})
SCHEMA = {"type": "object"}


def constrained(**values) -> pb.SamplingParams:
    params = pb.SamplingParams()
    set_constraints(Fields(values, CONSTRAINT_FIELDS), params)
    return params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}), ({"response_format": {"type": "text"}}, {}), ({"structured_outputs": None}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": "start: A", "regex": None}}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ],
)  # fmt: skip
def test_constraints_of_a_request(fields, expected):
    params = constrained(**fields)
    kind = params.WhichOneof("constraint")
    found = {} if kind is None else {kind: getattr(params, kind)}
    if kind == "json_schema":
        found[kind] = json.loads(found[kind])
    if kind == "choice":
        found[kind] = list(found[kind].choices)
    assert found == expected
    check_constraints(params, False)
    if kind is None:
        check_constraints(params, True)
    else:
        with pytest.raises(ApiError, match="response_format and a forced tool_choice"):
            check_constraints(params, True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "xml"}}, "type = 'xml': must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "schema = 3: must be a JSON"),
        ({"response_format": {"type": "json_schema"}}, "schema = None: must be a JSON schema"),
        ({"structured_outputs": {}}, "one of regex, grammar, choice, json"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "one of regex, grammar, choice, json"),
        ({"structured_outputs": {"xml": "a"}}, "one of regex, grammar, choice, json"),
        ({"structured_outputs": {"regex": 3}}, "regex = 3 has another type"),
        ({"structured_outputs": {"choice": []}}, "choice = [] has another type"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "choice = ['a', 3] has another type"),
        ({"structured_outputs": {"choice": "ab"}}, "choice = 'ab' has another type"),
        ({"structured_outputs": {"json": [1]}}, "json = [1] has another type"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give one of the two"),
    ],
)  # fmt: skip
def test_constraints_that_are_refused(fields, says):
    with pytest.raises(ApiError) as caught:
        constrained(**fields)
    assert says in str(caught.value) and caught.value.status == 400
    assert caught.value.field == ("structured_outputs" if "structured_outputs" in fields else "response_format")
    with pytest.raises(ApiError, match="text: type = 'xml'"):
        response_format({"type": "xml"}, pb.SamplingParams(), "text")


def test_the_schemas_of_constraints_say_what_is_taken():
    inside = object_schema(CONSTRAINT_FIELDS)["properties"]["structured_outputs"]
    inside = next((each for each in inside.get("anyOf", [inside]) if "properties" in each), inside)
    assert inside["properties"] == {
        "regex": {"type": ["string", "null"]}, "grammar": {"type": ["string", "null"]},
        "choice": {"type": ["array", "null"], "items": {"type": "string"}, "minItems": 1},
        "json": {"type": ["string", "object", "null"]},
    }  # fmt: skip
    assert inside["additionalProperties"] == {"type": "null"}


def test_fields_of_messages_have_this_protocols_ranges():
    fields = fields_of_messages(MODEL)
    assert (fields["temperature"].least, fields["temperature"].most) == (0.0, 1.0)
    assert [(fields["n"].default, fields["n"].least, fields["n"].most), fields["max_tokens"].least] == [(1, 1, 1), 1]
    assert "stop_sequences" in fields and "stop" not in fields


def test_a_prompt_of_completions_is_a_text_or_ids_or_at_least_one_of_them():
    text, ids, several = fields_of_completions(MODEL)["prompt"].schema()["anyOf"]
    assert text == {"type": "string", "minLength": 1} and (ids["type"], ids["minItems"]) == ("array", 1)
    assert ids["items"] == {"type": "integer", "minimum": 0, "maximum": MODEL.vocab_size - 1}
    assert several == {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1}


def test_an_input_of_responses_is_a_text_or_at_least_one_item():
    text, items = fields_of_responses(MODEL)["input"].schema()["anyOf"]
    assert (text, items) == ({"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1})


def test_a_tokenizers_archive_is_its_files(tmp_path):
    """Equal files give equal bytes; the preprocessor's numbers are M3's where the folder has none."""
    for name in ("tokenizer.json", "config.json", "other.json"):
        (tmp_path / name).write_text(name * 3)
    archive = tokenizer_archive(tmp_path)
    assert archive == tokenizer_archive(tmp_path)
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        contents = {name: found.read(name) for name in found.namelist()}
    preprocessor = json.loads(contents.pop("preprocessor_config.json"))
    assert contents == {name: (name * 3).encode() for name in ("tokenizer.json", "config.json")}
    assert (preprocessor["patch_size"], preprocessor["merge_size"], preprocessor["temporal_patch_size"]) == (14, 2, 2)
    assert (preprocessor["min_pixels"], preprocessor["max_pixels"], preprocessor["size"]) == (3136, 451584, [672, 672])
    assert preprocessor["rescale_factor"] == 1 / 255 and all(preprocessor[f"do_{x}"] for x in ("resize", "rescale"))
    assert preprocessor["do_normalize"] is preprocessor["do_convert_rgb"] is True
    (tmp_path / "preprocessor_config.json").write_text("own")
    with zipfile.ZipFile(io.BytesIO(tokenizer_archive(tmp_path))) as found:
        assert found.read("preprocessor_config.json") == b"own"
    for length in (1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES):
        data = bytes(i % 251 for i in range(length))
        sent = list(pieces(data))
        assert b"".join(piece.data for piece in sent) == data and len(sent) == -(-length // 65536)
        assert [piece.sha256 for piece in sent] == [""] * (len(sent) - 1) + [hashlib.sha256(data).hexdigest()]


# Gateway and worker in one process


def served(monkeypatch, *words):
    """The engine, the worker's, the gateway and the address that a command line makes; nothing is loaded or served."""
    made = SimpleNamespace(closed=[])

    def engine(folder, **knobs):
        made.engine = {"folder": folder, **knobs}
        return "engine", "lm"

    class Worker:
        def __init__(self, own_engine, lm, *, name):
            made.worker = (own_engine, lm, name)

        async def prepare(self):
            made.closed.append("prepared")

        async def close(self, how):
            made.closed.append(how)

    async def open_gateway(gateway, workers, **options):
        made.opened = options
        return SimpleNamespace(closing=options["closing"])

    async def serve(gateway, address, load):
        made.gateway, made.address = gateway, address
        for close in (await load(gateway)).closing:
            await close()

    monkeypatch.setattr(together, "engine_from_pretrained", engine)
    monkeypatch.setattr(together, "Worker", Worker)
    monkeypatch.setattr(together, "LocalWorker", lambda worker: worker)
    monkeypatch.setattr(together, "open_gateway", open_gateway)
    monkeypatch.setattr(together, "serve", serve)
    monkeypatch.setattr(
        together, "identity", lambda folder, engine: {"weights": "w", "settings_hash": "s", "settings": engine}
    )
    together.serve_together(command.parser().parse_args(words))
    return made


def test_a_command_line_is_served_as_it_says(monkeypatch, tmp_path):
    found = served(monkeypatch)
    folder = found.engine.pop("folder")
    assert found.engine == dict(
        mesh=None, draft=None, draft_tokens=None, dtype="bfloat16", invariant=False, max_batch=8, steps_per_call=4
    )
    assert found.worker == ("engine", "lm", None) and found.closed == ["prepared", "abort"]
    assert (found.address.host, found.address.port, found.address.drain_seconds) == ("127.0.0.1", 8000, 30.0)
    assert found.opened["folder"] == folder and found.opened["processes"] == 2 and found.opened["name"] is None
    assert (found.gateway.headers, found.gateway.journal, found.gateway.settings.max_requests) == ({}, None, 256)
    log = tmp_path / "log"
    words = ["--invariant", "--request-log", str(log), "--no-warmup", "--name", "n", "--port", "5", "--host", "h"]
    words += ["--drain", "2", "--deadline", "9", "--max-requests", "3", "--api-key", "k", "--cors-origin", "o"]
    words += ["--pages", "7", "--context", "64", "--prefill-chunk", "16", "--max-batch", "2", "--weights", "mxfp8"]
    words += ["--allow-media", "a.example", "--media-processes", "1", "--model", str(tmp_path)]
    found = served(monkeypatch, *words)
    settings = dict(dtype="bfloat16", invariant=True, weights="mxfp8", max_batch=2, pages=7, prefill_chunk=16)
    settings |= dict(max_length=64, steps_per_call=4)
    assert found.engine == settings | dict(folder=tmp_path, mesh=None, draft=None, draft_tokens=None)
    assert found.worker[2] == "n" and found.closed == ["abort"]
    assert (found.address.host, found.address.port, found.address.drain_seconds) == ("h", 5, 2.0)
    own = found.gateway.settings
    assert (own.api_key, own.max_requests, own.deadline_seconds, own.origins) == ("k", 3, 9.0, ("o",))
    assert found.gateway.headers == {"X-M3JAX-Invariant": "weights=w, settings=s"}
    assert found.opened["sources"].hosts == {"a.example"} and found.opened["processes"] == 1
    assert json.loads(log.read_text())["server"] == {"weights": "w", "settings_hash": "s", "settings": settings}
    assert found.gateway.journal._file.closed


# A gateway alone


def loaded_apart(monkeypatch, *words, fails=()):
    """What a gateway alone is opened with, where opening it fails first so often, and what it waited in between."""
    made, fails = SimpleNamespace(waits=[]), list(fails)

    async def tokenizer_folder(worker, into):
        assert into.is_dir()
        return f"of {worker}"

    async def open_gateway(gateway, workers, **options):
        made.asked = getattr(made, "asked", 0) + 1
        if fails:
            raise fails.pop(0)
        made.opened = (gateway, workers, options)
        return "opened"

    async def serve(gateway, address, load):
        made.gateway, made.address, made.loaded = gateway, address, await load(gateway)

    async def sleep(seconds):
        made.waits.append(seconds)

    monkeypatch.setattr(apart, "RemoteWorker", lambda address: f"worker {address}")
    monkeypatch.setattr(apart, "tokenizer_folder", tokenizer_folder)
    monkeypatch.setattr(apart, "open_gateway", open_gateway)
    monkeypatch.setattr(apart, "serve", serve)
    monkeypatch.setattr(apart, "asyncio", SimpleNamespace(run=asyncio.run, sleep=sleep))
    args = command.gateway_parser().parse_args(["--worker", "grpc://a:1", "--worker", "b:2", *words])
    apart.serve_apart(args, ["a:1", "b:2"])
    return made


def test_a_gateway_alone_opens_before_its_workers(monkeypatch, tmp_path):
    """It asks them until one answers, has its tokenizer from the first or a folder, and takes no for an answer."""
    lost = ApiError(503, "no worker can be reached", code="worker_lost")
    words = [
        "--host",
        "h",
        "--port",
        "5",
        "--drain",
        "2",
        "--max-requests",
        "3",
        "--media-processes",
        "4",
        "--name",
        "n",
    ]
    found = loaded_apart(monkeypatch, *words, "--allow-media", "a.example", fails=[lost, lost])
    gateway, workers, options = found.opened
    assert (found.asked, found.waits, found.loaded) == (3, [1.0, 1.0], "opened") and gateway is found.gateway
    assert workers == ["worker a:1", "worker b:2"] and options.pop("sources").hosts == {"a.example"}
    assert options == {"folder": "of worker a:1", "name": "n", "processes": 4}
    assert (found.address.host, found.address.port, found.address.drain_seconds) == ("h", 5, 2.0)
    assert gateway.settings.max_requests == 3
    found = loaded_apart(monkeypatch, "--tokenizer", str(tmp_path))
    assert found.opened[2]["folder"] == tmp_path and found.opened[2]["name"] is None and not found.waits
    with pytest.raises(ValueError, match="max_tokens: no"):
        loaded_apart(monkeypatch, fails=[ApiError(400, "max_tokens: no")])


OWN = {"m3jax": "1", "jax": "2", "device": "cpu x"}


def verified(monkeypatch, path, lines, request_id=None, here=OWN):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {}

    async def close(how):
        made["closed"] = how

    async def verify(worker, requests):
        return [(number, None if line["id"] == "a" else "differs") for number, line in requests]

    def from_pretrained(folder, **engine):
        made["engine"] = engine
        return SimpleNamespace(close=close)

    monkeypatch.setattr(together, "identity", lambda folder, engine: {"weights": "w", "settings": engine | here})
    monkeypatch.setattr(together, "verify", verify)
    monkeypatch.setattr(together.Worker, "from_pretrained", from_pretrained)
    return together.verify_log(path, Path("M"), request_id), made


def test_a_log_is_replayed_with_its_own_settings(monkeypatch, tmp_path):
    """All of it or one request; on the same weights, versions and devices alone."""
    path, server = tmp_path / "log", {"server": {"weights": "w", "settings": {"dtype": "float32", **OWN}}}
    lines = [server, {"id": "a"}, server, {"id": "b"}]
    found, made = verified(monkeypatch, path, lines)
    assert found == [("a", None), ("b", "differs")] and made == {"engine": {"dtype": "float32"}, "closed": "abort"}
    assert verified(monkeypatch, path, lines, "b")[0] == [("b", "differs")]
    other = {"server": {"weights": "w", "settings": {"dtype": "bfloat16", **OWN}}}
    for given, request, says in (
        (lines, "c", "has no c"), ([server], None, "has no request"), ([{"id": "a"}], None, "has no request"),
        ([server, {"id": "a"}, other], None, "line 3: another server wrote from here on"),
        ([{"server": {**server["server"], "weights": "v"}}, {"id": "a"}], None, "M has the weights w, the log v"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            verified(monkeypatch, path, given, request)
    for name in OWN:
        with pytest.raises(ValueError, match=f"the log was written with {name} {OWN[name]}, this is other"):
            verified(monkeypatch, path, lines, here=OWN | {name: "other"})


def test_the_replay_of_a_log_is_its_exit_status(monkeypatch, tmp_path, capsys):
    path = tmp_path / "log"
    path.write_text("")
    args = command.verify_parser().parse_args([str(path), "--model", "M", "--request", "r"])
    for results, status, text in (
        ([("a", None), ("b", None)], 0, "a: the same bits\nb: the same bits\n"),
        ([("a", None), ("b", "it differs")], 1, "a: the same bits\nb: it differs\n"),
    ):
        asked = []
        monkeypatch.setattr(together, "verify_log", lambda *given, r=results, asked=asked: asked.append(given) or r)
        assert command.run_verify(args) == status and capsys.readouterr().out == text
        assert asked == [(path, Path("M"), "r")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--port=65536", "--port 65536: must be from 0 to 65535"), ("--port=-1", "--port -1"), ("", None),
        ("--max-requests=0", "--max-requests 0: must be at least 1"), ("--media-processes=0", "--media-processes 0"),
        ("--pages=0", "--pages 0"), ("--prefill-chunk=-1", "--prefill-chunk -1"), ("--context=0", "--context 0"),
        ("--deadline=0", "--deadline 0.0: must be above 0 seconds"), ("--drain=-1", "--drain -1.0: must be above 0"),
        ("--drain=nan", "--drain nan: must be above 0"), ("--api-key=", "a key has at least one character"),
        ("--port=65535 --max-requests=1 --media-processes=1 --max-batch=1 --pages=1", None),
        ("--port=0 --prefill-chunk=1 --context=1 --drain=0.1 --deadline=0.1", None),
    ],
)  # fmt: skip
def test_sizes_that_no_server_has(words, says):
    args = command.parser().parse_args(words.split())
    if says is None:
        command._check(args)
    else:
        with pytest.raises(ValueError, match=says):
            command._check(args)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--port 70000", "--port 70000: must be from 0 to 65535"), ("--draft-tokens 2", "--draft-tokens needs --draft"),
        ("--request-log log", "--request-log needs --invariant"), ("--process-id 1", "--process-id goes with"),
        ("--max-batch 0", "--max-batch 0: must be at least 1"), ("--api-key ''", "a key has at least one character"),
        ("gateway", "--worker"), ("gateway --worker nowhere", "--worker nowhere: give it as grpc://HOST:PORT"),
        ("gateway --worker grpc://:1", "give it as grpc"), ("gateway --worker grpc://a:b", "give it as grpc"),
        ("gateway --worker a:1 --drain 0", "--drain 0.0: must be above 0"), ("verify nowhere", "no such log: nowhere"),
        ("worker --port 65536", "--port 65536: must be from 0 to 65535"), ("worker --port -1", "--port -1: must"),
        ("worker --draft ngram --draft-tokens 9", "--draft-tokens 9: give 1 to 8"),
        ("worker --process-id 1", "--process-id goes with --coordinator"),
        ("worker --role prefill --prefill-from grpc://a:1", "--prefill-from with --role prefill"),
        ("worker --prefill-from grpc://a", "--prefill-from a: give it as grpc://HOST:PORT"),
        ("worker --prefill-from :1", "--prefill-from :1: give it as"),
        ("worker --prefill-from a:1 --mesh data=2 --coordinator h:1 --num-processes 2 --process-id 0", "have one host"),
        ("worker --role prefill --mesh data=2 --coordinator h:1 --num-processes 2 --process-id 0", "have one host"),
        ("--no-such-option", "--no-such-option"), ("--dtype", "--dtype"),
    ],
)  # fmt: skip
def test_command_lines_that_are_refused(monkeypatch, capsys, line, says):
    """In one line, before anything is loaded."""
    from m3jax.hosts import run
    from m3jax.serve.worker import command as worker_command

    loaded = lambda *_: pytest.fail("it was loaded")
    monkeypatch.setattr(run, "on_hosts", loaded)
    monkeypatch.setattr(apart, "serve_apart", loaded)
    monkeypatch.setattr(worker_command, "_read_prompts", loaded)
    for module in (command, worker_command):
        monkeypatch.setattr(module, "raise_interrupts", lambda: None)
    assert command.main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and says in err
    part = line.split()[0]
    assert err.startswith(f"m3jax.serve{'' if part.startswith('-') else ' ' + part}: error: ")


def test_what_each_part_of_the_command_runs(monkeypatch):
    """Ctrl-C and a SIGTERM end each from its beginning."""
    from m3jax.hosts import run
    from m3jax.serve.worker import command as worker_command

    done = []
    monkeypatch.setattr(run, "on_hosts", lambda args, prog, work: done.append(prog) or work("channel"))
    monkeypatch.setattr(together, "serve_together", lambda args, channel: done.append(("together", args.port, channel)))
    monkeypatch.setattr(apart, "serve_apart", lambda args, addresses: done.append(("apart", addresses)))
    monkeypatch.setattr(worker_command, "_read_prompts", lambda args: done.append(("reads", args.port)))
    monkeypatch.setattr(
        worker_command, "_work", lambda args, channel: done.append(("works", channel, args.prefill_from))
    )
    for module in (command, worker_command):
        monkeypatch.setattr(module, "raise_interrupts", lambda: done.append("interrupts"))
    for line, expected in (
        ("--port 65535 --no-compile-cache", ["m3jax.serve", ("together", 65535, "channel")]),
        ("gateway --worker grpc://a:1 --worker b:2", [("apart", ["a:1", "b:2"])]),
        ("worker --port 65535", ["m3jax.serve worker", ("works", "channel", [])]),
        ("worker --prefill-from grpc://a:1", ["m3jax.serve worker", ("works", "channel", ["a:1"])]),
        ("worker --role prefill --port 0", [("reads", 0)]),
    ):  # fmt: skip
        done.clear()
        assert command.main(line.split()) == 0 and done == ["interrupts", *expected], line


def test_a_worker_that_cannot_be_prepared_ends_its_server(monkeypatch):
    from m3jax.serve.worker import command as worker_command
    from m3jax.serve.worker import server

    async def prepare():
        raise RuntimeError("no room")

    async def noted(what, value):
        done.append((what, value))

    done = []
    worker = SimpleNamespace(name="m", prepare=prepare, close=lambda how: noted("worker", how))
    listening = SimpleNamespace(stop=lambda seconds: noted("server", seconds))
    monkeypatch.setattr(server, "start", lambda *_: asyncio.sleep(0, (listening, 50051)))
    monkeypatch.setattr(worker_command, "say", done.append)
    with pytest.raises(RuntimeError, match="no room"):
        served = worker_command._serve(SimpleNamespace(host="h", port=0, drain=3.0), worker)
        asyncio.run(asyncio.wait_for(served, 30))
    assert done == ["listening at grpc://h:50051; compiling", ("server", 3.0), ("worker", "abort")]


@pytest.mark.parametrize("token", [0, 31, 32, 62, 63, 64, 95])
def test_a_token_is_one_bit_of_a_guides_words(token):
    """The first is the lowest bit of the first word."""
    bits = lambda words: np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
    is_token = np.arange(96) == token
    np.testing.assert_array_equal(bits(guides._with(np.zeros(3, np.uint32), [token])), is_token)
    np.testing.assert_array_equal(bits(guides._without(np.full(3, 2**32 - 1, np.uint32), [token])), ~is_token)


def test_the_ranges_of_whole_numbers():
    """Each protocol's own; those of sampling, which all have, are in test_fields.py. A conversation is not empty."""
    of_sampling = sampling_fields(MODEL).keys()
    own = lambda table: [(name, field) for name, field in table.items() if name not in of_sampling]
    ranges, fewest = {}, {}
    for endpoint in ENDPOINTS:
        fields = own(endpoint.table(MODEL))
        ranges[endpoint.path] = {
            name: (field.default, field.least, field.most) for name, field in fields if isinstance(field, IntegerField)
        }
        fewest[endpoint.path] = {name: field.least for name, field in fields if isinstance(field, ListField)}
    limit = (None, 1, 1 << 24)
    assert ranges == {
        "/v1/chat/completions": dict(max_completion_tokens=limit, max_tokens=limit, top_logprobs=(None, 0, 20)),
        "/v1/completions": dict(max_tokens=(16, 0, 1 << 24), logprobs=(None, 0, 20), best_of=(None, 1, 128)),
        "/v1/messages": dict(max_tokens=limit), "/v1/messages/count_tokens": dict(max_tokens=limit),
        "/v1/responses": dict(max_output_tokens=limit), "/tokenize": {}, "/detokenize": {},
    }  # fmt: skip
    assert fewest == {
        "/v1/chat/completions": dict(messages=1, tools=0), "/v1/completions": {}, "/v1/responses": dict(tools=0),
        "/v1/messages": dict(messages=1, tools=0), "/v1/messages/count_tokens": dict(messages=1, tools=0),
        "/tokenize": dict(messages=0, tools=0), "/detokenize": dict(tokens=0),
    }  # fmt: skip


# Of a field: values that are taken, and values that are not. The reader is where what stands inside is checked.
INSIDE = {
    "prompt": (
        lambda fields: tokens_of(TOKENIZER, fields["prompt"], "prompt", 50, 100),
        ["a", [0], [49], [[49], "a"], ["a", "b"]], ["", [], [50], [-1], [[]], ["a", ""], [[1], [50]], [["a"]], [True]],
    ),
    "tokens": (
        lambda fields: tokens_of(TOKENIZER, [fields["tokens"]], "tokens", 50, 100), [[0, 49]], [[50], [-1], ["a"]],
    ),
    "stop_token_ids": (lambda fields: sampling_params(fields, MODEL), [[], [0, 49]], [[50], [-1], ["a"], [1.5]]),
    "logit_bias": (
        lambda fields: sampling_params(fields, MODEL), [{}, {"7": -100}, {"7": 100}, {"7": 0.5}],
        [{"7": -100.5}, {"7": 100.5}, {"7": "1"}, {"7": None}],
    ),
    "stream_options": (
        includes_usage,
        [{}, {"include_usage": True}, {"include_usage": False, "include_obfuscation": True}],
        [{"include_usage": 1}, {"include_obfuscation": None}, {"other": True}],
    ),
    "chat_template_kwargs": (
        lambda fields: thinking_mode(fields, "adaptive"),
        [{}, {"thinking_mode": "enabled"}, {"enable_thinking": False}, {"thinking_mode": "adaptive"}],
        [{"thinking_mode": "on"}, {"enable_thinking": 1}, {"thinking_mode": None}, {"tools": []}],
    ),
    "thinking": (
        lambda fields: thinking_mode(fields, "adaptive"), [{"type": "disabled"}, {"type": "enabled", "more": 1}],
        [{}, {"type": "on"}, {"type": None}],
    ),
    "tool_choice": (
        tool_choice, ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
        ["any", "", {"type": "tool", "name": "f"}, {"function": {"name": "f"}}, 1, []],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_stands_inside_a_field_is_read_as_it_is_described(name):
    """The document and OpenAI's readers take the same values, at the ends of what they take and beyond them."""
    reader, taken, refused = INSIDE[name]
    tables = [endpoint.table(MODEL) for endpoint in ENDPOINTS if endpoint.style is OPENAI]
    tables = [table for table in tables if name in table and not isinstance(table[name], FixedField | TextField)]
    others = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "tokens": [1]}
    for table in tables:
        described = jsonschema.Draft202012Validator(object_schema(table)["properties"][name])
        stream = {"stream": True} if name == "stream_options" else {}
        base = {other: value for other, value in others.items() if other in table and table[other].is_required}
        for value in taken:
            assert described.is_valid(value), value
            reader(Fields({**base, **stream, name: value}, table))
        for value in refused:
            assert not described.is_valid(value), value
            with pytest.raises(ApiError) as caught:
                reader(Fields({**base, **stream, name: value}, table))
            assert caught.value.status == 400
    assert tables


def test_no_part_of_the_command_runs_without_its_extra(monkeypatch, capsys, tmp_path):
    """Each package of the extra is looked for, before anything is loaded; a gateway and a replay need all of them."""
    from m3jax.serve.worker import command as worker_command

    (tmp_path / "log").write_text("")
    for module in (command, worker_command):
        monkeypatch.setattr(module, "raise_interrupts", lambda: pytest.fail("it went on"))
    monkeypatch.setattr(worker_command, "raise_interrupts", lambda: None)
    for lacking in ("starlette", "llguidance"):
        absent = lambda name, lacking=lacking: None if name == lacking else object()
        for module in (command, worker_command):
            monkeypatch.setattr(module, "find_spec", absent)
        needs = [[], ["gateway", "--worker", "a:1"], ["verify", str(tmp_path / "log")]]
        for words in needs if lacking == "starlette" else [*needs, ["worker"], ["worker", "--role", "prefill"]]:
            assert command.main(words) == 2, words
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1) and lacking in err and "pip install 'm3jax[serve]'" in err
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {"grpcio": "grpc", "smg-grpc-proto": "smg_grpc_proto", "prometheus-client": "prometheus_client"}
    packages = [re.match(r"[\w-]+", each)[0].lower() for each in extra["serve"]]
    assert sorted(command._NEEDED) == sorted(named.get(name, name) for name in packages)
    assert set(worker_command._NEEDED) <= set(command._NEEDED)


def test_what_each_request_must_have():
    """All else may be left out; null is as good as nothing."""
    required = {
        endpoint.path: {name for name, field in endpoint.table(MODEL).items() if field.is_required}
        for endpoint in ENDPOINTS
    }
    assert required == {
        "/v1/chat/completions": {"messages"}, "/v1/completions": {"prompt"}, "/v1/responses": {"input"},
        "/v1/messages": {"messages", "max_tokens"}, "/v1/messages/count_tokens": {"messages"},
        "/tokenize": set(), "/detokenize": {"tokens"},
    }  # fmt: skip
    defaults = lambda path: {
        name: field.default
        for endpoint in ENDPOINTS if endpoint.path == path
        for name, field in endpoint.table(MODEL).items() if type(getattr(field, "default", None)) is bool
    }  # fmt: skip
    assert defaults("/v1/chat/completions") == dict(
        parallel_tool_calls=True, stream=False, ignore_eos=False, logprobs=False, return_blocks=False,
        return_progress=False, skip_special_tokens=False,
    )  # fmt: skip
    assert defaults("/v1/completions") == dict(
        stream=False, ignore_eos=False, echo=False, skip_special_tokens=True, add_special_tokens=False
    )
    assert defaults("/v1/responses") == dict(parallel_tool_calls=True, stream=False, ignore_eos=False)
    assert defaults("/v1/messages") == dict(stream=False, ignore_eos=False)
    assert defaults("/tokenize") == dict.fromkeys(
        ("with_pieces", "return_token_strs", "add_special_tokens", "add_special"), False
    )
