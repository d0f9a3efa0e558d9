"""`python -m m3jax.evaluate`: each task ends in a table, a JSON file and a picture, and bad input in one line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from support import tiny
from tokenizers import decoders, models, pre_tokenizers

from m3jax.checkpoint import save
from m3jax.cli.arguments import BACKENDS
from m3jax.evaluate.__main__ import OPTIONS, TASKS, main, parser, with_defaults
from m3jax.evaluate.command import as_text, column_names
from m3jax.evaluate.tasks import TASKS as MEASURED
from m3jax.ops import BACKENDS as ALL_BACKENDS

CONFIG = tiny.config("dM", vocab_size=264, max_position_embeddings=512)
TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two random models, `one` and `two`, with a tokenizer of one token a byte, and a text."""
    place = tmp_path_factory.mktemp("models")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    for seed, name in enumerate(("one", "two")):
        save(tiny.model(CONFIG, seed), place / name)
        backend.save(str(place / name / "tokenizer.json"))
    (place / "text.py").write_text(TEXT, encoding="utf-8")
    return place


@pytest.fixture
def run(folder, capsys):
    """Runs the command on model `one` and the text, in float32."""

    def call(*argv: object, text: bool = True) -> tuple[int, str, str]:
        given = ["--model", folder / "one", "--dtype", "float32", *(["--text", folder / "text.py"] if text else [])]
        status = main(list(map(str, ["--chunk", 32, "--batch", 2, *given, *argv])))
        return status, *capsys.readouterr()

    return call


SIZES = {
    "perplexity": ("--tokens", 150, "--context", 64),
    "recall": ("--lengths", "100", "--depths", "0,1", "--repeats", 1),
    "caught": ("--context", 128, "--prompts", 1),
    "acceptance": ("--draft", "ngram", "--prompts", 2, "--context", 24, "--max-new-tokens", 8, "--temperatures", 0),
}


@pytest.mark.parametrize(
    "task",
    ["perplexity", *(pytest.param(task, marks=pytest.mark.further) for task in SIZES if task != "perplexity")],
)
def test_a_task_writes_its_figures_and_a_picture(run, folder, tmp_path, task):
    """Measured again beside another model, the first one's figures are the same, and both stand side by side."""
    status, table, err = run("--task", task, *SIZES[task], "--out", tmp_path / "one")
    assert (status, err) == (0, ""), err
    assert (tmp_path / "one" / f"{task}.png").read_bytes().startswith(b"\x89PNG") and "one, float32" in table
    report = json.loads((tmp_path / "one" / f"{task}.json").read_text())
    assert (report["task"], report["schema"]) == (task, 1)
    if task == "perplexity":
        settings = dict(text=[str(folder / "text.py")], tokens=150, context=64, batch=2, chunk=32)
        assert report["settings"] == settings
    status, table, _ = run("--task", task, *SIZES[task], "--against", folder / "two", "--out", tmp_path / "both")
    assert status == 0 and table.split("\n")[0].split() == ["one", "two"]
    both = json.loads((tmp_path / "both" / f"{task}.json").read_text())["results"]
    assert both[0] == report["results"][0] and both[1]["model"].endswith("two")
    figures = [{key: value for key, value in result.items() if key != "model"} for result in both]
    assert task in ("recall", "acceptance") or figures[0] != figures[1]


@pytest.mark.further  # its parts: test_divergence.py
def test_divergence_of_dtypes(run, tmp_path):
    """A reference is written, the model itself agrees with it to the bit, a float8 cache does not."""
    status, out, err = run("--task", "kl", "--write-reference", tmp_path / "ref", "--prompts", 2, "--context", 40)
    assert (status, err) == (0, "") and "logits of 2 prompts of 40 tokens" in out
    types = ("--cache-dtype", "model,float8_e4m3fn")
    status, table, err = run(
        "--task", "kl", "--reference", tmp_path / "ref", *types, "--out", tmp_path / "out", text=False
    )
    assert (status, err) == (0, ""), err
    assert "float32, cache float8_e4m3fn" in table.split("\n")[0]
    exact, float8 = json.loads((tmp_path / "out" / "kl.json").read_text())["results"]
    assert exact["mean"] == 0 < float8["mean"] and (exact["kv_dtype"], float8["kv_dtype"]) == (
        "float32",
        "float8_e4m3fn",
    )
    assert (tmp_path / "out" / "kl.png").is_file()
    before = {path: path.read_bytes() for path in (tmp_path / "ref").iterdir()}
    status, _, err = run("--task", "kl", "--write-reference", tmp_path / "ref", "--prompts", 2, "--context", 40)
    assert status == 2 and "reference.json is there already" in err
    assert {path: path.read_bytes() for path in (tmp_path / "ref").iterdir()} == before


@pytest.mark.further  # one task on a mesh: test_caught.py
def test_a_mesh_gives_the_figures_of_one_device(run, tmp_path):
    loss = []
    for mesh in ((), ("--mesh", "context=2,expert=2,tensor=2")):
        status, _, err = run("--task", "perplexity", *SIZES["perplexity"], *mesh, "--out", tmp_path / str(len(mesh)))
        assert (status, err) == (0, ""), err
        loss.append(json.loads((tmp_path / str(len(mesh)) / "perplexity.json").read_text())["results"][0]["loss"])
    np.testing.assert_allclose(*loss, rtol=1e-5)


