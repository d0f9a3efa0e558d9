"""Measures how many of a draft's tokens are accepted: before a policy moved, after it, and with the draft refreshed.

    python scripts/tiny/refresh_draft.py --out runs/draft                             # moved here, by fine-tuning
    python scripts/tiny/refresh_draft.py --model runs/calls/model --out runs/draft    # moved by rewards

The policy is one that `python -m m3jax.train grpo --task scripts/tiny/tool_calls.py` trained, or, without --model, the
embedded model after 40 steps of fine-tuning on the task's right answers. Prompts are the task's. It answers
some of them, the embedded draft is trained further on these answers (`m3jax.train.eagle3.refresh_draft`), and engines
with either draft answer others. The new draft is written to OUT in the hub's layout, as --draft of every command reads
it. Figures are printed, and written to OUT/acceptance.json, as they are there.
"""

import argparse
import json
import runpy
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax.numpy as jnp

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint.draft import load_draft, save_draft
from m3jax.compile_cache import compile_cache
from m3jax.decoding import Eagle3Drafter, Engine, Params, Sampling, build_engine
from m3jax.dialogue.answer import stop_ids
from m3jax.model import M3
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.train.accumulate import Accumulated
from m3jax.train.conversations import encode_conversation
from m3jax.train.eagle3 import refresh_draft
from m3jax.train.sft import ROWS, PackedBatches, SFTLoss, SFTSettings
from m3jax.train.step import init_state, make_optimizer, train_step

TASK = Path(__file__).resolve().parent / "tool_calls.py"
NEW_TOKENS, DRAFT_TOKENS = 64, 3
POLICY_STEPS, DRAFT_STEPS = 40, 100
WRITTEN, ASKED = 128, 32  # answers that the draft learns from, other prompts that are measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the policy after training (default: fine-tuned here)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the draft")
    args = parser.parse_args()
    tokenizer, template = Tokenizer.from_pretrained(embedded_path()), ChatTemplate.from_folder(embedded_path())
    rows = runpy.run_path(str(TASK))["prompts"]()[-WRITTEN - ASKED :]  # training takes them from the front
    prompts = [
        template.encode(tokenizer, row["messages"], tools=row["tools"], thinking_mode=row["thinking_mode"])
        for row in rows
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float | list[float]]] = {}

    def note(name: str, shares: list[float], length: float) -> None:
        found[name] = {"accepted": shares, "tokens_a_call": length}
        (args.out / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        of_each = ", ".join(f"{share:.1%}" for share in shares)
        print(f"{name:>10}: accepted {of_each}; {length:.2f} tokens a call", flush=True)

    with compile_cache():
        before = m3jax.load(None, dtype="float32", vision=False)
        draft = load_draft(None, before.config, "float32")
        ends = stop_ids(tokenizer, before.config.eos_token_id)
        serve = partial(
            build_engine, rows=16, length=-(-(max(map(len, prompts)) + NEW_TOKENS) // 16) * 16, steps_per_call=16,
            draft_tokens=DRAFT_TOKENS,
        )  # fmt: skip
        to_learn, to_ask = prompts[:WRITTEN], prompts[WRITTEN:]
        note("before", *acceptance(serve(before, draft=Eagle3Drafter(draft)), to_ask, ends))
        if args.model is not None:
            policy = m3jax.load(args.model, dtype="float32", vision=False)
        else:
            policy = fine_tuned(before, tokenizer, template, ends, POLICY_STEPS)
        engine = serve(policy, draft=Eagle3Drafter(draft))
        note("moved", *acceptance(engine, to_ask, ends))
        began = time.perf_counter()
        written = answers(engine, to_learn, ends)
        fresh = refresh_draft(draft, policy, written, steps=DRAFT_STEPS)
        seconds = time.perf_counter() - began
        note("refreshed", *acceptance(serve(policy, draft=Eagle3Drafter(fresh)), to_ask, ends))
    save_draft(fresh, args.out)
    print(f"writing {len(written)} answers and {DRAFT_STEPS} steps took {seconds:.0f} s")


def fine_tuned(model: M3, tokenizer: Tokenizer, template: ChatTemplate, ends: tuple[int, ...], steps: int) -> M3:
    """Return the model after some steps on right answers to the task's first prompts, with float32 weights.

    Args:
      model: not changed.
      tokenizer, template: of the model.
      ends: tokens that end a turn.
      steps: of 8 conversations, one a row.
    """
    settings = SFTSettings(steps=steps, length=256, rows=8, learning_rate=1e-4, compute_dtype="float32", remat=False)
    examples = []
    for row in runpy.run_path(str(TASK))["prompts"]()[: 8 * steps]:
        function = row["tools"][0]["function"]
        arguments = dict(zip(function["parameters"]["required"], row["numbers"], strict=True))
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        talk = [*row["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
        examples.append(encode_conversation(template, tokenizer, talk, ends, row["tools"], row["thinking_mode"]))
    batches = PackedBatches(examples, settings, model.config.index_block_size)
    optimizer = make_optimizer(settings.rate, frozen_index=True, frozen_vision=True)
    loss_fn, state = Accumulated(SFTLoss(compute_dtype="float32", remat=False), ROWS), init_state(model, optimizer)
    for step in range(steps):
        batch = {name: jnp.asarray(x) for name, x in batches[step].items()}
        state, metrics = train_step(state, batch, optimizer=optimizer, loss_fn=loss_fn, balance_rate=0.0)
        if step % 10 == 9 or step == 0:
            print(f"fine-tuning: step {step + 1} of {steps}, loss {float(metrics['lm']):.3f}", flush=True)
    return state.model


def answers(engine: Engine, prompts: Sequence[Sequence[int]], ends: tuple[int, ...]) -> list[list[int]]:
    """Return prompts with what is drawn behind them, at temperature 1."""
    handles = [
        engine.add(prompt, Params(max_new_tokens=NEW_TOKENS, sampling=Sampling(seed=seed), stop_ids=ends))
        for seed, prompt in enumerate(prompts)
    ]
    results = engine.run()
    return [[*prompt, *results[handle].tokens] for prompt, handle in zip(prompts, handles, strict=True)]


def acceptance(engine: Engine, prompts: Sequence[Sequence[int]], ends: tuple[int, ...]) -> tuple[list[float], float]:
    """Return the shares of proposals that were accepted, by position, and the mean number of tokens of a call.

    Args:
      engine: with a draft, and without requests so far.
      prompts, ends: as of `answers`.
    """
    answers(engine, prompts, ends)
    return [float(share) for share in engine.drafting.acceptance], float(engine.drafting.mean_length)


if __name__ == "__main__":
    main()
