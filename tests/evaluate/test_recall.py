"""Prompts with records to recall: where these stand, and what counts as an answer."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.embedded import TOKENIZER
from tiny.corpus import Corpus, RecordTokens
from tiny.measure import haystack_of, recall_accuracy, recall_probe

from m3jax.evaluate.prompts import KINDS, Haystack, Prompt, fill, line_breaks, recall_prompts
from m3jax.evaluate.reading import Reading
from m3jax.evaluate.recall import Grid, recall, recall_table
from m3jax.evaluate.words import WORDS
from m3jax.text import Tokenizer

NEWLINE, HASH, ARROW = 2, 3, 4
VOCAB = 512


@cache
def corpus() -> Corpus:
    """Noise with line breaks; as many words as there are in English."""
    tokens = np.random.default_rng(0).integers(5, 8, 4000).astype(np.uint16)
    newlines = np.arange(10, 3990, 10)
    tokens[newlines] = NEWLINE
    words = np.arange(8, 8 + len(WORDS), dtype=np.int32)
    return Corpus(tokens, newlines, np.array([0]), RecordTokens(newline=NEWLINE, hash=HASH, arrow=ARROW, words=words))


@cache
def haystack() -> Haystack:
    return haystack_of(corpus())


def records_of(row: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, key, value) of each record, found by reading the row token by token."""
    return [
        (start, int(row[start + 2]), int(row[start + 4]))
        for start in range(len(row) - 4)
        if row[start] == NEWLINE and row[start + 1] == HASH and row[start + 3] == ARROW
    ]


@jax.tree_util.register_pytree_node_class
class LooksUp:
    """Answers `# key ->` with what followed the key's first mention before an arrow, or, if hasty, at any mention."""

    def __init__(self, hasty: bool = False, error: int = 0):
        self.settings = (hasty, error)
        self.config = tiny.config(vocab_size=VOCAB)
        self.dtype = "float32"

    def tree_flatten(self):
        return (), self.settings

    @classmethod
    def tree_unflatten(cls, settings, _):
        return cls(*settings)

    def hidden(self, tokens):
        hasty, error = self.settings
        following = jnp.pad(tokens, ((0, 0), (0, 2)))
        is_key = jnp.ones_like(tokens, bool) if hasty else following[:, 1:-1] == ARROW
        asked = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]  # [B T]
        mentions = (tokens[:, None] == asked[:, :, None]) & is_key[:, None]  # [B T S]
        value = jnp.take_along_axis(following, jnp.argmax(mentions, axis=-1) + 2, axis=1)
        return (value + error)[..., None], None

    def unembed(self, hidden):
        return jax.nn.one_hot(hidden[..., 0], VOCAB)


@given(st.sampled_from([5, 9, 41, 128, 300, 700, 1020]), st.integers(0, 1000))
def test_probe_distance(distance: int, seed: int):
    prompts, answers = recall_probe(corpus(), distance, 3, 1024, seed)
    assert prompts.shape == (3, 1024) and answers.shape == (3,)
    for prompt, answer in zip(prompts, answers, strict=True):
        key = prompt[-2]
        assert prompt[-4:].tolist() == [NEWLINE, HASH, key, ARROW]
        records = records_of(prompt)
        assert [(start, value) for start, k, value in records if k == key] == [(1024 - distance - 4, answer)]
        assert len({k for _, k, _ in records}) == len(records)
        if distance >= 300:
            assert sum(start > 1024 - distance for start, _, _ in records) >= 15


def test_probe_repeats():
    one, two = (recall_probe(corpus(), 200, 4, 512, 3) for _ in range(2))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])


def test_a_prompt_longer_than_the_corpus_is_refused():
    with pytest.raises(ValueError, match="the text around has 4000 tokens"):
        recall_probe(corpus(), distance=8000, count=1, seq_len=9000, seed=0)


def check_prompt(prompt: Prompt, kind: str, length: int, depths: tuple[float, ...]) -> None:
    """Check that a prompt's questions ask for its records, and the answers are right, from its tokens alone."""
    row, last = prompt.tokens, prompt.answers[-1]
    assert (last[0], last[1], len(row)) == (length, length + 1, length + 1)
    records, asked = records_of(row), [(int(row[begin - 2]), int(row[begin])) for begin, _ in prompt.answers]
    questions = [begin - 4 for begin, _ in prompt.answers]
    assert [start for start, _, _ in records[-len(asked) :]] == questions
    text = records[: -len(asked)]
    values = {key: value for _, key, value in text}
    assert len(values) == len(text), "a key is defined once"
    assert all(values[key] == value for key, value in asked), "the answer is the key's value"
    if kind == "chain":
        assert asked[1][0] == asked[0][1], "the second question asks for what the first led to"
    begin_of = {key: start for start, key, _ in text}
    room = questions[0] - 5 * len(asked)  # tokens of the text around
    in_text = sorted(begin_of[key] for key, _ in asked)
    for (key, _), depth in zip(asked, prompt.depths, strict=True):
        before = begin_of[key] - 5 * in_text.index(begin_of[key])
        if kind != "chain" or key == asked[0][0]:
            assert before == round(depth * room) and depth in depths, (before, depth, room)


