"""`python -m m3jax.train convert`: a dense model becomes an MSA model (docs/training.md)."""

import argparse
import hashlib
import json
from functools import partial
from pathlib import Path

from m3jax.console import Parser, say
from m3jax.hosts.arguments import add_hosts
from m3jax.train.options import add_options, check_options, remat_of, run_on_hosts


def convert_parser(prog: str) -> Parser:
    """Return the parser of convert's arguments.

    Args:
      prog: the program's name.
    """
    out = Parser(prog, "Convert a dense model with grouped-query attention (Qwen3, Llama) to MiniMax Sparse Attention: "
                 "its index branch is added and trained, and blocks are selected.")  # fmt: skip
    add_options(out, "--model", required=True, help="a Qwen3 or a Llama in the hub's layout")
    out.add_argument("--data", metavar="FILE", required=True, help='JSON lines of {"text": ...} or {"tokens": [...]}')
    add_options(out, "--out", help="of the states, and of the MSA model")
    add_options(out, "--steps", help="of the optimiser, in both phases together")
    add_options(out, "--metrics")
    shape = out.add_argument_group("selection")
    shape.add_argument("--block-size", metavar="P", type=int, default=128, help="tokens of a block (default: 128)")
    shape.add_argument("--topk-blocks", metavar="J", type=int, default=16, help="that a query keeps (default: 16)")
    shape.add_argument("--index-dim", metavar="N", type=int, help="width of an index head (default: the heads' own)")
    shape.add_argument("--dense-layers", metavar="N", type=int, default=0, help="first layers that go on attending to "
                       "every block; MiniMax-M3 has 3 (default: 0)")  # fmt: skip
    sizes = out.add_argument_group("a step")
    sizes.add_argument("--length", metavar="N", type=int, help="tokens of a row, into which documents are "
                       "packed; a longer one is learnt in pieces (default: 8 J P, at most the context)")  # fmt: skip
    add_options(sizes, "--rows", "--accumulate")
    learning = out.add_argument_group("learning")
    learning.add_argument("--warm-up-steps", metavar="N", type=int, help="of --steps, in which the index branch alone "
                          "learns, from dense attention (default: a quarter)")  # fmt: skip
    learning.add_argument("--index-rate", metavar="X", type=float, default=1e-3, help="learning rate of the warm-up "
                          "(default: 1e-3)")  # fmt: skip
    add_options(learning, "--learning-rate", help="of the phase with selection (default: 1e-5)")
    add_options(learning, "--weight-decay", "--clip-norm")
    index = learning.add_mutually_exclusive_group()
    index.add_argument("--index-loss", metavar="X", type=float, default=1.0, help="weight of the index branch's loss "
                       "in the phase with selection (default: 1)")  # fmt: skip
    index.add_argument("--freeze-index", action="store_true", help="leave the index branch as the warm-up left it, to "
                       "the bit")  # fmt: skip
    learning.add_argument("--held-out", metavar="N", type=int, help="last documents that are measured and not learnt "
                          "(default: a twentieth, at least 1)")  # fmt: skip
    of_seed = "of the order of the documents, and of an index branch that begins at random (default: 0)"
    add_options(learning, "--seed", help=of_seed)
    ways = out.add_argument_group("how it is computed")
    add_options(ways, "--dtype", "--no-remat", "--keep-products", "--save-every", "--mesh")
    add_hosts(out)
    return out


