"""Policy gradients as pure functions: advantages, clipped ratios, corrections for another sampler, and the mismatch.

Three policies appear. The *sampler* drew the tokens: an engine, with its own rounding. The *old* policy is the
trainer's own reading of the same weights, which the ratio is taken against. The *new* policy is the one that has the
gradient. All are log-probabilities of the tokens that were drawn, natural logarithms in float32.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from m3jax.messages import shown

LOG_RATIO_LIMIT = 20.0  # beyond it exp of a log-ratio is cut off
PROB_ERROR_ALARM = 1.05  # of `token_mult_prob_error`, beyond which two programs, not roundings, differ (NeMo-RL)

Baseline = Literal["grpo", "dr_grpo", "rloo"]
Level = Literal["token", "sequence"]
Mean = Literal["token", "sequence", "constant"]


def group_advantages(rewards: Float[np.ndarray, "G N"], baseline: Baseline = "grpo") -> Float32[np.ndarray, "G N"]:
    """Return the advantage of each of the N answers to G prompts over the others of its group.

    Args:
      rewards: of the answers.
      baseline: "grpo" subtracts the group's mean and divides by its standard deviation plus 1e-6, so that a group of
        equal rewards has advantages of 0; "dr_grpo" subtracts the mean alone; "rloo" subtracts the mean of the other
        answers.

    Raises:
      ValueError: rewards that are not finite, groups of one answer, or another baseline.

    Source: DeepSeekMath (GRPO); Understanding R1-Zero-like training (Dr. GRPO); Back to basics (RLOO).
    """
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline = {shown(baseline)}: choose of {', '.join(get_args(Baseline))}")
    rewards = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward is {rewards[~np.isfinite(rewards)][0]}: rewards must be finite numbers")
    count = rewards.shape[1]
    if count < 2:
        raise ValueError("groups of one answer have nothing to be compared with: draw at least 2 answers to a prompt")
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    if baseline == "grpo":
        centered = centered / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    elif baseline == "rloo":
        centered = centered * count / (count - 1)
    return centered.astype(np.float32)


def masked_mean(x: Float[Array, "*X"], mask: Bool[Array, "*X"]) -> Float[Array, ""]:
    """Return the mean of the entries that the mask has; 0 where it has none."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def sequence_means(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Return the mean of each row's entries that the mask has; 0 for a row without any."""
    return jnp.sum(jnp.where(mask, x, 0.0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def log_ratios(
    new: Float[Array, "B T"], old: Float[Array, "B T"], mask: Bool[Array, "B T"], level: Level = "token"
) -> Float[Array, "B T"]:
    """Return the log of the ratio of two policies at each token, within plus and minus 20.

    Args:
      new, old: their log-probabilities.
      mask: tokens that count; others have 0.
      level: "token", or "sequence" for the mean over a row's tokens at each of them, as GSPO has it: its value is the
        row's, and its gradient is spread over the tokens.

    Source: Group sequence policy optimization, the token-level objective.
    """
    ratios = jnp.where(mask, new - old, 0.0)
    if level == "sequence":
        of_rows = sequence_means(ratios, mask)[:, None]
        # The gradient of each token is that of its own log-probability: the value alone is the row's.
        own = jnp.where(mask, new, 0.0)
        ratios = jnp.where(mask, jax.lax.stop_gradient(of_rows) + own - jax.lax.stop_gradient(own), 0.0)
    return jnp.clip(ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class Correction:
    """The correction for a sampler that is not quite the old policy, applied to each token's part of the loss.

    Attributes:
      weigh: truncated importance sampling by the ratio of the old policy to the sampler: of each "token", or of the
        whole "sequence"; None leaves it out.
      limit: the largest weight.
      reject: leave out tokens ("token") or rows ("sequence") whose divergence is above `reject_above`; None keeps all.
      divergence: of a token, "k1", the absolute log-ratio, or "k3", ratio - 1 - log-ratio; of a row the mean over its
        tokens.
      reject_above: in nats.
    """

    weigh: Level | None = None
    limit: float = 2.0
    reject: Level | None = None
    divergence: Literal["k1", "k3"] = "k3"
    reject_above: float = 1.0

    def weights(
        self, old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """Return the weight of each token, without a gradient: 1 where nothing is corrected, 0 outside of the mask."""
        old, sampler = jax.lax.stop_gradient((old, sampler))
        ratios = log_ratios(old, sampler, mask)
        weights = jnp.ones_like(ratios)
        if self.weigh is not None:
            summed = jnp.sum(ratios, axis=1, keepdims=True)
            of_level = ratios if self.weigh == "token" else jnp.clip(summed, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            weights = jnp.minimum(jnp.exp(of_level), self.limit) * weights
        if self.reject is not None:
            divergence = jnp.abs(ratios) if self.divergence == "k1" else jnp.exp(ratios) - 1 - ratios
            if self.reject == "sequence":
                divergence = sequence_means(divergence, mask)[:, None]
            weights = jnp.where(divergence > self.reject_above, 0.0, weights)
        return jnp.where(mask, weights, 0.0)


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped loss of a policy. Two of the same settings are equal, so that a step is compiled once for them.

    Attributes:
      clip_low, clip_high: the ratio counts from 1 - clip_low to 1 + clip_high.
      dual_clip: of a negative advantage the loss is at most so many times it; None for no such bound.
      level: of the ratio: "token", or "sequence" for GSPO.
      mean: over the "token"s of the batch; over each "sequence" and then over them, as GRPO has it; or the sum over
        rows divided by a "constant" number of tokens each, as Dr. GRPO has it.
      tokens: of that constant.
      kl_weight: of the divergence from a reference policy (k3); 0 leaves it out.
      correction: for the sampler.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    level: Level = "token"
    mean: Mean = "token"
    tokens: int = 0
    kl_weight: float = 0.0
    correction: Correction = Correction()

    def __post_init__(self):
        if self.level not in get_args(Level) or self.mean not in get_args(Mean):
            raise ValueError(f"level = {shown(self.level)}, mean = {shown(self.mean)}: see PolicyLoss")
        if not 0 <= self.clip_low < 1 or not self.clip_high >= 0:
            raise ValueError(f"clip_low = {self.clip_low}, clip_high = {self.clip_high}: give 0 to 1, and 0 or more")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip}: must be above 1, or None")
        if self.mean == "constant" and self.tokens < 1:
            raise ValueError(f"tokens = {self.tokens}: a constant mean needs the number of tokens of a row")

    def __call__(
        self,
        new: Float[Array, "B T"],
        old: Float[Array, "B T"],
        sampler: Float[Array, "B T"],
        advantages: Float[Array, " B"],
        mask: Bool[Array, "B T"],
        reference: Float[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the loss and its parts.

        Args:
          new: log-probabilities under the policy that is trained; the only argument with a gradient.
          old: under the policy that the ratio is taken against.
          sampler: under what drew the tokens.
          advantages: of each row.
          mask: tokens that the policy drew; what a tool wrote is never one of them.
          reference: under the reference policy; needed with `kl_weight`.

        Returns:
          (loss, {"policy", "kl", "clipped" (the share of tokens whose ratio is outside of its range), "kept" (the share
          that the correction keeps)}); kl is 0 without a reference.
        """
        old, sampler = jax.lax.stop_gradient((old, sampler))
        ratios = log_ratios(new, old, mask, self.level)
        advantage = advantages[:, None]
        ratio = jnp.exp(ratios)
        within = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        losses = jnp.maximum(-advantage * ratio, -advantage * within)
        if self.dual_clip is not None:
            bounded = jnp.minimum(losses, -advantage * self.dual_clip)
            losses = jnp.where(advantage < 0, bounded, losses)
        weights = self.correction.weights(old, sampler, mask)
        policy = self._averaged(losses * weights, mask)
        kl = jnp.float32(0.0)
        if reference is not None:
            away = jnp.where(mask, jax.lax.stop_gradient(reference) - new, 0.0)
            away = jnp.clip(away, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            kl = self._averaged(jnp.exp(away) - away - 1, mask)
        parts = {
            "policy": policy,
            "kl": kl,
            "clipped": masked_mean((ratio != within).astype(jnp.float32), mask),
            "kept": masked_mean((weights > 0).astype(jnp.float32), mask),
        }
        return policy + self.kl_weight * kl, parts

    def _averaged(self, x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
        if self.mean == "token":
            return masked_mean(x, mask)
        if self.mean == "sequence":
            return jnp.mean(sequence_means(x, mask))
        return jnp.sum(jnp.where(mask, x, 0.0)) / (self.tokens * x.shape[0])


def mismatch(
    sampler: Float[np.ndarray, "B T"], trainer: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]
) -> dict[str, float]:
    """Return how far a trainer's log-probabilities are from the sampler's, under the names that others print.

    Args:
      sampler: log-probabilities that the engine reported for its tokens.
      trainer: of the same tokens by the trainer, with the same weights.
      mask: tokens that count, at least one.

    Returns:
      As verl names them: rollout_probs_diff_max, _mean and _std (of the probabilities' absolute differences),
      rollout_actor_probs_pearson_corr (1 where one of them is constant and both are equal, NaN where it is constant and
      they differ), kl (mean of sampler - trainer), k3_kl, chi2_token, chi2_seq, ess (effective sample size of the
      tokens' ratios, as a share). As NeMo-RL: token_mult_prob_error, the mean of exp of the difference
      without its sign.

    Raises:
      ValueError: no token, or a log-probability that is not finite.
    """
    mask = np.asarray(mask, bool)
    sampler, trainer = (np.where(mask, np.asarray(x, np.float64), 0.0) for x in (sampler, trainer))
    if not mask.any():
        raise ValueError("mask has no token: there is nothing to compare")
    if not np.isfinite(sampler).all() or not np.isfinite(trainer).all():
        raise ValueError("a log-probability is not finite: a token was drawn that the other policy cannot draw")
    away = np.clip(trainer - sampler, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    of_tokens, of_rows = away[mask], np.clip(away.sum(axis=1), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[mask.any(axis=1)]
    p, q = np.exp(sampler[mask]), np.exp(trainer[mask])
    gaps, ratios = np.abs(p - q), np.exp(of_tokens)
    if p.std() > 0 and q.std() > 0:
        correlation = float(np.corrcoef(p, q)[0, 1])
    else:
        correlation = 1.0 if (p == q).all() else float("nan")
    return {
        "rollout_probs_diff_max": float(gaps.max()),
        "rollout_probs_diff_mean": float(gaps.mean()),
        "rollout_probs_diff_std": float(gaps.std()),
        "rollout_actor_probs_pearson_corr": correlation,
        "kl": float(-of_tokens.mean()),
        "k3_kl": float((np.exp(of_tokens) - of_tokens - 1).mean()),
        "chi2_token": float((ratios**2).mean() - 1),
        "chi2_seq": float(np.exp(2 * of_rows).mean() - 1),
        "ess": float(ratios.mean() ** 2 / (ratios**2).mean()),
        "token_mult_prob_error": float(np.exp(np.abs(of_tokens)).mean()),
    }
