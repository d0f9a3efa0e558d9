"""`python -m m3jax.train sft` and `merge`: learn from conversations, and add adapters to weights (docs/training.md)."""

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

from m3jax.console import Parser, say
from m3jax.hosts.arguments import add_hosts
from m3jax.train.options import add_options, check_options, remat_of, run_on_hosts


def sft_parser(prog: str) -> Parser:
    """Return the parser of sft's arguments.

    Args:
      prog: the program's name.
    """
    out = Parser(prog, "Fine-tune a model on conversations: it learns to write what the assistant wrote in them.")
    add_options(out, "--model", "--out", "--steps", "--metrics")
    out.add_argument("--data", metavar="FILE", required=True, help='JSON lines of {"messages": [...]}, with "tools" '
                     'and "thinking_mode" where a conversation has them')  # fmt: skip
    out.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard's events too; needs tensorboardX")
    sizes = out.add_argument_group("a step")
    sizes.add_argument("--length", metavar="N", type=int, help="tokens of a row, into which conversations are packed "
                       "(default: the longest conversation's, at least 1024)")  # fmt: skip
    add_options(sizes, "--rows", "--accumulate")
    learning = out.add_argument_group("learning")
    add_options(learning, "--learning-rate", "--warmup-steps", "--weight-decay", "--clip-norm")
    learning.add_argument("--schedule", choices=("cosine", "linear", "constant"), default="cosine", help="of the "
                          "learning rate behind the warm-up (default: cosine)")  # fmt: skip
    learning.add_argument("--end-rate", metavar="X", type=float, default=0.0, help="of the last step (default: 0)")
    index = learning.add_mutually_exclusive_group()
    index.add_argument("--index-loss", metavar="X", type=float, default=0.0, help="weight of the loss that aligns the "
                       "index branch with attention (default: 0, which leaves the branch as it is)")  # fmt: skip
    index.add_argument("--freeze-index", action="store_true", help="leave the index branch as it is, to the bit: the "
                       "default, said aloud")  # fmt: skip
    add_options(learning, "--seed", help="of the order of the conversations (default: 0)")
    lora = out.add_argument_group("adapters (LoRA)")
    lora.add_argument("--lora", metavar="RANK", type=int, help="train adapters of this rank, and nothing else")
    lora.add_argument("--lora-alpha", metavar="X", type=float, help="they count alpha / rank times (default: 2 RANK)")
    lora.add_argument("--lora-targets", metavar="NAMES", help="attention, experts or both with a comma (default: both)")
    lora.add_argument("--adapter", metavar="DIR", help="go on from these adapters, in PEFT's layout")
    ways = out.add_argument_group("how it is computed")
    add_options(ways, "--dtype", "--no-remat", "--keep-products", "--save-every", "--mesh")
    add_hosts(out)
    return out


def run_sft(args: argparse.Namespace) -> int:
    """Fine-tune as the parsed arguments ask for.

    Raises:
      ValueError: a bad argument, a folder or a file that cannot be used.
      OSError: a file that cannot be read or written.
    """
    if not Path(args.data).is_file():
        raise ValueError(f"--data {args.data}: no such file")
    if args.adapter and (args.lora or args.lora_alpha or args.lora_targets):
        raise ValueError("--adapter has a rank, an alpha and targets of its own: leave --lora, --lora-alpha and "
                         "--lora-targets out")  # fmt: skip
    if not args.lora and (args.lora_alpha or args.lora_targets):
        raise ValueError("--lora-alpha and --lora-targets: give --lora RANK with them")
    check_options(args)
    return run_on_hosts(args, "m3jax.train sft", lambda _: _train(args))


