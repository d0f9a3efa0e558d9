"""`python -m m3jax.train`: train a model on a task of one's own (docs/training.md)."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

import argparse
import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from m3jax.console import Parser, run_command, run_program, say
from m3jax.hosts.arguments import add_hosts
from m3jax.train.convert_command import convert_parser, run_convert
from m3jax.train.options import add_options, check_options, remat_of, run_on_hosts
from m3jax.train.sft_command import merge_parser, run_merge, run_sft, sft_parser

if TYPE_CHECKING:
    from m3jax.hosts.channel import Channel
    from m3jax.train.grpo import RunSettings

PROG = "m3jax.train"
COMMANDS = {"sft": (sft_parser, run_sft), "merge": (merge_parser, run_merge), "convert": (convert_parser, run_convert)}
REPLAY = {"experts": "expert_ids", "blocks": "blocks", "support": "support"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status, as `m3jax.console.run_command` has it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in COMMANDS:
        prog, (make_parser, run_one) = f"{PROG} {words[0]}", COMMANDS[words[0]]
        return run_command(prog, make_parser(prog), run_one, words[1:])
    return run_command(PROG, parser(), run, words)


def parser() -> Parser:
    """Return the parser of the command line's arguments."""
    out = Parser(PROG, "Train a model: grpo draws groups of answers, rewards them by a task, and learns from them. "
                 "sft learns from conversations, merge adds adapters to weights, and convert makes an MSA model of a "
                 "dense one: see sft --help, merge --help, convert --help.")  # fmt: skip
    out.add_argument("kind", choices=("grpo", "sft", "merge", "convert"))
    add_options(out, "--model")
    out.add_argument("--task", metavar="FILE", required=True, help="Python, with prompts() and reward(prompts, "
                     "completions, **columns)")  # fmt: skip
    add_options(out, "--out")
    add_options(out, "--steps", help="rounds of drawing and learning")
    add_options(out, "--metrics", help="JSON lines, one a round (default: OUT/metrics.jsonl)")
    sizes = out.add_argument_group("a round")
    sizes.add_argument("--prompts", metavar="N", type=int, default=8, help="default: 8")
    sizes.add_argument("--answers", metavar="N", type=int, default=8, help="to each prompt (default: 8)")
    sizes.add_argument("--max-new-tokens", metavar="N", type=int, default=128, help="of an answer (default: 128)")
    sizes.add_argument("--temperature", metavar="X", type=float, default=1.0, help="of the draws (default: 1)")
    sizes.add_argument("--top-k", metavar="N", type=int, help="draw from so many tokens")
    sizes.add_argument("--top-p", metavar="X", type=float, help="draw from the fewest tokens of this probability")
    sizes.add_argument("--min-p", metavar="X", type=float, help="draw from tokens this times as probable as the best")
    sizes.add_argument("--turns", metavar="N", type=int, default=4, help="of an episode, at most, where a task has "
                       "tools (default: 4)")  # fmt: skip
    sizes.add_argument("--tool-tokens", metavar="N", type=int, default=64, help="between two turns (default: 64)")
    sizes.add_argument("--epochs", metavar="N", type=int, default=1, help="optimiser steps on a round's answers "
                       "(default: 1)")  # fmt: skip
    sizes.add_argument("--rows", metavar="N", type=int, help="answers drawn side by side (default: all of a round)")
    learning = out.add_argument_group("learning")
    add_options(learning, "--learning-rate", "--warmup-steps", "--weight-decay")
    learning.add_argument("--baseline", choices=("grpo", "dr_grpo", "rloo"), default="grpo", help="default: grpo")
    learning.add_argument("--ratio", choices=("token", "sequence"), default="token", help="sequence is GSPO (default: "
                          "token)")  # fmt: skip
    learning.add_argument("--clip", metavar="LOW,HIGH", type=_pair, default=(0.2, 0.28), help="default: 0.2,0.28")
    learning.add_argument("--dual-clip", metavar="X", type=_or_none, default=10.0, help="times that a negative "
                          "advantage counts at most, or none (default: 10)")  # fmt: skip
    learning.add_argument("--mean", choices=("token", "sequence", "constant"), default="token", help="of the loss: "
                          "over tokens, over answers, or over max-new-tokens of each (default: token)")  # fmt: skip
    learning.add_argument("--kl", metavar="X", type=float, default=0.0, help="weight of the divergence from the first "
                          "weights (default: 0)")  # fmt: skip
    learning.add_argument("--old", choices=("trainer", "engine"), default="trainer", help="whose log-probabilities "
                          "ratios are taken against (default: trainer)")  # fmt: skip
    learning.add_argument("--tis", choices=("token", "sequence"), help="weigh by the ratio of trainer to engine, "
                          "truncated at 2")  # fmt: skip
    learning.add_argument("--reject", metavar="LEVEL,K,NATS", type=_reject, help="leave out each token or sequence "
                          "whose divergence of trainer and engine, k1 or k3, is above NATS: token,k3,0.1")  # fmt: skip
    add_options(learning, "--seed")
    ways = out.add_argument_group("how it is computed")
    of_dtype = "of engine and trainer; master weights are float32 (default: float32)"
    add_options(ways, "--dtype", default="float32", help=of_dtype)
    ways.add_argument("--replay", metavar="NAMES", default="", help="of experts, blocks and support, with commas: "
                      "what the trainer takes from the engine's records")  # fmt: skip
    ways.add_argument("--invariant", action="store_true", help="engine and trainer compute the same bits; the run "
                      "ends where they do not")  # fmt: skip
    ways.add_argument("--remat", action="store_true", help="recompute activations: less memory, slower")
    add_options(ways, "--keep-products")
    add_options(ways, "--save-every", default=10, help="rounds after which the state is kept (default: 10)")
    ways.add_argument("--reward-seconds", metavar="S", type=float, default=60.0, help="that one call of reward() may "
                      "take (default: 60)")  # fmt: skip
    add_options(ways, "--mesh")
    add_hosts(out)
    return out


