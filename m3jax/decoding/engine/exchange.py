"""A request's state on its way from one engine to another: keys, values, index keys and lengths together (T16)."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, Shaped

from m3jax.cache import Cache
from m3jax.cache.storage import FLOAT8
from m3jax.decoding.engine.media import Media
from m3jax.decoding.engine.request import Params, check_ids
from m3jax.decoding.engine.sealed import seal, unseal
from m3jax.decoding.protocols import CHOICES, SUPPORT, Identity, PageContents, TargetConfig
from m3jax.decoding.sampling import Sampling
from m3jax.messages import shown

PAGES_A_CALL = 8  # pages that one call reads or writes, and that one entry of a snapshot has

_ARRAY = "array"  # in a header, the name of an array in the place where it stood


@dataclass(frozen=True)
class Snapshot:
    """Everything that another engine needs to go on with a request: plain arrays and numbers.

    Attributes:
      prompt: token ids.
      new: token ids generated so far.
      logprobs: of them.
      params: how it goes on.
      cached: tokens whose keys, values and index keys are in `pages`.
      pages: their contents, eight pages at a time, as `Runner.read_pages` gives them.
      identity: configuration and dtypes that the receiving engine's model and cache must have.
      top_logprobs: as in `Generation`; () where none were asked for.
      prompt_logprobs: likewise.
      records: likewise; {} where none were asked for.
      media: its images and videos, (patches, grid) each; a chunk of a video is a video here. They travel too: without
        them the receiver could not read the prompt again where its pages had to go.
    """

    prompt: tuple[int, ...]
    new: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: Params
    cached: int
    pages: list[PageContents]
    identity: Identity
    media: Media = field(default_factory=Media)
    top_logprobs: tuple[dict[int, float], ...] = ()
    records: Mapping[str, Shaped[np.ndarray, "X ..."]] = field(default_factory=dict)
    prompt_logprobs: tuple[dict[int, float], ...] = ()

    def to_bytes(self) -> bytes:
        """Return the snapshot as a safetensors file with a checksum (`m3jax.decoding.engine.sealed`).

        Raises:
          ValueError: a cache of a structure or dtype that these bytes cannot hold.
        """
        arrays = {
            "prompt": np.asarray(self.prompt, np.int64),
            "new": np.asarray(self.new, np.int64),
            "logprobs": np.asarray(self.logprobs, np.float64),
        }
        pages = [_written_out(group, f"pages.{index}", arrays) for index, group in enumerate(self.pages)]
        grids, patches = self.media.to_arrays()
        header = dict(params=asdict(self.params), cached=self.cached, pages=pages, media=grids)
        arrays |= patches
        arrays |= {f"records.{name}": record for name, record in self.records.items()}
        header["records"] = list(self.records)
        for name in ("top_logprobs", "prompt_logprobs"):
            header[name] = [list(map(list, of_token.items())) for of_token in getattr(self, name)]
        return seal(arrays, header | dict(identity=_plain(self.identity)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Snapshot":
        """Read the snapshot that `to_bytes` wrote; `Engine.import_request` checks whether it fits an engine.

        A checksum shows damage, not malice: the pages also serve other requests of the same beginning, so take
        snapshots only from engines that you trust.

        Raises:
          ValueError: the bytes are damaged, of another version, or no snapshot.
        """
        arrays, header = unseal(data)
        try:
            params = header["params"]
            sampling = Sampling(**params["sampling"])
            tuples = {"stop_ids": tuple(params["stop_ids"])}
            tuples |= {name: tuple(params.get(name, ())) for name in ("record", "capture")}
            params = Params(**params | {"sampling": sampling} | tuples)
            lists = (tuple(arrays[name].tolist()) for name in ("prompt", "new", "logprobs"))
            pages = [_read_back(group, arrays) for group in header["pages"]]
            media = Media.from_arrays(header.get("media", {}), arrays)
            # Older bytes have none, and none of the newer settings: those are off then.
            records = {name: arrays[f"records.{name}"] for name in header.get("records", ())}
            of_places = {
                name: tuple({int(i): float(x) for i, x in pairs} for pairs in header.get(name, ()))
                for name in ("top_logprobs", "prompt_logprobs")
            }
            fixed = (params, header["cached"], pages, header["identity"], media)
            return cls(*lists, *fixed, records=records, **of_places)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"a snapshot that cannot be read: {shown(error)}") from error


def _written_out(tree: PyTree, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a tree of arrays in a form that JSON can hold; the arrays are added to `arrays`."""
    if tree is None:
        return None
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_written_out(x, f"{name}.{i}", arrays) for i, x in enumerate(tree)]}
    if not isinstance(tree, np.ndarray | jax.Array):
        raise ValueError(f"{name} of a snapshot is a {type(tree).__name__}: bytes can hold lists, tuples and arrays")
    arrays[name] = np.asarray(tree)
    return {_ARRAY: name}


