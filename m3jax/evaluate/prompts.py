"""Recall prompts: records such as `# harbor -> lantern` between the lines of a text, and questions at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, UInt

from m3jax.evaluate.words import WORDS
from m3jax.text import Tokenizer

DISTRACTORS = 24
KINDS = ("needle", "several", "chain")
Ids = Int32[np.ndarray, "_"]


@dataclass(frozen=True)
class TokenRun:
    """Texts as one run of token ids, with the places where a record's line may be inserted.

    Args:
        tokens: ids of all texts, one after the other.
        newlines: indices of the line breaks that a line may be put before.
    """

    tokens: UInt[np.ndarray, " S"] | Int32[np.ndarray, " S"]
    newlines: Int64[np.ndarray, " lines"]

    def chunk(self, start: int, length: int) -> tuple[Int32[np.ndarray, " length"], Int64[np.ndarray, " places"]]:
        """Return a run of tokens, and the offsets at which records may be inserted in it.

        Args:
            start: index of the first token.
            length: number of tokens.

        Returns:
            The ids [length] and the ascending offsets of insertion, the last of which is `length`
            itself.
        """
        first, end = np.searchsorted(self.newlines, (start, start + length))
        places = np.append(self.newlines[first:end] - start, length)
        return self.tokens[start : start + length].astype(np.int32), places


@dataclass(frozen=True)
class Haystack:
    """Text that records are inserted into, with the tokens of every key and value that a record can have.

    Attributes:
      run: the text.
      questions: of each word as a key, the tokens of "\\n# harbor ->".
      answers: of each word as a value, the tokens of " lantern".
    """

    run: TokenRun
    questions: tuple[Ids, ...]
    answers: tuple[Ids, ...]

    @classmethod
    def of_texts(cls, tokenizer: Tokenizer, texts: Mapping[str, str]) -> "Haystack":
        """Make a haystack of texts one after the other, with any tokenizer; a word may be several tokens.

        Args:
          tokenizer: the model's.
          texts: by name; the order counts.
        """
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        ids = [[*begin, *text, *end] for text in tokenizer.encode_batch(list(texts.values()))]
        tokens = np.concatenate([np.array(text, np.int32) for text in ids])
        questions = tokenizer.encode_batch([f"\n# {word} ->" for word in WORDS])
        answers = tokenizer.encode_batch([f" {word}" for word in WORDS])
        as_ids = lambda lists: tuple(np.array(ids, np.int32) for ids in lists)
        return cls(TokenRun(tokens, line_breaks(tokenizer, tokens)), as_ids(questions), as_ids(answers))

    def line(self, key: int, value: int) -> Ids:
        """Return the tokens of a record, given the indices of its two words in `WORDS`."""
        return np.concatenate([self.questions[key], self.answers[value]])


@dataclass(frozen=True)
class Prompt:
    """A row that ends in questions and their right answers.

    Attributes:
      tokens: the whole row.
      answers: first token and end of each answer in `tokens`.
      depths: the depth of the record that each answer is in.
    """

    tokens: Ids
    answers: tuple[tuple[int, int], ...]
    depths: tuple[float, ...]


def recall_prompts(
    haystack: Haystack, kind: str, length: int, depths: Sequence[float], count: int, seed: int,
    distractors: int = DISTRACTORS,
) -> list[Prompt]:  # fmt: skip
    """Return prompts whose records stand at the given depths.

    Depth 0 is the beginning of the prompt, 1 the place before the questions. "needle": one record, asked for; a prompt
    for each depth. "several": a record at each depth of the same prompt, and all are asked for, in a random
    order. "chain": a -> b at the depth, b -> c at a random one; a is asked for, then b.

    Args:
      haystack: the source of the text.
      kind: one of `KINDS`.
      length: tokens before the last answer, the questions included.
      depths: 0 to 1, each once.
      count: prompts of each depth, or of "several" with all.
      seed: of the prompts of this kind and length, not negative.
      distractors: other records; see `fill`.

    Raises:
      ValueError: arguments out of range, or a haystack that is too short.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown: choose one of {', '.join(KINDS)}")
    if count < 1 or not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"count = {count}, depths = {list(depths)}: give at least 1 prompt, and depths from 0 to 1")
    most = len(WORDS) // 2 - len(depths) - 2
    if not 0 <= distractors <= most:
        raise ValueError(f"distractors = {distractors}: with {len(depths)} depths give 0 to {most}")
    rng = np.random.default_rng([seed, KINDS.index(kind), length])
    wanted = [tuple(depths)] if kind == "several" else [(depth,) for depth in depths]
    return [_prompt(rng, haystack, kind, length, each, distractors) for each in wanted for _ in range(count)]


