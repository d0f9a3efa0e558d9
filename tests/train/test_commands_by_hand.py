"""What the commands of training hand on, with no model: each part that reads, computes or writes is noted."""

import contextlib
import dataclasses
import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from m3jax.train import __main__ as command
from m3jax.train import convert as convert_module
from m3jax.train import convert_command, keeping, sft_command
from m3jax.train import sft as sft_module
from m3jax.train.__main__ import main, parser
from m3jax.train.accumulate import Accumulated
from m3jax.train.conversations import Example
from m3jax.train.convert import ConvertSettings, WarmUpLoss
from m3jax.train.convert_command import convert_parser
from m3jax.train.keeping import save_trained, states_in
from m3jax.train.lora import LoraLoss, LoraSettings
from m3jax.train.sft import SFTLoss, SFTSettings
from m3jax.train.sft_command import merge_parser, run_merge, sft_parser

pytestmark = pytest.mark.usefixtures("unchecked")
CONFIG = SimpleNamespace(index_block_size=16, max_position_embeddings=4000, eos_token_id=(3,), vocab_size=90,
                         index_head_dim=12)  # fmt: skip


class Calls(list):
    """The calls that were made, (name, arguments, keywords), and what each gives back."""

    def of(self, name, result=None):
        def call(*given, **named):
            self.append((name, given, named))
            return result(*given, **named) if callable(result) else result

        return call

    def one(self, name):
        (found,) = [(given, named) for called, given, named in self if called == name]
        return found


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Replaces what the commands import as they run."""
    noted = Calls()
    model = SimpleNamespace(config=CONFIG)
    examples = [Example(np.zeros(n, np.int32), np.ones(n, bool)) for n in (5, 1030, 9)]
    documents = [f"document {i}" for i in range(50)]
    state = SimpleNamespace(model="trained")
    replaced = {
        "m3jax.assets.embedded_path": lambda: Path("embedded"),
        "m3jax.checkpoint.load": noted.of("load", model),
        "m3jax.checkpoint.save": noted.of("save"),
        "m3jax.dialogue.answer.stop_ids": lambda tokenizer, ids: (tokenizer, ids),
        "m3jax.hosts.run.is_first": lambda: noted.is_first,
        "m3jax.parallel.as_mesh": lambda text: text and f"mesh {text}",
        "m3jax.text.Tokenizer.from_pretrained": lambda folder: f"tokenizer of {folder}",
        "m3jax.text.ChatTemplate.from_folder": lambda folder: f"template of {folder}",
        "m3jax.train.conversations.load_examples": noted.of("load_examples", examples),
        "m3jax.train.keeping.save_trained": noted.of("save_trained", " in a layout"),
        "m3jax.train.sft.PackedBatches": noted.of("batches", "batches"),
        "m3jax.train.sft.check_rows": noted.of("check_rows"),
        "m3jax.train.sft.fine_tune": noted.of("fine_tune", state),
        "m3jax.train.sft.writer_of_events": noted.of("writer_of_events"),
        "m3jax.train.step.init_state": noted.of("init_state", "state"),
        "m3jax.train.step.make_optimizer": noted.of("make_optimizer", "adamw"),
        "m3jax.train.step.cast_weights": noted.of("cast_weights", "cast"),
        "m3jax.train.lora.load_adapters": lambda folder, of: (f"adapters of {folder}", LoraSettings(5, 7.0)),
        "m3jax.train.lora.init_adapters": noted.of("init_adapters", "new adapters"),
        "m3jax.train.lora.init_adapter_state": noted.of("init_adapter_state", "adapter state"),
        "m3jax.train.lora.save_adapters": noted.of("save_adapters"),
        "m3jax.train.lora.merge_folder": noted.of("merge_folder", "merged"),
        "m3jax.train.dense.read_dense": noted.of("read_dense", model),
        "m3jax.train.documents.load_documents": noted.of("load_documents", documents),
        "m3jax.train.convert.convert": noted.of("convert", ("converted", {"before": {"dense_loss": 2.0},
                                                                          "after": {"loss": 1.5}})),
        "m3jax.files.replace_file": noted.of("replace_file"),
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(name, value)
    for module in (sft_command, convert_command, command):
        monkeypatch.setattr(module, "say", noted.of("say"))
    noted.is_first, noted.model, noted.examples, noted.documents = True, model, examples, documents
    (tmp_path / "data").write_text("x")
    noted.digest = hashlib.sha256(b"x").hexdigest()
    return noted


def sft(tmp_path, *words):
    given = ["--data", tmp_path / "data", "--out", tmp_path / "out", "--steps", 40, *words]
    sft_command._train(sft_parser("sft").parse_args(list(map(str, given))))


SETTINGS = SFTSettings(
    steps=40, length=64, rows=2, accumulate=3, learning_rate=0.5, schedule="linear", warmup_steps=4, end_rate=0.25,
    weight_decay=0.125, clip_norm=2.0, index_loss=0.75, compute_dtype="float32", remat=False, seed=6,
)  # fmt: skip
WORDS = ("--length", 64, "--rows", 2, "--accumulate", 3, "--learning-rate", 0.5, "--schedule", "linear",
         "--warmup-steps", 4, "--end-rate", 0.25, "--weight-decay", 0.125, "--clip-norm", 2, "--dtype", "float32",
         "--no-remat", "--seed", 6)  # fmt: skip


def test_fine_tuning_trains_all_weights_in_float32(calls, tmp_path):
    """Settings are those of the options; the index branch is frozen where it has no loss, the tower always."""
    sft(tmp_path, *WORDS, "--index-loss", 0.75, "--mesh", "data=2", "--tensorboard", "events", "--save-every", 7)
    out = tmp_path / "out"
    assert [name for name, *_ in calls][:1] == ["writer_of_events"]
    assert calls.one("load") == ((None,), dict(dtype="float32", mesh="mesh data=2"))
    (data, template, tokenizer, ends, most), _ = calls.one("load_examples")
    assert (data, template, tokenizer) == (str(tmp_path / "data"), "template of embedded", "tokenizer of embedded")
    assert ends == ("tokenizer of embedded", (3,)) and most == 64
    assert calls.one("check_rows")[0] == (2, "mesh data=2") and calls.one("batches")[0] == (
        calls.examples,
        SETTINGS,
        16,
    )
    assert calls.one("init_state")[0] == (calls.model, "adamw")
    (rate, decay), named = calls.one("make_optimizer")
    assert [rate(step) for step in (0, 4, 40)] == [SETTINGS.rate(step) for step in (0, 4, 40)] and decay == 0.125
    assert named == dict(frozen_index=False, frozen_vision=True, clip_norm=2.0)
    given, named = calls.one("fine_tune")
    assert given == ("state", "batches", "adamw", SFTLoss(0.75, compute_dtype="float32", remat=False), SETTINGS, out)
    assert named["say"] is sft_command.say
    assert {name: x for name, x in named.items() if name != "say"} == dict(
        origin={"model": "embedded", "data": calls.digest}, mesh="mesh data=2", save_every=7,
        metrics=out / "metrics.jsonl", tensorboard="events",
    )  # fmt: skip
    assert calls.one("save_trained")[0] == ("trained", out / "model", Path("embedded"))
    assert calls.one("say")[0] == (f"the trained model is in {out / 'model'} in a layout, with float32 weights",)


@pytest.mark.parametrize(("length", "longest", "rows_of"), [(None, 1030, 1040), (None, 900, 1024), (32, 1030, 32)])
def test_a_row_holds_the_longest_conversation_in_whole_blocks(calls, tmp_path, length, longest, rows_of):
    """At least 1,024 tokens where nothing is asked for; other processes write and say nothing."""
    calls.examples[1] = Example(np.zeros(longest, np.int32), np.ones(longest, bool))
    calls.is_first = False
    sft(tmp_path, *([] if length is None else ["--length", length]), "--metrics", "here", "--model", "folder")
    assert calls.one("load_examples")[0][-1] == (4000 if length is None else length)
    (_, settings, _), _ = calls.one("batches")
    assert settings.length == rows_of and (settings.remat, settings.index_loss) == (True, 0.0)
    assert calls.one("make_optimizer")[1]["frozen_index"] is True
    _, named = calls.one("fine_tune")
    assert not {"metrics", "tensorboard"} & named.keys() and named["say"]("x") is None
    assert named["origin"]["model"] == "folder" and not [name for name, *_ in calls if name == "say"]
    assert calls.one("save_trained")[0][-1] == Path("folder")


def test_adapters_are_trained_on_a_model_in_the_dtype_of_a_pass(calls, tmp_path):
    """New ones of a rank, an alpha of twice that and both kinds of targets, or those of a folder."""
    for words, adapters, shape in (
        (["--lora", 4, "--seed", 9], "new adapters", LoraSettings(4, 8.0)),
        (["--lora", 4, "--lora-alpha", 3, "--lora-targets", "experts"], "new adapters",
         LoraSettings(4, 3.0, ("experts",))),
        (["--adapter", "before"], "adapters of before", LoraSettings(5, 7.0)),
    ):  # fmt: skip
        calls.clear()
        sft(tmp_path, *words)
        assert calls.one("load")[1]["dtype"] == "bfloat16" and calls.one("init_adapter_state")[0] == (adapters, "adamw")
        if "--lora" in words:
            assert calls.one("init_adapters")[0] == (calls.model, shape, 9 if "--seed" in words else 0)
        given, named = calls.one("fine_tune")
        loss = LoraLoss(SFTLoss(0.0, compute_dtype="bfloat16", remat=True), shape.scale)
        assert given[0] == "adapter state" and given[3] == loss and named["shared"] == {"base": calls.model}
        of_adapters = dict(adapter="before" if "--adapter" in words else None, rank=shape.rank, alpha=shape.alpha)
        assert named["origin"] == {
            "model": "embedded", "data": calls.digest, **of_adapters, "targets": list(shape.targets)
        }  # fmt: skip
        out = tmp_path / "out" / "adapter"
        assert calls.one("save_adapters") == (("trained", shape, calls.model, out), dict(base="embedded"))
        assert calls.one("say")[0][0].startswith(f"the adapters are in {out}, in PEFT's layout")
    for words in (["--lora", 4], ["--adapter", "x"]):
        with pytest.raises(ValueError, match="--index-loss trains the index branch, which has no adapters"):
            sft(tmp_path, *words, "--index-loss", 1)


def test_merged_weights_are_read_in_float32_and_rounded_once(calls, tmp_path):
    for model, source in (([], Path("embedded")), (["--model", "folder"], "folder")):
        calls.clear()
        words = [*model, "--adapter", "a", "--out", str(tmp_path), "--dtype", "bfloat16"]
        assert run_merge(merge_parser("merge").parse_args(words)) == 0
        assert calls.one("load") == ((model[1] if model else None,), dict(dtype="float32"))
        assert calls.one("merge_folder")[0] == (calls.model, "a")
        assert calls.one("cast_weights")[0] == ("merged", "bfloat16")
        assert calls.one("save") == (("cast", tmp_path), dict(copy_from=source))


def converted(calls, tmp_path, *words, warm_up=3):
    calls.clear()
    given = ["--model", "dense", "--data", tmp_path / "data", "--out", tmp_path / "out", "--steps", 10, *words]
    args = convert_parser("convert").parse_args(list(map(str, given)))
    convert_command._convert(args, warm_up)


def test_a_conversion_keeps_a_twentieth_of_the_documents_to_measure_on(calls, tmp_path):
    """The last ones; both phases have the sizes of the options, and rates and seeds of their own."""
    out = tmp_path / "out"
    converted(
        calls, tmp_path, "--block-size", 16, "--topk-blocks", 3, "--index-dim", 12, "--dense-layers", 1, "--seed", 5,
        "--rows", 2, "--accumulate", 4, "--weight-decay", 0.5, "--clip-norm", 3, "--dtype", "float32", "--index-rate",
        0.25, "--learning-rate", 0.125, "--index-loss", 2, "--mesh", "data=2", "--save-every", 6, "--no-remat",
    )  # fmt: skip
    assert calls.one("check_rows")[0] == (2, "mesh data=2")
    assert calls.one("read_dense") == (
        ("dense", 5, "mesh data=2"), dict(block_size=16, topk_blocks=3, index_dim=12, dense_layers=1)
    )  # fmt: skip
    (data, tokenizer, vocab_size, length), _ = calls.one("load_documents")
    assert (data, tokenizer(), vocab_size, length) == (str(tmp_path / "data"), "tokenizer of dense", 90, 8 * 3 * 16)
    shared = dict(
        length=384, rows=2, accumulate=4, weight_decay=0.5, clip_norm=3.0, compute_dtype="float32", remat=False
    )
    settings = ConvertSettings(
        warm_up=SFTSettings(steps=3, learning_rate=0.25, seed=5, **shared),
        sparse=SFTSettings(steps=7, learning_rate=0.125, seed=6, index_loss=2.0, **shared),
    )
    given, named = calls.one("convert")
    assert given == (calls.model, calls.documents[:-2], calls.documents[-2:], settings, out, out / "metrics.jsonl")
    assert named["origin"] == {
        "model": "dense", "data": calls.digest, "held_out": 2, "block_size": 16, "topk_blocks": 3, "index_dim": 12,
        "dense_layers": 1,
    }  # fmt: skip
    assert named["save_every"] == 6 and calls.one("save_trained")[0] == ("converted", out / "model", "dense")
    ((file, text),) = [calls.one("replace_file")[0]]
    assert (
        file == out / "report.json" and text.startswith(b'{\n "before": {\n  "dense_loss": 2.0') and text[-1:] == b"\n"
    )
    said = [given[0] for name, given, _ in calls if name == "say"]
    assert said == [
        "held out: loss 2.0000 before, dense, and 1.5000 after (-25.00%)",
        f"the MSA model is in {out / 'model'} in a layout, with float32 weights",
    ]


def test_a_conversion_needs_documents_on_both_sides(calls, tmp_path):
    for held_out, learnt in ((None, 48), (1, 49), (49, 1)):
        converted(calls, tmp_path, *([] if held_out is None else ["--held-out", held_out]), "--freeze-index")
        given, _ = calls.one("convert")
        assert (len(given[1]), len(given[2]), given[3].sparse.index_loss) == (learnt, 50 - learnt, 0.0)
    for held_out in (0, 50):
        with pytest.raises(ValueError, match=f"--held-out {held_out}: the data is 50 documents"):
            converted(calls, tmp_path, "--held-out", held_out)
    del calls.documents[1:]
    with pytest.raises(ValueError, match="--held-out 1: the data is 1 documents of at most"):
        converted(calls, tmp_path)
    calls.documents.append("another")
    calls.is_first = False
    converted(calls, tmp_path, "--length", 4000)
    given, named = calls.one("convert")
    assert len(given[1]) == len(given[2]) == 1 and given[-1] is None and named["say"]("x") is None
    assert not {"say", "replace_file"} & {name for name, *_ in calls}
    with pytest.raises(ValueError, match="--length 4001: the model's context is 4000 tokens"):
        converted(calls, tmp_path, "--length", 4001)


def test_a_policy_is_trained_by_the_task_on_master_weights_in_float32(calls, tmp_path, monkeypatch):
    """With the folder's chat template where it has one; policies that part are said in a line."""
    from m3jax.train.grpo import PartedPolicies

    folder = tmp_path / "folder"
    folder.mkdir()
    task = SimpleNamespace(opened=[])

    @contextlib.contextmanager
    def shared_task(open_task, channel):
        task.opened.append((open_task.func, open_task.args, channel))
        yield "task"

    monkeypatch.setattr("m3jax.train.shared_task.shared_task", shared_task)
    monkeypatch.setattr("m3jax.train.grpo.train_policy", calls.of("train_policy", "policy"))
    words = ["grpo", "--task", tmp_path / "data", "--out", tmp_path / "out", "--steps", 3, "--model", folder]
    args = parser().parse_args(list(map(str, [*words, "--reward-seconds", 9, "--mesh", "data=2"])))
    origin = {"model": str(folder), "task": calls.digest}
    for has_template, is_first in ((False, True), (True, False)):
        calls.clear()
        calls.is_first = is_first
        if has_template:
            (folder / "chat_template.jinja").write_text("")
        command._train(args, "settings", "channel")
        assert calls.one("load") == ((str(folder),), dict(dtype="float32", mesh="mesh data=2", vision=False))
        template = f"template of {folder}" if has_template else None
        metrics = args.out / "metrics.jsonl" if is_first else None
        given, _ = calls.one("train_policy")
        tell = given[7]
        assert (*given[:7], given[8]) == (
            calls.model, f"tokenizer of {folder}", template, "task", "settings", args.out, metrics, origin
        )  # fmt: skip
        assert calls.one("save_trained")[0] == ("policy", args.out / "model", folder)
        assert tell is command.say if is_first else tell("x") is None
        said = [given[0] for name, given, _ in calls if name == "say"]
        assert said == [f"the trained model is in {args.out / 'model'} in a layout, with float32 weights"] * is_first
    from m3jax.train.rewards import TaskFile

    assert task.opened == [(TaskFile, (str(tmp_path / "data"), 9.0), "channel")] * 2

    def part(*_):
        raise PartedPolicies("they differ")

    monkeypatch.setattr("m3jax.train.grpo.train_policy", part)
    with pytest.raises(ValueError, match=r"^they differ$"):
        command._train(args, "settings", "channel")


