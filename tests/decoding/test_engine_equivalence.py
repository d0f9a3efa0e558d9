"""One answer for each request, however the engine cuts, places, shares, moves and mixes the work."""

import random
from collections.abc import Iterable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.compilations import compilations
from support.engines import (
    CONFIG,
    QUICK,
    SHAPE,
    SIZE,
    Watched,
    allocator_of,
    assert_stays,
    engine,
    finish,
    no_steps,
    params,
    places,
    poison,
    preemptions,
    prompt,
    quick,
    runner_of,
    temporary_bytes,
    watch,
)

from m3jax.decoding import Engine, Params, device
from m3jax.parallel import parse_mesh

TOLERANCE = 1e-5  # of a log-probability, between programs that sum in different orders
# Greedy and sampled rows, prompts of less than a page and of many, all lengths but one off the page's border.
WORK = [
    (prompt(5), params(12, temperature=1.0, seed=3)),
    (prompt(1), params(30)),
    (prompt(40), params(60, temperature=1.2, top_k=8, seed=1)),
    (prompt(17), params(60, temperature=0.8, top_p=0.9, min_p=0.01, seed=7)),
    (prompt(61), params(16, repetition_penalty=1.3, frequency_penalty=0.6, logit_bias={3: 2.0})),
    (prompt(100), params(20, temperature=1.0, seed=5)),
]
Item = tuple[tuple[int, ...], Params]


class Outcome(NamedTuple):
    """The result of a request, and the blocks that each of its tokens chose [S L K J]."""

    tokens: list[int]
    logprobs: list[float]
    blocks: np.ndarray


@cache
def model() -> Watched:
    return Watched(tiny.model(CONFIG))


def run(served: Engine, items: Iterable[Item], notes=None, used: int = 0) -> list[Outcome]:
    """Serve requests that are all there from the start."""
    notes = watch(served) if notes is None else notes
    items = list(items)
    handles = [served.add(*item) for item in items]
    finish(served, used)
    return [outcome(served, notes, *item) for item in zip(handles, items, strict=True)]


def outcome(served: Engine, notes, handle: int, item: Item) -> Outcome:
    result = served.result(handle)
    assert result.stop_reason == "length"
    # The last token is drawn and never fed.
    return Outcome(result.tokens, result.logprobs, notes[(*item[0], *result.tokens[:-1])])


@cache
def alone(number: int) -> Outcome:
    """Request `number` in an engine of its own."""
    return run(engine(model()), [WORK[number]])[0]


def assert_same(found: Outcome, expected: Outcome, bits: bool = False) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.blocks, expected.blocks)
    if bits:
        assert found.logprobs == expected.logprobs
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)


# The ground


@cache
def forward(number: int) -> tuple[np.ndarray, np.ndarray]:
    """(log-probabilities [S V], blocks [S L K J]) of a request's tokens, from one call without a cache."""
    rows = np.zeros((len(WORK), 128), np.int32)
    for i, row in enumerate(rows):
        tokens = (*WORK[i][0], *alone(i).tokens)
        row[: len(tokens)] = tokens
    logprobs, blocks = _forward(model().model, rows)
    return np.asarray(logprobs[number]), np.moveaxis(np.asarray(blocks[:, number]), 2, 0)


@partial(jax.jit, compiler_options=QUICK)
def _forward(model, tokens):
    out = model.run(tokens, probe=lambda values, _: values.get("blocks"))
    blocks = jnp.concatenate([blocks for blocks in out.probed if blocks is not None])
    return jax.nn.log_softmax(out.logits), blocks


@pytest.mark.parametrize("number", range(len(WORK)))
def test_a_request_is_one_call_over_its_tokens(number):
    """T14, T15, T18: prefill in chunks and decode choose, and give, what one call over all tokens does."""
    found, (logprobs, blocks) = alone(number), forward(number)
    first, fed = len(WORK[number][0]) - 1, len(found.blocks)
    np.testing.assert_array_equal(found.blocks, blocks[:fed])
    expected = logprobs[np.arange(first, fed), found.tokens]
    np.testing.assert_allclose(found.logprobs, expected, rtol=0, atol=5 * TOLERANCE)
    if WORK[number][1].sampling.temperature == 0 and WORK[number][1].sampling.repetition_penalty is None:
        assert found.tokens == logprobs[first:fed].argmax(-1).tolist()