def _prompt(
    rng: np.random.Generator, haystack: Haystack, kind: str, length: int, depths: tuple[float, ...], distractors: int
) -> Prompt:
    """Return one prompt: draw the words and the order of the questions, then fill in the text around the records."""
    words = rng.permutation(len(haystack.questions)).tolist()
    if kind == "chain":
        first, second, third, *spare = words
        links, order = [(first, second), (second, third)], [0, 1]
        depths = (depths[0], float(rng.uniform()))
    else:
        used, spare = words[: 2 * len(depths)], words[2 * len(depths) :]
        links, order = list(zip(used[::2], used[1::2], strict=True)), rng.permutation(len(depths)).tolist()
    tail, answers = [], []
    for i in order:
        key, value = links[i]
        begin = sum(map(len, tail)) + len(haystack.questions[key])
        answers.append((begin, begin + len(haystack.answers[value])))
        tail += [haystack.questions[key], haystack.answers[value]]
    tail = np.concatenate(tail)
    in_text = np.argsort(depths, kind="stable")  # the records in the order of the text
    lines = [haystack.line(*links[i]) for i in in_text]
    room = length + len(haystack.answers[links[order[-1]][1]]) - len(tail) - sum(map(len, lines))
    if room < 0:
        raise ValueError(f"a prompt of {length} tokens has no room for {len(lines)} records: {-room} tokens too few")
    offsets = [round(depths[i] * room) for i in in_text]
    row = fill(rng, haystack, np.diff([0, *offsets, room]).tolist(), lines, spare, distractors)
    answers = tuple((len(row) + begin, len(row) + end) for begin, end in answers)
    # A chain is one question in two steps: both belong to the depth of its first link.
    asked = (depths[0], depths[0]) if kind == "chain" else tuple(depths[i] for i in order)
    return Prompt(np.concatenate([row, tail]), answers, asked)


def fill(
    rng: np.random.Generator,
    haystack: Haystack,
    gaps: Sequence[int],
    lines: Sequence[Ids],
    spare_words: Sequence[int],
    distractors: int,
) -> Ids:
    """Return records with text between them, and distractor records between the lines of that text.

    Args:
      rng: the source of randomness.
      haystack: the source of the text.
      gaps: tokens before the first record, between the records, and after the last: one more than `lines`. What stands
        before the first record and after it was one text; each later piece is another one, from a line's end on.
      lines: the records.
      spare_words: the words of the distractor records, two for each.
      distractors: the number of these, each stated once. 16 of them, or as many as there is room for, come after the
        last record; the rest are spread over the pieces before. They take 5/8 of a piece at most.

    Raises:
      ValueError: a haystack that is too short.
    """
    longest = max(map(len, haystack.questions)) + max(map(len, haystack.answers))
    fitting = [gap * 5 // (8 * longest) for gap in gaps]
    num_last = min(max(min(distractors, 16), round(distractors * gaps[-1] / max(1, sum(gaps)))), fitting[-1])
    before = max(1, sum(gaps[:-1]))
    counts = [
        min((distractors - num_last) * gap // before, most) for gap, most in zip(gaps[:-1], fitting, strict=False)
    ]
    counts.append(num_last)
    words = iter(spare_words)
    other_lines = [[haystack.line(next(words), next(words)) for _ in range(count)] for count in counts]
    code = [gap - sum(map(len, piece)) for gap, piece in zip(gaps, other_lines, strict=True)]
    starts = []
    for i in range(1, len(gaps)):
        room_before = code[0] if i == 1 else 0
        newlines = haystack.run.newlines
        has_room = (newlines >= room_before) & (newlines <= len(haystack.run.tokens) - code[i])
        if not has_room.any():
            needed = room_before + code[i]
            raise ValueError(
                f"the text around has {len(haystack.run.tokens)} tokens, and {needed} in one piece are needed: give "
                "more text, or shorter prompts"
            )
        starts.append(int(rng.choice(newlines[has_room])))
    starts = [starts[0] - code[0], *starts]
    pieces = []
    for i, start in enumerate(starts):
        pieces.append(_scattered(rng, haystack, start, code[i], other_lines[i]))
        pieces += [lines[i]] if i < len(lines) else []
    return np.concatenate(pieces)


def _scattered(rng: np.random.Generator, haystack: Haystack, start: int, length: int, lines: list[Ids]) -> Ids:
    """Return a run of text with records between its lines, at places drawn uniformly."""
    code, places = haystack.run.chunk(start, length)
    wanted_offset = np.sort(rng.uniform(0, length, size=len(lines)))
    chosen = places[np.searchsorted(places, wanted_offset)]
    parts = np.split(code, chosen)
    between = [part for pair in zip(parts[:-1], lines, strict=True) for part in pair]
    return np.concatenate([*between, parts[-1]])


def line_breaks(
    tokenizer: Tokenizer, tokens: UInt[np.ndarray, " S"] | Int32[np.ndarray, " S"]
) -> Int64[np.ndarray, " lines"]:
    """Return the indices of the line breaks that a record's line may be inserted before.

    Args:
        tokenizer: that wrote the tokens.
        tokens: ids.
    """
    used = np.unique(tokens)
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in used]
    is_space, is_break = np.zeros((2, tokenizer.vocab_size), bool)  # of each id that is used, [V]
    is_space[used] = [piece.isspace() for piece in pieces]
    is_break[used] = [piece.isspace() and "\n" in piece for piece in pieces]
    # A long run of blanks is several tokens; only before the first of them can a line be inserted without a change in
    # how the text on either side is tokenised.
    opens_run = np.append(True, ~is_space[tokens[:-1]])  # [S]
    return np.flatnonzero(is_break[tokens] & opens_run)
