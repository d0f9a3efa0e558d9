"""What each known mistake looks like, quantity by quantity, and what is recomputed to prove it."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from m3jax.compare import pairs
from m3jax.compare.hints import are_float8, hint
from m3jax.compare.names import Meaning
from m3jax.compare.pairs import Pair, are_close
from m3jax.compare.quantities import quantity
from m3jax.compare.sides import Source, side

CONFIG = tiny.config("dMM", hidden_size=12, dense_intermediate_size=24)
LENGTHS = (27, 13)
T = sum(LENGTHS)
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])
DRAW = np.random.default_rng(5)
STREAM = DRAW.normal(size=(T, 12))
HEADS = DRAW.normal(size=(T, 8, 16))


def side_of(arrays, config=CONFIG, lengths=LENGTHS):
    ids = {"tokens": [np.zeros(sum(lengths), np.int32)], "lengths": [np.array(lengths)]}
    axes = {"blocks": "X K J", "block_scores": "X K M"}
    by_name = {name: Meaning((name,), axes[kind]) for name in arrays if (kind := name.split(".")[-1]) in axes}
    return side(Source("a test", {name: [x] for name, x in arrays.items()} | ids), config, None, by_name)


def said(name, expected, actual, config=CONFIG, lengths=LENGTHS, both=None, mine=None) -> str | None:
    """The hint for a quantity of two sides, which have `both` besides; the reference alone has `mine`."""
    sides = [side_of({name: x, **(both or {}), **more}, config, lengths) for x, more in
             ((expected, mine or {}), (actual, {}))]  # fmt: skip
    return hint(Pair(*sides, config), quantity(name))


def changed(x, index, value):
    x = x.copy()
    x[index] = value
    return x


def shifted(x, by):
    """Each token has what the token `by` before it has; what has none before it has other numbers."""
    out = x[::-1].copy()
    begin = 0
    for length in LENGTHS:
        part = x[begin : begin + length]
        out[begin:][max(by, 0) : length + min(by, 0)] = part[max(-by, 0) : length - max(by, 0)]
        begin += length
    return out


def turned(x, lengths=1.0):
    """Vectors of these lengths in other directions."""
    other = DRAW.permutation(x.reshape(-1)).reshape(x.shape)
    norm = lambda x: np.linalg.norm(x, axis=-1, keepdims=True)
    return other / norm(other) * norm(x) * lengths


FLOAT8 = STREAM.astype(ml_dtypes.float8_e4m3fn).astype(float)
SHARED = "all of it is {0} times the reference's, as if summed once more over {0} devices (T52)"
FACTORS = "every dim that RoPE leaves alone has a factor of its own: another weight of the norm, or w for 1 + w"
LENGTHS_AGREE = "every vector has its length and another direction: RoPE (pairs, theta, rotated width or positions)"
OTHER_FACTORS = np.concatenate([turned(HEADS)[..., :8] * 3, HEADS[..., 8:] * DRAW.uniform(0.5, 2, 8)], axis=-1)
NUMBERS = {
    "twice": ("ffn_out", STREAM, 2 * STREAM, SHARED.format(2)),
    "thrice": ("attention_out", STREAM, 3.0005 * STREAM, SHARED.format(3)),
    "no whole number": ("ffn_out", STREAM, 2.002 * STREAM, "all of it is 2.002 times the reference's"),
    "no sum of devices": ("input", STREAM, 2 * STREAM, "all of it is 2 times the reference's"),
    "half": ("ffn_out", STREAM, 0.5 * STREAM, "all of it is 0.5 times the reference's"),
    "minus": ("ffn_out", STREAM, -STREAM, "all of it is -1 times the reference's"),
    "hardly": ("ffn_out", STREAM, 1.0009 * STREAM, None),
    "nearly nothing": ("ffn_out", STREAM, 0.0009 * STREAM, None),
    "nothing to scale": ("ffn_out", np.zeros((T, 12)), STREAM, None),
    "NaN": ("ffn_out", changed(STREAM, 0, np.nan), changed(STREAM, (slice(0, 4), 3), np.nan), "3 numbers are NaN"),
    "zeros": ("ffn_out", changed(STREAM, 30, 0.0), changed(STREAM, [4, 8, 30], 0.0),
              f"0 at 2 of {T} tokens, the first at prompt 1, position 4"),
    "zeros of the second": ("ffn_out", STREAM, changed(STREAM, 29, 0.0), f"0 at 1 of {T} tokens, the first at prompt "
                            "2, position 2"),
    "one late": ("ffn_out", STREAM, shifted(STREAM, 1), "each token has what the one before it should have: off by "
                 "one"),
    "one early": ("ffn_out", STREAM, shifted(STREAM, -1), "each token has what the one after it should have: off by "
                  "one"),
    "two late": ("ffn_out", STREAM, shifted(STREAM, 2), None),
    "float8": ("ffn_out", STREAM, FLOAT8, "every number of it is one of float8_e4m3fn, times a power of two at most "
               "(T26)"),
    "float8 on both sides": ("ffn_out", FLOAT8, FLOAT8[::-1], None),
    "directions": ("q", HEADS, turned(HEADS), LENGTHS_AGREE),
    "lengths within 1%": ("k_proj", HEADS[:, :4], turned(HEADS[:, :4], 1.009), None),
    "directions, not quite": ("index_q", HEADS[:, :4], turned(HEADS[:, :4], 1.009), LENGTHS_AGREE),
    "lengths too": ("q", HEADS, turned(HEADS, 1.015), None),
    "a factor a dim": ("q", HEADS, OTHER_FACTORS, FACTORS),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_what_numbers_look_like(case):
    kind, expected, actual, sentence = NUMBERS[case]
    config = tiny.config("dMM", index_head_dim=16) if kind == "index_q" else CONFIG
    assert said(f"layers.1.{kind}", expected, actual, config) == sentence


def test_parts_that_are_taken_for_each_other():
    """Gate for up and k for v, either way, where both sides have the other one."""
    gate, up = DRAW.normal(size=(2, T, 24))
    for kind, other, x in (("gate", "up", up), ("up", "gate", gate)):
        right = {"gate": gate, "up": up}
        found = said(f"layers.0.{kind}", right[kind], x, both={f"layers.0.{other}": x})
        assert found == f"the reference's {other}: the parts of a fused projection are taken for each other"
    k, v = DRAW.normal(size=(2, T, 4, 16))
    for kind, other, own, x in (("k", "v", k, v), ("v", "k", v, k)):
        found = said(f"layers.1.{kind}", own, x, both={f"layers.1.{other}": x})
        assert found == f"the reference's {other}: the parts of a fused projection are taken for each other"
    assert said("layers.1.v", v, k) is None


def unit(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)


@pytest.mark.parametrize("name", ["layers.1.attention_norm", "layers.1.ffn_norm", "sum", "final_norm"])
def test_the_weight_of_a_norm(name):
    """Where the reference has what is normed: of the last norm the last layer's output, of the second also a sum."""
    weight = 0.3 * DRAW.normal(size=12)
    mine = {
        "layers.1.attention_norm": {"layers.1.input": STREAM}, "layers.1.ffn_norm": {"layers.1.ffn_input": STREAM},
        "sum": {"layers.1.input": STREAM - 0.25, "layers.1.attention_out": np.full((T, 12), 0.25)},
        "final_norm": {"layers.2.output": STREAM, "layers.1.output": STREAM[::-1]},
    }[name]  # fmt: skip
    name = "layers.1.ffn_norm" if name == "sum" else name
    right = unit(STREAM) * (1 + weight)
    twice, plain = unit(STREAM) * (2 + weight), unit(STREAM) * weight
    assert said(name, right, twice, mine=mine) == "1 is added to the norm's weight twice, 1 + (1 + w) (T47)"
    assert said(name, right, plain, mine=mine) == "the norm multiplies with w in the place of 1 + w (T47)"
    assert said(name, right, twice) is None and said(name, right, unit(STREAM) * (3 + weight), mine=mine) is None


