"""Checks of the arrays that a caller gives: what they are at every call, what is in them where `checks()` asks for it.

`checked` reads a function's annotations, so that a shape is written once, and refuses arrays of another rank, dtype or
size. `check_values` looks at the numbers themselves. That costs a transfer to the host, so it is done under `checks()`
alone, also inside `jax.jit`, where the program is traced again with the checks in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import UnionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, Array, Shaped

P = ParamSpec("P")
R = TypeVar("R")

# Part of the key by which jax finds a compiled function: one that was traced without checks is traced anew with them.
_is_checking = jax.make_user_context(default_value=False)
# What compiled programs found wrong since the last look. They may run on other threads; appending is atomic.
_found: list[str] = []


@contextmanager
def checks() -> Iterator[None]:
    """Look into arrays too: token ids, positions, lengths, selections and NaN that nothing else would notice.

    Functions of `m3jax.msa` and calls of the model raise at once where they are called with arrays at hand. Inside
    `jax.jit` they cannot: then the block raises at its end, when all that was started in it has ended. A function that
    was compiled before is compiled anew inside the block, and found again as it was behind it.

    Raises:
      ValueError: the first thing found, and how many more there are.

    Example:
      with m3jax.checks():
          out = sparse_attention(q, k, v, blocks, positions, lengths, block_size=128)
    """
    body_error = None
    with _is_checking(True):
        try:
            yield
        except Exception as error:  # what a compiled program found is the likelier cause, and is said first
            body_error = error
        jax.effects_barrier()
    found, _found[:] = list(dict.fromkeys(_found)), []
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(found[0] + more) from body_error
    if body_error is not None:
        raise body_error


@contextmanager
def unchecked() -> Iterator[None]:
    """Switch `checks()` off inside: parts of a larger array may break rules that the whole array keeps."""
    with _is_checking(False):
        yield


def is_checking() -> bool:
    """Return True inside `checks()`, where values of arrays are looked into."""
    return bool(_is_checking.value)


def is_traced(*values: Any) -> bool:
    """Return True if some leaf of these values is a tracer, so that its numbers cannot be read yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def check_values(
    find_problem: Callable[..., str | None], *arrays: Shaped[Array, "..."] | Shaped[np.ndarray, "..."]
) -> None:
    """Check the values of arrays: at once if they are concrete, else when the program that is being traced runs.

    Args:
      find_problem: gets the arrays as numpy arrays; what is wrong with them, or None.
      *arrays: of any shapes.

    Raises:
      ValueError: what was found, where the arrays are at hand; else `checks()` raises it at its end.
    """
    if not is_traced(arrays):
        if problem := find_problem(*map(np.asarray, arrays)):
            raise ValueError(problem)
        return

    def look(*values):
        if problem := find_problem(*map(np.asarray, values)):
            _found.append(problem)

    jax.debug.callback(look, *arrays)


class _Contract(NamedTuple):
    """The dtype kind and the axes that an annotation such as Float[Array, "B T H"] asks of an argument."""

    kind: str
    letters: tuple[str, ...]
    is_optional: bool

    def __str__(self):
        return f"{_KINDS[self.kind][1]} [{' '.join(self.letters)}]"


_KINDS = {
    "Float": (jnp.floating, "floats"),
    "Int": (jnp.signedinteger, "signed integers"),
    "Bool": (jnp.bool_, "booleans"),
    "Num": (jnp.number, "numbers"),
    "Shaped": (jnp.generic, "an array"),
}


def checked(
    function: Callable[P, R], also: Callable[[dict[str, Any], dict[str, int]], None] | None = None
) -> Callable[P, R]:
    """Make a function refuse arrays that are not what its annotations say.

    Args:
      function, also: as of `check_of`.
    """
    check = check_of(function, also)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def without_checks(function: Callable[P, R]) -> Callable[P, R]:
    """Return a `checked` function without its checks, for callers in the package whose arrays were checked at the door.

    Args:
      function: what `checked` returned.
    """
    return function.__wrapped__


def check_of(
    function: Callable[P, Any], also: Callable[[dict[str, Any], dict[str, int]], None] | None = None
) -> Callable[P, None]:
    """Return a check of a function's arguments: rank and dtype of each array, and one size for each letter.

    Annotations other than jaxtyping's, and those with a variable number of axes, are left alone.

    Args:
      function: with jaxtyping's annotations.
      also: gets the arguments by name and the size of each letter, and raises ValueError for whatever else is wrong.

    Returns:
      A function of the same arguments. It raises ValueError, with the argument's name, what it is and what it must be.
    """
    parameters = signature(function)
    contracts: dict[str, _Contract] = {}

    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        if not contracts:  # read at the first call: annotations may name what is defined below the function
            contracts.update(_contracts(function))
        given = parameters.bind(*args, **kwargs).arguments
        sizes: dict[str, tuple[int, str]] = {}
        for name, contract in contracts.items():
            if name in given and not (given[name] is None and contract.is_optional):
                _check_array(name, given[name], contract, sizes)
        if also is not None:
            also(given, {letter: size for letter, (size, _) in sizes.items()})

    return check


def _contracts(function: Callable) -> dict[str, _Contract]:
    """The contracts of a function's array arguments, by name."""
    found = {}
    for name, hint in get_type_hints(function).items():
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        arrays = [x for x in options if isinstance(x, type) and issubclass(x, AbstractArray)]
        if len(arrays) == 1 and name != "return" and "..." not in arrays[0].dim_str and "*" not in arrays[0].dim_str:
            array = arrays[0]
            kind = array.dtype.__name__
            letters = tuple(letter.strip("#") for letter in array.dim_str.split())
            found[name] = _Contract(kind if kind in _KINDS else "Shaped", letters, type(None) in options)
    return found


def _check_array(name: str, value: Any, contract: _Contract, sizes: dict[str, tuple[int, str]]) -> None:
    """Compare one argument with its contract; `sizes` maps each letter to its size and the argument that set it."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"{name} is a {type(value).__name__}: must be an array of {contract}")
    shape, dtype = tuple(value.shape), value.dtype
    described = f"{name} has shape {list(shape)} and dtype {dtype}"
    least, _ = _KINDS[contract.kind]
    if len(shape) != len(contract.letters) or not jnp.issubdtype(dtype, least):
        raise ValueError(f"{described}: must be {contract}")
    if 0 in shape:
        raise ValueError(f"{described}: no axis of {contract} may be empty")
    for letter, size in zip(contract.letters, shape, strict=True):
        known, owner = sizes.setdefault(letter, (size, name))
        if size != known:
            raise ValueError(f"{described}: must be {contract} with {letter} = {known}, as {owner} has")
