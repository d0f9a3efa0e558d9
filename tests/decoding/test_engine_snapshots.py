"""Snapshots that are damaged, edited or hostile: an import goes on with the same tokens or changes nothing."""

import hashlib
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from support import tiny
from support.engines import CONFIG, engine, finish, params, prompt, quick, runner_of, serve

from m3jax.decoding import Engine, Params, Sampling
from m3jax.decoding.engine import Snapshot
from m3jax.decoding.engine.runner import Runner
from m3jax.decoding.engine.sealed import seal, unseal

WORK = prompt(90), params(20, temperature=0.8, seed=5)  # more than eight pages: two groups


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


@cache
def model():
    return tiny.model(CONFIG)


@cache
def alone():
    return serve(engine(model()), WORK)[0]


@cache
def exported(rounds: int = 10) -> Snapshot:
    source = engine(model())
    handle = source.add(*WORK)
    for _ in range(rounds):
        source.step()
    return source.export(handle)


@cache
def target() -> Engine:
    """One engine for all: whatever a broken import leaves is found by those that come after it."""
    served = engine(model())
    serve(served, (prompt(20, seed=3), params(6)))
    return served


def assert_harmless(bring: Callable[[], Snapshot]) -> bool:
    """Return True if an import worked; fail unless it did or raised a ValueError of one line.

    After both, the engine has its pages and serves the next request as if there had been no import.
    """
    served = target()
    if served.pages["cached"]:
        served.update(served.served_model)  # else the pages of the last import are found, not written
    before = served.pages
    try:
        snapshot = bring()
        moved = served.import_request(snapshot)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 2000, repr(str(error)[:3000])
        moved = None
        assert {name: served.pages[name] for name in ("free", "cached", "used")} == {
            name: before[name] for name in ("free", "cached", "used")
        }
    served.check()
    if moved is not None:
        finish(served)
        if snapshot.params == WORK[1]:
            assert served.result(moved).tokens == alone().tokens
    (next_one,) = serve(served, WORK)
    assert next_one.tokens == alone().tokens, "the next request with this prompt"
    return moved is not None


# Bytes


@pytest.mark.parametrize("types", [(), ("bfloat16", "bfloat16", "float8_e4m3fn")], ids=str)
def test_bytes_are_a_safetensors_file(types):
    """Every array comes back, of the same type and to the bit; the file is one that others read."""
    served = engine(model())
    handle = served.add(*WORK)
    for _ in range(6):
        served.step()
    snapshot = served.export(handle)
    if types:
        cast = lambda array, dtype: None if array is None else array.astype(dtype)
        cast_all = lambda arrays: tuple(cast(*each) for each in zip(arrays, types, strict=True))
        snapshot = replace(snapshot, pages=[[cast_all(arrays) for arrays in group] for group in snapshot.pages])
    data = snapshot.to_bytes()
    back = Snapshot.from_bytes(data)
    assert (back.prompt, back.new, back.logprobs) == (snapshot.prompt, snapshot.new, snapshot.logprobs)
    assert (back.params, back.cached) == (snapshot.params, snapshot.cached)
    for group, other in zip(snapshot.pages, back.pages, strict=True):
        for (k, v, index_k), copies in zip(group, other, strict=True):
            for x, y in zip((k, v, index_k), copies, strict=True):
                assert (x is None) == (y is None)
                assert x is None or (x.dtype == y.dtype and x.tobytes() == y.tobytes())
    assert {"prompt", "new", "logprobs"} < {name for name, _ in deserialize(data)}
    if not types:
        assert served.import_request(back) > handle
        finish(served)


@cache
def sealed_bytes() -> bytes:
    return exported().to_bytes()


def test_bytes_stay_what_they_were():
    """What an earlier version sealed is unsealed: the same arrays and header give the same bytes in every version."""
    arrays = {"b": np.arange(3.0).astype(ml_dtypes.bfloat16), "a": np.arange(6).reshape(2, 3), "none": np.zeros((0, 5))}
    data = seal(arrays, {"cached": 3, "text": "\u00fc"})
    assert hashlib.sha256(data).hexdigest() == "754fe07f3f500257c2f9bfa19417a93f77c69ee6d4599a772c4157ccf21ab471"
    found, header = unseal(data)
    assert header == {"cached": 3, "text": "\u00fc"} and list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@given(st.sampled_from(("flip", "cut", "add", "zero", "swap")), st.integers(0, 2**40), st.integers(0, 7), st.booleans())
