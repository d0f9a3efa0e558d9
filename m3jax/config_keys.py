"""Which keys a config.json may hold, what they mean, and which values are supported."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# The hub's names for what the flat transformers names call otherwise.
_SPARSE_NAMES = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
    "sparse_init_block": "index_init_blocks",
    "sparse_score_type": "index_score_type",
}
_M3_BOS, _M3_EOS = 200034, 200020
_INDEX_DEFAULTS = {"index_init_blocks": 0, "index_score_type": "max"}
_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "dense_intermediate_size", "shared_intermediate_size", "num_local_experts",
    "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks",
    "index_local_blocks",
)  # fmt: skip
_OPTIONAL = ("routed_scaling_factor", "rms_norm_eps", "swiglu_alpha", "swiglu_limit", "max_position_embeddings",
             "bos_token_id")  # fmt: skip

# Keys with one supported value; any other value is another model. An absent key means that value.
_FIXED = {
    "attention_output_gate": (False,),
    "attention_bias": (False,),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    # transformers writes "silu" for a checkpoint that says "swigluoai", and computes SwiGLU-OAI all the same.
    "hidden_act": ("swigluoai", "silu"),
    "swiglu_beta": (1.0,),
    "tie_word_embeddings": (False,),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "norm_topk_prob": (True,),
    "n_shared_experts": (1,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "use_index_cache": (False,),
    "index_topk_freq": (1, None),
}
_FIXED_SPARSE = {"use_sparse_attention": (True,)}

# Keys that do not change a forward pass: bookkeeping, training, and what transformers writes into every config.
_HARMLESS = frozenset(
    [
        "architectures",
        "auto_map",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "use_cache",
        "attention_dropout",
        "initializer_range",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_router_logits",
        "pad_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "num_mtp_modules",
        "num_nextn_predict_layers",
        "num_reward_heads",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "_attn_implementation",
        "attn_implementation",
        "quantization_config",
        "vision_config",
        "mtp_transformer_layers",
        "base_model_tp_plan",
    ]
)


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list | tuple) and all(map(test, x))


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or test(x)


# (what a value must be, the test of it, keys)
_KINDS: tuple[tuple[str, Callable[[Any], bool], Iterable[str]], ...] = (
    ("an integer", _is_integer, (
        *_REQUIRED, "max_position_embeddings", "index_init_blocks", *(set(_SPARSE_NAMES) - {"sparse_score_type"}),
    )),
    ("an integer or null", _or_none(_is_integer), ("rotary_dim", "bos_token_id")),
    ("a number", _is_number, ("routed_scaling_factor", "rms_norm_eps", "swiglu_alpha", "swiglu_limit")),
    ("a number or null", _or_none(_is_number), ("rope_theta", "partial_rotary_factor")),
    ("a list of 0 and 1", _or_none(_list_of(lambda x: x in (0, 1))), (
        "moe_layer_freq", "sparse_attention_freq", "sparse_disable_index_value",
    )),
    ("a list of names", _or_none(_list_of(lambda x: isinstance(x, str))), ("layer_types", "mlp_layer_types")),
    ("an integer, a list of them, or null", lambda x: x is None or _is_integer(x) or _list_of(_is_integer)(x), (
        "eos_token_id",
    )),
    ("an object or null", _or_none(lambda x: isinstance(x, Mapping)), ("rope_parameters", "sparse_attention_config")),
)  # fmt: skip


def read_text_config(text: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Map a text config of any accepted form to M3Config's fields.

    Args:
      text: the text part of a parsed config.json.
      top: the rest of the top level (token ids may stand there).

    Raises:
      ValueError: lists every missing, unknown or unsupported key.
    """
    _check_kinds(text)
    sparse = text.get("sparse_attention_config") or {}
    problems = _unsupported(text, _FIXED) + _unsupported(sparse, _FIXED_SPARSE) + _unsupported(top, _FIXED)
    values = dict(_INDEX_DEFAULTS)
    values |= {k: text[k] for k in (*_REQUIRED, *_OPTIONAL, *_INDEX_DEFAULTS) if k in text}
    values |= {_SPARSE_NAMES[k]: v for k, v in sparse.items() if k in _SPARSE_NAMES}
    layers = text.get("num_hidden_layers", 0)
    problems += _read_layers(values, text, sparse, layers) + _read_rope(values, text)
    # The hub's file has no token ids; transformers' class fills in those of M3's tokenizer.
    in_vocabulary = text.get("vocab_size", 0) > _M3_BOS
    values.setdefault("bos_token_id", _M3_BOS if in_vocabulary else None)
    default_eos = _M3_EOS if in_vocabulary else None
    values["eos_token_id"] = _ids(text.get("eos_token_id", top.get("eos_token_id", default_eos)))
    problems += [f"{k} is missing" for k in _REQUIRED if k not in values]
    problems += [f"unknown key {k!r}: remove it if it does not change the arithmetic" for k in _unknown(text, sparse)]
    _raise(problems)
    return values


