"""Experts, router, gradients, the numbers of a config, and the model as a tree of parameters."""

from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import comparisons, tiny

from m3jax import model as m3_model
from m3jax.cache import Cache
from m3jax.execution import Compute, Fast, plain
from m3jax.model import M3
from m3jax.model.moe import Experts, route
from m3jax.ops import run_experts
from m3jax.ops.experts import ExpertWeights
from m3jax.weights import StackedLayer

TOLERANCE = 5e-5
# For programs whose speed and last bits do not matter: it halves the time to compile them.
QUICK = {"xla_backend_optimization_level": 0}


# Experts

EXPERTS, ACTIVE, PAIRS = 5, 2, 41
MOE = tiny.config("m", num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE)
ALPHA, LIMIT = 1.3, 0.6


@cache
def experts(dtype: str = "float32") -> Experts:
    """Two layers of them; the tests use the second."""
    config = tiny.config("mm", num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE)
    return tiny.model(config, dtype=dtype).stacks[0].mlp.experts


def one_by_one(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Each (token, expert) pair on its own, in float64."""
    weights = (experts().gate_proj, experts().up_proj, experts().down_proj)
    gate, up, down = (np.asarray(w[...][1], np.float64) for w in weights)
    out = np.zeros((*ids.shape, x.shape[1]))
    for token, slot in np.ndindex(ids.shape):
        e = ids[token, slot]
        g, u = np.minimum(x[token] @ gate[e], LIMIT), np.clip(x[token] @ up[e], -LIMIT, LIMIT)
        out[token, slot] = ((u + 1) * g / (1 + np.exp(-ALPHA * g))) @ down[e]
    return out


def choices() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    pairs = np.array([draw.permutation(EXPERTS)[:ACTIVE] for _ in range(PAIRS)])
    return {
        "any": pairs,
        "one is idle": np.where(pairs == 3, 4, pairs),
        "all to one": np.full((PAIRS, ACTIVE), 2),
        "first and last": np.broadcast_to([0, EXPERTS - 1], (PAIRS, ACTIVE)),
    }


@cache
def path(name: str):
    """One of the ways to compute the experts, as [X A D]; the two with many tokens take any number of them."""

    @partial(jax.jit, static_argnames=("dtype",))
    def call(experts, x, ids, layer, dtype):
        act = lambda gate, up: m3_model.layers.swiglu_oai(gate, up, ALPHA, LIMIT).astype(dtype)
        weights = ExpertWeights(experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
        return run_experts(x, weights, ids, layer, act, path=name)

    return lambda e, x, ids: call(e, x, ids.astype(np.int32), np.int32(1), dtype=x.dtype)


@pytest.mark.parametrize("name", ["gathered", "one_by_one", "tiled", "ragged"])
@pytest.mark.parametrize("choice", choices())
def test_paths_agree_with_one_expert_at_a_time(name, choice):
    """T42: each way to run experts, with clamps that are reached."""
    x = np.random.default_rng(1).normal(size=(PAIRS, MOE.hidden_size)).astype(np.float32)
    ids = choices()[choice]
    comparisons.assert_close(path(name)(experts(), x, ids), one_by_one(x, ids), f"out of {name}", "X A D", atol=1e-5)


def test_weights_of_scores_that_are_all_zero_are_nan():
    """T45: 0 / 0, as in transformers, and no epsilon that hides it; the bias chooses and is in no weight."""
    logits = np.full((3, 8), -200.0, np.float32)  # sigmoid is 0 in float32
    logits[1, 5], logits[2] = -80.0, -80.0
    bias = np.arange(8, dtype=np.float32) / 8
    bias[5] = 1e4
    ids, weights = plain.choose_experts(jnp.asarray(logits), jnp.asarray(bias), 3)
    np.testing.assert_array_equal(ids, [[5, 7, 6]] * 3)
    np.testing.assert_allclose(weights, [[np.nan] * 3, [1, 0, 0], [1 / 3] * 3], rtol=1e-6)


def test_a_token_does_not_depend_on_its_tile():
    """T40, bitwise: the tokens beside one, and so its place in a tile, do not matter."""
    draw = np.random.default_rng(2)
    x, ids = draw.normal(size=(PAIRS, MOE.hidden_size)).astype(np.float32), choices()["any"]
    before = path("tiled")(experts(), x, ids)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(PAIRS)
        companions = np.where(np.arange(PAIRS)[:, None] == 7, x, x[order])
        other_ids = np.where(np.arange(PAIRS)[:, None] == 7, ids, ids[order])
        after = path("tiled")(experts(), companions.astype(np.float32), other_ids)
        comparisons.assert_equal(after[7], before[7], "out of token 7", "A D")


def test_paths_sum_the_chosen_experts():
    """The public call, on both sides of the line between a few and many tokens."""
    how = Fast(Compute())

    @jax.jit
    def call(experts, x, ids, weights, layer):
        act = lambda gate, up: m3_model.layers.swiglu_oai(gate, up, ALPHA, LIMIT).astype(x.dtype)
        matrices = (experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
        return how.experts(x, ids, weights, [StackedLayer(matrix, layer) for matrix in matrices], act, (), 1.0)[0]

    draw = np.random.default_rng(3)
    for tokens in (4, PAIRS):
        x = draw.normal(size=(tokens, MOE.hidden_size)).astype(np.float32)
        ids, weights = choices()["any"][:tokens], draw.uniform(size=(tokens, ACTIVE))
        out = call(experts(), x, ids.astype(np.int32), weights.astype(np.float32), np.int32(1))
        expected = (one_by_one(x, ids) * weights[..., None]).sum(1)
        comparisons.assert_close(out, expected, f"sum of experts of {tokens} tokens", "X D", atol=1e-5)


def test_experts_in_bfloat16_are_never_widened_all_at_once():
    """A loop over layers, one token: XLA's CPU backend made 32-bit numbers of all experts before it."""
    width, hidden, count, depth = 64, 32, 16, 4
    shape = lambda *sizes: jax.ShapeDtypeStruct((depth, count, *sizes), jnp.bfloat16)
    weights = ExpertWeights(shape(width, hidden), shape(width, hidden), shape(hidden, width))

    def run(x, weights, ids):
        def run_layer(x, layer):
            out = run_experts(x, weights, ids, layer, lambda gate, up: (gate * up).astype(x.dtype), path="one_by_one")
            return x + out.sum(1).astype(x.dtype), None

        return jax.lax.scan(run_layer, x, jnp.arange(depth))[0]

    x, ids = jax.ShapeDtypeStruct((1, width), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2), jnp.int32)
    scratch = jax.jit(run).lower(x, weights, ids).compile().memory_analysis().temp_size_in_bytes
    of_one_layer = 3 * count * width * hidden * 2
    assert scratch < of_one_layer, f"{scratch} bytes of scratch memory beside {of_one_layer} of a layer's experts"


