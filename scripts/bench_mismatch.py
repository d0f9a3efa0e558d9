"""Measures how far a trainer's log-probabilities are from the engine's, with each replay and correction.

    python scripts/bench_mismatch.py                        # random weights, 128 experts of which 4, 8 of 36 blocks
    python scripts/bench_mismatch.py --model DIR            # a checkpoint, such as m3jax/assets/tiny
    python scripts/bench_mismatch.py --json docs/data/mismatch.json

An engine draws answers in bfloat16, once from all tokens and once within top-p, and records experts, blocks and the
support of each draw. A trainer reads the same tokens with the same weights: without anything, with each replay, with
all, and both in the invariant mode. Figures are those of `m3jax.train.policy.mismatch`; a line for truncated importance
sampling says what its weights are. A choice is of one layer, or of one key head of a layer. The costs are times in one
run, the best of some turns: of drawing with each record beside drawing without, and of reading with each replay beside
reading without. stderr has each row as it is there, and what is compiled; the file of --json holds what there is so
far, and lacks "costs" where a run was cut off.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring.compiles import compiles_said

import m3jax
from m3jax.compile_cache import compile_cache
from m3jax.config import FULL, SPARSE, M3Config
from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3, init
from m3jax.train.policy import Correction, mismatch
from m3jax.train.programs import jit_for_training
from m3jax.train.rollouts import Episode, as_batch, read_logprobs, roll_out

SHOWN = ("rollout_probs_diff_max", "rollout_probs_diff_mean", "kl", "k3_kl", "chi2_token", "ess")
COLUMNS = (*SHOWN, "token_mult_prob_error")
CHOICES, SUPPORT = ("expert_ids", "blocks"), "support"
ALL = (*CHOICES, SUPPORT)
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="a checkpoint in the hub's layout (default: random weights)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--answers", type=int, default=4, help="to each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=448)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--no-costs", action="store_true", help="time nothing")
    args = parser.parse_args()

    def keep(found: dict) -> None:
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with compile_cache(), compiles_said():
        model = random_model() if args.model is None else m3jax.load(args.model, dtype="bfloat16", vision=False)
        found = measure(model, args, keep)
    show(found)


def random_model() -> M3:
    """As sparse as M3: 4 of 128 experts, and 8 of up to 36 blocks; the logits are made as peaked as a trained model's.

    The router's weights are spread so that its scores are as near to one another as a trained one's, not all alike.
    """
    layers = 8
    config = M3Config(
        vocab_size=1024, hidden_size=128, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=16, intermediate_size=64, dense_intermediate_size=256, shared_intermediate_size=64,
        num_local_experts=128, num_experts_per_tok=4, rotary_dim=8,
        layer_types=(FULL,) + (SPARSE,) * (layers - 1), mlp_layer_types=("dense",) + ("sparse",) * (layers - 1),
        index_n_heads=4, index_head_dim=16, index_block_size=16, index_topk_blocks=8, max_position_embeddings=1024,
    )  # fmt: skip
    model = init(config, 0, "bfloat16")
    wider = {"lm_head": 6.0, "gate": 6.0, "embed_tokens": 40.0}

    def scaled(path, leaf):
        name = jax.tree_util.keystr(path)
        factor = next((factor for part, factor in wider.items() if part in name), 3.0 if "proj" in name else 1.0)
        return (leaf * factor).astype(leaf.dtype)

    return jax.jit(partial(jax.tree_util.tree_map_with_path, scaled))(model)


def measure(model: M3, args: argparse.Namespace, keep: Callable[[dict], None]) -> dict:
    """Return the figures of all ways, bytes and costs.

    Args:
      model: of engine and trainer.
      args: of the command line.
      keep: is given what there is so far.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, model.config.vocab_size, args.prompt_tokens).tolist() for _ in range(args.prompts)]
    size = model.config.index_block_size
    length = -(-(args.prompt_tokens + args.new_tokens) // size) * size
    rows = args.prompts * args.answers
    serve = lambda **more: Engine(
        model, pages=(rows + 2) * (length // size), max_batch=rows, max_length=length, prefill_chunk=256,
        steps_per_call=16, kv_dtype="float32", index_dtype="float32", **more,
    )  # fmt: skip
    engine, invariant_engine = serve(), serve(invariant=True)
    ask = lambda record, **knobs: Params(
        max_new_tokens=args.new_tokens, sampling=Sampling(**knobs), record=(*record, "drawn_logprobs")
    )
    draw = lambda engine, params: [one for group in roll_out(engine, prompts, params, args.answers) for one in group]
    found: dict[str, Any] = {
        "model": f"{model.config.num_hidden_layers} layers, {model.config.num_experts_per_tok} of "
        f"{model.config.num_local_experts} experts, {model.config.index_topk_blocks} blocks of {size}",
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16",
        "rows": {},
    }

    def note(name: str, figures: dict[str, float]) -> None:
        found["rows"][name] = figures
        print(f"{name}: " + ", ".join(f"{column} {figures[column]:.3g}" for column in COLUMNS), file=sys.stderr,
              flush=True)  # fmt: skip
        keep(found)

    plain, knobs = {}, dict(top_p=args.top_p)
    for draws, of_draws in (("all tokens", plain), (f"top-p {args.top_p:g}", knobs)):
        episodes = draw(engine, ask(ALL, **of_draws))
        batch = as_batch(episodes, length, ALL)
        ways = {
            "nothing": (),
            "experts": ("expert_ids",),
            "blocks": ("blocks",),
            "experts and blocks": CHOICES,
            "support": (SUPPORT,),
            "all three": ALL,
        }
        for name, replay in ways.items():
            own = read_batch(model, batch, replay)
            figures = mismatch(batch["sampler"], own, batch["mask"])
            note(f"{draws}: {name}", figures)
            if name == "nothing":
                note(f"{draws}: TIS", figures | truncation(batch, own))
        exact = as_batch(draw(invariant_engine, ask(ALL, **of_draws)), length, ALL)
        own = read_batch(model.with_invariance(), exact, (SUPPORT,) if of_draws else ())
        note(f"{draws}: invariant", mismatch(exact["sampler"], own, exact["mask"]))
        if not of_draws:
            changed = swapped(model, episodes, length, size)
    found |= {
        "tokens": int(batch["mask"].sum()),
        "entropy": float(-batch["sampler"][batch["mask"]].mean()),
        "choices that the trainer makes in another way": changed,
        "bytes a token": bytes_of(episodes),
    }
    keep(found)
    if not args.no_costs:
        found["costs"] = costs(engine, invariant_engine, model, batch, draw, ask, knobs)
        keep(found)
    return found


def read_batch(model: M3, batch: dict, replay: tuple[str, ...]) -> np.ndarray:
    """Return the trainer's log-probabilities, with some of the records replayed."""
    names = tuple(name for name in replay if name in CHOICES)
    choices = replace(batch["choices"], **{name: None for name in CHOICES if name not in names}) if names else None
    support = jnp.asarray(batch[SUPPORT]) if SUPPORT in replay else None
    tokens = jnp.asarray(batch["tokens"])
    return np.asarray(read_logprobs(model, tokens, choices, "bfloat16", support=support, temperature=1.0))


def truncation(batch: dict, own: np.ndarray) -> dict[str, float]:
    """Return what truncated importance sampling of tokens does: its mean weight, and the share that it cuts."""
    correction = Correction(weigh="token")
    weights = np.asarray(correction.weights(*map(jnp.asarray, (own, batch["sampler"], batch["mask"]))))[batch["mask"]]
    return {"weight_mean": float(weights.mean()), "weight_cut": float((weights >= correction.limit).mean())}


def swapped(model: M3, episodes: list[Episode], length: int, size: int) -> dict[str, float]:
    """Return the share of choices in which the trainer's own experts, or blocks, are others, and of tokens with one."""
    batch = as_batch(episodes, length, CHOICES)
    lengths = np.array([len(episode.tokens) for episode in episodes], np.int32)
    read = jit_for_training(lambda model, tokens, lengths: model.recorded(tokens, CHOICES, (), lengths=lengths)[2])
    own = read(model, jnp.asarray(batch["tokens"]), jnp.asarray(lengths))
    shares = {}
    for name in CHOICES:
        given, mine = np.asarray(getattr(batch["choices"], name))[:, :-1], np.asarray(own[name])[:, :-1]
        differs = (np.sort(given, -1) != np.sort(mine, -1)).any(-1)[batch["mask"]].reshape(batch["mask"].sum(), -1)
        shares[name], shares[f"tokens, {name}"] = float(differs.mean()), float(differs.any(-1).mean())
    return shares


def bytes_of(episodes: list[Episode]) -> dict[str, float]:
    """Return the bytes of each record of a token: ids in int16, as the engine gives them; the support in bits."""
    is_drawn = [episode.is_drawn for episode in episodes]
    support = np.concatenate([episode.support[drawn] for episode, drawn in zip(episodes, is_drawn, strict=True)])
    count = np.unpackbits(support.view(np.uint8), axis=1).sum(1)
    first = episodes[0].choices
    return {
        "experts": 2.0 * first.expert_ids[0, 0].size,
        "blocks": 2.0 * first.blocks[0, 0].size,
        "support": 4.0 * support.shape[1],
        "support as ids": 2.0 * float(count.mean()),
        "support, tokens": float(count.mean()),
    }


def costs(engine, invariant_engine, model, batch, draw, ask, knobs) -> dict[str, dict[str, float]]:
    """Return times in seconds, each the best of some turns, as multiples of drawing and reading without anything."""
    drawing: dict[str, Callable] = {
        "nothing": lambda: draw(engine, replace(ask((), **knobs), record=())),
        "experts": lambda: draw(engine, replace(ask((), **knobs), record=("expert_ids",))),
        "blocks": lambda: draw(engine, replace(ask((), **knobs), record=("blocks",))),
        "support": lambda: draw(engine, ask((SUPPORT,), **knobs)),
        "all three": lambda: draw(engine, ask(ALL, **knobs)),
        "invariant": lambda: draw(invariant_engine, replace(ask((), **knobs), record=())),
    }
    reading: dict[str, Callable] = {
        "nothing": lambda: read_batch(model, batch, ()),
        "experts": lambda: read_batch(model, batch, ("expert_ids",)),
        "blocks": lambda: read_batch(model, batch, ("blocks",)),
        "support": lambda: read_batch(model, batch, (SUPPORT,)),
        "all three": lambda: read_batch(model, batch, ALL),
        "invariant": lambda: read_batch(model.with_invariance(), batch, ()),
    }
    return {"drawing": timed(drawing), "reading": timed(reading)}


def timed(calls: dict[str, Callable]) -> dict[str, float]:
    """Return the seconds of the first call, and of the others as multiples of it, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if turn:  # the first one compiles
                best[name] = min(best[name], time.perf_counter() - began)
    return {"seconds": best["nothing"]} | {name: seconds / best["nothing"] for name, seconds in best.items()}


def show(found: dict) -> None:
    """Print the figures as tables of Markdown."""
    print(f"{found['model']}; {found['tokens']} tokens; {found['device']}; mean -log p {found['entropy']:.2f}\n")
    print("| drawn from: trainer | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (1 + len(COLUMNS)))
    for name, figures in found["rows"].items():
        text = f"| {name} | " + " | ".join(f"{figures[column]:.3g}" for column in COLUMNS) + " |"
        if "weight_mean" in figures:
            text += f" mean weight {figures['weight_mean']:.4f}, {figures['weight_cut']:.2%} cut"
        print(text)
    for name in ("choices that the trainer makes in another way", "bytes a token", "costs"):
        if name in found:
            print(f"\n{name}: {json.dumps(found[name])}")


if __name__ == "__main__":
    main()
