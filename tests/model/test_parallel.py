"""The model over eight host devices: every way to divide it gives one device's logits."""

from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import comparisons, tiny

from m3jax import M3Config
from m3jax import model as m3_model
from m3jax.cache import Cache, LayerCall, Places
from m3jax.execution import Compute, Fast, OverMesh, Projections, Tap
from m3jax.execution.attend import attend, attend_over_mesh
from m3jax.execution.divided import MATRIX_AXES
from m3jax.execution.experts import dispatch_capacity
from m3jax.make import dotted_path
from m3jax.model.context import selection_rules
from m3jax.model.layers import swiglu_oai
from m3jax.ops import Heads
from m3jax.parallel import AXES, RULES, make_mesh, parse_mesh, sharding, spec
from m3jax.planning import hlo
from m3jax.vision import VisionConfig
from m3jax.weights import StackedLayer

CONFIG = tiny.config("dM")
BATCH, LENGTH = 8, 33
MESHES = [
    pytest.param("tensor=8", marks=pytest.mark.further),  # more devices than KV heads
    "context=2,expert=2,tensor=2",
    pytest.param("data=2,context=2,tensor=2", marks=pytest.mark.further),
]
pytestmark = pytest.mark.usefixtures("eight_devices")
QUICK = {"xla_backend_optimization_level": 0}  # half the time to compile; the program is the same


@cache
def model(mesh: str | None):
    return tiny.model(CONFIG, mesh=parse_mesh(mesh) if mesh else None)


def put(x: np.ndarray, mesh) -> jax.Array:
    return jax.device_put(x, sharding(x.shape, ("batch",) + (None,) * (x.ndim - 1), mesh))


@cache
def whole(mesh: str | None) -> np.ndarray:
    """Return the logits of a prompt in one call."""
    m, tokens = model(mesh), tiny.tokens(CONFIG, BATCH, LENGTH)
    return np.asarray(jax.jit(lambda m, t: m(t), compiler_options=QUICK)(m, put(tokens, m.mesh)))


@cache
def results(mesh: str | None):
    """(logits of a prompt's tokens through a cache, one call each; the cache; the step's text)."""
    m, tokens = model(mesh), tiny.tokens(CONFIG, BATCH, LENGTH)
    step = jax.jit(lambda m, t, c, p, n: m(t, cache=c, positions=p, lengths=n), donate_argnums=2)
    cache, decoded, compiled = Cache.init(CONFIG, BATCH, LENGTH, "float32", m.mesh), [], None
    for i in range(LENGTH):
        # Row 0 starts late, so that rows stand at different positions.
        at = np.full(BATCH, i, np.int32) - 5 * (np.arange(BATCH) == 0)
        now = np.take_along_axis(tokens, np.maximum(at, 0)[:, None], 1)
        at = at.astype(np.int32)
        args = m, put(now, m.mesh), cache, *(put(x, m.mesh) for x in (at[:, None], np.maximum(at + 1, 0)))
        compiled = compiled or tiny.lower(step, *args).compile(QUICK)
        logits, cache = compiled(*args)
        decoded.append(np.asarray(logits[:, 0]))
    return np.stack(decoded, 1), cache, compiled.as_text()


