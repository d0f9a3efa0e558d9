"""What docs/tiny.md says of a trained checkpoint."""

from typing import Any

import jax
import numpy as np

from m3jax.evaluate.caught import caught_by_distance
from m3jax.evaluate.perplexity import validation_loss
from m3jax.evaluate.recall import recall_accuracy
from m3jax.model import M3
from m3jax.progress import activity
from m3jax.train.data import Corpus, PlainBatches


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
    count, batch = (4, 4) if short else (256, 16)
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
