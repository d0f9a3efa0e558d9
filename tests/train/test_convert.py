"""Conversion: a dense model's own logits, an index branch that alone is trained at first, runs that stop."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny
from support.conversion import QWEN3, dense_model

import m3jax
from m3jax.checkpoint import tree
from m3jax.checkpoint.reader import CheckpointError
from m3jax.config import M3Config
from m3jax.files.tensors import packed
from m3jax.hub import hub_parameters
from m3jax.model import M3, abstract, shardings
from m3jax.parallel import make_mesh
from m3jax.spec import model as definition
from m3jax.train import __main__ as command
from m3jax.train import convert as conversion
from m3jax.train.conversations import Example
from m3jax.train.convert import ConvertSettings, WarmUpLoss, convert, in_words, measure
from m3jax.train.dense import (
    dense_config,
    in_model_units,
    index_weights,
    read_dense,
    read_dense_with_report,
    with_index_weights,
    write_dense,
)
from m3jax.train.documents import load_documents
from m3jax.train.lora import LoraSettings, init_adapters
from m3jax.train.sft import PackedBatches, SFTSettings
from m3jax.train.step import init_state, make_optimizer, train_step
from m3jax.train.units import stream_unit

SMALL = dict(block_size=4, topk_blocks=3)
QUICK = {"xla_backend_optimization_level": 0}
TOKENS = np.random.default_rng(1).integers(0, 64, (2, 32)).astype(np.int32)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_dense(dense_model(), tmp_path / "runs" / "qwen3")
    return tmp_path / "runs" / "qwen3"


# The source


LLAMA = {name: value for name, value in QWEN3.items() if name != "head_dim"} | dict(model_type="llama", hidden_size=64)
SOURCES = {
    "qwen3": ("Qwen3", QWEN3), "qwen3, tied": ("Qwen3", QWEN3 | {"tie_word_embeddings": True}),
    "llama": ("Llama", LLAMA), "llama, every head a KV head": ("Llama", LLAMA | {"num_key_value_heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, data",
    [
        pytest.param(*source, marks=pytest.mark.further if name == "llama, every head a KV head" else (), id=name)
        for name, source in SOURCES.items()
    ],
)
def test_where_every_block_is_selected_the_logits_are_the_sources(tmp_path, kind, data):
    """Transformers' model in float32, with norms that do something; what is written is read there again.

    Of a Llama the heads' lengths differ by token, and M3's norms of heads leave them as they are.
    """
    import transformers
    from support.oracle import torch

    torch.manual_seed(0)
    of_kind = getattr(transformers, f"{kind}ForCausalLM")
    source = of_kind(getattr(transformers, f"{kind}Config")(**data)).eval()
    with torch.no_grad():
        for name, weight in source.named_parameters():
            weight.copy_(0.3 * torch.randn_like(weight) + ("norm" in name))
    source.save_pretrained(tmp_path / "source")
    theirs = source(torch.tensor(TOKENS)).logits.detach().numpy()
    model = read_dense(tmp_path / "source", block_size=4, topk_blocks=8)
    np.testing.assert_allclose(model(TOKENS), theirs, atol=5e-5)
    if kind == "Qwen3":
        few = read_dense(tmp_path / "source", **SMALL)
        assert np.abs(np.asarray(few(TOKENS)) - theirs).max() > 0.1, "nothing is left out"
    dense = read_dense(tmp_path / "source", dense_layers=2)
    if kind == "Llama":  # training may move the norms of heads, which a Llama has not
        dense = with_moved_head_norms(dense)
        theirs = np.asarray(dense(TOKENS))
    write_dense(dense, tmp_path / "written")
    again = of_kind.from_pretrained(tmp_path / "written")
    np.testing.assert_allclose(again(torch.tensor(TOKENS)).logits.detach().numpy(), theirs, atol=1e-4)


def with_moved_head_norms(model: M3) -> M3:
    draw = np.random.default_rng(3)
    factor = lambda name, x: 1 + 0.2 * draw.normal(size=x.shape) if name.endswith(("q_norm", "k_norm")) else 1.0
    leaves = tree.flatten(model).items()
    return tree.replace(model, {name: jnp.asarray(x * factor(name, x), x.dtype) for name, x in leaves})


def test_a_step_on_a_llama_is_adamws_on_the_llamas_own_weights():
    """Though its stream is stored 2**20 times as large: clipped, with weight decay, by optax itself on the source's."""
    random = tiny.model(dense_config(LLAMA, **SMALL))
    model = tree.replace(random, in_model_units(tree.flatten(random), random.config))
    loss = lambda model: jnp.mean(jnp.sin(model(jnp.asarray(TOKENS))) ** 2)
    optimizer = make_optimizer(lambda step: 1e-2, 0.1, clip_norm=0.01)
    state = init_state(model, optimizer)
    ours, metrics = train_step(state, {}, optimizer, lambda model, batch: (loss(model), {}), 0.0)

    # The source's weights: what writes into the stream by 2**20, and heads without norms.
    own = lambda name, x: x / 2**20 if name.endswith(("embed_tokens", "o_proj", "down_proj")) else x
    is_of_heads = lambda name: name.endswith(("q_norm", "k_norm"))
    leaves = {name: own(name, x) for name, x in tree.flatten(model).items()}
    norms = {name: x for name, x in leaves.items() if is_of_heads(name)}
    weights = {name: x for name, x in leaves.items() if name not in norms}
    back = lambda weights: tree.replace(model, in_model_units(weights | norms, model.config))
    decayed = {name: "norm" not in name for name in weights}
    plain = optax.chain(
        optax.clip_by_global_norm(0.01), optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-10, weight_decay=0.1, mask=decayed)
    )  # fmt: skip
    grads = jax.jit(jax.grad(lambda weights: loss(back(weights))), compiler_options=QUICK)(weights)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4)
    assert metrics["grad_norm"] > 0.02, "nothing is clipped"
    updates, _ = plain.update(grads, plain.init(weights), weights)
    for name, x in tree.flatten(ours.model).items():
        if not is_of_heads(name):
            np.testing.assert_allclose(own(name, x), weights[name] + updates[name], atol=2e-5, err_msg=name)


