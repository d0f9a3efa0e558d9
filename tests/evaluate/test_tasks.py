"""What each task reads and measures for its options, with no model: windows, grids, rows, prompts."""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

from m3jax.evaluate import tasks
from m3jax.evaluate.reading import Reading
from m3jax.evaluate.tasks import TASKS, context_of

pytestmark = pytest.mark.usefixtures("unchecked")  # the models and tokenizers here are none
CONFIG = tiny.config("dM", max_position_embeddings=500)
ARGS = Namespace(
    context=None, skip=None, text=["t"], tokens=40, lengths=[100, 500], depths=(0.0, 1.0), repeats=2, kinds="k", seed=3,
    reference="folder", prompts=2, draft=None, draft_tokens=4, max_new_tokens=30, temperatures=(0.5,), chunk=16,
    batch=3,
)  # fmt: skip
MODEL = SimpleNamespace(config=CONFIG)
SUBJECT = SimpleNamespace(
    path="path", folder=None, dtype="float32",
    reading=lambda model, how, tokens: (model is MODEL, how, np.asarray(tokens)[:2].tolist()),
)  # fmt: skip

WRITTEN = "abcdefghij" * 20

HOW = Reading(16, 3)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Every part that needs a model or a file gives back what it was given."""
    letters = SimpleNamespace(bos_id=None, encode=ids, decode=lambda ids, **_: "".join(map(chr, ids)))
    monkeypatch.setattr(tasks.M3Config, "from_pretrained", lambda path: {"path": CONFIG}[path])
    monkeypatch.setattr(tasks.Tokenizer, "from_pretrained", lambda path: {"path": letters}[path])
    monkeypatch.setattr(tasks, "read_texts", lambda names: {"text of t": WRITTEN} if names == ["t"] else None)
    monkeypatch.setattr(tasks, "default_first", lambda config: 10)
    for name in ("recall", "divergence", "caught_by_distance", "caught_figures", "acceptance", "named_drafter"):
        monkeypatch.setattr(tasks, name, lambda *given, name=name, **named: (name, *given, *named.items()))
    monkeypatch.setattr(tasks, "perplexity", lambda *given: {"given": given})


def run(task: str, **changes):
    args = Namespace(**vars(ARGS) | changes)
    prepared = TASKS[task].prepare(args, SUBJECT, "mesh")
    return TASKS[task].measure(args, SUBJECT, MODEL, prepared)


def test_windows_end_where_the_models_context_does():
    of = lambda asked, default, more=0: context_of(Namespace(context=asked), CONFIG, default, more)
    assert (of(None, 64), of(None, 2048), of(None, 2048, 8), of(500, 1), of(492, 1, 8)) == (64, 500, 492, 500, 492)
    for asked, more in ((501, 0), (493, 8)):
        with pytest.raises(ValueError, match=rf"--context {asked}: the model reads {500 - more} tokens at most here"):
            of(asked, 64, more)


def test_perplexity_reads_windows_that_begin_with_half_a_context():
    for changes, context, skip in (({}, 500, 250), (dict(context=31), 31, 15), (dict(context=31, skip=30), 31, 30)):
        found = run("perplexity", **changes)
        assert (found["context"], found["skip"]) == (context, skip)
        model, (text,), *rest = found["given"]
        assert model is MODEL and text.tokens.tolist() == ids(WRITTEN)[:40]
        assert rest == [context, skip, (True, HOW, ids("ab"))]
    with pytest.raises(ValueError, match="--skip 31: windows have 31 tokens"):
        run("perplexity", context=31, skip=31)


def test_recall_measures_its_grid(monkeypatch):
    grids = []
    stack = SimpleNamespace(run=SimpleNamespace(tokens=np.array([7, 8, 9])))
    monkeypatch.setattr(tasks.Haystack, "of_texts", lambda tokenizer, texts: stack if texts["text of t"] else None)
    monkeypatch.setattr(tasks.Grid, "of", lambda *given: grids.append(given) or "grid")
    assert run("recall") == ("recall", MODEL, "grid", (True, HOW, [7, 8]))
    assert grids == [(stack, "k", [100, 500], (0.0, 1.0), 2, 3)]
    with pytest.raises(ValueError, match="--lengths 501: the model reads 500 tokens at most"):
        run("recall", lengths=[501, 100])


def test_a_divergence_is_from_the_reference(monkeypatch):
    checked = []
    dumps = [SimpleNamespace(tokens=[4, 5, 6])]
    monkeypatch.setattr(tasks, "read_dump", lambda folder: dumps if folder == "folder" else None)
    monkeypatch.setattr(tasks, "check_reference", lambda *given: checked.append(given))
    assert run("kl", skip=2) == ("divergence", MODEL, dumps, 2, (True, HOW, [4, 5]))
    assert checked == [(dumps, CONFIG, 2)]


def test_what_selection_catches_is_measured_behind_the_first_tokens():
    for changes, context, first in (({}, 40, 10), (dict(context=50, skip=49), 50, 49)):
        name, config, mass, *rest = run("caught", **changes)
        assert (name, config, rest) == ("caught_figures", CONFIG, [first, context])
        assert mass[:2] == ("caught_by_distance", MODEL) and mass[3] == first
        starts = [0, 200 - context]
        assert mass[2].tolist() == [ids(WRITTEN)[start : start + context] for start in starts]
    with pytest.raises(ValueError, match="--skip 40: rows have 40 tokens"):
        run("caught", skip=40)


def test_acceptance_is_of_the_named_draft():
    found = run("acceptance")
    name, model, draft, prompts, *named = found["temperatures"]
    assert (name, model, draft) == ("acceptance", MODEL, ("named_drafter", "builtin", CONFIG, "float32", "mesh"))
    assert [prompt.tolist() for prompt in prompts] == [ids(WRITTEN)[:64], ids(WRITTEN)[-64:]]
    how = (True, HOW, ids("ab"))
    assert dict(named) == dict(max_new_tokens=30, draft_tokens=4, temperatures=(0.5,), seed=3, how=how)
    assert (found["draft"], found["draft_tokens"]) == ("builtin", 4)
    assert run("acceptance", draft="ngram")["draft"] == "ngram"
    with pytest.raises(ValueError, match="--context 471: the model reads 470 tokens at most here"):
        run("acceptance", context=471)
