"""Hub tensor names, all their variants, and the parameters that they fill."""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

from m3jax.config import M3Config, Stack
from m3jax.mxfp8 import BLOCK
from m3jax.vision import VisionConfig

# Hub name, parameter, and the rearrangement from the hub's [out, in] to the parameter's axes.
# Letters are the package's; Hi is the index head dim, Fd and Fs the hidden widths of the dense and
# the shared MLP. Of the tower W is the width, Nv and Hv are its heads, Fv is the hidden width, and Q the projector's;
# Dm is D times the patches of a merge block. A name with a layer in front stands in a stack, so its parameter has an
# axis L (and E for {e}) before the axes given here.
_EMBEDDING = {"language_model.model.embed_tokens.weight": ("embed_tokens", "V D -> V D")}
_HEAD = {
    "language_model.model.norm.weight": ("norm", "D -> D"),
    "language_model.lm_head.weight": ("lm_head", "V D -> V D"),
}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm", "D -> D"),
    "post_attention_layernorm.weight": ("post_attention_layernorm", "D -> D"),
    "self_attn.q_proj.weight": ("self_attn.q_proj", "(N H) D -> D N H"),
    "self_attn.k_proj.weight": ("self_attn.k_proj", "(K H) D -> D K H"),
    "self_attn.v_proj.weight": ("self_attn.v_proj", "(K H) D -> D K H"),
    "self_attn.o_proj.weight": ("self_attn.o_proj", "D (N H) -> N H D"),
    "self_attn.q_norm.weight": ("self_attn.q_norm", "H -> H"),
    "self_attn.k_norm.weight": ("self_attn.k_norm", "H -> H"),
}
_INDEX = {
    "self_attn.index_q_proj.weight": ("self_attn.index_q_proj", "(K Hi) D -> D K Hi"),
    "self_attn.index_k_proj.weight": ("self_attn.index_k_proj", "Hi D -> D Hi"),
    "self_attn.index_q_norm.weight": ("self_attn.index_q_norm", "Hi -> Hi"),
    "self_attn.index_k_norm.weight": ("self_attn.index_k_norm", "Hi -> Hi"),
}
_DENSE = {
    "mlp.gate_proj.weight": ("mlp.gate_proj", "Fd D -> D Fd"),
    "mlp.up_proj.weight": ("mlp.up_proj", "Fd D -> D Fd"),
    "mlp.down_proj.weight": ("mlp.down_proj", "D Fd -> Fd D"),
}
_MOE = {
    "block_sparse_moe.gate.weight": ("mlp.gate", "E D -> D E"),
    "block_sparse_moe.e_score_correction_bias": ("mlp.e_score_correction_bias", "E -> E"),
    "block_sparse_moe.shared_experts.gate_proj.weight": ("mlp.shared_experts.gate_proj", "Fs D -> D Fs"),
    "block_sparse_moe.shared_experts.up_proj.weight": ("mlp.shared_experts.up_proj", "Fs D -> D Fs"),
    "block_sparse_moe.shared_experts.down_proj.weight": ("mlp.shared_experts.down_proj", "D Fs -> Fs D"),
    "block_sparse_moe.experts.{e}.w1.weight": ("mlp.experts.gate_proj", "F D -> D F"),
    "block_sparse_moe.experts.{e}.w3.weight": ("mlp.experts.up_proj", "F D -> D F"),
    "block_sparse_moe.experts.{e}.w2.weight": ("mlp.experts.down_proj", "D F -> F D"),
}
_VISION_TOP = {
    "vision_tower.vision_model.embeddings.patch_embedding.weight": ("patch_embedding", "W C Fr Ph Pw -> C Fr Ph Pw W"),
    "vision_tower.vision_model.pre_layrnorm.weight": ("pre_layrnorm.weight", "W -> W"),
    "vision_tower.vision_model.pre_layrnorm.bias": ("pre_layrnorm.bias", "W -> W"),
    "multi_modal_projector.linear_1.weight": ("projector.linear_1.weight", "Q W -> W Q"),
    "multi_modal_projector.linear_1.bias": ("projector.linear_1.bias", "Q -> Q"),
    "multi_modal_projector.linear_2.weight": ("projector.linear_2.weight", "D Q -> Q D"),
    "multi_modal_projector.linear_2.bias": ("projector.linear_2.bias", "D -> D"),
    "patch_merge_mlp.linear_1.weight": ("projector.merge_linear_1.weight", "Q Dm -> Dm Q"),
    "patch_merge_mlp.linear_1.bias": ("projector.merge_linear_1.bias", "Q -> Q"),
    "patch_merge_mlp.linear_2.weight": ("projector.merge_linear_2.weight", "D Q -> Q D"),
    "patch_merge_mlp.linear_2.bias": ("projector.merge_linear_2.bias", "D -> D"),
}
_VISION_LAYER = {
    "layer_norm1.weight": ("layers.layer_norm1.weight", "W -> W"),
    "layer_norm1.bias": ("layers.layer_norm1.bias", "W -> W"),
    "self_attn.q_proj.weight": ("layers.self_attn.q_proj.weight", "(Nv Hv) W -> W Nv Hv"),
    "self_attn.q_proj.bias": ("layers.self_attn.q_proj.bias", "(Nv Hv) -> Nv Hv"),
    "self_attn.k_proj.weight": ("layers.self_attn.k_proj.weight", "(Nv Hv) W -> W Nv Hv"),
    "self_attn.k_proj.bias": ("layers.self_attn.k_proj.bias", "(Nv Hv) -> Nv Hv"),
    "self_attn.v_proj.weight": ("layers.self_attn.v_proj.weight", "(Nv Hv) W -> W Nv Hv"),
    "self_attn.v_proj.bias": ("layers.self_attn.v_proj.bias", "(Nv Hv) -> Nv Hv"),
    "self_attn.out_proj.weight": ("layers.self_attn.out_proj.weight", "W (Nv Hv) -> Nv Hv W"),
    "self_attn.out_proj.bias": ("layers.self_attn.out_proj.bias", "W -> W"),
    "layer_norm2.weight": ("layers.layer_norm2.weight", "W -> W"),
    "layer_norm2.bias": ("layers.layer_norm2.bias", "W -> W"),
    "mlp.fc1.weight": ("layers.mlp.fc1.weight", "Fv W -> W Fv"),
    "mlp.fc1.bias": ("layers.mlp.fc1.bias", "Fv -> Fv"),
    "mlp.fc2.weight": ("layers.mlp.fc2.weight", "W Fv -> Fv W"),
    "mlp.fc2.bias": ("layers.mlp.fc2.bias", "W -> W"),
}
_VISION_PREFIX = "vision_tower.vision_model.encoder.layers."
_NEVER_QUANTIZED = ("embed_tokens", "lm_head", "mlp.gate")

