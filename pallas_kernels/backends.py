"""The backends of an op: each is a folder inside the op's own, imported when it is first asked for.

An op's `__init__.py` has its `Call`: operands, options, the docstring and the checks. The folder of a backend has what
differs:

- `run(call, config)` takes a checked call, and sizes of tiles or None. It computes, and checks nothing again.
- `LIMITS`, a `Limits`, says which operands and options its kernels take; the op refuses the others by it.
- `Config`, a `TileConfig`, has the sizes of its tiles, if there are any to choose.

A new backend is a new folder with these. Neither the op nor its other folders change.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.pages import Pages

# False to run on the device, True for Pallas's interpret mode on the CPU, or what one backend's interpreter takes.
Interpret = Any


def reach_all(name: str, pages: Pages, interpret: Interpret) -> None:
    """A `check_pages` of kernels that reach every page, or read none."""


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Sizes that change the speed and not the result (but for the order of float32 sums); each backend has its own."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The operands and options that the kernels of one backend of an op take.

    Attributes:
      check_pages: raises ValueError for pages that they cannot reach; called as (name, pages, interpret).
      config: class of the tile sizes; None where there are none.
      stored: dtypes that keys in memory may have beside that of the queries.
      schedules: what the op's `schedule` may be, where it has one.
      max_blocks: M at most; None for any.
      interpreters: types of `interpret`.
    """

    check_pages: Callable[[str, Pages, Interpret], None] = reach_all
    config: type[TileConfig] | None = None
    stored: tuple[jax.typing.DTypeLike, ...] = ()
    schedules: tuple[str, ...] = ()
    max_blocks: int | None = None
    interpreters: tuple[type, ...] = (bool,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op: its operands and static options. The docstring of an op's own class is its contract.

    Attributes:
      interpret: True to run on the CPU; for "mosaic_tpu" also `pltpu.InterpretParams`.
    """

    interpret: Interpret = False

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together, or a backend does not take them."""


def op(call_class: type[Call]) -> Callable[..., Any]:
    """Return the function of an op: it makes a call, has it checked, and has a backend run it.

    Beside the fields of the call it takes two arguments by name: `backend`, a folder in the op's own, and `config`,
    tile sizes of that backend, which None leaves to it. It raises ValueError for a backend that the op does not have,
    for an option that only another backend understands, and for what `check` or the backend refuses.

    Args:
      call_class: the class of the op's calls, in the op's package.
    """
    package = call_class.__module__

    def run(*operands: Any, backend: str, config: TileConfig | None = None, **options: Any) -> Any:
        call = call_class(*operands, **options)
        runner = load_backend(package, backend, config, call.interpret)
        call.check(runner.LIMITS)
        return runner.run(call, config)

    run.__name__ = run.__qualname__ = package.rpartition(".")[2]
    run.__module__, run.__doc__ = package, call_class.__doc__
    fields = inspect.signature(call_class)
    own = [inspect.signature(run).parameters[name] for name in ("backend", "config")]
    run.__signature__ = fields.replace(parameters=[*fields.parameters.values(), *own])
    return run


def backend_names(op: str) -> tuple[str, ...]:
    """Return the names of the backends that an op has.

    Args:
      op: name of the op's package, such as "pallas_kernels.index_topk"; an op gives its `__name__`.

    Returns:
      The names of the folders in it, sorted.
    """
    folders = importlib.import_module(op).__path__
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg))


def load_backend(op: str, backend: str, config: TileConfig | None, interpret: Interpret) -> ModuleType:
    """Import the folder of a backend, and check that the backend takes these options.

    Args:
      op: name of the op's package.
      backend: name of a folder in it.
      config: tile sizes; None leaves them to the backend.
      interpret: how to run.

    Returns:
      A module with `run` and `LIMITS`.

    Raises:
      ValueError: a backend that the op does not have, or an option that only another backend understands.
    """
    names = backend_names(op)
    if backend not in names:
        name = op.rpartition(".")[2]
        raise ValueError(f"backend = {backend!r}: {name} has {', '.join(map(repr, names))}")
    module = importlib.import_module(f"{op}.{backend}")
    allowed = module.LIMITS.config
    if config is not None and (allowed is None or not isinstance(config, allowed)):
        given, expected = type(config), f"a {allowed.__module__}.{allowed.__name__}" if allowed else "no tile sizes"
        raise ValueError(f"config is a {given.__module__}.{given.__name__}: backend = {backend!r} takes {expected}")
    if not isinstance(interpret, module.LIMITS.interpreters):
        kinds = " or ".join(kind.__name__ for kind in module.LIMITS.interpreters)
        raise ValueError(f"interpret = {interpret!r}: backend = {backend!r} takes {kinds}")
    return module
