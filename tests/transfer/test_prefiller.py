"""Prompts that an engine of plain Python reads: who is sent what, who waits, who is refused, and what is freed."""

import hashlib
import threading
import time
from dataclasses import replace

import grpc
import jax
import numpy as np
import pytest
from support.transfers import IDENTITY, SHAPE, TRANSFER, P, PlainEngine, received, scores_of

from m3jax.decoding import Params, Sampling
from m3jax.decoding.engine import Snapshot
from m3jax.transfer import Frame, PrefillClient, Prefiller, TransferError, Transferred, client, service
from m3jax.transfer import prefiller as prefilling
from m3jax.transfer.frames import decode, encode
from m3jax.transfer.prefiller import page_frames

pytestmark = pytest.mark.usefixtures("unchecked")  # engines here are no Engine


@pytest.fixture
def engine(monkeypatch):
    for module in (prefilling, client):
        monkeypatch.setattr(module, "transfer_identity", lambda engine: engine.identity)
    return PlainEngine()


@pytest.fixture
def reading(engine):
    prefiller = Prefiller(engine, max_requests=2)
    yield prefiller
    engine.may_read.set()
    prefiller.close()
    assert not engine.reasons  # every request was forgotten


def until(is_so, seconds=10):
    """Wait until something is so, which other threads bring about."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def read(prefiller, prompt, left_out=0):
    """Return all frames; fail where none is ready for five seconds."""
    frames = []
    for frame in prefiller.read(prompt, left_out, alive_seconds=5):
        assert frame.kind != "alive"
        frames.append(frame)
    return frames


def test_frames_of_a_prompt(reading, engine):
    """Hello with the prompt's sum, each page of each layer once and in order, and how many tokens were known."""
    prompt = list(range(11))
    hello, *pages, end = read(reading, prompt)
    digest = hashlib.sha256(np.arange(11, dtype="<i8").tobytes()).hexdigest()
    assert (hello.kind, hello.fields) == ("hello", dict(tokens=11, identity=IDENTITY, prompt=digest))
    assert (end.kind, end.fields) == ("end", {"cached_tokens": 1})
    assert [(f.fields["layer"], f.fields["first"], len(f.arrays["k"])) for f in pages] == [
        (0, 0, 2), (1, 0, 2), (0, 2, 1), (1, 2, 1)
    ]  # fmt: skip
    for frame in pages:
        first, count = frame.fields["first"], len(frame.arrays["k"])
        assert frame.arrays["k"][:, 0, 0, 0].tolist() == list(range(first, first + count))
        assert (frame.arrays["v"] == -frame.arrays["k"]).all()
        assert (frame.arrays["index_k"] == frame.fields["layer"]).all() and len(frame.arrays["index_k"]) == count
    assert {call[1] for call in engine.calls if call[0] == "prefill"} == {False}  # no decode step follows
    until(lambda: not engine.reasons)  # whose pages are freed, though the prefiller goes on


def test_left_out_pages_are_not_read_again(reading, engine):
    for left_out, firsts in ((0, [0, 0, 2, 2]), (4, [1, 1, 2, 2]), (8, [2, 2])):
        frames = read(reading, range(11), left_out)
        assert [frame.fields["first"] for frame in frames[1:-1]] == firsts, left_out
    assert [frame.kind for frame in read(reading, range(8), 8)] == ["hello", "end"]
    for left_out in (-4, -1, 2, 12):
        with pytest.raises(ValueError, match=f"left_out = {left_out}: whole pages of 4 of 11 tokens"):
            read(reading, range(11), left_out)


def test_a_receiver_that_leaves_frees_its_prompt_at_once(reading, engine):
    """Also one that leaves before its prompt has begun, whose prompt never does; others go on."""
    engine.may_read.clear()
    frames = reading.read(range(400))
    assert next(frames).kind == "hello"
    until(lambda: ("prefill", False) in engine.calls)
    second = reading.read(range(5))
    next(second)
    second.close()  # while the engine is busy
    frames.close()
    engine.may_read.set()
    until(lambda: not engine.reasons)
    assert engine.progress == {0: 8} and list(engine.prompts) == [0]
    assert read(reading, range(5))[-1].kind == "end"


