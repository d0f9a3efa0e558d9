"""Trains the embedded checkpoint on `tiny/tool_calls.py`, with each replay and several seeds, and plots the rewards.

    python scripts/tiny/grpo_curves.py --out runs/grpo                       # all ways, three seeds
    python scripts/tiny/grpo_curves.py --out runs/grpo --ways all --seeds 0  # one run
    python scripts/tiny/grpo_curves.py --out runs/grpo --only-plot           # of the runs that there are

Each run is a `python -m m3jax.train grpo` whose folder is OUT/WAY-SEED: one that was stopped goes on, one that is whole
is not run again. In bfloat16, within top-p 0.95: what the replays are there for. "float32" is without both.
"""

import argparse
import json
import subprocess
import sys
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
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default: all of them)")
    parser.add_argument("--seeds", default="0,1,2", help="default: 0,1,2")
    parser.add_argument("--steps", type=int, default=20, help="rounds of 8 x 8 answers (default: 20)")
    parser.add_argument("--only-plot", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, default=Path("docs/data/grpo_tool_calls.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/data/grpo_tool_calls.png"))
    args = parser.parse_args()
    if unknown := [way for way in args.ways.split(",") if way not in WAYS]:
        parser.error(f"--ways {unknown[0]}: choose of {', '.join(WAYS)}")
    if not args.only_plot:
        for seed in map(int, args.seeds.split(",")):
            for way in args.ways.split(","):
                train(args.out / f"{way}-{seed}", way, seed, args.steps)
    curves = collect(args.out)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    plot(curves, args.plot)
    for name, curve in curves.items():
        rewards = curve["reward_mean"]
        print(f"{name}: {rewards[0]:.2f} in the first round, {np.mean(rewards[-3:]):.2f} in the last three")


def train(folder: Path, way: str, seed: int, steps: int) -> None:
    """Run one way with one seed, from wherever its folder is."""
    words = ["--task", str(TASK), "--out", str(folder), "--steps", str(steps), "--seed", str(seed), *SHARED, *WAYS[way]]
    subprocess.run([sys.executable, "-m", "m3jax.train", "grpo", *words], check=True)


def collect(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each run by round, in the order of `WAYS`."""
    curves = {}
    for way in WAYS:
        for file in sorted(folder.glob(f"{way}-*/metrics.jsonl")):
            rounds = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
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
