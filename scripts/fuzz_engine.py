"""Random lives of requests in engines, judged after every step.

    python scripts/fuzz_engine.py --seconds 60
    python scripts/fuzz_engine.py --lives 500      # as many, however long they take
    python scripts/fuzz_engine.py --only 17        # one life again, with its operations

A life is an engine of some kind, with a small pool, and operations on it, drawn from (seed, number). After each one

- `Engine.check` must pass, and pages must add up;
- what every request has so far must be the beginning of what it gets alone, in float32. With a draft requests are
  greedy: a sampled row draws anew where its rounds begin anew;
- rows, queue and pages must be those that the definition says (tests/support/service_definition.py).

Wrong calls and damaged snapshots must be a ValueError of one line that changes nothing.
"""

import argparse
import itertools
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax looks for devices: a kind of engine is on a mesh of four
    flags = os.environ.get("XLA_FLAGS", "")
    if "device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4"
    sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where the definitions are

import jax
import jax.numpy as jnp
import numpy as np
from support.pool_definition import Pool
from support.pool_definition import state_of as state_of_pool
from support.service_definition import Served, Service, state_of

from m3jax import M3Config
from m3jax.cache import OutOfPages
from m3jax.decoding import Engine, Generation, Media, Params, Sampling
from m3jax.decoding.engine import Snapshot
from m3jax.model import M3, init

ROOM = 48  # tokens of a request, at most
SHAPES = dict(max_batch=3, prefill_rows=2, prefill_chunk=(4, 12), steps_per_call=3, max_length=ROOM, max_stop_ids=3)
PAGES = 9  # one request can need six: two of them make each other wait
OPERATIONS = {
    "add": 6, "add group": 2, "step": 12, "prefill": 2, "take": 3, "abort": 1, "stop": 1, "forget": 2, "copy": 2,
    "truncate": 2, "update": 1, "move": 2, "move in bytes": 2, "damaged bytes": 2, "edited snapshot": 2,
    "failed write": 1, "wrong call": 2,
}  # fmt: skip


