"""Verification: the target's distribution comes out whatever is proposed, and the best token where it is greedy."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import drafts, tiny
from support.sampling_reference import reference

from m3jax.decoding import DrawContext, Eagle3Drafter, PromptLookup, Sampling, SamplingParams
from m3jax.decoding.sampling import WORD_TOKENS, count_uses, filtered_logits
from m3jax.decoding.speculation.named import as_drafter
from m3jax.decoding.speculation.verify import DRAFT as DRAFT_KEYS
from m3jax.decoding.speculation.verify import Proposal, context_by_column, position_keys, verify

V, K = 16, 3
POSITION = 7  # of the first proposal
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
    "bias, bad words": Sampling(logit_bias={3: 2.0, 5: -3.0}, bad_words=((7,),), top_k=9),
}
PENALTIES = Sampling(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2, bad_words=((6, 4), (4, 4)))
EMPTY = DrawContext(recent=np.full((1, WORD_TOKENS - 1), -1, np.int32))  # of a text without tokens
# Of a chi-square variable with 15 degrees of freedom, exceeded once in 10,000 times.
LIMIT = 44.3


@partial(jax.jit, static_argnames="rule")
def emitted(params, seeds, rule, context=EMPTY):
    """Tokens [DRAWS X] and how many were accepted, each row with a seed of its own."""
    rows = len(seeds)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), params)
    log_q = jnp.broadcast_to(jax.nn.log_softmax(DRAFT), (rows, K, V))
    # With a drafter's own keys: were they those of the tests or of the next token, draws would depend on each other.
    keys = [position_keys(seeds, jnp.full(rows, POSITION + column, jnp.int32), DRAFT_KEYS) for column in range(K)]
    drawn = jax.vmap(jax.vmap(jax.random.categorical))(jnp.stack(keys, 1), log_q).astype(jnp.int32)
    best = jnp.broadcast_to(jnp.argmax(DRAFT, axis=-1).astype(jnp.int32), (rows, K))
    proposal = Proposal(drawn, log_q) if rule == "drawn" else Proposal(best)
    params = SamplingParams(**{**vars(params), "seed": seeds})
    logits = jnp.broadcast_to(TARGET, (rows, K + 1, V))
    context = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), context)
    return verify(logits, proposal, params, context, jnp.full(rows, POSITION, jnp.int32))


def chi_square(tokens, p):
    counts, expected = np.bincount(tokens, minlength=V), p * len(tokens)
    assert not counts[p == 0].any()
    inside = p > 0
    return ((counts - expected)[inside] ** 2 / expected[inside]).sum()


# What knobs make of the logits does not depend on the rule, so the second rule has two of them.
@pytest.mark.parametrize(
    ("rule", "knobs"),
    [
        ("drawn", "plain"),
        ("best", "plain"),
        *(pytest.param("drawn", knobs, marks=pytest.mark.further) for knobs in KNOBS if knobs != "plain"),
        pytest.param("best", "bias, bad words", marks=pytest.mark.further),
    ],
)
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


@pytest.mark.further  # of greedy rows: test_the_penalty_counts_accepted_proposals; in rounds: test_engine_sampling.py
@pytest.mark.parametrize("rule", ["drawn", "best"])
def test_penalties_count_what_was_accepted(rule):
    """The second token has the distribution that plain decoding gives it after each first one, as far as it comes."""
    prompt, new = [2, 6], [6]
    context = DrawContext(
        uses=count_uses(prompt, new, V)[None],
        recent=np.array([[-1] * (WORD_TOKENS - 4) + prompt + new], np.int32),
        counts=np.ones(1, np.int32),
        min_tokens=np.full(1, 2, np.int32),
        stop_ids=np.array([[TARGET[0].argmax()]], np.int32),
    )
    found = emitted(SamplingParams.stack([PENALTIES]), np.arange(DRAWS, dtype=np.uint32), rule, context)
    accepted, tokens = np.asarray(found.accepted), np.asarray(found.tokens)
    rest = dict(prompt=prompt, stop_ids=context.stop_ids[0].tolist(), min_tokens=2)
    assert chi_square(tokens[:, 0], reference(TARGET[0], PENALTIES, new=new, **rest)) < LIMIT
    firsts = [first for first in range(V) if np.sum((tokens[:, 0] == first) & (accepted >= 1)) > 2000]
    for first in firsts:
        kept = tokens[(tokens[:, 0] == first) & (accepted >= 1), 1]
        assert chi_square(kept, reference(TARGET[1], PENALTIES, new=[*new, first], **rest)) < LIMIT, first
    assert firsts or rule == "best"


@pytest.mark.further  # the shares of many draws
def test_acceptance_is_what_the_rule_says():
    sampling = SamplingParams.stack([Sampling()])
    p, q = reference(TARGET[0], Sampling()), reference(DRAFT[0], Sampling())
    for rule, share in (("drawn", np.minimum(p, q).sum()), ("best", p[q.argmax()])):
        accepted = np.asarray(emitted(sampling, np.arange(DRAWS, dtype=np.uint32), rule).accepted)
        assert abs((accepted >= 1).mean() - share) < 5 * (share * (1 - share) / DRAWS) ** 0.5


@jax.jit
def drawn_by_eagle3(model, drafter, memory, seeds):
    """Rows' knobs, and a proposal of EAGLE3 to each, all after one output of the draft [D]."""
    rows = len(seeds)
    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), SamplingParams.stack([Sampling()]))
    params = SamplingParams(**{**vars(stacked), "seed": seeds})
    newest, lengths = jnp.zeros(rows, jnp.int32), jnp.full(rows, POSITION - 1, jnp.int32)  # as a round passes them
    cache = drafter.join(model, model.new_cache(1, rows, 1))  # not read: the only proposal is picked from the memory
    outputs = jnp.broadcast_to(memory, (rows, len(memory)))  # [B D]
    return params, drafter.propose(model, cache, outputs, params, newest, lengths, jnp.ones(rows, bool), count=1)[0]