def test_a_matrix_is_solved_for_where_there_are_tokens_enough():
    """Eight more than it has inputs; numbers that are none on either side say nothing, and stop nothing."""
    gate, up = DRAW.normal(size=(2, T, 24))
    down, alpha, limit = DRAW.normal(size=(24, 12)), CONFIG.swiglu_alpha, CONFIG.swiglu_limit
    act = lambda gate, up, one=1.0: (np.clip(up, -limit, limit) + one) * np.minimum(gate, limit) / (
        1 + np.exp(-alpha * np.minimum(gate, limit))
    )  # fmt: skip
    wanted = "SwiGLU with up in the place of up + 1 (T42)"
    for count, sentence in ((32, wanted), (31, None)):
        g, u = gate[:count], up[:count]
        parts = {"layers.0.gate": g, "layers.0.up": u}
        found = said("layers.0.ffn_out", act(g, u) @ down, act(g, u, 0.0) @ down, lengths=(count,), mine=parts)
        assert found == sentence, count
    parts = {"layers.0.gate": gate, "layers.0.up": up}
    right, wrong = act(gate, up) @ down, act(gate, up, 0.0) @ down
    assert said("layers.0.ffn_out", right, wrong, mine=parts) == wanted
    assert said("layers.0.ffn_out", right, wrong, mine={"layers.0.gate": gate}) is None
    # What no matrix explains is a ten-thousandth at most; tokens more than inputs leave room for it.
    x, rest = act(gate, up), DRAW.normal(size=right.shape)
    rest -= x @ np.linalg.lstsq(x, rest, rcond=None)[0]
    rest *= np.linalg.norm(right) / np.linalg.norm(rest)
    for share, found in ((0.9e-4, wanted), (1.1e-4, None)):
        assert said("layers.0.ffn_out", right + share * rest, wrong, mine=parts) == found
    for value in (np.nan, np.inf):
        assert said("layers.0.ffn_out", changed(right, (3, 5), value), wrong, mine=parts) is None
        broken = parts | {"layers.0.up": changed(up, (3, 5), np.nan)}
        assert said("layers.0.ffn_out", right, wrong, mine=broken) is None


