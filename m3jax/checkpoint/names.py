"""Hub tensor names, all their variants, and the parameters that they fill."""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

from m3jax.config import M3Config, Stack

# Hub name, parameter, and the rearrangement from the hub's [out, in] to the parameter's axes.
# Letters are the package's; Hi is the index head dim, Fd and Fs the hidden widths of the dense and
# the shared MLP. A name with a layer in front stands in a stack, so its parameter has an axis L
# (and E for {e}) before the axes given here.
_TOP = (
    ("language_model.model.embed_tokens.weight", "embed_tokens", "V D -> V D"),
    ("language_model.model.norm.weight", "norm", "D -> D"),
    ("language_model.lm_head.weight", "lm_head", "V D -> V D"),
)
_LAYER = (
    ("input_layernorm.weight", "input_layernorm", "D -> D"),
    ("post_attention_layernorm.weight", "post_attention_layernorm", "D -> D"),
    ("self_attn.q_proj.weight", "self_attn.q_proj", "(N H) D -> D N H"),
    ("self_attn.k_proj.weight", "self_attn.k_proj", "(K H) D -> D K H"),
    ("self_attn.v_proj.weight", "self_attn.v_proj", "(K H) D -> D K H"),
    ("self_attn.o_proj.weight", "self_attn.o_proj", "D (N H) -> N H D"),
    ("self_attn.q_norm.weight", "self_attn.q_norm", "H -> H"),
    ("self_attn.k_norm.weight", "self_attn.k_norm", "H -> H"),
)
_INDEX = (
    ("self_attn.index_q_proj.weight", "self_attn.index_q_proj", "(K Hi) D -> D K Hi"),
    ("self_attn.index_k_proj.weight", "self_attn.index_k_proj", "Hi D -> D Hi"),
    ("self_attn.index_q_norm.weight", "self_attn.index_q_norm", "Hi -> Hi"),
    ("self_attn.index_k_norm.weight", "self_attn.index_k_norm", "Hi -> Hi"),
)
_DENSE = (
    ("mlp.gate_proj.weight", "mlp.gate_proj", "Fd D -> D Fd"),
    ("mlp.up_proj.weight", "mlp.up_proj", "Fd D -> D Fd"),
    ("mlp.down_proj.weight", "mlp.down_proj", "D Fd -> Fd D"),
)
_MOE = (
    ("block_sparse_moe.gate.weight", "mlp.gate", "E D -> D E"),
    (
        "block_sparse_moe.e_score_correction_bias",
        "mlp.e_score_correction_bias",
        "E -> E",
    ),
    (
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "mlp.shared_experts.gate_proj",
        "Fs D -> D Fs",
    ),
    (
        "block_sparse_moe.shared_experts.up_proj.weight",
        "mlp.shared_experts.up_proj",
        "Fs D -> D Fs",
    ),
    (
        "block_sparse_moe.shared_experts.down_proj.weight",
        "mlp.shared_experts.down_proj",
        "D Fs -> Fs D",
    ),
    ("block_sparse_moe.experts.{e}.w1.weight", "mlp.experts.gate_proj", "F D -> D F"),
    ("block_sparse_moe.experts.{e}.w3.weight", "mlp.experts.up_proj", "F D -> D F"),
    ("block_sparse_moe.experts.{e}.w2.weight", "mlp.experts.down_proj", "D F -> F D"),
)
_NEVER_QUANTIZED = ("embed_tokens", "lm_head", "mlp.gate")

_SPELLINGS = (
    (r"^(model\.)?(language_model\.)?(model\.)?(?=(embed_tokens|norm|layers)\.)", "language_model.model."),
    (r"^(model\.)?(language_model\.)?lm_head\.", "language_model.lm_head."),
    (r"\.self_attn\.indexer\.([qk])_(proj|norm)\.", r".self_attn.index_\1_\2."),
    (r"\.mlp\.(?=(gate|experts|shared_experts)\.|e_score_)", ".block_sparse_moe."),
    (r"\.gate\.e_score_correction_bias$", ".e_score_correction_bias"),
    (r"\.experts\.(gate_up_proj|down_proj)\.weight$", r".experts.\1"),
)  # fmt: skip
_SCALE = re.compile(r"(?:\.weight_scale|_scale)(?:_inv)?$")
_MTP = re.compile(r"(^|\.)mtp\.")
_VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp)\.")