def run(args: argparse.Namespace) -> int:
    """Train as the parsed arguments ask for.

    Raises:
      ValueError: a bad argument, a folder or a task that cannot be used.
      OSError: a file that cannot be read or written.
    """
    if args.kind != "grpo":
        raise ValueError(f"{args.kind}: write it before all other arguments")
    check_options(args)
    names = [name for name in args.replay.split(",") if name]
    if unknown := [name for name in names if name not in REPLAY]:
        raise ValueError(f"--replay {unknown[0]}: choose of {', '.join(REPLAY)}")
    if not Path(args.task).is_file():
        raise ValueError(f"--task {args.task}: no such file")
    settings = _settings(args, names)
    args.out.mkdir(parents=True, exist_ok=True)
    return run_on_hosts(args, f"{PROG} grpo", lambda channel: _train(args, settings, channel))


def _settings(args: argparse.Namespace, replay: Sequence[str]) -> "RunSettings":
    """Return the settings of the run that the parsed arguments ask for."""
    from m3jax.decoding import Sampling
    from m3jax.train.grpo import RunSettings
    from m3jax.train.policy import Correction, PolicyLoss

    low, high = args.clip
    level, divergence, nats = args.reject or (None, "k3", 1.0)
    correction = Correction(weigh=args.tis, reject=level, divergence=divergence, reject_above=nats)
    loss = PolicyLoss(
        clip_low=low, clip_high=high, dual_clip=args.dual_clip, level=args.ratio, mean=args.mean,
        tokens=args.max_new_tokens if args.mean == "constant" else 0, kl_weight=args.kl, correction=correction,
    )  # fmt: skip
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    return RunSettings(
        steps=args.steps, prompts=args.prompts, answers=args.answers, max_new_tokens=args.max_new_tokens,
        epochs=args.epochs, learning_rate=args.learning_rate, warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay, baseline=args.baseline, loss=loss,
        replay=tuple(REPLAY[name] for name in replay), sampling=sampling, old=args.old, turns=args.turns,
        tool_tokens=args.tool_tokens, invariant=args.invariant, compute_dtype=args.dtype,
        remat=remat_of(args, args.remat), rows=args.rows, save_every=args.save_every, seed=args.seed,
    )  # fmt: skip


def _train(args: argparse.Namespace, settings: "RunSettings", channel: "Channel | None") -> None:
    """Train on every process; the first one asks the task, says how it goes, and writes what is not divided."""
    from m3jax.assets import embedded_path
    from m3jax.checkpoint import load
    from m3jax.hosts.run import is_first
    from m3jax.parallel import as_mesh
    from m3jax.text import ChatTemplate, Tokenizer
    from m3jax.train.grpo import PartedPolicies, train_policy
    from m3jax.train.keeping import save_trained
    from m3jax.train.rewards import TaskFile
    from m3jax.train.shared_task import shared_task

    folder = embedded_path() if args.model is None else Path(args.model)
    tokenizer = Tokenizer.from_pretrained(folder)
    has_template = (Path(folder) / "chat_template.jinja").is_file()
    template = ChatTemplate.from_folder(folder) if has_template else None
    tell = say if is_first() else lambda text: None
    metrics = (args.metrics or args.out / "metrics.jsonl") if is_first() else None
    origin = {"model": str(folder), "task": hashlib.sha256(Path(args.task).read_bytes()).hexdigest()}
    with shared_task(partial(TaskFile, args.task, args.reward_seconds), channel) as task:
        model = load(args.model, dtype="float32", mesh=as_mesh(args.mesh), vision=False)
        try:
            trained = train_policy(model, tokenizer, template, task, settings, args.out, metrics, tell, origin)
        except PartedPolicies as error:
            raise ValueError(str(error)) from error
        layout = save_trained(trained, args.out / "model", folder)
    tell(f"the trained model is in {args.out / 'model'}{layout}, with float32 weights")


def _pair(text: str) -> tuple[float, float]:
    low, _, high = text.partition(",")
    return float(low), float(high)


def _or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


def _reject(text: str) -> tuple[str, str, float]:
    level, divergence, nats = text.split(",")
    if level not in ("token", "sequence") or divergence not in ("k1", "k3"):
        raise ValueError(text)
    return level, divergence, float(nats)


if __name__ == "__main__":
    run_program(main)
