"""Features in pairs: each of how an engine computes with each other one, and with all that a request can go through."""

from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.covering import covering_rows, pairs_in, pairs_of
from support.engines import finish, preemptions, prompt, quick

from m3jax.cache import measure_scales
from m3jax.decoding import Engine, Generation, Params, Sampling
from m3jax.decoding.engine import Snapshot
from m3jax.model import M3

# Two layers in one stack; 8 tokens a block, of which two are kept: partial from 17 tokens on.
CONFIG = tiny.config(
    "MM", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, index_n_heads=2, index_head_dim=8,
    intermediate_size=32, dense_intermediate_size=32, shared_intermediate_size=32, num_local_experts=4, rotary_dim=4,
    index_topk_blocks=2, max_position_embeddings=128,
)  # fmt: skip
ROOM = 56
SHAPE = dict(pages=12, max_batch=3, prefill_rows=2, prefill_chunk=12, steps_per_call=1, max_length=ROOM, max_stop_ids=2)
NAMES = ("expert_ids", "blocks")

# An engine computes. Weights in MXFP8 are held to their numbers in tests/model, and every request here is recorded.
HOW = dict(
    memory=("device", "host"),
    keys=("float32", "float8"),
    draft=(None, "ngram"),
    invariant=(False, True),
    decode_rows=((), (1,)),
)
YES_NO = (False, True)
# What happens to a request on its way.
PASSES = dict.fromkeys(
    ("known", "imported", "guided", "edited", "stopped", "group", "preempted", "copied", "truncated", "updated"), YES_NO
)


def is_possible(row: dict) -> bool:
    """A draft needs all keys on the device; a guide does not travel."""
    has = row.get
    return not (has("memory") == "host" and has("draft")) and not (has("guided") and has("imported"))


ENGINES = covering_rows(HOW, is_possible)
ROWS = covering_rows({"engine": tuple(range(len(ENGINES)))} | PASSES, is_possible)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


class NoMultiplesOfThree:
    """A guide."""

    def bits(self, new):
        allowed = [token for token in range(CONFIG.vocab_size) if token % 3]
        words = np.zeros(-(-CONFIG.vocab_size // 32), np.uint32)
        np.bitwise_or.at(words, np.array(allowed) // 32, np.uint32(1) << np.uint32(np.array(allowed) % 32))
        return words


GUIDE = NoMultiplesOfThree()
TOKENS = prompt(21, seed=7)  # its continuations have a new token among their last ones
OTHERS = [prompt(30, seed=seed) for seed in (1, 2)]


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def scales():
    return measure_scales(model(), jnp.asarray([[*prompt(60)]]))


def engine(number: int) -> Engine:
    """An engine that computes in one of the ways; those of one way share compiled programs."""
    how, options = ENGINES[number], {}
    if how["memory"] == "host":
        options |= dict(device_pages=12, host_memory="pinned_host")
    if how["keys"] == "float8":
        options |= dict(kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn", scales=scales())
    if how["draft"]:
        options |= dict(draft=how["draft"], draft_tokens=2)
    return Engine(model(), **SHAPE | options, invariant=how["invariant"], decode_rows=how["decode_rows"])


def params(number: int, new: int, row: dict) -> Params:
    edits = dict(logit_bias={7: 2.0, 11: -3.0}, repetition_penalty=1.3) if row["edited"] else {}
    stop_ids = ()
    if row["stopped"]:  # at one of the last tokens
        tokens = alone(number, new, False, row["edited"], row["guided"]).tokens
        stop_ids = (max(tokens, key=tokens.index),)
        assert tokens.index(stop_ids[0]) > 7, tokens
    return Params(max_new_tokens=new, sampling=Sampling(temperature=0, **edits), stop_ids=stop_ids, record=NAMES)


@cache
def alone(number: int, new: int, stopped: bool, edited: bool, guided: bool) -> Generation:
    """Return what the request gets in an engine of its own that computes in the same way."""
    asked = params(number, new, dict(stopped=stopped, edited=edited, guided=guided))
    served = engine(number)
    handle = served.add(TOKENS, asked, guide=GUIDE if guided else None)
    return served.run()[handle]


def test_every_pair_occurs():
    for rows, factors in ((ENGINES, HOW), (ROWS, {"engine": tuple(range(len(ENGINES)))} | PASSES)):
        assert set(pairs_of(factors, is_possible)) <= set().union(*map(pairs_in, rows))
    assert len(ENGINES) < 9 and len(ROWS) < 24


# An engine's programs are compiled: that one is invariant, with a draft.
@pytest.mark.parametrize(
    "number",
    [number if number == 6 else pytest.param(number, marks=pytest.mark.further) for number in range(len(ENGINES))],
)
def test_a_request_gets_what_it_gets_alone(number):
    """Known by its beginning, imported, in a group, preempted, copied, taken back, under new weights, and all in pairs.

    In the invariant mode to the bit.
    """
    for row in (row for row in ROWS if row["engine"] == number):
        expected = alone(number, 16, row["stopped"], row["edited"], row["guided"])
        for found in live(number, row):
            assert (found.tokens, found.stop_reason) == (expected.tokens, expected.stop_reason), row
            tolerance = 0 if ENGINES[number]["invariant"] else 1e-4
            np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=tolerance, err_msg=str(row))
            assert found.records.keys() == expected.records.keys()
            for name, record in found.records.items():
                np.testing.assert_array_equal(record, expected.records[name], err_msg=f"{name} of {row}")


def go_on(served: Engine, handle: int) -> None:
    """Serve until the request has two tokens more."""
    before = len(served.result(handle).tokens)
    while len(served.result(handle).tokens) < before + 2:
        served.step()
        served.check()


def live(number: int, row: dict) -> list[Generation]:
    """Serve the request as a row says, and return all that are to be equal to it."""
    served, asked = engine(number), params(number, 16, row)
    # Others are recorded too, which spares each engine the programs that record nothing.
    greedy = lambda new: Params(max_new_tokens=new, sampling=Sampling(temperature=0), record=asked.record)
    if row["known"]:  # its first two pages
        served.add((*TOKENS[:20], 3, 5, 9), greedy(4))
        served.run()
    if row["imported"]:
        source = engine(number)
        sent = source.add(TOKENS, asked)
        go_on(source, sent)
        served.add(OTHERS[1], greedy(3))  # so that its pages are others here
        served.step()
        handles = [served.import_request(Snapshot.from_bytes(source.export(sent).to_bytes()))]
    else:
        handles = [served.add(TOKENS, asked, guide=GUIDE if row["guided"] else None)]
    if row["group"]:
        handles += served.add(TOKENS, asked, guide=GUIDE if row["guided"] else None, n=2)
    go_on(served, handles[0])
    if row["preempted"]:  # those that come before it in order need all pages
        for other in OTHERS:
            served.add(other, greedy(ROOM - 30), priority=1)
    first = handles[0]
    if row["copied"]:
        handles.append(served.copy(first))
    if row["truncated"]:
        served.truncate(first, min(2, len(served.result(first).tokens)))
    if row["updated"]:
        served.update(jax.tree.map(jnp.copy, served.served_model), "keep")
    finish(served)
    assert not row["preempted"] or preemptions(served), row
    return [served.result(handle) for handle in handles]