def test_selection_is_partial():
    """T17: of the longest request most tokens drop blocks that they see, and not merely the oldest."""
    blocks, own = alone(5).blocks, np.arange(119) // SIZE
    assert np.mean(own + 1 > CONFIG.index_topk_blocks) > 0.7
    count = np.minimum(own + 1, CONFIG.index_topk_blocks)[:, None, None]
    np.testing.assert_array_equal((blocks >= 0).sum(-1), np.broadcast_to(count, blocks.shape[:3]))
    assert np.any(blocks[40:, ..., 0] < own[40:, None, None] - 3)


def test_one_program_serves_growing_lengths():
    """T11, T21: in one engine, longer and longer; nothing is compiled, and nothing of the shorter ones remains."""
    served = engine(model())
    served.warmup()
    notes = watch(served)
    with compilations() as seen:
        for number in (1, 0, 3, 2, 4, 5):
            assert_same(run(served, [WORK[number]], notes)[0], alone(number), bits=True)
    assert seen == []


# Cutting


@pytest.mark.further
def test_chunks_of_half_a_page():
    """T14, T20: all other tests have chunks that cross pages' borders, or one call. T7: 4 tokens of 4 heads."""
    expected = [alone(number) for number in range(len(WORK))]  # by the programs that others compare it with too
    with quick():
        served = engine(model(), prefill_chunk=4)
        for found, each in zip(run(served, WORK), expected, strict=True):
            assert_same(found, each)


@pytest.mark.parametrize("shared", [0, 7, 8, 13, 40])
def test_a_prefix_hit_is_a_fresh_start(shared):
    """T15: a request that shares its first tokens, be they no multiple of the page, is as if alone.

    Whole pages are taken from the cache, and never the last token: its logits are needed.
    """
    tokens, asked = WORK[2]
    served = engine(model())
    notes = watch(served)
    run(served, [((*tokens[:shared], *prompt(60 - shared, seed=9)), params(3))], notes)
    assert served.timings.prompt_tokens == 60
    (found,) = run(served, [(tokens, asked)], notes)
    reused = min(shared, 39) // SIZE * SIZE
    assert served.timings.prompt_tokens == 60 + 40 - reused
    assert_same(found, alone(2))


def test_the_same_prompt_twice_and_a_conversation_that_goes_on():
    """Pages that were written in decode are shared like those of a prompt."""
    tokens, asked = WORK[3]
    served = engine(model())
    notes = watch(served)
    first, again = run(served, [(tokens, asked)], notes)[0], run(served, [(tokens, asked)], notes)[0]
    assert served.timings.prompt_tokens == 17 + 1
    assert_same(first, alone(3), bits=True)
    assert_same(again, alone(3))
    more = ((*tokens, *first.tokens, *prompt(6)), params(20, seed=2, temperature=1.0))
    before = served.timings.prompt_tokens
    (found,) = run(served, [more], notes)
    assert served.timings.prompt_tokens - before == 83 - 76 // SIZE * SIZE
    assert_same(found, run(engine(model()), [more])[0])


# Placing


def shuffle_free_pages(served: Engine, seed: int) -> None:
    """Take all pages, and give them back in another order."""
    pages = allocator_of(served)
    handles = [pages.add((0,))[0] for _ in range(pages.num_pages)]
    for handle in handles:
        pages.extend(handle, 1)
    random.Random(seed).shuffle(handles)
    for handle in handles:
        pages.release(handle)


@pytest.mark.parametrize("seed", range(2))
def test_any_permutation_of_pages(seed):
    """T9: which pages a row has changes no bit, and pages that it does not have are not read."""
    for number in (2, 4, 5):
        served = engine(model())
        shuffle_free_pages(served, seed)
        poison(served)
        assert_same(run(served, [WORK[number]])[0], alone(number), bits=True)


def test_a_page_is_a_block():
    """Pages of every stack have as many tokens as a block of the selection (T27)."""
    cache = runner_of(engine(model())).state.cache
    assert cache.page_size == CONFIG.index_block_size
    assert all(s.k.shape[3] == SIZE and (s.index_k is None or s.index_k.shape[2] == SIZE) for s in cache.stacks)


