"""Verification of proposals: the number that is accepted, and the target's own token after them."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, UInt32

from m3jax.decoding.sampling import Sampling, SamplingParams
from m3jax.decoding.speculation.verify import Proposal, position_keys, verify
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, on_host
from m3jax.vectors.groups.sampling import (
    EDIT_AXES,
    FILTERS,
    NUMBERS,
    distribution,
    edit_inputs,
    params_and_context,
    uniforms,
)

AXES = EDIT_AXES | {name: "B" for name in (*NUMBERS, "seed", "positions", "accepted")} | {
    "logits": "B X V", "proposals": "B C", "draft_probabilities": "B C V", "seen": "B V", "accept_uniform": "B C",
    "draw_uniform": "B X V", "tokens": "B X", "logprobs": "B X",
}  # fmt: skip
TOLERANCES = {"accepted": "bits", "tokens": "bits", "logprobs": "probabilities"}
_ACCEPT, _DRAW = 0, 1  # the uses of a position's keys, as in `m3jax.decoding.speculation.verify`


def cases(large: bool) -> Iterator[Case]:
    """Yield a case of proposals with the distribution that they were drawn from, and one without it; each again with
    the knobs that act before the temperature.
    """
    if large:
        return
    for index, name in enumerate(("drafted", "point_mass")):
        rng, (num_rows, count, vocab) = np.random.default_rng(111 + index), (12, 3, 16)
        settings = [
            Sampling(temperature=0.9),
            Sampling.greedy(),
            Sampling(top_k=6),
            Sampling(top_p=0.8, repetition_penalty=1.3),
        ]
        params = SamplingParams.stack(settings * 3)
        logits = (rng.normal(size=(num_rows, count + 1, vocab)) * 2).astype(np.float32)
        noise = rng.gumbel(size=(num_rows, count, vocab)) * 0.7
        proposals = np.argmax(logits[:, :count] + noise, axis=-1).astype(np.int32)
        proposals[5, 1] = proposals[9, 0] = -1  # no proposal
        seed = np.arange(40, 40 + num_rows, dtype=np.uint32)
        positions = rng.integers(1, 4000, num_rows).astype(np.int32)
        inputs = {knob: np.asarray(getattr(params, knob)) for knob in FILTERS}
        inputs |= {"logits": logits, "proposals": proposals, "seen": rng.random((num_rows, vocab)) < 0.2, "seed": seed,
                   "positions": positions} | _uniforms(seed, positions, count, vocab)  # fmt: skip
        if name == "drafted":
            noise = np.exp(logits[:, :count] + rng.normal(size=(num_rows, count, vocab)))
            inputs["draft_probabilities"] = (noise / noise.sum(-1, keepdims=True)).astype(np.float32)
        source = "drawn from draft_probabilities" if name == "drafted" else "without a distribution: a point mass each"
        what = (
            f"proposals {source}; -1 is none. Accepted while u q < p; then the token of the largest log w + g, with "
            "w = p after all proposals, else max(p - q, 0), and g = -log(-log u) of draw_uniform in that column"
        )
        yield Case(name, what, {}, 111 + index, inputs)
    yield from _edited_cases()


_EDITS = (
    Sampling(frequency_penalty=1.5, presence_penalty=0.5),
    Sampling(temperature=0.0, frequency_penalty=-2.0),
    Sampling(logit_bias={2: 2.0, 6: 2.5, 11: -100.0}, repetition_penalty=1.3),
    Sampling(bad_words=((2, 6), (6, 6), (9, 2, 6)), logit_bias={6: 3.0, 2: 3.0}, top_k=8),
)


def _edited_cases() -> Iterator[Case]:
    """Yield cases in which accepted proposals count as new tokens for the penalties, bad words and the minimum."""
    for index, name in enumerate(("edited_drafted", "edited_point_mass")):
        rng, (rows, count, vocab) = np.random.default_rng(121 + index), (24, 3, 40)
        inputs = edit_inputs(rng, _EDITS * 6, vocab)
        inputs["min_tokens"] = (np.sum(inputs["new"] >= 0, axis=1) + np.arange(rows) % 4).astype(np.int32)
        logits = (rng.normal(size=(rows, count + 1, vocab)) * 2).astype(np.float32)
        logits[..., [2, 5, 6, 7, 12]] += 3.5  # tokens that the knobs speak of are drawn often
        proposals = np.argmax(logits[:, :count] + rng.gumbel(size=(rows, count, vocab)) * 0.7, axis=-1).astype(np.int32)
        proposals[np.any(inputs["mask"] != 2**32 - 1, axis=1)] = -1  # a mask says nothing of the tokens after the next
        seed, positions = np.arange(80, 80 + rows, dtype=np.uint32), rng.integers(1, 4000, rows).astype(np.int32)
        inputs |= {"logits": logits, "proposals": proposals, "seed": seed, "positions": positions}
        inputs |= _uniforms(seed, positions, count, vocab)
        if name == "edited_drafted":
            noise = np.exp(logits[:, :count] + rng.normal(size=(rows, count, vocab)))
            inputs["draft_probabilities"] = (noise / noise.sum(-1, keepdims=True)).astype(np.float32)
        what = (
            f"as {name.removeprefix('edited_')}, with the knobs of sampling/edits; an accepted proposal counts as new "
            "in the columns after it. A row with a mask has no proposals"
        )
        yield Case(name, what, {}, 121 + index, inputs)


def _uniforms(
    seed: UInt32[np.ndarray, " B"], positions: Int32[np.ndarray, " B"], count: int, vocab: int
) -> dict[str, np.ndarray]:
    """Return the uniform numbers of each acceptance and each draw."""
    accept, draw = [], []
    for column in range(count + 1):
        keys = position_keys(jnp.asarray(seed), jnp.asarray(positions) + column, _DRAW)
        draw.append(uniforms(keys, (vocab,)))
        keys = position_keys(jnp.asarray(seed), jnp.asarray(positions) + column, _ACCEPT)
        accept.append(np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)))
    return {"accept_uniform": np.stack(accept[:count], axis=1), "draw_uniform": np.stack(draw, axis=1)}


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Verify by Leviathan et al. 2023, algorithm 1, in float64 numpy, a row at a time."""
    x = {name: np.asarray(value) for name, value in inputs.items()}
    num_rows, count = x["proposals"].shape
    accepted, tokens, logprobs = np.zeros(num_rows, np.int32), np.full((num_rows, count + 1), -1, np.int32), []
    for b in range(num_rows):
        for column in range(count + 1):
            p = distribution(x, b, x["logits"][b, column], later=tokens[b, :column].tolist())
            token = x["proposals"][b, column] if column < count else -1
            q = np.zeros(len(p)) if token < 0 else np.eye(len(p))[token]
            if token >= 0 and "draft_probabilities" in x:
                q = x["draft_probabilities"][b, column].astype(np.float64)
            if token >= 0 and x["accept_uniform"][b, column] * q[token] < p[token]:
                tokens[b, column], accepted[b] = token, column + 1
                continue
            weights = np.maximum(p - q, 0)
            weights = weights if weights.any() else p
            with np.errstate(divide="ignore"):
                noisy = np.log(weights) - np.log(-np.log(x["draw_uniform"][b, column].astype(np.float64)))
            tokens[b, column] = np.argmax(noisy)
            break
        logits = x["logits"][b].astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        logprobs.append(np.where(tokens[b] < 0, 0.0, log_p[np.arange(count + 1), tokens[b]]))
    return {"accepted": accepted, "tokens": tokens, "logprobs": np.stack(logprobs)}


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield a run of `verify`; the slots behind the target's own token hold garbage, which is made -1 here."""
    params, context = params_and_context(inputs, inputs["logits"].shape[-1])
    drafted = inputs.get("draft_probabilities")
    proposal = Proposal(jnp.asarray(inputs["proposals"]), None if drafted is None else jnp.log(jnp.asarray(drafted)))
    logits, positions = jnp.asarray(inputs["logits"]), jnp.asarray(inputs["positions"])
    verdict = jax.jit(verify)(logits, proposal, params, context, positions)
    meant = jnp.arange(verdict.tokens.shape[1]) <= verdict.accepted[:, None]
    outputs = {"accepted": verdict.accepted, "tokens": jnp.where(meant, verdict.tokens, -1)}
    yield Run("verify", "float32", on_host(outputs | {"logprobs": jnp.where(meant, verdict.logprobs, 0.0)}))


GROUP = Group("verification", cases, define, runs, AXES, TOLERANCES, on_host=True)
