"""Our server under load beside transformers' and llama.cpp's, and what gateway and worker cost (docs/serving.md).

    bench.py serve --others none                             # our server alone
    bench.py serve --transformers "PYTHON -m transformers.cli.transformers serve" \\
        --llama-cpp "PYTHON -m llama_cpp.server"             # in one run, by turns
    bench.py serve --overhead                                # over the bare engine, 32 streams

Requests come at random times, whether those before have ended or not (Poisson, an open loop): a server that is too slow
is late for all that follow. Workloads: "chat", 1,000 tokens of prompt and 200 new; "agentic", conversations of 8 turns
that begin with the same 8,192 tokens; "images", a new picture each. All servers have the embedded model's weights, its
context widened to hold the conversations, and get the same requests at the same times, one server after the other.
Goodput counts the requests a second that were answered within both limits, on the time to the first text and on the
mean time of a token behind it; several pairs of limits are counted from the same answers. A request that was not
answered when the window and its drain were over has missed all of them.

`--overhead` draws the same prompts by the engine in this process and by the server over HTTP, by turns: new tokens a
second of both, and the processor time, which says more where others use the machine. The client runs on the same cores.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import asyncio
import base64
import contextlib
import io
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clients import ServerProcess, Streamed, free_port, streamed

from benchmarks.harness import CORES, HERE, Option
from benchmarks.models import greedy
from m3jax.assets import embedded_path
from m3jax.decoding import Engine
from m3jax.evaluate.words import WORDS
from m3jax.text import Tokenizer

USES_DEVICE, PACKAGES = False, ("torch", "transformers", "llama-cpp-python")
CHAT, AGENTIC, IMAGES = "chat", "agentic", "images"
CONTEXT = 16_384  # tokens; the embedded model's own 8,192 do not hold a prefix of 8,192 and eight turns
STEPS_PER_CALL = 4  # of the server's engine


@dataclass(frozen=True)
class Limits:
    """A pair of limits within which an answer is good, in seconds: to the first text, and of a token behind it."""

    first: float
    token: float

    def __str__(self) -> str:
        return f"{self.first:g}:{self.token:g}"

    def are_met(self, answer: Streamed) -> bool:
        """Return whether a request was answered within the limits."""
        is_answered = answer.is_whole and answer.status == 200 and answer.error is None
        return is_answered and answer.first_token_seconds <= self.first and answer.token_seconds <= self.token


LIMITS = (Limits(10.0, 0.3), Limits(60.0, 2.0), Limits(math.inf, math.inf))
STREAMS, OVERHEAD_PROMPT, OVERHEAD_CONTEXT = 32, 64, 512  # requests of --overhead, and their tokens
OPTIONS = dict(
    workloads=Option([CHAT, AGENTIC, IMAGES], "Workloads", choices=(CHAT, AGENTIC, IMAGES)),
    others=Option(["transformers", "llama.cpp"], "Servers beside ours, or none", smoke=["none"],
                  choices=("transformers", "llama.cpp", "none")),
    transformers=Option(f"{sys.executable} -m transformers.cli.transformers serve", "Command of its server"),
    llama_cpp=Option(f"{sys.executable} -m llama_cpp.server", "Command of llama-cpp-python's server"),
    dtype=Option("float32", "Dtype of weights", choices=("float32", "bfloat16")),
    max_batch=Option(8, "Rows of our engine", smoke=2),
    chat_rates=Option([0.05, 0.5, 1.0], "Chats a second", smoke=[4.0]),
    agentic_rates=Option([0.02, 0.1], "Conversations a second", smoke=[4.0]),
    image_rates=Option([0.5], "Pictures a second", smoke=[2.0]),
    seconds=Option(60.0, "Seconds in which requests come", smoke=0.5),
    drain=Option(30.0, "Seconds more that they have", smoke=60.0),
    prompt=Option(1000, "Tokens of a chat's question", smoke=40),
    prefix=Option(8192, "Tokens before all agentic conversations", smoke=64),
    turns=Option(8, "Turns of an agentic conversation", smoke=2),
    new_tokens=Option(200, "Tokens of an answer; agentic and images have half of them", smoke=8),
    side=Option(224, "Pixels of a picture's side", smoke=56),
    overhead=Option(False, "Measure gateway and worker over the bare engine"),
)  # fmt: skip
REPEATS = 1


def measure(args):
    """Yield the rows of the overhead, or of the servers under load."""
    yield from overhead(args) if args.overhead else compare_servers(args)


# Servers


@dataclass(eq=False)
class Server:
    """A server that is measured.

    Attributes:
      process: Its process.
      fields: Fields of its requests besides messages, max_tokens, temperature and stream.
      takes_images: Whether it is asked for pictures.
      ready_path: Path that answers 200 once it serves.
    """

    process: ServerProcess
    fields: dict[str, Any]
    takes_images: bool = False
    ready_path: str = "/health"

    async def ask(self, messages: Sequence[Any], new_tokens: int, until: float) -> Streamed:
        """Return the answer to a conversation as it streamed; at `until`, of `time.perf_counter`, the client leaves."""
        body = {"messages": messages, "max_tokens": new_tokens, "temperature": 0, "stream": True, **self.fields}
        seconds = max(0.0, until - time.perf_counter())
        return await streamed(self.process.port, "/v1/chat/completions", body, seconds=seconds)

    async def settle(self, seconds: float = 120.0) -> None:
        """Wait until the server has left what its clients left: until a small request is answered."""
        found = await self.ask([{"role": "user", "content": "Hi"}], 1, time.perf_counter() + seconds)
        if not found.is_whole or found.status != 200:
            raise ValueError(f"{self.process.name} does not answer a small request within {seconds:g} s: {found.error}")


THINKING = {"chat_template_kwargs": {"thinking_mode": "disabled"}}


def our_command(folder: Path, port: int, args, *more: str) -> list[str]:
    """Return the command line of our server."""
    command = [sys.executable, "-m", "m3jax.serve", "--model", str(folder), "--port", str(port), "--dtype", args.dtype]
    return [*command, "--max-batch", str(args.max_batch), *more]


def our_server(folder: Path, scratch: Path, args) -> Server:
    """Start our server."""
    port = free_port()
    more = ("--context", "512", "--prefill-chunk", "64", "--no-warmup") if args.smoke else ()
    fields = {"ignore_eos": True, "stream_options": {"include_usage": True}, **THINKING}
    process = ServerProcess("m3jax", our_command(folder, port, args, *more), port)
    return Server(process, fields, takes_images=True)


def transformers_server(folder: Path, scratch: Path, args) -> Server:
    """Start `transformers serve`; its Python needs torchvision."""
    export, port = scratch / "transformers", free_port()
    export_whole(folder, export)
    command = [*shlex.split(args.transformers), str(export), "--port", str(port), "--dtype", args.dtype]
    process = ServerProcess("transformers", command, port)
    return Server(process, {"model": str(export), **THINKING}, takes_images=True)


def llama_cpp_server(folder: Path, scratch: Path, args) -> Server:
    """Start llama.cpp's server, of llama-cpp-python, on the text part of the model as GGUF."""
    path, port = scratch / "model.gguf", free_port()
    convert = [*shlex.split(args.llama_cpp)[:1], str(HERE.parent / "peer_llama_cpp.py"), "convert", str(path)]
    more = ["--model", str(folder), "--dtype", args.dtype, "--vocabulary"]
    done = subprocess.run([*convert, *more], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"llama.cpp: the model becomes no GGUF file: {done.stderr.strip().splitlines()[-1]}")
    settings = dict(
        model=path, port=port, host="127.0.0.1", n_ctx=CONTEXT, n_threads=CORES, n_threads_batch=CORES,
        flash_attn=True, interrupt_requests=False, verbose=False,
    )  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    process = ServerProcess("llama.cpp", shlex.split(args.llama_cpp) + words, port)
    return Server(process, {}, ready_path="/v1/models")


