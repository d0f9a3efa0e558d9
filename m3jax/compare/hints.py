"""Guesses at the mistake behind a difference: known mistakes of engines, each tried on the numbers themselves."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from jaxtyping import Int, Shaped

from m3jax.compare.pairs import Pair, are_close
from m3jax.compare.quantities import Quantity
from m3jax.mxfp8 import BLOCK
from m3jax.vectors.compare import other_sets

Tensor = Shaped[np.ndarray, "..."]
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
_MOST_STEP = 16  # the most tokens of one decode step
_MOST_INPUTS = 2048  # of a matrix that is solved for, which takes seconds at this size
_SUMS_OF_DEVICES = ("attention_out", "ffn_out", "logits")  # what devices with parts of a matrix have parts of


def hint(pair: Pair, differing: Quantity) -> str | None:
    """Return the first known mistake that explains a quantity's difference, in one sentence; None if none does.

    Args:
      pair: the two sides.
      differing: a quantity of both that differs.
    """
    expected, actual, tokens = pair.arrays(differing.name)
    if differing.kind == "blocks":
        guesses = _of_blocks(pair, differing, expected, actual)
    elif differing.kind == "expert_ids":
        guesses = _of_sets(expected, actual, "experts")
    else:
        guesses = _of_numbers(pair, differing, expected, actual, tokens)
    return next(guesses, None)


def _of_sets(expected: Int[np.ndarray, "X ... J"], actual: Int[np.ndarray, "X ... J"], things: str) -> Iterator[str]:
    """Yield the mistakes that any selection, of blocks or of experts, can show."""
    ordered = np.sort(actual, axis=-1)
    if repeated := int(np.any((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0), axis=-1).sum()):
        yield f"{repeated} selections have an id twice (T4)"
    valid, wanted = (actual >= 0).sum(-1), (expected >= 0).sum(-1)
    if (valid > wanted).any():
        yield f"{(valid > wanted).sum()} selections have more {things} than the reference's (T3)"
    if (valid < wanted).any():
        yield f"{(valid < wanted).sum()} selections have fewer {things} than the reference's (T23)"


def _of_blocks(
    pair: Pair, differing: Quantity, expected: Int[np.ndarray, "X K J"], actual: Int[np.ndarray, "X K J"]
) -> Iterator[str]:
    """Yield the mistakes that a selection of blocks can show."""
    if any(not other_sets(expected, turned).any() for turned in misread(actual, pair.places[:, 0])):
        yield "the axes of heads and tokens are taken for each other (T7)"
    for layer in (differing.layer - 1, differing.layer + 1):
        name = f"layers.{layer}.blocks"
        if pair.has(name) and not other_sets(pair.arrays(name)[0], actual).any():
            yield f"the selection of layer {layer} (T25)"
    is_shared = actual.shape[1] > 1 and not other_sets(actual, np.broadcast_to(actual[:, :1], actual.shape)).any()
    if is_shared and other_sets(expected, np.broadcast_to(expected[:, :1], expected.shape)).any():
        yield "every KV head has the same selection (T1)"
    for step in range(_MOST_STEP, 1, -1):
        first = np.arange(len(actual)) - pair.places[:, 1] % step  # the first token of each token's group
        if (
            (first >= 0).all()
            and not other_sets(actual, actual[first]).any()
            and other_sets(expected, expected[first]).any()
        ):
            yield f"every {step} tokens share the selection of the first of them (T19)"
    yield from _of_sets(expected, actual, "blocks")


def misread(blocks: Int[np.ndarray, "X K J"], prompts: Int[np.ndarray, " X"]) -> list[Int[np.ndarray, "X K J"]]:
    """Return the selections that a reader gets who takes a buffer's token axis for its head axis, either way (T7).

    Args:
      blocks: as they were chosen.
      prompts: of each token. A buffer holds one prompt, or all of them.
    """
    ends = np.flatnonzero(np.diff(prompts)) + 1
    parts = {len(cuts): np.split(blocks, cuts) for cuts in (ends, ends[:0])}

    def as_if_by_head(part: Int[np.ndarray, "T K J"]) -> Int[np.ndarray, "T K J"]:
        tokens, heads, slots = part.shape
        return np.ascontiguousarray(part).reshape(heads, tokens, slots).swapaxes(0, 1)

    def as_if_by_token(part: Int[np.ndarray, "T K J"]) -> Int[np.ndarray, "T K J"]:
        return np.ascontiguousarray(part.swapaxes(0, 1)).reshape(part.shape)

    return [
        np.concatenate([read(x) for x in some]) for some in parts.values() for read in (as_if_by_head, as_if_by_token)
    ]


def _of_numbers(
    pair: Pair, differing: Quantity, expected: Tensor, actual: Tensor, tokens: Int[np.ndarray, " X"]
) -> Iterator[str]:
    """Yield the mistakes that numbers can show: those of one kind of quantity first, then those of any."""
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    if differing.kind == "attention":
        yield from _of_attention(pair, differing, expected, actual, tokens)
    if differing.kind == "block_scores":
        yield from _of_scores(pair, differing, expected, actual, tokens)
    if differing.kind == "taps":
        yield from _of_taps(pair, actual, tokens)
    yield from _of_norms(pair, differing, expected, actual, tokens)
    yield from _of_products(pair, differing, expected, actual, tokens)
    if differing.kind in ("k", "v", "index_k"):
        yield from _of_float8(expected, actual)
    twin = {"gate": "up", "up": "gate", "k": "v", "v": "k"}.get(differing.kind)
    name = f"layers.{differing.layer}.{twin}"
    if pair.has(name) and are_close(pair.arrays(name)[0], actual):
        yield f"the reference's {twin}: the parts of a fused projection are taken for each other"
    if (wrong := np.isnan(actual) & ~np.isnan(expected)).any():
        yield f"{wrong.sum()} numbers are NaN"
    is_number = np.isfinite(expected) & np.isfinite(actual)
    x, y = expected[is_number], actual[is_number]
    scale = float(x @ y / (x @ x)) if (x @ x) > 0 else 1.0
    is_scaled = abs(scale) > 1e-3 and not are_close(x, y) and are_close(scale * x, y)
    if is_scaled and round(scale) >= 2 and abs(scale - round(scale)) < 1e-3 and differing.kind in _SUMS_OF_DEVICES:
        count = round(scale)
        yield f"all of it is {count} times the reference's, as if summed once more over {count} devices (T52)"
    if is_scaled:
        yield f"all of it is {scale:.4g} times the reference's"
    flat = actual.reshape(len(actual), -1)
    if (empty := np.flatnonzero(~flat.any(-1) & expected.reshape(len(expected), -1).any(-1))).size:
        yield f"0 at {len(empty)} of {len(actual)} tokens, the first at {pair.where(tokens[empty[0]])}"
    if differing.kind in ("q", "k", "index_q", "index_k"):
        if pair.config is not None and are_close(_turned_whole(pair, expected, tokens), actual):
            yield f"the whole head is turned, not {pair.config.rotary_dim} dims of it (T46)"
        lengths = np.linalg.norm(expected, axis=-1), np.linalg.norm(actual, axis=-1)
        if are_close(*lengths, share=1e-2):
            yield "every vector has its length and another direction: RoPE (pairs, theta, rotated width or positions)"
        # The dims that RoPE does not turn: there only the norm's weight can make a difference of a factor for each dim.
        rest = (x[..., 0 if pair.config is None else pair.config.rotary_dim :] for x in (expected, actual))
        x, y = (part.reshape(-1, part.shape[-1]) for part in rest)
        with np.errstate(invalid="ignore", divide="ignore"):
            factors = (x * y).sum(0) / (x * x).sum(0)
        if pair.config is not None and x.size and not are_close(x, y) and are_close(x * factors, y):
            yield "every dim that RoPE leaves alone has a factor of its own: another weight of the norm, or w for 1 + w"
    if are_float8(y) and not are_float8(x):
        yield "every number of it is one of float8_e4m3fn, times a power of two at most (T26)"
    same_prompt = pair.places[tokens[1:], 0] == pair.places[tokens[:-1], 0]
    if same_prompt.any():
        if are_close(expected[:-1][same_prompt], actual[1:][same_prompt]):
            yield "each token has what the one before it should have: off by one"
        if are_close(expected[1:][same_prompt], actual[:-1][same_prompt]):
            yield "each token has what the one after it should have: off by one"


def _turned_whole(pair: Pair, expected: Tensor, tokens: Int[np.ndarray, " X"]) -> Tensor:
    """Return heads [X ... H] turned back by the reference's rotation, and forth by one over all of their dims."""
    position = pair.places[tokens, 1].reshape(-1, *[1] * (expected.ndim - 1))

    def turned(x: Tensor, width: int, sign: int) -> Tensor:
        half = width // 2
        angle = sign * position * pair.config.rope_theta ** (-2 * np.arange(half) / width)
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate([*parts, x[..., 2 * half :]], axis=-1)

    return turned(turned(expected, pair.config.rotary_dim, -1), expected.shape[-1], 1)


