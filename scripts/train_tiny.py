"""Train the embedded checkpoint: a small MSA model on Python source with keys to recall.

    python scripts/train_tiny.py --out runs/tiny            # train, or go on where the run stopped
    python scripts/train_tiny.py --out runs/dense --dense   # the same model with dense attention, to compare

The run keeps its state under OUT/state and writes a checkpoint in the hub's layout to OUT/model, with what was
measured in OUT/report.json. See docs/tiny.md.
"""

import argparse
import dataclasses
import sys
import time
from functools import cache

import optax
from tiny.arguments import add_run_arguments, corpora, keep_model, keep_report, mismatch
from tiny.corpus import Corpus
from tiny.data import RecallBatches
from tiny.losses import KEYS, TinyLoss
from tiny.measure import measure

from m3jax.assets import embedded_path
from m3jax.config import M3Config
from m3jax.model import init
from m3jax.text import Tokenizer
from m3jax.train.fused import fuse
from m3jax.train.run import Stage, run_stages
from m3jax.train.step import TrainState, init_state, make_optimizer

CONFIG = M3Config(
    vocab_size=2048, hidden_size=192, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
    intermediate_size=192, dense_intermediate_size=768, shared_intermediate_size=192, num_local_experts=8,
    num_experts_per_tok=2, layer_types=("full_attention", *["minimax_m3_sparse"] * 4),
    mlp_layer_types=("dense", *["sparse"] * 4), rotary_dim=16, index_n_heads=2, index_head_dim=32, index_block_size=16,
    index_topk_blocks=8, rope_theta=1e5, max_position_embeddings=8192, bos_token_id=0, eos_token_id=(1,),
)  # fmt: skip

# Dense warm-up, in which the index branch learns from whole rows, then sparse (docs/msa.md).
STAGES = (
    Stage("warm-up", 2000, 1024, 64, False),
    Stage("warm-up, long", 500, 4096, 16, False),
    Stage("sparse", 1800, 4096, 16, True),
)
LEARNING_RATE = 2e-3
SHORT = (Stage("warm-up", 3, 128, 2, False), Stage("sparse", 3, 256, 2, True))


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    parser.add_argument("--dense", action="store_true", help="dense attention throughout, for comparison")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("dense", "short", "seed")
    if reason := mismatch(args.out, {name: getattr(args, name) for name in names}):
        parser.error(reason)
    stages = SHORT if args.short else STAGES
    if args.dense:
        stages = tuple(dataclasses.replace(s, sparse=False) for s in stages)
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    splits = corpora(tokenizer, args)
    begin = time.perf_counter()
    state = train(args, stages, splits["train"])
    print(f"trained in {time.perf_counter() - begin:.0f} s", flush=True)
    model = keep_model(state.model, embedded_path(), args.out / "model", "dense" if args.dense else "mask")
    begin = time.perf_counter()
    report = measure(fuse(model), splits["validation"], args.short, args.dense)
    keep_report(report, args.out)
    print(f"measured in {time.perf_counter() - begin:.0f} s", flush=True)


def train(args: argparse.Namespace, stages: tuple[Stage, ...], corpus: Corpus) -> TrainState:
    """Run what is left of the stages, keeping the state as it goes."""
    optimizer = _optimizer(sum(stage.steps for stage in stages), LEARNING_RATE, args.dense)
    loss = TinyLoss(recall_weight=2.0, kl_weight=0.0 if args.dense else 1.0, fused=True)
    return run_stages(
        args.out / "state",
        stages,
        init_state(init(CONFIG, args.seed), optimizer),
        optimizer,
        loss,
        batches=lambda stage: RecallBatches(corpus, stage.seq_len, stage.batch, args.seed),
        schedule="mask",
        keys=KEYS,
    )


@cache
def _optimizer(num_steps: int, learning_rate: float, frozen_index: bool) -> optax.GradientTransformation:
    """Return one optimiser for equal settings: `train_step` is compiled for the object."""
    warmup_steps = min(200, num_steps // 4 + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, num_steps, 0.0)
    return make_optimizer(schedule, frozen_index=frozen_index)


if __name__ == "__main__":
    sys.exit(main())
