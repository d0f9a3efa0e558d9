"""Pages of a prompt on their way from one engine to another: whole and right, or refused (T16, T49, T50)."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import seeing, tiny
from support.engines import CONFIG, SIZE, engine, finish, params, prompt, quick, serve

from m3jax import make_mesh
from m3jax.cache import Cache
from m3jax.cache.storage import unit_scales
from m3jax.decoding.engine import Snapshot, UnknownPages
from m3jax.decoding.engine.exchange import identity
from m3jax.transfer import Frame, PageReceiver, PrefillClient, Prefiller, TransferError, service
from m3jax.transfer import client as transfer_client
from m3jax.transfer.frames import decode, encode
from m3jax.transfer.prefiller import page_frames

PROMPT, PARAMS = prompt(45), params(12, temperature=0.8, seed=5)  # of 44 tokens that travel the last page is half full
TRANSFER = "0011223344556677"


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


@cache
def model():
    return tiny.model(CONFIG)


@pytest.fixture(scope="module")
def reading() -> Iterator[Prefiller]:
    prefiller = Prefiller(engine(model()))
    yield prefiller
    prefiller.close()
    prefiller.engine.check()
    assert prefiller.engine.pages["used"] == 0  # whatever was asked, and however it ended


@pytest.fixture(scope="module")
def sent(reading) -> list[bytes]:
    """All frames of the prompt, as they go over the wire: its pages come with four chunks, in both stacks of layers."""
    frames = [
        encode(frame, TRANSFER, number) for number, frame in enumerate(reading.read(PROMPT[:-1], alive_seconds=600))
    ]
    assert len(frames) == 1 + 4 * 2 + 1
    return frames


@cache
def target():
    return engine(model())


def receiver(reading, identity=None) -> PageReceiver:
    found = reading.identity if identity is None else identity
    return PageReceiver(TRANSFER, len(PROMPT) - 1, target().page_layout, SIZE, found)


def received(reading, frames: list[bytes]) -> PageReceiver:
    """Take all frames, and the pages: what a receiver does in the end."""
    found = receiver(reading)
    for data in frames:
        found.take(data)
    found.pages()
    return found


def renumbered(frames: list[Frame]) -> list[bytes]:
    """Frames of a sender that has a fault of its own: checksums and numbers are right."""
    return [encode(frame, TRANSFER, number) for number, frame in enumerate(frames)]


def alone(request=(PROMPT, PARAMS)):
    return serve(engine(model()), request)[0]


# What comes is right


def test_an_answer_over_grpc_is_one_engines(reading):
    """The engine that decodes computes one token of the prompt; the second time the sender knows the prompt."""
    server, port = service.start(reading)
    client = PrefillClient([f"127.0.0.1:{port}"], target())
    client.check(10)
    target().update(target().served_model)  # forgets what other tests left
    tokens = prompt(45, seed=2)
    before, expected = target().timings.prompt_tokens, alone((tokens, PARAMS))
    for _ in range(2):
        fetched = client.fetch(tokens, PARAMS)
        handle = target().import_request(fetched.snapshot, cached_tokens=fetched.cached_tokens)
        finish(target())
        found = target().result(handle)
        assert found.tokens == expected.tokens
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert found.cached_tokens == fetched.cached_tokens == 40
    assert target().timings.prompt_tokens - before == 2
    # Whole pages travel, and the headers beside them.
    assert 48 * target().bytes_per_token < fetched.num_bytes < 48 * target().bytes_per_token + 25_000
    client.close()
    server.stop(0).wait()


def test_pictures_travel_with_their_prompt():
    """Their patches go to the tower of the engine that reads; two prompts that differ in the picture alone stay two.

    The engine that decodes runs no tower until it has to read a prompt again itself, and then has what it needs.
    """
    source, drawing = (seeing.seeing_engine(seeing.model()) for _ in range(2))
    expected = [drawing.add(tokens, PARAMS, media) for tokens, media in seeing.WORK[:3]]
    finish(drawing)
    expected = [drawing.result(handle) for handle in expected]
    drawing.update(drawing.served_model)  # forgets pages and features
    prefiller = Prefiller(source)
    server, port = service.start(prefiller)
    client = PrefillClient([f"127.0.0.1:{port}"], drawing)
    for (tokens, media), answer in zip(seeing.WORK[:3], expected, strict=True):
        before = drawing.timings.prompt_tokens
        fetched = client.fetch(tokens, PARAMS, media=media)
        handle = drawing.import_request(fetched.snapshot, cached_tokens=fetched.cached_tokens)
        finish(drawing)
        found = drawing.result(handle)
        assert found.tokens == answer.tokens
        np.testing.assert_allclose(found.logprobs, answer.logprobs, rtol=0, atol=1e-5)
        assert drawing.timings.prompt_tokens - before == 1
        again = Snapshot.from_bytes(replace(fetched.snapshot, cached=0, pages=[]).to_bytes())
        handle = drawing.import_request(again)
        finish(drawing)
        assert drawing.result(handle).tokens == answer.tokens
    assert abs(expected[0].logprobs[0] - expected[1].logprobs[0]) > 1e-3
    tokens, _ = seeing.WORK[0]
    with pytest.raises(ValueError, match="placeholder"):
        client.fetch(tokens, PARAMS)
    client.close()
    server.stop(0).wait()
    prefiller.close()


def test_scores_of_a_prompt_are_one_engines(reading):
    """`Params.prompt_logprobs`: read with the pages, of which some or all may be known where the answer is drawn.

    Of 41 tokens the last one, whose score is read there and which is computed here, would begin a page.
    """
    server, port = service.start(reading)
    client = PrefillClient([f"127.0.0.1:{port}"], target())
    asked = replace(params(4), prompt_logprobs=2)
    for tokens, is_known in ((prompt(45, seed=7), False), (prompt(41, seed=7), False), (prompt(41, seed=7), True)):
        expected, before = alone((tokens, asked)), target().timings.prompt_tokens
        left_out = target().known_tokens(tokens)
        assert left_out == (40 if is_known else 0)
        fetched = client.fetch(tokens, asked, left_out=left_out)
        handle = target().import_request(fetched.snapshot, left_out=left_out)
        finish(target())
        found = target().result(handle)
        assert found.tokens == expected.tokens and target().timings.prompt_tokens - before == 1
        assert len(found.prompt_logprobs) == len(tokens) - 1
        for one, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert list(one) == list(other)
            np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=0, atol=1e-5)
        if not is_known:
            serve(target(), (tokens, params(2)))
    with pytest.raises(ValueError, match="prompt_logprobs = 21: must be an integer from 0 to 20"):
        client.fetch(prompt(45), replace(asked, prompt_logprobs=21))
    client.close()
    server.stop(0).wait()


def test_pages_that_are_left_out_must_be_known(reading):
    """T50: pages of the beginning do not travel where the receiver has them, and are never taken for zeros."""
    tokens = prompt(45, seed=6)
    server, port = service.start(reading)
    client = PrefillClient([f"127.0.0.1:{port}"], target())
    serve(target(), (tokens[:30], params(2)))
    known = target().known_tokens(tokens)
    assert known == 24
    fetched = client.fetch(tokens, PARAMS, left_out=known)
    assert fetched.num_bytes < 24 * target().bytes_per_token + 25_000
    handle = target().import_request(fetched.snapshot, left_out=known)
    finish(target())
    assert target().result(handle).tokens == alone((tokens, PARAMS)).tokens
    target().update(target().served_model)  # forgets all pages
    with pytest.raises(UnknownPages, match="24 tokens were left out of the snapshot's pages, and 0 are known here"):
        target().import_request(fetched.snapshot, left_out=known)
    target().check()
    assert target().pages["used"] == 0 and not target().busy
    with pytest.raises(ValueError, match="left_out = 12"):
        client.fetch(tokens, PARAMS, left_out=12)
    client.close()
    server.stop(0).wait()


def test_a_group_goes_on_from_one_import(reading, sent):
    pages = received(reading, sent).pages()
    snapshot = Snapshot(PROMPT, (), (), PARAMS, len(PROMPT) - 1, pages, target().identity)
    handles = target().import_request(snapshot, n=2)
    finish(target())
    second = replace(PARAMS, sampling=replace(PARAMS.sampling, seed=PARAMS.sampling.seed + 1))
    assert [target().result(handle).tokens for handle in handles] == [alone().tokens, alone((PROMPT, second)).tokens]


def test_pages_leave_while_the_prompt_is_read(reading):
    """T50: the first pages are there when one chunk of twelve tokens is through, and no page that is not written."""
    source = engine(model())
    handle = source.add(prompt(60, seed=8), params(2))
    source.prefill(decode_follows=False)
    assert source.prompt_progress(handle) == (0, 12)
    assert [source.export_pages(handle, first)[0] for first in (0, 1)] == [1, 0]  # of twelve tokens, a page of eight
    while source.prompt_progress(handle)[1] < 60:
        source.prefill(decode_follows=False)
    assert source.export_pages(handle, 1)[0] == 7  # the last one in part
    source.abort(handle)


def test_a_prompt_of_known_pages_but_for_one_token_is_read_too(reading):
    """Elsewhere a decode step computes that token, which an engine that reads prompts never runs."""
    first, second = prompt(24, seed=4), (*prompt(24, seed=4), 7)
    list(reading.read(first))
    frames = list(islice(reading.read(second, alive_seconds=1), 120))  # signs of life for two minutes at most
    assert (frames[-1].kind, frames[-1].fields) == ("end", {"cached_tokens": 24})


@pytest.mark.parametrize(("senders", "receivers"), [(1, 4), (4, 2)])
def test_heads_are_cut_again(senders, receivers):
    """T49: pages of another tensor-parallel layout have each head in its place."""
    draw = np.random.default_rng(0)
    k, v = (draw.normal(size=(2, 8, 4, SIZE, 16)).astype(np.float32) for _ in range(2))  # [L C K P H]
    index_k = draw.normal(size=(2, 8, SIZE, 20)).astype(np.float32)
    place = lambda x, size: jax.device_put(
        x, NamedSharding(make_mesh(tensor=size), PartitionSpec(None, None, "tensor"))
    )
    layout = [tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v, index_k))]
    found = PageReceiver(TRANSFER, 5 * SIZE, layout, SIZE, {})
    contents = [(place(k, senders), place(v, senders), jnp.asarray(index_k))]
    frames = [Frame("hello", dict(identity={}, tokens=5 * SIZE)), *page_frames(contents, 0, 5)]
    assert len(frames) == 1 + 2 * senders
    for data in renumbered([*frames, Frame("end", dict(cached_tokens=0))]):
        found.take(data)
    ((other_k, other_v, other_index),) = found.pages()[0]
    for original, other in ((k, other_k), (v, other_v)):
        for shard in place(other, receivers).addressable_shards:  # as the receiver's devices divide them
            np.testing.assert_array_equal(shard.data[:, :5], original[:, :5, shard.index[2]])
    np.testing.assert_array_equal(other_index[:, :5], index_k[:, :5])


# What is not whole is refused


def test_a_frame_with_any_byte_changed_or_cut_off_is_refused():
    data = encode(Frame("pages", dict(layer=1), {"k": np.arange(6, dtype=np.float32).reshape(2, 3)}), TRANSFER, 3)
    frame, transfer, number = decode(data)
    np.testing.assert_array_equal(frame.arrays["k"], [[0, 1, 2], [3, 4, 5]])
    assert (frame.kind, frame.fields, transfer, number) == ("pages", {"layer": 1}, TRANSFER, 3)
    for place in range(len(data)):
        with pytest.raises(TransferError):
            decode(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(TransferError):
            decode(data[:place])
    with pytest.raises(TransferError, match="version 2"):
        decode(data[:4] + b"\2\0\0\0" + data[8:])


def test_lost_doubled_early_and_cut_transfers_are_refused(reading, sent):
    """T50: whichever frame it is."""
    received(reading, sent)
    count = len(sent)
    for place in range(count):
        with pytest.raises(TransferError, match=r"comes next|ended after|hello|behind the last"):
            received(reading, sent[:place] + sent[place + 1 :])  # dropped; the last one: cut
        with pytest.raises(TransferError, match=r"comes next|hello|behind the last"):
            received(reading, sent[: place + 1] + sent[place:])  # doubled
        with pytest.raises(TransferError, match=r"comes next|ended after|hello|before all"):
            received(reading, sent[:place])
        if place + 1 < count:
            swapped = [*sent[:place], sent[place + 1], sent[place], *sent[place + 2 :]]
            with pytest.raises(TransferError):
                received(reading, swapped)
    other = decode(sent[3])[0]
    with pytest.raises(TransferError, match="another transfer"):
        received(reading, [*sent[:3], encode(other, "ff" * 8, 3), *sent[4:]])


# Faults of a sender whose numbers and checksums are right: name -> (the frames that it sends, the reason).
SENDERS = {
    "T16: index keys stay behind": (
        lambda f: [replace(x, arrays={n: a for n, a in x.arrays.items() if n != "index_k"}) for x in f],
        "belong together",
    ),
    "a layer is left out": (lambda f: [x for x in f if x.fields.get("stack") != 1], "are missing"),
    "a layer twice": (lambda f: [f[0], f[1], f[1], *f[2:]], "twice"),
    "T49: tokens before heads": (
        lambda f: [replace(x, arrays={n: np.swapaxes(a, 1, 2) for n, a in x.arrays.items()}) for x in f],
        "this engine has",
    ),
    "another dtype": (
        lambda f: [replace(x, arrays={n: a.astype(np.float16) for n, a in x.arrays.items()}) for x in f],
        "float16",
    ),
    "pages behind the prompt": (
        lambda f: [replace(x, fields=x.fields | {"first": x.fields["first"] + 1}) if x.arrays else x for x in f],
        "no such place",
    ),
    "a negative stack": (
        lambda f: [replace(x, fields=x.fields | {"stack": -1}) if x.arrays else x for x in f],
        "stack -1",
    ),
    "another prompt": (lambda f: [replace(f[0], fields=f[0].fields | {"tokens": 43}), *f[1:]], "43 tokens"),
    "no end": (lambda f: f[:-1], "before all pages"),
    "an unknown kind": (lambda f: [f[0], Frame("kv"), *f[1:]], "unknown kind"),
}


@pytest.mark.parametrize("name", SENDERS)
def test_a_sender_with_a_fault_is_refused(reading, sent, name):
    """T16, T49: checksums and numbers are right, and the pages are not those of the prompt in this engine's layout."""
    frames_of, reason = SENDERS[name]
    with pytest.raises(TransferError, match=reason):
        received(reading, renumbered(frames_of([decode(data)[0] for data in sent])))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own: own | {"config": own["config"] | {"index_block_size": 16}}, "index_block_size is 16"),
        (lambda own: own | {"dtype of k in stack 1": "bfloat16"}, "its dtype of k in stack 1 is 'bfloat16'"),
        (lambda own: own | {"invariant mode": True}, "its invariant mode is True"),
        (lambda own: own | {"weights": "0" * 16}, "its weights is"),
        (lambda own: own | {"layout of pages": "NHD"}, "its layout of pages is 'NHD'"),
        (lambda own: {}, "is None"),
    ],
)
def test_another_model_or_cache_is_refused_by_name(reading, sent, change, reason):
    hello = decode(sent[0])[0]
    changed = encode(replace(hello, fields=hello.fields | {"identity": change(reading.identity)}), TRANSFER, 0)
    with pytest.raises(TransferError, match=reason):
        receiver(reading).take(changed)