def test_no_more_prompts_than_it_takes(reading, engine):
    engine.may_read.clear()
    held = [reading.read(range(9)) for _ in range(2)]
    for frames in held:
        next(frames)
    with pytest.raises(TransferError, match="2 prompts are read or wait, and no more are taken: try again"):
        next(reading.read(range(9)))
    engine.may_read.set()
    held[0].close()
    assert read(reading, range(9))[-1].kind == "end" and list(held[1])[-1].kind == "end"
    for _ in range(3):  # one that is refused, or fails, counts no longer
        with pytest.raises(ValueError, match="no token id"):
            read(reading, [-1])
        with pytest.raises(TransferError, match="logits are no numbers"):
            read(reading, [9999, 5])


def test_pages_wait_for_a_slow_receiver_in_the_cache(reading, engine):
    """Four groups of eight are copied and no more; each that is taken makes room, and nothing is asked before."""
    frames = reading.read(range(50 * P), alive_seconds=60)
    next(frames)
    exported = lambda: sum(call[3] for call in engine.calls if call[0] == "export")
    until(lambda: exported() == 32 and engine.progress[0] == 200)
    time.sleep(0.05)
    num_calls = len(engine.calls)
    time.sleep(0.05)
    assert exported() == 32 and len(engine.calls) == num_calls
    assert len(list(frames)) == 2 * 25 + 1 and exported() == 50


def test_who_waits_is_told_that_there_is_more_to_come(reading, engine):
    engine.may_read.clear()
    frames = reading.read(range(5), alive_seconds=0.01)
    assert [next(frames).kind for _ in range(3)] == ["hello", "alive", "alive"]
    engine.may_read.set()
    assert {frame.kind for frame in frames} >= {"pages", "end"}


def test_an_engine_that_fails_ends_every_transfer(engine):
    prefiller = Prefiller(engine)
    engine.may_read.clear()
    first, second = prefiller.read(range(9)), prefiller.read(range(9))
    next(first)
    until(lambda: engine.calls)
    next(second)  # it has not begun
    engine.error = RuntimeError("out of memory")
    engine.may_read.set()
    for frames in (first, second):
        with pytest.raises(TransferError, match="the prompt was lost: out of memory"):
            list(frames)
    with pytest.raises(TransferError, match="the engine that reads prompts has ended") as caught:
        next(prefiller.read(range(9)))
    assert caught.value.__cause__ is engine.error and not engine.reasons


def test_a_prefiller_that_is_closed_tells_who_waits(engine):
    prefiller = Prefiller(engine)
    engine.may_read.clear()
    frames = prefiller.read(range(50 * P))  # more pages than wait for a receiver
    next(frames)
    until(lambda: engine.calls)
    closing = threading.Thread(target=prefiller.close)
    closing.start()
    engine.may_read.set()
    closing.join(10)
    with pytest.raises(TransferError, match="the prompt was lost: the engine that reads prompts was stopped"):
        while True:
            next(frames)


def test_an_idle_prefiller_asks_its_engine_for_nothing(reading, engine):
    read(reading, range(9))
    until(lambda: not engine.reasons)
    time.sleep(0.05)
    count = len(engine.calls)
    time.sleep(0.1)
    assert len(engine.calls) == count


