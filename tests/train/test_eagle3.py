"""Training a draft: what its losses are of, what it learns from, and how a step moves it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from support import tiny
from support.drafts import CONFIG, draft, model

from m3jax.train import eagle3
from m3jax.train.eagle3 import continuations, draft_losses, draft_optimizer, draft_train_step, refresh_draft

QUICK = {"xla_backend_optimization_level": 0}
LENGTH = 24


def chain_attention(q: np.ndarray, past: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Position by position: the first step's keys up to the position, then one key of each later step."""
    out, (batch, length, heads, width) = np.zeros(q.shape), q.shape
    for row, at, head in np.ndindex(batch, length, heads):
        of_head = lambda x, row=row, head=head: x[row, :, head // (heads // x.shape[2])]
        first, *chain = [[of_head(x) for x in step] for step in past]
        k, v = (np.stack([*first[i][: at + 1], *(step[i][at] for step in chain)]) for i in range(2))
        weights = np.exp(k @ q[row, at, head] * width**-0.5)
        out[row, at, head] = weights @ v / weights.sum()
    return out


def test_a_chain_goes_with_the_tokens_behind_its_beginning():
    """Step j of the chain at t: token t + j + 1, position t + j, the target's logits behind that token; no padding."""
    module, draw, (batch, length, steps) = draft(), np.random.default_rng(0), (2, 6, 3)
    tokens, lengths = jnp.asarray(draw.integers(0, CONFIG.vocab_size, (batch, length)), jnp.int32), jnp.array([6, 3])
    taps = jnp.asarray(draw.normal(size=(batch, length, 3, CONFIG.hidden_size)), jnp.float32)
    logits = jnp.asarray(draw.normal(size=(batch, length, CONFIG.vocab_size)), jnp.float32)
    run = jax.jit(draft_losses, static_argnames="steps", compiler_options=QUICK)
    found = run(module, taps, logits, tokens, model(), steps=steps, lengths=lengths)

    embedding, head = model().embed_tokens[...], model().lm_head[...]
    features, positions, past = module.features(taps), jnp.tile(jnp.arange(length, dtype=jnp.int32), (batch, 1)), []
    for step in range(steps):
        ahead = jnp.pad(tokens, ((0, 0), (0, steps)))[:, step + 1 : step + 1 + length]
        x, residual = module.inputs(features, ahead, embedding, model().compute)
        projected = module.project(x, positions + step)
        past.append((np.asarray(projected["k"]), np.asarray(projected["v"])))
        attention = jnp.asarray(chain_attention(np.asarray(projected["q"]), past), jnp.float32)
        output = module.outputs(attention, residual)
        features, of_draft = module.recur(output), np.asarray(module.logits(output, head, model().compute))
        cross_entropy, agrees = [], []
        for row, t in np.ndindex(batch, length):
            if t + step + 1 < lengths[row]:
                target = logits[row, t + step + 1]
                cross_entropy.append(-jax.nn.softmax(target) @ jax.nn.log_softmax(of_draft[row, t]))
                agrees.append(of_draft[row, t].argmax() == target.argmax())
        expected = [np.mean(cross_entropy), np.mean(agrees)]
        np.testing.assert_allclose([found[0][step], found[1][step]], expected, rtol=1e-4, atol=1e-5)


def test_padding_is_no_target_of_a_draft():
    """Rows of 9 and 24 tokens: the loss is the mean over the targets of both, whatever stands behind the shorter."""
    module, tokens = draft(), jnp.asarray(tiny.tokens(CONFIG, 2, LENGTH, seed=1))

    def losses(module, model, tokens, lengths):
        out = model.run(tokens, residual_layers=module.config.taps)
        return draft_losses(module, out.residuals, out.logits, tokens, model, 2, lengths)

    run = jax.jit(losses, compiler_options=QUICK)
    of = lambda tokens, *lengths: np.array(run(module, model(), tokens, jnp.array(lengths, jnp.int32)))  # [2 S]
    both, first, second = of(tokens, 9, LENGTH), of(tokens, 9, 0), of(tokens, 0, LENGTH)
    counts = [np.array([8, 7]), np.array([LENGTH - 1, LENGTH - 2])]
    np.testing.assert_allclose(both, (counts[0] * first + counts[1] * second) / sum(counts), rtol=1e-5)
    np.testing.assert_array_equal(of(tokens.at[0, 9:].set(3), 9, LENGTH), both)


@pytest.mark.further  # what its loss is of: the other tests
def test_a_draft_learns_what_the_target_writes(unchecked):
    """A few steps on four rows: the target's choices there are met more often; the given draft stays as it was."""
    module, rows = draft(dtype="bfloat16"), [list(tiny.tokens(CONFIG, 1, n, seed=n)[0]) for n in (9, LENGTH, 17, 12)]
    before = jax.tree.map(np.array, module)
    fresh = refresh_draft(module, model(), rows, steps=30, batch=4, unroll=1, learning_rate=1e-2, progress=False)
    assert fresh.dtype == module.dtype
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(module), strict=True):
        np.testing.assert_array_equal(one, other)
    tokens = jnp.asarray(np.stack([np.pad(row, (0, LENGTH - len(row))) for row in rows]), jnp.int32)
    lengths = jnp.array([len(row) for row in rows], jnp.int32)
    out = model().run(tokens, residual_layers=module.config.taps)
    loss = jax.jit(draft_losses, static_argnames="steps", compiler_options=QUICK)
    old, new = (
        loss(one, out.residuals, out.logits, tokens, model(), steps=1, lengths=lengths)[0][0] for one in (module, fresh)
    )
    assert new < old - 0.1, (old, new)
    with pytest.raises(ValueError, match="0 rows, the shortest of 0 tokens"):
        refresh_draft(module, model(), [])
    with pytest.raises(ValueError, match="2 rows, the shortest of 1 tokens"):
        refresh_draft(module, model(), [[1, 2], [3]])


