"""Looks at what the Triton kernels of these tests ask of the compiler: interpret mode and lowering take anything."""

from collections.abc import Iterator

import pytest
from jax.experimental.pallas import triton as plgpu


@pytest.fixture(autouse=True, scope="session")
def warps_are_a_power_of_two() -> Iterator[None]:
    """A GPU runs no other number of them, and one stage of a program's steps at least."""
    make = plgpu.CompilerParams.__init__

    def checked(self, *args, **options):
        make(self, *args, **options)
        assert self.num_warps in (1, 2, 4, 8, 16, 32) and self.num_stages >= 1, self

    plgpu.CompilerParams.__init__ = checked
    yield
    plgpu.CompilerParams.__init__ = make
