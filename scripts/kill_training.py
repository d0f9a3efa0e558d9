"""Kill a fine-tuning run at random moments, and compare its losses with those of a run that nobody disturbed.

    python scripts/kill_training.py --out runs/kill             # 20 kills
    python scripts/kill_training.py --out runs/kill --kills 2 --seed 3

What is trained is a table of bigrams, whose steps take no time, so that a kill meets the writing of a state as often as
a step; batches, states and metrics are those of `python -m m3jax.train sft`. The processes are forked from this one
before JAX begins any thread, and end by SIGKILL.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from m3jax.train.conversations import Example
from m3jax.train.sft import PackedBatches, SFTSettings, fine_tune
from m3jax.train.step import TrainState, make_optimizer

VOCABULARY = 64


def main() -> int:
    """Run undisturbed, then with kills; print what differs. The exit status is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    began = time.perf_counter()
    whole = args.out / "whole"
    if in_child(whole, args.steps, None) != 0:
        raise SystemExit("the undisturbed run failed")
    seconds, draw, kills = time.perf_counter() - began, np.random.default_rng(args.seed), 0
    killed = args.out / "killed"
    while True:
        # From the beginning of a process, before its first step, to about its end.
        moment = draw.uniform(0.2, 1.0) * seconds if kills < args.kills else None
        status = in_child(killed, args.steps, moment)
        if status == -signal.SIGKILL:
            kills += 1
        elif status != 0:
            raise SystemExit(f"a run that was killed {kills} times cannot go on")
        elif kills >= args.kills or moment is None:
            break
        else:  # it was done before its kill: begin a new one
            killed = args.out / f"killed-{kills}"
    differences = [name for name in ("loss", "grad_norm", "step") if column(killed, name) != column(whole, name)]
    found = f"other {', '.join(differences)}" if differences else "the same losses"
    print(f"{kills} kills, {len(column(killed, 'loss'))} steps: {found}")
    return int(bool(differences))


def in_child(folder: Path, steps: int, kill_after: float | None) -> int:
    """Train in a process of its own, and return how it ended: 0, or minus the signal.

    Args:
      folder, steps: as of `train`.
      kill_after: seconds; None lets it end by itself.
    """
    pid = os.fork()
    if pid == 0:
        try:
            train(folder, steps)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    deadline = None if kill_after is None else time.perf_counter() + kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.perf_counter() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = None
        time.sleep(0.005)


def bigram_loss(table, batch):
    """Return the loss of a table of logits, (loss, {"lm"})."""
    logits = jax.nn.log_softmax(table["logits"][batch["tokens"]])
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    loss = -jnp.sum(picked * batch["weights"]) / batch["num_targets"]
    return loss, {"lm": loss}


def train(folder: Path, steps: int) -> None:
    """Train, or go on, up to the last step."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(2, 64, 40)
    examples = [Example(draw.integers(0, VOCABULARY, n).astype(np.int32), draw.random(n) < 0.5) for n in lengths]
    settings = SFTSettings(steps=steps, length=128, accumulate=2, learning_rate=1e-2)
    optimizer = make_optimizer(settings.rate)
    table = {"logits": jnp.zeros((VOCABULARY, VOCABULARY))}
    put = lambda x: jax.device_put(x, jax.devices()[0])
    state = jax.tree.map(put, TrainState(jnp.int32(0), table, optimizer.init(table)))
    batches = PackedBatches(examples, settings, 8)
    fine_tune(state, batches, optimizer, bigram_loss, settings, folder, folder / "metrics.jsonl", save_every=5,
              say=lambda text: None)  # fmt: skip


def column(folder: Path, name: str) -> list[float]:
    """Return a figure of all steps of a run."""
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
