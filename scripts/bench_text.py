"""Checks that turning streamed tokens into text takes the same time for each token, whatever came before it.

    python scripts/bench_text.py                     # 1,000,000 tokens, and half as many
    python scripts/bench_text.py --tokens 50000      # a quick look

Streams of the embedded tokenizer (ByteLevel) and of a small one with ByteFallback, over text and over tokens that make
none: bytes that belong to no character, beginnings of characters. Ends with 1 where twice the tokens took more than
three times the time.
"""

import argparse
import sys
import time

import tokenizers
from tokenizers import decoders, models

from m3jax.assets import embedded_path
from m3jax.text import Tokenizer

MOST = 3.0  # times the time for twice the tokens


def main() -> int:
    """Print a line for each stream, and say whether all are linear."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    if args.tokens < 2:
        parser.error(f"--tokens {args.tokens}: must be at least 2")
    is_linear = True
    print(f"{'stream':14s} {'of':24s} {'tokens':>10s} {'seconds':>9s} {'us a token':>11s} {'ratio':>6s}")
    for name, tokenizer, cases in (byte_level(), byte_fallback()):
        for case, pattern in cases.items():
            ids = (pattern * (args.tokens // len(pattern) + 1))[: args.tokens]
            half, whole = seconds(tokenizer, ids[: args.tokens // 2]), seconds(tokenizer, ids)
            is_linear &= whole < MOST * half
            each = 1e6 * whole / len(ids)
            print(f"{name:14s} {case:24s} {len(ids):10,d} {whole:9.2f} {each:11.2f} {whole / half:6.2f}", flush=True)
    print(f"twice the tokens in at most {MOST:g} times the time: {'yes' if is_linear else 'NO'}")
    return 0 if is_linear else 1


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


if __name__ == "__main__":
    sys.exit(main())
