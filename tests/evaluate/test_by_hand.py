"""What an evaluation reads and hands on, task by task and with no model: texts, windows, sizes, a reference's files."""

import contextlib
import hashlib
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

from m3jax.evaluate import __main__ as entry
from m3jax.evaluate import command, sources, subjects, tasks
from m3jax.evaluate.perplexity import Text
from m3jax.evaluate.prompts import line_breaks
from m3jax.evaluate.reading import Reading
from m3jax.evaluate.subjects import Subject, each_loaded, read_texts, spread, tokenised
from m3jax.evaluate.tasks import TASKS, context_of

pytestmark = pytest.mark.usefixtures("unchecked")  # the models and tokenizers here are none
CONFIG = tiny.config("dM", max_position_embeddings=500)


class Letters:
    """A tokenizer of one token a letter, with or without a mark at the beginning."""

    def __init__(self, bos_id: int | None = None):
        self.bos_id = bos_id

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def test_texts_are_cut_where_the_tokens_end():
    """Of each text the id that begins it and its tokens; bytes are those of what is predicted."""
    texts = {"a": "äbc", "b": "defg", "c": "h"}
    of = lambda most, bos_id=None: [
        (text.name, text.tokens.tolist(), text.num_bytes) for text in tokenised(Letters(bos_id), texts, most)
    ]
    a, b = [ord(x) for x in "äbc"], [ord(x) for x in "defg"]
    assert of(99) == [("a", a, 2), ("b", b, 3)]  # the last has one token, which is predicted by none
    assert of(99, 7) == [("a", [7, *a], 4), ("b", [7, *b], 4), ("c", [7, ord("h")], 1)]
    assert of(5) == [("a", a, 2), ("b", b[:2], 1)] and of(4) == of(3) == [("a", a, 2)] and of(2) == [("a", a[:2], 1)]
    with pytest.raises(ValueError, match="the texts have fewer than 2 tokens, or --tokens 1 leaves fewer"):
        of(1)


def test_records_go_before_a_run_of_blanks_that_has_a_line_break_first():
    """In a text of one token a letter: only there is the text on either side tokenised as before."""
    text = "\na\n\n b \nc\n  d\te\n"
    expected = [i for i, x in enumerate(text) if x == "\n" and (i == 0 or not text[i - 1].isspace())]
    letters = Letters()
    letters.vocab_size = 128
    found = line_breaks(letters, np.array(letters.encode(text), np.int32))
    assert found.tolist() == expected == [0, 2, 9, len(text) - 1]


@pytest.mark.parametrize(("count", "length", "starts"), [(1, 4, [0]), (3, 4, [0, 3, 6]), (4, 1, [0, 3, 6, 9])])
def test_pieces_are_spread_from_the_first_token_to_the_last(count, length, starts):
    texts = [Text("a", np.arange(6), 6), Text("b", np.arange(6, 10), 4)]
    assert [piece.tolist() for piece in spread(texts, count, length)] == [[*range(x, x + length)] for x in starts]


def test_pieces_that_there_are_not():
    texts = [Text("a", np.arange(6), 6)]
    assert len(spread(texts, 1, 6)) == 1
    for count, length in ((0, 3), (1, 0), (1, 7)):
        with pytest.raises(ValueError, match=f"{count} pieces of {length} tokens: the texts have 6 tokens"):
            spread(texts, count, length)


