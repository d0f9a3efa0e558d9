"""A training step of four layers of M3, at M3's widths, beside transformers' on the same GPU.

    bench.py training_slice --lora 16 --experts 16          # adapters of attention, weights in bfloat16
    bench.py training_slice --experts 8                     # all weights: float32 masters, AdamW
    bench.py training_slice --lora 16 --loss grpo           # the clipped loss of a policy's rollouts

M3's last dense layer and its first three sparse ones, with random weights, fewer experts (four of them for each token)
and a smaller vocabulary. Rows are documents of one length, so that neither side pads; both compute in bfloat16, clip
the gradient, take AdamW's step, leave the index branch as it is, and recompute nothing unless --remat says so. Each
side is a process of its own, one after the other, so that each has all of the GPU's memory; the median step counts,
behind two that do not.

m3jax's products are cuBLAS's first choice, as `m3jax.train` has them; --tuned compiles with XLA's defaults, which times
kernels for each product. With --loss grpo the first quarter of each row is a prompt, the rest was drawn by the policy
itself, and rows have advantages of both signs. Peak is the arithmetic of the model (products of all weights that a
token meets, of attention's visible keys, of index scores), without what is recomputed, over what the device is said to
reach in bfloat16, 989 TFLOP/s of an H100.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.harness import Option, rows_of, start_part
from benchmarks.models import four_layers
from m3jax import M3Config

USES_DEVICE, PACKAGES, REPEATS = False, ("torch", "transformers"), 5
RATE = 1e-5
VOCAB_SIZE = 32_768
PEAK = 989e12
OPTIONS = dict(
    experts=Option(8, "Experts of a layer"),
    loss=Option("sft", "Loss of the step", choices=("sft", "grpo")),
    lora=Option(0, "Rank of adapters of attention, trained alone; 0 trains all weights", smoke=4),
    length=Option(4096, "Tokens of a document", smoke=64),
    rows=Option(2, "Documents of a step"),
    remat=Option(False, "Recompute activations on both sides"),
    keep_products=Option(False, "Recompute no products in m3jax's --remat"),
    tuned=Option(False, "Let XLA time kernels for each of m3jax's products"),
)


def measure(args):
    """Yield a row for each side, timed in a process of its own."""
    failed = []
    for side in ("m3jax", "transformers"):
        on_host = args.smoke or side == "transformers"  # torch alone has the GPU then
        environment = {"JAX_PLATFORMS": "cpu"} if on_host else {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
        try:
            with start_part(args, side, env=environment) as process:
                yield from rows_of(process)
        except ChildProcessError as error:
            failed.append(f"{side}: {error}")
    if failed:
        raise SystemExit("; ".join(failed))


def part(args):
    """Yield one side's row."""
    config = M3Config.tiny()
    if not args.smoke:
        config = replace(
            four_layers(), num_local_experts=args.experts, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=(1,)
        )
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (args.rows, args.length)).astype(np.int32)
    step, read_device = (ours if args.part == "m3jax" else theirs)(config, tokens, args)
    times, losses = [], []
    # The first step compiles, and the second may still grow the memory of an allocator: neither counts.
    for _ in range(args.repeats + 2):
        began = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - began)
    seconds, count = statistics.median(times[2:]), args.rows * args.length
    rate = flops(config, args.length, bool(args.lora)) * count / seconds
    peak, device = read_device()
    yield {
        "side": args.part, "ms a step": 1e3 * seconds, "tokens/s": count / seconds,
        "of peak": rate / PEAK, "first step, s": times[0], "first loss": losses[0], "last loss": losses[-1],
        "GB at most": peak / 1e9, "device": device,
    }  # fmt: skip


def ours(config: M3Config, tokens: np.ndarray, args) -> tuple[Callable, Callable]:
    """Return m3jax's step, which gives the loss, and a function that gives the largest bytes and the device."""
    import jax
    import jax.numpy as jnp

    from m3jax.model import init
    from m3jax.train import lora
    from m3jax.train.accumulate import Accumulated
    from m3jax.train.conversations import Example
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
    del model  # the state, or the batch, has it
    loss_fn = Accumulated(loss, accumulated) if accumulated else loss
    take_step = train_step
    if args.tuned:
        statics = ("optimizer", "loss_fn", "balance_rate")
        take_step = jax.jit(train_step.__wrapped__, static_argnames=statics, donate_argnames="state")

    def step() -> float:
        nonlocal state
        state, metrics = take_step(state, batch, optimizer=optimizer, loss_fn=loss_fn, balance_rate=0.0)
        return float(metrics[shown])

    device = jax.devices()[0]
    return step, lambda: ((device.memory_stats() or {}).get("peak_bytes_in_use", 0), device.device_kind)


def rollouts_of(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets that were drawn, bool [B T-1], and the rows' advantages, [B]: 1 and -0.5 in turn."""
    rows, length = tokens.shape
    drawn = np.broadcast_to(np.arange(1, length) >= length // 4, (rows, length - 1))
    return drawn, np.where(np.arange(rows) % 2, -0.5, 1.0).astype(np.float32)


def theirs(config: M3Config, tokens: np.ndarray, args) -> tuple[Callable, Callable]:
    """Return transformers' step, which gives the loss, and a function that gives the largest bytes and the device."""
    import torch
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    from benchmarks.training import torch_update

    device = "cpu" if args.smoke else "cuda"

    class Adapter(torch.nn.Module):
        """A linear layer with an adapter, as PEFT computes one."""

        def __init__(self, base: torch.nn.Linear, rank: int):
            super().__init__()
            make = lambda *shape: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
            self.base, self.scale = base, 2.0
            self.a, self.b = make(rank, base.in_features), make(base.out_features, rank)
            torch.nn.init.kaiming_uniform_(self.a, a=5**0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.scale * (x @ self.a.to(x.dtype).T @ self.b.to(x.dtype).T)

    settings = MiniMaxM3VLConfig.from_dict(config.to_dict()).text_config
    settings._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if args.lora else torch.float32)
    with torch.device(device):
        model = MiniMaxM3VLForCausalLM(settings).train()
    torch.set_default_dtype(torch.float32)
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
    update = torch_update(trained, RATE, fused=device == "cuda" or None)
    ids = torch.from_numpy(tokens).long().to(device)
    drawn, advantages = (torch.from_numpy(np.array(x)).to(device) for x in rollouts_of(tokens))

    def read_loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=not args.lora):
            if args.loss == "sft":
                return model(input_ids=ids, labels=ids, use_cache=False).loss
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        new = -torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        ratio = (new - new.detach()).exp()  # on policy
        gains = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
        return -(gains * drawn).sum() / drawn.sum()

    on_gpu = lambda: (torch.cuda.max_memory_allocated(), torch.cuda.get_device_name())
    return lambda: update(read_loss()), (lambda: (0, "cpu")) if args.smoke else on_gpu


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
