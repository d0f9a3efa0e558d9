"""Arguments, settings and checkpoints that the training scripts share."""

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny.corpus import Corpus

from m3jax.assets import embedded_path
from m3jax.checkpoint import save
from m3jax.model import M3
from m3jax.text import Tokenizer
from m3jax.train.run import under
from m3jax.train.step import cast_weights

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every training script has: --out, --short, --sources, --seed."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--short", action="store_true", help="a few tiny steps, to see that everything works")
    parser.add_argument("--sources", type=Path, help="a standard library's folder; the running Python's by default")
    parser.add_argument("--seed", type=int, default=0)


def add_tuning_arguments(parser: argparse.ArgumentParser, most_workers: int) -> None:
    """Add the arguments of a script that continues from a checkpoint: --model, --workers.

    Args:
      parser: of the script.
      most_workers: processes that are enough for its batches; by default two cores are left to the rest.
    """
    workers = max(0, min(most_workers, (os.cpu_count() or 1) - 2))
    parser.add_argument(
        "--model", type=Path, default=embedded_path(), help="what to begin with; the embedded checkpoint"
    )
    parser.add_argument("--workers", type=int, default=workers, help="processes that make batches, 0 for a thread; "
                        "they are the same (default here: %(default)s)")  # fmt: skip


def corpora(tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Corpus]:
    """Return the splits "train" and "validation" of a script's sources, kept in its folder."""
    return {
        split: Corpus.build(tokenizer, split, cache=args.out / f"{split}.npz", root=args.sources)
        for split in ("train", "validation")
    }


def keep_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write what was measured to report.json in a folder, and print it."""
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / "report.json").write_text(text + "\n")
    print(text)


def keep_model(model: M3, base: Path, folder: Path, schedule: str = "mask") -> M3:
    """Write a trained model as a checkpoint, with the text files of another one.

    Args:
      model: Float32 master weights, under any schedule.
      base: Folder of the checkpoint that has the text files.
      folder: Folder to write to.
      schedule: Schedule of the model that is returned.

    Returns:
      The model as it was written, in bfloat16.
    """
    model = cast_weights(under(model, schedule), "bfloat16")
    save(model, folder)
    for name in FILES:
        shutil.copy(base / name, folder / name)
    return model


def mismatch(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return why the run in a folder cannot go on under some settings, or None; a new folder keeps the settings.

    Args:
      folder: of the run.
      settings: by name, of kinds that JSON has.

    Returns:
      The reason; None where it can go on.
    """
    path = folder / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2) + "\n")
        return None
    before = json.loads(path.read_text())
    wrong = [f"{k} = {before.get(k)!r}, not {v!r}" for k, v in settings.items() if before.get(k) != v]
    return f"{folder} holds a run with {'; '.join(wrong)}: give the same, or another --out" if wrong else None
