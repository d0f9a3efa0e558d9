"""A dense model becomes an MSA model: its index branch is trained against its own attention, then blocks are selected.

Two phases (paper, MSA-CPT). The warm-up leaves the model as it is, to the bit, and dense: the index branch alone learns
where the heads of its group look. Then each query reads the blocks that the branch selects; the model learns to do with
these, and the branch goes on learning, on the selected blocks alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from m3jax.model import M3
from m3jax.model.context import Context
from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.parallel import read
from m3jax.progress import activity
from m3jax.spec.msa import chosen_tokens
from m3jax.train.conversations import Example
from m3jax.train.dense import index_weights, with_index_weights
from m3jax.train.losses import drawn_offset, mean_attention
from m3jax.train.packing import PackedPages, pack, packed_row, slots_of
from m3jax.train.programs import jit_for_training
from m3jax.train.sft import (
    ROWS,
    PackedBatches,
    SFTLoss,
    SFTSettings,
    check_rows,
    check_same_run,
    fine_tune,
    index_losses,
)
from m3jax.train.sft import token_losses as losses_of_tokens
from m3jax.train.step import cast_weights, check_trainable, first_state, init_state, make_optimizer, on_data_axis

WARM_UP, SELECTING = "warm-up", "sparse"  # the phases, as a line of the metrics has them
_SCORE_BUDGET = 1 << 26  # probabilities of one chunk of queries


@dataclass(frozen=True)
class WarmUpLoss:
    """The loss of the index branch on a dense model, as a function of the branch's weights alone.

    It is the share of one micro-batch in a step's loss: the sum is divided by the tokens of the whole step.

    Attributes:
      index_stride: every how many tokens of a row it looks at, from an offset that is drawn for each step.
      compute_dtype: activations and weights of the forward pass; the branch's own weights are float32.
    """

    index_stride: int = 8
    compute_dtype: str = "bfloat16"

    def __call__(
        self, weights: Mapping[str, Float[Array, "..."]], batch: Mapping[str, Any]
    ) -> tuple[Float[Array, ""], dict[str, Any]]:
        """Return the loss and its parts.

        Args:
          weights: of the index branch, by name.
          batch: tokens and positions [B T], as `packed_row` makes them; num_tokens of the step, step, as `train_step`
            adds it, and base, the model.

        Returns:
          (loss, {"kl"}), in nats: the mean over sparse layers, tokens and KV heads of the divergence from the heads'
          attention to the branch's distribution, over all that a query sees.
        """
        model = cast_weights(with_index_weights(batch["base"], weights), self.compute_dtype)
        model = model.with_dense().with_training_paths(PackedPages, "auto")
        offset = drawn_offset(batch["step"], self.index_stride)
        probe = partial(index_losses, block_size=model.config.index_block_size, offset=offset, stride=self.index_stride)
        out = model.run(batch["tokens"], positions=batch["positions"], probe=probe, logits=False)
        of_layers = jnp.concatenate([measures["kl"] for measures in out.probed if "kl" in measures])  # [L]
        kl = jnp.mean(of_layers) * jnp.sum(batch["positions"] >= 0) / batch["num_tokens"]
        return kl, {"kl": kl}


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """The settings of a conversion.

    Attributes:
      warm_up: of the phase that trains the index branch alone.
      sparse: of the phase that trains the model under its selection; `index_loss` is the weight of the branch's loss,
        0 leaves the branch as the warm-up left it, to the bit (T32).
    """

    warm_up: SFTSettings
    sparse: SFTSettings


def convert(
    model: M3,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    settings: ConvertSettings,
    folder: str | Path,
    metrics: str | Path | None = None,
    *,
    origin: Mapping[str, Any] | None = None,
    save_every: int = 100,
    say: Callable[[str], None] = print,
) -> tuple[M3, dict[str, Any]]:
    """Run both phases of a conversion, or what a run before has left of them.

    Args:
      model: in float32, with an index branch that was never trained (`m3jax.train.dense.read_dense`). Its mesh divides
        the work; the mesh's data axis divides the rows.
      examples: documents to learn from; all their tokens are learnt.
      held_out: documents to measure on, before, between and after the phases.
      settings: of the run.
      folder: of the states; a run whose folder has one goes on from there.
      metrics: a file of JSON lines, one a step.
      origin: what the run begins with and reads, by name; a folder's run goes on with the same alone.
      save_every: steps after which the state is kept.
      say: is told about a line every few seconds, and what was measured.

    Returns:
      The converted model, and what `measure` found: "before", "after_warm_up" and "after".

    Raises:
      ValueError: a model without an index branch, rows in which nothing is ever left out or that the mesh does not
        divide, a folder of another run, a state that cannot be read or kept.
    """
    check_trainable(model)
    check_rows(settings.sparse.rows, model.mesh)
    config, folder = model.config, Path(folder)
    if not index_weights(model):
        raise ValueError("no layer of this model selects blocks: there is nothing to convert; give fewer dense layers")
    budget = config.index_topk_blocks * config.index_block_size
    if settings.sparse.length <= budget:
        raise ValueError(f"rows of {settings.sparse.length} tokens: a query reads up to {budget} of them, so that no "
                         "block would ever be left out; make rows longer, or keep fewer blocks")  # fmt: skip
    warm_up, sparse = settings.warm_up, settings.sparse
    batches = {phase: PackedBatches(examples, of, config.index_block_size) for phase, of in
               ((WARM_UP, warm_up), (SELECTING, sparse))}  # fmt: skip
    # Before anything is computed: hosts that read other data or settings would wait for one another.
    check_same_run(folder / WARM_UP, dict(origin or {}) | asdict(warm_up))
    report, dtype = {}, sparse.compute_dtype
    shared = dict(origin=origin, mesh=model.mesh, save_every=save_every, say=say)

    def look(name: str, at: M3) -> None:
        with activity(about=(config, settings)) as line:
            line.say("measuring on held-out documents")
            report[name] = measure(at, held_out, settings.sparse.length, settings.sparse.rows, dtype)
        say(f"{name.replace('_', ' ')}: {in_words(report[name])}")

    look("before", model)
    optimizer = make_optimizer(warm_up.rate, warm_up.weight_decay, clip_norm=warm_up.clip_norm)
    state = first_state(index_weights(model), optimizer, model)
    loss_fn = WarmUpLoss(compute_dtype=warm_up.compute_dtype)
    base = {"base": cast_weights(model, warm_up.compute_dtype)}
    state = fine_tune(
        state, batches[WARM_UP], optimizer, loss_fn, warm_up, folder / WARM_UP, metrics, shared=base,
        about={"phase": WARM_UP}, **shared,
    )  # fmt: skip
    del base
    model = with_index_weights(model, state.model)
    look("after_warm_up", model)

    optimizer = make_optimizer(
        sparse.rate, sparse.weight_decay, frozen_index=not sparse.index_loss, clip_norm=sparse.clip_norm
    )
    loss_fn = SFTLoss(sparse.index_loss, compute_dtype=sparse.compute_dtype, remat=sparse.remat)
    state = init_state(model, optimizer)
    del model  # the state has a copy
    state = fine_tune(
        state, batches[SELECTING], optimizer, loss_fn, sparse, folder / SELECTING, metrics, steps_before=warm_up.steps,
        about={"phase": SELECTING}, **shared,
    )  # fmt: skip
    look("after", state.model)
    return state.model, report


def measure(
    model: M3, documents: Sequence[Example], length: int, rows: int, compute_dtype: str = "float32"
) -> dict[str, Any]:
    """Return how a model predicts some documents, dense and with its selection, and what its selection catches.

    Args:
      model: with an index branch.
      documents: whose tokens all count.
      length: tokens of a row that they are packed into.
      rows: computed at a time; over a mesh a multiple of its data axis.
      compute_dtype: of weights and activations.

    Returns:
      "dense_loss" and "loss", in nats a token: of the same weights without and with selection. "caught", a figure a
      sparse layer: the share of attention's probability that lies in the selected blocks, of queries that leave some
      block out, mean over tokens and KV heads; "by_window", the same of the last J blocks. Attention is the one that
      the layer's heads would pay to all that they see. None where no query leaves a block out.
    """
    totals: Any = None
    for batch in _in_rows(documents, length, rows, model.config.index_block_size):
        found = read(_measures(model, on_data_axis(batch, model.mesh), compute_dtype))
        totals = found if totals is None else jax.tree.map(np.add, totals, found)
    targets, queries = float(totals["targets"]), float(totals["queries"])
    shares = lambda name: [float(x) / queries for x in totals[name]] if queries else None
    return {
        "dense_loss": float(totals["dense"]) / targets, "loss": float(totals["sparse"]) / targets,
        "caught": shares("caught"), "by_window": shares("window"),
    }  # fmt: skip


def in_words(measured: Mapping[str, Any]) -> str:
    """Return what `measure` found as a line.

    Args:
      measured: from `measure`.
    """
    caught, window = measured["caught"], measured["by_window"]
    of_mass = "no held-out query leaves a block out" if caught is None else (
        f"{np.mean(caught):.1%} of attention in the selected blocks, {np.mean(window):.1%} in the last ones"
    )  # fmt: skip
    return f"loss {measured['loss']:.4f}, dense {measured['dense_loss']:.4f}; {of_mass}"


def _in_rows(documents: Sequence[Example], length: int, rows: int, block_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the documents in batches of packed rows; the last one is filled up with empty rows."""
    packed = [
        packed_row([documents[i] for i in row], length, block_size)
        for row in pack([len(document.tokens) for document in documents], length, block_size)
    ]
    packed += [packed_row([], length, block_size)] * (-len(packed) % rows)
    for start in range(0, len(packed), rows):
        yield {name: np.stack([row[name] for row in packed[start : start + rows]]) for name in ROWS}