def test_other_weights_of_the_same_shapes_have_another_sum(reading):
    from m3jax.transfer.identity import weights_sum

    assert weights_sum(model()) == weights_sum(tiny.model(CONFIG)) == reading.identity["weights"]
    leaves, tree = jax.tree.flatten(model())
    largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
    swapped = [jnp.flip(leaf) if i == largest else leaf for i, leaf in enumerate(leaves)]
    assert weights_sum(jax.tree.unflatten(tree, swapped)) != weights_sum(model())


def test_other_scales_of_float8_are_another_cache():
    """The same bits under other scales are other keys, and no frame has scales."""
    first, same, other = (
        identity(CONFIG, Cache.pool(CONFIG, 1, 1, 1, kv_dtype="float8_e4m3fn", scales=scales))
        for scales in (
            tuple(unit_scales(CONFIG)),
            tuple(unit_scales(CONFIG)),
            tuple(jax.tree.map(lambda scale: 2 * scale, unit_scales(CONFIG))),
        )
    )
    assert first == same and first != other


def test_a_transfer_that_stalls_or_whose_sender_dies_leaves_no_page(reading):
    """Over real gRPC: silence ends it, and so does a process that goes away; both sides are as they were."""
    target().update(target().served_model)

    class Stalling(Prefiller):
        def __init__(self, dies):
            self.identity, self.dies, self.is_over = reading.identity, dies, threading.Event()

        def read(self, tokens, left_out, media=None):
            frames = reading.read(tokens)
            for _ in range(4):
                yield next(frames)
            if self.dies:
                self.server.stop(0)
            self.is_over.wait(10)

    for dies, reason in ((False, "nothing came for 0.3 s"), (True, "ended the transfer")):
        sender = Stalling(dies)
        sender.server, port = service.start(sender)
        client = PrefillClient([f"127.0.0.1:{port}"], target(), silence_seconds=20 if dies else 0.3)
        with pytest.raises(TransferError, match=reason):
            client.fetch(prompt(45, seed=9), PARAMS)
        sender.is_over.set()
        client.close()
        sender.server.stop(0).wait()
    target().check()
    assert target().pages["used"] == 0 and not target().busy


def test_a_request_that_is_given_up_and_one_that_is_refused(reading, monkeypatch):
    """Given up as soon as something comes, though all may have come before the next look at the clock."""
    monkeypatch.setattr(transfer_client, "_POLL_SECONDS", 60.0)
    server, port = service.start(reading)
    client = PrefillClient([f"127.0.0.1:{port}"], target())
    with pytest.raises(TransferError, match="given up"):
        client.fetch(prompt(120, seed=3), params(4), is_stopped=lambda: True)
    with pytest.raises(ValueError, match="no token id"):
        client.fetch((3, 99, 5), params(4))
    with pytest.raises(ValueError, match="at least 2"):
        client.fetch((3,), params(4))
    raw = grpc.insecure_channel(f"127.0.0.1:{port}")
    with pytest.raises(grpc.RpcError, match="no frame of pages"):
        list(raw.unary_stream(f"/{service.SERVICE}/Read")(b"garbage"))
    raw.close()
    client.close()
    server.stop(0).wait()
