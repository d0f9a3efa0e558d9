"""The message of a failing comparison: quantity, place, both values, and the trap."""

import numpy as np
import pytest
from support.comparisons import assert_close, assert_equal, assert_same_sets


def test_a_number_that_is_off():
    """T9: this test is about that trap."""
    expected = np.arange(6.0).reshape(2, 3)
    found = expected + np.array([[0, 0.001, 0], [0, 0, 0.5]])
    message = (
        r"^out is wrong at 1 of 6 places; at B = 1, T = 2: found 5.5, expected 5.0; off by 0.5, allowed are 0.02\n"
        r"  trap T9: An unused slot's -1 was followed into memory, to the first page or the last one\.$"
    )
    with pytest.raises(AssertionError, match=message):
        assert_close(found, expected, "out", "B T", atol=0.02)
    assert_close(found, expected, "out", "B T", atol=0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_has_to_be_expected(bad):
    with pytest.raises(AssertionError, match=r"lse is wrong at 1 of 2 places; at axis 0 = 1: found 1.0, expected"):
        assert_close([0.0, 1.0], [0.0, bad], "lse", "B T", atol=9.0)
    with pytest.raises(AssertionError, match=r"at T = 0: found (nan|-?inf), expected 2.0"):
        assert_close([bad, 1.0], [2.0, 1.0], "lse", "T", rtol=9.0)
    assert_close([bad], [bad])
    assert_equal([bad], [bad])


def test_equal_means_equal():
    assert_equal([1, 2], [1, 2])
    with pytest.raises(AssertionError, match=r"ids is wrong at 2 of 3 places; at X = 1: found 2, expected 4"):
        assert_equal([1, 2, 3], [1, 4, 5], "ids", "X")
    with pytest.raises(AssertionError, match=r"found shape \(3,\), expected \(2,\)"):
        assert_equal([1, 2, 3], [1, 2], "ids")
    with pytest.raises(AssertionError, match=r"found shape \(1,\), expected \(2,\)"):
        assert_close([1.0], [1.0, 1.0])


def test_sets_say_what_was_kept_and_dropped():
    with pytest.raises(AssertionError, match=r"at K = 1: found \[ 0  3 -1\], .*wrongly kept \[3\], dropped \[2, 7\]"):
        assert_same_sets([[0, 1, 2], [0, 3, -1]], [[0, 1, 2], [0, 2, 7]], axes="K")
    with pytest.raises(AssertionError, match="the same ids, in another order"):
        assert_same_sets([[1, 0, 2]], [[0, 1, 2]], axes="K")