@pytest.mark.parametrize("share", [True, False])
def test_freed_pages_are_not_read(share):
    """T10, T12: NaN after every step in all slots without a token, while requests end, are preempted and resumed."""
    served = engine(model(), prefix_cache=share)
    notes, handles = watch(served), [served.add(*item) for item in WORK]
    poison(served)
    while served.busy:
        served.step()
        served.check()
        poison(served)
    assert preemptions(served)
    for number, (handle, item) in enumerate(zip(handles, WORK, strict=True)):
        assert_same(outcome(served, notes, handle, item), alone(number))


# Mixing


@settings(max_examples=6)
@given(
    st.lists(st.tuples(st.sampled_from(range(len(WORK))), st.integers(0, 12)), min_size=2, max_size=6), st.booleans()
)
def test_any_companions(mix, share):
    """T13, T40: with whatever runs beside it, before and after, a request gets what it gets alone.

    To the last bit, unless it found a part of its prompt in the cache or was preempted: then other calls computed it.
    """
    served = engine(model(), prefix_cache=share)
    notes, handles = watch(served), {}
    for step in range(13):
        for i, (number, start) in enumerate(mix):
            if start == step:
                handles[i] = served.add(*WORK[number])
        served.step()
        served.check()
    finish(served)
    for i, (number, _) in enumerate(mix):
        bits = not share and not served.result(handles[i]).timings.preemptions
        assert_same(outcome(served, notes, handles[i], WORK[number]), alone(number), bits)


@pytest.mark.parametrize("share", [True, False])
def test_preempted_and_resumed_is_undisturbed(share):
    """The youngest gives way in the middle of its decoding, and the oldest never."""
    served = engine(model(), prefix_cache=share)
    notes = watch(served)
    older, younger = run(served, [WORK[2], WORK[3]], notes)
    assert [served.result(handle).timings.preemptions > 0 for handle in (0, 1)] == [False, True]
    lengths = {len(tokens) for tokens in notes if tokens[:17] == WORK[3][0]}
    assert any(17 < n < 76 for n in lengths)
    assert_same(older, alone(2), bits=True)
    assert_same(younger, alone(3))


def test_copies_go_on_as_if_alone():
    """T16: copies share pages with what they were copied from, and the first to write into one has its own first."""
    tokens, asked = WORK[2]
    served = engine(model())
    notes, first = watch(served), served.add(tokens, asked)
    for _ in range(4):
        served.step()
    so_far = served.result(first).tokens
    assert (len(tokens) + len(so_far) - 1) % SIZE  # a page is filled in part
    other = params(len(so_far) + 20, temperature=1.5, seed=99)
    same, changed = served.copy(first), served.copy(first, other)
    finish(served)
    for handle in (first, same):
        assert_same(outcome(served, notes, handle, WORK[2]), alone(2))
    item = ((*tokens, *so_far), params(20, temperature=1.5, seed=99))
    expected = run(engine(model()), [item])[0]
    found = outcome(served, notes, changed, (tokens, other))
    assert found.tokens[len(so_far) :] == expected.tokens
    np.testing.assert_array_equal(found.blocks, expected.blocks)


def test_truncated_goes_on_as_before():
    """T16: taken back by some tokens, into the middle of a page, a request draws them again."""
    served = engine(model())
    notes, handle = watch(served), served.add(*WORK[2])
    for _ in range(6):
        served.step()
    served.truncate(handle, 5)
    served.check()
    assert served.result(handle).tokens == alone(2).tokens[:5]
    finish(served)
    assert_same(outcome(served, notes, handle, WORK[2]), alone(2))


# Dividing


@pytest.mark.further  # meshes of an engine: tests/hosts
@pytest.mark.usefixtures("eight_devices")
def test_a_mesh_is_one_device():
    """T28, T38: pages over several devices, of which some hold none of a short row; rows over others.

    The state stays where it lies, and no device makes a second cache.
    """
    with quick():
        served = engine(Watched(tiny.model(CONFIG, mesh=parse_mesh("data=2,context=4"))), pages=4096)
        served.warmup()
        pages, before = allocator_of(served), places(served)
        taken, left = pages.add((0,))[0], SHAPE["pages"]
        pages.extend(taken, (4096 - left) * SIZE)
        served.check = pages.check  # the engine's own would miss the request that has them
        with compilations() as seen:
            found = run(served, WORK, used=4096 - left)
        temporary, cache_bytes = temporary_bytes(device.decode, served, no_steps(served), max_steps=4)
    assert seen == []
    assert preemptions(served)
    assert temporary < cache_bytes / 4
    assert_stays(served, before)
    for number, each in enumerate(found):
        assert_same(each, alone(number))
