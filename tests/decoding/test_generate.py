"""Generation through the engine: what it must not depend on, where it stops, and what it refuses."""

from collections.abc import Sequence
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilations import compilations
from support.engines import runner_of
from support.fake_model import FakeConfig, FakeModel
from support.generation import LETTERS, params, run, small_engine, tokenizer, tokens

from m3jax.completion import StoppableText, generate, generate_text
from m3jax.decoding import Sampling, check_logits, device, engine_for

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(2, 64, n).tolist() for n in (5, 1, 40, 17)]
WARM = {"temperature": 1.3, "top_p": 0.95, "seed": 3}


@pytest.fixture
def fake():
    return FakeModel.random()


def forward(model, prompts: Sequence[Sequence[int]], news: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The logits that each new token was drawn from, of one call over everything."""
    rows = np.zeros((4, 64), np.int32)
    for row, prompt, new in zip(rows, prompts, news, strict=True):
        row[: len(prompt) + len(new)] = [*prompt, *new]
    logits = np.asarray(jax.jit(FakeModel.__call__)(model, rows))
    return [x[len(p) - 1 : len(p) + len(n) - 1] for x, p, n in zip(logits, prompts, news, strict=True)]


def test_greedy_is_teacher_forcing(fake):
    news = generate(fake, PROMPTS, max_new_tokens=16, temperature=0, stop_ids=[])
    for new, logits in zip(news, forward(fake, PROMPTS, news), strict=True):
        assert len(new) == 16
        assert new == logits.argmax(-1).tolist()


@pytest.mark.further
def test_single_prompts_of_many_lengths_share_programs_on_a_cpu(fake):
    """Of up to 1,024 tokens with what follows, streamed or not; a longer one has its own."""
    ids = RNG.integers(2, 64, 1500).tolist()
    generate(fake, [ids[:20]], max_new_tokens=40, stop_ids=[])
    with compilations() as seen:
        for length, new in ((1, 1), (100, 16), (300, 33), (700, 64)):
            generate(fake, [ids[:length]], max_new_tokens=new, stop_ids=[])
    assert seen == []
    with compilations() as seen:
        generate(fake, [ids], max_new_tokens=40, stop_ids=[])
    assert seen, "another size is compiled, and counted"


@pytest.mark.parametrize(
    "steps", [pytest.param(1, marks=pytest.mark.further), 3, pytest.param(16, marks=pytest.mark.further)]
)
def test_slices_give_the_same_tokens_as_one_shot(fake, steps):
    one_shot = generate(fake, PROMPTS, max_new_tokens=12, stop_ids=[], **WARM)
    engine = small_engine(fake, steps_per_call=steps)
    handles = [engine.add(p, params(**WARM)) for p in PROMPTS]
    engine.prefill()
    streamed = [engine.take(handle) for handle in handles]
    assert [len(new) for new in streamed] == [1] * 4
    while engine.busy:
        engine.step()
        slices = [engine.take(handle) for handle in handles]
        assert max(map(len, slices)) <= steps
        for row, new in zip(streamed, slices, strict=True):
            row += new
    assert streamed == one_shot


def test_prompts_may_be_arrays(fake):
    expected = generate(fake, PROMPTS, max_new_tokens=4, stop_ids=[])
    assert generate(fake, [np.asarray(p) for p in PROMPTS], max_new_tokens=4, stop_ids=[]) == expected
    assert generate(fake, [jnp.asarray(p) for p in PROMPTS], max_new_tokens=4, stop_ids=[]) == expected


def test_seeds_are_per_row(fake):
    prompts = [*PROMPTS[:1] * 3, PROMPTS[2]]
    a, b, c, _ = generate(fake, prompts, max_new_tokens=16, temperature=2.0, seed=[5, 6, 5, 5], stop_ids=[])
    assert a == c
    assert a != b
    assert generate(fake, prompts[:1], max_new_tokens=16, temperature=2.0, seed=6, stop_ids=[]) == [b]


def test_a_stop_id_ends_its_row_and_is_kept(fake):
    free = generate(fake, PROMPTS, max_new_tokens=16, stop_ids=[], **WARM)
    stop = [free[0][7], free[2][3]]
    for row, full in zip(generate(fake, PROMPTS, max_new_tokens=16, stop_ids=stop, **WARM), free, strict=True):
        ends = [i for i, token in enumerate(full) if token in stop]
        assert row == (full[: ends[0] + 1] if ends else full)


def test_no_stop_ids_means_eos(fake):
    free = generate(fake, PROMPTS, max_new_tokens=16, stop_ids=[], **WARM)
    eos = free[1][5]
    model = FakeModel(fake.embed, fake.head, FakeConfig(eos_token_id=(eos,)))
    stopped = generate(model, PROMPTS, max_new_tokens=16, **WARM)
    assert stopped == [row[: row.index(eos) + 1] if eos in row else row for row in free]


def test_numbers_and_names_as_people_write_them(fake):
    """Numbers of arrays, a draft by its name, a context that is no power of two."""
    found = generate(
        fake, PROMPTS, max_new_tokens=8, temperature=jnp.float32(0.5), seed=jnp.int32(3), top_k=np.int64(4)
    )
    assert found == generate(fake, PROMPTS, max_new_tokens=8, temperature=0.5, seed=3, top_k=4)
    greedy = dict(max_new_tokens=8, temperature=0.0, stop_ids=[])
    assert generate(fake, PROMPTS, **greedy, draft="ngram") == generate(fake, PROMPTS, **greedy)
    with pytest.raises(ValueError, match="draft = 'builtin': a FakeModel loads no draft by its name"):
        generate(fake, PROMPTS, **greedy, draft="builtin")
    short = FakeModel(fake.embed, fake.head, FakeConfig(max_position_embeddings=300))
    assert len(generate(short, [PROMPTS[0] * 3], **greedy)[0]) == 8


def test_repetition_penalty_counts_prompt_and_continuation(fake):
    """A penalty that pushes every seen token below every unseen one makes greedy decoding repeat nothing."""
    positive = FakeModel(jnp.abs(fake.embed), jnp.abs(fake.head))
    prompt = list(range(10, 30))
    (new,) = run(small_engine(positive), [prompt], params(40, temperature=0, repetition_penalty=1e30))
    assert len(set(prompt + new.tokens)) == 60


def test_logprobs_are_the_models_own(fake):
    results = run(small_engine(fake), PROMPTS, params(temperature=0.4, top_k=3))
    for result, logits in zip(results, forward(fake, PROMPTS, tokens(results)), strict=True):
        chosen = np.asarray(jax.nn.log_softmax(logits))[np.arange(12), result.tokens]
        np.testing.assert_allclose(result.logprobs, chosen, rtol=1e-4, atol=1e-4)


def test_no_logits_of_the_whole_prompt_are_made(fake):
    """Prefill unembeds one hidden state a row."""
    runner = runner_of(small_engine(fake))
    empty = lambda shape: np.zeros(shape, np.int32)
    chunk = device.Chunk(empty(2), empty((2, 128)), empty(2), empty(2), runner.continuations([], 2))
    text = str(jax.make_jaxpr(device.prefill)(fake, runner.state, chunk))
    assert f"2,{fake.config.vocab_size}]" in text
    assert f"2,128,{fake.config.vocab_size}]" not in text


def test_nothing_compiles_after_warm_up(fake):
    """Other lengths, row counts, limits, knobs, seeds and stop ids of the same buckets."""
    generate(fake, PROMPTS, max_new_tokens=14, stop_ids=[3])
    with compilations() as seen:
        generate(fake, PROMPTS[1:], max_new_tokens=9, temperature=0, stop_ids=[])
        generate(fake, [p[-35:] for p in PROMPTS], max_new_tokens=16, top_k=3, top_p=0.5, min_p=0.1, seed=[1, 2, 3, 4])
        generate(fake, PROMPTS, max_new_tokens=3, repetition_penalty=1.5, stop_ids=[4, 5, 6])
        run(engine_for(fake, PROMPTS, [params()] * 4), PROMPTS, params())
    assert seen == []
    with compilations() as seen:
        jax.jit(lambda x: x + 1)(np.int32(0))
    assert len(seen) == 2  # the counter counts: it was traced and compiled


def test_nan_logits_are_an_error_and_touch_no_other_row(fake):
    model = FakeModel(fake.embed.at[7].set(jnp.nan), fake.head)
    results = run(small_engine(model), [[2, 3], [2, 7, 3]], params())
    assert [r.stop_reason for r in results] == ["length", "nan"]
    assert [len(r.tokens) for r in results] == [12, 0]
    with pytest.raises(FloatingPointError, match=r"prompt 2: after 0 new tokens .*NaN or infinite"):
        check_logits(results)
    with pytest.raises(FloatingPointError, match=r"prompt 2: after 0 new tokens .*NaN or infinite"):
        generate(model, [[2, 3], [2, 7, 3], [2] * 40], max_new_tokens=12, stop_ids=[])


def test_progress_and_timings(fake):
    engine, began = small_engine(fake, prefill_chunk=16), perf_counter()
    for prompt in PROMPTS:
        engine.add(prompt, params())
    seen = []
    while engine.prefill():
        seen.append(engine.prefilled)
    assert [*seen, engine.prefilled] == [(38, 63), (55, 63), (63, 63)]
    engine.run()
    assert engine.timings.prompt_tokens == 63
    assert engine.timings.decoded_tokens == 4 * 11
    assert engine.timings.prefill_tokens_per_second > 0
    assert engine.timings.decode_tokens_per_second > 0
    assert engine.timings.prefill_seconds + engine.timings.decode_seconds <= perf_counter() - began


@pytest.mark.parametrize(
    ("prompts", "knobs", "match"),
    [
        ([], {}, "no prompts"),
        ([[]], {}, "prompt 1 is empty"),
        ([[1], [2, 64]], {}, "prompt 2: 64 is no token id; .* 0 to 63"),
        ([[-1]], {}, "prompt 1: -1 is no token id"),
        ([[1.5]], {}, "prompt 1: 1.5 is no token id"),
        ([1, 2, 3], {}, r"wrap a single prompt as \[prompt\]"),
        (["text"], {}, "encode it with the model's tokenizer"),
        ("text", {}, "encode it with the model's tokenizer"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([[1] * 4096], {}, "prompt 1 has 4096 tokens and the model's context is 4096: shorten"),
        ([[1] * 4090], {}, "ask for at most 6 new tokens"),
        ([[1]], {"stop_ids": [99]}, "stop_ids: 99 is no token id"),
        ([[1]], {"stop_ids": [-1]}, "stop_ids: -1 is no token id"),
        ([[1]], {"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
        ([[1]], {"temperature": -1.0}, "temperature = -1.0"),
        ([[1]], {"top_p": 0.0}, "top_p = 0.0"),
        ([[1]], {"temprature": 0}, r"generate\(\) has no keyword 'temprature'; the nearest .* 'temperature'"),
        ([[1]], {"max_new_token": 0}, "'max_new_token'; the nearest that it has is 'max_new_tokens'"),
        ([[1]], {"sampling": Sampling(), "top_k": 3, "seed": 1}, "sampling and top_k, seed: give the object or keyw"),
        ([[1]], {"sampling": [Sampling()] * 2}, "sampling has 2 entries for 1 prompts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_arguments(fake, prompts, knobs, match):
    # Where annotations are checked, a wrong type is refused a moment earlier, as a TypeError.
    with pytest.raises((ValueError, TypeError), match=f"{match}|Type-check error"):
        generate(fake, prompts, **{"max_new_tokens": 12} | knobs)


# Token 2 is the byte C3 and 3 the byte A9, together é; the others are text of one to three characters.


@pytest.mark.parametrize(
    ("tokens", "stop", "pieces", "used"),
    [
        ([0, 4, 5, 8], (), ["a", "EN", "D", "y", ""], 4),
        ([0, 4, 5, 8], ("END",), ["a", "", ""], 3),
        ([6, 7, 0], ("END",), ["x", ""], 2),
        ([4, 8, 4], ("END",), ["", "ENy", "", "EN"], 3),
        ([4, 10, 5], ("END",), ["", "ENENx", "D", ""], 3),
        ([9, 9], ("bc", "c"), ["a"], 1),
        ([2, 3, 0], (), ["", "é", "a", ""], 3),
        ([2, 3, 0], ("é",), ["", ""], 2),
        ([0, 2], (), ["a", "", "\ufffd"], 2),
        ([0, 4], ("ENxx", "N"), ["a", "E"], 2),
    ],
    ids=str,
)
def test_stoppable_text(tokens, stop, pieces, used):
    text = StoppableText(tokenizer().stream(), stop)
    got = []
    for token in tokens:
        got.append(text.push(token))
        if text.stopped:
            break
    else:
        got.append(text.finish())
    assert got == pieces
    assert text.text == "".join(pieces)
    assert text.tokens == used
    together = StoppableText(tokenizer().stream(), stop)
    got = together.push_all(tokens)
    assert got + ("" if together.stopped else together.finish()) == "".join(pieces)
    assert (together.text, together.tokens, together.stop_string) == (text.text, used, text.stop_string)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="none of them empty"):
        StoppableText(tokenizer().stream(), ["END", ""])


# One to three letters a token, so that a string of the text crosses token borders in many ways.


@pytest.mark.parametrize(
    "steps", [pytest.param(1, marks=pytest.mark.further), 3, pytest.param(16, marks=pytest.mark.further)]
)
def test_text_ends_before_a_stop_string(fake, steps):
    words = tokenizer(LETTERS)
    free = tokens(run(small_engine(fake), PROMPTS, params(30, **WARM)))
    texts = [words.decode(row) for row in free]
    stop = [texts[0][20:25], texts[2][33:35]]
    rows = [params(30, **WARM)] * 4
    engine = engine_for(fake, PROMPTS, rows, steps_per_call=steps)
    handles = [engine.add(p, q) for p, q in zip(PROMPTS, rows, strict=True)]
    pieces = dict.fromkeys(handles, "")
    note = lambda handle, piece: pieces.update({handle: pieces[handle] + piece})
    results = generate_text(engine, handles, words, stop=stop, on_text=note)
    engine.check()
    for row, result in enumerate(results):
        cuts = [at for at in (texts[row].find(s) for s in stop) if at >= 0]
        assert result.text == pieces[handles[row]] == texts[row][: min(cuts, default=None)]
        assert result.stop_reason == ("stop_string" if cuts else "length")
        assert result.tokens == free[row][: len(result.tokens)]
        assert len(result.logprobs) == len(result.tokens)
        if cuts:
            assert any(s in words.decode(result.tokens) for s in stop)
            assert not any(s in words.decode(result.tokens[:-1]) for s in stop)
    assert {r.stop_reason for r in results} >= {"stop_string"}


def test_a_stop_id_is_no_part_of_the_text(fake):
    words = tokenizer(LETTERS)
    engine = small_engine(fake)
    (free,) = tokens(run(engine, PROMPTS[:1], params(30, **WARM)))
    handle = engine.add(PROMPTS[0], params(30, [free[10]], **WARM))
    (result,) = generate_text(engine, [handle], words)
    assert result.stop_reason == "stop_id"
    assert result.tokens == free[: free.index(free[10]) + 1]
    assert result.text == words.decode(result.tokens[:-1])