def test_an_eps_above_1_says_that_a_stream_is_in_other_units(unchecked):
    units = [stream_unit(SimpleNamespace(rms_norm_eps=eps)) for eps in (1e-6, 1.0, 1.0001, 1e7)]
    assert units == [1.0, 1.0, 2**20, 2**20]


def test_the_definition_says_what_a_converted_model_computes(folder):
    """With blocks left out, and an MLP whose up is not shifted."""
    model = read_dense(folder, **SMALL)
    params = hub_parameters(model)
    forward = jax.jit(definition.forward, static_argnames="config", compiler_options=QUICK)
    np.testing.assert_allclose(model(TOKENS), forward(params, TOKENS, model.config), atol=2e-5)
    assert M3Config.from_dict(model.config.to_dict()) == model.config
    assert "swiglu_beta" not in M3Config.m3().to_dict()["text_config"], "M3's own file has no such key"


def test_an_index_branch_begins_as_the_mean_of_its_heads(tmp_path):
    """Of one head it is that head, and has nothing to learn; with wider index heads it begins at random."""
    one = dict(num_attention_heads=1, num_key_value_heads=1)
    write_dense(dense_model(**one), tmp_path / "one")
    model = read_dense(tmp_path / "one", **SMALL)
    found = jax.jit(WarmUpLoss(1, "float32"), compiler_options=QUICK)(index_weights(model), batch() | {"base": model})
    np.testing.assert_allclose(found[0], 0.0, atol=1e-6)
    wider = read_dense(tmp_path / "one", index_dim=20, **SMALL)
    assert index_weights(wider)["stacks.0.self_attn.index_k_proj"].std() == pytest.approx(32**-0.5, rel=0.1)
    write_dense(dense_model(), tmp_path / "several")
    leaves = tree.flatten(read_dense(tmp_path / "several", **SMALL))
    q, index_q = (leaves[f"stacks.0.self_attn.{name}_proj"] for name in ("q", "index_q"))
    np.testing.assert_allclose(index_q[:, :, 1], (q[:, :, 2] + q[:, :, 3]) / 2, atol=1e-6)