def write_text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The hub's text_config of M3Config's fields; the inverse of `read_text_config`."""
    flat = {"index_n_heads", "layer_types", "mlp_layer_types", "rotary_dim", "rope_theta", *_SPARSE_NAMES.values()}
    out = {k: v for k, v in values.items() if k not in flat and k != "eos_token_id"}
    is_sparse = [int(t == "minimax_m3_sparse") for t in values["layer_types"]]
    factor = _factor(values["rotary_dim"], values["head_dim"])
    eos = list(values["eos_token_id"])
    return out | {
        "model_type": "minimax_m3_vl_text",
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "rotary_dim": values["rotary_dim"],
        "rope_theta": values["rope_theta"],
        "partial_rotary_factor": factor,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": values["rope_theta"], "partial_rotary_factor": factor,
        },
        "moe_layer_freq": [int(t == "sparse") for t in values["mlp_layer_types"]],
        "hidden_act": "swigluoai",
        "sparse_attention_config": {hub: values[flat_name] for hub, flat_name in _SPARSE_NAMES.items()} | {
            "use_sparse_attention": True, "sparse_attention_freq": is_sparse,
            "sparse_disable_index_value": is_sparse,
        },
    }  # fmt: skip


def m3_hub_config() -> dict[str, Any]:
    """The published config.json's arithmetic keys, with the token ids of its tokenizer."""
    freq = [0] * 3 + [1] * 57
    text = dict(
        hidden_size=6144, num_hidden_layers=60, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        vocab_size=200064, max_position_embeddings=1048576, rms_norm_eps=1e-6, use_gemma_norm=True,
        attention_output_gate=False, rope_theta=5000000, rotary_dim=64, partial_rotary_factor=0.5,
        hidden_act="swigluoai", swiglu_alpha=1.702, swiglu_limit=7.0, use_qk_norm=True, qk_norm_type="per_head",
        tie_word_embeddings=False, intermediate_size=3072, shared_intermediate_size=3072,
        dense_intermediate_size=12288, num_local_experts=128, num_experts_per_tok=4, n_shared_experts=1,
        scoring_func="sigmoid", use_routing_bias=True, routed_scaling_factor=2.0, moe_layer_freq=freq,
        sparse_attention_config=dict(
            use_sparse_attention=True, sparse_index_dim=128, sparse_num_index_heads=4, sparse_topk_blocks=16,
            sparse_block_size=128, sparse_score_type="max", sparse_init_block=0, sparse_local_block=1,
            sparse_attention_freq=freq, sparse_disable_index_value=freq,
        ),
    )  # fmt: skip
    return {"model_type": "minimax_m3_vl", "text_config": text}


def _unsupported(found: Mapping[str, Any], fixed: Mapping[str, tuple]) -> list[str]:
    return [
        f"{k} = {found[k]!r} is not supported (only {' or '.join(map(repr, allowed))})"
        for k, allowed in fixed.items()
        if k in found and found[k] not in allowed
    ]


