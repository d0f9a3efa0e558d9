"""The keys that a config.json may hold, their meanings, and the values that are supported."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from m3jax.messages import listed, note_problems, shown

# Positions, ids and sizes are int32, and numbers float32: a larger or a smaller one is no setting of this model.
LARGEST_INTEGER = 2**31 - 1
SMALLEST_REAL, LARGEST_REAL = 1.1754943508222875e-38, 3.4028234663852886e38
_MOST_STOP_IDS = 4096
# What is added to an MLP's `up`: 1 in M3, whose file leaves it out; 0 in the plain SwiGLU of a converted model.
SWIGLU_BETAS = (1.0, 0.0)
MODEL_TYPES = ("minimax_m3_vl", "minimax_m3_vl_text")

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
_OPTIONAL = ("routed_scaling_factor", "rms_norm_eps", "swiglu_alpha", "swiglu_limit", "swiglu_beta",
             "max_position_embeddings", "bos_token_id")  # fmt: skip

# Keys with one supported value; any other value is another model. An absent key means that value.
_FIXED = {
    "model_type": (*MODEL_TYPES, None),
    "attention_output_gate": (False,),
    "attention_bias": (False,),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    # transformers writes "silu" for a checkpoint that says "swigluoai", and computes SwiGLU-OAI all the same.
    "hidden_act": ("swigluoai", "silu"),
    "swiglu_beta": SWIGLU_BETAS,
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
HARMLESS = frozenset(
    [
        "architectures",
        "auto_map",
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


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST_REAL <= value <= LARGEST_REAL


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(test, value))


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


# (what a value must be, the test of it, keys)
_KINDS: tuple[tuple[str, Callable[[Any], bool], Iterable[str]], ...] = (
    ("an integer of 32 bits", _is_integer, (
        *_REQUIRED, "max_position_embeddings", "index_init_blocks", *(set(_SPARSE_NAMES) - {"sparse_score_type"}),
    )),
    ("an integer of 32 bits or null", _or_none(_is_integer), ("rotary_dim", "bos_token_id")),
    ("a finite float32 number", _is_number, (
        "routed_scaling_factor", "rms_norm_eps", "swiglu_alpha", "swiglu_limit", "swiglu_beta",
    )),
    ("a finite float32 number or null", _or_none(_is_number), ("rope_theta", "partial_rotary_factor")),
    ("a list of 0 and 1", _or_none(_list_of(lambda value: value in (0, 1))), (
        "moe_layer_freq", "sparse_attention_freq", "sparse_disable_index_value",
    )),
    ("a list of names", _or_none(_list_of(lambda value: isinstance(value, str))), ("layer_types", "mlp_layer_types")),
    (
        f"an integer of 32 bits, a list of at most {_MOST_STOP_IDS} of them, or null",
        _or_none(lambda value: _is_integer(value) or (_list_of(_is_integer)(value) and len(value) <= _MOST_STOP_IDS)),
        ("eos_token_id",),
    ),
    (
        "an object or null",
        _or_none(lambda value: isinstance(value, Mapping)),
        ("rope_parameters", "sparse_attention_config"),
    ),
)  # fmt: skip


def read_text_config(text: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Map a text config of any accepted form to M3Config's fields.

    Args:
      text: the text part of a parsed config.json.
      top: the rest of the top level (token ids may stand there).

    Raises:
      ValueError: lists every missing, unknown or unsupported key.
    """
    # Values that are not even of the right kind are refused before anything is computed from them.
    _raise(_wrong_kinds(text))
    _raise(_wrong_kinds({key: top[key] for key in ("eos_token_id",) if key in top}))
    for inner in ("rope_parameters", "sparse_attention_config"):
        _raise(_wrong_kinds(text.get(inner) or {}))
    sparse = text.get("sparse_attention_config") or {}
    problems = _unsupported(text, _FIXED) + _unsupported(sparse, _FIXED_SPARSE) + _unsupported(top, _FIXED)
    values = dict(_INDEX_DEFAULTS)
    values |= {key: text[key] for key in (*_REQUIRED, *_OPTIONAL, *_INDEX_DEFAULTS) if key in text}
    values |= {_SPARSE_NAMES[key]: value for key, value in sparse.items() if key in _SPARSE_NAMES}
    num_layers = text.get("num_hidden_layers", 0)
    problems += _read_layers(values, text, sparse, num_layers) + _read_rope(values, text)
    # The hub's file has no token ids; transformers' class fills in those of M3's tokenizer.
    is_m3_vocabulary = text.get("vocab_size", 0) > _M3_BOS
    values.setdefault("bos_token_id", _M3_BOS if is_m3_vocabulary else None)
    eos = text.get("eos_token_id", top.get("eos_token_id", _M3_EOS if is_m3_vocabulary else None))
    values["eos_token_id"] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    problems += [f"{key} is missing" for key in _REQUIRED if key not in values]
    unknown = _unknown_keys(text, sparse)
    problems += [f"unknown key {shown(key)}: remove it if it does not change the arithmetic" for key in unknown]
    _raise(problems)
    return values


