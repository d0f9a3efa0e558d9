"""Small checkpoint folders in the hub's layout, for the tests of loading and saving."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from m3jax import checkpoint
from m3jax.checkpoint import tree
from m3jax.config import M3Config

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
INDEX = "model.safetensors.index.json"


def tiny_config(**changes) -> M3Config:
    """Two dense layers, then three with MSA and MoE; every width differs from every other."""
    values = dict(
        vocab_size=96, hidden_size=64, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=4, head_dim=24, intermediate_size=32, dense_intermediate_size=160,
        shared_intermediate_size=128, num_local_experts=6, num_experts_per_tok=2, rotary_dim=12,
        layer_types=(FULL, FULL, SPARSE, SPARSE, SPARSE),
        mlp_layer_types=("dense", "dense", "sparse", "sparse", "sparse"),
        index_n_heads=4, index_head_dim=40, index_block_size=16, index_topk_blocks=4,
    )  # fmt: skip
    return M3Config(**(values | changes))


def shapes(c: M3Config) -> dict[str, tuple[int, ...]]:
    """Hub names and shapes, written out by hand."""
    d, h, hi, kv = c.hidden_size, c.head_dim, c.index_head_dim, c.num_key_value_heads
    out = {"language_model.model.embed_tokens.weight": (c.vocab_size, d)}
    for i in range(c.num_hidden_layers):
        a = f"language_model.model.layers.{i}."
        out[a + "input_layernorm.weight"] = out[a + "post_attention_layernorm.weight"] = (d,)
        a += "self_attn."
        out[a + "q_proj.weight"] = (c.num_attention_heads * h, d)
        out[a + "k_proj.weight"] = out[a + "v_proj.weight"] = (kv * h, d)
        out[a + "o_proj.weight"] = (d, c.num_attention_heads * h)
        out[a + "q_norm.weight"] = out[a + "k_norm.weight"] = (h,)
        if c.layer_types[i] == SPARSE:
            out[a + "index_q_proj.weight"] = (kv * hi, d)
            out[a + "index_k_proj.weight"] = (hi, d)
            out[a + "index_q_norm.weight"] = out[a + "index_k_norm.weight"] = (hi,)
        out |= _mlp_shapes(c, i)
    out["language_model.model.norm.weight"] = (d,)
    out["language_model.lm_head.weight"] = (c.vocab_size, d)
    return out


def _mlp_shapes(c: M3Config, layer: int) -> dict[str, tuple[int, ...]]:
    d, f, prefix = c.hidden_size, c.intermediate_size, f"language_model.model.layers.{layer}."
    if c.mlp_layer_types[layer] == "dense":
        return _glu_shapes(prefix + "mlp.", d, c.dense_intermediate_size)
    moe = prefix + "block_sparse_moe."
    out = {
        moe + "gate.weight": (c.num_local_experts, d),
        moe + "e_score_correction_bias": (c.num_local_experts,),
    }
    for e in range(c.num_local_experts):
        expert = f"{moe}experts.{e}."
        out |= {expert + "w1.weight": (f, d), expert + "w3.weight": (f, d), expert + "w2.weight": (d, f)}
    return out | _glu_shapes(moe + "shared_experts.", d, c.shared_intermediate_size)


def _glu_shapes(prefix: str, d: int, f: int) -> dict[str, tuple[int, ...]]:
    wide = {f"{prefix}{name}_proj.weight": (f, d) for name in ("gate", "up")}
    return wide | {f"{prefix}down_proj.weight": (d, f)}


def is_router(name: str) -> bool:
    return name.endswith((".gate.weight", "e_score_correction_bias"))


def random_tensors(c: M3Config, dtype=ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values for every text tensor: the router in float32, the others in `dtype`."""
    draw = np.random.default_rng(seed).standard_normal
    return {
        name: draw(shape, np.float32).astype(np.float32 if is_router(name) else dtype)
        for name, shape in shapes(c).items()
    }


def write_folder(
    path: Path, config: M3Config, tensors: Mapping[str, np.ndarray], shards: int = 1, **config_keys
) -> Path:
    """Write config.json (with more keys at its top level) and the tensors, dealt out over shards."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict() | config_keys))
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", {"format": "pt"})
        return path
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        held = {name: t for name, t in tensors.items() if weight_map[name] == file}
        save_file(held, path / file, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def expected_parameters(c: M3Config, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters by path, by loops over the hub's tensors: each stacked, transposed, split in heads."""
    top = "language_model."
    out = {
        "embed_tokens": tensors[top + "model.embed_tokens.weight"],
        "norm": tensors[top + "model.norm.weight"],
        "lm_head": tensors[top + "lm_head.weight"],
    }
    for s, stack in enumerate(c.stacks):
        layers = range(stack.first_layer, stack.first_layer + stack.num_layers)
        per_layer = [_layer_parameters(c, tensors, layer) for layer in layers]
        for path in per_layer[0]:
            out[f"stacks.{s}.{path}"] = np.stack([layer[path] for layer in per_layer])
    return out


def _layer_parameters(c: M3Config, tensors: Mapping, layer: int) -> dict[str, np.ndarray]:
    prefix, heads, experts = f"language_model.model.layers.{layer}.", {}, {}
    heads |= {"q_proj": c.num_attention_heads, "o_proj": c.num_attention_heads}
    heads |= dict.fromkeys(("k_proj", "v_proj", "index_q_proj"), c.num_key_value_heads)
    out = {}
    for name, value in tensors.items():
        if not name.startswith(prefix):
            continue
        path = name.removeprefix(prefix).removesuffix(".weight").replace("block_sparse_moe", "mlp")
        value = value.T
        kind = path.split(".")[-1]
        if match := re.fullmatch(r"mlp\.experts\.(\d+)\.(w\d)", path):
            experts.setdefault(match[2], {})[int(match[1])] = value
        elif kind == "o_proj":
            out[path] = value.reshape(heads[kind], -1, value.shape[-1])
        elif kind in heads:
            out[path] = value.reshape(value.shape[0], heads[kind], -1)
        else:
            out[path] = value
    for hub, name in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        if experts:
            slabs = [experts[hub][e] for e in range(c.num_local_experts)]
            out[f"mlp.experts.{name}"] = np.stack(slabs)
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal dtypes, shapes and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def load_parameters(path: Path, **arguments) -> dict[str, np.ndarray]:
    """The parameters of a folder by path, on the host."""
    model = checkpoint.load(path, progress=False, **arguments)
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(model).items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert [k for k in found if not same_bits(found[k], expected[k])] == []
