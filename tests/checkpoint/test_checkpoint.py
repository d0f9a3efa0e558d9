"""Loading hub folders: names, values, faults."""

import json
import logging
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoint_folders import (
    INDEX,
    assert_same,
    expected_parameters,
    is_router,
    load_parameters,
    random_tensors,
    shapes,
    tiny_config,
    write_folder,
)

from m3jax import checkpoint
from m3jax import model as m3_model
from m3jax.checkpoint import CheckpointError, names, tree
from m3jax.checkpoint.values import cut
from m3jax.config import M3Config

CONFIG = tiny_config()
Q_PROJ = "language_model.model.layers.0.self_attn.q_proj.weight"
GATE = "language_model.model.layers.2.block_sparse_moe.gate.weight"


def further(*values) -> list:
    """Values of parameters that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.further) for value in values]


def faults(path: Path) -> list[str]:
    """The lines of the error that loading raises: eight and how many more in its message, all of them in its notes."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, progress=False)
    problems, lines = list(caught.value.problems), str(caught.value).splitlines()[1:]
    more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
    assert [line.strip() for line in lines] == problems[:8] + more
    assert getattr(caught.value, "__notes__", []) == (problems if more else [])
    assert len(str(caught.value)) <= 2000
    return problems


# Names


def test_table_lists_the_published_tensors():
    places = names.targets(M3Config.m3())
    assert len(places) == 22_893
    assert sum(int(np.prod(target.hub_shape)) for target in places.values()) == 426_174_572_928


@pytest.mark.parametrize("config", [CONFIG, M3Config.m3()], ids=["tiny", "m3"])
def test_table_fills_every_parameter_once(config):
    leaves = tree.flatten(m3_model.abstract(config, "bfloat16"))
    filled, places = {}, names.targets(config)
    assert {name: target.hub_shape for name, target in places.items()} == shapes(config)
    for target in places.values():
        own_shape = tuple(target.dims[axis] for axis in target.perm)
        assert leaves[target.param].shape[len(target.index) :] == own_shape
        filled.setdefault(target.param, set()).add(target.index)
    assert filled.keys() == leaves.keys()
    for param, indices in filled.items():
        stack_shape = leaves[param].shape[: len(next(iter(indices)))]
        assert indices == set(np.ndindex(stack_shape))


def rename(pattern: str, replacement: str):
    return lambda tensors: {re.sub(pattern, replacement, name): values for name, values in tensors.items()}


