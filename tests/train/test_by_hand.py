"""Parts of training with no model: which rows and seeds a step has, what a run says and keeps, a round's figures."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from m3jax.decoding import Params, Sampling
from m3jax.decoding.engine.request import Generation
from m3jax.model import Choices
from m3jax.train import convert, eagle3, grpo, packing, run
from m3jax.train.conversations import Example, written_spans
from m3jax.train.dense import in_model_units
from m3jax.train.eagle3 import continuations
from m3jax.train.grpo import Rounds, RunSettings, TurnWriter, prompts_of_round
from m3jax.train.packing import attend_by_chunks, pack, packed_row
from m3jax.train.policy import PolicyLoss
from m3jax.train.rewards import TaskError
from m3jax.train.rollouts import Episode, RolloutLoss, as_batch, as_batch_of_groups, roll_out
from m3jax.train.run import Stage, run_stages
from m3jax.train.sft import PackedBatches, SFTSettings
from m3jax.train.shared_prompts import GroupLayout, shared_tokens
from m3jax.train.units import LARGE_UNIT

# Rows


def first_fit(lengths: list[int], row_length: int, block_size: int, most_open: int) -> list[list[int]]:
    """The definition: a document goes into the first open row with room; the oldest closes where too many are open."""
    rows, is_open = [], []
    blocks = lambda documents: sum(math.ceil(lengths[i] / block_size) for i in documents)
    for document in range(len(lengths)):
        fits = [row for row in is_open if (blocks(rows[row]) + blocks([document])) * block_size <= row_length]
        if fits:
            rows[fits[0]].append(document)
        else:
            rows.append([document])
            is_open.append(len(rows) - 1)
            if len(is_open) > most_open:
                del is_open[0]
        is_open = [row for row in is_open if blocks(rows[row]) * block_size < row_length]
    return rows


@given(st.lists(st.integers(1, 24), max_size=24), st.integers(1, 4))
def test_documents_go_into_the_first_open_row_with_room(lengths, most_open):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_OPEN_ROWS", most_open)
        assert pack(lengths, 24, 4) == first_fit(lengths, 24, 4, most_open)


@pytest.mark.parametrize(("rows", "accumulate"), [(1, 1), (2, 1), (1, 3), (3, 3)])
def test_steps_read_the_rows_of_each_pass_one_after_the_other(rows, accumulate):
    """Batch i has rows i n to (i + 1) n of all passes in a row, each pass in an order of its own."""
    draw = np.random.default_rng(0)
    examples = [Example(draw.integers(0, 9, n, np.int32), draw.random(n) < 0.5) for n in (5, 8, 3, 16, 9, 1, 7)]
    settings = SFTSettings(steps=9, length=16, rows=rows, accumulate=accumulate, seed=3)
    whole = []
    for number in range(40):
        order = np.random.default_rng((3, number)).permutation(len(examples))
        for documents in pack([len(examples[i].tokens) for i in order], 16, 4):
            whole.append(packed_row([examples[order[i]] for i in documents], 16, 4))
    batches, count = PackedBatches(examples, settings, 4), rows * accumulate
    for step in (0, 1, 2, 4, 3, 0, 5):
        batch, expected = batches[step], whole[step * count : (step + 1) * count]
        for name in ("tokens", "positions", "targets", "weights"):
            assert batch[name].shape == (accumulate, rows, 16)
            np.testing.assert_array_equal(batch[name].reshape(count, 16), [row[name] for row in expected])
        assert batch["num_targets"] == sum(row["weights"].sum() for row in expected)
        assert batch["num_tokens"] == sum((row["positions"] >= 0).sum() for row in expected)


def test_rows_of_a_draft_are_all_read_before_one_is_read_again(monkeypatch, unchecked):
    """Padded to whole blocks of the longest, with their own lengths; the last batch of a pass goes on with the next."""
    rows, steps = [[1, 2, 3], [4] * 9, [5, 6]], []

    def noted(state, model, tokens, optimizer, unroll, dtype, lengths):
        steps.append((np.asarray(tokens), np.asarray(lengths), unroll, dtype))
        return state, {}

    monkeypatch.setattr(eagle3, "draft_train_step", noted)
    begin = SimpleNamespace(draft={"w": jnp.zeros(2)})
    monkeypatch.setattr(eagle3, "init_draft_state", lambda draft, optimizer: begin)
    model = SimpleNamespace(config=SimpleNamespace(index_block_size=4))
    draft = SimpleNamespace(dtype=jnp.dtype("bfloat16"))
    fresh = eagle3.refresh_draft(draft, model, rows, steps=5, batch=2, unroll=2, seed=7, progress=False)
    assert fresh["w"].dtype == jnp.bfloat16 and len(steps) == 5
    rng = np.random.default_rng(7)
    order = np.concatenate([rng.permutation(3) for _ in range(4)])
    for number, (tokens, lengths, unroll, dtype) in enumerate(steps):
        chosen = order[2 * number : 2 * number + 2]
        assert (lengths.tolist(), unroll, dtype) == ([len(rows[i]) for i in chosen], 2, "bfloat16")
        assert tokens.tolist() == [rows[i] + [0] * (12 - len(rows[i])) for i in chosen]


def test_later_steps_of_a_draft_count_less():
    losses = jnp.array([4.0, 2.0, 1.0])
    expected = (4.0 + 0.8 * 2.0 + 0.64 * 1.0) / (1 + 0.8 + 0.64)
    np.testing.assert_allclose(eagle3._mean_of_steps(losses), expected, rtol=1e-6)


def test_a_token_s_slot_is_its_place_in_the_row():
    """Of queries at the row's end too; what is no token has none."""
    positions = jnp.array([[0, 1, 2, 0], [0, -1, -1, 3]])
    assert packing.slots_of(positions).tolist() == [[0, 1, 2, 3], [0, -1, -1, 3]]
    assert packing.slots_of(positions, 9).tolist() == [[5, 6, 7, 8], [5, -1, -1, 8]]
    blocks = jnp.array([[[[0, -1], [0, 1], [1, 0], [-1, 0]]]])  # [B K T J]
    # Documents of 8 and 4 tokens: the queries are at positions 6, 7, 0 and 1, in slots 6 to 9, and blocks are of 4.
    found = packing.in_row(blocks, jnp.array([[6, 7, 0, 1]]), 10, 4)
    assert found.tolist() == [[[[0, -1], [0, 1], [3, 2], [-1, 2]]]]


