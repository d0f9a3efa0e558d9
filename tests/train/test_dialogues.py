"""Dialogues to train on: they render and parse back, only the assistant's words count, a batch is its seed's."""

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.embedded import TOKENIZER
from support.scripted_chat import ScriptedModel
from tiny import arguments
from tiny.corpus import Corpus
from tiny.dialogues import KINDS, MODES, DialogueBatches, Task, dialogue_accuracy, draw_task, written_tokens
from tiny.dialogues.batches import NAME_WEIGHT, WRITTEN_WEIGHT

import m3jax
from m3jax.assets import embedded_path
from m3jax.text import ChatTemplate, OutputParser

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ChatTemplate.from_folder(embedded_path())
EVERY_TASK = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for i in range(60):
        text = "\n".join(f"def f{i}_{j}(x):\n    return x + {j}  # é" for j in range(200))
        (folder / f"part{i}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpus(sources) -> Corpus:
    return Corpus.build(TOKENIZER, "train", progress=False, root=sources)


def task_of(corpus: Corpus, kind: str | None, mode: str | None, seed: int = 0, tokens: int = 120) -> Task:
    return draw_task(np.random.default_rng(seed), corpus, TOKENIZER, tokens, kind, mode)


def written_texts(task: Task) -> list[str]:
    """Return the texts that the mask ascribes to the assistant, one for each turn."""
    ids, is_written, _ = written_tokens(TEMPLATE, TOKENIZER, task.messages, task.tools, task.thinking_mode)
    edges = np.flatnonzero(np.diff(is_written.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [TOKENIZER.decode(ids[begin:end], skip_special_tokens=False) for begin, end in edges]


@EVERY_TASK
@pytest.mark.parametrize("mode", MODES)
def test_what_counts_is_what_the_assistant_says_and_parses_back(corpus, kind, mode):
    """Each written turn ends with the end of the turn, and the parser makes of it the message that the task has."""
    for seed in range(3):
        task = task_of(corpus, kind, mode, seed)
        answers = [message for message in task.messages if message["role"] == "assistant"]
        texts = written_texts(task)
        assert len(texts) == len(answers) and answers
        for text, answer in zip(texts, answers, strict=True):
            assert text.endswith("[e~[") and text.count("[e~[") == 1
            parsed = OutputParser(tools=task.tools, thinking_mode=mode).parse(text.removesuffix("[e~["))
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in answer.get("tool_calls", ())]
            assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls and not parsed.faults
            assert (parsed.content, parsed.reasoning) == (answer["content"], answer.get("reasoning_content", ""))
        thinks = {bool(answer.get("reasoning_content")) for answer in answers}
        assert mode == "adaptive" or thinks == {mode == "enabled"}


@EVERY_TASK
def test_a_dialogue_is_the_prompts_that_the_model_will_see(corpus, kind):
    """Token by token: the parts together are the whole text's tokens, and what comes before an answer is its prompt."""
    task = task_of(corpus, kind, "enabled")
    ids, is_written, _ = written_tokens(TEMPLATE, TOKENIZER, task.messages, task.tools, "enabled")
    encode = lambda count, prompts: TEMPLATE.encode(
        TOKENIZER, task.messages[:count], tools=task.tools, thinking_mode="enabled", add_generation_prompt=prompts
    )
    assert ids.tolist() == encode(len(task.messages), False)
    begins = np.flatnonzero(np.diff(is_written.astype(int), prepend=0) == 1)
    places = [place for place, message in enumerate(task.messages) if message["role"] == "assistant"]
    for begin, place in zip(begins, places, strict=True):
        assert ids[:begin].tolist() == encode(place, True)


def test_answers_follow_from_what_was_said(corpus):
    """A document's answer is in its records, a sum is a sum, and results go to the calls of their order."""
    givers = set()
    for seed in range(20):
        document = task_of(corpus, "document", "disabled", seed)
        *before, answer = (message["content"] for message in document.messages)
        key, value = answer.removeprefix("The value of ").removesuffix(".").split(" is ")
        text = "\n\n".join(before)
        assert f"# {key} -> {value}\n" in text and text.endswith(f"\n\nWhat is {key}?")
        assert text.count(f"# {key} ->") == 1 and "\ufffd" not in text
        givers.add(document.messages[0]["role"])
        total = task_of(corpus, "sum", "disabled", seed)
        ((call,), result) = total.messages[1]["tool_calls"], total.messages[2]["content"]
        assert sum(call["function"]["arguments"].values()) == int(result)
        assert total.messages[3]["content"].endswith(f"= {result}.")
        both = task_of(corpus, "two look-ups, then sum", "disabled", seed).messages
        ids = [call["id"] for call in both[1]["tool_calls"]]
        assert [message["tool_call_id"] for message in both[2:4]] == ids and len(set(ids)) == 2
        terms = [int(message["content"].split(" -> ")[1]) for message in both[2:4]]
        assert list(both[4]["tool_calls"][0]["function"]["arguments"].values()) == terms
        assert both[-1]["content"] == f"The sum is {sum(terms)}."
    assert givers == {"user", "developer"}, "a document stands before the tools or behind them"


@pytest.mark.parametrize("kind", ["sum", "document, then look-up", "two look-ups, then sum"])
def test_names_that_only_the_tools_say_are_marked(corpus, kind):
    """They are the name and the parameters of each call, in the order in which they are written."""
    for seed in range(3):
        task = task_of(corpus, kind, None, seed)
        ids, is_written, is_name = written_tokens(TEMPLATE, TOKENIZER, task.messages, task.tools, task.thinking_mode)
        assert not np.any(is_name & ~is_written)
        edges = np.flatnonzero(np.diff(is_name.astype(int), prepend=0, append=0)).reshape(-1, 2)
        calls = [call["function"] for message in task.messages for call in message.get("tool_calls", ())]
        names = [name for call in calls for name in (call["name"], *call["arguments"])]
        assert [TOKENIZER.decode(ids[begin:end]) for begin, end in edges] == names and names


# Batches


def test_batches_are_those_of_their_seed_and_number(corpus):
    first, again = (DialogueBatches(corpus, TOKENIZER, TEMPLATE, 512, 4, seed=3) for _ in range(2))
    for name, array in first[2].items():
        np.testing.assert_array_equal(array, again[2][name], err_msg=name)
    others = [first[3], DialogueBatches(corpus, TOKENIZER, TEMPLATE, 512, 4, seed=4)[2]]
    assert all(not np.array_equal(first[2]["tokens"], other["tokens"]) for other in others)


def test_a_row_has_dialogues_then_code_beside_rows_of_the_older_data(corpus):
    """In a dialogue the assistant's words weigh most, and all others are those that a teacher may give."""
    batch = DialogueBatches(corpus, TOKENIZER, TEMPLATE, 1024, 4, seed=0, dialogue_fraction=0.5)[0]
    assert batch["tokens"].shape == (4, 1025) and batch["weights"].shape == (4, 1024)
    assert {name: array.dtype.name for name, array in batch.items()} == {
        **{"tokens": "int32", "weights": "float32", "recall": "bool", "distance": "int32", "recent": "int32"},
        **{"kept": "bool"},
    }
    turn = TOKENIZER.encode("]~b]")[0]
    assert (batch["tokens"][:2] == turn).any(axis=1).all() and not (batch["tokens"][2:] == turn).any()
    for row, weights, kept in zip(batch["tokens"][:2], batch["weights"][:2], batch["kept"][:2], strict=True):
        assert row[0] == TOKENIZER.bos_id
        text = TOKENIZER.decode(row[1:][~kept], skip_special_tokens=False)
        assert "]~b]" not in text and "<response>" not in text and "What is" not in text and "[e~[" in text
        assert set(weights[kept]) == {1} and set(weights[~kept]) == {WRITTEN_WEIGHT, NAME_WEIGHT}
        assert (weights == NAME_WEIGHT).mean() < 0.1
        assert 0.02 < (~kept).mean() < 0.9
    np.testing.assert_array_equal(batch["kept"][2:], ~batch["recall"][2:])


# The measure


@pytest.mark.usefixtures("unchecked")
def test_a_model_that_says_the_right_things_gets_all_of_them(corpus):
    """Through the engine, turn by turn, with the results between; another dialogue's answers are wrong ones."""
    tasks = [task_of(corpus, kind, "enabled", seed=1, tokens=32) for kind in ("two look-ups, then sum", "look-up")]
    model = ScriptedModel.of([text.removesuffix("[e~[") for text in written_texts(tasks[0])], "enabled")
    counts = dialogue_accuracy(model, TOKENIZER, TEMPLATE, tasks)
    assert counts == {
        "two look-ups, then sum": {"dialogues": 1, "calls": 2, "well_formed": 1.0, "right": 1.0},
        "look-up": {"dialogues": 1, "calls": 1, "well_formed": counts["look-up"]["well_formed"], "right": 0.0},
        "all": {"dialogues": 2, "calls": 3, "well_formed": counts["all"]["well_formed"], "right": 0.5},
    }


# The script


@pytest.mark.further  # a script
def test_the_script_trains_a_model_of_ours(monkeypatch, tmp_path, sources):
    """From a folder, with the model as its own teacher; a run that is stopped is tested in test_step.py."""
    spec = importlib.util.spec_from_file_location("train_chat", ROOT / "scripts" / "train_chat.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.SHORT_STEPS == 6
    monkeypatch.setattr(script, "SHORT_STEPS", 2)
    quick = partial(script.TinyLoss, compute_dtype="float32", remat=False)  # else the compiler takes twice as long
    monkeypatch.setattr(script, "TinyLoss", quick)
    monkeypatch.setattr(script, "measure", lambda *_: {})
    monkeypatch.setattr(script, "measure_dialogues", lambda *_: {})
    config = tiny.config("M", vocab_size=2048, index_block_size=16, index_topk_blocks=4)
    m3jax.save(tiny.model(config), tmp_path / "base")
    for name in arguments.FILES:
        (tmp_path / "base" / name).write_bytes((embedded_path() / name).read_bytes())
    given = lambda out: [
        *("--out", str(tmp_path / out), "--model", str(tmp_path / "base"), "--sources", str(sources), "--short"),
    ]
    script.main(given("run"))
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("run/model", "base")]
    assert weights[0] != weights[1]
    assert {path.name for path in (tmp_path / "run" / "model").iterdir()} >= set(arguments.FILES)
    with pytest.raises(SystemExit):
        script.main([*given("run"), "--seed", "1"])
    with pytest.raises(SystemExit):
        script.main([*given("other"), "--workers", "-1"])