@partial(jit_for_training, static_argnames="compute_dtype")
def _measures(model: M3, batch: Mapping[str, Array], compute_dtype: str) -> dict[str, Array]:
    """Return sums over a batch: "dense" and "sparse" losses of "targets", "caught" and "window" [L] of "queries"."""
    model = cast_weights(model, compute_dtype).with_training_paths(PackedPages, "auto")
    config, positions = model.config, batch["positions"]
    probe = partial(_caught, block_size=config.index_block_size, num_kept=config.index_topk_blocks)

    def read(model: M3) -> tuple[Float[Array, ""], list[dict[str, Array]]]:
        out = model.run(batch["tokens"], positions=positions, probe=probe, logits=False)
        losses = losses_of_tokens(model, out.hidden, batch["targets"])
        return jnp.sum(losses * batch["weights"]), [layers for layers in out.probed if layers]

    dense, _ = read(model.with_dense())
    sparse, kept = read(model)
    is_counted = positions // config.index_block_size >= config.index_topk_blocks
    joined = {name: jnp.concatenate([layers[name] for layers in kept]) for name in ("caught", "window")}
    return joined | {
        "dense": dense, "sparse": sparse, "targets": jnp.sum(batch["weights"]), "queries": jnp.sum(is_counted),
    }  # fmt: skip