def main() -> int:
    """Fuzz, print a table of counts, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="how long, compiling not counted (default: 60)")
    parser.add_argument("--lives", type=int, metavar="N", help="how many, in place of --seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one life, and print its operations")
    args = parser.parse_args()
    if args.seconds is not None and args.lives is not None:
        parser.error("--seconds and --lives: give one of them")
    kinds = tuple(KINDS)
    if args.only is not None:
        life, failure = live(kinds, args.seed, args.only)
        print("\n".join(life.log))
        counts, failures = life.counts, [failure] if failure else []
    else:
        seconds = args.seconds if args.seconds is not None else 60.0
        counts, failures = fuzz(kinds, args.seed, args.lives, math.inf if args.lives is not None else seconds)
    for name, count in sorted(counts.items()):
        print(f"{count:8d}  {name}")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(failures)} failures")
    return 1 if failures else 0


def fuzz(
    kinds: tuple[str, ...], seed: int, lives: int | None, seconds: float = math.inf
) -> tuple[Counter[str], list[str]]:
    """Run lives 0, 1, and so on, until there were so many or the time is over; five failures end it.

    Args:
      kinds: of engines, to choose from.
      seed: of all lives.
      lives: how many; None for no limit. With `seconds` left out what is tested does not depend on the machine.
      seconds: after which no life is begun.

    Returns:
      How often each thing happened, and what failed.
    """
    for kind in kinds:
        KINDS[kind].build().warmup()
    counts, failures, end = Counter(), [], time.monotonic() + seconds
    for number in itertools.count() if lives is None else range(lives):
        if time.monotonic() > end or len(failures) > 4:
            break
        life, failure = live(kinds, seed, number)
        counts += life.counts
        failures += [failure] if failure else []
    return counts, failures


def live(kinds: tuple[str, ...], seed: int, number: int) -> tuple["Life", str | None]:
    """Run one life; return it with a report of what failed in it, or None."""
    draw = random.Random(f"{seed} {number}")
    life = Life(KINDS[draw.choice(kinds)])
    try:
        for _ in range(draw.randrange(10, 60)):
            life.act(draw.choices(list(OPERATIONS), list(OPERATIONS.values()))[0], draw)
        life.finish()
    except Exception:
        return life, f"life {number} failed after: {'; '.join(life.log[-6:])}\n{traceback.format_exc()}"
    return life, None


# Engines, and what a request gets alone


@dataclass(frozen=True, eq=False)
class Ask:
    """A prompt, and how it goes on. There are few, so that what each gets alone can be known."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    media: Media | None = None


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of engine and what it is asked for; engines of one kind share compiled programs.

    Attributes:
      build: makes one.
      asks: what requests are drawn from.
      weights: makes the weights of its model anew, as a trainer does.
      build_alone: makes an engine in which a request is alone, if that is of another kind.
      room: tokens of a request, at most.
      has_draft: whether proposals decide how many tokens a call gives.
      is_defined: whether the definition of service speaks of it: of prompts without pictures, and of calls that are
        read before the next one is launched.
    """

    build: Callable[[], Engine]
    asks: tuple[Ask, ...]
    weights: Callable[[], Any]
    build_alone: Callable[[], Engine] | None = None
    room: int = ROOM
    has_draft: bool = False
    is_defined: bool = True


@cache
def model(mesh: str | None = None) -> M3:
    """Return a model of two layers, one of them sparse, whose selection is partial from 13 tokens on."""
    layers = ("full_attention", "minimax_m3_sparse")
    config = M3Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, dense_intermediate_size=48, shared_intermediate_size=24, num_local_experts=4,
        num_experts_per_tok=2, rotary_dim=4, layer_types=layers, mlp_layer_types=("dense", "sparse"), index_n_heads=2,
        index_head_dim=8, index_block_size=8, index_topk_blocks=2, max_position_embeddings=64,
    )  # fmt: skip
    return init(config, 3, "float32", mesh)


def text_ask(number: int) -> Ask:
    """One of the prompts, which often begin alike, with settings of its own."""
    rng = np.random.default_rng(number)
    prompt = (*range(5, 5 + number % 4 * 8), *rng.integers(0, 40, 1 + number % 11).tolist())[:40]
    knobs = (dict(temperature=0), dict(temperature=1.2, top_k=6),
             dict(temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={7: 1.5}),
             dict(temperature=0.8, top_p=0.9, min_p=0.02))[number % 4]  # fmt: skip
    return Ask(prompt, Sampling(seed=number, **knobs), tuple(rng.integers(0, 40, number % 3).tolist()))


_ASKS = tuple(map(text_ask, range(24)))


def kind_of(asks: tuple[Ask, ...] = _ASKS, mesh: str | None = None, **options: Any) -> Kind:
    """Return a kind of engine for the model above, with some of its arguments; alone a request is on one device."""
    of_kind = dict(has_draft="draft" in options, is_defined="dispatch_ahead" not in options)
    build = lambda: Engine(model(mesh), pages=PAGES, **SHAPES, **options)
    build_alone = lambda: Engine(model(), pages=PAGES, **SHAPES)
    return Kind(build, asks, lambda: jax.tree.map(jnp.copy, model(mesh)), build_alone, **of_kind)


KINDS = {
    "plain": kind_of(),
    "no prefix cache": kind_of(prefix_cache=False),
    "ngram": kind_of(_ASKS[::2], draft="ngram", draft_tokens=2),
    "host memory": kind_of(device_pages=16),
    "dispatched ahead": kind_of(dispatch_ahead=True),
    "ngram dispatched ahead": kind_of(_ASKS[::2], draft="ngram", draft_tokens=2, dispatch_ahead=True),
    "mesh": kind_of(mesh="context=2,tensor=2"),  # pages and heads are divided; needs four devices
}


@cache
def whole(kind: Kind, ask: Ask, seed: int) -> Generation:
    """Return all that a request can get in an engine of its own; with a limit it gets the beginning of it."""
    served = (kind.build_alone or kind.build)()
    params = Params(max_new_tokens=kind.room - len(ask.prompt), sampling=replace(ask.sampling, seed=seed))
    handle = served.add(ask.prompt, params, ask.media)
    return served.run()[handle]


def alone(kind: Kind, ask: Ask, params: Params) -> Generation:
    """Return the continuation of a request that has an engine to itself, up to its first stop id or its limit."""
    full = whole(kind, ask, params.sampling.seed)
    tokens = full.tokens[: params.max_new_tokens]
    end = next((i + 1 for i, token in enumerate(tokens) if token in params.stop_ids), len(tokens))
    return full.cut(end, "stop_id" if tokens[end - 1] in params.stop_ids else "length")


class Anything:
    """A guide that allows every token: its request gets one in each call."""

    def bits(self, new: Any) -> None:
        """Return no mask."""
        return None


# A life


@dataclass
class Life:
    """An engine, its requests, and what is expected of them.

    Attributes:
      kind: of the engine.
      draw: where the choices of an operation come from.
      log: the operations so far.
      counts: how often each thing happened.
      asked: of each request that was not forgotten what was asked, by its handle.
      guided: the requests that have a guide.
      taken: what `take` gave of each request.
      told: the tokens of each request, put together from the events that `step` gave.
      ended: the requests whose last event has come.
      served: the engine.
      service: what the definition says of it; None for a kind that it does not define.
    """

    kind: Kind
    draw: random.Random = field(default_factory=random.Random)
    log: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    asked: dict[int, tuple[Ask, Params]] = field(default_factory=dict)
    guided: set[int] = field(default_factory=set)
    taken: dict[int, list[int]] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.served = served = self.kind.build()
        pages = served._pages
        pool = Pool(pages.num_pages, pages.page_size, pages.shares, pages.stripes)
        self.service = Service(pool, served.shapes, self.next_tokens) if self.kind.is_defined else None
        self.counts["lives"] += 1

    def act(self, name: str, draw: random.Random) -> None:
        """Do an operation, and judge the engine."""
        self.draw = draw
        self.log.append(name)
        self.counts[f"operation {name}"] += 1
        if name not in ("step", "prefill", "add", "add group", "take"):
            self.served._scheduler.settle()  # so that a request that seems to go on has not ended in a call in flight
        _ACTS[name](self, self.served)
        self.judge()

    def note(self, handle: int, ask: Ask, params: Params, **of_request: Any) -> Served:
        """Note what was asked for; return it as the definition takes it."""
        self.asked[handle] = ask, params
        if self.served._requests[handle].guide is not None:
            self.guided.add(handle)
        return Served(handle, ask.prompt, params.max_new_tokens, params.stop_ids, **of_request)

    def next_tokens(self, request: Served, most: int) -> list[int]:
        """Return the next tokens of a request, at most so many: those that it gets alone."""
        ask, params = self.asked[request.handle]
        if self.kind.has_draft:  # how many proposals are accepted is the draft's affair
            most = min(most, len(self.served.result(request.handle).tokens) - len(request.new))
        elif request.handle in self.guided:
            most = 1
        tokens = whole(self.kind, ask, params.sampling.seed).tokens
        return tokens[len(request.new) : len(request.new) + most]

    def step(self) -> None:
        """Run a round of the engine, and read its events."""
        now = time.perf_counter()
        for event in self.served.step():
            assert event.handle not in self.ended, f"request {event.handle} has an event after its last"
            told = self.told.setdefault(event.handle, [])
            assert event.start <= len(told), f"request {event.handle}: an event begins at {event.start} of {len(told)}"
            told[event.start :] = event.tokens
            if event.generation is not None:
                self.ended.add(event.handle)
                assert told == event.generation.tokens, f"request {event.handle}: its events say {told}"
        if self.service is not None:
            self.service.step(now)

    def judge(self) -> None:
        """Check everything that must hold after each operation."""
        served = self.served
        if self.kind.is_defined or self.draw.random() < 0.2:  # a check reads the call that is in flight
            served.check()
        pages = served.pages
        total = served._pages.num_pages
        assert pages["free"] + pages["cached"] + pages["used"] == total, f"{pages} of {total} pages"
        for handle, (ask, params) in self.asked.items():
            found, expected = served.result(handle), alone(self.kind, ask, params)
            count = len(found.tokens)
            assert found.tokens == expected.tokens[:count], f"request {handle}: {found.tokens}, alone {expected.tokens}"
            np.testing.assert_allclose(found.logprobs, expected.logprobs[:count], rtol=0, atol=1e-4)
            if found.stop_reason in ("length", "stop_id"):
                ended = expected.tokens, expected.stop_reason
                assert (found.tokens, found.stop_reason) == ended, f"request {handle}: {found}"
            assert found.stop_reason in ("unfinished", "length", "stop_id", "stop_string", "aborted", "deadline")
            assert len(found.versions) == count and found.versions == sorted(found.versions), found.versions
            assert found.cached_tokens <= found.prompt_tokens, f"request {handle} found {found.cached_tokens} tokens"
        if self.service is not None:
            self.judge_service()

    def judge_service(self) -> None:
        """Check that rows, queue and pages are what the definition says."""
        pairs = [
            (state_of(self.served._scheduler), state_of(self.service)),
            (state_of_pool(self.served._pages), self.service.pool.state()),
            (
                {handle: self.served.reason(handle) for handle in self.asked},
                {handle: self.service.requests[handle].end or "unfinished" for handle in self.asked},
            ),
        ]
        for found, defined in pairs:
            for name in found:
                assert found[name] == defined[name], f"{name}: {found[name]}, as defined {defined[name]}"

    def finish(self) -> None:
        """Serve every request to its end, and look at what is left."""
        self.log.append("finish")
        served = self.served
        for _ in range(500):
            self.step()
            self.judge()
            if not served.busy:
                break
        assert not served.busy, "500 steps did not end every request"
        if not self.kind.is_defined:
            self.step()  # tells of what ended in a call that a check has read
        assert served.pages["used"] == 0, f"{served.pages['used']} pages are used by nobody"
        assert not served._requests, f"{len(served._requests)} requests have ended and are still there"
        assert self.ended >= self.asked.keys(), "a request has no last event"
        for handle in self.asked:
            result = served.result(handle)
            self.counts[f"ended by {result.stop_reason}"] += 1
            self.counts["tokens compared"] += len(result.tokens)
            rest = served.take(handle)
            taken = self.taken.get(handle, [])[: len(result.tokens)] + rest
            assert taken == result.tokens, "what take gave is not the tokens"
            self.counts["preemptions"] += result.timings.preemptions
        self.counts["evictions"] += served.pages["evictions"]


def request(life: Life) -> tuple[Ask, Params]:
    """Draw a request."""
    ask = life.draw.choice(life.kind.asks)
    room = life.kind.room - len(ask.prompt)
    limit = min(life.draw.choice((1, 4, 9, room)), room)
    return ask, Params(max_new_tokens=limit, sampling=ask.sampling, stop_ids=ask.stop_ids)


# Operations


def any_handle(life: Life, served: Engine, running: bool) -> int | None:
    """Draw a request's handle, of those that go on or of all; None if there is none."""
    handles = [h for h in life.asked if not running or served.reason(h) == "unfinished"]
    return life.draw.choice(handles) if handles else None


