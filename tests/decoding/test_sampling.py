"""Sampling against a NumPy reference, its statistics, and its independence of the batch."""

import itertools
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pytrees import assert_settings_are_static
from support.sampling_reference import edited, reference

from m3jax import cli, decoding
from m3jax.decoding import (
    DrawContext,
    Sampling,
    SamplingParams,
    filtered_logits,
    row_keys,
    sample,
)
from m3jax.decoding.sampling import KNOBS as KNOB_NAMES
from m3jax.decoding.sampling import (
    NO_DISTRIBUTION,
    NO_TOKEN,
    WORD_TOKENS,
    SamplingKnobs,
    as_sampling,
    as_samplings,
    compute_both,
    count_uses,
    draw_from,
    edited_logits,
    edits_logits,
    log_normaliser,
    logprob_of,
    sample_and_keep,
    sample_with_top,
)

V = 16
RNG_LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2
OFF = Sampling()


def probabilities(logits, rows, context=None):
    out = jax.jit(filtered_logits)(np.atleast_2d(logits), SamplingParams.stack(rows), context)
    return np.asarray(jax.nn.softmax(out, axis=-1))


def in_prompt(seen):
    """The context of rows whose prompt has some tokens, and that have no new ones."""
    return DrawContext(uses=np.asarray(seen, np.int32))


TIES = np.array([1, 3, 3, 3, 0, 0, 2, 2, 3, 1, 1, 1, 0, 2, 0, 0], np.float32)
CASES = {
    "off": OFF,
    "greedy": Sampling.greedy(),
    "hot": Sampling(temperature=2.5),
    "cold": Sampling(temperature=0.3),
    "top_k 1": Sampling(top_k=1),
    "top_k 5": Sampling(top_k=5),
    "top_k 0 is off": Sampling(top_k=0),
    "top_k above V": Sampling(top_k=100),
    "top_p tiny keeps the best": Sampling(top_p=1e-6),
    "top_p 0.5": Sampling(top_p=0.5),
    "top_p 0.95": Sampling(top_p=0.95),
    "top_p 1 is off": Sampling(top_p=1.0),
    "min_p 0.1": Sampling(min_p=0.1),
    "min_p 1": Sampling(min_p=1.0),
    "top_p after top_k": Sampling(top_k=4, top_p=0.6),
    "min_p after top_p": Sampling(top_p=0.9, min_p=0.3),
    "all": Sampling(temperature=1.7, top_k=9, top_p=0.85, min_p=0.05),
    "temperature acts before top_p": Sampling(temperature=3.0, top_p=0.5),
}


KNOBS = [*CASES.values(), Sampling.greedy(repetition_penalty=1.7), Sampling(top_k=3, repetition_penalty=0.6)]
SAMPLE_BY = jax.jit(sample, static_argnames="cond")
FILTER_BY = jax.jit(filtered_logits, static_argnames="cond")


@given(
    seed=st.integers(0, 2**16),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 3, 7]),
    top_p=st.sampled_from([None, 0.3, 0.77, 0.99]),
    min_p=st.sampled_from([None, 0.02, 0.4]),
    levels=st.sampled_from([2, 5, 1000]),
)
def test_any_combination_matches_the_reference(seed, temperature, top_k, top_p, min_p, levels):
    # Quarter steps with few levels make many exact ties.
    logits = np.random.default_rng(seed).integers(0, levels, V).astype(np.float32) / 4
    case = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(probabilities(logits, [case])[0], reference(logits, case), rtol=1e-4, atol=1e-5)


IDS = st.integers(0, V - 1)
SLOTS = dict(num_biases=3, num_bad_words=3)
EDITS = st.fixed_dictionaries(
    dict(
        repetition_penalty=st.sampled_from([None, 0.7, 1.5]),
        presence_penalty=st.sampled_from([None, -2, 0.5, 2.0]),
        frequency_penalty=st.sampled_from([None, -0.25, 1.75]),
        logit_bias=st.none() | st.dictionaries(IDS, st.sampled_from([-100.0, -1.5, 0.0, 3.0]), max_size=3),
        bad_words=st.none() | st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=3),
    )
)
ROW = st.fixed_dictionaries(
    dict(
        prompt=st.lists(st.integers(0, 3), max_size=9),
        new=st.lists(st.integers(0, 3), max_size=9),
        stop_ids=st.lists(IDS, max_size=2),
        min_tokens=st.integers(0, 6),
        allowed=st.none() | st.sets(IDS, max_size=V),
    )
)


