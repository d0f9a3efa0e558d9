"""Random lives of requests in engines: after every step nothing is lost, and every request gets what it gets alone.

    python scripts/fuzz_engine.py --seconds 60
    python scripts/fuzz_engine.py --only 17        # one life again, with its operations

A life is drawn from (seed, number): an engine of a random kind and pool, and operations on it. After each one
`Engine.check` must pass, pages must add up, and what every request has so far must be the beginning of what it gets
alone, in float32. With a draft requests are greedy: a sampled row draws anew where its rounds begin anew. Wrong calls
and damaged snapshots must be a ValueError of one line that changes nothing.
"""

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m3jax import M3Config
from m3jax.cache import OutOfPages
from m3jax.decoding import Engine, Generation, Params, Sampling
from m3jax.decoding.engine import Snapshot
from m3jax.model import M3, init

ROOM = 48  # tokens of a request, at most
SHAPES = dict(max_batch=3, prefill_rows=2, prefill_chunk=(4, 12), steps_per_call=3, max_length=ROOM, max_stop_ids=3)
PAGES = 9  # one request can need six: two of them make each other wait
KINDS = {  # arguments of an engine
    "plain": {},
    "no prefix cache": dict(prefix_cache=False),
    "ngram": dict(draft="ngram", draft_tokens=2),
    "host memory": dict(device_pages=16),
}
OPERATIONS = {
    "add": 6, "add group": 2, "step": 12, "prefill": 2, "take": 3, "abort": 1, "stop": 1, "forget": 2, "copy": 2,
    "truncate": 2, "update": 1, "move": 2, "move in bytes": 2, "damaged bytes": 2, "edited snapshot": 2,
    "failed write": 1, "wrong call": 2,
}  # fmt: skip


