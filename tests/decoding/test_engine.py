"""The engine as a server: what compiles, what memory it takes, who runs when, how requests end."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import tiny
from support.compilations import compilations
from support.engines import (
    CONFIG,
    SHAPE,
    engine,
    finish,
    no_steps,
    params,
    prompt,
    quick,
    runner_of,
    serve,
    temporary_bytes,
)
from support.fake_model import FakeModel
from support.generation import LETTERS, tokenizer

from m3jax.completion import generate_text
from m3jax.decoding import Engine, Generation, Params, device, engine_for
from m3jax.decoding.engine.compiling import compile_all
from m3jax.decoding.engine.runner import Runner
from m3jax.model import M3
from m3jax.progress import Activity


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def alone(tokens: tuple[int, ...], asked: Params) -> Generation:
    """Return the continuation of a request that has an engine to itself."""
    return serve(engine(model()), (tokens, asked))[0]


def pages_in_tables(served: Engine) -> int:
    return len({*runner_of(served).table.ravel().tolist()} - {-1})


# Compiling


def test_nothing_compiles_after_warmup():
    """T21: adds, aborts, copies, truncations, moves, any sampling, stop ids, lengths and mixes of them; checked."""
    rng, served, other = np.random.default_rng(0), engine(model()), engine(model())
    served.warmup()
    with compilations() as seen:
        live: list[int] = []
        for step in range(80):
            live = [handle for handle in live if served.reason(handle) == "unfinished"]
            if rng.random() < 0.4 or not live:
                live.append(served.add(prompt(int(rng.integers(1, 90)), seed=step % 3), random_params(rng)))
            if rng.random() < 0.1:
                served.abort(live.pop(rng.integers(len(live))))
            if rng.random() < 0.1 and live:
                served.truncate(live[0], 0)
            if rng.random() < 0.1 and live and len(served.result(live[0]).tokens) < 4:
                live.append(served.copy(live[0]))
            if rng.random() < 0.1 and live:
                other.abort(other.import_request(served.export(live[0])))
            served.step()
            served.check()
        finish(served)
    assert seen == []
    assert {result.stop_reason for result in served.run().values()} == {"length", "stop_id", "aborted"}


def random_params(rng: np.random.Generator) -> Params:
    knobs = dict(
        temperature=rng.choice([0.0, 0.7, 2.0]), top_k=rng.choice([0, 5]), top_p=rng.choice([0.5, 1.0]),
        min_p=rng.choice([0.0, 0.1]), repetition_penalty=rng.choice([1.0, 1.5]), seed=rng.integers(9),
    )  # fmt: skip
    knobs = {name: value.item() for name, value in knobs.items()}
    return params(int(rng.integers(4, 30)), rng.choice(64, rng.integers(5), replace=False).tolist(), **knobs)


def test_warmup_runs_no_program_of_the_model():
    """It compiles for the state that there is, and leaves that as it is; what it compiled is what requests then run.

    T21 too where a model's new cache is bound to no device, which is part of the key of a compiled program.
    """
    served = Engine(FakeModel.random(), pages=7, max_batch=3, prefill_chunk=(5, 9), steps_per_call=3, max_stop_ids=4)
    pages = runner_of(served).state.cache.pages
    served.warmup(programs=("prefill", "decode"))
    assert runner_of(served).state.cache.pages is pages and not pages.is_deleted()
    with compilations() as seen:
        results = serve(served, (prompt(20), params(9)), (prompt(3), params(4)), (prompt(9), params(1)))
    assert seen == [] and [len(result.tokens) for result in results] == [9, 4, 1]
    with pytest.raises(ValueError, match=r"programs = \('prefil',\): there is no 'prefil'; choose of"):
        served.warmup(programs=("prefil",))


def test_no_garbage_is_collected_while_programs_are_traced():
    """Tracing makes objects that stay; the collector is as it was afterwards, on or off, after an error too."""
    seen = []

    class Program:
        def __call__(self):
            raise AssertionError("it ran")

        def trace(self, fails):
            seen.append(gc.isenabled())
            if fails:
                raise RuntimeError("untraceable")
            return mock.Mock()

    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            for fails in (False, True):
                with pytest.raises(RuntimeError, match="untraceable") if fails else nullcontext():
                    compile_all([partial(Program(), fails)])
                assert gc.isenabled() == was_on
        finally:
            gc.enable()
    assert seen == [False] * 4


def test_programs_are_compiled_side_by_side():
    """Two that wait for each other while they are compiled; then one that fails, whose error comes out."""
    together, done = threading.Barrier(2, timeout=10), []

    class Program(NamedTuple):
        compile: Callable[[], None]

        def trace(self, *_args, **_options):
            return self

        def lower(self):
            return self

        def __call__(self):
            raise AssertionError("it ran")

    compile_all([partial(Program(together.wait))] * 2, meanwhile=lambda: done.append(threading.current_thread()))
    assert done == [threading.main_thread()]

    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_all([partial(Program(fail))])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("m3jax compile")]


def test_what_no_request_will_run_is_not_compiled():
    """A first token comes out of prefill: where nobody wants a second one, decode is left alone."""
    names = []

    @contextmanager
    def timed(self, text):
        names.append(text)
        yield

    with mock.patch.object(Activity, "timed", timed):
        for count in (1, 2):
            engine_for(FakeModel.random(), [[1, 2, 3]] * 2, [params(1), params(count)])
    prefill = "compiling prefill of 2 x 16 tokens"
    assert names == [prefill, f"{prefill}, decode of 64 steps"]


def test_the_counter_counts():
    """`compilations` counts the compilation of a new shape: else the tests of "compiles nothing" would always pass."""
    served = Engine(FakeModel.random(), pages=3)
    with compilations() as seen:
        runner_of(served).copy_pages([(0, 1)])
    assert len(seen) >= 2  # traced and compiled


# Memory


@pytest.mark.parametrize("name", ["decode", pytest.param("prefill", marks=pytest.mark.further)])
def test_a_step_makes_no_second_cache(name):
    """The scratch memory of the compiled program is far below the cache, however many pages that has."""
    served = engine(model(), pages=8192)
    if name == "prefill":
        arrays = [np.zeros(shape, np.int32) for shape in (2, (2, 12), 2, 2)]
        chunk = device.Chunk(*arrays, runner_of(served).continuations([], 2))
        temporary, cache_bytes = temporary_bytes(device.prefill, served, chunk)
    else:
        steps = SHAPE["steps_per_call"]
        temporary, cache_bytes = temporary_bytes(device.decode, served, no_steps(served), max_steps=steps)
    assert cache_bytes == served.cache_bytes > 7e7
    assert temporary < cache_bytes / 30


def test_a_step_takes_over_the_state():
    """Every array of the state before a call is gone after it: prefill, decode, the copy of a page."""
    served = engine(model())
    handle = served.add(prompt(20), params(20))
    for step in range(4):
        before = runner_of(served).state
        if step == 3:
            served.copy(handle)
        served.step()
        assert all(x.is_deleted() for x in jax.tree.leaves((before.cache.stacks, before.continuations, before.lengths)))
    assert served.result(handle).tokens


def test_idle_rows_stay_finite(monkeypatch):
    """T8: rows without a request compute nothing that is NaN, be it thrown away."""
    read, got = Runner.read, []

    def note(self, *args):
        got.append(read(self, *args))
        return got[-1]

    monkeypatch.setattr(Runner, "read", note)
    served = engine(model())
    serve(served, (prompt(40), params(20)), (prompt(5), params(2)))
    assert got
    for new in got:
        assert np.isfinite(new.logprobs).all()
        assert np.all((new.tokens >= 0) & (new.tokens < CONFIG.vocab_size))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(runner_of(served).state.cache.stacks))


# Who runs when


def test_a_long_prompt_does_not_stall_the_others():
    """While it goes through in nine chunks, every round appends to the rows that decode; then it decodes too."""
    served = engine(model())
    first = served.add(prompt(5), params(60))
    served.step()
    long = served.add(prompt(100), params(4))
    grown, before = [], len(served.result(first).tokens)
    while not served.result(long).tokens:
        served.step()
        grown.append(len(served.result(first).tokens) - before)
        before += grown[-1]
    assert grown == [SHAPE["steps_per_call"]] * 9
    finish(served)
    assert served.result(first) == alone(prompt(5), params(60))
    assert served.result(long) == alone(prompt(100), params(4))


def test_more_requests_than_rows_are_served_in_turn():
    work = [(prompt(9, seed=i), params(5)) for i in range(9)]
    served = engine(model())
    handles = [served.add(*item) for item in work]
    began = []
    while served.busy:
        served.step()
        began += [handle for handle in handles if handle not in began and served.result(handle).tokens]
    assert began == handles
    assert [served.result(handle) for handle in handles] == [alone(*item) for item in work]


def test_a_stream_gives_tokens_as_they_come_and_the_others_go_on():
    served = engine(model())
    mine, other = served.add(prompt(5), params(20)), served.add(prompt(9), params(20))
    stream = served.stream(mine)
    assert [next(stream) for _ in range(7)] == alone(prompt(5), params(20)).tokens[:7]
    assert 7 <= len(served.result(other).tokens) < 20
    assert served.reason(mine) == "unfinished"
    assert list(stream) == alone(prompt(5), params(20)).tokens[7:]
    assert served.take(mine) == alone(prompt(5), params(20)).tokens
    assert served.take(mine) == []
    finish(served)
    assert served.result(other) == alone(prompt(9), params(20))


# How requests end


def by_abort(served: Engine, handle: int) -> None:
    served.abort(handle)


def by_stop_string(served: Engine, handle: int) -> None:
    served.stop(handle, 3)


@pytest.mark.parametrize("end", [by_abort, by_stop_string])
@pytest.mark.parametrize("share", [True, False])
def test_who_is_ended_frees_its_pages_at_once(end: Callable[[Engine, int], None], share):
    served = engine(model(), prefix_cache=share)
    ended, other = served.add(prompt(30), params(40)), served.add(prompt(9), params(40))
    while len(served.result(ended).tokens) < 6:
        served.step()
    before = served.pages["used"]
    end(served, ended)
    served.check()
    assert served.pages["used"] == pages_in_tables(served) < before
    assert served.load == dict(running=1, waiting=0)
    kept = served.result(ended)
    assert kept.tokens == alone(prompt(30), params(40)).tokens[: len(kept.tokens)]
    assert kept.stop_reason == ("aborted" if end is by_abort else "stop_string")
    assert len(kept.logprobs) == len(kept.tokens) == (3 if end is by_stop_string else 9)
    finish(served)
    assert served.result(other) == alone(prompt(9), params(40))
    assert served.result(ended) == kept


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_before_the_first_token(steps):
    """While it waits for a row, and in the middle of its prompt."""
    served = engine(model())
    other = served.add(prompt(9), params(12))
    handle = served.add(prompt(100), params(4))
    for _ in range(steps):
        served.step()
    served.abort(handle)
    served.check()
    assert served.pages["used"] == pages_in_tables(served)
    finish(served)
    assert served.result(handle) == Generation([], [], "aborted", 100)
    assert served.result(other) == alone(prompt(9), params(12))


def test_a_stop_id_frees_pages_at_once():
    """In the middle of a call's steps: what the others get in it is kept, what comes after the stop id is not."""
    free = alone(prompt(30), params(40))
    stop = next(token for token in free.tokens[6:] if free.tokens.index(token) >= 6)
    end = free.tokens.index(stop) + 1
    served = engine(model())
    ended, other = served.add(prompt(30), params(40, [63, stop, 63])), served.add(prompt(9), params(40))
    while served.reason(ended) == "unfinished":
        served.step()
    assert served.pages["used"] == pages_in_tables(served)
    finish(served)
    assert served.result(ended) == Generation(free.tokens[:end], free.logprobs[:end], "stop_id", 30)
    assert served.result(other) == alone(prompt(9), params(40))


