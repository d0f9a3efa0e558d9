"""Batches of code with records to recall written between its lines.

A record is one comment line, `# harbor -> lantern`. The first line of a key defines its value,
which nobody can guess; each later line repeats key and value, and whoever can look back to the
definition can predict the value.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int32, Int64
from tiny.corpus import KEY, RECORD_LENGTH, VALUE, Corpus

from m3jax.train.run import Batch

_MAX_PAIRS = 128
_MIN_DISTANCE = 8
_QUERIES = (0.6, 0.25, 0.15)  # probability of 1, 2, 3 repeats of a pair


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
        _check_fits(self.corpus, self.seq_len + 1)

    def __getitem__(self, index: int) -> Batch:
        rng = np.random.default_rng([self.seed, index])
        rows = []
        for _ in range(self.batch_size):
            has_records = rng.random() < self.recall_fraction
            rows.append(self._recall_row(rng) if has_records else self._code_row(rng))
        return _stacked(rows)

    def _code_row(self, rng: np.random.Generator) -> Batch:
        """A row of code without records."""
        length = self.seq_len + 1
        start = self.corpus.draw_start(rng, length)
        return _plain_targets(self.corpus.tokens[start : start + length].astype(np.int32))

    def _recall_row(self, rng: np.random.Generator) -> Batch:
        """A row of code with records between its lines: which and about where first, then the code, then the words."""
        length, records = self.seq_len + 1, self.corpus.records
        # 4 lines of 5 tokens a pair at most: records never fill more than 5/8 of a row.
        most = min(_MAX_PAIRS, len(records.words) // 2, self.seq_len // 32)
        fewest = min(4, most)
        num_pairs = int(np.exp(rng.uniform(np.log(fewest), np.log(most + 1))))
        pair_of_record, wanted_offset = _schedule(rng, num_pairs, length)
        code_length = length - RECORD_LENGTH * len(pair_of_record)
        code, places = self.corpus.chunk(self.corpus.draw_start(rng, code_length), code_length)
        chosen = np.searchsorted(places, wanted_offset * (code_length / length))
        words = rng.permutation(records.words)
        lines = records.write(keys=words[2 * pair_of_record], values=words[2 * pair_of_record + 1])
        row, record_starts = _splice(code, places[chosen], lines)
        return _recall_targets(row, record_starts, pair_of_record)


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
        _check_fits(self.corpus, self.seq_len * self.batch_size + 1)

    def __len__(self) -> int:
        return (len(self.corpus.tokens) - 1) // (self.seq_len * self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} does not exist; there are {len(self)}")
        starts = (index * self.batch_size + np.arange(self.batch_size)) * self.seq_len
        windows = [self.corpus.tokens[start : start + self.seq_len + 1] for start in starts]
        return _stacked([_plain_targets(window.astype(np.int32)) for window in windows])


def scatter(
    rng: np.random.Generator, corpus: Corpus, start: int, length: int, records: Int32[np.ndarray, "R 5"]
) -> Int32[np.ndarray, " S"]:
    """A run of code with records between its lines, spread evenly by chance.

    Args:
        rng: the source of all that is random in it.
        corpus: where the code comes from.
        start: index of its first token.
        length: tokens of code, S - 5 R.
        records: the lines, in order.

    Returns:
        The ids.
    """
    code, places = corpus.chunk(start, length)
    wanted_offset = np.sort(rng.uniform(0, length, size=len(records)))
    row, _ = _splice(code, places[np.searchsorted(places, wanted_offset)], records)
    return row


def _schedule(
    rng: np.random.Generator, num_pairs: int, length: int
) -> tuple[Int64[np.ndarray, " R"], Float64[np.ndarray, " R"]]:
    """Draw the pair that each record of a row states, and about where it stands, in tokens, in ascending order."""
    repeats = rng.choice(len(_QUERIES), size=num_pairs, p=_QUERIES) + 1
    is_used = np.arange(len(_QUERIES)) < repeats[:, None]  # [pairs 3]
    if rng.random() < 0.3:
        # A table: all definitions on consecutive lines, the queries anywhere below.
        definition = rng.uniform(0, length / 4) + 1e-3 * np.arange(num_pairs)
        query = rng.uniform(definition[:, None] + _MIN_DISTANCE, length, size=is_used.shape)
    else:
        # Half uniform, half log-uniform: the far ones are common and the near ones not rare.
        near = np.exp(rng.uniform(np.log(_MIN_DISTANCE), np.log(length), size=is_used.shape))
        far = rng.uniform(_MIN_DISTANCE, length, size=is_used.shape)
        distance = np.where(rng.random(is_used.shape) < 0.5, near, far)
        distance = np.where(is_used, distance, 0)
        definition = rng.uniform(0, length - distance.max(axis=1))
        query = definition[:, None] + distance
    pair_of_record = np.concatenate([np.arange(num_pairs), np.nonzero(is_used)[0]])
    offset = np.concatenate([definition, query[is_used]])
    order = np.argsort(offset, kind="stable")
    return pair_of_record[order], offset[order]


def _splice(
    code: Int32[np.ndarray, " S"], places: Int64[np.ndarray, " R"], records: Int32[np.ndarray, "R 5"]
) -> tuple[Int32[np.ndarray, " T"], Int64[np.ndarray, " R"]]:
    """Inserts record r before code[places[r]]; places ascend. Also returns the records' starts."""
    starts = places + RECORD_LENGTH * np.arange(len(places))  # [R]
    record_slots = (starts[:, None] + np.arange(RECORD_LENGTH)).ravel()  # [R*5]
    row = np.empty(len(code) + len(record_slots), np.int32)
    is_code = np.ones(len(row), bool)
    is_code[record_slots] = False
    row[record_slots] = records.ravel()
    row[is_code] = code
    return row, starts


