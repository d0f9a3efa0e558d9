"""Public figures of accelerators: memory, rates, and the slices that exist."""

import difflib
import itertools
import math
import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Rates of one device, as a program sees it.

    Attributes:
      name: as in a topology.
      kind: "tpu" or "gpu".
      hbm: bytes that a program can use; for a TPU, the limit of its compiler.
      hbm_rate: bytes a second.
      flops: bfloat16 operations a second, dense.
      link_rate: bytes a second to other devices, one way, all links together.
      devices: devices in one chip; a TPU7x chip is two.
      dims: of the torus; 0 for a GPU.
      most: chips of the largest slice, or of one NVLink domain.
      compiler_name: the value of TPU_ACCELERATOR_TYPE for libtpu.
    """

    name: str
    kind: str
    hbm: float
    hbm_rate: float
    flops: float
    link_rate: float
    devices: int = 1
    dims: int = 0
    most: int = 8
    compiler_name: str = ""


# Source: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x} for rates (inter-chip bandwidth there is both ways);
# the compiler's own limits for memory. NVIDIA's data sheets of H100 SXM, H200 SXM and HGX B200 (NVLink, both ways too).
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", 15.75 * GIB, 819e9, 197e12, 200e9, 1, 2, 256, "v5litepod-4"),
        Chip("v5p", "tpu", 95.74 * GIB, 2765e9, 459e12, 600e9, 1, 3, 8960, "v5p-8"),
        Chip("v6e", "tpu", 31.25 * GIB, 1638e9, 918e12, 400e9, 1, 2, 256, "v6e-4"),
        Chip("tpu7x", "tpu", 94.75 * GIB, 3690e9, 1153.5e12, 300e9, 2, 3, 9216, "tpu7x-8"),
        Chip("h100", "gpu", 80e9, 3350e9, 989e12, 450e9),
        Chip("h200", "gpu", 141e9, 4800e9, 989e12, 450e9),
        Chip("b200", "gpu", 180e9, 8000e9, 2250e12, 900e9, most=72),
    )
}


@dataclass(frozen=True)
class Slice:
    """A slice of accelerators: a kind of chip, and how many chips stand on each side of the torus."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """The number of chips in the slice."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """The number of devices in the slice: two for each TPU7x chip, one for each other chip."""
        return self.num_chips * self.chip.devices

    def __str__(self):
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_slice(text: str) -> Slice:
    """Parse a slice, written as in "v5p:4x4x4" or "h200:8".

    Raises:
      ValueError: a chip or a shape that does not exist, with the nearest that does.
    """
    name, _, shape = text.strip().lower().partition(":")
    if name not in CHIPS:
        nearest_name = difflib.get_close_matches(name, CHIPS, 1, 0.0)[0]
        raise ValueError(
            f"topology {text!r}: unknown chip {name!r}; the nearest known is {nearest_name!r} (all: {', '.join(CHIPS)})"
        )
    chip = CHIPS[name]
    sizes = tuple(map(int, shape.split("x"))) if re.fullmatch(r"\d+(x\d+)*", shape) else ()
    nearest = _nearest_shape(chip, sizes)
    if sizes != nearest:
        rule = f"1 to {chip.most} devices" if chip.kind == "gpu" else f"{chip.dims} sizes{_RULES[chip.dims]}"
        raise ValueError(f"topology {text!r}: {name} takes {rule}; the nearest valid is '{Slice(chip, nearest)}'")
    return Slice(chip, sizes)


_SIDES = (2, 4, 8, 16)
_RULES = {2: ", each 2, 4, 8 or 16", 3: ", the first two even, all multiples of 4 above 4"}


def _nearest_shape(chip: Chip, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape itself if the chip has such slices, else the one nearest in its sides, then in chip count."""
    if chip.kind == "gpu":
        return (min(chip.most, max(1, math.prod(sizes))),)
    if _exists(chip, sizes):
        return sizes
    sides = _SIDES if chip.dims == 2 else (1, 2, *range(4, 33, 4))
    shapes = [shape for shape in itertools.product(sides, repeat=chip.dims) if _exists(chip, shape)]

    def distance(shape: tuple[int, ...]) -> tuple[int, int, int]:
        pairs = zip(sorted(shape), sorted(sizes), strict=True) if len(shape) == len(sizes) else ()
        in_chips = abs(math.prod(shape) - math.prod(sizes))
        return sum(abs(side - given) for side, given in pairs), in_chips, max(shape)

    return min(shapes, key=distance)


def _exists(chip: Chip, sizes: tuple[int, ...]) -> bool:
    """True if there are slices of a TPU in this shape (`_RULES`)."""
    if len(sizes) != chip.dims or not 0 < math.prod(sizes) <= chip.most or any(side % 2 for side in sizes[:2]):
        return False
    return all(side in _SIDES if chip.dims == 2 else side in (1, 2) or side % 4 == 0 for side in sizes)
