"""Sampling of a token: the knobs, and the draw from given uniform numbers."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Float64

from m3jax.decoding.sampling import KNOBS, Sampling, SamplingParams, filtered_logits, row_keys, sample
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, on_host

AXES = {name: "B" for name in (*KNOBS, "seed", "positions", "tokens")} | {
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


def cases(large: bool) -> Iterator[Case]:
    """Yield a case with single knobs, all of them at once, and ties at the edge of top-k and for the best token."""
    if large:
        return
    rng, vocab = np.random.default_rng(101), 32
    settings = SamplingParams.stack([*_SETTINGS, *_SETTINGS])
    num_rows = 2 * len(_SETTINGS)
    logits = (rng.normal(size=(num_rows, vocab)) * 2).astype(np.float32)
    logits[num_rows // 2 :] = np.round(logits[num_rows // 2 :])  # whole numbers: many are equal
    logits[num_rows // 2 + 1, [7, 20]] = 9.0  # two best ones
    seed, positions = np.arange(5, 5 + num_rows, dtype=np.uint32), rng.integers(1, 5000, num_rows).astype(np.int32)
    inputs = {name: np.asarray(getattr(settings, name)) for name in KNOBS}
    inputs |= {"logits": logits, "seen": rng.random((num_rows, vocab)) < 0.3, "seed": seed, "positions": positions,
               "uniform": uniforms(row_keys(seed, positions), (vocab,))}  # fmt: skip
    what = "in order: repetition penalty, temperature, top-k, top-p, min-p; then the token of the largest log p + g, " \
           "g = -log(-log u) of its uniform number u; of equal ones the lowest id"  # fmt: skip
    yield Case("knobs", what, {}, 101, inputs)


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
        knobs = {name: x[name][b] for name in KNOBS}
        p = distribution(x["logits"][b], x["seen"][b], knobs)
        with np.errstate(divide="ignore"):
            noisy = np.log(p) - np.log(-np.log(x["uniform"][b].astype(np.float64)))
        kept.append(p > 0)
        probabilities.append(p)
        tokens.append(np.argmax(noisy))
    return {"kept": np.stack(kept), "probabilities": np.stack(probabilities), "tokens": np.array(tokens, np.int32)}


def distribution(
    logits: Float32[np.ndarray, " V"], seen: Bool[np.ndarray, " V"], knobs: Mapping[str, np.generic]
) -> Float64[np.ndarray, " V"]:
    """Return probabilities [V] after every knob, in float64; a greedy row has one token."""
    x, ids = logits.astype(np.float64), np.arange(len(logits))
    penalty = float(knobs["repetition_penalty"])
    x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    if knobs["temperature"] == 0:
        return (ids == np.argmax(x)).astype(np.float64)
    x = (x - x.max()) / float(knobs["temperature"])
    order = np.lexsort((ids, -x))  # logit descending, id ascending
    if knobs["top_k"]:
        order = order[: knobs["top_k"]]
    mass = np.exp(x[order]) / np.exp(x[order]).sum()
    if knobs["top_p"] < 1:
        order = order[np.cumsum(mass) - mass < float(knobs["top_p"])]
    order = order[np.exp(x[order]) >= float(knobs["min_p"])]
    p = np.zeros(len(x))
    p[order] = np.exp(x[order])
    return p / p.sum()


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield a run of the engine's functions, which draw from a row's seed and position."""
    params = SamplingParams(**{name: jnp.asarray(inputs[name]) for name in (*KNOBS, "seed")})
    logits, seen = jnp.asarray(inputs["logits"]), jnp.asarray(inputs["seen"])
    keys = row_keys(inputs["seed"], inputs["positions"])
    filtered = filtered_logits(logits, params, seen)
    outputs = {"kept": filtered > -jnp.inf, "probabilities": jax.nn.softmax(filtered)}
    yield Run("the sampler", "float32", on_host(outputs | {"tokens": sample(logits, params, keys, seen)}))


GROUP = Group("sampling", cases, define, runs, AXES, TOLERANCES, on_host=True)
