"""The engine's own programs, as a plan has them compiled: with the shapes and the shardings that an engine has."""

import inspect
import io
import json
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from support import tiny

from m3jax.cache import Cache
from m3jax.decoding import device
from m3jax.decoding.device.compiler_options import OPTIONS
from m3jax.model import abstract
from m3jax.parallel import parse_mesh
from m3jax.planning import Job, parse_slice, program
from m3jax.planning.arithmetic import cache_shapes, new_cache

CONFIG = tiny.config("dM")
ROWS, CHUNK, CONTEXT = 6, 16, 100
SIZES = dict(data=2, context=1, expert=2, tensor=2)
pytestmark = pytest.mark.usefixtures("eight_devices")


def job(**changes) -> Job:
    values = dict(config=CONFIG, slice=parse_slice("v5e:2x4"), context=CONTEXT, batch=ROWS, chunk=CHUNK)
    return Job(**(values | changes))


def shapes(tree) -> list[tuple]:
    return [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(tree)]


def test_a_new_cache_is_the_engines():
    """Pages for every row's whole context: 6 rows of 13 blocks, in which float8 takes a byte a number."""
    mesh = parse_mesh("data=2,expert=2,tensor=2")
    leaves_of = lambda make: shapes(jax.eval_shape(lambda: jax.tree.leaves(make())))
    for types in ({}, dict(kv_dtype="float8_e4m3fn"), dict(index_dtype="float32")):
        planned = job(**types)
        made = leaves_of(lambda planned=planned: new_cache(planned, mesh))
        assert made == shapes(cache_shapes(planned, mesh))
        real = leaves_of(lambda types=types: Cache.init(CONFIG, ROWS, CONTEXT, "bfloat16", mesh, **types))
        assert made == real


class Traced:
    """One of the device's functions that keeps what it would be traced with."""

    def __init__(self, name: str):
        self.function = getattr(device, name).__wrapped__

    def trace(self, *args, **named) -> dict:
        return inspect.signature(self.function).bind(*args, **named).arguments


@pytest.mark.parametrize("name", device.PROGRAMS[:2])
def test_a_program_is_traced_with_an_engines_arguments(name, monkeypatch, unchecked):
    """A step of all rows, or a chunk of one; rows lie over the data axis, pages where the real cache has them."""
    asked = []
    monkeypatch.setattr(device, "program", lambda *which: asked.append(which) or Traced(which[0]))
    mesh = parse_mesh("data=2,expert=2,tensor=2")
    found = getattr(program, name)(job(), mesh)
    assert asked == [(name, "cpu", "narrow")]
    assert shapes(found["model"]) == shapes(abstract(CONFIG, "bfloat16", mesh))
    state = found["state"]
    assert shapes(state.cache) == shapes(cache_shapes(job(), mesh))
    assert found["layout"] == tuple(x.sharding for x in jax.tree.leaves(state))
    continuations = state.continuations
    each_row = (state.lengths, state.newest_token, state.stop_reasons, continuations.limits)
    assert [shape for shape, _ in shapes(each_row)] == [(ROWS,)] * 4
    uses = continuations.uses
    assert uses.shape == (ROWS, CONFIG.vocab_size) and uses.sharding.spec == PartitionSpec("data", None)
    assert {x.sharding.spec[0] for x in jax.tree.leaves(continuations)} == {"data"}
    if name == "decode":
        assert found["max_steps"] == 1 and [shape for shape, _ in shapes(found["steps"])] == [(ROWS,)]
    else:
        chunk = found["chunk"]
        arrays = (chunk.rows, chunk.tokens, chunk.start, chunk.lengths)
        assert [x.shape for x in arrays] == [(1,), (1, CHUNK), (1,), (1,)]
        assert len(jax.tree.leaves(chunk)) == len(arrays) + len(jax.tree.leaves(continuations))
        assert {x.shape[0] for x in jax.tree.leaves(chunk.continuations)} == {1}
        of_rows = [shape[1:] for shape, _ in shapes(continuations)]
        assert [shape[1:] for shape, _ in shapes(chunk.continuations)] == of_rows


def test_on_a_tpu_no_mode_has_options_of_its_own():
    """A plan takes those of one mode, since programs are compiled for TPUs alone."""
    for name in device.PROGRAMS:
        assert len({str(OPTIONS.get((name, "tpu", mode))) for mode in ("invariant", "narrow", "wide")}) == 1


def test_an_answer_has_the_compilers_own_numbers(monkeypatch):
    """Memory of arguments, of temporaries and of outputs that take none of an argument's, and no time is negative."""
    lowered = jax.jit(lambda x, y: (x + 1, x @ y), donate_argnums=0)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 32))]
    asked = []
    monkeypatch.setattr(program, "topology_mesh", lambda *which: asked.append(which) or parse_mesh("tensor=2"))
    monkeypatch.setattr(program, "decode", lambda *given: lowered.trace(*arrays))
    answer = program.compile_program(job(), SIZES, "decode")
    assert asked == [("v5e:2x4", SIZES)]
    assert min(answer["lower_seconds"], answer["compile_seconds"]) > 0
    assert answer["arguments"] == 4 * (8 * 16 + 16 * 32) and answer["flops"] == 2 * 8 * 16 * 32
    assert 4 * 8 * 32 <= answer["fresh_outputs"] < 4 * 8 * (32 + 16)  # and a tuple's pointers
    assert answer["collectives"] == {} and "error" not in answer


def test_a_compiling_process_answers_what_it_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(
        program, "compile_program", lambda *asked: {"name": asked[2], "equal": asked[:2] == (job(), SIZES)}
    )
    monkeypatch.setattr(
        program.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps((job(), SIZES, "decode"))))
    )
    program.main()
    assert json.loads(capsys.readouterr().out) == {"name": "decode", "equal": True}
