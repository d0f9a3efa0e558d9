"""The decode loop: what it must not depend on, where it stops, and what it refuses."""

from collections.abc import Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import FakeConfig, FakeModel, empty_prefill
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from m3jax.decoding import Batch, Request, Sampling, StoppableText, batch, generate, generate_text, loop
from m3jax.text import Tokenizer

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(2, 64, n).tolist() for n in (5, 1, 40, 17)]
WARM = {"temperature": 1.3, "top_p": 0.95, "seed": 3}


@pytest.fixture
def fake(monkeypatch):
    """A random FakeModel, with the cache that it needs."""
    monkeypatch.setattr(batch, "_empty_prefill", empty_prefill)
    return FakeModel.random()


def requests(prompts: Sequence, new: int = 12, stop_ids=(), **knobs) -> list[Request]:
    return [
        Request(prompt=tuple(p), max_new_tokens=new, sampling=Sampling(**knobs), stop_ids=tuple(stop_ids))
        for p in prompts
    ]


def run(work: Batch, steps: int = 1000) -> list[list[int]]:
    work.prefill()
    while work.live:
        work.advance(steps)
    return work.tokens()


@contextmanager
def compilations():
    """Counts what XLA compiles, and what jax only traces anew."""
    seen: list[str] = []

    def listener(event: str, *_args, **_kwargs):
        if event.endswith(("backend_compile_duration", "jaxpr_trace_duration")):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_greedy_is_teacher_forcing(fake):
    for prompt, new in zip(
        PROMPTS, generate(fake, PROMPTS, max_new_tokens=20, temperature=0, stop_ids=[]), strict=True
    ):
        logits = fake(jnp.asarray([prompt + new]))[0]
        assert len(new) == 20
        assert new == np.asarray(logits[len(prompt) - 1 : -1].argmax(-1)).tolist()


def test_rows_do_not_depend_on_their_companions(fake):
    together = generate(fake, PROMPTS, max_new_tokens=16, stop_ids=[], **WARM)
    for prompt, new in zip(PROMPTS, together, strict=True):
        assert generate(fake, [prompt], max_new_tokens=16, stop_ids=[], **WARM) == [new]
    assert generate(fake, PROMPTS[::-1], max_new_tokens=16, stop_ids=[], **WARM) == together[::-1]


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_any_prefill_chunk_gives_the_same_tokens(fake, chunk):
    whole = run(Batch(fake, requests(PROMPTS, **WARM)))
    assert run(Batch(fake, requests(PROMPTS, **WARM), prefill_chunk=chunk)) == whole


@pytest.mark.parametrize("steps", [1, 3, 16])
def test_slices_give_the_same_tokens_as_one_shot(fake, steps):
    one_shot = run(Batch(fake, requests(PROMPTS, **WARM)))
    work = Batch(fake, requests(PROMPTS, **WARM))
    work.prefill()
    streamed = work.take()
    assert [len(new) for new in streamed] == [1] * 4
    while work.live:
        work.advance(steps)
        for row, new in zip(streamed, work.take(), strict=True):
            row += new
    assert streamed == one_shot


def test_prompts_may_be_arrays(fake):
    expected = generate(fake, PROMPTS, max_new_tokens=4, stop_ids=[])
    assert generate(fake, [np.asarray(p) for p in PROMPTS], max_new_tokens=4, stop_ids=[]) == expected
    assert generate(fake, [jnp.asarray(p) for p in PROMPTS], max_new_tokens=4, stop_ids=[]) == expected


def test_seeds_are_per_row(fake):
    prompts = [PROMPTS[0]] * 3
    a, b, c = generate(fake, prompts, max_new_tokens=16, temperature=2.0, seed=[5, 6, 5], stop_ids=[])
    assert a == c
    assert a != b
    assert generate(fake, prompts[:1], max_new_tokens=16, temperature=2.0, seed=6, stop_ids=[]) == [b]


def test_a_stop_id_ends_its_row_and_is_kept(fake):
    free = generate(fake, PROMPTS, max_new_tokens=24, stop_ids=[], **WARM)
    stop = [free[0][7], free[2][3]]
    for row, full in zip(generate(fake, PROMPTS, max_new_tokens=24, stop_ids=stop, **WARM), free, strict=True):
        ends = [i for i, token in enumerate(full) if token in stop]
        assert row == (full[: ends[0] + 1] if ends else full)


