"""An engine of several processes: process 0 leads it, the others make the same calls."""

import threading
from argparse import Namespace
from contextlib import suppress

import numpy as np
import pytest
from support.fake_store import FakeClient, side_by_side

from m3jax.decoding import Params, Sampling, Steer
from m3jax.decoding.engine import Engine, Media
from m3jax.hosts.channel import Channel, Store
from m3jax.hosts.follow import HeardGuide, led
from m3jax.hosts.wire import from_bytes, to_bytes


def test_a_message_is_what_was_sent():
    params = Params(max_new_tokens=3, sampling=Sampling(logit_bias={3: 1.5}, bad_words=((1, 2),)), stop_ids=(4,))
    steer = Steer(add=np.arange(3, dtype=np.float32))
    media = Media(images=((np.ones((4, 1176), np.float32), (1, 2, 2)),))
    sent = {"call": "add", "args": [(1, 2), params], "x": [None, True, np.int32(3), float("inf"), {1: "é"}]}
    assert from_bytes(to_bytes(sent)) == sent
    assert list(from_bytes(to_bytes({1: 2, (3, "4"): 5}))) == [1, (3, "4")]
    first, second = from_bytes(to_bytes([np.arange(3), np.ones((2, 1), np.int8)]))
    np.testing.assert_array_equal(first, np.arange(3))
    np.testing.assert_array_equal(second, np.ones((2, 1), np.int8), strict=True)
    back = from_bytes(to_bytes([steer, media]))
    np.testing.assert_array_equal(back[0].add, steer.add)
    np.testing.assert_array_equal(back[1].images[0][0], media.images[0][0])
    assert back[1].images[0][1] == (1, 2, 2)
    with pytest.raises(ValueError, match="cannot carry a function"):
        to_bytes(lambda: None)


def channels(count: int = 2) -> list[Channel]:
    """The ends of a channel, in the order of the processes."""
    client = FakeClient()
    return [Channel(Store(client, i, count), "calls") for i in range(count)]


class FakeEngine(Engine):
    """What leading and following ask of an engine: its state, its clock, and a call that makes another."""

    def __init__(self):
        self.state = {"load": {"requests": 0}, "pages": {"free": 8, "used": 0}, "tokens": 0}
        self.clock, self.calls, self.watches = lambda: -1.0, [], []


def step(self):
    self.calls.append(("step", self.clock()))
    self.prefill()
    self.state["tokens"] += 1


def prefill(self):
    self.calls.append(("prefill", self.clock()))


def abort(self, handle):
    self.calls.append(("abort", handle, self.clock()))
    if handle == "unknown":
        raise ValueError(f"no request {handle}")


def add(self, prompt, params, media=None, guide=None, *, n=None):
    masks = None if guide is None else [guide.bits(()), guide.bits((3,))]
    self.calls.append(("add", prompt, params, media, n, str(masks)))


def warmup(self, watch=None, programs=(), longest=None):
    self.calls.append(("warmup", programs, longest))
    self.watches.append(watch)


def warmup_for(self, handle, watch=None):
    self.calls.append(("warmup_for", handle))
    self.watches.append(watch)


@pytest.fixture
def engines(monkeypatch) -> list[Engine]:
    """A leading and a following engine of two threads."""
    for method in (step, prefill, abort, add, warmup, warmup_for):
        monkeypatch.setattr(Engine, method.__name__, method)
    for name in ("load", "pages"):
        monkeypatch.setattr(Engine, name, property(lambda self, name=name: self.state[name]))
    timings = property(lambda self: Namespace(decoded_tokens=self.state["tokens"]))
    monkeypatch.setattr(Engine, "timings", timings, raising=False)
    return [FakeEngine(), FakeEngine()]


def follow(engine: Engine, channel: Channel) -> None:
    with led(engine, channel) as leading:
        assert leading is None


def lead_and_follow(engines, work) -> list:
    """Do work with the first engine while the second follows; return what came of both."""
    first, second = channels()

    def lead():
        with led(engines[0], first) as leading:
            return work(leading)

    return side_by_side(lead, lambda: follow(engines[1], second))


