"""`under_checks`: a test's functions look into their arrays."""

from collections.abc import Iterator

import pytest

import m3jax


@pytest.fixture
def under_checks() -> Iterator[None]:
    """The test runs in `m3jax.checks()`."""
    with m3jax.checks():
        yield
