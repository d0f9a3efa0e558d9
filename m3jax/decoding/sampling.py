"""Sampling of the next token from a row of logits: every knob is data, one value a row."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, PyTree, UInt32

from m3jax.messages import check_keywords

HostOrDevice = Array | np.ndarray
Number = float | int | np.number | HostOrDevice  # an array must have no axes
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which one row's tokens are drawn.

    The knobs act in this order, each on what the one before left: repetition penalty, temperature, top-k, top-p,
    min-p, then one draw. (vLLM puts min-p before top-k; the sets differ only where top-p is on as well.)

    Attributes:
      temperature: divides the logits; 0 is greedy, the largest logit and on a tie its lowest id.
      top_k: keep exactly this many tokens; None or 0 is off.
      top_p: keep the smallest set of tokens whose probabilities, renormalised after top-k, sum to at least this;
        the token that crosses the sum is in the set; None or 1 is off.
      min_p: keep tokens at least this times as probable as the most probable one; None or 0 is off.
      repetition_penalty: a token of the prompt or of the continuation has its positive logit divided by this and
        its negative one multiplied; None or 1 is off.
      seed: with the token's position it decides the draw, so a row's tokens depend neither on the rows next to
        it nor on how the work is cut; rows of equal prompt and seed get equal tokens.

    A number may be Python's, numpy's or jax's; it is kept as Python's.

    Raises:
      ValueError: a knob outside its range.

    Source: transformers 5.23.0 `GenerationMixin._get_logits_processor` for the order and each knob's meaning;
    where logits tie at the edge of top-k or top-p, lower ids are kept.
    """

    temperature: Number = 1.0
    top_k: Number | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    seed: Number = 0

    def __post_init__(self):
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, HostOrDevice | np.generic) and np.ndim(value) == 0:
                object.__setattr__(self, name, value.item())  # so that equal settings are equal, and hashable
        for name, low, high, open_low in _RANGES:
            _check_number(name, getattr(self, name), low, high, open_low)
        _check_integer("top_k", self.top_k, 2**31 - 1)
        _check_integer("seed", self.seed, _MAX_SEED)
        if self.temperature is None or self.seed is None:
            raise ValueError("temperature and seed need a number; temperature 0 is greedy")

    @classmethod
    def greedy(cls, repetition_penalty: Number | None = None) -> "Sampling":
        """Return settings that take the most probable token each time."""
        return cls(temperature=0.0, repetition_penalty=repetition_penalty)


class SamplingKnobs(TypedDict, total=False):
    """The attributes of `Sampling` as keywords, for a function that takes `**knobs: Unpack[SamplingKnobs]`.

    One that is None counts as not given. Where a function takes several prompts, `seed` can be one a prompt.
    """

    temperature: Number | None
    top_k: Number | None
    top_p: Number | None
    min_p: Number | None
    repetition_penalty: Number | None
    seed: Number | Sequence[int] | None


# The knobs that shape the distribution; the seed only says which token of it is drawn.
KNOBS = tuple(f.name for f in fields(Sampling) if f.name != "seed")


def as_sampling(
    sampling: Sampling | None,
    knobs: Mapping[str, Any],
    *,
    called: Callable,
    defaults: Mapping[str, float | int] | None = None,
) -> Sampling:
    """Return the settings that a caller gave, as an object or as keywords.

    Args:
      sampling: the object, for which the defaults do not count; None if keywords are given instead.
      knobs: the keywords that the function did not name itself.
      called: that function, for an unknown keyword's message.
      defaults: keywords that hold where neither the object nor the keywords say anything.

    Raises:
      TypeError: an unknown keyword; it names the nearest one.
      ValueError: both were given, or a knob is outside its range.
    """
    check_keywords(knobs, SamplingKnobs.__annotations__, called)
    given = {name: value for name, value in knobs.items() if value is not None}
    if sampling is None:
        return Sampling(**{**(defaults or {}), **given})
    if given:
        raise ValueError(f"sampling and {', '.join(given)}: give the object or keywords, not both")
    return sampling


def as_samplings(
    count: int,
    sampling: Sampling | Sequence[Sampling] | None,
    knobs: Mapping[str, Any],
    *,
    called: Callable,
    defaults: Mapping[str, float | int] | None = None,
) -> list[Sampling]:
    """Return the settings of each of several prompts; the other arguments are those of `as_sampling`.

    Args:
      count: how many prompts.
      sampling: one for all, or one a prompt.
      knobs: for all; `seed` may be one a prompt.
      called: as in `as_sampling`.
      defaults: as in `as_sampling`.

    Raises:
      TypeError: an unknown keyword.
      ValueError: not one a prompt, or as `as_sampling`.
    """
    seed = knobs.get("seed")
    seeds = [seed] * count if np.ndim(seed) == 0 else list(seed)
    samplings = [sampling] * count if sampling is None or isinstance(sampling, Sampling) else list(sampling)
    if len(seeds) != count:
        raise ValueError(f"seed has {len(seeds)} entries for {count} prompts: give one number or one a prompt")
    if len(samplings) != count:
        raise ValueError(f"sampling has {len(samplings)} entries for {count} prompts: give one or one a prompt")
    return [
        as_sampling(of_prompt, {**knobs, "seed": of_seed}, called=called, defaults=defaults)
        for of_prompt, of_seed in zip(samplings, seeds, strict=True)
    ]


