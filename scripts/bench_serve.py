"""Our server under load beside transformers' and llama.cpp's, and what gateway and worker cost (docs/serving.md).

    python scripts/bench_serve.py --others                            # our server alone
    python scripts/bench_serve.py --transformers "PYTHON -m transformers.cli.transformers serve" \\
        --llama-cpp "PYTHON -m llama_cpp.server"                      # in one run, by turns
    python scripts/bench_serve.py --overhead                          # over the bare engine, 32 streams
    python scripts/bench_serve.py --smoke                             # seconds: sees that it runs

Requests come at random times, whether those before have ended or not (Poisson, an open loop): a server that is too slow
is late for all that follow. Workloads: "chat", 1,000 tokens of prompt and 200 new; "agentic", conversations of 8 turns
that begin with the same 8,192 tokens; "images", a new picture each. All servers have the embedded model's weights, its
context widened to hold the conversations, and get the same requests at the same times, one server after the other.
Goodput counts the requests a second that were answered within both limits, on the time to the first text and on the
mean time of a token behind it; several pairs of limits are counted from the same answers, since a pair that a slow
server never meets tells nothing of how much faster the other one is. A request that was not answered when the window
and its drain were over has missed all of them.

`--overhead` draws the same prompts by the engine in this process and by the server over HTTP, by turns, and prints new
tokens a second of both, and the processor time, which says more where others use the machine. The client runs on the
same cores.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clients import ServerProcess, Streamed, free_port, streamed

CHAT, AGENTIC, IMAGES = "chat", "agentic", "images"
CONTEXT = 16_384  # tokens; the embedded model's own 8,192 do not hold a prefix of 8,192 and eight turns
ERROR = 2
STEPS_PER_CALL = 4  # of the server's engine


# Servers


@dataclass(eq=False)
class Server:
    """A server that is measured.

    Attributes:
      name: in tables.
      process: of it.
      fields: that each of its requests has besides messages, max_tokens, temperature and stream.
      takes_images: True if it is asked for pictures.
      ready_path: that says 200 once it serves.
    """

    name: str
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
        end = time.perf_counter() + seconds
        found = await self.ask([{"role": "user", "content": "Hi"}], 1, end)
        if not found.is_whole or found.status != 200:
            raise ValueError(f"{self.name} does not answer a small request within {seconds:g} s: {found.error}")


def our_command(folder: Path, port: int, args: argparse.Namespace, *more: str) -> list[str]:
    """Return the command line of our server."""
    command = [sys.executable, "-m", "m3jax.serve", "--model", str(folder), "--port", str(port), "--dtype", args.dtype]
    return [*command, "--max-batch", str(args.max_batch), *more]


def our_server(folder: Path, args: argparse.Namespace) -> Server:
    """Start our server."""
    port = free_port()
    more = ("--context", "512", "--prefill-chunk", "64", "--no-warmup") if args.smoke else ()
    process = ServerProcess("m3jax", our_command(folder, port, args, *more), port)
    own = {"ignore_eos": True, "stream_options": {"include_usage": True}, **THINKING}
    return Server("m3jax", process, own, takes_images=True)


THINKING = {"chat_template_kwargs": {"thinking_mode": "disabled"}}


def transformers_server(folder: Path, scratch: Path, args: argparse.Namespace) -> Server:
    """Start `transformers serve`: on the whole model where pictures are asked for and its Python has torchvision.

    Else on the text part, in the layout of the hub's text models, which answers texts no slower.
    """
    export, python = scratch / "transformers", shlex.split(args.transformers)[0]
    reads_pictures = lambda: subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode == 0
    takes_images = IMAGES in args.workloads and reads_pictures()
    (export_whole if takes_images else export_text)(folder, export)
    port = free_port()
    command = [*shlex.split(args.transformers), str(export), "--port", str(port), "--dtype", args.dtype]
    own = {"model": str(export), **THINKING}
    return Server("transformers", ServerProcess("transformers serve", command, port), own, takes_images=takes_images)


def llama_cpp_server(folder: Path, scratch: Path, args: argparse.Namespace) -> Server:
    """Start llama.cpp's server, of llama-cpp-python, on the text part of the model as GGUF."""
    path = scratch / "model.gguf"
    convert = [*shlex.split(args.llama_cpp)[:1], str(Path(__file__).with_name("peer_llama_cpp.py")), "convert"]
    more = ["--model", str(folder), "--dtype", args.dtype, "--vocabulary"]
    done = subprocess.run([*convert, str(path), *more], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"llama.cpp: the model becomes no GGUF file: {done.stderr.strip().splitlines()[-1]}")
    port = free_port()
    settings = dict(
        model=path, port=port, host="127.0.0.1", n_ctx=CONTEXT, n_threads=THREADS, n_threads_batch=THREADS,
        flash_attn=True, interrupt_requests=False, verbose=False,
    )  # fmt: skip
    command = shlex.split(args.llama_cpp) + [
        word for name, value in settings.items() for word in (f"--{name}", str(value))
    ]
    return Server("llama.cpp", ServerProcess("llama.cpp's server", command, port), {}, ready_path="/v1/models")


THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OTHERS: dict[str, Callable[[Path, Path, argparse.Namespace], Server]] = {
    "transformers": transformers_server,
    "llama.cpp": llama_cpp_server,
}


def widened(folder: Path) -> Path:
    """Copy the embedded model with a context that holds the conversations; what it says there is not measured."""
    from m3jax.assets import embedded_path

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


def export_text(folder: Path, into: Path) -> None:
    """Write the text part of a model as transformers' text model, whose answers no EOS ends."""
    import ml_dtypes  # noqa: F401  (gives numpy the name bfloat16, which safetensors asks it for)
    from safetensors.numpy import load_file, save_file

    into.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / name, into / name)
    config = json.loads((folder / "config.json").read_text())
    text = {**config["text_config"], "architectures": ["MiniMaxM3VLForCausalLM"], "torch_dtype": "bfloat16"}
    text |= {"model_type": "minimax_m3_vl_text", "eos_token_id": None}
    (into / "config.json").write_text(json.dumps(text))
    (into / "generation_config.json").write_text(json.dumps({"bos_token_id": text["bos_token_id"]}))
    prefix = "language_model."
    weights = load_file(folder / "model.safetensors")
    own = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
    save_file(own, into / "model.safetensors", metadata={"format": "pt"})


# Workloads


