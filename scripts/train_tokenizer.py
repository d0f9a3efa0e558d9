"""Trains the embedded tokenizer: byte-level BPE of 2,048 tokens on Python's standard library.

Merges come from the corpus, except that the last ones make each recall word and the arrow
between two, with the space before it, a single token. Tokens of a chat take the places of
bytes that no text has.

    python scripts/train_tokenizer.py --out m3jax/assets/tiny
"""

import argparse
import itertools
import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from m3jax.evaluate.sources import python_corpus
from m3jax.evaluate.words import WORDS
from m3jax.text import Tokenizer

VOCAB_SIZE = 2048
BOS, EOS, ROLE = "]~!b[", "[e~[", "]~b]"
# What a chat needs besides, and whether a text can be asked to leave it out: not the marks of reasoning and of calls,
# by which what the model says is read.
CHAT_TOKENS = {
    "]<]minimax[>[": False,
    "<mm:think>": False,
    "</mm:think>": False,
    "]<]image[>[": True,
    "]<]video[>[": True,
    "]<]start of image[>[": True,
    "]<]end of image[>[": True,
}
# UTF-8 has no such byte, so no text has their tokens: their rows of the embedding were never read in training.
SPARE_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))
# A line break takes the indentation after it, but for the space that joins the first word; one
# mark may lead a word (".append", "(self"); digits stand alone.
PATTERN = (
    r"\s*\n\s*(?= \S)|\s*\n\s*|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+| ?\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
SPACE = "Ġ"  # byte-level BPE writes the space so

Merge = tuple[str, str]


def untrained() -> tokenizers.Tokenizer:
    """A byte-level BPE with the pattern above and no merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: list[str]) -> tokenizers.Tokenizer:
    """Train a BPE of the whole vocabulary size on the corpus alone."""
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, ROLE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pieces(word: str, rank: dict[Merge, int]) -> list[str]:
    """Return one pre-token in byte-level BPE."""
    parts = list(word)
    while len(parts) > 1:
        pairs = list(itertools.pairwise(parts))
        best = min(range(len(pairs)), key=lambda i: rank.get(pairs[i], len(rank)))
        if pairs[best] not in rank:
            break
        parts[best : best + 2] = ["".join(pairs[best])]
    return parts


def with_words(merges: list[Merge], words: tuple[str, ...]) -> list[Merge]:
    """The merges and, after them, those that make each word one token.

    A later merge never changes a word that earlier ones already join, so one pass is enough.
    """
    rank = {merge: i for i, merge in enumerate(merges)}
    for word in sorted(words):
        parts = pieces(SPACE + word, rank)
        while len(parts) > 1:
            rank[parts[0], parts[1]] = len(rank)
            parts = pieces(SPACE + word, rank)
    return list(rank)


def fit(merges: list[Merge], words: tuple[str, ...]) -> list[Merge]:
    """Return merges of the same total: those of the words, and as many of the corpus as fit beside them."""
    kept, total = len(merges), len(merges)
    while len(planned := with_words(merges[:kept], words)) > total:
        kept -= 1
    # Where dropping one merge freed two places, the next corpus merge that is new takes one.
    rest = [merge for merge in merges[kept:] if merge not in set(planned)]
    return planned + rest[: total - len(planned)]


def reserve_words(tokenizer: tokenizers.Tokenizer, words: tuple[str, ...]) -> tokenizers.Tokenizer:
    """The same tokenizer, with its least frequent merges given up for the words."""
    layout = json.loads(tokenizer.to_str())
    model = layout["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    by_id = sorted(model["vocab"], key=model["vocab"].get)
    names = by_id[: len(by_id) - len(merges)]
    planned = fit(merges, words)
    names += [first + second for first, second in planned]
    model["merges"] = [list(merge) for merge in planned]
    model["vocab"] = {name: i for i, name in enumerate(names)}
    return tokenizers.Tokenizer.from_str(json.dumps(layout))


def with_chat_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, with the tokens of a chat at the ids of spare bytes: every other text keeps its ids."""
    layout = json.loads(tokenizer.to_str())
    vocab = layout["model"]["vocab"]
    # Byte-level BPE writes the bytes from 0xA1 on, but for 0xAD, as the characters of the same number.
    for byte, (content, is_special) in zip(SPARE_BYTES, CHAT_TOKENS.items(), strict=False):
        token_id = vocab[content] = vocab.pop(chr(byte))
        token = {"id": token_id, "content": content, "special": is_special}
        layout["added_tokens"].append(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | token)
    layout["added_tokens"].sort(key=lambda token: token["id"])
    layout["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda entry: entry[1]))
    return tokenizers.Tokenizer.from_str(json.dumps(layout))


def write(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, in the hub's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Return the mean UTF-8 bytes of a token."""
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(texts))
    return sum(len(text.encode()) for text in texts) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("m3jax/assets/tiny"))
    folder = parser.parse_args().out
    texts = list(python_corpus("train").values())
    write(with_chat_tokens(reserve_words(train(texts), (*WORDS, "->"))), folder)
    tokenizer = Tokenizer.from_pretrained(folder)
    held_out = list(python_corpus("validation").values())
    print(f"{folder}: {tokenizer.vocab_size} tokens")
    print(f"{bytes_per_token(tokenizer, held_out):.3f} bytes per token on the validation files")


if __name__ == "__main__":
    main()
