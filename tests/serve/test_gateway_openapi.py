"""The OpenAPI document: it says what the server does, and the server does what it says."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from starlette.routing import Route
from support.serving import CALL, ScriptedWorker

from m3jax.assets import embedded_path
from m3jax.serve.gateway.app import ENDPOINTS, app
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.loading import open_gateway
from m3jax.serve.gateway.openapi import document
from m3jax.serve.gateway.sampling import Model
from m3jax.serve.gateway.sources import Sources
from m3jax.serve.gateway.workers import LocalWorker

PATHS = [endpoint.path for endpoint in ENDPOINTS]


@pytest.fixture(scope="module")
def described(scripted_server) -> dict[str, Any]:
    """The document as the server gives it."""
    return json.loads(scripted_server[0].ask("/openapi.json")[2])


def schema_of(described: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Return the validator of a schema of the document, whose references lead into it."""
    return jsonschema.Draft202012Validator({**schema, "components": described["components"]})


def operation(described: dict[str, Any], path: str) -> dict[str, Any]:
    return described["paths"][path]["post"]


def request_schema(described: dict[str, Any], path: str) -> dict[str, Any]:
    return operation(described, path)["requestBody"]["content"]["application/json"]["schema"]


def example(described: dict[str, Any], path: str) -> dict[str, Any]:
    return operation(described, path)["requestBody"]["content"]["application/json"]["example"]


def answer_schema(described: dict[str, Any], path: str, status: int) -> dict[str, Any]:
    return operation(described, path)["responses"][str(status)]["content"]["application/json"]["schema"]


def test_every_route_is_described(described):
    """A path that is added is in the document, and each schema in it is one."""
    routes = [route for route in app(Gateway(settings=Settings())).routes if isinstance(route, Route)]
    methods = {"GET": "get", "POST": "post"}
    served = {
        (re.sub(":path", "", route.path), methods[method])
        for route in routes for method in route.methods if method in methods
    }  # fmt: skip
    assert served == {(path, method) for path, item in described["paths"].items() for method in item}
    assert described["openapi"] == "3.1.0"
    for schema in (*described["components"]["schemas"].values(), *(request_schema(described, path) for path in PATHS)):
        jsonschema.Draft202012Validator.check_schema(schema)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert named == set(described["components"]["schemas"])


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_as_described(scripted, described, path):
    """An answer with everything in it, and an error, have the fields of the document and no others."""
    server, worker = scripted
    worker.script = lambda request, index: f"Hm.</mm:think>I look. {CALL}" if "chat" in path else "All is well."
    more = {
        "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2, "return_blocks": True, "n": 2},
        "/v1/completions": {"logprobs": 2, "echo": True, "n": 2},
        "/tokenize": {"with_pieces": True, "return_token_strs": True},
    }
    for fields in ({}, more.get(path, {}), {"no_such_field": 1}):
        status, _, text = server.ask(path, example(described, path) | fields)
        assert status == (400 if "no_such_field" in fields else 200), text
        schema_of(described, answer_schema(described, path, status)).validate(json.loads(text))


def test_reads_are_as_described(scripted, described):
    """Each document that is read, with the statuses and the kind of text that are said."""
    server, _ = scripted
    for path, item in described["paths"].items():
        if "get" in item:
            name = json.loads(server.ask("/v1/models")[2])["data"][0]["id"]
            status, headers, text = server.ask(path.replace("{name}", name))
            (kind,) = item["get"]["responses"]["200"]["content"]
            assert status == 200 and headers["content-type"].split(";")[0] == kind, path
            if kind == "application/json":
                schema = item["get"]["responses"]["200"]["content"][kind]["schema"]
                schema_of(described, schema).validate(json.loads(text))