_SPELLINGS = (
    (r"^(model\.)?(language_model\.)?(model\.)?(?=(embed_tokens|norm|layers)\.)", "language_model.model."),
    (r"^(model\.)?(language_model\.)?lm_head\.", "language_model.lm_head."),
    (r"\.self_attn\.indexer\.([qk])_(proj|norm)\.", r".self_attn.index_\1_\2."),
    (r"\.mlp\.(?=(gate|experts|shared_experts)\.|e_score_)", ".block_sparse_moe."),
    (r"\.gate\.e_score_correction_bias$", ".e_score_correction_bias"),
    (r"\.experts\.(gate_up_proj|down_proj)\.weight$", r".experts.\1"),
    (r"^model\.(?=(vision_tower|multi_modal_projector|patch_merge_mlp)\.)", ""),
    (r"^vision_tower\.embeddings\.proj\.", "vision_tower.embeddings.patch_embedding."),
    (r"^vision_tower\.(?=layers\.)", "vision_tower.encoder."),
    (r"^vision_tower\.(?=(embeddings|pre_layrnorm|encoder)\.)", "vision_tower.vision_model."),
    (r"^multi_modal_projector\.merge_linear_", "patch_merge_mlp.linear_"),
)  # fmt: skip
_SCALE = re.compile(r"(?:\.weight_scale|_scale)(?:_inv)?$")
_MTP = re.compile(r"(^|\.)mtp\.")
_VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp)\.")


