"""`python -m m3jax.generate`: what it prints, what it refuses, and how it ends."""

import io
import json
import logging
import shutil
import socket
import subprocess
import sys

import jax
import pytest
import tokenizers
from support.generation import engine_for_two
from tokenizers import decoders, models, pre_tokenizers

from m3jax import cli, progress
from m3jax.checkpoint import load, save
from m3jax.cli import generation
from m3jax.completion import Defaults, generate
from m3jax.config import M3Config
from m3jax.decoding import engine_for
from m3jax.decoding.engine import DRAFT_TOKENS
from m3jax.decoding.speculation import MAX_DRAFT_TOKENS
from m3jax.model import init
from m3jax.model.build import WEIGHTS
from m3jax.ops import BACKENDS
from m3jax.text_model import NEW_TOKENS

EOS = 256
CONFIG = M3Config(
    vocab_size=257,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    dense_intermediate_size=16,
    shared_intermediate_size=16,
    num_local_experts=2,
    num_experts_per_tok=1,
    layer_types=("full_attention", "minimax_m3_sparse"),
    mlp_layer_types=("dense", "sparse"),
    rotary_dim=4,
    index_n_heads=1,
    index_head_dim=8,
    index_block_size=16,
    index_topk_blocks=2,
    max_position_embeddings=256,
    eos_token_id=(EOS,),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a tokenizer of one token a byte."""
    path = tmp_path_factory.mktemp("model")
    save(init(CONFIG, dtype="float32"), path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def run(folder, capsys, monkeypatch):
    monkeypatch.setattr(generation, "engine_for", engine_for_two)

    def call(*argv, model=folder):
        status = cli.main(["--model", str(model), "--dtype", "float32", "--max-new-tokens", "12", *map(str, argv)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def copy(folder, tmp_path):
    """The folder again, for tests that change a file in it."""
    return shutil.copytree(folder, tmp_path / "copy")


def objects(out):
    """The JSON objects of an output, one on each line."""
    return [json.loads(line) for line in out.splitlines()]


def test_json_and_text_say_the_same(run):
    status, out, err = run("--prompt", "def f(x):", "--prompt", "a", "--seed", 3, "--json", "--logprobs")
    assert (status, err) == (0, "")
    first, second = objects(out)
    assert first["prompt_tokens"] == 9
    assert len(first["token_ids"]) == len(first["logprobs"]) == first["new_tokens"] == 12
    assert first["stop_reason"] == "length"
    assert first["prefill_tokens_per_second"] > 0
    assert first["decode_tokens_per_second"] > 0
    assert run("--prompt", "def f(x):", "--seed", 3) == (0, first["text"] + "\n", "")
    both = f"==> prompt 1 <==\n{first['text']}\n==> prompt 2 <==\n{second['text']}\n"
    assert run("--prompt", "def f(x):", "--prompt", "a", "--seed", 3)[1] == both
    assert "logprobs" not in objects(run("--prompt", "a", "--json")[1])[0]


def test_same_tokens_as_the_function(run, folder):
    knobs = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5}
    flags = [text for name, value in knobs.items() for text in ("--" + name.replace("_", "-"), value)]
    _, out, _ = run("--prompt-tokens", "1,2,3", "--prompt-tokens", "7", "--json", *flags)
    expected = generate(load(folder, "float32"), [[1, 2, 3], [7]], max_new_tokens=12, **knobs)
    assert [result["token_ids"] for result in objects(out)] == expected


def test_prompt_file_and_standard_input(run, tmp_path, monkeypatch):
    (tmp_path / "prompt").write_text("def f(x):\n", encoding="utf-8")
    expected = run("--prompt", "def f(x):\n")
    assert run("--prompt-file", tmp_path / "prompt") == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f(x):\n")))
    assert run("--prompt-file", "-") == expected


def test_stats_go_to_stderr(run):
    status, _, err = run("--prompt", "abc", "--stats")
    assert status == 0
    assert [line.split(":")[0] for line in err.splitlines()] == ["prefill", "decode", "compile", "cache"]
    assert "3 tokens in" in err


def test_a_stop_string_cuts_the_text(run):
    (free,) = objects(run("--prompt", "abc", "--temperature", 0, "--json")[1])
    stop = free["text"][4:6]
    (cut,) = objects(run("--prompt", "abc", "--temperature", 0, "--json", "--stop", stop)[1])
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["stop_reason"] == "stop_string"
    assert cut["token_ids"] == free["token_ids"][: len(cut["token_ids"])]


def test_generation_config_gives_the_defaults(run, copy):
    """The file says greedy (by do_sample) and ends at a token of its own; a flag wins over it."""
    greedy = objects(run("--prompt", "abc", "--temperature", 0, "--json")[1])[0]["token_ids"]
    sampled = run("--prompt", "abc", "--temperature", 1, "--seed", 1)
    settings = {"do_sample": False, "temperature": 1.0, "eos_token_id": [greedy[5], EOS], "num_beams": 4}
    (copy / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    _, out, err = run("--prompt", "abc", "--json", model=copy)
    (result,) = objects(out)
    assert result["token_ids"] == greedy[: greedy.index(greedy[5]) + 1]
    assert result["stop_reason"] == "stop_id"
    assert err == "m3jax.generate: note: generation_config.json: not supported and left out: num_beams\n"
    (copy / "generation_config.json").write_text('{"do_sample": false}', encoding="utf-8")
    assert run("--prompt", "abc", "--temperature", 1, "--seed", 1, model=copy) == sampled
    assert "give --temperature" in run("--prompt", "abc", "--top-p", 0.5, model=copy)[2]


def test_defaults_of_a_hub_file():
    """The keys of the hub's generation_config.json are read; a value that is not there is off."""
    text = {"bos_token_id": 200019, "do_sample": True, "eos_token_id": 200020, "temperature": 1.0, "top_p": 0.95,
            "transformers_version": "4.46.1"}  # fmt: skip
    assert Defaults.from_dict(text) == Defaults({"temperature": 1.0, "top_p": 0.95}, (200020,))


def test_token_ids_work_without_a_tokenizer(run, copy):
    (copy / "tokenizer.json").unlink()
    status, out, err = run("--prompt-tokens", "1,2,3", "--json", model=copy)
    assert (status, err) == (0, "")
    (result,) = objects(out)
    assert result["text"] is None
    assert run("--prompt-tokens", "1,2,3", model=copy)[1] == ",".join(map(str, result["token_ids"])) + "\n"


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--prompt", "a", "--prompt-tokens", "1"], "not allowed with"),
        (["--prompt", "a", "--unknown"], "unrecognized arguments: --unknown"),
        (["--prompt", "a", "--top-p", "0"], "top_p = 0.0"),
        (["--prompt", "a", "--max-new-tokens", "300"], "ask for at most 255"),
        (["--prompt", "a" * 300], "prompt 1 has 300 tokens and the model's context is 256"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompt", "a", "--stop", ""], "--stop '': the text would end before it began"),
        (["--prompt", "a", "--draft-tokens", "2"], "--draft-tokens needs --draft"),
        (["--prompt-tokens", "1,x"], "'1,x': write token ids with commas"),
        (["--prompt-tokens", "257"], "prompt 1: 257 is no token id; they are integers from 0 to 256"),
        (["--prompt-tokens", "-3"], "prompt 1: -3 is no token id"),
        (["--prompt-file", "/nowhere/prompt"], "cannot read the prompt file /nowhere/prompt: No such file"),
        (["--prompt", "a", "--mesh", "rows=2"], "mesh 'rows=2'"),
        (["--prompt", "a", "--backend", "triton"], "needs a GPU, and JAX runs on a CPU"),
        (["--prompt", "a", "--backend", "cuda"], "invalid choice: 'cuda'"),
        (
            ["--prompt", "a", "--mesh", "data=64"],
            "start with XLA_FLAGS=--xla_force_host_platform_device_count=64 to divide",
        ),
        (["--prompt", "a", "--dtype", "int8"], "dtype = 'int8'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_are_one_line(run, argv, match):
    status, out, err = run(*argv)
    assert status == 2
    assert out == ""
    assert err.startswith("m3jax.generate: error: ")
    assert err.count("\n") == 1
    assert match in err


def test_a_number_out_of_its_range_is_refused_before_jax_is_imported():
    """In the time that argparse takes, though the numbers are those of the sampler."""
    wrong = ["--temperature -1", "--top-p 0", "--top-k -2", "--seed -1", "--max-new-tokens 0"]
    program = f"""
import sys
from m3jax.cli import chat, main
for words in {wrong}:
    assert main(["--prompt", "a", *words.split()]) == chat.main(words.split()) == 2
assert "jax" not in sys.modules and "numpy" not in sys.modules, "something large was imported"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, words in zip(done.stderr.splitlines(), (words for words in wrong for _ in range(2)), strict=True):
        assert f"{words.split()[0][2:].replace('-', '_')} = " in line


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", "[]", "is a JSON object"),
        ("generation_config.json", '{"top_p": 7}', "generation_config.json: top_p = 7"),
        ("config.json", None, "no config.json"),
        ("model.safetensors", "", "model.safetensors"),
    ],
)
def test_a_bad_folder_is_one_line(run, copy, name, content, match):
    for file in copy.glob("*.safetensors" if name.endswith("safetensors") else name):
        file.unlink()
    if content is not None:
        (copy / name).write_text(content, encoding="utf-8")
    status, out, err = run("--prompt", "a", model=copy)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert match in err


def test_a_prompt_that_is_no_text(run, tmp_path):
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    assert "is not UTF-8 text: byte 2" in run("--prompt-file", tmp_path / "prompt")[2]


def test_a_name_of_the_hub_is_what_its_cache_holds(run, folder, tmp_path, monkeypatch):
    """Nothing is asked over the network; of what is not there the error has the line that gets it."""

    def start(model, *_args, **_knobs):
        raise ValueError(f"loaded {model.config.vocab_size}")

    monkeypatch.setattr(generation, "engine_for", start)
    monkeypatch.setattr(socket, "socket", pytest.fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--org--name"
    for part in ("blobs", "refs", "snapshots/123"):
        (kept / part).mkdir(parents=True)
    (kept / "refs" / "main").write_text("123")
    for file in folder.iterdir():
        shutil.copy(file, kept / "blobs")
        (kept / "snapshots" / "123" / file.name).symlink_to(kept / "blobs" / file.name)
    assert run("--prompt", "abc", model="org/name") == (2, "", "m3jax.generate: error: loaded 257\n")
    status, out, err = run("--prompt", "abc", model="org/other")
    assert (status, out) == (2, "") and err.endswith(": hf download org/other --local-dir other\n")
    assert err.count("\n") == 1


def test_nan_weights_are_an_error(run, copy):
    model = load(copy, "float32")
    model.norm[...] = model.norm[...] * float("nan")
    save(model, copy)
    status, _, err = run("--prompt", "a", model=copy)
    assert status == 2
    assert "NaN or infinite" in err


def test_interrupt(run, monkeypatch):
    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate_text", stop)
    assert run("--prompt", "a") == (130, "", "")


def test_float64_needs_no_python(run, monkeypatch):
    """It needs a setting of jax, which the command line makes, and takes back."""

    def start(model, *_args, **_knobs):
        raise ValueError(f"loaded in {model.dtype}")

    monkeypatch.setattr(generation, "engine_for", start)
    assert run("--prompt", "a", "--dtype", "float64") == (2, "", "m3jax.generate: error: loaded in float64\n")
    assert not jax.config.jax_enable_x64


@pytest.mark.further  # how lines are said: test_waiting.py
def test_it_says_what_is_waited_for(run, folder, monkeypatch, capsys, caplog):
    """Lines come by the clock, so that what is compiled already or a fast machine shows few: the logger has all."""
    monkeypatch.setenv("M3JAX_PROGRESS", "1")
    monkeypatch.setattr(generation, "engine_for", engine_for)  # a single prompt has programs of its own
    monkeypatch.setattr(progress, "PAUSE", 0.001)
    with caplog.at_level(logging.DEBUG, "m3jax"):
        status, out, err = run("--prompt", "abc", "--json")
    assert status == 0 and len(objects(out)) == 1
    assert err and all(line.startswith("m3jax: ") for line in err.splitlines())
    said = ["compiling prefill of 1 x 256 tokens, decode of 32 steps", "reading the prompt", "generating"]
    assert [text for text in said if text in caplog.text] == said
    model = load(folder, "float32")
    with caplog.at_level(logging.DEBUG, "m3jax"):
        generate(model, [[1, 2, 3]], max_new_tokens=12)
    assert "m3jax: " in capsys.readouterr().err
    assert "compiling prefill of 1 x 256 tokens, decode of 64 steps" in caplog.text
    generate(model, [[1, 2, 3]], max_new_tokens=12, progress=False)
    assert capsys.readouterr().err == ""


def test_closed_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    status, _, err = run("--prompt-file", "-")
    assert status == 2 and "standard input is closed" in err and err.count("\n") == 1


def test_the_arguments_say_what_the_package_says():
    """They are read before the package is imported, so they have its constants of their own."""
    assert (cli.arguments.BACKENDS, cli.arguments.WEIGHTS, cli.DRAFT_TOKENS, cli.MAX_DRAFT_TOKENS) == (
        BACKENDS,
        WEIGHTS,
        DRAFT_TOKENS,
        MAX_DRAFT_TOKENS,
    )
    assert cli.NEW_TOKENS == NEW_TOKENS
