"""Time a token of turning streamed tokens into text, which must not depend on what came before it.

    bench.py text                       # 1,000,000 tokens, and half as many
    bench.py text --tokens 50000        # a quick look

Streams of the embedded tokenizer (ByteLevel) and of a small one with ByteFallback, over text and over tokens that make
none: bytes that belong to no character, beginnings of characters. Ends with 1 where twice the tokens took more than
three times the time.
"""

import time

import tokenizers
from tokenizers import decoders, models

from benchmarks.harness import Option
from m3jax.assets import embedded_path
from m3jax.text import Tokenizer

USES_DEVICE, PACKAGES = False, ("tokenizers",)
MOST = 3.0  # times the time for twice the tokens
OPTIONS = dict(tokens=Option(1_000_000, "Tokens of a stream", smoke=20_000))


def measure(args):
    """Yield a row for each stream."""
    if args.tokens < 2:
        raise ValueError(f"--tokens is {args.tokens}; it must be at least 2")
    is_linear = True
    for name, tokenizer, cases in (byte_level(), byte_fallback()):
        for case, pattern in cases.items():
            ids = (pattern * (args.tokens // len(pattern) + 1))[: args.tokens]
            half, whole = seconds(tokenizer, ids[: args.tokens // 2]), seconds(tokenizer, ids)
            is_linear &= whole < MOST * half
            yield {"stream": f"{name}, {case}", "tokens": len(ids), "seconds": whole,
                   "us a token": 1e6 * whole / len(ids), "times half": whole / half}  # fmt: skip
    if not is_linear:
        raise SystemExit(f"twice the tokens took more than {MOST:g} times the time")


def byte_level() -> tuple[str, Tokenizer, dict[str, list[int]]]:
    """The embedded tokenizer, whose vocabulary has every byte."""
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    token = lambda character: tokenizer.backend.token_to_id(character)
    cases = {"text": tokenizer.encode("def main():\n    return 'naïve 🦜'\n")}
    cases["bytes of no character"] = [token("ÿ")]  # 0xFF
    cases["beginnings of characters"] = [token("â")]  # 0xE2
    return "ByteLevel", tokenizer, cases


def byte_fallback() -> tuple[str, Tokenizer, dict[str, list[int]]]:
    """A vocabulary of one word and the 256 bytes, with the decoder of Llama."""
    vocabulary = ["▁word", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="▁word"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    cases = {"text": [0, *(1 + byte for byte in "🦜".encode())], "bytes of no character": [1 + 0xFF]}
    return "ByteFallback", Tokenizer(backend), cases | {"beginnings of characters": [1 + 0xE2]}


def seconds(tokenizer: Tokenizer, ids: list[int]) -> float:
    """Return the processor seconds to push all of the tokens."""
    stream, began = tokenizer.stream(), time.process_time()
    for token in ids:
        stream.push(token)
    stream.flush()
    return time.process_time() - began
