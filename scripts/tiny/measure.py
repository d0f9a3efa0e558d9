"""The measurements of a trained checkpoint that docs/tiny.md reports."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32
from tiny.corpus import Corpus
from tiny.data import Batch, PlainBatches

from m3jax.evaluate.caught import caught_by_distance
from m3jax.evaluate.prompts import DISTRACTORS, Haystack, fill
from m3jax.evaluate.reading import Reading, token_scores
from m3jax.model import M3
from m3jax.progress import activity


def measure(model: M3, corpus: Corpus, short: bool, dense: bool) -> dict[str, Any]:
    """Validation loss, recall by distance, and the attention mass that selection catches.

    Args:
      model: fused, or under any schedule.
      corpus: held-out code.
      short: a little of it, to see that everything works.
      dense: leave out what is about selection.

    Returns:
      By name, as docs/tiny.md reports it.
    """
    seq_len = 256 if short else 4096
    plain = PlainBatches(corpus, seq_len, 2 if short else 8)
    batches = [plain[i] for i in range(min(len(plain), 2 if short else 8))]
    distances = (64, 128) if short else (64, 256, 512, 1024, 2048, 3072, 3584)
    count, batch = (4, 2) if short else (256, 16)
    report = {"parameters": sum(x.size for x in jax.tree.leaves(model))}
    with activity(about=(seq_len, count)) as line:
        with line.timed("measuring the validation loss"):
            report["validation_loss"] = validation_loss(model, batches)
        report["recall"] = {}
        for distance in distances:
            with line.timed(f"measuring recall over {distance} tokens"):
                report["recall"] |= recall_accuracy(model, corpus, [distance], count, seq_len, batch=batch)
        if dense:
            return report
        with line.timed("measuring the validation loss with dense attention"):
            report["validation_loss_with_dense_attention"] = validation_loss(model.with_dense(), batches)
        tokens = np.concatenate([b["tokens"][:2, :-1] for b in batches])
        first = seq_len // 2 if short else None
        with line.timed("measuring the attention that selection catches"):
            mass = caught_by_distance(model, tokens, first).sum(axis=-1).astype(float).round(4)  # [L K W]
        report |= {"caught": mass[:, :, 1].tolist(), "caught_by_random_blocks": mass[:, :, 2].tolist()}
    return report


def validation_loss(model: M3, batches: Iterable[Batch]) -> float:
    """Mean cross-entropy of the next token, in nats, over batches of code; at least one batch is needed.

    Args:
      model: any M3; it reads whole rows without a cache, as in training.
      batches: of `tiny.data`, rows of one length each; a token counts by its weight.
    """
    losses, weights = [], []
    for batch in batches:
        scores = token_scores(model, list(batch["tokens"]), Reading(chunk=0, batch=len(batch["tokens"])))
        losses += [loss for loss, _ in scores]
        weights += list(batch["weights"])
    return float(np.average(np.concatenate(losses), weights=np.concatenate(weights)))


def recall_accuracy(
    model: M3, corpus: Corpus, distances: Iterable[int], count: int, seq_len: int, seed: int = 0, batch: int = 16
) -> dict[int, float]:
    """Share of values recalled exactly, by tokens from the value's definition to the answer.

    Args:
      model: any M3 whose tokenizer is the corpus's; it reads whole rows without a cache, as in training.
      corpus: held-out code that the records stand in.
      distances: as for `recall_probe`; each value is defined once.
      count: questions a distance.
      seq_len: tokens of a prompt.
      seed: of the questions.
      batch: prompts of one call.

    Returns:
      Share from 0 to 1 by distance.
    """
    accuracy = {}
    for distance in distances:
        prompts, answers = recall_probe(corpus, distance, count, seq_len, seed)
        rows = list(np.concatenate([prompts, answers[:, None]], axis=1))
        scores = token_scores(model, rows, Reading(chunk=0, batch=batch))
        accuracy[distance] = float(np.mean([is_best[-1] for _, is_best in scores]))
    return accuracy


def haystack_of(corpus: Corpus) -> Haystack:
    """The text and the records of a training corpus.

    Args:
      corpus: one in whose tokenizer each word is a single token.
    """
    records = corpus.records
    questions = [np.array([records.newline, records.hash, word, records.arrow], np.int32) for word in records.words]
    return Haystack(corpus, tuple(questions), tuple(np.array([word], np.int32) for word in records.words))


def recall_probe(
    corpus: Corpus, distance: int, count: int, seq_len: int, seed: int, distractors: int = DISTRACTORS
) -> tuple[Int32[np.ndarray, "C T"], Int32[np.ndarray, " C"]]:
    """Prompts that end in `# key ->`, each key defined once, a given number of tokens before.

    Args:
      corpus: where the code around comes from.
      distance: tokens from the defining value to the answer, which is the token after the prompt; from 5 to
        seq_len - 4.
      count: number of prompts, C.
      seq_len: tokens of a prompt, T.
      seed: of the whole set, not negative.
      distractors: other records; see `m3jax.evaluate.prompts.fill`.

    Returns:
      The prompts, and the answers' token ids.
    """
    rng, haystack = np.random.default_rng(seed), haystack_of(corpus)
    prompts, answers = [], []
    for _ in range(count):
        key, value, *spare = rng.permutation(len(haystack.questions)).tolist()
        gaps = [seq_len - distance - 4, distance - 5]
        row = fill(rng, haystack, gaps, [haystack.line(key, value)], spare, distractors)
        prompts.append(np.concatenate([row, haystack.questions[key]]))
        answers.append(haystack.answers[value][0])
    return np.stack(prompts), np.array(answers, np.int32)
