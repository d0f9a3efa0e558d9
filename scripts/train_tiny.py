"""Train the embedded checkpoint: a small MSA model on Python source with keys to recall.

    python scripts/train_tiny.py --out runs/tiny            # train, or go on where the run stopped
    python scripts/train_tiny.py --out runs/dense --dense   # the same model with dense attention, to compare

The run keeps its state under OUT/state and writes a checkpoint in the hub's layout to OUT/model, with what was
measured in OUT/report.json. See docs/tiny.md.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from m3jax.assets import embedded_path
from m3jax.checkpoint import save
from m3jax.config import M3Config
from m3jax.model import M3, init
from m3jax.msa import SCHEDULES
from m3jax.progress import activity
from m3jax.text import Tokenizer
from m3jax.train.data import Corpus, PlainBatches, RecallBatches
from m3jax.train.evaluate import attention_caught, recall_accuracy, validation_loss
from m3jax.train.fused import fuse
from m3jax.train.step import TrainOptions, TrainState, cast_weights, init_state, make_optimizer, train_step

CONFIG = M3Config(
    vocab_size=2048, hidden_size=192, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
    intermediate_size=192, dense_intermediate_size=768, shared_intermediate_size=192, num_local_experts=8,
    num_experts_per_tok=2, layer_types=("full_attention", *["minimax_m3_sparse"] * 4),
    mlp_layer_types=("dense", *["sparse"] * 4), rotary_dim=16, index_n_heads=2, index_head_dim=32, index_block_size=16,
    index_topk_blocks=8, rope_theta=1e5, max_position_embeddings=8192, bos_token_id=0, eos_token_id=(1,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps of one kind."""

    name: str
    steps: int
    seq_len: int
    batch: int
    sparse: bool


