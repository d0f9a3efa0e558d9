"""Processes of one run that die, hang, come late or do not fit: how all the others end (docs/scale.md).

    python scripts/fault_hosts.py                      # every fault
    python scripts/fault_hosts.py --only decode save   # some of them

Each fault is two processes of two CPU devices over gloo, with a tiny model. Of every process that is left the script
prints after how many seconds it ended, with which status, and its lines on the standard error, of which there must be
one; else the exit status is 1.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

HEARTBEAT, START_TIMEOUT, LIMIT = 10, 20, 60.0
PROG = "fault_hosts"
# By name: the process at fault, and what it does. "dies" is SIGKILL, "hangs" is SIGSTOP.
FAULTS = {
    "idle": (1, "dies"),
    "prefill": (1, "dies"),
    "decode": (1, "dies"),
    "save": (1, "dies"),
    "coordinator": (0, "dies"),  # in decode
    "hangs": (1, "hangs"),  # in decode
    "error": (1, "raises"),  # in decode
    "interrupt": (0, "interrupts"),  # in decode
    "no coordinator": (0, "is not started"),
    "missing": (1, "is not started"),
    "same number": (1, "says that it is process 0"),
    "versions": (1, "has another jax"),
    "folder": (1, "has another folder"),
}


def main() -> int:
    """Run the faults; the exit status is 1 if a process did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--child", nargs=4, metavar=("I", "PORT", "FOLDER", "FAULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        process_id, port, folder, fault = args.child
        child(int(process_id), port, Path(folder), fault)
        return 0
    wrong = 0
    for fault in args.only:
        with tempfile.TemporaryDirectory() as folder:
            wrong += meet(fault, Path(folder))
    return int(wrong > 0)


def meet(fault: str, folder: Path) -> int:
    """Start the processes of a fault, wait for those that are left, and print how they ended; return 1 if not well."""
    at_fault, deed = FAULTS[fault]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    for i in range(2):
        (folder / f"model{i}").mkdir()
        (folder / f"model{i}" / "config.json").write_text(f'{{"seed": {i if fault == "folder" else 0}}}\n')
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
        "M3JAX_PROGRESS": "0",
    }
    command = [sys.executable, __file__, "--child"]
    started = {
        i: subprocess.Popen([*command, str(i), port, str(folder), fault], env=env, stderr=subprocess.PIPE, text=True)
        for i in range(2)
        if not (i == at_fault and deed == "is not started")
    }
    left = {i: process for i, process in started.items() if i != at_fault or deed.startswith(("has", "says", "raises"))}
    print(f"{fault}: process {at_fault} {deed}", flush=True)
    is_well = True
    for i, process in left.items():
        try:
            _, text = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            _, text = process.communicate()
        begun = folder / "begun"  # touched by the process at fault, just before
        seconds = time.time() - (begun.stat().st_mtime if begun.exists() else (folder / f"ready{i}").stat().st_mtime)
        lines = text.splitlines()
        is_well &= len(lines) == 1 and process.returncode == 2 and seconds < LIMIT
        print(f"  process {i}: status {process.returncode} after {seconds:.0f} s", *lines[:8], sep="\n    ", flush=True)
    for process in started.values():  # one that hangs
        process.kill()
        process.wait()
    if fault == "save":
        whole = (folder / "orbax" / "parameters").exists()
        is_well &= not whole
        print(f"  a checkpoint under its name: {'yes' if whole else 'no'}")
    if not is_well:
        print("  NOT AS IT SHOULD BE")
    return int(not is_well)


def child(process_id: int, port: str, folder: Path, fault: str) -> None:
    """Be one of the processes."""
    from m3jax.hosts import run as run_module
    from m3jax.hosts.run import on_hosts
    from m3jax.interrupts import end_at_interrupts, raise_interrupts

    end_at_interrupts()
    raise_interrupts()
    at_fault, deed = FAULTS[fault]
    is_at_fault = process_id == at_fault
    if is_at_fault and fault == "versions":
        versions = run_module.versions()
        run_module.versions = lambda: versions | {"jax": "0.0.1"}
    args = argparse.Namespace(
        coordinator=f"127.0.0.1:{port}", num_processes=2, heartbeat=HEARTBEAT, start_timeout=START_TIMEOUT,
        process_id=0 if is_at_fault and fault == "same number" else process_id,
        verbose=False, model=str(folder / f"model{process_id}"),
    )  # fmt: skip
    (folder / f"ready{process_id}").touch()
    begin = lambda: do(deed, folder)
    on_hosts(args, PROG, lambda channel: work(channel, folder, fault, begin if is_at_fault else lambda: None))


def do(deed: str, folder: Path) -> None:
    """Do what a process at fault does."""
    (folder / "begun").touch()
    if deed == "raises":
        raise ValueError("this process has met an error of its own")
    signals = {"dies": signal.SIGKILL, "hangs": signal.SIGSTOP, "interrupts": signal.SIGINT}
    os.kill(os.getpid(), signals[deed])
    time.sleep(1)


def work(channel, folder: Path, fault: str, begin: Callable[[], None]) -> None:
    """Serve a request, and save; `begin` is called where the fault comes."""
    from m3jax import model as m3_model
    from m3jax.checkpoint import orbax, save_orbax
    from m3jax.config import M3Config
    from m3jax.decoding import Engine, Params, Sampling
    from m3jax.hosts.follow import led
    from m3jax.parallel import parse_mesh

    model = m3_model.init(M3Config.tiny(), mesh=parse_mesh("tensor=4"))
    engine = Engine(model, pages=32, max_batch=2, max_length=256, prefill_chunk=32, steps_per_call=2)
    if fault == "save":
        wait = orbax.sync_global_devices

        def wait_or_begin(point: str) -> None:
            if point.endswith("parameters are written"):
                begin()
            wait(point)

        orbax.sync_global_devices = wait_or_begin
        save_orbax(model, folder / "orbax")
    runner, in_prefill = engine._runner, fault == "prefill"
    name, calls = ("prefill", 1) if in_prefill else ("launch", 3)
    call, count = getattr(runner, name), 0

    def call_or_begin(*args, **kwargs):
        nonlocal count
        count += 1
        if count == calls and fault != "idle":
            begin()
        return call(*args, **kwargs)

    setattr(runner, name, call_or_begin)
    if fault == "idle" and not channel.is_sender:
        threading.Timer(2, begin).start()  # while it waits for a call
    with led(engine, channel) as leading:
        if leading is None:
            return
        if fault != "idle":
            leading.add(range(1, 80), Params(max_new_tokens=150, sampling=Sampling.greedy()))
            leading.run()
        time.sleep(120)


if __name__ == "__main__":
    sys.exit(main())