def test_damaged_bytes_are_refused(what, where, bit, in_header):
    """T50: a request in flight with a byte that is another one, missing or too many."""
    data = bytearray(sealed_bytes())
    place = where % (int.from_bytes(data[:8], "little") + 8 if in_header else len(data))
    if what == "flip":
        data[place] ^= 1 << bit
    elif what == "cut":
        del data[place:]
    elif what == "add":
        data[place:place] = b"\0" * (1 + bit)
    elif what == "zero":
        data[place] = 255 - data[place]
        data[place + 1 : place + 9] = b"\0" * len(data[place + 1 : place + 9])
    else:
        data[:] = data[place:] + data[:place]
    if data != sealed_bytes():
        with pytest.raises(ValueError, match=r"are no snapshot|checksum") as raised:
            Snapshot.from_bytes(bytes(data))
        assert "\n" not in str(raised.value)


def resealed(text: bytes, numbers: bytes) -> bytes:
    """Bytes with a header of any kind and a checksum that fits."""
    text = re.sub(rb'"sha256":"[0-9a-f]{64}"', b'"sha256":"' + b"0" * 64 + b'"', text, count=1)
    data = len(text).to_bytes(8, "little") + text + numbers
    return data.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + hashlib.sha256(data).hexdigest().encode(), 1)


def places_in(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value in parsed JSON."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places_in(value, (*path, key))


HOSTILE = (
    None, True, -1, 0, 1, 7, 2**31, 10**30, 1e308, 0.5, "x", "", [], {}, [[]], {"list": []}, {"array": "prompt"},
    {"array": "nothing"}, {"tuple": 3}, [-1, 2], "\x1b[2J\n" * 500, ["a"] * 1000,
)  # fmt: skip


@settings(max_examples=10)
@given(st.integers(0, 10**9), st.sampled_from(HOSTILE), st.booleans())
def test_a_hostile_header_is_refused_or_harmless(which, value, outer):
    """Its checksum fits. Memory stays within some copies of the bytes, whatever sizes the header asks for."""
    data = sealed_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    inner = json.loads(entries["__metadata__"]["header"])
    tree = entries if outer else inner
    *path, last = sorted(places_in(tree), key=str)[which % len(list(places_in(tree)))]
    if last in ("data_offsets", "sha256") or "data_offsets" in path:
        return  # another array's numbers under this name are another snapshot, which nothing tells from a true one
    parent = tree
    for key in path:
        parent = parent[key]
    parent[last] = value
    if isinstance(entries.get("__metadata__"), dict) and not outer:
        entries["__metadata__"]["header"] = json.dumps(inner)
    hostile = resealed(json.dumps(entries, separators=(",", ":")).encode(), data[8 + size :])
    tracemalloc.start()
    with suppress(ValueError):
        Snapshot.from_bytes(hostile)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(data) + 2**21, f"{peak} bytes for {len(data)}"
    assert_harmless(lambda: Snapshot.from_bytes(hostile))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "these 0 bytes are no snapshot"),
        (b"\xff" * 40, "these 40 bytes are no snapshot"),
        (seal({}, {})[:-1], "no snapshot, or its beginning is damaged"),
        (resealed(b'{"a":"sha256"}', b""), "they have no checksum"),
        (resealed(b'{"sha256":"' + b"0" * 64 + b'","a":' + b"[" * 10**5 + b"}", b""), "cannot be read"),
        (resealed(b'{"sha256":"' + b"0" * 64 + b'","a":NaN}', b""), "cannot be read: its header has NaN"),
        (seal({}, {}).replace(b'"version":"1"', b'"version":"9"'), "the checksum .* is another one"),
        (resealed(seal({}, {})[8:].replace(b'"version":"1"', b'"version":"9"'), b""), "version is '9', and 1 can be"),
        (seal({}, {}), "cannot be read: KeyError"),
        (seal({}, {"params": 3}), "cannot be read: TypeError"),
    ],
    ids=range(10),
)
def test_bytes_that_are_no_snapshot(data, match):
    with pytest.raises(ValueError, match=match):
        Snapshot.from_bytes(data)