def _of_norms(
    pair: Pair, differing: Quantity, expected: Tensor, actual: Tensor, tokens: Int[np.ndarray, " X"]
) -> Iterator[str]:
    """Yield the mistakes of a norm's weight, where the reference has what is normed: x / rms(x) is a weight of 1."""
    normed_from = {
        "attention_norm": "input", "ffn_norm": "ffn_input", "q_normed": "q_proj", "k_normed": "k_proj",
        "index_q_normed": "index_q_proj", "index_k_normed": "index_k_proj",
    }  # fmt: skip
    name = f"layers.{differing.layer}.{normed_from.get(differing.kind)}"
    x = _of_reference(pair, name, tokens)
    if x is None and differing.kind == "ffn_norm":
        parts = [_of_reference(pair, f"layers.{differing.layer}.{part}", tokens) for part in ("input", "attention_out")]
        x = None if parts[0] is None or parts[1] is None else parts[0] + parts[1]
    if differing.kind == "final_norm" and pair.config is not None:
        x = _of_reference(pair, f"layers.{pair.config.num_hidden_layers - 1}.output", tokens)
    if x is None or pair.config is None or x.shape != expected.shape:
        return
    one = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + pair.config.rms_norm_eps)
    if are_close(expected + one, actual):
        yield "1 is added to the norm's weight twice, 1 + (1 + w) (T47)"
    if are_close(expected - one, actual):
        yield "the norm multiplies with w in the place of 1 + w (T47)"