def _train(args: argparse.Namespace) -> None:
    """Fine-tune on every process; the first one says how it goes, and writes what is not divided."""
    from m3jax.assets import embedded_path
    from m3jax.checkpoint import load
    from m3jax.dialogue.answer import stop_ids
    from m3jax.hosts.run import is_first
    from m3jax.parallel import as_mesh
    from m3jax.text import ChatTemplate, Tokenizer
    from m3jax.train import lora
    from m3jax.train.conversations import load_examples
    from m3jax.train.keeping import save_trained
    from m3jax.train.sft import PackedBatches, SFTLoss, SFTSettings, check_rows, fine_tune, writer_of_events
    from m3jax.train.step import init_state, make_optimizer

    if args.tensorboard is not None:
        writer_of_events()  # a missing library is said before the model is read
    folder = embedded_path() if args.model is None else Path(args.model)
    tokenizer, template = Tokenizer.from_pretrained(folder), ChatTemplate.from_folder(folder)
    has_adapters = bool(args.lora or args.adapter)
    settings = SFTSettings(
        steps=args.steps, length=args.length or 1, rows=args.rows, accumulate=args.accumulate,
        learning_rate=args.learning_rate, schedule=args.schedule, warmup_steps=args.warmup_steps,
        end_rate=args.end_rate, weight_decay=args.weight_decay, clip_norm=args.clip_norm, index_loss=args.index_loss,
        compute_dtype=args.dtype, remat=remat_of(args, not args.no_remat), seed=args.seed,
    )  # fmt: skip
    if args.lora:
        targets = lora.TARGETS if args.lora_targets is None else tuple(args.lora_targets.split(","))
        shape = lora.LoraSettings(args.lora, args.lora_alpha or 2.0 * args.lora, targets)
    if has_adapters and settings.index_loss:
        raise ValueError("--index-loss trains the index branch, which has no adapters: leave one of the two out")
    mesh = as_mesh(args.mesh)
    # Beneath adapters no weight moves: it need not be held wider than it is computed with.
    model = load(args.model, dtype=args.dtype if has_adapters else "float32", mesh=mesh)
    block_size, context = model.config.index_block_size, model.config.max_position_embeddings
    end_ids = stop_ids(tokenizer, model.config.eos_token_id)
    examples = load_examples(args.data, template, tokenizer, end_ids, min(args.length or context, context))
    longest = max(1024, *(len(example.tokens) for example in examples))
    settings = replace(settings, length=args.length or -(-longest // block_size) * block_size)
    check_rows(settings.rows, mesh)
    batches = PackedBatches(examples, settings, block_size)
    loss_fn = SFTLoss(settings.index_loss, compute_dtype=settings.compute_dtype, remat=settings.remat)
    optimizer = make_optimizer(
        settings.rate, settings.weight_decay, frozen_index=not settings.index_loss, frozen_vision=True,
        clip_norm=settings.clip_norm,
    )  # fmt: skip
    origin = {"model": str(folder), "data": hashlib.sha256(Path(args.data).read_bytes()).hexdigest()}
    tell = say if is_first() else lambda text: None
    written = dict(metrics=args.metrics or args.out / "metrics.jsonl", tensorboard=args.tensorboard)
    options = dict(mesh=mesh, save_every=args.save_every, say=tell, **(written if is_first() else {}))
    if not has_adapters:
        state = init_state(model, optimizer)
        del model  # the state has a copy
        state = fine_tune(state, batches, optimizer, loss_fn, settings, args.out, origin=origin, **options)
        layout = save_trained(state.model, args.out / "model", folder)
        tell(f"the trained model is in {args.out / 'model'}{layout}, with float32 weights")
        return
    if args.adapter:
        adapters, shape = lora.load_adapters(args.adapter, model)
    else:
        adapters = lora.init_adapters(model, shape, settings.seed)
    origin |= {"adapter": args.adapter, "rank": shape.rank, "alpha": shape.alpha, "targets": list(shape.targets)}
    state = lora.init_adapter_state(adapters, optimizer)
    loss_fn = lora.LoraLoss(loss_fn, shape.scale)
    shared = {"base": model}
    state = fine_tune(state, batches, optimizer, loss_fn, settings, args.out, origin=origin, shared=shared, **options)
    lora.save_adapters(state.model, shape, model, args.out / "adapter", base=str(folder))
    tell(f"the adapters are in {args.out / 'adapter'}, in PEFT's layout; `merge` adds them to the weights")


def merge_parser(prog: str) -> Parser:
    """Return the parser of merge's arguments.

    Args:
      prog: the program's name.
    """
    out = Parser(prog, "Add adapters in PEFT's layout to the weights of the model that they were trained on.")
    add_options(out, "--model")
    out.add_argument("--adapter", metavar="DIR", required=True, help="with adapter_config.json")
    add_options(out, "--out", help="of the merged model, in the hub's layout")
    add_options(out, "--dtype", help="of its weights (default: bfloat16)")
    return out


def run_merge(args: argparse.Namespace) -> int:
    """Write a model with adapters merged into its weights, which are read in float32 and rounded once.

    Raises:
      ValueError: a folder that cannot be used, adapters of another model.
      OSError: a file that cannot be read or written.
    """
    from m3jax.assets import embedded_path
    from m3jax.checkpoint import load, save
    from m3jax.train.lora import merge_folder
    from m3jax.train.step import cast_weights

    merged = merge_folder(load(args.model, dtype="float32"), args.adapter)
    save(cast_weights(merged, args.dtype), args.out, copy_from=args.model or embedded_path())
    return 0