# Router


def test_router_bias_chooses_and_does_not_weigh():
    x = np.eye(4, dtype=np.float32)
    gate = np.array([[2, 1, 0, 0], [0, 0, 0, 0], [-9, -9, 3, 3], [1, 2, 3, 4]], np.float32)
    bias = np.array([0, 0, 0, 0.5], np.float32)
    ids, weights = route(jnp.asarray(x), jnp.asarray(gate), jnp.asarray(bias), 2)
    # Of equal scores the lower id; the bias lifts expert 3 to the top everywhere.
    comparisons.assert_equal(ids, [[3, 0], [3, 0], [3, 2], [3, 2]], "expert ids", "X A")
    scores = np.take_along_axis(1 / (1 + np.exp(-gate)), np.asarray(ids), 1)
    comparisons.assert_close(weights, scores / scores.sum(1, keepdims=True), "expert weights", "X A", rtol=1e-6)


def test_router_is_float32_in_a_bfloat16_model():
    config = tiny.config("M")
    model = tiny.model(config, dtype="bfloat16").with_schedule("mask")
    mlp = model.stacks[0].mlp
    assert mlp.gate.dtype == mlp.e_score_correction_bias.dtype == jnp.float32
    assert mlp.experts.gate_proj.dtype == jnp.bfloat16
    probe = lambda values, _: {k: values[k] for k in ("ffn_norm", "expert_ids", "expert_weights")}
    run = jax.jit(lambda m, t: m.trunk(t, probe=probe)[2][0], compiler_options=QUICK)
    values = jax.tree.map(lambda x: x[0], run(model, tiny.tokens(config, 1, 40)))
    assert values["ffn_norm"].dtype == jnp.bfloat16
    assert values["expert_weights"].dtype == jnp.float32
    x = np.asarray(values["ffn_norm"][0], np.float64)
    scores = 1 / (1 + np.exp(-x @ np.asarray(mlp.gate[...][0], np.float64)))
    ids = np.argsort(-(scores + mlp.e_score_correction_bias[...][0]), axis=1, kind="stable")[:, :2]
    comparisons.assert_equal(values["expert_ids"][0], ids, "expert ids", "T A")
    weights = np.take_along_axis(scores, ids, 1)
    # A router in bfloat16 would be off by 1e-3.
    weights /= weights.sum(1, keepdims=True)
    comparisons.assert_close(values["expert_weights"][0], weights, "expert weights", "T A", rtol=2e-6)


