"""MXFP8 weights: the format bit by bit, and folders that are stored in it."""

import json
import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.checkpoint_folders import (
    assert_same,
    expected_parameters,
    is_router,
    load_parameters,
    random_tensors,
    same_bits,
    shapes,
    tiny_config,
    write_folder,
)

from m3jax import checkpoint, parallel
from m3jax.checkpoint import CheckpointError, mxfp8, tree
from m3jax.checkpoint.names import Target
from m3jax.checkpoint.reader import read_folder
from m3jax.checkpoint.values import check_range, cut
from m3jax.config import M3Config
from m3jax.model import dequantize, quantize

CONFIG = tiny_config()
QUANTIZATION = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
Q_PROJ = "language_model.model.layers.0.self_attn.q_proj.weight"
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.5.w2.weight"

# Significant bits, and the exponents of the smallest normal number and of the first that is too large.
FORMATS = {
    "bfloat16": (8, -126, 128),
    "float16": (11, -14, 16),
    "float32": (24, -126, 128),
    "float64": (53, -1022, 1024),
}


def e4m3(code: int) -> Fraction:
    """The value of an E4M3FN code without a sign, other than NaN (127), by its fields."""
    exponent, mantissa = code >> 3, code & 7
    return (8 + mantissa if exponent else mantissa) * Fraction(2) ** (max(exponent, 1) - 7 - 3)


def rounded(value: Fraction, dtype: str) -> float:
    """Round what is not negative to nearest, ties to even, with gradual underflow, and to infinity."""
    bits, smallest, too_large = FORMATS[dtype]
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(value.numerator) - math.log2(value.denominator))
    ulp = Fraction(2) ** (max(exponent, smallest) - bits + 1)
    value = round(value / ulp) * ulp
    return math.inf if value >= Fraction(2) ** too_large else float(value)


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=() if name == "bfloat16" else pytest.mark.further) for name in FORMATS]
)
def test_every_code_with_every_scale(dtype):
    """T44: codes are e4m3fn."""
    codes, scales = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    found = mxfp8.dequantize(codes, scales, np.dtype(dtype))
    assert found.dtype == dtype
    expected = np.full((256, 256), np.nan)
    for scale, code in np.ndindex(255, 127):
        product = rounded(e4m3(code) * Fraction(2) ** (scale - 127), "float32")
        if dtype not in ("float32", "float64") and math.isfinite(product):
            product = rounded(Fraction(product), dtype)
        expected[scale, code], expected[scale, code + 128] = product, -product
    np.testing.assert_array_equal(found.astype(np.float64), expected)
    is_zero = (codes & 127 == 0) & (scales < 255)
    assert (np.signbit(found[is_zero]) == (codes[is_zero] == 128)).all()


