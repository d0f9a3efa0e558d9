"""The processes of a run, as the arguments or the scheduler of a cluster name them."""

import argparse
import os
import re
from dataclasses import dataclass

from jax._src import clusters  # what `jax.distributed.initialize` asks; it has no public name

AUTO = "auto"


@dataclass(frozen=True)
class HostJob:
    """The place of this process among those of a run.

    Attributes:
      coordinator: HOST:PORT of process 0, which the others connect to.
      num_processes: of the run.
      process_id: of this one, from 0.
      local_devices: ids of the devices that this process uses; None for all that it sees.
      heartbeat: seconds of silence after which a process counts as dead.
      start_timeout: seconds in which all processes have to come.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None
    heartbeat: int = 30
    start_timeout: int = 300

    @classmethod
    def of(cls, args: argparse.Namespace) -> "HostJob | None":
        """Return the job that parsed arguments name; None where they name none.

        Args:
          args: of a parser that has `m3jax.cli.arguments.add_hosts`.

        Raises:
          ValueError: "auto", and no scheduler has started this process.
        """
        if args.coordinator is None:
            return None
        timeouts = dict(heartbeat=args.heartbeat, start_timeout=args.start_timeout)
        if args.coordinator != AUTO:
            return cls(args.coordinator, args.num_processes, args.process_id, **timeouts)
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, args.start_timeout
        )
        coordinator, num_processes, process_id, devices = found
        if None in (coordinator, num_processes, process_id):
            raise ValueError(
                "--coordinator auto: no job of SLURM, Open MPI, Kubernetes or Cloud TPU started this process; start it "
                "there, or give --coordinator HOST:PORT --num-processes N --process-id I"
            )
        # JAX gives each process of SLURM and Open MPI one device. A process that is alone on its host has them all.
        devices = None if _is_alone_on_host() or "JAX_LOCAL_DEVICE_IDS" in os.environ else devices
        devices = None if devices is None else tuple(devices)
        return cls(coordinator, num_processes, process_id, devices, **timeouts)


def _is_alone_on_host() -> bool:
    """Return True if SLURM or Open MPI has started one process on each host."""
    of_slurm = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # as in 1(x4), or 8(x2),4
    return bool(re.fullmatch(r"1(\(x\d+\))?", of_slurm)) or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
