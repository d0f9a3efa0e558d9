"""Calls of the model: what they refuse, and that a call outside `jax.jit` compiles once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from jaxtyping import Array, Float, Int
from support import tiny
from support.compilations import compilations

import m3jax
from m3jax import M3Config
from m3jax import model as m3_model
from m3jax.arrays import is_checking
from m3jax.cache import Cache
from m3jax.decoding import Engine, Params, Sampling
from m3jax.media import pack
from m3jax.model import Choices
from m3jax.model.calls import model_call

CONFIG = tiny.config(max_position_embeddings=64)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 40)), jnp.int32)


@pytest.fixture(scope="module")
def model():
    return tiny.model(CONFIG)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (TOKENS.at[1, 7].set(64), {}, r"tokens\[1, 7\] = 64: token ids are 0 to 63"),
        (jnp.zeros((1, 65), jnp.int32), {}, "tokens has 65 columns and the model's context is 64"),
        (TOKENS, dict(lengths=jnp.array([40])), r"lengths has shape \[1\] .* with B = 2, as tokens has"),
        (TOKENS[0], {}, r"tokens has shape \[40\] .*: must be signed integers \[B T\]"),
        (TOKENS * 1.0, {}, "tokens .* dtype float32: must be signed integers"),
        (TOKENS.tolist(), {}, "tokens is a list: must be an array"),
    ],
)
@pytest.mark.parametrize("method", ["__call__", "intermediates"])
def test_a_call_refuses(model, method, tokens, options, message, unchecked):
    """An id beyond the vocabulary would be clamped and -1 wrap around."""
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(tokens, **options)


@pytest.mark.parametrize(
    ("method", "args", "options", "message"),
    [
        ("__call__", (), dict(edits={"layers.9.q": jnp.negative}), "edits has 'layers.9.q', which the model has not"),
        ("hidden", (), dict(edits={"logits.q": jnp.negative}), "edits has 'logits.q', which the model has not"),
        ("intermediates", (), dict(names=("layers.9.q",)), "names has 'layers.9.q', which the model has not"),
        ("intermediates", (), dict(stop_at=9), "stop_at = 9: layers that run, 0 to 3"),
        ("run", (), dict(names=("layers.9.q",)), "names has 'layers.9.q', which the model has not"),
        *(("run", (), dict(residual_layers=layers),
           re.escape(f"residual_layers = {layers}: the model has 0 (the embedding) to 3"))
          for layers in ((-1,), (4,), (2, 2))),
    ],
)  # fmt: skip
def test_a_call_refuses_values_and_layers_that_it_has_not(model, method, args, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(TOKENS, *args, **options)


def test_a_traced_call_refuses_under_checks():
    model = tiny.model(tiny.config("d"))  # the least to compile: the ids are looked at before the layers
    call = jax.jit(lambda model, tokens: model(tokens))
    call(model, TOKENS + 64)  # nothing looks
    with pytest.raises(ValueError, match=r"tokens\[0, 0\] = \d+: token ids are 0 to 63"), m3jax.checks():
        call(model, TOKENS + 64)
    with m3jax.checks():
        call(model, TOKENS)


def test_padding_may_hold_anything(model):
    lengths = jnp.array([40, 11])
    padded = jnp.where(jnp.arange(40) < lengths[:, None], TOKENS, -5)
    np.testing.assert_array_equal(model(padded, lengths=lengths)[1, :11], model(TOKENS, lengths=lengths)[1, :11])


def test_values_of_a_step_come_with_its_cache(model, unchecked):
    """By shape alone; a cache whose later layers would lack the step's keys is refused."""
    cache, at = model.new_cache(20, 2, 10), dict(positions=jnp.full((2, 1), 7), lengths=jnp.array([8, 8]))
    names = ("layers.2.output", "final_norm")
    step = lambda model, cache: model.intermediates(TOKENS[:, :1], names=names, cache=cache, **at)
    values, new_cache = jax.eval_shape(step, model, cache)
    assert {name: x.shape for name, x in values.items()} == dict.fromkeys(names, (2, 1, model.config.hidden_size))
    assert jax.tree.map(jnp.shape, new_cache) == jax.tree.map(jnp.shape, cache)
    with pytest.raises(ValueError, match="stop_at with a cache: the layers behind it would lack these tokens"):
        model.intermediates(TOKENS[:, :1], stop_at=2, cache=cache, **at)


