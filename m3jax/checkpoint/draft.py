"""EAGLE3 drafts: folders as they are on the hub, to parameters and back."""

import json
import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.numpy import save_file

from m3jax.assets import embedded_draft_path
from m3jax.checkpoint.reader import FLOATS, SINGLE_NAME, CheckpointError, StoredTensor, read_folder
from m3jax.config import M3Config
from m3jax.model.eagle3 import Eagle3, Eagle3Config, abstract

# Hub name, parameter, and the rearrangement from the hub's [out, in]: a taps, u tokens that the draft can propose.
_TABLE = (
    ("fc.weight", "fc", "d (a e) -> a e d"),
    ("layers.0.hidden_norm.weight", "hidden_norm", "d -> d"),
    ("layers.0.input_layernorm.weight", "input_layernorm", "d -> d"),
    ("layers.0.post_attention_layernorm.weight", "post_attention_layernorm", "d -> d"),
    ("layers.0.self_attn.q_proj.weight", "q_proj", "(n h) w -> w n h"),
    ("layers.0.self_attn.k_proj.weight", "k_proj", "(k h) w -> w k h"),
    ("layers.0.self_attn.v_proj.weight", "v_proj", "(k h) w -> w k h"),
    ("layers.0.self_attn.o_proj.weight", "o_proj", "d (n h) -> n h d"),
    ("layers.0.mlp.gate_proj.weight", "gate_proj", "f d -> d f"),
    ("layers.0.mlp.up_proj.weight", "up_proj", "f d -> d f"),
    ("layers.0.mlp.down_proj.weight", "down_proj", "d f -> f d"),
    ("norm.weight", "norm", "d -> d"),
    ("embed_tokens.weight", "embed_tokens", "v d -> v d"),
    ("lm_head.weight", "lm_head", "u d -> u d"),
)
_FC_NORM, _OFFSETS = "fc_norm.{}.weight", "d2t"
_LEFT_OUT = frozenset({"t2d"})  # the same as d2t says, the other way round
_TAPS = "eagle_aux_hidden_state_layer_ids"
# Keys with one supported value, if they are there at all.
_FIXED = {
    "num_hidden_layers": (1,), "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
    "rope_scaling": (None,), "norm_before_fc": (False,), "sliding_window": (None,),
}  # fmt: skip
_OPTIONAL = ("rms_norm_eps", "rope_theta", "fc_norm", "norm_output", "norm_before_residual")