def test_take_gives_again_what_was_truncated():
    """Tokens that were taken and then truncated are given again when they are decoded again."""
    served, whole = engine(model()), alone(prompt(30), params(40)).tokens
    handle = served.add(prompt(30), params(40))
    while len(served.result(handle).tokens) < 8:
        served.step()
    taken = served.take(handle)
    served.truncate(handle, 5)
    finish(served)
    assert taken[:5] + served.take(handle) == whole
    assert served.take(handle) == []


def test_a_stop_string_frees_pages_while_others_go_on():
    words = tokenizer(LETTERS)
    text = words.decode(alone(prompt(30), params(40)).tokens)
    served = engine(model())
    ended, other = served.add(prompt(30), params(40)), served.add(prompt(9), params(40))
    seen = []

    def note(handle, piece):
        assert served.pages["used"] == pages_in_tables(served)
        seen.append((served.reason(ended), served.reason(other)))

    results = generate_text(served, [ended, other], words, stop=[text[9:18]], on_text=note)
    assert ("stop_string", "unfinished") in seen
    assert results[0].stop_reason == "stop_string"
    assert results[0].text == text[: text.index(text[9:18])]
    assert results[1].tokens == alone(prompt(9), params(40)).tokens
    assert served.pages["used"] == 0


def with_nan(token: int) -> M3:
    """The model, with an embedding that is no number."""
    other = jax.tree.map(lambda x: x, model())
    other.embed_tokens = nnx.Param(model().embed_tokens[...].at[token].set(jnp.nan))
    return other


def test_nan_logits_end_one_request_and_free_its_pages():
    """In the prompt and in decode; who runs beside it, and who gets its pages next, sees nothing of it (T10)."""
    safe, free = [(prompt(9), params(10)), (prompt(60, 1), params(20))], alone(prompt(30), params(40))
    harmless = {token for item in safe for token in (*item[0], *alone(*item).tokens)}
    new = [t for t in free.tokens if t not in harmless and t not in prompt(30)]
    bad = new[0]
    served = engine(with_nan(bad), prefix_cache=False)
    at_prompt, in_decode = served.add((*prompt(20), bad), params(5)), served.add(prompt(30), params(40))
    other = served.add(*safe[0])
    while "unfinished" in (served.reason(at_prompt), served.reason(in_decode)):
        served.step()
        served.check()
        assert served.pages["used"] == pages_in_tables(served)
    assert served.result(at_prompt) == Generation([], [], "nan", 21)
    count = free.tokens.index(bad) + 1
    assert served.result(in_decode) == Generation(free.tokens[:count], free.logprobs[:count], "nan", 30)
    next_one = served.add(*safe[1])
    finish(served)
    assert served.result(other) == alone(*safe[0])
    assert served.result(next_one) == alone(*safe[1])
