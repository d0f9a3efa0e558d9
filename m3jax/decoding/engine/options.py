"""An engine's options: where it keeps what it has computed, and how it cuts work into device calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from m3jax.cache import Scales
from m3jax.decoding.engine.checks import check_sizes
from m3jax.decoding.protocols import RECORDS
from m3jax.decoding.sampling import MAX_TOP_LOGPROBS
from m3jax.messages import check_keywords


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The storage of an engine: where it keeps what it has computed, and how much of it.

    Attributes:
      pages: of the pool; a page is one block of the model.
      max_length: tokens that one request can have; by default, and at most, what the pages and the model's context
        allow.
      prefix_cache: whether requests share the pages of equal beginnings.
      kv_dtype: of stored keys and values; the model's by default.
      index_dtype: of stored index keys; the model's by default.
      scales: for float8 (`m3jax.cache.measure_scales`).
      device_pages: keys and values of sparse layers are in host memory and `pages` counts those; the device has room
        for this many of them in each layer, and keeps what was used last. Index keys and dense layers stay on it.
      host_memory: "pinned_host", "numpy", or "auto": the first of them that the device has.
      media_tokens: features of images and videos that the device keeps, for prompts that are not through and for the
        next one with the same picture; None is 16,384, or more where a chunk of a prompt can need more. Each takes as
        much memory as the embedding of a token.

    Raises:
      ValueError: a size below 1.
    """

    pages: int
    max_length: int | None = None
    prefix_cache: bool = True
    kv_dtype: str | None = None
    index_dtype: str | None = None
    scales: tuple[Scales, ...] | None = None
    device_pages: int | None = None
    host_memory: str = "auto"
    media_tokens: int | None = None

    def __post_init__(self):
        optional = dict(max_length=self.max_length, device_pages=self.device_pages)
        check_sizes({"pages": self.pages} | {name: size for name, size in optional.items() if size is not None})


@dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes of an engine's device calls, which decide the programs that are compiled.

    Attributes:
      max_batch: rows that decode together.
      decode_rows: rows of smaller decode calls, a program each: where fewer requests decode, the smallest call that
        holds them runs. A CPU computes for each row, whether it is used or not; an accelerator reads the weights, and
        gains little. () is none, as on a mesh.
      prefill_chunk: prompt tokens of a row in one device call; it bounds the memory of prefill, and how long the others
        wait. Of several sizes what is left takes the smallest that holds it, or two calls of a smaller one if that is
        less to compute. None is 256 and 2,048, on a GPU 8,192 too, on a CPU 256 and 512, as far as `max_length` goes.
      prefill_rows: prompts that share a call.
      steps_per_call: decode steps in one device call. More is faster, fewer react sooner.
      max_stop_ids: of one request.
      max_biases: tokens with a `Sampling.logit_bias` of one request; 0 is none. They are kept as ids and numbers, not
        as a number for each token of the vocabulary: 64 of them take 512 bytes of a row in place of 800 kB, which
        would be sent with each chunk of a prompt.
      max_bad_words: `Sampling.bad_words` of one request, of up to 8 tokens each; 0 is none.
      max_top_logprobs: the largest `Params.top_logprobs`, 0 to 20. They are only computed while some request asks.
      records: what requests will ask to be recorded (`Params.record`): `warmup` then compiles each program that can
        record a second time, with these. What is not named here is compiled by the first call that records it.
      edits: names of the values that a request can change by vectors (`Engine.add`), of width D: "embedding",
        "final_norm", and of a layer "layers.3." and input, attention_norm, attention_out, ffn_norm, ffn_out or output;
        "layers.*." for all layers.
      prompt_logprobs: whether requests will ask for `Params.prompt_logprobs`: `warmup` then compiles each size of
        prefill a second time. Else the first such request does.
      media_patches: patches in one call of the vision tower, a program a size. An image, or a chunk of a video, runs
        alone in the smallest that holds it, and no larger one is taken. None is 256, 1,024, 2,304 (the hub's largest
        image) and 12,288 (its largest chunk) where the model has a tower; () serves text alone.

    Raises:
      ValueError: a size below 1.
    """

    max_batch: int = 8
    decode_rows: Sequence[int] = ()
    prefill_chunk: int | Sequence[int] | None = None
    prefill_rows: int = 1
    steps_per_call: int = 16
    max_stop_ids: int = 8
    max_biases: int = 64
    max_bad_words: int = 16
    max_top_logprobs: int = MAX_TOP_LOGPROBS
    records: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    media_patches: int | Sequence[int] | None = None
    dispatch_ahead: bool | None = None

    def __post_init__(self):
        names = ("max_batch", "prefill_rows", "steps_per_call", "max_stop_ids")
        check_sizes({name: getattr(self, name) for name in names})
        check_sizes({name: getattr(self, name) for name in ("max_biases", "max_bad_words", "max_top_logprobs")}, 0)
        if unknown := [name for name in self.records if name not in RECORDS]:
            raise ValueError(f"records has {unknown[0]!r}: choose of {', '.join(RECORDS)}")
        if self.max_top_logprobs > MAX_TOP_LOGPROBS:
            raise ValueError(f"max_top_logprobs = {self.max_top_logprobs}: at most {MAX_TOP_LOGPROBS}")


class EngineKnobs(TypedDict, total=False):
    """The attributes of `Storage` and of `Work` as keywords, for `**knobs: Unpack[EngineKnobs]`."""

    pages: int
    max_length: int | None
    prefix_cache: bool
    kv_dtype: str | None
    index_dtype: str | None
    scales: tuple[Scales, ...] | None
    device_pages: int | None
    host_memory: str
    media_tokens: int | None
    max_batch: int
    decode_rows: Sequence[int]
    prefill_chunk: int | Sequence[int] | None
    prefill_rows: int
    steps_per_call: int
    max_stop_ids: int
    max_biases: int
    max_bad_words: int
    max_top_logprobs: int
    records: tuple[str, ...]
    edits: tuple[str, ...]
    prompt_logprobs: bool
    media_patches: int | Sequence[int] | None
    dispatch_ahead: bool | None


def as_options(
    storage: Storage | None, work: Work | None, knobs: Mapping[str, Any], called: Callable
) -> tuple[Storage, Work]:
    """Return what a caller gave, as objects or as keywords of both.

    Args:
      storage: None where its attributes are given as keywords.
      work: the same.
      knobs: the keywords.
      called: name of the function or class that was given them, for the message about an unknown keyword.

    Raises:
      TypeError: an unknown keyword, or no `pages`.
      ValueError: an object and keywords of it.
    """
    check_keywords(knobs, EngineKnobs.__annotations__, called)
    return _object_of(Storage, storage, "storage", knobs), _object_of(Work, work, "work", knobs)


def _object_of(kind: type, given: Any, name: str, knobs: Mapping[str, Any]) -> Any:
    """Return the object that was given, or else one made of its attributes among the keywords."""
    own = {field.name: knobs[field.name] for field in fields(kind) if field.name in knobs}
    if given is None:
        return kind(**own)
    if own:
        raise ValueError(f"{name} and {', '.join(own)}: give the object or keywords, not both")
    return given