def context_of(rows, num_later=0, vocab=V):
    """The context of rows as an engine has it; of the new tokens the last `num_later` are in `later`."""
    known = [row["new"][: max(len(row["new"]) - num_later, 0)] for row in rows]
    later = [row["new"][len(new) :] for row, new in zip(rows, known, strict=True)]
    texts = [[*row["prompt"], *new] for row, new in zip(rows, known, strict=True)]
    padded = lambda lists, width: np.array([[*ids, *[-1] * (width - len(ids))] for ids in lists], np.int32)
    recent = [[-1] * (WORD_TOKENS - 1 - len(text)) + text[-(WORD_TOKENS - 1) :] for text in texts]
    allowed = [set(range(vocab)) if row["allowed"] is None else row["allowed"] for row in rows]
    return DrawContext(
        row=np.arange(len(rows), dtype=np.int32),
        later=padded(later, num_later),
        uses=np.stack([count_uses(row["prompt"], new, vocab) for row, new in zip(rows, known, strict=True)]),
        recent=np.array(recent, np.int32),
        counts=np.array([len(new) for new in known], np.int32),
        min_tokens=np.array([row["min_tokens"] for row in rows], np.int32),
        stop_ids=padded([row["stop_ids"] for row in rows], 2),
        mask=np.stack([bits(ids, vocab) for ids in allowed]),
    )


