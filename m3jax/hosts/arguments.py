"""The arguments that make a command one of several processes; this module imports nothing large."""

import argparse

from m3jax.console import Parser
from m3jax.messages import printable


def add_hosts(out: Parser) -> None:
    """Add the arguments that make this process one of several."""
    some = out.add_argument_group("one run on several hosts (docs/scale.md)")
    some.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, with a free port; auto asks "
                      "SLURM, Open MPI, Kubernetes or Cloud TPU for this and the next two")  # fmt: skip
    some.add_argument("--num-processes", metavar="N", type=int, help="of the run")
    some.add_argument("--process-id", metavar="I", type=int, help="of this one, 0 to N - 1; process 0 prints")
    some.add_argument("--heartbeat", metavar="SECONDS", type=int, default=30, help="of silence after which a process "
                      "counts as dead, and all end (default: 30)")  # fmt: skip
    some.add_argument("--start-timeout", metavar="SECONDS", type=int, default=300, help="in which all have to come "
                      "(default: 300)")  # fmt: skip


def check_hosts(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments of `add_hosts` that no run of several processes has."""
    numbers = {"--num-processes": args.num_processes, "--process-id": args.process_id}
    given = [name for name, value in numbers.items() if value is not None]
    if args.coordinator is not None and getattr(args, "mesh", "") is None:
        raise ValueError("--coordinator needs --mesh: say how the devices of all processes divide the model")
    if args.coordinator in (None, "auto"):
        if given:
            raise ValueError(f"{given[0]} goes with --coordinator HOST:PORT; of auto the scheduler says it")
        return
    host, _, port = args.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--coordinator {printable(args.coordinator)}: give HOST:PORT of process 0, or auto")
    if missing := [name for name, value in numbers.items() if value is None]:
        raise ValueError(f"--coordinator {args.coordinator} needs {missing[0]} too")
    if args.num_processes < 1 or not 0 <= args.process_id < args.num_processes:
        raise ValueError(
            f"--process-id {args.process_id} of --num-processes {args.num_processes}: give each of N >= 1 processes "
            "its own number from 0 to N - 1"
        )
    for name in ("heartbeat", "start_timeout"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least 1 second")
