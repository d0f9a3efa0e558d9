"""A prefiller behind gRPC: the service `m3jax.transfer.Prefill`, whose messages are frames.

Describe: nothing -> one frame "hello" with the identity, and no prompt
Read:     a frame "ask" with the prompt's ids, and the patches of its images and videos
          -> frames "hello", "pages", "scores" and "alive" as they come, "end"
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from m3jax.decoding import Media
from m3jax.messages import printable, shortened
from m3jax.transfer.frames import Frame, TransferError, decode, encode
from m3jax.transfer.listening import bound_port, server_options
from m3jax.transfer.prefiller import Prefiller

SERVICE = "m3jax.transfer.Prefill"
OPTIONS = server_options()  # a frame has eight pages of a layer: megabytes
_THREADS = 64  # transfers at once, each of which has one


def start(prefiller: Prefiller, host: str = "127.0.0.1", port: int = 0) -> tuple[grpc.Server, int]:
    """Listen for engines that decode.

    Args:
      prefiller: it is not closed with the server.
      host: address to listen on.
      port: 0 takes a free one.

    Returns:
      (the server, which `stop` ends; its port).

    Raises:
      ValueError: the port cannot be listened on.
    """

    def describe(_: bytes, context: grpc.ServicerContext) -> bytes:
        return encode(Frame("hello", {"identity": prefiller.identity}), "", 0)

    def read(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            ask, transfer, _ = decode(data)
            ids, left_out = ask.arrays["prompt"].tolist(), int(ask.fields.get("left_out", 0))
            scores = {name: ask.fields[name] for name in ("next_token", "prompt_logprobs") if name in ask.fields}
            frames = prefiller.read(ids, left_out, media=_media_of(ask), **scores)
            try:
                for number, frame in enumerate(frames):
                    if not context.is_active():  # the receiver is gone
                        return
                    yield encode(frame, transfer, number)
            finally:
                frames.close()  # which frees the prompt's pages
        except KeyError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "ask for a prompt: its ids or its patches are missing")
        except (ValueError, TransferError) as error:
            is_refused = isinstance(error, ValueError)
            status = grpc.StatusCode.INVALID_ARGUMENT if is_refused else grpc.StatusCode.UNAVAILABLE
            context.abort(status, shortened(printable(str(error))))

    server = grpc.server(ThreadPoolExecutor(_THREADS, thread_name_prefix="m3jax transfer"), options=OPTIONS)
    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Read": grpc.unary_stream_rpc_method_handler(read),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    bound = bound_port(server, host, port)
    server.start()
    return server, bound


def ask_frame(
    prompt: tuple[int, ...],
    left_out: int = 0,
    media: Media | None = None,
    next_token: int | None = None,
    prompt_logprobs: int | None = None,
) -> Frame:
    """Return the message that asks for the pages of a prompt's tokens, without those of the first `left_out`.

    Args:
      prompt: token ids.
      left_out: tokens at the beginning whose pages are not asked for.
      media: images and chunks of videos of the prompt, (patches, grid) each.
      next_token: the token behind the prompt, which is sent where scores are asked for.
      prompt_logprobs: as in `Prefiller.read`; None asks for no scores.
    """
    fields: dict[str, Any] = {"left_out": left_out}
    if prompt_logprobs is not None:
        fields |= {"next_token": next_token, "prompt_logprobs": prompt_logprobs}
    arrays = {"prompt": np.asarray(prompt, np.int64)}
    if media:
        grids, patches = media.to_arrays()
        fields, arrays = fields | grids, arrays | patches
    return Frame("ask", fields, arrays)


def _media_of(ask: Frame) -> Media | None:
    """Return what `ask_frame` was given; None for a prompt of text alone.

    Raises:
      KeyError: a grid without patches.
    """
    grids = {kind: ask.fields[kind] for kind in ("images", "videos") if kind in ask.fields}
    return Media.from_arrays(grids, ask.arrays) or None