def bits(allowed, vocab=V):
    """A mask of these tokens; what lies past the vocabulary is set, and must not matter."""
    flags = np.isin(np.arange(-(-vocab // 32) * 32), [*allowed, *range(vocab, vocab + 32)])
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


_edited = jax.jit(edited_logits)


TWO = dict(min_size=2, max_size=2)


@given(st.integers(0, 99), st.lists(EDITS, **TWO), st.lists(ROW, **TWO), st.integers(0, 2))
def test_what_acts_before_the_temperature_matches_the_reference(seed, knobs, rows, num_later):
    """Bias, penalties, bad words, minimum and mask, in any combination, with tokens that came since the context."""
    logits = np.random.default_rng(seed).normal(size=(2, V)).astype(np.float32) * 3
    settings = [Sampling(**of_row) for of_row in knobs]
    found = np.asarray(_edited(logits, SamplingParams.stack(settings, **SLOTS), context_of(rows, num_later)))
    for row, (setting, text) in enumerate(zip(settings, rows, strict=True)):
        expected = edited(logits[row], setting, **text)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5, err_msg=f"row {row}: {setting}, {text}")


# All cases in one batch


@pytest.mark.parametrize("logits", [RNG_LOGITS, TIES, np.zeros(V, np.float32)], ids=["random", "ties", "equal"])
def test_each_row_of_a_batch_has_the_distribution_of_its_knobs(logits):
    """The best token, those that tie with it under min-p 1, and every other set that a knob keeps."""
    cases = list(CASES.values())
    rows = jnp.broadcast_to(logits, (len(cases), V))
    filtered = np.asarray(filtered_logits(rows, SamplingParams.stack(cases)))
    np.testing.assert_array_equal(filtered.max(-1), 0)
    p = np.exp(filtered) / np.exp(filtered).sum(-1, keepdims=True)
    for found, (name, case) in zip(p, CASES.items(), strict=True):
        expected = reference(logits, case)
        assert np.flatnonzero(found).tolist() == np.flatnonzero(expected).tolist(), name
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_edits_of_rows_that_use_every_one_of_them():
    """Ids 0 and V - 1, words of one token and of several, begun in the prompt and in tokens since the context."""
    knobs = dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.25)
    settings = [
        Sampling(**knobs, logit_bias={0: 1.5, V - 1: -2.0}, bad_words=[(0,), (1, 2, 3), (2, 9)]),
        Sampling(**knobs, logit_bias={1: -1.0}, bad_words=[(2, 0), (3, 1)]),
        Sampling(),
        Sampling(**knobs, logit_bias={0: -1.0}, bad_words=[(0, 5)]),
    ]
    rows = [
        dict(prompt=[5, 0, 1], new=[0, 1, 2], stop_ids=[0, 4], min_tokens=4, allowed={*range(1, V)}),
        dict(prompt=[3], new=[7, 7, 2], stop_ids=[V - 1], min_tokens=3, allowed=None),
        dict(prompt=[V - 1], new=[1, V - 1], stop_ids=[0], min_tokens=3, allowed={0, V - 1}),
        dict(prompt=[4], new=[0, 3], stop_ids=[6], min_tokens=2, allowed=None),
    ]
    logits = np.random.default_rng(8).normal(size=(4, V)).astype(np.float32)
    params = SamplingParams.stack(settings, **SLOTS)
    expected = [edited(*of_row[:2], **of_row[2]) for of_row in zip(logits, settings, rows, strict=True)]
    known, since = context_of(rows), context_of(rows, 2)
    in_order = replace(known, row=None, later=None)  # as the steps of an engine have the rows
    edit = jax.jit(lambda *given: edited_logits(*given))  # traced here
    for name, context in {"in order": in_order, "with later tokens": since}.items():
        found = edit(logits, params, context)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_log_probabilities_of_given_tokens_are_those_of_a_softmax():
    """In rows of any number of axes; a negative token has that of token 0; a normaliser that is given is taken."""
    logits = np.random.default_rng(6).normal(size=(2, 3, V)).astype(np.float32)
    tokens = np.array([[0, V - 1, 5], [-1, 7, -2]], np.int32)
    log_total = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    given, tokens = jnp.asarray(logits), jnp.asarray(tokens)
    np.testing.assert_allclose(log_normaliser(given), log_total, rtol=1e-5)
    chosen = [[logits[row, place, max(tokens[row, place], 0)] for place in range(3)] for row in range(2)]
    np.testing.assert_allclose(logprob_of(tokens, given), chosen - log_total, rtol=1e-5)
    np.testing.assert_allclose(logprob_of(tokens, given, jnp.full((2, 3), 2.0)), np.array(chosen) - 2, rtol=1e-6)


@jax.jit
def ways_to_draw(logits, params, keys, context):
    """The logits that are drawn from, a token by itself, and what the other two ways give without and with the best."""
    ways, none, some = (sample_with_top, sample_and_keep), np.zeros(5, bool), np.arange(5) == 1
    filtered = filtered_logits(logits, params, context)
    with_top = [way(logits, params, keys, context, wants_top=w, num_top=2)[:3] for way in ways for w in (none, some)]
    alone = [way(logits, params, keys, context)[:3] for way in ways]
    kept = sample_and_keep(logits, params, keys, context)[3]
    return filtered, kept, sample(logits, params, keys, context), draw_from(filtered, params, keys), alone, with_top


def test_every_way_to_draw_gives_one_token_and_the_largest_logits_where_some_row_asks():
    """Of rows that are greedy, drawn, of no distribution and, with a context, edited until no token is left."""
    logits = np.stack([RNG_LOGITS, TIES, RNG_LOGITS, TIES, RNG_LOGITS])
    logits[3, 5] = np.nan
    every = tuple((token,) for token in range(V))
    settings = [Sampling.greedy(), Sampling.greedy(), Sampling(top_k=4, seed=2), Sampling(), Sampling(bad_words=every)]
    greedy = [replace(setting, temperature=0.0) for setting in settings]  # where no row is edited, a shorter way
    with_words = DrawContext(recent=np.full((5, WORD_TOKENS - 1), -1, np.int32))
    for of_rows, context in itertools.product((settings, greedy), (None, with_words)):
        params = SamplingParams.stack(of_rows)
        keys = row_keys(params.seed, np.arange(5, dtype=np.int32))
        filtered, kept, single, drawn, alone, with_top = ways_to_draw(logits, params, keys, context)
        np.testing.assert_array_equal(kept, filtered)
        expected = np.array(drawn)
        expected[3] = NO_DISTRIBUTION
        assert expected[:2].tolist() == [RNG_LOGITS.argmax(), TIES.argmax()]
        assert expected[2] in np.argsort(-RNG_LOGITS)[:4] and (expected[4] == NO_TOKEN) == (context is not None)
        for tokens in (single, *(of_way[0] for of_way in (*alone, *with_top))):
            assert tokens.tolist() == expected.tolist() and tokens.dtype == jnp.int32
        assert all(ids.shape == values.shape == (5, 0) for _, ids, values in alone)
        for (_, ids, values), is_asked in zip(with_top, (False, True) * 2, strict=True):
            for row in (0, 1, 2, 4):
                best = sorted(range(V), key=lambda i, row=row: (-logits[row, i], i))[:2]
                assert ids[row].tolist() == (best if is_asked else [0, 0])
                np.testing.assert_array_equal(values[row], logits[row, best] if is_asked else [0, 0])


def test_settings_are_stacked_with_what_is_off_as_documented():
    """Numbers that float32 cannot divide by are the nearest that it can, 0 stays 0; slots are filled as they say."""
    params = SamplingParams.stack([Sampling(), Sampling(temperature=1e-45, repetition_penalty=1e300, min_p=0.0)])
    off = dict(top_k=0, top_p=1, min_p=0, presence_penalty=0, frequency_penalty=0)
    assert {name: getattr(params, name).tolist() for name in off} == {name: [value] * 2 for name, value in off.items()}
    limits = np.finfo(np.float32)
    assert params.temperature.tolist() == [1, limits.tiny] and params.repetition_penalty.tolist() == [1, limits.max]
    assert SamplingParams.stack([Sampling(presence_penalty=-1e-45)]).presence_penalty.tolist() == [-limits.tiny]
    assert params.bias_ids.shape == params.biases.shape == (2, 0) and params.bad_words.shape == (2, 0, WORD_TOKENS)
    longest = tuple(range(WORD_TOKENS))
    full = Sampling(logit_bias={3: 0.5, 7: -1.0}, bad_words=[(4, 5), longest], seed=2**32 - 1)
    found = SamplingParams.stack([Sampling(), full])
    assert found.bias_ids.tolist() == [[-1, -1], [3, 7]] and found.biases.tolist() == [[0, 0], [0.5, -1]]
    none = [-1] * WORD_TOKENS
    assert found.bad_words.tolist() == [[none, none], [[*none[2:], 4, 5], list(longest)]]
    assert found.seed.tolist() == [0, 2**32 - 1]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (dict(logit_bias={1: 1.0, 2: 1.0}), r"logit_bias has 2 tokens: there is room for 1 \(max_biases\)"),
        (dict(bad_words=[(1,), (2,)]), r"bad_words has 2 words: there is room for 1 \(max_bad_words\)"),
        (
            dict(bad_words=[range(1, WORD_TOKENS + 2)]),
            f"a word of {WORD_TOKENS + 1} tokens: a word can have {WORD_TOKENS}",
        ),
    ],
)
def test_what_has_no_room_in_the_slots_is_refused(knobs, message):
    knobs = {name: [tuple(word) for word in value] if name == "bad_words" else value for name, value in knobs.items()}
    with pytest.raises(ValueError, match=message):
        SamplingParams.stack([Sampling(), Sampling(**knobs)], num_biases=1, num_bad_words=1)
    assert SamplingParams.stack([Sampling(logit_bias={1: 1.0}, bad_words=[(1,)])], 1, 1).bias_ids.tolist() == [[1]]


