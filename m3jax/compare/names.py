"""Names that other engines have for the quantities: a row for each module whose output, or input, is one.

A dump has names of modules as `named_modules()` gives them, with ".input" behind one for what goes in, and ".0", ".1"
for the parts of a tuple. transformers' are those of 5.23.0, where a test uses them; vLLM's stand in its model file of
autumn 2026, SGLang's were written down from notes on its own, and neither table has been tried on
its engine. The names of other modules can be given in a file (`read_map`).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from m3jax.compare.quantities import quantity
from m3jax.files import read_json
from m3jax.messages import printable, shown


class Meaning(NamedTuple):
    """The meaning of one array of a dump: a quantity, or the parts of a fused projection.

    Attributes:
      names: the quantity; of a fused projection its parts, in their order along the last axis.
      axes: the array's axes, as in "B K T J", where they are known; else they are found by its shape.
    """

    names: tuple[str, ...]
    axes: str | None = None


_PREFIX = re.compile(r"(?:(?:language_model|model)\.)*")
_QKV = "q_proj k_proj v"
_INDEX = "index_q_proj index_k_proj"
# Columns: the module, with N for its layer; the quantity, or the parts of a fused one; axes, where they are fixed.
_COMMON = [
    ("embed_tokens", "embedding"),
    ("norm", "final_norm"), ("norm.0", "final_norm"), ("lm_head", "logits"), ("logits", "logits"), ("taps", "taps"),
    ("layers.N.input", "input"), ("layers.N.input.0", "input"), ("layers.N", "output"),
    ("layers.N.input_layernorm", "attention_norm"), ("layers.N.input_layernorm.0", "attention_norm"),
    ("layers.N.post_attention_layernorm", "ffn_norm"), ("layers.N.post_attention_layernorm.0", "ffn_norm"),
    ("layers.N.self_attn.q_proj", "q_proj"), ("layers.N.self_attn.k_proj", "k_proj"),
    ("layers.N.self_attn.v_proj", "v"),
    ("layers.N.self_attn.q_norm", "q_normed"), ("layers.N.self_attn.k_norm", "k_normed"),
    ("layers.N.self_attn.o_proj.input", "attention"), ("layers.N.self_attn.o_proj.input.0", "attention"),
    ("layers.N.self_attn.o_proj", "attention_out"), ("layers.N.self_attn.o_proj.0", "attention_out"),
    ("layers.N.self_attn", "attention_out"), ("layers.N.mlp", "ffn_out"),
    ("layers.N.mlp.gate_proj", "gate"), ("layers.N.mlp.up_proj", "up"), ("layers.N.mlp.gate_up_proj", "gate up"),
    ("layers.N.mlp.gate_up_proj.0", "gate up"), ("layers.N.mlp.shared_experts.gate_up_proj", "gate up"),
    ("layers.N.mlp.shared_experts.gate_up_proj.0", "gate up"),
]  # fmt: skip
# These engines pass the stream on as two parts, the last addition and the stream before it, which the next norm adds.
_TWO_STREAMS = [
    ("layers.N.0", "ffn_out"), ("layers.N.1", "ffn_input"),
    ("layers.N.input_layernorm.1", "input"), ("layers.N.post_attention_layernorm.1", "ffn_input"),
    ("layers.N.self_attn.attn", "attention"), ("layers.N.self_attn.attn.input.0", "q"),
    ("layers.N.self_attn.attn.input.1", "k"), ("layers.N.self_attn.attn.input.2", "v"),
    ("layers.N.self_attn.qkv_proj", f"{_QKV} {_INDEX}"), ("layers.N.self_attn.qkv_proj.0", f"{_QKV} {_INDEX}"),
]  # fmt: skip
TABLES: dict[str, list[tuple[str, ...]]] = {
    "m3jax": [],
    "transformers": [
        *_COMMON,
        ("layers.N.0", "output"), ("layers.N.self_attn.0", "attention_out"),
        ("layers.N.self_attn.indexer", "blocks", "B K T J"),
        ("layers.N.self_attn.indexer.q_proj", "index_q_proj"), ("layers.N.self_attn.indexer.k_proj", "index_k_proj"),
        ("layers.N.self_attn.indexer.q_norm", "index_q_normed"),
        ("layers.N.self_attn.indexer.k_norm", "index_k_normed"),
        ("layers.N.mlp.gate.0", "router_logits"), ("layers.N.mlp.gate.1", "expert_weights"),
        ("layers.N.mlp.gate.2", "expert_ids"),
    ],
    "vllm": [
        *_COMMON, *_TWO_STREAMS,
        ("layers.N.self_attn.index_q_norm", "index_q_normed"), ("layers.N.self_attn.index_k_norm", "index_k_normed"),
        ("layers.N.self_attn.indexer", "blocks"), ("layers.N.self_attn.indexer.input.0", "index_q"),
        ("layers.N.self_attn.indexer.input.1", "index_k"),
        ("layers.N.block_sparse_moe", "ffn_out"), ("layers.N.block_sparse_moe.gate", "router_logits"),
        ("layers.N.block_sparse_moe.gate.0", "router_logits"),
        ("layers.N.block_sparse_moe.shared_experts.gate_up_proj", "gate up"),
        ("layers.N.block_sparse_moe.shared_experts.gate_up_proj.0", "gate up"),
    ],
    "sglang": [
        *_COMMON, *_TWO_STREAMS,
        ("layers.N.self_attn.index_qkv_proj", _INDEX), ("layers.N.self_attn.index_qkv_proj.0", _INDEX),
        ("layers.N.self_attn.index_q_norm", "index_q_normed"), ("layers.N.self_attn.index_k_norm", "index_k_normed"),
        ("layers.N.mlp.gate", "router_logits"), ("layers.N.mlp.gate.0", "router_logits"),
        ("layers.N.mlp.topk.0", "expert_weights"), ("layers.N.mlp.topk.1", "expert_ids"),
        ("layers.N.mlp.0", "ffn_out"),
    ],
}  # fmt: skip
# The quantities whose axes in `M3.intermediates` and the golden vectors are not in the order tokens, heads, rest.
_OWN_AXES = {"block_scores": "B K T M", "blocks": "B K T J"}
_LAYER = re.compile(r"layers\.(\d{1,5})(?=\.|$)")


def meanings(names: Sequence[str], user_map: Mapping[str, Meaning | None] | None = None) -> dict[str, Meaning]:
    """Return the meaning of each name of a dump: by the user's map, else by the table that knows most of the names.

    Args:
      names: of a dump's arrays.
      user_map: as `read_map` gives it.

    Returns:
      Meanings by name; a name that neither the map nor the table knows is left out.
    """
    by_table = [_by_table(names, engine) for engine in TABLES]
    by_name = max(by_table, key=len)  # the first of equal counts
    for name in names:
        entry = _entry_for(name, user_map or {})
        if entry is not None:
            by_name.pop(name, None)
            template, layer = entry
            if (meaning := user_map[template]) is not None:
                by_name[name] = meaning._replace(
                    names=tuple(template_name.format(layer=layer) for template_name in meaning.names)
                )
    return by_name


def _by_table(names: Sequence[str], engine: str) -> dict[str, Meaning]:
    """Return the meanings of those names that one engine's table knows."""
    table = {row[0]: row[1:] for row in TABLES[engine]}
    by_name = {}
    for name in names:
        if (known := quantity(name[_PREFIX.match(name).end() :])) is not None:
            by_name[name] = Meaning((known.name,), _OWN_AXES.get(known.kind))
            continue
        module, layer = _place(name.removesuffix(".output"))
        if module in table:
            quantity_names, *axes = table[module]
            whole = [
                quantity_name if layer is None else f"layers.{layer}.{quantity_name}"
                for quantity_name in quantity_names.split()
            ]
            by_name[name] = Meaning(tuple(whole), axes[0] if axes else None)
    return by_name


