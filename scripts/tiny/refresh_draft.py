"""Measures how many of a draft's tokens are accepted: before a policy moved, after it, and with the draft refreshed.

    python scripts/tiny/refresh_draft.py --model runs/calls/model --out runs/draft

The model is one that `python -m m3jax.train grpo --task scripts/tiny/tool_calls.py` trained; prompts are the task's. It
answers some of them, the embedded draft is trained further on these answers (`m3jax.train.eagle3.refresh_draft`), and
engines with either draft answer others. The new draft is written to OUT in the hub's layout, as --draft of every
command reads it.
"""

import argparse
import json
import runpy
import time
from collections.abc import Sequence
from pathlib import Path

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint.draft import load_draft, save_draft
from m3jax.compile_cache import compile_cache
from m3jax.decoding import Eagle3Drafter, Engine, Params, Sampling, build_engine
from m3jax.dialogue.answer import stop_ids
from m3jax.model import M3
from m3jax.model.eagle3 import Eagle3
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.train.eagle3 import refresh_draft

TASK = Path(__file__).resolve().parent / "tool_calls.py"
NEW_TOKENS, DRAFT_TOKENS = 64, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the policy after training")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the draft")
    parser.add_argument("--written", type=int, default=128, help="answers that the draft learns from (default: 128)")
    parser.add_argument("--asked", type=int, default=32, help="other prompts that are measured (default: 32)")
    parser.add_argument("--steps", type=int, default=100, help="of the optimiser (default: 100)")
    parser.add_argument("--dtype", default="float32", help="of target and draft (default: float32)")
    args = parser.parse_args()
    tokenizer, template = Tokenizer.from_pretrained(embedded_path()), ChatTemplate.from_folder(embedded_path())
    rows = runpy.run_path(str(TASK))["prompts"]()[-args.written - args.asked :]  # training takes them from the front
    prompts = [
        template.encode(tokenizer, row["messages"], tools=row["tools"], thinking_mode=row["thinking_mode"])
        for row in rows
    ]
    with compile_cache():
        before = m3jax.load(None, dtype=args.dtype, vision=False)
        policy = m3jax.load(args.model, dtype=args.dtype, vision=False)
        draft = load_draft(None, policy.config, args.dtype)
        to_learn, to_ask = prompts[: args.written], prompts[args.written :]
        ends = stop_ids(tokenizer, policy.config.eos_token_id)
        found = {"before": acceptance(before, draft, to_ask, ends), "moved": acceptance(policy, draft, to_ask, ends)}
        began = time.perf_counter()
        written = answers(build_engine(policy, **sizes(to_learn)), to_learn, ends)
        fresh = refresh_draft(draft, policy, written, steps=args.steps)
        seconds = time.perf_counter() - began
        found["refreshed"] = acceptance(policy, fresh, to_ask, ends)
    save_draft(fresh, args.out)
    for name, (shares, length) in found.items():
        print(f"{name:>10}: accepted {', '.join(f'{share:.1%}' for share in shares)}; {length:.2f} tokens a call")
    print(f"writing {len(written)} answers and {args.steps} steps took {seconds:.0f} s")
    (args.out / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def sizes(prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the sizes of an engine for these prompts."""
    return dict(rows=16, length=-(-(max(map(len, prompts)) + NEW_TOKENS) // 16) * 16, steps_per_call=16)


def answers(engine: Engine, prompts: Sequence[Sequence[int]], ends: tuple[int, ...]) -> list[list[int]]:
    """Return prompts with what is drawn behind them, at temperature 1."""
    handles = [
        engine.add(prompt, Params(max_new_tokens=NEW_TOKENS, sampling=Sampling(seed=seed), stop_ids=ends))
        for seed, prompt in enumerate(prompts)
    ]
    results = engine.run()
    return [[*prompt, *results[handle].tokens] for prompt, handle in zip(prompts, handles, strict=True)]


def acceptance(
    model: M3, draft: Eagle3, prompts: Sequence[Sequence[int]], ends: tuple[int, ...]
) -> tuple[list[float], float]:
    """Return the shares of proposals that were accepted, by position, and the mean number of tokens of a call."""
    drafter = Eagle3Drafter(draft)
    engine = build_engine(model, **sizes(prompts), draft=drafter, draft_tokens=DRAFT_TOKENS)
    answers(engine, prompts, ends)
    return [float(share) for share in engine.drafting.acceptance], float(engine.drafting.mean_length)


if __name__ == "__main__":
    main()
