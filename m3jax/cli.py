"""The command line of `python -m m3jax.generate`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from m3jax.assets import embedded_path
from m3jax.checkpoint import load
from m3jax.checkpoint.draft import load_draft
from m3jax.config import M3Config
from m3jax.decoding import (
    Drafter,
    Eagle3Drafter,
    Engine,
    Generation,
    Params,
    PromptLookup,
    Sampling,
    check_logits,
    engine_for,
    generate_text,
)
from m3jax.decoding.defaults import Defaults
from m3jax.decoding.engine import DRAFT_TOKENS, check_prompt
from m3jax.decoding.speculation import MAX_DRAFT_TOKENS
from m3jax.model import M3
from m3jax.ops import BACKENDS, check_backend
from m3jax.parallel import parse_mesh
from m3jax.text import Tokenizer

PROG = "m3jax.generate"
_KNOBS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NEW_TOKENS = 128
# Tokens in one device call: few where somebody watches, more where nobody does.
_STREAM_STEPS, _BATCH_STEPS = 4, 32
_INTERRUPTED, _CLOSED_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status: 0; 2 after an error, which is one line on stderr; 130 after an interrupt; 141 if the
      reader of stdout went away.
    """
    try:
        run(parser().parse_args(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return _CLOSED_PIPE
    except (ValueError, OSError, FloatingPointError, MemoryError, JaxRuntimeError) as error:
        _say(f"{PROG}: error: {_one_line(error)}")
        return 2
    return 0


def program() -> NoReturn:
    """Run the command line of this process, and end it."""
    status = main()
    if status == _INTERRUPTED:
        # The device may be at work still, and the interpreter's own way out can crash under it.
        os._exit(status)
    sys.exit(status)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the arguments")


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    out = _Parser(prog=f"python -m {PROG}", description="Continue prompts with a MiniMax-M3 model.", allow_abbrev=False)
    out.add_argument("--model", metavar="DIR", help="a folder in the hub's layout (default: the embedded checkpoint)")
    prompt = out.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", action="append", help="may be given several times")
    prompt.add_argument("--prompt-file", metavar="F", help="the whole file is one prompt; - is standard input")
    prompt.add_argument("--prompt-tokens", metavar="IDS", action="append", help="ids, as in 1,2,3; may be repeated")
    out.add_argument("--max-new-tokens", metavar="N", type=int, help=f"default: the model folder's, else {_NEW_TOKENS}")
    out.add_argument("--temperature", metavar="X", type=float, help="0 is greedy")
    out.add_argument("--top-k", metavar="K", type=int, help="keep the K most probable tokens; 0 is off")
    out.add_argument("--top-p", metavar="P", type=float, help="keep the fewest tokens of total probability P; 1 is off")
    out.add_argument("--min-p", metavar="P", type=float, help="drop tokens below P times the best one; 0 is off")
    out.add_argument("--repetition-penalty", metavar="X", type=float, help="1 is off")
    out.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before TEXT; may be repeated")
    out.add_argument("--seed", metavar="N", type=int, default=0, help="of every prompt (default: 0)")
    out.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16, float32 or float64")
    out.add_argument("--draft", metavar="DIR", help="draft tokens with an EAGLE3 model: its folder, or builtin for the "
                     "embedded checkpoint's; ngram looks for them in the text so far")  # fmt: skip
    out.add_argument("--draft-tokens", metavar="K", type=int, default=DRAFT_TOKENS, help=f"1 to {MAX_DRAFT_TOKENS} in "
                     f"one verification (default: {DRAFT_TOKENS})")  # fmt: skip
    out.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="auto (default) takes kernels where they can run"
    )
    out.add_argument("--mesh", metavar="AXES", help="devices to shard over, as in data=1,expert=2,tensor=4")
    out.add_argument("--json", action="store_true", help="print one JSON object a prompt, each on its line")
    out.add_argument("--logprobs", action="store_true", help="with --json: the log-probability of each new token")
    out.add_argument("--stats", action="store_true", help="print times and sizes on stderr at the end")
    return out


def run(args: argparse.Namespace) -> None:
    """Generate what the parsed arguments ask for.

    Raises:
      ValueError: a bad argument, or a folder that cannot be used.
      OSError: a file that cannot be read.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    if args.logprobs and not args.json:
        raise ValueError("--logprobs needs --json: plain text has no place for them")
    folder = embedded_path() if args.model is None else Path(args.model)
    # Everything that can be refused is refused before the weights are read.
    config = M3Config.from_pretrained(folder)
    tokenizer = _tokenizer(folder, args)
    params = _params(args, config, Defaults.from_pretrained(folder))
    prompts = _prompts(args, tokenizer)
    for number, prompt in enumerate(prompts):
        check_prompt(prompt, params, config, f"prompt {number}")
    mesh = None if args.mesh is None else parse_mesh(args.mesh)
    check_backend(args.backend)
    if not 1 <= args.draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft-tokens {args.draft_tokens}: give 1 to {MAX_DRAFT_TOKENS}")
    draft = _drafter(args, config, mesh)
    model = load(args.model, dtype=args.dtype, mesh=mesh).with_backend(args.backend)
    is_streamed = len(prompts) == 1 and not args.json  # then text is shown as it comes
    engine, handles = _start(model, prompts, params, draft, args.draft_tokens, is_streamed)
    results = _continue(engine, handles, tokenizer, args, is_streamed)
    if args.stats:
        _print_stats(engine)
    check_logits(results)


def _drafter(args: argparse.Namespace, config: M3Config, mesh: Mesh | None) -> Drafter | None:
    """What proposes tokens, as `--draft` says."""
    if args.draft is None:
        return None
    if args.draft == "ngram":
        return PromptLookup()
    folder = None if args.draft == "builtin" else args.draft
    return Eagle3Drafter(load_draft(folder, config, args.dtype, mesh))


def _tokenizer(folder: Path, args: argparse.Namespace) -> Tokenizer | None:
    """The folder's tokenizer; None where it has none, and nothing but token ids is asked for."""
    is_needed = args.prompt_tokens is None or args.stop
    return Tokenizer.from_pretrained(folder) if is_needed or (folder / "tokenizer.json").is_file() else None


def _params(args: argparse.Namespace, config: M3Config, defaults: Defaults) -> Params:
    """How to generate: a flag wins over the model folder's generation_config.json."""
    given = {name: getattr(args, name) for name in _KNOBS if getattr(args, name) is not None}
    if defaults.ignored:
        _say(f"{PROG}: note: generation_config.json: not supported and left out: {', '.join(defaults.ignored)}")
    if given and "temperature" not in given and defaults.knobs.get("temperature") == 0:
        _say(f"{PROG}: note: generation_config.json asks for greedy decoding; give --temperature to sample")
    sampling = Sampling(**{**defaults.knobs, **given}, seed=args.seed)
    stop_ids = config.eos_token_id if defaults.stop_ids is None else defaults.stop_ids
    limits = (args.max_new_tokens, defaults.max_new_tokens, _NEW_TOKENS)
    new_tokens = next(limit for limit in limits if limit is not None)
    return Params(max_new_tokens=new_tokens, sampling=sampling, stop_ids=stop_ids)


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[list[int]]:
    """The token ids of every prompt."""
    if args.prompt_tokens is not None:
        return [_token_ids(text) for text in args.prompt_tokens]
    texts = args.prompt if args.prompt is not None else [_read_prompt(args.prompt_file)]
    return [tokenizer.encode(text) for text in texts]


def _token_ids(text: str) -> list[int]:
    """The ids in a text like "1,2,3"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--prompt-tokens {text!r}: write token ids with commas between them, as in 1,2,3") from None


def _read_prompt(name: str) -> str:
    """The text of a file, or of standard input for "-"."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {name} is not UTF-8 text: byte {error.start} is wrong") from error


