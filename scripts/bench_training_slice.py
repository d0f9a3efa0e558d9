"""A training step of four layers of M3, at M3's widths, beside transformers' on the same GPU.

    python scripts/bench_training_slice.py --lora 16 --experts 16          # adapters of attention, weights in bfloat16
    python scripts/bench_training_slice.py --experts 8                     # all weights: float32 masters, AdamW
    python scripts/bench_training_slice.py --lora 16 --loss grpo           # the clipped loss of a policy's rollouts
    python scripts/bench_training_slice.py --widths tiny --length 64 --lora 4 --device cpu   # to see that it works

M3's last dense layer and its first three sparse ones, with random weights, fewer experts (four of them for each token)
and a smaller vocabulary: --vocab 200064 has all of M3's, whose head is then as large as all layers together. Rows are
documents of one length, so that neither side pads; both compute in bfloat16, clip the gradient, take AdamW's step,
leave the index branch as it is, and recompute nothing unless --remat says so. Each side is a process of its own, one
after the other, so that each has all of the GPU's memory; the median step counts. The forward pass, whose program is
the smaller one, is timed before the step. stderr has each program that is compiled and each step as they end, so that a
run that is cut off has said how far it came.

m3jax's products are cuBLAS's first choice, as `m3jax.train` has them; --tuned compiles with XLA's defaults, which times
kernels for each product. With --loss grpo the first quarter of each row is a prompt, the rest was drawn by the policy
itself, and rows have advantages of both signs. Peak is the arithmetic of the model (products of all weights that a
token meets, of attention's visible keys, of index scores), without what is recomputed, over what the device is said to
reach in bfloat16 (--peak).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_engine import four_layers

from m3jax import M3Config

RATE = 1e-5
SIDES = ("m3jax", "transformers")


def main() -> int:
    """Time each side in a process of its own, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", choices=("m3", "tiny"), default="m3")
    parser.add_argument("--experts", type=int, default=8, help="of a layer (default: 8)")
    parser.add_argument("--vocab", type=int, default=32768, help="tokens of the vocabulary (default: 32768)")
    parser.add_argument("--loss", choices=("sft", "grpo"), default="sft", help="of the step (default: sft)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of attention alone")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document (default: 4096)")
    parser.add_argument("--rows", type=int, default=2, help="documents of a step (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="that are timed, behind two that are not (default: 5)")
    parser.add_argument("--remat", action="store_true", help="both sides recompute activations")
    parser.add_argument("--keep-products", action="store_true", help="m3jax: with --remat, but not products")
    parser.add_argument("--tuned", action="store_true", help="m3jax: XLA times kernels for each product")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the device (default: an H100's, 989)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", type=int, metavar="KERNELS", help="m3jax: print the dearest kernels of a step")
    parser.add_argument(
        "--experts-implementation", help="of transformers, such as grouped_mm (default: its own choice)"
    )
    parser.add_argument("--sides", default=",".join(SIDES), help="default: both")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--in-this-process", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_this_process:
        print(json.dumps(measure(args)))
        return 0
    config = config_of(args)
    how = f"adapters of rank {args.lora}" if args.lora else "all weights, float32 masters"
    print(f"{args.rows} x {args.length} tokens, {config.num_local_experts} experts, vocabulary of {config.vocab_size}; "
          f"{how}{', recomputed' if args.remat else ''}", flush=True)  # fmt: skip
    found = {}
    for side in args.sides.split(","):
        found[side] = in_child(side, sys.argv[1:], args)
        print(line_of(side, found[side], args, config), flush=True)
    seconds = [found[side]["seconds"] for side in SIDES if "seconds" in found.get(side, {})]
    if len(seconds) == 2:
        print(f"{seconds[1] / seconds[0]:.2f} times transformers' speed")
    if args.json:
        args.json.write_text(json.dumps({"arguments": sys.argv[1:], **found}, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in of_side for of_side in found.values()))


def config_of(args: argparse.Namespace) -> M3Config:
    """Return the configuration of the slice."""
    if args.widths == "tiny":
        return M3Config.tiny()
    return replace(
        four_layers(), num_local_experts=args.experts, vocab_size=args.vocab, bos_token_id=0, eos_token_id=(1,)
    )


def in_child(side: str, words: list[str], args: argparse.Namespace) -> dict:
    """Run one side, and return its figures, or {"error"}."""
    on_host = args.device == "cpu" or side == "transformers"  # torch alone has the GPU then
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if on_host else {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"})
    command = [sys.executable, __file__, *words, "--in-this-process", side]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)  # stderr is passed on as it comes
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return {"error": f"ended with {run.returncode}: see above"}
    return json.loads(lines[-1])


def measure(args: argparse.Namespace) -> dict:
    """Return the figures of one side: {"seconds", "first", "losses", "forward", ...}."""
    from measuring import print_kernels
    from measuring.compiles import compiles_said

    config = config_of(args)
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (args.rows, args.length)).astype(np.int32)
    with compiles_said() if args.in_this_process == "m3jax" else nullcontext():
        forward, step, figures = (ours if args.in_this_process == "m3jax" else theirs)(config, tokens, args)
        passes, _ = in_turn(forward, "forward pass", args)
        times, losses = in_turn(step, "step", args)
        if args.profile and args.in_this_process == "m3jax":
            print_kernels(step, args.profile, sys.stderr)
    return {
        "seconds": statistics.median(times[2:]), "first": times[0], "losses": losses,
        "forward": statistics.median(passes[2:]), **figures(),
    }  # fmt: skip


def in_turn(call: Callable[[], float], name: str, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Call a function some times, say each on stderr, and return the seconds and what it returned.

    The first call compiles, and the second may still grow the memory of an allocator: neither counts.

    Args:
      call: takes a step, or a pass, and returns its loss.
      name: of what it does.
      args: of the command line.
    """
    times, losses = [], []
    for number in range(args.steps + 2):
        began = time.perf_counter()
        losses.append(call())
        times.append(time.perf_counter() - began)
        speed = f"{times[-1] * 1e3:.1f} ms, {tokens_of(args) / times[-1]:.0f} tokens/s"
        line = f"{args.in_this_process}: {name} {number + 1}: {speed}, loss {losses[-1]:.4f}"
        print(line, file=sys.stderr, flush=True)
    return times, losses


def tokens_of(args: argparse.Namespace) -> int:
    """Return the tokens of a step."""
    return args.rows * args.length


def ours(config: M3Config, tokens: np.ndarray, args: argparse.Namespace) -> tuple[Callable, Callable, Callable]:
    """Return m3jax's forward pass and step, which give the loss, and a function that gives its figures."""
    import jax
    import jax.numpy as jnp

    from m3jax.model import init
    from m3jax.train import lora
    from m3jax.train.accumulate import Accumulated
    from m3jax.train.conversations import Example
    from m3jax.train.programs import jit_for_training
    from m3jax.train.rollouts import RolloutLoss
    from m3jax.train.sft import ROWS, PackedBatches, SFTLoss, SFTSettings
    from m3jax.train.step import init_state, make_optimizer, train_step

    size = config.index_block_size
    optimizer = make_optimizer(lambda step: RATE, weight_decay=0.0, frozen_index=True)
    remat = "products" if args.keep_products else args.remat
    if args.loss == "sft":
        settings = SFTSettings(steps=1, length=-(-args.length // size) * size, rows=args.rows, remat=remat)
        examples = [Example(row, np.ones(len(row), bool)) for row in tokens]
        batch = PackedBatches(examples, settings, size)[0]
        loss, accumulated, shown = SFTLoss(remat=remat), ROWS, "lm"
    else:
        drawn, advantages = rollouts_of(tokens)
        logprobs = np.zeros(drawn.shape, np.float32)
        batch = {"tokens": tokens, "mask": drawn, "sampler": logprobs, "old": logprobs, "advantages": advantages,
                 "is_on_policy": np.bool_(True)}  # fmt: skip
        loss, accumulated, shown = RolloutLoss(compute_dtype="bfloat16", remat=remat), (), "policy"
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    if args.lora:
        model, shape = init(config, 0, "bfloat16"), lora.LoraSettings(args.lora, 2.0 * args.lora, ("attention",))
        state = lora.init_adapter_state(lora.init_adapters(model, shape), optimizer)
        loss, batch = lora.LoraLoss(loss, shape.scale), batch | {"base": model}
    else:
        model = init(config, 0, "float32")
        state = init_state(model, optimizer)
    count = sum(x.size for x in jax.tree.leaves(model))
    del model  # the state, or the batch, has it
    loss_fn = Accumulated(loss, accumulated) if accumulated else loss
    read_loss, take_step = jit_for_training(lambda model, batch: loss_fn(model, batch)[0]), train_step
    if args.tuned:
        read_loss = jax.jit(read_loss.__wrapped__)
        statics = ("optimizer", "loss_fn", "balance_rate")
        take_step = jax.jit(train_step.__wrapped__, static_argnames=statics, donate_argnames="state")

    def forward() -> float:
        return float(read_loss(state.model, {**batch, "step": state.step}))

    def step() -> float:
        nonlocal state
        state, metrics = take_step(state, batch, optimizer=optimizer, loss_fn=loss_fn, balance_rate=0.0)
        return float(metrics[shown])

    def figures() -> dict:
        device = jax.devices()[0]
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        return {"parameters": count, "gigabytes": peak / 1e9, "device": f"{device.device_kind}, jax {jax.__version__}"}

    return forward, step, figures


def rollouts_of(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets that were drawn, bool [B T-1], and the rows' advantages, [B]: 1 and -0.5 in turn."""
    rows, length = tokens.shape
    drawn = np.broadcast_to(np.arange(1, length) >= length // 4, (rows, length - 1))
    return drawn, np.where(np.arange(rows) % 2, -0.5, 1.0).astype(np.float32)


def theirs(config: M3Config, tokens: np.ndarray, args: argparse.Namespace) -> tuple[Callable, Callable, Callable]:
    """Return transformers' forward pass and step, which give the loss, and a function that gives its figures."""
    import torch
    import transformers
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    class Adapter(torch.nn.Module):
        """A linear layer with an adapter, as PEFT computes one."""

        def __init__(self, base: torch.nn.Linear, rank: int):
            super().__init__()
            make = lambda *shape: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=args.device))
            self.base, self.scale = base, 2.0
            self.a, self.b = make(rank, base.in_features), make(base.out_features, rank)
            torch.nn.init.kaiming_uniform_(self.a, a=5**0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.scale * (x @ self.a.to(x.dtype).T @ self.b.to(x.dtype).T)

    settings = MiniMaxM3VLConfig.from_dict(config.to_dict()).text_config
    settings._attn_implementation = "sdpa"
    if args.experts_implementation:
        settings._experts_implementation = args.experts_implementation
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if args.lora else torch.float32)
    with torch.device(args.device):
        model = MiniMaxM3VLForCausalLM(settings).train()
    torch.set_default_dtype(torch.float32)
    count = sum(p.numel() for p in model.parameters())
    if args.lora:
        model.requires_grad_(False)
        for module in [module for module in model.modules() if hasattr(module, "q_proj") and hasattr(module, "o_proj")]:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(module, name, Adapter(getattr(module, name), args.lora))
    for name, parameter in model.named_parameters():
        if "indexer" in name:
            parameter.requires_grad_(False)
    if args.remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=args.device == "cuda" or None
    )
    ids = torch.from_numpy(tokens).long().to(args.device)
    drawn, advantages = (torch.from_numpy(np.array(x)).to(args.device) for x in rollouts_of(tokens))

    def read_loss() -> torch.Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=not args.lora):
            if args.loss == "sft":
                return model(input_ids=ids, labels=ids, use_cache=False).loss
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        new = -torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        ratio = (new - new.detach()).exp()  # on policy
        gains = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
        return -(gains * drawn).sum() / drawn.sum()

    def forward() -> float:
        with torch.no_grad():
            return float(read_loss())

    def step() -> float:
        optimizer.zero_grad()
        loss = read_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())  # waits for the device

    def figures() -> dict:
        is_gpu = args.device == "cuda"
        name = torch.cuda.get_device_name() if is_gpu else "cpu"
        return {
            "parameters": count,
            "gigabytes": torch.cuda.max_memory_allocated() / 1e9 if is_gpu else 0.0,
            "device": f"{name}, torch {torch.__version__}, transformers {transformers.__version__}",
        }

    return forward, step, figures


def line_of(side: str, found: dict, args: argparse.Namespace, config: M3Config) -> str:
    """Return the line that is printed of one side."""
    if "error" in found:
        return f"{side:>14}: {found['error']}"
    seconds, tokens = found["seconds"], tokens_of(args)
    share = flops(config, args.length, bool(args.lora)) * tokens / seconds / (args.peak * 1e12)
    return (
        f"{side:>14}: {seconds * 1e3:8.1f} ms a step, {tokens / seconds:8.0f} tokens/s, {share:.1%} of {args.peak:g} "
        f"TFLOP/s, forward pass {found['forward'] * 1e3:.1f} ms, {found['gigabytes']:.1f} GB at most; "
        f"{found['parameters'] / 1e9:.2f}B parameters, loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f}; "
        f"first step {found['first']:.0f} s; {found['device']}"
    )


def flops(config: M3Config, length: int, only_adapters: bool) -> float:
    """Return the operations of a training step for a token: twice the forward's behind it, once without weights'."""
    width, heads, kv_heads, dim = (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )  # fmt: skip
    mean_keys = (length + 1) / 2
    chosen = config.index_topk_blocks * config.index_block_size
    mean_chosen = sum(min(t + 1, chosen) for t in range(length)) / length
    weights, keys, scores = config.vocab_size * width, 0.0, 0.0
    for stack in config.stacks:
        matrices = width * (heads + 2 * kv_heads) * dim + heads * dim * width
        if stack.is_moe:
            routed = config.num_experts_per_tok * 3 * width * config.intermediate_size
            matrices += routed + 3 * width * config.shared_intermediate_size + width * config.num_local_experts
        else:
            matrices += 3 * width * config.dense_intermediate_size
        if stack.is_sparse:
            index = config.index_n_heads * config.index_head_dim
            scores += stack.num_layers * 2 * (width * (index + config.index_head_dim) + index * mean_keys)
        weights += stack.num_layers * matrices
        keys += stack.num_layers * (mean_chosen if stack.is_sparse else mean_keys)
    of_weights = (4 if only_adapters else 6) * weights
    return of_weights + 3 * 4 * heads * dim * keys + scores


if __name__ == "__main__":
    sys.exit(main())