def refused(life: Life, served: Engine, call: Callable[[], Any]) -> None:
    """Make a call that must raise ValueError, of one line, and change nothing."""
    before = (served.pages, len(served._requests), [request.tokens for request in served._requests.values()])
    try:
        call()
    except ValueError as error:
        assert str(error).isprintable() and len(str(error)) < 2000, f"an error of {len(str(error))} characters"
    else:
        raise AssertionError("a wrong call was taken")
    life.counts["refused"] += 1
    after = (served.pages, len(served._requests), [request.tokens for request in served._requests.values()])
    assert after == before, "a call that was refused changed something"


def add(life: Life, served: Engine) -> None:
    """Add a request, or a group of one prompt, which have a seed each."""
    ask, params = request(life)
    is_group = life.log[-1] == "add group"
    # Deadlines that have passed in the next round, or never will.
    order = life.draw.choice(({}, {}, dict(priority=life.draw.randrange(-1, 2)), dict(deadline=1e-9),
                              dict(deadline=float(life.draw.randrange(1000, 4000)))))  # fmt: skip
    guide = Anything() if life.draw.randrange(6) == 5 else None
    n = life.draw.randrange(1, 5) if is_group else None
    added = served.add(ask.prompt, params, ask.media, guide, n=n, **order)
    handles = added if is_group else [added]
    for index, handle in enumerate(handles):
        of_member = replace(params, sampling=replace(params.sampling, seed=params.sampling.seed + index))
        deadline = served._requests[handle].deadline
        known = life.note(
            handle, ask, of_member, priority=order.get("priority", 0), group=handles[0] if is_group else None,
            deadline=math.inf if deadline is None else deadline,
        )  # fmt: skip
        if life.service is not None:
            life.service.add(known)


