"""config.json in all its forms: read, refused with the key's name, and written back."""

import copy
import dataclasses
import json
import math
import re
import tracemalloc
from typing import Any

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import tiny

from m3jax import M3Config
from m3jax import model as m3_model

FULL, SPARSE = tiny.FULL, tiny.SPARSE
FREQ = [0] * 3 + [1] * 57

# What the hub's file holds, key by key (MiniMaxAI/MiniMax-M3).
HUB: dict[str, Any] = dict(
    architectures=["MiniMaxM3SparseForConditionalGeneration"],
    auto_map={"AutoConfig": "configuration_minimax_m3_vl.MiniMaxM3VLConfig"},
    model_type="minimax_m3_vl", torch_dtype="bfloat16", transformers_version="4.52.4",
    image_token_index=200025, video_token_index=200026, image_seq_length=576,
    projector_hidden_size=6144, projector_hidden_act="gelu", multimodal_projector_bias=True,
    vision_feature_layer=-1, vision_feature_select_strategy="full", process_image_mode="dynamic_res",
    num_reward_heads=0, image_grid_pinpoints="[(336, 336)]",
    img_token_compression_config=dict(
        image_token_compression_method="patch_merge", spatial_merge_size=2, temporal_patch_size=2
    ),
    text_config=dict(
        architectures=["MiniMaxM3SparseForCausalLM"], hidden_size=6144, num_hidden_layers=60,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=200064,
        max_position_embeddings=1048576, rms_norm_eps=1e-06, use_gemma_norm=True,
        attention_output_gate=False, rope_theta=5000000, rotary_dim=64, partial_rotary_factor=0.5,
        hidden_act="swigluoai", swiglu_alpha=1.702, swiglu_limit=7.0, use_qk_norm=True,
        qk_norm_type="per_head", tie_word_embeddings=False, intermediate_size=3072,
        shared_intermediate_size=3072, dense_intermediate_size=12288, num_local_experts=128,
        num_experts_per_tok=4, n_shared_experts=1, scoring_func="sigmoid", use_routing_bias=True,
        routed_scaling_factor=2.0, moe_layer_freq=FREQ, num_mtp_modules=7, num_nextn_predict_layers=1,
        sparse_attention_config=dict(
            use_sparse_attention=True, sparse_index_dim=128, sparse_num_index_heads=4,
            sparse_topk_blocks=16, sparse_block_size=128, sparse_score_type="max",
            sparse_init_block=0, sparse_local_block=1, sparse_attention_freq=FREQ,
            sparse_disable_index_value=FREQ,
        ),
    ),
    vision_config=dict(
        hidden_size=1280, num_attention_heads=16, num_hidden_layers=32, intermediate_size=5120,
        patch_size=14, image_size=2016, model_type="clip_vision_model", rope_mode="3d",
    ),
)  # fmt: skip

# The same text model as transformers writes it: flat.
FLAT: dict[str, Any] = dict(
    architectures=["MiniMaxM3VLForCausalLM"], model_type="minimax_m3_vl_text", dtype="bfloat16",
    transformers_version="5.23.0", attention_dropout=0.0, bos_token_id=200034, eos_token_id=200020,
    pad_token_id=None, hidden_size=6144, num_hidden_layers=60, num_attention_heads=64,
    num_key_value_heads=4, head_dim=128, vocab_size=200064, max_position_embeddings=1048576,
    rms_norm_eps=1e-06, hidden_act="silu", initializer_range=0.02, intermediate_size=3072,
    shared_intermediate_size=3072, dense_intermediate_size=12288, num_local_experts=128,
    num_experts_per_tok=4, output_router_logits=False, router_aux_loss_coef=0.001,
    router_jitter_noise=0.0, routed_scaling_factor=2.0, rotary_dim=64, swiglu_alpha=1.702,
    swiglu_limit=7.0, tie_word_embeddings=False, use_cache=True, index_n_heads=4, index_head_dim=128,
    index_block_size=128, index_topk_blocks=16, index_local_blocks=1,
    layer_types=[FULL] * 3 + [SPARSE] * 57, mlp_layer_types=["dense"] * 3 + ["sparse"] * 57,
    rope_parameters=dict(rope_type="default", rope_theta=5000000.0, partial_rotary_factor=0.5),
)  # fmt: skip