@pytest.mark.parametrize("key", [None, "k"])
def test_the_document_says_what_is_taken_and_what_may_come(key):
    """Of each endpoint: that it needs a body, its statuses, when to try again, and where a key is asked for."""
    gateway = Gateway(settings=Settings(api_key=key))
    gateway.model = Model("m", 100, 50, (1,), can_see=False, block_size=8, defaults={})
    found = document(gateway, ENDPOINTS)
    posts = {path: item["post"] for path, item in found["paths"].items() if "post" in item}
    gets = {path: item["get"] for path, item in found["paths"].items() if "get" in item}
    errors = ("400", "401", "404", "413", "429", "500", "503", "504")
    for path, post in posts.items():
        assert post["requestBody"]["required"] is True, path
        assert post["responses"].keys() == {"200", *errors} and "security" not in post
    statuses = {path: {status for status in get["responses"] if status != "200"} for path, get in gets.items()}
    assert statuses == {
        "/health": {"503"}, "/metrics": {"401"}, "/": set(), "/v1/models/{name}": {"401", "404", "503"},
        "/v1/models": {"401", "503"}, "/tokenizer_info": {"401", "503"}, "/openapi.json": {"401", "503"},
    }  # fmt: skip
    for path, each in (*posts.items(), *gets.items()):
        for status, answer in each["responses"].items():
            assert ("headers" in answer) == (status in ("429", "503")), (path, status)
            assert not answer.get("headers") or answer["headers"]["Retry-After"]["schema"] == {"type": "integer"}
    assert {path for path, get in gets.items() if get.get("security") == []} == {"/health", "/"}
    (named,) = gets["/v1/models/{name}"]["parameters"]
    assert (named["name"], named["in"], named["required"]) == ("name", "path", True)
    assert not [path for path, get in gets.items() if "parameters" in get and "{" not in path]
    content = {path: get["responses"]["200"]["content"] for path, get in gets.items()}
    refers = {path: {kind: "$ref" in each["schema"] for kind, each in kinds.items()} for path, kinds in content.items()}
    texts = {"/metrics": {"text/plain": False}, "/": {"text/html": False}}
    assert refers == {path: texts.get(path, {"application/json": True}) for path in gets}
    assert content["/metrics"]["text/plain"]["schema"] == {"type": "string"} == named["schema"]
    schema_of_error = lambda item: item["content"]["application/json"]["schema"]
    ref = lambda name: {"$ref": f"#/components/schemas/{name}"}
    assert schema_of_error(posts["/v1/messages"]["responses"]["400"]) == ref("AnthropicError")
    assert schema_of_error(posts["/v1/completions"]["responses"]["400"]) == ref("OpenAIError")
    both = {"anyOf": [ref("OpenAIError"), ref("AnthropicError")]}
    assert schema_of_error(gets["/v1/models"]["responses"]["401"]) == both
    assert found["security"] == ([] if key is None else [{"bearer": []}, {"key": []}])
    assert found["components"]["securitySchemes"]["key"] == {"type": "apiKey", "in": "header", "name": "x-api-key"}


def test_the_objects_of_the_document_have_the_fields_that_are_said_and_no_others(described):
    def objects(schema):
        if isinstance(schema, dict):
            yield from [schema] if "properties" in schema and "type" in schema else []
            for inner in schema.values():
                yield from objects(inner)
        elif isinstance(schema, list):
            for inner in schema:
                yield from objects(inner)

    found = list(objects(described["components"]["schemas"]))
    assert len(found) > 30
    for schema in found:
        assert schema["type"] == "object" and schema["additionalProperties"] is False, schema
        assert set(schema["required"]) <= schema["properties"].keys(), schema


ODD = (True, -1, 5.5, 2**70, "", "x", [None], {})


@pytest.mark.parametrize("path", PATHS)
def test_what_the_document_rules_out_is_refused(scripted, described, path):
    """Every field with every odd value: what its schema does not take gets 400 with the field's name."""
    server, _ = scripted
    refused = 0
    for name, schema in request_schema(described, path)["properties"].items():
        taken, base = schema_of(described, schema), dict(example(described, path))
        if path == "/tokenize" and name in ("content", "messages"):
            del base["prompt"]  # one of the three may be given
        for value in ODD:
            if taken.is_valid(value):
                continue
            refused += 1
            status, _, text = server.ask(path, {**base, name: value})
            assert status == (404 if name == "model" and isinstance(value, str) else 400), (name, value, text)
            error = json.loads(text)["error"]
            assert error.get("param", name) == name and name in error["message"], (name, value, text)
    assert refused > 10


@pytest.fixture(scope="module")
def opened() -> Iterator[Gateway]:
    """A gateway without a server, in front of a scripted worker."""
    gateway = Gateway(settings=Settings())
    worker = ScriptedWorker()
    opening = open_gateway(
        gateway, [LocalWorker(worker)], folder=embedded_path(), name=None, sources=Sources(), processes=1
    )
    parts = asyncio.run(opening)
    gateway.state = "ready"
    yield gateway
    parts.pool.close()


@pytest.mark.further  # the description against chosen requests: the other tests
def test_schemathesis(opened):
    """Requests that schemathesis draws from the document, good ones and bad ones: no 500, and answers as described."""
    import schemathesis  # takes two seconds
    from schemathesis import GenerationMode
    from schemathesis.checks import CheckContext, not_a_server_error  # noqa: F401
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
        negative_data_rejection,
    ]  # fmt: skip
    document = schemathesis.openapi.from_asgi("/openapi.json", app(opened))
    drawn = 0
    for result in document.get_all_operations():
        each = result.ok()
        for mode in GenerationMode if each.method == "post" else [GenerationMode.POSITIVE]:

            @given(case=each.as_strategy(generation_mode=mode))
            @settings(
                max_examples=3, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def run(case):
                nonlocal drawn
                drawn += 1
                case.validate_response(case.call(), checks=checks)

            run()
    assert drawn > 30
