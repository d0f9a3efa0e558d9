"""The five tasks: for each a preparation before the model is loaded, the measurement, and a table."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from m3jax.completion import named_drafter
from m3jax.config import M3Config
from m3jax.evaluate.acceptance import acceptance, acceptance_table
from m3jax.evaluate.caught import caught_by_distance, caught_figures, caught_table, default_first
from m3jax.evaluate.divergence import check_reference, divergence, divergence_table
from m3jax.evaluate.dumps import read_dump
from m3jax.evaluate.perplexity import perplexity, perplexity_table
from m3jax.evaluate.prompts import Haystack
from m3jax.evaluate.reading import Reading
from m3jax.evaluate.recall import Grid, recall, recall_table
from m3jax.evaluate.subjects import Subject, read_texts, spread, tokenised
from m3jax.model import M3
from m3jax.progress import activity
from m3jax.text import Tokenizer

ALL_TOKENS = 1 << 62
Figures = dict[str, Any]


class Task(NamedTuple):
    """One task: its preparation, its measurement, and its table.

    Attributes:
      prepare: of (arguments, subject, mesh) to what does not need the weights; it raises what is wrong with either.
      measure: of (arguments, subject, model, what was prepared) to the figures.
      table: of figures to lines, a column for each result.
    """

    prepare: Callable[[argparse.Namespace, Subject, Mesh | None], Any]
    measure: Callable[[argparse.Namespace, Subject, M3, Any], Figures]
    table: Callable[[Sequence[Mapping[str, Any]]], list[list[str]]]


def context_of(args: argparse.Namespace, config: M3Config, default: int, more: int = 0) -> int:
    """Return the tokens of a window: those asked for, or the task's default as far as the model's context allows.

    Args:
      args: with `context`, which may be None.
      config: of the model.
      default: the task's own.
      more: tokens that come after them.

    Raises:
      ValueError: more than the model's context.
    """
    limit = config.max_position_embeddings - more
    if args.context is not None and args.context > limit:
        raise ValueError(f"--context {args.context}: the model reads {limit} tokens at most here; give fewer")
    return min(default, limit) if args.context is None else args.context


def _prepare_perplexity(args, subject, mesh):
    context = context_of(args, M3Config.from_pretrained(subject.path), 2048)
    skip = context // 2 if args.skip is None else args.skip
    if skip >= context:
        raise ValueError(f"--skip {skip}: windows have {context} tokens; give fewer, or a larger --context")
    return tokenised(Tokenizer.from_pretrained(subject.path), read_texts(args.text), args.tokens), context, skip


def _measure_perplexity(args, subject, model, prepared):
    texts, context, skip = prepared
    how = subject.reading(model, Reading(args.chunk, args.batch), texts[0].tokens)
    return {"context": context, "skip": skip, **perplexity(model, texts, context, skip, how)}


def _prepare_recall(args, subject, mesh):
    limit = M3Config.from_pretrained(subject.path).max_position_embeddings
    if max(args.lengths) > limit:
        raise ValueError(f"--lengths {max(args.lengths)}: the model reads {limit} tokens at most; give fewer")
    haystack = Haystack.of_texts(Tokenizer.from_pretrained(subject.path), read_texts(args.text))
    grid = Grid.of(haystack, args.kinds, args.lengths, args.depths, args.repeats, args.seed)
    return grid, haystack.run.tokens


def _measure_recall(args, subject, model, prepared):
    grid, tokens = prepared
    return recall(model, grid, subject.reading(model, Reading(args.chunk, args.batch), tokens))


def _prepare_kl(args, subject, mesh):
    dumps = read_dump(args.reference)
    check_reference(dumps, M3Config.from_pretrained(subject.path), args.skip)
    return dumps


def _measure_kl(args, subject, model, dumps):
    how = subject.reading(model, Reading(args.chunk, args.batch), np.asarray(dumps[0].tokens))
    return divergence(model, dumps, args.skip, how)


def _prepare_caught(args, subject, mesh):
    config = M3Config.from_pretrained(subject.path)
    first = default_first(config) if args.skip is None else args.skip
    context = context_of(args, config, 4 * default_first(config))
    if first >= context:
        raise ValueError(f"--skip {first}: rows have {context} tokens; give fewer, or a larger --context")
    texts = tokenised(Tokenizer.from_pretrained(subject.path), read_texts(args.text), ALL_TOKENS)
    return np.stack(spread(texts, args.prompts, context)), first


def _measure_caught(args, subject, model, prepared):
    rows, first = prepared
    about, text = (model.config, subject, rows.shape), f"measuring the attention of {rows.size:,} tokens"
    with activity(about=about) as line, line.timed(text):
        mass = caught_by_distance(model, rows, first)
    return caught_figures(model.config, mass, first, rows.shape[1])


def _prepare_acceptance(args, subject, mesh):
    config = M3Config.from_pretrained(subject.path)
    if args.draft is None and subject.folder is not None:
        raise ValueError("--task acceptance with a model of your own needs --draft: an EAGLE3 draft's folder, or ngram")
    context = context_of(args, config, 64, args.max_new_tokens)
    texts = tokenised(Tokenizer.from_pretrained(subject.path), read_texts(args.text), ALL_TOKENS)
    return named_drafter(args.draft or "builtin", config, subject.dtype, mesh), spread(texts, args.prompts, context)


def _measure_acceptance(args, subject, model, prepared):
    draft, prompts = prepared
    found = acceptance(
        model, draft, prompts, max_new_tokens=args.max_new_tokens, draft_tokens=args.draft_tokens,
        temperatures=args.temperatures, seed=args.seed,
        how=subject.reading(model, Reading(args.chunk, args.batch), prompts[0]),
    )  # fmt: skip
    return {"draft": args.draft or "builtin", "draft_tokens": args.draft_tokens, "temperatures": found}


TASKS = {
    "perplexity": Task(_prepare_perplexity, _measure_perplexity, perplexity_table),
    "recall": Task(_prepare_recall, _measure_recall, recall_table),
    "kl": Task(_prepare_kl, _measure_kl, divergence_table),
    "caught": Task(_prepare_caught, _measure_caught, caught_table),
    "acceptance": Task(_prepare_acceptance, _measure_acceptance, acceptance_table),
}
