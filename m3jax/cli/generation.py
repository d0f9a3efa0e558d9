"""The work of `python -m m3jax.generate` after its arguments are parsed."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from m3jax.assets import embedded_path
from m3jax.checkpoint import load
from m3jax.cli.knobs import asked_params
from m3jax.cli.settings import settings
from m3jax.completion import Defaults, generate_text, marked, named_drafter, read_media, with_placeholders
from m3jax.config import M3Config
from m3jax.console import say, token_ids, write
from m3jax.decoding import Drafter, Engine, Generation, Media, Params, check_logits, engine_for
from m3jax.decoding.engine import check_prompt
from m3jax.hosts.channel import Channel
from m3jax.hosts.follow import led
from m3jax.hosts.run import on_hosts
from m3jax.media import is_moving, media_source
from m3jax.messages import shown
from m3jax.model import M3
from m3jax.ops import check_backend
from m3jax.parallel import parse_mesh
from m3jax.progress import activity
from m3jax.text import Tokenizer

PROG = "m3jax.generate"
# Tokens in one device call: few while text streams to a terminal, more otherwise.
_STREAM_STEPS, _BATCH_STEPS = 4, 32


def generate(args: argparse.Namespace) -> None:
    """Generate what the parsed arguments ask for.

    Args:
      args: of `m3jax.cli.parser`.

    Raises:
      ValueError: a bad argument, or a folder that cannot be used.
      OSError: a file that cannot be read, or stdout that cannot be written.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    with settings(args, PROG):
        on_hosts(args, PROG, lambda channel: _generate(args, channel))


def _generate(args: argparse.Namespace, channel: Channel | None) -> None:
    folder = embedded_path() if args.model is None else Path(args.model)
    # Everything that can be refused is refused before the weights are read.
    config = M3Config.from_pretrained(folder)
    tokenizer = _tokenizer(folder, args)
    params = asked_params(args, PROG, config, Defaults.from_pretrained(folder))
    media = _media(args, config)
    prompts = [with_placeholders(prompt, media, tokenizer) for prompt in _prompts(args, tokenizer, media)]
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, params, config, f"prompt {number}")
    mesh = None if args.mesh is None else parse_mesh(args.mesh)
    check_backend(args.backend)
    draft = None if args.draft is None else named_drafter(args.draft, config, args.dtype, mesh)
    model = load(args.model, dtype=args.dtype, mesh=mesh, weights=args.weights)
    model = model.with_backend(args.backend).with_invariance(args.invariant)
    is_streamed = len(prompts) == 1 and not args.json  # one prompt's text is printed as it is generated
    engine = _start(model, prompts, params, media, draft, args.draft_tokens, is_streamed)
    with led(engine, channel) as engine:
        if engine is None:
            return  # another process leads: this one has followed it to the end
        handles = _read_prompts(engine, prompts, params, media)
        results = _continue(engine, handles, tokenizer, args, is_streamed)
        if args.stats:
            _print_stats(engine)
    check_logits(results)


def _tokenizer(folder: Path, args: argparse.Namespace) -> Tokenizer | None:
    """Return the folder's tokenizer; None if it has none and the arguments need none (token ids only)."""
    is_needed = args.prompt_tokens is None or args.stop or args.image or args.video
    return Tokenizer.from_pretrained(folder) if is_needed or (folder / "tokenizer.json").is_file() else None


def _media(args: argparse.Namespace, config: M3Config) -> Media:
    """Read and process the images and videos."""
    if (args.image or args.video) and config.vision_config is None:
        raise ValueError("--image, --video: this model has no vision tower, it takes text alone")
    media = read_media(args.image, args.video)
    for name in args.image:
        if is_moving(media_source(name)):
            say(f"{PROG}: note: --image {shown(name)}: the first frame alone; --video shows all of a GIF")
    return media


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer | None, media: Media) -> list[list[int]]:
    """Return the token ids of every prompt; in a text each image and video has a placeholder."""
    if args.prompt_tokens is not None:
        return [token_ids(text) for text in args.prompt_tokens]
    texts = args.prompt if args.prompt is not None else [_read_prompt(args.prompt_file)]
    return [tokenizer.encode(marked(text, media)) for text in texts]