def test_decode_is_forward_on_one_device():
    expected, decoded = whole(None), results(None)[0]
    comparisons.assert_close(decoded[1:], expected[1:], "logits of rows 1 on", "B T V", rtol=1e-5, atol=2e-5)
    comparisons.assert_close(decoded[0, 5:], expected[0, :-5], "logits of row 0", "T V", rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("mesh", ["data=2,context=2,tensor=2", pytest.param("expert=8", marks=pytest.mark.further)])
def test_forward_is_one_device_s(mesh):
    """T51, T52: of a dense layer and of layers with experts and an index branch."""
    comparisons.assert_close(whole(mesh), whole(None), "logits", "B T V", rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", [("attention", "blocks"), ("block_scores",)])
def test_values_without_a_cache_are_one_device_s(names):
    """Each device attends with its own heads; scores that are asked for are those of all heads."""
    names, found = [f"layers.1.{name}" for name in names], []
    for mesh in (None, "data=2,context=2,tensor=2"):
        m, tokens = model(mesh), tiny.tokens(CONFIG, BATCH, LENGTH)
        run = jax.jit(lambda m, t: m.intermediates(t, names=names), compiler_options=QUICK)
        found.append(run(m, put(tokens, m.mesh)))
    for name in names:
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
def test_cached_decode_is_one_device_s(mesh):
    """T51: token by token, with a row that begins later."""
    found, expected = results(mesh)[0], results(None)[0]
    comparisons.assert_close(found[1:], expected[1:], "logits of rows 1 on", "B T V", rtol=1e-5, atol=1e-5)
    comparisons.assert_close(found[0, 5:], expected[0, 5:], "logits of row 0 from 5", "T V", rtol=1e-5, atol=1e-5)


def test_drafts_over_the_context_are_verified_as_on_one_device():
    """T48: 5 tokens a call, the first one at each residue of the 16 tokens that a turn over the devices takes."""
    num_rows, count, calls = 2 * CONFIG.index_block_size, 5, 9
    tokens = tiny.tokens(CONFIG, num_rows, count * calls)
    logits = {}
    for mesh in (None, "context=2"):
        m = model(mesh)
        step = jax.jit(lambda m, t, c, p, n: m(t, cache=c, positions=p, lengths=n), donate_argnums=2)
        cache, compiled, logits[mesh] = Cache.init(CONFIG, num_rows, count * calls, "float32", m.mesh), None, []
        for call in range(calls):
            positions = count * call + np.arange(count) - np.arange(num_rows)[:, None]  # row b begins b tokens later
            now = np.take_along_axis(tokens, np.maximum(positions, 0), 1)
            positions = np.where(positions < 0, -1, positions).astype(np.int32)
            args = m, put(now, m.mesh), cache, put(positions, m.mesh), put(positions[:, -1] + 1, m.mesh)
            compiled = compiled or tiny.lower(step, *args).compile(QUICK)
            found, cache = compiled(*args)
            logits[mesh].append(np.where((positions >= 0)[..., None], found, 0))
    assert count * calls > CONFIG.index_block_size * (CONFIG.index_topk_blocks + 2)  # blocks are dropped
    found, expected = np.stack(logits["context=2"]), np.stack(logits[None])
    comparisons.assert_close(found, expected, "logits", "X B T V", rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 16), (16, 2)])
def test_arrays_of_divided_tokens_are_what_annotations_say(shape):
    """A device that gets the outputs of its own tokens alone; programs that are compiled here are not checked."""
    m, integers = model("context=2,expert=2,tensor=2"), jnp.zeros(shape, jnp.int32)
    cache = Cache.init(CONFIG, shape[0], LENGTH, "float32", m.mesh)
    run = lambda m, t, c, p, n: m(t, cache=c, positions=p, lengths=n)[0]
    logits = jax.eval_shape(run, m, integers, cache, integers, integers[:, 0])
    assert logits.shape == (*shape, CONFIG.vocab_size)


def one_layer(mesh: str | None, is_sparse: bool, tokens: int, blocks: int) -> hlo.Counts:
    """Counts of the compiled attention of one layer, over a row of so many blocks; nothing is run."""
    where = None if mesh is None else parse_mesh(mesh)
    pages = Cache.pool(CONFIG, blocks, 1, blocks, "float32", where).stacks[is_sparse]
    numbers, width = lambda *sizes: jnp.zeros(sizes, jnp.int32), CONFIG.index_head_dim
    keys = jnp.zeros((1, tokens, CONFIG.num_key_value_heads, CONFIG.head_dim))
    heads = Heads(q=jnp.zeros((1, tokens, CONFIG.num_attention_heads, CONFIG.head_dim)), k=keys, v=keys)
    if is_sparse:
        index_q = jnp.zeros((*keys.shape[:3], width))
        heads = heads._replace(index_q=index_q, index_k=index_q[:, :, 0])
    places = Places(numbers(1, blocks), numbers(1, tokens), numbers(1, tokens))
    call = LayerCall(numbers(), places, numbers(1, tokens), numbers(1))
    rules = selection_rules(CONFIG, "max") if is_sparse else None

    def layer(heads, pages, call):
        projections = Projections.of_heads(heads)
        if where is None:
            return attend(projections, pages, call, rules, Tap())
        return attend_over_mesh(projections, pages, call, rules, Tap(), where)

    return hlo.count(jax.jit(layer, donate_argnums=1).lower(heads, pages, call).compile(QUICK).as_text())


