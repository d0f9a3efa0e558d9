"""The pieces of an engine's host by themselves: checks at their limits, reports, requests, features, steering."""

import gc
import inspect
import itertools
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.fake_model import FakeModel

from m3jax import model as m3_model
from m3jax.cache import PageAllocator
from m3jax.decoding import Engine, Params, Sampling, Storage, Work, build_engine, engine_for, sampling
from m3jax.decoding.device import PROGRAMS, scores, state
from m3jax.decoding.device.compiler_options import CPU_DECODE_OPTIONS, CPU_PREFILL_OPTIONS, OPTIONS, STEP_OPTIONS
from m3jax.decoding.engine import checks, compiling, definition, media, scheduler, sealed
from m3jax.decoding.engine import engine as engines
from m3jax.decoding.engine import runner as runners
from m3jax.decoding.engine.exchange import PAGES_A_CALL
from m3jax.decoding.engine.media import FeatureRows, PlacedSegment, prefix_keys
from m3jax.decoding.engine.options import EngineKnobs
from m3jax.decoding.engine.report import Drafting, Timings, offload_counters
from m3jax.decoding.engine.request import Generation, PromptScores, Request, RequestTimings, check_ids
from m3jax.decoding.engine.runner import Runner
from m3jax.decoding.engine.sealed import seal, unseal
from m3jax.decoding.engine.shapes import DRAFT_TOKENS, Shapes
from m3jax.decoding.loop import EngineLoop
from m3jax.decoding.protocols import RECORDS
from m3jax.decoding.speculation.verify import DraftCounts
from m3jax.decoding.steering import Steer, steering_of
from m3jax.media.packing import Segment
from m3jax.messages import shown
from m3jax.tiles import GPU_OPTIONS, UNTUNED

CONFIG = tiny.config("dM")  # a context of 1,024 tokens, blocks of 8, three of them kept
SHAPES = Shapes(batch=2, prompts=2, chunks=(8, 16), steps=4, stop_ids=2, biases=1, bad_words=1, top_logprobs=5)


def params(new: int = 4, **changes) -> Params:
    sampling = {name: changes.pop(name) for name in ("logit_bias", "bad_words") if name in changes}
    return Params(max_new_tokens=new, sampling=Sampling(**sampling), **changes)