@pytest.mark.usefixtures("unchecked")
def test_what_bytes_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="read from bytes, got str"):
        Snapshot.from_bytes("text")
    with pytest.raises(ValueError, match=r"pages\.0 of a snapshot is a set"):
        replace(exported(), pages=[{1}]).to_bytes()
    with pytest.raises(ValueError, match=r"pages\.0 is an array of complex64"):
        replace(exported(), pages=[np.zeros(1, np.complex64)]).to_bytes()
    for number in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="JSON"):
            seal({}, {"temperature": number})


# Edited records


def other_array(change: Callable[[np.ndarray], Any], group: int = 0) -> Callable[[Snapshot], Snapshot]:
    """The first stack's keys of a group of pages changed."""

    def edit(snapshot: Snapshot) -> Snapshot:
        pages = [list(stacks) for stacks in snapshot.pages]
        k, v, index_k = pages[group][0]
        pages[group][0] = (change(k), v, index_k)
        return replace(snapshot, pages=pages)

    return edit


EDITS = {
    "pages of the snapshot has other arrays|other arrays than this engine's": lambda s: replace(
        s, pages=[s.pages[0][:1], *s.pages[1:]]
    ),
    "pages are 1 entries: 102 cached tokens need 2": lambda s: replace(s, pages=s.pages[:1]),
    "pages are 3 entries": lambda s: replace(s, pages=[*s.pages, s.pages[0]]),
    "pages are None": lambda s: replace(s, pages=None),
    r"pages\[0\] of the snapshot has other arrays": lambda s: replace(s, pages=[None, None]),
    r"pages\[0\]\[0\]\[0\] of the snapshot is float32 \[1, 8, 4, 8\]": other_array(lambda k: k[..., 0]),
    r"pages\[1\]\[0\]\[0\] of the snapshot is float32 \[1, 1, 4, 8, 16\]": other_array(lambda k: k[:, :1], group=1),
    r"is float64 \[1, 8, 4, 8, 16\], this engine's float32": other_array(lambda k: k.astype(np.float64)),
    r"is 'x': it must be an array": other_array(lambda k: "x"),
    "has other arrays": other_array(lambda k: k.tolist()),
    "cached is 5: |pages are 2 entries: 5 cached tokens need 1": lambda s: replace(s, cached=5),
    "cached is -1: of 103 tokens 0 to 102 are in pages": lambda s: replace(s, cached=-1),
    "cached is 103": lambda s: replace(s, cached=103),
    "cached is True": lambda s: replace(s, cached=True),
    "cached is 102.0": lambda s: replace(s, cached=102.0),
    "prompt is empty": lambda s: replace(s, prompt=(), cached=0, pages=[]),
    "prompt: 64 is no token id": lambda s: replace(s, prompt=(64, *s.prompt[1:])),
    r"prompt is \[": lambda s: replace(s, prompt=list(s.prompt)),
    "new tokens: -1 is no token id": lambda s: replace(s, new=(*s.new[:-1], -1)),
    "new tokens: 'a' is no token id": lambda s: replace(s, new=(*s.new[:-1], "a")),
    "has 13 new tokens: it must have 13 finite log-probabilities": lambda s: replace(s, logprobs=s.logprobs[:-1]),
    "has 13 new tokens: it must have 13 finite log-": lambda s: replace(s, logprobs=(*s.logprobs[:-1], float("nan"))),
    "max_new_tokens = 13: the snapshot has 13 already": lambda s: replace(s, params=params(13)),
    "max_new_tokens = 60": lambda s: replace(s, params=params(60)),
    "params: got None": lambda s: replace(s, params=None),
    "params: got {}": lambda s: replace(s, params=Params(max_new_tokens=20, sampling={})),
    "takes 4": lambda s: replace(s, params=params(20, stop_ids=range(5))),
    "does not say of which model": lambda s: replace(s, identity=None),
    "of another model or cache: its config is None": lambda s: replace(s, identity={}),
    "its vocab_size is 65": lambda s: replace(
        s, identity=s.identity | {"config": s.identity["config"] | {"vocab_size": 65}}
    ),
    "takes a Snapshot, got dict": lambda s: vars(s),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("match", EDITS)
def test_an_edited_snapshot_is_refused_and_changes_nothing(match):
    served, before = target(), target().pages
    with pytest.raises(ValueError, match=match):
        served.import_request(EDITS[match](exported()))
    assert served.pages == before
    served.check()


def test_the_next_request_after_all_of_them_is_right():
    assert assert_harmless(exported)


# Failures on the way


@pytest.mark.parametrize("group", [0, 1])
def test_a_write_that_fails_takes_everything_back(group, monkeypatch):
    """T50: The pages are not known by their tokens until they are written, and go back."""
    served, calls = engine(model()), []
    write = Runner.write_pages

    def fail(self, page_ids, contents, tokens):
        write(self, page_ids[: 8 * group], contents[:group], tokens)
        calls.append(served.pages["used"])
        raise MemoryError("no room on the device")

    monkeypatch.setattr(Runner, "write_pages", fail)
    before = served.pages
    with pytest.raises(MemoryError, match="no room on the device"):
        served.import_request(exported())
    assert calls == [13]
    assert {name: served.pages[name] for name in ("free", "cached", "used")} == {
        name: before[name] for name in ("free", "cached", "used")
    }
    assert not served.busy
    served.check()
    monkeypatch.undo()
    assert serve(served, WORK)[0].tokens == alone().tokens
    moved = served.import_request(exported())
    finish(served)
    assert served.result(moved).tokens == alone().tokens


def test_check_sees_pages_that_are_known_and_were_not_written(monkeypatch):
    """T50: As an import that registered its pages and then failed to write them left them."""
    served = engine(model())
    monkeypatch.setattr(Runner, "write_pages", lambda *args: None)
    served.import_request(exported())
    with pytest.raises(AssertionError, match=r"page \d+ is known by the tokens \(.*\), and \(-1, .*\) were written"):
        served.check()


def test_check_sees_a_token_in_the_wrong_place():
    served = engine(model())
    served.add(prompt(40), params(8))
    for _ in range(4):
        served.step()
    written, third = runner_of(served).written, prompt(40)[16:24]
    (page,) = np.flatnonzero((written == third).all(axis=1)).tolist()
    written[page, [0, 1]] = written[page, [1, 0]]
    with pytest.raises(AssertionError, match=f"page {page} is known by the tokens"):
        served.check()


def test_a_snapshot_has_no_other_request_s_pages():
    """The last group is filled up with the request's own first page of it."""
    served = engine(model())
    serve(served, (prompt(40, seed=8), params(6)))  # has been in page 0
    handle = served.add(*WORK)
    for _ in range(3):
        served.step()
    (group,) = served.export(handle).pages
    for k, v, index_k in group:
        for x in (k, v) if index_k is None else (k, v, index_k):
            np.testing.assert_array_equal(x[:, 5:], np.repeat(x[:, :1], 3, axis=1))


def test_snapshots_hold_the_settings_and_read_older_bytes():
    """Bytes from before there were these settings have none: they are off."""
    knobs = dict(presence_penalty=1.0, frequency_penalty=-1.0, logit_bias={3: -5.0, 1: 2.0}, bad_words=((1, 2), (3,)))
    knobs |= dict(temperature=0.5, top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=2**32 - 1)
    asked = Params(
        max_new_tokens=30, sampling=Sampling(**knobs), stop_ids=(3, 4), min_tokens=3, ignore_eos=True, top_logprobs=4
    )
    whole = exported()
    top = tuple({token: -0.5, (token + 1) % CONFIG.vocab_size: -2.0} for token in whole.new)
    snapshot = Snapshot.from_bytes(replace(whole, params=asked, top_logprobs=top).to_bytes())
    assert snapshot.params == asked and snapshot.top_logprobs == top

    arrays, header = unseal(whole.to_bytes())
    header["params"] = {name: header["params"][name] for name in ("max_new_tokens", "sampling", "stop_ids")}
    new = ("presence_penalty", "frequency_penalty", "logit_bias", "bad_words")
    header["params"]["sampling"] = {k: v for k, v in header["params"]["sampling"].items() if k not in new}
    del header["top_logprobs"]
    older = Snapshot.from_bytes(seal(arrays, header))
    assert older.params == whole.params and older.top_logprobs == ()