def test_no_stop_ids_means_eos(fake):
    free = generate(fake, PROMPTS, max_new_tokens=24, stop_ids=[], **WARM)
    eos = free[1][5]
    model = FakeModel(fake.embed, fake.head, FakeConfig(eos_token_id=(eos,)))
    stopped = generate(model, PROMPTS, max_new_tokens=24, **WARM)
    assert stopped == [row[: row.index(eos) + 1] if eos in row else row for row in free]


def test_limits_are_per_row(fake):
    rows = [requests([p], new=n)[0] for p, n in zip(PROMPTS, (1, 9, 4, 17), strict=True)]
    work = Batch(fake, rows)
    assert [len(new) for new in run(work)] == [1, 9, 4, 17]
    assert work.reasons() == ["length"] * 4


def test_repetition_penalty_counts_prompt_and_continuation(fake):
    """A penalty that pushes every seen token below every unseen one makes greedy decoding repeat nothing."""
    positive = FakeModel(jnp.abs(fake.embed), jnp.abs(fake.head))
    prompt = list(range(10, 30))
    (new,) = generate(positive, [prompt], max_new_tokens=40, temperature=0, repetition_penalty=1e30, stop_ids=[])
    assert len(set(prompt + new)) == 60


def test_logprobs_are_the_models_own(fake):
    work = Batch(fake, requests(PROMPTS, temperature=0.4, top_k=3))
    run(work)
    for request, result in zip(work.requests, work.results(), strict=True):
        logits = fake(jnp.asarray([list(request.prompt) + result.tokens]))[0]
        expected = jax.nn.log_softmax(logits[result.prompt_tokens - 1 : -1])
        chosen = [float(row[token]) for row, token in zip(expected, result.tokens, strict=True)]
        np.testing.assert_allclose(result.logprobs, chosen, rtol=1e-4, atol=1e-4)


def test_no_logits_of_the_whole_prompt_are_made(fake):
    """Prefill unembeds one hidden state a row."""
    rows, chunk = 2, 128
    part, _ = empty_prefill(fake, rows, 256)
    args = np.zeros((rows, chunk), np.int32), np.int32(0), np.full(rows, chunk, np.int32)
    text = str(jax.make_jaxpr(loop.prefill_chunk)(fake, part, *args))
    assert f"{rows},{chunk},{fake.config.vocab_size}" not in text


def test_nothing_compiles_after_warm_up(fake):
    """Other lengths, row counts, limits, knobs, seeds and stop ids of the same buckets."""
    generate(fake, PROMPTS, max_new_tokens=14, stop_ids=[3])
    with compilations() as seen:
        generate(fake, PROMPTS[1:], max_new_tokens=9, temperature=0, stop_ids=[])
        generate(fake, [p[-35:] for p in PROMPTS], max_new_tokens=16, top_k=3, top_p=0.5, min_p=0.1, seed=[1, 2, 3, 4])
        generate(fake, PROMPTS, max_new_tokens=3, repetition_penalty=1.5, stop_ids=[4, 5, 6])
        work = Batch(fake, requests(PROMPTS))
        run(work, steps=2)
    assert seen == []
    with compilations() as seen:
        generate(fake, PROMPTS, max_new_tokens=300)
    assert seen  # the counter counts


def test_a_step_takes_over_the_cache(fake):
    work = Batch(fake, requests(PROMPTS))
    work.prefill()
    cache, seen = work._state.cache, work._state.seen
    work.advance(1)
    assert cache.is_deleted()
    assert seen.is_deleted()


def test_nan_logits_are_an_error_and_touch_no_other_row(fake):
    model = FakeModel(fake.embed.at[7].set(jnp.nan), fake.head)
    work = Batch(model, requests([[2, 3], [2, 7, 3]]))
    run(work)
    assert work.reasons() == ["length", "nan"]
    assert [len(row) for row in work.tokens()] == [12, 0]
    with pytest.raises(FloatingPointError, match=r"prompt 1: after 0 new tokens .*NaN or infinite"):
        generate(model, [[2, 3], [2, 7, 3]], max_new_tokens=12, stop_ids=[])


def test_progress_and_timings(fake):
    seen: list[tuple[int, int]] = []
    work = Batch(fake, requests(PROMPTS), prefill_chunk=16)
    work.prefill(lambda done, total: seen.append((done, total)))
    work.advance(1000)
    assert seen == [(38, 63), (55, 63), (63, 63)]
    assert work.timings.prompt_tokens == 63
    assert work.timings.decoded_tokens == 4 * 11
    assert work.timings.prefill_tokens_per_second > 0
    assert work.timings.decode_tokens_per_second > 0


