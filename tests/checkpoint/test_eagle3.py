"""Folders of EAGLE3 drafts: names, what is shared with the target, reduced vocabularies, and what is refused."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.drafts import CONFIG, draft

from m3jax.assets import embedded_draft_path, embedded_path
from m3jax.checkpoint import CheckpointError, load_draft, save_draft
from m3jax.checkpoint.draft import draft_config
from m3jax.config import M3Config

VARIANTS = {
    "released": dict(fc_norm=True, norm_output=True, own_embedding=True, own_head=True, num_key_value_heads=4),
    "shared": dict(fc_norm=True, norm_output=True),
    "reduced": dict(draft_vocab_size=40, own_head=True, norm_before_residual=True),
}


def assert_equal(found, expected):
    """Fail where two drafts differ in their configuration or in a parameter."""
    assert found.config == expected.config
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def edit(folder, tensors=None, **config):
    """Change files of a folder: tensors through a function of them, keys of config.json, None to drop one."""
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_is_loaded(tmp_path, name, dtype):
    module = draft(dtype=dtype, **VARIANTS[name])
    save_draft(module, tmp_path)
    assert_equal(load_draft(tmp_path, CONFIG, dtype), module)


def test_names_and_shapes_are_the_hubs(tmp_path):
    """model.md 5.2, at the tiny model's widths: 17 tensors."""
    save_draft(draft(**VARIANTS["released"]), tmp_path)
    width, heads_width, hidden = CONFIG.hidden_size, 4 * 12, 32
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    expected = {f"layers.0.self_attn.{name}_proj.weight": (heads_width, 2 * width) for name in "qkv"}
    expected |= {f"layers.0.{name}.weight": (width,) for name in norms}
    expected |= {f"layers.0.mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
    expected |= {f"fc_norm.{tap}.weight": (width,) for tap in range(3)}
    expected |= {
        "layers.0.self_attn.o_proj.weight": (width, heads_width), "layers.0.mlp.down_proj.weight": (width, hidden),
        "fc.weight": (width, 3 * width), "norm.weight": (width,),
        "embed_tokens.weight": (64, width), "lm_head.weight": (64, width),
    }  # fmt: skip
    assert {name: values.shape for name, values in load_file(tmp_path / "model.safetensors").items()} == expected
    of_engines = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text()).items() >= of_engines.items()
    assert len(expected) == 17


def test_fc_reads_the_low_layer_first(tmp_path):
    """Columns of fc.weight: the first tapped layer's, then the second's, then the third's."""
    module = draft()
    save_draft(module, tmp_path)
    fc = load_file(tmp_path / "model.safetensors")["fc.weight"]
    for tap, columns in enumerate(np.split(fc, 3, axis=1)):
        np.testing.assert_array_equal(columns.T, module.fc[...][tap])


def test_other_spellings(tmp_path):
    """T55: `midlayer.`, a `model.` prefix, a list in `eagle_config`, a `t2d` mask; the heads that Llama leaves out.

    And Llama's options, where they are said to be off.
    """
    module = draft(**VARIANTS["reduced"], num_key_value_heads=4)
    save_draft(module, tmp_path)
    ids = np.asarray(module.target_ids[...])

    def respell(tensors):
        new_name = lambda name: name if name == "d2t" else "model." + name.replace("layers.0.", "midlayer.")
        return {new_name(name): values for name, values in tensors.items()} | {"t2d": np.isin(np.arange(64), ids)}

    edit(tmp_path, respell)
    taps = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    off = dict(attention_bias=False, mlp_bias=False, norm_before_fc=False)
    edit(tmp_path, num_key_value_heads=None, **taps, **off)
    assert_equal(load_draft(tmp_path, CONFIG, "float32"), module)
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["d2t"], ids - np.arange(40))


def test_layers_that_are_not_named_are_vllms(tmp_path):
    """T55: [2, n // 2, n - 3]: of 60 layers 2, 30 and 57, the outputs of the layers 1, 29 and 56 counted from 0."""
    save_draft(draft(), tmp_path)
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    sparse, experts = ("minimax_m3_sparse",) * 60, ("sparse",) * 60
    values = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    target = M3Config(**values | dict(num_hidden_layers=60, layer_types=sparse, mlp_layer_types=experts))
    assert load_draft(tmp_path, target, "float32").config.taps == (2, 30, 57)
    with pytest.raises(ValueError, match="different ones in ascending order"):
        load_draft(tmp_path, CONFIG)


