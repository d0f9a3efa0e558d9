"""Tiny random MiniMax-M3 models of transformers, the independent implementation, and ours from the same folder."""

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3jax import checkpoint

_WAITS = "compares with transformers 5.23.0 (pip install 'm3jax[oracle]', CPython 3.11)"
torch = pytest.importorskip("torch", reason=_WAITS)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    m3_vl = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl", reason=_WAITS)
    from transformers.models.minimax_m3_vl import MiniMaxM3VLConfig
    from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
EOS = 3
_VISION = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=28)


@dataclass(frozen=True)
class Case:
    """A random model and how long its inputs are. No two widths of a case are equal unless that is its point.

    `heads`, `kv_heads`, `head_dim`, `index_dim`, `rotary`, `block`, `top_k` and `local` are M3's; `layers` has a letter
    per layer, upper case for sparse attention, lower case for dense: "d"/"D" with a dense MLP, "m"/"M" with experts.
    """

    name: str
    layers: str
    heads: int
    kv_heads: int
    head_dim: int
    index_dim: int
    rotary: int
    block: int
    top_k: int
    length: int
    local: int = 1
    batch: int = 2
    experts: tuple[int, int] = (6, 2)
    width: int = 48
    seed: int = 0

    def text_config(self) -> dict[str, Any]:
        """The flat names of transformers, with constants that no two cases share (T36)."""
        draw = np.random.default_rng(self.seed)
        uniform = lambda low, high: round(float(draw.uniform(low, high)), 4)
        return dict(
            vocab_size=96, hidden_size=self.width, num_hidden_layers=len(self.layers),
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            intermediate_size=40, dense_intermediate_size=88, shared_intermediate_size=56,
            num_local_experts=self.experts[0], num_experts_per_tok=self.experts[1],
            layer_types=[SPARSE if letter.isupper() else FULL for letter in self.layers],
            mlp_layer_types=["sparse" if letter in "mM" else "dense" for letter in self.layers],
            index_n_heads=self.kv_heads, index_head_dim=self.index_dim, index_block_size=self.block,
            index_topk_blocks=self.top_k, index_local_blocks=self.local, rotary_dim=self.rotary,
            rope_parameters=dict(
                rope_type="default", rope_theta=uniform(1e3, 1e6),
                partial_rotary_factor=self.rotary / self.head_dim,
            ),
            swiglu_alpha=uniform(0.8, 2.5), swiglu_limit=uniform(0.5, 2.0), routed_scaling_factor=uniform(0.7, 3.0),
            rms_norm_eps=uniform(0.01, 0.1), max_position_embeddings=4096, bos_token_id=1, eos_token_id=EOS,
        )  # fmt: skip

    def tokens(self, length: int | None = None) -> np.ndarray:
        """Random ids [B T]."""
        draw = np.random.default_rng(self.seed + 1)
        return draw.integers(4, 96, (self.batch, length or self.length), dtype=np.int32)


CASES = {
    case.name: case
    for case in (
        # What M3 has: dense layers, then sparse attention with experts; an odd length.
        Case("m3", "dMM", 8, 4, 16, 16, 8, block=16, top_k=4, length=301, seed=14),
        # Groups of one query head, narrow blocks, and every kind of layer, each a stack of its own.
        Case("groups1", "dDmM", 4, 4, 12, 20, 6, block=4, top_k=2, length=129, seed=20),
        Case("groups4", "MD", 8, 2, 24, 16, 16, block=8, top_k=3, length=203, seed=33, local=2),
        # Longer than every chunk of queries and of keys that our schedules walk.
        Case("groups8", "dDD", 8, 1, 16, 32, 4, block=32, top_k=8, length=1301, seed=43, batch=1),
        Case("dense-only", "dddd", 6, 3, 16, 16, 16, block=16, top_k=4, length=97, seed=50),
        Case("sparse-only", "MMM", 4, 2, 16, 24, 10, block=16, top_k=5, length=277, seed=60, experts=(16, 5)),
        # Axes that could be taken for one another have one size: T = N = H and B = K = G = P = M (T7).
        Case("coincide", "MM", 16, 4, 16, 16, 16, block=4, top_k=2, length=16, seed=70, batch=4),
    )
}


@dataclass(frozen=True)
class Pair:
    """One set of weights in both implementations."""

    case: Case
    theirs: Any
    folder: Path

    @cached_property
    def ours(self):
        return checkpoint.load(self.folder, dtype="float32", progress=False)


@cache
def pair(name: str) -> Pair:
    """Build a case, save it with transformers, load it; once per process."""
    case = CASES[name]
    theirs = random_model(case)
    folder = scratch() / name
    theirs.save_pretrained(folder)
    return Pair(case, theirs, folder)


