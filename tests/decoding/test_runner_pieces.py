"""The calls of the device as the runner makes them of requests, and what it notes of them, by their definitions."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from m3jax.decoding import Params, Sampling, device
from m3jax.decoding.engine import runner as runners
from m3jax.decoding.engine.exchange import PAGES_A_CALL
from m3jax.decoding.engine.runner import PromptPart, Runner
from m3jax.decoding.engine.shapes import Shapes
from m3jax.decoding.sampling import WORD_TOKENS
from m3jax.decoding.speculation.drafter import PromptContext
from m3jax.decoding.steering import Steer

VOCAB, PAGE = 40, 4
BATCH, PROMPTS, WIDTH, LENGTH = 5, 3, 4, 20
SHAPES = Shapes(
    BATCH, PROMPTS, (WIDTH, 8), 6, stop_ids=3, decode_rows=(1, 3), biases=2, bad_words=1, top_logprobs=7, draft_tokens=2
)
SEEDS = range(6)


class Named(str):
    """The name of a program, in its place."""

    def __call__(self) -> None:
        raise AssertionError(f"{self} was run")


@pytest.fixture
def runner(unchecked) -> Runner:
    """A runner without a device: programs are names, and nothing of the model is there but its configuration."""
    made = Runner.__new__(Runner)
    config = SimpleNamespace(vocab_size=VOCAB, eos_token_id=(1,), hidden_size=2, index_block_size=PAGE)
    made.model, made.shapes, made.drafter, made.features = SimpleNamespace(config=config, mesh=None), SHAPES, None, None
    made.state, made.host, made._layout, made._types = "state", None, "layout", "types"
    made._programs = {name: Named(name) for name in device.PROGRAMS}
    made._max_length, made._steered = LENGTH, {}
    made._no_masks = made._no_prompt_masks = "no masks"
    made._masks_on_device = lambda masks, count: (dict(masks), count)
    made.table = np.arange(BATCH * (LENGTH // PAGE), dtype=np.int32).reshape(BATCH, -1)
    made.written = np.full((made.table.size, PAGE), -1, np.int64)
    made._stop_reasons = np.full(BATCH, device.LIVE, np.int32)
    made._feature_keys = -10 - np.arange(9)
    made._lengths, made._newest_token = [0] * BATCH, [0] * BATCH
    made._table_is_stale = made._stops_are_stale = False
    made._unread, made._compiled_widths = 0, set()
    return made


def parts(seed: int, count: int) -> list[PromptPart]:
    """Requests of random lengths, some with new tokens, a mask, an edit, a feature or scores."""
    rng = np.random.default_rng(seed)
    found = []
    for row in rng.permutation(BATCH)[:count].tolist():
        tokens = tuple(rng.integers(0, VOCAB, rng.integers(2, LENGTH)).tolist())
        cached = int(rng.integers(0, len(tokens)))
        asked = Params(
            max_new_tokens=int(rng.integers(3, 9)), sampling=Sampling(temperature=0.5 + row, seed=row),
            stop_ids=tuple(rng.integers(2, VOCAB, rng.integers(0, 3)).tolist()), min_tokens=int(rng.integers(0, 3)),
            top_logprobs=int(rng.integers(0, 3)), ignore_eos=bool(rng.integers(0, 2)),
        )  # fmt: skip
        piece = len(tokens[cached : cached + WIDTH])
        is_chosen = rng.random(3) < 0.5
        found.append(
            PromptPart(
                row, np.int32(tokens), cached, asked, int(rng.integers(0, len(tokens))),
                rng.integers(-1, 9, piece).astype(np.int32), np.uint32([row, 7]) if is_chosen[0] else None,
                bool(is_chosen[1]), {"name": Steer(scale=2.0)} if is_chosen[2] else None, 1000 * row,
            )
        )  # fmt: skip
    return found


def at(tokens: tuple[int, ...], place: int, other: int) -> int:
    return tokens[place] if place < len(tokens) else other


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chunk_has_the_next_tokens_of_each_prompt(seed, runner):
    """And what stands for no token or no prompt: token 0, no feature, no target, and the row behind the last."""
    given = parts(seed, count=1 + seed % PROMPTS)
    runner.features = "features" if seed % 2 else None
    runner.drafter = SimpleNamespace(reads_tokens=seed > 3) if seed > 1 else None
    for has_scores in (False, True):
        call = runner._prefill_call(given, WIDTH, ("blocks",), has_scores)
        model, state, parcel = call.args
        chunk = device.parcel.opened(parcel)
        # Each array of the host would be a copy of its own to the device: there is one.
        assert len([x for x in jax.tree.leaves(parcel) if not isinstance(x, str)]) == 1
        assert (call.func, model, state) == ("prefill", runner.model, "state")
        masks = {i: part.mask for i, part in enumerate(given) if part.mask is not None}
        expected = dict(host=None, drafter=runner.drafter, edits=None, num_top=7, records=("blocks",), layout="layout")
        expected |= dict(masks=(masks, PROMPTS) if masks else "no masks", types="types")
        assert call.keywords == expected
        np.testing.assert_array_equal(chunk.continuations.counts, runner.continuations(given, PROMPTS).counts)
        assert (chunk.targets is None) == (not has_scores) and (chunk.media is None) == (runner.features is None)
        for index in range(PROMPTS):
            part = given[index] if index < len(given) else None
            tokens = () if part is None else part.tokens
            cached = 0 if part is None else part.cached
            assert (chunk.rows[index], chunk.start[index]) == (BATCH if part is None else part.row, cached)
            assert chunk.lengths[index] == len(tokens)
            assert chunk.tokens[index].tolist() == [at(tokens, cached + t, 0) for t in range(WIDTH)]
            if has_scores:
                is_scored = part is not None and part.wants_scores
                targets = [at(tokens, cached + t + 1, -1) if is_scored else -1 for t in range(WIDTH)]
                assert chunk.targets[index].tolist() == targets
            if chunk.media is not None:
                rows = [] if part is None else part.feature_rows.tolist()
                assert chunk.media.rows[index].tolist() == [*rows, *[-1] * WIDTH][:WIDTH]
                assert chunk.media.features == "features"
            if runner.drafter is not None:
                assert isinstance(chunk.context, PromptContext)
                assert chunk.context.following[index] == at(tokens, cached + WIDTH, 0)
                if runner.drafter.reads_tokens:
                    assert chunk.context.all_tokens[index].tolist() == [at(tokens, t, 0) for t in range(LENGTH)]
                else:
                    assert chunk.context.all_tokens is None
            else:
                assert chunk.context is None


@pytest.mark.parametrize("seed", SEEDS)
def test_continuations_are_what_requests_ask_for_and_have(seed, runner):
    """Rows that are padding are greedy, have no token and end at no stop id."""
    given = parts(seed, count=seed % PROMPTS)
    found = runner.continuations(given, PROMPTS)
    for index in range(PROMPTS):
        part = given[index] if index < len(given) else None
        asked = None if part is None else part.params
        stops = [] if part is None else [*asked.stops((1,))]
        assert found.stop_ids[index].tolist() == [*stops, *[-1] * 3][:3]
        tokens = () if part is None else tuple(part.tokens.tolist())
        new = () if part is None else tokens[len(tokens) - part.new_count :]
        limit, least, top = (0, 0, 0) if part is None else (asked.max_new_tokens, asked.min_tokens, asked.top_logprobs)
        numbers = found.limits, found.min_tokens, found.top_logprobs, found.counts
        assert [x[index] for x in numbers] == [limit, least, top, len(new)]
        in_prompt = tokens[: len(tokens) - len(new)]
        uses = [(token in in_prompt) + 2 * new.count(token) for token in range(VOCAB)]
        assert found.uses[index].tolist() == uses
        assert found.recent[index].tolist() == [*[-1] * WORD_TOKENS, *tokens][1 - WORD_TOKENS :]
        assert found.sampling.temperature[index] == (0 if part is None else asked.sampling.temperature)
    assert found.sampling.bias_ids.shape == (PROMPTS, 2) and found.sampling.bad_words.shape[:2] == (PROMPTS, 1)


@pytest.mark.parametrize("drafter", [None, "drafter"])
def test_a_decode_call_is_the_smallest_that_holds_its_rows(drafter, runner):
    runner.drafter = drafter
    lead = (runner.model, "state") if drafter is None else (runner.model, drafter, "state")
    sizes = dict(max_steps=6) if drafter is None else dict(draft_tokens=2, max_rounds=6)
    sizes |= dict(host=None, num_top=7, layout="layout", types="types", edits=None, records=("blocks",))
    none = BATCH  # the row behind the last
    for rows, expected in (
        (None, None), ((), [none]), ((3,), [3]), ((4, 0), [0, 4, none]), ((4, 0, 2), [0, 2, 4]), ((0, 1, 2, 3), None)
    ):  # fmt: skip
        call = runner._decode_call(4, {1: "mask"} if rows else {}, ("blocks",), rows=rows)
        assert call.func == ("decode" if drafter is None else "decode_in_rounds")
        *found, steps = call.args
        assert tuple(found) == lead and steps.tolist() == [4] * BATCH and steps.dtype == np.int32
        keywords = dict(call.keywords)
        assert (None if expected is None else keywords.pop("rows").tolist()) == expected
        assert keywords == sizes | dict(masks=({1: "mask"}, BATCH) if rows else "no masks")


def test_rows_start_from_their_last_token(runner, monkeypatch):
    """Which is not in the cache; the host notes the same of them."""
    monkeypatch.setattr(runners.device, "start_rows", Named("start"))
    given = parts(2, 2)
    call = runner._start_call(given)
    state, rows, last_token, lengths, continuations = call.args
    assert (call.func, state, call.keywords) == ("start", "state", dict(layout="layout", types="types"))
    assert rows.tolist() == [*(part.row for part in given), BATCH]
    assert last_token.tolist() == [*(part.tokens[-1] for part in given), 0]
    assert lengths.tolist() == [*(part.cached for part in given), 0]
    assert continuations.limits.tolist() == [*(part.params.max_new_tokens for part in given), 0]
    runner._stop_reasons[:] = device.IDLE
    calls = []
    runner._send_changes = lambda: calls.append("sent")
    runner._start_call = lambda starting: calls.append(starting) or (lambda: "started")
    runner.start_rows(given)
    assert calls == ["sent", given] and runner.state == "started"
    for part in given:
        assert (runner._lengths[part.row], runner._newest_token[part.row]) == (part.cached, part.tokens[-1])
    started = {part.row for part in given}
    expected = [device.LIVE if row in started else device.IDLE for row in range(BATCH)]
    assert runner._stop_reasons.tolist() == expected


def test_a_call_is_made_of_what_the_host_changed_and_what_it_wrote_goes_to_host_memory(runner):
    """In this order, whichever call it is. Of a prompt what it writes is noted before."""
    calls = []
    runner._send_changes = lambda: calls.append("sent")
    runner._flush_host = lambda: calls.append("flushed")
    made = lambda name: lambda *given: calls.append((name, *given)) or (lambda: (f"after {name}", f"new of {name}"))
    runner._prefill_call, runner._decode_call = made("prefill"), made("decode")
    given = parts(3, 2)
    assert runner.prefill(given, WIDTH) == "new of prefill" and runner.state == "after prefill"
    has_scores = any(part.wants_scores for part in given)
    assert calls == ["sent", ("prefill", given, WIDTH, (), has_scores), "flushed"]
    assert runner._compiled_widths == {WIDTH} and runner._unread == 0
    for part in given:
        places = range(part.cached, min(part.cached + WIDTH, len(part.tokens)))
        of_places = zip(places, part.feature_rows, strict=True)
        keys = [part.tokens[place] if row < 0 else -10 - row for place, row in of_places]
        keys[0] += part.key_offset if part.cached == 0 else 0
        assert [runner.written[runner.table[part.row, place // PAGE], place % PAGE] for place in places] == keys
    calls.clear()
    assert runner.launch(3, None, ("blocks",), None, (1, 2)) == "new of decode" and runner.state == "after decode"
    assert calls == ["sent", ("decode", 3, {}, ("blocks",), {}, (1, 2)), "flushed"] and runner._unread == 1
    runner.launch(3, {1: "mask"}, (), {2: "edit"}, None)
    assert calls[4] == ("decode", 3, {1: "mask"}, (), {2: "edit"}, None) and runner._unread == 2


@pytest.mark.parametrize("start", range(6))
def test_what_a_call_writes_is_noted_by_its_page_and_place(start, runner):
    """A feature by its key in place of its token; the first token of a row by a key of its own, wherever it stands."""
    tokens, features = [30, 31, 32, 33, 34, 35], np.int32([-1, 0, -1, 8, -1, 3])
    for given, row in ((None, 1), (features, 3)):
        before = runner.written.copy()
        runner._note_written(row, start, tokens, given, key_offset=500)
        expected = before
        for index, token in enumerate(tokens):
            place = start + index
            key = token if given is None or given[index] < 0 else -10 - given[index]
            page = runner.table[row, place // PAGE]
            expected[page, place % PAGE] = key + (500 if place == 0 else 0)
        np.testing.assert_array_equal(runner.written, expected)
    runner._note_written(0, 0, [7])
    assert runner.written[0, 0] == 7


def test_reading_a_call_notes_the_token_before_each_new_one(runner, monkeypatch):
    """The newest is in no page yet; a row without new tokens stays as it was."""
    monkeypatch.setattr(runners, "on_host", lambda new: new)
    runner._lengths, runner._newest_token, runner._unread = [3, 5, 0, 8, 2], [9, 8, 7, 6, 5], 2
    counts, tokens = np.int32([2, 0, 1, 0, 4]), np.arange(20).reshape(5, 4)
    reasons = np.int32([device.LIVE, device.IDLE, device.STOP_ID, device.LENGTH, device.LIVE])
    new = SimpleNamespace(counts=counts, tokens=tokens, stop_reasons=reasons)
    assert runner.read(new) is new and runner._unread == 1
    assert runner._stop_reasons.tolist() == reasons.tolist()
    assert runner._lengths == [5, 5, 1, 8, 6] and runner._newest_token == [1, 8, 8, 6, 19]
    held = lambda row: runner.written[runner.table[row]].reshape(-1).tolist()
    known = [{place: token for place, token in enumerate(held(row)) if token >= 0} for row in range(BATCH)]
    assert known == [{3: 9, 4: 0}, {}, {0: 7}, {}, {2: 5, 3: 16, 4: 17, 5: 18}]


def test_the_device_hears_of_what_the_host_changed_and_of_nothing_else(runner, monkeypatch):
    """Of a table that differs, and of a row that was live there; a row is not stopped while a call is unread."""
    sent = []
    monkeypatch.setattr(runners, "put", lambda array, where: sent.append(array.tolist()) or where)
    monkeypatch.setattr(runners, "replace", lambda state, **new: (sent.append(sorted(new)), state)[1])
    cache = SimpleNamespace(table=SimpleNamespace(sharding="table"), replace=lambda table: f"cache with {table}")
    runner.state = SimpleNamespace(cache=cache, stop_reasons=SimpleNamespace(sharding="stops"))
    runner.set_pages(2, runner.table[2].copy())
    runner._send_changes()
    assert sent == []  # these were its pages already
    runner.set_pages(2, runner.table[2] + 1)
    runner._send_changes()
    runner._send_changes()
    assert sent == [runner.table.tolist(), ["cache"]]
    sent.clear()
    runner._stop_reasons[3] = device.LENGTH
    runner._unread = 1
    runner.clear_row(3)  # it has stopped on the device
    runner._send_changes()
    assert sent == [runner.table.tolist(), ["cache"]] and (runner.table[3] == -1).all()
    sent.clear()
    runner.clear_row(1)
    with pytest.raises(AssertionError, match="a row was stopped before a call in flight was read"):
        runner._send_changes()
    runner._unread = 0
    sent.clear()
    runner._send_changes()
    assert sent == [runner.table.tolist(), ["cache"], runner._stop_reasons.tolist(), ["stop_reasons"]]
    assert runner._stop_reasons.tolist() == [device.LIVE, device.IDLE, device.LIVE, device.IDLE, device.LIVE]
    runner._send_changes()
    assert len(sent) == 4


def test_masks_allow_all_but_where_a_guide_says(runner, monkeypatch):
    monkeypatch.setattr(runners, "put", lambda array, where: array)
    every, words = 2**32 - 1, -(-VOCAB // 32)
    found = Runner._masks_on_device(runner, {0: np.uint32([5, 6]), 2: None}, 4)
    assert found.is_masked.tolist() == [True, False, True, False]
    assert found.bits.tolist() == [[5, 6], *[[every] * words] * 3] and found.bits.dtype == np.uint32
    assert not Runner._masks_on_device(runner, {}, 2).is_masked.any()


def test_vectors_of_steered_rows_are_sent_once(runner, monkeypatch):
    """As long as they stay the same; those of prompts and those of rows apart."""
    asked = []
    monkeypatch.setattr(runners, "steering_of", lambda *given: asked.append(given) or {"a": np.zeros(len(asked))})
    monkeypatch.setattr(runners, "put", lambda array, where: array)
    monkeypatch.setattr(runners, "is_invariant", lambda model: False)
    assert runner._steering({1: {"a": "x"}}, 3) is None and asked == []  # an engine that steers nothing
    runner.shapes = SimpleNamespace(edits=("a",))
    first = runner._steering({1: {"a": "x"}}, 3)
    assert asked == [([None, {"a": "x"}, None], ("a",), 2, False)]
    assert runner._steering({1: {"a": "x"}}, 3) is first and len(asked) == 1
    assert len(runner._steering({1: {"a": "x"}}, 2)["a"]) == 2  # of another number of rows
    assert runner._steering({1: {"a": "x"}}, 3) is first
    assert len(runner._steering({}, 3)["a"]) == 3 and len(runner._steering({}, 3)["a"]) == 3


def test_pages_are_copied_and_written_in_host_memory_too(runner, monkeypatch):
    """In groups of one size: what is no page of the group copies page 0 to nowhere, and is not written."""
    calls = []
    copy = lambda cache, source, target, layout: calls.append(("copy", source.tolist(), target.tolist())) or "copied"
    write = lambda cache, ids, group, layout: calls.append(("write", ids.tolist(), group)) or "written"
    monkeypatch.setattr(runners, "device", SimpleNamespace(copy_pages=copy, write_pages=write))
    runner.state, runner._cache_layout = SimpleNamespace(cache="cache"), None
    runner._replace_cache = lambda cache: calls.append(cache)
    of_host = lambda name: lambda *given: calls.append((f"host {name}", *given))
    runner.host = SimpleNamespace(copy=of_host("copy"), write=lambda ids, group: of_host("write")(ids.tolist(), group))
    runner.written[:] = np.arange(runner.written.size).reshape(runner.written.shape)
    copies = [(page, page + 10) for page in range(PAGES_A_CALL + 1)]
    runner.copy_pages(copies)
    empty = PAGES_A_CALL - 1
    assert calls == [
        ("copy", [*range(PAGES_A_CALL)], [*range(10, 10 + PAGES_A_CALL)]), "copied", ("host copy", copies[:-1]),
        ("copy", [PAGES_A_CALL, *[0] * empty], [10 + PAGES_A_CALL, *[-1] * empty]), "copied",
        ("host copy", copies[-1:]),
    ]  # fmt: skip
    for source, target in copies:
        assert runner.written[target].tolist() == [*range(source * PAGE, source * PAGE + PAGE)]
    calls.clear()
    keys = [*range(100, 110)]  # of two whole pages and a half
    runner.write_pages([3, -1, 5], ["group"], keys)
    ids = [3, -1, 5, *[-1] * (PAGES_A_CALL - 3)]
    assert calls == [("write", ids, "group"), "written", ("host write", ids, "group")]
    assert runner.written[3].tolist() == keys[:4] and runner.written[5].tolist() == [108, 109, 22, 23]