def test_names_of_what_is_recorded_are_written_out(model):
    """In the order in which they are asked for; logits are not recorded, and neither is what the model has not."""
    names = ("final_norm", "layers.*.blocks", "layers.0.q")
    assert model.recorded_names(names) == ("final_norm", "layers.1.blocks", "layers.2.blocks", "layers.0.q")
    for name in ("logits", "layers.0.blocks"):
        with pytest.raises(ValueError, match=name):
            model.recorded_names((name,))


def test_a_call_has_media_or_embeddings(model):
    with pytest.raises(ValueError, match="media or embeddings, not both"):
        model(TOKENS, media=pack((), 64), embeddings=jnp.zeros((*TOKENS.shape, CONFIG.hidden_size)))


def test_a_second_call_compiles_nothing(model):
    """Outside `jax.jit` each call used to compile its scans again."""
    other = TOKENS[::-1]
    model(TOKENS), model.intermediates(TOKENS)
    with compilations() as compiled:
        model(other), model.intermediates(other)
    assert not compiled


def test_one_layer(model):
    """`layer(i)` has the parameters that the i-th layer of the stacks has."""
    depths = [stack.depth for stack in model.stacks]
    for index, name in ((0, "0.0"), (1, "1.0"), (2, "1.1")):
        stack, place = (int(part) for part in name.split("."))
        one = model.layer(index)
        assert one.depth == 1
        jax.tree.map(lambda x, y, place=place: np.testing.assert_array_equal(x[0], y[place]), one, model.stacks[stack])
    with pytest.raises(ValueError, match=f"layer 3: the model has layers 0 to {sum(depths) - 1}"):
        model.layer(3)


def test_tabulate_breaks_nothing(model):
    """It used to leave the classes with replaced methods until the process ended."""
    with pytest.raises(NotImplementedError, match=r"see model\.summary\(\)"):
        nnx.tabulate(model, TOKENS)
    model(TOKENS)
    lines = model.summary().splitlines()
    assert len(lines) == len(jax.tree.leaves(model)) + 2
    assert f"{sum(x.size for x in jax.tree.leaves(model)):,}" in lines[-1]


@pytest.mark.further
def test_an_engine_passes_checks(model):
    """The engine's calls of the model pass `checks()`, rows of padding and ends of pages included."""
    params = Params(max_new_tokens=5, sampling=Sampling.greedy())
    with m3jax.checks():
        engine = Engine(model, pages=24, max_batch=2, prefill_chunk=16, steps_per_call=2)
        handles = [engine.add(prompt, params) for prompt in (TOKENS[0], TOKENS[1, :3], TOKENS[1, :17])]
        results = engine.run()
    assert [len(results[handle].tokens) for handle in handles] == [5, 5, 5]


def test_unknown_ways_to_compute_are_refused():
    """By name, with those that there are; the way back from the invariant mode is the model as it was."""
    model = m3_model.abstract(tiny.config("M"))
    for change, message in (
        (lambda: model.with_schedule("fastest"), "'fastest': allowed are 'auto'"),
        (lambda: model.with_schedule("dense"), r"attention to every block is another function; use with_dense\(\)"),
        (lambda: model.with_backend("cuda"), "backend = 'cuda': allowed are 'auto', 'xla', 'triton', 'mosaic_tpu'"),
        (lambda: model.with_score("mean"), "score = 'mean': allowed are 'max', 'lse'"),
        (lambda: model.with_activations("mxfp8"), "no weight is in MXFP8"),
    ):
        with pytest.raises(ValueError, match=message):
            change()
    assert model.with_invariance().compute != model.compute == model.with_invariance().with_invariance(False).compute
    assert model.with_dense().dense and not model.with_dense().with_dense(False).dense