@dataclass(frozen=True)
class Conversation:
    """The questions of one client, one after the other, each behind the answers before it.

    Attributes:
      before: messages that stand before the first question.
      questions: contents of the user's messages.
      new_tokens: of each answer.
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


class Texts:
    """Texts of as many tokens as are asked for, of words that a seed draws."""

    def __init__(self, seed: int):
        from m3jax.assets import embedded_path
        from m3jax.evaluate.words import WORDS
        from m3jax.text import Tokenizer

        self._words, self.rng = WORDS, np.random.default_rng(seed)
        self._tokenizer = Tokenizer.from_pretrained(embedded_path())

    def draw(self, num_tokens: int) -> str:
        """Return a text of about so many tokens: cut in the middle of a word it may have one or two more."""
        words = [self._words[int(i)] for i in self.rng.integers(len(self._words), size=num_tokens)]
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


def conversations(workload: str, count: int, texts: Texts, args: argparse.Namespace) -> list[Conversation]:
    """Return that many conversations of a workload, none of which an earlier run had."""
    if workload == CHAT:
        return [Conversation((), (texts.draw(args.prompt),), args.new_tokens) for _ in range(count)]
    if workload == AGENTIC:
        before = [{"role": "system", "content": texts.draw(args.prefix)}]
        return [
            Conversation(before, [texts.draw(64) for _ in range(args.turns)], args.new_tokens // 2)
            for _ in range(count)
        ]
    asked = {"type": "text", "text": "What do you see?"}
    part = lambda: {"type": "image_url", "image_url": {"url": texts.picture(args.side)}}
    return [Conversation((), ([part(), asked],), args.new_tokens // 2) for _ in range(count)]


# Load


@dataclass
class Window:
    """The answers of one server to the requests of one window.

    Attributes:
      answers: of the requests that were sent.
      offered: requests that the clients would have made.
      seconds: of the window.
    """

    answers: list[Streamed]
    offered: int
    seconds: float

    def met(self, limits: "Limits") -> int:
        """Return how many requests were answered within the limits."""
        is_met = lambda one: (
            one.is_whole and one.status == 200 and one.error is None
            and one.first_token_seconds <= limits.first and one.token_seconds <= limits.token
        )  # fmt: skip
        return sum(map(is_met, self.answers))


@dataclass(frozen=True)
class Limits:
    """A pair of limits within which an answer is good.

    Attributes:
      first: seconds to the first text.
      token: mean seconds of a token behind it.
    """

    first: float
    token: float

    @classmethod
    def parsed(cls, text: str) -> "Limits":
        """Read FIRST:TOKEN, such as 10:0.3; inf is none.

        Raises:
          ValueError: it is not two numbers.
        """
        first, token = text.split(":")
        return cls(float(first), float(token))

    def __str__(self) -> str:
        return f"first text within {self.first:g} s, a token within {self.token:g} s"


async def window(server: Server, talks: Sequence[Conversation], arrivals: Sequence[float], args: Any) -> Window:
    """Run conversations that begin at these seconds of the window, and leave those that are not through at its end."""
    began = time.perf_counter()
    until = began + args.seconds + args.drain

    async def one(talk: Conversation, arrival: float) -> list[Streamed]:
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        return await talk.run(server, until)

    found = await asyncio.gather(*(one(talk, arrival) for talk, arrival in zip(talks, arrivals, strict=True)))
    offered = sum(len(talk.questions) for talk in talks)
    return Window([answer for answers in found for answer in answers], offered, args.seconds)


def percentiles(values: Sequence[float]) -> str:
    """Return p50, p95 and p99 in milliseconds; "-" where more requests than that never got so far."""
    ranked = sorted(values)
    at = lambda share: ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)] if ranked else math.inf
    return " ".join(f"{at(p) * 1e3:8.0f}" if math.isfinite(at(p)) else f"{'-':>8s}" for p in (0.5, 0.95, 0.99))


async def measure(
    workload: str, rate: float, servers: Sequence[Server], seed: int, args: Any
) -> dict[str, list[float]]:
    """Run windows of one workload at one rate on each server by turns, and print a line for each.

    Returns:
      By server its goodputs, one for each pair of limits.
    """
    found: dict[str, list[Window]] = {server.name: [] for server in servers}
    for number in range(args.rounds):
        texts = Texts(seed + number)
        arrivals = np.cumsum(texts.rng.exponential(1 / rate, size=max(1, math.ceil(2 * rate * args.seconds))))
        arrivals = [float(when) for when in arrivals if when < args.seconds] or [0.0]
        talks = conversations(workload, len(arrivals), texts, args)
        for server in servers:
            await server.settle()
            found[server.name].append(await window(server, talks, arrivals, args))
    goodputs = {}
    for name, windows in found.items():
        answers = [answer for each in windows for answer in each.answers]
        offered, seconds = sum(each.offered for each in windows), sum(each.seconds for each in windows)
        met = [sum(each.met(limits) for each in windows) for limits in args.limits]
        goodputs[name] = [count / seconds for count in met]
        missing = [math.inf] * (offered - len(answers))
        first = percentiles([answer.first_token_seconds for answer in answers] + missing)
        token = percentiles([answer.token_seconds for answer in answers] + missing)
        whole = sum(answer.is_whole and answer.status == 200 for answer in answers)
        counts = f"{offered:5d} {whole:6d} {'/'.join(map(str, met)):>9s}"
        listed = "/".join(f"{goodput:.3f}" for goodput in goodputs[name])
        print(f"{workload:8s} {rate:6.2f} {name:13s} {counts}  {first}  {token}  {listed:>17s}", flush=True)
        for error in sorted({answer.error for answer in answers if answer.error})[:2]:
            print(f"         {name}: {error[:200]}")
    return goodputs


async def run_load(servers: Sequence[Server], args: argparse.Namespace) -> None:
    """Print a table for each workload, and the ratios of goodputs."""
    limits = "; or ".join(map(str, args.limits))
    windows = f"windows of {args.seconds:g} s and {args.drain:g} s more, {args.rounds} rounds"
    print(f"limits: {limits}; {windows}; {args.dtype}, {THREADS} cores")
    heads = "".join(f"{name:>9s}" for name in ("p50", "p95", "p99"))
    print(f"{'':36s}{'':12s}{'':6s}{'ms to the first text':^27s} {'ms a token':^28s}")
    names = f"{'workload':8s} {'rate/s':>6s} {'server':13s} {'asked':>5s} {'whole':>6s} {'met':>9s}"
    print(f"{names} {heads} {heads}  goodput/s", flush=True)
    for workload in args.workloads:
        able = [server for server in servers if workload != IMAGES or server.takes_images]
        for server in servers:
            if server not in able:
                print(f"{workload:8s}        {server.name} takes no pictures here")
        rates = {CHAT: args.chat_rates, AGENTIC: args.agentic_rates, IMAGES: args.image_rates}[workload]
        best = {server.name: [0.0] * len(args.limits) for server in able}
        for number, rate in enumerate(rates):
            goodputs = await measure(workload, rate, able, 1000 * number + args.seed, args)
            best = {name: list(map(max, best[name], goodputs[name])) for name in best}
        for name, goodputs in best.items():
            for limits, own, other in zip(args.limits, best["m3jax"], goodputs, strict=True):
                if name != "m3jax":
                    ratio = f"{own / other:.1f} times that of" if other else "none within the limits from"
                    print(f"{workload}, {limits}: best goodput {own:.3f}/s, {ratio} {name} ({other:.3f}/s)")


def compare_servers(args: argparse.Namespace) -> None:
    """Start our server and the others that are there, and measure them; a line says which are missing, and why."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = widened(Path(scratch) / "model")
        servers = []
        for start in (lambda *_: our_server(folder, args), *(OTHERS[name] for name in args.others)):
            try:
                server = start(folder, Path(scratch), args)
                stack.callback(server.process.close)
                server.process.wait_until_ready(300, server.ready_path)
                asyncio.run(server.settle())
            except ValueError as error:
                if not servers:
                    raise
                print(f"left out: {error}", flush=True)
                continue
            servers.append(server)
        asyncio.run(run_load(servers, args))