def _start(
    model: M3, prompts: list[list[int]], params: Params, draft: Drafter | None, draft_tokens: int, is_streamed: bool
) -> tuple[Engine, list[int]]:
    """An engine that has read all prompts, and the prompts' handles; on a terminal its progress is shown."""

    def show(status: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{status}", end="", file=sys.stderr, flush=True)

    show("compiling")
    steps = _STREAM_STEPS if is_streamed and sys.stdout.isatty() else _BATCH_STEPS
    every_params = [params] * len(prompts)
    engine = engine_for(model, prompts, every_params, steps_per_call=steps, draft=draft, draft_tokens=draft_tokens)
    handles = [engine.add(prompt, params) for prompt in prompts]
    while engine.prefill():
        done, total = engine.prefilled
        show(f"prompt: {done} of {total} tokens")
    show("")
    return engine, handles


def _continue(
    engine: Engine, handles: list[int], tokenizer: Tokenizer | None, args: argparse.Namespace, is_streamed: bool
) -> list[Generation]:
    """Generate to the end of every prompt, and print what came."""
    if tokenizer is None:
        generations = engine.run()
        results = [generations[handle] for handle in handles]
    else:
        show = (lambda handle, piece: print(piece, end="", flush=True)) if is_streamed else None
        results = generate_text(engine, handles, tokenizer, stop=args.stop, on_text=show)
    if args.json:
        for result in results:
            print(json.dumps(_as_json(result, engine, args.logprobs)), flush=True)
    elif is_streamed and tokenizer is not None:
        print()
    else:
        for number, result in enumerate(results, 1):
            if len(results) > 1:
                print(f"==> prompt {number} <==")
            print(",".join(map(str, result.tokens)) if result.text is None else result.text)
    return results


def _as_json(result: Generation, engine: Engine, with_logprobs: bool) -> dict[str, Any]:
    """One prompt's result as `--json` prints it."""
    return {
        "text": result.text,
        "token_ids": result.tokens,
        **({"logprobs": result.logprobs} if with_logprobs else {}),
        "stop_reason": result.stop_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.tokens),
        "prefill_tokens_per_second": engine.timings.prefill_tokens_per_second,
        "decode_tokens_per_second": engine.timings.decode_tokens_per_second,
    }


def _print_stats(engine: Engine) -> None:
    """Print times and sizes on stderr; compilation is no part of any rate."""
    times = engine.timings
    rate = lambda tokens_per_second: "" if tokens_per_second is None else f", {tokens_per_second:.1f} tokens/s"
    _say(f"prefill: {times.prompt_tokens} tokens in {times.prefill_seconds:.3f} s"
         f"{rate(times.prefill_tokens_per_second)}")  # fmt: skip
    _say(f"decode: {times.decoded_tokens} tokens in {times.decode_seconds:.3f} s"
         f"{rate(times.decode_tokens_per_second)}")  # fmt: skip
    if (drafting := engine.drafting).forwards:
        shares = ", ".join(f"{share:.1%}" for share in drafting.acceptance)
        _say(f"draft: accepted by position {shares}; mean length {drafting.mean_length:.2f}; "
             f"{times.decoded_tokens / drafting.forwards:.2f} tokens a call of the model")  # fmt: skip
    _say(f"compile: {times.compile_seconds:.1f} s, not counted above")
    _say(f"cache: {engine.cache_bytes / 2**20:.1f} MiB")


def _one_line(error: BaseException) -> str:
    """An error's message on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines) or type(error).__name__


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silence_stdout() -> None:
    """Send stdout, which nobody reads any more, nowhere: the interpreter's last flush must not complain about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
