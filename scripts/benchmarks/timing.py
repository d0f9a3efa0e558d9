"""Times for the subjects: medians of calls by turns, and the kernels that a profiler saw on the device."""

import glob
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from m3jax.planning.chips import CHIPS


def medians(
    calls: Sequence[Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the median time of each of some calls.

    They are called in turns, so that what else the machine does falls on all of them, after a first time that does not
    count.

    Args:
      calls: Functions that return when their work is done.
      seconds: Time after which no more turns begin; there are at least three.
      clock: `time.process_time` leaves out what other processes do.

    Returns:
      Seconds, one number for each call.
    """
    for call in calls:
        call()
    times, end = [[] for _ in calls], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for call, taken in zip(calls, times, strict=True):
            began = clock()
            call()
            taken.append(clock() - began)
    return [statistics.median(taken) for taken in times]


@dataclass
class Kernels:
    """The kernels that ran on the device, as the profiler saw them; none on a CPU.

    Attributes:
      busy: Seconds in which some stream ran a kernel.
      seconds: Seconds of each kernel, all its calls together.
      calls: Number of times that each kernel ran.
    """

    busy: float
    seconds: Counter[str]
    calls: Counter[str]

    def __sub__(self, other: "Kernels") -> "Kernels":
        calls, seconds = self.calls - other.calls, Counter(self.seconds)
        seconds.subtract(other.seconds)
        return Kernels(self.busy - other.busy, seconds, calls)


def mean(of: Sequence[Kernels]) -> Kernels:
    """Return the mean of several traces; how often a kernel ran is rounded."""
    total = lambda of_each: sum(of_each, Counter())
    seconds, calls = total(kernels.seconds for kernels in of), total(kernels.calls for kernels in of)
    return Kernels(
        statistics.mean(kernels.busy for kernels in of),
        Counter({name: of_kernel / len(of) for name, of_kernel in seconds.items()}),
        Counter({name: round(count / len(of)) for name, count in calls.items()}),
    )


def traced(run: Callable[[], object]) -> Kernels:
    """Run a function under the profiler, and return the kernels that ran on the device meanwhile."""
    busy, latest, seconds, calls = 0.0, 0.0, Counter(), Counter()
    for start, end, name, _ in sorted(_kernels_of(run)):
        busy += max(0.0, end - max(start, latest))
        latest = max(latest, end)
        seconds[name] += (end - start) / 1e9
        calls[name] += 1
    return Kernels(busy / 1e9, seconds, calls)


def kernel_times(fn: Callable, calls: Sequence[tuple], repeats: int) -> tuple[float, dict[str, float]]:
    """Return the microseconds of one call of a function on the device, and those of each of its kernels.

    Args:
      fn: Function of arrays.
      calls: Arguments of the function, used by turns.
      repeats: Number of timed calls, after one with each of the first two arguments.

    Returns:
      The sum over all kernels, and each kernel's part of it by its name: medians over the calls.
    """
    for args in calls[:2]:
        jax.block_until_ready(fn(*args))

    def run() -> None:
        for i in range(repeats):
            out = fn(*calls[i % len(calls)])
        jax.block_until_ready(out)

    times = defaultdict(list)
    for start, end, name, _ in _kernels_of(run):
        times[name].append((end - start) / 1e3)
    kernels = {name: statistics.median(x) * len(x) / repeats for name, x in times.items()}
    return sum(kernels.values()), kernels


def copy_rate() -> float:
    """Return the bytes a second that a copy reads and writes.

    Raises:
      SystemExit: The device cannot have that rate: it is more than its maker says, or less than a tenth of it.
    """
    if jax.default_backend() == "cpu":
        x = jnp.arange(1 << 26, dtype=jnp.int32)
        return 2 * x.nbytes / seconds_of(jnp.copy, x)
    # On the device's own clock: the host's has what stands between two calls, which can be longer than a copy.
    x = jnp.arange(1 << 29, dtype=jnp.int32)
    microseconds, _ = kernel_times(jnp.copy, [(x,)], 6)
    rate, kind = 2 * x.nbytes / microseconds * 1e6, jax.devices()[0].device_kind
    known = [chip.hbm_rate for chip in CHIPS.values() if chip.name in kind.lower()]
    if known and not known[0] / 10 <= rate <= known[0]:
        raise SystemExit(f"a copy moves {rate / 1e9:.0f} GB/s, and a {kind} {known[0] / 1e9:.0f}: this is no bound")
    return rate


def product_rate(dtype: jax.typing.DTypeLike) -> float:
    """Return the floating-point operations a second of a large matrix product."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    if jax.default_backend() == "cpu":
        return 2 * size**3 / seconds_of(jax.jit(jnp.dot), x, x)
    return 2 * size**3 / kernel_times(jax.jit(jnp.dot), [(x, x)], 10)[0] * 1e6


def seconds_of(fn: Callable, *args: jax.Array, calls: int = 10) -> float:
    """Return the seconds of one call among some that the device runs one after the other."""
    jax.block_until_ready(fn(*args))
    began = time.perf_counter()
    jax.block_until_ready([fn(*args) for _ in range(calls)][-1])
    return (time.perf_counter() - began) / calls


def _kernels_of(run: Callable[[], object]) -> Iterator[tuple[float, float, str, str]]:
    """Yield (start, end, name, device) of each kernel that a function has devices run; nanoseconds."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    yield event.start_ns, event.start_ns + event.duration_ns, event.name, plane.name
