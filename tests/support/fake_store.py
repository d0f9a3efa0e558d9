"""Processes of a run as threads of one: their key-value store, and what each of them does."""

import threading


class FakeClient:
    """The key-value store of JAX's coordination service, for threads of one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key, _):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 30)
            return self.values[key]

    def key_value_delete(self, folder):
        with self.changed:
            self.values = {key: x for key, x in self.values.items() if not key.startswith(f"{folder}/")}


def side_by_side(*calls):
    """Return the results of calls on threads, or what they raised."""
    results = [None] * len(calls)

    def note(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=note, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