STARTS = {"transformers": transformers_server, "llama.cpp": llama_cpp_server}


def widened(folder: Path) -> Path:
    """Copy the embedded model with a context that holds the conversations; what it says there is not measured."""
    shutil.copytree(embedded_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def export_whole(folder: Path, into: Path) -> None:
    """Write a model as transformers' server reads it with its processors of media; no EOS ends its answers."""
    from m3jax.serve.worker.tokenizer_files import tokenizer_archive

    shutil.copytree(folder, into)
    with zipfile.ZipFile(io.BytesIO(tokenizer_archive(folder))) as archive:
        archive.extract("preprocessor_config.json", into)
    config = json.loads((into / "config.json").read_text())
    config["text_config"]["eos_token_id"] = None
    written = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": config["text_config"]["bos_token_id"]},
        "video_preprocessor_config.json": {"video_processor_type": "MiniMaxM3VLVideoProcessor"},
        "processor_config.json": {"processor_class": "MiniMaxM3VLProcessor"},
    }
    for name, content in written.items():
        (into / name).write_text(json.dumps(content))


# Workloads


class Texts:
    """Texts of as many tokens as are asked for, of words that a seed draws."""

    def __init__(self, seed: int):
        self.rng, self._tokenizer = np.random.default_rng(seed), Tokenizer.from_pretrained(embedded_path())

    def draw(self, num_tokens: int) -> str:
        """Return a text of about so many tokens: cut in the middle of a word it may have one or two more."""
        words = [WORDS[int(i)] for i in self.rng.integers(len(WORDS), size=num_tokens)]
        return self._tokenizer.decode(self._tokenizer.encode(" ".join(words))[:num_tokens])

    def ids(self, num_tokens: int) -> list[int]:
        """Return that many token ids of a text."""
        return self._tokenizer.encode(self.draw(num_tokens + 8))[:num_tokens]

    def picture(self, side: int) -> str:
        """Return a picture of noise as a data URL."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(self.rng.integers(0, 255, (side, side, 3), np.uint8)).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True)
class Conversation:
    """The questions of one client, one after the other, each behind the answers before it.

    Attributes:
      before: Messages that stand before the first question.
      questions: Contents of the user's messages.
      new_tokens: Tokens of each answer.
    """

    before: Sequence[Any]
    questions: Sequence[Any]
    new_tokens: int

    async def run(self, server: Server, until: float) -> list[Streamed]:
        """Return the answers; those to questions that were not asked any more are missing."""
        messages, found = list(self.before), []
        for question in self.questions:
            messages.append({"role": "user", "content": question})
            answer = await server.ask(messages, self.new_tokens, until)
            found.append(answer)
            if not answer.is_whole:
                break
            messages.append({"role": "assistant", "content": answer.text})
        return found


def conversations(workload: str, count: int, texts: Texts, args) -> list[Conversation]:
    """Return that many conversations of a workload, none of which an earlier run had."""
    if workload == CHAT:
        return [Conversation((), (texts.draw(args.prompt),), args.new_tokens) for _ in range(count)]
    if workload == AGENTIC:
        before, half = [{"role": "system", "content": texts.draw(args.prefix)}], args.new_tokens // 2
        return [Conversation(before, [texts.draw(64) for _ in range(args.turns)], half) for _ in range(count)]
    asked = {"type": "text", "text": "What do you see?"}
    part = lambda: {"type": "image_url", "image_url": {"url": texts.picture(args.side)}}
    return [Conversation((), ([part(), asked],), args.new_tokens // 2) for _ in range(count)]


# Load


async def window(server: Server, talks: Sequence[Conversation], arrivals: Sequence[float], args) -> list[Streamed]:
    """Run conversations that begin at these seconds of the window, and leave those that are not through at its end."""
    began = time.perf_counter()
    until = began + args.seconds + args.drain

    async def one(talk: Conversation, arrival: float) -> list[Streamed]:
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        return await talk.run(server, until)

    found = await asyncio.gather(*(one(talk, arrival) for talk, arrival in zip(talks, arrivals, strict=True)))
    return [answer for answers in found for answer in answers]


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p95 and p99 in milliseconds; None where more requests than that never got so far."""
    ranked = sorted(values)
    at = lambda share: ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)] if ranked else math.inf
    return {f"{name} p{p}": 1e3 * at(p / 100) if math.isfinite(at(p / 100)) else None for p in (50, 95, 99)}