def write_text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Write M3Config's fields as the hub's text_config, from which `read_text_config` reads the same fields."""
    in_hub_form = {"index_n_heads", "layer_types", "mlp_layer_types", "rotary_dim", "rope_theta", "eos_token_id",
                   *_SPARSE_NAMES.values()}  # fmt: skip
    unchanged = {name: value for name, value in values.items() if name not in in_hub_form}
    if values["swiglu_beta"] == 1.0:
        del unchanged["swiglu_beta"]  # M3's own value, which its file leaves out
    is_sparse = [int(kind == "minimax_m3_sparse") for kind in values["layer_types"]]
    factor = _rotated_part(values["rotary_dim"], values["head_dim"])
    eos = list(values["eos_token_id"])
    return unchanged | {
        "model_type": "minimax_m3_vl_text",
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "rotary_dim": values["rotary_dim"],
        "rope_theta": values["rope_theta"],
        "partial_rotary_factor": factor,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": values["rope_theta"], "partial_rotary_factor": factor,
        },
        "moe_layer_freq": [int(kind == "sparse") for kind in values["mlp_layer_types"]],
        "hidden_act": "swigluoai",
        "sparse_attention_config": {hub_name: values[name] for hub_name, name in _SPARSE_NAMES.items()} | {
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
    """A line for each key whose value makes it another model than this one."""
    return [
        f"{key} = {shown(found[key])} is not supported (only {' or '.join(map(repr, allowed))})"
        for key, allowed in fixed.items()
        if key in found and found[key] not in allowed
    ]


def _unknown_keys(text: Mapping[str, Any], sparse: Mapping[str, Any]) -> list[str]:
    """Keys of a text config, and of its sparse_attention_config, that are in no list here."""
    known = {*_REQUIRED, *_OPTIONAL, *_INDEX_DEFAULTS, *_FIXED, *HARMLESS, "layer_types", "mlp_layer_types",
             "moe_layer_freq", "rope_theta", "rotary_dim", "partial_rotary_factor", "rope_parameters",
             "eos_token_id", "sparse_attention_config"}  # fmt: skip
    known_sparse = {*_SPARSE_NAMES, *_FIXED_SPARSE, "sparse_attention_freq", "sparse_disable_index_value"}
    return sorted(set(text) - known) + sorted(f"sparse_attention_config.{key}" for key in set(sparse) - known_sparse)


def _read_layers(
    values: dict[str, Any], text: Mapping[str, Any], sparse: Mapping[str, Any], num_layers: int
) -> list[str]:
    """Put the kinds of all layers into `values`, and return the problems of the lists that give them."""
    problems = []
    lists = (
        ("layer_types", sparse.get("sparse_attention_freq"), ("full_attention", "minimax_m3_sparse")),
        ("mlp_layer_types", text.get("moe_layer_freq"), ("dense", "sparse")),
    )
    for name, frequencies, kinds in lists:
        from_frequencies = None if frequencies is None else tuple(kinds[bool(is_on)] for is_on in frequencies)
        given = None if text.get(name) is None else tuple(text[name])
        if from_frequencies is not None and given is not None and from_frequencies != given:
            problems.append(f"{name} and its frequency list disagree; keep one")
        if from_frequencies is None and given is None:
            problems.append(f"{name} (or its frequency list) is missing")
        values[name] = given if given is not None else (from_frequencies or ())
        if from_frequencies is not None and len(from_frequencies) != num_layers:
            count = len(from_frequencies)
            problems.append(f"the frequency list of {name} has {count} entries for {num_layers} layers")
    # Index heads have no values in this model, so that path must be off wherever attention is sparse.
    disabled = sparse.get("sparse_disable_index_value")
    if disabled is None:
        return problems
    if len(disabled) != num_layers:
        problems.append(f"sparse_disable_index_value has {len(disabled)} entries for {num_layers} layers")
        return problems
    pairs = zip(values["layer_types"], disabled, strict=False)
    enabled = [layer for layer, (kind, is_off) in enumerate(pairs) if kind == "minimax_m3_sparse" and not is_off]
    if enabled:
        problems.append(f"sparse_disable_index_value: the index value path of layers {enabled} is not supported")
    return problems


def _read_rope(values: dict[str, Any], text: Mapping[str, Any]) -> list[str]:
    """Put base and width of the rotation into `values`, and return where the up to three places of them disagree."""
    rope = text.get("rope_parameters") or {}
    problems = []
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_parameters.rope_type = {shown(rope['rope_type'])}: rope scaling is not supported")
    unknown = sorted(set(rope) - {"rope_type", "rope_theta", "partial_rotary_factor"})
    problems += [f"rope_parameters.{key} is not supported" for key in unknown]
    thetas = {float(theta) for theta in (rope.get("rope_theta"), text.get("rope_theta")) if theta is not None}
    if len(thetas) > 1:
        problems.append(f"rope_theta and rope_parameters.rope_theta disagree: {sorted(thetas)}")
    values["rope_theta"] = next(iter(thetas), 5e6)
    widths = {text["rotary_dim"]} if text.get("rotary_dim") is not None else set()
    factors = (rope.get("partial_rotary_factor"), text.get("partial_rotary_factor"))
    widths |= {int(text.get("head_dim", 0) * factor) for factor in factors if factor is not None}
    if len(widths) != 1:
        problems.append(f"rotary_dim and partial_rotary_factor x head_dim must give one width, got {sorted(widths)}")
    values["rotary_dim"] = next(iter(widths), 0)
    head_dim = text.get("head_dim")
    if factors == (None, None) and widths and head_dim and widths != {head_dim}:
        # SGLang reads rotary_dim alone, transformers the factor alone, and takes 1 where there is none: which of the
        # two the weights were trained with cannot be told from this file.
        width = values["rotary_dim"]
        problems.append(
            f"rotary_dim = {width} and head_dim = {head_dim} without partial_rotary_factor disagree: transformers "
            f"rotates all {head_dim} dims of such a config, SGLang {width}; write rotary_dim = {head_dim} if the model "
            f"was trained with the first, partial_rotary_factor = {_rotated_part(width, head_dim)} if with the "
            "second"
        )
    return problems


def _rotated_part(rotary_dim: int, head_dim: int) -> float:
    """Return the partial_rotary_factor of which every reader, by int(head_dim x factor), makes `rotary_dim`."""
    factor = rotary_dim / head_dim
    # A float product can fall short of an integer.
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)


def _wrong_kinds(found: Mapping[str, Any]) -> list[str]:
    """A line for each key whose value is not of the kind in `_KINDS`."""
    return [
        f"{key} = {shown(found[key])}: must be {expected}"
        for expected, test, keys in _KINDS
        for key in keys
        if key in found and not test(found[key])
    ]


def _raise(problems: list[str]) -> None:
    if problems:
        error = ValueError("unsupported config.json: " + listed(problems))
        note_problems(error, problems)
        raise error
