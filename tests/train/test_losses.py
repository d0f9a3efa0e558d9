"""The losses of training, against numpy in float64."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support import tiny
from tiny.losses import TinyLoss, kept_loss

from m3jax.train import losses, sft
from m3jax.train.losses import index_kl, next_token_loss

BATCH, QUERIES, KEYS, HEADS, GROUPS, WIDTH, INDEX_WIDTH, BLOCK, SLOTS = 3, 13, 26, 6, 2, 8, 5, 4, 3
QUICK = {"xla_backend_optimization_level": 0}


@cache
def operands(seed: int = 0) -> dict[str, np.ndarray]:
    """A chunk at the end of ragged rows, with padding after it and before it; own blocks are always chosen."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    lengths = np.array([KEYS, 17, 9], np.int32)
    positions = np.stack([np.arange(QUERIES) + first for first in (KEYS - QUERIES, 10, -3)]).astype(np.int32)
    own = np.maximum(positions, 0)[:, None] // BLOCK
    others = draw.integers(-1, -(-KEYS // BLOCK), (BATCH, GROUPS, QUERIES, SLOTS - 1))
    blocks = np.concatenate([others, np.broadcast_to(own, others.shape[:3])[..., None]], -1).astype(np.int32)
    return {
        "q": 2 * normal(BATCH, QUERIES, HEADS, WIDTH), "k": normal(BATCH, KEYS, GROUPS, WIDTH),
        "index_q": 2 * normal(BATCH, QUERIES, GROUPS, INDEX_WIDTH), "index_k": normal(BATCH, KEYS, INDEX_WIDTH),
        "blocks": blocks, "positions": positions, "lengths": lengths,
    }  # fmt: skip


def softmax(scores: np.ndarray) -> np.ndarray:
    p = np.exp(scores - scores.max())
    return p / p.sum()


def rows(x: dict[str, np.ndarray], whole: bool):
    """(teacher, student, support, chosen) of each real query and group, one at a time."""
    x = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in x.items()}
    per_group = x["q"].shape[2] // x["k"].shape[2]
    for b, t in np.ndindex(x["positions"].shape):
        position = x["positions"][b, t]
        if not 0 <= position < x["lengths"][b]:
            continue
        for g in range(x["k"].shape[2]):
            chosen = np.isin(np.arange(position + 1) // BLOCK, x["blocks"][b, g, t])
            support = np.flatnonzero(chosen | whole)
            scores = x["k"][b, support, g] @ x["q"][b, t, g * per_group : (g + 1) * per_group].T / np.sqrt(WIDTH)
            teacher = np.mean([softmax(head) for head in scores.T], axis=0)
            student = softmax(x["index_k"][b, support] @ x["index_q"][b, t, g] / np.sqrt(x["index_k"].shape[-1]))
            yield (b, t, g), teacher, student, support, chosen[support]


def loss_of(x: dict[str, np.ndarray], whole: bool) -> jax.Array:
    return index_kl(**jax.tree.map(jnp.asarray, x | {"blocks": None} if whole else x), block_size=BLOCK)


WHOLE = pytest.mark.parametrize("whole", [True, False], ids=["warm-up", "selected"])


@WHOLE
@pytest.mark.parametrize("chunk", [1 << 26, 2000], ids=["at once", "chunks"])
def test_index_loss_is_the_divergence_from_mean_attention(monkeypatch, whole, chunk):
    """Padding does not count; the mean is over real queries and groups."""
    monkeypatch.setattr(losses, "_SCORE_BUDGET", chunk)
    found = [np.sum(teacher * np.log(teacher / student)) for _, teacher, student, *_ in rows(operands(), whole)]
    assert len(found) == GROUPS * (QUERIES + 7 + 9)
    np.testing.assert_allclose(loss_of(operands(), whole), np.mean(found), rtol=1e-5)


@WHOLE
def test_gradient_of_the_index_loss(whole):
    """Student less teacher per score, and nothing at all for the trunk's queries and keys (T33)."""
    x = operands()
    inputs = [x[k] for k in ("q", "k", "index_q", "index_k")]
    fn = lambda *a: loss_of(x | dict(zip(("q", "k", "index_q", "index_k"), a, strict=True)), whole)
    dq, dk, d_index_q, d_index_k = jax.jit(jax.grad(fn, argnums=range(4)))(*inputs)
    assert not np.any(dq) and not np.any(dk)
    expected_q, expected_k = np.zeros(x["index_q"].shape), np.zeros(x["index_k"].shape)
    found = list(rows(x, whole))
    for (b, t, g), teacher, student, support, _ in found:
        d = (student - teacher) / np.sqrt(INDEX_WIDTH) / len(found)
        expected_q[b, t, g] = d @ x["index_k"][b, support]
        expected_k[b, support] += d[:, None] * x["index_q"][b, t, g]
    np.testing.assert_allclose(d_index_q, expected_q, atol=1e-7)
    np.testing.assert_allclose(d_index_k, expected_k, atol=1e-6)


@WHOLE
@pytest.mark.parametrize("seed", range(4))
def test_index_loss_is_positive_and_zero_for_a_perfect_student(whole, seed):
    """One head a group and one group: an index branch that copies them has nothing left to learn."""
    x = operands(seed)
    assert loss_of(x, whole) > 1e-2
    one = x | {"q": x["q"][:, :, :1], "k": x["k"][:, :, :1], "blocks": x["blocks"][:, :1]}
    perfect = one | {"index_q": one["q"], "index_k": one["k"][:, :, 0]}
    np.testing.assert_allclose(loss_of(perfect, whole), 0.0, atol=1e-6)


def test_index_loss_of_padding_alone_is_zero():
    x = operands()
    for none in ({"lengths": np.zeros(BATCH, np.int32)}, {"positions": np.full_like(x["positions"], -1)}):
        assert loss_of(x | none, whole=False) == 0 == loss_of(x | none, whole=True)


def test_index_loss_does_not_read_beyond_the_lengths():
    """T8: slots that nobody sees may hold anything."""
    x = operands()
    beyond = np.arange(KEYS) >= x["lengths"][:, None]
    for garbage in (np.nan, np.inf, 1e30):
        poisoned = {k: np.where(beyond[(...,) + (None,) * (x[k].ndim - 2)], garbage, x[k]) for k in ("k", "index_k")}
        for whole in (True, False):
            poisoned = {k: v.astype(np.float32) for k, v in poisoned.items()}
            np.testing.assert_array_equal(loss_of(x | poisoned, whole), loss_of(x, whole))


def test_next_token_loss():
    draw = np.random.default_rng(0)
    logits, targets = draw.normal(size=(2, 5, 7)).astype(np.float32), draw.integers(0, 7, (2, 5))
    weights = draw.choice([0.0, 1.0, 3.0], (2, 5)).astype(np.float32)
    nll = np.zeros((2, 5))
    for at in np.ndindex(2, 5):
        nll[at] = -np.log(softmax(logits[at].astype(np.float64))[targets[at]])
    loss = lambda x, w: next_token_loss(jnp.asarray(x), jnp.asarray(targets), jnp.asarray(w))
    np.testing.assert_allclose(loss(logits, weights), np.average(nll, weights=weights), rtol=1e-6)
    assert loss(logits, 0 * weights) == 0
    np.testing.assert_allclose(loss(logits, 0.01 * weights), np.sum(0.01 * weights * nll), rtol=1e-6)  # no mean below 1
    check_grads(lambda x: loss(x, weights), (logits,), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_the_log_probability_of_a_token_is_read_before_it(unchecked):
    """Of the model's own logits; with a temperature of these divided by it; with a support among its tokens alone."""
    draw = np.random.default_rng(0)
    hidden, matrix = draw.normal(size=(2, 4, 3)).astype(np.float32), draw.normal(size=(3, 40)).astype(np.float32)
    tokens = draw.integers(0, 40, (2, 4))
    allowed = draw.random((2, 3, 40)) < 0.5
    np.put_along_axis(allowed, tokens[:, 1:, None], True, axis=-1)
    words = np.zeros((2, 3, 2), np.int64)
    for token in range(40):
        words[..., token // 32] |= allowed[..., token].astype(np.int64) << (token % 32)
    support = words.astype(np.uint32).view(np.int32).reshape(2, 3, 2)
    compute = SimpleNamespace(invariant=False, token_tile=None)
    model = SimpleNamespace(compute=compute, unembed=lambda hidden: hidden @ matrix)
    of = lambda support, temperature: losses.logprobs_of_hidden(model, hidden, tokens, support, temperature)
    found = jax.jit(lambda support: (of(None, None), of(None, 0.5), of(support, None), of(support, 2.0)))(support)
    logits = (hidden @ matrix)[:, :-1]
    for number, (is_left, temperature) in enumerate(((True, 1.0), (True, 0.5), (allowed, 1.0), (allowed, 2.0))):
        kept = np.where(is_left, logits / temperature, -np.inf)
        expected = kept - np.log(np.exp(kept).sum(axis=-1, keepdims=True))
        expected = np.take_along_axis(expected, tokens[:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose(found[number], expected, rtol=1e-4, atol=1e-5, err_msg=str(number))


def test_the_index_loss_looks_at_every_so_many_tokens(monkeypatch, unchecked):
    """Where it begins is drawn anew for each step, evenly; keys are those of the query's own document."""
    steps, of_loss = jnp.arange(200, dtype=jnp.int32), losses.MSALoss(kl_stride=4).offset
    drawn = lambda step: (losses.drawn_offset(step, 4), of_loss({"step": step}), of_loss({}))
    offsets, same, first = jax.jit(jax.vmap(drawn))(steps)
    assert sorted(np.unique(offsets)) == [0, 1, 2, 3] and np.bincount(offsets).min() > 30
    assert np.array_equal(offsets, same) and (first == offsets[0]).all()
    monkeypatch.setattr(losses, "index_kl", lambda *given, **named: (given, named))
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, -1]])
    of_tokens = jnp.arange(8)[None]
    values = dict(q=of_tokens, k="k", index_q=of_tokens + 10, index_k="index k", blocks=of_tokens[None] + 20)
    context = SimpleNamespace(positions=positions, lengths="lengths")
    found = sft.index_losses(values, context, 4, np.int32(1), 3)["kl"]
    (q, k, index_q, index_k), named = found
    assert (q.tolist(), k, index_q.tolist(), index_k) == ([[1, 4]], "k", [[11, 14]], "index k")
    assert named["blocks"].tolist() == [[[21, 24]]] and named["positions"].tolist() == [[1, 4]]
    assert named["first_keys"].tolist() == [[0, 4]] and (named["lengths"], named["block_size"]) == ("lengths", 4)
    del values["blocks"]
    assert sft.index_losses(values, context, 4, jnp.int32(0), 3)["kl"][1]["blocks"] is None
    assert sft.index_losses({"q": of_tokens}, context, 4, jnp.int32(0), 3) == {}


# Through the model

CONFIG = tiny.config("M")


def batch() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    recall = draw.random((2, 64)) < 0.2
    return {"tokens": tiny.tokens(CONFIG, 2, 65), "weights": np.ones((2, 64), np.float32), "recall": recall}


@cache
def gradients(schedule: str) -> dict[str, dict[str, np.ndarray]]:
    """By loss, the gradient by parameter name."""
    loss_fn = TinyLoss(kl_stride=4, recall_weight=1.0, remat=schedule == "mask")
    arrays = jax.tree.map(jnp.asarray, batch())
    one = lambda name: lambda model: loss_fn(model, arrays)[1][name]
    names = ("lm", "kl", "recall") if schedule == "mask" else ("lm", "kl")
    grad = jax.jit(lambda m: {k: jax.grad(one(k))(m) for k in names}, compiler_options=QUICK)
    found = jax.device_get(grad(tiny.under(tiny.model(CONFIG), schedule)))
    named = lambda tree: {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    return {name: named(tree) for name, tree in found.items()}


@pytest.mark.parametrize("schedule", [pytest.param("dense", marks=pytest.mark.further), "mask"])
def test_no_gradient_leaks_between_trunk_and_index_branch(schedule):
    """T33, exactly: in bfloat16, in both stages, in that with selection with remat too."""
    found = gradients(schedule)
    for name, grad in found["lm"].items():
        still = "index_" in name or "e_score_correction_bias" in name
        assert np.any(grad) != still and np.all(np.isfinite(grad)), name
    for name, grad in found["kl"].items():
        assert np.any(grad) == ("index_" in name) and np.all(np.isfinite(grad)), name


def test_recall_is_measured_not_trained():
    """The loss of recalled values alone is a metric; what trains is the language loss with its extra weights."""
    assert not any(np.any(grad) for grad in gradients("mask")["recall"].values())


def test_kept_targets_are_a_distribution_and_the_others_a_token():
    draw = np.random.default_rng(0)
    logits, expected = (jnp.asarray(draw.normal(size=(2, 5, 7)).astype(np.float32)) for _ in range(2))
    targets, weights = jnp.asarray(draw.integers(7, size=(2, 5))), jnp.asarray(draw.random((2, 5)).astype(np.float32))
    kept = jnp.asarray(draw.random((2, 5)) < 0.5)
    of_token = np.eye(7)[targets]
    target = np.where(kept[..., None], np.apply_along_axis(softmax, -1, np.asarray(expected, float)), of_token)
    log_p = np.log(np.apply_along_axis(softmax, -1, np.asarray(logits, float)))
    right = -((target * log_p).sum(-1) * weights).sum() / max(weights.sum(), 1)
    np.testing.assert_allclose(kept_loss(logits, targets, weights, expected, kept), right, rtol=1e-5)
    none = kept_loss(logits, targets, weights, expected, jnp.zeros_like(kept))
    np.testing.assert_allclose(none, next_token_loss(logits, targets, weights), rtol=1e-6)