def test_the_token_after_a_refusal_does_not_depend_on_the_drafts_draw():
    """p moves the probability of q's best token to the second and the last, half each; so these share what is refused.

    Drawn by one key, the refused token's win would say that the second, which it often is close to, drew low. Under a
    random p that hardly shows: what p - q leaves is mostly on tokens of little q, whose draw a win says little about.
    """
    model = tiny.model(tiny.config("dM", vocab_size=V))
    drafter = Eagle3Drafter(drafts.draft(vocab_size=V, draft_vocab_size=V), sample=True)
    memory = jnp.asarray(np.random.default_rng(0).normal(size=model.config.hidden_size), jnp.float32)
    params, proposal = drawn_by_eagle3(model, drafter, memory, jnp.arange(DRAWS, dtype=jnp.uint32))
    p = np.exp(np.asarray(proposal.log_q[0, 0], np.float64))
    best, second, last = np.argsort(-p)[[0, 1, -1]]
    p[[second, last]] += p[best] / 2
    p[best] = 0
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (DRAWS, 2, V))
    found = _verify(logits, proposal, params, DrawContext(), jnp.full(DRAWS, POSITION, jnp.int32))
    tokens = np.asarray(found.tokens)[:, 0]
    corrections = tokens[np.asarray(found.accepted) == 0]
    assert set(corrections.tolist()) == {second, last} and len(corrections) > 10_000
    share, limit = (corrections == second).mean(), 4 * 0.5 / len(corrections) ** 0.5
    message = f"token {second} is {share:.3f} of those after token {best} was refused, not 0.5 within {limit:.3f}"
    assert abs(share - 0.5) < limit, message
    assert chi_square(tokens, p) < LIMIT


def test_each_column_has_the_proposals_before_it_behind_its_row_s_text():
    context = DrawContext(is_edited=jnp.array([True, False]), counts=jnp.array([4, 5], jnp.int32))
    found = context_by_column(context, jnp.array([[7, 8], [9, -1]], jnp.int32))
    assert found.row.tolist() == [0, 0, 0, 1, 1, 1] and found.counts is context.counts
    assert found.is_edited.tolist() == [True] * 3 + [False] * 3
    assert found.later.tolist() == [[-1, -1], [7, -1], [7, 8], [-1, -1], [9, -1], [9, -1]]
    assert context_by_column(DrawContext(), found.later).is_edited is None