def load_draft(path: str | Path | None, target: M3Config, dtype: str = "bfloat16", mesh: Mesh | None = None) -> Eagle3:
    """Load an EAGLE3 draft for a target.

    A draft without an embedding or a head shares the target's. Names may begin with `model.`, and the layer may be
    called `layers.0` or `midlayer`. Where config.json does not say which layers are tapped, they are 2, n // 2 and
    n - 3 of the target's n layers, as in vLLM, whose numbering this is: 0 is the embedding, n the output of the n-th
    layer.

    Args:
      path: a folder with config.json and safetensors files, or None for the draft of the embedded checkpoint.
      target: configuration of the model that verifies.
      dtype: as in `load`; the target's is best.
      mesh: where the target lies.

    Raises:
      CheckpointError: tensors do not fit config.json; it lists every fault.
      ValueError: an unsupported config.json, or a draft of another target, with the reasons.
    """
    path = embedded_draft_path() if path is None else Path(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(path, ["no config.json; give a folder of an EAGLE3 draft in the hub's layout"])
    folder = read_folder(path)
    stored = {_canonical(name): tensor for name, tensor in folder.tensors.items()}
    config = draft_config(_read_json(path / "config.json"), target, stored)
    config.check_fits(target)
    shapes, left = _expected(config), set(stored) - _LEFT_OUT - {_OFFSETS}
    problems = [*folder.problems, *(f"{name}: missing, expected {list(shapes[name])}" for name in shapes.keys() - left)]
    problems += [f"{stored[name].name}: unexpected, found {stored[name]}" for name in left - shapes.keys()]
    problems += [
        f"{stored[name].name}: expected a float of shape {list(shape)}, found {stored[name]}"
        for name, shape in shapes.items()
        if name in stored and (stored[name].shape != shape or stored[name].dtype not in FLOATS)
    ]
    ids, wrong = _target_ids(config, stored.get(_OFFSETS))
    if problems or wrong:
        raise CheckpointError(path, sorted(problems) + wrong)
    return _fill(config, stored, ids, dtype, mesh)


def save_draft(draft: Eagle3, path: str | Path) -> None:
    """Write config.json and model.safetensors with the hub's names, which other engines read too.

    Args:
      draft: what it shares with the target is not written.
      path: the folder, which is made if it is not there.
    """
    path, config = Path(path), draft.config
    path.mkdir(parents=True, exist_ok=True)
    out = {
        hub: np.ascontiguousarray(rearrange(np.asarray(leaf[...]), " -> ".join(reversed(axes.split(" -> ")))))
        for hub, name, axes in _TABLE
        if (leaf := getattr(draft, name)) is not None
    }
    if config.fc_norm:
        out |= {_FC_NORM.format(i): np.ascontiguousarray(w) for i, w in enumerate(np.asarray(draft.fc_norm[...]))}
    if draft.target_ids is not None:
        ids = np.asarray(draft.target_ids[...]).astype(np.int64)
        out[_OFFSETS] = ids - np.arange(len(ids))
    data = json.dumps(_to_json(config, str(draft.dtype)), indent=2, sort_keys=True) + "\n"
    unfinished = {name: path / f".unfinished-{name}" for name in (SINGLE_NAME, "config.json")}
    save_file(out, unfinished[SINGLE_NAME], metadata={"format": "pt"})
    unfinished["config.json"].write_text(data, encoding="utf-8")
    for name, file in unfinished.items():
        os.replace(file, path / name)


def draft_config(data: Mapping[str, Any], target: M3Config, tensors: Mapping[str, Any]) -> Eagle3Config:
    """Read a draft's parsed config.json.

    Args:
      data: Llama's keys, those of EAGLE3, and the tapped layers under `eagle_aux_hidden_state_layer_ids`, at the top or
        in `eagle_config`.
      target: gives the tapped layers where they are not named.
      tensors: the draft's, which say whether it has an embedding and a head.

    Raises:
      ValueError: a key that is missing, or a value that is not supported.
    """
    problems = [
        f"{name} = {data[name]!r}: supported is {allowed[0]!r}"
        for name, allowed in _FIXED.items()
        if name in data and data[name] not in allowed
    ]
    needed = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    problems += [f"{name} is missing" for name in needed if name not in data]
    wide = data.get("target_hidden_size")
    if wide not in (None, data.get("hidden_size")):
        problems.append(f"target_hidden_size = {wide}: supported is the draft's own hidden_size")
    if problems:
        raise ValueError("unsupported draft: " + "; ".join(problems))
    heads, layers = data["num_attention_heads"], target.num_hidden_layers
    taps = data.get(_TAPS) or (data.get("eagle_config") or {}).get(_TAPS) or (2, layers // 2, layers - 3)
    return Eagle3Config(
        **{name: data[name] for name in needed},
        num_key_value_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or data["hidden_size"] // heads,
        draft_vocab_size=data.get("draft_vocab_size") or data["vocab_size"],
        taps=tuple(taps),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        **{name: data[name] for name in _OPTIONAL if data.get(name) is not None},
    )


def _to_json(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    names = ("hidden_size", "vocab_size", "draft_vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "intermediate_size", *_OPTIONAL)  # fmt: skip
    return {name: getattr(config, name) for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": dtype, _TAPS: list(config.taps),
    }  # fmt: skip


def _canonical(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def _expected(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The hub shape of every tensor but d2t."""
    c = config
    sizes = dict(
        d=c.hidden_size, e=c.hidden_size, w=2 * c.hidden_size, a=len(c.taps), n=c.num_attention_heads,
        k=c.num_key_value_heads, h=c.head_dim, f=c.intermediate_size, v=c.vocab_size, u=c.draft_vocab_size,
    )  # fmt: skip
    shared = {"embed_tokens.weight": not c.own_embedding, "lm_head.weight": not c.own_head}
    groups = {hub: re.findall(r"\(.*?\)|\w", axes.split(" -> ")[0]) for hub, _, axes in _TABLE if not shared.get(hub)}
    out = {hub: tuple(prod(sizes[x] for x in re.findall(r"\w", g)) for g in axes) for hub, axes in groups.items()}
    return out | {_FC_NORM.format(i): (c.hidden_size,) for i in range(len(c.taps) * c.fc_norm)}


def _target_ids(config: Eagle3Config, stored: StoredTensor | None) -> tuple[np.ndarray | None, list[str]]:
    """The target's id of each token that the draft can propose, where it cannot propose all; and what is wrong."""
    count, vocab = config.draft_vocab_size, config.vocab_size
    if stored is None:
        return None, [f"{_OFFSETS}: missing, expected [{count}] integers"] if count != vocab else []
    with safe_open(stored.file, framework="numpy") as file:
        offsets = file.get_tensor(stored.name)
    ids = np.arange(count) + offsets if offsets.shape == (count,) and offsets.dtype.kind in "iu" else np.array([-1])
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < len(ids):
        return None, [f"{_OFFSETS}: expected [{count}] offsets to different ids from 0 to {vocab - 1}, found {stored}"]
    return (None if count == vocab and not offsets.any() else ids.astype(np.int32)), []


def _fill(config, stored, ids, dtype, mesh) -> Eagle3:
    draft = abstract(config, dtype, mesh)
    place = lambda x, spec: jax.device_put(np.ascontiguousarray(x).astype(spec.dtype), spec.sharding)
    put = lambda name, x: setattr(draft, name, jax.tree.map(lambda spec: place(x, spec), getattr(draft, name)))
    sizes = {"(a e)": dict(a=len(config.taps)), "(n h)": dict(h=config.head_dim), "(k h)": dict(h=config.head_dim)}
    for hub, name, axes in _TABLE:
        if getattr(draft, name) is not None:
            known = next((size for letters, size in sizes.items() if letters in axes), {})
            put(name, rearrange(stored[hub].view(), axes, **known))
    if config.fc_norm:
        put("fc_norm", np.stack([stored[_FC_NORM.format(i)].view() for i in range(len(config.taps))]))
    if ids is not None:
        put("target_ids", ids)
    return draft


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{file}: a config is a JSON object, got {type(data).__name__}")
    return data
