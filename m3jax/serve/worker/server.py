"""A worker behind gRPC: the service `vllm.grpc.engine.VllmEngine`."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as protocol

from m3jax.decoding.loop import LoopClosed, LoopFull
from m3jax.messages import printable, shortened
from m3jax.serve.worker.worker import Worker
from m3jax.transfer import TransferError
from m3jax.transfer.listening import bound_port, server_options

_MOST_BYTES = 512 << 20  # of one message: 200 images of the hub's usual size take some 400 MB
_LOG = logging.getLogger(__name__)
# What a worker raises, as a gateway is told it. Anything else is a fault of the worker's own.
_STATUS = (
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (LoopFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LoopClosed, grpc.StatusCode.UNAVAILABLE),
    (TransferError, grpc.StatusCode.UNAVAILABLE),
)
_SERVICE = protocol.DESCRIPTOR.services_by_name["VllmEngine"]


def _handlers(worker: Worker) -> grpc.GenericRpcHandler:
    """Return the service: each call is the worker's of the same name; those that it does not have are UNIMPLEMENTED.

    Requests are parsed here and not by gRPC, which would call bytes that are no message an error of the server.
    """
    handlers = {}
    for method in _SERVICE.methods:
        call, message = getattr(worker, method.name, None), GetMessageClass(method.input_type)
        if call is None:
            continue
        if method.server_streaming:
            handle, kind = _streamed(call, message), grpc.unary_stream_rpc_method_handler
        else:
            handle, kind = _answered(call, message), grpc.unary_unary_rpc_method_handler
        handlers[method.name] = kind(handle, response_serializer=lambda response: response.SerializeToString())
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)


def _answered(call: Callable[[Any], Any], message: type[Message]) -> Callable[[bytes, Any], Any]:
    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> Message:
        try:
            return await call(_parsed(data, message))
        except Exception as error:
            await _refuse(context, error)

    return handle


def _streamed(
    call: Callable[[Any], AsyncIterator[Message]], message: type[Message]
) -> Callable[[bytes, Any], AsyncIterator[Message]]:
    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        # Now, not with the first message: a gateway takes a subscription without news for a worker that is gone.
        await context.send_initial_metadata(())
        try:
            # Closed at once where the client is gone, not when it is collected: that frees its pages.
            async with aclosing(call(_parsed(data, message))) as messages:
                async for each in messages:
                    yield each
        except Exception as error:
            await _refuse(context, error)

    return handle


def _parsed(data: bytes, message: type[Message]) -> Message:
    """Return a request; ValueError for bytes that are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise ValueError(f"the request is no {message.DESCRIPTOR.name}: {error}") from error


async def _refuse(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """End a call with the status of what was raised."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    if status == grpc.StatusCode.INTERNAL:
        _LOG.error("a call failed", exc_info=error)
    await context.abort(status, shortened(printable(str(error) or type(error).__name__)))


async def start(worker: Worker, host: str = "127.0.0.1", port: int = 0) -> tuple[grpc.aio.Server, int]:
    """Listen for calls.

    Args:
      worker: it is not closed with the server.
      host: address to listen on.
      port: 0 takes a free one.

    Returns:
      (the server, which `stop` ends; its port).

    Raises:
      ValueError: the port cannot be listened on.
    """
    server = grpc.aio.server(options=server_options(_MOST_BYTES))
    server.add_generic_rpc_handlers((_handlers(worker),))
    bound = bound_port(server, host, port)
    await server.start()
    return server, bound
