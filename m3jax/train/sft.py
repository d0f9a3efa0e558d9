"""Supervised fine-tuning: a model learns to write what the assistant wrote in conversations.

One step reads `accumulate` micro-batches of packed rows. Which rows those are is a function of the settings and of the
step's number alone, so that a run goes on where it stopped.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from m3jax.execution import Remat
from m3jax.files import read_json, replace_file
from m3jax.model import M3
from m3jax.model.context import Context
from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.progress import activity
from m3jax.train.accumulate import Accumulated
from m3jax.train.conversations import Example
from m3jax.train.keeping import keep, keep_whole, restored, states_in
from m3jax.train.losses import drawn_offset, strided_index_kl
from m3jax.train.metric_lines import MetricLines
from m3jax.train.packing import pack, packed_row, slots_of, with_fast_gradients
from m3jax.train.run import Batches
from m3jax.train.step import LossFn, TrainState, cast_weights, check_trainable, on_data_axis, train_step

ROWS = ("tokens", "positions", "targets", "weights")  # of a batch: [micro-batches rows T]
_LOGITS_BUDGET = 1 << 24  # logits that are held at once


@dataclass(frozen=True, kw_only=True)
class SFTSettings:
    """The settings of a run that decide what is learnt; a run goes on with the same ones alone.

    Attributes:
      steps: optimiser steps.
      length: tokens of a row, a multiple of the model's block size.
      rows: of a micro-batch.
      accumulate: micro-batches of a step.
      learning_rate: reached after `warmup_steps` steps.
      schedule: how the learning rate goes on behind that, to `end_rate` at the last step: "constant" keeps it.
      warmup_steps: over which it rises from 0.
      end_rate: of the last step.
      weight_decay: of AdamW.
      clip_norm: the largest norm of a step's gradient.
      index_loss: weight of the index branch's loss; 0 leaves the branch as it is, to the bit (T32).
      compute_dtype: of activations and weights in a pass; the master weights are float32.
      remat: what the backward pass recomputes (`m3jax.execution.Compute`): the blocks and experts that were chosen.
      seed: of the order of the conversations.
    """

    steps: int
    length: int
    rows: int = 1
    accumulate: int = 1
    learning_rate: float = 1e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    end_rate: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    index_loss: float = 0.0
    compute_dtype: str = "bfloat16"
    remat: Remat = True
    seed: int = 0

    def __post_init__(self):
        least = dict(steps=1, length=1, rows=1, accumulate=1, warmup_steps=0, end_rate=0, weight_decay=0, index_loss=0)
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {smallest}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm = {self.clip_norm}: must be above 0")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise ValueError(f"schedule = {self.schedule!r}: choose of cosine, linear, constant")
        if self.warmup_steps >= self.steps and self.warmup_steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps}: must be fewer than the run's {self.steps} steps")

    @property
    def rate(self) -> optax.Schedule:
        """The learning rate by step."""
        after, peak = max(1, self.steps - self.warmup_steps), self.learning_rate
        behind = {
            "cosine": lambda: optax.cosine_decay_schedule(peak, after, self.end_rate / peak if peak else 0.0),
            "linear": lambda: optax.linear_schedule(peak, self.end_rate, after),
            "constant": lambda: optax.constant_schedule(peak),
        }[self.schedule]()
        return optax.join_schedules([optax.linear_schedule(0.0, peak, self.warmup_steps), behind], [self.warmup_steps])


@dataclass(frozen=True)
class SFTLoss:
    """The loss of packed conversations: the next token where the assistant wrote it, and the index branch's.

    It is the share of one micro-batch in a step's loss: sums are divided by the counts of the whole step.

    Attributes:
      index_loss: weight of the index loss, the mean over sparse layers; 0 leaves it out.
      index_stride: every how many tokens of a row the index loss looks at.
      compute_dtype: activations and weights of the forward pass; the master weights stay float32.
      remat: what the backward pass recomputes (`m3jax.execution.Compute`).
    """

    index_loss: float = 0.0
    index_stride: int = 8
    compute_dtype: str = "bfloat16"
    remat: Remat = True

    def __call__(self, model: M3, batch: Mapping[str, Any]) -> tuple[Float[Array, ""], dict[str, Any]]:
        """Return the loss and its parts.

        Args:
          model: float32 master weights.
          batch: tokens, positions, targets and weights [B T], as `packed_row` makes them; num_targets, the sum of the
            step's weights, num_tokens, of its tokens, and step, as `train_step` adds it.

        Returns:
          (loss, {"lm"} and with an index loss {"kl"}), in nats.

        Raises:
          ValueError: weights in MXFP8, which no step could move.
        """
        check_trainable(model)
        model = with_fast_gradients(cast_weights(model, self.compute_dtype))
        tokens, positions = batch["tokens"], batch["positions"]
        offset = drawn_offset(batch["step"], self.index_stride)
        probe = partial(index_losses, block_size=model.config.index_block_size, offset=offset, stride=self.index_stride)
        out = model.run(
            tokens,
            positions=positions,
            probe=probe if self.index_loss else None,
            remat=self.remat,
            logits=False,
        )
        losses = token_losses(model, out.hidden, batch["targets"])
        lm = jnp.sum(losses * batch["weights"]) / batch["num_targets"]
        if not self.index_loss:
            return lm, {"lm": lm}
        of_layers = jnp.concatenate([measures["kl"] for measures in out.probed if "kl" in measures])  # [L]
        kl = jnp.mean(of_layers) * jnp.sum(positions >= 0) / batch["num_tokens"]
        return lm + self.index_loss * kl, {"lm": lm, "kl": kl}


def index_losses(
    values: Mapping[str, Array], context: Context, block_size: int, offset: Int[Array, ""], stride: int
) -> dict[str, Array]:
    """Return {"kl"}, the index loss of a layer with an index branch in packed rows; {} of another layer.

    The loss is on the blocks that the layer selected, or, where it attends to every block, on all that a query sees.

    Args:
      values: the layer's, by name.
      context: of the call.
      block_size: P.
      offset: first token of a row that counts.
      stride: from one token that counts to the next.
    """
    if "index_q" not in values:
        return {}
    slots = slots_of(context.positions)
    first_keys = slots - context.positions
    return {"kl": strided_index_kl(values, context, slots, offset, stride, block_size, first_keys)}


def token_losses(model: M3, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the cross-entropy of each target in nats; the logits of a few tokens are held at a time.

    Args:
      model: whose head is read.
      hidden: what the final norm gave.
      targets: token ids.
    """

    def of_chunk(hidden, targets):
        logits = model.unembed(hidden).astype(jnp.float32)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)

    chunk = rows_within(_LOGITS_BUDGET, hidden.shape[0] * model.config.vocab_size, hidden.shape[1])
    return map_chunks(of_chunk, chunk, 1, hidden, targets)


