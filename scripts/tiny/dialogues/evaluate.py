"""The share of held-out dialogues that a model gets right, played turn by turn with the tools' results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tiny.corpus import Corpus
from tiny.dialogues.tasks import KINDS, MODES, Task, draw_task

from m3jax.decoding import Engine, Params, Sampling, build_engine
from m3jax.model import M3
from m3jax.progress import activity
from m3jax.text import ChatTemplate, Message, OutputParser, Tokenizer

_HELD_OUT_SEED = 2**31  # no training run has it
_NEW_TOKENS = 192  # of one answer; the longest right one has about 120


@dataclass
class _Play:
    """One dialogue while it is played.

    Attributes:
      task: with the right answers.
      messages: so far, the model's own answers among them.
      is_open: whether the next answer is the model's.
      num_calls, num_well_formed: turns that should call tools, and those that did so in the right form.
      is_right: whether all was right, to the last answer.
    """

    task: Task
    messages: list[dict[str, Any]] = field(default_factory=list)
    is_open: bool = True
    num_calls: int = 0
    num_well_formed: int = 0
    is_right: bool = False


def held_out_dialogues(corpus: Corpus, tokenizer: Tokenizer, count: int, document_tokens: int) -> list[Task]:
    """Draw dialogues of each kind and thinking mode, from code that no training row has.

    Args:
      corpus: the validation split.
      tokenizer: the corpus's.
      count: of each kind and mode.
      document_tokens: length of the longest document; they are spread evenly up to it.
    """
    rng = np.random.default_rng(_HELD_OUT_SEED)
    lengths = np.linspace(min(64, document_tokens), document_tokens, count).astype(int)
    return [
        draw_task(rng, corpus, tokenizer, int(length), kind, mode)
        for kind in KINDS
        for mode in MODES
        for length in lengths
    ]


def measure_dialogues(
    model: M3, corpus: Corpus, tokenizer: Tokenizer, template: ChatTemplate, short: bool
) -> dict[str, dict[str, float | int]]:
    """Measure a model on held-out dialogues, by kind, with documents of up to 3,000 tokens.

    Args:
      model: any M3.
      corpus: the validation split.
      tokenizer: the corpus's.
      template: the model's chat template.
      short: a few short ones, to see that everything works.
    """
    tasks = held_out_dialogues(corpus, tokenizer, count=1 if short else 64, document_tokens=128 if short else 3000)
    with activity(about=len(tasks)) as line, line.timed("playing held-out dialogues"):
        return dialogue_accuracy(model, tokenizer, template, tasks)


def dialogue_accuracy(
    model: M3, tokenizer: Tokenizer, template: ChatTemplate, tasks: Sequence[Task], batch: int = 32
) -> dict[str, dict[str, float | int]]:
    """Return the share of dialogues that greedy decoding answers exactly.

    Each is played to its end or to the first answer that is wrong; a call that is right gets its result. A turn's calls
    are well formed if they end, have no fault for the parser to mend, name declared tools, and give all parameters,
    typed as the schema has them. A dialogue is right if its calls, mended ones too, and its answers are those of the
    task, character by character; what is thought does not matter.

    Args:
      model: any M3.
      tokenizer: the model's.
      template: its chat template.
      tasks: dialogues that it was not trained on.
      batch: dialogues that are played at once.

    Returns:
      By kind, and for "all": "dialogues", their number; "calls", turns that should call and were reached; and shares
      from 0 to 1, "well_formed" of those turns, where there are any, and "right" of the dialogues.
    """
    plays = [_Play(task) for task in tasks]
    for play in plays:
        _hear(play)
    engine = _engine(model, tokenizer, template, tasks, batch)
    stop_ids = tuple(model.config.eos_token_id)
    params = Params(max_new_tokens=_NEW_TOKENS, sampling=Sampling.greedy(), stop_ids=stop_ids)
    while waiting := [play for play in plays if play.is_open]:
        prompts = [
            template.encode(tokenizer, play.messages, tools=play.task.tools, thinking_mode=play.task.thinking_mode)
            for play in waiting
        ]
        handles = [engine.add(prompt, params) for prompt in prompts]
        results = engine.run()
        for play, handle in zip(waiting, handles, strict=True):
            tokens = results[handle].tokens
            is_ended = bool(tokens) and tokens[-1] in stop_ids
            text = tokenizer.decode(tokens[:-1] if is_ended else tokens, skip_special_tokens=False)
            parser = OutputParser(tools=play.task.tools, thinking_mode=play.task.thinking_mode)
            _judge(play, parser.parse(text), is_ended)
    return {kind: _counts(plays, kind) for kind in (*dict.fromkeys(task.kind for task in tasks), "all")}


def _engine(model: M3, tokenizer: Tokenizer, template: ChatTemplate, tasks: Sequence[Task], batch: int) -> Engine:
    """One engine for all turns, in whose prefix cache the turns before stay; with room for the longest dialogue."""
    ids = [template.encode(tokenizer, t.messages, tools=t.tools, thinking_mode=t.thinking_mode) for t in tasks]
    answers = max(sum(message["role"] == "assistant" for message in task.messages) for task in tasks)
    longest = min(max(map(len, ids)) + answers * _NEW_TOKENS, model.config.max_position_embeddings)
    rows = min(batch, len(tasks))
    return build_engine(model, rows=rows, length=longest, prefill_chunk=512, prefill_rows=min(rows, 8), programs=())


def _hear(play: _Play) -> None:
    """Append the messages before the next answer: the user's, or the results of the calls just made."""
    rest = play.task.messages[len(play.messages) :]
    calls = [call["id"] for call in play.messages[-1].get("tool_calls", ())] if play.messages else []
    for message in rest:
        if message["role"] == "assistant":
            return
        play.messages.append({**message, "tool_call_id": calls.pop(0)} if message["role"] == "tool" else message)
    play.is_open, play.is_right = False, True  # nothing is left to answer


def _judge(play: _Play, answer: Message, is_ended: bool) -> None:
    """Compare an answer with the right one; after a wrong one the dialogue is over."""
    expected = play.task.messages[len(play.messages)]
    expected_calls = [_function(call) for call in expected.get("tool_calls", ())]
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    if expected_calls:
        play.num_calls += 1
        is_whole = is_ended and calls and not answer.faults and all(call.is_whole for call in answer.tool_calls)
        play.num_well_formed += bool(is_whole and all(_fits(call, play.task.tools or ()) for call in calls))
    if is_ended and calls == expected_calls and answer.content == expected["content"]:
        play.messages.append(answer.as_dict())
        _hear(play)
    else:
        play.is_open = False


def _function(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return call["function"]["name"], call["function"]["arguments"]


def _fits(call: tuple[str, Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a call names a declared tool, and gives each parameter a value of its type."""
    name, arguments = call
    types = {"string": str, "integer": int}
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = tool["function"]["parameters"]["properties"]
            same_names = set(arguments) == set(properties)
            return same_names and all(type(arguments[key]) is types[properties[key]["type"]] for key in properties)
    return False


def _counts(plays: Sequence[_Play], kind: str) -> dict[str, float | int]:
    chosen = [play for play in plays if kind in (play.task.kind, "all")]
    num_calls = sum(play.num_calls for play in chosen)
    counts: dict[str, float | int] = {"dialogues": len(chosen), "calls": num_calls}
    if num_calls:
        counts["well_formed"] = round(sum(play.num_well_formed for play in chosen) / num_calls, 4)
    return counts | {"right": round(sum(play.is_right for play in chosen) / len(chosen), 4)}
