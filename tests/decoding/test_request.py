"""A request on the host: its order, its events, its times, its keys, and what of a generation is compared and cut."""

from dataclasses import replace

import numpy as np
from support.engines import params

from m3jax.decoding import Generation, RequestTimings
from m3jax.decoding.engine.request import PromptScores, Request


def test_requests_are_served_by_priority_deadline_and_age():
    orders = [(0, None), (0, 5.0), (2, None), (0, 3.0), (2, 9.0), (-1, 0.1), (0, None)]
    requests = [Request(i, (1,), params(), priority=p, deadline=d) for i, (p, d) in enumerate(orders)]
    assert [request.handle for request in sorted(requests, key=lambda x: x.order)] == [4, 2, 3, 1, 0, 6, 5]


def test_news_of_a_request_are_what_came_since_the_last():
    request = Request(3, (1, 2, 3), params(), found=9, prompt_scores=PromptScores([{5: -1.0}]))
    assert request.news().prompt_logprobs == ()  # with the first token
    request.new, request.logprobs, request.versions, request.top_logprobs = [7], [-0.5], [0], [{7: -0.5}]
    news = request.news()
    assert (news.handle, news.start, news.tokens, news.logprobs, news.versions) == (3, 0, (7,), (-0.5,), (0,))
    assert (news.top_logprobs, news.prompt_logprobs) == (({7: -0.5},), ({5: -1.0},))
    assert (news.stop_reason, news.generation, news.cached_tokens) == ("unfinished", None, 3)  # of the prompt's three
    request.new, request.logprobs, request.versions = [7, 8, 9], [-0.5, -1.0, -2.0], [0, 0, 1]
    request.stop_reason = "length"
    news = request.news()
    assert (news.start, news.tokens, news.versions, news.prompt_logprobs) == (1, (8, 9), (0, 1), ())
    assert news.generation.tokens == [7, 8, 9] and news.generation.prompt_tokens == 3
    times = replace(request, added_at=10.0, row_at=11.0, first_token_at=13.0, last_token_at=17.0, preemptions=2).timings
    assert (times.queue_seconds, times.prompt_seconds, times.decode_seconds, times.preemptions) == (1, 2, 4, 2)
    quick = replace(request, added_at=10.0, row_at=10.25, first_token_at=10.75, last_token_at=11.0).timings
    assert (quick.queue_seconds, quick.prompt_seconds, quick.decode_seconds) == (0.25, 0.5, 0.25)
    waiting = replace(request, added_at=10.0).timings
    assert waiting.queue_seconds > 0 and waiting.prompt_seconds == waiting.decode_seconds == 0


def test_a_generation_is_cut_in_all_its_lists():
    whole = Generation(
        [1, 2, 3], [-1.0, -2.0, -3.0], "length", 4, text="abc", top_logprobs=[{1: -1.0}, {2: -2.0}, {3: -3.0}],
        versions=[0, 0, 1], records={"blocks": np.arange(3)}, prompt_logprobs=[{9: -1.0}] * 3,
    )  # fmt: skip
    cut = whole.cut(2, "stop_string")
    assert (cut.tokens, cut.logprobs, cut.versions, cut.stop_reason) == ([1, 2], [-1.0, -2.0], [0, 0], "stop_string")
    assert cut.top_logprobs == [{1: -1.0}, {2: -2.0}] and cut.records["blocks"].tolist() == [0, 1]
    assert cut.prompt_tokens == 4 and len(cut.prompt_logprobs) == 3


def test_generations_of_the_same_tokens_are_equal_however_they_were_made():
    """Who drew them when, what was recorded and how many proposals there were is no part of the text."""
    one = Generation([1], [-0.5], "length", 3)
    assert (one.cached_tokens, one.drafted, one.accepted, one.timings) == (0, 0, 0, None)
    other = dict(versions=[4], timings=RequestTimings(), records={"blocks": np.zeros(1)}, drafted=5, accepted=2)
    for name, value in other.items():
        assert replace(one, **{name: value}) == one, name
    for name, value in dict(tokens=[2], logprobs=[-0.25], stop_reason="stop_id", cached_tokens=1).items():
        assert replace(one, **{name: value}) != one, name


def test_stop_ids_that_count():
    asked = params(stop_ids=(1, 2, 3))
    assert asked.stops((2,)) == (1, 2, 3) and replace(asked, ignore_eos=True).stops((2, 9)) == (1, 3)
    assert replace(asked, record=("blocks",), capture=("layers.0.q",)).recorded == ("blocks", "layers.0.q")


def test_keys_of_a_few_tokens_are_those_of_all():
    """The scheduler asks for those that a call has written, and a prompt may be long."""
    request = Request(0, (5, 6, 7), params(), prompt_keys=(50, 60, 70), new=[8, 9])
    assert request.keys == (50, 60, 70, 8, 9) and request.uncached == 5
    for start in range(6):
        for end in range(start, 6):
            assert request.keys_between(start, end) == request.keys[start:end]