class Target(NamedTuple):
    """The place of one hub tensor among the parameters.

    `param` is a dotted parameter path and `index` the place in its stack ((layer,), (layer, expert)
    or ()). `dims` are the hub tensor's axes with heads split out, the first `out_axes` of which are
    its output channels; parameter axis i is axis `perm[i]` of them.
    A convolution's kernel has all its axes in the file.
    """

    param: str
    index: tuple[int, ...]
    dims: tuple[int, ...]
    perm: tuple[int, ...]
    out_axes: int
    is_kernel: bool = False

    @property
    def hub_shape(self) -> tuple[int, ...]:
        """The shape in the file: [out, in], [out] of a vector, or that of a convolution's kernel."""
        if self.is_kernel:
            return self.dims
        outputs, inputs = self.dims[: self.out_axes], self.dims[self.out_axes :]
        return (prod(outputs), prod(inputs)) if inputs else (prod(outputs),)

    @property
    def quantizable(self) -> bool:
        """True if an MXFP8 checkpoint stores this tensor in 8 bits: most matrices of the text model, nothing else."""
        is_of_text = not self.param.startswith("vision.")
        return is_of_text and len(self.dims) > 1 and not self.param.endswith(_NEVER_QUANTIZED)

    @property
    def codes(self) -> "Target":
        """The place of an MXFP8 tensor's codes, where they are not dequantised."""
        return self._replace(param=f"{self.param}.codes")

    @property
    def holds_codes(self) -> bool:
        """True if the parameter holds E4M3 codes, as bytes."""
        return self.param.endswith(".codes")

    @property
    def scales(self) -> "Target":
        """The place of an MXFP8 tensor's scales: one for 32 input channels, counted on one axis even across heads."""
        outputs = self.dims[: self.out_axes]
        blocks = -(-prod(self.dims[self.out_axes :]) // BLOCK)
        perm = (self.out_axes, *range(self.out_axes))
        return self._replace(param=f"{self.param}.scales", dims=(*outputs, blocks), perm=perm)


class Part(NamedTuple):
    """The part of a stored tensor that is the hub tensor `name`: the whole, one expert's slab, or some of the rows."""

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


class Entry(NamedTuple):
    """A tensor that a file may hold: its shape and the hub tensors in it."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def targets(config: M3Config) -> dict[str, Target]:
    """Return every tensor of the hub layout: the text model's in the hub's order, then the tower's if there is one.

    Args:
      config: the model's configuration.

    Returns:
      From hub name ("language_model.model.layers.0.self_attn.q_proj.weight") to its place.

    Source: the tensor list of MiniMaxAI/MiniMax-M3.
    """
    sizes = _sizes(config)
    places = {hub: _target(param, axes, sizes) for hub, (param, axes) in _EMBEDDING.items()}
    for number, stack in enumerate(config.stacks):
        in_layer = {
            hub: _target(f"stacks.{number}.{param}", axes, sizes) for hub, (param, axes) in _layer_table(stack).items()
        }
        for layer in range(stack.num_layers):
            prefix = f"language_model.model.layers.{stack.first_layer + layer}."
            for hub, target in in_layer.items():
                if "{e}" not in hub:
                    places[prefix + hub] = target._replace(index=(layer,))
                    continue
                for expert in range(config.num_local_experts):
                    places[prefix + hub.format(e=expert)] = target._replace(index=(layer, expert))
    places |= {hub: _target(param, axes, sizes) for hub, (param, axes) in _HEAD.items()}
    if config.vision_config is not None:
        places |= _vision_targets(VisionConfig.of(config).num_hidden_layers, sizes)
    return places


def _layer_table(stack: Stack) -> dict[str, tuple[str, str]]:
    """Return the table of the tensors that each layer of a stack has."""
    return _LAYER | (_INDEX if stack.is_sparse else {}) | (_MOE if stack.is_moe else _DENSE)


def _vision_targets(num_layers: int, sizes: dict[str, int]) -> dict[str, Target]:
    """Return the tower's and the projector's part of `targets`."""
    of = lambda param, axes: _target(f"vision.{param}", axes, sizes)
    places = {hub: of(param, axes) for hub, (param, axes) in _VISION_TOP.items()}
    for hub, (param, axes) in _VISION_LAYER.items():
        target = of(param, axes)
        places |= {f"{_VISION_PREFIX}{layer}.{hub}": target._replace(index=(layer,)) for layer in range(num_layers)}
    return places


def totals(config: M3Config) -> tuple[int, int]:
    """Return the number of hub tensors in `targets` and of their values, without building that dictionary.

    Args:
      config: the model's configuration, of any size.
    """
    sizes = _sizes(config)
    num_tensors = num_values = 0
    layers_of = Counter(zip(config.layer_types, config.mlp_layer_types, strict=True))  # 4 kinds at most
    tables = [(1, _EMBEDDING | _HEAD)]
    for (attention, mlp), num_layers in layers_of.items():
        stack = Stack(0, num_layers, attention, mlp)
        tables.append((num_layers, _layer_table(stack)))
    for num_layers, table in tables:
        for hub, (param, axes) in table.items():
            copies = num_layers * (config.num_local_experts if "{e}" in hub else 1)
            num_tensors += copies
            num_values += copies * prod(_target(param, axes, sizes).dims)
    if config.vision_config is not None:
        num_layers = VisionConfig.of(config).num_hidden_layers
        for copies, table in ((1, _VISION_TOP), (num_layers, _VISION_LAYER)):
            num_tensors += copies * len(table)
            num_values += copies * sum(prod(_target(param, axes, sizes).dims) for param, axes in table.values())
    return num_tensors, num_values


def entries(config: M3Config, places: dict[str, Target]) -> dict[str, Entry]:
    """Return every tensor that a file may hold, by canonical name: the hub's, or a merged one.

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
    """Return the canonical name of a stored tensor's weight, and whether the tensor is that weight's scale.

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


def scale_name(name: str) -> str:
    """Return the hub's name for the scales of an MXFP8 tensor.

    Args:
      name: of the tensor.
    """
    return f"{name}_scale_inv"


def is_mtp(name: str) -> bool:
    """True if a stored tensor belongs to a multi-token-prediction module, which is not loaded."""
    return _MTP.search(name) is not None


def is_vision(name: str) -> bool:
    """True if a stored tensor belongs to the vision tower or its projectors."""
    return _VISION.match(name) is not None


def _sizes(c: M3Config) -> dict[str, int]:
    text = {
        "V": c.vocab_size, "D": c.hidden_size, "N": c.num_attention_heads, "K": c.num_key_value_heads,
        "H": c.head_dim, "Hi": c.index_head_dim, "E": c.num_local_experts, "F": c.intermediate_size,
        "Fd": c.dense_intermediate_size, "Fs": c.shared_intermediate_size,
    }  # fmt: skip
    if c.vision_config is None:
        return text
    v = VisionConfig.of(c)
    channels, frames, rows, columns = v.kernel
    return text | {
        "W": v.hidden_size, "Nv": v.num_attention_heads, "Hv": v.head_dim, "Fv": v.intermediate_size,
        "Q": v.projector_hidden_size, "Dm": c.hidden_size * v.merged_patches, "C": channels, "Fr": frames, "Ph": rows,
        "Pw": columns,
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
        is_kernel=len(letters) > 3,
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
