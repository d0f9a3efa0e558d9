"""Numbers of the tools that a user meets: limits of a dialogue and of a folder's defaults, shares, schema versions."""

import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from m3jax.compare import hints, pairs, quantities, report, text
from m3jax.compare.__main__ import DIFFER
from m3jax.compare.running import compare_sides
from m3jax.completion import Defaults, generate, generate_text, read_media, read_medium
from m3jax.dialogue import dialogue
from m3jax.dialogue.answer import answer
from m3jax.dialogue.chat import MOST_NEW_TOKENS
from m3jax.dialogue.dialogue import MOST_CONTEXT
from m3jax.dialogue.media import dialogue_tokens, read_part
from m3jax.evaluate import caught, command, divergence, dumps, prompts, reading, sources, subjects
from m3jax.evaluate.__main__ import OPTIONS, TASKS, main, parser, with_defaults
from m3jax.evaluate.words import WORDS

chat = sys.modules["m3jax.dialogue.chat"]  # the package has a function of this name


def test_numbers_that_a_user_meets():
    assert (MOST_NEW_TOKENS, MOST_CONTEXT, DIFFER) == (4096, 32_768, 1)
    assert (command.SCHEMA, dumps.SCHEMA, prompts.DISTRACTORS) == (1, 1, 24)
    assert (sources._MIN_CHARACTERS, sources._VALIDATION_SHARE, text._FEW) == (64, 25, 6)
    assert (hints._MOST_STEP, hints._MOST_INPUTS, pairs._MOST_TOKENS, report._CHUNK) == (16, 2048, 2048, 256)
    # Tokens of a device call of a dialogue, of a stream, and stop ids that it is made for; of a float8 cache's scales.
    assert (dialogue._STEPS, chat._STREAM_STEPS, dialogue._STOP_IDS, subjects._SCALE_TOKENS) == (4, 4, 8, 512)
    # Numbers that are held at once: logits, those that cross to the host, and probabilities.
    assert (reading._LOGITS_AT_ONCE, dumps._LOGITS_OF_A_CALL, caught._SCORE_BUDGET) == (2**25, 2**26, 2**26)
    assert report._MOST_ROUNDING == {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}


