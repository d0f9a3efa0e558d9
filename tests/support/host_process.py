"""One of two processes of a run over gloo, and the engines' work that one process alone is held against.

Started as `python host_process.py I PORT FOLDER WORK`, with a name in `WORK`.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DEVICES = 4  # of each process
HEARTBEAT = 10
LIMIT = 480  # seconds until a process that hangs says where, and ends
# Each engine's mesh and settings. Rows and pages lie on both hosts, and so do heads; 21 pages do not divide over 4
# devices. Sums over the four of context and tensor are what gloo adds in an order of its own.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "rows and pages": ("data=2,context=2,tensor=2", dict(pages=21, invariant=True)),
    "heads, one row, draft": (
        "expert=2,tensor=4",
        dict(pages=21, max_batch=1, prefill_rows=1, draft="ngram", draft_tokens=2),
    ),
}


class OddTokens:
    """A guide: odd and even tokens in turn. It counts how often it was asked."""

    asked = 0

    def bits(self, new):
        type(self).asked += 1
        return np.full(2, 0xAAAAAAAA if len(new) % 2 else 0x55555555, np.uint32)


def work(engine) -> dict[str, Any]:
    """Have an engine do all that requests can go through; return what they got."""
    from support.engines import finish, params, prompt

    found = {}
    first = engine.add(prompt(37), params(6))
    group = engine.add(prompt(24), params(4, temperature=1.0, seed=5), n=2)
    guided = engine.add(list(prompt(5)), params(4), guide=OddTokens())
    late = engine.add(prompt(11), params(4), deadline=1e-9)
    stopped = engine.add(np.array(prompt(40)), params(12, temperature=0.7, seed=3))
    for _ in range(100):
        engine.step()
        if len(engine.result(first).tokens) >= 1:
            break
    copied = engine.copy(first)
    if engine.shapes.draft_tokens == 0:
        found["moved"] = engine.import_request(engine.export(first))
    engine.abort(stopped)
    try:
        engine.add(prompt(4), params(5000))
    except ValueError as error:
        found["refused"] = str(error)
    finish(engine)
    handles = dict(first=first, guided=guided, late=late, stopped=stopped, copied=copied, a=group[0], b=group[1])
    if "moved" in found:
        handles["moved"] = found.pop("moved")
    for name, handle in handles.items():
        generation = engine.result(handle)
        found[name] = [generation.tokens, generation.stop_reason, generation.logprobs]
    return found


def made(settings: Mapping[str, Any], mesh: str | None):
    """Return an engine over the tiny model."""
    from support import engines, tiny

    from m3jax.parallel import parse_mesh

    model = tiny.model(tiny.config("M"), mesh=None if mesh is None else parse_mesh(mesh))
    return engines.engine(model, **settings)


class Letters:
    """A task that likes letters, and fails when it is asked for rewards a second time."""

    has_tools, weights = False, {"letters": 1.0}

    def __init__(self, fails: bool):
        self.fails, self.asked = fails, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def prompts(self):
        return [{"prompt": "ab"}, {"prompt": "xy", "of_no_message": object()}]

    def reward_parts(self, rows, completions, group):
        from m3jax.train.rewards import TaskError

        self.asked += 1
        if self.fails and self.asked == 2:
            raise TaskError("reward() of task.py: it fails")
        return {"letters": [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]}

    def answer_calls(self, calls):
        raise NotImplementedError


def policy(mesh: str | None):
    """Return the model that rounds of GRPO begin with."""
    from support import tiny
    from support.embedded import TOKENIZER

    from m3jax.parallel import parse_mesh

    config = tiny.config("d", vocab_size=TOKENIZER.vocab_size)
    return tiny.model(config, mesh=None if mesh is None else parse_mesh(mesh))


def rounds(model, task, folder: Path, steps: int, metrics: Path | None) -> None:
    """Do what is left of some rounds of GRPO."""
    from support.embedded import TOKENIZER

    from m3jax.train.grpo import RunSettings, train_policy

    settings = RunSettings(steps=steps, prompts=2, answers=2, max_new_tokens=5, epochs=2, learning_rate=1e-3)
    train_policy(model, TOKENIZER, None, task, settings, folder, metrics, lambda text: None)


def kept_state(model, folder: Path):
    """Return the state that a run of GRPO kept last, on a model's devices."""
    from m3jax.train.keeping import restored, states_in
    from m3jax.train.step import init_state, make_optimizer

    with states_in(folder) as keeper:
        return restored(keeper, init_state(model, make_optimizer(lambda _: 1e-3)))


