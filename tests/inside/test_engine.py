"""Values captured by an engine are those of one call over the whole text, and a steered request is as it is alone."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.compilations import compilations
from support.drafts import Knowing
from support.engines import CONFIG, SHAPE, finish, params, prompt, quick

from m3jax.decoding import Engine, Generation, Steer
from m3jax.decoding.engine import Snapshot
from m3jax.decoding.steering import steering_of
from m3jax.model import M3

CAPTURED = ("embedding", "layers.0.attention_out", "layers.1.q", "layers.1.block_scores", "layers.1.blocks",
            "layers.1.expert_weights", "layers.*.output", "final_norm")  # fmt: skip
STEERED = ("layers.0.output", "layers.1.attention_out")
WIDTH = CONFIG.hidden_size


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    with quick():
        yield


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def served(name: str = "plain") -> Engine:
    changes = {"plain": dict(edits=STEERED), "draft": dict(draft=Knowing.of(2, 0, 1, 2, 0, 8, 1), draft_tokens=2)}[name]
    return Engine(model(), **SHAPE | changes, invariant=True)


def expected_values(generation: Generation, tokens: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The values of one call over the prompt and the new tokens, at the positions that drew these."""
    whole = np.zeros((1, 96), np.int32)
    whole[0, : len(tokens) + len(generation.tokens)] = [*tokens, *generation.tokens]
    values = model().with_invariance().intermediates(whole, names=CAPTURED)
    drawn = slice(len(tokens) - 1, len(tokens) - 1 + len(generation.tokens))
    by_head = lambda name: name.endswith(("blocks", "block_scores"))
    return {
        name: np.moveaxis(x[0], 1, 0)[drawn] if by_head(name) else np.asarray(x[0, drawn]) for name, x in values.items()
    }


@cache
def captured(name: str) -> list[Generation]:
    """One request that is captured and two beside it; drafted, these are captured too.

    It is read first and ends last, so no step is without it: that would be a program of its own.
    """
    engine = served(name)
    handles = [engine.add(prompt(61), params(32, temperature=1.0), capture=CAPTURED)]
    while not engine.result(handles[0]).tokens:
        engine.step()
    others = CAPTURED if name == "draft" else ()
    handles += [engine.add(prompt(length), params(9, temperature=1.0), capture=others) for length in (9, 30)]
    finish(engine)
    return [engine.result(handle) for handle in handles]


@pytest.mark.parametrize("name", ["plain", pytest.param("draft", marks=pytest.mark.further)])
def test_captures_are_the_values_of_the_whole_text(name):
    """In chunks, beside others, drafted: what is rejected leaves no trace, and each value lies at its own token."""
    found, *others = captured(name)
    for value, expected in expected_values(found, prompt(61)).items():
        own = found.records[value]
        if value.endswith("block_scores"):  # the engine's rows have room for more blocks, which no query sees
            assert np.isneginf(own[..., expected.shape[-1] :]).all()
            own = own[..., : expected.shape[-1]]
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5, err_msg=value)
    if name == "plain":
        assert all(other.records == {} for other in others)
    else:  # some proposals were rejected, and some accepted
        engine = served(name)
        assert 0 < sum(engine.drafting.accepted) < 2 * engine.drafting.forwards
        for undrafted, drafted in zip(captured("plain"), captured("draft"), strict=True):  # nobody is steered in either
            assert undrafted.tokens == drafted.tokens and undrafted.logprobs == drafted.logprobs


def test_captures_travel_with_a_request():
    """A copy and a request that moved by bytes have all values, of the tokens before too."""
    engine = served()
    first = engine.add(prompt(20), params(20, temperature=1.0), capture=CAPTURED)
    for _ in range(4):
        engine.step()
    copy = engine.copy(first)
    moved = engine.import_request(Snapshot.from_bytes(engine.export(first).to_bytes()))
    finish(engine)
    expected = engine.result(first).records
    assert set(expected) > {"layers.0.output", "layers.1.output", "layers.1.blocks"}
    for other in (copy, moved):
        assert engine.result(other).records.keys() == expected.keys()
        for name, value in engine.result(other).records.items():
            np.testing.assert_array_equal(value, expected[name])


def steers(row: int) -> dict[str, Steer]:
    """Another change for each row, large enough to change its tokens."""
    draw = np.random.default_rng(row)
    add, without = draw.normal(size=WIDTH) * 2, draw.normal(size=WIDTH)
    kinds = (
        {STEERED[0]: Steer(add=add)},
        {STEERED[0]: Steer(without=without), STEERED[1]: Steer(scale=-2.0)},
        {STEERED[1]: Steer(add=add, scale=0.5, without=without)},
        {STEERED[0]: Steer(scale=1.5)},
    )
    return kinds[row % 4]


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


