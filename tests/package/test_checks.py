"""The checker of annotations that every test runs under: what is wrong is refused, at the first call and later ones."""

from collections.abc import Callable

import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float, Int32
from support.checks import check_from_first_call

X, ROW = np.zeros((2, 3), np.float32), np.zeros(3, np.int32)


def turned() -> Callable:
    """A function of arrays whose axes belong together, checked as the package's are; its last argument spoils it."""

    @jaxtyping.jaxtyped(typechecker=check_from_first_call)
    def turn(
        x: Float[np.ndarray, "A B"], row: Int32[np.ndarray, " B"], as_it_is: bool = False
    ) -> Float[np.ndarray, "B A"]:
        return x if as_it_is else x.T

    return turn


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, ROW[:2]), "parameter 'row'"),
        ((X.astype(np.int32), ROW), "parameter 'x'"),
        ((X, ROW, 1), "parameter 'as_it_is'"),
        ((X, ROW, True), "checking the return value"),
    ],
)
def test_what_is_wrong_is_refused(calls_before, arguments, message):
    turn = turned()
    for _ in range(calls_before):
        assert turn(X, ROW).shape == (3, 2)
    with pytest.raises(jaxtyping.TypeCheckError, match=message):
        turn(*arguments)