def test_the_first_word_says_which_command_it_is(monkeypatch):
    """Of the process where none are given; grpo keeps its word, which says that it stands first."""
    ran = []
    noted = lambda prog, parser, run, words: ran.append((prog, parser.prog, run, words)) or 7
    monkeypatch.setattr(command, "run_command", noted)
    for word, run in (
        ("sft", command.run_sft), ("merge", command.run_merge), ("convert", command.run_convert), ("grpo", command.run)
    ):  # fmt: skip
        assert main([word, "--x"]) == 7
        prog = "m3jax.train" if word == "grpo" else f"m3jax.train {word}"
        assert ran.pop() == (prog, f"python -m {prog}", run, ["grpo", "--x"] if word == "grpo" else ["--x"])
    monkeypatch.setattr(command.sys, "argv", ["program", "sft", "--y"])
    assert main() == 7 and ran.pop()[2:] == (command.run_sft, ["--y"])
    assert main([]) == 7 and ran.pop()[2:] == (command.run, [])


def test_a_command_runs_on_all_hosts_under_its_name(monkeypatch, tmp_path):
    """With compiled programs kept; each takes the options of a run on several hosts."""
    ran, checked = [], []
    (tmp_path / "data").write_text("x")
    monkeypatch.setattr("m3jax.compile_cache.compile_cache", contextlib.nullcontext)
    monkeypatch.setattr("m3jax.hosts.run.on_hosts", lambda *given: ran.append(given))
    checks = ["check_options", "check_hosts", "raise_interrupts"]
    for module in (sft_command, convert_command, command):
        for check in checks:
            monkeypatch.setattr(module, check, lambda *_, check=check: checked.append(check))
    monkeypatch.setattr(sft_command, "_train", lambda args: ("sft", args))
    monkeypatch.setattr(convert_command, "_convert", lambda args, warm_up: ("convert", args, warm_up))
    monkeypatch.setattr(command, "_train", lambda args, settings, channel: ("grpo", args, settings.steps, channel))
    shared = ["--out", str(tmp_path / "runs" / "out"), "--steps", "10"]
    data = ["--data", str(tmp_path / "data")]
    for name, of, run, words, expected in (
        ("m3jax.train sft", sft_parser("sft"), command.run_sft, data, ("sft",)),
        ("m3jax.train convert", convert_parser("x"), command.run_convert, [*data, "--model", "m"], ("convert", 2)),
        ("m3jax.train grpo", parser(), command.run, ["grpo", "--task", data[1]], ("grpo", 10, "channel")),
    ):
        args = of.parse_args([*words, *shared])
        checked.clear()
        assert run(args) == 0 and "coordinator" in vars(args) and checked == checks
        given, called, work = ran.pop()
        assert (given, called) == (args, name)
        kind, of_work, *rest = work("channel")
        assert (kind, *rest) == expected and of_work is args
    assert (tmp_path / "runs" / "out").is_dir()


