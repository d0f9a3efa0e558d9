"""Engines over the tiny model, of few shapes, and a model that notes which blocks each token chose."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from flax import struct
from jax.sharding import Sharding
from support import tiny

from m3jax.cache import Cache, PageAllocator
from m3jax.decoding import Engine, Generation, Params, Sampling, device
from m3jax.decoding.device import program
from m3jax.decoding.engine.runner import Runner
from m3jax.model import M3
from m3jax.parallel import sharding

CONFIG = tiny.config("dM")  # block 8, top-k 3: from 25 tokens on selection is partial
SIZE = CONFIG.index_block_size
# A chunk ends within a page; 20 pages hold one request of any length, but not four.
SHAPE = dict(pages=20, max_batch=4, prefill_rows=2, prefill_chunk=12, steps_per_call=4, max_length=128, max_stop_ids=4)


def engine(model, **changes) -> Engine:
    return Engine(model, **SHAPE | changes)


def params(new: int = 12, stop_ids: Sequence[int] = (), **knobs) -> Params:
    return Params(max_new_tokens=new, sampling=Sampling(**{"temperature": 0} | knobs), stop_ids=tuple(stop_ids))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng((seed, length)).integers(0, CONFIG.vocab_size, length).tolist())


def serve(engine: Engine, *work: tuple[Sequence[int], Params]) -> list[Generation]:
    """Add all, then step to the end."""
    handles = [engine.add(*item) for item in work]
    finish(engine)
    return [engine.result(handle) for handle in handles]


def finish(engine: Engine, used: int = 0) -> None:
    """Step to the end, which must come; pages are checked after every step, and none is lost."""
    for _ in range(1000):
        engine.step()
        engine.check()
        if not engine.busy:
            break
    assert not engine.busy
    assert engine.pages["used"] == used


def runner_of(engine: Engine) -> Runner:
    """Return an engine's device side, for tests of what no caller sees: memory, programs, whole arrays."""
    return engine._runner


def allocator_of(engine: Engine) -> PageAllocator:
    """Return the owner of an engine's pages, for tests of what is written into which."""
    return engine._pages


def places(engine: Engine) -> list[Sharding]:
    """Return the sharding of each array of the engine's state."""
    return [x.sharding for x in jax.tree.leaves(runner_of(engine).state)]


def assert_stays(engine: Engine, before: Sequence[Sharding]) -> None:
    """Fail if a step changes the sharding of the state: every step would then move it, or be compiled again."""
    for x, place in zip(jax.tree.leaves(runner_of(engine).state), before, strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)


def preemptions(engine: Engine) -> int:
    """Return how often requests have lost their row, in an engine whose requests have all ended."""
    return sum(generation.timings.preemptions for generation in engine.run().values())


def poison(engine: Engine, value: float = np.nan) -> None:
    """Overwrite every slot that holds no token of a request or of the prefix cache."""
    pages, runner = allocator_of(engine), runner_of(engine)
    stale = np.zeros((pages.num_pages, SIZE), bool)
    stale[sorted(pages.free)] = True
    for handle in pages.handles:
        table, length = pages.table(handle, pages.num_pages), len(pages.tokens(handle))
        slots = np.arange(pages.num_pages * SIZE).reshape(-1, SIZE)
        is_used = table >= 0
        stale[table[is_used]] |= (slots >= length)[is_used]
    cache = runner.state.cache
    poisoned = lambda x: None if x is None else _overwrite(x, stale.reshape(_beside(x)), value)
    stacks = tuple(s.replace(k=poisoned(s.k), v=poisoned(s.v), index_k=poisoned(s.index_k)) for s in cache.stacks)
    runner.state = replace(runner.state, cache=cache.replace(stacks=stacks))


def _beside(x) -> tuple[int, ...]:
    """The shape in which [X P] stands beside pages [L X K P H] or [L X P I]."""
    return (1, x.shape[1], 1, SIZE, 1) if x.ndim == 5 else (1, x.shape[1], SIZE, 1)


@jax.jit
def _overwrite(x, stale, value):
    return jnp.where(stale, value, x)


# Half the time to compile; the program is the same, but it may sum in another order.
QUICK = {"xla_backend_optimization_level": 0}
_QUICK_PROGRAMS = {
    name: jax.jit(
        getattr(device, name).__wrapped__, donate_argnames="state", static_argnames=statics, compiler_options=QUICK
    )
    for name, statics in (
        ("prefill", ("num_top", "records", "layout", "types")),
        ("decode", ("max_steps", "num_top", "records", "layout", "types")),
        ("decode_in_rounds", ("draft_tokens", "max_rounds", "num_top", "records", "layout", "types")),
    )
}