@given(st.sampled_from(KINDS), st.sampled_from([128, 300, 900]), st.integers(0, 1000))
def test_records_stand_at_their_depths(kind: str, length: int, seed: int):
    depths = (0.0, 0.3, 0.5, 1.0)
    prompts = recall_prompts(haystack(), kind, length, depths, 2, seed)
    assert len(prompts) == (2 if kind == "several" else 2 * len(depths))
    for prompt in prompts:
        check_prompt(prompt, kind, length, depths)
    again = recall_prompts(haystack(), kind, length, depths, 2, seed)
    assert all(np.array_equal(one.tokens, two.tokens) for one, two in zip(prompts, again, strict=True))


@pytest.mark.parametrize(
    ("gaps", "count"),
    [([100, 200, 300], 24), ([0, 50, 900], 24), ([400, 8, 16], 24), ([80, 400, 40], 20), ([10, 10, 10], 3),
     ([0, 0, 0], 5), ([300, 0, 7], 20), ([500, 400, 1000], 40), ([64, 64, 64], 0)],
)  # fmt: skip
def test_other_records_are_spread_over_the_pieces_between(gaps, count):
    """Behind the last record 16 of them or a piece's share, before it the rest by length; 5/8 of a piece at most."""
    lines = [haystack().line(2 * i, 2 * i + 1) for i in range(2)]
    row = fill(np.random.default_rng(0), haystack(), gaps, lines, list(range(10, 10 + 2 * count)), count)
    assert len(row) == sum(gaps) + 5 * 2
    starts = [gaps[0], gaps[0] + 5 + gaps[1]]
    records = [start for start, _, _ in records_of(row)]
    assert set(starts) <= set(records)
    room = [gap * 5 // 8 // 5 for gap in gaps]  # a record has five tokens
    last = min(max(min(count, 16), round(count * gaps[2] / max(sum(gaps), 1))), room[2])
    share = lambda gap: (count - last) * gap // (gaps[0] + gaps[1]) if gaps[0] + gaps[1] else 0
    expected = [min(share(gaps[0]), room[0]), min(share(gaps[1]), room[1]), last]
    edges = [-1, *starts, len(row)]
    found = [sum(low < start < high for start in records) for low, high in pairwise(edges)]
    assert found == expected


def test_prompts_in_the_tokens_of_any_tokenizer():
    """Words of several tokens: the text that a prompt spells has the records that it should, and its answer."""

    class Bytes(Tokenizer):
        """A token a byte."""

        vocab_size = 256

        def encode_batch(self, texts):
            return [list(text.encode()) for text in texts]

        def decode(self, ids, skip_special_tokens=True):
            return bytes(ids).decode("latin-1")

    haystack = Haystack.of_texts(Bytes(TOKENIZER.backend), {"a": "def f(x):\n    return x\n" * 200})
    for prompt in recall_prompts(haystack, "needle", 700, (0.0, 0.5), 1, 0):
        text = bytes(prompt.tokens.tolist()).decode()
        ((begin, end),) = prompt.answers
        question, answer = text[:begin].rpartition("\n")[2], text[begin:end]
        assert begin == 700 and end == len(text) and answer.strip() in WORDS
        assert text.count(question + answer) == 2 and text.count("->") > 5


def grid(kind: str, lengths: tuple[int, ...] = (200, 300), depths: tuple[float, ...] = (0.0, 0.6, 1.0)) -> Grid:
    return Grid.of(haystack(), (kind,), lengths, depths, 2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_recall_counts_exact_answers(unchecked, kind):
    for length in (200, 300):
        found = recall(LooksUp(), grid(kind, (length,)), Reading(chunk=0))[kind]
        assert found["mean"] == 1 and found["shares"] == [[1, 1, 1]]
        assert recall(LooksUp(error=1), grid(kind, (length,)), Reading(chunk=0))[kind]["mean"] == 0


def test_a_chain_needs_both_of_its_steps(unchecked):
    """A model that takes a key's mention as a value for its definition answers needles, and few chains."""
    assert recall(LooksUp(hasty=True), grid("needle", (300,)), Reading(chunk=0))["needle"]["mean"] == 1
    assert recall(LooksUp(hasty=True), grid("chain", (300,)), Reading(chunk=0))["chain"]["mean"] < 0.9


def test_recall_accuracy_counts_exact_answers(unchecked):
    measure = lambda model: recall_accuracy(model, corpus(), (8, 100), count=6, seq_len=200, batch=4)
    assert measure(LooksUp()) == {8: 1.0, 100: 1.0}
    assert measure(LooksUp(error=1)) == {8: 0.0, 100: 0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": ("chains",)}, "kind 'chains' is unknown"),
        ({"lengths": (18,)}, "a prompt of 18 tokens has no room"),
        ({"lengths": (3999, 9000)}, "the text around has 4000 tokens"),
        ({"depths": (0.5, 1.5)}, r"depths from 0 to 1"),
        ({"depths": (0.5, 0.5)}, "depths 0.5, 0.5: give at least one, each once"),
        ({"count": 0}, "count = 0"),
    ],
)
def test_wrong_grids(arguments, message):
    given = {"kinds": ("chain",), "lengths": (100,), "depths": (0.5,), "count": 1, "seed": 0} | arguments
    with pytest.raises(ValueError, match=message):
        Grid.of(haystack(), **given)


def test_shares_of_recall_and_their_table(monkeypatch, unchecked):
    """Of one question each, of several by their own depths, of a chain of all; an answer's tokens are all right."""
    of = lambda answers, depths: Prompt(np.zeros(9, np.int32), answers, depths)
    prompts = [
        ("needle", 0, of(((2, 4),), (0.0,))), ("needle", 0, of(((2, 4),), (1.0,))),
        ("needle", 1, of(((2, 3),), (0.0,))),
        ("needle", 1, of(((3, 4),), (1.0,))), ("several", 0, of(((2, 3), (5, 6)), (1.0, 0.0))),
        ("several", 1, of(((2, 3), (5, 6)), (0.0, 1.0))), ("chain", 0, of(((2, 3), (5, 6)), (0.0, 0.3))),
        ("chain", 0, of(((2, 3), (5, 6)), (1.0, 0.3))), ("chain", 1, of(((2, 3), (5, 6)), (0.0, 0.3))),
        ("chain", 1, of(((2, 3), (5, 6)), (1.0, 0.3))),
    ]  # fmt: skip
    # Token t is predicted at t - 1.
    right_at = [(1, 2), (2, 3), (1,), (3,), (1,), (1, 4), (1, 4), (1,), (4,), (1, 4)]
    scores = [(None, np.isin(np.arange(8), at)) for at in right_at]
    given = []
    monkeypatch.setattr(
        "m3jax.evaluate.recall.token_scores", lambda model, rows, how: given.append((model, len(rows), how)) or scores
    )
    grid = Grid(("needle", "several", "chain"), (1000, 20), (0.0, 1.0), 1, prompts)
    found = recall("model", grid, "how")
    assert given == [("model", 10, "how")]
    shares = dict(needle=[[1, 0], [1, 0]], several=[[0, 1], [1, 1]], chain=[[1, 0], [0, 1]])
    of_kinds = {kind: dict(shares=x, mean=np.mean(x)) for kind, x in shares.items()}
    assert found == dict(lengths=[1000, 20], depths=[0.0, 1.0], count=1, **of_kinds)
    del found["several"]
    table = [
        ["depth", "    0%  100%"], ["needle", "mean 50.0%"], ["  1,000 tokens", "  100%    0%"],
        ["  20 tokens", "  100%    0%"], ["chain", "mean 50.0%"], ["  1,000 tokens", "  100%    0%"],
        ["  20 tokens", "    0%  100%"],
    ]  # fmt: skip
    assert recall_table([found]) == table
    assert recall_table([found, found]) == [[name, figures, figures] for name, figures in table]


def test_limits_of_prompts(unchecked):
    """Two words of a record, of a depth's and of a chain's: the others are left for distractors."""
    most = len(WORDS) // 2 - 4
    prompts = lambda **changes: recall_prompts(
        **dict(haystack=haystack(), kind="needle", length=900, depths=(0.0, 1.0), count=1, seed=3) | changes
    )
    assert [len(prompts(distractors=count)) for count in (0, most)] == [2, 2]
    for changes, reason in (
        (dict(distractors=-1), f"distractors = -1: with 2 depths give 0 to {most}"),
        (dict(distractors=most + 1), "with 2 depths give"),
        (dict(depths=()), "depths = "),
        (dict(depths=(-0.0001,)), "depths from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            prompts(**changes)


def test_records_go_before_a_run_of_blanks_that_has_a_line_break_first():
    """In a text of one token a letter: only there is the text on either side tokenised as before."""

    class Letters(Tokenizer):
        vocab_size = 128

        def decode(self, ids, skip_special_tokens=True):
            return "".join(map(chr, ids))

    text = "\na\n\n b \nc\n  d\te\n"
    expected = [i for i, x in enumerate(text) if x == "\n" and (i == 0 or not text[i - 1].isspace())]
    found = line_breaks(Letters(TOKENIZER.backend), np.array([*map(ord, text)], np.int32))
    assert found.tolist() == expected == [0, 2, 9, len(text) - 1]