async def load(workload: str, rate: float, servers: Sequence[Server], seed: int, args) -> list[dict]:
    """Run windows of one workload at one rate on each server by turns, and return a row for each."""
    found: dict[str, list[Streamed]] = {server.process.name: [] for server in servers}
    offered = 0
    for number in range(args.repeats):
        texts = Texts(seed + number)
        arrivals = np.cumsum(texts.rng.exponential(1 / rate, size=max(1, math.ceil(2 * rate * args.seconds))))
        arrivals = [float(when) for when in arrivals if when < args.seconds] or [0.0]
        talks = conversations(workload, len(arrivals), texts, args)
        offered += sum(len(talk.questions) for talk in talks)
        for server in servers:
            await server.settle()
            found[server.process.name] += await window(server, talks, arrivals, args)
    rows = []
    for name, answers in found.items():
        missing = [math.inf] * (offered - len(answers))
        row = {"workload": f"{workload}, {rate:g} a second", "server": name, "asked": offered,
               "whole": sum(answer.is_whole and answer.status == 200 for answer in answers)}  # fmt: skip
        row |= percentiles("first, ms", [answer.first_token_seconds for answer in answers] + missing)
        row |= percentiles("token, ms", [answer.token_seconds for answer in answers] + missing)
        for limits in LIMITS:
            row[f"met {limits}"] = sum(map(limits.are_met, answers))
            row[f"goodput/s {limits}"] = row[f"met {limits}"] / (args.seconds * args.repeats)
        rows.append(row)
        for error in sorted({answer.error for answer in answers if answer.error})[:2]:
            rows.append(f"{name}: {error[:200]}")
    return rows


