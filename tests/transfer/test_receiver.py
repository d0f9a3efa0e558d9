"""What travels: frames as they are laid out, scores and places that are refused, and what two engines must share."""

import hashlib
import json
from argparse import Namespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.transfers import HEADS, IDENTITY, LAYOUT, TRANSFER, P, received, scores_of

from m3jax.transfer import Frame, PageReceiver, TransferError
from m3jax.transfer.frames import decode, encode
from m3jax.transfer.identity import check_identity, transfer_identity, weights_sum
from m3jax.transfer.prefiller import score_frame

pytestmark = pytest.mark.usefixtures("unchecked")


def test_a_frame_is_laid_out_as_it_is_documented():
    arrays = {"a": np.array([[1, 2]], np.int16), "b": np.array([1.5], np.float32)}
    data = encode(Frame("pages", {"x": [1]}, arrays), TRANSFER, 7)
    number = lambda start, size: int.from_bytes(data[start : start + size], "little")
    assert (data[:4], number(4, 4), number(12, 8)) == (b"M3KV", 1, 8)
    header = data[52 : 52 + number(8, 4)]
    assert json.loads(header) == dict(
        kind="pages", transfer=TRANSFER, number=7, fields={"x": [1]}, arrays=[["a", "I16", [1, 2]], ["b", "F32", [1]]]
    )
    assert data[20:52] == hashlib.sha256(data[:20] + data[52:]).digest()
    assert data[52 + len(header) :] == b"\x01\x00\x02\x00" + np.float32(1.5).tobytes()
    with pytest.raises(ValueError, match="JSON"):
        encode(Frame("pages", {"x": float("nan")}), TRANSFER, 0)


