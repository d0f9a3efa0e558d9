"""The measurements that a gateway makes of its requests, as Prometheus reads them."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from smg_grpc_proto import vllm_engine_pb2 as pb

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Figures:
    """All metrics of a gateway; each has a registry of its own, so that several can live in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of = lambda kind, name, about, labels=(), **more: kind(
            f"m3jax_{name}", about, labels, registry=self.registry, **more
        )
        self.requests = of(Counter, "requests", "HTTP requests that ended, by route and status", ("route", "status"))
        self.running = of(Gauge, "requests_running", "Requests that are worked on", ("route",))
        self.first_token = of(
            Histogram, "time_to_first_token_seconds", "From a request's prompt to its first token", ("route",),
            buckets=_SECONDS,
        )  # fmt: skip
        self.token = TokenTimes()
        self.registry.register(self.token)
        self.whole = of(
            Histogram, "request_seconds", "From a request's prompt to its end", ("route",), buckets=_SECONDS
        )
        self.prompt_tokens = of(Counter, "prompt_tokens", "Tokens of prompts", ("route",))
        self.cached_tokens = of(Counter, "cached_tokens", "Of these, found in the prefix cache", ("route",))
        self.new_tokens = of(Counter, "output_tokens", "Tokens of answers", ("route",))
        self.drafted = of(Counter, "draft_tokens", "Tokens that were drafted", ("route",))
        self.accepted = of(Counter, "accepted_draft_tokens", "Of these, accepted", ("route",))
        self.worker_requests = of(Gauge, "worker_requests", "Requests on a worker", ("worker", "state"))
        self.worker_pages = of(Gauge, "worker_page_use", "Part of a worker's pages that is used", ("worker",))
        self.worker_hits = of(Gauge, "worker_cache_hit_rate", "Part of prompts found in the cache", ("worker",))
        self.worker_up = of(Gauge, "worker_up", "1 if a worker can be reached", ("worker",))

    @contextmanager
    def timed(self, route: str) -> Iterator["Clock"]:
        """Measure one request to the worker."""
        self.running.labels(route).inc()
        clock = Clock(self, route)
        try:
            yield clock
        finally:
            self.running.labels(route).dec()
            self.whole.labels(route).observe(time.perf_counter() - clock.started)

    def text(self, loads: Mapping[str, pb.SchedulerLoad], names: list[str]) -> bytes:
        """Return everything in Prometheus' text format.

        Args:
          loads: of the workers that answered, by name.
          names: of all workers.
        """
        for name in names:
            self.worker_up.labels(name).set(name in loads)
        for name, load in loads.items():
            self.worker_requests.labels(name, "running").set(load.num_running_reqs)
            self.worker_requests.labels(name, "waiting").set(load.num_waiting_reqs)
            self.worker_pages.labels(name).set(load.token_usage)
            self.worker_hits.labels(name).set(load.cache_hit_rate)
        return generate_latest(self.registry)


class TokenTimes:
    """The histogram of the times between tokens, by route.

    Several tokens come at once and share a time: prometheus_client's own histogram takes each apart, which cost more
    than to write the message that they came with.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # of a route, in each bucket
        self._seconds: dict[str, float] = {}

    def observe(self, route: str, seconds: float, count: int) -> None:
        """Count tokens that took so many seconds each."""
        counts = self._counts.get(route)
        if counts is None:
            counts = self._counts[route] = [0] * (len(_TOKEN_SECONDS) + 1)
            self._seconds[route] = 0.0
        counts[bisect_left(_TOKEN_SECONDS, seconds)] += count
        self._seconds[route] += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric, as prometheus_client asks a collector for it."""
        family = HistogramMetricFamily(
            "m3jax_time_per_output_token_seconds", "Between tokens of an answer", labels=("route",)
        )
        for route, counts in self._counts.items():
            bounds = [*(str(float(bound)) for bound in _TOKEN_SECONDS), "+Inf"]
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((route,), buckets, self._seconds[route])
        yield family


class Clock:
    """The times and counts of one request.

    Args:
      figures: that it counts in.
      route: of the request.
    """

    def __init__(self, figures: Figures, route: str):
        self._figures, self._route = figures, route
        self.started = time.perf_counter()
        self._last: dict[int, float] = {}

    def note(self, response: pb.GenerateResponse) -> None:
        """Count what is in a worker's response, which has just come."""
        if response.HasField("chunk"):
            chunk, now = response.chunk, time.perf_counter()
            if not chunk.token_ids:
                return
            before = self._last.get(chunk.index)
            if before is None:
                self._figures.first_token.labels(self._route).observe(now - self.started)
            else:
                count = len(chunk.token_ids)
                self._figures.token.observe(self._route, (now - before) / count, count)
            self._last[chunk.index] = now
            return
        figures, route, complete = self._figures, self._route, response.complete
        if complete.index == 0:  # the continuations of a prompt share it
            figures.prompt_tokens.labels(route).inc(complete.prompt_tokens)
            figures.cached_tokens.labels(route).inc(complete.cached_tokens)
        figures.new_tokens.labels(route).inc(complete.completion_tokens)
        figures.drafted.labels(route).inc(complete.spec_draft_tokens)
        figures.accepted.labels(route).inc(complete.spec_accepted_tokens)
