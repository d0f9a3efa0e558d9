"""Recorded choices of requests: the same however a request is served, and enough to compute its very bits again."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from support import tiny
from support.compilations import compilations
from support.drafts import Knowing
from support.engines import QUICK, SHAPE, assert_stays, finish, params, places, prompt, quick

from m3jax.decoding import Engine, Generation, Params, Sampling
from m3jax.model import M3, Choices
from m3jax.parallel import parse_mesh

CONFIG = tiny.config("M")  # block 8, top-k 3
NAMES = ("expert_ids", "blocks")


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    with quick():
        yield


@cache
def model() -> M3:
    return tiny.model(CONFIG, dtype="bfloat16")


@cache
def served(name: str = "plain") -> Engine:
    changes = {"plain": {}, "draft": dict(draft=Knowing.of(2, 0, 1, 2, 0, 8, 1), draft_tokens=2)}[name]
    return Engine(model(), **SHAPE | changes, invariant=True, records=NAMES)


def asked(new: int, record: tuple[str, ...] = NAMES, **knobs) -> Params:
    return Params(max_new_tokens=new, sampling=Sampling(**{"temperature": 1.0} | knobs), record=record)


def assert_same_records(found: Generation, expected: Generation) -> None:
    assert found.tokens == expected.tokens
    for name in NAMES:
        np.testing.assert_array_equal(found.records[name], expected.records[name])


@pytest.mark.parametrize(
    "name", ["plain", pytest.param("draft", marks=pytest.mark.further)]
)  # in rounds: also test_support.py
def test_a_record_played_again_gives_the_requests_bits(name):
    """The engine's log-probabilities, from one forward pass with its choices given; most of the blocks are dropped.

    The last chunk of the prompt has four tokens: its record is that of the last one.
    """
    engine, tokens = served(name), prompt(64)
    handle = engine.add(tokens, asked(9, seed=3))
    found = engine.run()[handle]
    assert {key: (value.shape, value.dtype) for key, value in found.records.items()} == {
        "expert_ids": ((9, 1, 2), np.int16),
        "blocks": ((9, 1, CONFIG.num_key_value_heads, 3), np.int16),
    }
    whole = np.array([[*tokens, *found.tokens]], np.int32)
    choices = Choices.of_records(found.records, len(tokens))
    logits = _forward(model().with_invariance(), whole, choices)
    logprobs = np.asarray(jax.nn.log_softmax(logits))[0, len(tokens) - 1 : -1]
    drawn = logprobs[np.arange(9), found.tokens]
    np.testing.assert_allclose(drawn, found.logprobs, rtol=0, atol=1e-6)  # one log-sum-exp here, a tile's there
    np.testing.assert_array_equal(logits, _forward(model().with_invariance(), whole, None))


@partial(jax.jit, compiler_options=QUICK)
def _forward(model, tokens, choices):
    return model(tokens, choices=choices)


@pytest.mark.further
def test_a_copy_of_what_was_not_recorded_begins_with_the_models_own_choice():
    engine = served()
    first = engine.add(prompt(9), asked(20, record=()))
    engine.step()
    engine.step()
    had = len(engine.result(first).tokens)
    copy = engine.copy(first, asked(20, record=("blocks",)))
    finish(engine)
    record = engine.result(copy).records["blocks"]
    assert len(record) == 20 and (record[:had] == -1).all() and (record[had:].max(axis=-1) >= 0).all()


@pytest.mark.further
@pytest.mark.usefixtures("eight_devices")
def test_records_over_a_mesh_are_those_of_one_device():
    """T38: rows over two devices, experts over others; a copy and a request that was taken back are among them.

    The layout of the state is steady, so no later step compiles.
    """
    plain, divided = (
        Engine(tiny.model(CONFIG, mesh=mesh), **SHAPE, records=NAMES)
        for mesh in (None, parse_mesh("data=2,tensor=2,expert=2"))
    )
    records = []
    for engine in (plain, divided):
        handles = [engine.add(prompt(length), asked(12, temperature=0.0)) for length in (61, 9, 30)]
        while len(engine.result(handles[0]).tokens) < 6:
            engine.step()
        engine.truncate(handles[0], 3)
        handles.append(engine.copy(handles[2]) if engine.reason(handles[2]) == "unfinished" else handles[2])
        finish(engine)
        before = places(engine)
        with compilations() as seen:
            handles.append(engine.add(prompt(20), asked(12, temperature=0.0)))
            finish(engine)
        assert seen == []
        assert_stays(engine, before)
        records.append([engine.result(handle) for handle in handles])
    for one, other in zip(*records, strict=True):
        assert_same_records(other, one)


@pytest.mark.further  # which calls warm-up compiles: test_engine_sizes.py
def test_nothing_compiles_where_the_engine_was_told_what_is_recorded():
    engine = Engine(model(), **SHAPE, invariant=True, records=NAMES)
    engine.warmup()
    with compilations() as seen:
        engine.add(prompt(30), asked(5))
        engine.add(prompt(9), asked(5, record=("blocks",)))
        engine.add(prompt(9, seed=1), params(5))
        engine.run()
    assert seen == []


def test_what_cannot_be_recorded_is_refused(unchecked):
    with pytest.raises(ValueError, match="record = \\('logits',\\): must be a tuple of expert_ids, blocks"):
        served().add(prompt(3), asked(2, record=("logits",)))
    with pytest.raises(ValueError, match="records has 'logits': choose of expert_ids, blocks"):
        Engine(model(), **SHAPE, records=("logits",))