def test_what_an_assistant_wrote_ends_with_the_mark_of_its_turn(unchecked):
    """Behind the prompt for each answer, up to its last mark; the rest of the turn is the template's: a line break."""

    def render(messages, tools, thinking_mode, prompts):
        assert (tools, thinking_mode) == ("tools", "mode")
        turns = [f"<{message['role'][0]}>{message['content']}|\n" for message in messages]
        return "".join(turns) + ("<a>" if prompts else "")

    template = SimpleNamespace(render=render)
    talk = [dict(role=role, content=text) for role, text in
            (("user", "x"), ("assistant", "y|y"), ("user", "z"), ("assistant", ""), ("user", "v"))]  # fmt: skip
    for count, wanted in ((5, ["y|y|", "|"]), (4, ["y|y|", "|"]), (3, ["y|y|"]), (2, ["y|y|"])):
        text, spans = written_spans(template, talk[:count], ["|", "none"], "tools", "mode")
        assert text == render(talk[:count], "tools", "mode", False)
        assert [text[begin:end] for begin, end in spans] == wanted
        assert all(text[:begin].endswith("<a>") for begin, _ in spans)
    text, ((begin, end),) = written_spans(template, talk[:2], [], "tools", "mode")
    assert text[begin:end] == "y|y|\n"  # no mark: the whole turn
    with pytest.raises(ValueError, match="no message of the assistant"):
        written_spans(template, talk[:1], ["|"], "tools", "mode")


# A run of stages


class Counted(NamedTuple):
    step: int


STAGES = [Stage("dense", 3, 8, 2, False), Stage("long", 2, 16, 1, True), Stage("last", 4, 16, 1, True)]


@pytest.mark.parametrize("begin", [0, 2, 3, 6, 9])
def test_stages_are_run_one_after_the_other_from_where_the_state_is(begin, tmp_path, monkeypatch, capsys, unchecked):
    """A stage ends at its own last step of the whole run, under its schedule; those that are over are not begun."""
    keeper, ran = SimpleNamespace(), []
    made = lambda folder, options: contextlib.nullcontext(keeper) if folder == tmp_path.resolve() else None
    monkeypatch.setattr(run.ocp, "CheckpointManager", made)
    monkeypatch.setattr(run, "restored", lambda found, state: Counted(begin) if found is keeper else None)
    monkeypatch.setattr(run, "_with_schedule", lambda tree, schedule: (tree, schedule))
    monkeypatch.setattr(run, "train_step", lambda *given, **named: (given, named))

    def run_stage(name, last_step, state, step, *rest):
        ran.append((name, last_step, state, step("state", "batch"), *rest))
        return Counted(last_step)

    monkeypatch.setattr(run, "_run_stage", run_stage)
    look, loss = lambda state: None, lambda params, batch: None
    end = run_stages(
        tmp_path, STAGES, "state at 0", "adamw", loss, batches=lambda stage: f"batches of {stage.name}",
        schedule="blockwise", keys=("a", "b"), shared={"teacher": 1}, balance_rate=0.5, workers=7, check=look,
        check_every=11,
    )  # fmt: skip
    state, expected = Counted(begin), []
    stepped = (("state", "batch"), dict(optimizer="adamw", loss_fn=loss, balance_rate=0.5))
    for name, last, schedule in (("dense", 3, "dense"), ("long", 5, "blockwise"), ("last", 9, "blockwise")):
        if begin < last:
            fixed = ({"teacher": 1}, schedule)
            of_run = (f"batches of {name}", ("a", "b"), fixed, 7, keeper, loss, look, 11)
            expected.append((name, last, (state, schedule), stepped, *of_run))
            state = Counted(last)
    assert ran == expected and end == Counted(9)
    assert capsys.readouterr().out == (f"going on from step {begin}\n" if begin else "")


class Writes:
    """An engine that is none: it ends its requests last first, and writes the seed of each."""

    def __init__(self):
        self.waiting = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, prompt, params) -> int:
        handle = 100 - len(self.waiting)
        self.waiting[handle] = params
        return handle

    def step(self):
        handle, params = self.waiting.popitem()
        seed, temperature = params.sampling.seed, params.sampling.temperature
        written = [seed] * (params.max_new_tokens - 1) + [int(10 * temperature)]
        going_on = SimpleNamespace(handle=handle, generation=None)
        return [going_on, SimpleNamespace(handle=handle, generation=SimpleNamespace(tokens=written))]


def test_continuations_fill_their_rows_each_by_a_seed_of_its_own(monkeypatch, unchecked):
    """Rows come in the order of their beginnings, and take the temperatures in turn."""
    built, told = [], []
    monkeypatch.setattr(eagle3, "build_engine", lambda *given, **named: built.append((given, named)) or Writes())
    line = SimpleNamespace(say=told.append)
    monkeypatch.setattr(eagle3, "activity", lambda progress: contextlib.nullcontext(line))
    beginnings = [[7], [8, 9], [7, 7, 7]]
    for batch, prefill_rows in ((9, 9), (300, 128)):
        found = continuations("model", beginnings, 6, (0.0, 0.5), batch)
        expected = [[7, 0, 0, 0, 0, 0], [8, 9, 1, 1, 1, 5], [7, 7, 7, 2, 2, 0]]
        np.testing.assert_array_equal(found, np.array(expected, np.int32), strict=True)
        assert built.pop() == (("model",), dict(
            rows=batch, length=6, prefill_chunk=3, prefill_rows=prefill_rows, steps_per_call=64, prefix_cache=False,
            progress=True,
        ))  # fmt: skip
    assert told[:3] == [f"writing continuations: {n} of 3" for n in (1, 2, 3)]


