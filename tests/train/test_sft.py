"""Fine-tuning: packed documents as if alone, micro-batches as one batch, choices that are made once, runs that stop."""

import json
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import tiny

from m3jax.model import M3
from m3jax.parallel import make_mesh
from m3jax.train.accumulate import Accumulated
from m3jax.train.conversations import Example
from m3jax.train.keeping import keep, restored, states_in
from m3jax.train.packing import PackedPages, pack, packed_row
from m3jax.train.sft import ROWS, PackedBatches, SFTLoss, SFTSettings, check_same_run, fine_tune
from m3jax.train.step import TrainState, make_optimizer, train_step

ROOT = Path(__file__).parents[2]
QUICK = {"xla_backend_optimization_level": 0}
# Forced blocks at a document's beginning and around a query: those of the row would be others (T29).
CONFIG = tiny.config("dM", index_init_blocks=1, index_local_blocks=2, index_topk_blocks=4)
LENGTHS = (39, 35, 57, 25, 8, 1, 64, 17)
SETTINGS = SFTSettings(steps=3, length=128, rows=1, accumulate=2, learning_rate=1e-2, compute_dtype="float32")
LOSS = SFTLoss(index_loss=0.5, index_stride=1, compute_dtype="float32", remat=False)


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def examples() -> tuple[Example, ...]:
    draw = np.random.default_rng(0)
    return tuple(Example(draw.integers(0, 64, n).astype(np.int32), draw.random(n) < 0.4) for n in LENGTHS)


def batch_of(**changes) -> dict[str, np.ndarray]:
    return PackedBatches(examples(), replace(SETTINGS, **changes), CONFIG.index_block_size)[0]


def documents_of(batch: dict[str, np.ndarray]):
    """Yield (row, first column, tokens) of each document in the rows of a batch."""
    positions, tokens = (batch[name].reshape(-1, SETTINGS.length) for name in ("positions", "tokens"))
    for row, start in np.argwhere(positions == 0):
        count = np.argmax(np.append(np.diff(positions[row, start:]), 0) != 1) + 1
        yield row, start, tokens[row, start : start + count]


@cache
def alone():
    """The model by its own schedules, on one document, right-padded to 64 tokens."""

    def logits(tokens):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(model(), padded, np.array([len(tokens)], np.int32)))[0, : len(tokens)]

    run = jax.jit(lambda model, tokens, lengths: model(tokens, lengths=lengths), compiler_options=QUICK)
    return logits


@cache
def of_micro_batches() -> tuple[float, dict[str, float], M3]:
    """(loss, parts, gradient) of four rows on one device, in micro-batches of one row each."""
    value_and_grad = jax.jit(jax.value_and_grad(Accumulated(LOSS, ROWS), has_aux=True), compiler_options=QUICK)
    batch = batch_of(rows=1, accumulate=4) | {"step": jnp.int32(0)}
    (value, parts), grads = value_and_grad(model(), batch)
    return float(value), {name: float(x) for name, x in parts.items()}, grads


def test_a_packed_document_is_as_it_is_alone():
    """T29: with positions, blocks and forced blocks of its own, in layers with and without selection."""
    batch = batch_of(rows=4, accumulate=1)

    def logits(model, tokens, positions):
        model = model.with_training_paths(PackedPages, "auto")
        return model(tokens, positions=positions)

    packed = np.asarray(jax.jit(logits, compiler_options=QUICK)(model(), batch["tokens"][0], batch["positions"][0]))
    documents = list(documents_of(batch))
    assert len(documents) > 4 and any(start for _, start, _ in documents)
    for row, start, tokens in documents:
        np.testing.assert_allclose(packed[row, start : start + len(tokens)], alone()(tokens), atol=2e-5)


def test_the_loss_is_the_mean_over_the_tokens_that_were_written():
    """In float64 numpy, document by document: neither rows nor micro-batches weigh."""
    batch, losses = batch_of(rows=4, accumulate=1), []
    weights = batch["weights"].reshape(-1, SETTINGS.length)
    for row, start, tokens in documents_of(batch):
        logits = alone()(tokens).astype(np.float64)
        for t in range(len(tokens) - 1):
            if weights[row, start + t]:
                losses.append(np.log(np.exp(logits[t]).sum()) - logits[t, tokens[t + 1]])
    assert batch["num_targets"] == len(losses)
    np.testing.assert_allclose(of_micro_batches()[1]["lm"], np.mean(losses), rtol=1e-5)


