"""Tokens a second of a fine-tuning step, beside transformers' of the same model on the same tokens, in one run.

    python scripts/bench_training.py                        # the embedded model on this machine's CPU
    python scripts/bench_training.py --lengths 512 --rows 4 # documents of one length: no padding on either side
    python scripts/bench_training.py --round 4 8            # a round of GRPO: 8 answers to each of 4 prompts
    python scripts/bench_training.py --round 4 8 --alone    # the same, with the prompt computed for each answer

Both sides compute in float32 with AdamW, clip the gradient and recompute nothing. m3jax packs the documents into rows;
transformers gets them as one batch that is padded on the right, as its own trainers make it, with attention by sdpa.
Tokens are those of documents, without padding. The two take turns, and the fastest step of each counts: the machine's
other work falls on both. Before the first step both print the loss of the same weights, which must agree.

A round draws answers, reads them and takes a step of the policy's loss: by an engine that is then given the new
weights, and by transformers' `generate` with `num_return_sequences`. Prompts are of one length, answers of
--new-tokens, drawn at temperature 1, so that no side pads; rewards are random. Tokens are those of the answers.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import m3jax
from m3jax.assets import embedded_path
from m3jax.decoding import Params, Sampling, build_engine
from m3jax.train.accumulate import Accumulated
from m3jax.train.conversations import Example
from m3jax.train.policy import group_advantages
from m3jax.train.rollouts import RolloutLoss, as_batch, as_batch_of_groups, roll_out
from m3jax.train.sft import ROWS, PackedBatches, SFTLoss, SFTSettings
from m3jax.train.shared_prompts import GroupLayout
from m3jax.train.step import init_state, make_optimizer, train_step

# Tokens of conversations: a few turns each, some long.
LENGTHS = (61, 148, 96, 402, 77, 233, 120, 55, 310, 89, 180, 131)
RATE = 1e-4


def main() -> None:
    """Time both sides in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(embedded_path()), help="a folder in the hub's layout (the embedded one)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the documents of a step")
    parser.add_argument("--rows", type=int, default=1, help="how many times over")
    parser.add_argument("--length", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--turns", type=int, default=5, help="steps of each side")
    parser.add_argument("--round", type=int, nargs=2, metavar=("PROMPTS", "ANSWERS"), help="of GRPO, in place of that")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of a round's prompt (default: 128)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a round's answer (default: 64)")
    parser.add_argument("--alone", action="store_true", help="a round's step computes the prompt for each answer")
    args = parser.parse_args()
    draw = np.random.default_rng(0)
    model = m3jax.load(args.model, dtype="float32", vision=False)
    if args.round:
        prompts = draw.integers(2, model.config.vocab_size, (args.round[0], args.prompt_tokens))
        sizes = prompts, args.round[1], args.new_tokens
        print(f"{len(prompts)} x {args.round[1]} answers of {args.new_tokens} tokens behind {args.prompt_tokens}")
        sides = {"m3jax": our_round(model, *sizes, args.alone), "transformers": their_round(args.model, *sizes)}
        in_turns(sides, args.turns, args.round[0] * args.round[1] * args.new_tokens)
        return
    examples = [
        Example(draw.integers(2, model.config.vocab_size, n).astype(np.int32), np.arange(n) >= n // 2)
        for n in (*args.lengths,) * args.rows
    ]
    tokens = sum(len(example.tokens) for example in examples)
    print(f"{len(examples)} documents, {tokens} tokens, float32, {jax.devices()[0].device_kind}")
    sides = {"m3jax": ours(model, examples, args.length), "transformers": theirs(args.model, examples)}
    in_turns(sides, args.turns, tokens)


def in_turns(sides: dict[str, Callable[[], float]], turns: int, tokens: int) -> None:
    """Call the sides in turns, and print the fastest of each: seconds by the clock, and of all cores' work.

    Args:
      sides: each takes a step, and returns its loss.
      turns: that count; one more is before them.
      tokens: of a step.
    """
    fastest, busy = dict.fromkeys(sides, float("inf")), dict.fromkeys(sides, float("inf"))
    for turn in range(turns + 1):
        for name, step in sides.items():
            began, cpu = time.perf_counter(), time.process_time()
            loss = step()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            if turn == 0:
                print(f"{name}: loss {loss:.5f}; the first step took {seconds:.1f} s, and does not count", flush=True)
            else:
                print(f"{name}: turn {turn} of {turns}: {seconds:.2f} s, {cpu:.2f} s of CPU", flush=True)
                fastest[name], busy[name] = min(fastest[name], seconds), min(busy[name], cpu)
    for name, seconds in fastest.items():
        print(
            f"{name:>14}: {seconds * 1e3:8.0f} ms a step, {tokens / seconds:8.0f} tokens/s; {busy[name]:.2f} s of CPU"
        )
    of_cpu = busy["transformers"] / busy["m3jax"]
    print(f"{fastest['transformers'] / fastest['m3jax']:.2f} times transformers' speed, {of_cpu:.2f} by CPU time")


def ours(model: m3jax.M3, examples: list[Example], length: int) -> Callable[[], float]:
    """Return a function that takes a step on all documents and returns its loss.

    Args:
      model: with float32 weights.
      examples: the documents.
      length: tokens of a packed row.
    """
    settings = SFTSettings(steps=1, length=length, compute_dtype="float32", remat=False, seed=0)
    # One pass over the documents is one step: as many rows as they need.
    rows = len(_rows(examples, settings, model.config.index_block_size))
    settings = SFTSettings(steps=1, length=length, rows=rows, compute_dtype="float32", remat=False)
    batch = PackedBatches(examples, settings, model.config.index_block_size)[0]
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    optimizer = make_optimizer(lambda step: RATE, weight_decay=0.0, frozen_index=True)
    loss_fn = Accumulated(SFTLoss(compute_dtype="float32", remat=False), ROWS)
    state = init_state(model, optimizer)
    run = partial(train_step, optimizer=optimizer, loss_fn=loss_fn, balance_rate=0.0)
    print(f"m3jax: {rows} rows of {length} tokens, {int(batch['num_targets'])} targets")

    def step() -> float:
        nonlocal state
        state, metrics = run(state, batch)
        return float(metrics["lm"])

    return step


def our_round(model: m3jax.M3, prompts: np.ndarray, answers: int, new_tokens: int, alone: bool) -> Callable[[], float]:
    """Return a function that does a round of GRPO and returns its loss.

    Args:
      model: with float32 weights.
      prompts: [B T] token ids.
      answers: to each.
      new_tokens: of an answer.
      alone: compute each answer with a prompt of its own.
    """
    layout = GroupLayout.of([prompts.shape[1]], new_tokens, model.config.index_block_size)
    length = -(-(prompts.shape[1] + new_tokens) // model.config.index_block_size) * model.config.index_block_size
    optimizer = make_optimizer(lambda step: RATE, weight_decay=0.0, frozen_index=True)
    state, loss_fn, draw = init_state(model, optimizer), RolloutLoss(), np.random.default_rng(0)
    engine = build_engine(state.model, rows=len(prompts) * answers, length=length, steps_per_call=16)
    asked, rounds = Params(max_new_tokens=new_tokens, sampling=Sampling()), 0

    def step() -> float:
        nonlocal state, rounds
        groups = roll_out(engine, prompts.tolist(), asked, answers, seed=1000 * rounds)
        if alone:
            batch = as_batch([episode for group in groups for episode in group], length)
        else:
            batch = as_batch_of_groups(groups, layout)
        batch["advantages"] = group_advantages(draw.random((len(prompts), answers))).reshape(-1)
        batch |= {"old": batch["sampler"], "is_on_policy": np.array(True)}
        state, metrics = train_step(state, batch, optimizer=optimizer, loss_fn=loss_fn, balance_rate=0.0)
        engine.update(state.model)
        rounds += 1
        return float(metrics["policy"])

    return step


def their_round(folder: str, prompts: np.ndarray, answers: int, new_tokens: int) -> Callable[[], float]:
    """Return a function that does transformers' round and returns its loss.

    Args:
      folder: of the model.
      prompts, answers, new_tokens: as of `our_round`.
    """
    import torch

    model, trained, optimizer = _of_transformers(folder)
    draw, before = np.random.default_rng(0), prompts.shape[1]
    ids = torch.from_numpy(prompts).long()

    def step() -> float:
        model.eval()
        with torch.no_grad():
            drawn = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                num_return_sequences=answers, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0,
            )  # fmt: skip
        model.train()
        advantages = torch.from_numpy(group_advantages(draw.random((len(prompts), answers))).reshape(-1))
        optimizer.zero_grad()
        logits = model(input_ids=drawn, use_cache=False).logits[:, before - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, drawn[:, before:, None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        loss = -(advantages[:, None] * ratio).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def _rows(examples: list[Example], settings: SFTSettings, block_size: int) -> list[list[int]]:
    """Return the rows of the first pass over the documents."""
    from m3jax.train.packing import pack

    order = np.random.default_rng((settings.seed, 0)).permutation(len(examples))
    return pack([len(examples[i].tokens) for i in order], settings.length, block_size)


def theirs(folder: str, examples: list[Example]) -> Callable[[], float]:
    """Return a function that takes transformers' step on all documents and returns its loss.

    Args:
      folder: of the model.
      examples: the documents.
    """
    import torch

    model, trained, optimizer = _of_transformers(folder)
    longest = max(len(example.tokens) for example in examples)
    ids = torch.zeros((len(examples), longest), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        count = len(example.tokens)
        ids[row, :count], mask[row, :count] = torch.from_numpy(example.tokens).long(), 1
        labels[row, :count] = torch.where(torch.from_numpy(example.is_written), ids[row, :count], -100)
    print(f"transformers: {len(examples)} rows of {longest} tokens, {torch.get_num_threads()} threads")

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def _of_transformers(folder: str) -> tuple[Any, list[Any], Any]:
    """Return transformers' model in training, the parameters that it trains, and an optimiser of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration
    model = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    trained = [p for name, p in model.named_parameters() if "vision" not in name and "indexer" not in name]
    return model, trained, torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)


if __name__ == "__main__":
    main()
