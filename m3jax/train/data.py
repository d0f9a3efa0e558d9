"""Batches of code with records to recall written between its lines.

A record is one comment line, `# harbor -> lantern`. The first line of a key defines its value,
which nobody can guess; each later line repeats key and value, and whoever can look back to the
definition can predict the value.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from m3jax.train.corpus import KEY, RECORD_LENGTH, VALUE, Corpus, RecordTokens, python_corpus

__all__ = [
    "Batch",
    "Corpus",
    "PlainBatches",
    "RecallBatches",
    "RecordTokens",
    "python_corpus",
    "recall_probe",
]

Batch = dict[str, np.ndarray]

_MAX_PAIRS = 128
_MIN_DISTANCE = 8
_QUERIES = (0.6, 0.25, 0.15)  # probability of 1, 2, 3 repeats of a pair


def _splice(code: np.ndarray, places: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inserts record r before code[places[r]]; places ascend. Also returns the records' starts."""
    starts = places + RECORD_LENGTH * np.arange(len(places))
    slots = (starts[:, None] + np.arange(RECORD_LENGTH)).ravel()
    row = np.empty(len(code) + len(slots), np.int32)
    is_code = np.ones(len(row), bool)
    is_code[slots] = False
    row[slots] = records.ravel()
    row[is_code] = code
    return row, starts


