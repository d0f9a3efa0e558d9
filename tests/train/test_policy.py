"""Policy losses and mismatch figures, each held to a few lines of numpy that are written from its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3jax.train.policy import Correction, PolicyLoss, group_advantages, log_ratios, mismatch

ROWS, LENGTH = 4, 7
_loss = jax.jit(lambda loss, *arrays, **more: loss(*arrays, **more), static_argnums=0)


def batch(seed: int, spread: float = 0.5) -> dict[str, np.ndarray]:
    """Log-probabilities of four policies, advantages and a mask: one row has no token, one has all."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2, (ROWS, LENGTH))
    near = lambda: (old + spread * rng.normal(size=old.shape)).astype(np.float32)
    mask = rng.random((ROWS, LENGTH)) < 0.6
    mask[0], mask[1] = False, True
    advantages = rng.normal(size=ROWS).astype(np.float32)
    return dict(
        new=near(), old=old.astype(np.float32), sampler=near(), advantages=advantages, mask=mask, reference=near()
    )


def on_device(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


# Each of these reads one token at a time.


def reference_loss(loss: PolicyLoss, new, old, sampler, advantages, mask, reference) -> float:
    sums, counts, kls = np.zeros(ROWS), np.zeros(ROWS), np.zeros(ROWS)
    for i in range(ROWS):
        tokens = np.flatnonzero(mask[i])
        mean_ratio = np.mean([new[i, t] - old[i, t] for t in tokens]) if len(tokens) else 0.0
        summed = sum(old[i, t] - sampler[i, t] for t in tokens)
        k = {"k1": abs, "k3": lambda x: np.exp(x) - 1 - x}[loss.correction.divergence]
        of_row = np.mean([k(old[i, t] - sampler[i, t]) for t in tokens]) if len(tokens) else 0.0
        for t in tokens:
            ratio = np.exp(mean_ratio if loss.level == "sequence" else new[i, t] - old[i, t])
            clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            surrogate = min(ratio * advantages[i], clipped * advantages[i])
            if loss.dual_clip is not None and advantages[i] < 0:
                surrogate = max(surrogate, loss.dual_clip * advantages[i])
            away = old[i, t] - sampler[i, t]
            weight = {None: 1.0, "token": np.exp(away), "sequence": np.exp(summed)}[loss.correction.weigh]
            weight = min(weight, loss.correction.limit) if loss.correction.weigh else 1.0
            divergence = {None: 0.0, "token": k(away), "sequence": of_row}[loss.correction.reject]
            if divergence > loss.correction.reject_above:
                weight = 0.0
            sums[i] -= surrogate * weight
            log_r = reference[i, t] - new[i, t]
            kls[i] += np.exp(log_r) - log_r - 1
            counts[i] += 1
    total = {
        "token": lambda x: x.sum() / max(counts.sum(), 1),
        "sequence": lambda x: np.mean(x / np.maximum(counts, 1)),
        "constant": lambda x: x.sum() / (loss.tokens * ROWS) if loss.tokens else 0.0,
    }[loss.mean]
    return total(sums) + loss.kl_weight * total(kls)


LOSSES = {
    "grpo": PolicyLoss(mean="sequence", kl_weight=0.1),
    "dapo": PolicyLoss(),
    "dr. grpo": PolicyLoss(mean="constant", tokens=9),
    "gspo": PolicyLoss(level="sequence", mean="sequence", clip_low=0.1, clip_high=0.1),
    "no dual clip": PolicyLoss(dual_clip=None, clip_low=0.05),
    "dual clip": PolicyLoss(dual_clip=1.1),
    "tis of tokens": PolicyLoss(correction=Correction(weigh="token", limit=1.2)),
    "tis of rows": PolicyLoss(correction=Correction(weigh="sequence")),
    "rejects tokens, k1": PolicyLoss(correction=Correction(reject="token", divergence="k1", reject_above=0.4)),
    "rejects rows, k3": PolicyLoss(correction=Correction(weigh="token", reject="sequence", reject_above=0.12)),
}


@pytest.mark.parametrize("name", LOSSES)
@given(st.integers(0, 2**16))
def test_losses_are_their_papers(name, seed):
    loss, given_batch = LOSSES[name], batch(seed)
    found, parts = _loss(loss, **given_batch)
    assert float(found) == pytest.approx(reference_loss(loss, **given_batch), rel=2e-5, abs=2e-5)
    assert 0 <= float(parts["clipped"]) <= 1 and 0 <= float(parts["kept"]) <= 1


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_differences_of_the_loss(name):
    """In float64; of old policy, sampler and reference there is none, and what the mask leaves out has exactly zero."""
    with jax.enable_x64(True):
        loss, arrays = LOSSES[name], {key: jnp.asarray(value) for key, value in batch(3).items()}
        arrays = {key: x.astype(float) if x.dtype == jnp.float32 else x for key, x in arrays.items()}
        value = lambda new, **more: loss(**{**arrays, **more, "new": new})[0]
        gradient = np.asarray(jax.grad(value)(arrays["new"]))
        if loss.level == "token":  # of a sequence's ratio the gradient is another one on purpose (below)
            for place in [(1, 0), (1, 5), (2, int(np.flatnonzero(np.asarray(arrays["mask"])[2])[0]))]:
                step = jnp.zeros_like(arrays["new"]).at[place].set(1e-6)
                slope = (value(arrays["new"] + step) - value(arrays["new"] - step)) / 2e-6
                assert gradient[place] == pytest.approx(float(slope), rel=1e-5, abs=1e-8)
        assert not gradient[~np.asarray(arrays["mask"])].any() and gradient.any()
        for other in ("old", "sampler", "reference"):
            of_other = jax.grad(lambda x, other=other: value(arrays["new"], **{other: x}))(arrays[other])
            assert not np.asarray(of_other).any(), other


def test_on_policy_the_gradient_is_the_policys():
    """Ratio 1, but not 1 for ever: the gradient is that of advantage times log-probability, at both levels."""
    arrays = on_device(batch(5))
    arrays["new"] = arrays["sampler"] = arrays["old"]
    for level in ("token", "sequence"):
        loss = PolicyLoss(level=level)
        gradient = jax.grad(lambda new, loss=loss: loss(**{**arrays, "new": new})[0])(jnp.asarray(arrays["new"]))
        expected = -np.where(arrays["mask"], arrays["advantages"][:, None], 0) / arrays["mask"].sum()
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_what_the_mask_leaves_out_has_ratio_0_and_weight_0():
    """And within it a log-ratio is cut off at 20, of a token and of a row's sum."""

    @jax.jit
    def found(new, old, mask):
        ratios = [log_ratios(new, old, mask, level) for level in ("token", "sequence")]
        corrections = [Correction(weigh=level, limit=1e30) for level in ("token", "sequence")]
        return *ratios, *(jnp.log(correction.weights(new, old, mask)) for correction in corrections)

    arrays = batch(6)
    old, mask = arrays["old"], arrays["mask"]
    for away in (0.5, 19.5, 20.5, -20.5):
        of_token, of_row, weight, weight_of_row = map(np.asarray, found(old + np.float32(away), old, mask))
        for ratios in (of_token, of_row):
            np.testing.assert_allclose(ratios, np.where(mask, np.clip(away, -20, 20), 0), rtol=1e-5)
        summed = np.clip(np.clip(away, -20, 20) * mask.sum(axis=1, keepdims=True), -20, 20)
        for logs, expected in ((weight, np.clip(away, -20, 20)), (weight_of_row, summed)):
            np.testing.assert_allclose(logs, np.where(mask, expected, -np.inf), rtol=1e-5)


def test_a_batch_without_tokens_is_zero():
    arrays = on_device(batch(1) | dict(mask=np.zeros((ROWS, LENGTH), bool)))
    for loss in LOSSES.values():
        value, gradient = jax.value_and_grad(lambda new, loss=loss: loss(**{**arrays, "new": new})[0])(arrays["new"])
        assert float(value) == 0 and not np.asarray(gradient).any()


def test_far_policies_stay_finite():
    """A log-ratio of a thousand is cut off at 20; nothing is infinite or NaN, in value or gradient."""
    arrays = on_device(batch(2))
    arrays["new"] = arrays["new"] - 1000
    arrays["reference"] = arrays["reference"] + 1000
    for loss in LOSSES.values():
        value, gradient = jax.value_and_grad(lambda new, loss=loss: loss(**{**arrays, "new": new})[0])(arrays["new"])
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_advantages():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [3.0, -1.0, 0.0, 0.0]])
    for i, row in enumerate(rewards):
        others = [np.mean(np.delete(row, j)) for j in range(4)]
        mean, deviation = row.mean(), np.sqrt(((row - row.mean()) ** 2).sum() / 3)
        np.testing.assert_allclose(group_advantages(rewards, "rloo")[i], row - others, atol=1e-6)
        np.testing.assert_allclose(group_advantages(rewards, "dr_grpo")[i], row - mean, atol=1e-6)
        np.testing.assert_allclose(group_advantages(rewards)[i], (row - mean) / (deviation + 1e-6), atol=1e-5)
    assert not group_advantages(rewards)[1].any()
    assert group_advantages(np.array([[1.0, 0.0]]), "rloo").tolist() == [[1.0, -1.0]]
    # Rewards that hardly differ: what is added to the deviation counts.
    close = 1e-6 * np.array([[1.0, 0.0, 0.0, 1.0]])
    expected = (close - close.mean()) / (close.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(group_advantages(close), expected, rtol=1e-5)


def test_bad_settings_and_rewards_are_named(unchecked):
    for rewards, message in (
        (np.array([[1.0, np.nan]]), "a reward is nan: rewards must be finite"),
        (np.array([[1.0]]), "groups of one answer have nothing to be compared with"),
    ):
        with pytest.raises(ValueError, match=message):
            group_advantages(rewards)
    with pytest.raises(ValueError, match="baseline = 'best': choose of grpo, dr_grpo, rloo"):
        group_advantages(np.ones((1, 2)), "best")
    for knobs, message in (
        (dict(dual_clip=1.0), "dual_clip = 1.0: must be above 1, or None"),
        (dict(mean="constant"), "tokens = 0: a constant mean needs"),
        (dict(clip_low=1.0), "clip_low = 1.0"),
        (dict(clip_low=-0.1), "clip_low = -0.1"),
        (dict(clip_high=-0.1), "clip_high = -0.1"),
        (dict(level="word"), "level = 'word'"),
        (dict(mean="all"), "mean = 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyLoss(**knobs)
    assert PolicyLoss(clip_low=0.0, clip_high=0.0, dual_clip=1.5, mean="constant", tokens=1).tokens == 1


@given(st.integers(0, 2**16))
def test_mismatch_is_what_its_names_say(seed):
    arrays = batch(seed, spread=0.1)
    found = mismatch(arrays["sampler"], arrays["new"], arrays["mask"])
    pairs = [
        (float(arrays["sampler"][i, t]), float(arrays["new"][i, t]))
        for i, t in zip(*np.nonzero(arrays["mask"]), strict=True)
    ]
    p, q = np.exp(np.array(pairs)).T
    ratios = q / p
    expected = {
        "rollout_probs_diff_max": max(abs(p - q)),
        "rollout_probs_diff_mean": np.mean(abs(p - q)),
        "rollout_probs_diff_std": np.std(abs(p - q)),
        "rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
        "kl": np.mean(np.log(p / q)),
        "k3_kl": np.mean(ratios - 1 - np.log(ratios)),
        "chi2_token": np.mean(ratios**2) - 1,
        "ess": np.sum(ratios) ** 2 / np.sum(ratios**2) / len(ratios),
        "token_mult_prob_error": np.mean(np.maximum(ratios, 1 / ratios)),
    }
    away = np.where(arrays["mask"], arrays["new"] - arrays["sampler"], 0).astype(float)
    of_rows = [np.prod(np.exp(row)) for row, is_token in zip(away, arrays["mask"], strict=True) if is_token.any()]
    expected["chi2_seq"] = np.mean(np.square(of_rows)) - 1
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_same_bits_mismatch_in_nothing():
    arrays = batch(4)
    found = mismatch(arrays["old"], arrays["old"], arrays["mask"])
    perfect = {"rollout_actor_probs_pearson_corr": 1.0, "ess": 1.0, "token_mult_prob_error": 1.0}
    assert found == pytest.approx({name: perfect.get(name, 0.0) for name in found}, abs=1e-12)
    with pytest.raises(ValueError, match="mask has no token"):
        mismatch(arrays["old"], arrays["old"], np.zeros((ROWS, LENGTH), bool))
    arrays["new"][1, 0] = -np.inf
    with pytest.raises(ValueError, match="a log-probability is not finite"):
        mismatch(arrays["old"], arrays["new"], arrays["mask"])


def test_what_is_constant_correlates_with_its_like_alone():
    """No correlation is defined there: 1 for the same numbers, NaN for others, and nothing is divided by 0."""
    constant, other = np.full((1, 3), -1.0), np.full((1, 3), -2.0)
    varied, mask = np.array([[-1.0, -2.0, -1.5]]), np.ones((1, 3), bool)
    correlation = lambda p, q: mismatch(p, q, mask)["rollout_actor_probs_pearson_corr"]
    assert correlation(constant, constant) == 1.0 and correlation(varied, varied) == pytest.approx(1.0)
    for p, q in ((constant, other), (constant, varied), (varied, constant)):
        assert np.isnan(correlation(p, q))
