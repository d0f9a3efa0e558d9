"""The Python door: text in, text out, and what leads to a model of one's own."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.generation import engine_for_two

import m3jax
from m3jax import cli
from m3jax.parallel import AXES

PROMPTS = ["import os, sys", "def f(x):"]


@pytest.fixture(scope="module")
def lm():
    return m3jax.TextModel.from_pretrained(dtype="float32")


@pytest.fixture(autouse=True)
def _engine_of_two(monkeypatch):
    monkeypatch.setattr("m3jax.text_model.engine_for", engine_for_two)


@pytest.mark.further  # the commands print: test_cli.py
def test_text_is_that_of_the_command_line(lm, capsys):
    """No BOS on either side, one set of defaults, one seed."""
    knobs = dict(max_new_tokens=12, temperature=0.7, top_p=0.9, seed=3)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    assert cli.main([*(f"--prompt={prompt}" for prompt in PROMPTS), *flags, "--json", "--dtype=float32"]) == 0
    expected = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert lm.generate(PROMPTS, **knobs) == expected
    assert lm.generate(PROMPTS[0], **knobs) == expected[0]
    assert len(set(expected)) == 2 and all(expected)


def test_a_stream_is_the_text_in_pieces(lm):
    knobs = dict(max_new_tokens=12, temperature=0)
    whole = lm.generate(PROMPTS, **knobs)
    pieces = list(lm.generate(PROMPTS, stream=True, **knobs))
    assert ["".join(piece for number, piece in pieces if number == i) for i in range(2)] == whole
    assert len(pieces) >= 2
    assert "".join(lm.generate(PROMPTS[0], stream=True, **knobs)) == whole[0]


def test_a_stop_text_ends_it(lm):
    whole = lm.generate(PROMPTS[0], max_new_tokens=12, temperature=0)
    stop = whole[3:5]
    assert lm.generate(PROMPTS[0], max_new_tokens=12, temperature=0, stop=stop) == whole[: whole.index(stop)]
    assert lm.generate(PROMPTS[0], max_new_tokens=12, temperature=0, stop=["@@", stop]) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1), "temperature = -1"),
        (dict(stop=[""]), "stop = "),
        (dict(max_new_tokens=0), "max_new_tokens = 0"),
        (dict(seed=[1, 2]), "seed has 2 entries for 1 prompts"),
        (dict(draft="nowhere"), "nowhere"),
    ],
)
def test_bad_arguments(lm, options, message):
    with pytest.raises(ValueError, match=message):
        lm.generate("import os", **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.generate([1, 2, 3]), r"prompts = \[1, 2, 3\]: must be a text, .* go to m3jax.generate"),
        (lambda lm: lm.generate(5), "prompts = 5: must be a text"),
        (lambda lm: lm.generate(b"import"), "prompts = b'import': must be a text"),
        (lambda lm: lm.forward(None), "text is a NoneType, None: must be a str"),
        (lambda lm: lm.tokenizer.encode(5), "text is a int, 5: must be a str"),
        (lambda lm: lm.tokenizer.encode(["a", "b"]), "text is a list, .*encode_batch takes several"),
        (lambda lm: m3jax.generate(lm, [[1]], max_new_tokens=2), "model is a TextModel, .*: give its model, .model"),
        (lambda lm: m3jax.generate(None, [[1]], max_new_tokens=2), "model is a NoneType, .* give a model from m3jax.l"),
        (lambda lm: m3jax.chat(lm, lm.tokenizer, []), "model is a TextModel, .*: give its model, .model"),
        (lambda lm: m3jax.dialogue.Dialogue(lm, lm.tokenizer), "model is a TextModel, .*: give its model, .model"),
        (lambda lm: m3jax.init("tiny"), "config is a str: must be an M3Config, such as M3Config.tiny()"),
    ],
)
def test_what_belongs_elsewhere_is_refused_in_one_line(lm, call, message):
    """An argument of another kind is named, with what to give in its place, and no error comes from further inside."""
    with pytest.raises(ValueError, match=message) as raised:
        call(lm)
    assert "\n" not in str(raised.value)


def test_forward_keeps_everything(lm):
    """The values are `intermediates` of the text's tokens; the pieces together are the text."""
    text = PROMPTS[0]
    values = lm.forward(text)
    tokens = lm.tokenizer.encode(text)
    assert values["tokens"].tolist() == [tokens] and "".join(values["pieces"]) == text
    np.testing.assert_array_equal(values["logits"], lm.model.intermediates(jnp.array([tokens]))["logits"])
    with pytest.raises(ValueError, match="text is empty"):
        lm.forward("")


