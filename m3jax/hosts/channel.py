"""Messages between processes, through the key-value store of JAX's coordination service, which process 0 keeps.

Not `multihost_utils.broadcast_one_to_all`: it is a program of all devices, in their queue, for arrays of known shapes.

A message costs a fraction of a millisecond and no work of the devices; who waits for one is woken by the store.
"""

import socket
from collections.abc import Sequence
from typing import Any

import jax

_WAIT_MS = 60_000  # of one call of the store; a wait goes on as long as the run
_BLOCK = 256  # messages that are forgotten together


class Store:
    """The store, with the process's place in the run.

    Args:
      client: of `jax.distributed`.
      process_id: of this process.
      num_processes: of the run.
    """

    def __init__(self, client: Any, process_id: int, num_processes: int):
        self._client, self.process_id, self.num_processes = client, process_id, num_processes
        self._names: Sequence[str] = ()

    def set(self, key: str, value: bytes) -> None:
        """Set a key that nobody has set."""
        self._client.key_value_set_bytes(f"m3jax/{key}", value)

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value."""
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(f"m3jax/{key}", _WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def gather(self, name: str, value: bytes) -> list[bytes]:
        """Return every process's value of a name that all set, in the order of the processes."""
        self.set(f"{name}/{self.process_id}", value)
        return [self.get(f"{name}/{process_id}") for process_id in range(self.num_processes)]

    def forget(self, folder: str) -> None:
        """Drop all keys of a folder."""
        self._client.key_value_delete(f"m3jax/{folder}")

    def introduce(self) -> None:
        """Tell the others this host's name, and learn theirs."""
        self._names = [name.decode() for name in self.gather("names", socket.gethostname().encode())]

    def name_of(self, process_id: int) -> str:
        """Return what messages call a process: its number and its host."""
        known = process_id < len(self._names)
        return f"process {process_id}" + (f" ({self._names[process_id]})" if known else "")


class Channel:
    """A row of messages from process 0 to all others, which get each in order.

    Args:
      store: of the run.
      name: of the channel; each is used once, by all processes.
    """

    def __init__(self, store: Store, name: str):
        self._store, self._name, self._count = store, name, 0

    @property
    def is_sender(self) -> bool:
        """True on process 0."""
        return self._store.process_id == 0

    def send(self, message: bytes) -> None:
        """Send a message; process 0 alone. It waits where another process is two blocks of messages behind."""
        block, place = divmod(self._count, _BLOCK)
        if place == 0 and block >= 2:
            for process_id in range(1, self._store.num_processes):
                self._store.get(f"{self._name}/read/{block - 2}/{process_id}")
            self._store.forget(f"{self._name}/{block - 2}")
            self._store.forget(f"{self._name}/read/{block - 2}")
        self._store.set(f"{self._name}/{block}/{place}", message)
        self._count += 1

    def receive(self) -> bytes:
        """Wait for the next message; all processes but 0."""
        block, place = divmod(self._count, _BLOCK)
        message = self._store.get(f"{self._name}/{block}/{place}")
        self._count += 1
        if place == _BLOCK - 1:
            self._store.set(f"{self._name}/read/{block}/{self._store.process_id}", b"")
        return message
