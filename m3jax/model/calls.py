"""Checks of a model's calls, and the compiled programs that run them."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np

from m3jax import arrays
from m3jax.model.choices import NAMES, Choices, shapes_of
from m3jax.model.names import as_pytrees, check_edits, check_names

SELECTIONS = (".blocks", ".expert_ids")  # values that are valid or not, whatever their shape
Method = TypeVar("Method", bound=Callable)
Body = Callable[..., Any]


def compiled(*static: str) -> Callable[[Method], Method]:
    """Make a method of the model one compiled program, unless it is called as a part of another one.

    Args:
      *static: names of the arguments whose values the program is compiled for.
    """

    def decorate(method):
        program = jax.jit(method, static_argnames=static)

        @wraps(method)
        def call(self, *args, **kwargs):
            run = method if arrays.is_traced(self, args, kwargs) else program
            return run(self, *args, **kwargs)

        return call

    return decorate


def model_call(body: Body, *static: str) -> Callable[[Any, dict[str, Any]], tuple[Body, dict[str, Any]]]:
    """Return a function of a model and a call's arguments that checks them and returns a runner and its arguments.

    The runner is `body`, compiled. While something else is traced it is `body` itself: a separate program would hide
    the call there.

    Args:
      body: Function of a model and the arguments, which it annotates.
      *static: Names of the arguments that the program is compiled for.
    """
    check, program = arrays.check_of(body, also=_check_call), jax.jit(body, static_argnames=static)

    def program_with_checks(*args, **kwargs):
        with arrays.checks():
            return program(*args, **kwargs)

    def prepare(model, call):
        edits, names, stop_at = call.get("edits"), call.get("names", ()), call.get("stop_at")
        if edits is not None:
            check_edits(edits, model.config, model.dense, stop_at)
            call |= {"edits": as_pytrees(edits)}
        if names or stop_at is not None:
            check_names(tuple(names), "names", model.config, model.dense, stop_at, also=NAMES)
            call |= {"names": tuple(names)}
        check(model, **call)
        if arrays.is_traced(model, call):
            return body, call
        # Whether an edited selection is possible is known when the program has run.
        changes_selection = any(name.endswith(SELECTIONS) for name in edits or ())
        return program_with_checks if changes_selection else program, call

    return prepare


def _check_call(arguments: dict[str, Any], sizes: dict[str, int]) -> None:
    """Raise ValueError for ids and lengths that the model does not have, if they are at hand; else under `checks()`.

    Padding may hold anything.
    """
    config, cache, tokens = arguments["model"].config, arguments.get("cache"), arguments["tokens"]
    positions, lengths = arguments.get("positions"), arguments.get("lengths")
    if cache is not None and (positions is None or lengths is None):
        raise ValueError("a call with a cache needs positions [B T] and lengths [B]")
    # The least of two rooms: the model's context, and the pages that a row of this cache can have.
    limit, where = config.max_position_embeddings, "the model's context is"
    if cache is not None and cache.table.shape[1] * cache.page_size < limit:
        limit, where = cache.table.shape[1] * cache.page_size, "a row of this cache has room for"
    batch, width = tokens.shape
    choices = arguments.get("choices")
    if choices is not None:
        for name, shape in shapes_of(config, batch, width).items():
            given = getattr(choices, name)
            if given is not None and given.shape != shape:
                raise ValueError(f"choices.{name} has shape {given.shape}, and this call of this model needs {shape}")
    if positions is None and width > limit:
        raise ValueError(f"tokens has {width} columns and {where} {limit} tokens: give fewer, or chunks with a cache")

    def find_problem(tokens, positions, lengths, *choices_of_tokens):
        if lengths.max() > limit or lengths.min() < 0:
            row = int(np.argmax((lengths > limit) | (lengths < 0)))
            return f"lengths[{row}] = {lengths[row]}: {where} {limit} tokens"
        # Indexing would clamp an id, or count it from the end: another token's embedding, in silence.
        is_wrong = (positions >= 0) & (positions < lengths[:, None]) & ((tokens < 0) | (tokens >= config.vocab_size))
        if is_wrong.any():
            row, column = (int(i) for i in np.argwhere(is_wrong)[0])
            return (
                f"tokens[{row}, {column}] = {tokens[row, column]}: token ids are 0 to {config.vocab_size - 1}; what "
                "only fills a row up must lie at or behind its length"
            )
        given_names = [name for name in NAMES if choices is not None and getattr(choices, name) is not None]
        given = Choices(**dict(zip(given_names, choices_of_tokens, strict=True)))
        return given.find_problem(config, positions, lengths)

    if arrays.is_checking() or not arrays.is_traced(tokens, positions, lengths, choices):
        if positions is None:
            positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
        if lengths is None:
            lengths = np.full(batch, width, np.int32)
        arrays.check_values(find_problem, tokens, positions, lengths, *jax.tree.leaves(choices))