def test_norms_of_heads_of_what_was_a_llama_change_nothing():
    """With an eps of 2**40 times the source's they are linear, by one; what writes into the stream is 2**20 times."""
    config = tiny.config("d", rms_norm_eps=1e-5 * 2.0**40)
    names = ("q_norm", "k_norm", "o_proj", "q_proj")
    weights = {f"stacks.0.self_attn.{name}": np.ones(8, np.float32) for name in names}
    weights |= {"stacks.0.mlp.down_proj": np.full(8, 3.0, np.float32), "embed_tokens": np.float32([0.5])}
    found = in_model_units(weights, config)
    x = np.random.default_rng(0).normal(size=(4, 8)) * np.array([[1e-3], [0.1], [1.0], [2.0]])
    for name in ("q_norm", "k_norm"):
        stored = np.asarray(found[f"stacks.0.self_attn.{name}"], np.float64)
        normed = (1 + stored) * x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        np.testing.assert_allclose(normed, x, rtol=2e-6)
    assert (
        found["stacks.0.self_attn.o_proj"][0] == LARGE_UNIT == 2**20 and found["stacks.0.mlp.down_proj"][0] == 3 * 2**20
    )
    assert found["stacks.0.self_attn.q_proj"][0] == 1 and found["embed_tokens"][0] == 2**19
    assert in_model_units(weights, tiny.config("d", rms_norm_eps=1.0)) == weights


def test_a_row_of_attention_is_four_parts_of_256_queries_or_more(monkeypatch, unchecked):
    """A part meets the keys up to its own end; so many of its queries at a time as a core's cache has scores for."""
    taken = []

    def noted(attend, chunk, axis, q, *rest):
        taken.append((q.shape[axis], *attend.args, chunk))
        return q

    monkeypatch.setattr(packing, "map_chunks", noted)
    monkeypatch.setattr(packing, "elements_at_once", lambda count: count)
    for queries, keys, parts in (
        (1, 1, [(1, 1)]), (256, 256, [(256, 256)]), (300, 300, [(256, 256), (44, 300)]),
        (1024, 1024, [(256, n) for n in (256, 512, 768, 1024)]),
        (2000, 2500, [(500, n) for n in (1000, 1500, 2000, 2500)]),
    ):  # fmt: skip
        taken.clear()
        x = lambda count, heads: np.zeros((1, count, heads, 1), np.float32)
        attend_by_chunks(x(queries, 2), x(keys, 1), x(keys, 1), None)
        fits = [packing.rows_within(2**20, 2 * end, count) for count, end in parts]
        assert taken == [(*part, chunk) for part, chunk in zip(parts, fits, strict=True)]


def test_what_a_stage_says_and_keeps(monkeypatch, capsys, unchecked):
    """A line every 100 steps and at the end, with the steps of this run by the second; a state every minute."""
    clock, kept, checked, said, timed = [0.0], [], [], [], []
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(run, "keep", lambda keeper, step, state: kept.append((step, state.step)))
    line = SimpleNamespace(say=said.append, timed=lambda text: timed.append(text) or contextlib.nullcontext())
    monkeypatch.setattr(run, "activity", lambda about: contextlib.nullcontext(line))

    class Batches:
        def __getitem__(self, step):
            return {"tokens": np.array([step]), "unread": np.zeros(1)}

    def step(state, batch):
        assert batch.keys() == {"tokens", "teacher"} and batch["tokens"].tolist() == [state.step]
        clock[0] += 0.5
        return Counted(state.step + 1), {"lm": 1 / 3 + state.step}

    end = run._run_stage(
        "sparse", 250, Counted(10), step, Batches(), ("tokens", "weights"), {"teacher": 1}, 0, None, None,
        lambda state: checked.append(state.step), 60,
    )  # fmt: skip
    assert end == Counted(250) and checked == [60, 120, 180, 240]
    assert kept == [(130, 130), (250, 250)]  # 120 steps of half a second are a minute
    assert said == [f"sparse: step {n} of 250" for n in range(11, 251)] and timed == ["sparse: compiling a step"]
    assert capsys.readouterr().out.splitlines() == [
        "        sparse    100/250   2.00 steps/s {'lm': 99.3333}",
        "        sparse    200/250   2.00 steps/s {'lm': 199.3333}",
        "        sparse    250/250   2.00 steps/s {'lm': 249.3333}",
    ]


# Rollouts


class Scripted:
    """An engine that answers a request of seed s with 100 s + the position at each position, up to its limit."""

    max_length = 30

    def __init__(self):
        self.asked, self.aborted = [], []

    def add(self, prompt, params, n=None):
        if min(prompt) < 0:
            raise ValueError("no token")
        handles = range(len(self.asked), len(self.asked) + (n or 1))
        for j in range(n or 1):
            self.asked.append((tuple(prompt), params.sampling.seed + j, params.max_new_tokens))
        return list(handles) if n else handles[0]

    def abort(self, handle):
        self.aborted.append(handle)

    def run(self):
        return {
            handle: Generation(
                [100 * seed + len(prompt) + t for t in range(new)],
                [-0.5] * new,
                "length",
                len(prompt),
                versions=[0] * new,
            )
            for handle, (prompt, seed, new) in enumerate(self.asked)
        }


