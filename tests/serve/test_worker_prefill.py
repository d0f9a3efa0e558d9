"""A worker whose prompts are read by another process's engine: its answers are those of a worker that reads its own."""

import asyncio

import pytest
from support.workers import (
    PROMPT,
    SHAPE,
    answer,
    answers,
    collect,
    generate_request,
    settled,
    shared_worker,
    text_model,
)

from m3jax.cache import OutOfPages
from m3jax.decoding import Engine
from m3jax.serve.worker import Worker
from m3jax.transfer import PrefillClient, Prefiller, TransferError, service

LONG = PROMPT * 3  # several pages, the last one in part


@pytest.fixture(scope="module")
def pair():
    """(a worker that has prompts read, the prefiller that reads them, its server)."""
    prefiller = Prefiller(Engine(text_model().model, **SHAPE))
    server, port = service.start(prefiller)
    engine = Engine(text_model().model, **SHAPE)
    worker = Worker(engine, text_model(), prefill=PrefillClient([f"127.0.0.1:{port}"], engine))
    worker.check_prefill(10)
    yield worker, prefiller, server
    server.stop(0).wait()
    prefiller.close()
    prefiller.engine.check()
    assert prefiller.engine.pages["used"] == 0


def test_answers_are_those_of_one_worker(pair, capsys):
    """Greedy and drawn, several of a prompt, under a grammar, with stop strings and log-probabilities."""
    worker, prefiller, _ = pair
    asked = [
        dict(logprobs=2),
        dict(temperature=0.9, seed=4, n=2),
        dict(json_object=True, max_tokens=12),
        dict(stop=["self"], max_tokens=16),
    ]
    requests = [generate_request(LONG, **sampling) for sampling in asked]
    found, expected = answers(worker, *requests), answers(shared_worker(), *requests)
    for some, others in zip(found, expected, strict=True):
        assert [list(each.output_ids) for each in some] == [list(each.output_ids) for each in others]
        assert [each.finish_reason for each in some] == [each.finish_reason for each in others]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prefill: ")]
    assert len(lines) == len(asked) and all("a token" in line for line in lines)
    # Its own engine computed the last token of each prompt, and nothing of it before.
    assert worker.engine.timings.prompt_tokens == 5
    assert prefiller.engine.timings.prompt_tokens >= len(LONG) - 1
    asyncio.run(settled(worker))


def test_pages_that_are_gone_when_the_others_come_are_sent_after_all(pair, capsys, monkeypatch):
    """T50: the two engines disagree on what is known; the request is right all the same."""
    worker, _, _ = pair
    prompt = (95, *LONG)
    monkeypatch.setattr(worker.engine, "known_tokens", lambda prompt: 32)
    assert answer(worker, prompt=prompt).output_ids == answer(shared_worker(), prompt=prompt).output_ids
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prefill: ")]
    assert "prefill: 16 tokens" in first and "prefill: 48 tokens" in second
    asyncio.run(settled(worker))


def test_short_prompts_are_read_here(pair):
    worker, prefiller, _ = pair
    before = prefiller.engine.timings.prompt_tokens
    short = LONG[:16]
    assert answer(worker, prompt=short).output_ids == answer(shared_worker(), prompt=short).output_ids
    assert prefiller.engine.timings.prompt_tokens == before
    answer(worker, prompt=(94, *LONG[:16]))  # a token more than a page
    assert prefiller.engine.timings.prompt_tokens == before + 16


def test_a_prompt_that_was_read_waits_for_pages_while_others_can_give_some_back(pair, monkeypatch):
    worker, _, _ = pair
    tried, add = [], worker.engine.import_request

    def import_request(*given, **named):
        tried.append(named)
        if len(tried) != 3:
            raise OutOfPages("full")
        return add(*given, **named)

    monkeypatch.setattr(worker.engine, "import_request", import_request)

    async def run():
        other = worker.Generate(generate_request(LONG[:16], stream=True, max_tokens=400, ignore_eos=True))
        await anext(other)
        found = await collect(worker, generate_request((93, *LONG)))
        await other.aclose()
        await settled(worker)
        with pytest.raises(OutOfPages):
            await collect(worker, generate_request((92, *LONG)))
        return found[-1].complete

    assert asyncio.run(run()).output_ids == answer(shared_worker(), prompt=(93, *LONG)).output_ids and len(tried) == 4


def test_scored_prompts_are_read_elsewhere_whatever_is_known(pair):
    """Once with all pages, and once with none, which are known by then; but for one that leaves no room there."""
    worker, prefiller, _ = pair
    prompt = (98, *LONG)
    expected = answer(shared_worker(), prompt=prompt, prompt_logprobs=2).input_logprobs
    for _ in range(2):
        ours, theirs = worker.engine.timings.prompt_tokens, prefiller.engine.timings.prompt_tokens
        complete = answer(worker, prompt=prompt, prompt_logprobs=2)
        assert complete.cached_tokens == 0
        found = complete.input_logprobs
        assert found.token_ids == expected.token_ids and len(found.token_ids) == len(prompt)
        assert [x.token_ids for x in found.top_logprobs] == [x.token_ids for x in expected.top_logprobs]
        values = [[entry.value for entry in each.token_logprobs] for each in (found, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)
        assert worker.engine.timings.prompt_tokens - ours == 1
        assert prefiller.engine.timings.prompt_tokens - theirs == len(prompt)
    theirs = prefiller.engine.timings.prompt_tokens
    longest = (PROMPT * 40)[: worker.engine.max_length - 1]
    answer(worker, prompt=longest, prompt_logprobs=0, max_tokens=1)
    assert prefiller.engine.timings.prompt_tokens == theirs


def test_what_is_refused_is_refused_before_a_prompt_is_read(pair):
    worker, prefiller, _ = pair
    before = prefiller.engine.timings.prompt_tokens
    with pytest.raises(ValueError, match="max_tokens"):
        answer(worker, prompt=(97, *LONG), max_tokens=600)
    assert prefiller.engine.timings.prompt_tokens == before


def test_a_prefiller_that_is_gone_is_told(pair):
    """The last test of the pair: its server is stopped."""
    worker, _, server = pair
    server.stop(0).wait()
    with pytest.raises(TransferError, match=r"127\.0\.0\.1:\d+ ended the transfer"):
        answer(worker, prompt=(96, *LONG))
    asyncio.run(settled(worker))
    with pytest.raises(ValueError, match="does not read prompts"):
        worker.check_prefill(0)