def without(name):
    return lambda tensors: {other: values for other, values in tensors.items() if other != name}


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


@pytest.mark.parametrize(
    ("variant", "tensors", "message"),
    [
        ("shared", without("norm.weight"), r"norm.weight: missing, expected \[48\]"),
        ("shared", without("fc_norm.1.weight"), r"fc_norm.1.weight: missing"),
        ("shared", lambda tensors: tensors | {"more": np.zeros(3)}, r"more: unexpected, found F64 \[3\]"),
        ("shared", changed("fc.weight", lambda x: x[:, :96]), r"expected a float of shape \[48, 144\], found F32 \[48"),
        ("shared", changed("norm.weight", lambda x: x.astype(np.uint8)), r"norm.weight: expected a float"),
        ("reduced", without("d2t"), r"d2t: missing, expected \[40\] integers"),
        ("reduced", changed("d2t", lambda x: x + 30), r"d2t: expected \[40\] offsets to different ids from 0 to 63"),
        ("reduced", changed("d2t", lambda x: x - np.arange(40)), "different ids"),
        ("released", changed("lm_head.weight", lambda x: x[:, :40]), r"lm_head.weight: expected a float of shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, variant, tensors, message):
    save_draft(draft(**VARIANTS[variant]), tmp_path)
    edit(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, CONFIG, "float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(vocab_size=70, draft_vocab_size=70), "vocab_size is 70, the target's 64"),
        (dict(hidden_size=96), "hidden_size is 96, the target's 48"),
        (dict(eagle_aux_hidden_state_layer_ids=[0, 1, 5]), r"after layers \[0, 1, 5\], and the target has 2 layers"),
        (dict(num_hidden_layers=2), "num_hidden_layers = 2: supported is 1"),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu': supported is 'silu'"),
        (dict(norm_before_fc=True), "norm_before_fc = True: supported is False"),
        (dict(attention_bias=True), "attention_bias = True: supported is False"),
        (dict(mlp_bias=True), "mlp_bias = True: supported is False"),
        (dict(sliding_window=4096), "sliding_window = 4096: supported is None"),
        (dict(target_hidden_size=64), "target_hidden_size = 64"),
        (dict(intermediate_size=None), "intermediate_size is missing"),
        (dict(draft_vocab_size=40), "needs a head of the draft's own"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(tmp_path, config, message):
    save_draft(draft(), tmp_path)
    edit(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path, CONFIG)


def test_all_that_is_wrong_is_in_the_notes():
    """The line has the first of many faults; --verbose prints the notes, which have all."""
    wrong = dict(
        hidden_size=0, vocab_size=-1, draft_vocab_size=0, num_attention_heads="8", num_key_value_heads=0, head_dim=True,
        intermediate_size=1.5, rms_norm_eps=-1, rope_theta=0, fc_norm=1, norm_output="yes", norm_before_residual=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="unsupported draft: ") as caught:
        draft_config(wrong, CONFIG, {})
    assert [note.partition(" = ")[0] for note in caught.value.__notes__] == list(wrong)
    missing = "hidden_size is missing; vocab_size is missing; num_attention_heads is missing; intermediate_size is mis"
    with pytest.raises(ValueError, match=f"^unsupported draft: {missing}"):
        draft_config({}, CONFIG, {})


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "none", tmp_path / "file", str(tmp_path / "none")):
        with pytest.raises(CheckpointError, match=r"no config.json; give a folder of an EAGLE3 draft in the hub's"):
            load_draft(path, CONFIG)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_draft(tmp_path, CONFIG)


def test_the_embedded_draft_is_small_and_fits():
    target = M3Config.from_pretrained(embedded_path())
    assert load_draft(None, target).config.taps == (1, 3, 5)
    assert sum(file.stat().st_size for file in embedded_draft_path().iterdir()) < 2 << 20
    with pytest.raises(ValueError, match="hidden_size is 192, the target's 48; its vocab_size is 2048"):
        load_draft(None, CONFIG)