@pytest.mark.parametrize("is_sparse, tokens", [(True, 1), pytest.param(False, 16, marks=pytest.mark.further)])
def test_eight_devices_do_an_eighth_of_the_work_each(is_sparse, tokens):
    """T51: products and memory of a long row, in a step of a sparse layer and a chunk of a dense one.

    Devices exchange J candidates for a query and head, and one output; the scores of all blocks would be 64 KiB. Few
    bytes are gathered: ids and keys in one, outputs and their log-sum-exp in another.
    """
    one, each = (one_layer(mesh, is_sparse, tokens, blocks=4096) for mesh in (None, "context=8"))
    assert one.unknown_loops == each.unknown_loops == 0
    assert 1 / 8 <= each.flops / one.flops < 1.1 / 8
    assert 0.9 / 8 < each.traffic / one.traffic < 1.1 / 8
    heads, candidates = CONFIG.num_attention_heads, 8 * CONFIG.num_key_value_heads * CONFIG.index_topk_blocks
    of_outputs = 8 * 4 * tokens * heads * (CONFIG.head_dim + 1)  # out and lse of each device
    assert each.collective_bytes == {"all-gather": is_sparse * tokens * candidates * (4 + 4) + of_outputs}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_cache_stays_where_it_was_put(mesh):
    """Else each step would move it."""
    fresh = Cache.init(CONFIG, BATCH, LENGTH, "float32", parse_mesh(mesh))
    for x, y in zip(jax.tree.leaves(fresh), jax.tree.leaves(results(mesh)[1]), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


# Experts

MOE = tiny.config("mm")
ALPHA, LIMIT = MOE.swiglu_alpha, MOE.swiglu_limit


def routed(tokens: int, skewed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, two experts for each, and their weights; skewed, all take the two experts of one device."""
    draw = np.random.default_rng(tokens)
    ids = np.argsort(draw.random((tokens, 2 if skewed else MOE.num_local_experts)), axis=1)[:, :2]
    weights = draw.uniform(size=ids.shape)
    return draw.normal(size=(tokens, MOE.hidden_size)).astype(np.float32), ids.astype(np.int32), np.float32(weights)


@cache
def layer_of_experts(mesh: str | None, platform: str):
    """The second layer's experts as a platform runs them, and their gradients."""
    experts = tiny.model(MOE, mesh=parse_mesh(mesh) if mesh else None).stacks[0].mlp.experts

    def both(experts, x, ids, weights):
        how = OverMesh(Compute(mesh=parse_mesh(mesh))) if mesh else Fast(Compute())

        def run(experts, x, weights):
            act = lambda gate, up: swiglu_oai(gate, up, ALPHA, LIMIT).astype(x.dtype)
            matrices = matrices_of(experts)
            none = tuple(jnp.zeros_like(matrix.stack[0, 0]) for matrix in matrices)  # a shared expert that adds nothing
            return how.experts(x[None], ids[None], weights[None], matrices, act, none, 1.0)[0]

        out, back = jax.vjp(run, experts, x, weights)
        return out, back(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    call = jax.jit(both, compiler_options=QUICK)

    def run(*args):
        with mock.patch("m3jax.ops.experts.platform", lambda: platform):
            return jax.device_get(call(experts, *args))

    return run


@pytest.mark.parametrize(
    "mesh, platform",
    [
        ("data=2,context=2,expert=2", "cpu"),
        pytest.param("data=2,context=2,expert=2", "gpu", marks=pytest.mark.further),
        pytest.param("context=3", "cpu", marks=pytest.mark.further),
        ("expert=4,tensor=2", "tpu"),
    ],
)
def test_experts_are_one_device_s(mesh, platform):
    """T52: Every platform's way, and its gradients; tokens that no axis divides; devices whose experts nobody chose."""
    for tokens, skewed in ((5, False), (5, True), (46, False)):
        args = routed(tokens, skewed)
        found, expected = layer_of_experts(mesh, platform)(*args), layer_of_experts(None, "cpu")(*args)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def even(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens that choose neighbouring experts in turn, the last of them no second one: as many for each device."""
    x, _, weights = routed(tokens, False)
    ids = (np.arange(tokens)[:, None] + [0, 1]) % MOE.num_local_experts
    ids[-1, 1], weights[-1, 1] = -1, 0.0
    return x, ids.astype(np.int32), weights


def matrices_of(experts) -> list[StackedLayer]:
    """Gate, up and down of the second layer."""
    of_stacks = (experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
    return [StackedLayer(matrix, jnp.int32(1)) for matrix in of_stacks]


@cache
def divided_experts(mesh: str | None):
    """The second layer's experts, its shared one among them, in a call with a cache on a mesh or on one device."""
    model = tiny.model(MOE, mesh=parse_mesh(mesh) if mesh else None)
    how = model.execution(has_cache=True)

    def run(mlp, x, ids, weights):
        act = lambda gate, up: swiglu_oai(gate, up, ALPHA, LIMIT).astype(x.dtype)
        own = how.prepared(jax.tree.map(lambda leaf: leaf[1], mlp.shared_experts))
        of_rows = x[None], ids[None], weights[None]
        return how.experts(*of_rows, matrices_of(mlp.experts), act, own.matrices(), 2.0)[0]

    return partial(jax.jit(run, compiler_options=QUICK), model.stacks[0].mlp)


@pytest.mark.parametrize(
    "mesh", [pytest.param("expert=8", marks=pytest.mark.further), "data=2,expert=4", "context=3,tensor=2"]
)
def test_divided_tokens_meet_their_experts(mesh):
    """T52: dispatched to them evenly; too unevenly for the places there are; gathered; of an axis that divides none."""
    for args in (even(256), routed(256, True), routed(256, False)):
        found, expected = divided_experts(mesh)(*args), divided_experts(None)(*args)
        comparisons.assert_close(found, expected, "sum of experts", "X D", rtol=1e-5, atol=2e-5)


def test_experts_are_dispatched_to_where_that_moves_less():
    """M3's: 4 experts a token."""
    places = {n: dispatch_capacity(1024, 4, n) for n in (2, 4, 8, 64)}
    assert places == {2: None, 4: None, 8: 640, 64: 96}


def test_the_axes_of_matrices_are_those_that_they_were_made_with():
    """What `Divided` says of a layer's matrices, by their names, is what the model said when it made them."""
    named, _ = jax.tree_util.tree_flatten_with_path(
        tiny.logical_axes(CONFIG), is_leaf=lambda leaf: isinstance(leaf, tiny.LogicalAxes)
    )
    made = {}
    for path, axes in named:
        *_, room, name = ["", *dotted_path(path).split(".")]
        if name.endswith("_proj") and room != "experts":
            made.setdefault(name, set()).add(tuple(axes[1:]))
    assert made == {name: {axes} for name, axes in MATRIX_AXES.items()}


def largest_collective(text: str) -> float:
    """Elements of the largest array that a device gives to a collective; they are in float32."""
    given = lambda c: c.num_bytes / 4 / (c.num_devices if c.kind == "all-gather" else 1)
    return max(map(given, hlo.collectives(text)))


def test_a_decode_step_moves_no_expert():
    """Indexing divided experts would have XLA bring each chosen one to all devices."""
    mesh = "context=2,expert=2,tensor=2"
    one = CONFIG.hidden_size * CONFIG.intermediate_size // parse_mesh(mesh).shape["tensor"]
    assert 0 < largest_collective(results(mesh)[2]) < one


# The rules


def specs(tree) -> dict[str, P]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    return {name(path): leaf.spec for path, leaf in leaves}


def test_where_each_parameter_lives():
    mesh = make_mesh(data=2, expert=2, tensor=2)
    found = specs(m3_model.shardings(CONFIG, mesh))
    replicated = {name for name, where in found.items() if not any(where)}
    assert {name.split(".")[-1] for name in replicated} == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "index_q_norm", "index_k_norm",
        "index_k_proj", "gate", "e_score_correction_bias",
    }  # fmt: skip
    up, down = P(None, None, "tensor"), P(None, "tensor", None)
    expected = {"embed_tokens": P("tensor", None), "lm_head": P(("context", "expert", "tensor"), None)}
    for stack, mlp in (("stacks.0.", "mlp."), ("stacks.1.", "mlp.shared_experts.")):
        expected |= {f"{stack}{mlp}{name}_proj": up for name in ("gate", "up")}
        expected[f"{stack}{mlp}down_proj"] = down
        expected |= {f"{stack}self_attn.{x}_proj": P(None, None, "tensor", None) for x in "qkv"}
        expected[f"{stack}self_attn.o_proj"] = P(None, "tensor", None, None)
    expected["stacks.1.self_attn.index_q_proj"] = P(None, None, "tensor", None)
    experts = "stacks.1.mlp.experts."
    expected |= {f"{experts}{name}_proj": P(None, "expert", None, "tensor") for name in ("gate", "up")}
    expected[f"{experts}down_proj"] = P(None, "expert", "tensor", None)
    assert {name: where for name, where in found.items() if name not in replicated} == expected
    placed = model("data=2,expert=2,tensor=2")
    assert specs(jax.tree.map(lambda x: x.sharding, placed)) == found


def test_where_the_cache_lives():
    cache = Cache.init(CONFIG, 2, 16, mesh=make_mesh(data=2, tensor=4))
    dense, sparse = cache.stacks
    for x in (dense.k, dense.v, sparse.k, sparse.v):
        assert x.sharding.spec == P(None, ("data", "context", "expert"), "tensor", None, None)
    # All KV heads read the one index key.
    assert sparse.index_k.sharding.spec == P(None, ("data", "context", "expert"), None, None)


def test_few_kv_heads_are_replicated():
    mesh = make_mesh(tensor=8)
    found = specs(m3_model.shardings(CONFIG, mesh))
    assert not any(found["stacks.1.self_attn.k_proj"])
    assert found["stacks.1.self_attn.q_proj"] == P(None, None, "tensor", None)
    cache = Cache.init(CONFIG, 1, 16, mesh=mesh)
    assert not any(cache.stacks[0].k.sharding.spec)


@pytest.mark.parametrize("mesh, share", [("tensor=8", 0.127), ("expert=2,tensor=4", 0.129), ("expert=8", 0.152)])
def test_the_full_model_divides_over_eight_devices(mesh, share):
    """One device holds little more than an eighth; over experts alone every device has the rest of the model."""
    config, mesh = M3Config.m3(), parse_mesh(mesh)
    held = jax.tree.map(
        lambda leaf, where: np.prod(where.shard_shape(leaf.shape)),
        m3_model.abstract(config, mesh=mesh),
        m3_model.shardings(config, mesh),
    )
    assert 1 / 8 <= sum(jax.tree.leaves(held)) / 426_174_572_928 < share


@pytest.mark.parametrize(
    "mesh, message",
    [
        (dict(tensor=3), r"axis 'vocab' of size 64 .* 3 devices of mesh axis 'tensor'"),
        (dict(expert=3), r"axis 'experts' of size 8 .* 3 devices of mesh axis 'expert'"),
    ],
)
def test_an_uneven_axis_is_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        m3_model.shardings(CONFIG, make_mesh(**mesh))


def test_pages_are_rounded_up_to_what_the_mesh_divides():
    cache = Cache.pool(CONFIG, 5, 1, 5, mesh=make_mesh(data=2, context=2, expert=2))
    assert cache.num_pages == 8


def test_neighbouring_blocks_lie_on_different_devices():
    """Else one device would do all the work of a short row."""
    mesh = make_mesh(context=4)
    cache = Cache.init(CONFIG, 2, 4 * CONFIG.index_block_size, mesh=mesh)
    owner = np.asarray(cache.table) // (cache.num_pages // 4)
    assert [sorted(row) for row in owner] == [[0, 1, 2, 3]] * 2


def test_every_rule_names_a_mesh_axis():
    assert {axis for rule in RULES.values() for axis in (rule if isinstance(rule, tuple) else (rule,))} <= set(AXES)
    seeing = VisionConfig.tiny().add_to(CONFIG)
    names = {name for axes in jax.tree.leaves(tiny.logical_axes(seeing)) for name in axes}
    assert names - {None, "layers"} == set(RULES) - {"batch", "pages", "tokens"}
    assert spec((4, 6), (None, "layers"), make_mesh(tensor=8)) == P(None, None)


def test_without_a_mesh_all_is_on_the_first_device():
    assert sharding((3,), ("vocab",), None) == SingleDeviceSharding(jax.devices()[0])


# Meshes


def test_parse_mesh():
    assert dict(parse_mesh("data=2, tensor=4").shape) == dict(data=2, context=1, expert=1, tensor=4)
    assert dict(parse_mesh("").shape) == dict(data=1, context=1, expert=1, tensor=1)
    where = NamedSharding(parse_mesh("expert=2"), P("expert"))
    assert len(jnp.zeros(4, device=where).addressable_shards) == 2


@pytest.mark.parametrize(
    "text", ["model=2", "tensor", "tensor=", "tensor=x", "tensor=-2", "tensor=2,tensor=2", "2", "tensor=²"]
)
def test_parse_mesh_says_how_to_write_one(text):
    with pytest.raises(ValueError, match="write axis=size pairs of data, context, expert, tensor"):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["tensor=16", "data=3,tensor=3", "tensor=0"])
def test_a_mesh_that_does_not_fit_is_refused(text):
    with pytest.raises(ValueError, match=r"there are \d+; give sizes of at least 1"):
        parse_mesh(text)
