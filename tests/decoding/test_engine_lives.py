"""Random lives of requests, of text and of pictures, over a model that runs in no time and a pool of fourteen pages."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines import finish, params, prompt, serve
from support.fake_seer import IMAGE, VIDEO, FakeSeer, seeing_config
from support.media import noise_patches

from m3jax.decoding import Engine, Generation, Media

SMALL = seeing_config(index_block_size=4, max_position_embeddings=64)
ROOM = 32

# Pictures of four and two features; a clip of two chunks of four and two.
PICTURES = {
    name: noise_patches((1, 4, width), seed=seed) for seed, (name, width) in enumerate(dict(A=4, B=4, C=2).items())
}
CLIP = noise_patches((6, 2, 2), seed=9)


def text(length: int, seed: int) -> tuple[int, ...]:
    """A prompt without placeholders."""
    return tuple(token % IMAGE for token in prompt(length, seed))


def seen(number: int, *names: str) -> tuple[int, ...]:
    """A prompt of text and pictures in turns, no two alike at the end."""
    tokens = BASE[:3]
    for name in names:
        tokens += (IMAGE,) * (len(PICTURES[name][0]) // 4) + BASE[5:6]
    return tokens + text(number % 3, seed=number)


BASE = text(20, seed=3)
LIVES = [
    (BASE[:n] + text(more, seed=n), knobs, Media())
    for n, more, knobs in (
        (1, 0, {}), (4, 0, dict(temperature=1.0, seed=1)), (9, 3, {}), (12, 2, dict(temperature=2.0, seed=2)),
        (12, 2, dict(temperature=2.0, seed=3)), (16, 0, {}), (20, 0, dict(repetition_penalty=2.0)), (0, 7, {}),
    )
] + [
    (seen(number, *names), dict(temperature=2.0, seed=number), Media([PICTURES[name] for name in names]))
    for number, names in enumerate(("A", "B", "AB", "BA", "AA", "CAC"))
] + [
    (BASE[:2] + (VIDEO,) * 4 + BASE[:1] + (VIDEO,) * 2 + BASE[4:6], {}, Media(videos=[CLIP])),
    (BASE[:2] + (VIDEO,) * 4 + BASE[:1] + (VIDEO,) * 2 + (IMAGE,) * 4, {}, Media([PICTURES["A"]], [CLIP])),
]  # fmt: skip


@cache
def fake() -> FakeSeer:
    return FakeSeer.random(SMALL)


def small_engine(share: bool = True, pages: int = 14, room: int | None = ROOM) -> Engine:
    shape = dict(pages=pages, max_batch=4, prefill_rows=2, prefill_chunk=(2, 5), steps_per_call=3, max_length=room)
    # Room for five pictures of four features, where there are six.
    sight = dict(media_patches=(8, 16), media_tokens=21)
    return Engine(fake(), **shape, **sight, max_stop_ids=2, prefix_cache=share)


def add(served: Engine, number: int, most: int) -> int:
    """Add request `number` with at most so many new tokens."""
    tokens, knobs, media = LIVES[number]
    return served.add(tokens, params(min(most, ROOM - len(tokens)), **knobs), media)


@cache
def life(number: int) -> Generation:
    """All that request `number` can get; with a lower limit it gets the beginning of it."""
    served = small_engine()
    handle = add(served, number, ROOM)
    finish(served)
    return served.result(handle)


ADD = st.tuples(st.just("add"), st.integers(0, len(LIVES) - 1), st.integers(3, 16))
STEP = st.tuples(st.just("step"), st.just(0), st.integers(1, 3))
OTHERS = st.tuples(st.sampled_from(("abort", "prefill", "truncate", "copy")), st.integers(0, 9), st.integers(0, ROOM))


@given(st.lists(ADD, min_size=1, max_size=3), st.lists(st.one_of(ADD, STEP, OTHERS), min_size=5), st.booleans())
def test_random_lives(first, then, share):
    """Whatever is added, aborted, copied, taken back, preempted: each request gets the beginning of what is its own."""
    served, numbers, limits = small_engine(share), {}, {}
    for what, which, size in (*first, *then):
        live = [handle for handle in numbers if served.reason(handle) == "unfinished"]
        if what == "add":
            numbers[add(served, which, size)] = which
        elif what == "step":
            for _ in range(size):
                served.step()
                served.check()
        elif live:
            act(served, what, live[which % len(live)], size, numbers)
        served.check()
        limits |= {handle: request.params.max_new_tokens for handle, request in served._requests.items()}
        for handle, number in numbers.items():
            assert_beginning(served.result(handle), life(number))
    finish(served)
    for handle, number in numbers.items():
        found = served.result(handle)
        assert_beginning(found, life(number))
        if found.stop_reason != "aborted":
            assert found.stop_reason == "length"
            assert len(found.tokens) == limits[handle]


def act(served: Engine, what: str, handle: int, size: int, numbers: dict[int, int]) -> None:
    had, number = len(served.result(handle).tokens), numbers[handle]
    if what == "abort":
        served.abort(handle)
    elif what == "truncate":
        served.truncate(handle, size % (had + 1))
    elif what == "prefill":
        served.prefill()
    else:
        tokens, knobs, _ = LIVES[number]
        limit = min(had + size + 1, ROOM - len(tokens))
        numbers[served.copy(handle, params(limit, **knobs))] = number


def assert_beginning(found: Generation, whole: Generation) -> None:
    count = len(found.tokens)
    assert found.tokens == whole.tokens[:count]
    np.testing.assert_allclose(found.logprobs, whole.logprobs[:count], rtol=0, atol=1e-5)


def test_a_request_may_fill_the_pool():
    """Its prompt and all but the last of its new tokens lie in all eight pages; alone, twice, and beside another."""
    served = small_engine(pages=8)
    asked = params(ROOM - len(LIVES[5][0]))
    for _ in range(2):
        assert_beginning(serve(served, (LIVES[5][0], asked))[0], life(5))
    both = serve(served, (LIVES[5][0], asked), (LIVES[7][0], params(ROOM - 7)))
    for found, number in zip(both, (5, 7), strict=True):
        assert found.stop_reason == "length"
        assert_beginning(found, life(number))


def test_longer_than_the_pool():
    """A request is refused if it is longer than all pages hold, even if the model could take it."""
    served = small_engine(pages=6, room=None)
    assert served.max_length == 24
    with pytest.raises(ValueError, match="needs room for 25 tokens and a request of this engine can have 24"):
        served.add(BASE, params(5))