def test_a_mesh_holds_the_parts_of_one_devices_model(tmp_path):
    """Read from the files, and made here: the branch's first weights, and of a Llama the norms of heads."""
    mesh = make_mesh(data=2, expert=2, tensor=2)
    write_dense(dense_model(), tmp_path / "qwen3")
    random = tiny.model(dense_config(LLAMA, dense_layers=2))
    write_dense(tree.replace(random, in_model_units(tree.flatten(random), random.config)), tmp_path / "llama")
    for name, changes in (("qwen3", {}), ("qwen3", {"index_dim": 20}), ("llama", {})):
        expected, of_one = read_dense_with_report(tmp_path / name, 3, **SMALL, **changes)
        model, report = read_dense_with_report(tmp_path / name, 3, mesh, **SMALL, **changes)
        places = tree.flatten(shardings(model.config, mesh))
        for key, x in tree.flatten(model).items():
            assert x.sharding.is_equivalent_to(places[key], x.ndim), key
            np.testing.assert_allclose(x, tree.flatten(expected)[key], rtol=1e-6, atol=1e-7, err_msg=key)
        (whole,) = of_one.bytes_read.values()
        assert len(report.bytes_read) == 8 and max(report.bytes_read.values()) < 0.5 * whole  # the head over four


OTHERS = {
    "mistral": dict(model_type="mistral"), "qwen2": dict(model_type="qwen2"), "qwen3_moe": dict(model_type="qwen3_moe"),
    "minimax_m3_vl": dict(model_type="minimax_m3_vl"), "None": dict(model_type=None),
}  # fmt: skip
WRONG = {
    "sliding": (dict(use_sliding_window=True, sliding_window=8), "use_sliding_window = True"),
    "bias": (dict(attention_bias=True), "attention_bias = True"),
    "rope": (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope_parameters = .*no scaling"),
    "gelu": (dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "eps": (dict(rms_norm_eps=2.0), "rms_norm_eps = 2.0: must be a number from .+ to 1 in a qwen3"),
    "key": (dict(logit_scale=2.0), "unknown key 'logit_scale'"),
    "missing": (dict(head_dim=None, rms_norm_eps=None), "head_dim is missing; rms_norm_eps is missing"),
    "layers": (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types = .*only 'full_attention'"),
    "text": (dict(num_hidden_layers="2"), "num_hidden_layers = '2': must be a positive integer"),
    "ends": (dict(eos_token_id=["x"]), "eos_token_id = .*must be an integer or a list"),
}


WRONG_LLAMAS = {
    "rope": (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "rope_scaling = "),
    "bias": (dict(mlp_bias=True), "mlp_bias = True is not supported"),
    "window": (dict(sliding_window=8), "sliding_window = 8 is not supported"),
    "eps": (dict(rms_norm_eps=1e-9), "rms_norm_eps = 1e-09: must be a number from 1e-07 to 1 in a llama"),
    "text": (dict(rms_norm_eps="1e-5"), "rms_norm_eps = '1e-5': must be a number"),
    "width": (dict(hidden_size=None), "hidden_size is missing; head_dim is missing"),
}  # fmt: skip


@pytest.mark.parametrize("changes, message", WRONG_LLAMAS.values(), ids=WRONG_LLAMAS)
def test_a_llama_with_what_m3_cannot_compute_is_refused(changes, message):
    assert dense_config(LLAMA | {"pretraining_tp": 1, "mlp_bias": False}).head_dim == 16
    assert dense_config(LLAMA | {"num_key_value_heads": None}).num_key_value_heads == 4
    with pytest.raises(ValueError, match=message):
        dense_config(LLAMA | changes)


def test_adapters_of_what_was_a_llama_are_refused():
    """Their products would be 2**20 times too small where they write into the stream."""
    with pytest.raises(ValueError, match=r"made of a Llama.+: train all its weights"):
        init_adapters(abstract(dense_config(LLAMA), "float32"), LoraSettings(rank=2, alpha=4.0))


@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture_is_refused_by_name(name):
    with pytest.raises(
        ValueError, match=f"model_type = '?{name}'? cannot become an MSA model: .+; give a Qwen3 or a Llama"
    ):
        dense_config(QWEN3 | OTHERS[name])


@pytest.mark.parametrize("changes, message", WRONG.values(), ids=WRONG)
def test_what_m3_cannot_compute_is_refused(changes, message):
    assert dense_config(QWEN3).swiglu_beta == 0
    with pytest.raises(ValueError, match=message):
        dense_config(QWEN3 | changes)


def test_all_tensors_that_do_not_fit_are_named(folder):
    """Missing, unexpected, of another shape, of integers: in one error."""
    _, layers = "ignored", "model.layers.0."
    tensors = {name: np.array(value) for name, value in stored(folder).items()}
    del tensors[f"{layers}self_attn.q_norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors[f"{layers}mlp.up_proj.weight"] = np.zeros((47, 32), np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    (folder / "model.safetensors").write_bytes(packed(tensors))
    with pytest.raises(CheckpointError) as raised:
        read_dense(folder)
    assert sorted(raised.value.problems) == [
        "language_model.lm_head.weight: I32 is not supported; give weights in BF16, F16, F32, F64",
        "language_model.model.layers.0.mlp.up_proj.weight: shape [47, 32], config.json needs [48, 32]",
        "language_model.model.layers.0.self_attn.q_norm.weight is missing",
        "language_model.model.layers.0.self_attn.q_proj.bias: unexpected",
    ]


def test_a_head_is_the_embedding_where_the_source_ties_them_alone(folder):
    """Where it does not, a missing one is missing; a folder is written anew in its place."""
    tensors = {name: np.array(value) for name, value in stored(folder).items() if name != "lm_head.weight"}
    (folder / "model.safetensors").write_bytes(packed(tensors))
    config = json.loads((folder / "config.json").read_text())
    for without in (config, {name: value for name, value in config.items() if name != "tie_word_embeddings"}):
        (folder / "config.json").write_text(json.dumps(without))
        with pytest.raises(CheckpointError) as raised:
            read_dense(folder)
        assert raised.value.problems == ("language_model.lm_head.weight is missing",)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = tree.flatten(read_dense(folder))
    np.testing.assert_array_equal(tied["lm_head"], tied["embed_tokens"])
    write_dense(dense_model(), folder)
    assert json.loads((folder / "config.json").read_text()) == config and "lm_head.weight" in stored(folder)


def stored(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


# The documents


BAD_LINES = {
    "no JSON": ('{"text": ', "no JSON"),
    "no document": ('{"messages": []}', 'write {"text": ...} or {"tokens": [...]}'),
    "no token": ('{"tokens": [1, 64]}', "64 is no token: the model has 0 to 63"),
    "a float": ('{"tokens": [1, 2.5]}', "2.5 is no token"),
    "a boolean": ('{"tokens": [1, true]}', "True is no token"),
    "one token": ('{"tokens": [1]}', "a document has at least two"),
}


@pytest.mark.parametrize("line, message", BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_cannot_be_learnt_is_named(tmp_path, line, message):
    file = tmp_path / "data.jsonl"
    file.write_text('\n{"tokens": [1, 2]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as raised:
        load_documents(file, lambda: None, 64, 8)
    assert f"{file}, line 3: " in str(raised.value) and message in str(raised.value)


def test_a_long_document_is_learnt_in_pieces(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"tokens": [0, 1, 2, 3, 4], "name": "x"}\n', encoding="utf-8")
    assert [piece.tokens.tolist() for piece in load_documents(file, lambda: None, 64, 2)] == [[0, 1], [2, 3], [4]]


def test_a_document_is_a_text_between_its_marks(tmp_path):
    """Those that the tokenizer has, which is made for the first text alone."""
    made, file = [], tmp_path / "data.jsonl"
    file.write_text('{"tokens": [1, 2]}\n{"text": "ab"}\n{"text": "c"}\n', encoding="utf-8")
    for marks, expected in (((7, 9), [[7, 97, 98, 9], [7, 99, 9]]), ((None, 9), [[97, 98, 9], [99, 9]])):
        reader = SimpleNamespace(bos_id=marks[0], eos_id=marks[1], encode=lambda text: [*text.encode()])
        found = load_documents(file, lambda reader=reader: made.append(1) or reader, 100, 8)
        assert [example.tokens.tolist() for example in found] == [[1, 2], *expected]
        assert all(example.is_written.all() and example.tokens.dtype == np.int32 for example in found)
    assert made == [1, 1]


# The loss of the warm-up, and what is measured


CONFIG = tiny.config("dDD", index_topk_blocks=2, index_local_blocks=1)
LENGTHS = (39, 57, 20)
P, J = CONFIG.index_block_size, CONFIG.index_topk_blocks


@cache
def documents() -> tuple[Example, ...]:
    draw = np.random.default_rng(2)
    return tuple(Example(draw.integers(0, 64, n).astype(np.int32), np.ones(n, bool)) for n in LENGTHS)


@cache
def selecting() -> M3:
    return tiny.model(CONFIG)


def attention_of(values: dict[str, np.ndarray]) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(token, group, mean attention of the group's heads over what it sees, the index branch's distribution)."""
    values = {
        name: np.asarray(x, np.float64)[0] for name, x in values.items() if name in ("q", "k", "index_q", "index_k")
    }
    softmax = lambda scores: np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    num_heads, groups, width = values["q"].shape[1], values["k"].shape[1], values["q"].shape[2]
    for t in range(len(values["q"])):
        for g in range(groups):
            heads = values["q"][t, g * (num_heads // groups) : (g + 1) * (num_heads // groups)]
            teacher = np.mean([softmax(values["k"][: t + 1, g] @ q / np.sqrt(width)) for q in heads], axis=0)
            scores = values["index_k"][: t + 1] @ values["index_q"][t, g]
            yield t, g, teacher, softmax(scores / np.sqrt(values["index_k"].shape[-1]))


@cache
def alone(is_dense: bool) -> list[list[dict[str, np.ndarray]]]:
    """The named values of the layers with an index branch, of each document computed by itself."""
    run = jax.jit(
        lambda model, tokens, lengths: model.intermediates(tokens, lengths=lengths)["layers"][1:],
        compiler_options=QUICK,
    )
    cut = lambda x, n: np.asarray(x)[:, :n] if x.shape[1] == 64 else np.asarray(x)[:, :, :n]
    out = []
    for document in documents():
        n = len(document.tokens)
        padded = np.zeros((1, 64), np.int32)
        padded[0, :n] = document.tokens
        layers = run(selecting().with_dense(is_dense), padded, np.array([n], np.int32))
        names = ("q", "k", "index_q", "index_k", "blocks")
        out.append([{name: cut(layer[name], n) for name in names if name in layer} for layer in layers])
    return out


def batch() -> dict[str, np.ndarray]:
    settings = SFTSettings(steps=1, length=128, rows=1)
    found = PackedBatches(documents(), settings, P)[0]
    assert (found["positions"] == 0).sum() == 3 and found["tokens"].shape == (1, 1, 128)
    return {name: x[0] if np.ndim(x) == 3 else x for name, x in found.items()} | {"step": jnp.int32(0)}


def test_the_warm_up_is_the_divergence_from_each_documents_own_attention():
    """T29: in packed rows, over the whole document up to the query, mean over layers, tokens and heads."""
    wanted = [
        np.sum(teacher * np.log(teacher / student))
        for layers in alone(True)
        for layer in layers
        for _, _, teacher, student in attention_of(layer)
    ]
    loss = WarmUpLoss(index_stride=1, compute_dtype="float32")
    found, parts = jax.jit(loss, compiler_options=QUICK)(index_weights(selecting()), batch() | {"base": selecting()})
    np.testing.assert_allclose([found, parts["kl"]], np.mean(wanted), rtol=1e-5)


@pytest.mark.further  # of the loss beneath it: test_losses.py
def test_the_gradient_of_the_warm_up_is_the_index_branchs():
    """In float64 against differences; of the model beneath it, through which it reads, it is exactly zero (T33)."""
    with jax.enable_x64(True):
        config = replace(CONFIG, num_hidden_layers=1, layer_types=CONFIG.layer_types[1:2],
                         mlp_layer_types=CONFIG.mlp_layer_types[1:2])  # fmt: skip
        model = tiny.model(config, dtype="float64")
        loss = WarmUpLoss(index_stride=4, compute_dtype="float64")
        rest = jax.tree.map(jnp.asarray, batch())
        fn = lambda weights, base: loss(weights, rest | {"base": base})[0]
        weights = index_weights(model)
        assert sorted(name.rpartition(".")[2] for name in weights) == [
            "index_k_norm", "index_k_proj", "index_q_norm", "index_q_proj",
        ]  # fmt: skip
        of_weights, of_model = jax.jit(jax.grad(fn, argnums=(0, 1)), compiler_options=QUICK)(weights, model)
        draw, value = np.random.default_rng(0), jax.jit(fn, compiler_options=QUICK)
        step = {name: 1e-5 * draw.normal(size=x.shape) for name, x in weights.items()}
        for name in weights:  # each by itself: a gradient that is right in sum could be wrong in parts
            up, down = (value(weights | {name: weights[name] + sign * step[name]}, model) for sign in (1, -1))
            np.testing.assert_allclose(np.sum(of_weights[name] * step[name]), (up - down) / 2, rtol=1e-6, err_msg=name)
        assert not any(np.any(x) for x in jax.tree.leaves(of_model))


def test_what_selection_catches_is_attentions_mass_in_the_chosen_blocks():
    """Of queries that leave a block out; beside it the same budget's last blocks. Losses with and without selection.

    Four documents in three rows, of which two are computed at a time.
    """
    caught, window = np.zeros((2, 2)), 0
    for layers in [*alone(False), alone(False)[1]]:
        for i, layer in enumerate(layers):
            for t, g, teacher, _ in attention_of(layer):
                if t // P < J:
                    continue
                key_blocks = np.arange(t + 1) // P
                chosen = np.isin(key_blocks, layer["blocks"][0, g, t])
                caught[i] += teacher[chosen].sum(), 1
                window += teacher[key_blocks > t // P - J].sum()
    found = measure(selecting(), [*documents(), documents()[1]], 64, 2)
    np.testing.assert_allclose(found["caught"], caught[:, 0] / caught[:, 1], rtol=1e-4)
    np.testing.assert_allclose(np.sum(found["by_window"]), window / caught[0, 1], rtol=1e-4)
    assert found["loss"] != found["dense_loss"]
    few = [Example(document.tokens[: J * P], document.is_written[: J * P]) for document in documents()[:2]]
    assert measure(selecting(), few, 64, 2)["caught"] is None, "no token has more than J blocks"


def test_what_was_measured_in_words():
    found = dict(dense_loss=0.8, loss=1.2, caught=[0.25, 0.5], by_window=[0.25, 0.125])
    said = "loss 1.2000, dense 0.8000; 37.5% of attention in the selected blocks, 18.8% in the last ones"
    assert in_words(found) == said
    nothing = dict(dense_loss=0.8, loss=1.2, caught=None, by_window=None)
    assert in_words(nothing) == "loss 1.2000, dense 0.8000; no held-out query leaves a block out"


# Runs


SHARED = dict(length=64, rows=1, compute_dtype="float32", remat=False, weight_decay=0.1)
SETTINGS = ConvertSettings(
    warm_up=SFTSettings(steps=2, learning_rate=1e-2, **SHARED),
    sparse=SFTSettings(steps=2, learning_rate=1e-2, index_loss=1.0, **SHARED),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_optimizer(monkeypatch):
    """Runs share their optimisers, so that a step is compiled once."""
    monkeypatch.setattr(conversion, "make_optimizer", lambda rate, decay, **how: _optimizer(decay, **how))


@cache
def _optimizer(decay: float, **how):
    return make_optimizer(lambda step: 1e-2, decay, **how)


def run(folder: Path, stop_at: tuple[str, int] | None = None, settings: ConvertSettings = SETTINGS):
    """Convert a model of two layers; at a step of a phase Ctrl-C comes."""

    class Stopping(PackedBatches):
        def __init__(self, examples, settings, block_size):
            super().__init__(examples, settings, block_size)
            self.phase = ("warm-up", "sparse")[settings.index_loss > 0]

        def __getitem__(self, step):
            if stop_at == (self.phase, step):
                raise KeyboardInterrupt
            return super().__getitem__(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "PackedBatches", Stopping)
        metrics = folder / "metrics.jsonl"
        return convert(start(), documents(), documents()[:1], settings, folder, metrics, say=lambda text: None)


@cache
def start() -> M3:
    """What the command makes of `folder`, so that they share their programs."""
    with tempfile.TemporaryDirectory() as folder:
        write_dense(dense_model(), folder)
        return read_dense(folder, block_size=4, topk_blocks=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "make_optimizer", lambda rate, decay, **how: _optimizer(decay, **how))
        return *run(folder), lines_of(folder)


def lines_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: x for name, x in line.items() if name != "seconds"} for line in lines]


def test_the_warm_up_moves_the_index_branch_and_nothing_else(whole, tmp_path):
    """To the bit: the dense loss is as before; the phase with selection then moves all of it."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop_at=("sparse", 0))
    model, report, lines = whole
    assert report["before"]["dense_loss"] == report["after_warm_up"]["dense_loss"] != report["after"]["dense_loss"]
    assert report["before"]["caught"] != report["after_warm_up"]["caught"]
    assert [(line["step"], line["phase"]) for line in lines] == [
        (1, "warm-up"), (2, "warm-up"), (3, "sparse"), (4, "sparse")
    ]  # fmt: skip
    assert lines[0]["kl"] == lines[0]["loss"] and lines[2]["loss"] != lines[2]["kl"]
    moved = [name for name, x in tree.flatten(model).items() if not np.array_equal(x, tree.flatten(start())[name])]
    assert sorted(moved) == sorted(tree.flatten(start()))


@pytest.mark.parametrize("stop_at", [("warm-up", 1), ("sparse", 1)], ids=lambda where: where[0])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(whole, tmp_path, monkeypatch, stop_at):
    """The same weights and lines, to the bit; lines of the second phase stay where the first is whole."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop_at=stop_at)
    model, report = run(tmp_path)
    assert (report, lines_of(tmp_path)) == whole[1:]
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(whole[0]), strict=True):
        np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(conversion, "measure", None)  # it is refused before anything is computed
    with pytest.raises(ValueError, match=r"has a run with learning_rate = 0.01: give the same"):
        run(tmp_path, settings=replace(SETTINGS, warm_up=replace(SETTINGS.warm_up, learning_rate=0.5)))


def test_a_frozen_index_branch_stays_as_the_warm_up_left_it(tmp_path):
    """T32: to the bit, though weights decay; the model moves."""
    frozen = replace(SETTINGS, sparse=replace(SETTINGS.sparse, index_loss=0.0))
    model, _ = run(tmp_path, settings=frozen)
    warmed = tmp_path / "warmed"
    with pytest.raises(KeyboardInterrupt):
        run(warmed, stop_at=("sparse", 0))
    before = start()
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "init_state", lambda model, optimizer: seen.setdefault("model", model) and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(warmed)
    index = index_weights(seen["model"])
    for name, x in tree.flatten(model).items():
        if name in index:
            np.testing.assert_array_equal(x, index[name], err_msg=name)
        else:
            assert not np.array_equal(x, tree.flatten(before)[name]), name
    kept = with_index_weights(before, index_weights(seen["model"]))
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(seen["model"]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_command_writes_a_model_that_everything_loads(folder, tmp_path, capsys):
    """From a Qwen3's folder and lines of tokens to an MSA model, its report and its metrics."""
    data, out = tmp_path / "data.jsonl", tmp_path / "run"
    lines = [json.dumps({"tokens": document.tokens.tolist()}) for document in documents()]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["convert", "--model", str(folder), "--data", str(data), "--out", str(out), "--steps", "2", "--block-size",
             "4", "--topk-blocks", "2", "--length", "64", "--dtype", "float32", "--no-remat",
             "--weight-decay", "0.1"]  # fmt: skip
    assert command.main(words) == 0
    assert "held out: loss " in capsys.readouterr().err
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert set(report) == {"before", "after_warm_up", "after"} and len(report["after"]["caught"]) == 2
    model = m3jax.load(out / "model", dtype="float32")
    assert model.config.index_topk_blocks == 2 and model.config.swiglu_beta == 0
    found = measure(model, [documents()[2]], 64, 1)
    np.testing.assert_allclose(found["loss"], report["after"]["loss"], rtol=1e-6)
    for change, message in {
        ("--length", "62"): "length = 62: must be a multiple of the model's block size, 4",
        ("--length", "8"): "rows of 8 tokens: a query reads up to 8 of them",
        ("--steps", "1"): "--steps 1: must be at least 2",
        ("--warm-up-steps", "2"): "--warm-up-steps 2: must be from 1 to 1",
        ("--warm-up-steps", "0"): "--warm-up-steps 0: must be from 1 to 1",
        ("--save-every", "0"): "--save-every 0: must be at least 1",
        ("--keep-products",): "--no-remat keeps all activations",
        ("--held-out", "3"): "--held-out 3: the data is 3 documents",
        ("--held-out", "0"): "--held-out 0: the data is 3 documents",
        ("--length", "256"): "--length 256: the model's context is 128 tokens",
        ("--data", "none.jsonl"): "--data none.jsonl: no such file",
        ("--model", str(tmp_path / "none")): "no such folder",
        ("--dense-layers", "2"): "no layer of this model selects blocks",
    }.items():
        assert command.main([*words, *change, "--out", str(tmp_path / "other")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
