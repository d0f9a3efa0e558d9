"""Checks of an engine's arguments, and of the requests that it has room for."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from m3jax.decoding.engine.media import MEDIA_PATCHES, MEDIA_TOKENS
from m3jax.decoding.engine.request import Params
from m3jax.decoding.engine.runner import PROGRAMS
from m3jax.decoding.engine.shapes import Shapes
from m3jax.decoding.protocols import OF_DRAWS, NamedModel, TargetConfig, TargetModel, sees
from m3jax.decoding.sampling import check_slots
from m3jax.decoding.speculation.drafter import MAX_DRAFT_TOKENS, Drafter
from m3jax.decoding.steering import STEERED, Steer, check_steering
from m3jax.media.sizes import MERGE
from m3jax.messages import shown
from m3jax.platform import platform


def check_sizes(sizes: dict[str, int], smallest: int = 1) -> None:
    """Raise ValueError for the first size that is not an integer of at least 1, or of another smallest one."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < smallest:
            raise ValueError(f"{name} = {size!r}: must be an integer of at least {smallest}")


def chunk_sizes(prefill_chunk: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a prefill call, ascending; ValueError if there is none, or one is not a positive integer."""
    sizes = tuple(prefill_chunk) if isinstance(prefill_chunk, Sequence) else (prefill_chunk,)
    if not sizes:
        raise ValueError("prefill_chunk = (): give at least one size")
    check_sizes({f"prefill_chunk[{i}]": size for i, size in enumerate(sizes)})
    return tuple(sorted(sizes))


def decode_sizes(decode_rows: Sequence[int], max_batch: int, model: TargetModel) -> tuple[int, ...]:
    """Return the rows of the smaller decode calls, ascending; ValueError for one of `max_batch`, and on a mesh."""
    check_sizes({f"decode_rows[{i}]": size for i, size in enumerate(decode_rows)})
    if decode_rows and max(decode_rows) >= max_batch:
        raise ValueError(f"decode_rows has {max(decode_rows)}: must be below max_batch, which is {max_batch}")
    if decode_rows and model.mesh is not None:
        raise ValueError("decode_rows on a mesh: leave it out, each device decodes the rows that it holds")
    return tuple(sorted(set(decode_rows)))


def check_warmup(programs: Sequence[str], longest: int | None) -> None:
    """Raise ValueError if there is no such program to compile, or no such prompt to compile it for."""
    if unknown := [name for name in programs if name not in PROGRAMS]:
        raise ValueError(f"programs = {tuple(programs)}: there is no {unknown[0]!r}; choose of {PROGRAMS}")
    check_sizes({} if longest is None else dict(longest=longest))


def check_max_length(max_length: int | None, pages: int, config: TargetConfig) -> int:
    """Return the most tokens that a request can have; ValueError if pages or context allow fewer than asked for."""
    in_pages = pages * config.index_block_size
    longest = min(config.max_position_embeddings, in_pages)
    if max_length is not None and max_length > longest:
        what = "the model's context" if longest < in_pages else f"{pages} pages of {config.index_block_size} tokens"
        raise ValueError(f"max_length = {max_length}: at most {longest} ({what})")
    return longest if max_length is None else max_length


def check_dispatch_ahead(asked: bool | None, device_pages: int | None) -> bool:
    """Return whether an engine launches calls ahead; ValueError if it is asked to and cannot."""
    if asked not in (True, False, None):
        raise ValueError(f"dispatch_ahead = {shown(asked)}: must be True, False or None")
    if asked and device_pages is not None:
        raise ValueError(
            "dispatch_ahead with device_pages: what a call writes goes to host memory before the next one is launched; "
            "leave one of the two out"
        )
    return (platform() != "cpu" and device_pages is None) if asked is None else asked


def as_invariant(model: TargetModel) -> TargetModel:
    """Return the model in its invariant mode; ValueError if it has none."""
    with_invariance = getattr(model, "with_invariance", None)  # as `M3` has it
    if with_invariance is None:
        raise ValueError(f"invariant = True needs an M3, and the model is a {type(model).__name__}")
    return with_invariance()


def media_sizes(
    patches: int | Sequence[int] | None, tokens: int | None, model: TargetModel, shapes: Shapes
) -> tuple[tuple[int, ...], int]:
    """Return the patches in calls of the tower, ascending, and the features that the device keeps; () and 0 for text.

    Raises:
      ValueError: sizes that are none, or that the tower cannot have, too few features for a chunk of a prompt, or a
        model without a tower.
    """
    if not sees(model):
        raise ValueError(f"media_patches = {patches}: the model has no vision tower; leave it out")
    if patches is None:
        patches = MEDIA_PATCHES
    sizes = tuple(sorted(patches)) if isinstance(patches, Sequence) else (patches,)
    check_sizes({f"media_patches[{i}]": size for i, size in enumerate(sizes)})
    if uneven := [size for size in sizes if size % MERGE**2]:
        raise ValueError(f"media_patches = {uneven[0]}: a feature has {MERGE**2} patches; give a multiple of that")
    if not sizes:
        return (), 0
    # The features that a chunk of the oldest prompt needs must always find room. A chunk may begin and end inside a
    # segment, or inside two where an image stands between a video's frames.
    needed = shapes.chunks[-1] + 4 * (sizes[-1] // MERGE**2)
    if tokens is None:
        tokens = max(MEDIA_TOKENS, needed)
    check_sizes({"media_tokens": tokens})
    if tokens < needed:
        raise ValueError(
            f"media_tokens = {tokens}: a chunk of {shapes.chunks[-1]} tokens can need {needed} features; give that "
            "many, or a smaller media_patches or prefill_chunk"
        )
    return sizes, tokens


def check_draft(draft: Drafter, draft_tokens: int, model: TargetModel, device_pages: int | None) -> None:
    """Raise ValueError if a draft cannot propose so many tokens to the model, or cannot run beside host memory."""
    check_sizes({"draft_tokens": draft_tokens})
    if draft_tokens > MAX_DRAFT_TOKENS:
        raise ValueError(f"draft_tokens = {draft_tokens}: at most {MAX_DRAFT_TOKENS}")
    if device_pages is not None:
        raise ValueError("device_pages with a draft: the pool is for one token a row and step; leave one of them out")
    draft.check(model)


def check_device_pages(device_pages: int, model: TargetModel, shapes: Shapes) -> None:
    """Raise ValueError on a mesh, or if the pool is too small for the pages of a decode call or of a prefill call."""
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


def check_room(prompt: Sequence[int], params: Params, max_length: int, shapes: Shapes) -> None:
    """Raise ValueError for a request that an engine has no room for.

    Args:
      prompt: token ids.
      params: how it goes on.
      max_length: tokens that a request of the engine can have.
      shapes: the engine's.

    Raises:
      ValueError: the request would have more tokens, stop ids, biases, bad words or alternatives.
    """
    asked = len(prompt) + params.max_new_tokens
    if asked > max_length:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens with max_new_tokens = {params.max_new_tokens} needs room for "
            f"{asked} tokens and a request of this engine can have {max_length}: ask for less, or make the "
            "engine with more pages or a larger max_length"
        )
    if len(params.stop_ids) > shapes.stop_ids:
        raise ValueError(f"{len(params.stop_ids)} stop ids: this engine takes {shapes.stop_ids} (max_stop_ids)")
    check_slots(params.sampling, shapes.biases, shapes.bad_words)
    for name in ("top_logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > shapes.top_logprobs:
            asked = getattr(params, name)
            raise ValueError(f"{name} = {asked}: this engine gives {shapes.top_logprobs} (max_top_logprobs)")


def check_goes_on(new: Sequence[int], params: Params, name: str) -> None:
    """Raise ValueError if a request that has some new tokens already, called `name`, would not go on under params.

    Raises:
      ValueError: it has as many new tokens as the params allow.
    """
    if params.max_new_tokens <= len(new):
        raise ValueError(f"max_new_tokens = {params.max_new_tokens}: {name} has {len(new)} already")


def check_order(n: object, priority: object, deadline: object) -> None:
    """Raise ValueError for requests of a group, a priority or a deadline that are none."""
    check_sizes({} if n is None else {"n": n})
    if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
        raise ValueError(f"priority = {priority!r}: must be an integer; a higher one is served first")
    is_number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if deadline is not None and (not is_number or not 0 < deadline < math.inf):
        raise ValueError(f"deadline = {deadline!r}: must be a number of seconds above 0, or None")


def check_same_shapes(old: TargetModel, new: TargetModel) -> None:
    """Raise ValueError unless the programs that run one model run the other one too.

    Raises:
      ValueError: names the first parameter of another shape, dtype or place, or says that the models differ otherwise.
    """
    if not isinstance(new, TargetModel):
        raise ValueError(f"model is a {type(new).__name__}, which an engine cannot serve: give one from m3jax.load")
    by_name = lambda model: {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]
    }
    old_leaves, new_leaves = by_name(old), by_name(new)
    for name, leaf in new_leaves.items():
        known = old_leaves.get(name)
        if known is None:
            raise ValueError(f"the new model has a parameter {name} that the engine's model lacks: make a new engine")
        if (leaf.shape, leaf.dtype) != (known.shape, known.dtype):
            raise ValueError(
                f"parameter {name} of the new model is {leaf.dtype} {leaf.shape}, and the engine's is {known.dtype} "
                f"{known.shape}: give one of the same shapes, or make a new engine"
            )
        if not leaf.sharding.is_equivalent_to(known.sharding, leaf.ndim):
            raise ValueError(f"parameter {name} of the new model lies on other devices: load it with the engine's mesh")
    if missing := old_leaves.keys() - new_leaves.keys():
        raise ValueError(f"the new model lacks the parameter {min(missing)}: make a new engine")
    if type(old) is not type(new) or jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "the new model is computed in another way (schedule, backend, score, invariance ...), or its configuration "
            "differs: call the same with_... methods, or make a new engine"
        )


def check_records(names: Sequence[str], model: TargetModel) -> None:
    """Raise ValueError if a model cannot say what is to be recorded."""
    if set(names).difference(OF_DRAWS) and not isinstance(model, NamedModel):
        raise ValueError(f"record = {tuple(names)}: a {type(model).__name__} does not say what its layers choose")


def captured_names(names: Sequence[str], model: TargetModel) -> tuple[str, ...]:
    """Return the names of captured values in full; ValueError if a model has no such values."""
    if not names:
        return ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"capture = {shown(names)}: give names of values, as ('layers.3.output',)")
    if not isinstance(model, NamedModel):
        raise ValueError(f"capture = {tuple(names)}: a {type(model).__name__} does not name its values")
    return model.recorded_names(tuple(names))


def checked_edits(
    edits: Mapping[str, Steer] | None, names: Sequence[str], model: TargetModel
) -> dict[str, Steer] | None:
    """Return a request's edits by full names, None if there are none; ValueError for those that an engine cannot make.

    Args:
      edits: by name.
      names: of the values that requests of the engine can change.
      model: the engine's.
    """
    if edits is not None and not isinstance(edits, Mapping):
        raise ValueError(f"edits = {shown(edits)}: give Steer objects by name, as {{'layers.3.output': Steer(add=v)}}")
    if not edits:
        return None
    if not names:
        raise ValueError(
            f"edits has {next(iter(edits))!r}: make the engine with edits=(...), the names of what changes"
        )
    full = {name: steer for given, steer in edits.items() for name in captured_names((given,), model)}
    check_steering(full, names, model.config.hidden_size)
    return full


def edited_names(names: Sequence[str], model: TargetModel) -> tuple[str, ...]:
    """Return the names of the values that requests can change in full; ValueError if they cannot be steered."""
    for name in (full := captured_names(names, model)):
        if name.rpartition(".")[2] not in STEERED:
            raise ValueError(
                f"edits has {name!r}: requests can change {', '.join(STEERED)}, which have one vector a token"
            )
    return full
