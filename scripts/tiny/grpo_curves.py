"""Trains the embedded checkpoint on `tiny/tool_calls.py`, with each replay and several seeds, and plots the rewards.

    python scripts/tiny/grpo_curves.py --out runs/grpo                        # all ways, three seeds
    python scripts/tiny/grpo_curves.py --out runs/grpo --ways none all        # without and with the three replays
    python scripts/tiny/grpo_curves.py --out runs/grpo --parallel 5           # on a GPU, or many cores

Each run is a `python -m m3jax.train grpo` whose folder is OUT/WAY-SEED: one that was stopped goes on, one that is whole
is not run again. In bfloat16, within top-p 0.95: what the replays are there for. "float32" is without both. A line a
round says whose it is; what a run says beside is in OUT/WAY-SEED/log. The minutes to a reward of 0.9 are those of the
rounds, compiling included. Figures that --json has of runs which OUT does not have stay there.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

TASK = Path(__file__).resolve().parent / "tool_calls.py"
SHARED = ("--max-new-tokens", "64", "--learning-rate", "1e-4")
NARROW = ("--dtype", "bfloat16", "--top-p", "0.95")
WAYS = {
    "float32": (),
    "none": NARROW,
    "experts": (*NARROW, "--replay", "experts"),
    "blocks": (*NARROW, "--replay", "blocks"),
    "support": (*NARROW, "--replay", "support"),
    "all": (*NARROW, "--replay", "experts,blocks,support"),
}
KEPT = ("reward_mean", "k3_kl", "token_mult_prob_error", "tokens_mean", "seconds", "seconds_drawing")
COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all of them")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"], help="default: 0 1 2")
    parser.add_argument("--steps", type=int, default=20, help="rounds of 8 x 8 answers (default: 20)")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--json", type=Path, default=Path("docs/data/grpo_tool_calls.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/data/grpo_tool_calls.png"))
    args = parser.parse_args()
    run_all(args)
    earlier = json.loads(args.json.read_text(encoding="utf-8")) if args.json.is_file() else {}
    curves = earlier | collect(args.out)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    for name, curve in curves.items():
        rewards, minutes = curve["reward_mean"], minutes_to(curve)
        print(f"{name}: {rewards[0]:.2f} in the first of {len(rewards)} rounds, {np.mean(rewards[-3:]):.2f} in the "
              f"last three; 0.9 {'not reached' if minutes is None else f'after {minutes:.1f} minutes'}; "
              f"k3_kl {np.mean(curve['k3_kl']):.2g}, {np.median(curve['seconds']):.1f} s a round")  # fmt: skip
    if curves:
        plot(curves, args.plot)


def run_all(args: argparse.Namespace) -> None:
    """Run all ways and seeds that were asked for, some at a time."""
    # All ways of one seed before the next: what a run that is stopped leaves out is the same of each.
    runs = [(f"{way}-{seed}", way, seed) for seed, way in product(args.seeds, args.ways)]
    with ThreadPoolExecutor(args.parallel) as pool:
        started = []
        for name, way, seed in runs:
            words = ["--seed", seed, "--steps", str(args.steps), *SHARED, *WAYS[way]]
            started.append(pool.submit(train, args.out / name, words, args.parallel))
        for run in started:
            run.result()


def train(folder: Path, words: Sequence[str], parallel: int) -> None:
    """Run one way with one seed, from wherever its folder is, and print its rounds.

    Args:
      folder: Folder of the run.
      words: Words of the command, beside task and folder.
      parallel: Runs that share the machine: each takes its part of a GPU's memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / parallel:.3f}"} | os.environ
    command = [sys.executable, "-m", "m3jax.train", "grpo", "--task", str(TASK), "--out", str(folder), *words]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    with (folder / "log").open("a", encoding="utf-8") as log:
        for line in run.stderr:
            log.write(line)
            log.flush()
            if line.startswith("round "):
                print(f"{folder.name}: {line}", end="", flush=True)
    if status := run.wait():
        print(f"{folder.name}: ended with {status}: see {folder / 'log'}", flush=True)


def minutes_to(curve: Mapping[str, Sequence[float]], wanted: float = 0.9) -> float | None:
    """Return the minutes that a run took to the end of the first round of that reward; None if there is none."""
    reached = np.flatnonzero(np.array(curve["reward_mean"]) >= wanted)
    return float(np.sum(curve["seconds"][: reached[0] + 1])) / 60 if len(reached) else None


def collect(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each run by round, in the order of `WAYS`."""
    curves = {}
    for way in WAYS:
        for file in sorted(folder.glob(f"{way}-*/metrics.jsonl")):
            rounds = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if rounds:
                curves[file.parent.name] = {name: [line[name] for line in rounds] for name in KEPT}
    return curves


def plot(curves: dict[str, dict[str, list[float]]], file: Path) -> None:
    """Plot the reward of each round, a color a way, and the mismatch beneath."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5.5), sharex=True, layout="constrained")
    ways = [way for way in WAYS if any(name.startswith(f"{way}-") for name in curves)]
    for way, color in zip(WAYS, COLORS, strict=True):
        for number, curve in enumerate(c for name, c in curves.items() if name.startswith(f"{way}-")):
            rounds = np.arange(1, len(curve["reward_mean"]) + 1)
            label = way if number == 0 else None
            above.plot(rounds, curve["reward_mean"], color=color, label=label, linewidth=1.2)
            below.plot(rounds, np.maximum(curve["k3_kl"], 1e-16), color=color, linewidth=1.2)
    above.axhline(0.9, color="grey", linewidth=0.6, linestyle=":")
    above.set(ylabel="mean reward of a round", ylim=(0, 1.02))
    below.set(ylabel="k3_kl, trainer to engine", xlabel="round of 64 answers", yscale="log")
    if len(ways) > 1:
        above.legend(title="replay", fontsize=8, ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