def test_a_name_stands_for_a_drafter(unchecked):
    own = PromptLookup(3, 2)
    loading = SimpleNamespace(load_drafter=lambda name: ("loaded", name))
    assert as_drafter(None, loading) is None and as_drafter(own, loading) is own
    for target in (loading, object()):
        assert as_drafter("ngram", target) == PromptLookup()
    for name in ("builtin", Path("folder")):
        assert as_drafter(name, loading) == ("loaded", name)
        with pytest.raises(ValueError, match=f"draft = '{name}': a object loads no draft by its name"):
            as_drafter(name, object())
    with pytest.raises(ValueError, match="draft is 3: give 'builtin', 'ngram', an EAGLE3 draft's folder, or a drafter"):
        as_drafter(3, loading)


def check(proposed, sampling=GREEDY, logits=TARGET, seen=()):
    """One row's verdict."""
    uses = np.zeros((1, V), np.int32)
    uses[0, list(seen)] = 1
    proposal = Proposal(jnp.asarray([proposed], jnp.int32))
    params = jax.tree.map(jnp.asarray, SamplingParams.stack([sampling]))
    found = _verify(
        jnp.asarray(logits)[None], proposal, params, DrawContext(uses=jnp.asarray(uses)), jnp.zeros(1, jnp.int32)
    )
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


@pytest.mark.parametrize("has_q", [False, True])
@given(seed=st.integers(0, 2**32 - 1))
def test_one_condition_for_greedy_rows_changes_nothing(has_q, seed):
    """Of logits with ties, and columns without a distribution, as where a knob is on that does nothing."""
    rng, rows = np.random.default_rng(seed), 4
    logits = rng.integers(-3, 4, (rows, K + 1, V)).astype(np.float32)
    logits[rng.random((rows, K + 1)) < 0.2, 0] = rng.choice([np.nan, np.inf, -np.inf])
    proposed = [np.full((rows, K), -1), np.argmax(logits[:, :K], axis=-1), rng.integers(0, V, (rows, K))]
    tokens = np.choose(rng.choice(3, (rows, K), p=[0.2, 0.6, 0.2]), proposed).astype(np.int32)
    log_q = np.asarray(jax.nn.log_softmax(rng.normal(size=(rows, K, V)).astype(np.float32))) if has_q else None
    params = SamplingParams.stack([GREEDY] * rows)
    plain, other = (
        _verify(logits, Proposal(tokens, log_q), params, DrawContext(is_edited=is_edited), np.arange(rows))
        for is_edited in (np.zeros(rows, bool), np.ones(rows, bool))
    )
    np.testing.assert_array_equal(plain.accepted, other.accepted)
    is_kept = np.arange(K + 1) <= plain.accepted[:, None]
    np.testing.assert_array_equal(plain.tokens[is_kept], other.tokens[is_kept])
    assert set(np.unique(plain.accepted)) <= set(range(K + 1))
    np.testing.assert_array_equal(plain.logprobs[is_kept], other.logprobs[is_kept])


def test_a_row_that_asks_for_more_than_the_best_token_gets_it():
    """Beside a greedy row: a draw, a knob before the temperature, the most probable tokens."""
    logits = np.broadcast_to(TARGET, (2, K + 1, V))
    proposal = Proposal(np.full((2, K), -1, np.int32))
    hot = Sampling(temperature=50.0, seed=3)
    context = DrawContext(is_edited=np.zeros(2, bool))
    drawn = {
        int(_verify(logits, proposal, SamplingParams.stack([GREEDY, hot]), context, np.full(2, place)).tokens[1, 0])
        for place in range(20)
    }
    assert len(drawn) > 5
    params = SamplingParams.stack([GREEDY, Sampling(temperature=0.0, logit_bias={WRONG[0]: 99.0})])
    found = _verify(logits, proposal, params, DrawContext(is_edited=np.array([False, True])), np.zeros(2, np.int32))
    assert found.tokens[:, 0].tolist() == [BEST[0], WRONG[0]]
    wants_top = np.array([False, True])
    inputs = logits, proposal, SamplingParams.stack([GREEDY] * 2), context, np.zeros(2, np.int32), wants_top
    found = jax.jit(partial(verify, num_top=2))(*inputs)
    np.testing.assert_array_equal(found.top_ids[1], np.argsort(-TARGET, axis=-1)[:, :2])


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