# Selections, scores, attention and taps

BLOCKS = np.sort(DRAW.permuted(np.tile(np.arange(6), (T, 4, 1)), axis=-1)[..., :3], axis=-1)  # [X K J]


def grouped(x, step):
    """Each token has the selection of the first one of its group of a step."""
    return x[np.arange(T) - POSITIONS % step]


@pytest.mark.parametrize(
    ("actual", "both", "sentence"),
    [
        (np.broadcast_to(BLOCKS[:, :1], BLOCKS.shape).copy(), None, "every KV head has the same selection (T1)"),
        (BLOCKS[::-1], {"layers.1.blocks": BLOCKS[::-1]}, "the selection of layer 1 (T25)"),
        (BLOCKS[::-1], {"layers.3.blocks": BLOCKS[::-1]}, "the selection of layer 3 (T25)"),
        (BLOCKS[::-1], {"layers.0.blocks": BLOCKS[::-1]}, None),
        *[(grouped(BLOCKS, n), None, f"every {n} tokens share the selection of the first of them (T19)")
          for n in (2, 3, 16)],
        (grouped(BLOCKS, 17), None, None),
        (np.concatenate([part.reshape(4, -1, 3).swapaxes(0, 1) for part in (BLOCKS[:27], BLOCKS[27:])]), None,
         "the axes of heads and tokens are taken for each other (T7)"),
        (BLOCKS.swapaxes(0, 1).reshape(BLOCKS.shape), None,
         "the axes of heads and tokens are taken for each other (T7)"),
    ],
)  # fmt: skip
def test_what_a_selection_looks_like(actual, both, sentence):
    """A buffer whose axes are taken for each other is turned back, of one prompt or of all."""
    assert said("layers.2.blocks", BLOCKS, actual, both=both) == sentence


