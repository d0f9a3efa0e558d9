"""Losses, drafts and shared prompts with no model: what each part is given, and what becomes of what it gives."""

import contextlib
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from m3jax.model import Choices
from m3jax.msa import SelectionRules
from m3jax.ops import Heads
from m3jax.train import convert, eagle3, grpo, lora, losses, packing, rollouts, sft, shared_prompts, units
from m3jax.train import step as steps
from m3jax.train.convert import WarmUpLoss
from m3jax.train.documents import load_documents
from m3jax.train.eagle3 import DraftState, draft_losses
from m3jax.train.lora import LoraLoss
from m3jax.train.rollouts import RolloutLoss
from m3jax.train.sft import SFTLoss
from m3jax.train.shared_prompts import GroupPages, answer_logprobs

pytestmark = pytest.mark.usefixtures("unchecked")


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# Losses


@pytest.fixture
def read(monkeypatch):
    """Replaces what prepares a model: how it was prepared stands in its name."""
    for module in (sft, convert, rollouts):
        monkeypatch.setattr(module, "cast_weights", lambda model, dtype: model.named(dtype), raising=False)
        monkeypatch.setattr(module, "check_trainable", lambda model: None, raising=False)
    monkeypatch.setattr(sft, "with_fast_gradients", lambda model: model.named("fast"))
    monkeypatch.setattr(convert, "with_index_weights", lambda model, weights: model.named(weights))
    monkeypatch.setattr(sft, "drawn_offset", lambda step, stride: (step, stride))
    monkeypatch.setattr(convert, "drawn_offset", lambda step, stride: (step, stride))


class Measured:
    """A model that is none: its layers measured what it is told, and its trunk notes how it was called."""

    config = SimpleNamespace(index_block_size=4, index_topk_blocks=2, num_local_experts=8, vocab_size=5)

    def __init__(self, kept=(), names=(), noted=None):
        self.kept, self.names, self.noted = kept, names, {} if noted is None else noted

    def named(self, name):
        return Measured(self.kept, (*self.names, name), self.noted)

    def with_dense(self):
        return self.named("dense")

    def with_training_paths(self, *paths):
        return self.named(paths)

    def trunk(self, tokens, positions, probe=None, remat=None):
        self.noted.update(names=self.names, tokens=tokens, positions=positions, probe=probe, remat=remat)
        return tokens[..., None], None, self.kept

    def final_norm(self, x):
        return x + 1

    def unembed(self, hidden):
        return hidden * jnp.arange(5.0)


KEPT = [{"kl": jnp.array([1.0, 2.0])}, {}, {"kl": jnp.array([6.0])}]
BATCH = dict(
    tokens=jnp.array([[1.0, 2.0, 0.0, 1.0], [0.5, 1.0, 1.0, 0.0]]), targets=jnp.array([[1, 4, 0, 2], [3, 3, 1, 0]]),
    positions=jnp.array([[0, 1, 0, 1], [0, 1, 2, -1]]), weights=jnp.array([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]),
    num_targets=20.0, num_tokens=70.0, step=3,
)  # fmt: skip


def test_a_micro_batch_has_its_share_of_the_step_s_losses(read):
    """The targets' losses over those of the step; the layers' mean over the tokens of the step, of which it has 7."""
    logits = (np.asarray(BATCH["tokens"]) + 1)[..., None] * np.arange(5.0)
    of_targets = -np.take_along_axis(log_softmax(logits), np.asarray(BATCH["targets"])[..., None], axis=-1)[..., 0]
    lm = (of_targets * np.asarray(BATCH["weights"])).sum() / 20
    for weight in (0.0, 0.5):
        model = Measured(KEPT)
        loss, parts = SFTLoss(weight, index_stride=2, compute_dtype="bfloat16", remat="products")(model, BATCH)
        kl = 3.0 * 7 / 70 if weight else 0.0
        np.testing.assert_allclose(loss, lm + weight * kl, rtol=1e-6)
        assert {name: float(x) for name, x in parts.items()} == pytest.approx(
            {"lm": lm, **({"kl": kl} if weight else {})}
        )
        noted = model.noted
        assert noted["names"] == ("bfloat16", "fast") and noted["remat"] == "products"
        assert noted["tokens"] is BATCH["tokens"] and noted["positions"] is BATCH["positions"]
        settings = dict(block_size=4, offset=(3, 2), stride=2)
        assert noted["probe"] is None if not weight else noted["probe"].keywords == settings
    assert model.noted["probe"].func is sft.index_losses


def test_the_warm_up_reads_a_dense_model_with_the_branch_that_is_trained(read):
    model = Measured(KEPT)
    loss, parts = WarmUpLoss(index_stride=2, compute_dtype="bfloat16")("branch", BATCH | {"base": model})
    assert float(loss) == float(parts["kl"]) == pytest.approx(3.0 * 7 / 70) and parts.keys() == {"kl"}
    assert model.noted["names"] == ("branch", "bfloat16", "dense", (packing.PackedPages, "auto"))
    assert model.noted["probe"].keywords == dict(block_size=4, offset=(3, 2), stride=2)
    assert model.noted["probe"].func is sft.index_losses


