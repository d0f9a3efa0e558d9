"""A request's state on its way from one engine to another: keys, values, index keys and lengths together (T16)."""

from dataclasses import dataclass

from m3jax.cache import Cache
from m3jax.decoding.engine.request import Params
from m3jax.decoding.protocols import Identity, PageContents, TargetConfig


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
    pages: list[PageContents]
    identity: Identity


def identity(config: TargetConfig, cache: Cache) -> Identity:
    """What two engines must share to exchange pages: the model's configuration, and how its cache is stored."""
    dtypes = {
        f"dtype of {name} in stack {index}": str(array.dtype)
        for index, stack in enumerate(cache.stacks)
        for name, array in (("k", stack.k), ("v", stack.v), ("index_k", stack.index_k))
        if array is not None
    }
    return {"config": config.to_dict()} | dtypes


def check_identity(snapshot: Snapshot, expected: Identity) -> None:
    """Raise ValueError, naming the first difference, where a snapshot is of another model or cache."""
    found = snapshot.identity
    if found.get("config") != expected.get("config"):
        found, expected = found["config"], expected["config"]
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"the snapshot is of another model or cache: its {name} is {found.get(name)}, this engine's "
                f"{expected.get(name)}; import it into an engine of the same checkpoint and storage types"
            )