def scores_of():
    scores = DRAW.normal(size=(T, 4, 4))
    return np.where(np.arange(4) <= (POSITIONS // 8)[:, None, None], scores, -np.inf)


def test_what_block_scores_look_like():
    """Blocks without index keys, by their first and last; scores that differ in queries' own blocks alone."""
    right = scores_of()
    name, seen = "layers.1.block_scores", lambda x: np.where(np.isneginf(right), -np.inf, x)
    none = lambda *blocks: seen(np.where(np.isin(np.arange(4), blocks), 0.0, right))
    for blocks, words in (((1,), "block 1"), ((0, 1, 2), "blocks 0 to 2"), ((0, 2), "blocks 0, 2")):
        sentence = f"the score is 0 for every query in {words}: no index keys are there (T16)"
        assert said(name, right, none(*blocks)) == sentence
    is_own = np.arange(4) == (POSITIONS // 8)[:, None, None]
    behind = seen(np.where(is_own, right + 0.5, right))
    sentence = "only queries' own blocks score otherwise: tokens behind the query speak in them (T2)"
    assert said(name, right, behind) == sentence
    rounded = seen(right * (1 + 9e-4))  # what rounding makes of the others is no difference
    assert said(name, right, np.where(is_own, behind, rounded)) == sentence
    assert said(name, right, seen(right * (1 + 2e-3))) != sentence
    zero = changed(right, (20, 1, 0), 0.0)  # of which a share is nothing: a millionth is
    for near, found in ((0.9e-6, sentence), (1.1e-6, None)):
        assert said(name, zero, changed(np.where(is_own, behind, zero), (20, 1, 0), near)) == found
    assert said(name, right, changed(behind, (20, 1, 0), 9.0)) is None


def test_tokens_that_end_a_block_agree_where_the_mask_is_missing():
    right = DRAW.normal(size=(T, 8, 16))
    is_last = (POSITIONS + 1) % CONFIG.index_block_size == 0
    off = np.where(is_last[:, None, None], right, right + 0.1)
    sentence = "no mask behind a row's last token (T10): tokens that end a block agree, others do not"
    assert said("layers.1.attention", right, off) == sentence
    assert said("layers.1.attention", right, np.where(is_last[:, None, None], right * (1 + 9e-4), off)) == sentence
    assert said("layers.1.attention", right, np.where(is_last[:, None, None], right * (1 + 2e-3), off)) is None
    assert said("layers.1.attention", right, off, config=None, lengths=LENGTHS) is None


def test_taps_are_named_by_the_layers_that_they_are_of():
    streams = {"embedding": DRAW.normal(size=(T, 12))}
    streams |= {f"layers.{layer}.output": DRAW.normal(size=(T, 12)) for layer in range(3)}
    of = lambda *numbers: np.stack([[*streams.values()][number] for number in numbers], axis=1)  # [X C D]
    found = said("taps", of(0, 2, 3), of(1, 2, 2), mine=streams)
    assert found == "the streams after [1, 2, 2] layers, the reference's those after [0, 2, 3]"
    assert said("taps", of(0, 2, 3), changed(of(0, 2, 3), (slice(None), 1), 9.0), mine=streams) is None


def test_four_significant_bits():
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    assert are_float8(numbers) and are_float8(numbers * 2.0**-40) and not are_float8(np.zeros(3))
    for wrong in (17.0, 1 + 1 / 16, 449.0):
        assert not are_float8(np.append(numbers, wrong))
    assert are_float8(np.append(numbers, [np.inf, 15.0, 18.0]))


@given(st.floats(1e-4, 0.5), st.floats(0.5, 2.0))
def test_closeness_is_a_share_of_the_norm(share, times):
    x = np.array([3.0, 4.0])
    assert are_close(x, x + np.array([0.0, 5.0 * share * times]), share) == (times <= 1 + 1e-12) or times == 1
    assert not are_close(x, np.array([3.0, np.inf]), share) and not are_close(x, x[:1], share)
    assert not are_close(np.array([3.0, np.inf]), x, share) and not are_close(np.array([3.0, np.nan]), x, share)


# What is recomputed, with numpy in the place of a compiled definition


def dots(q, k):
    """Scores of blocks of 8: the largest product of a query and a key of the block that it sees."""
    q, k = np.asarray(q)[0], np.asarray(k)[0]  # [T K I], [T I]
    scores = np.full((q.shape[1], len(q), -(-len(k) // 8)), -np.inf)  # [K T M]
    for head, t, block in np.ndindex(scores.shape):
        seen = k[8 * block : min(8 * block + 8, t + 1)]
        scores[head, t, block] = max((q[t, head] @ key for key in seen), default=-np.inf)
    return scores


def test_scores_are_recomputed_prompt_by_prompt(monkeypatch, unchecked):
    """Of the reference first, stored or from its index queries and keys; of a side that lacks tokens there are none."""
    monkeypatch.setattr(pairs, "contiguous_index", lambda k, size: (np.asarray(k, np.float32), size))
    seen = []

    def walk_scores(q, index, positions, lengths, score):
        seen.append((np.asarray(positions)[0].tolist(), np.asarray(lengths).tolist(), score, index[1]))
        return [dots(q, index[0])]

    monkeypatch.setattr(pairs, "walk_scores", walk_scores)
    q, k = DRAW.normal(size=(T, 4, 20)).astype(np.float32), DRAW.normal(size=(T, 20)).astype(np.float32)
    parts = {"layers.1.index_q": q, "layers.1.index_k": k}
    expected = np.full((T, 4, 4), -np.inf)
    for begin, end in ((0, 27), (27, T)):
        found = dots(q[None, begin:end], k[None, begin:end])
        expected[begin:end, :, : found.shape[-1]] = found.swapaxes(0, 1)
    with_parts, other = side_of(parts), side_of({"layers.1.q": HEADS})
    for pair in (Pair(with_parts, other, CONFIG), Pair(other, with_parts, CONFIG)):
        np.testing.assert_array_equal(pair.block_scores(1), expected)
        assert pair.block_scores(2) is None
    score = CONFIG.index_score_type
    assert seen[:2] == [([*range(27)], [27], score, 8), ([*range(13)], [13], score, 8)]
    stored = scores_of()
    pair = Pair(side_of({"layers.1.block_scores": stored}), with_parts, CONFIG)
    np.testing.assert_array_equal(pair.block_scores(1), stored)
    rounded = pair.scores_of(pair.b, 1, in_float8=True)
    by_hand = dots(q[None, :27], k[None, :27].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).swapaxes(0, 1)
    np.testing.assert_array_equal(rounded[:27], by_hand)
    assert pair.scores_of(pair.a, 1) is None and Pair(with_parts, other, None).scores_of(with_parts, 1) is None
    places = np.stack([np.zeros(T, int), np.arange(T) + 1], axis=1)
    assert pair.scores_of(replace(with_parts, places=places), 1) is None  # its prompt does not begin at 0


def test_attention_of_a_long_prompt_is_not_recomputed(monkeypatch, unchecked):
    """All of a side is left out then; the first of its two prompts has 27 tokens."""
    q, k, v = HEADS.astype(np.float32), HEADS[:, :4].astype(np.float32), HEADS[:, 4:].astype(np.float32)
    whole = side_of({"layers.1.q": q, "layers.1.k": k, "layers.1.v": v})
    pair = Pair(whole, whole, CONFIG)
    for most, is_computed in ((27, True), (26, False)):
        monkeypatch.setattr(pairs, "_MOST_TOKENS", most)
        found = pair.attention_of(whole, 1, None)
        assert (found is not None and found.shape == q.shape) == is_computed