def test_pages_that_are_divided_themselves_travel_whole():
    """Of two axes of a mesh heads are sent once a part; where pages are divided, the array is sent as it is."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    values = np.arange(2 * 2 * 4 * P * 2, dtype=np.float32).reshape(2, 2, 4, P, 2)
    place = lambda *axes: jax.device_put(values, jax.NamedSharding(mesh, jax.P(*axes)))
    for axes, heads in (((None, None, "tensor"), [0, 2]), ((None, "data"), [0]), (("data",), [0]), ((), [0])):
        frames = list(page_frames([(place(*axes), place(*axes), None)], 6, 1))
        assert [(f.fields["layer"], f.fields["first_head"]) for f in frames] == [
            (layer, head) for layer in range(2) for head in heads
        ], axes
        for frame in frames:
            layer, head = frame.fields["layer"], frame.fields["first_head"]
            expected = values[layer, :1, head : head + 4 // len(heads)]
            np.testing.assert_array_equal(frame.arrays["k"], expected)
            assert frame.arrays.keys() == {"k", "v"} and frame.fields["first"] == 6


def test_pages_come_to_their_places(reading):
    frames = read(reading, range(11))
    receiver, kinds = received([frames[0], Frame("alive"), *frames[1:]])
    assert kinds == ["hello", "alive", *["pages"] * 4, "end"]
    sent = [encode(frame, TRANSFER, number) for number, frame in enumerate([frames[0], Frame("alive"), *frames[1:]])]
    assert (receiver.num_bytes, receiver.cached_tokens, receiver.is_whole) == (sum(map(len, sent)), 1, True)
    groups = receiver.pages()
    assert len(groups) == 2
    k, v, index_k = groups[1][0]
    assert k.shape == SHAPE and (k[:, 0] == 2).all() and not k[:, 1].any()  # behind the last page are zeros
    assert (v == -k).all() and (index_k[1, 0] == 1).all() and (groups[0][0][0][:, 1] == 1).all()
    # Pages that were left out are zeros here, and come from nowhere.
    left_out, _ = received(read(reading, range(11), 8), left_out=8)
    assert not left_out.pages()[0][0][0].any() and (left_out.pages()[1][0][0][:, 0] == 2).all()
    with pytest.raises(TransferError, match=r"host:1 sent pages 0 to 2 of layer 0 twice"):
        received(frames, left_out=8)
    with pytest.raises(TransferError, match="says that all has come, and 12 parts of pages are missing"):
        received([*read(reading, range(11), 8)], left_out=0)


@pytest.mark.parametrize(("count", "left_out"), [(11, 0), (8, 0), (8, 8)])
def test_scores_travel_beside_the_pages(reading, engine, count, left_out):
    """Of the second token to the one behind the prompt, which has a page of its own behind eight: that stays there."""
    asked = dict(next_token=77, prompt_logprobs=1)
    frames = list(reading.read(range(count), left_out, alive_seconds=60, **asked))
    assert list(engine.prompts.values())[-1] == (*range(count), 77)
    num_pages = -(-count // P) - left_out // P
    assert sum(len(frame.arrays["k"]) for frame in frames if frame.kind == "pages") == 2 * num_pages
    scored = [*range(1, count), 77]
    found, _ = received(frames, count, left_out, scored)
    assert found.is_whole and [list(x.items()) for x in found.prompt_logprobs] == [
        list(x.items()) for x in scores_of(scored)
    ]
    with pytest.raises(TransferError, match=f"scores of tokens 0 to {min(count, 8)}, and of 0 those from 0 on come"):
        received(frames, count, left_out)  # who did not ask
    for one in asked:
        with pytest.raises(ValueError, match="next_token and prompt_logprobs: give both"):
            next(reading.read(range(count), **{one: 1}))


# Over gRPC


def test_pages_over_grpc(reading, engine, monkeypatch):
    """All but the last token are asked for, as frame 0 of the transfer; what is refused there is refused here."""
    asked = []
    monkeypatch.setattr(service, "decode", lambda data: asked.append(decode(data)) or decode(data))
    server, port = service.start(reading)
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: is something else there"):
        service.start(reading, port=port)
    fetching = PrefillClient([f"127.0.0.1:{port}"], engine)
    fetching.check()
    other = PlainEngine()
    other.identity = {"config": {"width": 7}}
    with pytest.raises(TransferError, match=f":{port} has pages of another model or cache: its width is 5"):
        PrefillClient([f"127.0.0.1:{port}"], other).check(30)
    params = Params(max_new_tokens=5, sampling=Sampling.greedy())
    found = fetching.fetch(range(12), params, left_out=4)
    frame, transfer, number = asked[0]
    assert (frame.kind, number, frame.fields, len(transfer)) == ("ask", 0, {"left_out": 4}, 16)
    assert frame.arrays["prompt"].tolist() == list(range(11)) and frame.arrays["prompt"].dtype == np.int64
    assert found.snapshot == Snapshot(tuple(range(12)), (), (), params, 11, found.snapshot.pages, IDENTITY)
    assert (found.cached_tokens, found.left_out, found.address) == (1, 4, f"127.0.0.1:{port}")
    assert found.snapshot.prompt_logprobs == () and 0 < found.seconds < 60
    scored = replace(params, prompt_logprobs=1)
    assert fetching.fetch(range(12), scored).snapshot.prompt_logprobs == tuple(scores_of(range(1, 12)))
    assert asked.pop(1)[0].fields == {"left_out": 0, "next_token": 11, "prompt_logprobs": 1}
    assert fetching.fetch([1, 2], params).num_tokens == 1
    assert [transfer for _, transfer, _ in asked][1] != transfer  # each has a name of its own
    with pytest.raises(ValueError, match="no token id"):
        fetching.fetch([-1, 5], params)
    with pytest.raises(TransferError, match="logits are no numbers"):
        fetching.fetch([9999, 5], params)
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    describe, ask = (
        channel.unary_unary(f"/{service.SERVICE}/Describe"), channel.unary_stream(f"/{service.SERVICE}/Read")
    )  # fmt: skip
    hello, transfer, number = decode(describe(b""))
    assert (hello, transfer, number) == (Frame("hello", {"identity": IDENTITY}), "", 0)
    for data, code, line in (
        (encode(Frame("ask"), TRANSFER, 0), "INVALID_ARGUMENT", "ask for a prompt: its ids or its patches are missing"),
        (encode(service.ask_frame((-1,)), TRANSFER, 0), "INVALID_ARGUMENT", "no token id"),
        (encode(service.ask_frame((9999, 1)), TRANSFER, 0), "UNAVAILABLE", "logits are no numbers"),
    ):
        with pytest.raises(grpc.RpcError, match=line) as caught:
            list(ask(data))
        assert caught.value.code().name == code
    assert [decode(data)[2] for data in ask(encode(service.ask_frame((1, 2, 3)), TRANSFER, 0))] == [0, 1, 2, 3]
    channel.close()
    fetching.close()
    with pytest.raises(ValueError, match=r"(?i)closed channel|channel closed"):
        fetching.fetch([1, 2], params)
    server.stop(0).wait()


def test_a_prompt_goes_to_the_prefiller_with_the_fewest(reading, engine):
    """To the first of those that have as few; no address is refused."""
    other = Prefiller(PlainEngine())
    servers, ports = zip(service.start(reading), service.start(other), strict=True)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    fetching, params = PrefillClient(addresses, engine), Params(max_new_tokens=5, sampling=Sampling.greedy())
    engine.may_read.clear()
    found = []
    waiting = threading.Thread(target=lambda: found.append(fetching.fetch(range(9), params).address))
    waiting.start()
    until(lambda: engine.prompts)
    assert [fetching.fetch(range(9), params).address for _ in range(4)] == addresses[1:] * 4
    engine.may_read.set()
    waiting.join(10)
    assert found == addresses[:1] and fetching.fetch(range(9), params).address == addresses[0]
    fetching.close()
    for server in servers:
        server.stop(0).wait()
    other.close()
    with pytest.raises(ValueError, match="give HOST:PORT"):
        PrefillClient([], engine)


def test_what_a_transfer_says_of_itself():
    snapshot = Snapshot(tuple(range(46)), (), (), Params(max_new_tokens=1, sampling=Sampling.greedy()), 45, [], {})
    found = Transferred(snapshot, 8, 123_000, 1.25, "h:1", 40)
    assert (found.num_tokens, found.bytes_per_token) == (5, 24_600)
    assert (
        str(found) == "5 tokens of a prompt (40 more were known here) from h:1 in 1.25 s, 123,000 bytes, 24,600 a token"
    )
    assert (
        str(Transferred(snapshot, 8, 90, 0.5, "h:1")) == "45 tokens of a prompt from h:1 in 0.50 s, 90 bytes, 2 a token"
    )
    assert Transferred(snapshot, 8, 90, 0.5, "h:1", 45).bytes_per_token == 90
