"""Teach the embedded checkpoint to see: a small tower and projector, trained on pictures that are drawn here.

    python scripts/train_vision.py --out runs/vision                 # all weights, pictures beside text
    python scripts/train_vision.py --out runs/tower --train vision   # the tower alone: no bit of the text moves
    python scripts/train_vision.py --out runs/try --short            # six small steps, to see that everything works

The run keeps its state under OUT/state and writes a checkpoint in the hub's layout to OUT/model, with what was
measured in OUT/report.json. See docs/tiny.md.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from tiny.arguments import add_run_arguments, add_tuning_arguments, corpora, keep_model, keep_report, mismatch
from tiny.corpus import Corpus
from tiny.dialogues import DialogueBatches, measure_dialogues
from tiny.losses import KEYS, TinyLoss
from tiny.measure import measure
from tiny.pictures import Alternating, PictureBatches, held_out_tasks, picture_accuracy, with_tower

import m3jax
from m3jax.media import PlaceholderIds
from m3jax.model import M3
from m3jax.progress import activity
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.train.fused import fuse
from m3jax.train.run import Batches, Stage, run_stages, under
from m3jax.train.step import TrainState, cast_weights, init_state, make_optimizer
from m3jax.vision import VisionConfig

# Rows of pictures are short: among fifty dialogues, which of them a question is about is learned slowly.
# Text is first attended to densely: under selection the index loss sees selected blocks alone, so that neither
# attention nor index finds what is not selected yet, like a tool's name thousands of tokens before the call.
STAGES = {
    "all": (Stage("pictures, dense", 1000, 512, 64, False), Stage("pictures", 1800, 512, 64, True)),
    "vision": (Stage("pictures", 2400, 512, 64, True),),
}
SHORT = {"steps": 3, "batch": 2}
TEXT_EVERY, TEXT_SHAPE = 2, (4096, 16)  # under "all" every other batch is of text: tokens of a row, rows
# What train_chat.py leaves hardest: a document between the tools and the question, and most documents long.
TEXT_SHARES, LONG_DOCUMENTS, DIALOGUES = (0.15, 0.05, 0.05, 0.6, 0.15), 0.6, 0.625
TEXT_RATE, VISION_RATE = 5e-4, 2e-3  # learning rates
CHECK_EVERY = 800  # steps
CHECKED, MEASURED = 32, 250  # pictures of each kind that are asked about during the run, and after it


def tower(ids: PlaceholderIds) -> VisionConfig:
    """The tower and the projector: 0.9 million parameters, 1.9 MB in a checkpoint.

    Args:
      ids: of the placeholders.
    """
    return VisionConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384, projector_hidden_size=192,
        image_token_id=ids.image, video_token_id=ids.video,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, train, measure."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.workers < 0:
        parser.error("--workers is at least 0")
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("train", "short", "seed")
    if reason := mismatch(args.out, {name: getattr(args, name) for name in names} | {"model": str(args.model)}):
        parser.error(reason)
    tokenizer, template = Tokenizer.from_pretrained(args.model), ChatTemplate.from_folder(args.model)
    splits = corpora(tokenizer, args) if args.train == "all" else {}
    base = m3jax.load(args.model, dtype="float32")
    begin = time.perf_counter()
    state = train(args, base, splits.get("train"), tokenizer, template)
    print(f"trained in {time.perf_counter() - begin:.0f} s", flush=True)
    model = keep_model(state.model, args.model, args.out / "model")
    begin = time.perf_counter()
    report = measure_pictures(fuse(model), tokenizer, template, 1 if args.short else MEASURED)
    if args.train == "all":
        report |= measure(fuse(model), splits["validation"], args.short, False)
        report["dialogues"] = measure_dialogues(model, splits["validation"], tokenizer, template, args.short)
    else:
        report["text_is_unchanged"] = is_same_text(model, cast_weights(base, "bfloat16"))
    keep_report(report, args.out)
    print(f"measured in {time.perf_counter() - begin:.0f} s", flush=True)


def train(
    args: argparse.Namespace, base: M3, corpus: Corpus | None, tokenizer: Tokenizer, template: ChatTemplate
) -> TrainState:
    """Run what is left of the steps, keeping the state as it goes."""
    stages = [replace(stage, **(SHORT if args.short else {})) for stage in STAGES[args.train]]
    trains_text = args.train == "all"
    num_steps = sum(stage.steps for stage in stages)
    optimizer = _optimizer(num_steps, TEXT_RATE, VISION_RATE, frozen_text=not trains_text)
    # Without the text there is nobody to learn which blocks to select, and no load to balance.
    parts = dict(recall_weight=2.0) if trains_text else dict(kl_weight=0.0)
    return run_stages(
        args.out / "state",
        stages,
        init_state(with_tower(base, tower(PlaceholderIds.of_tokenizer(tokenizer)), args.seed), optimizer),
        optimizer,
        TinyLoss(fused=True, **parts),
        batches=lambda stage: make_batches(stage, args, corpus, tokenizer, template),
        schedule="mask",
        keys=KEYS,
        shared={"teacher": base} if trains_text else None,
        balance_rate=1e-3 if trains_text else 0.0,
        workers=args.workers,
        check=None if args.short else checker(tokenizer, template),
        check_every=CHECK_EVERY,
    )


def make_batches(
    stage: Stage, args: argparse.Namespace, corpus: Corpus | None, tokenizer: Tokenizer, template: ChatTemplate
) -> Batches:
    """Make batches of pictures and, if text is trained too, of dialogues and code."""
    pictures = PictureBatches(tokenizer, template, stage.seq_len, stage.batch, args.seed)
    if corpus is None:
        return pictures
    length, rows = (stage.seq_len, stage.batch) if args.short else TEXT_SHAPE
    text = DialogueBatches(corpus, tokenizer, template, length, rows, args.seed, DIALOGUES, TEXT_SHARES, LONG_DOCUMENTS)
    return Alternating(pictures, text, TEXT_EVERY)


def checker(tokenizer: Tokenizer, template: ChatTemplate) -> Callable[[TrainState], None]:
    """Return a function that reports now and then how many of some held-out pictures are answered right."""
    tasks = held_out_tasks(CHECKED)

    def check(state: TrainState) -> None:
        model = fuse(cast_weights(under(state.model, "mask"), "bfloat16"))
        print(f"{'right':>14} {picture_accuracy(model, tokenizer, template, tasks)}", flush=True)

    return check


def measure_pictures(model: M3, tokenizer: Tokenizer, template: ChatTemplate, count: int) -> dict[str, Any]:
    """The share of right answers, by kind of question: on new pictures of known things, and on new things.

    Args:
      model: with a tower.
      tokenizer: the model's.
      template: its chat template.
      count: pictures of each kind.
    """
    vision = sum(leaf.nbytes for leaf in jax.tree.leaves(model.vision))
    report: dict[str, Any] = {"vision_bytes": vision, "pictures_of_each_kind": count}
    with activity(about=count) as line:
        for name, new_pairs in (("pictures", False), ("pictures_of_new_pairs", True)):
            with line.timed("asking about held-out pictures"):
                tasks = held_out_tasks(count, new_pairs=new_pairs)
                report[name] = picture_accuracy(model, tokenizer, template, tasks, min(64, len(tasks)))
    return report


def is_same_text(model: M3, base: M3) -> bool:
    """Return True if two models have equal text weights."""
    parts = lambda m: jax.tree.leaves((m.embed_tokens, m.stacks, m.norm, m.lm_head))
    return all(np.array_equal(a, b) for a, b in zip(parts(model), parts(base), strict=True))


@cache
def _optimizer(num_steps: int, rate: float, vision_rate: float, frozen_text: bool) -> optax.GradientTransformation:
    """Return one optimiser for equal settings: `train_step` is compiled for the object."""
    warmup_steps = min(100, num_steps // 4 + 1)
    rising = lambda rate: optax.warmup_cosine_decay_schedule(0.0, rate, warmup_steps, num_steps, 0.0)
    return make_optimizer(rising(rate), vision_rate=rising(vision_rate), frozen_text=frozen_text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    add_tuning_arguments(parser, most_workers=12)
    parser.add_argument("--train", choices=tuple(STAGES), default="all", help="all weights, on pictures and text; or "
                        "vision alone, which leaves the text model as it is (default %(default)s)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