@cache
def scratch() -> Path:
    """A folder that lives as long as the process."""
    folder = tempfile.mkdtemp(prefix="m3jax-oracle-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def random_model(case: Case):
    """A transformers model whose weights leave no operation close to an identity or a constant."""
    config = MiniMaxM3VLConfig(text_config=case.text_config(), vision_config=_VISION, projector_hidden_size=case.width)
    model = m3_vl.MiniMaxM3SparseForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    draw = np.random.default_rng(case.seed + 2)
    text = (*model.model.language_model.named_parameters(), *model.lm_head.named_parameters())
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, weight in (*text, *biases):
            value = draw.normal(size=weight.shape) * _scale(name, weight)
            weight.copy_(torch.from_numpy(value.astype(np.float32)))
    return model


def _scale(name: str, weight) -> float:
    if "norm" in name:
        return 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.1
    return 1.0 if "embed_tokens" in name else 1.5 * weight.shape[-1] ** -0.5


def logits(model, tokens: np.ndarray, **arguments) -> np.ndarray:
    """Their logits [B T V] in float32."""
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(tokens).long(), **arguments)
    return out.logits.float().numpy()


def intermediates(model, tokens: np.ndarray, **arguments) -> dict[str, Any]:
    """Run their model and record what `M3.intermediates` returns, in its shapes."""
    text, modules = model.model.language_model, []
    for layer in text.layers:
        modules += _watched(layer)
    seen: dict[Any, Any] = {}
    with _rotated() as rotated:
        hooks = [m.register_forward_hook(_keep(seen, m), with_kwargs=True) for m in modules]
        hooks.append(text.norm.register_forward_hook(_keep(seen, text.norm), with_kwargs=True))
        try:
            out = {"logits": logits(model, tokens, **arguments)}
        finally:
            for hook in hooks:
                hook.remove()
    out["final_norm"] = _numpy(seen[text.norm][1])
    out["layers"] = [_layer_values(layer, seen, rotated) for layer in text.layers]
    return out


def _watched(layer) -> list:
    attention, mlp = layer.self_attn, layer.mlp
    out = [layer, layer.input_layernorm, layer.post_attention_layernorm, attention, mlp]
    out += [attention.o_proj, attention.v_proj]
    out += [m for m in (attention.indexer, getattr(mlp, "gate", None)) if m is not None]
    return out


def _keep(seen: dict, module):
    def hook(_, args, kwargs, output):
        seen[module] = (args[0] if args else kwargs["hidden_states"], output)

    return hook


@contextmanager
def _rotated() -> Iterator[list]:
    """Collects the (q, k) pairs that leave the rotary embedding: a layer's own, then its indexer's."""
    real, out = m3_vl.apply_rotary_pos_emb, []

    def record(*args, **kwargs):
        out.append(real(*args, **kwargs))
        return out[-1]

    m3_vl.apply_rotary_pos_emb = record
    try:
        yield out
    finally:
        m3_vl.apply_rotary_pos_emb = real


def _layer_values(layer, seen: dict, rotated: list) -> dict[str, np.ndarray]:
    attention, heads = layer.self_attn, layer.self_attn.head_dim
    q, k = (_numpy(x.transpose(1, 2)) for x in rotated.pop(0))
    split = lambda x: _numpy(x.reshape(*x.shape[:2], -1, heads))
    out = {
        "input": _numpy(seen[layer][0]),
        "attention_norm": _numpy(seen[layer.input_layernorm][1]),
        "q": q,
        "k": k,
        "v": split(seen[attention.v_proj][1]),
        "attention": split(seen[attention.o_proj][0]),
        "attention_out": _numpy(seen[attention][1][0]),
        "ffn_norm": _numpy(seen[layer.post_attention_layernorm][1]),
        "ffn_out": _numpy(seen[layer.mlp][1]),
        "output": _numpy(seen[layer][1]),
    }
    if attention.indexer is not None:
        index_q, index_k = rotated.pop(0)
        out["index_q"], out["index_k"] = _numpy(index_q.transpose(1, 2)), _numpy(index_k[:, 0])
        out["blocks"] = sorted_blocks(_numpy(seen[attention.indexer][1]), attention.indexer.topk_blocks)
    if hasattr(layer.mlp, "gate"):
        _, weights, ids = seen[layer.mlp.gate][1]
        shape = (*out["input"].shape[:2], -1)
        out["expert_ids"], out["expert_weights"] = (_numpy(x).reshape(shape) for x in (ids, weights))
    return out


def sorted_blocks(blocks: np.ndarray, slots: int) -> np.ndarray:
    """Ascending ids, then -1, in `slots` slots."""
    last = np.iinfo(np.int32).max
    blocks = np.sort(np.where(blocks < 0, last, blocks).astype(np.int32), axis=-1)
    blocks = np.pad(blocks, [(0, 0)] * 3 + [(0, slots - blocks.shape[-1])], constant_values=last)
    return np.where(blocks == last, -1, blocks)


def _numpy(x) -> np.ndarray:
    return x.detach().float().numpy() if x.is_floating_point() else x.detach().numpy()
