"""Fine-tune the embedded checkpoint for a chat: keys of a document, look-ups and sums by tools, reasoning on and off.

    python scripts/train_chat.py --out runs/chat            # train, or go on where the run stopped
    python scripts/train_chat.py --out runs/try --short     # six small steps, to see that everything works

The run keeps its state under OUT/state and writes a checkpoint in the hub's layout to OUT/model, with what was
measured in OUT/report.json. See docs/tiny.md.
"""

import argparse
import sys
import time
from functools import cache

import optax
from tiny.arguments import add_run_arguments, add_tuning_arguments, corpora, keep_model, keep_report, mismatch
from tiny.corpus import Corpus
from tiny.dialogues import DialogueBatches, measure_dialogues
from tiny.losses import KEYS, TinyLoss
from tiny.measure import measure

import m3jax
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.train.fused import fuse
from m3jax.train.run import Stage, run_stages
from m3jax.train.step import TrainState, init_state, make_optimizer

STEPS, SHORT_STEPS = 1400, 6
LEARNING_RATE = 3e-4


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, train, measure."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.workers < 0:
        parser.error("--workers is at least 0")
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("short", "seed", "dialogue_fraction")
    if reason := mismatch(args.out, {name: getattr(args, name) for name in names} | {"model": str(args.model)}):
        parser.error(reason)
    tokenizer, template = Tokenizer.from_pretrained(args.model), ChatTemplate.from_folder(args.model)
    splits = corpora(tokenizer, args)
    begin = time.perf_counter()
    state = train(args, splits["train"], tokenizer, template)
    print(f"trained in {time.perf_counter() - begin:.0f} s", flush=True)
    model = keep_model(state.model, args.model, args.out / "model")
    begin = time.perf_counter()
    report = measure(fuse(model), splits["validation"], args.short, False)
    report["dialogues"] = measure_dialogues(model, splits["validation"], tokenizer, template, args.short)
    keep_report(report, args.out)
    print(f"measured in {time.perf_counter() - begin:.0f} s", flush=True)


def train(args: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer, template: ChatTemplate) -> TrainState:
    """Run what is left of the steps, keeping the state as it goes."""
    steps, seq_len, rows = (SHORT_STEPS, 512, 2) if args.short else (STEPS, 4096, 16)
    optimizer = _optimizer(steps, LEARNING_RATE)
    model = m3jax.load(args.model, dtype="float32")
    return run_stages(
        args.out / "state",
        [Stage("dialogues", steps, seq_len, rows, sparse=True)],
        init_state(model, optimizer),
        optimizer,
        TinyLoss(recall_weight=2.0, fused=True),
        batches=lambda stage: DialogueBatches(
            corpus, tokenizer, template, stage.seq_len, stage.batch, args.seed, args.dialogue_fraction
        ),
        schedule="mask",
        keys=KEYS,
        workers=args.workers,
        # Its own predictions are the targets in code, so that it is not forgotten nor learned by heart.
        shared={"teacher": model},
    )


@cache
def _optimizer(num_steps: int, learning_rate: float) -> optax.GradientTransformation:
    """Return one optimiser for equal settings: `train_step` is compiled for the object."""
    warmup_steps = min(100, num_steps // 4 + 1)
    return make_optimizer(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, num_steps, 0.0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    add_tuning_arguments(parser, most_workers=6)
    parser.add_argument("--dialogue-fraction", type=float, default=0.5, help="share of rows with dialogues; the "
                        "others are those that the checkpoint was trained on (default %(default)s)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
