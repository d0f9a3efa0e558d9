"""Sizes of prefill's calls: what there is by default, what a prompt takes, what is compiled when."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
from support.compilations import compilations
from support.engines import finish, params, prompt, quick, serve
from support.fake_model import FakeConfig, FakeModel

from m3jax.decoding import Engine, device
from m3jax.decoding.engine import runner, shapes


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


def test_a_prompt_compiles_the_sizes_of_prefill_that_it_needs():
    """A size that was left out of warm-up comes with the first prompt that needs it; what is cached counts."""
    served = Engine(FakeModel.random(), pages=32, max_batch=1, prefill_chunk=(8, 16, 32, 64), max_length=256)
    served.warmup(programs=("prefill", "decode"), longest=8)
    names, compiled_in = [], served.timings.compile_seconds
    assert compiled_in > 0
    watch = lambda name: names.append(name) or nullcontext()
    shared = prompt(80, seed=1)
    # Of 60 tokens the prompt before has 48, in whole pages. 90 are 64 and 26.
    work = (prompt(64), ["64"]), (shared[:48], []), (shared[:60], ["16"]), (prompt(90, seed=2), ["32"]), (shared, [])
    for tokens, sizes in work:
        names.clear()
        with compilations() as seen:
            handle = served.add(tokens, params(2))
            served.warmup_for(handle, watch)
            served.warmup_for(handle, watch)
        assert names == [f"prefill of 1 x {size} tokens" for size in sizes] and bool(seen) == bool(sizes)
        assert (served.timings.compile_seconds > compiled_in) == bool(sizes)
        compiled_in = served.timings.compile_seconds
        with compilations() as seen:
            finish(served)
        assert seen == [] and len(served.result(handle).tokens) == 2
    with pytest.raises(ValueError, match="longest = 0: must be an integer of at least 1"):
        served.warmup(longest=0)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (200, [256]), (256, [256]), (400, [256, 256]), (512, [256, 256]), (513, [2048]), (3000, [2048, 2048]),
        (4097, [8192]), (8192, [8192]), (11_000, [8192, 2048, 2048]), (8500, [8192, 256, 256]),
    ],
)  # fmt: skip
def test_the_end_of_a_prompt_takes_two_small_calls_rather_than_one_that_is_hardly_half_full(tokens, sizes):
    """Warm-up compiles for a prompt exactly the sizes of its calls; sizes that are near each other are not halved."""
    of_engine = shapes.Shapes(batch=1, prompts=1, chunks=(256, 2048, 8192), steps=1, stop_ids=1)
    assert of_engine.prefill_sizes(tokens) == tuple(sorted(set(sizes)))
    for size in sizes:
        assert of_engine.prefill_size(tokens) == size
        tokens -= size
    assert tokens <= 0
    near = shapes.Shapes(batch=1, prompts=1, chunks=(8, 16), steps=4, stop_ids=1, media_patches=(4, 16))
    assert [near.prefill_size(count) for count in (8, 9, 16, 40)] == [8, 16, 16, 16]
    assert near.prefill_sizes(None) == (8, 16) and near.prefill_sizes(0) == ()
    assert [near.tower_size(patches) for patches in (1, 4, 5, 16)] == [4, 4, 16, 16]
    assert near.tokens == 4 and replace(near, draft_tokens=2).tokens == 12


def test_what_is_recorded_and_scored_has_programs_of_its_own(monkeypatch):
    """Compiled ahead beside those that do neither, in the order of the names that a call of such a request has."""
    names = ("expert_ids", "blocks")
    settings = dict(pages=8, max_batch=3, decode_rows=(1,), prefill_chunk=(8, 16), max_length=32, records=names)
    served = Engine(FakeModel.random(), **settings, prompt_logprobs=True)
    compiled = []
    monkeypatch.setattr(runner, "compile_all", lambda calls, meanwhile=None: compiled.extend(calls))
    prefills = lambda: [
        (chunk.tokens.shape[1], call.keywords["records"], chunk.targets is not None)
        for call in compiled
        if isinstance(call.args[-1], device.parcel.Parcel)
        for chunk in [device.parcel.opened(call.args[2])]
    ]
    decodes = lambda: [
        (len(call.keywords.get("rows", range(3))), call.keywords["records"])
        for call in compiled
        if "max_steps" in call.keywords
    ]
    for _ in range(2):  # the second time there is nothing left to compile
        served.warmup_for(served.add(prompt(5), params(1)))
    assert sorted(prefills()) == [(8, records, scores) for records in ((), names) for scores in (False, True)]
    compiled.clear()
    served.warmup(programs=("prefill", "decode"), all_record=True)
    assert sorted(prefills()) == [(width, names, scores) for width in (8, 16) for scores in (False, True)]
    assert sorted(decodes()) == [(1, names), (3, names)]
    compiled.clear()
    served.warmup(programs=("decode",))
    assert prefills() == [] and sorted(decodes()) == [(size, records) for size in (1, 3) for records in ((), names)]
    plain = Engine(FakeModel.random(), **settings | dict(records=()))
    compiled.clear()
    plain.warmup_for(plain.add(prompt(9), params(1)))
    assert prefills() == [(16, (), False)]


def test_two_small_calls_give_what_a_large_one_gives():
    """A call that is shorter than what is left of a prompt leaves the rest to the next one; prompts share calls too."""
    fake, settings = FakeModel.random(), dict(pages=64, max_batch=2, max_length=128, prefill_rows=2)
    requests = [(prompt(length, seed=length), params(4)) for length in (12, 16, 17, 70, 76)]
    of_one, of_both = (Engine(fake, prefill_chunk=chunks, **settings) for chunks in (64, (8, 64)))
    expected, found = ([result.tokens for result in serve(served, *requests)] for served in (of_one, of_both))
    assert found == expected
    of_both.check()
    assert of_both.timings.prompt_tokens == sum(len(tokens) for tokens, _ in requests)


@pytest.mark.parametrize(
    ("platform", "max_length", "chunks"),
    [
        ("cpu", 4096, (256, 512)), ("tpu", 4096, (256, 2048)), ("gpu", 32768, (256, 2048, 8192)),
        ("gpu", 4096, (256, 2048, 4096)), ("gpu", 2048, (256, 2048)), ("cpu", 300, (256, 300)), ("gpu", 256, (256,)),
    ],
)  # fmt: skip
def test_default_sizes_of_prefill_by_platform(monkeypatch, platform, max_length, chunks):
    """A GPU is given 8,192 tokens at once and a CPU 512; nothing is compiled for more than a prompt can have."""
    monkeypatch.setattr(shapes, "platform", lambda: platform)
    assert shapes.prefill_chunks(max_length) == chunks
    fake = FakeModel.random(config=FakeConfig(max_position_embeddings=max_length))
    assert Engine(fake, pages=2048, max_batch=1).shapes.chunks == chunks


@pytest.mark.parametrize("draft", [None, pytest.param("ngram", marks=pytest.mark.further)])
def test_fewer_rows_decode_in_smaller_calls_and_get_what_they_get_in_the_largest(draft):
    """A call has the rows that decode alone, wherever they lie; requests come, end and leave gaps between them."""
    fake = FakeModel.random()
    settings = dict(pages=64, max_batch=5, max_length=64, prefill_chunk=16, steps_per_call=3, draft=draft)
    # The last prompt takes four rounds, in which the others decode in a call that has its row.
    sampled, penalised = dict(temperature=1.0, seed=3), dict(repetition_penalty=2.0)
    lives = (7, 40, {}), (8, 30, sampled), (9, 29, penalised), (10, 27, {}), (50, 5, {})
    requests = [(prompt(length, seed=length), params(new, **knobs)) for length, new, knobs in lives]
    of_all, of_few = (Engine(fake, decode_rows=sizes, **settings) for sizes in ((), (1, 3)))
    for served in (of_all, of_few):  # whoever is stopped has the host tell the device of all rows
        stopped = served.add(prompt(5), params(20))
        served.step()
        served.abort(stopped)
    expected, found = (serve(served, *requests) for served in (of_all, of_few))
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    of_few.check()
    assert of_few.drafting == of_all.drafting


def test_the_smallest_call_that_holds_the_rows_is_taken():
    of_engine = shapes.Shapes(batch=5, prompts=1, chunks=(16,), steps=1, stop_ids=1, decode_rows=(1, 3))
    assert [of_engine.decode_size(rows) for rows in range(1, 6)] == [1, 3, 3, 5, 5]


@pytest.mark.further
def test_warmup_compiles_the_calls_of_every_number_of_rows():
    served = Engine(FakeModel.random(), pages=64, max_batch=5, decode_rows=(3, 1), prefill_chunk=16, steps_per_call=1)
    served.warmup()
    with compilations() as seen:
        serve(served, *[(prompt(5, seed=i), params(2 + 3 * i)) for i in range(5)])
    assert seen == []