def update(life: Life, served: Engine) -> None:
    """New weights of the same numbers: every token stays what it is, and is computed with the new ones."""
    live = life.draw.choice(("finish", "restart", "keep"))
    life.log[-1] += f" {live}"
    if live == "finish" and life.service is not None:
        while served.busy:  # what `update` would do, round by round
            life.step()
    if live == "restart":
        for handle in life.asked:
            if served.reason(handle) == "unfinished":
                life.taken.pop(handle, None)
    version = served.update(life.kind.weights(), live)
    assert version == served.update(life.kind.weights(), "keep") - 1
    assert served.pages["cached"] == served.pages["used"] == 0, "pages of the old weights are still there"
    if life.service is not None:
        life.service.update(restarts=live == "restart")


def step(life: Life, served: Engine) -> None:
    """Run a round of the engine: `Engine.step`."""
    life.step()


def prefill(life: Life, served: Engine) -> None:
    """Run the half of a round that reads prompts: `Engine.prefill`."""
    now = time.perf_counter()
    served.prefill()
    if life.service is not None:
        life.service.prefill(now)


def take(life: Life, served: Engine) -> None:
    """Take the new tokens of a request."""
    if (handle := any_handle(life, served, running=False)) is not None:
        life.taken.setdefault(handle, []).extend(served.take(handle))