def signed(header: dict, numbers: bytes = b"") -> bytes:
    """A frame with a right checksum, whatever its header says."""
    text = json.dumps(header).encode()
    sizes = b"M3KV" + b"".join(x.to_bytes(n, "little") for x, n in ((1, 4), (len(text), 4), (len(numbers), 8)))
    return sizes + hashlib.sha256(sizes + text + numbers).digest() + text + numbers


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ([["a", "F32", [1]]], "its arrays take 4 of 8 bytes"),
        ([["a", "F32", [3]]], "cannot be read"),
        ([["a", "F31", [2]]], "F31"),
        ([["a", "F32"]], "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(arrays, reason):
    said = dict(kind="pages", transfer=TRANSFER, number=0, fields={}, arrays=arrays)
    with pytest.raises(TransferError, match=reason):
        decode(signed(said, bytes(8)))
    assert decode(signed(said | dict(arrays=[["a", "F32", [2]]]), bytes(8)))[0].arrays["a"].tolist() == [0, 0]
    with pytest.raises(TransferError, match="cannot be read"):
        decode(signed({}))
    bare = b"M3KV" + (1).to_bytes(4, "little") + bytes(12)  # of no header at all
    with pytest.raises(TransferError, match="cannot be read"):
        decode(bare + hashlib.sha256(bare).digest())
    with pytest.raises(TransferError, match="51 bytes that are no frame of pages"):
        decode((bare + hashlib.sha256(bare).digest())[:-1])


SCORED = (3, 1, 4, 1)


SCORES = scores_of(SCORED)


WRONG_SCORES = {
    "some are missing": ([score_frame(SCORES[:3], 0)], "all has come, and scores of 1 tokens are missing"),
    "some twice": ([score_frame(SCORES[:3], 0)] * 2, "scores of tokens 0 to 3, and of 4 those from 3 on come next"),
    "some are left out": ([score_frame(SCORES[1:], 1)], "scores of tokens 1 to 4, and of 4 those from 0 on come next"),
    "one too many": ([score_frame([*SCORES, {9: -1.0}], 0)], "scores of tokens 0 to 5"),
    "none": ([score_frame([], 0)], "scores of tokens 0 to 0"),
    "a token's is empty": ([score_frame([{}, *SCORES[1:]], 0)], "scores of 4 tokens that are not whole"),
    "of other tokens": ([score_frame(SCORES[::-1], 0)], "scores of another prompt: none of token 3 in its place"),
    "no numbers": ([score_frame([{3: float("nan")}, *SCORES[1:]], 0)], "no numbers"),
    "a number is missing": (
        [Frame("scores", {"first": 0}, {
            "counts": np.ones(4, np.int32), "ids": np.array(SCORED, np.int32), "logprobs": np.zeros(3)
        })],
        "not whole",
    ),
    "no counts": ([Frame("scores", {"first": 0})], "cannot be carried out"),
}  # fmt: skip


@pytest.mark.parametrize(("frames", "reason"), WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_scores_that_are_not_whole_are_refused(frames, reason):
    """T50: checksums and numbers are right."""
    hello, end = Frame("hello", dict(tokens=4, identity=IDENTITY)), Frame("end", {"cached_tokens": 0})
    in_parts = [score_frame(SCORES[:1], 0), score_frame(SCORES[1:], 1)]
    assert received([hello, *in_parts, end], 4, 4, SCORED)[0].prompt_logprobs == SCORES
    with pytest.raises(TransferError, match=reason):
        received([hello, *frames, end], 4, 4, SCORED)


def pages_at(**fields):
    count, heads = fields.pop("count", 1), fields.pop("heads", HEADS)
    arrays = {"k": np.zeros((count, heads, P, 5), np.float32), "v": np.zeros((count, heads, P, 5), np.float32)}
    if fields.get("first_head", 0) == 0:
        arrays["index_k"] = np.zeros((count, P, 6), np.float32)
    return Frame("pages", dict(stack=0, layer=0, first=0, first_head=0) | fields, arrays)


def test_places_at_the_edge_and_behind_it():
    """Of 3 pages, 2 layers, 3 heads and 1 stack each end is taken, and what is one behind is refused."""
    hello = Frame("hello", dict(tokens=11, identity=IDENTITY))
    for edge in (
        dict(), dict(layer=1), dict(first=2), dict(first=0, count=3), dict(first_head=2, heads=1), dict(heads=1),
    ):  # fmt: skip
        assert received([hello, pages_at(**edge)])[1] == ["hello", "pages"], edge
    for behind in (
        dict(layer=2), dict(layer=-1), dict(first=3), dict(first=2, count=2), dict(first=-1), dict(heads=4),
        dict(first_head=2, heads=2), dict(first_head=-1, heads=1), dict(count=0), dict(heads=0), dict(stack=1),
        dict(first_head=3, heads=0), dict(stack=-1),
    ):  # fmt: skip
        with pytest.raises(TransferError, match=r"this engine has (no such place|1)"):
            received([hello, pages_at(**behind)])
    for number, kind in enumerate(("pages", "hello")):
        receiver = PageReceiver(TRANSFER, 11, LAYOUT, P, IDENTITY)
        with pytest.raises(TransferError, match=f"sent '{kind}' as frame {number}: a transfer begins with hello"):
            for place, frame in enumerate([*[hello][:number], Frame(kind, hello.fields)]):
                receiver.take(encode(frame, TRANSFER, place))
    with pytest.raises(TransferError, match="the sender ended after frame 0, before all pages had come"):
        receiver = PageReceiver(TRANSFER, 11, LAYOUT, P, IDENTITY)
        receiver.take(encode(hello, TRANSFER, 0))
        receiver.pages()


def test_the_difference_between_two_engines_is_named():
    """That of the configuration before others, by its own name; every key counts, on either side."""
    own = {"config": {"width": 5, "depth": 2}, "weights": "aa"}
    check_identity(dict(own), own, "host:1")
    for found, line in (
        ({"config": {"width": 6, "depth": 2}, "weights": "bb"}, "its width is 6, this engine's 5"),
        ({"config": {"width": 5}, "weights": "aa"}, "its depth is None, this engine's 2"),
        (own | {"weights": "bb"}, "its weights is 'bb', this engine's 'aa'"),
        (own | {"mode": True}, "its mode is True, this engine's None"),
        ({"weights": "aa"}, "its config is None"),
        ([], "host:1 does not say of which model"),
    ):
        with pytest.raises(TransferError, match=line):
            check_identity(found, own, "host:1")
    with pytest.raises(ValueError, match="hold more than keys"):
        transfer_identity(Namespace(page_layout=[(1, 2)]))
    with pytest.raises(ValueError, match="hold more than keys"):
        transfer_identity(Namespace(page_layout={"a": (1, 2, 3)}))


def test_a_sum_of_weights_changes_with_every_bit_and_place():
    """Of arrays of each width, and of how many there are; keys of random numbers have no bits to sum."""
    leaves = [
        jnp.array([1, 0], jnp.int8), jnp.array([[0.5], [2.0]], jnp.bfloat16), jnp.array([3.0, 3.0]), jnp.array([True])
    ]  # fmt: skip
    changed = [leaves[0][::-1], leaves[1][::-1], leaves[2] + jnp.array([0.0, 3e-7]), jnp.array([False])]
    sums = [weights_sum(leaves), weights_sum([*leaves, jnp.zeros(1)])]
    sums += [weights_sum([*leaves[:i], leaf, *leaves[i + 1 :]]) for i, leaf in enumerate(changed)]
    assert len(set(sums)) == len(sums)
    assert weights_sum([*leaves, jax.random.key(0), "text"]) == sums[0] and len(sums[0]) == 16
    assert int(sums[0][:8], 16) == 2 + 2 + 2 + 1 and int(weights_sum([jnp.zeros((2, 999))])[:8], 16) == 1998
    with jax.enable_x64(True):  # numbers of 64 bits, of which each half counts
        wide = [np.array([2, 1], np.int64), np.array([1, 2]), np.array([2 + 2**32, 1]), np.array([2, 1 + 2**40])]
        assert len({weights_sum([jnp.asarray(each)]) for each in wide}) == 4


def test_a_sum_of_weights_changes_with_every_bit_of_every_one():
    """Modulo 2^32 the highest bit, a number's sign, counts only if its place is odd."""
    bits = np.random.default_rng(0).integers(0, 2**32, (3, 4), np.uint32)
    sum_of = lambda bits: weights_sum([jnp.ones(2, jnp.bfloat16), jnp.asarray(bits.view(np.float32))])
    before = sum_of(bits)
    for place in np.ndindex(3, 4):
        for bit in (0, 16, 31):
            flipped = bits.copy()
            flipped[place] ^= np.uint32(1 << bit)
            assert sum_of(flipped) != before, (place, bit)