PARAMS = Params(max_new_tokens=4, sampling=Sampling())


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 3])
def test_each_answer_has_its_seed_in_all_of_its_turns(seed, unchecked):
    """Answer j to prompt i has seed + i count + j modulo 2^32; a turn has no more tokens than there is room for."""
    engine, prompts, count = Scripted(), [(1, 2, 3), (4,) * 9, (5,)], 2
    asked, tool = [], (7, 8)

    def respond(going):
        asked.append([i for i, _ in going])
        return [None if i == 1 else tool for i, _ in going]

    groups = roll_out(engine, prompts, PARAMS, count, seed, respond, turns=3, room=18)
    assert [len(group) for group in groups] == [2, 2, 2]
    episodes = [episode for group in groups for episode in group]
    seeds = [(seed + i * count) % 2**32 + j for i in range(3) for j in range(2)]  # an engine counts up from the first
    for i, episode in enumerate(episodes):
        turns, expected, is_drawn = 0, list(prompts[i // 2]), [False] * len(prompts[i // 2])
        while turns < 3 and (turns == 0 or (i != 1 and len(expected) + 2 < 18)):
            if turns:
                expected, is_drawn = [*expected, *tool], is_drawn + [False] * 2
            of_turn = seeds[i] if turns == 0 else (seed + i) % 2**32
            new = 4 if turns == 0 else min(4, 18 - len(expected))
            expected += [100 * of_turn + len(expected) + t for t in range(new)]
            is_drawn += [True] * new
            turns += 1
        assert list(episode.tokens) == expected and episode.is_drawn.tolist() == is_drawn, i
        assert episode.logprobs.tolist() == [-0.5 * drawn for drawn in is_drawn]
    assert asked[0] == [0, 1, 2, 3, 4, 5] and asked[1] == [0, 2, 3, 4, 5]


def test_without_tools_an_answer_is_an_episode(unchecked):
    """The engine's own room counts where none is given; a refused prompt leaves no request behind."""
    engine = Scripted()
    (group,) = roll_out(engine, [(1, 2)], PARAMS, 3)
    assert [episode.tokens for episode in group] == [(1, 2, *range(100 * s + 2, 100 * s + 6)) for s in range(3)]
    engine = Scripted()
    roll_out(engine, [(1,) * 20], PARAMS, 1, respond=lambda going: [(9,) * 3 for _ in going], turns=2)
    assert engine.asked[1][2] == 3  # 20 + 4 + 3 + 3 = 30
    engine = Scripted()
    roll_out(engine, [(1,) * 20], PARAMS, 1, respond=lambda going: [(9,) * 6 for _ in going], turns=2)
    assert len(engine.asked) == 1  # its next turn would have no room
    engine = Scripted()
    with pytest.raises(ValueError, match="no token"):
        roll_out(engine, [(1,), (2,), (-1,)], PARAMS, 2)
    assert engine.aborted == [0, 1, 2, 3]


# A round


def test_the_figures_of_a_round(monkeypatch, unchecked):
    """Rewards are weighted, advantages go by group, and each figure is that of its name."""
    settings = RunSettings(steps=9, prompts=2, answers=3, seed=4, baseline="rloo", compute_dtype="float32")
    draw, number = np.random.default_rng(0), 5
    lengths = [[4, 6, 5], [3, 6, 6]]
    make = lambda prompt, length: Episode(
        tokens=tuple(range(length)), is_drawn=np.arange(length) >= prompt,
        logprobs=np.where(np.arange(length) >= prompt, -draw.random(length), 0).astype(np.float32),
    )  # fmt: skip
    groups = [[make(2, length) for length in of_group] for of_group in lengths]
    calls, clock = {}, iter([10.0, 13.0, 20.0])
    monkeypatch.setattr(grpo, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(grpo, "roll_out", lambda *given: calls.update(drawn=given) or groups)
    monkeypatch.setattr(grpo, "cast_weights", lambda model, dtype: (model, dtype))
    letters, size = [[1.0, 0.0, 2.0, 3.0, 5.0, 4.0], [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]]

    def reward_parts(rows, answers, group):
        calls.update(rewarded=(rows, answers, group))
        return {"letters": letters, "size": size}

    def learn(self, state, batch):
        calls.update(batch=batch)
        metrics = {"kl": 0.25, "policy": 0.5, "grad_norm": 2.0, "clipped": 0.125, "kept": 0.75}
        return SimpleNamespace(model="new", step=np.int32(6)), metrics, batch["sampler"] + np.float32(0.01)

    monkeypatch.setattr(Rounds, "_learn", learn)
    monkeypatch.setattr(Rounds, "_answer", lambda self, row, episode, written: len(episode.tokens))
    rows = [{"prompt": letter} for letter in "abcd"]
    engine = SimpleNamespace(update=lambda weights: calls.update(served=weights))
    task = SimpleNamespace(weights={"letters": 1.0, "size": 0.1}, reward_parts=reward_parts)
    rounds = Rounds(
        engine, task, rows, [(i, i) for i in range(4)], None, PARAMS, None, settings, length=8, reference="first"
    )
    _, line = rounds(number, SimpleNamespace(model="old", step=np.int32(5)))
    chosen = prompts_of_round(number, 2, 4, 4)
    seed = (4 * 1_000_003 + number) * 6
    assert calls["drawn"] == (engine, [(i, i) for i in chosen], PARAMS, 3, seed, None, 1, 8)
    asked_rows = [rows[i] for i in chosen for _ in range(3)]
    assert calls["rewarded"] == (asked_rows, [*lengths[0], *lengths[1]], 3) and calls["served"] == ("new", "float32")
    rewards = np.array(letters) + 0.1 * np.array(size)
    by_group = rewards.reshape(2, 3)
    others = (by_group.sum(1, keepdims=True) - by_group) / 2
    np.testing.assert_allclose(calls["batch"]["advantages"], (by_group - others).ravel(), rtol=1e-6)
    assert calls["batch"]["tokens"].shape == (6, 8)
    expected = {
        "step": 6, "reward_mean": rewards.mean(), "reward_std": rewards.std(), "reward_mean.letters": np.mean(letters),
        "reward_mean.size": np.mean(size), "kl_reference": 0.25, "loss": 0.5, "grad_norm": 2.0, "clipped": 0.125,
        "kept": 0.75, "new_tokens": 18, "tokens_mean": 3.0, "seconds": 10.0, "seconds_drawing": 3.0,
        "token_mult_prob_error": math.exp(0.01), "kl": -0.01,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    # With a layout each prompt stands once; in the invariant mode all bits are compared.
    rounds = dataclasses.replace(rounds, layout="layout", settings=dataclasses.replace(settings, invariant=True))
    clock = iter(range(9))
    monkeypatch.setattr(grpo, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    shared = lambda *given: calls.update(shared=given) or as_batch([x for group in given[0] for x in group], 8)
    monkeypatch.setattr(grpo, "as_batch_of_groups", shared)
    with pytest.raises(grpo.PartedPolicies, match="differ in 18 of 18 tokens"):
        rounds(number, SimpleNamespace(model="old", step=np.int32(5)))
    assert calls["shared"] == (groups, "layout", settings.replay)
    same = lambda self, state, batch: (learn(self, state, batch)[0], learn(self, state, batch)[1], batch["sampler"])
    monkeypatch.setattr(Rounds, "_learn", same)
    assert rounds(number, SimpleNamespace(model="old", step=np.int32(5)))[1]["token_mult_prob_error"] == 1.0


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 9))
def test_rounds_go_through_all_prompts(count, per_round, seed):
    """Round after round the prompts of pass after pass, each of them an order of all prompts drawn from the seed."""
    passes = [np.random.default_rng((seed, turn)).permutation(count).tolist() for turn in range(30)]
    whole = [prompt for order in passes for prompt in order]
    for number in range(5):
        found = prompts_of_round(number, per_round, count, seed)
        assert found == whole[number * per_round : (number + 1) * per_round]


def test_a_line_of_a_round():
    line = dict(step=3, reward_mean=0.12345, tokens_mean=17.6, k3_kl=0.000123, seconds=2.34, token_mult_prob_error=1.05)
    text = "round 3 of 9: reward 0.123, 18 tokens an answer, k3_kl 0.00012, 2.3 s"
    assert grpo._shown(line, 9) == text
    alarm = "; token_mult_prob_error 1.060 is above 1.05: engine and trainer differ by more than rounding"
    assert grpo._shown(line | dict(token_mult_prob_error=1.06), 9) == text + alarm


@pytest.mark.parametrize("old", ["trainer", "engine"])
def test_the_steps_of_a_round(old, monkeypatch, unchecked):
    """The first step's reading is the trainer's old policy for the later ones; against the engine's there is none."""
    settings = RunSettings(steps=9, epochs=3, old=old, compute_dtype="bfloat16", remat=True)
    seen, sampler = [], np.float32([[-1.0, -2.0]])

    def step(state, batch, optimizer, loss_fn, balance_rate):
        seen.append((state.number, dict(batch), optimizer, loss_fn, balance_rate))
        read = jnp.full((1, 2), state.number, jnp.float32)
        return SimpleNamespace(model=state.model, number=state.number + 1), {"logprobs": read}

    monkeypatch.setattr(grpo, "train_step", step)
    monkeypatch.setattr(grpo, "read_batch", lambda model, batch, dtype, temperature: (model, dtype, temperature))
    rounds = Rounds(None, None, [], [], None, PARAMS, "adamw", settings, length=8, reference="first")
    given = {"sampler": sampler}
    state, metrics, own = rounds._learn(SimpleNamespace(model=SimpleNamespace(mesh=None), number=5), given)
    assert given.keys() == {"sampler"} and state.number == 8 and float(metrics["logprobs"][0, 0]) == 7
    assert own.tolist() == [[5.0, 5.0]]
    loss = RolloutLoss(settings.loss, "bfloat16", True, settings.temperature)
    assert [(number, *rest) for number, _, *rest in seen] == [(n, "adamw", loss, 0.0) for n in (5, 6, 7)]
    is_trainer = old == "trainer"
    assert [bool(batch["is_on_policy"]) for _, batch, *_ in seen] == [is_trainer, False, False]
    later = own if is_trainer else sampler
    for (_, batch, *_), expected in zip(seen, (sampler, later, later), strict=True):
        np.testing.assert_array_equal(batch["old"], expected)
        assert batch["reference"] == ("first", "bfloat16", settings.temperature)


class Deleted(SimpleNamespace):
    """A leaf of a state, which a step that was interrupted has taken with it."""

    def is_deleted(self):
        return self.gone


@pytest.fixture
def policy(monkeypatch, tmp_path):
    """`train_policy` with rounds that count; what is read, built, kept and said is noted."""
    noted = SimpleNamespace(built=[], kept=[], said=[], lines=[], rounds=[], begun=0, fails=None, is_gone=False)
    keeper = SimpleNamespace(latest_step=lambda: noted.kept[-1] if noted.kept else None)
    config = SimpleNamespace(index_block_size=8, max_position_embeddings=100, eos_token_id=(2,))
    model = SimpleNamespace(
        config=config, mesh=None, with_invariance=lambda: SimpleNamespace(config=config, mesh="of it")
    )
    state = lambda step: SimpleNamespace(model=f"weights {step}", step=step)

    class Round:
        def __init__(self, *given):
            noted.given = given

        def __call__(self, number, before):
            noted.rounds.append(number)
            if noted.fails is not None and len(noted.rounds) > 1:
                raise noted.fails
            return state(before.step + noted.settings.epochs), {"step": number + 1}

    def manager(folder, options):
        noted.folder, noted.options = folder, options
        return contextlib.nullcontext(keeper)

    lines = SimpleNamespace(write=noted.lines.append)
    replaced = dict(
        _encode=lambda row, *_: tuple(range(row)), cast_weights=lambda of, dtype: (of, dtype), Rounds=Round,
        check_same_run=lambda folder, about: noted.__dict__.update(same=(folder, about)),
        make_optimizer=lambda schedule, decay, frozen_index: ("adamw", decay, frozen_index),
        init_state=lambda of, optimizer: state(0), restored=lambda found, _: state(noted.begun),
        MetricLines=lambda *given: noted.__dict__.update(metrics=given) or lines,
        build_engine=lambda *given, **named: noted.built.append((given, named)) or "engine",
        stop_ids=lambda tokenizer, ids: (tokenizer, *ids), TurnWriter=lambda *given: ("writer", *given),
        layout_of_groups=lambda lengths, new, length, settings, of: ("layout", lengths, new, length),
        keep=lambda found, step, kept: noted.kept.append(step) if found is keeper else None,
        _shown=lambda line, steps: f"{line['step']} of {steps}",
    )  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(grpo, name, value)
    monkeypatch.setattr(grpo.ocp, "CheckpointManager", manager)
    monkeypatch.setattr(grpo.ocp, "CheckpointManagerOptions", lambda **options: options)
    monkeypatch.setattr(grpo.jax.tree, "leaves", lambda tree: [Deleted(gone=noted.is_gone)])

    def train(prompts, has_tools=False, **changes):
        noted.settings = RunSettings(**dict(steps=5, prompts=2, answers=3, max_new_tokens=10, save_every=2) | changes)
        task = SimpleNamespace(prompts=lambda: prompts, has_tools=has_tools)
        given = (
            model,
            "tokenizer",
            "template",
            task,
            noted.settings,
            tmp_path,
            "metrics",
            noted.said.append,
            {"a": "b"},
        )
        return grpo.train_policy(*given)

    noted.train, noted.model, noted.task_folder = train, model, tmp_path
    return noted


def test_a_run_of_a_policy_is_rounds_from_where_its_state_is(policy, unchecked):
    """Rows are as long as the longest prompt and its answers, in whole blocks; a state is kept every few rounds."""
    assert policy.train([5, 9, 7], epochs=2, weight_decay=0.5, compute_dtype="bfloat16") == "weights 10"
    settings = policy.settings
    assert policy.same == (policy.task_folder, {"a": "b"} | settings.decisive) and policy.metrics == ("metrics", 0)
    assert policy.built == [((("weights 0", "bfloat16"),), dict(
        rows=6, length=24, records=settings.record, all_record=True, steps_per_call=16
    ))]  # fmt: skip
    assert policy.folder == (policy.task_folder / "states").resolve()
    assert policy.options == dict(max_to_keep=2, enable_async_checkpointing=True)
    ends = ("tokenizer", 2)
    asked = Params(max_new_tokens=10, sampling=settings.sampling, stop_ids=ends, record=settings.record)
    engine, task, rows, encoded, *rest = policy.given
    assert (engine, rows, [*map(len, encoded)], task.has_tools) == ("engine", [5, 9, 7], [5, 9, 7], False)
    assert rest == [
        ("writer", "tokenizer", "template", ends), asked, ("adamw", 0.5, True), settings, 24, 1, None,
        ("layout", [5, 9, 7], 10, 24),
    ]  # fmt: skip
    assert policy.rounds == [0, 1, 2, 3, 4] and policy.kept == [4, 8, 10]
    assert policy.lines == [{"step": n} for n in range(1, 6)] and policy.said == [f"{n} of 5" for n in range(1, 6)]
    policy.begun, policy.rounds[:], policy.kept[:] = 6, [], []
    policy.train([5], rows=4, epochs=2, loss=PolicyLoss(kl_weight=0.5), invariant=True)
    assert policy.rounds == [3, 4] and policy.kept == [8, 10] and policy.metrics == ("metrics", 3)
    assert policy.built[1][1]["rows"] == 4 and policy.built[1][1]["length"] == 16
    of, dtype = policy.given[10]
    assert of.mesh == "of it" and dtype == "float32"


def test_turns_with_tools_take_room_and_what_has_none_is_refused(policy, unchecked):
    sizes = dict(max_new_tokens=20, turns=3, tool_tokens=5)
    for has_tools, longest, length, turns in ((False, 80, 104 - 4, 1), (True, 30, 100, 3)):
        policy.model.config.max_position_embeddings = length + 4
        policy.train([longest], has_tools, **sizes)
        assert policy.given[8:10] == (104, turns) and policy.given[11][2] == (20 if turns == 1 else 70)
        policy.model.config.max_position_embeddings = length + 3
        words = r" in 3 turns and tool_tokens = 5" if has_tools else ""
        reason = f"longest prompt has {longest} tokens, which with max_new_tokens = 20{words} are more than the model's"
        with pytest.raises(ValueError, match=reason):
            policy.train([longest], has_tools, **sizes)
    policy.model.mesh = SimpleNamespace(shape={"data": 4})
    with pytest.raises(ValueError, match="prompts = 2 and answers = 3: their product must be a multiple of the mesh's"):
        policy.train([5])
    assert policy.train([5], answers=2) == "weights 5"
    with pytest.raises(ValueError, match="invariant on a mesh with data=4"):
        policy.train([5], answers=2, invariant=True)
    policy.model.mesh = SimpleNamespace(shape={"data": 1})
    assert policy.train([5], invariant=True) == "weights 5"


@pytest.mark.parametrize("error", [KeyboardInterrupt, TaskError])
@pytest.mark.parametrize("save_every", [1, 9])
def test_a_run_that_is_stopped_keeps_its_last_whole_round(policy, unchecked, monkeypatch, error, save_every):
    """Once; nothing of a state that a step has taken, or of the beginning; an interrupt on several hosts keeps none."""
    policy.fails = error("stop")
    with pytest.raises(error):
        policy.train([5], save_every=save_every)
    assert policy.kept == [1] and policy.said == [
        "1 of 5",
        "stopped after round 1: the same command goes on from there",
    ]
    for is_gone, begun, processes, kept in (
        (True, 0, 1, []), (False, 0, 2, [1] if error is TaskError else []), (False, 3, 1, [4]),
    ):  # fmt: skip
        policy.is_gone, policy.begun, policy.kept[:], policy.said[:], policy.rounds[:] = is_gone, begun, [], [], []
        monkeypatch.setattr(grpo.jax, "process_count", lambda n=processes: n)
        with pytest.raises(error):
            policy.train([5], save_every=9)
        assert policy.kept == kept and len(policy.said) == 1 + len(kept)
    policy.rounds[:], policy.begun, policy.said[:] = ["an earlier one"], 0, []
    monkeypatch.setattr(grpo.jax, "process_count", lambda: 1)
    policy.kept[:] = []
    with pytest.raises(error):
        policy.train([5])
    assert policy.kept == policy.said == []


class Writer:
    """Texts and messages that say which tokens they are of; tokens above 50 are calls of tools of that name."""

    def text(self, tokens):
        return f"text {tokens}"

    def message(self, row, tokens):
        calls = [dict(id=f"c{x}", function=dict(name=f"f{x}", arguments=f'{{"x": {x}}}')) for x in tokens if x > 50]
        return {"role": "assistant", "content": f"{row['name']} {tokens}", "tool_calls": calls}

    def between(self, row, earlier, message, results, stop_id):
        return (len(earlier), len(results), stop_id, 40)


def test_what_a_task_reads_and_tools_write_of_an_answer(unchecked):
    """Of the last turn alone; an answer whose calls are answered goes on while there is room and it had ended."""
    asked, params = [], Params(max_new_tokens=4, sampling=Sampling(), stop_ids=(1,))
    task = SimpleNamespace(has_tools=False, answer_calls=lambda calls: asked.extend(calls) or [c[0] for c in calls])
    make = lambda *tokens, drawn: Episode(
        tokens=tokens, is_drawn=np.array([int(x) for x in drawn], bool), logprobs=np.zeros(len(tokens), np.float32)
    )
    rows = [{"name": name, "messages": [{"role": "user", "content": name}]} for name in "abcde"]
    rows[3] = {"name": "d", "prompt": "d"}
    going = [
        (0, make(7, 60, 8, 70, 51, 1, drawn="010111")), (1, make(7, 60, 2, drawn="011")),  # b was cut
        (2, make(7, 8, 1, drawn="011")), (3, make(7, 60, 1, drawn="011")),  # c calls nothing, d is a text
        (4, make(7, 7, 7, 60, 1, 60, 1, drawn="0001111")),  # e has no room for more
    ]  # fmt: skip
    rounds = Rounds(None, task, [], [], Writer(), params, None, RunSettings(steps=9), length=11)
    written = {i: [] for i in range(5)}
    written[0] = [{"role": "assistant"}, {"role": "tool"}]
    found = rounds._respond(rows, written, going)
    assert found == [(3, 2, 1, 40), None, None, None, None]
    wanted = [(0, 70), (0, 51), (1, 60), (4, 60), (4, 60)]
    assert asked == [(f"f{x}", {"x": x}, rows[i]) for i, x in wanted]
    calls = [dict(id=f"c{x}", function=dict(name=f"f{x}", arguments=f'{{"x": {x}}}')) for x in (70, 51)]
    message = {"role": "assistant", "content": "a [70, 51, 1]", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{x}", "content": f"f{x}"} for x in (70, 51)]
    assert written[0][2:] == [message, *results] and not any(written[i] for i in range(1, 5))
    longer = Rounds(None, task, [], [], Writer(), params, None, RunSettings(steps=9), length=12)
    assert longer._respond(rows, {4: []}, going[4:]) == [(1, 2, 1, 40)]
    for has_tools, expected in ((False, message), (True, [{"role": "tool"}, message])):
        task.has_tools = has_tools
        assert rounds._answer(rows[0], going[0][1], [{"role": "tool"}]) == expected
    assert rounds._answer(rows[3], going[3][1], []) == "text [60, 1]"


def test_an_answer_is_read_without_the_token_that_ended_it(unchecked):
    """As a text of ordinary tokens; as a message, whose marks are special tokens, of all of them."""

    def decode(tokens, skip_special_tokens=True):
        return "".join(chr(x) for x in tokens if not skip_special_tokens or x < 200)

    writer = TurnWriter(SimpleNamespace(decode=decode), None, (7, 8))
    for ends in ([], [7], [8]):
        tokens = [*map(ord, "on"), 201, ord("e"), *ends]
        assert writer.text(tokens) == "one"
        message = writer.message({"thinking_mode": "disabled"}, tokens)
        assert (message["role"], message["content"]) == ("assistant", f"on{chr(201)}e")


# Batches of episodes


def drawn_episode(draw, prompt: tuple[int, ...], new: int) -> Episode:
    count = len(prompt) + new
    is_drawn = np.arange(count) >= len(prompt)
    choices = Choices(expert_ids=draw.integers(0, 9, (1, count, 2, 2)), blocks=None)
    return Episode(
        tokens=(*prompt, *draw.integers(0, 9, new).tolist()), is_drawn=is_drawn,
        logprobs=np.where(is_drawn, -draw.random(count), 0).astype(np.float32), choices=choices,
        support=draw.integers(0, 9, (count, 3)).astype(np.int32),
    )  # fmt: skip


def test_a_row_of_a_batch_is_an_episode(unchecked):
    """What is read stands at its token, what is predicted at the token before it; padding is 0, or -1 of records."""
    draw, length = np.random.default_rng(0), 9
    episodes = [drawn_episode(draw, (1, 2, 3), 4), drawn_episode(draw, (4,), 8), drawn_episode(draw, (5, 6), 1)]
    batch = as_batch(episodes, length, ("expert_ids", "support"))
    assert batch.keys() == {"tokens", "mask", "sampler", "support", "choices"}
    pad = lambda x, value: np.concatenate([x, np.full((length - len(x), *x.shape[1:]), value, x.dtype)])
    for row, episode in enumerate(episodes):
        np.testing.assert_array_equal(batch["tokens"][row], pad(np.array(episode.tokens, np.int32), 0), strict=True)
        np.testing.assert_array_equal(batch["mask"][row], pad(episode.is_drawn, False)[1:], strict=True)
        np.testing.assert_array_equal(batch["sampler"][row], pad(episode.logprobs, 0)[1:], strict=True)
        np.testing.assert_array_equal(batch["support"][row], pad(episode.support, -1)[1:], strict=True)
        experts = np.asarray(episode.choices.expert_ids[0])
        np.testing.assert_array_equal(batch["choices"].expert_ids[row], pad(experts, -1))
    assert as_batch(episodes, length).keys() == {"tokens", "mask", "sampler"}


def test_a_batch_of_groups_has_each_prompt_once(unchecked):
    """Its whole blocks of 4 but the last token, at the end of their row; the rest in the rows of the answers."""
    draw, replay = np.random.default_rng(1), ("expert_ids", "support")
    prompts = [tuple(range(10, 19)), tuple(range(20, 25)), (30, 31)]
    groups = [[drawn_episode(draw, prompt, new) for new in (1, 5)] for prompt in prompts]
    layout = GroupLayout.of([len(prompt) for prompt in prompts], 6, 4)
    assert layout == GroupLayout(8, 8, 4) and layout.tokens(2) == 24
    batch = as_batch_of_groups(groups, layout, replay)
    shared = [8, 4, 0]
    for row, (prompt, count) in enumerate(zip(prompts, shared, strict=True)):
        assert batch["prompts"][row].tolist() == [0] * (8 - count) + list(prompt[:count])
    whole = as_batch([episode for group in groups for episode in group], 16, replay)
    for row in range(6):
        episode, first = groups[row // 2][row % 2], shared[row // 2]
        own = len(episode.tokens) - first
        assert batch["positions"][row].tolist() == [*range(first, first + own)] + [-1] * (8 - own)
        for name, width in (("tokens", 8), ("mask", 7), ("sampler", 7), ("support", 7)):
            np.testing.assert_array_equal(batch[name][row], whole[name][row, first : first + width])
        experts = whole["choices"].expert_ids[row, first : first + 8]
        np.testing.assert_array_equal(batch["choices"].expert_ids[row], experts)
    assert [shared_tokens(n, 4) for n in (1, 4, 5, 8, 9)] == [0, 0, 4, 4, 8]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 5))
def test_the_layout_of_groups_is_the_least_that_holds_all(lengths, new, block):
    """Of whole blocks; a prompt's last token is an answer's."""
    layout = GroupLayout.of(lengths, new, block)
    shared = [max(n for n in range(0, length, block) if n <= length - 1) for length in lengths]
    own = max(length - of_it for length, of_it in zip(lengths, shared, strict=True)) + new
    assert layout.prompt_slots == max(shared) and layout.block_size == block
    assert layout.width % block == 0 and own <= layout.width < own + block


# What a conversion measures


def test_measures_of_a_conversion_are_means_over_all_rows(monkeypatch, unchecked):
    """Losses over targets, shares over queries, whatever batch they are in; the last batch has rows of padding."""
    names, batches = ("dense", "sparse", "targets", "queries", "caught", "window"), []
    sums = [(2.0, 3.0, 4.0, 8.0, [2.0, 4.0], [1.0, 0.0]), (6.0, 9.0, 6.0, 0.0, [0.0, 0.0], [1.0, 1.0])]

    def measures(model, batch, dtype):
        batches.append((batch, dtype))
        return dict(zip(names, map(np.array, sums.pop(0)), strict=True))

    monkeypatch.setattr(convert, "_measures", measures)
    model = SimpleNamespace(mesh=None, config=SimpleNamespace(index_block_size=4))
    documents = [Example(np.full(n, n, np.int32), np.ones(n, bool)) for n in (8, 4, 3, 7)]
    found = convert.measure(model, documents, 8, 2, "bfloat16")
    assert found == dict(dense_loss=0.8, loss=1.2, caught=[0.25, 0.5], by_window=[0.25, 0.125])
    assert [(batch["tokens"].shape, dtype) for batch, dtype in batches] == [((2, 8), "bfloat16")] * 2
    rows = np.concatenate([batch["tokens"] for batch, _ in batches])
    documents_of_rows = pack([8, 4, 3, 7], 8, 4)
    expected = [packed_row([documents[i] for i in row], 8, 4)["tokens"] for row in documents_of_rows]
    np.testing.assert_array_equal(rows[: len(expected)], expected)
    assert len(expected) == 3 and not rows[3:].any() and (batches[1][0]["positions"][1] == -1).all()
    words = "loss 1.2000, dense 0.8000; 37.5% of attention in the selected blocks, 18.8% in the last ones"
    assert convert.in_words(found) == words
    nothing = dict(dense_loss=0.8, loss=1.2, caught=None, by_window=None)
    assert convert.in_words(nothing) == "loss 1.2000, dense 0.8000; no held-out query leaves a block out"
    sums.append((2.0, 3.0, 4.0, 0.0, [0.0], [0.0]))
    assert convert.measure(model, documents[:1], 8, 1)["caught"] is None
