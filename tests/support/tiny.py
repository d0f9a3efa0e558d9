"""Tiny models of ours with random weights, norms and routing biases included, for the tests without an oracle."""

import jax
import jaxtyping
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from m3jax import model as m3_model
from m3jax.config import M3Config
from m3jax.model import M3
from m3jax.model.build import MakeEach
from m3jax.parallel import put

FULL, SPARSE = "full_attention", "minimax_m3_sparse"


def config(layers: str = "dMM", **changes) -> M3Config:
    """A config with a letter per layer: upper case for sparse attention, "d"/"D" dense MLP, "m"/"M" experts."""
    values = dict(
        vocab_size=64, hidden_size=48, num_hidden_layers=len(layers), num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, intermediate_size=40, dense_intermediate_size=88,
        shared_intermediate_size=56, num_local_experts=8, num_experts_per_tok=2, rotary_dim=8,
        layer_types=tuple(SPARSE if letter.isupper() else FULL for letter in layers),
        mlp_layer_types=tuple("sparse" if letter in "mM" else "dense" for letter in layers),
        index_n_heads=4, index_head_dim=20, index_block_size=8, index_topk_blocks=3,
        max_position_embeddings=1024, swiglu_limit=1.5, rope_theta=1e4,
    )  # fmt: skip
    return M3Config(**(values | changes))


def model(config: M3Config, seed: int = 0, dtype: str = "float32", mesh: Mesh | None = None) -> M3:
    """A model with random weights, drawn by numpy: `m3jax.model.init` would compile a program per shape."""
    draw = np.random.default_rng(seed)

    def fill(path, leaf):
        scale = _scale(jax.tree_util.keystr(path), leaf.shape)
        values = (draw.normal(size=leaf.shape) * scale).astype(leaf.dtype)
        return jax.device_put(values) if leaf.sharding is None else put(values, leaf.sharding)

    return jax.tree_util.tree_map_with_path(fill, m3_model.abstract(config, dtype, mesh))


def _scale(name: str, shape: tuple[int, ...]) -> float:
    """The standard deviation of a parameter: fan_in**-0.5 of a projection, [L D N H], [L N H D] or [... in out].

    Of the tower's too, with biases, and layer norms none of which is near an identity.
    """
    if "norm" in name:
        return 0.5
    if "e_score_correction_bias" in name:
        return 0.1
    if "embed_tokens" in name:
        return 1.0
    if "lm_head" in name:
        return shape[-1] ** -0.5
    if ".bias" in name:
        return 0.3
    if "patch_embedding" in name:
        return float(np.prod(shape[:-1]) ** -0.5)
    if "o_proj" in name or "out_proj" in name:
        return float(np.prod(shape[1:-1]) ** -0.5)
    is_to_heads = "self_attn" in name and len(shape) == 4
    return float(shape[1 if is_to_heads else -2] ** -0.5)


class LogicalAxes(tuple):
    """The logical axis names of one parameter; a leaf of the tree, not a container."""


def logical_axes(config: M3Config) -> M3:
    """The model with the tuple of logical axis names in place of each parameter."""
    return M3(config, MakeEach(lambda shape, axes, least_dtype: LogicalAxes(axes)), None)


def under(model: M3, schedule: str) -> M3:
    """A model under a schedule, or, for "dense", attending to every block."""
    return model.with_dense() if schedule == "dense" else model.with_schedule(schedule)


def tokens(config: M3Config, batch: int, length: int, seed: int = 0) -> Int32[np.ndarray, "B T"]:
    """Random token ids of a model's vocabulary."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)


def lower(program, *args, **statics):
    """Lower a jitted program without checks of annotations: what is put into a cache while lowering are no arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return program.lower(*args, **statics)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
