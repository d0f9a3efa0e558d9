"""Engines and requests that are refused: the error names the reason, and other requests get the same tokens."""

from dataclasses import fields
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.engines import CONFIG, engine, finish, params, prompt, quick, serve

from m3jax.decoding import Engine, Generation, Params, Sampling, Storage, Work
from m3jax.decoding.engine import EngineKnobs
from m3jax.hub import M3


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    with quick():
        yield


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def alone() -> Generation:
    """Return the result of the request that runs while others are refused, from an engine to itself."""
    return serve(engine(model()), (prompt(9), params(40)))[0]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_batch": 2.0}, r"max_batch = 2\.0: must be an integer"),
        ({"prefill_chunk": (8, 0)}, r"prefill_chunk\[1\] = 0: must be an integer of at least 1"),
        ({"max_length": 161}, r"max_length = 161: at most 160 \(20 pages of 8 tokens\)"),
        ({"draft": 3}, "draft is 3: give 'builtin', 'ngram', an EAGLE3 draft's folder, or a drafter"),
        ({"draft": "nowhere"}, "no config.json; give a folder of an EAGLE3 draft"),
        ({"draft": "builtin"}, "hidden_size is "),
        ({"prefill_chunk": ()}, r"prefill_chunk = \(\): give at least one size"),
        ({"kv_dtype": "int8"}, "a cache cannot hold int8: choose one of bfloat16, .* float8_e4m3fn"),
        ({"kv_dtype": "float8_e5m2"}, "a cache cannot hold float8_e5m2"),
        ({"index_dtype": "complex64"}, "a cache cannot hold complex64"),
        ({"index_dtype": "float8"}, "a cache cannot hold float8: choose"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be(options, match):
    with pytest.raises(ValueError, match=match):
        engine(model(), **options)


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ((), {}, "prompt is empty: give it at least one token"),
    ((3, 64), {}, "prompt: 64 is no token id; they are integers from 0 to 63"),
    ((-1,), {}, "prompt: -1 is no token id"),
    ((1.0,), {}, r"prompt: 1\.0 is no token id"),
    ("text", {}, "the prompt is text: encode it with the model's tokenizer first"),
    (((1, 2), (3, 4)), {}, r"the prompt is \(\(1, 2\), \(3, 4\)\): give one list of token ids"),
    (7, {}, "the prompt is 7: give one list of token ids"),
    ((1, 2), {"new": 0}, "max_new_tokens = 0: must be an integer of at least 1"),
    ((1, 2), {"new": 2000}, "more than the model's context of 1024: ask for at most 1022"),
    ((1,) * 1024, {}, "prompt has 1024 tokens and the model's context is 1024: shorten"),
    ((1,) * 120, {"new": 9}, "needs room for 129 tokens and a request of this engine can have 128: .* more pages"),
    ((1, 2), {"stop_ids": range(5)}, r"5 stop ids: this engine takes 4 \(max_stop_ids\)"),
    ((1, 2), {"stop_ids": [64]}, "stop_ids: 64 is no token id"),
]


@pytest.mark.usefixtures("unchecked")
def test_a_request_that_cannot_be_changes_nothing():
    """Each is refused with the reason, and who runs at the time goes on as if it had not been."""
    served = engine(model())
    handle = served.add(prompt(9), params(40))
    for tokens, options, match in BAD_REQUESTS:
        pages = served.pages
        with pytest.raises(ValueError, match=match):
            served.add(tokens, params(**options))
        served.check()
        assert served.pages == pages
        served.step()
    for bad, match in (
        (None, r"params: got None; give Params\(max_new_tokens=..., sampling=Sampling\(...\)\)"),
        (Params(max_new_tokens=3, sampling=None), "params: got None; give Params"),
        (Params(max_new_tokens=3, sampling=Sampling(), stop_ids="1,2"), "stop_ids = '1,2': must be a tuple"),
        (Params(max_new_tokens=3, sampling=Sampling(), stop_ids=1), "stop_ids = 1: must be a tuple"),
    ):
        with pytest.raises(ValueError, match=match):
            served.add((1, 2), bad)
    finish(served)
    assert served.run() == {handle: alone()}


def test_a_prompt_may_be_an_array():
    served = engine(model())
    kinds = (np.array(prompt(9)), jnp.array(prompt(9)), list(prompt(9)))
    handles = [served.add(tokens, params(40)) for tokens in kinds]
    finish(served)
    assert [served.result(handle).tokens for handle in handles] == [alone().tokens] * 3


CALLS = [
    ("result", ()), ("reason", ()), ("take", ()), ("abort", ()), ("stop", (0,)), ("forget", ()), ("copy", ()),
    ("truncate", (0,)), ("export", ()), ("stream", ()),
]  # fmt: skip


def call(served: Engine, name: str, handle: Any, arguments: tuple) -> None:
    out = getattr(served, name)(handle, *arguments)
    if name == "stream":
        list(out)


@pytest.mark.usefixtures("unchecked")
def test_wrong_handles_change_nothing():
    """Unknown, forgotten, ended: a clear error from every call, and the others go on."""
    served = engine(model())
    gone, ended, other = (served.add(prompt(n), params(40)) for n in (5, 30, 9))
    for _ in range(3):
        served.step()
    served.abort(gone)
    served.forget(gone)
    served.abort(ended)
    pages = served.pages
    for name, arguments in CALLS:
        for handle in (gone, 99, -1, None):
            with pytest.raises(ValueError, match=f"no request {handle}: use a handle that add returned"):
                call(served, name, handle, arguments)
    for name, arguments in (("abort", ()), ("copy", ()), ("truncate", (0,)), ("export", ())):
        with pytest.raises(ValueError, match=rf"has ended already \(aborted\): there is nothing to {name}$"):
            call(served, name, ended, arguments)
    for name, arguments, match in (
        ("forget", (), "has not ended: abort it first"),
        ("stop", (99,), "keep = 99: request 2 has . new tokens; keep 0 to that many"),
        ("truncate", (-1,), "keep = -1: request 2 has . new tokens"),
        ("copy", (params(1),), "max_new_tokens = 1: request 2 has . already"),
        ("copy", (params(400),), "needs room for 409 tokens"),
    ):
        with pytest.raises(ValueError, match=match):
            call(served, name, other, arguments)
    served.check()
    assert served.pages == pages
    finish(served)
    assert served.result(other) == alone()


def test_options_are_objects_or_keywords():
    """Both lay out the same engine; nothing is given twice, and a word that is none is named with the nearest."""
    objects = Engine(model(), storage=Storage(pages=24, max_length=64), work=Work(max_batch=2, prefill_chunk=16))
    keywords = Engine(model(), pages=24, max_length=64, max_batch=2, prefill_chunk=16)
    assert objects.shapes == keywords.shapes and objects.max_length == keywords.max_length == 64
    with pytest.raises(ValueError, match="storage and pages, max_length: give the object or keywords, not both"):
        Engine(model(), storage=Storage(pages=24), pages=24, max_length=64)
    with pytest.raises(TypeError, match=r"Engine\(\) has no keyword 'max_batches'; the nearest .* 'max_batch'"):
        Engine(model(), pages=24, max_batches=2)
    with pytest.raises(TypeError, match="pages"):
        Engine(model(), max_batch=2)
    attributes = {field.name: field.type for kind in (Storage, Work) for field in fields(kind)}
    assert EngineKnobs.__annotations__ == attributes
