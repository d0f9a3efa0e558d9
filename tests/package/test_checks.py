"""The checker of annotations that every test runs under: what is wrong is refused, at the first call and later ones."""

from collections.abc import Callable
from dataclasses import dataclass

import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float, Int32
from support.checks import check_from_first_call, jaxtyped

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


checked = jaxtyped(typechecker=check_from_first_call)


@checked
@dataclass(frozen=True)
class Plain:
    """A dataclass whose fields name no axis; a later default of a method is of its own type."""

    count: int
    names: tuple[str, ...] = ()

    @checked
    def more(self, by: int, *, twice: bool = False) -> "Plain":
        return Plain(self.count + by * (1 + twice))


@pytest.mark.parametrize("calls_before", [0, 2])
def test_what_names_no_axis_is_checked_by_its_types(calls_before):
    @checked
    def halved(count: int, of: list[int] | None = None) -> int:
        return count / 2 if of is None else of[0]

    for _ in range(calls_before):
        assert halved(3, [5]) == 5 and Plain(1).more(2, twice=True) == Plain(5)
    for call in (
        lambda: halved("3", [5]),
        lambda: halved(3, [5.0]),
        lambda: halved(3),  # 1.5 is no int
        lambda: Plain("1"),
        lambda: Plain(1, (2,)),  # of a longer one an item is looked at that chance picks
        lambda: Plain(1).more(2, twice=1),
    ):
        with pytest.raises(jaxtyping.TypeCheckError, match=r"Type-check error: .*violates type hint"):
            call()


def test_fields_of_a_dataclass_that_are_arrays_are_checked_by_their_axes():
    @checked
    @dataclass
    class Pair:
        x: Float[np.ndarray, "A B"]
        row: Int32[np.ndarray, " B"]

    Pair(X, ROW)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'row'"):
        Pair(X, ROW[:2])


def test_nothing_is_checked_where_checks_are_off(unchecked):
    assert Plain("1").count == "1" and turned()(X, ROW[:2]).shape == (3, 2)
