"""The two ends of a transfer with an engine of plain Python behind them: who is read, sent, waited for and freed."""

import hashlib
import inspect
import json
import threading
import time
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3jax.decoding import Params, Sampling
from m3jax.decoding.engine import Snapshot
from m3jax.transfer import Frame, PageReceiver, PrefillClient, Prefiller, TransferError, Transferred, client, service
from m3jax.transfer import prefiller as prefilling
from m3jax.transfer.frames import decode, encode
from m3jax.transfer.identity import check_identity, transfer_identity, weights_sum
from m3jax.transfer.prefiller import page_frames, score_frame

P, GROUP, HEADS = 4, 2, 3  # tokens of a page; pages of a call; heads
SHAPE, INDEX_SHAPE = (2, GROUP, HEADS, P, 5), (2, GROUP, P, 6)  # [L C K P H], [L C P I]
LAYOUT = [tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in (SHAPE, SHAPE, INDEX_SHAPE))]
IDENTITY = {"config": {"width": 5}}
TRANSFER = "aa" * 8

pytestmark = pytest.mark.usefixtures("unchecked")  # engines here are no Engine


def scores_of(tokens):
    """Entries of `Generation.prompt_logprobs`, of one alternative."""
    return [{99: -0.5, token: -1.0 - token} for token in tokens]


