"""Times for the benches: medians of calls in turns, and the kernels that a profiler saw on the device."""

import glob
import re
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

import jax

COLLECTIVE = re.compile("nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)  # kernels' names


def medians(
    calls: Sequence[Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the median time of each of some calls.

    They are called in turns, so that what else the machine does falls on all of them, after a first time that does not
    count.

    Args:
      calls: each returns when its work is done.
      seconds: after which no more turns are begun; there are three at least.
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
      busy: seconds in which some stream ran a kernel.
      seconds: of each kernel, all its calls together.
      calls: how often each ran.
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


def print_kernels(call: Callable[[], object], count: int, file: TextIO = sys.stdout) -> None:
    """Print the kernels of a call that take longest, and the device's share of its time."""
    kernels = traced(call)
    print(f"{1e3 * kernels.busy:10.2f} ms in {kernels.calls.total()} kernels and copies", file=file)
    for name, seconds in kernels.seconds.most_common(count):
        print(f"{1e3 * seconds:10.2f} ms {kernels.calls[name]:5d} x  {name[:90]}", file=file, flush=True)


@dataclass
class DeviceTime:
    """The time of one device between its first kernel and its last, by use; all in seconds.

    Attributes:
      name: of the device.
      total: from the start of its first kernel to the end of its last.
      busy: in which some stream ran a kernel.
      collectives: in which some stream ran a collective: it moves data, or waits for another device.
      hidden: of `collectives`, the part in which another stream ran a kernel that is none.
      kernels: of each kernel, [seconds, how often].
      gaps: when no stream ran a kernel, by the kernels before and behind it: [seconds, how often].
    """

    name: str
    total: float
    busy: float
    collectives: float
    hidden: float
    kernels: dict[str, list[float]]
    gaps: dict[tuple[str, str], list[float]]


def device_times(run: Callable[[], object]) -> list[DeviceTime]:
    """Run a function under the profiler, and return how each device spent the time; none on a CPU."""
    of_device = defaultdict(list)
    for start, end, name, device in _kernels_of(run):
        of_device[device].append((start, end, name))
    return [time_of_device(device, sorted(events)) for device, events in sorted(of_device.items())]


def time_of_device(name: str, events: Sequence[tuple[float, float, str]]) -> DeviceTime:
    """Return how a device spent its time, given (start, end, kernel) of all its streams, sorted; nanoseconds."""
    is_collective = lambda kernel: COLLECTIVE.search(kernel) is not None
    covered = lambda some: sum(end - start for start, end in _joined(some))
    exchanging = [event for event in events if is_collective(event[2])]
    computing = [event for event in events if not is_collective(event[2])]
    busy, collectives = covered(events), covered(exchanging)
    hidden = collectives + covered(computing) - busy  # what is in both
    kernels, gaps = defaultdict(lambda: [0.0, 0]), defaultdict(lambda: [0.0, 0])
    latest, before = events[0][0], ""
    for start, end, kernel in events:
        _add(kernels[kernel], end - start)
        if start > latest:
            _add(gaps[before, kernel], start - latest)
        if end >= latest:
            latest, before = end, kernel
    return DeviceTime(name, (latest - events[0][0]) / 1e9, busy / 1e9, collectives / 1e9, hidden / 1e9, kernels, gaps)


def _add(sum_and_count: list[float], nanoseconds: float) -> None:
    sum_and_count[0] += nanoseconds / 1e9
    sum_and_count[1] += 1


def _joined(events: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float]]:
    """Yield the stretches of time that sorted events cover, none of which meet."""
    first = latest = None
    for start, end, _ in events:
        if first is None or start > latest:
            if first is not None:
                yield first, latest
            first, latest = start, end
        latest = max(latest, end)
    if first is not None:
        yield first, latest


def kernel_times(fn: Callable, calls: Sequence[tuple], repeats: int) -> tuple[float, dict[str, float]]:
    """Return the microseconds of one call of a function on the device, and those of each of its kernels.

    Args:
      fn: a function of arrays.
      calls: its arguments; the calls take turns with them.
      repeats: calls that are timed, after one with each of the first two.

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