def _of_reference(pair: Pair, name: str, tokens: Int[np.ndarray, " X"]) -> Tensor | None:
    """Return a quantity of the reference at some of the pair's tokens, in float64; None where it lacks one of them."""
    value = pair.a.values.get(name)
    if value is None:
        return None
    row_of = {int(token): row for row, token in enumerate(value.tokens)}
    rows = [row_of.get(int(token), -1) for token in pair.index[tokens, 0]]
    return None if -1 in rows else value.array[rows].astype(np.float64)


def _of_products(
    pair: Pair, differing: Quantity, expected: Tensor, actual: Tensor, tokens: Int[np.ndarray, " X"]
) -> Iterator[str]:
    """Yield the mistakes in what a matrix is multiplied with.

    The matrix is not among the quantities. With more tokens than it has inputs the reference's own input and output
    determine it; then it is multiplied with each wrong input.
    """
    layer, out = differing.layer, expected.reshape(len(expected), -1)
    read = lambda kind: _of_reference(pair, f"layers.{layer}.{kind}", tokens)
    inputs: dict[str, Tensor] = {}
    x = None
    if differing.kind == "ffn_out" and pair.config is not None and pair.config.mlp_layer_types[layer] == "dense":
        gate, up = read("gate"), read("up")
        if gate is not None and up is not None:
            x = _swiglu(gate, up, pair.config.swiglu_alpha, pair.config.swiglu_limit, pair.config.swiglu_beta)
            inputs = _other_swiglus(pair, gate, up)
    source = {"gate": "ffn_norm", "up": "ffn_norm"}.get(differing.kind, "attention_norm")
    if differing.kind in ("q_proj", "k_proj", "v", "index_q_proj", "index_k_proj", "gate", "up"):
        x = read(source)
        if x is not None and x.shape[-1] % BLOCK == 0:
            lacks = "the activations are in MXFP8, and their scale lacks the 2^8 of E4M3's last binade (T43)"
            inputs = {"the activations are in MXFP8 (W8A8)": _in_mxfp8(x, 8), lacks: _in_mxfp8(x, 0)}
    if x is None or not inputs or not x.shape[-1] + 8 <= len(x) or x.shape[-1] > _MOST_INPUTS:
        return
    if not np.isfinite(x).all() or not np.isfinite(out).all():
        return
    matrix, _, rank, _ = np.linalg.lstsq(x, out, rcond=1e-9)
    if rank < x.shape[-1] or not are_close(x @ matrix, out, share=1e-4):
        return
    for mistake, wrong in inputs.items():
        guess = wrong @ matrix
        if not are_close(guess, out) and are_close(guess, actual.reshape(out.shape)):
            yield mistake