@pytest.mark.parametrize(
    ("knobs", "is_edited"),
    [
        (dict(temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, seed=7), False),
        (dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, bad_words=()), False),
        *[(dict(repetition_penalty=penalty), True) for penalty in (0.5, 0.999, 1.001, 2.0)],
        *[(dict(presence_penalty=penalty), True) for penalty in (-2.0, -1.0, 1.0, 2.0)],
        *[(dict(frequency_penalty=penalty), True) for penalty in (-2.0, -1.0, 1.0, 2.0)],
        (dict(logit_bias={0: 0.5}), True),
        (dict(bad_words=[(0,)]), True),
        (dict(bad_words=[(3, 0)]), True),
    ],
)
def test_a_row_is_edited_by_each_knob_that_acts_before_the_temperature(knobs, is_edited):
    """Beside a row that is not; what is off in any of the ways to say so edits nothing."""
    params = SamplingParams.stack([Sampling(), Sampling(**knobs)], **SLOTS)
    assert np.asarray(edits_logits(params)).tolist() == [False, is_edited]


def test_arrays_of_samplers_and_drafters_are_arguments():
    assert_settings_are_static(decoding)


@pytest.mark.parametrize("cond", [jax.lax.cond, compute_both])
def test_rows_that_edit_nothing_keep_their_bits(cond):
    """Beside a row that does, and alone: the same logits, to the bit, as without a context."""
    rng = np.random.default_rng(5)
    logits, plain = rng.normal(size=(2, V)).astype(np.float32), Sampling(temperature=0.7, top_p=0.9)
    texts = [dict(prompt=[1, 2], new=[3, 3], stop_ids=[4], min_tokens=0, allowed=None)] * 2
    settings = [plain, Sampling(frequency_penalty=1.0, logit_bias={3: 5.0})]
    params = SamplingParams.stack(settings, **SLOTS)
    beside = replace(context_of(texts), is_edited=np.asarray(edits_logits(params)))
    found = np.asarray(FILTER_BY(logits, params, beside, cond=cond))
    np.testing.assert_array_equal(found[0], np.asarray(FILTER_BY(logits[:1], SamplingParams.stack([plain]), None))[0])
    assert np.abs(found[1] - np.asarray(FILTER_BY(logits, params, None))[1]).max() > 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_is_no_token(temperature):
    """Not the token of id 0; and not a row without a distribution, which has another name."""
    logits = np.stack([RNG_LOGITS] * 3)
    logits[2, 3] = np.nan
    texts = [dict(prompt=[1], new=[], stop_ids=[], min_tokens=0, allowed=ids) for ids in (None, (), ())]
    assert draw(logits, [Sampling(temperature=temperature)] * 3, [1, 1, 1], context_of(texts))[1:].tolist() == [-2, -1]
    every = Sampling(temperature=temperature, bad_words=[(i,) for i in range(V)])
    assert draw(logits[:1], [every], [1], context_of(texts[:1])).tolist() == [-2]