def _place(name: str) -> tuple[str, int | None]:
    """Return a module's name without the model's prefix and with N for its layer, and the layer's number or None."""
    name = name[_PREFIX.match(name).end() :]
    match = _LAYER.search(name)
    return (name, None) if match is None else (name[: match.start(1)] + "N" + name[match.end(1) :], int(match[1]))


def read_map(file: Path) -> dict[str, Meaning | None]:
    """Read the user's map of names: a JSON object from a name to a quantity, with {layer} in both.

    Args:
      file: such as {"l_out-{layer}": "layers.{layer}.output", "top-{layer}": {"to": "layers.{layer}.blocks", "axes":
        "X K J"}, "scratch": null}; null leaves an array out, several quantities with blanks between them are the parts
        of a fused one.

    Raises:
      ValueError: no such file, or an entry that is not understood.
    """
    if not file.is_file():
        raise ValueError(f"--map {printable(str(file))}: there is no such file")
    user_map = {}
    for name, entry in read_json(file, called="a map of names").items():
        where = f"--map {printable(str(file))}: {shown(name)}"
        to, axes = (entry.get("to"), entry.get("axes")) if isinstance(entry, dict) else (entry, None)
        if entry is not None:
            parts = to.split() if isinstance(to, str) else []
            unknown = [part for part in parts if quantity(part.replace("{layer}", "0")) is None]
            if not parts or unknown:
                target = shown(unknown[0] if unknown else to)
                raise ValueError(f"{where} leads to {target}, which is no quantity; docs/compare.md lists them")
            if axes is not None and (not isinstance(axes, str) or len(parts) > 1):
                raise ValueError(f"{where}: axes {shown(axes)}: give letters, as in 'X K J', and one quantity")
            if "{layer}" in to and "{layer}" not in name:
                raise ValueError(f"{where} leads to {shown(to)}: write {{layer}} where the name has its number")
        user_map[name] = None if entry is None else Meaning(tuple(parts), axes)
    return user_map


def _entry_for(name: str, user_map: Mapping[str, Meaning | None]) -> tuple[str, int] | None:
    """Return the key in the user's map that matches a name, and the layer number in the name (0 for an exact match)."""
    if name in user_map:
        return name, 0
    for number in re.finditer(r"\d{1,5}", name):
        template = name[: number.start()] + "{layer}" + name[number.end() :]
        if template in user_map:
            return template, int(number[0])
    return None
