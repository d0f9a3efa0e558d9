"""`python -m m3jax.serve worker`: what its arguments make, and its process from its start to SIGTERM."""

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest
from support.workers import text_model

from m3jax import transfer
from m3jax.decoding import Engine
from m3jax.serve.worker import command, main, server, worker
from m3jax.transfer import service


def test_a_folder_that_is_none_is_one_line(capsys, tmp_path):
    """Without a traceback."""
    assert main(["--model", str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "none" in line


def test_on_a_cpu_fewer_requests_decode_in_smaller_calls(monkeypatch):
    """A step costs a CPU what its rows cost, used or not; an invariant step is as wide for one row."""
    smaller = {1: (), 2: (), 4: (1,), 8: (1, 3), 32: (1, 3, 9)}
    assert {max_batch: worker.decode_rows(max_batch) for max_batch in smaller} == smaller

    class Asked(Engine):
        """An engine that is not made."""

        def __init__(self, model, **knobs):
            self.sizes, self.asked_pages = knobs.get("decode_rows", ()), knobs["pages"]

    lm = text_model()
    monkeypatch.setattr(worker, "Engine", Asked)
    monkeypatch.setattr(worker.TextModel, "from_pretrained", lambda *_, **__: lm)
    made = lambda **options: worker.engine_from_pretrained(**options)[0].sizes
    monkeypatch.setattr(worker, "platform", lambda: "cpu")
    assert made() == (1, 3) and made(max_batch=4) == (1,) and made(decode_rows=(2,)) == (2,)
    assert made(invariant=True) == ()
    monkeypatch.setattr(worker, "platform", lambda: "gpu")
    assert made() == ()
    # A pool has the pages of so many requests of the model's context, and no more than 4096 unless it is told.
    config = lm.model.config
    pages = math.ceil(config.max_position_embeddings / config.index_block_size)
    assert 1 < pages < 4096 < 4096 * pages
    pool = lambda **options: worker.engine_from_pretrained(**options)[0].asked_pages
    expected = {1: pages, 2: min(4096, 2 * pages), 8: min(4096, 8 * pages), 4096: 4096}
    assert (
        {size: pool(max_batch=size) for size in expected} == expected and pool() == expected[8] and pool(pages=5) == 5
    )


@pytest.mark.parametrize("is_sized", [False, True])
@pytest.mark.parametrize("role", ["both", "prefill"])
def test_an_engine_is_made_as_the_arguments_say(monkeypatch, capsys, role, is_sized):
    """What they leave open is the engine's own default."""
    words = ["--role", role, "--model", "M", "--dtype", "float32", "--steps-per-call", "3"]
    sizes = ["--pages", "9", "--max-batch", "2", "--max-length", "64", "--mesh", "data=2", "--invariant"]
    draft = ["--weights", "mxfp8", "--draft", "ngram", "--draft-tokens", "2"]
    made = {}

    def make(folder, **knobs):
        made.update(folder=folder, **knobs)
        raise ValueError("enough")

    monkeypatch.setattr(worker, "engine_from_pretrained", make)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert main([*words, *(sizes + draft if is_sized else [])]) == 2 and "enough" in capsys.readouterr().err
    defaults = dict(folder="M", dtype="float32", weights="dequantize", invariant=False, max_batch=8, draft_tokens=3)
    given = dict(pages=9, max_batch=2, max_length=64, mesh="data=2", invariant=True, weights="mxfp8", draft="ngram")
    steps = {"steps_per_call": 3} if role == "both" else {}
    assert made == defaults | steps | (given | {"draft_tokens": 2} if is_sized else {})


@pytest.fixture
def process(monkeypatch, unchecked) -> SimpleNamespace:
    """What a worker's process does, its engine and its network left out; `stop` is what SIGTERM calls."""
    found = SimpleNamespace(done=[], stop=None)
    engine = SimpleNamespace(warmup=lambda programs: found.done.append(("warmup", programs)))
    monkeypatch.setattr(worker, "engine_from_pretrained", lambda *_, **__: (engine, "lm"))
    monkeypatch.setattr(command, "say", found.done.append)
    note = lambda number, handler: setattr(found, "stop", handler)
    monkeypatch.setattr(command.signal, "signal", note)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda loop, *given: note(*given))
    return found


def test_a_process_that_reads_prompts_ends_in_order(monkeypatch, process):
    """Told to end it lets transfers end for so long, and then closes what reads."""
    done = process.done
    prefiller = SimpleNamespace(close=lambda: done.append("closed"))
    stop = lambda seconds: SimpleNamespace(wait=lambda: done.append(("stopped", seconds)))

    def start(given, host, port):
        assert given is prefiller
        done.append((host, port))
        threading.Timer(0.05, lambda: process.stop()).start()
        return SimpleNamespace(stop=stop), 77

    monkeypatch.setattr(transfer, "Prefiller", lambda own, most: done.append(("most", most)) or prefiller)
    monkeypatch.setattr(service, "start", start)
    words = ["--role", "prefill", "--name", "n", "--host", "h", "--port", "5", "--drain", "4", "--max-requests", "6"]
    assert main(words) == 0
    assert done == [
        "compiling", ("warmup", ("prefill", "pages")), ("most", 6), ("h", 5), "reading prompts for n at grpc://h:77",
        ("stopped", 4.0), "closed",
    ]  # fmt: skip


async def for_ever():
    await asyncio.Event().wait()


async def at_once():
    pass


async def fail():
    raise ValueError("no room")


@pytest.mark.parametrize("prepare", [at_once, for_ever, fail])
def test_a_worker_serves_until_it_is_told_to_end(monkeypatch, capsys, process, prepare):
    """It says that it serves once it has compiled, and ends if it cannot; what goes on gets its time, then it ends."""
    done = process.done

    async def noted(what):
        done.append(what)

    made = SimpleNamespace(name="n", prepare=prepare, check_prefill=lambda seconds: None, close=noted)

    async def start(own, host, port):
        if prepare is not fail:
            asyncio.get_running_loop().call_later(0.02, lambda: process.stop())
        return SimpleNamespace(stop=lambda seconds: noted(("stopped", seconds))), 77

    monkeypatch.setattr(worker, "Worker", lambda *_, **__: made)
    monkeypatch.setattr(server, "start", start)
    assert main(["--host", "h", "--port", "0", "--drain", "4"]) == (2 if prepare is fail else 0)
    assert ("no room" in capsys.readouterr().err) == (prepare is fail)
    served = ["serving n"] if prepare is at_once else []
    assert done == ["listening at grpc://h:77; compiling", *served, ("stopped", 4.0), "abort"]