@pytest.mark.parametrize("count", [1, 3, V, V + 2])
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_largest_logits_are_the_same_on_every_platform(name, count, monkeypatch):
    """Of two ways to find them, each is that of a platform."""
    monkeypatch.setattr(decoding.sampling, "platform", lambda: name)
    logits = jnp.asarray(np.stack([TIES, RNG_LOGITS, -TIES]))
    ids, values = decoding.sampling.top_logits(logits, count)
    for row in range(3):
        order = sorted(range(V), key=lambda i: (-logits[row, i], i))[:count]
        missing = max(0, count - V)
        assert ids[row].tolist() == order + [-1] * missing
        assert values[row].tolist() == [*logits[row, np.array(order)].tolist(), *[-np.inf] * missing]
    many = jnp.zeros((1, 300)).at[0, 200].set(1)  # so many that a sort may mix equal ones
    assert decoding.sampling.top_logits(many, count)[0][0].tolist() == [200, *range(count - 1)]


@pytest.mark.parametrize("knobs", [dict(top_k=7), dict(top_p=6.5 / 300)])
def test_of_many_equal_tokens_the_lower_ids_are_kept(knobs):
    params = SamplingParams.stack([Sampling(**knobs)])
    kept = np.isfinite(filtered_logits(jnp.zeros((1, 300)), params))
    assert np.flatnonzero(kept[0]).tolist() == [*range(7)]