def _plain_targets(row: Int32[np.ndarray, " T1"]) -> Batch:
    """A row of T + 1 tokens without records: every target counts, none is recalled."""
    num_targets = len(row) - 1
    return {
        "tokens": row,
        "weights": np.ones(num_targets, np.float32),
        "recall": np.zeros(num_targets, bool),
        "distance": np.zeros(num_targets, np.int32),
        "recent": np.zeros(num_targets, np.int32),
    }


def _recall_targets(
    row: Int32[np.ndarray, " T1"], record_starts: Int64[np.ndarray, " R"], pair_of_record: Int64[np.ndarray, " R"]
) -> Batch:
    """A row of T + 1 tokens with records, and what `RecallBatches` says of its targets."""
    value_index = record_starts + VALUE
    # In this order a pair's mentions are adjacent, and its definition comes first.
    order = np.argsort(pair_of_record, kind="stable")
    mentions, defines = value_index[order], np.diff(pair_of_record[order], prepend=-1) > 0
    definition = mentions[defines][np.cumsum(defines) - 1]  # of each mention's pair
    queries = mentions[~defines]
    weights, recall = np.ones(len(row), np.float32), np.zeros(len(row), bool)
    distance, recent = np.zeros(len(row), np.int32), np.zeros(len(row), np.int32)
    weights[(record_starts[:, None] + np.arange(KEY + 1)).ravel()] = 0
    weights[mentions[defines]] = 0
    recall[queries] = True
    distance[queries] = queries - definition[~defines]
    recent[queries] = np.diff(mentions, prepend=0)[~defines]
    per_token = {"weights": weights, "recall": recall, "distance": distance, "recent": recent}
    return {"tokens": row} | {name: array[1:] for name, array in per_token.items()}


def _stacked(rows: list[Batch]) -> Batch:
    """Stack rows of equal length into a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _check_fits(corpus: Corpus, tokens: int) -> None:
    if tokens > len(corpus.tokens) // 2:
        raise ValueError(
            f"{tokens} tokens are more than half of the corpus of {len(corpus.tokens)}; "
            "give a smaller seq_len or batch_size"
        )