@pytest.mark.parametrize(
    ("prompts", "knobs", "match"),
    [
        ([], {}, "no prompts"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [2, 64]], {}, "prompt 1: 64 is no token id; .* 0 to 63"),
        ([[-1]], {}, "prompt 0: -1 is no token id"),
        ([[1.5]], {}, "prompt 0: 1.5 is no token id"),
        ([1, 2, 3], {}, r"wrap a single prompt as \[prompt\]"),
        (["text"], {}, "encode it with the model's tokenizer"),
        ("text", {}, "encode it with the model's tokenizer"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([[1] * 4096], {}, "prompt 0 has 4096 tokens and the model's context is 4096: shorten"),
        ([[1] * 4090], {}, "ask for at most 6 new tokens"),
        ([[1]], {"stop_ids": [99]}, "stop_ids: 99 is no token id"),
        ([[1]], {"stop_ids": [-1]}, "stop_ids: -1 is no token id"),
        ([[1]], {"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
        ([[1]], {"temperature": -1.0}, "temperature = -1.0"),
        ([[1]], {"top_p": 0.0}, "top_p = 0.0"),
    ],
    ids=str,
)
def test_bad_arguments(fake, prompts, knobs, match):
    # Where annotations are checked, a wrong type is refused a moment earlier, as a TypeError.
    with pytest.raises((ValueError, TypeError), match=f"{match}|Type-check error"):
        generate(fake, prompts, **{"max_new_tokens": 12} | knobs)


def test_calls_out_of_order(fake):
    work = Batch(fake, requests(PROMPTS))
    with pytest.raises(ValueError, match="call prefill first"):
        work.advance(1)
    work.prefill()
    with pytest.raises(ValueError, match="prefill ran already"):
        work.prefill()
    with pytest.raises(ValueError, match="prefill_chunk"):
        Batch(fake, requests(PROMPTS), prefill_chunk=0)
    with pytest.raises(ValueError, match="steps"):
        work.advance(0)


# Token 2 is the byte C3 and 3 the byte A9, together é; the others are text of one to three characters.
WORDS = ["a", "<eos>", "\u00c3", "\u00a9", "EN", "D", "xE", "ND", "y", "abc", "ENx"]


def tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_id=1)


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


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="none of them empty"):
        StoppableText(tokenizer().stream(), ["END", ""])


# One to three letters a token, so that a string of the text crosses token borders in many ways.
LETTERS = ["_", "<eos>"] + [chr(97 + i % 26) * (1 + i % 3) + str(i % 10) for i in range(62)]


@pytest.mark.parametrize("steps", [1, 5, 16])
def test_text_ends_before_a_stop_string(fake, steps):
    words = tokenizer(LETTERS)
    free = generate(fake, PROMPTS, max_new_tokens=30, stop_ids=[], **WARM)
    texts = [words.decode(row) for row in free]
    stop = [texts[0][20:25], texts[2][33:35]]
    work = Batch(fake, requests(PROMPTS, new=30, **WARM))
    work.prefill()
    pieces = [""] * 4
    results = generate_text(
        work,
        words,
        stop=stop,
        steps_per_call=steps,
        on_text=lambda row, piece: pieces.__setitem__(row, pieces[row] + piece),
    )
    for row, result in enumerate(results):
        cuts = [at for at in (texts[row].find(s) for s in stop) if at >= 0]
        assert result.text == "".join(pieces[row]) == texts[row][: min(cuts, default=None)]
        assert result.stop_reason == ("stop_string" if cuts else "length")
        assert result.tokens == free[row][: len(result.tokens)]
        assert len(result.logprobs) == len(result.tokens)
        if cuts:
            assert any(s in words.decode(result.tokens) for s in stop)
            assert not any(s in words.decode(result.tokens[:-1]) for s in stop)
    assert {r.stop_reason for r in results} >= {"stop_string"}


def test_a_stop_id_is_no_part_of_the_text(fake):
    words = tokenizer(LETTERS)
    free = generate(fake, PROMPTS[:1], max_new_tokens=30, stop_ids=[], **WARM)[0]
    work = Batch(fake, requests(PROMPTS[:1], new=30, stop_ids=[free[10]], **WARM))
    work.prefill()
    (result,) = generate_text(work, words)
    assert result.stop_reason == "stop_id"
    assert result.tokens == free[: free.index(free[10]) + 1]
    assert result.text == words.decode(result.tokens[:-1])
