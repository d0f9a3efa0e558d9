"""Random lives of requests, of text and of pictures, held to the definition of service and to what each gets alone.

There is one generator of lives, scripts/fuzz_engine.py. Here Hypothesis draws its operations, so that a life that fails
is shrunk, and some lives of real models run by number.
"""

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.engines import params, prompt, quick, serve
from support.fake_seer import IMAGE, VIDEO, FakeSeer, seeing_config
from support.media import noise_patches

from m3jax.cache import PageAllocator
from m3jax.cache.prefix import PrefixIndex
from m3jax.decoding import Engine, Media, Sampling
from m3jax.decoding.engine.request import Request
from m3jax.decoding.engine.runner import Runner


def load_fuzzer() -> ModuleType:
    """Return scripts/fuzz_engine.py as a module; it is no part of a package."""
    path = Path(__file__).parents[2] / "scripts" / "fuzz_engine.py"
    spec = importlib.util.spec_from_file_location("fuzz_engine", path)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    del sys.modules[spec.name]
    return script


fuzz_engine = load_fuzzer()


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


# Prompts with pictures, for a model whose tower is one line

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
ASKS = [
    fuzz_engine.Ask(BASE[:n] + text(more, seed=n), Sampling(**{"temperature": 0} | knobs))
    for n, more, knobs in (
        (1, 0, {}), (4, 0, dict(temperature=1.0, seed=1)), (9, 3, {}), (12, 2, dict(temperature=2.0, seed=2)),
        (12, 2, dict(temperature=2.0, seed=3)), (16, 0, {}), (20, 0, dict(repetition_penalty=2.0)), (0, 7, {}),
    )
] + [
    fuzz_engine.Ask(
        seen(number, *names), Sampling(temperature=2.0, seed=number), (), Media([PICTURES[name] for name in names])
    )
    for number, names in enumerate(("A", "B", "AB", "BA", "AA", "CAC"))
] + [
    fuzz_engine.Ask(BASE[:2] + (VIDEO,) * 4 + BASE[:1] + (VIDEO,) * 2 + more, Sampling(temperature=0), (), media)
    for more, media in (
        (BASE[4:6], Media(videos=[CLIP])), ((IMAGE,) * 4, Media([PICTURES["A"]], [CLIP]))
    )
]  # fmt: skip


@cache
def fake() -> FakeSeer:
    return FakeSeer.random(SMALL)


def small_engine(share: bool = True, pages: int = 14, room: int | None = ROOM) -> Engine:
    shape = dict(pages=pages, max_batch=4, prefill_rows=2, prefill_chunk=(2, 5), steps_per_call=3, max_length=room)
    # Room for five pictures of four features, where there are six.
    sight = dict(media_patches=(8, 16), media_tokens=21)
    return Engine(fake(), **shape, **sight, max_stop_ids=2, prefix_cache=share)


def seeing(share: bool) -> object:
    weights = lambda: jax.tree.map(jnp.copy, fake())
    return fuzz_engine.Kind(
        lambda: small_engine(share), tuple(ASKS), weights, lambda: small_engine(), ROOM, is_defined=False
    )


# Lives

KINDS = {name: fuzz_engine.KINDS[name] for name in ("plain", "no prefix cache")}
KINDS |= {"pictures": seeing(True), "pictures, no prefix cache": seeing(False)}
NAMES = [name for name, weight in fuzz_engine.OPERATIONS.items() for _ in range(weight)]


def test_lives_by_number_meet_everything(unchecked):
    """What scripts/fuzz_engine.py runs: each operation, and each thing that can happen to a request, occurs."""
    counts, failures = fuzz_engine.fuzz(("plain", "no prefix cache"), seed=0, lives=5)
    assert not failures, "\n".join(failures)
    assert {f"operation {name}" for name in fuzz_engine.OPERATIONS} <= counts.keys()
    for name in ("imported", "refused", "failed writes", "preemptions", "evictions", "ended by length"):
        assert counts[name] > 0, name


def unwritten_import(monkeypatch):
    monkeypatch.setattr(Runner, "write_pages", lambda *args: None)


def kept_page(monkeypatch):
    monkeypatch.setattr(PageAllocator, "_drop", lambda self, page: None)


def kept_pages_of_a_failed_import(monkeypatch):
    monkeypatch.setattr(PageAllocator, "release", lambda self, handle: None)


def youngest_first(monkeypatch):
    monkeypatch.setattr(Request, "order", property(lambda self: (-self.priority, -self.handle)))


def newest_evicted(monkeypatch):
    evict = PrefixIndex.evict

    def evict_newest(self):
        page = next(page for page in reversed(self.unused) if not self.nodes[page].children)
        self.unused.move_to_end(page, last=False)
        return evict(self)

    monkeypatch.setattr(PrefixIndex, "evict", evict_newest)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (kept_page, "users and has"),
        (kept_pages_of_a_failed_import, "the pool has pages of"),
        *(
            pytest.param(*bug, marks=pytest.mark.further)
            for bug in (
                (unwritten_import, "were written into it"),
                (youngest_first, "as defined"),
                (newest_evicted, "as defined"),
            )
        ),
    ],
)
def test_a_planted_bug_is_a_failure(plant, message, unchecked, monkeypatch):
    plant(monkeypatch)
    _, failures = fuzz_engine.fuzz(("plain",), seed=0, lives=12)
    assert failures and all(message in failure for failure in failures), failures


# The whole pool


@pytest.mark.further
def test_a_request_may_fill_the_pool():
    """Its prompt and all but the last of its new tokens lie in all eight pages; alone, twice, and beside another."""
    served = small_engine(pages=8)
    asked = [(ASKS[number].prompt, params(ROOM - len(ASKS[number].prompt))) for number in (5, 7)]
    whole = [fuzz_engine.whole(KINDS["pictures"], ASKS[number], 0).tokens for number in (5, 7)]
    for _ in range(2):
        assert serve(served, asked[0])[0].tokens == whole[0]
    both = serve(served, *asked)
    assert [(found.tokens, found.stop_reason) for found in both] == [(tokens, "length") for tokens in whole]


def test_longer_than_the_pool():
    """A request is refused if it is longer than all pages hold, even if the model could take it."""
    served = small_engine(pages=6, room=None)
    assert served.max_length == 24
    with pytest.raises(ValueError, match="needs room for 25 tokens and a request of this engine can have 24"):
        served.add(BASE, params(5))


# Lives that Hypothesis draws


class Lives(RuleBasedStateMachine):
    """Whatever is added, aborted, copied, taken back, moved, preempted: each is served in order, and as if alone.

    It stands last: red, it shrinks for minutes.
    """

    @initialize(kind=st.sampled_from(list(KINDS)))
    def begin(self, kind):
        self.life = fuzz_engine.Life(KINDS[kind])

    @rule(name=st.sampled_from(NAMES), draw=st.randoms(use_true_random=False))
    def act(self, name, draw):
        self.life.act(name, draw)

    def teardown(self):
        if hasattr(self, "life"):
            self.life.finish()


@pytest.mark.further
@pytest.mark.usefixtures("unchecked")
class TestLives(Lives.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40)