def _read_back(entry: Any, arrays: dict[str, np.ndarray]) -> PyTree:
    """Return the tree that `_written_out` wrote."""
    if entry is None:
        return None
    ((kind, value),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else [(None, entry)]
    if kind == _ARRAY:
        return arrays[value]
    if kind not in ("list", "tuple") or not isinstance(value, list):
        raise ValueError(f"a snapshot that cannot be read: {shown(entry)} is no page")
    return {"list": list, "tuple": tuple}[kind](_read_back(x, arrays) for x in value)


def _plain(identity: Identity) -> Identity:
    """Return an identity as JSON reads it back, so that two can be compared wherever they come from."""
    return json.loads(json.dumps(identity))


def identity(config: TargetConfig, cache: Cache) -> Identity:
    """Return what two engines must share to exchange pages: a configuration, and their caches' dtypes and scales."""
    dtypes = {
        f"dtype of {name} in stack {index}": str(array.dtype)
        for index, stack in enumerate(cache.stacks)
        for name, array in (("k", stack.k), ("v", stack.v), ("index_k", stack.index_k))
        if array is not None
    }
    # What float8 holds was divided by these numbers: under others it would be other keys.
    scales = {
        f"scales of float8 in stack {index}": [
            np.asarray(x, np.float32).tolist() for x in jax.tree.leaves(stack.scales)
        ]
        for index, stack in enumerate(cache.stacks)
        if FLOAT8 in (stack.k.dtype, None if stack.index_k is None else stack.index_k.dtype)
    }
    return {"config": config.to_dict()} | dtypes | scales


def check_snapshot(
    snapshot: Snapshot, expected: Identity, page_layout: PyTree[jax.ShapeDtypeStruct], page_size: int, vocab_size: int
) -> None:
    """Raise ValueError for a snapshot that is not whole, or not of this engine's model and cache.

    The prompt, and whether there is room, are left to the engine's own test of requests. The numbers in the pages
    cannot be checked: those of an edited page are taken as they are.

    Args:
      snapshot: as it came.
      expected: this engine's identity.
      page_layout: shapes and dtypes of one entry of `pages` in this engine.
      page_size: P.
      vocab_size: V.

    Raises:
      ValueError: the first thing that is wrong.
    """
    if not isinstance(snapshot, Snapshot):
        raise ValueError(f"import_request takes a Snapshot, got {type(snapshot).__name__}: see Snapshot.from_bytes")
    _check_identity(snapshot.identity, _plain(expected))
    for name in ("prompt", "new", "logprobs"):
        if not isinstance(getattr(snapshot, name), tuple):
            raise ValueError(f"the snapshot's {name} is {shown(getattr(snapshot, name))}: it must be a tuple")
    if not isinstance(snapshot.media, Media):
        raise ValueError(f"the snapshot's media is {shown(snapshot.media)}: it must be a Media")
    check_ids("the snapshot's new tokens", snapshot.new, vocab_size)
    if len(snapshot.logprobs) != len(snapshot.new) or not all(map(_is_finite, snapshot.logprobs)):
        count = len(snapshot.new)
        raise ValueError(f"the snapshot has {count} new tokens: it must have {count} finite log-probabilities too")
    if not isinstance(snapshot.top_logprobs, tuple) or len(snapshot.top_logprobs) not in (0, len(snapshot.new)):
        count = len(snapshot.new)
        raise ValueError(f"the snapshot's top_logprobs must be a tuple, empty or of {count} entries, one a new token")
    of_ids = (*CHOICES, SUPPORT)
    if not isinstance(snapshot.records, Mapping) or any(
        not isinstance(record, np.ndarray)
        or not jnp.issubdtype(record.dtype, jnp.signedinteger if name in of_ids else jnp.number)
        or len(record) != len(snapshot.new)
        for name, record in snapshot.records.items()
    ):
        count = len(snapshot.new)
        raise ValueError(
            f"the snapshot's records must be arrays of numbers by name (integers of {', '.join(of_ids)}), each with "
            f"{count} rows, one a new token"
        )
    count, cached = len(snapshot.prompt) + len(snapshot.new), snapshot.cached
    if not isinstance(cached, int) or isinstance(cached, bool) or not 0 <= cached < max(count, 1):
        raise ValueError(f"the snapshot's cached is {shown(cached)}: of {count} tokens 0 to {count - 1} are in pages")
    # What is no `Params` is refused with the request; until then it asks for nothing.
    asks_for_scores = getattr(snapshot.params, "prompt_logprobs", None) is not None
    wanted = min(cached, len(snapshot.prompt) - 1) if asks_for_scores else 0
    if not isinstance(snapshot.prompt_logprobs, tuple) or len(snapshot.prompt_logprobs) < wanted:
        raise ValueError(
            f"the snapshot's prompt_logprobs must be a tuple of {wanted} entries at least, one a cached token"
        )
    groups = math.ceil(cached / page_size / PAGES_A_CALL)
    if not isinstance(snapshot.pages, list) or len(snapshot.pages) != groups:
        found = f"{len(snapshot.pages)} entries" if isinstance(snapshot.pages, list) else shown(snapshot.pages)
        raise ValueError(f"the snapshot's pages are {found}: {cached} cached tokens need {groups} of {PAGES_A_CALL}")
    if problem := next((line for i, group in enumerate(snapshot.pages) for line in _unlike(group, page_layout, i)), ""):
        raise ValueError(problem)


def _check_identity(found: object, expected: Identity) -> None:
    """Raise ValueError, naming the first difference, if a snapshot is of another model or cache."""
    try:
        found = _plain(found)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("the snapshot does not say of which model and cache it is")
    if found.get("config") != expected.get("config") and isinstance(found.get("config"), dict):
        found, expected = found["config"], expected["config"]
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"the snapshot is of another model or cache: its {shown(name)[1:-1]} is {_said(found.get(name))}, this "
                f"engine's {_said(expected.get(name))}; import it into an engine of the same checkpoint and storage "
                "types"
            )


def _said(value: object) -> str:
    """Return a value of an identity as an error message shows it: text without quotes."""
    return shown(value)[1:-1] if isinstance(value, str) else shown(value)


def _unlike(group: PageContents, page_layout: PyTree[jax.ShapeDtypeStruct], index: int) -> Iterator[str]:
    """Yield the differences between an entry of a snapshot's pages and what this engine writes."""
    if jax.tree.structure(group) != jax.tree.structure(page_layout):
        yield f"pages[{index}] of the snapshot has other arrays than this engine's pages: it is not whole"
        return
    (found, _), (expected, _) = map(jax.tree_util.tree_flatten_with_path, (group, page_layout))
    for (path, array), (_, wanted) in zip(found, expected, strict=True):
        name = f"pages[{index}]{jax.tree_util.keystr(path)} of the snapshot"
        if not isinstance(array, np.ndarray | jax.Array):
            yield f"{name} is {shown(array)}: it must be an array"
        elif (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
            yield f"{name} is {array.dtype} {list(array.shape)}, this engine's {wanted.dtype} {list(wanted.shape)}"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def page_layout(groups: Sequence[PageContents]) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of what `Runner.read_pages` gives for a group of pages."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), groups[0])
