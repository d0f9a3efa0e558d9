"""What a live run hands to a model and takes from it, with no model: fakes in the place of PyTorch and transformers."""

import contextlib
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from m3jax.compare import live

CONFIG = tiny.config("d", max_position_embeddings=9)
PROMPTS = [[5, 9, 4], [8]]


class Tensor:
    """An array with what the hooks ask of PyTorch's tensors."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = np.asarray(array), np.shape(array), "torch.float32"

    def detach(self):
        return self

    def transpose(self, one, other):
        return Tensor(self.array.swapaxes(one, other))

    def numpy(self):
        return self.array


class Module:
    """A module of PyTorch as far as hooks go; a subclass says in `forward` what it computes."""

    def __init__(self, modeling=None):
        self.modeling, self.hooks = modeling, []

    def register_forward_hook(self, hook, with_kwargs):
        assert with_kwargs
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    def __call__(self, *args, **kwargs):
        output = self.forward(*args, **kwargs)
        for hook in self.hooks:
            hook(self, args, kwargs, output)
        return output


class Projection(Module):
    def forward(self, x):
        return Tensor(x.array + 1)


class Indexer(Module):
    """Turns its queries and keys; its call is inside that of the attention around it, whose own come first."""

    def forward(self, x):
        self.modeling.apply_rotary_pos_emb(Tensor(x.array[:, None] * 10), Tensor(x.array[:, None] * 20))
        return Tensor(np.zeros((1, 1, 2, 3)))


class Attention(Module):
    def __init__(self, modeling, indexer, o_proj):
        super().__init__(modeling)
        self.indexer, self.o_proj = indexer, o_proj

    def forward(self, hidden_states):
        self.modeling.apply_rotary_pos_emb(
            Tensor(hidden_states.array[:, None]), Tensor(hidden_states.array[:, None] * 2)
        )
        if self.indexer is not None:
            self.indexer(hidden_states)
        return self.o_proj(hidden_states), None


class Model(Module):
    """Two layers, of which the second has an indexer, and a module that is no quantity."""

    def __init__(self, modeling):
        super().__init__(modeling)
        self.layers = [
            Attention(modeling, indexer, Projection()) for indexer in (None, Indexer(modeling))
        ]  # fmt: skip
        self.other = Projection()

    def eval(self):
        return self

    def named_modules(self):
        yield "", self
        yield "model.language_model.other", self.other
        for number, layer in enumerate(self.layers):
            name = f"model.language_model.layers.{number}.self_attn"
            yield name, layer
            yield f"{name}.o_proj", layer.o_proj
            if layer.indexer is not None:
                yield f"{name}.indexer", layer.indexer

    def forward(self, input_ids, attention_mask, use_cache):
        self.given = input_ids, attention_mask, use_cache
        x = Tensor(np.stack([input_ids + 0.5, -1.0 * input_ids], axis=-1))  # [B T D]
        self.other(x)
        for layer in self.layers:
            layer(hidden_states=Tensor(x.array + self.layers.index(layer)))


def fake_modeling():
    rotate = lambda q, k: (Tensor(q.array + 0.25), Tensor(k.array + 0.25))
    return SimpleNamespace(apply_rotary_pos_emb=rotate)


def test_a_run_is_recorded_by_the_names_of_modules_and_heads_behind_their_rotation():
    """Inputs, outputs and parts of tuples that are quantities, by keyword or not; afterwards no hook is left."""
    modeling = fake_modeling()
    model, rotate, ids = Model(modeling), modeling.apply_rotary_pos_emb, np.array([[1, 2, 3]])
    with live.recorded(model, modeling) as calls:
        model(ids, None, False)
    x = np.stack([ids + 0.5, -1.0 * ids], axis=-1)
    expected = {}
    for number in (0, 1):
        name, of_layer = f"model.language_model.layers.{number}", x + number
        expected |= {
            f"{name}.self_attn.0": of_layer + 1, f"{name}.self_attn.o_proj": of_layer + 1,
            f"{name}.self_attn.o_proj.input": of_layer, f"{name}.q": of_layer[:, :, None] + 0.25,
            f"{name}.k": 2 * of_layer[:, :, None] + 0.25,
        }  # fmt: skip
    expected["model.language_model.layers.1.self_attn.indexer"] = np.zeros((1, 1, 2, 3))
    expected["model.language_model.layers.1.index_q"] = 10 * (x + 1)[:, :, None] + 0.25
    expected["model.language_model.layers.1.index_k"] = 20 * (x + 1)[:, :, None] + 0.25
    assert calls.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(calls[name].array, array, err_msg=name)
    assert modeling.apply_rotary_pos_emb is rotate and not any(module.hooks for _, module in model.named_modules())
    with pytest.raises(KeyError), live.recorded(model, modeling):
        raise KeyError
    assert modeling.apply_rotary_pos_emb is rotate and not any(module.hooks for _, module in model.named_modules())


def test_transformers_reads_padded_prompts_without_a_tower(monkeypatch, unchecked):
    """Eagerly and without a cache, in the dtype that was asked for; text weights that it does not find are refused."""
    modeling, asked, missing = fake_modeling(), [], ["model.vision_tower.x", "model.other"]
    model, settings = Model(modeling), SimpleNamespace(vision_config=SimpleNamespace(num_hidden_layers=5))

    def from_pretrained(folder, **options):
        asked.append((folder, options))
        return model, {"missing_keys": missing}

    modeling.MiniMaxM3SparseForConditionalGeneration = SimpleNamespace(from_pretrained=from_pretrained)
    of_config = SimpleNamespace(from_pretrained=lambda folder: settings if folder == "folder" else None)
    m3 = SimpleNamespace(MiniMaxM3VLConfig=of_config, modeling_minimax_m3_vl=modeling, __path__=[])
    as_long = lambda array: SimpleNamespace(long=lambda: array.astype(np.int64))
    torch = SimpleNamespace(float16="half", no_grad=contextlib.nullcontext, from_numpy=as_long)
    for name, module in (
        ("torch", torch), ("transformers", SimpleNamespace(__path__=[])),
        ("transformers.models", SimpleNamespace(__path__=[])), ("transformers.models.minimax_m3_vl", m3),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(live.M3Config, "from_pretrained", lambda folder: CONFIG if folder == "folder" else None)
    monkeypatch.setattr(live, "_quiet", contextlib.nullcontext)
    found = live.run_transformers("label", "folder", PROMPTS, "float16")
    assert (found.label, found.config, settings.vision_config.num_hidden_layers) == ("label", CONFIG, 0)
    options = dict(config=settings, dtype="half", attn_implementation="eager", output_loading_info=True)
    assert asked == [("folder", options)]
    ids, mask, use_cache = model.given
    assert (ids.tolist(), mask.tolist(), use_cache) == ([[5, 9, 4], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]], False)
    assert found.arrays["tokens"][0].tolist() == ids.tolist() and found.arrays["lengths"][0].tolist() == [3, 1]
    (q,) = found.arrays["model.language_model.layers.1.q"]
    assert q.shape == (2, 3, 1, 2) and q[1, 0, 0].tolist() == [9.75, -6.75]
    for name in ("model.language_model.norm.weight", "lm_head.weight"):
        missing[1:] = [name, "model.language_model.z"] if name.startswith("model") else [name]
        with pytest.raises(ValueError, match=rf"folder: transformers finds no {name} in it \({len(missing) - 1} mi"):
            live.run_transformers("label", "folder", PROMPTS, "float16")


def test_a_run_of_our_own_names_its_values_by_layer(monkeypatch, unchecked):
    """Those of a layer and those between them; an empty folder is the embedded model."""
    layers, loaded = [{"q": np.float32([1])}, {"q": np.float32([2])}], []
    calls = []

    def intermediates(tokens, lengths):
        calls.append((np.asarray(tokens).tolist(), np.asarray(lengths).tolist()))
        return {"embedding": np.float32([0]), "layers": layers}

    model = SimpleNamespace(intermediates=intermediates)
    monkeypatch.setattr(live.M3Config, "from_pretrained", lambda folder: CONFIG)
    monkeypatch.setattr(live, "load", lambda *given: loaded.append(tuple(map(str, given))) or model)
    monkeypatch.setattr(live, "embedded_path", lambda: "embedded")
    between = lambda given, of_layers: [{"gate": 10 * layer["q"]} for layer in of_layers] if given is model else None
    monkeypatch.setattr(live, "_between", between)
    for folder, read in (("a", "a"), ("", "embedded")):
        found = live.run_m3jax("label", folder, PROMPTS, "float64", "tensor=2")
        assert loaded.pop() == (read, "float64", "tensor=2") and found.config is CONFIG
        assert calls.pop() == ([[5, 9, 4], [8, 0, 0]], [3, 1])
    assert {name: arrays[0].tolist() for name, arrays in found.arrays.items()} == {
        "embedding": [0], "layers.0.q": [1], "layers.0.gate": [10], "layers.1.q": [2], "layers.1.gate": [20],
        "tokens": [[5, 9, 4], [8, 0, 0]], "lengths": [3, 1],
    }  # fmt: skip


def test_what_a_layer_leaves_out_is_computed_from_its_norms():
    """By hand, in each head and column: projections, their norms by 1 + w, and a router's scores with their bias."""
    model, draw = tiny.model(tiny.config("dM")), np.random.default_rng(0)
    x, y = jnp.asarray(draw.normal(size=(2, 1, 3, model.config.hidden_size)), jnp.float32)
    for index, heads in enumerate((("q", "k"), ("q", "k", "index_q", "index_k"))):
        found = live._between_in(model, index, dict(input=x, attention_norm=x, ffn_norm=y))
        attention, mlp = model.layer(index).self_attn, model.layer(index).mlp
        expected = {}
        for name in heads:
            weight, norm = (np.asarray(getattr(attention, f"{name}_{part}")[0]) for part in ("proj", "norm"))
            projected = expected[f"{name}_proj"] = np.tensordot(x, weight, 1)
            size = np.sqrt(np.mean(projected**2, axis=-1, keepdims=True) + model.config.rms_norm_eps)
            expected[f"{name}_normed"] = projected / size * (1 + norm)
        if index:
            logits = expected["router_logits"] = y @ np.asarray(mlp.gate[0])
            expected["router_scores"] = 1 / (1 + np.exp(-logits)) + np.asarray(mlp.e_score_correction_bias[0])
            mlp = mlp.shared_experts
        expected |= {name: y @ np.asarray(getattr(mlp, f"{name}_proj")[0]) for name in ("gate", "up")}
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-4, err_msg=name)


def test_prompts_are_of_the_model_s_tokens_and_context():
    tokens, lengths = live._padded([[0] * 9, [63]], CONFIG)
    assert (tokens.shape, tokens.dtype, lengths.tolist(), lengths.dtype) == ((2, 9), np.int32, [9, 1], np.int32)
    for prompts, message in (
        ([[1], []], "prompt 2 has no token"), ([[1, 64, 65]], "prompt 1: token 64, and the model has 0 to 63"),
        ([[-1]], "prompt 1: token -1, and"), ([[1] * 10], "prompt 1: 10 tokens, and the model takes 9"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            live._padded(prompts, CONFIG)