def test_a_picture_without_matplotlib_is_refused_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("m3jax.evaluate.command.evaluate", pytest.fail)
    status, out, err = run("--task", "perplexity", "--out", tmp_path / "out")
    assert (status, out) == (2, "") and not (tmp_path / "out").exists()
    assert err == "m3jax.evaluate: error: --out needs matplotlib for its picture: pip install 'm3jax[plots]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task perplexity --lengths 100", "--lengths is for --task recall, not perplexity"),
        ("--task perplexity --text nowhere.txt", "--text nowhere.txt: cannot be read: No such file"),
        ("--task perplexity --tokens 1", "fewer than 2 tokens"),
        ("--task perplexity --context 513", "--context 513: the model reads 512 tokens at most"),
        ("--task perplexity --context 64 --skip 64", "--skip 64: windows have 64 tokens"),
        ("--task perplexity --batch 0", "--batch 0: too small"),
        ("--task perplexity --dtype float32,int8", "--dtype 'int8': choose of bfloat16"),
        ("--task perplexity --dtype float32 --cache-dtype int4", "--cache-dtype 'int4': choose of model"),
        ("--task perplexity --backend cuda", "backend = 'cuda'"),
        ("--task perplexity --mesh expert=3000", "3000"),
        ("--task perplexity --against nowhere", "nowhere"),
        ("--task recall --lengths 600", "--lengths 600: the model reads 512 tokens at most"),
        ("--task recall --lengths 100,x", "--lengths"),
        ("--task recall --lengths 100 --kinds haystack", "kind 'haystack' is unknown"),
        ("--task kl", "write them once with --write-reference"),
        ("--task kl --reference a --write-reference b", "not both at a time"),
        ("--task kl --reference nowhere", "nowhere: no such folder"),
        ("--task kl --write-reference x --dtype float32,bfloat16", "of one model in one way"),
        ("--task caught --context 128 --skip 128", "--skip 128: rows have 128 tokens"),
        ("--task caught --context 500 --prompts 0", "--prompts 0: too small"),
        ("--task acceptance", "needs --draft"),
        ("--task acceptance --draft ngram --context 500", "--context 500: the model reads 448 tokens at most here"),
        ("--task acceptance --draft nowhere --context 24", "nowhere"),
        ("--task guessing", "invalid choice: 'guessing'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_lost(run, tmp_path, monkeypatch, arguments, message):
    """Before any weights are read: they would take minutes."""
    monkeypatch.chdir(tmp_path)
    for module in ("subjects", "command"):
        monkeypatch.setattr(f"m3jax.evaluate.{module}.{'load' if module == 'subjects' else 'each_loaded'}", pytest.fail)
    status, out, err = run(*arguments.split(), text="--text" not in arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1, err
    assert message in err


@pytest.mark.parametrize(("data", "message"), [(b"\xff", "byte 0 is wrong"), (b"", "is empty")])
def test_a_text_that_is_none(run, tmp_path, data, message):
    (tmp_path / "text").write_bytes(data)
    status, _, err = run("--task", "perplexity", "--text", tmp_path / "text", text=False)
    assert status == 2 and message in err and err.count("\n") == 1


def test_a_report_is_not_written_over(run, tmp_path):
    (tmp_path / "caught.png").write_text("mine")
    status, _, err = run("--task", "caught", *SIZES["caught"], "--out", tmp_path)
    assert status == 2 and "caught.png is there already" in err
    assert (tmp_path / "caught.png").read_text() == "mine" and not (tmp_path / "caught.json").exists()


def test_help_and_wrong_arguments_need_no_jax():
    code = (
        "import sys\nfrom m3jax.evaluate.__main__ import main\n"
        "status = main(sys.argv[1:])\nsys.exit(9 if 'jax' in sys.modules else status)"
    )
    for argv, status in ((["--task", "recall", "--tokens", "3"], 2), (["--task"], 2), (["--help"], 0)):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == status, (argv, done.stderr)


def test_what_is_said_without_jax_is_so():
    assert set(TASKS) == MEASURED.keys() and {task for tasks in OPTIONS.values() for task in tasks} <= set(TASKS)
    assert set(BACKENDS) == set(ALL_BACKENDS)


def test_columns_are_named_by_what_tells_them_apart():
    base = dict(model="x/one", dtype="float32", kv_dtype="float32", index_dtype="float32", backend="xla")
    of = lambda *changes: column_names([base | change for change in changes])
    assert of({}) == of({}, {})[:1] == ["one, float32"]
    assert of({}, dict(kv_dtype="float8")) == ["float32", "float32, cache float8"]
    assert of({}, dict(backend="triton")) == ["float32, xla", "float32, triton"]
    assert of({}, dict(model="y/two", index_dtype="float8")) == ["one", "two, index float8"]
    assert of({}, dict(model="/")) == ["one", "/"]
    other = dict(model="two", dtype="bfloat16", kv_dtype="f8", index_dtype="i8", backend="triton")
    assert of({}, other) == ["one, float32, xla", "two, bfloat16, cache f8, index i8, triton"]
    assert as_text([["", "ab"], ["long name", "c"], ["x", ""]]) == "           ab\nlong name   c\nx\n"


# What docs/evaluate.md and --help say that a task does where nothing is asked for.
DEFAULTS = {
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
    asked = DEFAULTS[task] | (dict(reference=Path("x")) if task == "kl" else {})
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
