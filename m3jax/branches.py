"""Names of scopes by which a program says how often a branch of a condition runs, for those who count its work.

A compiler knows only that one of the branches does. The names are read by `m3jax.planning.hlo`.
"""

import re
from contextlib import AbstractContextManager

import jax

_RARE, _SHARED = "rarely", "on_one_device_of_"


def rarely() -> AbstractContextManager[None]:
    """Return the scope of a branch that is there for exactness, and that no ordinary choice of experts takes."""
    return jax.named_scope(_RARE)


def on_one_device_of(num_devices: int) -> AbstractContextManager[None]:
    """Return the scope of a condition that holds on one of so many devices, each time on any one of them."""
    return jax.named_scope(f"{_SHARED}{num_devices}")


def is_rare(op_name: str) -> bool:
    """Return True if an operation is in a branch that runs rarely.

    Args:
      op_name: as in the metadata of a compiled program.
    """
    return _RARE in op_name.split("/")


def devices_that_take_turns(op_name: str) -> int:
    """Return on which part of the devices a condition holds: on one of so many; 1 where its scope says nothing.

    Args:
      op_name: of the condition, as in the metadata of a compiled program.
    """
    found = re.search(rf"/{_SHARED}(\d+)/cond$", op_name)
    return int(found[1]) if found else 1