# Gradients

GRADIENT = tiny.config("MM")


def loss(model: M3, tokens, remat: bool | str):
    x, _, _ = model.trunk(tokens, remat=remat)
    log_p = jax.nn.log_softmax(model.unembed(x)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1))


@cache
def gradient(schedule: str, remat: bool | str):
    grad = jax.jit(jax.grad(loss), static_argnames="remat", compiler_options=QUICK)
    model = tiny.model(GRADIENT).with_schedule(schedule)
    return jax.device_get(grad(model, tiny.tokens(GRADIENT, 2, 50), remat=remat))


def by_name(tree) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}


@pytest.mark.further  # as trained: tests/train/test_losses.py
def test_language_loss_does_not_train_the_index_branch():
    """T33; the routing bias, which only chooses, gets no gradient either, and all else does."""
    still = ("index_", "e_score_correction_bias", "norm.value")
    for name, grad in by_name(gradient("auto", remat=True)).items():
        if any(x in name for x in still[:2]) or name == still[2]:
            assert np.all(grad == 0), name
        else:
            assert np.all(np.isfinite(grad)) and np.any(grad != 0), name


@pytest.mark.further
@pytest.mark.parametrize("remat", [True, "products"])
def test_remat_and_schedule_do_not_change_the_gradient(remat):
    """T30: recomputed activations of the fast schedule against stored ones of the definition."""
    expected = by_name(gradient("mask", remat=False))
    for name, grad in by_name(gradient("auto", remat=remat)).items():
        comparisons.assert_close(grad, expected[name], f"gradient of {name}", atol=1e-6)


def test_remat_keeps_the_selection():
    """T30: the backward pass reads the blocks and experts that the forward pass chose, and chooses none of its own."""
    tokens, model = tiny.tokens(GRADIENT, 2, 50), tiny.model(GRADIENT)
    blocks = -(-50 // GRADIENT.index_block_size)
    for remat in (False, True, "products"):
        jaxpr = jax.make_jaxpr(partial(jax.grad(loss), remat=remat))(model, tokens)
        top_k = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "top_k"]
        assert sorted(e.invars[0].aval.shape[-1] for e in top_k) == sorted([blocks, GRADIENT.num_local_experts])


def test_kept_products_are_not_made_again():
    """But attention's scores, which a backward pass without a kernel never keeps."""
    tokens, model = tiny.tokens(GRADIENT, 2, 50), tiny.model(GRADIENT)

    def products(remat):
        jaxpr = jax.make_jaxpr(partial(jax.grad(loss), remat=remat))(model, tokens)
        of_products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
        return Counter(tuple(x.aval.shape for x in e.invars) for e in of_products)

    made_again = (products("products") - products(False)).elements()
    assert not [shapes for shapes in made_again if GRADIENT.hidden_size in shapes[1]]
    assert (products(True) - products(False)).total() > 10


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


# The numbers of a config

SHORT = dict(index_block_size=2, index_topk_blocks=2)
NUMBERS = dict(
    routed_scaling_factor=1.7, rms_norm_eps=0.05, rope_theta=300.0, rotary_dim=4, swiglu_alpha=1.1, swiglu_limit=0.7,
    num_experts_per_tok=1, index_topk_blocks=3, index_block_size=3, index_local_blocks=2, index_init_blocks=1,
    index_score_type="lse",
)  # fmt: skip