def test_rows_of_a_draft_are_all_read_before_one_is_read_again(monkeypatch, unchecked):
    """Padded to whole blocks of the longest, with their own lengths; the last batch of a pass goes on with the next."""
    rows, steps = [[1, 2, 3], [4] * 9, [5, 6]], []

    def noted(state, model, tokens, optimizer, unroll, dtype, lengths):
        steps.append((np.asarray(tokens), np.asarray(lengths), unroll, dtype))
        return state, {}

    monkeypatch.setattr(eagle3, "draft_train_step", noted)
    begin = SimpleNamespace(draft={"w": jnp.zeros(2)})
    monkeypatch.setattr(eagle3, "init_draft_state", lambda draft, optimizer: begin)
    model = SimpleNamespace(config=SimpleNamespace(index_block_size=4))
    draft = SimpleNamespace(dtype=jnp.dtype("bfloat16"))
    fresh = refresh_draft(draft, model, rows, steps=5, batch=2, unroll=2, seed=7, progress=False)
    assert fresh["w"].dtype == jnp.bfloat16 and len(steps) == 5
    rng = np.random.default_rng(7)
    order = np.concatenate([rng.permutation(3) for _ in range(4)])
    for number, (tokens, lengths, unroll, dtype) in enumerate(steps):
        chosen = order[2 * number : 2 * number + 2]
        assert (lengths.tolist(), unroll, dtype) == ([len(rows[i]) for i in chosen], 2, "bfloat16")
        assert tokens.tolist() == [rows[i] + [0] * (12 - len(rows[i])) for i in chosen]


class Writes:
    """An engine that is none: it ends its requests last first, and writes the seed of each."""

    def __init__(self):
        self.waiting = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, prompt, params) -> int:
        handle = 100 - len(self.waiting)
        self.waiting[handle] = params
        return handle

    def step(self):
        handle, params = self.waiting.popitem()
        seed, temperature = params.sampling.seed, params.sampling.temperature
        written = [seed] * (params.max_new_tokens - 1) + [int(10 * temperature)]
        going_on = SimpleNamespace(handle=handle, generation=None)
        return [going_on, SimpleNamespace(handle=handle, generation=SimpleNamespace(tokens=written))]


def test_continuations_fill_their_rows_each_by_a_seed_of_its_own(monkeypatch, unchecked):
    """Rows come in the order of their beginnings, and take the temperatures in turn."""
    monkeypatch.setattr(eagle3, "build_engine", lambda *_, **__: Writes())
    found = continuations("model", [[7], [8, 9], [7, 7, 7]], 6, (0.0, 0.5), 9)
    expected = [[7, 0, 0, 0, 0, 0], [8, 9, 1, 1, 1, 5], [7, 7, 7, 2, 2, 0]]
    np.testing.assert_array_equal(found, np.array(expected, np.int32), strict=True)


@struct.dataclass
class Draft:
    """A draft of one number."""

    w: jax.Array
    config: object = struct.field(pytree_node=False, default=None)


def test_a_step_moves_a_draft_against_its_loss_in_the_dtype_of_a_pass(monkeypatch, unchecked):
    given = []

    def of_steps(draft, *rest):
        given.append((draft.w.dtype, rest))
        return jnp.stack([draft.w, 3 * draft.w]).astype(jnp.float32), jnp.array([0.25, 0.5])

    monkeypatch.setattr(eagle3, "draft_losses", of_steps)
    model = SimpleNamespace(
        run=lambda tokens, residual_layers: SimpleNamespace(residuals=residual_layers, logits="logits")
    )
    optimizer = optax.sgd(0.5)
    state = eagle3.init_draft_state(Draft(jnp.bfloat16(2.0), SimpleNamespace(taps="taps")), optimizer)
    assert state.draft.w.dtype == jnp.float32 and int(state.step) == 0
    step = lambda state: draft_train_step.__wrapped__(state, model, "tokens", optimizer, 2, "bfloat16", "lengths")
    state, metrics = jax.jit(step)(state)
    assert given == [(jnp.bfloat16, ("taps", "logits", "tokens", model, 2, "lengths"))]
    slope = (1 + 0.8 * 3) / 1.8
    assert int(state.step) == 1 and state.draft.w.dtype == jnp.float32
    np.testing.assert_allclose(state.draft.w, 2 - 0.5 * slope, rtol=1e-2)
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], [2 * slope, slope], rtol=1e-2)
    assert metrics["agreement"].tolist() == [0.25, 0.5] and metrics.keys() == {"loss", "agreement", "grad_norm"}


def test_matrices_of_a_draft_decay_and_its_norms_do_not():
    params = {"matrix": np.full((2, 2), 3.0, np.float32), "norm": np.full(2, 3.0, np.float32)}
    optimizer = draft_optimizer(lambda step: 0.5)
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