def _read_prompt(name: str) -> str:
    """Return the text of a file, or of standard input for "-"."""
    if name == "-" and sys.stdin is None:
        raise ValueError("--prompt-file -: standard input is closed; name a file, or give the text with --prompt")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {name} is not UTF-8 text: byte {error.start} is wrong") from error


def _start(
    model: M3,
    prompts: list[list[int]],
    params: Params,
    media: Media,
    draft: Drafter | None,
    draft_tokens: int,
    is_streamed: bool,
) -> Engine:
    """Return an engine in which all prompts run at once."""
    steps = _STREAM_STEPS if is_streamed and sys.stdout.isatty() else _BATCH_STEPS
    every_params = [params] * len(prompts)
    return engine_for(
        model, prompts, every_params, media=[media], steps_per_call=steps, draft=draft, draft_tokens=draft_tokens
    )


def _read_prompts(engine: Engine, prompts: list[list[int]], params: Params, media: Media) -> list[int]:
    """Have an engine read all prompts; return their handles."""
    handles = [engine.add(prompt, params, media) for prompt in prompts]
    with activity() as line:
        line.say("reading the prompt")
        while engine.prefill():
            done, total = engine.prefilled
            line.say(f"reading the prompt: {done} of {total} tokens")
    return handles


def _continue(
    engine: Engine, handles: list[int], tokenizer: Tokenizer | None, args: argparse.Namespace, is_streamed: bool
) -> list[Generation]:
    """Generate the continuation of every prompt, and print the results."""
    # Streamed text shows the progress itself, so no progress line is needed beside it.
    with activity(shown=not (is_streamed and tokenizer is not None)) as line:
        line.say("generating")
        if tokenizer is None:
            generations = engine.run()
            results = [generations[handle] for handle in handles]
        else:
            show = (lambda handle, piece: write(piece)) if is_streamed else None
            results = generate_text(engine, handles, tokenizer, stop=args.stop, on_text=show)
    if args.json:
        for result in results:
            write(json.dumps(_as_json(result, engine, args)) + "\n")
    elif is_streamed and tokenizer is not None:
        write("\n")
    else:
        for number, result in enumerate(results, 1):
            heading = f"==> prompt {number} <==\n" if len(results) > 1 else ""
            text = ",".join(map(str, result.tokens)) if result.text is None else result.text
            write(f"{heading}{text}\n")
    return results


def _as_json(result: Generation, engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Return one prompt's result as `--json` prints it."""
    return {
        "text": result.text,
        "token_ids": result.tokens,
        **({"logprobs": result.logprobs} if args.logprobs else {}),
        **({"top_logprobs": result.top_logprobs} if args.top_logprobs else {}),
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
    say(f"prefill: {times.prompt_tokens} tokens in {times.prefill_seconds:.3f} s"
         f"{rate(times.prefill_tokens_per_second)}")  # fmt: skip
    say(f"decode: {times.decoded_tokens} tokens in {times.decode_seconds:.3f} s"
         f"{rate(times.decode_tokens_per_second)}")  # fmt: skip
    if (drafting := engine.drafting).forwards:
        shares = ", ".join(f"{share:.1%}" for share in drafting.acceptance)
        say(f"draft: accepted by position {shares}; mean length {drafting.mean_length:.2f}; "
             f"{times.decoded_tokens / drafting.forwards:.2f} tokens a call of the model")  # fmt: skip
    say(f"compile: {times.compile_seconds:.1f} s, not counted above")
    say(f"cache: {engine.cache_bytes / 2**20:.1f} MiB")