@cache
def logits(**changes) -> np.ndarray:
    config = tiny.config("M", **(SHORT | changes))
    model = tiny.model(config).with_schedule("mask")
    call = jax.jit(lambda m, t: m(t), compiler_options=QUICK)
    return np.asarray(call(model, tiny.tokens(config, 1, 8, seed=1)))


# The oracle's cases draw all numbers but these, and agree (test_oracle.py).
NOT_DRAWN = ("index_init_blocks", "index_score_type")


@pytest.mark.parametrize(
    "name", [*NOT_DRAWN, *(pytest.param(name, marks=pytest.mark.further) for name in NUMBERS if name not in NOT_DRAWN)]
)
def test_every_number_of_the_config_counts(name):
    """T36: none is written into the code."""
    assert np.abs(logits(**{name: NUMBERS[name]}) - logits()).max() > 100 * TOLERANCE


# A tree of parameters


def test_intermediates_have_names_and_shapes():
    config = tiny.config("dM")
    b, t, n, k, h, i, d = 2, 20, 8, 4, 16, 20, 48
    model = m3_model.abstract(config, "bfloat16")
    tokens = jax.ShapeDtypeStruct((b, t), jnp.int32)
    out = jax.eval_shape(lambda m, x: m.intermediates(x), model, tokens)
    dense = dict.fromkeys(("input", "attention_norm", "attention_out", "ffn_norm", "ffn_out", "output"), (b, t, d))
    dense |= {"q": (b, t, n, h), "k": (b, t, k, h), "v": (b, t, k, h), "attention": (b, t, n, h)}
    sparse = {"index_q": (b, t, k, i), "index_k": (b, t, i)}
    sparse |= {"block_scores": (b, k, t, 3), "blocks": (b, k, t, 3)}
    moe = dict.fromkeys(("expert_ids", "expert_weights"), (b, t, 2))
    shapes = [{name: x.shape for name, x in layer.items()} for layer in out["layers"]]
    assert shapes == [dense, dense | sparse | moe]
    assert out.keys() == {"embedding", "layers", "final_norm", "logits"}
    assert out["embedding"].shape == out["final_norm"].shape == (b, t, d)
    assert (out["logits"].shape, out["logits"].dtype) == ((b, t, 64), jnp.float32)
    assert out["layers"][1]["output"].dtype == out["layers"][1]["q"].dtype == jnp.bfloat16
    assert out["layers"][1]["block_scores"].dtype == jnp.float32


def test_the_model_is_a_tree():
    """NNX in tree mode: leaves are arrays, and a model made of its leaves computes the same."""
    config = tiny.config("M")
    model, tokens = tiny.model(config), jnp.asarray(tiny.tokens(config, 1, 4))
    leaves, treedef = jax.tree.flatten(model)
    assert all(isinstance(x, jax.Array) for x in leaves)
    call = jax.jit(lambda m, t: m(t))
    expected = call(model, tokens)
    for other in (jax.tree.unflatten(treedef, leaves), nnx.merge(*nnx.split(model))):
        np.testing.assert_array_equal(call(other, tokens), expected)
    assert call._cache_size() == 1
    comparisons.assert_close(model(tokens), expected, "logits", "B T V", atol=TOLERANCE)  # without jit


@pytest.mark.further
def test_the_model_can_be_vmapped():
    config = tiny.config("M")
    model, tokens = tiny.model(config), tiny.tokens(config, 4, 20)
    call = lambda m, t: m(t)
    expected = jax.jit(call, compiler_options=QUICK)(model, tokens)
    over = jax.jit(jax.vmap(call, in_axes=(None, 0)), compiler_options=QUICK)
    found = over(model, tokens.reshape(2, 2, 20))
    comparisons.assert_close(found.reshape(expected.shape), expected, "logits", "B T V", atol=TOLERANCE)


