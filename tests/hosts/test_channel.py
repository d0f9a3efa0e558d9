"""What processes of a run tell each other: facts that all must have alike, and messages in their order."""

import socket
import threading

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fake_store import FakeClient, side_by_side

from m3jax.hosts.agree import agree, fingerprint
from m3jax.hosts.channel import Channel, Store


class Unanswering(FakeClient):
    """A store whose waits end in errors before a value comes."""

    def __init__(self, *errors):
        super().__init__()
        self.errors, self.waited = list(errors), []

    def blocking_key_value_get_bytes(self, key, milliseconds):
        self.waited.append(milliseconds)
        if self.errors:
            raise jax.errors.JaxRuntimeError(self.errors.pop(0))
        return super().blocking_key_value_get_bytes(key, milliseconds)


def test_a_wait_goes_on_until_the_store_itself_fails():
    client = Unanswering(*["DEADLINE_EXCEEDED: no such key"] * 2)
    client.values["m3jax/late"] = b"there"
    assert Store(client, 0, 2).get("late") == b"there" and len(client.waited) == 3
    assert min(client.waited) >= 1000  # it does not ask again and again
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        Store(Unanswering("UNAVAILABLE: the service ended"), 0, 2).get("late")


def test_a_process_is_named_by_its_number_until_hosts_are_known():
    stores = [Store(FakeClient(), 0, 1), Store(FakeClient(), 0, 1)]
    stores[1].introduce()
    assert [stores[0].name_of(0), stores[1].name_of(0), stores[1].name_of(1)] == [
        "process 0", f"process 0 ({socket.gethostname()})", "process 1"
    ]  # fmt: skip


def test_messages_come_in_order_and_are_forgotten():
    """What all have read leaves the store."""
    client = FakeClient()
    channels = [Channel(Store(client, i, 3), "calls") for i in range(3)]
    numbers = range(1500)
    send = lambda: [channels[0].send(str(i).encode()) for i in numbers]
    receive = [lambda c=c: [int(c.receive()) for _ in numbers] for c in channels[1:]]
    _, *received = side_by_side(send, *receive)
    assert received == [list(numbers)] * 2
    assert len(client.values) < 800


@pytest.mark.parametrize("order", [1, -1])
def test_a_reader_holds_the_sender_up_at_two_blocks(order):
    """The sender stops before message 512 until both others have read the first 256, and forgets those alone."""
    client = FakeClient()
    first, *others = (Channel(Store(client, i, 3), "calls") for i in range(3))
    for i in range(512):
        first.send(b"%d" % i)
    sending = threading.Thread(target=first.send, args=(b"512",))
    sending.start()
    for channel in others[::order]:
        for _ in range(255):
            channel.receive()
        sending.join(0.05)
        assert sending.is_alive() and "m3jax/calls/2/0" not in client.values
        channel.receive()
    sending.join(30)
    assert sorted({key.split("/")[2] for key in client.values}) == ["1", "2"]
    assert [int(others[0].receive()) for _ in range(257)] == list(range(256, 513))


def test_other_versions_are_refused_on_all_and_both_named():
    client = FakeClient()
    stores = [Store(client, i, 3) for i in range(3)]
    side_by_side(*(store.introduce for store in stores))
    facts = [{"m3jax": "1", "jax": "0.10.2"}, {"m3jax": "1", "jax": "0.10.2"}, {"m3jax": "1", "jax": "0.11.0"}]
    calls = [lambda i=i: agree(stores[i], "versions", facts[i]) for i in range(3)]
    host = socket.gethostname()
    line = f"jax is '0.10.2' on process 0 ({host}) and '0.11.0' on process 2 ({host}): every process needs the same"
    assert list(map(str, side_by_side(*calls))) == [line] * 3


def test_a_fingerprint_tells_folders_apart(tmp_path):
    """By the JSON files and by each tensor file's name, size and header; not by the numbers, which are not read."""
    tensors = {"a": np.arange(6, dtype=np.float32)}
    folders = {name: tmp_path / name for name in ("one", "numbers", "header", "size", "name", "json")}
    for name, folder in folders.items():
        folder.mkdir()
        changed = {"numbers": {"a": tensors["a"] + 1}, "header": {"b": tensors["a"]}, "size": {"a": tensors["a"][:5]}}
        save_file(changed.get(name, tensors), folder / ("y" if name == "name" else "x.safetensors"))
        (folder / "config.json").write_text("{}" if name != "json" else "[]")
    (folders["name"] / "y").rename(folders["name"] / "y.safetensors")
    found = {name: fingerprint(folder) for name, folder in folders.items()}
    assert found["one"] == found["numbers"] and len(set(found.values())) == 5
    assert {len(each) for each in found.values()} == {16}
