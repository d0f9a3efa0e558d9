"""Loading and saving of EAGLE3 drafts in the hub's layout."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Int32, Shaped

from m3jax.assets import embedded_draft_path
from m3jax.checkpoint.reader import FLOATS, INTEGERS, CheckpointError, StoredTensor, read_folder, version
from m3jax.checkpoint.replacing import Replacement, as_json
from m3jax.config import M3Config
from m3jax.config_keys import LARGEST_INTEGER, LARGEST_REAL, SMALLEST_REAL
from m3jax.files import current_file, read_json
from m3jax.files.tensors import by_width
from m3jax.messages import listed, note_problems, printable, shortened, shown
from m3jax.model.eagle3 import Eagle3, Eagle3Config, abstract

# Hub name, parameter, and the rearrangement from the hub's [out, in] to the parameter's axes. The package's letters in
# lower case, and a taps, e the width of one tap, w = 2d what attention reads, u tokens that the draft can propose.
_TABLE = {
    "fc.weight": ("fc", "d (a e) -> a e d"),
    "layers.0.hidden_norm.weight": ("hidden_norm", "d -> d"),
    "layers.0.input_layernorm.weight": ("input_layernorm", "d -> d"),
    "layers.0.post_attention_layernorm.weight": ("post_attention_layernorm", "d -> d"),
    "layers.0.self_attn.q_proj.weight": ("q_proj", "(n h) w -> w n h"),
    "layers.0.self_attn.k_proj.weight": ("k_proj", "(k h) w -> w k h"),
    "layers.0.self_attn.v_proj.weight": ("v_proj", "(k h) w -> w k h"),
    "layers.0.self_attn.o_proj.weight": ("o_proj", "d (n h) -> n h d"),
    "layers.0.mlp.gate_proj.weight": ("gate_proj", "f d -> d f"),
    "layers.0.mlp.up_proj.weight": ("up_proj", "f d -> d f"),
    "layers.0.mlp.down_proj.weight": ("down_proj", "d f -> f d"),
    "norm.weight": ("norm", "d -> d"),
    "embed_tokens.weight": ("embed_tokens", "v d -> v d"),
    "lm_head.weight": ("lm_head", "u d -> u d"),
}
_FC_NORM, _OFFSETS = "fc_norm.{}.weight", "d2t"
_LEFT_OUT = frozenset({"t2d"})  # the target's ids that the draft has, which d2t gives too
_TAPS = "eagle_aux_hidden_state_layer_ids"
# Keys with one supported value, if they are there at all.
_FIXED = {
    "num_hidden_layers": (1,), "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
    "rope_scaling": (None,), "norm_before_fc": (False,), "sliding_window": (None,),
}  # fmt: skip
_REQUIRED = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
_OPTIONAL = {"rms_norm_eps", "rope_theta", "fc_norm", "norm_output", "norm_before_residual"}


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
      mesh: the devices of the target.

    Raises:
      CheckpointError: tensors do not fit config.json; it lists every fault.
      ValueError: an unsupported config.json, or a draft of another target, with the reasons.
    """
    path = embedded_draft_path() if path is None else Path(path)
    before = version(path)
    file = current_file(path, "config.json") if path.is_dir() else path / "config.json"
    if not file.is_file():
        raise CheckpointError(path, ["no config.json; give a folder of an EAGLE3 draft in the hub's layout"])
    data, folder = read_json(file), read_folder(path)
    if version(path) != before:
        raise CheckpointError(path, ["replaced by a save while it was read; load again"])
    stored, twice = _by_canonical_name(folder.tensors)
    try:
        config = draft_config(data, target, stored)
        config.check_fits(target)
    except ValueError as error:
        error.args = (shortened(f"{printable(str(file))}: {error}"),)
        raise
    shapes = _hub_shapes(config)
    given = set(stored) - _LEFT_OUT - {_OFFSETS}
    problems = [
        *folder.problems,
        *twice,
        *(f"{name}: missing, expected {list(shapes[name])}" for name in shapes.keys() - given),
        *(f"{stored[name].name}: unexpected, found {stored[name]}" for name in given - shapes.keys()),
    ]
    problems += [
        f"{stored[name].name}: expected a float of shape {list(shape)}, found {stored[name]}"
        for name, shape in shapes.items()
        if name in stored and (stored[name].shape != shape or stored[name].dtype not in FLOATS)
    ]
    target_ids, id_problems = _read_target_ids(config, stored.get(_OFFSETS))
    if problems or id_problems:
        raise CheckpointError(path, sorted(problems) + id_problems)
    return _fill(abstract(config, dtype, mesh), stored, target_ids)


