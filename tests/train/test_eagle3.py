"""Refreshing a draft: padding is no target, and what the target writes by now is learnt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.drafts import CONFIG, draft, model

from m3jax.train.eagle3 import _chain_attention, draft_losses, refresh_draft

QUICK = {"xla_backend_optimization_level": 0}
LENGTH = 24


def test_a_chain_sees_the_targets_features_and_its_own_steps():
    """Position by position in numpy: the first step's keys up to the position, then one key of each later step."""
    draw, (batch, length, heads, kv_heads, width) = np.random.default_rng(0), (2, 5, 4, 2, 6)
    q = draw.normal(size=(batch, length, heads, width)).astype(np.float32)
    past = draw.normal(size=(3, 2, batch, length, kv_heads, width)).astype(np.float32)
    found = _chain_attention(jnp.asarray(q), [(jnp.asarray(k), jnp.asarray(v)) for k, v in past])
    for row, at, head in np.ndindex(batch, length, heads):
        of_head = past[:, :, row, :, head // (heads // kv_heads)]  # [3 2 T H]
        seen = np.concatenate([of_head[0, :, : at + 1], of_head[1:, :, at].swapaxes(0, 1)], axis=1)  # [2 keys H]
        weights = np.exp(seen[0] @ q[row, at, head] * width**-0.5)
        expected = weights @ seen[1] / weights.sum()
        np.testing.assert_allclose(found[row, at, head], expected, rtol=1e-4, atol=1e-5)


def test_padding_is_no_target_of_a_draft():
    """Rows of 9 and 24 tokens: the loss is the mean over the targets of both, whatever stands behind the shorter."""
    module, tokens = draft(), jnp.asarray(tiny.tokens(CONFIG, 2, LENGTH, seed=1))

    def losses(module, model, tokens, lengths):
        hidden, taps, _ = model.tapped(tokens, module.config.taps)
        return draft_losses(module, taps, model.unembed(hidden), tokens, model, 2, lengths)

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
    hidden, taps, _ = model().tapped(tokens, module.config.taps)
    loss = jax.jit(draft_losses, static_argnames="steps", compiler_options=QUICK)
    old, new = (
        loss(one, taps, model().unembed(hidden), tokens, model(), steps=1, lengths=lengths)[0][0]
        for one in (module, fresh)
    )
    assert new < old - 0.1, (old, new)
    with pytest.raises(ValueError, match="0 rows, the shortest of 0 tokens"):
        refresh_draft(module, model(), [])
    with pytest.raises(ValueError, match="2 rows, the shortest of 1 tokens"):
        refresh_draft(module, model(), [[1, 2], [3]])
