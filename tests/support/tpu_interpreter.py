"""The TPU interpreter as tests want it: what would hang on a chip, or leave a semaphore raised, is an error.

A wait for a copy that nobody started has no end in the interpreter either, and a copy that nobody waits for is never
carried out by it, so that neither shows in numbers. Kernels here copy within a device and a core: what a wait needs
must have been started before it.
"""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret.shared_memory import Semaphore
from jax.experimental.pallas import tpu as pltpu

# Reads outside of a buffer raise, fresh memory holds NaN, and copies race with computation that does not wait for them.
STRICT = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")

_wait = Semaphore.wait


def _wait_for_what_was_started(semaphore: Semaphore, value: int, core: int, **options) -> None:
    core = int(core)
    tasks = semaphore.tasks[core]
    while semaphore.count_by_core[core] < value and tasks:
        tasks.pop()()
    if semaphore.count_by_core[core] < value:
        raise RuntimeError(f"a wait for {value} bytes, of which {semaphore.count_by_core[core]} were ever copied")
    _wait(semaphore, value, core, **options)


@interpreter.fail_on_exception
def _nothing_is_left(token, device):
    """Raise RuntimeError where a kernel has ended and a copy of its device was not waited for, or not wholly."""
    memory = interpreter._get_shared_memory()
    for semaphore in list(memory.sem.values()):
        for core in memory.get_global_core_ids(int(device)):
            if semaphore.tasks[core] or semaphore.count_by_core[core]:
                raise RuntimeError(
                    f"the kernel has ended: {len(semaphore.tasks[core])} copies and "
                    f"{semaphore.count_by_core[core]} bytes were not waited for"
                )
    return token


Semaphore.wait = _wait_for_what_was_started
interpreter._validate = _nothing_is_left