def _quick_program(name: str, *of_platform):
    return _QUICK_PROGRAMS.get(name) or program(name, *of_platform)


def no_steps(engine: Engine) -> np.ndarray:
    """Return the steps of each row in a call that does nothing."""
    return np.zeros(engine.shapes.batch, np.int32)


def temporary_bytes(program, engine: Engine, *args, **statics) -> tuple[int, int]:
    """(scratch memory of a compiled program, bytes of the cache), both of one device."""
    runner = runner_of(engine)
    lowered = tiny.lower(program, runner.model, runner.state, *args, **statics, layout=runner._layout)
    memory = lowered.compile().memory_analysis()
    cache = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(runner.state.cache))
    assert memory.alias_size_in_bytes >= cache  # donated, and given back
    return memory.temp_size_in_bytes, cache


@contextmanager
def quick() -> Iterator[None]:
    """Compile quickly: for engines whose shapes nothing else has, and where XLA's defaults are not asked for.

    Annotations are not checked meanwhile, which is a quarter of the time of an engine's programs: the tests of the
    model, of what an engine is made of, and of engines over a `FakeModel`, check them.
    """
    if os.environ.get("M3JAX_TEST_XLA") == "defaults":
        yield
        return
    was_off = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with mock.patch.multiple(device, program=_quick_program, **_QUICK_PROGRAMS):
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", was_off)


# The blocks that each token chose


@struct.dataclass
class WatchedCache(Cache):
    """Pages that also keep, for each token, what the sparse layers chose for it: [X P L K J]."""

    chosen: jax.Array = None

    def copy_pages(self, source, target):
        return super().copy_pages(source, target)._note(target, self.chosen[source])

    def read_pages(self, pages):
        return super().read_pages(pages), self.chosen[pages]

    def write_pages(self, pages, contents):
        return super().write_pages(pages, contents[0])._note(pages, contents[1])

    def _note(self, pages, chosen):
        page_ids = jnp.where(pages >= 0, pages, self.num_pages)
        return self.replace(chosen=self.chosen.at[page_ids].set(chosen, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watched:
    """A model whose cache is a `WatchedCache`."""

    model: M3

    @property
    def config(self):
        return self.model.config

    @property
    def mesh(self):
        return self.model.mesh

    def new_cache(self, *sizes, **types):
        cache = self.model.new_cache(*sizes, **types)
        layers = sum(stack.num_layers for stack in self.config.stacks if stack.is_sparse)
        heads, slots = self.config.num_key_value_heads, self.config.index_topk_blocks
        chosen = np.full((cache.num_pages, cache.page_size, layers, heads, slots), -2, np.int8)
        place = sharding(chosen.shape, (None,) * 5, self.mesh)
        return WatchedCache(cache.stacks, cache.table, chosen=jax.device_put(chosen, place))

    def hidden(self, tokens, *, cache, positions, lengths):
        probe = lambda values, _: values.get("blocks")
        call = dict(cache=cache, positions=positions, lengths=lengths)
        out = self.model.run(tokens, probe=probe, logits=False, **call)
        blocks = jnp.concatenate([blocks for blocks in out.probed if blocks is not None])  # [L B K T J]
        places = cache.places(positions, lengths)
        page = jnp.where(places.page >= 0, places.page, cache.num_pages)
        blocks = jnp.transpose(blocks, (1, 3, 0, 2, 4)).astype(jnp.int8)  # [B T L K J]
        chosen = cache.chosen.at[page, places.offset].set(blocks, mode="drop")
        return out.hidden, out.cache.replace(chosen=chosen)

    def unembed(self, hidden):
        return self.model.unembed(hidden)


def watch(engine: Engine) -> dict[tuple[int, ...], np.ndarray]:
    """Notes of every request that gives its pages back: its tokens in the cache -> what each chose [S L K J]."""
    notes, owner = {}, allocator_of(engine)
    release = owner.release

    def note(handle):
        tokens, pages = owner.tokens(handle), list(owner.pages_of(handle))
        chosen = np.asarray(runner_of(engine).state.cache.chosen)[pages]
        chosen = chosen.reshape(-1, *chosen.shape[2:])[: len(tokens)]
        np.testing.assert_array_equal(chosen, notes.setdefault(tokens, chosen))
        release(handle)

    owner.release = note
    return notes