def test_trees_of_one_structure():
    config = tiny.config("dMM")
    trees = [m3_model.abstract(config), tiny.logical_axes(config), m3_model.shardings(config, None)]
    structures = {jax.tree.structure(tree) for tree in trees}
    assert len(structures) == 1
    for leaf, axes in zip(*(jax.tree.leaves(tree) for tree in trees[:2]), strict=True):
        assert len(leaf.shape) == len(axes)


@pytest.mark.parametrize("make", [m3_model.abstract, partial(m3_model.init, seed=0)])
def test_unknown_dtypes_are_refused(make):
    with pytest.raises(ValueError, match="dtype = 'int8': allowed are bfloat16"):
        make(tiny.config(), dtype="int8")
    with pytest.raises(ValueError, match="jax_enable_x64"):
        make(tiny.config(), dtype="float64")


def test_an_unknown_schedule_is_refused():
    model = m3_model.abstract(tiny.config("M"))
    with pytest.raises(ValueError, match="'fastest': allowed are 'auto'"):
        model.with_schedule("fastest")
    with pytest.raises(ValueError, match=r"'dense': attention to every block is another function; use with_dense\(\)"):
        model.with_schedule("dense")


@pytest.mark.parametrize("small_sizes", [(1 << 12, 1 << 16), ()], ids=["cut from shared sizes", "drawn in its shape"])
def test_init_is_seeded(monkeypatch, small_sizes):
    monkeypatch.setattr(m3_model.build, "_SMALL_SIZES", small_sizes)
    config = tiny.config("d")
    with jax.default_prng_impl("rbg"):  # quicker to compile
        one, same, other = (by_name(m3_model.init(config, seed)) for seed in (0, 0, 1))
    for name, leaf in one.items():
        np.testing.assert_array_equal(leaf, same[name])
        assert np.all(leaf == 0) if "norm" in name else np.any(leaf != other[name])
    assert np.std(one["lm_head.value"]) == pytest.approx(48**-0.5, rel=0.05)
    assert np.std(one["embed_tokens.value"]) == pytest.approx(1, rel=0.05)


def test_init_scales_by_fan_in(monkeypatch):
    """With each parameter filled with its fan-in, and norms and the routing bias with 0."""
    fill = lambda _, deviation, shape, dtype: jnp.full(shape, jnp.round(deviation**-2), dtype)
    monkeypatch.setattr(m3_model.build, "_cut", fill)
    found = by_name(m3_model.init(tiny.config("dM")))
    fan_in = {}
    for name, leaf in found.items():
        assert np.all(leaf == leaf.ravel()[0])
        fan_in.setdefault(int(leaf.ravel()[0]), set()).add(name.split(".")[-2])
    assert fan_in.pop(0) == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "index_q_norm", "index_k_norm",
        "e_score_correction_bias",
    }  # fmt: skip
    assert fan_in.pop(1) == {"embed_tokens"}
    assert fan_in.pop(8 * 16) == {"o_proj"}
    for width in (88, 40, 56):  # dense, one expert, shared
        assert fan_in.pop(width) == {"down_proj"}
    assert fan_in == {48: {
        "lm_head", "q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj", "gate_proj", "up_proj", "gate",
    }}  # fmt: skip


# The cache


@pytest.mark.parametrize("batch, length", [(0, 8), (1, 0), (1, 1025)])
def test_cache_sizes_are_checked(batch, length):
    with pytest.raises(ValueError, match="1 to 1024 tokens"):
        Cache.init(tiny.config(), batch, length)


def test_cache_holds_keys_values_and_index_keys():
    config = tiny.config("dMM")
    cache = Cache.init(config, 2, 13)
    dense, sparse = cache.stacks
    assert (cache.max_length, cache.num_pages, cache.page_size) == (16, 4, 8)
    assert dense.k.shape == dense.v.shape == (1, 4, 4, 8, 16)
    assert sparse.k.shape == sparse.v.shape == (2, 4, 4, 8, 16)
    assert (dense.index_k, sparse.index_k.shape) == (None, (2, 4, 8, 20))
    assert all(x.dtype == jnp.bfloat16 for x in (dense.k, dense.v, sparse.k, sparse.v, sparse.index_k))
    assert cache.bytes_per_token == 2 * (3 * 2 * 4 * 16 + 2 * 20)
    assert sorted(np.asarray(cache.table).ravel()) == [0, 1, 2, 3]