def test_the_index_loss_looks_at_every_so_many_tokens(monkeypatch):
    """Where it begins is drawn anew for each step, evenly; keys are those of the query's own document."""
    steps, of_loss = jnp.arange(200, dtype=jnp.int32), losses.MSALoss(kl_stride=4).offset
    drawn = lambda step: (sft.drawn_offset(step, 4), of_loss({"step": step}), of_loss({}))
    offsets, same, first = jax.jit(jax.vmap(drawn))(steps)
    assert sorted(np.unique(offsets)) == [0, 1, 2, 3] and np.bincount(offsets).min() > 30
    assert np.array_equal(offsets, same) and (first == offsets[0]).all()
    monkeypatch.setattr(sft, "index_kl", lambda *given, **named: (given, named))
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


def test_logits_of_so_many_tokens_are_held_as_the_budget_has_room_for(monkeypatch):
    taken = []
    monkeypatch.setattr(sft, "map_chunks", lambda fn, chunk, axis, *arrays: taken.append((chunk, axis)) or fn(*arrays))
    monkeypatch.setattr(sft, "_LOGITS_BUDGET", 45)
    hidden = BATCH["tokens"][..., None] + 1
    logits = np.asarray(hidden) * np.arange(5.0)
    found = sft.token_losses(Measured(), hidden, BATCH["targets"])
    expected = -np.take_along_axis(log_softmax(logits), np.asarray(BATCH["targets"])[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert taken == [(4, 1)]  # 4 tokens of 2 rows of 5 logits are 40


def test_a_conversion_measures_the_same_weights_dense_and_selecting(monkeypatch, read):
    """Sums over a batch; a query counts where it leaves a block out."""
    by_trunk = [{}, {"caught": jnp.array([1.0]), "window": jnp.array([2.0])}, {"caught": jnp.array([3.0, 4.0])}]
    by_trunk[2]["window"] = jnp.array([5.0, 6.0])
    model = Measured(by_trunk)
    seen = []
    monkeypatch.setattr(convert, "losses_of_tokens", lambda model, x, targets: seen.append((model, x)) or 2.0 * targets)
    batch = BATCH | {"positions": jnp.array([[6, 7, 8, 9], [0, 11, 12, -1]])}
    found = convert._measures.__wrapped__(model, batch, "bfloat16")
    loss = float((2 * BATCH["targets"] * BATCH["weights"]).sum())
    expected = dict(dense=loss, sparse=loss, targets=5.0, queries=4, caught=[1, 3, 4], window=[2, 5, 6])
    assert {name: np.asarray(x).tolist() for name, x in found.items()} == expected
    names = [model.names for model, _ in seen]
    assert names[1] == ("bfloat16", (packing.PackedPages, "auto")) and names[0] == (*names[1], "dense")
    assert all(np.array_equal(x, BATCH["tokens"][..., None] + 1) for _, x in seen)
    assert model.noted["positions"] is batch["positions"] and model.noted["tokens"] is BATCH["tokens"]
    assert (
        model.noted["probe"].keywords == dict(block_size=4, num_kept=2) and model.noted["probe"].func is convert._caught
    )


def test_the_log_probability_of_a_token_is_read_before_it():
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
        expected = log_softmax(np.where(is_left, logits / temperature, -np.inf))
        expected = np.take_along_axis(expected, tokens[:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose(found[number], expected, rtol=1e-4, atol=1e-5, err_msg=str(number))


def test_a_language_model_learns_the_next_token_and_its_index_branch(monkeypatch):
    """The branch's loss is the mean over all sparse layers, and weighed; loads are those of the stacks."""
    kept = [{"kl": jnp.array([1.0, 2.0]), "load": "loads"}, {}, {"kl": jnp.array([6.0])}]
    model, loss = Measured(kept), losses.MSALoss(kl_weight=0.5, kl_stride=2, remat="products", fused=True)
    trunk = lambda tokens, embeddings, probe, remat: Measured.trunk(model, tokens, embeddings, probe, remat)
    prepared = SimpleNamespace(trunk=trunk, config=Measured.config, final_norm=model.final_norm, unembed=model.unembed)
    monkeypatch.setattr(losses, "check_trainable", lambda of: None)
    monkeypatch.setattr(losses, "cast_weights", lambda of, dtype: (of, dtype))
    monkeypatch.setattr(losses, "fuse", lambda given: prepared if given == ("master", "bfloat16") else None)
    tokens = np.array([[1, 2, 0, 1, 3], [0, 1, 1, 0, 4]])
    weights = np.float32([[1, 0, 2, 1], [1, 1, 0, 0]])
    value, parts = loss("master", {"tokens": tokens, "weights": weights, "step": 3})
    logits = (tokens[:, :-1] + 1.0)[..., None] * np.arange(5.0)
    of_targets = -np.take_along_axis(log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    lm = (of_targets * weights).sum() / 6
    np.testing.assert_allclose([value, parts["lm"], parts["kl"]], [lm + 0.5 * 3, lm, 3], rtol=1e-5)
    assert parts["loads"] == ["loads", None, None] and model.noted["remat"] == "products"
    probe = model.noted["probe"].keywords
    assert (probe["block_size"], probe["num_experts"], probe["loss"]) == (4, 8, loss)
    assert int(probe["offset"]) == int(loss.offset({"step": 3}))
    assert losses.MSALoss().prepare("master") == ("master", "bfloat16")
    assert float(losses.layer_parts([{}])["kl"]) == 0.0
    nothing = losses.next_token_loss(jnp.zeros((1, 2, 3)), jnp.zeros((1, 2), int), jnp.zeros((1, 2)))
    half = losses.next_token_loss(jnp.zeros((1, 2, 3)), jnp.zeros((1, 2), int), jnp.full((1, 2), 0.25))
    assert float(nothing) == 0.0 and float(half) == pytest.approx(0.5 * np.log(3))  # weights below 1 are no mean


def test_loads_are_shares_of_the_routed_pairs(monkeypatch):
    monkeypatch.setattr(losses, "index_kl", lambda *given, **named: (given, named))
    of_tokens = np.arange(7)[None]
    values = dict(q=of_tokens, k="k", index_q=of_tokens + 10, index_k="index k", blocks=of_tokens[None] + 20)
    values["expert_ids"] = jnp.array([[[0, 1], [1, 3], [1, 0], [3, 1]]])
    context = SimpleNamespace(positions=of_tokens + 30, lengths="lengths")
    measure = lambda values, loss: losses._layer_measures(values, context, 4, 5, np.int32(1), loss)
    found = measure(values, losses.MSALoss(kl_stride=3))
    (q, k, index_q, index_k), named = found["kl"]
    assert (q.tolist(), k, index_q.tolist(), index_k) == ([[1, 4]], "k", [[11, 14]], "index k")
    assert named.pop("blocks").tolist() == [[[21, 24]]] and named.pop("positions").tolist() == [[31, 34]]
    assert named == dict(lengths="lengths", block_size=4)
    assert found["load"].tolist() == [0.25, 0.5, 0.0, 0.25, 0.0]
    assert measure(values, losses.MSALoss(kl_weight=0.0)).keys() == {"load"}
    assert measure({"q": of_tokens}, losses.MSALoss()) == {}


def test_scores_of_so_many_queries_are_held_as_the_budget_has_room_for(monkeypatch):
    """Of each query a score of every head's key and two of every group's."""
    x = lambda *shape: np.zeros(shape, np.float32)
    taken, batch, queries, keys = [], 2, 16, 8
    noted = lambda fn, chunk, axis, *arrays: taken.append((chunk, axis)) or jnp.zeros((batch, queries, 2))
    monkeypatch.setattr(losses, "map_chunks", noted)
    positions, blocks = np.zeros((batch, queries), np.int32), np.zeros((batch, 2, queries, 3), np.int32)
    each = batch * (6 + 2 * 2) * keys
    for budget, count in ((each * 4, 4), (each * 4 - 1, 2), (each * 99, 16), (1, 1)):
        monkeypatch.setattr(losses, "_SCORE_BUDGET", budget)
        for chosen in (None, blocks):
            losses.index_kl(
                x(batch, queries, 6, 3), x(batch, keys, 2, 3), x(batch, queries, 2, 5), x(batch, keys, 5), chosen,
                positions, np.full(batch, keys, np.int32), block_size=4,
            )  # fmt: skip
            assert taken.pop() == (count, 1)


def test_a_policy_is_its_own_old_one_in_the_first_step(monkeypatch, read):
    """What the model reads has its gradient in the loss, and none in what is handed on."""
    read_of = lambda model, batch, remat, temperature: model.w * jnp.array([[1.0, 2.0]])
    monkeypatch.setattr(rollouts, "logprobs_of_batch", read_of)
    policy = lambda new, old, sampler, **more: (jnp.sum(new * old) + jnp.sum(sampler), {"more": {**more}})
    loss_fn = RolloutLoss(policy, compute_dtype="bfloat16", remat=True, temperature=0.5)

    def loss(w, **more):
        model = SimpleNamespace(w=w, named=lambda dtype: SimpleNamespace(w=w) if dtype == "bfloat16" else None)
        batch = dict(old=np.array([[5.0, 7.0]]), sampler=np.array([[1.0, 1.0]]), mask=np.array([[True, False]]))
        return loss_fn(model, batch | dict(advantages=np.array([2.0]), reference=None, tokens="unread") | more)

    for flag, old, slope in (
        ({}, [5, 7], 19),
        (dict(is_on_policy=False), [5, 7], 19),
        (dict(is_on_policy=True), [3, 6], 15),
    ):
        (value, parts), gradient = jax.value_and_grad(loss, has_aux=True)(3.0, **flag)
        assert float(value) == np.dot([3, 6], old) + 2 and float(gradient) == slope
        assert parts["logprobs"].tolist() == [[3.0, 6.0]] and parts["more"].keys() == {"advantages", "mask"}
    own = jax.grad(lambda w: jnp.sum(loss(w)[1]["logprobs"]))(3.0)
    assert float(own) == 0.0 and loss(3.0, reference=np.zeros((1, 2)))[1]["more"].keys() == {
        "advantages", "mask", "reference"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_computes_rows_of_16_bits_by_cudnn(monkeypatch, dtype):
    """The same attention, for which nothing is cut; a query that sees nothing gets 0. Float32 is cut as elsewhere."""
    cut, seen = [], []
    attend, chunks = jax.nn.dot_product_attention, packing.map_chunks

    def noted(*rows, mask, implementation):
        seen.append(implementation)
        return attend(*rows, mask=mask, implementation="xla")

    monkeypatch.setattr(packing.jax.nn, "dot_product_attention", noted)
    monkeypatch.setattr(packing, "map_chunks", lambda *given: cut.append(given[1]) or chunks(*given))
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(2, n, heads, 8)).astype(jnp.dtype(dtype)) for n, heads in ((4, 4), (6, 2), (6, 2)))
    drops = draw.integers(0, 2, (2, 4, 1, 6)) == 1
    drops[1, 2] = True

    def visible(drops, count):
        return ~drops.swapaxes(1, 2)[..., :count] & (jnp.arange(count) <= jnp.arange(2, 6)[:, None])[None, None]

    found = {}
    for name in ("cpu", "gpu"):
        monkeypatch.setattr(packing, "platform", lambda name=name: name)
        attend_all = jax.jit(lambda *given: packing.attend_by_chunks(*given[:3], visible, given[3]))
        found[name] = np.asarray(attend_all(q, k, v, drops), np.float32)
    np.testing.assert_allclose(found["gpu"], found["cpu"], atol=3e-2 if dtype == "bfloat16" else 1e-6)
    assert not found["gpu"][1, 2].any() and found["gpu"][1, 1].any()
    assert (len(cut), seen) == ((1, ["cudnn"]) if dtype == "bfloat16" else (2, []))


def test_documents_of_a_row_are_read_and_selected_from_alone():
    """Queries are the row's last: two documents of 7 and 5 tokens in blocks of 2, and padding between and behind."""
    draw, block, first, slots = np.random.default_rng(3), 2, 2, 14
    positions = np.array([[*range(2, 7), -1, *range(5), -1]], np.int32)
    starts = np.array([0] * 5 + [-1] + [8] * 5 + [-1])
    q, k, v = (draw.normal(size=(1, n, heads, 3)).astype(np.float32) for n, heads in ((12, 4), (14, 2), (14, 2)))
    index_q, index_k = (
        draw.normal(size=(1, 12, 2, 3)).astype(np.float32),
        draw.normal(size=(1, 14, 3)).astype(np.float32),
    )
    rules = SelectionRules(top_k=2)

    @jax.jit
    def run(q, k, v, index_q, index_k):
        chosen = packing.select_in_documents(index_q, index_k, positions, rules, block)
        in_row = packing.in_row(chosen, positions, slots, block)
        every = packing.attend_to_documents(q, k, v, positions)
        return chosen, in_row, every, packing.attend_to_blocks(q, k, v, positions, in_row, block)

    chosen, in_row, every, selected = run(q, k, v, index_q, index_k)
    for t in np.flatnonzero(positions[0] >= 0):
        slot, start = first + t, starts[t]
        for group in range(2):
            scores = index_k[0, start : slot + 1] @ index_q[0, t, group]
            of_blocks = [scores[i : i + block].max() for i in range(0, len(scores), block)]
            own = len(of_blocks) - 1
            kept = {own, int(np.argmax(of_blocks[:own]))} if own else {0}
            assert {*chosen[0, group, t].tolist()} - {-1} == kept
            assert {*in_row[0, group, t].tolist()} - {-1} == {x + start // block for x in kept}
            seen = np.arange(start, slot + 1)
            for head in (2 * group, 2 * group + 1):
                for out, keys in ((every, seen), (selected, seen[np.isin((seen - start) // block, [*kept])])):
                    weights = np.exp(log_softmax(k[0, keys, group] @ q[0, t, head] / np.sqrt(3)))
                    np.testing.assert_allclose(out[0, t, head], weights @ v[0, keys, group], rtol=1e-4, atol=1e-5)


def test_what_is_caught_is_attention_in_the_selected_blocks_and_in_the_last_ones():
    """By the definition, token by token: two documents in a row, of whose queries those from block J on count."""
    draw, block, kept = np.random.default_rng(0), 2, 2
    q, k = draw.normal(size=(1, 12, 4, 3)).astype(np.float32), draw.normal(size=(1, 12, 2, 3)).astype(np.float32)
    positions = np.array([[*range(8), 0, 1, 2, -1]], np.int32)
    own = np.arange(12) // block
    blocks = np.stack([np.stack([np.maximum(own - draw.integers(1, 3, 12), 0), own], axis=-1) for _ in range(2)])[None]
    blocks = np.maximum(blocks, np.where(np.arange(12) >= 8, 4, 0)[None, None, :, None]).astype(np.int32)
    values = dict(q=q, k=k, blocks=blocks)
    found = jax.jit(lambda values, at: convert._caught(values, SimpleNamespace(positions=at), block, kept))(
        values, positions
    )
    caught, window = [], []
    for t in range(12):
        if positions[0, t] // block < kept:
            continue
        visible = np.arange(t - positions[0, t], t + 1)
        for group in range(2):
            scores = q[0, t, 2 * group : 2 * group + 2] @ k[0, visible, group].T / np.sqrt(3)
            p = np.exp(log_softmax(scores)).mean(axis=0)
            caught.append(p[np.isin(visible // block, blocks[0, group, t])].sum())
            window.append(p[visible // block > t // block - kept].sum())
    assert len(caught) == 2 * 4
    np.testing.assert_allclose(found["caught"], sum(caught) / 2, rtol=1e-5)
    np.testing.assert_allclose(found["window"], sum(window) / 2, rtol=1e-5)
    assert convert._caught({"q": values["q"]}, None, block, kept) == {}


# Adapters and runs


def test_a_loss_of_adapters_has_no_gradient_for_their_model(monkeypatch):
    monkeypatch.setattr(lora, "merge", lambda base, adapters, scale: base + scale * adapters["a"])
    loss = LoraLoss(lambda model, batch: (model**2 * batch["x"], {"model": model}), 0.5)
    of = lambda a, base: loss({"a": a}, {"base": base, "x": 3.0})
    (value, parts), slopes = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(2.0, 4.0)
    assert (float(value), float(parts["model"])) == (75.0, 5.0) and [*map(float, slopes)] == [2 * 5 * 3 * 0.5, 0.0]
    adapters, optimizer = {"x": {"a": jnp.float32([1.0])}}, optax.trace(0.5)
    state = lora.init_adapter_state(adapters, optimizer)
    assert int(state.step) == 0 and state.model["x"]["a"].tolist() == [1.0] and state.opt_state.trace["x"]["a"] == 0
    assert state.model["x"]["a"] is not adapters["x"]["a"] and state.step.committed
    adapters["x"]["a"].delete()
    assert state.model["x"]["a"].tolist() == [1.0]


def test_a_state_is_a_copy_on_the_devices_of_its_model():
    """A step takes its arrays with it, and the given ones stay."""
    weights, optimizer = {"w": jnp.float32([1.0, 2.0])}, optax.trace(0.5)
    state = steps.first_state(weights, optimizer, SimpleNamespace(mesh=None, embed_tokens={...: weights["w"]}))
    assert int(state.step) == 0 and all(x.committed for x in jax.tree.leaves(state))
    state.model["w"].delete()
    assert weights["w"].tolist() == [1.0, 2.0] and state.opt_state.trace["w"].tolist() == [0.0, 0.0]


def test_rows_of_a_batch_are_divided_over_a_mesh_and_counts_are_not(monkeypatch):
    monkeypatch.setattr(sft, "put", lambda x, where: (x, where))
    monkeypatch.setattr(sft, "NamedSharding", lambda mesh, spec: (mesh, spec))
    batch = {"tokens": np.zeros((2, 3, 4)), "num_tokens": np.float32(5), "step": np.zeros(3)}
    found, spec = sft._on_devices(batch, "mesh"), jax.sharding.PartitionSpec
    assert {name: where for name, (_, where) in found.items()} == {
        "tokens": ("mesh", spec(None, "data")), "num_tokens": ("mesh", spec()), "step": ("mesh", spec())
    }  # fmt: skip
    assert all(found[name][0] is batch[name] for name in batch)
    assert all(isinstance(x, jax.Array) for x in sft._on_devices(batch, None).values())


def test_the_first_token_that_differs_in_a_bit_is_named():
    """Of those that the policy drew, counted from 1."""
    old = np.float32([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    mask = np.array([[True, False, True], [False, True, True]])
    sampler = np.where(mask, old, np.float32(0))
    grpo.check_bits(dict(mask=mask, sampler=sampler, old=old))
    sampler[1, 1:] = np.nextafter(old[1, 1:], np.float32(0))
    said = r"differ in 2 of 4 tokens, first in answer 1, token 2: .*-5\.0.* and .*-4\.99"
    with pytest.raises(grpo.PartedPolicies, match=said):
        grpo.check_bits(dict(mask=mask, sampler=sampler, old=old))


def test_a_prompt_is_a_text_or_messages_of_a_model_with_a_template():
    tokenizer = SimpleNamespace(encode=lambda text: [*text.encode()])
    template = SimpleNamespace(encode=lambda tokenizer, messages, **named: [(messages, named)])
    assert grpo._encode({"prompt": "ab"}, 3, tokenizer, None) == (97, 98)
    given = {"messages": "talk", "tools": "tools", "thinking_mode": "enabled"}
    named = dict(tools="tools", thinking_mode="enabled")
    assert grpo._encode(given, 3, tokenizer, template) == (("talk", named),)
    assert grpo._encode({"messages": "talk"}, 3, tokenizer, template) == (("talk", dict.fromkeys(named)),)
    for row, reason in (({"prompt": 5}, "prompt 3 of the task is int"), (given, "prompt 3 of the task has messages")):
        with pytest.raises(ValueError, match=reason):
            grpo._encode(row, 3, tokenizer, None)
    assert grpo.arguments_of({"function": {"arguments": '{"a": 1}'}}) == {"a": 1}
    assert grpo.arguments_of({"function": {"arguments": {"a": 1}}}) == {"a": 1}


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
    file.write_text('{"tokens": [1, 2]}\n')
    load_documents(file, lambda: pytest.fail("no text to read"), 100, 8)
    for tokens, reason in (
        ([0, 99], None),
        ([0, 100], "100 is no token"),
        ([0, True], "True is no token"),
        ([5], "1 tok"),
    ):
        file.write_text(json.dumps({"tokens": tokens}))
        with pytest.raises(ValueError, match=reason) if reason else contextlib.nullcontext():
            load_documents(file, lambda: None, 100, 8)


# Units


def test_an_optimiser_moves_a_model_as_it_would_its_source(monkeypatch):
    """Writers are a thousand times the source's: their gradients are as many times smaller, and their steps larger."""
    monkeypatch.setattr(units, "_unit_of", lambda params: 1000.0)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.25), optax.trace(0.5))
    names = ("embed_tokens", "layers.self_attn.o_proj", "layers.mlp.down_proj", "layers.mlp.up_proj")
    source = {name: np.float32([1.0, 2.0 + i]) for i, name in enumerate(names)}
    scale = {name: 1.0 if name.endswith("up_proj") else 1000.0 for name in names}
    params = {name: x * scale[name] for name, x in source.items()}
    ours, state, of_source = units.in_source_units(optimizer), optimizer.init(params), optimizer.init(source)
    step_of_source, our_step = jax.jit(optimizer.update), jax.jit(ours.update)
    for step in (1.0, -2.0):
        grads = {name: np.float32([step, 0.5]) for name in names}
        expected, of_source = step_of_source(grads, of_source, source)
        given = {name: grad / scale[name] for name, grad in grads.items()}
        for name, grad in units.source_gradients(given, params).items():
            np.testing.assert_allclose(grad, grads[name], rtol=1e-6)
        found, state = our_step(given, state, params)
        for name in names:
            np.testing.assert_allclose(found[name], expected[name] * scale[name], rtol=1e-5, err_msg=name)


# Drafts


def test_a_chain_of_a_draft_goes_with_the_tokens_behind_its_beginning(monkeypatch):
    """Step j of the chain at t: token t + j + 1, position t + j, the target's logits behind that token; no padding."""
    draw, (batch, length, vocabulary) = np.random.default_rng(0), (2, 6, 5)
    table = draw.normal(size=(7, vocabulary)).astype(np.float32)
    taps, logits = (draw.normal(size=(batch, length, n)).astype(np.float32) for n in (1, vocabulary))
    tokens = draw.integers(0, 7, (batch, length))

    def chain_step(draft, model, features, tokens, positions, past):
        past = [*past, jnp.zeros(())]
        return features + 0.5, table_of[(tokens + 2 * positions + 3 * len(past)) % 7] * features, past

    table_of = jnp.asarray(table)
    monkeypatch.setattr(eagle3, "_chain_step", chain_step)
    draft = SimpleNamespace(features=lambda taps: taps + 1)
    run = jax.jit(lambda *given: [draft_losses(draft, *given[:3], None, 3, lengths) for lengths in (None, *given[3])])
    every = (None, [6, 3], [1, 2])
    for lengths, found in zip(every, run(taps, logits, tokens, [np.array(x) for x in every[1:]]), strict=True):
        for step in range(3):
            ends = lengths or [length] * batch
            targets = [(row, t) for row in range(batch) for t in range(length) if t + step + 1 < ends[row]]
            cross_entropy, agrees = [], []
            for row, t in targets:
                seen = table[(tokens[row, t + step + 1] + 2 * (t + step) + 3 * (step + 1)) % 7]
                of_draft, of_target = seen * (taps[row, t] + 1 + 0.5 * step), logits[row, t + step + 1]
                cross_entropy.append(-np.exp(log_softmax(of_target)) @ log_softmax(of_draft))
                agrees.append(of_draft.argmax() == of_target.argmax())
            expected = [np.sum(x) / max(1, len(targets)) for x in (cross_entropy, agrees)]
            np.testing.assert_allclose([found[0][step], found[1][step]], expected, rtol=1e-5, atol=1e-6)


def test_a_step_of_a_chain_adds_its_keys_and_values(monkeypatch):
    monkeypatch.setattr(eagle3, "_chain_attention", lambda q, past: ("attended", q, past))
    draft = SimpleNamespace(
        inputs=lambda *given: (("x", *given), "residual"), project=lambda x, at: dict(q=("q", x, at), k="k", v="v"),
        outputs=lambda *given: ("output", *given), recur=lambda of: ("recurred", of), logits=lambda *given: given,
    )  # fmt: skip
    model = SimpleNamespace(embed_tokens={...: "embedding"}, lm_head={...: "head"}, compute="compute")
    features, logits, past = eagle3._chain_step(draft, model, "features", "tokens", "positions", [("k0", "v0")])
    assert past == [("k0", "v0"), ("k", "v")]
    x = ("x", "features", "tokens", "embedding", "compute")
    output = ("output", ("attended", ("q", x, "positions"), past), "residual")
    assert features == ("recurred", output) and logits == (output, "head", "compute")


@struct.dataclass
class Draft:
    """A draft of one number."""

    w: jax.Array
    config: object = struct.field(pytree_node=False, default=None)


def test_a_step_moves_a_draft_against_its_loss_in_the_dtype_of_a_pass(monkeypatch):
    given = []

    def of_steps(draft, *rest):
        given.append((draft.w.dtype, rest))
        return jnp.stack([draft.w, 3 * draft.w]).astype(jnp.float32), jnp.array([0.25, 0.5])

    monkeypatch.setattr(eagle3, "draft_losses", of_steps)
    model = SimpleNamespace(tapped=lambda tokens, taps: ("hidden", taps, None), unembed=lambda hidden: f"{hidden}'s")
    optimizer = optax.sgd(0.5)
    state = eagle3.init_draft_state(Draft(jnp.bfloat16(2.0), SimpleNamespace(taps="taps")), optimizer)
    assert state.draft.w.dtype == jnp.float32 and int(state.step) == 0
    step = lambda state: eagle3.draft_train_step.__wrapped__(
        state, model, "tokens", optimizer, 2, "bfloat16", "lengths"
    )
    state, metrics = jax.jit(step)(state)
    assert given == [(jnp.bfloat16, ("taps", "hidden's", "tokens", model, 2, "lengths"))]
    slope = (1 + 0.8 * 3) / 1.8
    assert isinstance(state, DraftState) and int(state.step) == 1 and state.draft.w.dtype == jnp.float32
    np.testing.assert_allclose(state.draft.w, 2 - 0.5 * slope, rtol=1e-2)
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], [2 * slope, slope], rtol=1e-2)
    assert metrics["agreement"].tolist() == [0.25, 0.5] and metrics.keys() == {"loss", "agreement", "grad_norm"}


def test_matrices_of_a_draft_decay_and_its_norms_do_not():
    params = {"matrix": np.full((2, 2), 3.0, np.float32), "norm": np.full(2, 3.0, np.float32)}
    optimizer = eagle3.draft_optimizer(lambda step: 0.5)
    still, step = jax.tree.map(np.zeros_like, params), jax.jit(optimizer.update)
    updates, state = step(still, optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.5 * 0.01 * 3, rtol=1e-6)
    assert not np.asarray(updates["norm"]).any()
    # Gradients of norm 6 are clipped to 1, of 3 a second time: AdamW with 0.9 and 0.95.
    values = {"norm": 0.0}
    for grad in ([6.0, 0.0], [0.0, 0.5]):
        updates, state = step({"matrix": still["matrix"], "norm": np.float32(grad)}, state, params)
        values["norm"] = np.asarray(updates["norm"])
    first = np.array([0.9 * 0.1 * 1.0, 0.1 * 0.5]) / (1 - 0.9**3)
    second = np.array([0.95 * 0.05 * 1.0, 0.05 * 0.25]) / (1 - 0.95**3)
    np.testing.assert_allclose(values["norm"], -0.5 * first / (np.sqrt(second) + 1e-8), rtol=1e-4)


# Prompts that answers share


def pages(**heads) -> GroupPages:
    return GroupPages(block_size=2, prompt_slots=4, answers=3).replace(heads=Heads(**heads))


def test_the_places_of_a_group_are_no_arrays_of_a_program():
    assert (GroupPages(block_size=2).prompt_slots, GroupPages(block_size=2).answers) == (0, 1)
    assert jax.tree.leaves(pages()) == [] and pages() == shared_prompts.MakeGroupPages(4, 3)(2).replace(heads=Heads())


def test_an_answer_s_keys_are_its_prompt_s_and_its_own(monkeypatch):
    """A row of 4 prompt slots and 3 answers of 2 tokens: queries go apart, and what they get is put together again."""
    x = np.arange(2 * 10 * 3.0).reshape(2, 10, 3)
    of_prompts, of_answers = pages()._apart(x)
    np.testing.assert_array_equal(of_prompts, x[:, :4])
    for row in range(6):
        columns = slice(4 + 2 * (row % 3), 6 + 2 * (row % 3))
        np.testing.assert_array_equal(of_answers[row], x[row // 3, columns])
    np.testing.assert_array_equal(pages()._joined(of_prompts, of_answers), x)
    alone, behind = pages()._seen(x)
    np.testing.assert_array_equal(alone, of_prompts)
    for row in range(6):
        np.testing.assert_array_equal(behind[row], np.concatenate([x[row // 3, :4], of_answers[row]]))
    called = []
    for name in ("attend_to_blocks", "attend_to_documents"):
        monkeypatch.setattr(shared_prompts, name, lambda q, *given, name=name: called.append((name, *given)) or -q)
    monkeypatch.setattr(shared_prompts, "in_row", lambda *given: given)
    cache, call = pages(k=x, v=x + 100), SimpleNamespace(positions=x[..., 0] + 200)
    blocks = (x + 300)[:, None]  # [G K X J]
    for out, kept in (cache.attend_all(call, x + 400), cache.attend_selected(call, x + 400, blocks)):
        np.testing.assert_array_equal(out, -(x + 400))
        assert kept is cache
    assert [name for name, *_ in called] == ["attend_to_documents"] * 2 + ["attend_to_blocks"] * 2
    for number, (_, keys, values, positions, *more) in enumerate(called):
        part = number % 2  # the prompts', then the answers'
        np.testing.assert_array_equal(keys, (alone, behind)[part])
        np.testing.assert_array_equal(values, cache._seen(x + 100)[part])
        np.testing.assert_array_equal(positions, cache._apart(call.positions)[part])
        if more:
            (of_row, at, slots, size), block_size = more
            np.testing.assert_array_equal(of_row.swapaxes(1, 2), cache._apart(blocks.swapaxes(1, 2))[part])
            assert at is positions and (slots, size, block_size) == ((4, 6)[part], 2, 2)


def test_answers_stand_in_one_row_behind_their_prompt(monkeypatch):
    """Prompts end where answers begin; records are of the answers' tokens alone, and so is what is read."""
    noted = {}

    class Model:
        compute = SimpleNamespace(invariant=False)

        def trunk(self, tokens, **given):
            noted.update(tokens=tokens, **given)
            return np.asarray(tokens)[..., None], None

        def final_norm(self, x):
            return x + 0.5

    monkeypatch.setattr(shared_prompts, "with_fast_gradients", lambda model, made: noted.update(pages=made(2)) or model)
    monkeypatch.setattr(shared_prompts, "logprobs_of_hidden", lambda model, *given: given)
    prompts, tokens = np.array([[0, 0, 1, 2], [3, 4, 5, 6]]), np.arange(10, 22).reshape(4, 3)
    positions = np.array([[2, 3, -1], [2, 3, 4], [4, -1, -1], [4, 5, 6]])
    ids = np.arange(24).reshape(4, 3, 1, 2)
    found = answer_logprobs(
        Model(), prompts, tokens, positions, Choices(expert_ids=ids, blocks=None), True, "support", 0.5
    )
    hidden, *rest = found
    np.testing.assert_array_equal(hidden, tokens[..., None] + 0.5)
    assert rest[0] is tokens and rest[1:] == ["support", 0.5]
    assert noted["tokens"].tolist() == [[0, 0, 1, 2, *range(10, 16)], [3, 4, 5, 6, *range(16, 22)]]
    assert noted["positions"].tolist() == [[-1, -1, 0, 1, 2, 3, -1, 2, 3, 4], [0, 1, 2, 3, 4, -1, -1, 4, 5, 6]]
    assert noted["lengths"].tolist() == [5, 7] and noted["remat"] is True
    assert noted["pages"] == GroupPages(block_size=2, prompt_slots=4, answers=2)
    assert noted["choices"].blocks is None and (noted["choices"].expert_ids[:, :4] == -1).all()
    np.testing.assert_array_equal(noted["choices"].expert_ids[:, 4:], ids.reshape(2, 6, 1, 2))
    answer_logprobs(Model(), prompts, tokens, positions)
    assert (noted["choices"], noted["remat"]) == (None, False)
    Model.compute.invariant = True
    for given, reason in (
        ((prompts, tokens), "prompts are not shared in the invariant mode"),
        ((prompts, tokens[:3]), "3 answers to 2 prompts: give each prompt as many answers"),
        ((prompts[:, :0], tokens), "no prompt has a whole block"),
    ):
        with pytest.raises(ValueError, match=reason):
            answer_logprobs(Model(), *given, positions)
        Model.compute.invariant = False