def _unknown(text: Mapping[str, Any], sparse: Mapping[str, Any]) -> list[str]:
    known = {*_REQUIRED, *_OPTIONAL, *_INDEX_DEFAULTS, *_FIXED, *_HARMLESS, "layer_types", "mlp_layer_types",
             "moe_layer_freq", "rope_theta", "rotary_dim", "partial_rotary_factor", "rope_parameters",
             "eos_token_id", "sparse_attention_config"}  # fmt: skip
    known_sparse = {*_SPARSE_NAMES, *_FIXED_SPARSE, "sparse_attention_freq", "sparse_disable_index_value"}
    return sorted(set(text) - known) + sorted(f"sparse_attention_config.{k}" for k in set(sparse) - known_sparse)


def _read_layers(values: dict, text: Mapping, sparse: Mapping, layers: int) -> list[str]:
    problems = []
    pairs = (
        ("layer_types", sparse.get("sparse_attention_freq"), ("full_attention", "minimax_m3_sparse")),
        ("mlp_layer_types", text.get("moe_layer_freq"), ("dense", "sparse")),
    )
    for name, freq, kinds in pairs:
        from_freq = None if freq is None else tuple(kinds[bool(f)] for f in freq)
        given = None if text.get(name) is None else tuple(text[name])
        if from_freq is not None and given is not None and from_freq != given:
            problems.append(f"{name} and its frequency list disagree; keep one")
        if from_freq is None and given is None:
            problems.append(f"{name} (or its frequency list) is missing")
        values[name] = given if given is not None else (from_freq or ())
        if from_freq is not None and len(from_freq) != layers:
            problems.append(f"the frequency list of {name} has {len(from_freq)} entries for {layers} layers")
    return problems + _read_index_values(values["layer_types"], sparse, layers)


def _read_index_values(kinds: tuple[str, ...], sparse: Mapping, layers: int) -> list[str]:
    disabled = sparse.get("sparse_disable_index_value")
    disabled = [1] * layers if disabled is None else disabled
    if len(disabled) != layers:
        return [f"sparse_disable_index_value has {len(disabled)} entries for {layers} layers"]
    enabled = [i for i, (kind, off) in enumerate(zip(kinds, disabled, strict=False))
               if kind == "minimax_m3_sparse" and not off]  # fmt: skip
    if not enabled:
        return []
    return [f"sparse_disable_index_value: the index value path of layers {enabled} is not supported"]


def _read_rope(values: dict, text: Mapping) -> list[str]:
    rope = text.get("rope_parameters") or {}
    problems = []
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_parameters.rope_type = {rope['rope_type']!r}: rope scaling is not supported")
    unknown = sorted(set(rope) - {"rope_type", "rope_theta", "partial_rotary_factor"})
    problems += [f"rope_parameters.{k} is not supported" for k in unknown]
    thetas = {float(t) for t in (rope.get("rope_theta"), text.get("rope_theta")) if t is not None}
    if len(thetas) > 1:
        problems.append(f"rope_theta and rope_parameters.rope_theta disagree: {sorted(thetas)}")
    values["rope_theta"] = next(iter(thetas), 5e6)
    widths = {text["rotary_dim"]} if text.get("rotary_dim") is not None else set()
    factors = (rope.get("partial_rotary_factor"), text.get("partial_rotary_factor"))
    widths |= {int(text.get("head_dim", 0) * f) for f in factors if f is not None}
    if len(widths) != 1:
        problems.append(f"rotary_dim and partial_rotary_factor x head_dim must give one width, got {sorted(widths)}")
    values["rotary_dim"] = next(iter(widths), 0)
    return problems


def _factor(rotary_dim: int, head_dim: int) -> float:
    """The partial_rotary_factor whose product with head_dim, cut to an integer, is rotary_dim in every reader."""
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)


def _ids(eos: int | list[int] | None) -> tuple[int, ...]:
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _check_kinds(text: Mapping[str, Any]) -> None:
    """Raise for values that are not even of the right kind, before anything is computed from them."""
    _raise(_wrong_kinds(text))
    for inner in ("rope_parameters", "sparse_attention_config"):
        _raise(_wrong_kinds(text.get(inner) or {}))


def _wrong_kinds(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {found[name]!r}: must be {what}"
        for what, test, names in _KINDS
        for name in names
        if name in found and not test(found[name])
    ]


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("unsupported config.json: " + "; ".join(problems))
