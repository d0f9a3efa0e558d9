"""Episodes of an engine of plain Python: who is asked for what, what is drawn, what room there is, what a batch has."""

from argparse import Namespace

import numpy as np
import pytest

from m3jax.decoding import Params, Sampling
from m3jax.decoding.protocols import DRAWN_LOGPROBS, SUPPORT
from m3jax.train.rollouts import Episode, as_batch, check_replay, roll_out

pytestmark = pytest.mark.usefixtures("unchecked")  # the engine here is none


def generation(tokens, version=3, **records):
    logprobs = np.linspace(-1.0, -2.0, len(tokens)).astype(np.float32)
    return Namespace(
        tokens=tuple(tokens), stop_reason="length", records=records, logprobs=logprobs, versions=(version + 1, version)
    )


class PlainEngine:
    """An engine whose answer to a request is its seed and how many tokens it may have, one number behind the other."""

    max_length = 12

    def __init__(self):
        self.asked, self.waiting, self.aborted = [], {}, []

    def add(self, prompt, params, n=None):
        if len(prompt) > 9:
            raise ValueError("too long")
        handles = []
        for copy in range(n or 1):
            handle = len(self.asked)
            seed = params.sampling.seed + copy
            self.asked.append((tuple(prompt), seed, params.max_new_tokens))
            self.waiting[handle] = generation([seed, params.max_new_tokens], version=handle)
            handles.append(handle)
        return handles if n else handles[0]

    def abort(self, handle):
        self.aborted.append(handle)

    def run(self):
        found, self.waiting = self.waiting, {}
        return found


PARAMS = Params(max_new_tokens=4, sampling=Sampling(temperature=1.0, seed=99))


def test_each_answer_has_a_seed_of_its_own():
    """Answer j to prompt i has seed + i count + j; the prompt is added once for all its answers."""
    engine = PlainEngine()
    found = roll_out(engine, [(1, 2), (3,)], PARAMS, count=3, seed=10)
    assert engine.asked == [((1, 2), 10 + j, 4) for j in range(3)] + [((3,), 13 + j, 4) for j in range(3)]
    assert [[episode.tokens for episode in of_prompt] for of_prompt in found] == [
        [(1, 2, 10, 4), (1, 2, 11, 4), (1, 2, 12, 4)], [(3, 13, 4), (3, 14, 4), (3, 15, 4)]
    ]  # fmt: skip
    episode = found[1][2]
    assert episode.is_drawn.tolist() == [False, True, True] and episode.logprobs.tolist() == [0.0, -1.0, -2.0]
    assert episode.version == 5  # of the oldest weights
    assert roll_out(PlainEngine(), [(1,)], PARAMS, 1, seed=2**32 - 1)[0][0].tokens[1] == 2**32 - 1
    assert roll_out(PlainEngine(), [(1,), (2,)], PARAMS, 1, seed=2**32 - 1)[1][0].tokens[1] == 0


def test_a_refused_prompt_leaves_no_request():
    engine = PlainEngine()
    with pytest.raises(ValueError, match="too long"):
        roll_out(engine, [(1,), (2,), (0,) * 10], PARAMS, count=2)
    assert engine.aborted == [0, 1, 2, 3]


