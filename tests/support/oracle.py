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
from jaxtyping import Float, Int32, Shaped
from support.transformers_import import without_what_is_unused

from m3jax import checkpoint
from m3jax.model import M3

_WAITS = "compares with transformers 5.23.0 (pip install 'm3jax[oracle]', CPython 3.11)"
torch = pytest.importorskip("torch", reason=_WAITS)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers.utils", reason=_WAITS)
    with without_what_is_unused():
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

    def tokens(self, length: int | None = None) -> Int32[np.ndarray, "B T"]:
        """Random token ids, without the special ones."""
        draw = np.random.default_rng(self.seed + 1)
        return draw.integers(4, 96, (self.batch, length or self.length), dtype=np.int32)


CASES = {
    case.name: case
    for case in (
        # What M3 has: dense layers, then sparse attention with experts; an odd length.
        Case("m3", "dMM", 8, 4, 16, 16, 8, block=16, top_k=4, length=301, seed=14),
        # Groups of one query head, narrow blocks, and every kind of layer, each a stack of its own.
        Case("groups1", "dDmM", 4, 4, 12, 20, 6, block=4, top_k=2, length=129, seed=20),
        # Longer than every chunk of queries and of keys that our schedules walk.
        Case("groups8", "dDD", 8, 1, 16, 32, 4, block=32, top_k=8, length=1301, seed=43, batch=1),
        Case("dense-only", "dddd", 6, 3, 16, 16, 16, block=16, top_k=4, length=97, seed=50),
        # Two local blocks, and more of the experts.
        Case("sparse-only", "MMM", 4, 2, 16, 24, 10, block=16, top_k=5, length=277, seed=60, local=2, experts=(16, 5)),
        # Axes that could be taken for one another have one size: T = N = H and B = K = G = P = M (T7).
        Case("coincide", "MM", 16, 4, 16, 16, 16, block=4, top_k=2, length=16, seed=70, batch=4),
    )
}


@dataclass(frozen=True)
class Pair:
    """A case's model in both implementations, with the same weights."""

    case: Case
    theirs: Any
    folder: Path

    @cached_property
    def ours(self) -> M3:
        """Our model, loaded from the folder that transformers wrote."""
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
    weights = (*model.model.language_model.named_parameters(), *model.lm_head.named_parameters())
    biases = [(name, bias) for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, weight in (*weights, *biases):
            values = draw.normal(size=weight.shape) * _scale(name, weight)
            weight.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def _scale(name: str, weight) -> float:
    """The standard deviation that a weight is drawn with."""
    if "norm" in name:
        return 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.1
    return 1.0 if "embed_tokens" in name else 1.5 * weight.shape[-1] ** -0.5


def logits(model, tokens: Int32[np.ndarray, "B T"], **arguments) -> Float[np.ndarray, "B T V"]:
    """The logits of a transformers model, in float32."""
    with torch.no_grad():
        outputs = model(input_ids=torch.from_numpy(tokens).long(), **arguments)
    return outputs.logits.float().numpy()


def intermediates(model, tokens: Int32[np.ndarray, "B T"], **arguments) -> dict[str, Any]:
    """Run a transformers model and record what `M3.intermediates` returns, in its shapes."""
    text = model.model.language_model
    modules = [text.norm]
    for layer in text.layers:
        attention, mlp = layer.self_attn, layer.mlp
        modules += [layer, layer.input_layernorm, layer.post_attention_layernorm, attention, mlp]
        modules += [attention.o_proj, attention.v_proj]
        modules += [part for part in (attention.indexer, getattr(mlp, "gate", None)) if part is not None]
    calls: dict[Any, Any] = {}  # by module: (input, output)

    def record(module, args, kwargs, output):
        calls[module] = (args[0] if args else kwargs["hidden_states"], output)

    with _recorded_rotations() as rotations:
        hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
        try:
            values = {"logits": logits(model, tokens, **arguments)}
        finally:
            for hook in hooks:
                hook.remove()
    values["final_norm"] = _numpy(calls[text.norm][1])
    values["layers"] = [_layer_values(layer, calls, rotations) for layer in text.layers]
    return values


@contextmanager
def _recorded_rotations() -> Iterator[list]:
    """Collects the (q, k) pairs that leave the rotary embedding: a layer's own, then its indexer's."""
    rotate, pairs = m3_vl.apply_rotary_pos_emb, []

    def record(*args, **kwargs):
        pairs.append(rotate(*args, **kwargs))
        return pairs[-1]

    m3_vl.apply_rotary_pos_emb = record
    try:
        yield pairs
    finally:
        m3_vl.apply_rotary_pos_emb = rotate


def _layer_values(layer, calls: dict, rotations: list) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The intermediates of one layer, whose rotations are the next ones."""
    attention, head_dim = layer.self_attn, layer.self_attn.head_dim
    q, k = (_numpy(heads.transpose(1, 2)) for heads in rotations.pop(0))  # from [B N T H]: [B T N H]
    split = lambda flat: _numpy(flat.reshape(*flat.shape[:2], -1, head_dim))  # from [B T N*H]: [B T N H]
    values = {
        "input": _numpy(calls[layer][0]),
        "attention_norm": _numpy(calls[layer.input_layernorm][1]),
        "q": q,
        "k": k,
        "v": split(calls[attention.v_proj][1]),
        "attention": split(calls[attention.o_proj][0]),
        "attention_out": _numpy(calls[attention][1][0]),
        "ffn_norm": _numpy(calls[layer.post_attention_layernorm][1]),
        "ffn_out": _numpy(calls[layer.mlp][1]),
        "output": _numpy(calls[layer][1]),
    }
    if attention.indexer is not None:
        index_q, index_k = rotations.pop(0)
        values["index_q"] = _numpy(index_q.transpose(1, 2))  # [B T K H]
        values["index_k"] = _numpy(index_k[:, 0])  # from one head, [B 1 T H]: [B T H]
        values["blocks"] = sorted_blocks(_numpy(calls[attention.indexer][1]), attention.indexer.topk_blocks)
    if hasattr(layer.mlp, "gate"):
        _, expert_weights, expert_ids = calls[layer.mlp.gate][1]
        by_token = lambda flat: _numpy(flat).reshape(*values["input"].shape[:2], -1)  # from [B*T E]: [B T E]
        values["expert_ids"], values["expert_weights"] = by_token(expert_ids), by_token(expert_weights)
    return values


def sorted_blocks(blocks: Shaped[np.ndarray, "B K T found"], slots: int) -> Int32[np.ndarray, "B K T J"]:
    """A selection as ours are: ascending block ids, then -1, in `slots` slots."""
    last = np.iinfo(np.int32).max
    ascending = np.sort(np.where(blocks < 0, last, blocks).astype(np.int32), axis=-1)
    padded = np.pad(ascending, [(0, 0)] * 3 + [(0, slots - ascending.shape[-1])], constant_values=last)  # [B K T J]
    return np.where(padded == last, -1, padded)


def _numpy(tensor) -> Shaped[np.ndarray, "..."]:
    return tensor.detach().float().numpy() if tensor.is_floating_point() else tensor.detach().numpy()