@dataclass(frozen=True)
class RecallBatches:
    """Random training batches; batch i is a function of (seed, i) alone, so a run can resume.

    `batches[i]` has tokens int32 [B T+1] and, for the targets `tokens[:, 1:]`: weights float32
    [B T], recall bool [B T] (the target is a value that its row defined before), distance int32
    [B T] (tokens back to the value's definition, 0 where recall is false) and recent int32 [B T]
    (tokens back to its latest mention). Weights are 1, and 0 where nothing predicts the target: a
    record's line break, "#" and key, and the value that defines.

    Args:
        corpus: where the code comes from.
        seq_len: T, at least 64.
        batch_size: B.
        seed: of all batches, not negative.
        recall_fraction: share of rows that have records.
    """

    corpus: Corpus
    seq_len: int
    batch_size: int
    seed: int
    recall_fraction: float = 0.7

    def __post_init__(self):
        if self.seq_len < 64:
            raise ValueError(f"seq_len {self.seq_len} has no room for records; give at least 64")
        _check_positive(batch_size=self.batch_size)
        _check_fits(self.corpus, self.seq_len + 1)
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} is negative; give 0 or more")
        if not 0 <= self.recall_fraction <= 1:
            raise ValueError(f"recall_fraction {self.recall_fraction} is not between 0 and 1")

    def __getitem__(self, index: int) -> Batch:
        if index < 0:
            raise IndexError(f"batch {index} does not exist; batches count from 0 without end")
        rng = np.random.default_rng([self.seed, index])
        rows = [self._row(rng) for _ in range(self.batch_size)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, rng: np.random.Generator) -> Batch:
        if rng.random() < self.recall_fraction:
            return self._recall_row(rng)
        length = self.seq_len + 1
        start = self.corpus.draw_start(rng, length)
        return _plain_row(self.corpus.tokens[start : start + length].astype(np.int32))

    def _recall_row(self, rng: np.random.Generator) -> Batch:
        length = self.seq_len + 1
        pair, at = _schedule(rng, self._draw_pairs(rng), length)
        code_length = length - RECORD_LENGTH * len(pair)
        code, places = self.corpus.chunk(self.corpus.draw_start(rng, code_length), code_length)
        wanted = np.searchsorted(places, at * (code_length / length))
        words = rng.permutation(self.corpus.records.words)
        records = self.corpus.records.write(words[2 * pair], words[2 * pair + 1])
        row, starts = _splice(code, places[wanted], records)
        return _recall_targets(row, starts, pair)

    def _draw_pairs(self, rng: np.random.Generator) -> int:
        # 4 lines of 5 tokens a pair at most: records never fill more than 5/8 of a row.
        most = min(_MAX_PAIRS, len(self.corpus.records.words) // 2, self.seq_len // 32)
        fewest = min(4, most)
        return int(np.exp(rng.uniform(np.log(fewest), np.log(most + 1))))


def _schedule(rng: np.random.Generator, pairs: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pair each record of a row states, and about where, in tokens, in ascending order."""
    repeats = rng.choice(len(_QUERIES), size=pairs, p=_QUERIES) + 1
    used = np.arange(len(_QUERIES)) < repeats[:, None]
    if rng.random() < 0.3:
        # A table: all definitions on consecutive lines, the queries anywhere below.
        first = rng.uniform(0, length / 4) + 1e-3 * np.arange(pairs)
        later = rng.uniform(first[:, None] + _MIN_DISTANCE, length, size=used.shape)
    else:
        distance = np.where(used, _distances(rng, used.shape, length), 0)
        first = rng.uniform(0, length - distance.max(axis=1))
        later = first[:, None] + distance
    pair = np.concatenate([np.arange(pairs), np.nonzero(used)[0]])
    at = np.concatenate([first, later[used]])
    order = np.argsort(at, kind="stable")
    return pair[order], at[order]


def _distances(rng: np.random.Generator, shape: tuple[int, ...], length: int) -> np.ndarray:
    """Half uniform, half log-uniform: the far ones are common and the near ones not rare."""
    near = np.exp(rng.uniform(np.log(_MIN_DISTANCE), np.log(length), size=shape))
    far = rng.uniform(_MIN_DISTANCE, length, size=shape)
    return np.where(rng.random(shape) < 0.5, near, far)


def _plain_row(row: np.ndarray) -> Batch:
    targets = len(row) - 1
    return {
        "tokens": row,
        "weights": np.ones(targets, np.float32),
        "recall": np.zeros(targets, bool),
        "distance": np.zeros(targets, np.int32),
        "recent": np.zeros(targets, np.int32),
    }


def _recall_targets(row: np.ndarray, starts: np.ndarray, pair: np.ndarray) -> Batch:
    values = starts + VALUE
    order = np.argsort(pair, kind="stable")
    # In this order a pair's mentions are adjacent, and its definition comes first.
    grouped, defines = values[order], np.diff(pair[order], prepend=-1) > 0
    definition = grouped[defines][np.cumsum(defines) - 1]
    queries = grouped[~defines]
    weights, recall = np.ones(len(row), np.float32), np.zeros(len(row), bool)
    distance, recent = np.zeros(len(row), np.int32), np.zeros(len(row), np.int32)
    weights[(starts[:, None] + np.arange(KEY + 1)).ravel()] = 0
    weights[grouped[defines]] = 0
    recall[queries] = True
    distance[queries] = queries - definition[~defines]
    recent[queries] = np.diff(grouped, prepend=0)[~defines]
    per_token = {"weights": weights, "recall": recall, "distance": distance, "recent": recent}
    return {"tokens": row} | {name: array[1:] for name, array in per_token.items()}


@dataclass(frozen=True)
class PlainBatches:
    """Code alone, in order: windows of T targets, for a validation loss.

    `batches[i]` has the arrays of `RecallBatches`, all weights 1. The corpus is covered once but
    for an end that does not fill a batch; `len(batches)` batches there are.

    Args:
        corpus: where the code comes from.
        seq_len: T.
        batch_size: B.
    """

    corpus: Corpus
    seq_len: int
    batch_size: int

    def __post_init__(self):
        _check_positive(seq_len=self.seq_len, batch_size=self.batch_size)
        _check_fits(self.corpus, self.seq_len * self.batch_size + 1)

    def __len__(self) -> int:
        return (len(self.corpus.tokens) - 1) // (self.seq_len * self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} does not exist; there are {len(self)}")
        first = index * self.batch_size
        rows = [self._row(first + b) for b in range(self.batch_size)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, index: int) -> Batch:
        start = index * self.seq_len
        return _plain_row(self.corpus.tokens[start : start + self.seq_len + 1].astype(np.int32))


def recall_probe(
    corpus: Corpus, distance: int, count: int, seq_len: int, seed: int, distractors: int = 24
) -> tuple[Int32[np.ndarray, "C T"], Int32[np.ndarray, " C"]]:
    """Prompts that end in `# key ->`, each key defined once, a given number of tokens before.

    Args:
        corpus: where the code around comes from.
        distance: tokens from the defining value to the answer, which is the token after the
            prompt; from 5 to seq_len - 4.
        count: number of prompts, C.
        seq_len: tokens of a prompt, T.
        seed: of the whole set, not negative.
        distractors: other records, stated once each. 16 of them, or as many as there is room
            for, come after the definition; the rest are spread over the prompt.

    Returns:
        The prompts, and the answers' token ids.

    Raises:
        ValueError: a distance that does not fit, or arguments out of range.
    """
    _check_positive(count=count)
    _check_fits(corpus, seq_len)
    if not RECORD_LENGTH <= distance <= seq_len - VALUE:
        raise ValueError(
            f"distance {distance} does not fit a prompt of {seq_len} tokens; give {RECORD_LENGTH} to {seq_len - VALUE}"
        )
    if not 0 <= distractors < len(corpus.records.words) // 2:
        raise ValueError(f"distractors {distractors} is not between 0 and {len(corpus.records.words) // 2 - 1}")
    rng = np.random.default_rng(seed)
    probes = [_probe(rng, corpus, distance, seq_len, distractors) for _ in range(count)]
    prompts, answers = zip(*probes, strict=True)
    return np.stack(prompts), np.array(answers, np.int32)


def _probe(
    rng: np.random.Generator, corpus: Corpus, distance: int, seq_len: int, distractors: int
) -> tuple[np.ndarray, int]:
    # Tokens between the defining line and the question, and before the defining line.
    after, before = distance - RECORD_LENGTH, seq_len - distance - VALUE
    late, early = _share(distractors, after, before)
    words = rng.permutation(corpus.records.words)[: 2 * (1 + late + early)].reshape(-1, 2)
    records = corpus.records.write(words[:, 0], words[:, 1])
    code_before, code_after = before - RECORD_LENGTH * early, after - RECORD_LENGTH * late
    usable = corpus.newlines[(corpus.newlines >= code_before) & (corpus.newlines <= len(corpus.tokens) - code_after)]
    middle = int(rng.choice(usable))
    head = _scatter(rng, *corpus.chunk(middle - code_before, code_before), records[1 : 1 + early])
    tail = _scatter(rng, *corpus.chunk(middle, code_after), records[1 + early :])
    question = records[0, :VALUE]
    return np.concatenate([head, records[0], tail, question]), int(records[0, VALUE])


def _share(distractors: int, after: int, before: int) -> tuple[int, int]:
    """Distractors after and before the definition; records take 5/8 of either side at most."""
    room_after, room_before = after // 8, before // 8
    wanted = max(min(distractors, 16), round(distractors * after / max(1, after + before)))
    late = min(wanted, room_after)
    return late, min(distractors - late, room_before)


def _scatter(rng: np.random.Generator, code: np.ndarray, places: np.ndarray, records: np.ndarray) -> np.ndarray:
    wanted = np.sort(rng.uniform(0, len(code), size=len(records)))
    return _splice(code, places[np.searchsorted(places, wanted)], records)[0]


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size} is not positive; give 1 or more")


def _check_fits(corpus: Corpus, tokens: int) -> None:
    if tokens > len(corpus.tokens) // 2:
        raise ValueError(
            f"{tokens} tokens are more than half of the corpus of {len(corpus.tokens)}; "
            "give a smaller seq_len or batch_size"
        )