class Looks(list):
    """A list that a program may be compiled for."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@struct.dataclass
class Called:
    """A model that computes nothing, and says of each of its programs whether values are looked into in it."""

    config: M3Config = struct.field(pytree_node=False)
    looks: Looks = struct.field(pytree_node=False, default_factory=Looks)
    dense: bool = struct.field(pytree_node=False, default=False)

    def run(self, tokens, **arguments):
        run, call = prepare(self, dict(tokens=tokens, **arguments))
        return run(self, **call)


def body(
    model: Called,
    tokens: Int[Array, "B T"],
    *,
    cache: Cache | None = None,
    positions: Int[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    embeddings: Float[Array, "B T D"] | None = None,
    choices: Choices | None = None,
    edits: dict | None = None,
    names: tuple[str, ...] = (),
    stop_at: int | None = None,
) -> tuple:
    model.looks.append((is_checking(), names, stop_at))
    return tokens, {name: edit(tokens) for name, edit in (edits or {}).items()}


prepare = model_call(body, "names", "stop_at")


def test_a_call_is_refused_by_its_numbers(unchecked):
    """Each limit used up passes, and one more is refused; what fills a row up may hold anything."""
    config = tiny.config("d", max_position_embeddings=16)
    tokens = np.zeros((2, 4), np.int32)

    def found(tokens=tokens, of=config, **arguments):
        try:
            Called(of).run(jnp.asarray(tokens), **arguments)
        except ValueError as error:
            return str(error)
        return ""

    rows = lambda *values: jnp.array(values, jnp.int32)
    assert not found() and not found(np.full((2, 16), 63)) and not found(lengths=rows(0, 4))
    assert "tokens has 17 columns and the model's context is 16 tokens" in found(np.zeros((1, 17), np.int32))
    assert "lengths[1] = 17: the model's context is 16 tokens" in found(lengths=rows(16, 17))
    assert "lengths[0] = -1" in found(lengths=rows(-1, 17))
    wrong = tokens.copy()
    wrong[1, 2] = 64
    assert "tokens[1, 2] = 64: token ids are 0 to 63" in found(wrong)
    assert "tokens[1, 2] = 64" in found(wrong, lengths=rows(4, 3)) and not found(wrong, lengths=rows(4, 2))
    assert not found(wrong, positions=rows([0, 1, 2, 3], [0, 1, -1, 2]), lengths=rows(4, 4))
    wrong[1, 2] = -1
    assert "tokens[1, 2] = -1" in found(wrong)
    of_one_page = Cache.init(config, 2, 8)
    at = dict(cache=of_one_page, positions=rows([4, 5, 6, 7], [0, 1, 2, 3]))
    assert not found(**at, lengths=rows(8, 4))
    assert "lengths[0] = 9: a row of this cache has room for 8 tokens" in found(**at, lengths=rows(9, 4))
    of_two_pages = at | {"cache": Cache.init(config, 2, 16)}
    assert "lengths[0] = 17: the model's context is 16 tokens" in found(**of_two_pages, lengths=rows(17, 4))
    for given in (dict(lengths=rows(4, 4)), dict(positions=at["positions"])):
        assert "a call with a cache needs positions [B T] and lengths [B]" in found(cache=of_one_page, **given)
    shapes = "choices.expert_ids has shape (2, 3, 1, 2), and this call of this model needs (2, 4, 1, 2)"
    assert shapes in found(of=tiny.config("M"), choices=Choices(expert_ids=np.zeros((2, 3, 1, 2), np.int32)))


def test_values_are_looked_into_where_a_selection_is_changed_and_nowhere_else():
    """A program takes edits as pytrees and names as a tuple; that of one call is that of the next."""
    tokens, looks = jnp.zeros((1, 2), jnp.int32), Looks()
    model = Called(tiny.config("M"), looks)
    for options, expected in (
        ({}, (False, (), None)), (dict(edits={"layers.0.q": jnp.negative}), (False, (), None)),
        (dict(edits={"layers.0.blocks": jnp.negative}), (True, (), None)),
        (dict(edits={"embedding": abs, "layers.*.expert_ids": jnp.negative}), (True, (), None)),
        (dict(names=["layers.0.q"], stop_at=1), (False, ("layers.0.q",), 1)), (dict(stop_at=1), (False, (), 1)),
    ):  # fmt: skip
        found = model.run(tokens, **options)
        model.run(tokens, **options)  # nothing is traced again
        assert looks.pop() == expected and not looks, options
        assert found[1].keys() == options.get("edits", {}).keys()