@given(seed=st.integers(0, 99), knobs=st.lists(st.sampled_from(KNOBS), min_size=4, max_size=4))
def test_without_conditions_the_same_tokens_are_drawn(seed, knobs):
    """A GPU's prefill computes what no row asks for, rather than have the host wait: nobody's token may change."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 6, (4, V)).astype(np.float32) / 2
    logits[3, rng.integers(V)] = rng.choice([np.nan, np.inf, -np.inf])
    params, seen = SamplingParams.stack(knobs), rng.random((4, V)) < 0.3
    keys, context = row_keys(params.seed, np.arange(4, dtype=np.int32)), in_prompt(seen)
    expected, found = (SAMPLE_BY(logits, params, keys, context, cond=cond) for cond in (jax.lax.cond, compute_both))
    assert found.tolist() == expected.tolist()


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    kept = [int((probabilities(logits, [Sampling(top_p=p)]) > 0).sum()) for p in (0.49, 0.51, 0.74, 0.76, 0.9)]
    assert kept == [1, 2, 2, 3, 4]


def test_top_p_of_one_keeps_what_float32_does_not_sum():
    """Beside a row that asks for less: the mass before the second token is 1 already, and the last one stays."""
    logits = np.float32([[0, -20, -30, -40]] * 2)
    kept = probabilities(logits, [Sampling(top_p=1.0), Sampling(top_p=0.5)]) > 0
    assert kept.sum(axis=-1).tolist() == [4, 1]


def test_top_p_equal_to_the_sum_ends_the_set():
    """Of equal tokens, whose sums are exact: the smallest set that reaches the sum, and no token more."""
    logits = np.zeros(V, np.float32)
    for kept in (1, 3, 8, 15):
        found = np.flatnonzero(probabilities(logits, [Sampling(top_p=kept / V)])[0])
        assert found.tolist() == list(range(kept)), f"top_p = {kept} / {V} keeps {len(found)} of equal tokens"


def test_same_order_and_meaning_as_transformers():
    torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
    process = pytest.importorskip("transformers.generation.logits_process", reason="the oracle extra is not installed")
    prompt = [3, 5, 5, 9]
    seen = np.isin(np.arange(V), prompt)[None]
    case = Sampling(temperature=1.4, top_k=10, top_p=0.8, min_p=0.06, repetition_penalty=1.2)
    scores = torch.tensor(RNG_LOGITS)[None]
    for step in (
        process.RepetitionPenaltyLogitsProcessor(1.2),
        process.TemperatureLogitsWarper(1.4),
        process.TopKLogitsWarper(10),
        process.TopPLogitsWarper(0.8),
        process.MinPLogitsWarper(0.06),
    ):
        scores = step(torch.tensor([prompt]), scores)
    expected = torch.softmax(scores, -1).numpy()
    np.testing.assert_allclose(probabilities(RNG_LOGITS, [case], in_prompt(seen)), expected, rtol=1e-5, atol=1e-7)


def test_knobs_are_per_row_and_rows_do_not_meet():
    """Each row of a mixed batch equals, bit for bit, the same row alone."""
    rows = list(CASES.values())
    logits = np.random.default_rng(1).normal(size=(len(rows), V)).astype(np.float32)
    together = probabilities(logits, rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(probabilities(logits[i], [row])[0], together[i])


@jax.jit
def one_draw(logits, params, positions, context):
    return sample(logits, params, row_keys(params.seed, positions), context)


def draw(logits, rows, positions, context=None):
    return np.asarray(one_draw(logits, SamplingParams.stack(rows), np.asarray(positions, np.int32), context))


@pytest.mark.parametrize(
    "case", [OFF, Sampling(temperature=0.6, top_k=8), Sampling(top_p=0.8), Sampling(min_p=0.2)], ids=repr
)
def test_frequencies(case):
    """Chi-square of 4,096 draws at as many positions; nothing outside the kept set is ever drawn."""
    count = 4096
    logits = np.broadcast_to(RNG_LOGITS, (count, V))
    tokens = draw(logits, [replace(case, seed=7)] * count, np.arange(count))
    observed, expected = np.bincount(tokens, minlength=V), reference(RNG_LOGITS, case) * count
    kept = expected > 0
    assert not observed[~kept].any()
    chi2 = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi2 < 45  # 15 degrees of freedom: above 44.3 in 1e-4 of all seeds


def test_seeds_give_independent_draws():
    count = 4096
    logits = np.zeros((count, V), np.float32)
    tokens = draw(logits, [Sampling(seed=i) for i in range(count)], np.full(count, 5))
    assert np.abs(np.bincount(tokens, minlength=V) - count / V).max() < 5 * np.sqrt(count / V)
    again = draw(logits, [Sampling(seed=i) for i in range(count)], np.full(count, 6))
    assert 0.75 / V < np.mean(tokens == again) < 1.25 / V


def test_a_draw_depends_on_seed_and_position_only():
    logits = np.random.default_rng(2).normal(size=(6, V)).astype(np.float32)
    rows = [Sampling(seed=i, temperature=1.5) for i in range(6)]
    positions = np.arange(6) * 10
    together = draw(logits, rows, positions)
    order = [4, 0, 5, 2]
    np.testing.assert_array_equal(draw(logits[order], [rows[i] for i in order], positions[order]), together[order])
    for i in range(6):
        assert draw(logits[i : i + 1], [rows[i]], positions[i : i + 1])[0] == together[i]


def test_greedy_rows_ignore_the_seed():
    logits = np.random.default_rng(3).normal(size=(3, V)).astype(np.float32)
    rows = [Sampling(temperature=0, seed=1), Sampling(temperature=0, seed=2), Sampling(seed=3)]
    assert draw(logits, rows, [1, 2, 3])[:2].tolist() == logits[:2].argmax(-1).tolist()


@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 4))
def test_greedy_rows_get_the_same_tokens_beside_rows_that_are_drawn(seed, levels):
    """Alone they take a shorter way: ties go to the lowest id on both, and what is no distribution is no token."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, (4, V)).astype(np.float32)
    logits[0, rng.integers(V)] = rng.choice([np.nan, np.inf, -np.inf])
    rows, positions = [Sampling.greedy()] * 3, [1, 2, 3, 4]
    *beside, drawn = draw(logits, [*rows, Sampling(seed=1)], positions)
    assert draw(logits, [*rows, Sampling.greedy()], positions)[:3].tolist() == beside
    assert beside[1:] == logits[1:3].argmax(-1).tolist()
    assert drawn == draw(logits[3:], [Sampling(seed=1)], [4])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [np.full(V, np.nan), np.where(np.arange(V) == 3, np.nan, 0), np.where(np.arange(V) == 3, np.inf, 0),
            np.full(V, -np.inf)], ids=["all NaN", "one NaN", "inf", "all -inf"]
)  # fmt: skip
def test_a_row_without_a_distribution_is_no_token(bad, temperature):
    logits = np.stack([RNG_LOGITS, bad.astype(np.float32)])
    rows = [Sampling(temperature=temperature, top_p=0.9)] * 2
    alone = draw(logits[:1], rows[:1], [0])
    assert draw(logits, rows, [0, 0]).tolist() == [alone[0], -1]