def abort(life: Life, served: Engine) -> None:
    """Abort a request; if it has ended already, the engine must refuse that."""
    if (handle := any_handle(life, served, running=False)) is None:
        return
    if served.reason(handle) != "unfinished":
        refused(life, served, lambda: served.abort(handle))
        return
    served.abort(handle)
    if life.service is not None:
        life.service.stop(handle, "aborted")


def stop(life: Life, served: Engine) -> None:
    """A request is ended at one of its tokens."""
    if (handle := any_handle(life, served, running=True)) is not None:
        keep = life.draw.randrange(len(served.result(handle).tokens) + 1)
        served.stop(handle, keep)
        life.taken[handle] = life.taken.get(handle, [])[:keep]
        if life.service is not None:
            life.service.stop(handle, "stop_string", keep)


def forget(life: Life, served: Engine) -> None:
    """Forget a request that has ended; if it goes on, the engine must refuse that."""
    if (handle := any_handle(life, served, running=False)) is None:
        return
    if served.reason(handle) == "unfinished":
        refused(life, served, lambda: served.forget(handle))
    else:
        served.forget(handle)
        life.taken.pop(handle, None)
        del life.asked[handle]


def copy(life: Life, served: Engine) -> None:
    """A request is forked, sometimes with another limit; both go on."""
    if (handle := any_handle(life, served, running=True)) is None:
        return
    ask, params = life.asked[handle]
    if life.draw.random() < 0.5:
        fewest = len(served.result(handle).tokens) + 1
        params = replace(params, max_new_tokens=life.draw.randint(fewest, life.kind.room - len(ask.prompt)))
    copied = served.copy(handle, params)
    source = served._requests[handle]
    deadline = math.inf if source.deadline is None else source.deadline
    known = life.note(copied, ask, params, priority=source.priority, deadline=deadline)
    if life.service is not None:
        life.service.copy(handle, known)


