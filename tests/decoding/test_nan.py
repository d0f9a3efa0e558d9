"""A row of logits without a distribution is never a token, however large the array that its NaN stands in."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import drafts, tiny
from support.fake_model import FakeConfig, FakeModel
from support.lowering import array, lower

from m3jax.cache import measure_scales
from m3jax.completion import generate
from m3jax.decoding import DrawContext, Eagle3Drafter, Engine, Params, PromptLookup, Sampling, SamplingParams, sample
from m3jax.decoding.device.compiler_options import CPU_DECODE_OPTIONS
from m3jax.decoding.sampling import has_distribution, row_keys
from m3jax.decoding.speculation.verify import Proposal, verify
from m3jax.model.layers import swiglu_oai

# B and V on both sides of 4,096 numbers, where XLA's maximum begins to leave NaN out on a CPU (jaxlib 0.10.2).
SHAPES = ((1, 1), (4, 1023), (4, 1024), (1, 4096), (4, 2**18))
BAD = st.sampled_from((np.nan, np.inf))


def stacked(*samplings: Sampling) -> SamplingParams:
    return jax.tree.map(jnp.asarray, SamplingParams.stack(samplings))


@jax.jit
def _sample(logits, params):
    return sample(logits, params, row_keys(params.seed, jnp.arange(len(logits), dtype=jnp.int32)))


@given(st.sampled_from(SHAPES), st.integers(0, 2**32), st.sampled_from((0.0, 1.0)), BAD)
def test_one_bad_logit_anywhere_is_no_token(shape, seed, temperature, bad):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=shape).astype(np.float32)
    params = stacked(*[Sampling(temperature=temperature, seed=row) for row in range(shape[0])])
    before = np.asarray(_sample(logits, params))
    assert (before >= 0).all()
    row, column = rng.integers(shape[0]), rng.integers(shape[1])
    logits[row, column] = bad
    found = np.asarray(_sample(logits, params))
    assert found[row] == -1, f"token {found[row]} of row {row}, whose logit {column} of {shape} is {bad}"
    assert (np.delete(found, row) == np.delete(before, row)).all()


def test_a_product_that_is_nan_stays_so_through_a_clamp():
    """Under the options of a decode step on a CPU the library of products takes what follows one, and its minimum, of
    4,096 numbers on, is 7 where one is NaN."""
    rng = np.random.default_rng(0)
    x, gate, up = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64, 256), (64, 256)))
    run = jax.jit(lambda x, gate, up: swiglu_oai(x @ gate, x @ up, 1.702, 7.0), compiler_options=CPU_DECODE_OPTIONS)
    assert np.isfinite(run(x, gate, up)).all()
    for broken in (gate, up):
        kept = broken[3, 9]
        broken[3, 9] = np.nan
        found = np.isnan(run(x, gate, up))
        assert found[:, 9].all() and found.sum() == 16, f"NaN in {found.sum()} of 16 numbers"
        broken[3, 9] = kept


@pytest.mark.parametrize("shape", SHAPES)
def test_minus_infinity_is_a_token_ruled_out(shape):
    """One token left is the token; none left is no distribution."""
    logits, left = np.full(shape, -np.inf, np.float32), shape[1] // 2
    assert not has_distribution(jnp.asarray(logits)).any()
    logits[:, left] = -3.0
    for temperature in (0.0, 1.0):
        found = _sample(logits, stacked(*[Sampling(temperature=temperature)] * shape[0]))
        assert np.asarray(found).tolist() == [left] * shape[0]


_verify = jax.jit(verify)


@pytest.mark.further  # test_speculative_verify.py
@given(st.integers(0, 2**32), st.sampled_from((64, 4096)), st.sampled_from((0.0, 1.0)), BAD)
def test_verification_ends_at_a_bad_logit(seed, vocab, temperature, bad):
    """Whatever was accepted before it stays. Top-k drops a NaN, and its column's proposal would pass."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 4, vocab)).astype(np.float32)
    column = rng.integers(4)
    best = logits.argmax(-1)[:, :3].astype(np.int32)
    logits[1, column, rng.integers(vocab)] = bad
    params = stacked(*[Sampling(temperature=temperature, top_k=1)] * 2)
    found = _verify(logits, Proposal(jnp.asarray(best)), params, DrawContext(), jnp.zeros(2, jnp.int32))
    ended = int(found.accepted[1])
    assert ended <= column
    assert int(found.tokens[1, ended]) == (-1 if ended == column else best[1, ended])
    assert int(found.accepted[0]) == 3 and int(found.tokens[0].min()) >= 0


