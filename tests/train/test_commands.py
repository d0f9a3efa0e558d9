"""What the commands of training hand on: settings, sizes, what is learnt and what is held out. Nothing is trained."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.chat_messages import assistant, user
from support.options import wrong_defaults

from m3jax.train.__main__ import main, parser
from m3jax.train.convert import ConvertSettings
from m3jax.train.convert_command import convert_parser
from m3jax.train.lora import LoraLoss, LoraSettings
from m3jax.train.sft import SFTLoss, SFTSettings
from m3jax.train.sft_command import merge_parser, sft_parser

pytestmark = pytest.mark.usefixtures("unchecked")  # models and states are none
CONFIG = SimpleNamespace(index_block_size=16, max_position_embeddings=4000, eos_token_id=(3,), vocab_size=90,
                         index_head_dim=12)  # fmt: skip
REPORT = {"before": {"dense_loss": 2.0}, "after": {"loss": 1.5}}


def test_options_have_the_defaults_that_help_says():
    for each in (parser(), sft_parser("sft"), convert_parser("convert"), merge_parser("merge")):
        assert wrong_defaults(each) == [], each.prog


@pytest.fixture
def calls(monkeypatch) -> dict:
    """The arguments of what reads, trains and writes a model, by name."""
    noted, model = {}, SimpleNamespace(config=CONFIG)
    results = {
        "m3jax.checkpoint.load": model, "m3jax.train.dense.read_dense": model,
        "m3jax.train.step.make_optimizer": "adamw", "m3jax.train.step.init_state": "state",
        "m3jax.train.lora.init_adapters": "new adapters", "m3jax.train.lora.init_adapter_state": "adapter state",
        "m3jax.train.lora.load_adapters": ("old adapters", LoraSettings(5, 7.0)),
        "m3jax.train.lora.save_adapters": None, "m3jax.train.keeping.save_trained": "",
        "m3jax.train.sft.fine_tune": SimpleNamespace(model="trained"),
        "m3jax.train.convert.convert": ("converted", REPORT),
    }  # fmt: skip

    def note(name, result):
        return lambda *given, **named: noted.update({name: (given, named)}) or result

    for path, result in results.items():
        monkeypatch.setattr(path, note(path.rpartition(".")[2], result))
    return noted


def words(text: str) -> list[str]:
    return text.split()


@pytest.fixture
def sft(tmp_path, calls):
    def run(text: str, question: str = "a") -> None:
        data = tmp_path / "talks.jsonl"
        data.write_text(json.dumps({"messages": [user(question), assistant("b")]}), encoding="utf-8")
        calls.clear()
        given = ["sft", "--data", str(data), "--out", str(tmp_path / "out"), "--steps", "40"]
        assert main([*given, *words(text)]) == 0

    return run


def test_fine_tuning_has_the_settings_of_its_options(calls, sft, tmp_path, capsys):
    """All weights are trained in float32, the index branch where it has a loss."""
    options = (
        "--length 64 --rows 2 --accumulate 3 --learning-rate 0.5 --schedule linear --warmup-steps 4 --end-rate 0.25 "
        "--weight-decay 0.125 --clip-norm 2 --dtype float32 --no-remat --seed 6 --save-every 7"
    )
    settings = SFTSettings(
        steps=40, length=64, rows=2, accumulate=3, learning_rate=0.5, schedule="linear", warmup_steps=4, end_rate=0.25,
        weight_decay=0.125, clip_norm=2.0, compute_dtype="float32", remat=False, seed=6,
    )  # fmt: skip
    for index_loss in (0.0, 0.75):
        sft(f"{options} --index-loss {index_loss}")
        state, batches, optimizer, loss, found, folder = calls["fine_tune"][0]
        assert (state, optimizer, folder) == ("state", "adamw", tmp_path / "out")
        assert found == replace(settings, index_loss=index_loss) and batches[0]["tokens"].shape == (3, 2, 64)
        assert loss == SFTLoss(index_loss, compute_dtype="float32", remat=False)
        (rate, decay), named = calls["make_optimizer"]
        assert [rate(step) for step in (0, 4, 40)] == [settings.rate(step) for step in (0, 4, 40)] and decay == 0.125
        assert named == dict(frozen_index=not index_loss, frozen_vision=True, clip_norm=2.0)
    named = calls["fine_tune"][1]
    assert (named["save_every"], named["metrics"]) == (7, tmp_path / "out" / "metrics.jsonl")
    assert calls["load"][1]["dtype"] == "float32" and calls["save_trained"][0][:2] == (
        "trained", tmp_path / "out" / "model"
    )  # fmt: skip
    assert f"the trained model is in {tmp_path / 'out' / 'model'}" in capsys.readouterr().err


def test_a_row_holds_the_longest_conversation_in_whole_blocks(calls, sft):
    """At least 1,024 tokens where nothing is asked for."""
    for options, question, fewest, remat in (("", "a", 1024, True), ("--keep-products", "a " * 1500, 1500, "products")):
        sft(options, question)
        batches, settings = calls["fine_tune"][0][1], calls["fine_tune"][0][4]
        tokens = batches[0]["num_tokens"]
        assert settings.length == max(1024, -(-tokens // 16) * 16) >= fewest and settings.remat == remat


def test_adapters_are_trained_on_a_model_in_the_dtype_of_a_pass(calls, sft):
    """New ones of a rank, an alpha of twice that and both kinds of targets, or those of a folder."""
    for text, shape in (
        ("--lora 4 --seed 9", LoraSettings(4, 8.0)),
        ("--lora 4 --lora-alpha 3 --lora-targets experts", LoraSettings(4, 3.0, ("experts",))),
        ("--adapter before", LoraSettings(5, 7.0)),
    ):
        sft(text)
        given, named = calls["fine_tune"]
        loss = LoraLoss(SFTLoss(0.0, compute_dtype="bfloat16", remat=True), shape.scale)
        assert (given[0], given[3], calls["load"][1]["dtype"]) == ("adapter state", loss, "bfloat16")
        assert named["shared"]["base"].config is CONFIG and calls["save_adapters"][0][:2] == ("trained", shape)
        assert (calls["init_adapter_state"][0][0] == "old adapters") == ("--adapter" in text)
        if "--lora" in text:
            assert calls["init_adapters"][0][1:] == (shape, 9 if "--seed" in text else 0)
        of_run = {name: named["origin"][name] for name in ("adapter", "rank", "alpha", "targets")}
        adapter = "before" if "--adapter" in text else None
        assert of_run == dict(adapter=adapter, rank=shape.rank, alpha=shape.alpha, targets=list(shape.targets))


@pytest.fixture
def convert(tmp_path, calls):
    def run(text: str, documents: int = 50) -> None:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(f'{{"tokens": [1, {i}]}}\n' for i in range(documents)), encoding="utf-8")
        given = ["convert", "--model", "dense", "--data", str(data), "--out", str(tmp_path / "out"), "--steps", "10"]
        assert main([*given, *words(text)]) == 0

    (tmp_path / "out").mkdir()
    return run


def test_a_conversion_has_the_settings_of_its_options(calls, convert, tmp_path, capsys):
    """Both phases have the sizes that were asked for, and rates and seeds of their own."""
    convert(
        "--block-size 16 --topk-blocks 3 --index-dim 12 --dense-layers 1 --seed 5 --rows 2 --accumulate 4 "
        "--weight-decay 0.5 --clip-norm 3 --dtype float32 --index-rate 0.25 --learning-rate 0.125 --index-loss 2 "
        "--save-every 6 --no-remat --warm-up-steps 3"
    )
    assert calls["read_dense"] == (
        ("dense", 5, None), dict(block_size=16, topk_blocks=3, index_dim=12, dense_layers=1)
    )  # fmt: skip
    shared = dict(
        length=384, rows=2, accumulate=4, weight_decay=0.5, clip_norm=3.0, compute_dtype="float32", remat=False
    )
    settings = ConvertSettings(
        warm_up=SFTSettings(steps=3, learning_rate=0.25, seed=5, **shared),
        sparse=SFTSettings(steps=7, learning_rate=0.125, seed=6, index_loss=2.0, **shared),
    )
    (_, _, _, found, folder, metrics), named = calls["convert"]
    assert (found, folder, metrics) == (settings, tmp_path / "out", tmp_path / "out" / "metrics.jsonl")
    assert named["save_every"] == 6 and calls["save_trained"][0] == ("converted", folder / "model", "dense")
    assert json.loads((folder / "report.json").read_text()) == REPORT
    assert "held out: loss 2.0000 before, dense, and 1.5000 after (-25.00%)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "length", "steps", "index_loss"),
    [
        ("", 8 * 3 * 16, (2, 8), 1.0),
        ("--length 64 --warm-up-steps 9", 64, (9, 1), 1.0),
        ("--steps 2", 8 * 3 * 16, (1, 1), 1.0),
        ("--topk-blocks 99 --freeze-index", 4000, (2, 8), 0.0),
    ],
)
def test_phases_of_a_conversion(calls, convert, text, length, steps, index_loss):
    """A quarter of the steps warms up; a row is eight selections long, in whole blocks of the context."""
    convert(f"--block-size 16 --topk-blocks 3 {text}")
    settings = calls["convert"][0][3]
    assert settings.warm_up.length == settings.sparse.length == length
    assert (settings.warm_up.steps, settings.sparse.steps) == steps and settings.sparse.index_loss == index_loss
    assert (settings.warm_up.learning_rate, settings.sparse.learning_rate) == (1e-3, 1e-5)


@pytest.mark.parametrize(("text", "documents", "held_out"), [("", 50, 2), ("--held-out 49", 50, 49), ("", 2, 1)])
def test_a_conversion_holds_out_the_last_twentieth(calls, convert, text, documents, held_out):
    """At least one document, which are measured and not learnt."""
    convert(text, documents)
    _, learnt, measured, *_ = calls["convert"][0]
    assert len(measured) == held_out and len(learnt) == documents - held_out
    assert [document.tokens[1] for document in (*learnt, *measured)] == [*range(documents)]
