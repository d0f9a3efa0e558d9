"""Train the embedded checkpoint's draft on what that checkpoint writes.

    python scripts/train_eagle3.py --out runs/draft            # 5 minutes on a GPU
    python scripts/train_eagle3.py --out runs/try --short      # a few tiny steps, to see that everything works

Writes the draft in the hub's layout to OUT/draft, and what was measured to OUT/report.json. See docs/speculative.md.
"""

import argparse
import dataclasses
import sys
import time
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny.arguments import add_run_arguments, corpora, keep_report
from tiny.corpus import Corpus

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint.draft import save_draft
from m3jax.decoding import Eagle3Drafter, Params, Sampling, build_engine
from m3jax.model import M3
from m3jax.model.eagle3 import Eagle3, Eagle3Config, init
from m3jax.progress import activity
from m3jax.text import Tokenizer
from m3jax.train.eagle3 import continuations, draft_optimizer, draft_train_step, init_draft_state
from m3jax.train.fused import fuse

CONFIG = Eagle3Config(
    hidden_size=192, vocab_size=2048, draft_vocab_size=2048, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
    intermediate_size=768, taps=(1, 3, 5), rope_theta=1e5, fc_norm=True, norm_output=True, own_embedding=False,
    own_head=False,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The numbers of rows, tokens, steps and prompts of a run."""

    rows: int = 6144
    length: int = 512
    decoding: int = 512
    batch: int = 64
    steps: int = 3000
    unroll: int = 5
    prompts: int = 64
    new: int = 128


SHORT = Sizes(rows=8, length=64, decoding=8, batch=4, steps=4, unroll=2, prompts=2, new=16)
LEARNING_RATE = 2e-3
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


def main(argv: list[str] | None = None) -> None:
    """Generate, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = SHORT if args.short else Sizes()
    model = m3jax.load()
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    splits = corpora(tokenizer, args)
    begin = time.perf_counter()
    written = continuations(
        model, beginnings(splits["train"], sizes.rows, sizes.length, args.seed), length=sizes.length,
        temperatures=TEMPERATURES, batch=sizes.decoding,
    )  # fmt: skip
    print(f"{written.size} tokens of continuations in {time.perf_counter() - begin:.0f} s", flush=True)
    draft = train(model, splits["train"], written, sizes, args)
    save_draft(draft, args.out / "draft")
    begin = time.perf_counter()
    report = {"parameters": sum(x.size for x in jax.tree.leaves(draft))}
    report |= {f"temperature {t}": measure(model, draft, splits["validation"], sizes, t) for t in (0.0, 0.7, 1.0)}
    keep_report(report, args.out)
    print(f"measured in {time.perf_counter() - begin:.0f} s", flush=True)


def beginnings(corpus: Corpus, count: int, length: int, seed: int) -> list[list[int]]:
    """Draw beginnings of rows from code: a sixteenth to a half of a row each."""
    rng, prompts = np.random.default_rng(seed), []
    for _ in range(count):
        size = int(rng.integers(max(1, length // 16), length // 2 + 1))
        start = corpus.draw_start(rng, size)
        prompts.append(corpus.tokens[start : start + size].tolist())
    return prompts


def train(model: M3, corpus: Corpus, written: np.ndarray, sizes: Sizes, args: argparse.Namespace) -> Eagle3:
    """A draft trained on batches of which three quarters are what the target wrote, one quarter code as it is."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, sizes.steps // 20 + 1, sizes.steps, 0.0)
    optimizer = draft_optimizer(schedule)
    state = init_draft_state(init(CONFIG, args.seed), optimizer)
    fused_model, rng, begin = fuse(model), np.random.default_rng(args.seed), time.perf_counter()
    with activity(about=sizes) as line:
        for step in range(sizes.steps):
            continued = written[rng.integers(len(written), size=sizes.batch - sizes.batch // 4)]
            starts = [corpus.draw_start(rng, sizes.length) for _ in range(sizes.batch // 4)]
            code = np.stack([corpus.tokens[start : start + sizes.length].astype(np.int32) for start in starts])
            tokens = jnp.asarray(np.concatenate([continued, code]))
            with line.timed("compiling a training step") if step == 0 else nullcontext():
                state, metrics = draft_train_step(state, fused_model, tokens, optimizer, sizes.unroll)
            line.say(f"training: step {step + 1} of {sizes.steps}")
            if step % 200 == 199 or step + 1 == sizes.steps:
                values = {name: np.asarray(value).round(4).tolist() for name, value in metrics.items()}
                seconds = (time.perf_counter() - begin) / (step + 1)
                print(f"{step + 1:6d}/{sizes.steps} {seconds:.4f} s a step {values}", flush=True)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.draft)


def measure(model: M3, draft: Eagle3, corpus: Corpus, sizes: Sizes, temperature: float) -> dict:
    """Measure how much of a draft is accepted on continuations of held-out code, for K = 3 and 7."""
    rng, report = np.random.default_rng(7), {}
    prompt_length = 4 * model.config.index_block_size
    starts = [corpus.draw_start(rng, prompt_length) for _ in range(sizes.prompts)]
    for draft_tokens in (3, 7):
        engine = build_engine(
            model, rows=sizes.prompts, length=16 * model.config.index_block_size, prefill_chunk=prompt_length,
            prefill_rows=1, draft=Eagle3Drafter(draft), draft_tokens=draft_tokens,
        )  # fmt: skip
        for seed, start in enumerate(starts):
            sampling = Sampling(temperature=temperature, seed=seed)
            prompt = corpus.tokens[start : start + prompt_length].tolist()
            engine.add(prompt, Params(max_new_tokens=sizes.new, sampling=sampling))
        with activity() as line:
            while engine.busy:
                engine.step()
                line.say(f"measuring: temperature {temperature}, K = {draft_tokens}")
        acceptance = [round(share, 4) for share in engine.drafting.acceptance]
        mean_length = round(engine.drafting.mean_length, 4)
        report[f"K = {draft_tokens}"] = {"acceptance": acceptance, "mean_length": mean_length}
    return report


if __name__ == "__main__":
    sys.exit(main())
