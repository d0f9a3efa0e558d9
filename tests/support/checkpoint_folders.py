"""Small checkpoint folders in the hub's layout, for the tests of loading and saving."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors.numpy import save_file

from m3jax import checkpoint
from m3jax.checkpoint import tree
from m3jax.config import M3Config

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
INDEX = "model.safetensors.index.json"

Values = Shaped[np.ndarray, "..."]


def tiny_config(**changes) -> M3Config:
    """A model of two dense layers, then three with MSA and MoE; every width differs from every other."""
    values = dict(
        vocab_size=96, hidden_size=64, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=4, head_dim=24, intermediate_size=32, dense_intermediate_size=160,
        shared_intermediate_size=128, num_local_experts=6, num_experts_per_tok=2, rotary_dim=12,
        layer_types=(FULL, FULL, SPARSE, SPARSE, SPARSE),
        mlp_layer_types=("dense", "dense", "sparse", "sparse", "sparse"),
        index_n_heads=4, index_head_dim=40, index_block_size=16, index_topk_blocks=4,
    )  # fmt: skip
    return M3Config(**(values | changes))


def shapes(config: M3Config) -> dict[str, tuple[int, ...]]:
    """The shape of every text tensor by hub name, in the hub's order, written out by hand."""
    width, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    found = {"language_model.model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        prefix = f"language_model.model.layers.{layer}."
        found[prefix + "input_layernorm.weight"] = found[prefix + "post_attention_layernorm.weight"] = (width,)
        attention = prefix + "self_attn."
        found[attention + "q_proj.weight"] = (heads * head_dim, width)
        found[attention + "k_proj.weight"] = found[attention + "v_proj.weight"] = (kv_heads * head_dim, width)
        found[attention + "o_proj.weight"] = (width, heads * head_dim)
        found[attention + "q_norm.weight"] = found[attention + "k_norm.weight"] = (head_dim,)
        if config.layer_types[layer] == SPARSE:
            found[attention + "index_q_proj.weight"] = (kv_heads * index_dim, width)
            found[attention + "index_k_proj.weight"] = (index_dim, width)
            found[attention + "index_q_norm.weight"] = found[attention + "index_k_norm.weight"] = (index_dim,)
        found |= _mlp_shapes(config, layer)
    found["language_model.model.norm.weight"] = (width,)
    found["language_model.lm_head.weight"] = (config.vocab_size, width)
    return found


def _mlp_shapes(config: M3Config, layer: int) -> dict[str, tuple[int, ...]]:
    width, hidden, prefix = config.hidden_size, config.intermediate_size, f"language_model.model.layers.{layer}."
    if config.mlp_layer_types[layer] == "dense":
        return _glu_shapes(prefix + "mlp.", width, config.dense_intermediate_size)
    moe = prefix + "block_sparse_moe."
    found = {
        moe + "gate.weight": (config.num_local_experts, width),
        moe + "e_score_correction_bias": (config.num_local_experts,),
    }
    for number in range(config.num_local_experts):
        expert = f"{moe}experts.{number}."
        found[expert + "w1.weight"] = found[expert + "w3.weight"] = (hidden, width)
        found[expert + "w2.weight"] = (width, hidden)
    return found | _glu_shapes(moe + "shared_experts.", width, config.shared_intermediate_size)


def _glu_shapes(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    into_hidden = {f"{prefix}{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
    return into_hidden | {f"{prefix}down_proj.weight": (width, hidden)}


def is_router(name: str) -> bool:
    """Return True if a hub tensor is the router's weight or bias, which are float32 in every checkpoint."""
    return name.endswith((".gate.weight", "e_score_correction_bias"))


def random_tensors(config: M3Config, dtype=ml_dtypes.bfloat16, seed: int = 0) -> dict[str, Values]:
    """Random values for every text tensor: the router in float32, the others in `dtype`."""
    draw = np.random.default_rng(seed).standard_normal
    return {
        name: draw(shape, np.float32).astype(np.float32 if is_router(name) else dtype)
        for name, shape in shapes(config).items()
    }


def write_folder(path: Path, config: M3Config, tensors: Mapping[str, Values], shards: int = 1, **config_keys) -> Path:
    """Write config.json (with more keys at its top level) and the tensors, dealt out over shards."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict() | config_keys))
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", {"format": "pt"})
        return path
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        in_file = {name: values for name, values in tensors.items() if weight_map[name] == file}
        save_file(in_file, path / file, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def expected_parameters(config: M3Config, tensors: Mapping[str, Values]) -> dict[str, Values]:
    """The parameters by path, by loops over the hub's tensors: each stacked, transposed, split in heads."""
    parameters = {
        "embed_tokens": tensors["language_model.model.embed_tokens.weight"],
        "norm": tensors["language_model.model.norm.weight"],
        "lm_head": tensors["language_model.lm_head.weight"],
    }
    for number, stack in enumerate(config.stacks):
        layers = range(stack.first_layer, stack.first_layer + stack.num_layers)
        per_layer = [_layer_parameters(config, tensors, layer) for layer in layers]
        for path in per_layer[0]:
            parameters[f"stacks.{number}.{path}"] = np.stack([layer[path] for layer in per_layer])  # [L ...]
    return parameters


def _layer_parameters(config: M3Config, tensors: Mapping[str, Values], layer: int) -> dict[str, Values]:
    """The parameters of one layer by path."""
    prefix = f"language_model.model.layers.{layer}."
    heads_of = dict.fromkeys(("q_proj", "o_proj"), config.num_attention_heads)
    heads_of |= dict.fromkeys(("k_proj", "v_proj", "index_q_proj"), config.num_key_value_heads)
    parameters, experts = {}, {}
    for name, values in tensors.items():
        if not name.startswith(prefix):
            continue
        path = name.removeprefix(prefix).removesuffix(".weight").replace("block_sparse_moe", "mlp")
        weight = values.T  # [in out]
        kind = path.split(".")[-1]
        if match := re.fullmatch(r"mlp\.experts\.(\d+)\.(w\d)", path):
            experts.setdefault(match[2], {})[int(match[1])] = weight
        elif kind == "o_proj":
            parameters[path] = weight.reshape(heads_of[kind], -1, weight.shape[-1])  # [N H D]
        elif kind in heads_of:
            parameters[path] = weight.reshape(weight.shape[0], heads_of[kind], -1)  # [D N H]
        else:
            parameters[path] = weight
    if experts:
        for hub, name in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            slabs = [experts[hub][expert] for expert in range(config.num_local_experts)]
            parameters[f"mlp.experts.{name}"] = np.stack(slabs)  # [E D F], of w2 [E F D]
    return parameters


def same_bits(left: Values, right: Values) -> bool:
    """Return True if two arrays have equal dtypes, shapes and bytes."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def load_parameters(path: Path, **arguments) -> dict[str, Values]:
    """The parameters of a folder by path, on the host."""
    model = checkpoint.load(path, progress=False, **arguments)
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(model).items()}


def assert_same(found: dict[str, Values], expected: dict[str, Values]) -> None:
    """Fail where two sets of parameters differ in a name or in a bit."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []
