"""Verification: the target's distribution comes out whatever is proposed, and the best token where it is greedy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling_reference import reference

from m3jax.decoding import Sampling, SamplingParams
from m3jax.decoding.speculation.verify import Proposal, verify

V, K = 16, 3
DRAWS = 60_000
GREEDY = Sampling.greedy()
RNG = np.random.default_rng(0)
TARGET = (RNG.normal(size=(K + 1, V)) * 1.5).astype(np.float32)  # logits by how many tokens came before
DRAFT = (TARGET[:K] + RNG.normal(size=(K, V))).astype(np.float32)
KNOBS = {
    "plain": Sampling(),
    "top-k 5": Sampling(top_k=5),
    "top-p 0.7": Sampling(top_p=0.7, temperature=1.4),
    "min-p 0.1, warm": Sampling(min_p=0.1, temperature=0.7),
}
# Of a chi-square variable with 15 degrees of freedom, exceeded once in 10,000 times.
LIMIT = 44.3


@partial(jax.jit, static_argnames="rule")
def emitted(params, seeds, rule):
    """Tokens [DRAWS X] and how many were accepted, each row with a seed of its own."""
    rows = len(seeds)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), params)
    log_q = jnp.broadcast_to(jax.nn.log_softmax(DRAFT), (rows, K, V))
    keys = jax.random.split(jax.random.key(99), (rows, K))
    drawn = jax.vmap(jax.vmap(jax.random.categorical))(keys, log_q).astype(jnp.int32)
    best = jnp.broadcast_to(jnp.argmax(DRAFT, axis=-1).astype(jnp.int32), (rows, K))
    proposal = Proposal(drawn, log_q) if rule == "drawn" else Proposal(best)
    params = SamplingParams(**{**vars(params), "seed": seeds})
    logits = jnp.broadcast_to(TARGET, (rows, K + 1, V))
    seen = jnp.zeros((rows, V), bool)
    return verify(logits, proposal, params, seen, jnp.full(rows, 7, jnp.int32))


def chi_square(tokens, p):
    counts, expected = np.bincount(tokens, minlength=V), p * len(tokens)
    assert not counts[p == 0].any()
    inside = p > 0
    return ((counts - expected)[inside] ** 2 / expected[inside]).sum()


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("rule", ["drawn", "best"])
def test_tokens_have_the_targets_distribution(rule, knobs):
    """Of each position that is reached, with proposals that were drawn and with the most probable ones."""
    sampling = KNOBS[knobs]
    found = emitted(SamplingParams.stack([sampling]), np.arange(DRAWS, dtype=np.uint32), rule)
    accepted, tokens = np.asarray(found.accepted), np.asarray(found.tokens)
    for position in range(K + 1):
        kept = tokens[accepted >= position, position]
        # Those that accepted all so far are a fair sample of the next token: TARGET does not depend on the past.
        if len(kept) > 2000:
            assert chi_square(kept, reference(TARGET[position], sampling)) < LIMIT, position
    assert len(tokens[accepted >= 1]) > 2000


def test_the_counting_can_fail():
    """A rule that takes the refused token's place from p itself is told apart."""
    p = reference(TARGET[0], Sampling())
    rng = np.random.default_rng(0)
    q = reference(DRAFT[0], Sampling())
    proposed = rng.choice(V, DRAWS, p=q)
    accepted = rng.random(DRAWS) < np.minimum(1, p / q)[proposed]
    assert chi_square(np.where(accepted, proposed, rng.choice(V, DRAWS, p=p)), p) > 10 * LIMIT


def test_acceptance_is_what_the_rule_says():
    sampling = SamplingParams.stack([Sampling()])
    p, q = reference(TARGET[0], Sampling()), reference(DRAFT[0], Sampling())
    for rule, share in (("drawn", np.minimum(p, q).sum()), ("best", p[q.argmax()])):
        accepted = np.asarray(emitted(sampling, np.arange(DRAWS, dtype=np.uint32), rule).accepted)
        assert abs((accepted >= 1).mean() - share) < 5 * (share * (1 - share) / DRAWS) ** 0.5


def check(proposed, sampling=GREEDY, logits=TARGET, seen=()):
    """One row's verdict."""
    mask = np.zeros((1, V), bool)
    mask[0, list(seen)] = True
    proposal = Proposal(jnp.asarray([proposed], jnp.int32))
    params = jax.tree.map(jnp.asarray, SamplingParams.stack([sampling]))
    found = _verify(jnp.asarray(logits)[None], proposal, params, jnp.asarray(mask), jnp.zeros(1, jnp.int32))
    count = int(found.accepted[0])
    return count, found.tokens[0, : count + 1].tolist(), found.logprobs[0, : count + 1]


_verify = jax.jit(verify)
BEST = TARGET.argmax(-1).tolist()
WRONG = [(token + 1) % V for token in BEST]


@pytest.mark.parametrize(
    ("proposed", "accepted"),
    [
        (BEST[:3], 3),
        ([WRONG[0], *BEST[1:3]], 0),
        ([BEST[0], WRONG[1], BEST[2]], 1),
        ([*BEST[:2], WRONG[2]], 2),
        ([-1, -1, -1], 0),
        ([BEST[0], -1, BEST[2]], 1),
    ],
)
def test_greedy_keeps_the_longest_right_beginning(proposed, accepted):
    """Then the correction, or after all of them the bonus token."""
    count, tokens, logprobs = check(proposed)
    assert (count, tokens) == (accepted, BEST[: accepted + 1])
    expected = TARGET - np.log(np.exp(TARGET).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[range(accepted + 1), tokens], atol=1e-5)


def test_a_tie_goes_to_the_lowest_id():
    logits = np.zeros((K + 1, V), np.float32)
    logits[:, [4, 9]] = 5
    assert check([9, 4, 4], logits=logits)[:2] == (0, [4])
    assert check([4, 4, 9], logits=logits)[:2] == (2, [4, 4, 4])


def test_the_penalty_counts_accepted_proposals():
    """A token that was proposed and accepted is penalised at the next position."""
    logits = np.zeros((K + 1, V), np.float32)
    logits[:, 4], logits[:, 9] = 5, 4
    penalty = Sampling.greedy(repetition_penalty=2.0)
    assert check([4, 9, 4], penalty, logits)[:2] == (3, [4, 9, 4, 4])
    assert check([4, 4, 4], penalty, logits)[:2] == (1, [4, 9])
    assert check([9, 4, 4], penalty, logits, seen=[4])[:2] == (3, [9, 4, 4, 4])
    assert check([4, 4, 4], penalty, logits, seen=[4])[:2] == (0, [9])


def test_a_proposal_outside_top_k_is_refused():
    last = int(TARGET[0].argmin())
    for seed in range(50):
        count, tokens, _ = check([last, 0, 0], Sampling(top_k=3, seed=seed))
        assert count == 0 and tokens[0] in np.argsort(TARGET[0])[-3:]


def test_logits_without_a_distribution_end_the_row():
    for value in (np.nan, np.inf):
        logits = TARGET.copy()
        logits[2] = value
        assert check(BEST[:3], logits=logits)[:2] == (2, [*BEST[:2], -1])
        assert check([WRONG[0], 0, 0], logits=logits)[:2] == (0, BEST[:1])


def test_equal_distributions_accept_everything():
    """Where q is p, nothing is ever refused, and what rounding leaves of p - q is not drawn from."""
    rows = 2000
    log_p = jax.nn.log_softmax(jnp.broadcast_to(jnp.asarray(TARGET), (rows, K + 1, V)))
    drawn = jax.random.categorical(jax.random.key(0), log_p[:, :K]).astype(jnp.int32)
    params = jax.tree.map(jnp.asarray, SamplingParams.stack([Sampling(seed=i) for i in range(rows)]))
    rest = params, jnp.zeros((rows, V), bool), jnp.zeros(rows, jnp.int32)
    found = _verify(log_p, Proposal(drawn, log_p[:, :K]), *rest)
    assert float(jnp.mean(found.accepted == K)) > 0.999
    assert int(found.tokens.min()) >= 0
