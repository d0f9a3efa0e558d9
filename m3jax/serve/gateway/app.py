"""The gateway's routes."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from m3jax.serve.gateway.chat_completions import chat_completions, fields_of_chat
from m3jax.serve.gateway.completions import completions, fields_of_completions
from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.gateway import Gateway
from m3jax.serve.gateway.http import ANTHROPIC, OPENAI, RESPONSES, Endpoint, Json, check_key, error_response
from m3jax.serve.gateway.messages import count_tokens, fields_of_count, fields_of_messages, messages
from m3jax.serve.gateway.openapi import document
from m3jax.serve.gateway.responses import fields_of_responses, responses
from m3jax.serve.gateway.tokenizing import (
    detokenize,
    fields_of_detokenize,
    fields_of_tokenize,
    model_object,
    models,
    tokenize,
    tokenizer_info,
)

# The page loads nothing, and asks nobody but this server.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ENDPOINTS = (
    Endpoint("/v1/chat/completions", chat_completions, fields_of_chat, OPENAI),
    Endpoint("/v1/completions", completions, fields_of_completions, OPENAI),
    Endpoint("/v1/messages", messages, fields_of_messages, ANTHROPIC),
    Endpoint("/v1/messages/count_tokens", count_tokens, fields_of_count, ANTHROPIC),
    Endpoint("/v1/responses", responses, fields_of_responses, RESPONSES),
    Endpoint("/tokenize", tokenize, fields_of_tokenize, OPENAI),
    Endpoint("/detokenize", detokenize, fields_of_detokenize, OPENAI),
)


def app(gateway: Gateway) -> Starlette:
    """Return the ASGI application of a gateway."""
    cors = Middleware(CORSMiddleware, allow_origins=gateway.settings.origins, allow_methods=["*"], allow_headers=["*"])
    return Starlette(
        routes=[
            *(endpoint.route(gateway) for endpoint in ENDPOINTS),
            Route("/v1/models", _read(gateway, lambda _: models(gateway))),
            Route("/v1/models/{name:path}", _read(gateway, lambda r: model_object(gateway, r.path_params["name"]))),
            Route("/openapi.json", _read(gateway, lambda _: document(gateway, ENDPOINTS))),
            Route("/tokenizer_info", _read(gateway, lambda _: tokenizer_info(gateway))),
            Route("/health", _health(gateway)),
            Route("/metrics", _metrics(gateway)),
            Route("/", _page(gateway)),
        ],
        middleware=[cors] if gateway.settings.origins else [],
        exception_handlers={HTTPException: _http_error},
    )


def _read(gateway: Gateway, describe: Callable[[Request], dict]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of something that is only read."""

    async def read(request: Request) -> Response:
        try:
            check_key(gateway, request.headers)
            gateway.check_ready()
            return Json(describe(request), headers=dict(gateway.headers))
        except ApiError as error:
            style = ANTHROPIC if "anthropic-version" in request.headers else OPENAI
            return error_response(error, style, gateway.headers)

    return read


def _health(gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        try:
            gateway.check_ready()
        except ApiError as error:
            return error_response(error, OPENAI, {})
        return Json({"status": "ok"})

    return health


def _metrics(gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        try:
            check_key(gateway, request.headers)
        except ApiError as error:
            return error_response(error, OPENAI, {})
        workers = gateway.workers
        loads = {} if workers is None else await workers.loads()
        names = [] if workers is None else [worker.name for worker in workers.workers]
        return Response(gateway.figures.text(loads, names), media_type="text/plain; version=0.0.4; charset=utf-8")

    return metrics


def _page(gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    text = files("m3jax.serve.gateway").joinpath("page.html").read_text(encoding="utf-8")

    async def page(request: Request) -> Response:
        headers = {"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)

    return page


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer for paths and methods that are not there, in the words of the protocol that the path belongs to."""
    style = ANTHROPIC if request.url.path.startswith("/v1/messages") else OPENAI
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message), style, error.headers or {})
