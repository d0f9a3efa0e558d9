"""Folders that lie: names that leave them, sizes that they do not hold, values that are no numbers; and such drafts."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import vision
from support.checkpoint_folders import (
    INDEX,
    assert_same,
    expected_parameters,
    load_parameters,
    shapes,
    tiny_config,
    write_folder,
)
from support.drafts import CONFIG as TARGET
from support.drafts import draft

import m3jax
from m3jax import checkpoint
from m3jax.assets import embedded_path
from m3jax.checkpoint import CheckpointError, load_draft, names, save_draft
from m3jax.config import M3Config

CONFIG = tiny_config()
NORM = "language_model.model.norm.weight"
GATE = "language_model.model.layers.2.block_sparse_moe.gate.weight"
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.5.w2.weight"


def problems(path: Path, **arguments) -> list[str]:
    """The faults that loading a folder raises, in a message that a terminal can show."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, progress=False, **arguments)
    assert str(caught.value).replace("\n", "").isprintable() and len(str(caught.value)) <= 2000
    return list(caught.value.problems)


def link_to(folder: Path, path: Path) -> Path:
    """A folder whose weights are links to those of another, and whose other files are copies."""
    path.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            (path / file.name).symlink_to(file)
        else:
            (path / file.name).write_bytes(file.read_bytes())
    return path


# Names and links


@pytest.mark.parametrize(
    "shard",
    ["../model-00001-of-00003.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors",
     "", "x" * 300 + ".safetensors", "\0.safetensors", "\x1b[2J.safetensors", "c:x.safetensors", "../.."],
)  # fmt: skip
def test_an_index_names_files_of_its_own_folder_only(shard, folder, tmp_path):
    path = link_to(folder, tmp_path / "inner" / "folder")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][NORM] = shard
    (path / INDEX).write_text(json.dumps(index))
    lines = [line for line in problems(path) if line.startswith(f"{INDEX}: places 1 tensors in ")]
    assert len(lines) == 1 and lines[0].endswith("a shard is the plain name of a file in the folder of the index")


def test_an_index_names_only_safetensors(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {NORM: "config.json"}}))
    assert f"{INDEX}: places 1 tensors in 'config.json': a shard's name ends in .safetensors" in problems(tmp_path)


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    path = link_to(folder, tmp_path / "links")
    outside = "a link to a file outside the folder; copy that file there"
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert problems(path) == [f"{file}: {outside}" for file in files]
    (tmp_path / "single").mkdir()
    os.link(folder / "config.json", tmp_path / "single" / "config.json")
    (tmp_path / "single" / "model.safetensors").symlink_to(folder / files[0])
    assert problems(tmp_path / "single") == [f"model.safetensors: {outside}"]
    (path / INDEX).unlink()
    (path / INDEX).symlink_to(folder / INDEX)
    assert problems(path) == [f"{INDEX}: {outside}"]


