"""A whole tiny model: a folder in the hub's layout, and each named value of two prompts."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from m3jax.checkpoint import load, save
from m3jax.config import M3Config
from m3jax.model import M3, abstract
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, on_host
from m3jax.vectors.margins import cut

_LAYER = {
    "input": "B T D", "attention_norm": "B T D", "q": "B T N H", "k": "B T K H", "v": "B T K H", "index_q": "B T K I",
    "index_k": "B T I", "block_scores": "B K T M", "blocks": "B K T J", "last_kept": "B K T", "first_dropped": "B K T",
    "attention": "B T N H", "attention_out": "B T D", "ffn_norm": "B T D", "ffn_out": "B T D", "output": "B T D",
    "expert_ids": "B T A", "expert_weights": "B T A",
}  # fmt: skip
_KINDS = ("dense", "moe", "moe")
_TAPS = (1, 2, 3)
AXES = {"tokens": "B T", "embedding": "B T D", "final_norm": "B T D", "logits": "B T V", "taps": "B T C D"} | {
    f"layers.{layer}.{name}": axes for layer in range(len(_KINDS)) for name, axes in _LAYER.items()
}  # fmt: skip
_SETS = ("blocks", "expert_ids")
TOLERANCES = {name: "blocks" if name.endswith(_SETS) else "model" for name in AXES if name != "tokens"}


def cases(large: bool) -> Iterator[Case]:
    """Yield a model of a dense layer and two sparse ones with experts, and rows of 11 blocks, of which 3 are kept."""
    if large:
        return
    config, rng = _config(), np.random.default_rng(131)
    names = dict(
        eps=config.rms_norm_eps, theta=config.rope_theta, rotary_dim=config.rotary_dim, num_heads=4, num_kv_heads=2,
        block_size=config.index_block_size, top_k=config.index_topk_blocks, experts_per_token=2,
        limit=config.swiglu_limit, alpha=config.swiglu_alpha, routed_scaling_factor=config.routed_scaling_factor,
        layers=list(_KINDS), taps=list(_TAPS), model="model/tiny",
    )  # fmt: skip
    what = "folder model/tiny holds config.json and weights under the hub's names; taps are outputs of layers 1, 2, 3"
    tokens = rng.integers(0, config.vocab_size, (2, 44)).astype(np.int32)
    yield Case("prompts", what, names, 131, {"tokens": tokens}, ("T17", "T18", "T25", "T36"))


def _config() -> M3Config:
    sparse = "minimax_m3_sparse"
    return M3Config(
        vocab_size=48, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=24, dense_intermediate_size=56, shared_intermediate_size=40, num_local_experts=6,
        num_experts_per_tok=2, rotary_dim=8, layer_types=("full_attention", sparse, sparse),
        mlp_layer_types=("dense", "sparse", "sparse"), index_n_heads=2, index_head_dim=16, index_block_size=4,
        index_topk_blocks=3, max_position_embeddings=256, swiglu_limit=1.5, rope_theta=1e4,
    )  # fmt: skip


def write_folder(folder: Path, case: Case) -> None:
    """Write the model's folder: random weights, norms and biases included, in bfloat16, the router in float32.

    Raises:
      ValueError: it is there already; a checkpoint in it would be replaced.
    """
    target = folder / case.rule["model"]
    if target.exists():
        raise ValueError(f"{target}: it is there already; choose another folder, or remove it first")
    rng = np.random.default_rng(case.seed + 1000)

    def draw(path, leaf):
        name, shape = jax.tree_util.keystr(path), leaf.shape
        fan_in = shape[-1] if "lm_head" in name or len(shape) < 2 else shape[-2]
        if "o_proj" in name:
            fan_in = shape[1] * shape[2]
        elif "self_attn" in name and len(shape) == 4:
            fan_in = shape[1]
        scale = 0.3 if "norm" in name else 0.1 if "bias" in name else 1.0 if "embed" in name else float(fan_in) ** -0.5
        return jnp.asarray((rng.normal(size=shape) * scale).astype(leaf.dtype))

    save(jax.tree_util.tree_map_with_path(draw, abstract(_config(), "bfloat16")), target)


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Return all named values in float64, without a cache, by "mask", the schedule that is the definition itself."""
    with jax.enable_x64(True):
        return named_values(load(rule["folder"], "float64").with_schedule("mask"), inputs, rule)


def named_values(model: M3, inputs: Arrays, rule: Rule) -> dict[str, np.ndarray]:
    """Return `M3.intermediates` with layers' names written out, the taps, and the scores at each cut."""
    tokens = jnp.asarray(inputs["tokens"])
    values = model.intermediates(tokens)
    outputs = {name: value for name, value in values.items() if name != "layers"}
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    lengths = jnp.full(len(tokens), tokens.shape[1])
    for index, layer in enumerate(values["layers"]):
        if "blocks" in layer:
            layer = layer | cut(layer["block_scores"], layer["blocks"], positions, lengths, rule)
        outputs |= {f"layers.{index}.{name}": value for name, value in layer.items()}
    return on_host(outputs | {"taps": model.run(tokens, residual_layers=tuple(rule["taps"]), logits=False).residuals})


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield runs of the model in float32: in one call, and over a cache in chunks that end inside blocks."""
    model = load(rule["folder"], "float32")
    yield Run("the model", "float32", named_values(model, inputs, rule))
    tokens, parts, start = jnp.asarray(inputs["tokens"]), [], 0
    num_rows = len(tokens)
    cache = model.new_cache(24, num_rows, 12)
    cache = cache.replace(table=jnp.arange(24, dtype=jnp.int32)[::-1].reshape(num_rows, 12))
    for count in (17, 17, 10):
        positions = jnp.broadcast_to(start + jnp.arange(count, dtype=jnp.int32), (num_rows, count))
        start += count
        logits, cache = model(tokens[:, start - count : start], cache=cache, positions=positions,
                              lengths=jnp.full(num_rows, start, jnp.int32))  # fmt: skip
        parts.append(logits)
    yield Run("the model over a cache", "float32", on_host({"logits": jnp.concatenate(parts, axis=1)}))


GROUP = Group("model", cases, define, runs, AXES, TOLERANCES, on_host=True, write_folder=write_folder)
