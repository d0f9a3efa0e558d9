"""One of two processes of a run over gloo, and the engines' work that one process alone is held against.

Started as `python host_process.py I PORT FOLDER [WHEN]`: `WHEN` is where process 1 kills itself.
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

DEVICES = 2  # of each process
HEARTBEAT = 10
LIMIT = 240  # seconds until a process that hangs says where, and ends
# Each engine's mesh and settings. Rows and pages lie on both hosts, and so do heads; 21 pages do not divide over 4
# devices.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "rows and pages": ("data=2,context=2", dict(pages=21, invariant=True)),
    "heads, one row, draft": (
        "tensor=4",
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

    model = tiny.model(engines.CONFIG, mesh=None if mesh is None else parse_mesh(mesh))
    return engines.engine(model, **settings)


def training_state(model, step: int):
    """Return a state of a training run in which every array differs from what a run begins with."""
    import jax

    from m3jax.train.step import init_state, make_optimizer

    leaves, structure = jax.tree.flatten(init_state(model, make_optimizer(lambda _: 1e-3)))
    moved = jax.jit(
        lambda leaves: [(x + (i + step)).astype(x.dtype) for i, x in enumerate(leaves)],
        out_shardings=[x.sharding for x in leaves],
    )
    return jax.tree.unflatten(structure, moved(leaves))


def run(channel, process_id: int, folder: Path, when: str) -> None:
    """Do all of a process's work."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.stderr)
    import jax
    from support.engines import params, prompt, quick

    from m3jax.checkpoint import load_with_report, save_orbax
    from m3jax.hosts.follow import led
    from m3jax.parallel import parse_mesh, read
    from m3jax.train.keeping import keep, restored, states_in

    report = {}
    model, loaded = load_with_report(folder / "hub", "float32", parse_mesh("expert=2,tensor=2"), progress=False)
    report["bytes"] = {str(device): size for device, size in loaded.bytes_read.items()}
    report["held"] = sum(float(np.abs(x).sum(dtype=np.float64)) for x in read(jax.tree.leaves(model)))
    save_orbax(model, folder / "orbax")
    with states_in(folder / "run of two") as keeper:
        keep(keeper, 3, training_state(model, 3))
    with states_in(folder / "run of one") as keeper:
        state = restored(keeper, training_state(model, 0))
    report["state"] = [float(np.abs(x).sum(dtype=np.float64)) for x in read(jax.tree.leaves(state))]
    for name, (mesh, settings) in ENGINES.items():
        with quick(), led(made(settings, mesh), channel) as engine:
            if engine is None:
                continue
            report[name] = work(engine)
            if settings.get("invariant"):
                alone = engine.add(prompt(37), params(6))
                engine.run()
                report["alone"] = engine.result(alone).logprobs
    report["asked"] = OddTokens.asked
    (folder / f"report{process_id}.json").write_text(json.dumps(report))
    if when == "idle":
        if process_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def main() -> None:
    process_id, port, folder, when = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    from m3jax.hosts.run import on_hosts

    args = argparse.Namespace(
        coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=process_id, heartbeat=HEARTBEAT, start_timeout=60,
        verbose=False, model=str(folder / "hub"),
    )  # fmt: skip
    on_hosts(args, "m3jax.test", lambda channel: run(channel, process_id, folder, when))


if __name__ == "__main__":
    main()