def _caught(
    values: Mapping[str, Array], context: Context, block_size: int, num_kept: int
) -> dict[str, Float[Array, ""]]:
    """Return the probability in a layer's selected blocks and in the last J, summed over queries that leave some out.

    {} of a layer that selects nothing.
    """
    if "blocks" not in values:
        return {}
    k, positions = values["k"], context.positions
    keys = jnp.arange(k.shape[1], dtype=jnp.int32)

    def of_chunk(
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"],
        blocks: Int[Array, "B T K J"],
    ) -> Float[Array, "B T 2"]:
        first = (slots - positions)[..., None]
        visible = (keys >= first) & (keys <= slots[..., None])  # [B T S]: of the query's own document (T29)
        attention = mean_attention(q, k, visible[:, None])  # [B K T S]
        chosen = chosen_tokens(blocks.swapaxes(1, 2), k.shape[1], block_size)  # [B K T S]
        in_window = keys // block_size > (slots // block_size)[..., None] - num_kept  # [B T S]
        mass = [jnp.mean(jnp.sum(attention * x, axis=-1), axis=1) for x in (chosen, in_window[:, None])]  # [B T] each
        counts = positions // block_size >= num_kept
        return jnp.where(counts[..., None], jnp.stack(mass, axis=-1), 0.0)

    q = values["q"]
    chunk = rows_within(_SCORE_BUDGET, q.shape[0] * 2 * q.shape[2] * k.shape[1], q.shape[1])
    mass = map_chunks(of_chunk, chunk, 1, q, positions, slots_of(positions), values["blocks"].swapaxes(1, 2))
    caught, window = jnp.sum(mass, axis=(0, 1))
    return {"caught": caught, "window": window}