def test_who_follows_makes_the_calls_of_who_leads(engines):
    """Each once, though one makes another, at the time that process 0 read, with its refusals."""

    def work(leading):
        with pytest.raises(ValueError, match="no request unknown"):
            leading.abort("unknown")
        return leading.step()

    assert lead_and_follow(engines, work) == [None, None]
    calls = engines[0].calls
    assert calls == engines[1].calls and [call[0] for call in calls] == ["abort", "step", "prefill"]
    assert 0 < calls[0][-1] < calls[1][-1] == calls[2][-1]


@pytest.mark.parametrize("what", ["load", "free", "used", "tokens"])
def test_who_has_another_state_does_not_follow(engines, what):
    state = engines[1].state
    place, name = {"load": (state["load"], "requests"), "tokens": (state, "tokens")}.get(what, (state["pages"], what))
    place[name] += 1
    _, error = lead_and_follow(engines, lambda leading: leading.step())
    assert isinstance(error, RuntimeError) and "before step process 0 had [0, 8, 0, 0]" in str(error)
    assert not engines[1].calls


def test_guides_and_watches_stay_with_process_0(engines):
    """Masks travel; a guide, and what watches the compiler, by place or by name, are no part of a message."""

    class Masks:
        def bits(self, new):
            return np.array([7 + len(new)], np.uint32) if new else None

    def work(leading):
        leading.add(np.array([1, 2]), 5, None, Masks(), n=2)
        leading.add([3], params=6, guide=Masks())
        leading.add([4], 7)
        leading.warmup(min, ("decode",), 9)
        leading.warmup(programs=("prefill",), watch=max)
        leading.warmup_for(3, len)
        leading.warmup_for(4, watch=any)
        with pytest.raises(ValueError, match="weights of an engine on several hosts"):
            leading.update(None)

    assert lead_and_follow(engines, work) == [None, None]
    assert engines[0].calls == engines[1].calls
    assert engines[0].calls[:3] == [
        ("add", (1, 2), 5, None, 2, "[None, array([8], dtype=uint32)]"),
        ("add", (3,), 6, None, None, "[None, array([8], dtype=uint32)]"),
        ("add", (4,), 7, None, None, "None"),
    ]
    assert engines[0].watches == [min, max, len, any] and engines[1].watches == [None] * 4


def test_one_process_leads_itself(engines):
    with led(engines[0], None) as leading:
        assert leading is engines[0]


def test_who_follows_refuses_what_it_was_not_told(engines):
    """A refusal of process 0 that is none here, a refusal of another kind, and a mask that is none."""
    told = dict(call="abort", kwargs={"handle": "unknown"}, now=1.0, state=[0, 8, 0, 0])
    for messages, error in (
        ([{"refused": "ValueError"}], "process 0 met a ValueError in a call that went through here"),
        ([told, {"refused": "OutOfPages"}], "no request unknown"),
        ([told | dict(call="step", kwargs={"count": 1})], "unexpected keyword"),
    ):
        sender, follower = channels()
        for message in (*messages, {"end": True}):
            sender.send(to_bytes(message))
        with pytest.raises((RuntimeError, ValueError, TypeError), match=error):
            follow(engines[1], follower)
    sender, follower = channels()
    sender.send(to_bytes({"call": "step"}))
    with pytest.raises(RuntimeError, match=r"a mask was to come from process 0, and \['call'\] came"):
        HeardGuide(follower).bits(())


@pytest.mark.parametrize("is_made", [False, True])
def test_a_server_that_is_ended_while_it_loads_ends_the_others(engines, monkeypatch, is_made):
    """They are not left waiting for calls: whether process 0 had its engine or not."""
    from m3jax.serve import command, together

    ends, of_thread = channels(), threading.local()
    monkeypatch.setattr(together, "engine_from_pretrained", lambda *_, **__: (engines[of_thread.i], None))
    monkeypatch.setattr(together, "Worker", lambda *_, **__: pytest.fail("enough"))

    async def serve(gateway, address, load):
        if is_made:
            with suppress(pytest.fail.Exception):
                await load(gateway)

    async def to_thread(call):
        return call()

    monkeypatch.setattr(together, "serve", serve)
    monkeypatch.setattr(together.asyncio, "to_thread", to_thread)
    args = command.parser().parse_args(["--mesh", "data=2"])

    def of_process(i):
        of_thread.i = i
        together.serve_together(args, ends[i])
        return "ended"

    assert side_by_side(lambda: of_process(0), lambda: of_process(1)) == ["ended", "ended"]
