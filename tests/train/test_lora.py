"""Adapters: what they add, PEFT's layout on disk, adapters of another model, and the commands that train and merge."""

import hashlib
import json
import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.chat_messages import assistant, user
from support.embedded import TOKENIZER

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import tree
from m3jax.files.tensors import mapped, packed
from m3jax.model import M3
from m3jax.train import __main__ as command
from m3jax.train import lora
from m3jax.train.lora import LoraSettings, init_adapters, load_adapters, merge, merge_folder, save_adapters

CONFIG = tiny.config("dM")
SETTINGS = LoraSettings(rank=3, alpha=6.0)
PREFIX = "base_model.model.model.language_model.layers."


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def adapters():
    draw = np.random.default_rng(1)
    random = lambda x: jnp.asarray(draw.normal(size=x.shape), jnp.float32)
    return jax.tree.map(random, init_adapters(model(), SETTINGS))


@pytest.fixture
def folder(tmp_path) -> Path:
    save_adapters(adapters(), SETTINGS, model(), tmp_path / "runs" / "adapter", base="tiny")
    return tmp_path / "runs" / "adapter"


def test_new_adapters_change_no_bit():
    merged = tree.flatten(merge(model(), init_adapters(model(), SETTINGS), SETTINGS.scale))
    for name, weight in tree.flatten(model()).items():
        np.testing.assert_array_equal(merged[name], weight, err_msg=name)


def test_adapters_begin_uniform_within_the_root_of_their_inputs():
    """A fills (-In**-0.5, In**-0.5), B is 0; the matrices are in one order, whatever that of the targets."""
    settings = LoraSettings(rank=50, targets=("experts", "attention"))
    found, draw = init_adapters(model(), settings, seed=1), np.random.default_rng(1)
    of_attention = {"q": (48, 128), "k": (48, 64), "v": (48, 64), "o": (128, 48)}
    shapes = {f"stacks.{i}.self_attn.{x}_proj": ((1,), *of_attention[x]) for i in (0, 1) for x in "qkvo"}
    shapes["stacks.1.mlp.experts.gate_up_proj"] = ((1, 8), 48, 80)
    shapes["stacks.1.mlp.experts.down_proj"] = ((1, 8), 40, 48)
    assert [*found] == [*shapes]
    for name, (lead, inputs, outputs) in shapes.items():
        a = draw.uniform(-(inputs**-0.5), inputs**-0.5, (*lead, inputs, 50)).astype(np.float32)
        np.testing.assert_array_equal(found[name]["a"], a, err_msg=name)
        assert found[name]["b"].shape == (*lead, 50, outputs) and not found[name]["b"].any()
    assert set(init_adapters(model(), LoraSettings(targets=("experts",)))) == {name for name in shapes if "mlp" in name}


def test_shapes_that_no_adapter_has(unchecked):
    for wrong, reason in (
        (dict(rank=0), "rank = 0: must be at least 1"),
        (dict(alpha=0.0), "alpha = 0.0: must be above 0"),
        (dict(targets=()), "targets = none: choose of attention, experts"),
        (dict(targets=("attention", "head")), "targets = attention, head: choose of"),
    ):
        with pytest.raises(ValueError, match=reason):
            LoraSettings(**wrong)
    with pytest.raises(ValueError, match="the model has none of experts"):
        init_adapters(tiny.model(tiny.config("d")), LoraSettings(targets=("experts",)))