# What is kept


def test_a_trained_model_is_in_the_hub_s_layout_where_one_process_has_it(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(keeping, "save", calls.of("save"))
    monkeypatch.setattr(keeping, "save_orbax", calls.of("save_orbax"))
    assert save_trained("model", "out", "source") == ""
    monkeypatch.setattr(keeping.jax, "process_count", lambda: 2)
    assert save_trained("model", "out", "source") == " in Orbax's layout (m3jax.load_orbax)"
    assert calls == [("save", ("model", "out"), dict(copy_from="source")), ("save_orbax", ("model", "out"), {})]


def test_states_are_closed_and_their_writer_is_quiet(monkeypatch, tmp_path):
    """Two are kept, in `states`, written while training goes on; what fails is raised, and logged no more."""
    made, log = [], logging.getLogger("absl")
    keeper = SimpleNamespace(
        close=lambda: made.append("closed"), latest_step=lambda: None, directory=tmp_path / "states"
    )  # fmt: skip
    manager = lambda folder, options: made.append((folder, options)) or keeper
    monkeypatch.setattr(keeping.ocp, "CheckpointManager", manager)
    monkeypatch.setattr(keeping.ocp, "CheckpointManagerOptions", lambda **options: options)
    level = log.level
    with states_in(tmp_path) as found:
        assert found is keeper and log.level == logging.CRITICAL and "closed" not in made
    options = dict(max_to_keep=2, enable_async_checkpointing=True)
    assert made == [((tmp_path / "states").resolve(), options), "closed"] and log.level == level
    with pytest.raises(KeyError), states_in(tmp_path):
        raise KeyError
    assert made[2:] == [made[0], "closed"] and log.level == level

    def close():
        raise OSError("no space\nleft")

    keeper.close = close
    said = r"states: the state of step 0 or the one before cannot be written \(no space\); make room"
    with pytest.raises(ValueError, match=said), states_in(tmp_path):
        pass
    with pytest.raises(KeyError), states_in(tmp_path):
        raise KeyError
    assert log.level == level


# Runs, whose steps are none


class Leaf(SimpleNamespace):
    """An array of a state, which a step that was interrupted has taken with it."""

    def is_deleted(self):
        return self.gone


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """`fine_tune` with steps that count, a clock that goes on by four seconds a step, and a state that is noted."""
    noted = SimpleNamespace(kept=[], said=[], told=[], lines=[], board=[], steps=[], begun=0, clock=0.0, gone=False)
    noted.fails_at, noted.tick = None, 4.0
    settings = SFTSettings(steps=9, length=8, learning_rate=0.5, schedule="linear")
    state = lambda step: SimpleNamespace(step=step)
    keeper = SimpleNamespace(latest_step=lambda: noted.kept[-1] if noted.kept else None)
    line = SimpleNamespace(say=noted.told.append)

    def step(before, batch, optimizer, loss_fn, balance_rate):
        if before.step == noted.fails_at:
            raise KeyboardInterrupt
        noted.steps.append((before.step, batch, optimizer, loss_fn, balance_rate))
        noted.clock += noted.tick
        return state(before.step + 1), {noted.loss: 0.25 * before.step, "grad_norm": 2.0}

    replaced = dict(
        check_same_run=lambda folder, about: noted.__dict__.update(same=(folder, about)), train_step=step,
        states_in=lambda folder: noted.__dict__.update(folder=folder) or contextlib.nullcontext(keeper),
        restored=lambda found, given: state(noted.begun) if found is keeper and given == "state" else None,
        keep=lambda found, number, kept: noted.kept.append(number) if kept.step == number else None,
        MetricLines=lambda *given: noted.__dict__.update(metrics=given) or SimpleNamespace(write=noted.lines.append),
        activity=lambda about: contextlib.nullcontext(line), _on_devices=lambda batch, mesh: batch | {"on": mesh},
        time=SimpleNamespace(perf_counter=lambda: noted.clock),
        writer_of_events=lambda: lambda folder, purge_step: contextlib.nullcontext(
            SimpleNamespace(add_scalar=lambda *given: noted.board.append((folder, purge_step, *given)))
        ),
    )  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(sft_module, name, value)
    monkeypatch.setattr(sft_module.jax.tree, "leaves", lambda tree: [Leaf(gone=noted.gone)])
    loss_fn = SFTLoss()

    class Numbers:
        def __getitem__(self, number):
            return {"tokens": number, "num_targets": 10 + number, "num_tokens": 100}

    def tune(loss="lm", **options):
        noted.loss = loss
        options = (
            dict(say=noted.said.append, origin={"a": "b"}, shared={"base": 1}, mesh="mesh", save_every=4) | options
        )
        return sft_module.fine_tune("state", Numbers(), "adamw", loss_fn, settings, tmp_path, **options)

    noted.tune, noted.settings, noted.loss_fn = tune, settings, loss_fn
    return noted


def test_a_run_of_steps_says_keeps_and_writes_what_it_does(tuning, tmp_path):
    """A line at the first step, at the last and every ten seconds; a state every so many steps, and the last one."""
    assert tuning.tune(metrics="metrics", about={"phase": "x"}, steps_before=20, tensorboard="events").step == 9
    assert tuning.same == (tmp_path, {"a": "b"} | dataclasses.asdict(tuning.settings)) and tuning.folder == tmp_path
    assert tuning.metrics == ("metrics", 20) and tuning.kept == [4, 8, 9]
    numbers = [(number, batch, optimizer, rate) for number, batch, optimizer, _, rate in tuning.steps]
    batch = lambda n: {"tokens": n, "num_targets": 10 + n, "num_tokens": 100, "on": "mesh", "base": 1}
    assert numbers == [(n, batch(n), "adamw", 0.0) for n in range(9)]
    assert all(loss == Accumulated(tuning.loss_fn, sft_module.ROWS) for *_, loss, _ in tuning.steps)
    assert tuning.lines == [
        dict(step=21 + n, phase="x", loss=0.25 * n, grad_norm=2.0, learning_rate=float(tuning.settings.rate(n)),
             targets=10 + n, tokens=100, seconds=4.0) for n in range(9)
    ]  # fmt: skip
    shown = {name for name in tuning.lines[0] if name != "phase"}
    assert {(name, step, value) for *_, name, value, step in tuning.board} == {
        (f"sft/{name}", n + 1, tuning.lines[n][name]) for n in range(9) for name in shown
    }  # fmt: skip
    assert {each[:2] for each in tuning.board} == {("events", 1)}
    assert tuning.told == [f"step {n} of 9{': compiling' if n == 1 else ''}" for n in range(1, 10)]
    assert tuning.said == [f"step {n} of 9: loss {0.25 * (n - 1):.4f}, 25 tokens/s" for n in (1, 4, 7, 9)]


def test_a_line_is_said_where_more_than_ten_seconds_have_gone_by(tuning):
    for seconds, steps in ((10.0, [1, 3, 5, 7, 9]), (10.5, [1, 2, 3, 4, 5, 6, 7, 8, 9])):
        tuning.tick, tuning.said[:] = seconds, []
        tuning.tune()
        assert [int(line.split()[1]) for line in tuning.said] == steps


def test_a_run_of_steps_goes_on_from_what_was_kept(tuning):
    tuning.begun = 6
    assert tuning.tune(loss="kl", tensorboard="events").step == 9
    assert tuning.said[0] == "going on from step 6" and [n for n, *_ in tuning.steps] == [6, 7, 8]
    assert tuning.metrics == (None, 6) and tuning.kept == [8, 9] and tuning.board[0][1] == 7
    assert [line["loss"] for line in tuning.lines] == [1.5, 1.75, 2.0] and tuning.lines[0]["kl"] == 1.5
    tuning.begun, tuning.steps[:] = 9, []
    tuning.said.clear()
    assert tuning.tune().step == 9 and tuning.steps == tuning.said == []


@pytest.mark.parametrize(
    ("fails_at", "gone", "processes", "kept"),
    [(3, False, 1, [3]), (3, True, 1, []), (3, False, 2, []), (0, False, 1, []), (4, False, 1, [4]),
     (6, False, 1, [4, 6])],
)  # fmt: skip
def test_steps_that_are_interrupted_keep_a_whole_state_once(tuning, monkeypatch, fails_at, gone, processes, kept):
    tuning.fails_at, tuning.gone = fails_at, gone
    monkeypatch.setattr(sft_module.jax, "process_count", lambda: processes)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune()
    assert tuning.kept == kept and tuning.said[-1] == "stopped: the same command goes on from what was kept"


def test_a_conversion_trains_the_index_branch_and_then_all_under_its_selection(monkeypatch, tmp_path):
    """What is held out is measured before, between and after; lines of the second phase follow those of the first."""
    calls = Calls()
    config = SimpleNamespace(index_topk_blocks=3, index_block_size=16)
    model, warmed = (SimpleNamespace(config=config, mesh="mesh", name=name) for name in ("model", "warmed"))
    has_index, line = [True], contextlib.nullcontext(SimpleNamespace(say=calls.of("line")))
    replaced = dict(
        check_trainable=lambda of: None, check_rows=calls.of("check_rows"),
        index_weights=lambda of: "index" if has_index[0] else {}, with_index_weights=lambda of, weights: warmed,
        PackedBatches=lambda *given: given, check_same_run=calls.of("same"), measure=lambda of, *given: (of, *given),
        in_words=lambda found: "words", activity=lambda about: line,
        make_optimizer=lambda rate, decay, **named: (rate(3), decay, named), cast_weights=lambda of, dtype: (of, dtype),
        first_state=lambda *given: ("first", *given), init_state=lambda *given: ("init", *given),
        fine_tune=calls.of("tune", lambda *given, **named: SimpleNamespace(model=SimpleNamespace(of=given[0]))),
    )  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(convert_module, name, value)
    said = []
    phases = dict(length=64, rows=2, compute_dtype="float16", remat=False, clip_norm=3.0)
    settings = ConvertSettings(
        warm_up=SFTSettings(steps=4, weight_decay=0.5, **phases), index_stride=5,
        sparse=SFTSettings(steps=6, weight_decay=0.25, index_loss=2.0, **phases),
    )  # fmt: skip
    convert = lambda **changes: convert_module.convert(
        model, "learnt", "held", replace(settings, **changes), tmp_path, "metrics", origin={"a": 1}, save_every=7,
        say=said.append,
    )  # fmt: skip
    found, report = convert()
    assert calls.one("check_rows")[0] == (2, "mesh")
    assert calls.one("same")[0] == (tmp_path / "warm-up", {"a": 1} | dataclasses.asdict(settings.warm_up))
    first, second = [(given, named) for name, given, named in calls if name == "tune"]
    shared = dict(origin={"a": 1}, mesh="mesh", save_every=7, say=said.append)
    adamw = (settings.warm_up.rate(3), 0.5, dict(clip_norm=3.0))
    assert first[0] == (
        ("first", "index", adamw, model), ("learnt", settings.warm_up, 16), adamw, WarmUpLoss(5, "float16"),
        settings.warm_up, tmp_path / "warm-up", "metrics",
    )  # fmt: skip
    assert first[1] == dict(shared={"base": (model, "float16")}, about={"phase": "warm-up"}, **shared)
    adamw = (settings.sparse.rate(3), 0.25, dict(frozen_index=False, clip_norm=3.0))
    assert second[0] == (
        ("init", warmed, adamw), ("learnt", settings.sparse, 16), adamw, SFTLoss(2.0, 5, "float16", False),
        settings.sparse, tmp_path / "sparse", "metrics",
    )  # fmt: skip
    assert second[1] == dict(steps_before=4, about={"phase": "sparse"}, **shared)
    measured = ("held", 64, 2, "float16")
    assert report == dict(before=(model, *measured), after_warm_up=(warmed, *measured), after=(found, *measured))
    assert found.of == ("init", warmed, adamw) and said == [f"{x}: words" for x in ("before", "after warm up", "after")]
    convert(sparse=SFTSettings(steps=6, **phases))
    assert [given[2][2].get("frozen_index") for name, given, _ in calls if name == "tune"][1::2] == [False, True]
    for length, is_refused in ((48, True), (49, False)):
        with (
            pytest.raises(ValueError, match="rows of 48 tokens: a query reads up to 48 of them")
            if is_refused
            else (contextlib.nullcontext())
        ):
            convert(sparse=SFTSettings(steps=6, **phases | dict(length=length)))
    has_index[0] = False
    with pytest.raises(ValueError, match="no layer of this model selects blocks"):
        convert()