BESIDE = {
    "config.json": M3Config.from_pretrained,
    "tokenizer.json": m3jax.TextModel.from_pretrained,
    "tokenizer_config.json": m3jax.TextModel.from_pretrained,
    "generation_config.json": m3jax.TextModel.from_pretrained,
    "chat_template.jinja": m3jax.TextModel.from_pretrained,
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_link_out_of_the_folder_is_refused_beside_the_weights_too(name, tmp_path):
    """No file of the reader's own comes into what a folder shows, nor into what is saved from it."""
    folder = tmp_path / "folder"
    shutil.copytree(embedded_path(), folder)
    (tmp_path / name).write_bytes((folder / name).read_bytes() if (folder / name).is_file() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / name)
    expected = f"^{re.escape(str(folder / name))}: a link to a file outside the folder; copy that file there$"
    with pytest.raises(ValueError, match=expected):
        BESIDE[name](folder)


def test_a_save_copies_no_link_and_nothing_large(folder, tmp_path):
    model = checkpoint.load(folder, progress=False)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").symlink_to(folder / "config.json")
    with pytest.raises(ValueError, match=r"source/tokenizer\.json: a link to a file outside the folder"):
        checkpoint.save(model, tmp_path / "saved", copy_from=tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").unlink()
    (tmp_path / "source" / "merges.txt").touch()
    os.truncate(tmp_path / "source" / "merges.txt", 20 << 30)
    with pytest.raises(ValueError, match=r"source/merges\.txt: larger than 268,435,456 bytes"):
        checkpoint.save(model, tmp_path / "saved", copy_from=tmp_path / "source")
    assert not (tmp_path / "saved").exists()


def test_a_template_of_any_size_costs_no_memory(tmp_path):
    """A sparse file of 20 GB takes no room on the disk, and would take all memory if it were read whole."""
    shutil.copytree(embedded_path(), tmp_path, dirs_exist_ok=True)
    for data, message in ((b"", "larger than 1,048,576 bytes"), (b"ab\xff", "byte 2 is not UTF-8")):
        (tmp_path / "chat_template.jinja").write_bytes(data)
        if not data:
            os.truncate(tmp_path / "chat_template.jinja", 20 << 30)
        with pytest.raises(ValueError, match=rf"chat_template\.jinja: {message}"):
            m3jax.TextModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("is_linked", [False, True], ids=["its path", "a link to the snapshot"])
def test_a_hub_cache_loads(is_linked, folder, tensors, tmp_path):
    """`snapshots/<revision>` holds links to `../../blobs/<hash>`, and people link to snapshots."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        (blobs / f"{number:040}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040}")
    (tmp_path / "mine").symlink_to(snapshot)
    path = tmp_path / "mine" if is_linked else snapshot
    assert_same(load_parameters(path), expected_parameters(CONFIG, tensors))
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    shard.unlink()
    shard.symlink_to(folder / shard.name)
    assert problems(path) == [f"{shard.name}: a link to a file outside the folder; copy that file there"]


def test_links_within_the_folder_and_folders_that_are_links_load(folder, tensors, tmp_path):
    write_folder(tmp_path / "real", CONFIG, tensors)
    os.rename(tmp_path / "real" / "model.safetensors", tmp_path / "real" / "weights.bin")
    (tmp_path / "real" / "model.safetensors").symlink_to("weights.bin")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert_same(load_parameters(tmp_path / "link"), expected_parameters(CONFIG, tensors))


def test_names_of_tensors_are_shown_without_their_control_characters(tensors, tmp_path):
    write_folder(tmp_path, CONFIG, tensors | {"\x1b]0;title\x07\u202e": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, progress=False)
    assert r"\x1b]0;title\x07\u202e: unexpected, found F32 [2]" in str(caught.value)


# Sizes


def test_totals_are_those_of_the_list():
    """Each layer's tensors once a layer; a tower's own and its projector's once."""
    with_tower = vision.config("dM", num_hidden_layers=3)
    assert any(map(names.is_vision, names.targets(with_tower)))
    for config in (CONFIG, M3Config.m3(), tiny_config(mlp_layer_types=("sparse",) * 5), with_tower):
        places = names.targets(config)
        values = sum(int(np.prod(target.hub_shape)) for target in places.values())
        assert names.totals(config) == (len(places), values)


SIZES = {
    "num_local_experts": 100_000,
    "hidden_size": 2**31 - 1,
    "vocab_size": 2**31 - 1,
    "num_attention_heads": 2**30,
    "intermediate_size": 10**9,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_the_files_do_not_hold_costs_no_time_and_no_memory(name, folder, tmp_path, monkeypatch):
    path = tmp_path / "folder"
    path.mkdir()
    for file in folder.iterdir():
        os.link(file, path / file.name)
    (path / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][name] = SIZES[name]
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("m3jax.model.abstract", None)  # nothing of that size is even described
    start = time.process_time()
    found = problems(path)
    assert time.process_time() - start < 1
    if name == "num_local_experts":
        own = shapes(CONFIG)
        held = sum(int(np.prod(shape)) for shape in own.values())
        # Three layers: of an expert w1, w2, w3 of [32, 64], a row of the router's weight, and a bias.
        asked, values = len(own) + 3 * 3 * 99_994, held + 3 * 99_994 * (3 * 32 * 64 + 64 + 1)
        assert found == [
            f"config.json describes {asked:,} tensors of {values:,} values, the files hold "
            f"{len(own)} of {held:,}: give the config.json of these weights"
        ]
    else:
        assert all("expected shape" in line for line in found)


def test_ninety_thousand_layers_cost_no_time(folder, tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    for file in folder.iterdir():
        os.link(file, path / file.name)
    (path / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    freq = [0, 1] * 45_000
    config["text_config"] |= dict(num_hidden_layers=90_000, moe_layer_freq=freq)
    config["text_config"]["sparse_attention_config"] |= dict(
        sparse_attention_freq=freq, sparse_disable_index_value=freq
    )
    (path / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    (line,) = problems(path)
    assert line.startswith("config.json describes 2,070,003 tensors of ") and time.process_time() - start < 3


# Values


@pytest.mark.parametrize("host_bytes", [16 << 20, 0], ids=["on the host", "in place"])
def test_check_finite_names_the_tensors(host_bytes, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr("m3jax.checkpoint.loading.HOST_BYTES", host_bytes)
    bad = {name: tensors[name].copy() for name in (NORM, GATE, EXPERT)}
    bad[NORM][63], bad[GATE][2, 5:7], bad[EXPERT][0, 0] = np.nan, np.inf, -np.inf
    write_folder(tmp_path, CONFIG, tensors | bad)
    assert sorted(problems(tmp_path, check_finite=True)) == [
        f"{GATE}: 2 values are NaN or infinite",
        f"{EXPERT}: 1 values are NaN or infinite",
        f"{NORM}: 1 values are NaN or infinite",
    ]
    assert_same(load_parameters(tmp_path), expected_parameters(CONFIG, tensors | bad))
    checkpoint.load_with_report(tmp_path, progress=False)  # nobody asked to look


def test_check_finite_counts_on_and_passes_what_is_finite(folder, tensors, tmp_path):
    assert_same(load_parameters(folder, check_finite=True), expected_parameters(CONFIG, tensors))
    write_folder(tmp_path, CONFIG, {name: values * np.nan for name, values in tensors.items()})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, progress=False, check_finite=True)
    assert str(caught.value).endswith(f"and {len(tensors) - 8} more")
    assert len(caught.value.__notes__) == len(tensors)


def test_a_quantization_config_under_text_config_counts(tensors, tmp_path):
    """transformers writes it there for a text-only model."""
    quantized = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    fp8 = {name: values for name, values in tensors.items()}
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    fp8[name] = np.full(tensors[name].shape, 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)  # 1.0
    fp8[name + "_scale_inv"] = np.full((192, 2), 128, np.uint8)  # 2.0
    write_folder(tmp_path, CONFIG, fp8)
    assert problems(tmp_path) == ["config.json: no quantization_config, but 1 weights are F8_E4M3"]
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = quantized
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_parameters(tmp_path)["stacks.0.self_attn.q_proj"][0]
    assert (loaded == 2).all(), "1.0 with the scale 2"
    for wrong in (quantized | {"quant_method": "fp8"}, "mxfp8", [], False):
        config["text_config"]["quantization_config"] = wrong
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert any(line.startswith("config.json: quantization_config") for line in problems(tmp_path)), wrong


# Drafts


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    save_draft(draft(draft_vocab_size=40, own_head=True), path)
    return path


TAPS = "eagle_aux_hidden_state_layer_ids"
WRONG = {
    "fc_norm": (10**30, 1, "yes", [True]),
    "norm_output": (2, "false"),
    "hidden_size": ("48", 48.0, None, True, 2**31, 0, -1),
    "head_dim": (10**30, "12", 1.5),
    "num_key_value_heads": (0, [2], False),
    "rms_norm_eps": (0, "1e-6", 1e-60),
    "rope_theta": (-1.0, {}),
    "eagle_config": ([1], "x", 3),
    TAPS: (5, "012", [0, "1"], [0.5], list(range(100)), {"a": 1}, [10**30]),
    "target_hidden_size": ([48], "x" * 10_000),
    "hidden_act": ("\x1b[31m", ["silu"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_draft_s_settings_are_checked_by_name(name, draft_folder, tmp_path, unchecked):
    data = json.loads((draft_folder / "config.json").read_text())
    os.link(draft_folder / "model.safetensors", tmp_path / "model.safetensors")
    for value in WRONG[name]:
        (tmp_path / "config.json").write_text(json.dumps(data | {name: value}))
        with pytest.raises(ValueError, match=rf"config\.json: unsupported draft: .*{name} = ") as caught:
            load_draft(tmp_path, TARGET)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, bool, ml_dtypes.bfloat16, np.int16])
def test_offsets_of_another_dtype_are_refused_not_raised_through(dtype, draft_folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    stored = load_file(draft_folder / "model.safetensors")
    stored["d2t"] = np.zeros(40, dtype)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((draft_folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"d2t: expected \[40\] offsets"):
        load_draft(tmp_path, TARGET)


def test_a_draft_s_tensor_under_two_names_is_refused(draft_folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    stored = load_file(draft_folder / "model.safetensors")
    save_file(stored | {"model.norm.weight": stored["norm.weight"] + 1}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((draft_folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"norm\.weight: the same tensor as (model\.)?norm\.weight, keep one"):
        load_draft(tmp_path, TARGET)