def _swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float, one: float = 1.0) -> Tensor:
    """Return (up + one) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):
        return (up + one) * gate / (1 + np.exp(-alpha * gate))


def _other_swiglus(pair: Pair, gate: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Return what wrong activations give, by the mistake (T42)."""
    alpha, limit = pair.config.swiglu_alpha, pair.config.swiglu_limit
    side_by_side, in_turn = np.concatenate([gate, up], axis=-1), np.stack([gate, up], axis=-1)
    halves = np.split(in_turn.reshape(len(gate), -1), 2, axis=-1)
    return {
        "SwiGLU without alpha, as SiLU (T42)": _swiglu(gate, up, 1.0, limit),
        "SwiGLU without its clamps (T42)": _swiglu(gate, up, alpha, np.inf),
        "SwiGLU with up in the place of up + 1 (T42)": _swiglu(gate, up, alpha, limit, one=0.0),
        "plain SiLU: no alpha, no clamps, up in the place of up + 1 (T42)": _swiglu(gate, up, 1.0, np.inf, one=0.0),
        "the gate is clamped on both sides, and not above alone (T42)":
            _swiglu(np.maximum(gate, -limit), up, alpha, limit),
        "gate and up are taken for each other (T42)": _swiglu(up, gate, alpha, limit),
        "the halves gate and up are read as if interleaved (T42)":
            _swiglu(side_by_side[:, ::2], side_by_side[:, 1::2], alpha, limit),
        "interleaved gate and up are read as halves (T42)": _swiglu(*halves, alpha, limit),
    }  # fmt: skip