def test_a_mesh_gives_the_loss_and_gradients_of_micro_batches_on_one_device():
    """T28: context, experts and heads divided; documents in which blocks are left out, and the index loss.

    The mesh computes all rows at once: micro-batches add up to that. They have different numbers of targets: a mean of
    means would be another loss. A step of plain descent at rate 1 moves the weights by the gradient.
    """
    counts = batch_of(rows=1, accumulate=4)["weights"].sum(axis=(1, 2))
    assert len(set(counts.tolist())) > 1
    batch = batch_of(rows=4, accumulate=1)
    kept, size = CONFIG.index_topk_blocks, CONFIG.index_block_size
    assert (batch["positions"] // size >= kept).sum() > 40, "every block is selected"
    mesh, descent = make_mesh(context=2, expert=2, tensor=2), optax.sgd(1.0)
    state = TrainState(jnp.int32(0), tiny.model(CONFIG, mesh=mesh), descent.init(model()))
    how = dict(optimizer=descent, loss_fn=Accumulated(LOSS, ROWS), balance_rate=0.0)
    step = jax.jit(partial(train_step.__wrapped__, **how), compiler_options=QUICK)
    after, found = step(state, jax.device_put(batch, NamedSharding(mesh, PartitionSpec())))
    assert int(after.step) == 1 and len(after.model.lm_head[...].sharding.device_set) == 8
    loss, parts, grads = of_micro_batches()
    np.testing.assert_allclose(found["lm"] + 0.5 * found["kl"], loss, rtol=1e-5)
    np.testing.assert_allclose([found[name] for name in parts], [*parts.values()], rtol=1e-5)
    before, gradients = jax.tree_util.tree_flatten_with_path(model())[0], jax.tree.leaves(grads)
    for (path, weight), moved, grad in zip(before, jax.tree.leaves(after.model), gradients, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(moved, weight - grad, atol=5e-6, err_msg=name)
        assert "index_q_proj" not in name or np.abs(grad).max() > 1e-4, name


@pytest.mark.further  # of the model: test_remat_keeps_the_selection
def test_a_recomputed_layer_chooses_no_experts_and_blocks_anew():
    """T30, T58: the program of a gradient has each choice once, with and without remat."""
    batch = {name: x[0] if np.ndim(x) == 3 else x for name, x in batch_of().items()} | {"step": jnp.int32(0)}

    def choices(remat: bool) -> tuple[int, int]:
        loss = replace(LOSS, remat=remat)
        text = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(model(), batch))
        return text.count(" top_k["), text.count(" exp ")

    (kept, exps), (recomputed, more_exps) = choices(remat=False), choices(remat=True)
    assert kept == recomputed >= 2, (kept, recomputed)
    assert more_exps > exps, "nothing is recomputed"


@pytest.mark.parametrize(("rows", "accumulate"), [(1, 1), (2, 1), (1, 3), (3, 3)])
def test_steps_read_the_rows_of_each_pass_one_after_the_other(rows, accumulate):
    """Batch i has rows i n to (i + 1) n of all passes in a row, each pass in an order of its own."""
    draw = np.random.default_rng(0)
    examples = [Example(draw.integers(0, 9, n, np.int32), draw.random(n) < 0.5) for n in (5, 8, 3, 16, 9, 1, 7)]
    settings = SFTSettings(steps=9, length=16, rows=rows, accumulate=accumulate, seed=3)
    whole = []
    for number in range(40):
        order = np.random.default_rng((3, number)).permutation(len(examples))
        for documents in pack([len(examples[i].tokens) for i in order], 16, 4):
            whole.append(packed_row([examples[order[i]] for i in documents], 16, 4))
    batches, count = PackedBatches(examples, settings, 4), rows * accumulate
    for step in (0, 1, 2, 4, 3, 0, 5):
        batch, expected = batches[step], whole[step * count : (step + 1) * count]
        for name in ("tokens", "positions", "targets", "weights"):
            assert batch[name].shape == (accumulate, rows, 16)
            np.testing.assert_array_equal(batch[name].reshape(count, 16), [row[name] for row in expected])
        assert batch["num_targets"] == sum(row["weights"].sum() for row in expected)
        assert batch["num_tokens"] == sum((row["positions"] >= 0).sum() for row in expected)


# Settings


@pytest.mark.parametrize("warmup", [0, 4])
def test_the_learning_rate_by_step(warmup):
    """From 0 to its peak in a line, then by its schedule to the end rate, which the step behind the last would have."""
    peak, end, steps = 0.8, 0.2, 12
    after = steps - warmup
    done = [max(0.0, (step - warmup) / after) for step in range(steps + 1)]
    behind = dict(
        cosine=[end + (peak - end) * (1 + np.cos(np.pi * x)) / 2 for x in done],
        linear=[peak + (end - peak) * x for x in done],
        constant=[peak] * (steps + 1),
    )
    for schedule, expected in behind.items():
        settings = SFTSettings(
            steps=steps, length=8, learning_rate=peak, end_rate=end, warmup_steps=warmup, schedule=schedule
        )
        expected = [peak * step / warmup if step < warmup else expected[step] for step in range(steps + 1)]
        np.testing.assert_allclose([settings.rate(step) for step in range(steps + 1)], expected, rtol=1e-5)
    assert SFTSettings(steps=3, length=8, learning_rate=0.0).rate(1) == 0.0


def test_settings_that_no_run_has(unchecked):
    """The least of each setting is taken, and nothing below it."""
    given = dict(steps=9, length=8)
    least = dict(
        steps=1, length=1, rows=1, accumulate=1, warmup_steps=0, end_rate=0.0, weight_decay=0.0, index_loss=0.0
    )
    for name, smallest in least.items():
        assert getattr(SFTSettings(**given | {name: smallest}), name) == smallest
        with pytest.raises(ValueError, match=rf"{name} = {smallest - 1}: must be at least {smallest:g}"):
            SFTSettings(**given | {name: smallest - 1})
    assert SFTSettings(**given, warmup_steps=8, clip_norm=1e-9).warmup_steps == 8
    for wrong, reason in (
        (dict(clip_norm=0.0), "clip_norm = 0.0: must be above 0"),
        (dict(warmup_steps=9), "warmup_steps = 9: must be fewer than the run's 9"),
        (dict(schedule="none"), "schedule = 'none': choose of cosine, linear"),
    ):
        with pytest.raises(ValueError, match=reason):
            SFTSettings(**given | wrong)


def test_a_folder_has_the_settings_of_its_run(tmp_path):
    """As JSON that a reader can read; another run is refused with what differs."""
    folder, settings = tmp_path / "runs" / "a", {"steps": 9, "name": "x", "rates": [0.5]}
    for _ in range(2):
        check_same_run(folder, settings)
        assert (folder / "settings.json").read_text() == json.dumps(settings, indent=2) + "\n"
    for changes, said in (({"steps": 8}, "steps = 9"), ({"name": "y", "new": 1}, "name = 'x', new = None")):
        with pytest.raises(ValueError, match=f"a has a run with {said}: give the same, or another --out"):
            check_same_run(folder, settings | changes)


# Runs. What is trained is one matrix: all that a run does but the model is the same.


class Bigrams(NamedTuple):
    """The loss of a table of logits, which takes no time to compile."""

    def __call__(self, table, batch):
        logits = jax.nn.log_softmax(table["logits"][batch["tokens"]])
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        loss = -jnp.sum(picked * batch["weights"]) / batch["num_targets"]
        return loss, {"lm": loss}


OPTIMIZER = make_optimizer(SETTINGS.rate)


def run(
    folder: Path,
    steps: int = 6,
    mesh: Mesh | None = None,
    tensorboard: Path | None = None,
    say=lambda _: None,
    **changes,
) -> list[dict]:
    """Train up to a step of six, and return the lines of the metrics without times."""
    table = {"logits": jnp.zeros((64, 64))}
    where = table["logits"].sharding if mesh is None else NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda x: jax.device_put(x, where), TrainState(jnp.int32(0), table, OPTIMIZER.init(table)))
    settings = replace(SETTINGS, steps=6, **changes)
    batches = PackedBatches(examples(), settings, 8)
    metrics = folder / "metrics.jsonl"
    stopping = Stopping(batches, steps)
    try:
        fine_tune(state, stopping, OPTIMIZER, Bigrams(), settings, folder, metrics, save_every=2, say=say,
                  mesh=mesh, tensorboard=tensorboard)  # fmt: skip
    except KeyboardInterrupt:
        assert steps < 6
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [{name: x for name, x in line.items() if name != "seconds"} for line in lines]


