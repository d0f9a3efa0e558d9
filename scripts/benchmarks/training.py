"""Tokens a second of a fine-tuning step, beside transformers' of the same model on the same tokens, in one run.

    bench.py training                        # the embedded model on this machine's CPU
    bench.py training --round 4 8            # a round of GRPO: 8 answers to each of 4 prompts
    bench.py training --round 4 8 --alone    # the same, with the prompt computed for each answer

Both sides compute in float32 with AdamW, clip the gradient and recompute nothing. m3jax packs the documents into rows;
transformers gets them as one batch that is padded on the right, as its own trainers make it, with attention by sdpa.
Tokens are those of documents, without padding. The two take turns, and the fastest step of each counts: the machine's
other work falls on both. The losses of the first step, of the same weights, must agree.

A round draws answers, reads them and takes a step of the policy's loss: by an engine that is then given the new
weights, and by transformers' `generate` with `num_return_sequences`. Prompts are of one length, answers of
--new-tokens, drawn at temperature 1, so that no side pads; rewards are random. Tokens are those of the answers.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import m3jax
from benchmarks.harness import Option
from m3jax.assets import embedded_path
from m3jax.decoding import Params, Sampling, build_engine
from m3jax.train.accumulate import Accumulated
from m3jax.train.conversations import Example
from m3jax.train.packing import pack
from m3jax.train.policy import group_advantages
from m3jax.train.rollouts import RolloutLoss, as_batch, as_batch_of_groups, roll_out
from m3jax.train.sft import ROWS, PackedBatches, SFTLoss, SFTSettings
from m3jax.train.shared_prompts import GroupLayout
from m3jax.train.step import init_state, make_optimizer, train_step

REPEATS, PACKAGES = 5, ("torch", "transformers")
RATE = 1e-4
# Tokens of conversations: a few turns each, some long.
LENGTHS = [61, 148, 96, 402, 77, 233, 120, 55, 310, 89, 180, 131]
OPTIONS = dict(
    lengths=Option(LENGTHS, "Tokens of the documents of a step", smoke=[40, 24]),
    length=Option(512, "Tokens of a packed row", smoke=128),
    round=Option([], "Prompts, and answers to each, of a round of GRPO", type=int),
    prompt_tokens=Option(128, "Tokens of a round's prompt", smoke=32),
    new_tokens=Option(64, "Tokens of a round's answer", smoke=8),
    alone=Option(False, "Compute the prompt for each answer of a round's step"),
)


def measure(args):
    """Yield the time of each side's step."""
    if len(args.round) not in (0, 2):
        raise ValueError(f"--round has {len(args.round)} numbers; it takes two, of prompts and of answers")
    draw = np.random.default_rng(0)
    model = m3jax.load(None, dtype="float32", vision=False, progress=False)
    if args.round:
        prompts = draw.integers(2, model.config.vocab_size, (args.round[0], args.prompt_tokens))
        sizes, tokens = (prompts, args.round[1], args.new_tokens), args.round[0] * args.round[1] * args.new_tokens
        sides = {"m3jax": our_round(model, *sizes, args.alone), "transformers": their_round(*sizes)}
    else:
        examples = [
            Example(draw.integers(2, model.config.vocab_size, n).astype(np.int32), np.arange(n) >= n // 2)
            for n in args.lengths
        ]
        tokens = sum(len(example.tokens) for example in examples)
        sides = {"m3jax": our_step(model, examples, args.length), "transformers": their_step(examples)}
    yield from in_turns(sides, args.repeats, tokens)


def in_turns(sides: dict[str, Callable[[], float]], turns: int, tokens: int):
    """Call the sides, each of which takes a step and returns its loss, in turns; yield the fastest of each."""
    fastest, losses = dict.fromkeys(sides, float("inf")), {}
    for turn in range(turns + 1):
        for name, step in sides.items():
            began = time.perf_counter()
            loss = step()
            seconds = time.perf_counter() - began
            if turn == 0:  # it compiles
                losses[name] = loss
            else:
                fastest[name] = min(fastest[name], seconds)
    for name, seconds in fastest.items():
        yield {
            "side": name, "ms a step": 1e3 * seconds, "tokens/s": tokens / seconds,
            "times ours": seconds / fastest["m3jax"], "first loss": losses[name],
        }  # fmt: skip


def our_step(model: m3jax.M3, examples: list[Example], length: int) -> Callable[[], float]:
    """Return a function that takes a step on all documents, packed into rows of `length`, and returns its loss."""
    size = model.config.index_block_size
    # One pass over the documents is one step: as many rows as they need, in the order of the first pass.
    order = np.random.default_rng((0, 0)).permutation(len(examples))
    rows = len(pack([len(examples[i].tokens) for i in order], length, size))
    settings = SFTSettings(steps=1, length=length, rows=rows, compute_dtype="float32", remat=False, seed=0)
    batch = {name: jnp.asarray(x) for name, x in PackedBatches(examples, settings, size)[0].items()}
    optimizer = make_optimizer(lambda step: RATE, weight_decay=0.0, frozen_index=True)
    loss_fn = Accumulated(SFTLoss(compute_dtype="float32", remat=False), ROWS)
    state = init_state(model, optimizer)
    run = partial(train_step, optimizer=optimizer, loss_fn=loss_fn, balance_rate=0.0)

    def step() -> float:
        nonlocal state
        state, metrics = run(state, batch)
        return float(metrics["lm"])

    return step


def our_round(model: m3jax.M3, prompts: np.ndarray, answers: int, new_tokens: int, alone: bool) -> Callable[[], float]:
    """Return a function that does a round of GRPO and returns its loss.

    Args:
      model: Float32 weights.
      prompts: Token ids, [B T].
      answers: Number of answers to each prompt.
      new_tokens: Tokens of an answer.
      alone: Whether each answer is computed with a prompt of its own.
    """
    size = model.config.index_block_size
    layout = GroupLayout.of([prompts.shape[1]], new_tokens, size)
    length = -(-(prompts.shape[1] + new_tokens) // size) * size
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


def their_round(prompts: np.ndarray, answers: int, new_tokens: int) -> Callable[[], float]:
    """Return a function that does the same round by transformers and returns its loss."""
    import torch

    model, update = transformers_training()
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
        logits = model(input_ids=drawn, use_cache=False).logits[:, before - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, drawn[:, before:, None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        return update(-(advantages[:, None] * ratio).mean())

    return step


def their_step(examples: list[Example]) -> Callable[[], float]:
    """Return a function that takes transformers' step on all documents and returns its loss."""
    import torch

    model, update = transformers_training()
    longest = max(len(example.tokens) for example in examples)
    ids = torch.zeros((len(examples), longest), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        count = len(example.tokens)
        ids[row, :count], mask[row, :count] = torch.from_numpy(example.tokens).long(), 1
        labels[row, :count] = torch.where(torch.from_numpy(example.is_written), ids[row, :count], -100)
    return lambda: update(model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss)


def transformers_training() -> tuple[Any, Callable[[Any], float]]:
    """Return transformers' model in training, and a function that steps by a loss and returns its value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration
    model = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        embedded_path(), dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    trained = [p for name, p in model.named_parameters() if "vision" not in name and "indexer" not in name]
    return model, torch_update(trained, RATE)


def torch_update(trained: list, rate: float, **more) -> Callable[[Any], float]:
    """Return a function that takes AdamW's step down a loss of these parameters, and returns the loss."""
    import torch

    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, **more)

    def update(loss: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())  # waits for the device

    return update