def test_texts_of_files(tmp_path):
    good, empty, wrong = (str(tmp_path / name) for name in ("good", "empty", "wrong"))
    for name, data in ((good, "ä\r\n".encode()), (empty, b""), (wrong, b"ab\xff")):
        Path(name).write_bytes(data)
    assert read_texts([good]) == {good: "ä\r\n"}
    for names, reason in (
        ([good, good], "is given twice; give each file once"), ([empty], "is empty; give"),
        ([wrong], "not UTF-8 text: byte 2 is wrong"), ([str(tmp_path / "none")], "cannot be read: No such file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            read_texts(names)


def test_windows_end_where_the_models_context_does():
    of = lambda asked, default, more=0: context_of(Namespace(context=asked), CONFIG, default, more)
    assert (of(None, 64), of(None, 2048), of(None, 2048, 8), of(500, 1), of(492, 1, 8)) == (64, 500, 492, 500, 492)
    for asked, more in ((501, 0), (493, 8)):
        with pytest.raises(ValueError, match=rf"--context {asked}: the model reads {500 - more} tokens at most here"):
            of(asked, 64, more)


def test_subjects_are_all_ways_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(subjects.M3Config, "from_pretrained", lambda path: CONFIG)
    found = subjects.subjects([None, Path("x")], "float32, bfloat16", "model,float8_e4m3fn", "float32", "auto")
    assert found == [
        Subject(folder, dtype, kv, "float32", "auto")
        for folder in (None, Path("x")) for dtype in ("float32", "bfloat16") for kv in (None, "float8_e4m3fn")
    ]  # fmt: skip
    assert found[4].settings() == {
        "model": "x", "dtype": "float32", "kv_dtype": "float32", "index_dtype": "float32", "backend": "auto"
    }  # fmt: skip
    assert found[3].settings()["kv_dtype"] == "float8_e4m3fn" and found[3].settings()["model"] == "embedded"
    for dtypes, caches, reason in (("model", "model", "--dtype .model"), ("float32", "int8", "--cache-dtype .int8")):
        with pytest.raises(ValueError, match=f"{reason}.*: choose of"):
            subjects.subjects([None], dtypes, caches, "model", "auto")


def test_weights_are_loaded_once_for_neighbours(monkeypatch):
    """Of one folder and dtype; another backend is put on what is loaded."""
    loaded = []

    class Loaded:
        def __init__(self, name, backend=None):
            self.name, self.backend = name, backend

        def with_backend(self, backend):
            return Loaded(self.name, backend)

    load = lambda path, dtype, mesh: loaded.append((path, dtype, mesh)) or Loaded(f"{path} {dtype}")
    monkeypatch.setattr(subjects, "load", load)
    ways = [
        Subject(Path("a"), "float32", None, None, "xla"), Subject(Path("a"), "float32", "bfloat16", None, "auto"),
        Subject(Path("a"), "bfloat16", None, None, "xla"), Subject(Path("b"), "bfloat16", None, None, "xla"),
    ]  # fmt: skip
    found = [(subject, model.name, model.backend) for subject, model in each_loaded(ways, "mesh")]
    assert found == [(way, f"{way.folder} {way.dtype}", way.backend) for way in ways]
    assert loaded == [(Path("a"), "float32", "mesh"), (Path("a"), "bfloat16", "mesh"), (Path("b"), "bfloat16", "mesh")]


@pytest.mark.parametrize(("kv", "index"), [(None, None), ("float8_e4m3fn", None), (None, "float8_e4m3fn")])
def test_scales_are_measured_for_a_cache_in_float8_alone(kv, index, monkeypatch):
    measured = []
    monkeypatch.setattr(subjects, "measure_scales", lambda model, tokens: measured.append(tokens) or "scales")
    monkeypatch.setattr(subjects, "_SCALE_TOKENS", 4)
    subject = Subject(None, "float32", kv, index, "auto")
    found = subject.reading(SimpleNamespace(config=CONFIG), Reading(16, 2), np.arange(9))
    has_float8 = kv is not None or index is not None
    assert found == Reading(16, 2, kv, index, "scales" if has_float8 else None)
    assert [tokens.tolist() for tokens in measured] == ([[[0, 1, 2, 3]]] if has_float8 else [])


# Tasks


ARGS = Namespace(
    context=None, skip=None, text=["t"], tokens=40, lengths=[100, 500], depths=(0.0, 1.0), repeats=2, kinds="k", seed=3,
    reference="folder", prompts=2, draft=None, draft_tokens=4, max_new_tokens=30, temperatures=(0.5,), chunk=16,
    batch=3, write_reference=None, out=None,
)  # fmt: skip
MODEL = SimpleNamespace(config=CONFIG)
SUBJECT = SimpleNamespace(
    path="path", folder=None, dtype="float32",
    reading=lambda model, how, tokens: (model is MODEL, how, np.asarray(tokens)[:2].tolist()),
)  # fmt: skip
WRITTEN = "abcdefghij" * 20


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Every part that needs a model or a file gives back what it was given."""
    for module in (tasks, command):
        monkeypatch.setattr(module.M3Config, "from_pretrained", lambda path: {"path": CONFIG}[path])
        monkeypatch.setattr(module.Tokenizer, "from_pretrained", lambda path: {"path": Letters()}[path])
        monkeypatch.setattr(module, "read_texts", lambda names: {"text of t": WRITTEN} if names == ["t"] else None)
    monkeypatch.setattr(tasks, "default_first", lambda config: 10)
    for name in ("recall", "divergence", "caught_by_distance", "caught_figures", "acceptance", "named_drafter"):
        monkeypatch.setattr(tasks, name, lambda *given, name=name, **named: (name, *given, *named.items()))
    monkeypatch.setattr(tasks, "perplexity", lambda *given: {"given": given})


def run(task: str, **changes):
    args = Namespace(**vars(ARGS) | changes)
    prepared = TASKS[task].prepare(args, SUBJECT, "mesh")
    return TASKS[task].measure(args, SUBJECT, MODEL, prepared)


HOW = Reading(16, 3)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


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


def test_a_reference_is_written_for_one_subject(monkeypatch, tmp_path, capsys):
    """Of pieces of the texts as long as the context allows, with what the model was and where."""
    dumps, told = [], []
    line = SimpleNamespace(say=told.append)
    monkeypatch.setattr(command, "activity", lambda: contextlib.nullcontext(line))
    monkeypatch.setattr(command, "each_loaded", lambda asked, mesh: [(subject, MODEL) for subject in asked])
    folder = tmp_path / "new" / "reference"

    def write_dump(model, rows, where, about, how):
        dumps.append((model, [row.tolist() for row in rows], where, about, how))
        (where / "prompt-000.safetensors").write_bytes(bytes(2**20))

    monkeypatch.setattr(command, "write_dump", write_dump)
    subject = SimpleNamespace(**vars(SUBJECT), settings=lambda: {"model": "name"})
    args = Namespace(**vars(ARGS) | dict(write_reference=folder, context=30))
    command._write_reference(args, [subject], "mesh")
    ((model, rows, where, about, how),) = dumps
    assert (model, where, how) == (MODEL, folder, (True, HOW, ids("ab"))) and about["model"] == "name"
    assert rows == [ids(WRITTEN)[:30], ids(WRITTEN)[-30:]] and about.keys() == {"jax", "device", "model"}
    assert told == ["reading texts"]
    assert capsys.readouterr().out == f"{folder}: logits of 2 prompts of 30 tokens, 1.0 MiB\n"
    with pytest.raises(ValueError, match=r"prompt-000.safetensors is there already; name another folder"):
        command._write_reference(args, [subject], "mesh")
    with pytest.raises(ValueError, match="a reference is of one model in one way"):
        command._write_reference(args, [subject, subject], "mesh")


def test_a_reading_that_says_nothing():
    assert Reading() == Reading(512, 4, None, None, None)
    assert replace(Reading(), batch=5) != Reading()


def test_figures_are_printed_and_written_by_the_first_process(monkeypatch, tmp_path, capsys):
    """Texts are prepared once for a folder and dtype; a report repeats the settings that count, and no other."""
    made = []
    subject = lambda name, dtype, kv: Subject(Path(name), dtype, kv, None, "xla")
    asked = [subject("a", "float32", None), subject("a", "float32", "bfloat16"), subject("b", "float32", None)]
    monkeypatch.setattr(command, "subjects", lambda *given: made.append(given) or asked)
    monkeypatch.setattr(command, "parse_mesh", lambda text: f"mesh {text}")
    monkeypatch.setattr(command, "activity", lambda: contextlib.nullcontext(SimpleNamespace(say=made.append)))
    monkeypatch.setattr(command, "each_loaded", lambda ways, mesh: [(way, f"{way.folder} on {mesh}") for way in ways])
    prepared = []
    prepare = lambda args, of, mesh: prepared.append((of, mesh)) or len(prepared)
    measure = lambda args, of, model, ready: {"figure": [str(of.folder), of.kv_dtype, model, ready]}
    table = lambda results: [["figure", *(str(result["figure"][3]) for result in results)]]
    monkeypatch.setitem(command.TASKS, "kl", tasks.Task(prepare, measure, table))
    monkeypatch.setitem(command.PLOTS, "kl", "draw")
    monkeypatch.setattr(command, "plot", lambda draw, names, results: f"{draw} {names} {len(results)}".encode())
    args = Namespace(**vars(ARGS) | dict(
        model=Path("a"), against=Path("b"), dtype="d", cache_dtype="c", index_dtype="i", backend="x", mesh="data=2",
        task="kl", out=tmp_path / "new", reference=Path("reference"),
    ))  # fmt: skip
    command._evaluate(args)
    assert made == [([Path("a"), Path("b")], "d", "c", "i", "x"), "reading texts"]
    assert prepared == [(asked[0], "mesh data=2"), (asked[2], "mesh data=2")]
    out = capsys.readouterr().out
    files = [tmp_path / "new" / f"kl.{end}" for end in ("json", "png")]
    lines = out.splitlines()
    assert lines[1].split() == ["figure", "1", "1", "2"] and lines[2:] == [str(file) for file in files]
    report = json.loads(files[0].read_text())
    assert [result["figure"] for result in report["results"]] == [
        ["a", None, "a on mesh data=2", 1], ["a", "bfloat16", "a on mesh data=2", 1], ["b", None, "b on mesh data=2", 2]
    ]  # fmt: skip
    assert [result["model"] for result in report["results"]] == ["a", "a", "b"]
    assert (report["schema"], report["task"], report["mesh"]) == (1, "kl", "data=2")
    assert report["settings"] == dict(
        text=["t"], tokens=40, prompts=2, lengths=[100, 500], depths=[0.0, 1.0], repeats=2, kinds="k", seed=3,
        reference="reference", draft_tokens=4, temperatures=[0.5], max_new_tokens=30, batch=3, chunk=16,
    )  # fmt: skip
    assert files[0].read_bytes().startswith(b'{\n "schema": 1,\n') and files[0].read_bytes().endswith(b"}\n")
    assert files[1].read_bytes() == f"draw {command.column_names(report['results'])} 3".encode()
    with pytest.raises(ValueError, match=r"kl.json is there already; name another folder"):
        command._evaluate(args)
    args.out, args.against, args.mesh = None, None, None
    command._evaluate(args)
    assert made[-2][0] == [Path("a")] and len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(command, "is_first", lambda: False)
    args.out = tmp_path / "other"
    command._evaluate(args)
    assert capsys.readouterr().out == "" and list(args.out.iterdir()) == []


def test_columns_are_named_by_what_tells_them_apart():
    base = dict(model="x/one", dtype="float32", kv_dtype="float32", index_dtype="float32", backend="xla")
    of = lambda *changes: command.column_names([base | change for change in changes])
    assert of({}) == of({}, {})[:1] == ["one, float32"]
    assert of({}, dict(kv_dtype="float8")) == ["float32", "float32, cache float8"]
    assert of({}, dict(backend="triton")) == ["float32, xla", "float32, triton"]
    assert of({}, dict(model="y/two", index_dtype="float8")) == ["one", "two, index float8"]
    assert of({}, dict(model="/")) == ["one", "/"]
    other = dict(model="two", dtype="bfloat16", kv_dtype="f8", index_dtype="i8", backend="triton")
    assert of({}, other) == ["one, float32, xla", "two, bfloat16, cache f8, index i8, triton"]
    assert command.as_text([["", "ab"], ["long name", "c"], ["x", ""]]) == "           ab\nlong name   c\nx\n"


def test_a_corpus_is_the_sources_of_one_split(tmp_path):
    """By path, in order; without tests and the like, files that are short, and files that are no UTF-8."""
    names = ["a.py", "b/c.py", "b/a.py", "z.py", *(f"m{i}.py" for i in range(80))]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n" + "x" * 64)
    held_out = {
        name for name in names if int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 25 == 0
    }  # fmt: skip
    (tmp_path / "short.py").write_text("y" * 63)
    (tmp_path / "wrong.py").write_bytes(b"\xff" * 100)
    (tmp_path / "text.txt").write_text("t" * 100)
    for skipped in (sorted(sources._SKIPPED_FOLDERS)[0], "config-3.11", "_sysconfigdata_x"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "s.py").write_text("s" * 100)
    train, validation = (sources.python_corpus(split, tmp_path) for split in ("train", "validation"))
    assert 0 < len(held_out) < len(names) and set(validation) == held_out and set(train) == {*names} - held_out
    assert [*train] == sorted(train) and train["b/c.py"].startswith("# b/c.py")
    (tmp_path / "edge.py").write_text("y" * 64)
    found = sources.python_corpus("train", tmp_path) | sources.python_corpus("validation", tmp_path)
    assert "edge.py" in found and "short.py" not in found
    with pytest.raises(ValueError, match="split 'test' is unknown; give 'train' or 'validation'"):
        sources.python_corpus("test", tmp_path)
    with pytest.raises(ValueError, match="holds no Python sources"):
        sources.python_corpus("train", tmp_path / "none")


def test_a_command_measures_once_its_options_are_checked(monkeypatch):
    done = []
    note = lambda name: lambda *given: done.append((name, *given))
    for name in ("check_hosts", "check_plots", "raise_interrupts"):
        monkeypatch.setattr(entry, name, note(name))
    monkeypatch.setattr(command, "evaluate", note("evaluate"))
    for more, plots in (([], []), (["--out", "folder"], [("check_plots", "--out")])):
        done.clear()
        given = entry.parser().parse_args(["--task", "perplexity", *more])
        assert entry.run(given) == 0
        args = entry.with_defaults(given)
        assert done == [("check_hosts", args), *plots, ("raise_interrupts",), ("evaluate", args)]
        assert args.tokens == 16_384 and given.tokens is None
