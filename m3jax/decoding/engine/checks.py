"""What an engine refuses to be made of."""

import math

import numpy as np

from m3jax.decoding.engine.runner import Shapes
from m3jax.decoding.protocols import TargetConfig, TargetModel
from m3jax.decoding.speculation.drafter import MAX_DRAFT_TOKENS, Drafter
from m3jax.model import M3


def check_sizes(sizes: dict[str, int]) -> None:
    """Raise ValueError for the first size that is no integer of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} = {size!r}: must be an integer of at least 1")


def check_max_length(max_length: int | None, pages: int, config: TargetConfig) -> int:
    """How many tokens a request can have; ValueError where more are asked for than pages and context allow."""
    in_pages = pages * config.index_block_size
    longest = min(config.max_position_embeddings, in_pages)
    if max_length is not None and max_length > longest:
        what = "the model's context" if longest < in_pages else f"{pages} pages of {config.index_block_size} tokens"
        raise ValueError(f"max_length = {max_length}: at most {longest} ({what})")
    return longest if max_length is None else max_length


def as_invariant(model: TargetModel, device_pages: int | None) -> TargetModel:
    """The model in its invariant mode; ValueError where it has none, or the engine could not keep it."""
    if not isinstance(model, M3):
        raise ValueError(f"invariant = True needs an M3, and the model is a {type(model).__name__}")
    if device_pages is not None:
        raise ValueError(
            "invariant = True with device_pages: what a pool's passes bring in depends on other requests; leave one out"
        )
    if model.mesh is not None and model.mesh.size > 1:
        raise ValueError("invariant = True with a mesh: sums over devices have no fixed order here; leave one out")
    return model.with_invariance()


def check_draft(draft: Drafter, draft_tokens: int, model: TargetModel, device_pages: int | None) -> None:
    """Raise ValueError where a draft cannot propose so many tokens to the model, or not beside host memory."""
    check_sizes({"draft_tokens": draft_tokens})
    if draft_tokens > MAX_DRAFT_TOKENS:
        raise ValueError(f"draft_tokens = {draft_tokens}: at most {MAX_DRAFT_TOKENS}")
    if device_pages is not None:
        raise ValueError("device_pages with a draft: the pool is for one token a row and step; leave one of them out")
    draft.check(model)


def check_device_pages(device_pages: int, model: TargetModel, shapes: Shapes) -> None:
    """Raise ValueError where a decode step could not have all that it selects, or a chunk not all that it writes."""
    if model.mesh is not None and model.mesh.size > 1:
        raise ValueError("device_pages on a mesh: host memory is for one device; leave device_pages out")
    page_size = model.config.index_block_size
    touched = lambda tokens: math.ceil((tokens - 1) / page_size) + 1  # pages that so many tokens lie in, at most
    decode_needs = shapes.batch * (model.config.index_topk_blocks + touched(shapes.steps) - 1)
    prefill_needs = shapes.prompts * touched(shapes.chunks[-1]) + 1
    if device_pages < max(decode_needs, prefill_needs):
        raise ValueError(
            f"device_pages = {device_pages}: a decode call of {shapes.batch} rows can need {decode_needs} pages at "
            f"once and a prefill call {prefill_needs}; give {max(decode_needs, prefill_needs)} or more, or a smaller "
            "max_batch, prefill_chunk or prefill_rows"
        )