def test_a_sampled_row_is_alone_in_every_place():
    """Among companions with other seeds, knobs and proposals: the bits that it has in a call of its own."""
    rng, rows = np.random.default_rng(4), 5
    samplings = [Sampling(temperature=0.8 + row / 4, top_k=3 * row, seed=101 + 7 * row) for row in range(rows)]
    logits = rng.normal(size=(rows, K + 1, V)).astype(np.float32)
    log_q = np.asarray(jax.nn.log_softmax(logits[:, :K] + rng.normal(size=(rows, K, V)).astype(np.float32)))
    tokens = rng.integers(0, V, (rows, K)).astype(np.int32)
    positions, seen = 9 + 3 * np.arange(rows, dtype=np.int32), rng.random((rows, V)) < 0.3

    def verdicts(order):
        params = jax.tree.map(jnp.asarray, SamplingParams.stack([samplings[row] for row in order]))
        proposal = Proposal(jnp.asarray(tokens[order]), jnp.asarray(log_q[order]))
        context = DrawContext(uses=jnp.asarray(seen[order], jnp.int32))
        found = _verify(jnp.asarray(logits[order]), proposal, params, context, positions[order])
        return [jax.tree.map(lambda x, place=place: np.asarray(x[place]), found) for place in range(rows)]

    alone = [verdicts([row] * rows)[0] for row in range(rows)]
    assert len({int(verdict.accepted) for verdict in alone}) > 1
    for turn in range(rows):  # every row in every place
        order = np.roll(np.arange(rows), turn)
        for place, verdict in enumerate(verdicts(order)):
            count, expected = int(alone[order[place]].accepted), alone[order[place]]
            assert int(verdict.accepted) == count, f"row {order[place]} in place {place}: accepted"
            np.testing.assert_array_equal(verdict.tokens[: count + 1], expected.tokens[: count + 1])


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
    """If q is p, over 99.9% of rows accept all proposals, and no token is drawn from rounding errors of p - q."""
    rows = 2000
    log_p = jax.nn.log_softmax(jnp.broadcast_to(jnp.asarray(TARGET), (rows, K + 1, V)))
    drawn = jax.random.categorical(jax.random.key(0), log_p[:, :K]).astype(jnp.int32)
    params = jax.tree.map(jnp.asarray, SamplingParams.stack([Sampling(seed=i) for i in range(rows)]))
    rest = params, DrawContext(), jnp.zeros(rows, jnp.int32)
    found = _verify(log_p, Proposal(drawn, log_p[:, :K]), *rest)
    assert float(jnp.mean(found.accepted == K)) > 0.999
    assert int(found.tokens.min()) >= 0


def test_knobs_make_no_nan_of_finite_logits():
    """Step by step, a greedy row beside a drawn one: who looks for NaN (`jax_debug_nans`) finds those of the model."""
    logits = jnp.asarray(TARGET[:2])
    params = SamplingParams.stack([GREEDY, Sampling(temperature=0.7, min_p=0.1)])
    as_asked = lambda is_asked, then, otherwise, *x: then(*x) if is_asked else otherwise(*x)
    with jax.debug_nans(True):
        found = np.asarray(filtered_logits(logits, params, cond=as_asked))
    assert found[0].argmax() == TARGET[0].argmax() and np.isneginf(found[0]).sum() == V - 1 and found.max() == 0


def test_lookup_remembers_the_new_tokens_of_each_row(unchecked):
    """`counts` of them behind the newest token's place; what has no room is not remembered, and nothing else moves."""
    memory = np.arange(24, dtype=np.int32).reshape(3, 8)
    tokens = 100 + np.arange(9, dtype=np.int32).reshape(3, 3)
    lengths, counts = np.array([2, 5, 0], np.int32), np.array([3, 3, 0], np.int32)
    expected = memory.copy()
    for row in range(3):
        for column in range(counts[row]):
            if lengths[row] + 1 + column < 8:
                expected[row, lengths[row] + 1 + column] = tokens[row, column]
    given = map(jnp.asarray, (tokens, lengths, counts))
    cache, found = PromptLookup().learn(None, "cache", jnp.asarray(memory), None, *given)
    assert cache == "cache"
    np.testing.assert_array_equal(found, expected)
