"""The checks of annotations in all tests (tests/conftest.py): of shapes, dtypes and types, at every call."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation

_of_axes = jaxtyping.jaxtyped


def install(*packages: str) -> None:
    """Check the annotations of packages, which must not be imported yet, at every call.

    jaxtyping's import hook decorates each function and dataclass by `jaxtyping.jaxtyped`. In a call it takes 20
    microseconds to keep what the letters of its signature stand for. Most signatures name no axis, and those that
    schedule, parse or plan are called a million times in some files: they are checked without letters.
    """
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(packages, f"{__name__}.{check_from_first_call.__name__}")


def jaxtyped(checked: Any = None, *, typechecker: Callable) -> Any:
    """Decorate as `jaxtyping.jaxtyped` does, but a signature that names no axis by the type checker alone.

    Both are done at a function's first call: in a test process most of the package's 3,400 functions have none, and
    jaxtyping compiles two functions for each.
    """
    if checked is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if dataclasses.is_dataclass(checked) and "__init__" in vars(checked):
        checked.__init__ = jaxtyped(checked.__init__, typechecker=typechecker)
        return checked
    if not inspect.isfunction(checked):
        return _of_axes(checked, typechecker=typechecker)
    function, with_types, with_axes = checked, None, None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal with_types, with_axes
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if with_types is None and with_axes is None:
            if any(map(names_axes, function.__annotations__.values())):
                with_axes = _of_axes(function, typechecker=typechecker)
            else:
                with_types = beartype(_without_forward_references(function))
        if with_axes is not None:
            return with_axes(*args, **kwargs)
        try:
            return with_types(*args, **kwargs)
        except BeartypeCallHintViolation as error:  # of this function: one that it calls has raised the error below
            raise jaxtyping.TypeCheckError(f"Type-check error: {error}") from None

    return call


def names_axes(annotation: Any) -> bool:
    """True if an annotation is that of an array or a tree of arrays, or has one in it."""
    if isinstance(annotation, list):  # the arguments of a Callable
        return any(map(names_axes, annotation))
    is_of_arrays = type(annotation).__module__.startswith("jaxtyping.")
    return is_of_arrays or any(map(names_axes, typing.get_args(annotation)))


def _without_forward_references(function: Callable) -> Callable:
    """A copy of the function with Any for each annotation that is a string: a class that is not made yet."""
    f = function
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    functools.update_wrapper(copy, function)
    del copy.__wrapped__
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = {name: Any if isinstance(x, str) else x for name, x in function.__annotations__.items()}
    return copy


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