def truncate(life: Life, served: Engine) -> None:
    """A request is taken back, and goes on from there."""
    if (handle := any_handle(life, served, running=True)) is not None:
        keep = life.draw.randrange(len(served.result(handle).tokens) + 1)
        served.truncate(handle, keep)
        life.taken[handle] = life.taken.get(handle, [])[:keep]
        if life.service is not None:
            life.service.truncate(handle, keep)


def exported(life: Life, served: Engine) -> tuple[int, Snapshot] | None:
    """Draw a request that goes on, with a snapshot of it; None if there is none. One with a guide must be refused."""
    if (handle := any_handle(life, served, running=True)) is None:
        return None
    if handle in life.guided:
        refused(life, served, lambda: served.export(handle))
        return None
    return handle, served.export(handle)


def bring(life: Life, served: Engine, handle: int, snapshot: Snapshot) -> None:
    """Import a snapshot of a request for which there may be no room."""
    tokens = (*snapshot.prompt, *snapshot.new)[: snapshot.cached]
    try:
        imported = served.import_request(snapshot)
    except OutOfPages:
        life.counts["no room for an import"] += 1
        imported = None
    try:
        pages = None if life.service is None else life.service.receive(tokens)
    except OutOfPages:
        assert imported is None, "an import found room where there is none"
        return
    if imported is None:
        assert life.service is None, "an import found no room where there is some"
        return
    life.counts["imported"] += 1
    known = life.note(imported, *life.asked[handle])
    if life.service is not None:
        known.new, known.page_handle, known.cached = list(snapshot.new), pages, len(tokens)
        life.service.add(known)


def move(life: Life, served: Engine) -> None:
    """A request goes on twice: where it was, and from a snapshot."""
    if (found := exported(life, served)) is not None:
        bring(life, served, *found)


def move_in_bytes(life: Life, served: Engine) -> None:
    """The same by way of bytes."""
    if (found := exported(life, served)) is not None:
        handle, snapshot = found
        bring(life, served, handle, Snapshot.from_bytes(snapshot.to_bytes()))


def damaged_bytes(life: Life, served: Engine) -> None:
    """Import bytes that were cut, changed or doubled, which must be refused."""
    if (found := exported(life, served)) is None:
        return
    draw, data = life.draw, found[1].to_bytes()
    place = draw.randrange(len(data)) if draw.random() < 0.5 else draw.randrange(min(2000, len(data)))
    changed = bytes([data[place] ^ (1 << draw.randrange(8))])
    damaged = draw.choice(
        (data[:place], data[place:] + data[:place], data + data[place:], data[:place] + changed + data[place + 1 :])
    )
    if damaged != data:
        refused(life, served, lambda: served.import_request(Snapshot.from_bytes(damaged)))