def main() -> int:
    """Fuzz, print a table of counts, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long, compiling not counted (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one life, and print its operations")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of engines, from {', '.join(KINDS)}")
    args = parser.parse_args()
    kinds = tuple(name.strip() for name in args.kinds.split(","))
    if unknown := [name for name in kinds if name not in KINDS]:
        parser.error(f"--kinds {', '.join(unknown)}: choose from {', '.join(KINDS)}")
    if args.only is not None:
        life = Life(random.Random(f"{args.seed} {args.only}"), kinds)
        failure = run(life, args.only)
        print("\n".join(life.log))
        counts, failures = life.counts, [failure] if failure else []
    else:
        counts, failures = fuzz(kinds, args.seed, args.seconds)
    for name, count in sorted(counts.items()):
        print(f"{count:8d}  {name}")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(failures)} failures")
    return 1 if failures else 0


def fuzz(kinds: tuple[str, ...], seed: int, seconds: float, most: int = 10**9) -> tuple[Counter[str], list[str]]:
    """Run lives 0, 1, and so on until the time is over.

    Returns:
      How often each thing happened, and what failed.
    """
    for kind in kinds:
        build(kind).warmup()
    counts, failures, end = Counter(), [], time.monotonic() + seconds
    for number in range(most):
        if time.monotonic() > end or len(failures) > 4:
            break
        life = Life(random.Random(f"{seed} {number}"), kinds)
        failure = run(life, number)
        counts += life.counts
        failures += [failure] if failure else []
    return counts, failures


@dataclass
class Life:
    """An engine, its requests, and what is expected of them.

    Attributes:
      draw: where every choice comes from.
      kinds: of engines, to choose from.
      is_greedy: whether no request is sampled.
      log: the operations so far.
      counts: how often each thing happened.
      asked: the prompt and the parameters of each request that was not forgotten, by its handle.
      taken: what `take` gave of each request.
      told: the tokens of each request, put together from the events that `step` gave.
      ended: the requests whose last event has come.
    """

    draw: random.Random
    kinds: tuple[str, ...]
    is_greedy: bool = False
    log: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    asked: dict[int, tuple[tuple[int, ...], Params]] = field(default_factory=dict)
    taken: dict[int, list[int]] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def work(self, served: Engine) -> None:
        """Run a round of the engine, and read its events."""
        for event in served.step():
            assert event.handle not in self.ended, f"request {event.handle} has an event after its last"
            told = self.told.setdefault(event.handle, [])
            assert event.start <= len(told), f"request {event.handle}: an event begins at {event.start} of {len(told)}"
            told[event.start :] = event.tokens
            if event.generation is not None:
                self.ended.add(event.handle)
                assert told == event.generation.tokens, f"request {event.handle}: its events say {told}"


def run(life: Life, number: int) -> str | None:
    """Run one life; return a report of what failed in it, or None."""
    try:
        live(life)
    except Exception:
        return f"life {number} failed after: {'; '.join(life.log[-6:])}\n{traceback.format_exc()}"
    return None


def live(life: Life) -> None:
    """Run operations on an engine, each checked, and then every request to its end."""
    draw = life.draw
    kind = draw.choice(life.kinds)
    served = build(kind)
    life.log.append(kind)
    life.is_greedy = "draft" in KINDS[kind]
    life.counts["lives"] += 1
    for _ in range(draw.randrange(10, 60)):
        name = draw.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        life.log.append(name)
        life.counts[f"operation {name}"] += 1
        _ACTS[name](life, served)
        inspect(life, served)
    for _ in range(500):
        life.work(served)
        inspect(life, served)
        if not served.busy:
            break
    assert not served.busy, "500 steps did not end every request"
    assert served.pages["used"] == 0, f"{served.pages['used']} pages are used by nobody"
    assert not served._requests, f"{len(served._requests)} requests have ended and are still there"
    assert life.ended >= life.asked.keys(), "a request has no last event"
    for handle in life.asked:
        result = served.result(handle)
        life.counts[f"ended by {result.stop_reason}"] += 1
        life.counts["tokens compared"] += len(result.tokens)
        rest = served.take(handle)
        taken = life.taken.get(handle, [])[: len(result.tokens)] + rest
        assert taken == result.tokens, "what take gave is not the tokens"
        life.counts["preemptions"] += result.timings.preemptions
    life.counts["evictions"] += served.pages["evictions"]


def inspect(life: Life, served: Engine) -> None:
    """Check everything that must hold after each operation."""
    served.check()
    pages = served.pages
    total = served._pages.num_pages
    assert pages["free"] + pages["cached"] + pages["used"] == total, f"{pages} of {total} pages"
    for handle, (prompt, params) in life.asked.items():
        found, whole = served.result(handle), alone(prompt, params)
        count = len(found.tokens)
        assert found.tokens == whole.tokens[:count], f"request {handle}: {found.tokens}, alone {whole.tokens}"
        np.testing.assert_allclose(found.logprobs, whole.logprobs[:count], rtol=0, atol=1e-4)
        if found.stop_reason in ("length", "stop_id"):
            assert (found.tokens, found.stop_reason) == (whole.tokens, whole.stop_reason), f"request {handle}: {found}"
        assert found.stop_reason in ("unfinished", "length", "stop_id", "stop_string", "aborted", "deadline")
        assert len(found.versions) == count and found.versions == sorted(found.versions), found.versions


# What a request gets alone


@cache
def model() -> M3:
    """Return a model of two layers, one of them sparse, whose selection is partial from 13 tokens on."""
    layers = ("full_attention", "minimax_m3_sparse")
    config = M3Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, dense_intermediate_size=48, shared_intermediate_size=24, num_local_experts=4,
        num_experts_per_tok=2, rotary_dim=4, layer_types=layers, mlp_layer_types=("dense", "sparse"), index_n_heads=2,
        index_head_dim=8, index_block_size=8, index_topk_blocks=2, max_position_embeddings=64,
    )  # fmt: skip
    return init(config, 3, "float32")


def build(kind: str) -> Engine:
    """An engine of a kind; those of one kind share compiled programs."""
    return Engine(model(), pages=PAGES, **SHAPES, **KINDS[kind])


@cache
def alone(prompt: tuple[int, ...], params: Params) -> Generation:
    """Return the continuation of a request that has an engine to itself."""
    served = build("plain")
    handle = served.add(prompt, params)
    return served.run()[handle]


def request(draw: random.Random, is_greedy: bool) -> tuple[tuple[int, ...], Params]:
    """Draw one of some hundred requests that often begin alike: few enough to know what each gets alone."""
    kind = draw.randrange(0, 24, 2 if is_greedy else 1)
    rng = np.random.default_rng(kind)
    prompt = (*np.arange(5, 5 + kind % 4 * 8), *rng.integers(0, 40, 1 + kind % 11))[:40]
    knobs = (dict(temperature=0), dict(temperature=1.2, top_k=6),
             dict(temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={7: 1.5}),
             dict(temperature=0.8, top_p=0.9, min_p=0.02))[kind % 4]  # fmt: skip
    stop_ids = tuple(rng.integers(0, 40, kind % 3).tolist())
    limit = draw.choice((1, 4, 9, ROOM - len(prompt)))
    params = Params(
        max_new_tokens=min(limit, ROOM - len(prompt)), sampling=Sampling(seed=kind, **knobs), stop_ids=stop_ids
    )
    return tuple(int(token) for token in prompt), params


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
    """Add a request."""
    asked = request(life.draw, life.is_greedy)
    order = life.draw.choice(({}, {}, dict(priority=life.draw.randrange(-1, 2)), dict(deadline=1e-9)))
    life.asked[served.add(*asked, **order)] = asked


def add_group(life: Life, served: Engine) -> None:
    """Add a few requests of one prompt, which have a seed each."""
    prompt, params = request(life.draw, life.is_greedy)
    handles = served.add(prompt, params, n=life.draw.randrange(1, 5))
    for index, handle in enumerate(handles):
        sampling = replace(params.sampling, seed=params.sampling.seed + index)
        life.asked[handle] = prompt, replace(params, sampling=sampling)


def update(life: Life, served: Engine) -> None:
    """New weights of the same numbers: every token stays what it is, and is computed with the new ones."""
    live = life.draw.choice(("finish", "restart", "keep"))
    life.log[-1] += f" {live}"
    if live == "restart":
        for handle in life.asked:
            if served.reason(handle) == "unfinished":
                life.taken.pop(handle, None)
    version = served.update(jax.tree.map(jnp.copy, model()), live)
    assert version == served.update(jax.tree.map(jnp.copy, model()), "keep") - 1
    assert served.pages["cached"] == served.pages["used"] == 0, "pages of the old weights are still there"


def step(life: Life, served: Engine) -> None:
    """Run a round of the engine: `Engine.step`."""
    life.work(served)


def prefill(life: Life, served: Engine) -> None:
    """Run the half of a round that reads prompts: `Engine.prefill`."""
    served.prefill()


def take(life: Life, served: Engine) -> None:
    """Take the new tokens of a request."""
    if (handle := any_handle(life, served, running=False)) is not None:
        life.taken.setdefault(handle, []).extend(served.take(handle))


def abort(life: Life, served: Engine) -> None:
    """Abort a request; if it has ended already, the engine must refuse that."""
    if (handle := any_handle(life, served, running=False)) is None:
        return
    if served.reason(handle) == "unfinished":
        served.abort(handle)
    else:
        refused(life, served, lambda: served.abort(handle))


def stop(life: Life, served: Engine) -> None:
    """A request is ended at one of its tokens."""
    if (handle := any_handle(life, served, running=True)) is not None:
        keep = life.draw.randrange(len(served.result(handle).tokens) + 1)
        served.stop(handle, keep)
        life.taken[handle] = life.taken.get(handle, [])[:keep]


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
    """A request is forked; both go on."""
    if (handle := any_handle(life, served, running=True)) is not None:
        life.asked[served.copy(handle)] = life.asked[handle]


def truncate(life: Life, served: Engine) -> None:
    """A request is taken back, and goes on from there."""
    if (handle := any_handle(life, served, running=True)) is not None:
        keep = life.draw.randrange(len(served.result(handle).tokens) + 1)
        served.truncate(handle, keep)
        life.taken[handle] = life.taken.get(handle, [])[:keep]


def bring(life: Life, served: Engine, snapshot: Snapshot) -> None:
    """Import a snapshot for which there may be no room."""
    try:
        handle = served.import_request(snapshot)
    except OutOfPages:
        life.counts["no room for an import"] += 1
    else:
        life.asked[handle] = snapshot.prompt, snapshot.params
        life.counts["imported"] += 1


def move(life: Life, served: Engine) -> None:
    """A request goes on twice: where it was, and from a snapshot."""
    if (handle := any_handle(life, served, running=True)) is not None:
        bring(life, served, served.export(handle))


def move_in_bytes(life: Life, served: Engine) -> None:
    """The same by way of bytes."""
    if (handle := any_handle(life, served, running=True)) is not None:
        bring(life, served, Snapshot.from_bytes(served.export(handle).to_bytes()))


def damaged_bytes(life: Life, served: Engine) -> None:
    """Import bytes that were cut, changed or doubled, which must be refused."""
    if (handle := any_handle(life, served, running=True)) is None:
        return
    draw, whole = life.draw, served.export(handle).to_bytes()
    place = draw.randrange(len(whole)) if draw.random() < 0.5 else draw.randrange(min(2000, len(whole)))
    changed = bytes([whole[place] ^ (1 << draw.randrange(8))])
    damaged = draw.choice(
        (
            whole[:place],
            whole[place:] + whole[:place],
            whole + whole[place:],
            whole[:place] + changed + whole[place + 1 :],
        )
    )
    if damaged != whole:
        refused(life, served, lambda: served.import_request(Snapshot.from_bytes(damaged)))


def edited_snapshot(life: Life, served: Engine) -> None:
    """A record that is not whole, or asks for what cannot be, is refused."""
    if (handle := any_handle(life, served, running=True)) is None:
        return
    whole = served.export(handle)
    count = len(whole.prompt) + len(whole.new)
    edits = [
        dict(cached=count), dict(cached=-1), dict(cached=None), dict(pages=[*whole.pages, None]), dict(pages=None),
        dict(prompt=(*whole.prompt, 40)), dict(new=(*whole.new, "1")), dict(logprobs=(*whole.logprobs, 0.0)),
        dict(params=None), dict(params=replace(whole.params, max_new_tokens=ROOM)), dict(identity={}),
        dict(params=replace(whole.params, max_new_tokens=len(whole.new))),
    ]  # fmt: skip
    if whole.pages:
        index_k = whole.pages[-1][1][2]
        for other in (None, index_k[:, :-1], index_k.astype(np.float64), index_k[..., None]):
            dense, (k, v, _) = whole.pages[-1]
            edits.append(dict(pages=[*whole.pages[:-1], [dense, (k, v, other)]]))
        edits += [dict(pages=whole.pages[:-1]), dict(cached=0)]
    edit = life.draw.choice(edits)
    life.log[-1] += f" {list(edit)}"
    refused(life, served, lambda: served.import_request(replace(whole, **edit)))


def failed_write(life: Life, served: Engine) -> None:
    """The device fails while it writes what was imported: the pages go back, and nobody finds them."""
    if (handle := any_handle(life, served, running=True)) is None:
        return
    runner, snapshot = served._runner, served.export(handle)
    used, count = served.pages["used"], len(served._requests)

    def fail(page_ids, contents, tokens):
        raise MemoryError("the device is full")

    runner.write_pages = fail
    try:
        served.import_request(snapshot)
    except (MemoryError, OutOfPages):
        life.counts["failed writes"] += 1
        assert (served.pages["used"], len(served._requests)) == (used, count), "a failed write kept pages"
    finally:
        del runner.write_pages


def wrong_call(life: Life, served: Engine) -> None:
    """Make a call with wrong arguments, which the engine must refuse."""
    prompt, params = request(life.draw, life.is_greedy)
    calls = (
        lambda: served.add((), params), lambda: served.add((*prompt, 40), params), lambda: served.add("text", params),
        lambda: served.add(prompt, replace(params, max_new_tokens=ROOM)), lambda: served.add(prompt, None),
        lambda: served.add(prompt, replace(params, stop_ids=(1, 2, 3, 4))), lambda: served.abort(10**6),
        lambda: served.take(-1), lambda: served.copy(10**6), lambda: served.import_request(None),
        lambda: served.add(prompt, params, n=0), lambda: served.add(prompt, params, priority="high"),
        lambda: served.add(prompt, params, deadline=-1.0), lambda: served.update(None),
        lambda: served.update(model(), live="later"), lambda: served.update(model().with_score("lse")),
        lambda: served.update(jax.tree.map(lambda x: x[..., :1], model())),
    )  # fmt: skip
    refused(life, served, life.draw.choice(calls))


_ACTS: dict[str, Callable[[Life, Engine], None]] = {
    "add": add, "add group": add_group, "update": update, "step": step,
    "prefill": prefill, "take": take, "abort": abort, "stop": stop, "forget": forget,
    "copy": copy, "truncate": truncate, "move": move, "move in bytes": move_in_bytes, "damaged bytes": damaged_bytes,
    "edited snapshot": edited_snapshot, "failed write": failed_write, "wrong call": wrong_call,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
