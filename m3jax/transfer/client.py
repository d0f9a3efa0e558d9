"""Prompts read elsewhere: what an engine that decodes asks of one that reads prompts, by gRPC."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import jax
from jaxtyping import PyTree

from m3jax.decoding import Engine, Media, Params
from m3jax.decoding.engine import Snapshot
from m3jax.decoding.engine.media import as_media
from m3jax.transfer.frames import TransferError, decode, encode
from m3jax.transfer.identity import check_identity, transfer_identity
from m3jax.transfer.receiver import PageReceiver
from m3jax.transfer.service import OPTIONS, SERVICE, ask_frame

SILENCE_SECONDS = 60.0  # without any frame, after which a transfer is given up; a prompt that waits sends "alive"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Transferred:
    """A prompt's pages that have come, all of them.

    Attributes:
      snapshot: for `Engine.import_request`: all tokens of the prompt but the last are in its pages.
      cached_tokens: of the prompt, those that the engine that read it had in its prefix cache.
      num_bytes: of all frames.
      seconds: from the question to the last frame.
      address: of the engine that read the prompt.
      left_out: tokens at the beginning of which no page came, as it was asked.
    """

    snapshot: Snapshot
    cached_tokens: int
    num_bytes: int
    seconds: float
    address: str
    left_out: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose pages came."""
        return self.snapshot.cached - self.left_out

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token whose page came took on the wire."""
        return self.num_bytes / max(self.num_tokens, 1)

    def __str__(self) -> str:
        known = f" ({self.left_out:,} more were known here)" if self.left_out else ""
        return (
            f"{self.num_tokens:,} tokens of a prompt{known} from {self.address} in {self.seconds:.2f} s, "
            f"{self.num_bytes:,} bytes, {self.bytes_per_token:,.0f} a token"
        )


class PrefillClient:
    """Prefillers of other processes, of which each prompt goes to the one with the fewest that go on.

    Any thread may call it.

    Args:
      addresses: HOST:PORT of each.
      engine: that the pages are for. It is asked once, here.
      silence_seconds: that a transfer may be silent before it is given up.

    Raises:
      ValueError: no address, or an engine whose pages cannot be moved.
    """

    def __init__(self, addresses: Sequence[str], engine: Engine, silence_seconds: int | float = SILENCE_SECONDS):
        if not addresses:
            raise ValueError("no address of an engine that reads prompts: give HOST:PORT")
        self._identity, self._engine_identity = transfer_identity(engine), engine.identity
        self._layout: PyTree[jax.ShapeDtypeStruct] = engine.page_layout
        self._config, self._silence_seconds = engine.config, silence_seconds
        self._channels = {address: grpc.insecure_channel(address, OPTIONS) for address in addresses}
        self._num_open = dict.fromkeys(addresses, 0)
        self._lock = threading.Lock()

    def check(self, wait_seconds: int | float = 0) -> None:
        """Ask every prefiller for its identity.

        Args:
          wait_seconds: that one gets to answer at all: it reads its weights first.

        Raises:
          TransferError: one does not answer, or has pages of another model or cache.
        """
        for address, channel in self._channels.items():
            call = channel.unary_unary(f"/{SERVICE}/Describe")
            try:
                frame, _, _ = decode(call(b"", timeout=max(wait_seconds, 1.0), wait_for_ready=wait_seconds > 0))
            except grpc.RpcError as error:
                raise TransferError(f"{address} does not read prompts: {_said(error)}") from None
            check_identity(frame.fields.get("identity"), self._identity, address)

    def fetch(
        self,
        prompt: Sequence[int],
        params: Params,
        is_stopped: Callable[[], bool] = lambda: False,
        left_out: int = 0,
        media: Media | None = None,
    ) -> Transferred:
        """Have a prompt read elsewhere, and return its pages when all have come.

        Args:
          prompt: token ids, at least 2; the last one is left to the engine that decodes.
          params: how the request goes on. Where it asks for `prompt_logprobs` they come with the pages.
          is_stopped: asked again and again; once it is True the transfer is given up.
          left_out: tokens at the beginning whose pages the engine that decodes knows (`Engine.known_tokens`).
          media: images and videos of the prompt. They travel to the prefiller, whose tower reads them, and are in the
            snapshot too, for the day on which the engine that decodes has to read the prompt again. The prompt's last
            token is none of theirs.

        Raises:
          ValueError: a prompt that the prefiller refuses, or media of a model without a tower.
          TransferError: pages came damaged, out of order, of another model, too late or not at all. Of what came
            nothing is used, and the prefiller frees what it has.
        """
        prompt = tuple(map(int, prompt))
        if len(prompt) < 2:
            raise ValueError(f"a prompt of {len(prompt)} tokens has no pages to fetch: give at least 2")
        began, transfer = time.monotonic(), secrets.token_hex(8)
        media = as_media(media.segments(self._config)) if media else Media()
        asked = params.prompt_logprobs
        scored = () if asked is None else prompt[1:]
        with self._least_loaded() as (address, channel):
            receiver = PageReceiver(
                *(transfer, len(prompt) - 1, self._layout, self._config.index_block_size, self._identity, address),
                left_out=left_out,
                scored=scored,
            )
            ask = ask_frame(prompt[:-1], left_out, media, next_token=prompt[-1], prompt_logprobs=asked)
            call = channel.unary_stream(f"/{SERVICE}/Read")(encode(ask, transfer, 0))
            with _Watch(call, self._silence_seconds, is_stopped) as watch:
                try:
                    for data in call:
                        watch.note()
                        receiver.take(data)
                except grpc.RpcError as error:
                    if not watch.reason and error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                        raise ValueError(error.details()) from None
                    if not watch.reason:
                        raise TransferError(f"{address} ended the transfer: {_said(error)}") from None
            if watch.reason:  # the last frame may have come before the call was cancelled
                raise TransferError(f"{address}: {watch.reason}")
            pages = receiver.pages()
        identity, cached = self._engine_identity, len(prompt) - 1
        scores = tuple(receiver.prompt_logprobs)
        snapshot = Snapshot(prompt, (), (), params, cached, pages, identity, media, prompt_logprobs=scores)
        seconds = time.monotonic() - began
        return Transferred(snapshot, receiver.cached_tokens, receiver.num_bytes, seconds, address, left_out)

    def close(self) -> None:
        """End all connections."""
        for channel in self._channels.values():
            channel.close()

    @contextmanager
    def _least_loaded(self) -> Iterator[tuple[str, grpc.Channel]]:
        """The prefiller with the fewest transfers, which has one more meanwhile."""
        with self._lock:
            address = min(self._num_open, key=self._num_open.__getitem__)
            self._num_open[address] += 1
        try:
            yield address, self._channels[address]
        finally:
            with self._lock:
                self._num_open[address] -= 1


class _Watch:
    """A thread that cancels a call which is silent for too long, or no longer wanted; leaving it ends the call."""

    def __init__(self, call: grpc.Call, silence_seconds: int | float, is_stopped: Callable[[], bool]):
        self.reason = ""
        self._call, self._silence_seconds, self._is_stopped = call, silence_seconds, is_stopped
        self._heard, self._is_over = time.monotonic(), threading.Event()

    def note(self) -> None:
        """Note that something has come, and look whether it is still wanted: all may come between two looks."""
        self._heard = time.monotonic()
        self._end_if_unwanted()

    def __enter__(self) -> "_Watch":
        threading.Thread(target=self._watch, name="m3jax transfer watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._call.cancel()  # a call that has ended stays as it is

    def _watch(self) -> None:
        while not self.reason and not self._is_over.wait(_POLL_SECONDS):
            self._end_if_unwanted()

    def _end_if_unwanted(self) -> None:
        if self._is_stopped():
            self.reason = "the request was given up"
        elif time.monotonic() - self._heard > self._silence_seconds:
            self.reason = f"nothing came for {self._silence_seconds:g} s"
        if self.reason:
            self._call.cancel()


def _said(error: grpc.RpcError) -> str:
    return f"{error.details() or error.code().name.lower()}"
