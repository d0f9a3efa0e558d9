"""The checker of annotations that jaxtyping's import hook is given (tests/conftest.py)."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def check_from_first_call(function: Callable) -> Callable:
    """Check a function by beartype, which is applied when the function is first called.

    jaxtyping makes two functions of each in the package, one for the arguments, whose result is Any, and one for the
    result, and hands both to this one. Writing their checks takes a millisecond; most of the package's 3,400 functions
    are not called in a test process. The function for the result checks no argument a second time: axes that the
    arguments named are known to jaxtyping, whoever checks what.
    """
    checked = None

    def call(*args, **kwargs):
        nonlocal checked
        if checked is None:
            if function.__annotations__.get("return", Any) is not Any:
                function.__annotations__ = {"return": function.__annotations__["return"]}
            checked = beartype(function)
        return checked(*args, **kwargs)

    return call
