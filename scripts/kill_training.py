"""Kill a training run at random moments, and compare its losses with those of a run that nobody disturbed.

    python scripts/kill_training.py --out runs/kill             # 20 kills
    python scripts/kill_training.py --out runs/kill --kills 2 --seed 3
    python scripts/kill_training.py --out runs/kill --kind grpo --steps 40

What is fine-tuned is a table of bigrams, whose steps take no time, so that a kill meets the writing of a state as often
as a step; batches, states and metrics are those of `python -m m3jax.train sft`. With grpo it is a model of two small
layers, its engine and `train_policy`, in bfloat16 with experts and blocks replayed; compiled programs come from the
cache in --out. The processes are forked from this one before JAX begins any thread, and end by SIGKILL.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from m3jax.assets import embedded_path
from m3jax.compile_cache import FOLDER_VARIABLE, compile_cache
from m3jax.config import SPARSE, M3Config
from m3jax.model import init
from m3jax.text import Tokenizer
from m3jax.train.conversations import Example
from m3jax.train.grpo import RunSettings, train_policy
from m3jax.train.rewards import TaskFile
from m3jax.train.sft import PackedBatches, SFTSettings, fine_tune
from m3jax.train.step import TrainState, make_optimizer

VOCABULARY = 64


def main() -> int:
    """Run undisturbed, then with kills; print what differs. The exit status is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--kind", choices=tuple(KINDS), default="sft")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    train, figures = KINDS[args.kind]
    whole = args.out / "whole"
    if args.kind == "grpo":
        os.environ[FOLDER_VARIABLE] = str(args.out / "cache")
        in_child(partial(train, args.out / "first", 2), None)  # compiles
    began = time.perf_counter()
    if in_child(partial(train, whole, args.steps), None) != 0:
        raise SystemExit("the undisturbed run failed")
    seconds, draw, kills = time.perf_counter() - began, np.random.default_rng(args.seed), 0
    say = lambda text: print(f"{time.perf_counter() - began:5.0f} s: {text}", flush=True)
    say(f"{len(column(whole, 'loss'))} steps undisturbed")
    whole_seconds, number, differences = seconds, 1, set()
    while True:
        killed = args.out / f"killed-{number}"
        # From the beginning of a process, before its first step, to about its end.
        moment = draw.uniform(0.2, 1.0) * whole_seconds if kills < args.kills else None
        status = in_child(partial(train, killed, args.steps), moment)
        if status == -signal.SIGKILL:
            kills += 1
            say(f"kill {kills} of {args.kills}, {moment:.1f} s after the start of {killed.name}")
            continue
        if status != 0:
            raise SystemExit(f"a run that was killed {kills} times cannot go on")
        other = [name for name in figures if column(killed, name) != column(whole, name)]
        say(f"{killed.name} is done: {'other ' + ', '.join(other) if other else 'the same figures of all steps'}")
        differences |= set(other)
        if kills >= args.kills:
            break
        number += 1  # it was done before its kill: begin a new one
    found = f"other {', '.join(sorted(differences))}" if differences else "the same losses"
    print(f"{kills} kills, {len(column(killed, 'loss'))} steps in {whole_seconds:.0f} s undisturbed: {found}")
    return int(bool(differences))


def in_child(train: Callable[[], None], kill_after: float | None) -> int:
    """Train in a process of its own, and return how it ended: 0, or minus the signal.

    Args:
      train: trains, or goes on, up to the last step.
      kill_after: seconds; None lets it end by itself.
    """
    pid = os.fork()
    if pid == 0:
        try:
            train()
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


def fine_tune_a_table(folder: Path, steps: int) -> None:
    """Train a table of bigrams, or go on, up to the last step."""
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


class Letters(TaskFile):
    """A task in the process of the run: answers are rewarded for their letters."""

    has_tools, weights = False, {"letters": 1.0}

    def __init__(self):
        pass

    def prompts(self):
        return [{"prompt": f"{name} = sorted({name}s)  # "} for name in ("row", "line", "word")]

    def reward_parts(self, rows, completions, group=1):
        return {"letters": [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]}


def learn_from_rewards(folder: Path, steps: int) -> None:
    """Train a small model by rewards, or go on, up to the last round."""
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    config = M3Config.tiny(num_hidden_layers=2, layer_types=(SPARSE,) * 2, mlp_layer_types=("sparse",) * 2,
                           vocab_size=tokenizer.vocab_size)  # fmt: skip
    settings = RunSettings(
        steps=steps, prompts=2, answers=4, max_new_tokens=8, learning_rate=3e-3, compute_dtype="bfloat16",
        replay=("expert_ids", "blocks"), save_every=2,
    )  # fmt: skip
    with compile_cache():
        train_policy(init(config, 0), tokenizer, None, Letters(), settings, folder, folder / "metrics.jsonl",
                     lambda text: None)  # fmt: skip


def column(folder: Path, name: str) -> list[float]:
    """Return a figure of all steps of a run."""
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# What trains, and the figures of a line that must be the same.
KINDS = {
    "sft": (fine_tune_a_table, ("loss", "grad_norm", "step")),
    "grpo": (learn_from_rewards, ("loss", "grad_norm", "step", "reward_mean", "kl", "k3_kl")),
}

if __name__ == "__main__":
    sys.exit(main())
