"""The gateway's metrics: what is counted of a request, in which bucket a time falls, what Prometheus reads."""

import itertools
import re

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from m3jax.serve.gateway import figures as figures_module
from m3jax.serve.gateway.figures import Figures, TokenTimes


def lines_of(text: bytes) -> dict[str, float]:
    """Return the samples of Prometheus' text, by name and labels; when each began is left out."""
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if "_created" not in name}


@pytest.fixture
def clock(monkeypatch):
    """The time, which tests set."""
    now = [100.0]
    monkeypatch.setattr(figures_module.time, "perf_counter", lambda: now[0])
    return now


def chunk(index=0, tokens=1):
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(index=index, token_ids=[7] * tokens))


def complete(index=0, **counts):
    return pb.GenerateResponse(complete=pb.GenerateComplete(index=index, **counts))


def test_what_is_counted_of_a_request(clock):
    """The first token's wait is from the prompt; tokens that come together share the time since those before them."""
    figures = Figures()
    with figures.timed("/chat") as timed:
        assert lines_of(figures.text({}, []))['m3jax_requests_running{route="/chat"}'] == 1
        for at, response in (
            (0.5, chunk(tokens=0)), (0.75, chunk()), (1.75, chunk(tokens=4)), (2.0, chunk(index=1, tokens=2)),
            (3.0, chunk(index=1, tokens=2)),
        ):  # fmt: skip
            clock[0] = 100.0 + at
            timed.note(response)
        counts = dict(
            prompt_tokens=10, cached_tokens=4, completion_tokens=5, spec_draft_tokens=6, spec_accepted_tokens=3
        )
        timed.note(complete(**counts))
        timed.note(complete(index=1, **counts))  # of the same prompt
        clock[0] = 104.0
    found = lines_of(figures.text({}, []))
    route = '{route="/chat"}'
    assert {name: found[f"m3jax_{name}{route}"] for name in (
        "requests_running", "prompt_tokens_total", "cached_tokens_total", "output_tokens_total", "draft_tokens_total",
        "accepted_draft_tokens_total", "request_seconds_count", "request_seconds_sum",
        "time_to_first_token_seconds_count", "time_to_first_token_seconds_sum",
        "time_per_output_token_seconds_count", "time_per_output_token_seconds_sum",
    )} == {
        "requests_running": 0, "prompt_tokens_total": 10, "cached_tokens_total": 4, "output_tokens_total": 10,
        "draft_tokens_total": 12, "accepted_draft_tokens_total": 6, "request_seconds_count": 1,
        "request_seconds_sum": 4.0, "time_to_first_token_seconds_count": 2, "time_to_first_token_seconds_sum": 2.75,
        "time_per_output_token_seconds_count": 6, "time_per_output_token_seconds_sum": 2.0,
    }  # fmt: skip


def test_buckets_of_times_between_tokens(monkeypatch):
    """A time at a bound falls into that bound's bucket, as Prometheus has it; buckets are cumulative."""
    monkeypatch.setattr(figures_module, "_TOKEN_SECONDS", (0.1, 0.5))
    times = TokenTimes()
    for seconds, count in ((0.05, 1), (0.1, 2), (0.2, 4), (0.5, 8), (0.6, 16)):
        times.observe("a", seconds, count)
    times.observe("b", 0.3, 1)
    (family,) = times.collect()
    found = {
        (s.name.removeprefix("m3jax_time_per_output_token_seconds"), *s.labels.values()): s.value
        for s in family.samples
    }
    assert found[("_sum", "a")] == pytest.approx(0.05 + 0.2 + 0.8 + 4.0 + 9.6) and found[("_sum", "b")] == 0.3
    buckets = {key[1:]: value for key, value in found.items() if key[0] == "_bucket"}
    assert buckets == {
        ("a", "0.1"): 3, ("a", "0.5"): 15, ("a", "+Inf"): 31, ("b", "0.1"): 0, ("b", "0.5"): 1, ("b", "+Inf"): 1
    }  # fmt: skip


def test_buckets_go_from_a_frame_to_minutes(clock):
    """Of two to five times the one before; round numbers, of a decade up to a second and of minutes beyond."""
    figures = Figures()
    with figures.timed("/chat") as timed:
        timed.note(chunk())
        timed.note(chunk())
    samples = re.findall(r'm3jax_(\w+)_bucket\{le="([\d.]+)"', figures.text({}, []).decode())
    of_requests, of_tokens = (
        [float(bound) for found, bound in samples if found == name]
        for name in ("request_seconds", "time_per_output_token_seconds")
    )
    for bounds, ends in ((of_requests, (0.005, 300)), (of_tokens, (0.001, 1))):
        assert (bounds[0], bounds[-1]) == ends
        assert all(2 <= after / before <= 5 for before, after in itertools.pairwise(bounds))
        assert {f"{bound:e}".split("e")[0].rstrip("0.") for bound in bounds if bound < 15} <= {"1", "2.5", "5"}
        assert all(bound % 30 == 0 for bound in bounds if bound >= 15)


def test_loads_of_workers():
    """One that did not answer is down; the others' requests, pages and cache hits are theirs."""
    figures = Figures()
    load = pb.SchedulerLoad(num_running_reqs=3, num_waiting_reqs=2, token_usage=0.5, cache_hit_rate=0.25)
    found = lines_of(figures.text({"a": load}, ["a", "b"]))
    assert {name: found[f"m3jax_{name}"] for name in (
        'worker_up{worker="a"}', 'worker_up{worker="b"}', 'worker_requests{state="running",worker="a"}',
        'worker_requests{state="waiting",worker="a"}', 'worker_page_use{worker="a"}',
        'worker_cache_hit_rate{worker="a"}',
    )} == {
        'worker_up{worker="a"}': 1, 'worker_up{worker="b"}': 0, 'worker_requests{state="running",worker="a"}': 3,
        'worker_requests{state="waiting",worker="a"}': 2, 'worker_page_use{worker="a"}': 0.5,
        'worker_cache_hit_rate{worker="a"}': 0.25,
    }  # fmt: skip
    assert 'm3jax_worker_page_use{worker="b"}' not in found