def edited_snapshot(life: Life, served: Engine) -> None:
    """A record that is not whole, or asks for what cannot be, is refused."""
    if (found := exported(life, served)) is None:
        return
    sent, room = found[1], life.kind.room
    count, vocab = len(sent.prompt) + len(sent.new), served.config.vocab_size
    edits = [
        dict(cached=count), dict(cached=-1), dict(cached=None), dict(pages=[*sent.pages, None]), dict(pages=None),
        dict(prompt=(*sent.prompt, vocab)), dict(new=(*sent.new, "1")), dict(logprobs=(*sent.logprobs, 0.0)),
        dict(params=None), dict(params=replace(sent.params, max_new_tokens=room)), dict(identity={}),
        dict(params=replace(sent.params, max_new_tokens=len(sent.new))),
    ]  # fmt: skip
    if sent.pages:
        edits += [dict(pages=sent.pages[:-1]), dict(cached=0)]
        for change in (lambda x: None, lambda x: x[:, :-1], lambda x: x.astype(np.int8), lambda x: x[..., None]):
            edits.append(dict(pages=[*sent.pages[:-1], with_last(sent.pages[-1], change)]))
    edit = life.draw.choice(edits)
    life.log[-1] += f" {list(edit)}"
    refused(life, served, lambda: served.import_request(replace(sent, **edit)))


def with_last(group: Any, change: Callable[[np.ndarray], Any]) -> Any:
    """Return a group of pages with its last array changed."""
    arrays, structure = jax.tree.flatten(group)
    return jax.tree.unflatten(structure, [*arrays[:-1], change(arrays[-1])])


def failed_write(life: Life, served: Engine) -> None:
    """The device fails while it writes what was imported: the pages go back, and nobody finds them."""
    if (found := exported(life, served)) is None or not found[1].cached:
        return
    runner, snapshot = served._runner, found[1]
    used, count = served.pages["used"], len(served._requests)

    def fail(page_ids, contents, tokens):
        raise MemoryError("the device is full")

    runner.write_pages = fail
    try:
        served.import_request(snapshot)
    except (MemoryError, OutOfPages):
        life.counts["failed writes"] += 1
        assert (served.pages["used"], len(served._requests)) == (used, count), "a failed write kept pages"
    else:
        raise AssertionError("an import whose pages were not written was taken")
    finally:
        del runner.write_pages
    if life.service is not None:
        with suppress(OutOfPages):
            life.service.receive((*snapshot.prompt, *snapshot.new)[: snapshot.cached], fails=True)


def wrong_call(life: Life, served: Engine) -> None:
    """Make a call with wrong arguments, which the engine must refuse."""
    ask, params = request(life)
    prompt, weights, vocab = ask.prompt, life.kind.weights(), served.config.vocab_size
    calls = (
        lambda: served.add((), params), lambda: served.add((*prompt, vocab), params, ask.media),
        lambda: served.add("text", params), lambda: served.add(prompt, None, ask.media),
        lambda: served.add(prompt, replace(params, max_new_tokens=life.kind.room), ask.media),
        lambda: served.add(prompt, replace(params, stop_ids=(1, 2, 3, 4)), ask.media), lambda: served.abort(10**6),
        lambda: served.take(-1), lambda: served.copy(10**6), lambda: served.import_request(None),
        lambda: served.add(prompt, params, ask.media, n=0), lambda: served.add(prompt, params, priority="high"),
        lambda: served.add(prompt, params, ask.media, deadline=-1.0), lambda: served.update(None),
        lambda: served.update(weights, live="later"), lambda: served.update(model().with_score("lse")),
        lambda: served.update(jax.tree.map(lambda x: x[..., :1], weights)),
    )  # fmt: skip
    refused(life, served, life.draw.choice(calls))


_ACTS: dict[str, Callable[[Life, Engine], None]] = {
    "add": add, "add group": add, "update": update, "step": step,
    "prefill": prefill, "take": take, "abort": abort, "stop": stop, "forget": forget,
    "copy": copy, "truncate": truncate, "move": move, "move in bytes": move_in_bytes, "damaged bytes": damaged_bytes,
    "edited snapshot": edited_snapshot, "failed write": failed_write, "wrong call": wrong_call,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
