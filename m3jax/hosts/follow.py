"""An engine on several hosts: process 0 is told what to do, the others do the same, call by call.

An engine decides everything from the calls that it gets, their times, and the masks of guides. So process 0 sends these
three, a few bytes a step, and every process makes the same choices and runs the same programs of the devices; text,
grammars, clients and the clock are process 0's alone. What the devices compute of a call is whole on each process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from time import perf_counter
from typing import Any

import numpy as np
from jaxtyping import UInt32

from m3jax.cache import OutOfPages
from m3jax.decoding.engine import Engine, Guide
from m3jax.decoding.engine.request import as_prompt
from m3jax.hosts.channel import Channel
from m3jax.hosts.wire import from_bytes, to_bytes

# All that changes an engine. What only reads one is answered by process 0 alone.
ORDERS = frozenset({"add", "abort", "stop", "forget", "take", "copy", "truncate", "export", "import_request"})
CALLS = ORDERS | {"step", "prefill", "check", "warmup", "warmup_for"}
# An order that cannot be carried out is refused on every process, and the engine is as it was. What the others raise
# is the end: a process that waited for a refusal then would keep all others waiting in a sum over devices.
_REFUSALS = (ValueError, OutOfPages)
_LOCAL = ("watch",)  # arguments that stay with process 0


class LeadingEngine(Engine):
    """An engine of process 0 whose calls the other processes follow; made by `led`."""

    _channel: Channel
    _depth: int  # of calls that are under way: a call that another one makes is not sent

    def update(self, *_: Any, **__: Any) -> int:
        """Raise ValueError: weights are no part of a call."""
        raise ValueError("the weights of an engine on several hosts are not changed while it is led: end it before")


def _sent(name: str) -> Callable[..., Any]:
    """Return a method of `LeadingEngine` that sends the call before it makes it."""
    parameters = signature(getattr(Engine, name))

    @wraps(getattr(Engine, name))
    def call(self: LeadingEngine, *args: Any, **kwargs: Any) -> Any:
        method = getattr(super(LeadingEngine, self), name)
        if self._depth:
            return method(*args, **kwargs)
        kwargs, told = dict(parameters.bind(self, *args, **kwargs).arguments), {}  # each argument by its name
        del kwargs["self"]
        if name == "add":
            kwargs["prompt"] = as_prompt(kwargs["prompt"])
            guide = kwargs.pop("guide", None)
            kwargs["guide"] = None if guide is None else ToldGuide(guide, self._channel)
            told["has_guide"] = guide is not None
        carried = {key: value for key, value in kwargs.items() if key not in (*_LOCAL, "guide")}
        now = perf_counter()
        told |= {"call": name, "kwargs": carried, "now": now, "state": _state(self)}
        self._channel.send(to_bytes(told))
        self._depth, self.clock = 1, lambda: now
        try:
            return method(**kwargs)
        except _REFUSALS as error:
            if name in ORDERS:
                self._channel.send(to_bytes({"refused": type(error).__name__}))
            raise
        finally:
            self._depth = 0

    return call


for _name in CALLS:
    setattr(LeadingEngine, _name, _sent(_name))


@contextmanager
def led(engine: Engine, channel: Channel | None) -> Iterator[Engine | None]:
    """Yield the engine to process 0, which leads it until the block ends; the others follow until then, and get None.

    Args:
      engine: made alike on every process; not used otherwise from here on.
      channel: of the run; None in a single process, which gets the engine as it is.

    Raises:
      RuntimeError: this process's engine is not in the state of process 0's.
    """
    if channel is None:
        yield engine
        return
    if not channel.is_sender:
        _follow(engine, channel)
        yield None
        return
    leading = object.__new__(LeadingEngine)
    leading.__dict__ = engine.__dict__
    leading._channel, leading._depth = channel, 0
    yield leading
    release(channel)


def release(channel: Channel) -> None:
    """End the block of the processes that follow: of `led`, or of a process 0 that ends before it came to lead.

    Args:
      channel: of the run, on process 0.
    """
    channel.send(to_bytes({"end": True}))


def _follow(engine: Engine, channel: Channel) -> None:
    """Make the calls that process 0 makes, until it ends."""
    while "end" not in (told := from_bytes(channel.receive())):
        if "refused" in told:
            raise RuntimeError(f"process 0 met a {told['refused']} in a call that went through here")
        if told["state"] != _state(engine):
            raise RuntimeError(f"before {told['call']} process 0 had {told['state']}, this process {_state(engine)}")
        now, kwargs = told["now"], told["kwargs"]
        if told.get("has_guide"):
            kwargs["guide"] = HeardGuide(channel)
        engine.clock = lambda now=now: now
        try:
            getattr(engine, told["call"])(**kwargs)
        except _REFUSALS as error:
            if told["call"] not in ORDERS or from_bytes(channel.receive()) != {"refused": type(error).__name__}:
                raise


def _state(engine: Engine) -> list[int]:
    """Return numbers that differ soon where two engines were told or have computed different things."""
    pages = engine.pages
    return [*engine.load.values(), pages["free"], pages["used"], engine.timings.decoded_tokens]


class ToldGuide:
    """A guide of process 0, whose masks the other processes are told.

    Args:
      guide: the request's.
      channel: of the engine.
    """

    def __init__(self, guide: Guide, channel: Channel):
        self._guide, self._channel = guide, channel

    def bits(self, new: Sequence[int]) -> UInt32[np.ndarray, " W"] | None:
        """Return the guide's mask, and send it."""
        mask = self._guide.bits(new)
        self._channel.send(to_bytes({"mask": mask}))
        return mask


class HeardGuide:
    """The guide of a request in a process that follows: what it says is what process 0's said.

    Args:
      channel: of the engine.
    """

    def __init__(self, channel: Channel):
        self._channel = channel

    def bits(self, new: Sequence[int]) -> UInt32[np.ndarray, " W"] | None:
        """Return the mask that process 0 sent for the same tokens."""
        told = from_bytes(self._channel.receive())
        if "mask" not in told:
            raise RuntimeError(f"a mask was to come from process 0, and {sorted(told)} came")
        return told["mask"]