def test_turns_with_tools():
    """The policy goes on with the seed of its episode, as far as there is room; who gets no answer has ended."""
    engine, seen = PlainEngine(), []

    def respond(going):
        seen.append([(i, episode.tokens) for i, episode in going])
        return [None if i == 1 else (7, 8) for i, _ in going]

    (found,) = roll_out(engine, [(1,)], PARAMS, count=3, seed=20, respond=respond, turns=5)
    first = [(1, 20 + j, 4) for j in range(3)]
    assert seen[0] == list(enumerate(first))
    # Behind three tokens and two of a tool there is room for seven of twelve, then for three, then for none.
    assert engine.asked[3:5] == [((*first[j], 7, 8), 20 + j, 4) for j in (0, 2)]
    second = [(*first[j], 7, 8, 20 + j, 4) for j in (0, 2)]
    assert seen[1] == [(0, second[0]), (2, second[1])]
    assert engine.asked[5:] == [((*second[k], 7, 8), 20 + 2 * k, 3) for k in (0, 1)]
    assert [episode.tokens for episode in found] == [
        (*second[0], 7, 8, 20, 3), first[1], (*second[1], 7, 8, 22, 3)
    ]  # fmt: skip
    assert len(seen) == 3 and found[0].version == 0
    drawn = [False, True, True, False, False, True, True, False, False, True, True]
    assert found[0].is_drawn.tolist() == drawn
    assert found[0].logprobs.tolist() == [0, -1, -2, 0, 0, -1, -2, 0, 0, -1, -2]
    one = PlainEngine()
    roll_out(one, [(1,)], PARAMS, count=1, respond=respond, turns=1)
    assert len(one.asked) == 1
    # A tool's text that fills the room to its last token leaves none for the policy.
    for room, requests in ((5, 1), (6, 2)):
        engine = PlainEngine()
        roll_out(engine, [(1,)], PARAMS, count=1, respond=respond, turns=2, room=room)
        assert len(engine.asked) == requests, room


def test_records_of_turns_are_joined_and_padded():
    """Support is given for what was drawn alone; a later turn without it is refused, and so is an unknown name."""
    first = Episode.of((1, 2), generation([5, 6], version=4, **{SUPPORT: np.array([[1, 2], [3, 4]], np.int32)}))
    assert first.support.tolist() == [[-1, -1], [-1, -1], [1, 2], [3, 4]]
    longer = first.then((9,), generation([7], version=2, **{SUPPORT: np.array([[8, 8]], np.int32)}))
    assert longer.support.tolist() == [[-1, -1], [-1, -1], [1, 2], [3, 4], [-1, -1], [8, 8]]
    assert (longer.tokens, longer.version) == ((1, 2, 5, 6, 9, 7), 2)
    with pytest.raises(ValueError, match=f"no record of {SUPPORT}, which the first one has"):
        first.then((), generation([7]))
    with pytest.raises(ValueError, match=r"ended without a token \(length\) is no episode"):
        Episode.of((1,), generation([]))
    own = Episode.of((1,), generation([5, 6], **{DRAWN_LOGPROBS: np.array([-0.5, -0.25], np.float32)}))
    assert own.logprobs.tolist() == [0.0, -0.5, -0.25]
    batch = as_batch([longer, first], 7, (SUPPORT,))
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "tokens": ((2, 7), np.int32), "mask": ((2, 6), bool), "sampler": ((2, 6), np.float32),
        SUPPORT: ((2, 6, 2), np.int32),
    }  # fmt: skip
    assert batch["tokens"].tolist() == [[1, 2, 5, 6, 9, 7, 0], [1, 2, 5, 6, 0, 0, 0]]
    assert batch["mask"].tolist() == [[False, True, True, False, True, False], [False, True, True] + [False] * 3]
    assert batch["sampler"][0].tolist() == [0, -1, -2, 0, -1, 0]
    assert batch[SUPPORT][0].tolist() == [*longer.support[1:].tolist(), [-1, -1]]
    assert as_batch([first], 4)["tokens"].tolist() == [[1, 2, 5, 6]]
    for episodes, length, names, reason in (
        ([first], 3, (), "an episode has 4 tokens, and the rows of the batch 3"),
        ([first, own], 4, (SUPPORT,), f"replay of {SUPPORT}: an episode has no record"),
        ([first], 4, ("blocks",), "replay of blocks: an episode has no record"),
    ):
        with pytest.raises(ValueError, match=reason):
            as_batch(episodes, length, names)
    assert check_replay(["blocks", SUPPORT]) == ("blocks", SUPPORT)
    with pytest.raises(ValueError, match="replay of 'tokens': choose of"):
        check_replay(["blocks", "tokens"])