class PlainEngine:
    """What a prefiller asks of an engine. It reads eight tokens of every prompt a call, and says that it knew one."""

    def __init__(self):
        self.config, self.identity, self.page_layout = Namespace(index_block_size=P), IDENTITY, LAYOUT
        self.prompts, self.progress, self.reasons, self.calls = {}, {}, {}, []
        self.may_read = threading.Event()
        self.may_read.set()
        self.error = None

    def add(self, prompt, params, media=None):
        if min(prompt) < 0:
            raise ValueError("no token id")
        assert params.max_new_tokens == 2 and params.sampling.temperature == 0
        handle = len(self.prompts)
        self.prompts[handle], self.progress[handle], self.reasons[handle] = prompt, 0, "unfinished"
        return handle

    def prefill(self, decode_follows=True):
        self.calls.append(("prefill", decode_follows))
        self.may_read.wait(10)
        if self.error:
            raise self.error
        for handle, reason in self.reasons.items():
            if reason == "unfinished":
                self.progress[handle] = min(self.progress[handle] + 8, len(self.prompts[handle]))
        return any(self.progress[i] < len(self.prompts[i]) for i, r in self.reasons.items() if r == "unfinished")

    def export_pages(self, handle, first):
        if 9999 in self.prompts[handle]:
            raise ValueError("it has ended")
        done, length = self.progress[handle], len(self.prompts[handle])
        count = min(-(-done // P) if done == length else done // P, first + GROUP) - first
        k = np.zeros(SHAPE, np.float32)
        k += np.arange(first, first + GROUP, dtype=np.float32)[:, None, None, None]
        index_k = np.zeros(INDEX_SHAPE, np.float32) + np.arange(2, dtype=np.float32)[:, None, None, None]
        self.calls.append(("export", handle, first, count))
        return count, [(k, -k, index_k)]

    def prompt_logprobs(self, handle, first=0):
        return scores_of(self.prompts[handle][1 : self.progress[handle] + 1])[first:]

    def prompt_progress(self, handle):
        return 1, self.progress[handle]

    def reason(self, handle):
        return self.reasons[handle]

    def abort(self, handle):
        assert self.reasons[handle] == "unfinished"
        self.reasons[handle] = "aborted"

    def forget(self, handle):
        del self.reasons[handle]


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
    assert not prefiller._thread.is_alive() and not engine.reasons  # every request was forgotten


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


# Who reads prompts


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
    until(lambda: not engine.reasons and not reading._readings)
    assert engine.progress == {0: 8} and list(engine.prompts) == [0]
    assert read(reading, range(5))[-1].kind == "end"


def test_no_more_prompts_than_it_takes(reading, engine):
    """256 where nobody says a number."""
    assert inspect.signature(Prefiller).parameters["max_requests"].default == 256 and reading._thread.daemon
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
    """A second is the time for it, a sixtieth of what a receiver bears, who looks twenty times a second."""
    assert (prefilling.ALIVE_SECONDS, client.SILENCE_SECONDS, client._POLL_SECONDS) == (1.0, 60.0, 0.05)
    assert (prefilling._MOST_READY, service._THREADS) == (32, 64)  # pages ahead of a receiver; transfers at once
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
    frames = prefiller.read(range(9))
    next(frames)
    until(lambda: engine.calls)
    closing = threading.Thread(target=prefiller.close)
    closing.start()
    until(lambda: prefiller._is_closing)
    engine.may_read.set()
    closing.join(10)
    with pytest.raises(TransferError, match="the prompt was lost: the engine that reads prompts was stopped"):
        while True:
            next(frames)


def test_an_idle_prefiller_asks_its_engine_for_nothing(reading, engine):
    read(reading, range(9))
    until(lambda: not reading._readings)
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


# What travels


def test_a_frame_is_laid_out_as_it_is_documented():
    arrays = {"a": np.array([[1, 2]], np.int16), "b": np.array([1.5], np.float32)}
    data = encode(Frame("pages", {"x": [1]}, arrays), TRANSFER, 7)
    number = lambda start, size: int.from_bytes(data[start : start + size], "little")
    assert (data[:4], number(4, 4), number(12, 8)) == (b"M3KV", 1, 8)
    header = data[52 : 52 + number(8, 4)]
    assert json.loads(header) == dict(
        kind="pages", transfer=TRANSFER, number=7, fields={"x": [1]}, arrays=[["a", "I16", [1, 2]], ["b", "F32", [1]]]
    )
    assert data[20:52] == hashlib.sha256(data[:20] + data[52:]).digest()
    assert data[52 + len(header) :] == b"\x01\x00\x02\x00" + np.float32(1.5).tobytes()
    with pytest.raises(ValueError, match="JSON"):
        encode(Frame("pages", {"x": float("nan")}), TRANSFER, 0)


def signed(header: dict, numbers: bytes = b"") -> bytes:
    """A frame with a right checksum, whatever its header says."""
    text = json.dumps(header).encode()
    sizes = b"M3KV" + b"".join(x.to_bytes(n, "little") for x, n in ((1, 4), (len(text), 4), (len(numbers), 8)))
    return sizes + hashlib.sha256(sizes + text + numbers).digest() + text + numbers


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ([["a", "F32", [1]]], "its arrays take 4 of 8 bytes"),
        ([["a", "F32", [3]]], "cannot be read"),
        ([["a", "F31", [2]]], "F31"),
        ([["a", "F32"]], "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(arrays, reason):
    said = dict(kind="pages", transfer=TRANSFER, number=0, fields={}, arrays=arrays)
    with pytest.raises(TransferError, match=reason):
        decode(signed(said, bytes(8)))
    assert decode(signed(said | dict(arrays=[["a", "F32", [2]]]), bytes(8)))[0].arrays["a"].tolist() == [0, 0]
    with pytest.raises(TransferError, match="cannot be read"):
        decode(signed({}))
    bare = b"M3KV" + (1).to_bytes(4, "little") + bytes(12)  # of no header at all
    with pytest.raises(TransferError, match="cannot be read"):
        decode(bare + hashlib.sha256(bare).digest())
    with pytest.raises(TransferError, match="51 bytes that are no frame of pages"):
        decode((bare + hashlib.sha256(bare).digest())[:-1])


def received(frames, num_tokens=11, left_out=0, scored=()):
    receiver = PageReceiver(TRANSFER, num_tokens, LAYOUT, P, IDENTITY, "host:1", left_out, scored)
    kinds = [receiver.take(encode(frame, TRANSFER, number)) for number, frame in enumerate(frames)]
    return receiver, kinds


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


SCORED = (3, 1, 4, 1)
SCORES = scores_of(SCORED)
WRONG_SCORES = {
    "some are missing": ([score_frame(SCORES[:3], 0)], "all has come, and scores of 1 tokens are missing"),
    "some twice": ([score_frame(SCORES[:3], 0)] * 2, "scores of tokens 0 to 3, and of 4 those from 3 on come next"),
    "some are left out": ([score_frame(SCORES[1:], 1)], "scores of tokens 1 to 4, and of 4 those from 0 on come next"),
    "one too many": ([score_frame([*SCORES, {9: -1.0}], 0)], "scores of tokens 0 to 5"),
    "none": ([score_frame([], 0)], "scores of tokens 0 to 0"),
    "a token's is empty": ([score_frame([{}, *SCORES[1:]], 0)], "scores of 4 tokens that are not whole"),
    "of other tokens": ([score_frame(SCORES[::-1], 0)], "scores of another prompt: none of token 3 in its place"),
    "no numbers": ([score_frame([{3: float("nan")}, *SCORES[1:]], 0)], "no numbers"),
    "a number is missing": (
        [Frame("scores", {"first": 0}, {
            "counts": np.ones(4, np.int32), "ids": np.array(SCORED, np.int32), "logprobs": np.zeros(3)
        })],
        "not whole",
    ),
    "no counts": ([Frame("scores", {"first": 0})], "cannot be carried out"),
}  # fmt: skip


@pytest.mark.parametrize(("frames", "reason"), WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_scores_that_are_not_whole_are_refused(frames, reason):
    """T50: checksums and numbers are right."""
    hello, end = Frame("hello", dict(tokens=4, identity=IDENTITY)), Frame("end", {"cached_tokens": 0})
    in_parts = [score_frame(SCORES[:1], 0), score_frame(SCORES[1:], 1)]
    assert received([hello, *in_parts, end], 4, 4, SCORED)[0].prompt_logprobs == SCORES
    with pytest.raises(TransferError, match=reason):
        received([hello, *frames, end], 4, 4, SCORED)


def pages_at(**fields):
    count, heads = fields.pop("count", 1), fields.pop("heads", HEADS)
    arrays = {"k": np.zeros((count, heads, P, 5), np.float32), "v": np.zeros((count, heads, P, 5), np.float32)}
    if fields.get("first_head", 0) == 0:
        arrays["index_k"] = np.zeros((count, P, 6), np.float32)
    return Frame("pages", dict(stack=0, layer=0, first=0, first_head=0) | fields, arrays)


def test_places_at_the_edge_and_behind_it():
    """Of 3 pages, 2 layers, 3 heads and 1 stack each end is taken, and what is one behind is refused."""
    hello = Frame("hello", dict(tokens=11, identity=IDENTITY))
    for edge in (
        dict(), dict(layer=1), dict(first=2), dict(first=0, count=3), dict(first_head=2, heads=1), dict(heads=1),
    ):  # fmt: skip
        assert received([hello, pages_at(**edge)])[1] == ["hello", "pages"], edge
    for behind in (
        dict(layer=2), dict(layer=-1), dict(first=3), dict(first=2, count=2), dict(first=-1), dict(heads=4),
        dict(first_head=2, heads=2), dict(first_head=-1, heads=1), dict(count=0), dict(heads=0), dict(stack=1),
        dict(first_head=3, heads=0), dict(stack=-1),
    ):  # fmt: skip
        with pytest.raises(TransferError, match=r"this engine has (no such place|1)"):
            received([hello, pages_at(**behind)])
    for number, kind in enumerate(("pages", "hello")):
        receiver = PageReceiver(TRANSFER, 11, LAYOUT, P, IDENTITY)
        with pytest.raises(TransferError, match=f"sent '{kind}' as frame {number}: a transfer begins with hello"):
            for place, frame in enumerate([*[hello][:number], Frame(kind, hello.fields)]):
                receiver.take(encode(frame, TRANSFER, place))
    with pytest.raises(TransferError, match="the sender ended after frame 0, before all pages had come"):
        receiver = PageReceiver(TRANSFER, 11, LAYOUT, P, IDENTITY)
        receiver.take(encode(hello, TRANSFER, 0))
        receiver.pages()


def test_the_difference_between_two_engines_is_named():
    """That of the configuration before others, by its own name; every key counts, on either side."""
    own = {"config": {"width": 5, "depth": 2}, "weights": "aa"}
    check_identity(dict(own), own, "host:1")
    for found, line in (
        ({"config": {"width": 6, "depth": 2}, "weights": "bb"}, "its width is 6, this engine's 5"),
        ({"config": {"width": 5}, "weights": "aa"}, "its depth is None, this engine's 2"),
        (own | {"weights": "bb"}, "its weights is 'bb', this engine's 'aa'"),
        (own | {"mode": True}, "its mode is True, this engine's None"),
        ({"weights": "aa"}, "its config is None"),
        ([], "host:1 does not say of which model"),
    ):
        with pytest.raises(TransferError, match=line):
            check_identity(found, own, "host:1")
    with pytest.raises(ValueError, match="hold more than keys"):
        transfer_identity(Namespace(page_layout=[(1, 2)]))
    with pytest.raises(ValueError, match="hold more than keys"):
        transfer_identity(Namespace(page_layout={"a": (1, 2, 3)}))


def test_a_sum_of_weights_changes_with_every_bit_and_place():
    """Of arrays of each width, and of how many there are; keys of random numbers have no bits to sum."""
    leaves = [
        jnp.array([1, 0], jnp.int8), jnp.array([[0.5], [2.0]], jnp.bfloat16), jnp.array([3.0, 3.0]), jnp.array([True])
    ]  # fmt: skip
    changed = [leaves[0][::-1], leaves[1][::-1], leaves[2] + jnp.array([0.0, 3e-7]), jnp.array([False])]
    sums = [weights_sum(leaves), weights_sum([*leaves, jnp.zeros(1)])]
    sums += [weights_sum([*leaves[:i], leaf, *leaves[i + 1 :]]) for i, leaf in enumerate(changed)]
    assert len(set(sums)) == len(sums)
    assert weights_sum([*leaves, jax.random.key(0), "text"]) == sums[0] and len(sums[0]) == 16
    assert int(sums[0][:8], 16) == 2 + 2 + 2 + 1 and int(weights_sum([jnp.zeros((2, 999))])[:8], 16) == 1998
    with jax.enable_x64(True):  # numbers of 64 bits, of which each half counts
        wide = [np.array([2, 1], np.int64), np.array([1, 2]), np.array([2 + 2**32, 1]), np.array([2, 1 + 2**40])]
        assert len({weights_sum([jnp.asarray(each)]) for each in wide}) == 4


def test_a_sum_of_weights_changes_with_every_bit_of_every_one():
    """Modulo 2^32 the highest bit, a number's sign, counts only if its place is odd."""
    bits = np.random.default_rng(0).integers(0, 2**32, (3, 4), np.uint32)
    sum_of = lambda bits: weights_sum([jnp.ones(2, jnp.bfloat16), jnp.asarray(bits.view(np.float32))])
    before = sum_of(bits)
    for place in np.ndindex(3, 4):
        for bit in (0, 16, 31):
            flipped = bits.copy()
            flipped[place] ^= np.uint32(1 << bit)
            assert sum_of(flipped) != before, (place, bit)


# Who decodes


class FakeCall:
    """A call of gRPC: it gives what it has, and is cancelled."""

    def __init__(self, *frames):
        self.frames, self.is_cancelled = frames, threading.Event()

    def __iter__(self):
        yield from self.frames
        self.is_cancelled.wait(10)

    def cancel(self):
        self.is_cancelled.set()


def test_a_transfer_is_given_up_after_silence_and_not_before():
    call, stop = FakeCall(), [False]
    with client._Watch(call, 0.4, lambda: stop[0]) as watch:
        watching = [thread for thread in threading.enumerate() if thread.name == "m3jax transfer watch"]
        assert [thread.daemon for thread in watching] == [True]
        for _ in range(8):  # longer than it may be silent
            time.sleep(0.08)
            watch.note()
        assert not watch.reason and not call.is_cancelled.is_set()
        until(call.is_cancelled.is_set)
        assert watch.reason == "nothing came for 0.4 s"
    call = FakeCall()
    with client._Watch(call, 60.0, lambda: stop[0]) as watch:
        stop[0] = True
        until(call.is_cancelled.is_set, 5)
        assert watch.reason == "the request was given up"
    call = FakeCall()
    with client._Watch(call, 60.0, lambda: False):
        pass
    assert call.is_cancelled.is_set()  # who leaves ends the call, and the watch with it
    until(lambda: not any(thread.name == "m3jax transfer watch" for thread in threading.enumerate()), 5)


def test_a_prompt_goes_to_the_prefiller_with_the_fewest(engine):
    many = PrefillClient(["a:1", "b:2", "c:3"], engine)
    with many._least_loaded() as (first, _), many._least_loaded() as (second, _):
        with many._least_loaded() as (third, channel):
            assert [first, second, third] == ["a:1", "b:2", "c:3"] and channel is many._channels["c:3"]
        with many._least_loaded() as (again, _):
            assert again == "c:3"
    assert set(many._num_open.values()) == {0}
    many.close()
    with pytest.raises(ValueError, match="give HOST:PORT"):
        PrefillClient([], engine)


def test_how_long_a_prefiller_may_take_to_answer(engine, monkeypatch):
    """A second where nobody waits for it to start; else as long as is said, also for one that does not listen yet."""
    asked = []

    class Channel:
        def unary_unary(self, method):
            assert method == "/m3jax.transfer.Prefill/Describe"
            return lambda data, **options: (
                asked.append(options) or encode(Frame("hello", {"identity": IDENTITY}), "", 0)
            )

    some = PrefillClient(["a:1"], engine)
    some.close()
    some._channels = {"a:1": Channel()}
    some.check()
    some.check(30)
    assert asked == [dict(timeout=1.0, wait_for_ready=False), dict(timeout=30, wait_for_ready=True)]
    some._identity = {"config": {"width": 7}}
    with pytest.raises(TransferError, match="a:1 has pages of another model or cache: its width is 5"):
        some.check()


def test_pages_over_grpc(reading, engine, monkeypatch):
    """All but the last token are asked for, as frame 0 of the transfer; what is refused there is refused here."""
    asked = []
    monkeypatch.setattr(service, "decode", lambda data: asked.append(decode(data)) or decode(data))
    server, port = service.start(reading)
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: is something else there"):
        service.start(reading, port=port)
    fetching = PrefillClient([f"127.0.0.1:{port}"], engine)
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


class Frames:
    """Three frames of a prompt, or an error in place of the third; it notes that it was closed."""

    def __init__(self, error):
        self.error, self.is_closed = error, False

    def __iter__(self):
        yield Frame("a", {})
        yield Frame("b", {})
        if self.error:
            raise self.error
        yield Frame("c", {})

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("error", [None, TransferError("the engine failed"), ValueError("no token id")])
def test_a_prompt_s_pages_are_freed_however_its_transfer_ends(error, monkeypatch):
    """At once, whatever still holds its frames. What the other side leaves out of its question is none."""
    found, asked, methods = Frames(error), [], {}

    def read(ids, left_out, media=None, **scores):
        asked.append((ids, left_out, media, scores))
        return found

    made = SimpleNamespace(add_generic_rpc_handlers=lambda handlers: None, start=lambda: methods.update(started=True))
    monkeypatch.setattr(service.grpc, "server", lambda *_, **__: made)
    monkeypatch.setattr(service.grpc, "method_handlers_generic_handler", lambda name, given: methods.update(given))
    monkeypatch.setattr(service.grpc, "unary_stream_rpc_method_handler", lambda method: method)
    monkeypatch.setattr(service, "bound_port", lambda server, host, port: (host, port))
    assert service.start(SimpleNamespace(read=read)) == (made, ("127.0.0.1", 0)) and methods["started"]
    ended = []
    looks = iter([True, True, True] if error else [True, True, False])
    context = SimpleNamespace(is_active=lambda: next(looks), abort=lambda status, text: ended.append((status, text)))
    data = encode(Frame("ask", {}, {"prompt": np.arange(3)}), TRANSFER, 0)
    frames = [decode(each) for each in methods["Read"](data, context)]
    assert [(frame.kind, transfer, number) for frame, transfer, number in frames] == [
        ("a", TRANSFER, 0),
        ("b", TRANSFER, 1),
    ]
    assert found.is_closed and asked == [([0, 1, 2], 0, None, {})]
    status = grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, ValueError) else grpc.StatusCode.UNAVAILABLE
    assert ended == ([(status, str(error))] if error else [])


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