def merge_experts(tensors):
    """[E, 2F, D] with the rows of w1 first, and [E, D, F], as transformers holds them in memory."""
    merged, experts_of = {}, {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(w\d)\.weight", name):
            experts_of.setdefault(match[1], {})[int(match[2]), match[3]] = values
        else:
            merged[name] = values
    for prefix, weights in experts_of.items():
        experts = range(1 + max(expert for expert, _ in weights))
        pairs = [np.concatenate([weights[expert, "w1"], weights[expert, "w3"]]) for expert in experts]  # [2*F D]
        merged[f"{prefix}.gate_up_proj"] = np.stack(pairs)  # [E 2*F D]
        merged[f"{prefix}.down_proj"] = np.stack([weights[expert, "w2"] for expert in experts])  # [E D F]
    return merged


def merge_gate_up(tensors):
    """Gate and up of dense and shared MLPs as [2F, D], with the rows of gate first."""
    merged = dict(tensors)
    for name in tensors:
        if name.endswith(".gate_proj.weight"):
            gate, up = merged.pop(name), merged.pop(name.replace("gate_proj", "up_proj"))
            merged[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([gate, up])  # [2*F D]
    return merged


def as_transformers_holds_it(tensors):
    held = merge_gate_up(merge_experts(tensors))
    for rename_all in (
        rename(r"^language_model\.lm_head", "lm_head"),
        rename(r"^language_model\.model", "model.language_model"),
        rename(r"block_sparse_moe\.e_score", "mlp.gate.e_score"),
        rename("block_sparse_moe", "mlp"),
        rename(r"index_([qk])_", r"indexer.\1_"),
    ):
        held = rename_all(held)
    return held


VARIANTS = {
    "no prefix": rename(r"^language_model\.", ""),
    "model.language_model": rename(r"^language_model\.model\.", "model.language_model."),
    "mlp": rename("block_sparse_moe", "mlp"),
    "bias under gate": rename(r"moe\.e_score", "moe.gate.e_score"),
    "indexer": rename(r"index_([qk])_", r"indexer.\1_"),
    "merged experts": merge_experts,
    "merged experts with .weight": lambda tensors: rename(r"experts\.(gate_up_proj|down_proj)$", r"experts.\1.weight")(
        merge_experts(tensors)
    ),
    "merged gate_up_proj": merge_gate_up,
    "all at once": as_transformers_holds_it,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_spelling_loads_the_same(variant, tensors, tmp_path):
    renamed = VARIANTS[variant](tensors)
    assert renamed.keys() != tensors.keys()
    write_folder(tmp_path, CONFIG, renamed)
    assert_same(load_parameters(tmp_path), expected_parameters(CONFIG, tensors))


def test_vision_and_mtp_tensors_are_left_with_a_note(tensors, tmp_path, caplog):
    values = np.zeros(3, np.int64)
    vision = [
        "vision_tower.vision_model.pre_layrnorm.bias",
        "multi_modal_projector.linear_1.weight",
        "patch_merge_mlp.linear_2.bias",
        "model.vision_tower.layers.0.mlp.fc1.weight",
    ]
    mtp = ["model.mtp.layers.0.enorm.weight", "mtp.layers.1.mlp.gate.weight"]
    write_folder(tmp_path, CONFIG, tensors | dict.fromkeys([*vision, *mtp], values))
    with caplog.at_level(logging.INFO, "m3jax.checkpoint"):
        _, report = checkpoint.load_with_report(tmp_path, progress=False)
    assert (report.vision, report.mtp) == (tuple(sorted(vision)), tuple(sorted(mtp)))
    assert "4 vision tensors are kept aside" in caplog.text
    assert "2 mtp.* tensors are skipped" in caplog.text


@pytest.mark.parametrize("prefix", ["", "model."])
def test_spellings_of_the_towers_names(prefix):
    """Without a prefix they are spelled as with one."""
    for name, spelled in {
        "vision_tower.embeddings.proj.weight": "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "vision_tower.layers.0.mlp.fc1.weight": "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "multi_modal_projector.merge_linear_1.bias": "patch_merge_mlp.linear_1.bias",
    }.items():
        assert names.canonical(prefix + name) == (spelled, False)


# Values


@pytest.mark.parametrize("host_bytes", [16 << 20, 0], ids=["on the host", "in place"])
def test_values_stand_where_they_belong(host_bytes, folder, tensors, monkeypatch):
    """T47, T53: every parameter is the tensor of the folder, norms as they are stored."""
    monkeypatch.setattr("m3jax.checkpoint.loading.HOST_BYTES", host_bytes)
    assert_same(load_parameters(folder), expected_parameters(CONFIG, tensors))


@pytest.mark.parametrize("stored", [np.float32, np.float64, *further(np.float16, ml_dtypes.bfloat16)])
@pytest.mark.parametrize("dtype", ["bfloat16", *further("float32", "float16")])
def test_values_are_cast_and_the_router_stays_float32(stored, dtype, tmp_path):
    tensors = random_tensors(CONFIG, stored)
    tensors[GATE] = tensors[GATE].astype(stored)
    write_folder(tmp_path, CONFIG, tensors)
    cast = {name: values.astype(np.float32 if is_router(name) else dtype) for name, values in tensors.items()}
    assert_same(load_parameters(tmp_path, dtype=dtype), expected_parameters(CONFIG, cast))


def test_float64_holds_everything_in_float64(folder, tensors):
    with pytest.raises(ValueError, match="jax_enable_x64"):
        load_parameters(folder, dtype="float64")
    with jax.enable_x64(True):
        cast = {name: values.astype(np.float64) for name, values in tensors.items()}
        assert_same(load_parameters(folder, dtype="float64"), expected_parameters(CONFIG, cast))


def test_all_bfloat16_values_survive_float32(tmp_path):
    config = tiny_config(vocab_size=1024)
    tensors = random_tensors(config)
    every_value = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(1024, 64)  # [V D]
    tensors["language_model.lm_head.weight"] = every_value
    write_folder(tmp_path, config, tensors)
    found = load_parameters(tmp_path, dtype="float32")["lm_head"]
    bits = every_value.view(np.uint16).astype(np.uint32) << 16
    is_nan = bits << 1 > 0xFF000000
    np.testing.assert_array_equal(found.view(np.uint32)[~is_nan], bits[~is_nan])
    assert np.isnan(found[is_nan]).all()


def test_a_value_out_of_range_is_an_error(tensors, tmp_path):
    large = tensors[Q_PROJ].copy()
    large[3, 4] = 1e5
    write_folder(tmp_path, CONFIG, tensors | {Q_PROJ: large})
    with pytest.raises(ValueError, match=re.escape(Q_PROJ) + ".*beyond the range of float16"):
        load_parameters(tmp_path, dtype="float16")
    assert np.isfinite(load_parameters(tmp_path)["stacks.0.self_attn.q_proj"]).all()


def test_the_largest_value_that_a_dtype_holds():
    """A float64 may round to the largest float32 and no further; infinities and NaN stay what they are."""
    largest = float(np.finfo(np.float32).max)
    target = names.Target("w", (), (4,), (0,), 1)
    cast = lambda values: cut("w", target, np.array(values), None, ((0, 4),), np.dtype(np.float32))
    held = [largest, -largest, np.inf, np.nan]
    np.testing.assert_array_equal(cast(held), np.array(held, np.float32))
    with pytest.raises(ValueError, match=r"w: a value is beyond the range of float32, at most 3\.40"):
        cast([1.01 * largest, np.inf, 0, 0])


def test_a_model_is_a_copy_of_its_files(tmp_path):
    """Also where a device could take the file's pages as they are: who writes into the file changes no model."""
    tensors = random_tensors(CONFIG, np.float32)
    file = write_folder(tmp_path, CONFIG, tensors) / "model.safetensors"
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    padded = begin + -begin % 64  # spaces behind the header, so that a CPU device could share the memory
    file.write_bytes((padded - 8).to_bytes(8, "little") + data[8:begin].ljust(padded - 8) + data[begin:])
    found = tree.flatten(checkpoint.load(tmp_path, dtype="float32", progress=False))
    with open(file, "r+b") as stream:
        stream.seek(padded)
        stream.write(bytes(len(data) - begin))
    assert_same({name: np.asarray(leaf) for name, leaf in found.items()}, expected_parameters(CONFIG, tensors))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "float8_e4m3fn", ""])
def test_unknown_dtype_says_what_is_allowed(dtype, folder):
    with pytest.raises(ValueError, match=f"dtype = {dtype!r}: allowed are bfloat16, "):
        load_parameters(folder, dtype=dtype)


def test_progress_bar_is_for_terminals(folder, monkeypatch, capsys):
    checkpoint.load(folder)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    checkpoint.load(folder, progress=False)
    assert capsys.readouterr() == ("", "")
    checkpoint.load(folder)
    out, err = capsys.readouterr()
    assert out == "" and "loading" in err


# Faults


def test_one_error_lists_every_tensor_at_fault(tensors, tmp_path):
    """T53: a tensor that is missing, unexpected or of another shape is never left as it was made."""
    broken = dict(tensors)
    norm = "language_model.model.norm.weight"
    del broken[Q_PROJ], broken[GATE]
    broken[norm] = np.zeros(65, ml_dtypes.bfloat16)
    broken["language_model.lm_head.weight"] = np.zeros((96, 64), np.int32)
    broken["language_model.model.layers.0.self_attn.index_k_proj.weight"] = np.zeros((40, 64), np.float32)
    broken["language_model.model.layers.2.block_sparse_moe.experts.6.w1.weight"] = np.ones((32, 64))
    broken["model.layers.1.mlp.up_proj.weight"] = broken["language_model.model.layers.1.mlp.up_proj.weight"]
    broken["what.is.this"] = np.zeros(2, np.uint8)
    found = "\n".join(faults(write_folder(tmp_path, CONFIG, broken, shards=2)))
    for line in (
        f"{Q_PROJ}: missing, expected [192, 64]",
        f"{GATE}: missing, expected [6, 64]",
        f"{norm}: expected shape [64], found BF16 [65]",
        "language_model.lm_head.weight: expected BF16, F16, F32 or F64, found I32 [96, 64]",
        "layers.0.self_attn.index_k_proj.weight: unexpected, found F32 [40, 64]",
        "layers.2.block_sparse_moe.experts.6.w1.weight: unexpected, found F64 [32, 64]",
        "model.layers.1.mlp.up_proj.weight: the same tensor as "
        "language_model.model.layers.1.mlp.up_proj.weight, keep one",
        "what.is.this: unexpected, found U8 [2]",
    ):
        assert line in found
    assert len(found.splitlines()) == 8


def test_merged_tensors_are_checked_like_others(tensors, tmp_path):
    broken = merge_experts(tensors)
    prefix = "language_model.model.layers.2.block_sparse_moe.experts."
    broken[prefix + "gate_up_proj"] = broken[prefix + "gate_up_proj"][:, :63]
    broken[prefix + "4.w2.weight"] = tensors[prefix + "4.w2.weight"]
    lines = faults(write_folder(tmp_path, CONFIG, broken))
    assert len(lines) == 2
    assert f"{prefix}gate_up_proj: expected shape [6, 64, 64], found BF16 [6, 63, 64]" in lines
    assert any(f"holds {prefix}4.w2.weight, which" in line for line in lines)


def test_a_model_of_another_depth_misses_every_tensor_of_the_layer(tensors, tmp_path):
    deeper = tiny_config(
        num_hidden_layers=6,
        layer_types=(*CONFIG.layer_types, "full_attention"),
        mlp_layer_types=(*CONFIG.mlp_layer_types, "dense"),
    )
    write_folder(tmp_path, deeper, tensors)
    missing = sorted(name for name in shapes(deeper) if ".layers.5." in name)
    assert sorted(line.split(":")[0] for line in faults(tmp_path)) == missing


@pytest.mark.parametrize("keep", [0, 7, 100, -1], ids=["empty", "no length", "half a header", "a byte"])
@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_file(keep, shards, tensors, tmp_path):
    write_folder(tmp_path, CONFIG, tensors, shards=shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    (line,) = faults(tmp_path)
    assert line.startswith(f"{file.name}: truncated or damaged, {file.stat().st_size} bytes")
    assert line.endswith("; download it again")


def test_index_that_does_not_match_its_shards(tensors, tmp_path):
    write_folder(tmp_path, CONFIG, tensors, shards=3)
    index = json.loads((tmp_path / INDEX).read_text())
    absent = "model-00002-of-00003.safetensors"
    (tmp_path / absent).unlink()
    first = "model-00001-of-00003.safetensors"
    unplaced = next(iter(load_file(tmp_path / first)))
    del index["weight_map"][unplaced]
    index["weight_map"]["language_model.model.layers.9.extra"] = first
    (tmp_path / INDEX).write_text(json.dumps(index))
    count = sum(file == absent for file in index["weight_map"].values())
    assert sorted(faults(tmp_path)) == sorted(
        [
            f"{absent}: no such file; {INDEX} places {count} tensors in it; download it again",
            f"{unplaced}: {first} holds it, but {INDEX} does not place it there",
            f"language_model.model.layers.9.extra: {INDEX} places it in {first}, which does not hold it",
        ]
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_broken_index(text, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / INDEX).write_text(text)
    (line,) = faults(tmp_path)
    assert line.startswith(f"{INDEX}: no weight_map")


def test_folder_without_weights(folder, tmp_path):
    assert faults(tmp_path / "nowhere") == ["no such folder; give one in the hub's layout"]
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_parameters(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (line,) = faults(tmp_path)
    assert line.startswith("no weights") and "only" not in line
    shard = "model-00001-of-00003.safetensors"
    (tmp_path / shard).write_bytes((folder / shard).read_bytes())
    (line,) = faults(tmp_path)
    assert line.startswith("no weights") and line.endswith(f"only {shard}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_parameters(tmp_path)


def test_an_error_has_the_first_eight_problems_and_a_short_name():
    many = CheckpointError("a" * 161, [f"p{number}" for number in range(9)])
    assert "9 problems\n  p0" in str(many) and len(many.__notes__) == 9 == len(many.problems)
    assert "a" * 161 not in str(many) and "a" * 160 in str(CheckpointError("a" * 160, ["x"]))
    assert str(CheckpointError("a", ["x"])).startswith("cannot load the checkpoint a: 1 problem\n  x")


def test_faults_are_found_before_anything_is_read(tensors, tmp_path, monkeypatch):
    broken = {name: values for name, values in tensors.items() if name != GATE}
    write_folder(tmp_path, CONFIG, broken)
    monkeypatch.setattr("m3jax.checkpoint.reader.StoredTensor.view", None)
    monkeypatch.setattr("m3jax.model.abstract", None)
    assert faults(tmp_path) == [f"{GATE}: missing, expected [6, 64]"]