def _in_mxfp8(x: Tensor, last_binade: int) -> Tensor:
    """Return activations [X D] rounded to MXFP8 whose scale is 2^(floor(log2 of the largest) - last_binade)."""
    blocks = x.reshape(len(x), -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - last_binade)
    codes = np.clip(blocks / scale, -_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(x.shape)


def _of_float8(expected: Tensor, actual: Tensor) -> Iterator[str]:
    """Yield the kinds of float8 that bytes of e4m3fn were read as (T44), under any power of two as their scale."""
    if not are_float8(actual):
        return
    kinds = {"e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "e5m2": ml_dtypes.float8_e5m2}
    for exponent in range(-12, 13):
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.clip(expected * 2.0**exponent, -_LARGEST, _LARGEST)
            codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            guesses = {name: codes.view(kind).astype(np.float64) / 2.0**exponent for name, kind in kinds.items()}
        for name, guess in guesses.items():
            # A zero's other sign is NaN in e4m3fnuz.
            same = np.isnan(guess) == np.isnan(actual)
            is_number = ~np.isnan(guess) & ~np.isnan(actual)
            if same.all() and (guess[is_number] == actual[is_number]).all() and is_number.any():
                yield f"bytes of float8_e4m3fn are read as {name} (T44)"
                return


def _of_scores(
    pair: Pair, differing: Quantity, expected: Tensor, actual: Tensor, tokens: Int[np.ndarray, " X"]
) -> Iterator[str]:
    """Yield the mistakes that explain block scores: missing or rounded index keys, or another mask."""
    with np.errstate(invalid="ignore"):
        is_other = (expected != actual) & ~(np.abs(expected - actual) <= 1e-3 * np.abs(expected) + 1e-6)
    is_seen = ~np.isneginf(expected)
    empty = [
        m for m in range(expected.shape[-1]) if is_seen[..., m].any() and not actual[..., m][is_seen[..., m]].any()
    ]
    if empty:
        yield f"the score is 0 for every query in {_listed(empty)}: no index keys are there (T16)"
    if pair.config is not None:
        own_block = pair.places[tokens, 1] // pair.config.index_block_size
        # A query sees a part of its own block alone, so only there can a missing mask let later tokens in.
        is_own = np.arange(expected.shape[-1]) == own_block[:, None, None]
        if is_other.any() and not (is_other & ~is_own).any():
            yield "only queries' own blocks score otherwise: tokens behind the query speak in them (T2)"
    scores = pair.scores_of(pair.b, differing.layer, in_float8=True)
    if scores is not None:
        mine = scores[pair.index[tokens, 1]][..., : expected.shape[-1]]
        if mine.shape == expected.shape and are_close(mine[is_seen], actual[is_seen]):
            yield "scores of index keys in float8_e4m3fn (T26)"


def _listed(blocks: list[int]) -> str:
    """Return blocks in words; consecutive ones are given by the first and the last."""
    if len(blocks) > 1 and blocks == [*range(blocks[0], blocks[-1] + 1)]:
        return f"blocks {blocks[0]} to {blocks[-1]}"
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"


def _of_attention(
    pair: Pair, differing: Quantity, expected: Tensor, actual: Tensor, tokens: Int[np.ndarray, " X"]
) -> Iterator[str]:
    """Yield the sets of keys that explain an attention output, each recomputed from the side's own q, k and v."""
    theirs = pair.index[tokens, 1]
    everything = pair.attention_of(pair.b, differing.layer, None)
    if everything is not None and not are_close(everything[theirs], expected) and are_close(everything[theirs], actual):
        yield "dense attention over all keys: no block was left out (T18)"
    blocks = pair.b.values.get(f"layers.{differing.layer}.blocks")
    for turned in [] if blocks is None else misread(blocks.array, pair.b.places[:, 0]):
        guess = pair.attention_of(pair.b, differing.layer, turned)
        if guess is not None and are_close(guess[theirs], actual):
            yield "attention over the chosen blocks with the axes of heads and tokens taken for each other (T7)"
    if pair.config is not None:
        error = np.linalg.norm((actual - expected).reshape(len(expected), -1), axis=-1)
        is_wrong = error > 1e-3 * np.linalg.norm(expected.reshape(len(expected), -1), axis=-1)
        # The last token of a block sees all of it, so a missing mask within the block makes no difference there.
        is_last = (pair.places[tokens, 1] + 1) % pair.config.index_block_size == 0
        if is_wrong.any() and is_last.any() and not is_wrong[is_last].any():
            yield "no mask behind a row's last token (T10): tokens that end a block agree, others do not"


def _of_taps(pair: Pair, actual: Tensor, tokens: Int[np.ndarray, " X"]) -> Iterator[str]:
    """Yield a sentence that names the layers whose outputs the taps are, where they are not the reference's."""
    streams = {0: pair.a.values.get("embedding")}
    layers = [int(name.split(".")[1]) for name in pair.a.values if name.endswith(".output")]
    streams |= {layer + 1: pair.a.values[f"layers.{layer}.output"] for layer in layers}
    rows = pair.index[tokens, 0]
    expected = pair.a.values["taps"].array[rows]
    names = []
    for taps in (expected, actual):
        near = lambda tap: [
            n for n, value in streams.items() if value is not None and are_close(value.array[rows], tap)
        ]
        names.append([min(near(taps[:, c]), default=None) for c in range(taps.shape[1])])
    if None not in names[0] + names[1] and names[0] != names[1]:
        yield f"the streams after {names[1]} layers, the reference's those after {names[0]}"


def are_float8(x: Tensor) -> bool:
    """True if every finite number has at most the four significant bits of float8_e4m3fn; exponents are not checked."""
    x = x[(x != 0) & np.isfinite(x)]
    if not x.size:
        return False
    fraction, _ = np.frexp(x)  # 4 significant bits: a fraction in [1/2, 1) is a multiple of 1/16
    return bool((fraction * 16 == np.rint(fraction * 16)).all())