def test_tokens_that_the_model_rules_out_are_fine():
    logits = np.where(np.arange(V) < 12, -np.inf, 0).astype(np.float32)[None]
    for case in CASES.values():
        assert draw(logits, [case], [0])[0] >= 12


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_in_effect(temperature):
    assert draw(RNG_LOGITS[None], [Sampling(temperature=temperature)], [3])[0] == RNG_LOGITS.argmax()


def test_huge_knobs_stay_finite():
    rows = [Sampling(temperature=1e300), Sampling(repetition_penalty=1e300), Sampling(top_k=2**31 - 1)]
    logits = np.broadcast_to(RNG_LOGITS, (3, V))
    assert (draw(logits, rows, [0, 1, 2], in_prompt(np.zeros((3, V)))) >= 0).all()


def test_half_precision_logits_are_filtered_in_float32():
    logits = jnp.asarray(RNG_LOGITS, jnp.bfloat16)
    out = filtered_logits(logits[None], SamplingParams.stack([OFF]))
    assert out.dtype == jnp.float32


def test_new_values_compile_nothing():
    jitted = jax.jit(lambda *args: sample(*args))  # a function of its own, so a cache of its own
    keys = jax.random.split(jax.random.key(0), 1)
    for case in CASES.values():
        jitted(RNG_LOGITS[None], SamplingParams.stack([case]), keys)
    assert jitted._cache_size() == 1


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": None},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": None},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_bad_knobs_are_refused_by_name(knobs):
    # Where annotations are checked, a wrong type is refused a moment earlier, as a TypeError.
    with pytest.raises((ValueError, TypeError), match=next(iter(knobs))):
        Sampling(**knobs)


def test_sampling_is_hashable():
    assert len({Sampling(), Sampling(temperature=1.0), Sampling.greedy()}) == 2


@pytest.mark.parametrize(
    "of", [np.float32, np.array, jnp.float32, jnp.array], ids=lambda f: f"{f.__module__}.{f.__name__}"
)
def test_numbers_of_arrays_are_numbers(of):
    """Kept as Python's: equal settings are equal, whatever they were written as."""
    whole = jnp.int32 if of is jnp.float32 else np.int64 if of is np.float32 else of
    found = Sampling(temperature=of(0.5), top_p=of(0.25), min_p=of(0.125), top_k=whole(3), seed=whole(4))
    assert found == Sampling(temperature=0.5, top_p=0.25, min_p=0.125, top_k=3, seed=4)
    assert len({found, Sampling(temperature=0.5, top_p=0.25, min_p=0.125, top_k=3, seed=4)}) == 1
    assert type(found.temperature) is float and type(found.seed) is int


def test_what_is_no_single_number_is_refused():
    for value in (np.array([0.5]), jnp.array([0.5, 1.0]), np.array(True), jnp.array(1j)):
        with pytest.raises(ValueError, match=r"temperature = .*: must be at least 0 and finite"):
            Sampling(temperature=value)
    with pytest.raises(ValueError, match=r"top_k = 2\.0: must be an integer"):
        Sampling(top_k=jnp.float32(2.0))