def refusal(call, *arguments, **options) -> str:
    """The error of a call; nothing where it passes."""
    try:
        call(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


# Checks


def test_sizes_up_to_their_limits(unchecked):
    assert not refusal(checks.check_sizes, {"a": 1, "b": np.int64(1)}) and not refusal(checks.check_sizes, {"a": 0}, 0)
    assert refusal(checks.check_sizes, {"a": 1, "b": 0}) == "b = 0: must be an integer of at least 1"
    assert refusal(checks.check_sizes, {"a": -1}, 0) == "a = -1: must be an integer of at least 0"
    for size in (True, 1.0, "1", None):
        assert "must be an integer of at least 1" in refusal(checks.check_sizes, {"a": size})
    assert checks.chunk_sizes(5) == (5,) and checks.chunk_sizes([16, 8]) == (8, 16)
    assert not refusal(checks.check_warmup, ("prefill",), 1)
    assert "longest = 0: must be" in refusal(checks.check_warmup, (), 0)
    assert "there is no 'x'; choose of" in refusal(checks.check_warmup, ("prefill", "x"), None)
    assert checks.check_max_length(None, 3, CONFIG) == 24 and checks.check_max_length(None, 200, CONFIG) == 1024
    assert checks.check_max_length(24, 3, CONFIG) == 24 and checks.check_max_length(1024, 128, CONFIG) == 1024
    asked = refusal(checks.check_max_length, 25, 3, CONFIG)
    assert asked == "max_length = 25: at most 24 (3 pages of 8 tokens)"
    assert "at most 1024 (the model's context)" in refusal(checks.check_max_length, 1025, 200, CONFIG)
    assert "at most 1024 (128 pages of 8 tokens)" in refusal(checks.check_max_length, 1025, 128, CONFIG)


def test_sizes_of_decode_calls_are_below_the_largest(unchecked):
    """Ascending and each once; on a mesh there is one size."""
    one_device, meshed = SimpleNamespace(mesh=None), SimpleNamespace(mesh=object())
    assert checks.decode_sizes((), 1, meshed) == () and checks.decode_sizes((3, 1, 3), 4, one_device) == (1, 3)
    for rows, batch, model, message in (
        ((1, 0), 4, one_device, "decode_rows[1] = 0: must be an integer of at least 1"),
        ((True,), 4, one_device, "decode_rows[0] = True: must be an integer"),
        ((1, 4), 4, one_device, "decode_rows has 4: must be below max_batch, which is 4"),
        ((1,), 4, meshed, "decode_rows on a mesh: leave it out"),
    ):
        assert message in refusal(checks.decode_sizes, rows, batch, model)


def test_calls_are_launched_ahead_where_that_changes_nothing(monkeypatch, unchecked):
    for platform, by_default in (("cpu", False), ("gpu", True), ("tpu", True)):
        monkeypatch.setattr(checks, "platform", lambda platform=platform: platform)
        assert checks.check_dispatch_ahead(None, None) is by_default
        assert checks.check_dispatch_ahead(None, 4) is checks.check_dispatch_ahead(False, 4) is False
        assert checks.check_dispatch_ahead(True, None) is True
    assert "dispatch_ahead with device_pages" in refusal(checks.check_dispatch_ahead, True, 4)
    assert "dispatch_ahead = 2: must be True, False or None" in refusal(checks.check_dispatch_ahead, 2, None)


def test_a_request_may_use_up_all_that_there_is_room_for():
    """And not one token, stop id, bias, bad word or alternative more."""
    full = params(4, stop_ids=(1, 2), logit_bias={1: 1.0}, bad_words=[(1,)], top_logprobs=5, prompt_logprobs=5)
    assert not refusal(checks.check_room, (1, 2, 3), full, 7, SHAPES)
    for changes, message in (
        (dict(max_new_tokens=5), "a prompt of 3 tokens with max_new_tokens = 5 needs room for 8 tokens"),
        (dict(max_new_tokens=5), "and a request of this engine can have 7"),
        (dict(stop_ids=(1, 2, 3)), "3 stop ids: this engine takes 2 (max_stop_ids)"),
        (dict(sampling=Sampling(logit_bias={1: 1.0, 2: 1.0})), "2 tokens: there is room for 1 (max_biases)"),
        (dict(sampling=Sampling(bad_words=[(1,), (2,)])), "bad_words has 2 words: there is room for 1"),
        (dict(top_logprobs=6), "top_logprobs = 6: this engine gives 5 (max_top_logprobs)"),
        (dict(prompt_logprobs=6), "prompt_logprobs = 6: this engine gives 5"),
        (dict(top_logprobs=6, prompt_logprobs=7), "top_logprobs = 6"),
    ):  # fmt: skip
        assert message in refusal(checks.check_room, (1, 2, 3), replace(full, **changes), 7, SHAPES)
    least = replace(SHAPES, stop_ids=0, biases=0, bad_words=0, top_logprobs=0)
    for asked in (params(4), params(4, top_logprobs=0, prompt_logprobs=0)):  # who asks for none needs no room
        assert not refusal(checks.check_room, (1, 2, 3), asked, 7, least)
    assert not refusal(checks.check_goes_on, (1, 2, 3), full, "it")
    assert refusal(checks.check_goes_on, (1, 2, 3, 4), full, "it") == "max_new_tokens = 4: it has 4 already"


def test_ids_are_integers_of_the_vocabulary(unchecked):
    """The first that is none is named, wherever it stands among how many others."""
    for ids in ((), (0,), (63,), (0, 63, 5), (np.int32(0), np.int64(63)), [7] * 1000):
        assert not refusal(check_ids, "prompt", ids, 64)
    for wrong in (-1, 64, True, 1.0, np.float32(1), "1", None):
        for ids in ((wrong,), (0, wrong, -5), (np.int32(1), wrong)):
            expected = f"prompt: {shown(wrong)} is no token id; they are integers from 0 to 63"
            assert refusal(check_ids, "prompt", ids, 64) == expected


def test_groups_priorities_and_deadlines(unchecked):
    for given in ((None, 0, None), (1, -3, 0.001), (2, np.int64(7), 5)):
        assert not refusal(checks.check_order, *given)
    for given, message in (
        ((0, 0, None), "n = 0: must be an integer of at least 1"),
        *[((1, number, None), f"priority = {number}: must be an integer") for number in (True, 1.0)],
        *[((1, 0, deadline), f"deadline = {deadline!r}: must be a number of seconds above 0")
          for deadline in (0, -1.0, float("inf"), float("nan"), True, "1")],
    ):  # fmt: skip
        assert message in refusal(checks.check_order, *given)


def test_a_model_in_place_of_another_has_its_parameters(unchecked):
    """All of them and no other, of the same shape, dtype and device, computed in the same way."""
    model = FakeModel.random()
    of = lambda **changes: refusal(checks.check_same_shapes, model, replace(model, **changes))
    assert not of() and not of(head=model.head + 1)
    assert of(embed=None) == "the new model lacks the parameter .embed: make a new engine"
    lacking = replace(model, head=None)
    message = "the new model has a parameter .head that the engine's model lacks: make a new engine"
    assert refusal(checks.check_same_shapes, lacking, model) == message
    found = of(head=jnp.zeros((3, 2), jnp.bfloat16))
    assert found.startswith("parameter .head of the new model is bfloat16 (3, 2), and the engine's is float32 (64, 16)")
    for other in (jnp.zeros((3, 2)), model.head.astype(jnp.bfloat16)):
        assert "parameter .head of the new model is" in of(head=other)
    assert "the new model is computed in another way" in of(config=replace(model.config, index_topk_blocks=3))
    assert "model is a int, which an engine cannot serve" in refusal(checks.check_same_shapes, model, 3)
    if jax.device_count() > 1:
        elsewhere = jax.device_put(model.embed, jax.devices()[1])
        assert "parameter .embed of the new model lies on other devices" in of(embed=elsewhere)


def test_a_pool_has_room_for_the_pages_of_a_call():
    """Two rows that select three blocks and write up to four tokens, over two pages; two chunks of 16, over three."""
    model = m3_model.abstract(CONFIG)
    decode, prefill = 2 * (3 + 2 - 1), 2 * 3 + 1
    assert not refusal(checks.check_device_pages, decode, model, SHAPES)
    expected = f"a decode call of 2 rows can need {decode} pages at once and a prefill call {prefill}; give {decode} or"
    assert expected in refusal(checks.check_device_pages, decode - 1, model, SHAPES)
    longer = replace(SHAPES, chunks=(8, 25), steps=1)  # of 25 tokens the last can be the second of a fifth page
    assert "can need 6 pages at once and a prefill call 9; give 9" in refusal(
        checks.check_device_pages, 8, model, longer
    )
    assert not refusal(checks.check_device_pages, 9, model, longer)


def test_a_draft_proposes_as_many_tokens_as_there_is_room_for(unchecked):
    drafter = SimpleNamespace(check=lambda model: None)
    for count in (1, 8):
        assert not refusal(checks.check_draft, drafter, count, None, None)
    assert refusal(checks.check_draft, drafter, 9, None, None) == "draft_tokens = 9: at most 8"
    assert "draft_tokens = 0: must be" in refusal(checks.check_draft, drafter, 0, None, None)
    assert "device_pages with a draft" in refusal(checks.check_draft, drafter, 1, None, 4)


def test_the_tower_s_sizes_and_its_features(unchecked):
    seeing = SimpleNamespace(vision=object())
    sizes = lambda patches, tokens=None: checks.media_sizes(patches, tokens, seeing, SHAPES)
    assert sizes((16, 8)) == ((8, 16), 16384) and sizes(8) == ((8,), 16384) and sizes(()) == ((), 0)
    assert sizes(None) == ((256, 1024, 2304, 12288), 16384)
    needed = 16 + 4 * 4  # a chunk of the prompt, and four segments of 16 patches
    assert sizes(16, needed) == ((16,), needed)
    assert f"can need {needed} features" in refusal(sizes, 16, needed - 1)
    assert sizes(1 << 16) == ((1 << 16,), 16 + (1 << 16))  # more than by default, where a call needs more
    assert "media_patches = 6: a feature has 4 patches" in refusal(sizes, (8, 6))
    blind = SimpleNamespace(vision=None)
    assert "the model has no vision tower" in refusal(checks.media_sizes, 8, None, blind, SHAPES)


def test_the_options_are_the_documented_ones(unchecked):
    storage, work = Storage(pages=1), Work()
    assert (storage.prefix_cache, storage.host_memory, storage.max_length) == (True, "auto", None)
    assert (work.max_batch, work.prefill_rows, work.steps_per_call, work.max_stop_ids) == (8, 1, 16, 8)
    assert (work.max_biases, work.max_bad_words, work.max_top_logprobs, work.prompt_logprobs) == (64, 16, 20, False)
    assert EngineKnobs.__optional_keys__ == {field.name for options in (storage, work) for field in fields(options)}
    assert inspect.signature(Engine).parameters["draft_tokens"].default == DRAFT_TOKENS == 3
    assert not refusal(Work, max_biases=0, max_bad_words=0, max_top_logprobs=0, max_batch=1, steps_per_call=1)
    for name in ("max_batch", "prefill_rows", "steps_per_call", "max_stop_ids"):
        assert f"{name} = 0: must be an integer of at least 1" in refusal(Work, **{name: 0})
    for name in ("max_biases", "max_bad_words", "max_top_logprobs"):
        assert f"{name} = -1: must be an integer of at least 0" in refusal(Work, **{name: -1})
    for names in (
        ("max_batch", "prefill_rows", "steps_per_call", "max_stop_ids"),
        ("max_biases", "max_bad_words", "max_top_logprobs"),
    ):  # of two that are wrong the first is named
        for first, second in itertools.pairwise(names):
            assert refusal(Work, **{second: -1, first: -1}).startswith(f"{first} = -1")
    assert "max_top_logprobs = 21: at most 20" in refusal(Work, max_top_logprobs=21)
    for name in ("pages", "max_length", "device_pages"):
        assert f"{name} = 0: must be" in refusal(Storage, **({"pages": 1} | {name: 0}))


def test_compiler_options_are_those_of_a_program_a_platform_and_a_mode():
    """On a CPU prompts and steps have their own, but for an invariant model, whose tokens have one set of bits."""
    for program, platform, mode in OPTIONS:
        assert program in PROGRAMS and platform in ("cpu", "gpu", "tpu") and mode in ("narrow", "wide", "invariant")
    prompts, steps = ("prefill", "read_media"), ("decode", "decode_in_rounds")
    expected = {
        (program, "cpu", mode): options
        for program, options in (("prefill", CPU_PREFILL_OPTIONS), ("decode", CPU_DECODE_OPTIONS))
        for mode in ("narrow", "wide")
    }
    for mode, of_prompts, of_steps in (
        ("narrow", UNTUNED, STEP_OPTIONS), ("wide", UNTUNED, STEP_OPTIONS | UNTUNED),
        ("invariant", GPU_OPTIONS, STEP_OPTIONS | GPU_OPTIONS),
    ):  # fmt: skip
        expected |= {(program, "gpu", mode): of_prompts for program in prompts}
        expected |= {(program, "gpu", mode): of_steps for program in steps}
        expected["prefill", "tpu", mode] = {"xla_tpu_enable_async_all_to_all": True}
    assert expected == OPTIONS and STEP_OPTIONS["xla_gpu_enable_cub_radix_sort"] is False


def test_a_call_records_what_was_compiled_where_any_of_its_requests_records():
    """Choices first, in the order of their names, then what is captured; where no request records, nothing is."""
    asking = lambda *record, capture=(): params(record=record, capture=capture)
    of = lambda compiled, *asked: Runner.records_of(SimpleNamespace(shapes=SimpleNamespace(records=compiled)), asked)
    every = ("blocks", "expert_ids")
    assert of(every) == of(every, asking(), asking()) == () and of((), asking("blocks")) == ("blocks",)
    both = tuple(name for name in RECORDS if name in every)
    assert of(every, asking(), asking("blocks")) == of((), asking(*every)) == both
    assert of(("support",), asking("blocks", capture=("z", "a"))) == (
        *(name for name in RECORDS if name in ("blocks", "support")), "a", "z",
    )  # fmt: skip


def test_a_settled_request_is_looked_up_and_one_that_ended_in_flight_can_be_aborted(unchecked):
    """`abort` first takes a request that goes on, then reads the call in flight; all other calls the other way."""
    request, calls = SimpleNamespace(stop_reason="unfinished", prompt_scores=PromptScores([{1: -1.0}, {2: -2.0}])), []

    def settle():
        calls.append("settled")
        request.stop_reason = "length"

    served = Engine.__new__(Engine)
    served._results, served._requests = {}, {7: request}
    stop = lambda request, reason: calls.append(reason)
    served._scheduler = SimpleNamespace(settle=settle, stop=stop)
    assert served.prompt_logprobs(7) == [{1: -1.0}, {2: -2.0}] and served.prompt_logprobs(7, 1) == [{2: -2.0}]
    served.abort(7)
    assert calls == ["settled"] and request.stop_reason == "length"  # it had its last token, and keeps its reason
    served._scheduler.settle = lambda: calls.append("read")
    request.stop_reason = "unfinished"
    served.abort(7)
    assert calls == ["settled", "read", "aborted"]
    served._scheduler.settle = settle
    for call, purpose in ((served.copy, "copy"), (served.export, "export"), (lambda x: served.truncate(x, 0), "trunc")):
        request.stop_reason = "unfinished"
        assert f"request 7 has ended already (length): there is nothing to {purpose}" in refusal(call, 7)
    assert "has ended already (length): there is nothing to abort" in refusal(served.abort, 7)


def test_what_is_compiled_counts_as_time_of_the_compiler(monkeypatch, unchecked):
    clock = iter([10.0, 12.5, 20.0, 21.0, 30.0, 39.0])
    monkeypatch.setattr(engines, "perf_counter", lambda: next(clock))
    served, asked = Engine.__new__(Engine), []
    runner = SimpleNamespace(warmup=lambda *given: asked.append(given))
    served.shapes, served._runner, served._scheduler = (
        SHAPES,
        runner,
        SimpleNamespace(timings=Timings(), admit=lambda: None),
    )
    served.warmup(programs=("decode",), longest=7)
    assert asked == [(("decode",), (8,), nullcontext, False)] and served.timings.compile_seconds == 2.5
    request = SimpleNamespace(uncached=12, segments=())
    served._results, served._requests = {}, {3: request}
    for compiles, seconds in ((True, 3.5), (False, 3.5)):
        runner.warmup_sizes = lambda *given, compiles=compiles: asked.append(given) or compiles
        served.warmup_for(3)
        assert asked[-1] == ((16,), set(), nullcontext) and served.timings.compile_seconds == seconds


@pytest.mark.parametrize("token_tile", [None, 4])
def test_scores_are_made_some_places_at_a_time(token_tile, monkeypatch, unchecked):
    """As many as 2**25 logits are for, or the model's tile, and one at least; of no more places than there are."""
    assert scores._LOGITS_AT_ONCE == 2**25
    tiles, draw = [], np.random.default_rng(0)
    hidden, targets = draw.normal(size=(2, 6, 5)).astype(np.float32), draw.integers(0, 5, (2, 6)).astype(np.int32)
    compute = SimpleNamespace(token_tile=token_tile)
    of = lambda vocab_size: SimpleNamespace(
        unembed=lambda x: x, compute=compute, config=SimpleNamespace(vocab_size=vocab_size)
    )
    noted = lambda fn, tile, *rows: tiles.append(tile) or fn(*rows)
    monkeypatch.setattr(scores, "by_tiles", noted)
    monkeypatch.setattr(scores, "is_invariant", lambda model: False)
    found = scores.score_tokens(of(5), jnp.asarray(hidden), targets, 2)
    log_p = hidden - np.log(np.exp(hidden).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(log_p, targets[..., None], -1)[..., 0], atol=1e-5)
    np.testing.assert_array_equal(found.top_ids, np.argsort(-log_p, axis=-1)[..., :2])
    np.testing.assert_allclose(found.top_logprobs, -np.sort(-log_p, axis=-1)[..., :2], atol=1e-5)
    for vocab_size, expected in ((5, 12), (2**25 // 7, 7), (2**25, 1), (2**26, 1)):
        tiles.clear()
        scores.score_tokens(of(vocab_size), jnp.asarray(hidden), targets, 2)
        assert tiles[0] == (expected if token_tile is None else token_tile)


def test_sizes_of_calls():
    shapes = replace(SHAPES, media_patches=(4, 16))
    assert [shapes.tower_size(patches) for patches in (1, 4, 5, 16)] == [4, 4, 16, 16]
    assert shapes.tokens == 4 and replace(shapes, draft_tokens=2).tokens == 12
    assert shapes.prefill_sizes(None) == (8, 16) and shapes.prefill_sizes(0) == ()


# Reports


def test_rates_and_shares():
    assert Timings().prefill_tokens_per_second is Timings().decode_tokens_per_second is None
    timings = Timings(prefill_seconds=2.0, decode_seconds=4.0, prompt_tokens=10, decoded_tokens=2)
    assert (timings.prefill_tokens_per_second, timings.decode_tokens_per_second) == (5, 0.5)
    drafting = Drafting(2)
    assert drafting.acceptance is drafting.mean_length is None
    for _ in range(2):
        counts = (np.array(x, np.int32) for x in ([2, 0], [4, 0], [[1, 1], [0, 0]]))
        drafting.add(DraftCounts(*counts))
    assert (drafting.forwards, drafting.accepted) == (4, (2, 2))
    assert (drafting.acceptance, drafting.mean_length) == ((0.5, 0.5), 2)


def test_an_engine_s_counts_begin_at_nothing():
    assert asdict(Timings()) == dict(
        compile_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0, prompt_tokens=0, decoded_tokens=0
    )
    assert asdict(Drafting(3)) == dict(draft_tokens=3, forwards=0, accepted=())


# What docs and docstrings say of what is left out of a call.
DEFAULTS = {
    Engine.add: dict(priority=0, capture=()), Engine.prefill: dict(decode_follows=True),
    Engine.prompt_logprobs: dict(first=0), Engine.export_pages: dict(first=0),
    Engine.import_request: dict(guide=None, n=None, cached_tokens=None, left_out=0), Engine.update: dict(live="finish"),
    Engine.warmup: dict(watch=nullcontext, programs=("prefill", "tower", "decode", "pages"), longest=None,
                        all_record=False),
    Engine: dict(draft_tokens=3, invariant=False),
    Params: dict(stop_ids=(), min_tokens=0, ignore_eos=False, top_logprobs=0, record=(), capture=()),
    Runner.read_pages: dict(is_awaited=True), Runner.warmup: dict(all_record=False),
    EngineLoop.close: dict(pending="finish"), EngineLoop: dict(max_requests=256),
    build_engine: dict(all_record=False, progress=True, draft_tokens=3),
    engine_for: dict(progress=True, draft_tokens=3),
}  # fmt: skip


@pytest.mark.parametrize("of", DEFAULTS, ids=lambda of: of.__qualname__)
def test_calls_have_these_defaults(of):
    parameters = inspect.signature(of).parameters
    assert {name: parameters[name].default for name in DEFAULTS[of]} == DEFAULTS[of]


def test_a_header_of_numbers_that_json_has_not_is_refused():
    for number in (float("nan"), float("inf")):
        assert "not JSON compliant" in refusal(seal, {}, {"x": number})
    arrays, header = unseal(seal({"a": np.arange(3)}, {"x": 1.5}))
    assert header == {"x": 1.5} and arrays["a"].tolist() == [0, 1, 2]


def test_counters_of_host_memory(unchecked):
    array = lambda *values: np.array(values, np.int32)
    stack = SimpleNamespace(hits=array(3, 1), misses=array(0, 4), moved=array(2, 3), k=np.zeros(5), v=np.zeros(2))
    host = SimpleNamespace(pages=(None, object()), page_bytes=7, bytes_out=11, nbytes=13)
    assert offload_counters(host, (None, stack)) == dict(
        hits=4, misses=4, hit_rate=0.5, bytes_in=35, bytes_out=11, device_bytes=56, host_bytes=13
    )
    none = SimpleNamespace(hits=array(0), misses=array(0), moved=array(0), k=np.zeros(0), v=np.zeros(0))
    assert offload_counters(host, (None, none))["hit_rate"] == 0


def test_a_call_s_tokens_are_counted_where_they_belong(unchecked):
    """A request that ended in the call before has none; the first one of a request counts as its prompt's."""
    rows, taken, none = [2, 0, None], [], np.zeros((3, 2), np.int32)
    requests = [Request(i, (1, 2), params(9), row=row, cached=5 + i) for i, row in enumerate(rows)]
    requests[0].new = [7]
    given = scheduler.Scheduler.__new__(scheduler.Scheduler)
    given.timings, given.drafting = Timings(), Drafting(2)
    given._take_tokens = lambda request, new, index, end: taken.append((request.handle, index, end))
    given.runner = SimpleNamespace(read=lambda new: new)
    accepted = np.int32([[2, 1], [9, 9], [3, 0]])
    drafting = DraftCounts(np.int32([3, 9, 4]), np.int32([6, 9, 5]), accepted)
    new = SimpleNamespace(counts=np.int32([4, 9, 3]), drafting=drafting, tokens=none)
    given._take_flight(scheduler.Flight(new, requests))
    assert taken == [(0, 2, 8), (1, 0, 10)] and given.timings.decoded_tokens == 3 + 4 - 1
    assert [(request.drafted, request.accepted) for request in requests] == [(5, 3), (6, 3), (0, 0)]
    assert given.drafting.forwards == 16 and given.drafting.accepted == (14, 10)
    given._take_flight(scheduler.Flight(new, requests[:1]))
    assert (requests[0].drafted, requests[0].accepted, given.timings.decoded_tokens) == (10, 6, 9)
    new.drafting, new.counts = None, np.int32([0, 0, 0])
    given._take_flight(scheduler.Flight(new, requests[1:]))
    assert given.timings.decoded_tokens == 9 and given.drafting.forwards == 32 and taken[-1] == (1, 0, 6)


def test_seconds_of_a_round_are_those_of_its_two_halves(monkeypatch, unchecked):
    clock = iter([10.0, 12.5, 20.0, 21.0, 30.0, 34.0, 40.0, 48.0])
    monkeypatch.setattr(scheduler, "perf_counter", lambda: next(clock))
    given, done = scheduler.Scheduler.__new__(scheduler.Scheduler), []
    given.timings, given.features, given.shapes = Timings(), None, SHAPES
    given._flight, given._dispatches_ahead, given._has_sharers = None, False, False
    given._is_turn_of_shortest, given._draft_lead = False, 0
    request = Request(0, (1, 2, 3), params(9), row=0, cached=1)
    given.request_of_row = [request]
    given._reserve = lambda request, count: done.append(("room", count))
    given._part = lambda request, count: SimpleNamespace(wants_scores=False)
    given._commit = lambda request, end: setattr(request, "cached", end)
    given._take_tokens = lambda request, new, index, end: done.append((int(new.tokens[index, 0]), end))
    new = SimpleNamespace(scores=None, tokens=np.int32([[8]]), stop_reasons=np.int32([0]))
    monkeypatch.setattr(scheduler, "on_host", lambda new: new)
    start_row = lambda *given: done.append(given)
    given.runner = SimpleNamespace(prefill=lambda parts, width: new, start_row=start_row)
    given.prefill(decode_follows=False)
    assert done == [("room", 2), (0, 0, 3, 8), (8, 3)] and request.is_decoding and given._is_turn_of_shortest
    assert (given.timings.prefill_seconds, given.timings.prompt_tokens) == (2.5, 2)
    given._launch = lambda: done.append("launched")
    given.decode()
    assert done[3:] == [("room", 4), "launched"] and given.timings.decode_seconds == 1.0
    given.decode()
    assert (given.timings.prefill_seconds, given.timings.decode_seconds) == (2.5, 5.0)
    request.is_decoding, request.cached = False, 2
    given.prefill(decode_follows=False)
    assert (given.timings.prefill_seconds, given.timings.prompt_tokens) == (10.5, 3)


def test_one_token_behind_what_is_cached_starts_without_prefill(unchecked):
    """As many rows at once as prompts share a call; not with a draft, nor an image's feature, nor from nothing."""
    given, started = scheduler.Scheduler.__new__(scheduler.Scheduler), []
    given.shapes, given.timings = replace(SHAPES, prompts=2), Timings()
    given._part = lambda request, count: (request.handle, count)
    given.runner = SimpleNamespace(start_rows=started.append)
    segment = SimpleNamespace(is_in=lambda start, stop: start <= 2 < stop)
    request = lambda handle, cached, **more: Request(handle, (1, 2, 3), params(), row=handle, cached=cached, **more)
    given.request_of_row = [
        request(0, 2), request(1, 1), request(2, 2, segments=(segment,)), request(3, 2), None,
        request(4, 2, priority=1), request(5, 2, is_decoding=True), Request(6, (1,), params(), row=7),
    ]  # fmt: skip
    given._start_rows()
    assert started == [[(4, 1), (0, 1)], [(3, 1)]] and given.timings.prompt_tokens == 3
    assert [r.handle for r in given.request_of_row if r and r.is_decoding] == [0, 3, 4, 5]
    for r in given.request_of_row:
        if r:
            r.is_decoding = False
    given.shapes = replace(SHAPES, draft_tokens=1)
    given._start_rows()
    assert len(started) == 2 and not any(r.is_decoding for r in given.request_of_row if r)


def test_so_many_programs_are_compiled_at_once(monkeypatch):
    """Half as many as there are cores, and two at least."""
    for cores, expected in ((1, 2), (2, 2), (4, 2), (5, 2), (6, 3), (9, 4), (64, 32)):
        monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert compiling._threads() == expected


def test_nothing_more_is_compiled_once_a_program_fails(monkeypatch, unchecked):
    """The first error in the order of the calls is raised, and what has not begun is left out."""
    monkeypatch.setattr(compiling, "_threads", lambda: 1)
    done, may_fail = [], threading.Event()

    def call(name, fails=False):
        def compile():
            may_fail.wait(10)
            if name == "c":
                time.sleep(0.3)  # in which what follows is taken back
            done.append(name)
            if fails:
                raise RuntimeError(name)

        def jitted(number, letter):
            raise AssertionError("it is compiled, and not run")

        lowered = SimpleNamespace(lower=lambda: SimpleNamespace(compile=compile))
        jitted.trace = lambda number, letter: lowered if (number, letter) == (1, "x") else None
        return partial(jitted, 1, letter="x")

    calls = [call("a"), call("b", fails=True), *(call(name) for name in "cdefgh")]
    with pytest.raises(RuntimeError, match=r"^b$"):
        compiling.compile_all(calls, meanwhile=may_fail.set)
    assert done in (["a", "b"], ["a", "b", "c"]) and gc.isenabled()
    may_fail.set()
    done.clear()
    compiling.compile_all([call("a"), call("c")])
    assert done == ["a", "c"]


# Rows, pages and features without a device


def a_scheduler(pages: int, features: FeatureRows | None = None, **shapes) -> scheduler.Scheduler:
    """A scheduler over a runner that only notes what it is asked for; pages have four tokens."""
    of_runner = replace(SHAPES, **shapes)
    note = lambda name: lambda *given: noted.append((name, *given))
    names = ("read_segment", "write_pages", "copy_pages", "clear_row", "set_pages")
    noted, table = [], np.zeros((of_runner.batch, 8), np.int32)
    runner = SimpleNamespace(shapes=of_runner, table=table, noted=noted, **{name: note(name) for name in names})
    return scheduler.Scheduler(runner, PageAllocator(pages, 4), features, dispatch_ahead=False)


def test_a_request_with_a_row_remembers_no_comparison(unchecked):
    """How its prompt begins beside those of others is held while it waits, for whom it waits for."""
    served = a_scheduler(20)
    prompts = [tuple(range(12)), (*range(9), 30, 31), (40, 41, 42)]
    first, second, third = (Request(i, p, params(), prompt_keys=p) for i, p in enumerate(prompts))
    served.waiting = [first, second]
    served.admit()
    assert (first.row, second.row, second.common) == (0, None, {0: 9}) and served._has_sharers
    first.is_decoding = True
    served.waiting.append(third)
    served.admit()
    assert (second.row, second.common, third.row) == (1, {}, None) and not served._has_sharers
    assert [call[0] for call in served.runner.noted] == ["set_pages", "set_pages"]


def placed_at(number: int, first: int, features: int) -> PlacedSegment:
    patches = np.zeros((4 * features, 3), np.float32)
    places = np.arange(first, first + features, dtype=np.int32)
    return PlacedSegment(Segment(patches, (1, 2, 2 * features), False), places, number)


@pytest.mark.parametrize(
    ("sizes", "rows", "expected", "later"),
    [
        # patches of the tower's calls; features that the device keeps; what is read, and what in the next round
        ((8, 32), 20, [10, 20, 30], []),
        ((8, 16), 20, [10, 20], [30]),
        ((8,), 20, [10], [20]),
        ((8, 32), 3, [10], []),
        ((8, 32), 5, [10, 20], []),
    ],
)
def test_features_are_read_for_the_oldest_prompt_first(sizes, rows, expected, later, unchecked):
    """Of its next chunk, as many as a call of the tower holds and as there is room for; none that is there already."""
    served = a_scheduler(20, FeatureRows(rows), media_patches=sizes, media_tokens=rows, chunks=(8,))
    older = Request(0, tuple(range(30)), params(), row=1, segments=(placed_at(10, 2, 2), placed_at(40, 20, 2)))
    younger = Request(1, tuple(range(30)), params(), row=0, segments=(placed_at(20, 1, 2), placed_at(30, 5, 2)))
    served.request_of_row = [younger, older]
    served.read_media()
    found = {placed.number: taken.tolist() for _, placed, size, taken in served.runner.noted if size == 8}
    assert list(found) == expected
    in_use = sorted(row for taken in found.values() for row in taken)
    assert in_use == sorted(set(in_use)) and len(in_use) == 2 * len(expected)
    assert served._has_features(older) and served._has_features(younger) == (len(expected) == 3)
    assert served._feature_rows(older, 8).tolist() == [-1, -1, *found[10], -1, -1, -1, -1]
    older.cached = 3
    assert served._feature_rows(older, 4).tolist() == [found[10][1], -1, -1, -1]
    served.runner.noted.clear()
    served.read_media()
    assert [placed.number for _, placed, *_ in served.runner.noted] == later


def test_a_call_of_the_tower_reads_no_more_than_the_largest_one(unchecked):
    """What follows waits for the next round, though it would fit a smaller call."""
    served = a_scheduler(20, FeatureRows(20), media_patches=(8, 16, 24), media_tokens=20, chunks=(16,))
    segments = placed_at(10, 0, 4), placed_at(20, 4, 4), placed_at(30, 8, 1)
    served.request_of_row = [Request(0, tuple(range(30)), params(), row=0, segments=segments), None]
    for expected in ([(10, 16)], [(20, 16), (30, 8)], []):
        served.read_media()
        assert [(placed.number, size) for _, placed, size, _ in served.runner.noted] == expected
        served.runner.noted.clear()


@pytest.mark.parametrize("known", [0, 3, 4, 32, 36])
@pytest.mark.parametrize("count", [37, 40])
def test_pages_that_come_are_written_but_for_those_that_are_known(known, count, unchecked):
    """In groups, of which those that are known whole are left out; of a page known in part nothing is known."""
    served, keys = a_scheduler(40), tuple(range(100, 100 + count))
    if known:
        other = served.pages.add((*keys[:known], 0))[0]
        served.pages.extend(other, known)
        served.pages.commit(other, keys[:known])
    whole, contents = known // 4, ["group 0", "group 1"]
    with pytest.raises(scheduler.UnknownPages, match=f"{count} tokens were left out .* and {4 * whole} are known here"):
        served.receive(keys, contents, left_out=count)
    served.runner.noted.clear()
    handle = served.receive(keys, contents, left_out=4 * whole)
    table = served.pages.table(handle, 10).tolist()
    skipped = whole // PAGES_A_CALL
    expected = [*[-1] * whole, *table[whole:]][skipped * PAGES_A_CALL :]
    assert served.runner.noted == [
        ("copy_pages", []), ("write_pages", expected, contents[skipped:], keys[skipped * PAGES_A_CALL * 4 :])
    ]  # fmt: skip
    assert served.pages.known((*keys, 0)) == count // 4 * 4
    free = served.pages.statistics()["free"]
    served.runner.write_pages = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        served.receive(tuple(range(500, 500 + count)), contents)
    assert served.pages.statistics()["free"] == free and served.pages.known(tuple(range(500, 505))) == 0


# Requests


def test_requests_are_served_by_priority_deadline_and_age():
    orders = [(0, None), (0, 5.0), (2, None), (0, 3.0), (2, 9.0), (-1, 0.1), (0, None)]
    requests = [Request(i, (1,), params(), priority=p, deadline=d) for i, (p, d) in enumerate(orders)]
    assert [request.handle for request in sorted(requests, key=lambda x: x.order)] == [4, 2, 3, 1, 0, 6, 5]


def test_news_of_a_request_are_what_came_since_the_last():
    request = Request(3, (1, 2, 3), params(), found=9, prompt_scores=PromptScores([{5: -1.0}]))
    assert request.news().prompt_logprobs == ()  # with the first token
    request.new, request.logprobs, request.versions, request.top_logprobs = [7], [-0.5], [0], [{7: -0.5}]
    news = request.news()
    assert (news.handle, news.start, news.tokens, news.logprobs, news.versions) == (3, 0, (7,), (-0.5,), (0,))
    assert (news.top_logprobs, news.prompt_logprobs) == (({7: -0.5},), ({5: -1.0},))
    assert (news.stop_reason, news.generation, news.cached_tokens) == ("unfinished", None, 3)  # of the prompt's three
    request.new, request.logprobs, request.versions = [7, 8, 9], [-0.5, -1.0, -2.0], [0, 0, 1]
    request.stop_reason = "length"
    news = request.news()
    assert (news.start, news.tokens, news.versions, news.prompt_logprobs) == (1, (8, 9), (0, 1), ())
    assert news.generation.tokens == [7, 8, 9] and news.generation.prompt_tokens == 3
    times = replace(request, added_at=10.0, row_at=11.0, first_token_at=13.0, last_token_at=17.0, preemptions=2).timings
    assert (times.queue_seconds, times.prompt_seconds, times.decode_seconds, times.preemptions) == (1, 2, 4, 2)
    quick = replace(request, added_at=10.0, row_at=10.25, first_token_at=10.75, last_token_at=11.0).timings
    assert (quick.queue_seconds, quick.prompt_seconds, quick.decode_seconds) == (0.25, 0.5, 0.25)
    assert (request.key_offset, request.segments, request.guide, request.edits) == (0, (), None, None)
    waiting = replace(request, added_at=10.0).timings
    assert waiting.queue_seconds > 0 and waiting.prompt_seconds == waiting.decode_seconds == 0


def test_a_generation_is_cut_in_all_its_lists():
    whole = Generation(
        [1, 2, 3], [-1.0, -2.0, -3.0], "length", 4, text="abc", top_logprobs=[{1: -1.0}, {2: -2.0}, {3: -3.0}],
        versions=[0, 0, 1], records={"blocks": np.arange(3)}, prompt_logprobs=[{9: -1.0}] * 3,
    )  # fmt: skip
    cut = whole.cut(2, "stop_string")
    assert (cut.tokens, cut.logprobs, cut.versions, cut.stop_reason) == ([1, 2], [-1.0, -2.0], [0, 0], "stop_string")
    assert cut.top_logprobs == [{1: -1.0}, {2: -2.0}] and cut.records["blocks"].tolist() == [0, 1]
    assert cut.prompt_tokens == 4 and len(cut.prompt_logprobs) == 3


def test_a_request_begins_with_nothing():
    """No token is cached, counted or told of; without page keys of its own, its priority is the middle one."""
    found = {name: value for name, value in vars(Request(3, (1, 2), params())).items() if name != "added_at"}
    assert found.pop("prompt_scores").known == [] and found.pop("params") == params()
    assert found == dict(
        handle=3, prompt=(1, 2), segments=(), prompt_keys=found["prompt_keys"], new=[], logprobs=[], top_logprobs=[],
        guide=None, edits=None, key_offset=0, recorded=[], unread_records=None, row=None, page_handle=None, cached=0,
        found=None, is_decoding=False, stop_reason="unfinished", versions=[], priority=0, deadline=None, group=None,
        reported=0, passes=0, common={}, preemptions=0, drafted=0, accepted=0, row_at=None, first_token_at=None,
        last_token_at=None,
    )  # fmt: skip
    assert Shapes(batch=1, prompts=1, chunks=(8,), steps=1, stop_ids=1) == Shapes(
        1, 1, (8,), 1, 1, decode_rows=(), biases=0, bad_words=0, top_logprobs=0, records=(), edits=(),
        prompt_logprobs=False, draft_tokens=0, media_patches=(), media_tokens=0,
    )  # fmt: skip


def test_generations_of_the_same_tokens_are_equal_however_they_were_made():
    """Who drew them when, what was recorded and how many proposals there were is no part of the text."""
    one = Generation([1], [-0.5], "length", 3)
    assert (one.cached_tokens, one.drafted, one.accepted, one.timings) == (0, 0, 0, None)
    other = dict(versions=[4], timings=RequestTimings(), records={"blocks": np.zeros(1)}, drafted=5, accepted=2)
    for name, value in other.items():
        assert replace(one, **{name: value}) == one, name
    for name, value in dict(tokens=[2], logprobs=[-0.25], stop_reason="stop_id", cached_tokens=1).items():
        assert replace(one, **{name: value}) != one, name


def test_so_much_is_kept_and_looked_at():
    """Results, features and their numbers, a snapshot's header; how far a request may be passed is the definition's."""
    assert (engines.RESULTS_KEPT, media.MEDIA_TOKENS, media._MOST_NUMBERS) == (1024, 16384, 2**16)
    assert (sealed._MOST_HEADER_BYTES, state._FEW_ELEMENTS, PAGES_A_CALL) == (2**24, 2**16, 8)
    assert scheduler.MOST_PASSES == definition.MOST_PASSES == 16
    assert scheduler._LOOK_AHEAD == definition.LOOK_AHEAD == 8
    assert (sampling._MOST_BIAS, sampling.MASK_BITS, sampling.USED, sampling.MAX_TOP_LOGPROBS) == (100.0, 32, 2, 20)
    assert sampling.WORD_TOKENS == 8


def test_seeds_of_a_group_follow_one_another():
    assert engines._seeds(5, 3) == [5, 6, 7] and engines._seeds(2**32 - 2, 4) == [2**32 - 2, 2**32 - 1, 0, 1]


def test_pages_travel_in_groups_of_one_size():
    found = [group.tolist() for group in runners._padded_groups([*range(5, 5 + PAGES_A_CALL + 2)])]
    assert found == [[*range(5, 5 + PAGES_A_CALL)], [5 + PAGES_A_CALL, 6 + PAGES_A_CALL, *[-1] * (PAGES_A_CALL - 2)]]
    assert runners._padded_groups([]) == [] and [len(x) for x in runners._padded_groups([1] * PAGES_A_CALL)] == [8]


def test_pages_of_a_prompt_are_ready_when_their_calls_were_launched(unchecked):
    """Whole ones, and the last in part when all of the prompt is through; new tokens' pages are not among them."""
    size, runner = 4, SimpleNamespace(read_pages=lambda ids, is_awaited: [(list(ids), is_awaited)] if ids else [])
    served = Engine.__new__(Engine)
    served._runner = runner
    for prompt_tokens in range(1, 2 * size + 2):
        for cached in range(prompt_tokens + 3):
            request = Request(0, tuple(range(prompt_tokens)), params(), page_handle=5, cached=cached)
            served._unfinished = lambda *_, request=request: request
            served._pages = SimpleNamespace(page_size=size, pages_of=lambda handle: [*range(100 + handle, 130)])
            is_ready = [
                all(token < cached for token in range(first, min(first + size, prompt_tokens)))
                for first in range(0, prompt_tokens, size)
            ]
            for first in range(len(is_ready) + 1):
                expected = [105 + page for page, ready in enumerate(is_ready) if ready and page >= first]
                count, contents = served.export_pages(0, first)
                assert count == len(expected) and contents == ((expected, False) if expected else None)
    request.page_handle = None
    assert served.export_pages(0) == (0, None)
    served._pages = SimpleNamespace(page_size=size, pages_of=lambda handle: [*range(50)])
    request = Request(0, tuple(range(200)), params(), page_handle=0, cached=200)
    served._unfinished = lambda *_: request
    assert [served.export_pages(0, first)[0] for first in (0, 41, 42, 43, 49, 50)] == [8, 8, 8, 7, 1, 0]


@pytest.mark.parametrize("is_awaited", [False, True])
def test_pages_that_are_read_are_on_the_host_or_on_their_way(is_awaited, monkeypatch, unchecked):
    """Groups repeat their first page; the index keys of an offloaded stack stand behind what host memory holds."""
    sent = []

    class Leaf:
        def __init__(self, name):
            self.name = name

        def copy_to_host_async(self):
            sent.append(self.name)

        def __array__(self, *_, **__):
            sent.append(self.name)
            return np.array(self.name)

    runner = Runner.__new__(Runner)
    runner.state, runner._cache_layout = SimpleNamespace(cache=None), None
    names = lambda ids: [(f"k {ids}", f"v {ids}", f"i {ids}")]
    read = lambda cache, ids, layout: [tuple(map(Leaf, stack)) for stack in names(ids.tolist())]
    monkeypatch.setattr(runners, "device", SimpleNamespace(read_pages=read))
    plain = lambda contents: [tuple(str(getattr(leaf, "name", leaf)) for leaf in stack) for stack in contents]
    ids = [*range(PAGES_A_CALL), 20, 21]
    groups = [[*range(PAGES_A_CALL)], [20, 21, *[20] * (PAGES_A_CALL - 2)]]
    runner.host = None
    assert [plain(group) for group in runner.read_pages(ids, is_awaited)] == [names(group) for group in groups]
    assert set(sent) == {name for group in groups for stack in names(group) for name in stack}
    runner.host = SimpleNamespace(read=lambda ids: [("host k", f"host v {ids[-1]}")])
    expected = [[("host k", f"host v {group[-1]}", f"i {group}")] for group in groups]
    assert [plain(group) for group in runner.read_pages(ids, is_awaited)] == expected
    assert runner.read_pages([], is_awaited) == []


@pytest.mark.parametrize(
    ("programs", "names"),
    [
        (("prefill", "tower", "decode", "pages"), "prefill of 2 x 8 and 16 tokens, vision tower for 4 and 16 patches, "
         "decode of 4 steps, copies of pages"),
        (("decode",), "decode of 4 steps"), (("tower", "pages"), "vision tower for 4 and 16 patches, copies of pages"),
        (("prefill",), "prefill of 2 x 8 and 16 tokens"), ((), ""),
    ],
)  # fmt: skip
def test_programs_are_compiled_under_their_names(programs, names, monkeypatch, unchecked):
    """The tower's before prefill's; of a draft steps are rounds. What was compiled is not compiled again by size."""
    compiled, watched = [], []
    note = lambda calls, meanwhile=None: compiled.append((list(calls), meanwhile))
    monkeypatch.setattr(runners, "compile_all", note)
    runner = Runner.__new__(Runner)
    runner.shapes = replace(SHAPES, media_patches=(4, 16), decode_rows=(1,), records=("blocks",), prompt_logprobs=True)
    runner.host, runner.drafter, runner.state = None, None, SimpleNamespace(lengths=0)
    runner._compiled_widths, runner._compiled_sizes = set(), set()
    runner._empty_tower_call = lambda size: ("tower", size)
    runner._prefill_call = lambda *given: ("prefill", *given)
    runner._decode_call = lambda *given, rows: ("decode", *given, len(rows))
    runner._start_call = lambda starts: ("start", starts)
    watch = lambda text: watched.append(text) or nullcontext()
    runner.warmup(programs, (8, 16), watch)
    assert watched == [names]
    ((calls, meanwhile),) = compiled
    expected = [("tower", size) for size in (4, 16) if "tower" in programs]
    recordings = ((), ("blocks",))
    if "prefill" in programs:
        expected += [("prefill", (), w, r, scores) for w in (8, 16) for r in recordings for scores in (False, True)]
    if "decode" in programs:
        expected += [*(("decode", 0, {}, r, size) for size in (1, 2) for r in recordings), ("start", ())]
    assert calls == expected and (meanwhile is not None) == ("pages" in programs)
    runner.drafter = object()
    runner.warmup(("decode",), (), watch, all_record=True)
    assert watched[1] == "decode of 4 rounds"
    assert compiled[1][0] == [*(("decode", 0, {}, ("blocks",), size) for size in (1, 2)), ("start", ())]
    watched.clear()
    is_new = "prefill" not in programs, "tower" not in programs
    assert runner.warmup_sizes((16, 8, 8), (16,), watch) == any(is_new)
    texts = ("prefill of 2 x 8 and 16 tokens", "vision tower for 16 patches")
    assert watched == ([", ".join(text for text, new in zip(texts, is_new, strict=True) if new)] if any(is_new) else [])
    if any(is_new):  # with what records and scores, though not all requests do
        found = [("tower", 16)] if is_new[1] else []
        widths = (8, 16) if is_new[0] else ()
        found += [("prefill", (), w, r, scores) for w in widths for r in recordings for scores in (False, True)]
        assert compiled[-1] == (found, None)
    assert not runner.warmup_sizes((8,), (16,), watch)


def test_stop_ids_that_count():
    asked = params(stop_ids=(1, 2, 3))
    assert asked.stops((2,)) == (1, 2, 3) and replace(asked, ignore_eos=True).stops((2, 9)) == (1, 3)
    assert params(record=("blocks",), capture=("layers.0.q",)).recorded == ("blocks", "layers.0.q")


# Features of images


def test_rows_of_features_are_given_to_the_segment_used_last():
    rows = FeatureRows(5)
    first, second = rows.take(1, 2, ()).tolist(), rows.take(2, 3, ()).tolist()
    assert (first, second) == ([0, 1], [2, 3, 4])
    assert rows.take(3, 4, (1, 2)) is None and rows.take(3, 4, (2,)) is None  # two rows are not enough
    assert rows.statistics() == dict(rows=5, used=5, segments=2, computed=2, dropped=0)
    assert rows.rows(1).tolist() == [0, 1]  # a use: now the second is the oldest
    assert set(rows.take(3, 2, ()).tolist()) <= {2, 3, 4}
    assert 1 in rows and 2 not in rows and 3 in rows
    assert rows.statistics() == dict(rows=5, used=4, segments=2, computed=3, dropped=1)
    rows.forget()
    assert rows.statistics() == dict(rows=5, used=0, segments=0, computed=3, dropped=3)
    assert sorted(rows.take(4, 5, ()).tolist()) == [0, 1, 2, 3, 4]


def test_a_segment_is_where_its_features_are():
    patches = np.zeros((12, 3), np.float32)
    placed = PlacedSegment(Segment(patches, (1, 2, 6), False), np.array([4, 5, 7], np.int32), 10)
    assert placed.segment.features == 3 and placed.keys.tolist() == [-12, -13, -14]
    inside = [placed.is_in(*part) for part in ((0, 4), (0, 5), (7, 8), (8, 9), (5, 6), (6, 7))]
    assert inside == [False, True, True, False, True, True]
    assert prefix_keys((1, 2, 3, 4, 9, 9, 5, 9), [placed]) == (1, 2, 3, 4, -12, -13, 5, -14)
    assert prefix_keys((1, 2), ()) == (1, 2)


# Steering


def test_a_row_is_steered_by_its_vectors():
    """`scale` (x - (x . u) u) + `add`; a row without a Steer keeps its bits."""
    steer = Steer(add=[1.0, 0.0, 0.0], scale=2.0, without=[0.0, 3.0, 0.0])
    edits = [None, {"a": steer, "b": Steer(scale=0.5)}, {"b": Steer(add=[0.0, 0.0, 4.0])}]
    found = steering_of(edits, ("a", "b"), 3, False)
    assert found["a"].is_steered.tolist() == [False, True, False]
    assert found["b"].is_steered.tolist() == [False, True, True]
    x = jnp.asarray(np.float32(np.arange(1, 19).reshape(3, 2, 3)))
    expected = np.array(x)
    expected[1] = 2 * expected[1] * [1, 0, 1] + [1, 0, 0]
    np.testing.assert_allclose(found["a"](x), expected)
    expected = np.array(x)
    expected[1], expected[2] = expected[1] / 2, expected[2] + [0, 0, 4]
    np.testing.assert_allclose(found["b"](x), expected)
    assert found["b"](x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