def sums(tree) -> list[float]:
    """Return a number for each array, the same on all processes, that every element of it changes."""
    import jax

    from m3jax.parallel import read

    return [float(np.abs(x).sum(dtype=np.float64)) for x in read(jax.tree.leaves(tree))]


def alone(engine, *order) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities of a request that an engine serves by itself."""
    handle = engine.add(*order)
    engine.run()
    return engine.result(handle).tokens, engine.result(handle).logprobs


def served(name: str, channel, report: dict[str, Any]) -> None:
    """Have an engine of all processes do its work."""
    from support.compilations import compilations
    from support.engines import assert_stays, params, places, prompt, quick

    from m3jax.hosts.follow import led

    mesh, settings = ENGINES[name]
    with quick(), led(made(settings, mesh), channel) as engine:
        if engine is None:
            return
        before = places(engine)
        report[name] = work(engine)
        assert_stays(engine, before)
        if settings.get("invariant"):
            orders = {"first": (prompt(37), params(6)), "b": (prompt(24), params(4, temperature=1.0, seed=6))}
            with compilations() as seen:
                report["alone"] = {name: alone(engine, *order) for name, order in orders.items()}
            report["compiled"] = list(map(str, seen))


def load_and_serve(channel, process_id: int, folder: Path, report: dict[str, Any]) -> None:
    """Read a checkpoint, and have the engine of rows and pages do its work."""
    from m3jax.checkpoint import load_with_report
    from m3jax.parallel import parse_mesh

    model, loaded = load_with_report(folder / "hub", "float32", parse_mesh("expert=2,tensor=4"), progress=False)
    report["bytes"] = {str(device): size for device, size in loaded.bytes_read.items()}
    report["held"] = sum(sums(model))
    served("rows and pages", channel, report)
    report["asked"] = OddTokens.asked


def save_and_train(channel, process_id: int, folder: Path, report: dict[str, Any]) -> None:
    """Save a checkpoint, convert a model, do rounds of GRPO until a reward fails, and serve with a draft."""
    from support import conversion

    from m3jax.checkpoint import load_with_report, save_orbax
    from m3jax.parallel import parse_mesh
    from m3jax.train.dense import read_dense_with_report
    from m3jax.train.rewards import TaskError
    from m3jax.train.shared_task import shared_task

    model, _ = load_with_report(folder / "hub", "float32", parse_mesh("expert=2,tensor=4"), progress=False)
    save_orbax(model, folder / "orbax")
    dense, loaded = read_dense_with_report(folder / "qwen3", mesh=parse_mesh("expert=4,tensor=2"), block_size=4)
    report["dense bytes"] = {str(device): size for device, size in loaded.bytes_read.items()}
    report["dense held"] = sum(sums(dense))
    conversion.convert(folder, folder / "converted", "data=2,context=2,tensor=2")
    model, begun = policy("data=2,context=2,tensor=2"), folder / "rounds of two"
    report["state before"] = sums(kept_state(model, begun))
    task = Letters(fails=True)  # that of process 1 is not asked for anything
    try:
        with shared_task(lambda: task, channel) as shared:
            rounds(model, shared, begun, 3, begun / "metrics.jsonl" if process_id == 0 else None)
    except TaskError as error:
        report["error"] = str(error)
    report["rewards asked"] = task.asked
    report["state after"] = sums(kept_state(model, begun))
    served("heads, one row, draft", channel, report)


WORK = {"serve": load_and_serve, "train": save_and_train}


def run(channel, process_id: int, folder: Path, name: str) -> None:
    """Do all of a process's work; then process 1 kills itself, and process 0 waits to hear of it."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.stderr)
    report: dict[str, Any] = {}
    WORK[name](channel, process_id, folder, report)
    (folder / f"{name}{process_id}.json").write_text(json.dumps(report))
    if process_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def main() -> None:
    process_id, port, folder, name = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    from m3jax.hosts.run import on_hosts

    args = argparse.Namespace(
        coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=process_id, heartbeat=HEARTBEAT, start_timeout=60,
        verbose=False, model=str(folder / "hub"),
    )  # fmt: skip
    on_hosts(args, "m3jax.test", lambda channel: run(channel, process_id, folder, name))


if __name__ == "__main__":
    main()