def compare_servers(args):
    """Start our server and the others that are there, and yield a row for each workload, rate and server."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = widened(Path(scratch) / "model")
        servers = []
        for start in (our_server, *(STARTS[name] for name in args.others if name != "none")):
            try:
                server = start(folder, Path(scratch), args)
                stack.callback(server.process.close)
                server.process.wait_until_ready(300, server.ready_path)
                asyncio.run(server.settle())
            except ValueError as error:
                if not servers:
                    raise
                yield f"left out: {error}"
                continue
            servers.append(server)
        best: dict[tuple[str, str], float] = {}
        rates = {CHAT: args.chat_rates, AGENTIC: args.agentic_rates, IMAGES: args.image_rates}
        for workload in args.workloads:
            able = [server for server in servers if workload != IMAGES or server.takes_images]
            for number, rate in enumerate(rates[workload]):
                for row in asyncio.run(load(workload, rate, able, 1000 * number, args)):
                    yield row
                    for column, value in row.items() if isinstance(row, dict) else ():
                        if column.startswith("goodput"):
                            key = column, row["server"]
                            best[key] = max(value, best.get(key, 0.0))
            for (column, name), goodput in best.items():
                own = best[column, "m3jax"]
                yield {"best": f"{workload}, {column}", "server": name, "goodput/s": goodput,
                       "ours, times that": own / goodput if goodput else None}  # fmt: skip
            best.clear()


# Overhead


def bare_engine(folder: Path, args) -> Engine:
    """Return the engine that our server makes of a folder, to be driven by hand."""
    from m3jax.serve.worker import Worker

    worker = Worker.from_pretrained(
        folder, dtype=args.dtype, max_batch=STREAMS, steps_per_call=STEPS_PER_CALL, max_length=OVERHEAD_CONTEXT
    )
    asyncio.run(worker.prepare(("prefill", "decode", "pages")))
    asyncio.run(worker.close())
    return worker.engine


def drawn(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Return the seconds of these prompts side by side, from their arrival to the last one's end."""
    params = greedy(new_tokens, stop_ids=())
    began = time.perf_counter()
    handles = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    seconds = time.perf_counter() - began
    for handle in handles:
        engine.forget(handle)
    return seconds


async def served(port: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Return the seconds of these prompts as streams side by side."""
    body = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(streamed(port, "/v1/completions", {"prompt": list(prompt), **body}) for prompt in prompts)
    )
    seconds, count = time.perf_counter() - began, sum(answer.tokens for answer in answers)
    if count != len(prompts) * new_tokens:
        raise ValueError(f"the server drew {count} tokens instead of {len(prompts) * new_tokens}")
    return seconds


def overhead(args):
    """Yield the new tokens a second of the bare engine and of the server, by turns on the same prompts."""
    port, folder = free_port(), embedded_path()
    args.max_batch = STREAMS
    process = ServerProcess("m3jax", our_command(folder, port, args, "--context", str(OVERHEAD_CONTEXT)), port)
    try:
        engine = bare_engine(folder, args)
        process.wait_until_ready(300)
        texts, ratios = Texts(0), []
        count = 2 * STREAMS * args.new_tokens
        for number in range(args.repeats + 1):
            seconds, cpu = dict(bare=0.0, served=0.0), dict(bare=0.0, served=0.0, client=0.0)
            # Who is first finds the machine as the other one left it, which made 8% on an idle one: each is first once.
            for order in (("bare", "served"), ("served", "bare")):
                prompts = [texts.ids(OVERHEAD_PROMPT) for _ in range(STREAMS)]
                for name in order:
                    of_server, own = process.cpu_seconds(), time.process_time()
                    if name == "bare":
                        seconds[name] += drawn(engine, prompts, args.new_tokens)
                        cpu["bare"] += time.process_time() - own
                    else:
                        seconds[name] += asyncio.run(served(port, prompts, args.new_tokens))
                        cpu["served"] += process.cpu_seconds() - of_server
                        cpu["client"] += time.process_time() - own
            if number == 0:  # memory is touched for the first time
                continue
            ratios.append((1 - seconds["bare"] / seconds["served"], cpu["served"] / cpu["bare"] - 1))
            yield {
                "round": f"{number}, {STREAMS} streams", "fewer tokens/s": ratios[-1][0],
                "more CPU time": ratios[-1][1], **{f"{name}, tokens/s": count / s for name, s in seconds.items()},
                **{f"{name}, CPU s": s for name, s in cpu.items()},
            }  # fmt: skip
        fewer, more = (statistics.median(column) for column in zip(*ratios, strict=True))
        yield f"gateway and worker over the bare engine, medians: {fewer:.1%} fewer tokens/s, {more:.1%} more CPU time"
    finally:
        process.close()