def quantized_folder(
    path: Path, rename=lambda tensors: tensors, seed: int = 0, config: M3Config = CONFIG
) -> dict[str, np.ndarray]:
    """Write a random MXFP8 folder; the tensors of the BF16 folder that it stands for."""
    draw = np.random.default_rng(seed).integers
    stored = random_tensors(config, seed=seed)
    plain = dict(stored)
    for name, shape in shapes(config).items():
        if len(shape) == 1 or is_router(name) or "embed_tokens" in name or "lm_head" in name:
            continue
        codes = draw(0, 256, shape, np.uint8)
        codes[codes & 127 == 127] = 0
        scales = draw(110, 140, (shape[0], -(-shape[1] // 32)), np.uint8)
        stored[name] = codes.view(ml_dtypes.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        powers = np.ldexp(1.0, scales.astype(int) - 127).repeat(32, axis=1)[:, : shape[1]]
        plain[name] = (stored[name].astype(np.float64) * powers).astype(ml_dtypes.bfloat16)
    write_folder(path, config, rename(stored), shards=2, quantization_config=QUANTIZATION)
    return plain


def merge_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as [E, 2F, D] and [E, D, F] with scales [E, 2F, D/32] and [E, D, F/32]."""
    merged = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in (2, 3, 4):
        prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts."
        for kind in ("", "_scale_inv"):
            stacked = lambda name, prefix=prefix, kind=kind: np.stack(
                [tensors[f"{prefix}{expert}.{name}.weight{kind}"] for expert in range(6)]
            )
            merged[f"{prefix}gate_up_proj{kind}"] = np.concatenate([stacked("w1"), stacked("w3")], axis=1)  # [E 2*F D]
            merged[f"{prefix}down_proj{kind}"] = stacked("w2")  # [E D F]
    return merged


def short_scale_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.replace("weight_scale_inv", "weight_scale"): values for name, values in tensors.items()}


@pytest.mark.parametrize("host_bytes", [16 << 20, 0], ids=["on the host", "in place"])
@pytest.mark.parametrize("rename", [dict, short_scale_names, merge_experts])
def test_folder_loads_as_its_bfloat16_twin(rename, host_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("m3jax.checkpoint.loading.HOST_BYTES", host_bytes)
    expected = expected_parameters(CONFIG, quantized_folder(tmp_path, rename))
    assert_same(load_parameters(tmp_path), expected)


def test_dequantised_values_are_the_same_in_float32(tmp_path):
    expected = expected_parameters(CONFIG, quantized_folder(tmp_path))
    for path, value in load_parameters(tmp_path, dtype="float32").items():
        assert same_bits(value, expected[path].astype(np.float32)), path


@pytest.mark.parametrize(
    ("dtype", "exponent"), [(np.float16, 16), (ml_dtypes.bfloat16, 128), (np.float32, 128), (np.float64, 128)]
)
def test_the_largest_scale_that_a_dtype_holds(dtype, exponent):
    """Of the largest code, 448; below it no code is too large for the dtype, whatever it is."""
    codes, dtype = np.full((2, 32), 0x7E, np.uint8), np.dtype(dtype)
    read = lambda scales: cut("w", Target("w", (), (2, 32), (1, 0), 1), codes, scales, ((0, 32), (0, 2)), dtype)
    held, too_large = (np.array([[0], [exponent - 9 + above + 127]], np.uint8) for above in (0, 1))
    assert np.isfinite(read(held).astype(np.float64)).all()
    check_range("w", codes, held, dtype)
    with pytest.raises(ValueError, match="w: a value is beyond the range"):
        read(too_large)
    with pytest.raises(ValueError, match="w: a value is beyond the range"):
        check_range("w", codes, too_large, dtype)


def test_shards_that_cut_through_scale_blocks(tmp_path):
    expected = expected_parameters(CONFIG, quantized_folder(tmp_path))
    # Two heads of 24 channels of o_proj's input, or half of 32 expert channels, are no whole blocks.
    mesh = parallel.make_mesh(tensor=4)
    model = checkpoint.load(tmp_path, mesh=mesh, progress=False)
    for path, leaf in tree.flatten(model).items():
        for shard in leaf.addressable_shards:
            assert same_bits(np.asarray(shard.data), expected[path][shard.index]), path


def stored(path: Path) -> dict[str, tuple]:
    """Dtype, shape and bytes of every tensor of a folder, by its name."""
    tensors = read_folder(path).tensors.values()
    return {tensor.name: (tensor.dtype, tensor.shape, tensor.view().tobytes()) for tensor in tensors}


@pytest.mark.parametrize(
    "host_bytes", [pytest.param(16 << 20, id="on the host"), pytest.param(0, marks=pytest.mark.further, id="in place")]
)
def test_kept_weights_stand_for_the_same_model_and_are_saved_byte_for_byte(host_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("m3jax.checkpoint.loading.HOST_BYTES", host_bytes)
    expected = expected_parameters(CONFIG, quantized_folder(tmp_path / "hub"))
    model = checkpoint.load(tmp_path / "hub", progress=False, weights="mxfp8")
    assert_same({path: np.asarray(leaf) for path, leaf in tree.flatten(dequantize(model)).items()}, expected)
    checkpoint.save(model, tmp_path / "again", max_shard_bytes=60_000)
    assert stored(tmp_path / "again") == stored(tmp_path / "hub")
    assert json.loads((tmp_path / "again/config.json").read_text())["quantization_config"] == QUANTIZATION


def test_merged_experts_are_kept_as_those_of_one_expert_a_tensor(tmp_path):
    quantized_folder(tmp_path / "hub")
    quantized_folder(tmp_path / "merged", merge_experts)
    found = load_parameters(tmp_path / "merged", weights="mxfp8")
    assert_same(found, load_parameters(tmp_path / "hub", weights="mxfp8"))


def test_kept_weights_on_a_mesh_have_the_scales_of_their_codes(tmp_path):
    """Devices of the tensor axis hold other input channels of o_proj: three blocks of scales each."""
    config = tiny_config(intermediate_size=64, dense_intermediate_size=192)
    expected = expected_parameters(config, quantized_folder(tmp_path, config=config))
    mesh = parallel.make_mesh(expert=2, tensor=2)
    found = tree.flatten(checkpoint.load(tmp_path, mesh=mesh, progress=False, weights="mxfp8"))
    for name, leaf in found.items():
        if not name.endswith(".codes"):
            continue
        weight = name.removesuffix(".codes")
        num_inputs = 2 if weight.endswith("o_proj") else 1  # heads and their channels
        scale_shards = found[f"{weight}.scales"].addressable_shards
        for codes, scales in zip(leaf.addressable_shards, scale_shards, strict=True):
            assert codes.device == scales.device
            values, blocks = np.asarray(codes.data).view(np.uint8), np.asarray(scales.data)
            axis = 2 if "experts." in weight and "shared" not in weight else 1  # of inputs, behind layers and experts
            flat = values.reshape(*values.shape[:axis], -1, *values.shape[axis + num_inputs :])
            repeated = blocks.repeat(32, axis).take(range(flat.shape[axis]), axis)
            part = mxfp8.dequantize(flat, repeated, np.dtype(ml_dtypes.bfloat16)).reshape(values.shape)
            assert same_bits(part, expected[weight][codes.index]), name


def test_a_mesh_that_cuts_through_blocks_of_kept_weights(tmp_path):
    """Half of 160 channels is two blocks and a half: a device would not have the scale of its last ones."""
    quantized_folder(tmp_path)
    with pytest.raises(ValueError, match="mesh axis 'tensor' of size 2 cuts 160 input channels"):
        checkpoint.load(tmp_path, mesh="tensor=2", progress=False, weights="mxfp8")


def test_orbax_keeps_codes_and_scales(tmp_path):
    quantized_folder(tmp_path / "hub")
    model = checkpoint.load(tmp_path / "hub", progress=False, weights="mxfp8")
    checkpoint.save_orbax(model, tmp_path / "orbax")
    found = tree.flatten(checkpoint.load_orbax(tmp_path / "orbax"))
    assert_same(
        {name: np.asarray(leaf) for name, leaf in found.items()}, load_parameters(tmp_path / "hub", weights="mxfp8")
    )


@pytest.mark.further  # quantize and save of such a model: tests/checkpoint/test_save.py
def test_quantizing_a_bfloat16_model_writes_the_release_s_layout(tmp_path):
    write_folder(tmp_path / "bf16", CONFIG, random_tensors(CONFIG))
    quantized_folder(tmp_path / "hub")
    model = quantize(checkpoint.load(tmp_path / "bf16", progress=False))
    checkpoint.save(model, tmp_path / "mxfp8")
    layout = lambda path: {name: tensor[:2] for name, tensor in stored(path).items()}
    assert layout(tmp_path / "mxfp8") == layout(tmp_path / "hub")
    announced = json.loads((tmp_path / "mxfp8/config.json").read_text())["quantization_config"]
    assert {key: announced[key] for key in QUANTIZATION} == QUANTIZATION
    gates = [f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in (2, 3, 4)]
    assert announced["ignored_layers"][-3:] == gates
    kept = {name: np.asarray(leaf) for name, leaf in tree.flatten(dequantize(model)).items()}
    assert_same(load_parameters(tmp_path / "mxfp8"), kept)


def test_weights_that_cannot_be_kept(tmp_path):
    write_folder(tmp_path / "bf16", CONFIG, random_tensors(CONFIG))
    with pytest.raises(CheckpointError, match="no weight is in MXFP8: load it with weights = 'dequantize', then"):
        checkpoint.load(tmp_path / "bf16", progress=False, weights="mxfp8")
    with pytest.raises(ValueError, match="weights = 'fp8': allowed are 'dequantize', 'mxfp8'"):
        checkpoint.load(tmp_path / "no folder", progress=False, weights="fp8")  # said before anything is read

    def with_one_in_bfloat16(tensors):
        tensors.pop(EXPERT + "_scale_inv")
        return tensors | {EXPERT: tensors[EXPERT].astype(ml_dtypes.bfloat16)}

    quantized_folder(tmp_path / "mixed", with_one_in_bfloat16)
    with pytest.raises(CheckpointError, match=f"{EXPERT}: BF16, and weights = 'mxfp8' needs MXFP8"):
        checkpoint.load(tmp_path / "mixed", progress=False, weights="mxfp8")

    def too_large(tensors):
        tensors[Q_PROJ + "_scale_inv"][0, 0], tensors[Q_PROJ].view(np.uint8)[0, 0] = 250, 0x7E
        return tensors

    quantized_folder(tmp_path / "large", too_large)
    with pytest.raises(ValueError, match=f"{Q_PROJ}: a value is beyond the range of bfloat16"):
        checkpoint.load(tmp_path / "large", progress=False, weights="mxfp8")


def test_saved_in_bfloat16_without_quantization_config(tmp_path):
    expected = expected_parameters(CONFIG, quantized_folder(tmp_path / "mxfp8"))
    checkpoint.save(checkpoint.load(tmp_path / "mxfp8", progress=False), tmp_path / "bf16")
    found = load_parameters(tmp_path / "bf16")
    assert all(same_bits(found[path], expected[path]) for path in expected)
    assert "quantization_config" not in (tmp_path / "bf16" / "config.json").read_text()


def faults(path: Path, change, quantization=QUANTIZATION) -> list[str]:
    """The lines of the error for a folder after `change` to its stored tensors."""

    def changed(tensors):
        change(tensors)
        return tensors

    quantized_folder(path, changed)
    keys = {} if quantization is None else {"quantization_config": quantization}
    config = write_folder(path / "only_config", CONFIG, {}, **keys) / "config.json"
    (path / "config.json").write_bytes(config.read_bytes())
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, progress=False)
    return list(caught.value.problems)


def test_one_error_lists_every_fault_of_scales(tmp_path):
    """T44: codes without a scale are refused, by name."""
    up = "language_model.model.layers.1.mlp.up_proj.weight"
    down = "language_model.model.layers.1.mlp.down_proj.weight"
    head = "language_model.lm_head.weight"

    def change(tensors):
        tensors[EXPERT + "_scale_inv"][7, 0] = 255
        del tensors[Q_PROJ + "_scale_inv"], tensors[up]
        tensors[down + "_scale_inv"] = tensors[down + "_scale_inv"][:, :-1].copy()
        tensors[head] = np.zeros((96, 64), ml_dtypes.float8_e4m3fn)
        tensors[head + "_scale_inv"] = np.zeros((96, 2), np.uint8)

    assert sorted(faults(tmp_path, change)) == sorted(
        [
            f"{EXPERT}_scale_inv: 1 of its scales are NaN (byte 255)",
            f"{Q_PROJ}: F8_E4M3 without a scale, expected {Q_PROJ}_scale_inv",
            f"{up}: missing, expected [160, 64]",
            f"{up}_scale_inv: a scale without its weight",
            f"{down}_scale_inv: expected U8 [64, 5], found U8 [64, 4]",
            f"{head}: expected BF16, F16, F32 or F64, found F8_E4M3 [96, 64]",
            f"{head}_scale_inv: unexpected, found U8 [96, 2]",
        ]
    )


@pytest.mark.parametrize("lost", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_of_a_lost_file_nothing_is_missing(lost, tmp_path):
    """A scale or a weight in a file that cannot be read is not missed beside the other one."""
    quantized_folder(tmp_path)
    (tmp_path / lost).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, progress=False)
    (line,) = caught.value.problems
    assert line.startswith(f"{lost}: truncated or damaged")


def test_a_release_leaves_the_gates_of_its_experts_alone():
    """And of no dense layer, which has none."""
    ignored = mxfp8.announcement(CONFIG)["ignored_layers"]
    gates = [f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in (2, 3, 4)]
    assert [name for name in ignored if "layers" in name] == gates


def test_another_float8_is_not_taken_for_e4m3(tmp_path):
    """T44: the same bytes under another kind's name."""

    def change(tensors):
        tensors[Q_PROJ] = tensors[Q_PROJ].view(ml_dtypes.float8_e5m2)

    (fault,) = faults(tmp_path, change)
    assert fault.startswith(f"{Q_PROJ}: expected ") and "found F8_E5M2" in fault, fault


def test_a_scale_beside_a_weight_that_is_not_quantised(tmp_path):
    def change(tensors):
        tensors[Q_PROJ] = np.zeros(tensors[Q_PROJ].shape, ml_dtypes.bfloat16)

    (line,) = faults(tmp_path, change)
    assert line == f"{Q_PROJ}: expected F8_E4M3 because {Q_PROJ}_scale_inv is there, found BF16 [192, 64]"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, "config.json: no quantization_config, but "),
        (QUANTIZATION | {"quant_method": "fp8"}, "quant_method must be 'mxfp8', found 'fp8'"),
        (QUANTIZATION | {"weight_block_size": [128, 128]}, "must be [1, 32], found [128, 128]"),
        ({"quant_method": "mxfp8"}, "weight_block_size must be [1, 32], found None"),
    ],
)
def test_config_that_does_not_announce_mxfp8(quantization, message, tmp_path):
    (line,) = faults(tmp_path, lambda tensors: None, quantization)
    assert message in line
