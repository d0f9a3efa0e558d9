"""Which meshes a slice can have, and which of them fits a job best."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from m3jax.config import M3Config
from m3jax.parallel import AXES
from m3jax.planning import arithmetic
from m3jax.planning.arithmetic import Memory, Work
from m3jax.planning.job import Job


class Candidate(NamedTuple):
    """A mesh and what arithmetic says of it."""

    sizes: dict[str, int]
    memory: Memory
    decode: Work
    prefill: Work

    @property
    def name(self) -> str:
        """As `--mesh` takes it."""
        return mesh_name(self.sizes)


def mesh_name(sizes: dict[str, int]) -> str:
    """Axes and sizes, as in data=1,context=2,expert=4,tensor=8."""
    return ",".join(f"{axis}={sizes[axis]}" for axis in AXES)


def candidates(job: Job) -> list[Candidate]:
    """All meshes of a slice that divide the model, best first.

    Those that fit come first, in the order of the product of both times (no weight says what a token of a prompt is
    worth against a decoded one), then the others, the smallest first.
    """
    found = [evaluate(job, sizes) for sizes in divisions(job)]
    chip = job.slice.chip
    time = lambda c: c.decode.roofline(chip) * c.prefill.roofline(chip)
    return sorted(found, key=lambda c: (not c.memory.fits, time(c) if c.memory.fits else c.memory.total))


def evaluate(job: Job, sizes: dict[str, int]) -> Candidate:
    """What arithmetic says of one mesh."""
    return Candidate(
        sizes, arithmetic.memory(job, sizes), arithmetic.decode(job, sizes), arithmetic.prefill(job, sizes)
    )


def divisions(job: Job) -> Iterator[dict[str, int]]:
    """Sizes whose product is the slice's, and which divide what they should."""
    count = job.slice.num_devices
    for tensor in filter(lambda n: _tensor_divides(job.config, n), _divisors(count)):
        for expert in (n for n in _divisors(count // tensor) if job.config.num_local_experts % n == 0):
            rest = count // tensor // expert
            for data in (n for n in _divisors(rest) if job.batch % n == 0):
                yield dict(data=data, context=rest // data, expert=expert, tensor=tensor)


def parse_sizes(text: str, job: Job) -> dict[str, int]:
    """Sizes from "context=4,expert=4,tensor=4"; axes left out have size 1.

    Raises:
      ValueError: an unknown axis, or sizes that do not divide the slice or the model, with the nearest that do.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh {text!r}: write axis=size pairs of {', '.join(AXES)}, as in expert=8,tensor=4")
        sizes[name] = int(size)
    allowed = list(divisions(job))
    if sizes in allowed:
        return sizes
    near = min(allowed, key=lambda s: sum(abs(math.log2(s[a] / sizes[a])) for a in AXES))
    raise ValueError(f"--mesh {text!r}: {_why_not(sizes, job)}; the nearest valid is '{mesh_name(near)}'")


def _why_not(sizes: dict[str, int], job: Job) -> str:
    product, count = math.prod(sizes.values()), job.slice.num_devices
    if product != count:
        return f"is {product} devices and {job.slice} has {count}"
    if not _tensor_divides(job.config, sizes["tensor"]):
        c = job.config
        return (
            f"tensor = {sizes['tensor']} does not divide {c.num_attention_heads} heads, a vocabulary of {c.vocab_size} "
            f"and hidden widths of {c.intermediate_size}, {c.dense_intermediate_size} and {c.shared_intermediate_size}"
        )
    if job.config.num_local_experts % sizes["expert"]:
        return f"expert = {sizes['expert']} does not divide {job.config.num_local_experts} experts"
    return f"data = {sizes['data']} does not divide {job.batch} rows"


def _tensor_divides(c: M3Config, size: int) -> bool:
    widths = c.intermediate_size, c.dense_intermediate_size, c.shared_intermediate_size
    return all(n % size == 0 for n in (c.num_attention_heads, c.vocab_size, *widths))


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]
