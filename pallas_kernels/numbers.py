"""Numbers that the kernels of every backend share."""

UNSEEN = -1e30  # a score no key can have: finite, so that no row of nothing but this makes a NaN
BEHIND_ALL = 2**30  # a block id, or a position, behind every real one
E4M3_MAX = 448.0  # the largest number of float8_e4m3fn, which has no infinity
MAX_QUERIES = 16  # queries a row that the ops of a decode step take


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def can_reach(size: int) -> bool:
    """Return True if a Triton kernel can address an array of `size` one-byte numbers.

    In arrays of up to 4 GiB offsets have 32 bits, and with one-byte numbers these overflow from 2 GiB on.
    """
    return not 2**31 <= size <= 2**32