def test_biases_and_bad_words_are_kept_sorted_and_hashable():
    """However they were given: equal settings are equal."""
    found = Sampling(logit_bias={9: 1, np.int64(2): np.float32(-0.5)}, bad_words=[[3], np.array([4, 5]), (3,)])
    assert found == Sampling(logit_bias=[(2, -0.5), (9, 1.0)], bad_words=((3,), (4, 5)))
    assert len({found, replace(found, logit_bias=dict(found.logit_bias))}) == 1
    assert found.logit_bias == ((2, -0.5), (9, 1.0)) and found.bad_words == ((3,), (4, 5))
    assert Sampling(logit_bias={}, bad_words=()) == Sampling()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (dict(presence_penalty=2.5), "presence_penalty = 2.5: must be at least -2 and at most 2"),
        (dict(frequency_penalty=np.nan), "frequency_penalty = nan: must be at least -2 and at most 2"),
        (dict(logit_bias={3: 101}), r"logit_bias\[3\] = 101: must be at least -100 and at most 100"),
        (dict(logit_bias={-1: 1.0}), "a token id of logit_bias = -1: must be an integer from 0"),
        (dict(logit_bias={"3": 1.0}), "a token id of logit_bias = '3': must be an integer from 0"),
        (dict(logit_bias={3: None}), r"logit_bias\[3\] = None: must be"),
        (dict(logit_bias=[(3, 1.0), (3, 2.0)]), "logit_bias has token 3 twice"),
        (dict(logit_bias=[3]), r"logit_bias = \[3\]: give numbers by token id"),
        (dict(bad_words=[3]), r"bad_words = \[3\]: give sequences of token ids"),
        (dict(bad_words=[[]]), r"bad_words = \[\[\]\]: give sequences of token ids"),
        (dict(bad_words=[[True]]), "a token id of bad_words = True: must be an integer from 0"),
        (dict(bad_words="word"), "bad_words = 'word': give sequences of token ids"),
    ],
)
def test_what_is_no_bias_penalty_or_word(unchecked, knobs, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**knobs)


def test_the_command_line_reads_biases_and_words():
    read = lambda *flags: vars(cli.parser().parse_args(["--prompt", "a", *flags]))
    assert read("--logit-bias", "9=1,2=-0.5")["logit_bias"] == ((9, 1.0), (2, -0.5))
    assert read("--bad-words", "12 7,9")["bad_words"] == ((12, 7), (9,))
    assert read("--min-tokens", "3", "--ignore-eos", "--top-logprobs", "4").items() >= {
        "min_tokens": 3, "ignore_eos": True, "top_logprobs": 4
    }.items()  # fmt: skip
    for flags in (("--logit-bias", "9"), ("--bad-words", "a b")):
        with pytest.raises(ValueError, match=f"argument {flags[0]}: {flags[1]}: write "):
            read(*flags)


def test_an_object_or_keywords():
    """A keyword wins over a default, and an object leaves the defaults out."""
    resolved = lambda sampling=None, **knobs: as_sampling(sampling, knobs, called=as_sampling, defaults={"top_k": 3})
    assert resolved() == Sampling(top_k=3)
    assert resolved(temperature=0.5, top_k=None, seed=2) == Sampling(temperature=0.5, top_k=3, seed=2)
    assert resolved(top_k=0) == Sampling(top_k=0)
    assert resolved(Sampling.greedy()) == resolved(Sampling.greedy(), seed=None) == Sampling.greedy()
    with pytest.raises(ValueError, match="sampling and seed: give the object or keywords, not both"):
        resolved(Sampling(), seed=1)
    with pytest.raises(TypeError, match="no keyword 'topk'; the nearest that it has is 'top_k'"):
        resolved(topk=1)


def test_settings_of_several_prompts():
    resolved = lambda sampling=None, **knobs: as_samplings(2, sampling, knobs, called=as_samplings)
    assert resolved(top_k=3, seed=7) == [Sampling(top_k=3, seed=7)] * 2
    assert resolved(top_k=3, seed=(1, 0)) == [Sampling(top_k=3, seed=1), Sampling(top_k=3)]
    assert resolved(seed=np.array([1, 2])) == [Sampling(seed=1), Sampling(seed=2)]
    one, other = Sampling.greedy(), Sampling(seed=3)
    assert resolved(one) == [one, one] and resolved((one, other)) == [one, other]


def test_the_keywords_are_the_settings():
    names = [field.name for field in fields(Sampling)]
    assert [*KNOB_NAMES, "seed"] == list(SamplingKnobs.__annotations__) == names
    assert SamplingKnobs.__optional_keys__ == set(names), "to a type checker none of them has to be given"
    flags = {action.dest for action in cli.parser()._actions}
    assert flags >= set(names), "the command line has a flag for each"