def test_rows_are_steered_each_by_its_own_vectors():
    """To the bit as alone, though the prompts are one and one row is not steered."""
    engine, tokens, asked = served(), prompt(30), params(12, temperature=1.0)
    alone, everybody = [], (*map(steers, range(4)), None)
    for edits in everybody:  # captured too: by the programs of the tests above
        handle = engine.add(tokens, asked, edits=edits, capture=CAPTURED)
        finish(engine)
        alone.append(engine.result(handle))
    assert len({tuple(found.tokens) for found in alone}) == 5

    with compilations() as seen:
        handles = [engine.add(tokens, asked, edits=edits, capture=CAPTURED) for edits in everybody]
        finish(engine)
    assert seen == []
    for handle, expected in zip(handles, alone, strict=True):
        found = engine.result(handle)
        assert found.tokens == expected.tokens and found.logprobs == expected.logprobs


def test_steering_is_the_edit_of_that_value():
    """Log-probabilities are those of a call of the model with the same change, written by hand."""
    engine, tokens, row = served(), prompt(30), 2
    handle = engine.add(tokens, params(8, temperature=1.0), edits=steers(row), capture=CAPTURED)
    found = engine.run()[handle]
    ((name, steer),) = steers(row).items()
    unit = (steer.without / np.linalg.norm(steer.without)).astype(np.float32)
    change = lambda x: steer.scale * (x - (x @ unit)[..., None] * unit) + steer.add.astype(np.float32)
    whole = np.array([[*tokens, *found.tokens]], np.int32)
    logprobs = np.asarray(jax.nn.log_softmax(model()(whole, edits={name: change})))[0, len(tokens) - 1 : -1]
    np.testing.assert_allclose(logprobs[np.arange(8), found.tokens], found.logprobs, rtol=0, atol=1e-4)


def test_a_steered_copy_stays_steered_and_a_later_vector_finds_no_old_page():
    engine, tokens, asked = served(), prompt(40), params(24, temperature=1.0)
    first = engine.add(tokens, asked, edits=steers(0), capture=CAPTURED)
    for _ in range(6):
        engine.step()
    copy = engine.copy(first)
    finish(engine)
    assert engine.result(copy).tokens == engine.result(first).tokens
    again, other = (
        engine.add(tokens, asked, edits=steers(0), capture=CAPTURED),
        engine.add(tokens, asked, edits=steers(3), capture=CAPTURED),
    )
    finish(engine)
    assert engine.result(again).cached_tokens > 0 and engine.result(other).cached_tokens == 0
    assert engine.result(again).tokens == engine.result(first).tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(capture=("layers.1.outputs",)), "nearest are layers.1.output"),
        (dict(capture=("logits",)), "ask for 'final_norm'"),
        (dict(capture=(3,)), "give names of values"),
        (
            dict(edits={"layers.1.output": Steer(add=np.ones(WIDTH))}),
            "can change layers.0.output, layers.1.attention_out",
        ),
        (dict(edits={"layers.0.output": Steer(add=np.ones(3))}), "has shape \\[3\\]: give 48 finite numbers"),
        (dict(edits={"layers.0.output": Steer(without=np.zeros(WIDTH))}), "it has no direction"),
        (dict(edits={"layers.0.output": Steer(scale=np.nan)}), "must be a finite number"),
        (dict(edits={"layers.0.output": lambda x: x}), "steered by Steer objects"),
        (dict(edits=[Steer()]), "give Steer objects by name"),
    ],
)
def test_what_cannot_be_captured_or_steered_is_refused(given, message, unchecked):
    with pytest.raises(ValueError, match=message):
        served().add(prompt(3), params(2), **given)


def test_engines_that_steer_nothing_and_names_that_cannot_be_steered(unchecked):
    with pytest.raises(ValueError, match="make the engine with edits="):
        served("draft").add(prompt(3), params(2), edits=steers(0))
    with pytest.raises(ValueError, match="one vector a token"):
        Engine(model(), **SHAPE, edits=("layers.1.q",))
    engine = served()
    handle = engine.add(prompt(3), params(2), edits=steers(0))
    with pytest.raises(ValueError, match="edits, which a snapshot cannot hold"):
        engine.export(handle)
    engine.abort(handle)