@jax.jit
def _proposed(drafter, model, memory, sampling):
    """The first proposal of each row, after outputs of the draft [B D]."""
    rows = len(memory)
    cache, zeros = drafter.join(model, model.new_cache(1, rows, 1)), jnp.zeros(rows, jnp.int32)
    live = jnp.ones(rows, bool)
    return drafter.propose(model, cache, memory, sampling, zeros, zeros + 1, live, count=1)[0].tokens[:, 0]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("rows", [3, 64])
def test_a_draft_without_a_distribution_proposes_nothing(rows, draws):
    """With 64 rows of 64 logits the draft's maximum leaves NaN out too: its proposal was the bad token."""
    output = np.random.default_rng(0).normal(size=(rows, drafts.CONFIG.hidden_size)).astype(np.float32)
    drafter, params = Eagle3Drafter(drafts.draft(), sample=draws), stacked(*[Sampling()] * rows)
    model = jax.tree.map(lambda x: x, drafts.model())
    assert (np.asarray(_proposed(drafter, model, output, params)) >= 0).all()
    model.lm_head[...] = model.lm_head[...].at[9].set(jnp.nan)
    assert (np.asarray(_proposed(drafter, model, output, params)) == -1).all()


def test_scales_of_keys_that_are_no_numbers_are_refused():
    """One token of 256 has none: the largest of the others' said nothing of it, and neither did "is it above 0"."""
    config = tiny.config("dM")
    tokens, model = tiny.tokens(config, 2, 128), tiny.model(config)
    tokens[tokens == 7] = 8
    assert len(measure_scales(model, jnp.asarray(tokens))) == 2
    tokens[1, 40] = 7
    model.embed_tokens[...] = model.embed_tokens[...].at[7].set(jnp.nan)
    with pytest.raises(ValueError, match="keys or values are not finite"):
        measure_scales(model, jnp.asarray(tokens))


def test_the_test_for_nan_is_in_the_program_of_a_gpu():
    """A number is compared with itself: what is not equal to itself is NaN. It is lowered, not run."""
    text = lower(lambda logits: _sample(logits, stacked(*[Sampling()] * 4)), array(jnp.float32, 4, 4096))
    test = re.search(r"stablehlo.compare +NE, (%\w+), \1,.*tensor<4x4096xf32>", text)
    assert test is not None, "no logit is compared with itself"


# End to end


@dataclass(frozen=True)
class Greedy:
    """Requests of four rows, all greedy."""

    max_new_tokens: int = 6

    def run(self, model: FakeModel, **options):
        served = Engine(model, pages=32, max_batch=4, prefill_rows=4, prefill_chunk=16, max_length=64, **options)
        params = Params(max_new_tokens=self.max_new_tokens, sampling=Sampling.greedy())
        handles = [served.add([row + 1, 2, 3], params) for row in range(4)]
        results = served.run()
        served.check()
        return [results[handle] for handle in handles]


@pytest.mark.further  # of a sampler: above; of an engine: test_engine.py
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param(dict(draft=PromptLookup(), draft_tokens=2), id="drafted"),
    ],
)
def test_a_row_of_the_head_that_is_nan_ends_every_request(options):
    """With a vocabulary like M3's the greedy token was that row's id, and the reason "length"."""
    model = FakeModel.random(config=FakeConfig(vocab_size=4096))
    assert {result.stop_reason for result in Greedy().run(model, **options)} == {"length"}
    for result in Greedy().run(with_a_broken_row(model), **options):
        assert (result.tokens, result.logprobs, result.stop_reason) == ([], [], "nan")


def with_a_broken_row(model: FakeModel) -> FakeModel:
    return FakeModel(model.embed, model.head.at[100].set(jnp.nan), model.config)


@pytest.mark.further
def test_a_row_of_the_head_that_is_nan_ends_generate_with_an_error():
    broken = with_a_broken_row(FakeModel.random(config=FakeConfig(vocab_size=4096)))
    with pytest.raises(FloatingPointError, match="logits were NaN or infinite"):
        generate(broken, [[1, 2, 3]] * 4, max_new_tokens=6, temperature=0.0)
