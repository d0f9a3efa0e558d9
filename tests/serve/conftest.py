"""One gateway for all tests of a process that need no more than a scripted worker."""

import time
from collections.abc import Iterator

import pytest
from support.serving import Running, ScriptedWorker, running


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[tuple[Running, ScriptedWorker]]:
    worker = ScriptedWorker()
    with running(worker) as server:
        yield server, worker


@pytest.fixture
def scripted(scripted_server) -> Iterator[tuple[Running, ScriptedWorker]]:
    """The shared gateway, its worker as new."""
    server, worker = scripted_server
    worker.__init__()
    yield server, worker
    for _ in range(400):  # a client has its answer a moment before the server has noticed
        if server.gateway.running == 0:
            break
        time.sleep(0.005)
    assert server.gateway.running == 0  # every test leaves its places