def save_draft(draft: Eagle3, path: str | Path) -> None:
    """Write a draft's config.json and model.safetensors with the hub's names, which other engines read too.

    A draft that the folder has is replaced as `save` replaces a checkpoint: all of it, or nothing.

    Args:
      draft: the draft; parameters that it shares with the target are not written.
      path: the folder, which is made if it is not there.

    Raises:
      ValueError: another save into the folder is running.
      OSError: names the path; the folder's draft is as after an error of `save`.
    """
    config = draft.config
    tensors = {}
    for hub_name, (name, axes) in _TABLE.items():
        if (parameter := getattr(draft, name)) is not None:
            hub_axes, own_axes = axes.split(" -> ")
            weight = rearrange(np.asarray(parameter[...]), f"{own_axes} -> {hub_axes}")  # of q_proj: [N*H W]
            tensors[hub_name] = np.ascontiguousarray(weight)
    if config.fc_norm:
        for tap, weight in enumerate(np.asarray(draft.fc_norm[...])):
            tensors[_FC_NORM.format(tap)] = np.ascontiguousarray(weight)
    if draft.target_ids is not None:
        target_ids = np.asarray(draft.target_ids[...]).astype(np.int64)
        tensors[_OFFSETS] = target_ids - np.arange(len(target_ids))
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    layout = by_width(layout)
    with Replacement(Path(path), 1, {"config.json": as_json(_to_json(config, str(draft.dtype)))}) as new:
        new.write_weights(new.names[0], layout, (tensors[name] for name in layout), {"format": "pt"})