def test_the_file_is_one_that_peft_reads(folder):
    """Names, shapes and the order of experts, as PEFT 0.21.2 wrote them for transformers' M3; deltas by its formulas.

    Of the two parameters of `mlp.experts` PEFT adapts gate_up_proj first: it lies under "base_layer".
    """
    before = (folder / "adapter_model.safetensors").read_bytes()
    save_adapters(adapters(), SETTINGS, model(), folder, base="tiny")  # over what lies there
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    tensors = mapped(folder / "adapter_model.safetensors", "the file")
    of_attention = {"q_proj": (128, 48), "k_proj": (64, 48), "v_proj": (64, 48), "o_proj": (48, 128)}
    shapes = {f"{layer}.self_attn.{name}": (3, *dims) for layer in (0, 1) for name, dims in of_attention.items()}
    shapes |= {"1.mlp.experts.base_layer": (24, 80, 48), "1.mlp.experts": (24, 48, 40)}
    wanted = {f"{PREFIX}{name}.lora_A.weight": (rank, i) for name, (rank, o, i) in shapes.items()}
    wanted |= {f"{PREFIX}{name}.lora_B.weight": (o, rank) for name, (rank, o, i) in shapes.items()}
    assert {name: x.shape for name, x in tensors.items()} == wanted

    merged, base = tree.flatten(merge_folder(model(), folder)), tree.flatten(model())
    delta = {name: np.asarray(merged[name]) - np.asarray(base[name]) for name in base}
    a, b = (tensors[f"{PREFIX}1.self_attn.o_proj.lora_{x}.weight"] for x in "AB")
    close = lambda one, other: np.testing.assert_allclose(one, other, atol=2e-5)
    close(delta["stacks.1.self_attn.o_proj"][0].reshape(128, 48).T, 2.0 * b @ a)
    a, b = (tensors[f"{PREFIX}0.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
    close(delta["stacks.0.self_attn.q_proj"][0].reshape(48, 128).T, 2.0 * b @ a)
    a, b = (tensors[f"{PREFIX}1.mlp.experts.base_layer.lora_{x}.weight"] for x in "AB")
    of_experts = 2.0 * np.einsum("ore,eri->eoi", b.reshape(80, 3, 8), a.reshape(8, 3, 48))
    close(delta["stacks.1.mlp.experts.gate_proj"][0].swapaxes(1, 2), of_experts[:, :40])
    close(delta["stacks.1.mlp.experts.up_proj"][0].swapaxes(1, 2), of_experts[:, 40:])
    adapted = {name.replace("gate_up", part) for name in adapters() for part in ("gate", "up")}
    assert {name for name, x in delta.items() if x.any()} == adapted


def test_what_was_written_is_read(folder):
    again, settings = load_adapters(folder, model())
    assert settings == SETTINGS
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(adapters()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_file_that_is_cut_is_named(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=f"^{re.escape(str(folder / 'adapter_model.safetensors'))}"):
        load_adapters(folder, model())


def test_the_config_is_that_of_plain_adapters(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config == dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path="tiny", r=3, lora_alpha=6.0, lora_dropout=0.0,
        bias="none", fan_in_fan_out=False, use_rslora=False, use_dora=False, inference_mode=True,
        target_modules=r"(?!.*vision).*\.layers\.\d+\.self_attn\.[qkvo]_proj",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip


def check_refused(folder: Path, other: M3, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        load_adapters(folder, other)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_adapters_of_another_model_are_refused(folder):
    """By the digest of its norms; where PEFT wrote the file, which has none, by names and shapes."""
    check_refused(folder, tiny.model(CONFIG, seed=1), "these adapters were trained on another model")
    file = folder / "adapter_model.safetensors"
    tensors = mapped(file, "the file")
    file.write_bytes(packed(dict(tensors)))
    load_adapters(folder, tiny.model(CONFIG, seed=1))
    check_refused(
        folder, tiny.model(tiny.config("d")), "layers.1.mlp.experts.base_layer.lora_A.weight: the model has no"
    )
    check_refused(folder, tiny.model(tiny.config("dMM")), "layer 2: no lora_A of self_attn.k_proj")
    check_refused(folder, tiny.model(tiny.config("dM", hidden_size=40)), "shape [3, 48], the model needs [3, 40]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True: only plain LoRA"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3': only LORA"),
        ({"r": "8"}, "r = '8', lora_alpha = 6.0: both are numbers"),
        ({"target_parameters": None}, "no adapters are kept for it"),
    ],
)
def test_another_kind_of_adapter_is_refused(folder, change, message):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    check_refused(folder, model(), message)


def test_a_model_is_known_by_the_norms_of_its_decoder(monkeypatch, unchecked):
    """In bfloat16 and in the order of their names, whatever dtype they are loaded in; nothing else counts."""
    monkeypatch.setattr(lora.tree, "flatten", lambda weights: weights)
    weights = {
        name: jnp.float32([number + 0.3]) for number, name in enumerate(("q_proj", "vision.norm", "norm", "a_norm"))
    }
    expected = hashlib.sha256(b"".join(np.asarray(weights[x].astype("bfloat16")).tobytes() for x in ("a_norm", "norm")))
    assert lora.digest(weights) == expected.hexdigest()
    assert lora.digest({name: x.astype("bfloat16") for name, x in weights.items()}) == expected.hexdigest()
    for name in weights:
        is_same = lora.digest(weights | {name: weights[name] + 1}) == expected.hexdigest()
        assert is_same == (name in ("q_proj", "vision.norm")), name


def test_the_commands_train_and_merge(tmp_path, capsys):
    """As docs/training.md says it: the adapters alone are trained, and the merged model loads."""
    base = tiny.model(tiny.config("dM", vocab_size=TOKENIZER.vocab_size))
    m3jax.save(base, tmp_path / "model", copy_from=embedded_path())
    talks = [{"messages": [user(f"say {i}"), assistant(str(i))]} for i in range(6)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks), encoding="utf-8")
    given = {"--model": "model", "--data": "talks.jsonl", "--out": "run"}
    words = [word for name, file in given.items() for word in (name, str(tmp_path / file))]
    words += ["--tensorboard", str(tmp_path / "events")]
    words += ["--steps", "3", "--length", "64", "--lora", "2", "--learning-rate", "0.02", "--dtype", "float32"]
    assert command.main(["sft", *words]) == 0
    # A second file would say that a session begins at step 1 again, which hides the steps that a run goes on from.
    assert len(list((tmp_path / "events").iterdir())) == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["loss"] < lines[0]["loss"]
    merging = ["merge", "--model", str(tmp_path / "model"), "--adapter", str(tmp_path / "run" / "adapter")]
    assert command.main([*merging, "--out", str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    merged = tree.flatten(m3jax.load(tmp_path / "merged", dtype="float32", progress=False))
    moved = {name for name, weight in tree.flatten(base).items() if not np.array_equal(merged[name], weight)}
    wanted = {f"stacks.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo"}
    assert moved == wanted | {f"stacks.1.mlp.experts.{x}_proj" for x in ("gate", "up", "down")}
    capsys.readouterr()
    assert command.main(["sft", *words[:-1], "bfloat16"]) == 2
    assert "has a run with compute_dtype = 'float32': give the same" in capsys.readouterr().err


FAULTS = {
    "--data none.jsonl": "--data none.jsonl: no such file",
    "--lora-alpha 2": "give --lora RANK with them",
    "--adapter x --lora 4": "--adapter has a rank, an alpha and targets of its own",
    "--lora 4 --lora-targets mlp": "targets = mlp: choose of attention, experts",
    "--lora 4 --index-loss 1": "trains the index branch, which has no adapters",
    "--freeze-index --index-loss 1": "not allowed with argument",
    "--length 100": "length = 100: must be a multiple of the model's block size, 16",
    "--steps 0": "steps = 0: must be at least 1",
    "--warmup-steps 4": "warmup_steps = 4: must be fewer than the run's 3 steps",
    "--mesh data=2": "--rows 1: must be a multiple of the mesh's data=2",
    "--mesh rows=2": "mesh 'rows=2': write axis=size pairs",
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_is_wrong_on_the_command_line(words, tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": [user("a"), assistant("b")]}), encoding="utf-8")
    given = {"--data": str(tmp_path / "t.jsonl"), "--out": str(tmp_path / "run"), "--steps": "3"}
    kept = [word for name, value in given.items() if name not in words.split() for word in (name, value)]
    assert command.main(["sft", *kept, *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and FAULTS[words] in err