class Target(NamedTuple):
    """The place of one hub tensor among the parameters.

    `param` is a dotted parameter path and `index` the place in its stack ((layer,), (layer, expert)
    or ()). `dims` are the hub tensor's axes with heads split out, the first `out_axes` of which are
    its output channels; parameter axis i is axis `perm[i]` of them.
    """

    param: str
    index: tuple[int, ...]
    dims: tuple[int, ...]
    perm: tuple[int, ...]
    out_axes: int

    @property
    def hub_shape(self) -> tuple[int, ...]:
        """The shape in the file: [out, in], or [out] of a vector."""
        if len(self.dims) == 1:
            return self.dims
        return (prod(self.dims[: self.out_axes]), prod(self.dims[self.out_axes :]))

    @property
    def quantizable(self) -> bool:
        """Whether an MXFP8 checkpoint stores this tensor in 8 bits."""
        return len(self.dims) > 1 and not self.param.endswith(_NEVER_QUANTIZED)


class Part(NamedTuple):
    """A hub tensor `name` within a stored tensor: all of it, one expert's slab, or some of its rows."""

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


class Entry(NamedTuple):
    """A tensor that a file may hold: its shape and the hub tensors in it."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def targets(config: M3Config) -> dict[str, Target]:
    """Every text tensor of the hub layout, in the hub's order.

    Args:
      config: the model's configuration.

    Returns:
      From hub name ("language_model.model.layers.0.self_attn.q_proj.weight") to its place.

    Source: the tensor list of MiniMaxAI/MiniMax-M3.
    """
    sizes = _sizes(config)
    places = {hub: _target(param, axes, sizes) for hub, param, axes in _TOP[:1]}
    for number, stack in enumerate(config.stacks):
        table = _LAYER + (_INDEX if stack.is_sparse else ()) + (_MOE if stack.is_moe else _DENSE)
        in_layer = {hub: _target(f"stacks.{number}.{param}", axes, sizes) for hub, param, axes in table}
        for layer in range(stack.num_layers):
            prefix = f"language_model.model.layers.{stack.first_layer + layer}."
            for hub, target in in_layer.items():
                if "{e}" not in hub:
                    places[prefix + hub] = target._replace(index=(layer,))
                    continue
                for expert in range(config.num_local_experts):
                    places[prefix + hub.format(e=expert)] = target._replace(index=(layer, expert))
    return places | {hub: _target(param, axes, sizes) for hub, param, axes in _TOP[1:]}


def totals(config: M3Config) -> tuple[int, int]:
    """How many hub tensors `targets` lists, and how many values they have, without the list.

    Args:
      config: the model's configuration, of any size.
    """
    sizes = _sizes(config)
    num_tensors = num_values = 0
    layers_of = Counter(zip(config.layer_types, config.mlp_layer_types, strict=True))  # 4 kinds at most
    tables = [(1, _TOP)]
    for (attention, mlp), num_layers in layers_of.items():
        kind = Stack(0, num_layers, attention, mlp)
        tables.append((num_layers, _LAYER + (_INDEX if kind.is_sparse else ()) + (_MOE if kind.is_moe else _DENSE)))
    for num_layers, table in tables:
        for hub, param, axes in table:
            copies = num_layers * (config.num_local_experts if "{e}" in hub else 1)
            num_tensors += copies
            num_values += copies * prod(_target(param, axes, sizes).dims)
    return num_tensors, num_values


def entries(config: M3Config, places: dict[str, Target]) -> dict[str, Entry]:
    """Every text tensor that a file may hold under its canonical name: the hub's, or a merged one.

    Merged tensors are those of transformers: `experts.gate_up_proj` [E, 2F, D] (rows of w1, then of
    w3), `experts.down_proj` [E, D, F], and `gate_up_proj` [2F, D] of a dense or shared MLP.

    Args:
      config: the model's configuration.
      places: `targets(config)`.

    Source: transformers `conversion_mapping`, "minimax_m3_vl".
    """
    allowed = {name: Entry(target.hub_shape, (Part(name),)) for name, target in places.items()}
    for stack in config.stacks:
        for layer in range(stack.num_layers):
            prefix = f"language_model.model.layers.{stack.first_layer + layer}."
            allowed |= _merged_moe(prefix, config) if stack.is_moe else _merged_dense(prefix, config)
    return allowed


def canonical(name: str) -> tuple[str, bool]:
    """The canonical name of a stored text tensor's weight, and whether this is the weight's scale.

    Args:
      name: any variant: with or without prefix, `mlp` or `block_sparse_moe`, the bias beside or under
        the gate, `indexer.q_proj` or `index_q_proj`, `weight_scale` or `weight_scale_inv`.
    """
    weight = _SCALE.sub("", name)
    is_scale = weight != name
    if is_scale and name[len(weight)] == ".":
        weight += ".weight"
    for pattern, replacement in _SPELLINGS:
        weight = re.sub(pattern, replacement, weight)
    return weight, is_scale


def is_mtp(name: str) -> bool:
    """Whether a stored tensor belongs to a multi-token-prediction module, which is not loaded."""
    return _MTP.search(name) is not None


def is_vision(name: str) -> bool:
    """Whether a stored tensor belongs to the vision tower or its projectors."""
    return _VISION.match(name) is not None


def _sizes(c: M3Config) -> dict[str, int]:
    return {
        "V": c.vocab_size, "D": c.hidden_size, "N": c.num_attention_heads, "K": c.num_key_value_heads,
        "H": c.head_dim, "Hi": c.index_head_dim, "E": c.num_local_experts, "F": c.intermediate_size,
        "Fd": c.dense_intermediate_size, "Fs": c.shared_intermediate_size,
    }  # fmt: skip


def _target(param: str, axes: str, sizes: dict[str, int]) -> Target:
    hub_axes, own_axes = axes.split(" -> ")
    letters = re.findall(r"\w+", hub_axes)
    outputs = re.match(r"\((.+?)\)", hub_axes)
    return Target(
        param,
        index=(),
        dims=tuple(sizes[letter] for letter in letters),
        perm=tuple(letters.index(letter) for letter in own_axes.split()),
        out_axes=len(outputs[1].split()) if outputs else 1,
    )


def _gate_up(prefix: str, width: int, d: int) -> dict[str, Entry]:
    gate = Part(f"{prefix}gate_proj.weight", rows=(0, width))
    up = Part(f"{prefix}up_proj.weight", rows=(width, 2 * width))
    return {f"{prefix}gate_up_proj.weight": Entry((2 * width, d), (gate, up))}


def _merged_dense(prefix: str, c: M3Config) -> dict[str, Entry]:
    return _gate_up(f"{prefix}mlp.", c.dense_intermediate_size, c.hidden_size)


def _merged_moe(prefix: str, c: M3Config) -> dict[str, Entry]:
    moe, experts = f"{prefix}block_sparse_moe.", range(c.num_local_experts)
    d, f = c.hidden_size, c.intermediate_size
    gate = [Part(f"{moe}experts.{e}.w1.weight", e, (0, f)) for e in experts]
    up = [Part(f"{moe}experts.{e}.w3.weight", e, (f, 2 * f)) for e in experts]
    down = [Part(f"{moe}experts.{e}.w2.weight", e) for e in experts]
    return _gate_up(f"{moe}shared_experts.", c.shared_intermediate_size, d) | {
        f"{moe}experts.gate_up_proj": Entry((len(experts), 2 * f, d), (*gate, *up)),
        f"{moe}experts.down_proj": Entry((len(experts), d, f), tuple(down)),
    }
