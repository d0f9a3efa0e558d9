"""A request's state on its way from one engine to another: keys, values, index keys and lengths together (T16)."""

from dataclasses import dataclass
from typing import Any

from m3jax.decoding.request import Params


@dataclass(frozen=True)
class Snapshot:
    """Everything that another engine needs to go on with a request; plain arrays and numbers, so it can be pickled.

    Attributes:
      prompt: token ids.
      new: token ids generated so far.
      logprobs: of them.
      params: how it goes on.
      cached: tokens whose keys, values and index keys are in `pages`.
      pages: their contents, a few pages at a time, as `Runner.read_pages` gives them.
      identity: what the receiving engine's model and cache must be.
    """

    prompt: tuple[int, ...]
    new: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: Params
    cached: int
    pages: list[Any]
    identity: dict[str, Any]


def identity(config: Any, cache: Any) -> dict[str, Any]:
    """What two engines must share to exchange pages: the model's configuration, and how its cache is stored."""
    types = {
        f"dtype of {name} in stack {i}": str(x.dtype)
        for i, stack in enumerate(cache.stacks)
        for name, x in (("k", stack.k), ("v", stack.v), ("index_k", stack.index_k))
        if x is not None
    }
    return {"config": config.to_dict()} | types


def check_identity(snapshot: Snapshot, mine: dict[str, Any]) -> None:
    """Raise ValueError, naming the first difference, where a snapshot is of another model or cache."""
    theirs = snapshot.identity
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            found, own = theirs.get(name), mine.get(name)
            if name == "config":
                name = next(k for k in sorted(found.keys() | own.keys()) if found.get(k) != own.get(k))
                found, own = found.get(name), own.get(name)
            raise ValueError(
                f"the snapshot is of another model or cache: its {name} is {found}, this engine's {own}; import it "
                "into an engine of the same checkpoint and storage types"
            )