# name, lowest, highest, whether the lowest itself is refused
_RANGES = (
    ("temperature", 0.0, math.inf, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, math.inf, True),
)


def _check_number(name: str, value: object, low: float, high: float, open_low: bool) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        upper = "finite" if high == math.inf else f"at most {high:g}"
        raise ValueError(f"{name} = {value!r}: must be {'above' if open_low else 'at least'} {low:g} and {upper}")


def _check_integer(name: str, value: object, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise ValueError(f"{name} = {value!r}: must be an integer from 0 to {high}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """`Sampling` of every row as arrays, so that new values compile nothing. `stack` makes them.

    Off is 0 for top_k and min_p, 1 for top_p and repetition_penalty.
    """

    temperature: Float32[HostOrDevice, "B"]
    top_k: Int32[HostOrDevice, "B"]
    top_p: Float32[HostOrDevice, "B"]
    min_p: Float32[HostOrDevice, "B"]
    repetition_penalty: Float32[HostOrDevice, "B"]
    seed: UInt32[HostOrDevice, "B"]

    @classmethod
    def stack(cls, settings: Sequence[Sampling]) -> "SamplingParams":
        """Return host arrays (float32, int32, uint32) of the settings of B rows."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        dtypes = {"top_k": np.int32, "seed": np.uint32}
        columns = {}
        for name in (f.name for f in fields(cls)):
            values = [getattr(setting, name) for setting in settings]
            values = [off[name] if value is None else _in_float32_range(value) for value in values]
            columns[name] = np.asarray(values, dtypes.get(name, np.float32))
        return cls(**columns)


def _in_float32_range(value: float | int) -> float | int:
    """Return 0, or the nearest number that float32 can divide by: XLA flushes subnormals to 0."""
    limits = np.finfo(np.float32)
    return value if value == 0 else min(max(value, float(limits.tiny)), float(limits.max))


def row_keys(seed: UInt32[HostOrDevice, "B"], positions: Int32[HostOrDevice, "B"]) -> Key[Array, "B"]:
    """Return the random key of each row's next token: its seed, folded with the position that the token will have.

    Args:
      seed: uint32.
      positions: int32, 0-based positions in the row's whole sequence, prompt included.
    """

    def position_key(seed, position):
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)

    return jax.vmap(position_key)(seed, positions)


def compute_both(is_true: Bool[Array, ""], when_true: Callable, when_false: Callable, *operands) -> PyTree[Array]:
    """Return the result of one of two functions, as `lax.cond` does, but compute both.

    On a GPU a condition outside of a CUDA graph makes the host wait for all that was launched before it.
    """
    return jax.tree.map(partial(jnp.where, is_true), when_true(*operands), when_false(*operands))


def filtered_logits(
    logits: Float[Array, "B V"],
    params: SamplingParams,
    seen: Bool[Array, "B V"] | None = None,
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> Float[Array, "B V"]:
    """Return the logits of the distribution that a token is drawn from.

    Args:
      logits: the model's, finite.
      params: B rows.
      seen: tokens of the prompt and the continuation; None leaves the repetition penalty out.
      cond: `lax.cond`, which leaves out what no row asks for, or `compute_both`.

    Returns:
      float32, -inf where a token is out; shifted per row so that the largest is 0. A greedy row holds one 0.
    """
    x = logits.astype(jnp.float32)  # [B V]
    if seen is not None:
        is_penalised = jnp.any(params.repetition_penalty != 1)
        x = cond(is_penalised, _penalise, lambda x, *_: x, x, seen, params.repetition_penalty)
    x = x - jnp.max(x, axis=-1, keepdims=True)
    best_id = jnp.argmax(x, axis=-1, keepdims=True)  # [B 1]
    is_greedy = params.temperature[:, None] == 0  # [B 1]
    x = x / jnp.where(is_greedy, jnp.float32(1), params.temperature[:, None])
    # Sorting a vocabulary is expensive: it is left out where no row asks for it.
    needs_sort = ((params.top_k > 0) | (params.top_p < 1)) & ~is_greedy[:, 0]
    x = cond(jnp.any(needs_sort), _keep_top, lambda x, *_: x, x, params.top_k, params.top_p)
    # The largest logit is 0, so log(min_p) is where a token is min_p times as probable as the best one.
    x = jnp.where(x >= jnp.log(params.min_p)[:, None], x, -jnp.inf)
    point_mass = jnp.where(_token_ids(x) == best_id, jnp.float32(0), -jnp.inf)
    return jnp.where(is_greedy, point_mass, x)


def sample(
    logits: Float[Array, "B V"],
    params: SamplingParams,
    keys: Key[Array, "B"],
    seen: Bool[Array, "B V"] | None = None,
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> Int32[Array, "B"]:
    """Draw one token a row.

    Args:
      logits: the model's.
      params: B rows.
      keys: one a row, from `row_keys`.
      seen: as in `filtered_logits`.
      cond: likewise.

    Returns:
      int32 token ids; -1 for a row without a distribution (`has_distribution`).
    """
    is_plain = jnp.all(params.temperature == 0)
    if seen is not None:
        is_plain &= jnp.all(params.repetition_penalty == 1)
    # Rows are greedy most often, and then this is the only condition: on a GPU each one makes the host wait, or adds
    # nodes to a CUDA graph.
    tokens = cond(is_plain, _best, partial(_draw, cond=cond), logits, params, keys, seen)
    return jnp.where(has_distribution(logits), tokens, jnp.int32(-1))


def _best(
    logits: Float[Array, "B V"], params: SamplingParams, keys: Key[Array, "B"], seen: Bool[Array, "B V"] | None
) -> Int32[Array, "B"]:
    """Return the id of the largest logit, on a tie the lowest: `_draw` for rows that are all greedy, none penalised."""
    x = logits.astype(jnp.float32)
    return jnp.argmax(x - jnp.max(x, axis=-1, keepdims=True), axis=-1).astype(jnp.int32)


def _draw(
    logits: Float[Array, "B V"],
    params: SamplingParams,
    keys: Key[Array, "B"],
    seen: Bool[Array, "B V"] | None,
    cond: Callable[..., PyTree[Array]],
) -> Int32[Array, "B"]:
    """Draw one token a row from `filtered_logits`; -1 where nothing is left to draw from."""
    filtered = filtered_logits(logits, params, seen, cond)
    best = lambda keys, filtered: jnp.argmax(filtered, axis=-1)
    draw = lambda keys, filtered: jax.vmap(jax.random.categorical)(keys, filtered)
    tokens = cond(jnp.all(params.temperature == 0), best, draw, keys, filtered)
    return jnp.where(jnp.max(filtered, axis=-1) == 0, tokens.astype(jnp.int32), jnp.int32(-1))


def has_distribution(logits: Float[Array, "*X V"]) -> Bool[Array, "*X"]:
    """Return True for rows whose softmax is a distribution: no logit is NaN or +inf, and some logit is not -inf.

    A logit of -inf rules a token out. NaN is looked for by itself because a maximum does not show it: on a CPU XLA
    leaves NaN out of the maximum of an array of 4,096 numbers or more (jaxlib 0.10.2, whose reductions are YNNPACK's).
    """
    return ~jnp.any(jnp.isnan(logits), axis=-1) & jnp.isfinite(jnp.max(logits, axis=-1))


def log_normaliser(logits: Float[Array, "*X V"]) -> Float[Array, "*X"]:
    """Return the log of the sum of exponentials: a logit minus this is its token's log-probability."""
    return jax.nn.logsumexp(logits, axis=-1)


def logprob_of(
    tokens: Int32[Array, "*X"], logits: Float[Array, "*X V"], log_total: Float[Array, "*X"] | None = None
) -> Float[Array, "*X"]:
    """Return the log-probability of each token under logits, before any knob; for a token < 0, that of token 0.

    Args:
      tokens: ids.
      logits: the model's.
      log_total: their `log_normaliser`, where it is known.
    """
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return chosen - (log_normaliser(logits) if log_total is None else log_total)


def _token_ids(x: Float[Array, "B V"]) -> Int32[Array, "B V"]:
    """Return the ids 0 to V - 1 in every row."""
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _penalise(
    x: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[HostOrDevice, "B"]
) -> Float[Array, "B V"]:
    """Apply the repetition penalty: the logits of seen tokens become less probable."""
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)


def _keep_top(
    x: Float[Array, "B V"], top_k: Int32[HostOrDevice, "B"], top_p: Float[HostOrDevice, "B"]
) -> Float[Array, "B V"]:
    """Apply top-k, then top-p: both keep a prefix of the tokens sorted by logit descending, id ascending."""
    ids = rank = _token_ids(x)  # [B V]: the columns of x are ids, those of what is sorted are ranks
    negated, sorted_ids = lax.sort((-x, ids), dimension=1, is_stable=True, num_keys=1)  # [B V]
    k = jnp.where(top_k > 0, top_k, x.shape[1])[:, None]
    top_logits = jnp.where(rank < k, -negated, -jnp.inf)
    mass = jnp.cumsum(jax.nn.softmax(top_logits, axis=-1), axis=-1)  # of each token and those before it: [B V]
    mass_before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    is_kept = (rank < k) & ((mass_before < top_p[:, None]) | (top_p[:, None] >= 1))
    # Back from ranks to ids: what is kept is what comes no later than the last kept token.
    last_rank = jnp.sum(is_kept, axis=-1, keepdims=True, dtype=jnp.int32) - 1  # [B 1]
    edge_logit = -jnp.take_along_axis(negated, last_rank, axis=1)  # [B 1]
    edge_id = jnp.take_along_axis(sorted_ids, last_rank, axis=1)  # [B 1]
    return jnp.where((x > edge_logit) | ((x == edge_logit) & (ids <= edge_id)), x, -jnp.inf)