def edited(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `data` with the value at a dotted path set, or removed where it is `...`."""
    changed = copy.deepcopy(data)
    *parents, key = path.split(".")
    inner = changed
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[key]
    else:
        inner[key] = value
    return changed


# The three forms


@pytest.mark.parametrize("data", [HUB, FLAT, HUB["text_config"]], ids=["hub", "flat", "text-only"])
def test_every_form_is_the_full_model(data):
    assert M3Config.from_dict(data) == M3Config.m3()


def test_the_full_model():
    c = M3Config.m3()
    assert (c.hidden_size, c.num_hidden_layers, c.vocab_size, c.max_position_embeddings) == (6144, 60, 200064, 1 << 20)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rotary_dim) == (64, 4, 128, 64)
    assert (c.index_n_heads, c.index_head_dim, c.index_block_size, c.index_topk_blocks) == (4, 128, 128, 16)
    assert (c.index_local_blocks, c.index_init_blocks, c.index_score_type) == (1, 0, "max")
    assert (c.num_local_experts, c.num_experts_per_tok, c.routed_scaling_factor) == (128, 4, 2.0)
    assert (c.intermediate_size, c.shared_intermediate_size, c.dense_intermediate_size) == (3072, 3072, 12288)
    assert (c.rope_theta, c.rms_norm_eps, c.swiglu_alpha, c.swiglu_limit) == (5e6, 1e-6, 1.702, 7.0)
    assert (c.bos_token_id, c.eos_token_id) == (200034, (200020,))
    assert c.stacks == ((0, 3, FULL, "dense"), (3, 57, SPARSE, "sparse"))


def test_parameters_of_the_full_model():
    leaves = jax.tree.leaves(m3_model.abstract(M3Config.m3()))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == 426_174_572_928


def test_the_rest_of_the_file_is_kept():
    config = M3Config.from_dict(HUB)
    assert config.vision_config == HUB["vision_config"]
    written = config.to_dict()
    kept = set(HUB) - {"text_config", "vision_config"}
    assert {key: written[key] for key in kept} == {key: HUB[key] for key in kept}
    assert written["vision_config"] == HUB["vision_config"]
    assert M3Config.from_dict(FLAT).vision_config is None


def test_written_text_config_is_the_hub_s():
    """A written config holds all keys that a reader of the hub's file looks for, with its values."""
    written, hub = M3Config.from_dict(HUB).to_dict()["text_config"], HUB["text_config"]
    implied = {
        "architectures", "use_gemma_norm", "attention_output_gate", "use_qk_norm", "qk_norm_type",
        "tie_word_embeddings", "n_shared_experts", "scoring_func", "use_routing_bias", "num_mtp_modules",
        "num_nextn_predict_layers",
    }  # fmt: skip
    written_out = set(hub) - implied
    assert {key: written[key] for key in written_out} == {key: hub[key] for key in written_out}
    # transformers takes the width of the rotation from here alone.
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.5


# There and back


@st.composite
def fields(draw) -> dict[str, Any]:
    """The fields of any valid config: not a config, to check which beartype draws numbers that hypothesis forbids."""
    small = st.integers(1, 6)
    layers = draw(small)
    kv_heads, head_dim = draw(small), draw(st.integers(2, 96))
    experts, top_k = draw(small), draw(st.integers(2, 9))
    init = draw(st.integers(0, top_k - 1))
    positive = st.floats(1e-8, 1e8, allow_subnormal=False)
    pick = lambda *kinds: tuple(draw(st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers)))
    return dict(
        vocab_size=50, hidden_size=draw(small), num_hidden_layers=layers,
        num_attention_heads=kv_heads * draw(small), num_key_value_heads=kv_heads, head_dim=head_dim,
        intermediate_size=draw(small), dense_intermediate_size=draw(small), shared_intermediate_size=draw(small),
        num_local_experts=experts, num_experts_per_tok=draw(st.integers(1, experts)),
        layer_types=pick(FULL, SPARSE), mlp_layer_types=pick("dense", "sparse"),
        rotary_dim=2 * draw(st.integers(1, head_dim // 2)), index_n_heads=kv_heads,
        index_head_dim=head_dim + draw(st.integers(0, 9)), index_block_size=draw(small), index_topk_blocks=top_k,
        index_local_blocks=draw(st.integers(1, top_k - init)), index_init_blocks=init,
        index_score_type=draw(st.sampled_from(["max", "lse"])), routed_scaling_factor=draw(positive),
        rms_norm_eps=draw(positive), rope_theta=draw(positive), swiglu_alpha=draw(positive),
        swiglu_limit=draw(positive), max_position_embeddings=draw(small),
        bos_token_id=draw(st.none() | st.integers(0, 49)),
        eos_token_id=tuple(draw(st.lists(st.integers(0, 49), max_size=3))),
    )  # fmt: skip


@given(fields())
def test_what_is_written_is_read_back(fields):
    config = M3Config(**fields)
    written = json.loads(json.dumps(config.to_dict()))
    again = M3Config.from_dict(written)
    assert again == config and hash(again) == hash(config)
    assert M3Config.from_dict(written["text_config"]) == config
    assert again.to_dict() == written


@given(fields())
def test_stacks_are_runs_of_equal_layers(fields):
    config = M3Config(**fields)
    kinds = [(stack.attention, stack.mlp) for stack in config.stacks for _ in range(stack.num_layers)]
    assert kinds == list(zip(config.layer_types, config.mlp_layer_types, strict=True))
    ends = [stack.first_layer + stack.num_layers for stack in config.stacks]
    assert [stack.first_layer for stack in config.stacks] == [0, *ends[:-1]] and ends[-1] == config.num_hidden_layers
    neighbours = zip(config.stacks, config.stacks[1:], strict=False)
    assert all((above.attention, above.mlp) != (below.attention, below.mlp) for below, above in neighbours)


@given(fields())
@example(vars(tiny.config(head_dim=44, index_head_dim=44, rotary_dim=30)))
def test_transformers_rotates_the_same_width(fields):
    """It takes int(head_dim x partial_rotary_factor), and float products fall short of integers."""
    config = M3Config(**fields)
    rope = config.to_dict()["text_config"]["rope_parameters"]
    assert int(config.head_dim * rope["partial_rotary_factor"]) == config.rotary_dim


def test_saved_and_loaded(tmp_path):
    config = M3Config.from_dict(HUB)
    for _ in range(2):  # into a folder that is made, and into one that is there
        config.save_pretrained(tmp_path / "new" / "folder")
    text = (tmp_path / "new" / "folder" / "config.json").read_text(encoding="utf-8")
    assert text == json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"
    again = M3Config.from_pretrained(tmp_path / "new" / "folder")
    assert again == config and again.vision_config == config.vision_config
    assert again.extra == config.extra


def test_quantization_is_not_written():
    """Weights are written dequantised."""
    config = M3Config.from_dict(HUB | {"quantization_config": {"quant_method": "mxfp8"}})
    assert config == M3Config.m3() and "quantization_config" not in config.to_dict()


# What would be another model is refused by name

TEXT, SPARSE_CONFIG = "text_config.", "text_config.sparse_attention_config."
REFUSED = {
    TEXT + "attention_output_gate": True,
    TEXT + "attention_bias": True,
    TEXT + "use_gemma_norm": False,
    TEXT + "use_qk_norm": False,
    TEXT + "qk_norm_type": "per_layer",
    TEXT + "hidden_act": "gelu",
    TEXT + "swiglu_beta": 2.0,
    TEXT + "tie_word_embeddings": True,
    TEXT + "scoring_func": "softmax",
    TEXT + "use_routing_bias": False,
    TEXT + "norm_topk_prob": False,
    TEXT + "n_shared_experts": 2,
    TEXT + "n_group": 8,
    TEXT + "topk_group": 4,
    TEXT + "rope_scaling": {"type": "yarn", "factor": 4.0},
    TEXT + "sliding_window": 4096,
    TEXT + "use_index_cache": True,
    TEXT + "index_topk_freq": 4,
    TEXT + "logit_softcap": 30.0,
    TEXT + "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
    SPARSE_CONFIG + "use_sparse_attention": False,
    SPARSE_CONFIG + "sparse_score_type": "mean",
    SPARSE_CONFIG + "sparse_num_index_heads": 1,
    SPARSE_CONFIG + "sparse_disable_index_value": [0] * 60,
    SPARSE_CONFIG + "sparse_local_tokens": 128,
    SPARSE_CONFIG + "sparse_local_block": 0,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("path", REFUSED)
def test_refused_by_name(path):
    with pytest.raises(ValueError, match=re.escape(path.split(".")[-1])):
        M3Config.from_dict(edited(HUB, path, REFUSED[path]))


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("rotary_dim", 32, "rotary_dim and partial_rotary_factor"),
        ("partial_rotary_factor", 1.0, "rotary_dim and partial_rotary_factor"),
        ("rope_parameters", dict(partial_rotary_factor=0.25), "partial_rotary_factor"),
        ("rope_parameters", dict(rope_theta=1e4), "rope_theta and rope_parameters.rope_theta disagree"),
        ("layer_types", [FULL] * 60, "layer_types and its frequency list disagree"),
        ("mlp_layer_types", ["dense"] * 60, "mlp_layer_types and its frequency list disagree"),
        ("num_hidden_layers", 61, "61 layers"),
        ("moe_layer_freq", [1] * 59, "frequency list of mlp_layer_types has 59 entries for 60 layers"),
        ("sparse_attention_config.sparse_attention_freq", [1] * 61, "layer_types has 61 entries"),
        ("sparse_attention_config.sparse_disable_index_value", [], "sparse_disable_index_value has 0 entries"),
        ("sparse_attention_config.sparse_init_block", 16, "index_init_blocks = 17 forced blocks do not fit"),
        ("num_attention_heads", 66, "num_attention_heads = 66 .* num_key_value_heads = 4"),
        ("num_experts_per_tok", 129, "num_experts_per_tok = 129 of only 128 experts"),
        ("num_key_value_heads", 8, "index_n_heads .* = 4: there is one index head per KV head"),
        ("eos_token_id", 200064, r"eos_token_id = \[200064\]: outside the vocabulary"),
        ("bos_token_id", -1, "bos_token_id = -1"),
    ],
)
def test_contradictions_are_refused(path, value, message):
    with pytest.raises(ValueError, match=message):
        M3Config.from_dict(edited(HUB, TEXT + path, value))


def test_a_rotated_width_on_which_engines_differ_is_refused():
    """Without a factor transformers rotates whole heads whatever rotary_dim says, SGLang as many dims as it says."""
    data = edited(FLAT, "rope_parameters.partial_rotary_factor", ...)
    with pytest.raises(ValueError, match="rotary_dim = 64 and head_dim = 128 without partial_rotary_factor") as caught:
        M3Config.from_dict(data)
    assert "write rotary_dim = 128 if" in str(caught.value) and "partial_rotary_factor = 0.5 if" in str(caught.value)
    assert M3Config.from_dict({**data, "rotary_dim": 128}).rotary_dim == 128  # all of it in either engine
    assert M3Config.from_dict({**data, "partial_rotary_factor": 0.5}) == M3Config.m3()


@pytest.mark.parametrize(
    "path",
    ["hidden_size", "head_dim", "vocab_size", "num_hidden_layers", "moe_layer_freq", "num_local_experts"],
)
def test_missing_keys_are_named(path):
    with pytest.raises(ValueError, match=f"{path.replace('moe_layer_freq', 'mlp_layer_types')}.* missing"):
        M3Config.from_dict(edited(HUB, TEXT + path, ...))


def test_all_faults_come_in_one_error():
    data = edited(edited(HUB, TEXT + "swiglu_beta", 2.0), TEXT + "hidden_size", ...)
    with pytest.raises(ValueError, match=r"swiglu_beta = 2.0 .*hidden_size is missing"):
        M3Config.from_dict(data)


@pytest.mark.parametrize(
    "path, value",
    [
        ("hidden_size", "6144"),
        ("num_hidden_layers", "60"),
        ("vocab_size", None),
        ("num_attention_heads", 64.0),
        ("head_dim", True),
        ("index_block_size", 0),
        ("intermediate_size", -3072),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", -1.0),
        ("swiglu_limit", None),
        ("swiglu_alpha", math.nan),
        ("routed_scaling_factor", math.inf),
        ("rope_theta", "5000000"),
        ("rope_theta", 0),
        ("rotary_dim", "64"),
        ("partial_rotary_factor", "half"),
        ("layer_types", "full_attention"),
        ("layer_types", [SPARSE] * 59 + ["linear"]),
        ("moe_layer_freq", 1),
        ("eos_token_id", "[e~["),
        ("sparse_attention_config", [1]),
        ("rope_parameters", "default"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(path, value, unchecked):
    data = FLAT if path in FLAT else HUB["text_config"]
    with pytest.raises(ValueError, match=path):
        M3Config.from_dict(edited(data, path, value))


@pytest.mark.parametrize("data", [None, [], "config"])
def test_a_config_is_an_object(data, unchecked):
    with pytest.raises(ValueError, match="a config is a JSON object"):
        M3Config.from_dict(data)
    with pytest.raises(ValueError, match="text_config is a JSON object"):
        M3Config.from_dict({"text_config": data})


def test_an_index_of_other_heads_is_allowed_where_nothing_is_sparse():
    config = tiny.config("dm", index_n_heads=1)
    assert M3Config.from_dict(config.to_dict()) == config


def test_index_value_flags_of_dense_layers_do_not_matter():
    data = edited(HUB, SPARSE_CONFIG + "sparse_disable_index_value", [1] * 60)
    assert M3Config.from_dict(data) == M3Config.m3()


def test_a_config_is_frozen_and_static():
    config = M3Config.from_dict(HUB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    assert hash(config) == hash(M3Config.m3())


# Folders


def test_folders_that_are_none(tmp_path, unchecked):
    with pytest.raises(ValueError, match=r"no such model folder: .*nowhere"):
        M3Config.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no such model folder: .*: hf download An-Org/M_3.1 --local-dir M_3\.1$"):
        M3Config.from_pretrained("An-Org/M_3.1")
    for name in ("nowhere", "a/b/c", "../b", "a/ b", "/b", "a/", "a/;b"):
        with pytest.raises(ValueError, match=r"holds config\.json$"):
            M3Config.from_pretrained(name)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        M3Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        M3Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        M3Config.from_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="a config is a JSON object"):
        M3Config.from_pretrained(tmp_path)


def test_every_error_of_a_file_begins_with_its_path(tmp_path, unchecked):
    for data in ({"hidden_size": "x"}, {}, edited(HUB, TEXT + "swiglu_beta", 2.0), edited(HUB, TEXT + "head_dim", 0)):
        (tmp_path / "config.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match="^" + re.escape(str(tmp_path / "config.json")) + ": unsupported"):
            M3Config.from_pretrained(tmp_path)


@pytest.mark.parametrize("where", ["", TEXT], ids=["top", "text_config"])
@pytest.mark.parametrize("name", ["llama", "", 3, ["minimax_m3_vl"], "minimax_m2"])
def test_another_model_type_is_refused_with_those_that_are_not(where, name, unchecked):
    with pytest.raises(ValueError, match=r"model_type = .* \(only 'minimax_m3_vl' or 'minimax_m3_vl_text' or None\)"):
        M3Config.from_dict(edited(HUB, where + "model_type", name))
    with pytest.raises(ValueError, match="model_type"):
        M3Config.from_dict(FLAT | {"model_type": name})


TOO_LARGE = {
    "hidden_size": 2**31, "num_hidden_layers": 10**30, "vocab_size": 10**400, "rope_theta": 1e39, "rotary_dim": 2**31,
    "rms_norm_eps": 1e-39, "swiglu_limit": 10**400, "routed_scaling_factor": 1e308, "eos_token_id": [1] * 5000,
    "bos_token_id": 10**30, "partial_rotary_factor": 10**60, "max_position_embeddings": 2**31,
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_number_that_no_model_has_is_refused_by_name(name, unchecked):
    with pytest.raises(ValueError, match=rf"{name} = [^;]*: must be ") as caught:
        M3Config.from_dict(FLAT | {name: TOO_LARGE[name]})
    assert len(str(caught.value)) < 400


def test_layers_that_no_list_has_cost_nothing():
    """The lists of kinds are compared with the number of layers before anything is made for each."""
    data = edited(edited(HUB, TEXT + "num_hidden_layers", 2**31 - 1), SPARSE_CONFIG + "sparse_disable_index_value", ...)
    tracemalloc.start()
    with pytest.raises(ValueError, match="60 entries for 2147483647 layers"):
        M3Config.from_dict(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes were allocated"


def test_an_eos_beside_the_text_config_is_checked_too(unchecked):
    for value in ("[e~[", 1.5, {"a": 1}, [None], 2**31):
        with pytest.raises(ValueError, match="eos_token_id = "):
            M3Config.from_dict(HUB | {"eos_token_id": value})
    with pytest.raises(ValueError, match=r"vision_config = \[1\]: must be an object"):
        M3Config.from_dict(HUB | {"vision_config": [1]})


def test_many_faults_are_eight_and_a_number_and_all_of_them_in_the_notes():
    data = HUB["text_config"] | {f"unknown\x1b{i:03}": i for i in range(100)}
    with pytest.raises(ValueError) as caught:
        M3Config.from_dict(data)
    text = str(caught.value)
    assert text.endswith("; and 92 more") and text.isprintable() and len(text) < 2000
    assert len(caught.value.__notes__) == 100
    assert caught.value.__notes__[99].startswith(r"unknown key 'unknown\x1b099': remove it")


def test_what_a_configuration_is_where_nobody_says_it():
    """The defaults of fields are M3's published values, but for the ids of its tokenizer."""
    fields = {each.name: each.default for each in dataclasses.fields(M3Config) if each.name not in ("extra",)}
    given = {name: value for name, value in fields.items() if value is not dataclasses.MISSING}
    assert given.pop("bos_token_id") is None and given.pop("eos_token_id") == () and given.pop("vision_config") is None
    assert given == {name: getattr(M3Config.m3(), name) for name in given} and len(given) == 12
