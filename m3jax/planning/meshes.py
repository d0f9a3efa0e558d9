"""The meshes that a slice can have, ranked by how well they fit a job."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from m3jax.mxfp8 import BLOCK
from m3jax.parallel import AXES, parse_axes
from m3jax.planning import arithmetic, images
from m3jax.planning.arithmetic import Memory, Work
from m3jax.planning.job import Job


class Candidate(NamedTuple):
    """A mesh of a slice, with the memory and work of a job on it by arithmetic."""

    sizes: dict[str, int]
    memory: Memory
    decode: Work
    prefill: Work
    images: Work | None = None

    @property
    def name(self) -> str:
        """The sizes as `--mesh` takes them."""
        return mesh_name(self.sizes)


def mesh_name(sizes: dict[str, int]) -> str:
    """Return the name of a mesh: its axes and sizes, as in data=1,context=2,expert=4,tensor=8."""
    return ",".join(f"{axis}={sizes[axis]}" for axis in AXES)


def candidates(job: Job) -> list[Candidate]:
    """Return all meshes of a slice that divide the model, best first.

    Those that fit in memory come first, by the product of their decode and prefill times (a product needs no weight of
    one against the other), then the others by total memory, the smallest first.
    """
    chip = job.slice.chip

    def rank(candidate: Candidate) -> tuple[bool, float]:
        if not candidate.memory.fits:
            return True, candidate.memory.total
        return False, candidate.decode.roofline(chip) * candidate.prefill.roofline(chip)

    return sorted((evaluate(job, sizes) for sizes in divisions(job)), key=rank)


def evaluate(job: Job, sizes: dict[str, int]) -> Candidate:
    """Count what a job needs on one mesh, and how fast it could be there; nothing is compiled."""
    memory = arithmetic.memory(job, sizes)
    temporaries = max(memory.temporaries, images.temporaries(job, sizes))  # one program runs at a time
    return Candidate(
        sizes=sizes,
        memory=replace(memory, vision=images.held_weights(job, sizes), temporaries=temporaries),
        decode=arithmetic.decode(job, sizes),
        prefill=arithmetic.prefill(job, sizes),
        images=images.see(job, sizes) if job.images else None,
    )


def divisions(job: Job) -> Iterator[dict[str, int]]:
    """Yield the meshes that use all devices of a job's slice and whose axes divide the model and the batch."""
    devices = job.slice.num_devices
    for tensor in _divisors(devices):
        if not _tensor_divides(job, tensor):
            continue
        for expert in _divisors(devices // tensor):
            if job.config.num_local_experts % expert:
                continue
            remaining = devices // tensor // expert
            for data in _divisors(remaining):
                if job.batch % data == 0:
                    yield dict(data=data, context=remaining // data, expert=expert, tensor=tensor)


def parse_sizes(text: str, job: Job) -> dict[str, int]:
    """Parse the sizes of a mesh, written as in "context=4,expert=4,tensor=4"; axes left out have size 1.

    Raises:
      ValueError: text that `m3jax.parallel.parse_axes` refuses, or sizes that do not divide the slice or the model,
        with the nearest that do.
    """
    sizes = dict.fromkeys(AXES, 1) | parse_axes(text)
    if min(sizes.values()) < 1:
        raise ValueError(f"mesh {text!r}: give sizes of at least 1")
    allowed = list(divisions(job))
    if sizes in allowed:
        return sizes
    distance = lambda other: sum(abs(math.log2(other[axis] / sizes[axis])) for axis in AXES)
    nearest = mesh_name(min(allowed, key=distance))
    raise ValueError(f"--mesh {text!r}: {_why_not(sizes, job)}; the nearest valid is '{nearest}'")


def _why_not(sizes: dict[str, int], job: Job) -> str:
    """Return the first reason why a mesh is not among `divisions`."""
    config, devices = job.config, math.prod(sizes.values())
    if devices != job.slice.num_devices:
        return f"is {devices} devices and {job.slice} has {job.slice.num_devices}"
    if not _tensor_divides(job, sizes["tensor"]):
        if _tensor_divides(replace(job, weights="dequantize"), sizes["tensor"]):
            return f"tensor = {sizes['tensor']} cuts through blocks of {BLOCK} input channels, which share a scale"
        return (
            f"tensor = {sizes['tensor']} does not divide {config.num_attention_heads} heads, a vocabulary of "
            f"{config.vocab_size} and hidden widths of {config.intermediate_size}, {config.dense_intermediate_size} "
            f"and {config.shared_intermediate_size}"
        )
    if config.num_local_experts % sizes["expert"]:
        return f"expert = {sizes['expert']} does not divide {config.num_local_experts} experts"
    return f"data = {sizes['data']} does not divide {job.batch} rows"


def _tensor_divides(job: Job, tensor_size: int) -> bool:
    """True if a tensor axis divides heads, vocabulary and hidden widths, and leaves the blocks of MXFP8 whole."""
    config = job.config
    widths = config.intermediate_size, config.dense_intermediate_size, config.shared_intermediate_size
    if job.weights == "mxfp8" and tensor_size > 1:
        input_sizes = (*widths, config.num_attention_heads * config.head_dim)
        if any(size % (tensor_size * BLOCK) for size in input_sizes):
            return False
    return all(size % tensor_size == 0 for size in (config.num_attention_heads, config.vocab_size, *widths))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
