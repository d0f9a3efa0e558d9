"""Sampling of a token: the knobs, and the draw from given uniform numbers."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Float64

from m3jax.decoding.sampling import (
    WORD_TOKENS,
    DrawContext,
    Sampling,
    SamplingParams,
    count_uses,
    filtered_logits,
    row_keys,
    sample,
)
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, on_host

# The knobs that are a number a row, those of the first case alone and all of them.
FILTERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NUMBERS = (*FILTERS, "presence_penalty", "frequency_penalty")
# What the knobs before the temperature read: ids padded with -1, bad words at the front; a mask as bits.
EDIT_AXES = {
    "prompt": "B S", "new": "B Y", "bias_ids": "B E", "biases": "B E", "bad_words": "B N L", "stop_ids": "B I",
    "min_tokens": "B", "mask": "B W",
}  # fmt: skip
AXES = EDIT_AXES | {name: "B" for name in (*NUMBERS, "seed", "positions", "tokens")} | {
    "logits": "B V", "seen": "B V", "uniform": "B V", "probabilities": "B V", "kept": "B V",
}  # fmt: skip
TOLERANCES = {"kept": "bits", "tokens": "bits", "probabilities": "probabilities"}

_SETTINGS = (
    Sampling(),
    Sampling.greedy(),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=0.8, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.5),
    Sampling.greedy(repetition_penalty=2.0),
)


_EDITS = (
    Sampling(logit_bias={3: 4.0, 17: -100.0, 38: 2.5}),
    Sampling(presence_penalty=1.5),
    Sampling.greedy(),
    Sampling(frequency_penalty=0.75, temperature=0.8),
    Sampling(bad_words=((4,), (1, 2, 12), (9, 2, 6), (2, 7))),
    Sampling(repetition_penalty=1.4, presence_penalty=-1.0, frequency_penalty=-0.5, top_k=8),
    Sampling(logit_bias={6: 3.0, 2: 1.0}, repetition_penalty=1.3, frequency_penalty=1.0, bad_words=((2,),), top_p=0.8),
    Sampling(temperature=0.0, logit_bias={30: 30.0}, frequency_penalty=2.0),
)


def cases(large: bool) -> Iterator[Case]:
    """Yield a case with single knobs, all of them at once, and ties at the edge of top-k and for the best token.

    A second one has what acts before the temperature: a mask, a minimum of tokens, bad words, bias and penalties.
    """
    if large:
        return
    rng, vocab = np.random.default_rng(101), 32
    settings = SamplingParams.stack([*_SETTINGS, *_SETTINGS])
    num_rows = 2 * len(_SETTINGS)
    logits = (rng.normal(size=(num_rows, vocab)) * 2).astype(np.float32)
    logits[num_rows // 2 :] = np.round(logits[num_rows // 2 :])  # whole numbers: many are equal
    logits[num_rows // 2 + 1, [7, 20]] = 9.0  # two best ones
    seed, positions = np.arange(5, 5 + num_rows, dtype=np.uint32), rng.integers(1, 5000, num_rows).astype(np.int32)
    inputs = {name: np.asarray(getattr(settings, name)) for name in FILTERS}
    inputs |= {"logits": logits, "seen": rng.random((num_rows, vocab)) < 0.3, "seed": seed, "positions": positions,
               "uniform": uniforms(row_keys(seed, positions), (vocab,))}  # fmt: skip
    what = "in order: repetition penalty, temperature, top-k, top-p, min-p; then the token of the largest log p + g, " \
           "g = -log(-log u) of its uniform number u; of equal ones the lowest id"  # fmt: skip
    yield Case("knobs", what, {}, 101, inputs)

    rng, vocab, settings = np.random.default_rng(102), 40, [*_EDITS, *_EDITS]
    inputs = edit_inputs(rng, settings, vocab)
    seed, positions = np.arange(60, 76, dtype=np.uint32), rng.integers(1, 5000, 16).astype(np.int32)
    inputs |= {"logits": (rng.normal(size=(16, vocab)) * 2).astype(np.float32), "seed": seed, "positions": positions,
               "uniform": uniforms(row_keys(seed, positions), (vocab,))}  # fmt: skip
    what = "in order: mask, stop_ids while there are fewer new tokens than min_tokens, bad_words, biases, repetition " \
           "penalty of prompt and new, frequency and presence penalty of new alone; then as in knobs"  # fmt: skip
    yield Case("edits", what, {}, 102, inputs)


def edit_inputs(rng: np.random.Generator, settings: Sequence[Sampling], vocab: int) -> dict[str, np.ndarray]:
    """Return the settings of B rows and what they read, with texts in which many knobs bite.

    The first half of the rows has fewer new tokens than its minimum; every third row has a mask.
    """
    rows, half = len(settings), len(settings) // 2
    params = SamplingParams.stack(settings)
    names = (*NUMBERS, "bias_ids", "biases", "bad_words")
    prompt, new = rng.integers(0, 8, (rows, 6)).astype(np.int32), rng.integers(0, 8, (rows, 5)).astype(np.int32)
    for row in range(rows):
        prompt[row, 3 + row % 4 :] = -1
        new[row, row % 6 :] = -1
    new[::4] = [5, 9, 2, -1, -1]  # so that 6 ends a bad word
    is_masked = np.arange(rows) % 3 == 2
    mask = rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32) | 1 << 12
    mask[~is_masked] = 2**32 - 1
    return {name: np.asarray(getattr(params, name)) for name in names} | {
        "prompt": prompt,
        "new": new,
        "stop_ids": np.where(np.arange(rows)[:, None] % 2, [[5, 12]], [[7, -1]]).astype(np.int32),
        "min_tokens": np.where(np.arange(rows) < half, 9, 0).astype(np.int32),
        "mask": mask,
    }


def uniforms(keys: jax.Array, shape: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
    """Return the uniform numbers in (0, 1) from which `jax.random.categorical` draws, for each key."""
    tiny = float(np.finfo(np.float32).tiny)
    draw = lambda key: jax.random.uniform(key, shape, jnp.float32, minval=tiny, maxval=1.0)
    return np.asarray(jax.vmap(draw)(keys))


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Sample in float64 numpy, a row at a time, since the package's own functions always compute in float32."""
    x = {name: np.asarray(value) for name, value in inputs.items()}
    kept, probabilities, tokens = [], [], []
    for b in range(len(x["logits"])):
        p = distribution(x, b, x["logits"][b])
        with np.errstate(divide="ignore"):
            noisy = np.log(p) - np.log(-np.log(x["uniform"][b].astype(np.float64)))
        kept.append(p > 0)
        probabilities.append(p)
        tokens.append(np.argmax(noisy))
    return {"kept": np.stack(kept), "probabilities": np.stack(probabilities), "tokens": np.array(tokens, np.int32)}


