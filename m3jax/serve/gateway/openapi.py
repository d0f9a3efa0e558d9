"""The OpenAPI document at /openapi.json: all endpoints with what they take, what they answer, and every error.

Requests are described by the tables that check them (`m3jax.serve.gateway.fields`). The answers' schemas stand here;
they allow no field that they do not name, and the tests hold each answer to them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from m3jax.serve.gateway.fields import object_schema
from m3jax.serve.gateway.gateway import Gateway
from m3jax.serve.gateway.http import ANTHROPIC, Endpoint, Style
from m3jax.version import VERSION

_Schema = Mapping[str, Any]

_TEXT, _FLAG, _NULL = {"type": "string"}, {"type": "boolean"}, {"type": "null"}
_COUNT, _NUMBER = {"type": "integer", "minimum": 0}, {"type": "number"}


def _object(optional: Mapping[str, _Schema] | None = None, /, **required: _Schema) -> dict[str, Any]:
    """Return the schema of an object of these fields and no others; the first argument has those that may lack."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(of: _Schema) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _or_null(schema: _Schema) -> dict[str, Any]:
    return {"anyOf": [schema, _NULL]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_BLOCKS = _object(
    block_size=_COUNT,
    choices=_COUNT,
    texts=_list(_TEXT),
    tokens=_list(_object(text=_TEXT, blocks=_list({**_list(_COUNT), "minItems": 2, "maxItems": 2}))),
)
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_CALL = _object(
    id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments={**_TEXT, "description": "JSON"})
)
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_TOOL_USE = _object(type={"const": "tool_use"}, id=_TEXT, name=_TEXT, input={"type": "object"})
_STATUS = {"enum": ["completed", "in_progress", "incomplete"]}
_ITEMS = (
    _object(
        type={"const": "reasoning"}, id=_TEXT, status=_STATUS, summary=_list({}),
        content=_list(_object(type={"const": "reasoning_text"}, text=_TEXT)),
    ),
    _object(
        type={"const": "message"}, id=_TEXT, status=_STATUS, role={"const": "assistant"},
        content=_list(_object(type={"const": "output_text"}, text=_TEXT, annotations=_list({}))),
    ),
    _object(
        type={"const": "function_call"}, id=_TEXT, call_id=_TEXT, name=_TEXT, arguments=_TEXT, status=_STATUS
    ),
)  # fmt: skip

SCHEMAS: Mapping[str, _Schema] = {
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
        completion_tokens_details=_object(reasoning_tokens=_COUNT),
    ),
    "ChatCompletion": _object(
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(
                {"blocks": _BLOCKS},
                index=_COUNT,
                message=_object(
                    {"reasoning_content": _TEXT, "reasoning": _TEXT, "tool_calls": _list(_CALL)},
                    role={"const": "assistant"},
                    content=_or_null(_TEXT),
                    refusal=_NULL,
                ),
                logprobs=_or_null(
                    _object(content=_list(_object(top_logprobs=_list(_object(**_TOKEN)), **_TOKEN)), refusal=_NULL)
                ),
                finish_reason=_FINISH,
            )
        ),
        usage=_ref("Usage"),
    ),
    "Completion": _object(
        id=_TEXT,
        object={"const": "text_completion"},
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(
                index=_COUNT,
                text=_TEXT,
                logprobs=_or_null(
                    _object(
                        tokens=_list(_TEXT),
                        token_logprobs=_list(_or_null(_NUMBER)),
                        top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
                        text_offset=_list(_COUNT),
                    )
                ),
                finish_reason=_FINISH,
            )
        ),
        usage=_ref("Usage"),
    ),
    "Message": _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content=_list(
            {
                "anyOf": [
                    _object(type={"const": "text"}, text=_TEXT),
                    _object(type={"const": "thinking"}, thinking=_TEXT, signature=_TEXT),
                    _TOOL_USE,
                ]
            }
        ),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=_or_null(_TEXT),
        usage=_object(
            input_tokens=_COUNT,
            cache_creation_input_tokens=_COUNT,
            cache_read_input_tokens=_COUNT,
            output_tokens=_COUNT,
        ),
    ),
    "TokenCount": _object(input_tokens=_COUNT),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status={"enum": ["completed", "incomplete", "in_progress", "failed"]},
        error=_or_null(_object(code=_TEXT, message=_TEXT)),
        incomplete_details=_or_null(_object(reason={"const": "max_output_tokens"})),
        instructions=_or_null(_TEXT),
        metadata={},
        output=_list({"anyOf": list(_ITEMS)}),
        parallel_tool_calls=_FLAG,
        temperature=_NUMBER,
        top_p=_NUMBER,
        tool_choice={},
        tools=_list({}),
        store={"const": False},
        usage=_or_null(
            _object(
                input_tokens=_COUNT,
                input_tokens_details=_object(cached_tokens=_COUNT),
                output_tokens=_COUNT,
                output_tokens_details=_object(reasoning_tokens=_COUNT),
                total_tokens=_COUNT,
            )
        ),
    ),
    "Tokens": _object(
        {"token_strs": _list(_TEXT)},
        count=_COUNT,
        max_model_len=_COUNT,
        tokens={"anyOf": [_list(_COUNT), _list(_object(id=_COUNT, piece=_TEXT))]},
    ),
    "Text": _object(prompt=_TEXT, content=_TEXT),
    "Model": _object(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_COUNT,
        type={"const": "model"},
        display_name=_TEXT,
        created_at=_TEXT,
    ),
    "Models": _object(
        object={"const": "list"}, data=_list(_ref("Model")), first_id=_TEXT, last_id=_TEXT, has_more={"const": False}
    ),
    "TokenizerInfo": _object(
        tokenizer_class=_TEXT,
        bos_token=_or_null(_TEXT),
        eos_token=_or_null(_TEXT),
        pad_token=_or_null(_TEXT),
        vocab_size=_COUNT,
        chat_template=_TEXT,
        add_bos_token={"const": False},
    ),
    "Health": _object(status={"const": "ok"}),
    "Document": {"type": "object"},
    "OpenAIError": _object(
        error=_object(
            message=_TEXT,
            type=_TEXT,
            param={**_or_null(_TEXT), "description": "the field that is wrong"},
            code={**_or_null(_TEXT), "description": "a word for programs"},
        )
    ),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
}