class Stopping:
    """Batches that are interrupted before a step, as by Ctrl-C."""

    def __init__(self, batches: PackedBatches, before: int):
        self._batches, self._before = batches, before

    def __getitem__(self, step: int):
        if step == self._before:
            raise KeyboardInterrupt
        return self._batches[step]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tmp_path):
    """By Ctrl-C between two states that are kept: the same batches, losses and metrics, one line a step."""
    said: list[str] = []
    whole = run(tmp_path / "whole", say=said.append)
    assert [line["step"] for line in whole] == list(range(1, 7)) and whole[-1]["loss"] < whole[0]["loss"]
    batches, rate = PackedBatches(examples(), SETTINGS, 8), replace(SETTINGS, steps=6).rate
    for line, step in zip(whole, range(6), strict=True):
        counts = line["targets"], line["tokens"]
        assert counts == (batches[step]["num_targets"], batches[step]["num_tokens"])
        assert line["learning_rate"] == pytest.approx(float(rate(step)))
    assert sorted(int(state.name) for state in (tmp_path / "whole" / "states").iterdir()) == [4, 6], "the last two"
    # The first step and the last; between them a line comes every ten seconds.
    assert [text.split(",")[0] for text in said] == [
        f"step {line['step']} of 6: loss {line['loss']:.4f}" for line in (whole[0], whole[-1])
    ]
    assert len(run(tmp_path / "cut", 3, say=said.append)) == 3
    assert said[-1] == "stopped: the same command goes on from what was kept"
    with (tmp_path / "cut" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')  # a process that was killed while it wrote
    assert run(tmp_path / "cut", say=said.append) == whole and "going on from step 3" in said
    said.clear()
    assert run(tmp_path / "cut", say=said.append) == whole and not said, "a finished run trains no further"


def test_what_reads_the_events_of_a_run(tmp_path, monkeypatch):
    """Each figure of a step goes to TensorBoard; without its library a line says so."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ValueError, match="--tensorboard needs tensorboardX, which is not installed: pip install 'm3jax\\[train\\]'"
    ):
        run(tmp_path / "without", tensorboard=tmp_path / "events")
    monkeypatch.undo()
    lines = run(tmp_path / "with", tensorboard=tmp_path / "events")
    (file,) = (tmp_path / "events").iterdir()
    values = [(v.tag, v.simple_value, e.step) for e in events_of(file.read_bytes()) for v in e.summary.value]
    losses = [(np.float32(value), step) for name, value, step in values if name == "sft/loss"]
    assert losses == [(np.float32(line["loss"]), line["step"]) for line in lines]


def events_of(data: bytes) -> Iterator[Any]:
    """Yield the events of a file of TensorBoard's: each behind its length and a checksum, and before another one."""
    from tensorboardX.proto.event_pb2 import Event

    while data:
        size = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


@pytest.fixture
def states(tmp_path):
    """A folder with the states of steps 1 and 2."""
    state = {"w": jnp.arange(4096.0)}
    with states_in(tmp_path) as keeper:
        for step in (1, 2):
            keep(keeper, step, {"w": state["w"] + step})
    return tmp_path, state


def test_a_damaged_state_is_said_in_a_line_and_the_one_before_is_whole(states):
    folder, state = states
    data = max(
        (path for path in (folder / "states" / "2").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"2: this state cannot be read") as raised, states_in(folder) as keeper:
        restored(keeper, state)
    assert "\n" not in str(raised.value)
    shutil.rmtree(folder / "states" / "2")
    with states_in(folder) as keeper:
        np.testing.assert_array_equal(restored(keeper, state)["w"], state["w"] + 1)


# One file's error ends Orbax's loop; a thread that meets the next one finds the loop closed, and tells Python's hook.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_said_in_a_line_and_loses_nothing(states, caplog):
    """No file may grow: the state is not written, and that of step 2 is still there."""
    folder, state = states
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(ValueError, match="cannot be written") as raised, states_in(folder) as keeper:
            keep(keeper, 3, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(raised.value) and not caplog.records
    with states_in(folder) as keeper:
        np.testing.assert_array_equal(restored(keeper, state)["w"], state["w"] + 2)


def test_a_state_goes_on_on_other_devices(tmp_path):
    """A step on one device, after a stop the next ones on eight, which divide the rows: the losses of one device."""
    mesh = make_mesh(data=2, tensor=2, expert=2)
    changes = dict(rows=2, accumulate=1)
    whole = run(tmp_path / "whole", 3, **changes)
    run(tmp_path / "moved", 1, **changes)
    moved = run(tmp_path / "moved", 3, mesh=mesh, **changes)
    assert [line["step"] for line in moved] == [1, 2, 3]
    for one, other in zip(whole, moved, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