def draft_config(data: Mapping[str, Any], target: M3Config, tensors: Mapping[str, Any]) -> Eagle3Config:
    """Build a draft's configuration from its parsed config.json.

    Args:
      data: Llama's keys, those of EAGLE3, and the tapped layers under `eagle_aux_hidden_state_layer_ids`, at the top or
        in `eagle_config`.
      target: gives the tapped layers where they are not named.
      tensors: the draft's, which say whether it has an embedding and a head.

    Raises:
      ValueError: a key that is missing, or a value that is not supported.
    """
    problems = [
        f"{name} = {shown(data[name])}: supported is {allowed[0]!r}"
        for name, allowed in _FIXED.items()
        if name in data and data[name] not in allowed
    ]
    problems += [f"{name} is missing" for name in _REQUIRED if name not in data]
    target_width = data.get("target_hidden_size")
    if target_width not in (None, data.get("hidden_size")):
        problems.append(f"target_hidden_size = {shown(target_width)}: supported is the draft's own hidden_size")
    named_layers, layers = data.get("eagle_config"), target.num_hidden_layers
    if not isinstance(named_layers, Mapping | None):
        problems.append(f"eagle_config = {shown(named_layers)}: must be an object or null")
        named_layers = None
    taps = data.get(_TAPS) or (named_layers or {}).get(_TAPS) or [2, layers // 2, layers - 3]
    problems += _wrong_kinds(data) + _wrong_taps(taps, layers)
    if problems:
        error = ValueError("unsupported draft: " + listed(problems))
        note_problems(error, problems)
        raise error
    heads = data["num_attention_heads"]
    return Eagle3Config(
        **{name: data[name] for name in _REQUIRED},
        num_key_value_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or data["hidden_size"] // heads,
        draft_vocab_size=data.get("draft_vocab_size") or data["vocab_size"],
        taps=tuple(taps),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        **{name: data[name] for name in _OPTIONAL if data.get(name) is not None},
    )


def _wrong_kinds(data: Mapping[str, Any]) -> list[str]:
    """Return a line for each value in a draft's config.json of a wrong type or range; an optional one may be null."""
    is_number = lambda value, kinds: isinstance(value, kinds) and not isinstance(value, bool)
    kinds = (
        ("an integer from 1 to 2^31 - 1", lambda value: is_number(value, int) and 1 <= value <= LARGEST_INTEGER,
         ("hidden_size", "vocab_size", "draft_vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size")),
        ("a positive float32 number",
         lambda value: is_number(value, int | float) and SMALLEST_REAL <= value <= LARGEST_REAL,
         ("rms_norm_eps", "rope_theta")),
        ("true or false", lambda value: isinstance(value, bool), ("fc_norm", "norm_output", "norm_before_residual")),
    )  # fmt: skip
    return [
        f"{name} = {shown(data[name])}: must be {expected}"
        for expected, is_right, names in kinds
        for name in names
        if name in data and not is_right(data[name]) and not (data[name] is None and name not in _REQUIRED)
    ]


def _wrong_taps(taps: Any, layers: int) -> list[str]:
    """Return a fault unless `taps` is a list of at most `layers` + 1 integers, before its length sizes an array."""
    is_layer = lambda value: isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER
    if isinstance(taps, list) and len(taps) <= layers + 1 and all(map(is_layer, taps)):
        return []
    return [f"{_TAPS} = {shown(taps)}: must be a list of at most {layers + 1} layer numbers"]


def _to_json(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of a draft, from which `draft_config` makes the same configuration."""
    written = {*_REQUIRED, "draft_vocab_size", "num_key_value_heads", "head_dim", *_OPTIONAL}
    return {name: getattr(config, name) for name in written} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": dtype, _TAPS: list(config.taps),
    }  # fmt: skip


def _by_canonical_name(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return stored tensors by the table's names (no prefix, layer `layers.0`), and a fault for each duplicate."""
    stored: dict[str, StoredTensor] = {}
    problems = []
    for name, tensor in tensors.items():
        canonical = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
        if canonical in stored:
            problems.append(f"{name}: the same tensor as {stored[canonical].name}, keep one")
        stored[canonical] = tensor
    return stored, problems


def _hub_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return the shape in the file of every tensor of a draft except d2t, by hub name."""
    c = config
    sizes = dict(
        d=c.hidden_size, e=c.hidden_size, w=2 * c.hidden_size, a=len(c.taps), n=c.num_attention_heads,
        k=c.num_key_value_heads, h=c.head_dim, f=c.intermediate_size, v=c.vocab_size, u=c.draft_vocab_size,
    )  # fmt: skip
    is_shared = {"embed_tokens.weight": not c.own_embedding, "lm_head.weight": not c.own_head}
    shapes = {}
    for hub_name, (_, axes) in _TABLE.items():
        if not is_shared.get(hub_name):
            groups = re.findall(r"\(.*?\)|\w", axes.split(" -> ")[0])  # "d (a e)": the axes d and (a e)
            shapes[hub_name] = tuple(prod(sizes[letter] for letter in re.findall(r"\w", group)) for group in groups)
    return shapes | {_FC_NORM.format(tap): (c.hidden_size,) for tap in range(len(c.taps) * c.fc_norm)}


def _read_target_ids(
    config: Eagle3Config, stored: StoredTensor | None
) -> tuple[Int32[np.ndarray, " draft_vocab"] | None, list[str]]:
    """Return the target's id of each token that a draft can propose (None if it proposes all), and d2t's faults."""
    count, vocab_size = config.draft_vocab_size, config.vocab_size
    if stored is None:
        return None, [f"{_OFFSETS}: missing, expected [{count}] integers"] if count != vocab_size else []
    if stored.shape == (count,) and stored.dtype in INTEGERS:
        offsets = stored.view()
        target_ids = np.arange(count) + offsets  # d2t holds the target's id minus the draft's
        if target_ids.min() >= 0 and target_ids.max() < vocab_size and len(np.unique(target_ids)) == count:
            proposes_all = count == vocab_size and not offsets.any()
            return (None if proposes_all else target_ids.astype(np.int32)), []
    return None, [f"{_OFFSETS}: expected [{count}] offsets to different ids from 0 to {vocab_size - 1}, found {stored}"]


def _fill(
    draft: Eagle3, stored: Mapping[str, StoredTensor], target_ids: Int32[np.ndarray, " draft_vocab"] | None
) -> Eagle3:
    """Return an abstract draft with its shapes replaced by the stored values."""
    config = draft.config

    def set_parameter(name: str, value: Shaped[np.ndarray, "..."]) -> None:
        put = lambda leaf: jax.device_put(np.ascontiguousarray(value).astype(leaf.dtype), leaf.sharding)
        setattr(draft, name, jax.tree.map(put, getattr(draft, name)))

    split_sizes = {
        "(a e)": dict(a=len(config.taps)),
        "(n h)": dict(h=config.head_dim),
        "(k h)": dict(h=config.head_dim),
    }
    for hub_name, (name, axes) in _TABLE.items():
        if getattr(draft, name) is not None:
            sizes = next((known for group, known in split_sizes.items() if group in axes), {})
            set_parameter(name, rearrange(stored[hub_name].view(), axes, **sizes))  # of q_proj: [W N H]
    if config.fc_norm:
        norms = [stored[_FC_NORM.format(tap)].view() for tap in range(len(config.taps))]
        set_parameter("fc_norm", np.stack(norms))  # [A D]
    if target_ids is not None:
        set_parameter("target_ids", target_ids)
    return draft