def run_convert(args: argparse.Namespace) -> int:
    """Convert as the parsed arguments ask for.

    Raises:
      ValueError: a bad argument, a folder or a file that cannot be used.
      OSError: a file that cannot be read or written.
    """
    if not Path(args.data).is_file():
        raise ValueError(f"--data {args.data}: no such file")
    check_options(args)
    if args.steps < 2:
        raise ValueError(f"--steps {args.steps}: must be at least 2, one for each phase")
    warm_up_steps = max(1, args.steps // 4) if args.warm_up_steps is None else args.warm_up_steps
    if not 0 < warm_up_steps < args.steps:
        raise ValueError(f"--warm-up-steps {warm_up_steps}: must be from 1 to {args.steps - 1}, fewer than --steps")
    return run_on_hosts(args, "m3jax.train convert", lambda _: _convert(args, warm_up_steps))


def _convert(args: argparse.Namespace, warm_up_steps: int) -> None:
    """Convert on every process; the first one says how it goes, and writes what is not divided."""
    from m3jax.files import replace_file
    from m3jax.hosts.run import is_first
    from m3jax.parallel import as_mesh
    from m3jax.text import Tokenizer
    from m3jax.train.convert import ConvertSettings, convert
    from m3jax.train.dense import read_dense
    from m3jax.train.documents import load_documents
    from m3jax.train.keeping import save_trained
    from m3jax.train.sft import SFTSettings, check_rows

    mesh = as_mesh(args.mesh)
    check_rows(args.rows, mesh)
    model = read_dense(
        args.model, args.seed, mesh, block_size=args.block_size, topk_blocks=args.topk_blocks,
        index_dim=args.index_dim, dense_layers=args.dense_layers,
    )  # fmt: skip
    config = model.config
    context = config.max_position_embeddings // args.block_size * args.block_size
    length = min(8 * args.topk_blocks * args.block_size, context) if args.length is None else args.length
    if length > config.max_position_embeddings:
        raise ValueError(f"--length {length}: the model's context is {config.max_position_embeddings} tokens")
    shared = dict(
        length=length, rows=args.rows, accumulate=args.accumulate, weight_decay=args.weight_decay,
        clip_norm=args.clip_norm, compute_dtype=args.dtype, remat=remat_of(args, not args.no_remat),
    )  # fmt: skip
    settings = ConvertSettings(
        warm_up=SFTSettings(steps=warm_up_steps, learning_rate=args.index_rate, seed=args.seed, **shared),
        # Another seed: documents come in another order than in the warm-up.
        sparse=SFTSettings(
            steps=args.steps - warm_up_steps, learning_rate=args.learning_rate, seed=args.seed + 1,
            index_loss=0.0 if args.freeze_index else args.index_loss, **shared,
        ),
    )  # fmt: skip
    tokenizer = partial(Tokenizer.from_pretrained, args.model)
    documents = load_documents(args.data, tokenizer, config.vocab_size, length)
    num_held_out = max(1, len(documents) // 20) if args.held_out is None else args.held_out
    if not 0 < num_held_out < len(documents):
        raise ValueError(f"--held-out {num_held_out}: the data is {len(documents)} documents of at most {length} "
                         "tokens; measure on 1 or more of them, and leave 1 or more to learn from")  # fmt: skip
    learnt, held_out = documents[:-num_held_out], documents[-num_held_out:]
    origin = {
        "model": str(args.model), "data": hashlib.sha256(Path(args.data).read_bytes()).hexdigest(),
        "held_out": num_held_out, "block_size": args.block_size, "topk_blocks": args.topk_blocks,
        "index_dim": config.index_head_dim, "dense_layers": args.dense_layers,
    }  # fmt: skip
    tell = say if is_first() else lambda text: None
    metrics = (args.metrics or args.out / "metrics.jsonl") if is_first() else None
    converted, report = convert(
        model, learnt, held_out, settings, args.out, metrics, origin=origin, save_every=args.save_every, say=tell
    )
    layout = save_trained(converted, args.out / "model", args.model)
    if is_first():
        replace_file(args.out / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    before, after = report["before"]["dense_loss"], report["after"]["loss"]
    tell(f"held out: loss {before:.4f} before, dense, and {after:.4f} after ({after / before - 1:+.2%})")
    tell(f"the MSA model is in {args.out / 'model'}{layout}, with float32 weights")