def test_orders_that_a_user_meets():
    """Of a report's columns, as the stream goes; of tasks in help; of quantiles; a kind's number is in its seed."""
    assert quantities.STREAM == ("attention", "attention_out", "ffn_out", "output")
    assert TASKS == ("perplexity", "recall", "kl", "caught", "acceptance")
    assert prompts.KINDS == ("needle", "several", "chain")
    assert divergence.FRACTIONS == (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


def test_prompts_of_recall_at_their_limits(monkeypatch, unchecked):
    """Each depth has its prompts, or all have them together; two words of a record, of a depth's and of a chain's."""
    monkeypatch.setattr(prompts, "_prompt", lambda rng, *given: (int(rng.integers(99)), *given))
    shared = dict(haystack=None, kind="needle", length=9, depths=(0.0, 1.0), count=2, seed=3, distractors=5)
    of = lambda **changes: prompts.recall_prompts(**shared | changes)
    numbers = lambda kind: np.random.default_rng([3, prompts.KINDS.index(kind), 9])
    draw = numbers("needle")
    one = lambda *depths, kind="needle": (int(draw.integers(99)), None, kind, 9, depths, 5)
    assert of() == [one(0.0), one(0.0), one(1.0), one(1.0)]
    draw = numbers("several")
    assert of(kind="several") == [one(0.0, 1.0, kind="several") for _ in range(2)]
    most = len(WORDS) // 2 - 4
    assert [len(of(distractors=count, count=1)) for count in (0, most)] == [2, 2]
    for changes, reason in (
        (dict(distractors=-1), f"distractors = -1: with 2 depths give 0 to {most}"),
        (dict(distractors=most + 1), "with 2 depths give"), (dict(count=0), "count = 0"),
        (dict(depths=()), "depths = "),
        (dict(depths=(0.0, 1.0001)), "depths from 0 to 1"), (dict(depths=(-0.0001,)), "depths from 0 to 1"),
        (dict(kind="two"), "kind 'two' is unknown: choose one of needle, several, chain"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            of(**changes)


# Of functions that a user calls, what their docstrings say; all that wait for something say so.
DEFAULTS = {
    generate: dict(draft_tokens=3, progress=True),
    read_media: dict(images=(), videos=(), progress=True),
    read_medium: dict(called="", progress=True),
    generate_text: dict(stop=()),
    answer: dict(stop=(), progress=True),
    chat.chat: dict(thinking_mode="adaptive", stream=True, stop=(), draft_tokens=3, progress=True),
    dialogue.Dialogue: dict(thinking_mode="adaptive", messages=(), stop=(), draft_tokens=3, progress=True),
    dialogue_tokens: dict(progress=True),
    read_part: dict(progress=True),
    compare_sides: dict(prompts=(), dtype="float32"),
    pairs.are_close: dict(share=1e-3),
    prompts.recall_prompts: dict(distractors=24),
    reading.Reading: dict(chunk=512, batch=4, kv_dtype=None, index_dtype=None, scales=None),
}


@pytest.mark.parametrize("of", DEFAULTS, ids=lambda of: of.__name__)
def test_functions_have_these_defaults(of):
    parameters = signature(of).parameters
    assert {name: parameters[name].default for name in DEFAULTS[of]} == DEFAULTS[of]


def test_defaults_of_a_folder_at_their_limits():
    """4,096 stop ids and numbers of 31 bits are taken; one more, a boolean and a fraction are refused by name."""
    largest = 2**31 - 1
    found = Defaults.from_dict({"eos_token_id": [0, *[largest] * 4095], "max_new_tokens": largest, "top_k": None})
    assert len(found.stop_ids) == 4096 and found.max_new_tokens == largest and dict(found.knobs) == {}
    assert Defaults.from_dict({"eos_token_id": 5, "max_new_tokens": 1}).stop_ids == (5,)
    assert Defaults.from_dict({"eos_token_id": []}).stop_ids == () and Defaults.from_dict({}).stop_ids is None
    for name, wrong in (
        ("eos_token_id", [[0] * 4097, -1, largest + 1, True, [1, "2"], 1.0]),
        ("max_new_tokens", [0, -1, largest + 1, True, 1.0]), ("do_sample", [0, 1, "true"]),
    ):  # fmt: skip
        for value in wrong:
            with pytest.raises(ValueError, match=f"{name} = "):
                Defaults.from_dict({name: value})
    greedy = Defaults.from_dict(
        {"do_sample": False, "temperature": 0.7, "top_p": 0.5, "zzz": 1, "aaa": 2, "use_cache": True}
    )
    assert dict(greedy.knobs) == {"temperature": 0, "top_p": 0.5} and greedy.ignored == ("aaa", "zzz")
    assert dict(Defaults.from_dict({"do_sample": True, "temperature": 0.7}).knobs) == {"temperature": 0.7}


# What docs/evaluate.md and --help say that a task does where nothing is asked for.
SIZES = {
    "perplexity": dict(tokens=16_384, context=None, skip=None),
    "recall": dict(lengths=(256, 512, 1024, 2048), depths=(0.0, 0.25, 0.5, 0.75, 1.0), repeats=2, seed=0,
                   kinds=("needle", "several", "chain")),
    "kl": dict(context=None, skip=None, prompts=8, reference="x", write_reference=None),
    "caught": dict(context=None, skip=None, prompts=2),
    "acceptance": dict(context=None, prompts=8, seed=0, draft=None, draft_tokens=3, temperatures=(0.0, 0.7),
                       max_new_tokens=64),
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_task_s_sizes_where_nothing_is_asked_for_and_their_least(task):
    """Options of other tasks are None; the smallest of each size is taken, and one below is refused by its name."""
    given = ["--task", task, *(["--reference", "x"] if task == "kl" else [])]
    found = vars(with_defaults(parser().parse_args(given)))
    asked = SIZES[task] | (dict(reference=Path("x")) if task == "kl" else {})
    assert {name: found[name] for name in OPTIONS if name != "text"} == dict.fromkeys(set(OPTIONS) - {"text"}) | asked
    assert (found["text"], found["batch"], found["chunk"]) == ((), 4, 512)
    whole = [name for name in ("tokens", "repeats", "prompts", "draft_tokens", "max_new_tokens") if asked.get(name)]
    starts = [name for name in ("skip", "seed") if name in asked]
    for name, least in [(name, 1) for name in ("batch", "chunk", *whole)] + [(name, 0) for name in starts]:
        option = f"--{name.replace('_', '-')}"
        assert getattr(with_defaults(parser().parse_args([*given, option, str(least)])), name) == least
        with pytest.raises(ValueError, match=f"^{option} {least - 1}: too small"):
            with_defaults(parser().parse_args([*given, option, str(least - 1)]))


def test_a_task_has_to_be_named(capsys):
    assert main([]) == 2 and "the following arguments are required: --task" in capsys.readouterr().err
