"""Fine-tune the embedded checkpoint for a chat: keys of a document, look-ups and sums by tools, reasoning on and off.

    python scripts/train_chat.py --out runs/chat            # train, or go on where the run stopped
    python scripts/train_chat.py --out runs/try --short     # six small steps, to see that everything works

The run keeps its state under OUT/state and writes a checkpoint in the hub's layout to OUT/model, with what was
measured in OUT/report.json. See docs/tiny.md.
"""

import argparse
import json
import shutil
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import optax

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import save
from m3jax.evaluate.checkpoint import measure
from m3jax.model import M3
from m3jax.msa import SCHEDULES
from m3jax.progress import activity
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.train.data import Corpus
from m3jax.train.dialogues import KINDS, MODES, DialogueBatches, Task, dialogue_accuracy, draw_task
from m3jax.train.fused import fuse
from m3jax.train.run import Stage, mismatch, run_stages, under
from m3jax.train.step import TrainOptions, TrainState, cast_weights, init_state, make_optimizer

STAGES = (Stage("dialogues", 2000, 4096, 16, True),)
SHORT = (Stage("dialogues", 6, 512, 2, True),)
HELD_OUT_SEED = 2**31  # no training run has it
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, train, measure."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("short", "seed", "learning_rate", "dialogue_fraction", "schedule")
    if reason := mismatch(args.out, {name: getattr(args, name) for name in names} | {"model": str(args.model)}):
        parser.error(reason)
    tokenizer, template = Tokenizer.from_pretrained(args.model), ChatTemplate.from_folder(args.model)
    corpora = {
        split: Corpus.build(tokenizer, split, cache=args.out / f"{split}.npz", root=args.sources)
        for split in ("train", "validation")
    }
    begin = time.perf_counter()
    state = train(args, corpora["train"], tokenizer, template)
    print(f"trained in {time.perf_counter() - begin:.0f} s", flush=True)
    model = cast_weights(under(state.model, "mask"), "bfloat16")
    save(model, args.out / "model")
    for name in FILES:
        shutil.copy(args.model / name, args.out / "model" / name)
    begin = time.perf_counter()
    report = measure(fuse(model), corpora["validation"], args.short, False)
    report["dialogues"] = measure_dialogues(model, corpora["validation"], tokenizer, template, args.short)
    (args.out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(json.dumps(report, indent=2))
    print(f"measured in {time.perf_counter() - begin:.0f} s", flush=True)


def train(args: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer, template: ChatTemplate) -> TrainState:
    """Run what is left of the steps, keeping the state as it goes."""
    stages = SHORT if args.short else STAGES
    fused = args.schedule == "fused"
    optimizer = _optimizer(sum(stage.steps for stage in stages), args.learning_rate)
    model = m3jax.load(args.model, dtype="float32")
    return run_stages(
        args.out / "state",
        stages,
        init_state(model, optimizer),
        optimizer,
        TrainOptions(recall_weight=2.0, fused=fused),
        batches=lambda stage: DialogueBatches(
            corpus, tokenizer, template, stage.seq_len, stage.batch, args.seed, args.dialogue_fraction
        ),
        schedule="mask" if fused else args.schedule,
    )


def held_out(corpus: Corpus, tokenizer: Tokenizer, count: int, document_tokens: int) -> list[Task]:
    """Dialogues of each kind and thinking mode, from code that no training row has.

    Args:
      corpus: the validation split.
      tokenizer: the corpus's.
      count: of each kind and mode.
      document_tokens: length of the longest document; they are spread evenly up to it.
    """
    rng = np.random.default_rng(HELD_OUT_SEED)
    lengths = np.linspace(min(64, document_tokens), document_tokens, count).astype(int)
    return [
        draw_task(rng, corpus, tokenizer, int(length), kind, mode)
        for kind in KINDS
        for mode in MODES
        for length in lengths
    ]


def measure_dialogues(
    model: M3, corpus: Corpus, tokenizer: Tokenizer, template: ChatTemplate, short: bool
) -> dict[str, dict]:
    """What the model makes of held-out dialogues, by kind, with documents of up to 3,000 tokens."""
    tasks = held_out(corpus, tokenizer, count=1 if short else 64, document_tokens=128 if short else 3000)
    with activity(about=len(tasks)) as line, line.timed("playing held-out dialogues"):
        return dialogue_accuracy(model, tokenizer, template, tasks)


@cache
def _optimizer(num_steps: int, learning_rate: float) -> optax.GradientTransformation:
    """One object for the same settings: `train_step` is compiled for the object."""
    warmup_steps = min(100, num_steps // 4 + 1)
    return make_optimizer(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, num_steps, 0.0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--model", type=Path, default=embedded_path(), help="what to begin with; the embedded checkpoint"
    )
    parser.add_argument("--short", action="store_true", help="a few tiny steps, to see that everything works")
    parser.add_argument("--sources", type=Path, help="a standard library's folder; the running Python's by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--dialogue-fraction", type=float, default=0.625, help="share of rows with dialogues; the "
                        "others are those that the checkpoint was trained on (default %(default)s)")  # fmt: skip
    parser.add_argument(
        "--schedule",
        default="fused",
        choices=("fused", *SCHEDULES),
        help="sparse attention in training: m3jax.train.fused, or a schedule of m3jax.msa (default %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