_ASKED = [{"role": "user", "content": "What is a context manager?"}]
# Of an endpoint that takes JSON: what it is for, the schema of its answer, of its stream's events a word, a request.
_POSTS: Mapping[str, tuple[str, str, str | None, Mapping[str, Any]]] = {
    "/v1/chat/completions": (
        "OpenAI's chat", "ChatCompletion", "chat.completion.chunk objects, then [DONE]", {"messages": _ASKED},
    ),
    "/v1/completions": (
        "OpenAI's completions", "Completion", "text_completion objects, then [DONE]", {"prompt": "def f(x):"},
    ),
    "/v1/messages": (
        "Anthropic's messages", "Message", "message_start to message_stop, and ping",
        {"messages": _ASKED, "max_tokens": 100},
    ),
    "/v1/messages/count_tokens": (
        "Tokens of Anthropic's messages as a prompt", "TokenCount", None, {"messages": _ASKED},
    ),
    "/v1/responses": (
        "OpenAI's responses, without a store", "Response", "response.created to response.completed",
        {"input": "What is a context manager?"},
    ),
    "/tokenize": ("Token ids of a text or a conversation", "Tokens", None, {"prompt": "a b"}),
    "/detokenize": ("The text of token ids", "Text", None, {"tokens": [5, 6, 7]}),
}  # fmt: skip
_GETS: Mapping[str, tuple[str, str, str]] = {
    "/v1/models": ("The one model", "application/json", "Models"),
    "/v1/models/{name}": ("A model by its name", "application/json", "Model"),
    "/tokenizer_info": ("Special tokens and the chat template", "application/json", "TokenizerInfo"),
    "/openapi.json": ("This document", "application/json", "Document"),
    "/health": ("Whether requests are taken", "application/json", "Health"),
    "/metrics": ("Figures for Prometheus", "text/plain", "Text"),
    "/": ("A page to chat with", "text/html", "Text"),
}
_OPEN = ("/health", "/")  # where no key is asked for

ERRORS: Mapping[int, str] = {
    400: "A field that is wrong or unknown, named in param; media or messages that cannot be read",
    401: "No key, or a wrong one",
    404: "Another model",
    413: "A body that is too large",
    429: "Too many requests at once",
    500: "The server failed, and its log says why",
    503: "Loading, draining, or no worker can be reached",
    504: "It took too long",
}
_OF_READS = {"/health": (503,), "/metrics": (401,), "/": (), "/v1/models/{name}": (401, 404, 503)}


def document(gateway: Gateway, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a gateway.

    Args:
      gateway: that serves; the ranges of some fields are those of its model.
      endpoints: that take JSON.
    """
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        about, answer, events, example = _POSTS[endpoint.path]
        content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
        if events is not None:
            event = _object({"event": _TEXT}, data={**_TEXT, "description": "JSON"})
            content["text/event-stream"] = {"schema": {**event, "description": f"with stream: {events}"}}
        schema = object_schema(gateway.table(endpoint.table))
        operation = _operation(endpoint.path, about, content, tuple(ERRORS), endpoint.style)
        body = {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}
        paths[endpoint.path] = {"post": {**operation, "requestBody": body}}
    for path, (about, media_type, answer) in _GETS.items():
        content = {media_type: {"schema": _ref(answer) if media_type == "application/json" else _TEXT}}
        operation = _operation(path, about, content, _OF_READS.get(path, (401, 503)))
        if "{name}" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
        paths[path] = {"get": operation}
    keys = [{"bearer": []}, {"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "m3jax", "version": VERSION, "summary": f"The model {gateway.model.name}"},
        "paths": paths,
        "security": keys if gateway.settings.api_key is not None else [],
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(
    path: str, about: str, content: Mapping[str, Any], statuses: Sequence[int], style: Style | None = None
) -> dict[str, Any]:
    """Return the description of an endpoint, without what it takes.

    Args:
      path: of it.
      about: a few words.
      content: of the answer 200, by media type.
      statuses: of its errors.
      style: of its errors; None where it is read by clients of both protocols.
    """
    name = "AnthropicError" if style is ANTHROPIC else "OpenAIError"
    # What both clients read answers in the words of the one that asks.
    error = {"anyOf": [_ref("OpenAIError"), _ref("AnthropicError")]} if style is None else _ref(name)
    answers: dict[str, Any] = {"200": {"description": about, "content": content}}
    for status in statuses:
        described = {"description": ERRORS[status], "content": {"application/json": {"schema": error}}}
        if status in (429, 503):
            described["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
        answers[str(status)] = described
    return {"summary": about, "responses": answers, **({"security": []} if path in _OPEN else {})}