# Overhead


class BareEngine:
    """The engine of our server, in this process and without a server."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        from m3jax.serve.worker import Worker

        # As the server makes it, but driven by hand.
        self._worker = Worker.from_pretrained(
            folder, dtype=args.dtype, max_batch=args.streams, steps_per_call=STEPS_PER_CALL, max_length=args.context
        )
        self._engine = self._worker.engine
        asyncio.run(self._worker.prepare(("prefill", "decode", "pages")))
        asyncio.run(self._worker.close())
        self._new_tokens = args.new_tokens

    def tokens_per_second(self, prompts: Sequence[Sequence[int]]) -> float:
        """Return the new tokens a second of these prompts side by side, from their arrival to the last one's end."""
        from m3jax.decoding import Params, Sampling

        params = Params(max_new_tokens=self._new_tokens, sampling=Sampling.greedy(), stop_ids=())
        began = time.perf_counter()
        handles = [self._engine.add(prompt, params) for prompt in prompts]
        self._engine.run()
        seconds = time.perf_counter() - began
        for handle in handles:
            self._engine.forget(handle)
        return len(prompts) * self._new_tokens / seconds


async def served(port: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Return the new tokens a second of these prompts as streams side by side."""
    body = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(streamed(port, "/v1/completions", {"prompt": list(prompt), **body}) for prompt in prompts)
    )
    seconds = time.perf_counter() - began
    count = sum(answer.tokens for answer in answers)
    if count != len(prompts) * new_tokens:
        raise ValueError(f"the server drew {count} tokens in place of {len(prompts) * new_tokens}")
    return count / seconds


def measure_overhead(args: argparse.Namespace) -> None:
    """Print the new tokens a second of the bare engine and of the server, by turns on the same prompts."""
    from m3jax.assets import embedded_path

    port, folder = free_port(), embedded_path()
    args.max_batch = args.streams
    process = ServerProcess("m3jax", our_command(folder, port, args, "--context", str(args.context)), port)
    try:
        bare = BareEngine(folder, args)
        process.wait_until_ready(300)
        texts = Texts(args.seed)
        draw = lambda: [texts.ids(args.overhead_prompt) for _ in range(args.streams)]
        count = args.streams * args.new_tokens
        sizes = f"{args.streams} streams of {args.overhead_prompt} + {args.new_tokens} tokens"
        print(f"{sizes}, {args.dtype}, {THREADS} cores; tokens/s, and seconds of processor time")
        names = f"{'round':>5s} {'bare':>8s} {'s':>6s} {'served':>8s} {'s':>6s} {'client s':>9s}"
        print(f"{names} {'fewer/s':>8s} {'more s':>7s}", flush=True)
        rows = []
        for number in range(args.rounds + 1):
            seconds, cpu = dict(bare=0.0, served=0.0), dict(bare=0.0, served=0.0, client=0.0)
            # Who is first finds the machine as the other one left it, which made 8% on an idle one: each is first once.
            for order in (("bare", "served"), ("served", "bare")):
                prompts = draw()
                for name in order:
                    of_server, own = process.cpu_seconds(), time.process_time()
                    if name == "bare":
                        seconds[name] += count / bare.tokens_per_second(prompts)
                        cpu["bare"] += time.process_time() - own
                    else:
                        seconds[name] += count / asyncio.run(served(port, prompts, args.new_tokens))
                        cpu["served"] += process.cpu_seconds() - of_server
                        cpu["client"] += time.process_time() - own
            if number == 0:  # memory is touched for the first time
                continue
            rates = {name: 2 * count / of_both for name, of_both in seconds.items()}
            fewer, more = 1 - rates["served"] / rates["bare"], cpu["served"] / cpu["bare"] - 1
            rows.append((fewer, more))
            print(f"{number:5d} {rates['bare']:8.0f} {cpu['bare']:6.2f} {rates['served']:8.0f} {cpu['served']:6.2f} "
                  f"{cpu['client']:9.2f} {fewer:8.1%} {more:7.1%}", flush=True)  # fmt: skip
        fewer, more = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"gateway and worker over the bare engine, medians: {fewer:.1%} fewer tokens/s, "
              f"{more:.1%} more processor time")  # fmt: skip
    finally:
        process.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; return 2 after an error, which is one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=(CHAT, AGENTIC, IMAGES), default=[CHAT, AGENTIC, IMAGES])
    parser.add_argument("--others", nargs="*", choices=tuple(OTHERS), default=list(OTHERS), help="servers beside ours")
    parser.add_argument("--transformers", metavar="COMMAND", help="of its server, without model and port",
                        default=f"{sys.executable} -m transformers.cli.transformers serve")  # fmt: skip
    parser.add_argument("--llama-cpp", metavar="COMMAND", help="of llama-cpp-python's server, without settings",
                        default=f"{sys.executable} -m llama_cpp.server")  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights (default: float32)"
    )
    parser.add_argument("--max-batch", type=int, default=8, help="rows of our engine")
    parser.add_argument("--chat-rates", type=float, nargs="+", default=[0.05, 0.5, 1.0], help="requests a second")
    parser.add_argument("--agentic-rates", type=float, nargs="+", default=[0.02, 0.1], help="conversations a second")
    parser.add_argument("--image-rates", type=float, nargs="+", default=[0.5], help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which requests come")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds more that they have")
    parser.add_argument("--rounds", type=int, help="the servers take turns (default: 1, of --overhead 5)")
    parser.add_argument("--limits", type=Limits.parsed, nargs="+", metavar="FIRST:TOKEN",
                        default=[Limits(10.0, 0.3), Limits(60.0, 2.0), Limits(math.inf, math.inf)],
                        help="pairs of limits for goodput: seconds to the first text, and of a token behind it "
                        "(default: 10:0.3 60:2 inf:inf)")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a chat's question")
    parser.add_argument("--prefix", type=int, default=8192, help="tokens before all agentic conversations")
    parser.add_argument("--turns", type=int, default=8, help="of an agentic conversation")
    parser.add_argument(
        "--new-tokens", type=int, default=200, help="of an answer; agentic and images have half of them"
    )
    parser.add_argument("--side", type=int, default=224, help="pixels of a picture's side")
    parser.add_argument("--overhead", action="store_true", help="measure gateway and worker over the bare engine")
    parser.add_argument("--streams", type=int, default=32, help="of --overhead")
    parser.add_argument("--overhead-prompt", type=int, default=64, help="tokens of a prompt of --overhead")
    parser.add_argument("--context", type=int, default=512, help="tokens of a request of --overhead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few small requests on our server alone")
    args = parser.parse_args(argv)
    if args.smoke:
        small = dict(others=[], chat_rates=[4.0], agentic_rates=[4.0], image_rates=[2.0], seconds=0.5, drain=60.0)
        small |= dict(prompt=40, prefix=64, turns=2, new_tokens=8, side=56, max_batch=2, rounds=1)
        args.__dict__.update(small)
    args.rounds = args.rounds or (5 if args.overhead else 1)
    try:
        measure_overhead(args) if args.overhead else compare_servers(args)
    except ValueError as error:
        print(f"bench_serve: {error}", file=sys.stderr)
        return ERROR
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