# Dense warm-up, in which the index branch learns from whole rows, then sparse (docs/msa.md).
STAGES = (
    Stage("warm-up", 2000, 1024, 64, False),
    Stage("warm-up, long", 500, 4096, 16, False),
    Stage("sparse", 1800, 4096, 16, True),
)
SHORT = (Stage("warm-up", 3, 128, 2, False), Stage("sparse", 3, 256, 2, True))
KEEP_SECONDS = 60.0


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, train, measure."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if reason := _mismatch(args):
        parser.error(reason)
    stages = SHORT if args.short else STAGES
    if args.dense:
        stages = tuple(dataclasses.replace(s, sparse=False) for s in stages)
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    corpora = {
        split: Corpus.build(tokenizer, split, cache=args.out / f"{split}.npz", root=args.sources)
        for split in ("train", "validation")
    }
    begin = time.perf_counter()
    state = train(args, stages, corpora["train"])
    print(f"trained in {time.perf_counter() - begin:.0f} s", flush=True)
    model = cast_weights(_under(state.model, "dense" if args.dense else "mask"), "bfloat16")
    save(model, args.out / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_path() / name, args.out / "model" / name)
    begin = time.perf_counter()
    report = measure(fuse(model), corpora["validation"], args.short, args.dense)
    (args.out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(json.dumps(report, indent=2))
    print(f"measured in {time.perf_counter() - begin:.0f} s", flush=True)


def train(args: argparse.Namespace, stages: tuple[Stage, ...], corpus: Corpus) -> TrainState:
    """Run what is left of the stages, keeping the state as it goes."""
    optimizer = _optimizer(sum(stage.steps for stage in stages), args.learning_rate, args.dense)
    fused = args.schedule == "fused"
    options = TrainOptions(recall_weight=args.recall_weight, kl_weight=0.0 if args.dense else 1.0, fused=fused)
    state = init_state(init(CONFIG, args.seed), optimizer)
    settings = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(args.out.resolve() / "state", options=settings) as keeper:
        state = _restore(keeper, state)
        last_step = 0
        for stage in stages:
            last_step += stage.steps
            if int(state.step) < last_step:
                sparse_schedule = "mask" if fused else args.schedule
                state = _with_schedule(state, sparse_schedule if stage.sparse else "dense")
                batches = RecallBatches(corpus, stage.seq_len, stage.batch, args.seed)
                state = run_stage(stage.name, last_step, state, batches, optimizer, options, keeper)
    return state


@cache
def _optimizer(num_steps: int, learning_rate: float, frozen_index: bool) -> optax.GradientTransformation:
    """One object for the same settings: `train_step` is compiled for the object."""
    warmup_steps = min(200, num_steps // 4 + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, num_steps, 0.0)
    return make_optimizer(schedule, frozen_index=frozen_index)


def run_stage(
    name: str,
    last_step: int,
    state: TrainState,
    batches: RecallBatches,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
    keeper: ocp.CheckpointManager,
) -> TrainState:
    """The steps of one stage up to the last; batches are made one ahead, on another thread."""
    first_step = int(state.step)
    begin = last_kept = time.perf_counter()
    with ThreadPoolExecutor(1) as pool, activity(about=options) as line:
        next_batch = pool.submit(batches.__getitem__, first_step)
        for step in range(first_step, last_step):
            batch = next_batch.result()
            next_batch = pool.submit(batches.__getitem__, step + 1)
            arrays = {key: jnp.asarray(batch[key]) for key in ("tokens", "weights", "recall")}
            with line.timed(f"{name}: compiling a step") if step == first_step else nullcontext():
                state, metrics = train_step(state, arrays, optimizer, options)
            line.say(f"{name}: step {step + 1} of {last_step}")
            is_last = step + 1 == last_step
            if step % 100 == 99 or is_last:
                values = {key: round(float(value), 4) for key, value in metrics.items()}
                rate = (step + 1 - first_step) / (time.perf_counter() - begin)
                print(f"{name:>14} {step + 1:6d}/{last_step} {rate:6.2f} steps/s {values}", flush=True)
            if time.perf_counter() - last_kept >= KEEP_SECONDS or is_last:
                keeper.save(step + 1, args=ocp.args.StandardSave(_leaves(state)))
                last_kept = time.perf_counter()
    return state


def measure(model, corpus: Corpus, short: bool, dense: bool) -> dict:
    """Validation loss, recall by distance, and the attention mass that selection catches."""
    seq_len = 256 if short else 4096
    plain = PlainBatches(corpus, seq_len, 2 if short else 8)
    batches = [plain[i] for i in range(min(len(plain), 2 if short else 8))]
    distances = (64, 128) if short else (64, 256, 512, 1024, 2048, 3072, 3584)
    count, batch = (4, 4) if short else (256, 16)
    report = {"parameters": sum(x.size for x in jax.tree.leaves(model))}
    with activity(about=(seq_len, count)) as line:
        with line.timed("measuring the validation loss"):
            report["validation_loss"] = validation_loss(model, batches)
        report["recall"] = {}
        for distance in distances:
            with line.timed(f"measuring recall over {distance} tokens"):
                report["recall"] |= recall_accuracy(model, corpus, [distance], count, seq_len, batch=batch)
        if dense:
            return report
        with line.timed("measuring the validation loss with dense attention"):
            report["validation_loss_with_dense_attention"] = validation_loss(model.with_dense(), batches)
        tokens = np.concatenate([b["tokens"][:2, :-1] for b in batches])
        first = seq_len // 2 if short else None
        for name, random in (("caught", False), ("caught_by_random_blocks", True)):
            with line.timed(f"measuring attention {name.replace('_', ' ')}"):
                report[name] = attention_caught(model, tokens, random, first).astype(float).round(4).tolist()
    return report


def _mismatch(args: argparse.Namespace) -> str | None:
    """Why the run in the folder cannot go on under these arguments; a new folder remembers them."""
    names = ("dense", "short", "seed", "learning_rate", "recall_weight", "schedule")
    settings, path = {name: getattr(args, name) for name in names}, args.out / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2) + "\n")
        return None
    before = json.loads(path.read_text())
    wrong = [f"{k} = {before[k]!r}, not {v!r}" for k, v in settings.items() if before[k] != v]
    return f"{args.out} holds a run with {'; '.join(wrong)}: give the same, or another --out" if wrong else None


def _leaves(state: TrainState) -> dict[str, jax.Array]:
    """The arrays of a state by name, as they are kept: in the order of the tree."""
    return {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def _restore(keeper: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The state that was kept last, or the given one where none was."""
    step = keeper.latest_step()
    if step is None:
        return state
    print(f"going on from step {step}", flush=True)
    leaves = keeper.restore(step, args=ocp.args.StandardRestore(_leaves(state)))
    return jax.tree.unflatten(jax.tree.structure(state), [leaves[k] for k in sorted(leaves)])


def _with_schedule(state: TrainState, schedule: str) -> TrainState:
    """The optimiser's moments are models too, whose static schedule must follow the parameters'."""
    is_model = lambda x: isinstance(x, M3)
    return jax.tree.map(lambda x: _under(x, schedule) if is_model(x) else x, state, is_leaf=is_model)


def _under(model: M3, schedule: str) -> M3:
    """A model under a schedule, or, for "dense", attending to every block."""
    return model.with_dense() if schedule == "dense" else model.with_dense(False).with_schedule(schedule)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--dense", action="store_true", help="dense attention throughout, for comparison")
    parser.add_argument("--short", action="store_true", help="a few tiny steps, to see that everything works")
    parser.add_argument("--sources", type=Path, help="a standard library's folder; the running Python's by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--recall-weight", type=float, default=2.0, help="extra weight of recalled values")
    parser.add_argument(
        "--schedule",
        default="fused",
        choices=("fused", *SCHEDULES),
        help="sparse attention in training: m3jax.train.fused, or a schedule of m3jax.msa (default %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