def edited(
    x: Arrays, b: int, logits: Float32[np.ndarray, " V"], later: Sequence[int] = ()
) -> Float64[np.ndarray, " V"]:
    """Return row b's logits after all that acts before the temperature, in float64; `later` are tokens after `new`."""
    off = {"presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0}
    number = lambda name: float(x[name][b]) if name in x else off[name]
    ids = lambda name: [int(i) for i in x[name][b] if i >= 0] if name in x else []
    prompt, new = ids("prompt") if "prompt" in x else np.flatnonzero(x["seen"][b]).tolist(), [*ids("new"), *later]
    text, y, penalty = [*prompt, *new], logits.astype(np.float64), number("repetition_penalty")
    biases = dict(zip(x["bias_ids"][b].tolist(), x["biases"][b].tolist(), strict=True)) if "biases" in x else {}
    banned = set(ids("stop_ids")) if len(new) < number("min_tokens") else set()
    for word in ([int(i) for i in word if i >= 0] for word in (x["bad_words"][b] if "bad_words" in x else ())):
        if word and text[len(text) - len(word) + 1 :] == word[:-1]:
            banned.add(word[-1])
    for i in range(len(y)):
        is_allowed = "mask" not in x or x["mask"][b, i // 32] >> (i % 32) & 1
        y[i] = y[i] + biases.get(i, 0.0) if is_allowed and i not in banned else -np.inf
        if i in text:
            y[i] = y[i] / penalty if y[i] > 0 else y[i] * penalty
        y[i] -= number("frequency_penalty") * new.count(i) + number("presence_penalty") * (i in new)
    return y


def distribution(
    x: Arrays, b: int, logits: Float32[np.ndarray, " V"], later: Sequence[int] = ()
) -> Float64[np.ndarray, " V"]:
    """Return row b's probabilities [V] after every knob, in float64; a greedy row has one token.

    Args:
      x: the case's inputs.
      b: the row.
      logits: of it.
      later: tokens that its text has after those of the inputs.
    """
    y, ids, knobs = edited(x, b, logits, later), np.arange(len(logits)), {name: x[name][b] for name in FILTERS}
    if knobs["temperature"] == 0:
        return (ids == np.argmax(y)).astype(np.float64)
    y = (y - y.max()) / float(knobs["temperature"])
    order = np.lexsort((ids, -y))  # logit descending, id ascending
    if knobs["top_k"]:
        order = order[: knobs["top_k"]]
    mass = np.exp(y[order]) / np.exp(y[order]).sum()
    if knobs["top_p"] < 1:
        order = order[np.cumsum(mass) - mass < float(knobs["top_p"])]
    order = order[np.exp(y[order]) >= float(knobs["min_p"])]
    p = np.zeros(len(y))
    p[order] = np.exp(y[order])
    return p / p.sum()


def params_and_context(inputs: Arrays, vocab: int) -> tuple[SamplingParams, DrawContext]:
    """Return the settings and the texts of a case as the engine keeps them; what a case does not have is off."""
    x = {name: np.asarray(value) for name, value in inputs.items()}
    off = SamplingParams.stack([Sampling()] * len(x["seed"]))
    given = {name: x[name] for name in (*NUMBERS, "bias_ids", "biases", "bad_words", "seed") if name in x}
    params = jax.tree.map(jnp.asarray, SamplingParams(**vars(off) | given))
    if "seen" in x:
        return params, DrawContext(uses=jnp.asarray(x["seen"], jnp.int32))
    ids = lambda row: row[row >= 0].tolist()
    texts = [(ids(prompt), ids(new)) for prompt, new in zip(x["prompt"], x["new"], strict=True)]
    last = [[*[-1] * WORD_TOKENS, *prompt, *new][1 - WORD_TOKENS :] for prompt, new in texts]
    return params, DrawContext(
        uses=jnp.asarray(np.stack([count_uses(*text, vocab) for text in texts])),
        recent=jnp.asarray(last, jnp.int32),
        counts=jnp.asarray([len(new) for _, new in texts], jnp.int32),
        min_tokens=jnp.asarray(x["min_tokens"]),
        stop_ids=jnp.asarray(x["stop_ids"]),
        mask=jnp.asarray(x["mask"]),
    )


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield a run of the engine's functions, which draw from a row's seed and position."""
    logits = jnp.asarray(inputs["logits"])
    params, context = params_and_context(inputs, logits.shape[-1])
    keys = row_keys(inputs["seed"], inputs["positions"])

    @jax.jit
    def draw(logits, params, keys, context):
        filtered = filtered_logits(logits, params, context)
        outputs = {"kept": filtered > -jnp.inf, "probabilities": jax.nn.softmax(filtered)}
        return outputs | {"tokens": sample(logits, params, keys, context)}

    yield Run("the sampler", "float32", on_host(draw(logits, params, keys, context)))


GROUP = Group("sampling", cases, define, runs, AXES, TOLERANCES, on_host=True)