class PackedBatches:
    """The batches of a run by the number of the step: each pass over the conversations has an order of its own.

    Args:
      examples: the conversations.
      settings: of the run.
      block_size: P.

    Raises:
      ValueError: rows whose length P does not divide, or a conversation that is longer.
    """

    def __init__(self, examples: Sequence[Example], settings: SFTSettings, block_size: int):
        if settings.length % block_size:
            raise ValueError(f"length = {settings.length}: must be a multiple of the model's block size, {block_size}")
        self._examples, self._settings, self._block_size = examples, settings, block_size
        self._rows: list[list[int]] = []  # conversations of the rows from `_first` on
        self._first = self._num_passes = 0

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return the batch of a step; steps ascend, but for one that begins anew.

        Args:
          step: from 0.

        Returns:
          tokens, positions, targets and weights [micro-batches rows T], as `packed_row` makes them; num_targets and
          num_tokens, counts of all of them.
        """
        settings = self._settings
        count = settings.rows * settings.accumulate
        first = step * count
        if first < self._first:
            self._rows, self._first, self._num_passes = [], 0, 0
        while self._first + len(self._rows) < first + count:
            order = np.random.default_rng((settings.seed, self._num_passes)).permutation(len(self._examples))
            lengths = [len(self._examples[i].tokens) for i in order]
            packed = pack(lengths, settings.length, self._block_size)
            self._rows += [[int(order[i]) for i in documents] for documents in packed]
            self._num_passes += 1
            passed = min(len(self._rows), first - self._first)
            self._rows, self._first = self._rows[passed:], self._first + passed
        rows = [
            packed_row([self._examples[i] for i in documents], settings.length, self._block_size)
            for documents in self._rows[first - self._first :][:count]
        ]
        out = {name: np.stack([row[name] for row in rows]) for name in ROWS}
        out = {name: x.reshape(settings.accumulate, settings.rows, -1) for name, x in out.items()}
        num_targets, num_tokens = out["weights"].sum(), (out["positions"] >= 0).sum()
        return out | {"num_targets": np.float32(num_targets), "num_tokens": np.float32(num_tokens)}


def fine_tune(
    state: TrainState,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    settings: SFTSettings,
    folder: str | Path,
    metrics: str | Path | None = None,
    *,
    origin: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    save_every: int = 100,
    tensorboard: str | Path | None = None,
    steps_before: int = 0,
    about: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> TrainState:
    """Run the steps that a run has not taken yet, keeping the state as it goes.

    The state is kept in `folder`/states; a run whose folder has one goes on from there, to the bit as if it had not
    stopped where the devices are the same.

    Args:
      state: at step 0: of a model (`init_state`), or of adapters.
      batches: `PackedBatches` of the run.
      optimizer: of the steps.
      loss_fn: of one micro-batch: `SFTLoss`, or one of adapters.
      settings: of the run.
      folder: of the states.
      metrics: a file of JSON lines, one a step; lines of steps that are repeated after a stop are replaced.
      origin: what the run begins with and reads, by name; a folder's run goes on with the same alone.
      shared: what every batch holds besides, such as the model beneath adapters.
      mesh: whose data axis divides the rows; None for one device.
      save_every: steps after which the state is kept; the last one is kept in any case.
      tensorboard: a folder for TensorBoard's events; None writes none.
      steps_before: steps of other runs that `metrics` has lines of, in front of this one's.
      about: what each line says besides, by name.
      say: is told about a line every few seconds.

    Returns:
      The state after the last step.

    Raises:
      ValueError: a folder of another run, a state that cannot be read or kept, no tensorboardX for `tensorboard`.
    """
    loss_fn = Accumulated(loss_fn, ROWS)
    folder = Path(folder)
    check_same_run(folder, dict(origin or {}) | dataclasses.asdict(settings))
    with ExitStack() as stack:
        keeper = stack.enter_context(states_in(folder))
        state = restored(keeper, state)
        first = int(state.step)
        if first >= settings.steps:
            return state  # nothing is left to do, and lines of later runs stay where they are
        if first:
            say(f"going on from step {first}")
        lines = MetricLines(metrics, steps_before + first)
        board = None
        if tensorboard is not None:
            # Events of later steps, of a run that was killed behind its last state, are hidden.
            board = stack.enter_context(writer_of_events()(str(tensorboard), purge_step=first + 1))
        line = stack.enter_context(activity(about=(type(loss_fn.loss_fn).__name__, settings)))
        last_said = time.perf_counter()
        try:
            for step in range(first, settings.steps):
                began = time.perf_counter()
                batch = on_data_axis(batches[step], mesh, rows_axis=1) | dict(shared or {})
                line.say(f"step {step + 1} of {settings.steps}" + (": compiling" if step == first else ""))
                state, values = train_step(state, batch, optimizer=optimizer, loss_fn=loss_fn, balance_rate=0.0)
                figures = {name: float(value) for name, value in values.items()}  # waits for the step
                seconds = time.perf_counter() - began
                loss = figures.pop("lm") if "lm" in figures else figures["kl"]
                out = {"step": steps_before + step + 1, **(about or {}), "loss": loss, **figures}
                out |= {"learning_rate": float(settings.rate(step)), "targets": int(batch["num_targets"])}
                out |= {"tokens": int(batch["num_tokens"]), "seconds": seconds}
                lines.write(out)
                if board is not None:
                    for name in out.keys() - (about or {}).keys():
                        board.add_scalar(f"sft/{name}", out[name], step + 1)
                is_last = step + 1 == settings.steps
                if is_last or step == first or time.perf_counter() - last_said > 10:
                    say(f"step {step + 1} of {settings.steps}: loss {out['loss']:.4f}, "
                        f"{out['tokens'] / seconds:,.0f} tokens/s")  # fmt: skip
                    last_said = time.perf_counter()
                if is_last or (step + 1) % save_every == 0:
                    keep(keeper, step + 1, state)
        except KeyboardInterrupt:
            keep_whole(keeper, state)
            say("stopped: the same command goes on from what was kept")
            raise
    return state


def check_rows(rows: int, mesh: jax.sharding.Mesh | None) -> None:
    """Raise ValueError for rows of a micro-batch that a mesh does not divide.

    Args:
      rows: of a micro-batch.
      mesh: whose data axis divides them; None for one device.
    """
    if mesh is not None and rows % mesh.shape["data"]:
        raise ValueError(f"--rows {rows}: must be a multiple of the mesh's data={mesh.shape['data']}")


def check_same_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run into its folder, or compare them with those of the run that the folder has.

    Args:
      folder: of the run; made if it is not there.
      settings: values that JSON has.

    Raises:
      ValueError: the folder has a run of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / "settings.json", json.dumps(settings, indent=2) + "\n"
    if not path.is_file():
        replace_file(path, text.encode())
        return
    before = read_json(path, called="the settings of a run")
    if wrong := [f"{name} = {before.get(name)!r}" for name, value in settings.items() if before.get(name) != value]:
        raise ValueError(f"{folder} has a run with {', '.join(wrong)}: give the same, or another --out")


def writer_of_events() -> Callable[..., Any]:
    """Return the class that writes TensorBoard's events; nothing is written yet.

    Raises:
      ValueError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise ValueError(
            "--tensorboard needs tensorboardX, which is not installed: pip install 'm3jax[train]'"
        ) from None
    return SummaryWriter
