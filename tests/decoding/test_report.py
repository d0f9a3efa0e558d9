"""An engine's reports: rates and shares of what was counted, and the counters of host memory."""

from types import SimpleNamespace

import numpy as np

from m3jax.decoding import Drafting, Timings
from m3jax.decoding.engine.report import offload_counters
from m3jax.decoding.speculation.verify import DraftCounts


def test_rates_and_shares():
    assert Timings().prefill_tokens_per_second is Timings().decode_tokens_per_second is None
    timings = Timings(prefill_seconds=2.0, decode_seconds=4.0, prompt_tokens=10, decoded_tokens=2)
    assert (timings.prefill_tokens_per_second, timings.decode_tokens_per_second) == (5, 0.5)
    drafting = Drafting(2)
    assert drafting.acceptance is drafting.mean_length is None
    for _ in range(2):
        counts = (np.array(x, np.int32) for x in ([2, 0], [4, 0], [[1, 1], [0, 0]]))
        drafting.add(DraftCounts(*counts))
    assert (drafting.forwards, drafting.accepted) == (4, (2, 2))
    assert (drafting.acceptance, drafting.mean_length) == ((0.5, 0.5), 2)


def test_counters_of_host_memory(unchecked):
    array = lambda *values: np.array(values, np.int32)
    stack = SimpleNamespace(hits=array(3, 1), misses=array(0, 4), moved=array(2, 3), k=np.zeros(5), v=np.zeros(2))
    host = SimpleNamespace(pages=(None, object()), page_bytes=7, bytes_out=11, nbytes=13)
    assert offload_counters(host, (None, stack)) == dict(
        hits=4, misses=4, hit_rate=0.5, bytes_in=35, bytes_out=11, device_bytes=56, host_bytes=13
    )
    none = SimpleNamespace(hits=array(0), misses=array(0), moved=array(0), k=np.zeros(0), v=np.zeros(0))
    assert offload_counters(host, (None, none))["hit_rate"] == 0
