"""Episodes of several turns: what tools write stands between them, and in no loss."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.embedded import TOKENIZER
from support.engines import CONFIG, SHAPE, prompt

from m3jax.assets import embedded_path
from m3jax.decoding import Engine, Params, Sampling
from m3jax.text import ChatTemplate
from m3jax.train import grpo
from m3jax.train.grpo import Rounds, RunSettings, TurnWriter, arguments_of, last_turn
from m3jax.train.rollouts import Episode, as_batch, read_logprobs, roll_out

LENGTH, RECORDS, TOOL = 64, ("expert_ids", "blocks"), (5, 6, 7)
ASKED = Params(max_new_tokens=8, sampling=Sampling(), record=RECORDS)


@cache
def drawn() -> tuple[Episode, ...]:
    """Eight episodes: after the first turn a tool answers those of even number, after the second one all but number 2.

    The longest have no room for a whole third turn.
    """
    engine = Engine(tiny.model(CONFIG, dtype="bfloat16"), **SHAPE, invariant=True, records=RECORDS)
    seen: list[list[int]] = []

    def respond(going):
        seen.append([i for i, _ in going])
        return [TOOL if (i % 2 == 0 and (len(seen) == 1 or i != 2)) else None for i, _ in going]

    groups = roll_out(engine, [prompt(41), prompt(17, seed=1)], ASKED, 4, 0, respond, turns=3, room=LENGTH)
    assert seen == [list(range(8)), [0, 2, 4, 6]] and not engine.busy
    return tuple(episode for group in groups for episode in group)


def test_turns_follow_one_another():
    """Each turn goes on from the very tokens before it; where the room ends, so does the episode."""
    lengths = {0: 41, 1: 17}
    for i, episode in enumerate(drawn()):
        start = lengths[i // 4]
        turns = 1 if i % 2 else 2 if i == 2 else 3
        new = (8, 11 + 8, 22 + 8)[turns - 1] if i // 4 or turns < 3 else LENGTH - start
        assert len(episode.tokens) == start + new, i
        expected = ([True] * 8 + [False] * 3) * turns
        assert episode.is_drawn.tolist() == [False] * start + expected[:new]
        for turn in range(turns - 1):
            assert episode.tokens[start + 8 + 11 * turn : start + 11 + 11 * turn] == TOOL
    assert last_turn(drawn()[4]) == slice(17 + 22, None)


@pytest.mark.further  # of one turn, with all knobs: test_runs.py
@pytest.mark.parametrize("replay", [(), RECORDS])
def test_the_trainer_reads_all_turns_to_the_bit(replay):
    """In the invariant mode: the records of each turn stand at its own tokens, and what a tool wrote has none."""
    batch = as_batch(drawn(), LENGTH, replay)
    model = tiny.model(CONFIG, dtype="bfloat16").with_invariance()
    found = read_logprobs(model, jnp.asarray(batch["tokens"]), batch.get("choices"), compute_dtype="bfloat16")
    np.testing.assert_array_equal(np.asarray(found)[batch["mask"]], batch["sampler"][batch["mask"]])
    assert not batch["sampler"][~batch["mask"]].any()
    if replay:
        is_given = batch["choices"].expert_ids[:, :-1, 0, 0] != -1
        np.testing.assert_array_equal(is_given, batch["mask"])


TEMPLATE = ChatTemplate.from_folder(embedded_path())
STOP = TOKENIZER.encode("[e~[")
WRITER = TurnWriter(TOKENIZER, TEMPLATE, tuple(STOP))
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ROW = dict(
    messages=[{"role": "user", "content": "Add 1."}],
    tools=[dict(type="function", function=dict(name="add", description="", parameters=_PARAMETERS))],
    thinking_mode="disabled",
)
SHARED = dict(tools=ROW["tools"], thinking_mode="disabled")
CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def written(earlier: list[dict], message: dict) -> list[int]:
    """The tokens of an answer, as a model would draw them."""
    before = TEMPLATE.render(earlier, **SHARED)
    whole = TEMPLATE.render([*earlier, message], add_generation_prompt=False, **SHARED)
    return TOKENIZER.encode(whole[len(before) : whole.rindex("[e~[") + len("[e~[")])


def test_an_answer_is_read_without_the_token_that_ended_it():
    """Cut or whole; and, as a text, without special tokens."""
    tokens = [*TOKENIZER.encode("on"), TOKENIZER.bos_id, *TOKENIZER.encode("e")]
    for ends in ([], STOP):
        assert WRITER.text([*tokens, *ends]) == "one"
        message = WRITER.message({"thinking_mode": "disabled"}, [*TOKENIZER.encode("one"), *ends])
        assert (message["role"], message["content"]) == ("assistant", "one")


def test_between_two_turns_stands_what_the_template_has():
    """The drawn tokens, and behind them what tools wrote: together the dialogue as the template renders it."""
    answer = written(ROW["messages"], {"role": "assistant", "content": "", "tool_calls": [CALL]})
    read = WRITER.message(ROW, answer)
    assert arguments_of(read["tool_calls"][0]) == {"a": 1} and read["tool_calls"][0]["function"]["name"] == "add"
    results = [{"role": "tool", "tool_call_id": read["tool_calls"][0]["id"], "content": "2"}]
    between = WRITER.between(ROW, ROW["messages"], read, results, STOP[0])
    before = TOKENIZER.encode(TEMPLATE.render(ROW["messages"], **SHARED))
    text = TOKENIZER.decode([*before, *answer, *between], skip_special_tokens=False)
    assert text == TEMPLATE.render([*ROW["messages"], read, *results], **SHARED)
    # A template that rewrites an answer once a tool has spoken would make other tokens than those that were drawn.
    forgetful = ChatTemplate(
        "{% for m in messages %}{{ m.role }}{{ messages|length }}{{ m.content }}[e~[{% endfor %}{{ tools }}"
        "{{ thinking_mode }}"
    )
    with pytest.raises(ValueError, match="writes an earlier answer in another way"):
        TurnWriter(TOKENIZER, forgetful, tuple(STOP)).between(ROW, ROW["messages"], read, results, STOP[0])


class Enough(Exception):
    """Ends a round before it learns."""


class Tools:
    """A task whose tool adds one; it keeps the answers that it is to reward."""

    has_tools = True

    def answer_calls(self, calls):
        assert [name for name, _, _ in calls] == ["add"] * len(calls) and all(row is ROW for *_, row in calls)
        return [str(arguments["a"] + 1) for _, arguments, _ in calls]

    def reward_parts(self, rows, answers, group):
        assert rows == [ROW] * 4 and group == 4
        self.answers = answers
        raise Enough


def test_a_task_s_tools_answer_calls_and_nothing_else(unchecked, monkeypatch):
    """An answer that calls goes on; one that does not, was cut, or has no room ends. Rewards get all messages."""
    params, length = Params(max_new_tokens=64, sampling=Sampling(), stop_ids=tuple(STOP)), 400
    prompt = TOKENIZER.encode(TEMPLATE.render(ROW["messages"], **SHARED))

    def episode(*turns: list[int]) -> Episode:
        tokens, is_drawn = list(prompt), [False] * len(prompt)
        for number, turn in enumerate(turns):
            tokens, is_drawn = [*tokens, *turn], [*is_drawn, *([number % 2 == 0] * len(turn))]
        return Episode(tuple(tokens), np.array(is_drawn), np.zeros(len(tokens), np.float32))

    calls = written(ROW["messages"], {"role": "assistant", "content": "", "tool_calls": [CALL]})
    says = written(ROW["messages"], {"role": "assistant", "content": "3."})
    crowded = [9] * (length - len(prompt) - len(calls) - 2) + calls
    first_turns = [episode(turn) for turn in (calls, says, calls[:-1], crowded)]

    def roll_out(engine, prompts, asked, count, seed, respond, turns, room):
        assert (prompts, count, turns, room) == ([tuple(prompt)], 4, 2, length)
        between = respond(list(enumerate(first_turns)))
        assert [found is not None for found in between] == [True, False, False, False]
        return [[episode(calls, list(between[0]), says), *first_turns[1:]]]

    monkeypatch.setattr(grpo, "roll_out", roll_out)
    task, settings = Tools(), RunSettings(steps=1, prompts=1, answers=4)
    rounds = Rounds(None, task, [ROW], [tuple(prompt)], WRITER, params, None, settings, length, turns=2)
    with pytest.raises(Enough):
        rounds(0, None)
    with_tool, *others = task.answers
    assert [message["role"] for message in with_tool] == ["assistant", "tool", "assistant"]
    assert (with_tool[1]["content"], with_tool[2]["content"]) == ("2", "3.")
    assert [[message["role"] for message in answer] for answer in others] == [["assistant"]] * 3