def test_a_saved_folder_is_the_same(lm, tmp_path):
    """Weights, tokenizer, chat template and defaults come back; without a template there is none."""
    (tmp_path / "first").mkdir()
    lm.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    again = m3jax.TextModel.from_pretrained(tmp_path / "first", dtype=jnp.float32)
    assert lm.template.startswith("{#-") and again.template == "{{ messages }}"
    assert again.defaults == lm.defaults and again.tokenizer.encode(PROMPTS[0]) == lm.tokenizer.encode(PROMPTS[0])
    jax.tree.map(np.testing.assert_array_equal, again.model, lm.model)
    again.save_pretrained(tmp_path / "second")
    assert m3jax.TextModel.from_pretrained(tmp_path / "second").template == "{{ messages }}"
    (tmp_path / "second" / "chat_template.jinja").unlink()
    assert m3jax.TextModel.from_pretrained(tmp_path / "second").template is None


def test_defaults_of_the_folder_are_kept(lm, tmp_path):
    """Defaults of generation_config.json hold, and arguments of the caller win over them."""
    lm.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 5}', encoding="utf-8")
    folder = m3jax.TextModel.from_pretrained(tmp_path, dtype="float32")
    greedy = lm.generate(PROMPTS[0], max_new_tokens=5, temperature=0)
    assert folder.generate(PROMPTS[0]) == greedy
    assert folder.generate(PROMPTS[0], max_new_tokens=2) == lm.generate(PROMPTS[0], max_new_tokens=2, temperature=0)


# Models of one's own, and where they lie.


def test_a_model_for_experiments():
    """`init` by a seed or by a stream of keys; `tiny` selects for real."""
    config = m3jax.M3Config.tiny()
    by_seed, again = m3jax.init(config, 1), m3jax.init(config, seed=1)
    jax.tree.map(np.testing.assert_array_equal, by_seed, again)
    by_stream = m3jax.init(config, rngs=nnx.Rngs(params=1))
    assert not np.array_equal(by_stream.lm_head[...], by_seed.lm_head[...])
    assert m3jax.init(config, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    values = jax.eval_shape(lambda model, tokens: model.intermediates(tokens), by_seed, jnp.zeros((1, 64), jnp.int32))
    blocks = values["layers"][1]["blocks"]
    assert blocks.shape == (1, 2, 64, 3) and config.max_position_embeddings // config.index_block_size > 3
    assert m3jax.M3Config.tiny(index_topk_blocks=2).index_topk_blocks == 2
    with pytest.raises(ValueError, match="rotary_dim = 7"):
        m3jax.M3Config.tiny(rotary_dim=7)


@pytest.mark.parametrize("dtype", ["float8", "int8", jnp.int32, "half"])
def test_a_dtype_that_no_model_has(dtype):
    with pytest.raises(ValueError, match="allowed are bfloat16, float16, float32, float64"):
        m3jax.init(m3jax.M3Config.tiny(), dtype=dtype)


@pytest.mark.parametrize(
    ("sizes", "nearest"),
    [
        ({"x": 2}, "m3jax.make_mesh(tensor=2)"),
        ({"dp": 2, "tp": 4}, "m3jax.make_mesh(data=2, tensor=4)"),
        ({"data": 2, "ep": 2}, "m3jax.make_mesh(data=2, expert=2)"),
    ],
)
def test_a_mesh_with_other_axes_is_refused(sizes, nearest):
    """It used to be taken, and all weights lay on every device."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    for call in (lambda: m3jax.load(mesh=mesh), lambda: m3jax.init(m3jax.M3Config.tiny(), mesh=mesh)):
        with pytest.raises(ValueError, match="the rules of sharding know data, context, expert, tensor") as raised:
            call()
        assert nearest in str(raised.value)


@pytest.mark.usefixtures("unchecked")
def test_a_mesh_may_be_text():
    by_text = m3jax.load(mesh="expert=2,tensor=2", dtype=jnp.float32)
    by_call = m3jax.load(mesh=m3jax.make_mesh(expert=2, tensor=2), dtype="float32")
    assert by_text.mesh == by_call.mesh and by_text.mesh.axis_names == AXES
    places = [[x.sharding for x in jax.tree.leaves(model)] for model in (by_text, by_call)]
    assert places[0] == places[1] and len(set(places[0])) > 1
    with pytest.raises(ValueError, match="mesh 'rows=2': write axis=size pairs"):
        m3jax.load(mesh="rows=2")
    with pytest.raises(ValueError, match="mesh is a int"):
        m3jax.load(mesh=2)


def test_names_of_the_package():
    """Every public name exists, and dir() shows it before it is imported."""
    assert set(m3jax.__all__) <= set(dir(m3jax))
    assert all(getattr(m3jax, name) is not None for name in m3jax.__all__)
    assert m3jax.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        m3jax.nothing  # noqa: B018


@pytest.mark.further  # as a text model does: above
def test_a_model_saves_itself(tmp_path):
    model = m3jax.init(m3jax.M3Config.tiny())
    model.save_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, m3jax.load(tmp_path, dtype="float32"), model)
