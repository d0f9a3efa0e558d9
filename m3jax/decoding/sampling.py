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

from m3jax.messages import check_keywords, shown
from m3jax.platform import platform
from m3jax.ranges import MAX_ID, MAX_SEED, SAMPLING, check_integer, check_number

HostOrDevice = Array | np.ndarray
Number = float | int | np.number | HostOrDevice  # an array must have no axes

WORD_TOKENS = 8  # of a bad word, at most
USED = 2  # what a new token adds to its entry of `DrawContext.uses`
MASK_BITS = 32  # tokens of one word of a mask
MAX_TOP_LOGPROBS = 20
NO_DISTRIBUTION, NO_TOKEN = -1, -2  # in the place of a token that could not be drawn


Biases = Mapping[int, Number] | Sequence[Sequence[Number]]  # or pairs of a token id and a number
Words = Sequence[Sequence[int] | HostOrDevice]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which one row's tokens are drawn.

    The knobs act in this order, each on what the one before left: bad words, logit bias, repetition penalty, frequency
    penalty, presence penalty, temperature, top-k, top-p, min-p, then one draw. A guide's mask and `Params.min_tokens`
    rule tokens out before all of them. (vLLM puts min-p before top-k; the sets differ only where top-p is on as well.)

    Attributes:
      temperature: divides the logits; 0 is greedy, the largest logit and on a tie its lowest id.
      top_k: keep exactly this many tokens; None or 0 is off.
      top_p: keep the smallest set of tokens whose probabilities, renormalised after top-k, sum to at least this;
        the token that crosses the sum is in the set; None or 1 is off.
      min_p: keep tokens at least this times as probable as the most probable one; None or 0 is off.
      repetition_penalty: a token of the prompt or of the continuation has its positive logit divided by this and
        its negative one multiplied; None or 1 is off.
      presence_penalty: subtracted from the logit of each token that the continuation has, from -2 to 2; the prompt
        does not count; None or 0 is off.
      frequency_penalty: subtracted from a token's logit as often as the continuation has the token, from -2 to 2; the
        prompt does not count; None or 0 is off.
      logit_bias: a number from -100 to 100 that is added to a token's logit, by token id: a dict, or pairs. It is kept
        as pairs sorted by id; None or {} is off.
      bad_words: sequences of token ids that the text shall not have. The last token of one is ruled out where the text,
        prompt included, ends in all the others; a sequence of one token is ruled out everywhere. None or () is off.
      seed: with the token's position it decides the draw, so a row's tokens depend neither on the rows next to
        it nor on how the work is cut; rows of equal prompt and seed get equal tokens.

    A number may be Python's, numpy's or jax's; it is kept as Python's.

    Raises:
      ValueError: a knob outside its range.

    Source: transformers 5.23.0 `GenerationMixin._get_logits_processor` for the order and each knob's meaning;
    where logits tie at the edge of top-k or top-p, lower ids are kept. What comes before the repetition penalty, and
    the penalties after it, are in the order of vLLM's `Sampler`; bias and penalties have the meaning of OpenAI's API,
    bad words that of transformers (vLLM compares them with the continuation alone).
    """

    temperature: Number = 1.0
    top_k: Number | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    bad_words: Words | None = None
    seed: Number = 0

    def __post_init__(self):
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, HostOrDevice | np.generic) and np.ndim(value) == 0:
                object.__setattr__(self, name, value.item())  # so that equal settings are equal, and hashable
        for name, of_knob in SAMPLING.items():
            if (value := getattr(self, name)) is not None:
                check_number(name, value, *of_knob)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 0, MAX_ID)
        if self.temperature is None or self.seed is None:
            raise ValueError("temperature and seed need a number; temperature 0 is greedy")
        check_integer("seed", self.seed, 0, MAX_SEED)
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _as_words(self.bad_words))

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
    presence_penalty: Number | None
    frequency_penalty: Number | None
    logit_bias: Biases | None
    bad_words: Words | None
    seed: Number | Sequence[int] | None


# The knobs that shape the distribution; the seed only says which token of it is drawn.
KNOBS = tuple(f.name for f in fields(Sampling) if f.name != "seed")


def as_sampling(
    sampling: Sampling | None,
    knobs: Mapping[str, Any],
    *,
    called: Callable,
    defaults: Mapping[str, Any] | None = None,
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
    defaults: Mapping[str, Any] | None = None,
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


_MOST_BIAS = 100.0


def _as_biases(given: Biases | None) -> tuple[tuple[int, float], ...] | None:
    """Return a logit bias as pairs sorted by token id, None for none; ValueError for what is no bias."""
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise ValueError(f"logit_bias = {shown(given)}: give numbers by token id, as in {{1234: -5.0}}")
    biases = {}
    for token, bias in ((_as_python(token), _as_python(bias)) for token, bias in pairs):
        check_integer("a token id of logit_bias", token, 0, MAX_ID)
        check_number(f"logit_bias[{token}]", bias, -_MOST_BIAS, _MOST_BIAS, False)
        if token in biases:
            raise ValueError(f"logit_bias has token {token} twice: give each token one number")
        biases[token] = float(bias)
    return tuple(sorted(biases.items())) or None


def _as_words(given: Words | None) -> tuple[tuple[int, ...], ...] | None:
    """Return bad words as tuples of token ids, None for none; ValueError for what is no list of them."""
    if given is None:
        return None
    is_list = lambda value: isinstance(value, list | tuple | HostOrDevice)
    if not is_list(given) or not all(is_list(word) and len(word) for word in given):
        raise ValueError(f"bad_words = {shown(given)}: give sequences of token ids, as in ((12,), (7, 9))")
    words = tuple(tuple(_as_python(token) for token in word) for word in given)
    for token in (token for word in words for token in word):
        check_integer("a token id of bad_words", token, 0, MAX_ID)
    return tuple(dict.fromkeys(words)) or None


def _as_python(value: object) -> object:
    """Return a single number of numpy or jax as Python's, anything else as it is."""
    return value.item() if isinstance(value, HostOrDevice | np.generic) and np.ndim(value) == 0 else value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """`Sampling` of every row as arrays, so that new values compile nothing. `stack` makes them.

    Off is 0 for top_k, min_p and the presence and frequency penalties, 1 for top_p and repetition_penalty.

    Attributes:
      bias_ids: the tokens that have a bias, padded with -1.
      biases: what is added to the logit of each.
      bad_words: each word stands at the end of its slot, behind -1; a slot without a word has -1 alone.
    """

    temperature: Float32[HostOrDevice, "B"]
    top_k: Int32[HostOrDevice, "B"]
    top_p: Float32[HostOrDevice, "B"]
    min_p: Float32[HostOrDevice, "B"]
    repetition_penalty: Float32[HostOrDevice, "B"]
    presence_penalty: Float32[HostOrDevice, "B"]
    frequency_penalty: Float32[HostOrDevice, "B"]
    bias_ids: Int32[HostOrDevice, "B E"]
    biases: Float32[HostOrDevice, "B E"]
    bad_words: Int32[HostOrDevice, "B N L"]
    seed: UInt32[HostOrDevice, "B"]

    @classmethod
    def stack(
        cls, settings: Sequence[Sampling], num_biases: int | None = None, num_bad_words: int | None = None
    ) -> "SamplingParams":
        """Return host arrays (float32, int32, uint32) of the settings of B rows.

        Args:
          settings: one a row.
          num_biases: E, slots of a row for biased tokens; None is as many as some row needs.
          num_bad_words: N, slots of a row for bad words; None is as many as some row needs. A slot has `WORD_TOKENS`
            tokens.

        Raises:
          ValueError: a row needs more, or has a bad word of more tokens.
        """
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
        off["frequency_penalty"] = 0.0
        dtypes = {"top_k": np.int32, "seed": np.uint32}
        columns = {}
        for name in (f.name for f in fields(cls) if f.name in SamplingKnobs.__annotations__ and f.name != "bad_words"):
            values = [getattr(setting, name) for setting in settings]
            values = [off[name] if value is None else _in_float32_range(value) for value in values]
            columns[name] = np.asarray(values, dtypes.get(name, np.float32))
        num_biases = max(map(count_biases, settings), default=0) if num_biases is None else num_biases
        num_bad_words = max(map(count_bad_words, settings), default=0) if num_bad_words is None else num_bad_words
        bias_ids = np.full((len(settings), num_biases), -1, np.int32)
        biases = np.zeros((len(settings), num_biases), np.float32)
        bad_words = np.full((len(settings), num_bad_words, WORD_TOKENS), -1, np.int32)
        for row, setting in enumerate(settings):
            check_slots(setting, num_biases, num_bad_words)
            for slot, (token, bias) in enumerate(setting.logit_bias or ()):
                bias_ids[row, slot], biases[row, slot] = token, bias
            for slot, word in enumerate(setting.bad_words or ()):
                bad_words[row, slot, -len(word) :] = word
        return cls(**columns, bias_ids=bias_ids, biases=biases, bad_words=bad_words)


def count_biases(sampling: Sampling) -> int:
    """Return the number of tokens that have a bias."""
    return len(sampling.logit_bias or ())


def count_bad_words(sampling: Sampling) -> int:
    """Return the number of bad words."""
    return len(sampling.bad_words or ())


def check_slots(sampling: Sampling, num_biases: int, num_bad_words: int) -> None:
    """Raise ValueError for settings with more biases, or more or longer bad words, than there is room for.

    Raises:
      ValueError: the first that does not fit.
    """
    if count_biases(sampling) > num_biases:
        raise ValueError(f"logit_bias has {count_biases(sampling)} tokens: there is room for {num_biases} (max_biases)")
    if count_bad_words(sampling) > num_bad_words:
        raise ValueError(
            f"bad_words has {count_bad_words(sampling)} words: there is room for {num_bad_words} (max_bad_words)"
        )
    longest = max(map(len, sampling.bad_words or ()), default=0)
    if longest > WORD_TOKENS:
        raise ValueError(f"bad_words has a word of {longest} tokens: a word can have {WORD_TOKENS}")


def _in_float32_range(value: float | int) -> float | int:
    """Return 0, or the nearest number that float32 can divide by: XLA flushes subnormals to 0."""
    limits = np.finfo(np.float32)
    if value == 0:
        return value
    return math.copysign(1, value) * min(max(abs(value), float(limits.tiny)), float(limits.max))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrawContext:
    """The texts of B rows as the knobs before the temperature read them, for X rows of logits.

    What is None is left out.

    Attributes:
      is_edited: True where one of these knobs is on; the logits of the others stay as they are. None is everywhere.
      row: the text that each row of logits belongs to; None where X = B and they are in the same order.
      later: tokens of that text that all the rest does not know of yet, oldest first, padded with -1 at the end.
      uses: how often each token was used, as `count_uses` has it.
      recent: the last tokens of each text, oldest first; -1 where it has fewer.
      counts: new tokens of each text.
      min_tokens: no stop id is drawn before each text has so many new tokens.
      stop_ids: padded with -1.
      mask: a bit for each token, 1 where it is allowed: bit i % 32 of word i // 32.
    """

    is_edited: Bool[HostOrDevice, "X"] | None = None
    row: Int32[HostOrDevice, "X"] | None = None
    later: Int32[HostOrDevice, "X Y"] | None = None
    uses: Int32[HostOrDevice, "B V"] | None = None
    recent: Int32[HostOrDevice, "B R"] | None = None
    counts: Int32[HostOrDevice, "B"] | None = None
    min_tokens: Int32[HostOrDevice, "B"] | None = None
    stop_ids: Int32[HostOrDevice, "B I"] | None = None
    mask: UInt32[HostOrDevice, "B W"] | None = None


def count_uses(
    prompt: Sequence[int] | Int32[np.ndarray, " N"], new: Sequence[int] | Int32[np.ndarray, " X"], vocab: int
) -> Int32[np.ndarray, "V"]:
    """Return, for each token, twice the times that the continuation has it, and one more if the prompt has it.

    So one array serves the repetition penalty, which asks for tokens of both, and the penalties that count new ones.

    Args:
      prompt: token ids.
      new: token ids of the continuation so far.
      vocab: V.
    """
    uses = np.zeros(vocab, np.int32)
    uses[np.asarray(prompt, np.int64)] = 1
    np.add.at(uses, np.asarray(new, np.int64), USED)
    return uses


def edits_logits(params: SamplingParams) -> Bool[HostOrDevice, "B"]:
    """Return True for rows with a knob that acts before the temperature."""
    is_penalised = (params.repetition_penalty != 1) | (params.presence_penalty != 0) | (params.frequency_penalty != 0)
    return is_penalised | (params.bias_ids >= 0).any(axis=1) | (params.bad_words >= 0).any(axis=(1, 2))


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


def edited_logits(x: Float32[Array, "X V"], params: SamplingParams, context: DrawContext) -> Float32[Array, "X V"]:
    """Return logits after the mask, the minimum of new tokens, bad words, bias and penalties, in this order.

    Args:
      x: the model's.
      params: X rows.
      context: of these rows.
    """
    vocab, index = x.shape[1], jnp.arange(len(x))[:, None]
    of_row = lambda values: values if context.row is None else jnp.asarray(values)[context.row]
    later = jnp.zeros((len(x), 0), jnp.int32) if context.later is None else context.later  # [X Y]
    ban = lambda x, ids, is_banned: x.at[index, jnp.where(is_banned, ids, vocab)].set(-jnp.inf, mode="drop")
    if context.mask is not None:
        words = of_row(context.mask)  # [X W]
        bits = words[:, :, None] >> jnp.arange(MASK_BITS, dtype=jnp.uint32) & 1  # [X W 32]
        x = jnp.where(bits.reshape(len(x), -1)[:, :vocab] == 1, x, -jnp.inf)
    if context.stop_ids is not None:
        counts = of_row(context.counts) + jnp.sum(later >= 0, axis=1, dtype=jnp.int32)  # [X]
        stop_ids = of_row(context.stop_ids)  # [X I]
        x = ban(x, stop_ids, (stop_ids >= 0) & (counts < of_row(context.min_tokens))[:, None])
    if context.recent is not None:
        recent = pushed(of_row(context.recent), later, jnp.sum(later >= 0, axis=1, dtype=jnp.int32))  # [X R]
        beginning, end = params.bad_words[..., :-1], params.bad_words[..., -1]  # [X N L-1], [X N]
        is_begun = jnp.all((beginning < 0) | (beginning == recent[:, None]), axis=-1)  # [X N]
        x = ban(x, end, is_begun & (end >= 0))
    x = x.at[index, jnp.where(params.bias_ids >= 0, params.bias_ids, vocab)].add(params.biases, mode="drop")
    if context.uses is not None:
        uses = of_row(context.uses)  # [X V]
        uses = uses.at[index, jnp.where(later >= 0, later, vocab)].add(USED, mode="drop")
        penalty, times = params.repetition_penalty[:, None], uses // USED
        x = jnp.where(uses > 0, jnp.where(x > 0, x / penalty, x * penalty), x)
        x = x - params.frequency_penalty[:, None] * times - jnp.where(times > 0, params.presence_penalty[:, None], 0)
    return x


def pushed(recent: Int32[Array, "X R"], tokens: Int32[Array, "X Y"], counts: Int32[Array, "X"]) -> Int32[Array, "X R"]:
    """Return the last R tokens after the first `counts` of some tokens came behind the last R ones before."""
    columns = counts[:, None] + jnp.arange(recent.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(jnp.concatenate([recent, tokens], axis=1), columns, axis=1)


def filtered_logits(
    logits: Float[Array, "B V"],
    params: SamplingParams,
    context: DrawContext | None = None,
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> Float[Array, "B V"]:
    """Return the logits of the distribution that a token is drawn from.

    Args:
      logits: the model's, finite.
      params: B rows.
      context: the texts so far; None leaves out all knobs before the temperature.
      cond: `lax.cond`, which leaves out what no row asks for, or `compute_both`.

    Returns:
      float32, -inf where a token is out; shifted per row so that the largest is 0. A greedy row holds one 0. Where no
      token is left none is 0.
    """
    x = logits.astype(jnp.float32)  # [B V]
    if context is not None and context.is_edited is None:
        x = edited_logits(x, params, context)
    elif context is not None:
        x = cond(jnp.any(context.is_edited), edited_logits, lambda x, *_: x, x, params, context)
    largest = jnp.max(x, axis=-1, keepdims=True)
    x = x - largest  # NaN where every token is out
    best_id = jnp.argmax(x, axis=-1, keepdims=True)  # [B 1]
    is_greedy = params.temperature[:, None] == 0  # [B 1]
    x = x / jnp.where(is_greedy, jnp.float32(1), params.temperature[:, None])
    # Sorting a vocabulary is expensive: it is left out where no row asks for it.
    needs_sort = ((params.top_k > 0) | (params.top_p < 1)) & ~is_greedy[:, 0]
    x = cond(jnp.any(needs_sort), _keep_top, lambda x, *_: x, x, params.top_k, params.top_p)
    # The largest logit is 0, so log(min_p) is where a token is min_p times as probable as the best one.
    x = jnp.where(x >= jnp.log(params.min_p)[:, None], x, -jnp.inf)
    point_mass = jnp.where((_token_ids(x) == best_id) & (largest > -jnp.inf), jnp.float32(0), -jnp.inf)
    return jnp.where(is_greedy, point_mass, x)


def sample(
    logits: Float[Array, "B V"],
    params: SamplingParams,
    keys: Key[Array, "B"],
    context: DrawContext | None = None,
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> Int32[Array, "B"]:
    """Draw one token a row.

    Args:
      logits: the model's.
      params: B rows.
      keys: one a row, from `row_keys`.
      context: as in `filtered_logits`.
      cond: likewise.

    Returns:
      int32 token ids; `NO_DISTRIBUTION` (-1) for a row without a distribution (`has_distribution`), `NO_TOKEN` (-2) for
      one whose knobs and mask leave no token.
    """
    return sample_with_top(logits, params, keys, context, cond=cond)[0]


def sample_with_top(
    logits: Float[Array, "B V"],
    params: SamplingParams,
    keys: Key[Array, "B"],
    context: DrawContext | None = None,
    wants_top: Bool[HostOrDevice, "B"] | None = None,
    num_top: int = 0,
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> tuple[Int32[Array, "B"], Int32[Array, "B Z"], Float32[Array, "B Z"]]:
    """Draw one token a row, and return the largest of the model's own logits where some row asks for them.

    Args:
      logits: the model's.
      params, keys, context, cond: as in `sample`.
      wants_top: rows that ask for the largest logits; None for none.
      num_top: Z, how many of them.

    Returns:
      (tokens as from `sample`; ids of the Z largest logits, of equal ones the lower id first; these logits). Ids and
      logits are 0 where no row asks.
    """

    def draw_plainly(logits, params, keys, context):
        return best_token(logits), *top_if_asked(logits, None, num_top)

    def draw(logits, params, keys, context):
        tokens = draw_from(filtered_logits(logits, params, context, cond), params, keys, cond)
        return tokens, *top_if_asked(logits, wants_top, num_top, cond)

    # Rows are greedy most often, and then this is the only condition: on a GPU each one makes the host wait, or adds
    # nodes to a CUDA graph.
    all_plain = jnp.all(is_plain(params, context, wants_top))
    tokens, *top = cond(all_plain, draw_plainly, draw, logits, params, keys, context)
    return jnp.where(has_distribution(logits), tokens, jnp.int32(NO_DISTRIBUTION)), *top


def top_logits(logits: Float[Array, "B V"], num_top: int) -> tuple[Int32[Array, "B Z"], Float32[Array, "B Z"]]:
    """Return the ids of the Z largest logits, of equal ones the lower first, and these; -1 where V is smaller."""
    count = min(num_top, logits.shape[1])
    x = logits.astype(jnp.float32)
    if platform() == "gpu":
        # A sort, as in `_keep_top`: TopK may become a library's call, and one that a CUDA graph cannot hold would keep
        # the whole loop of steps out of it.
        negated, ids = lax.sort((-x, _token_ids(x)), dimension=1, is_stable=True, num_keys=1)
        values, ids = -negated[:, :count], ids[:, :count]
    else:
        values, ids = lax.top_k(x, count)
    pad = lambda x, value: jnp.pad(x, ((0, 0), (0, num_top - count)), constant_values=value)
    return pad(ids.astype(jnp.int32), -1), pad(values, -jnp.inf)


def top_if_asked(
    logits: Float[Array, "B V"],
    wants_top: Bool[HostOrDevice, "X"] | None,
    num_top: int,
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> tuple[Int32[Array, "B Z"], Float32[Array, "B Z"]]:
    """Return `top_logits` where some of X rows asks for them, else zeros; None is for no row."""
    none = jnp.zeros((len(logits), num_top), jnp.int32), jnp.zeros((len(logits), num_top), jnp.float32)
    if not num_top or wants_top is None:
        return none
    return cond(jnp.any(wants_top), partial(top_logits, num_top=num_top), lambda x: none, logits)


def is_plain(
    params: SamplingParams, context: DrawContext | None, wants_top: Bool[HostOrDevice, "B"] | None
) -> Bool[Array, "B"]:
    """Return True for rows that want the best token of the model's own logits alone: greedy, not edited, no others."""
    plain = params.temperature == 0
    if context is not None:
        plain &= jnp.bool_(False) if context.is_edited is None else ~context.is_edited
    return plain if wants_top is None else plain & ~wants_top


def best_token(logits: Float[Array, "*X V"]) -> Int32[Array, "*X"]:
    """Return the id of the largest logit, on a tie the lowest: what is drawn where all rows are greedy, none edited."""
    x = logits.astype(jnp.float32)
    return jnp.argmax(x - jnp.max(x, axis=-1, keepdims=True), axis=-1).astype(jnp.int32)


def sample_and_keep(
    logits: Float[Array, "B V"],
    params: SamplingParams,
    keys: Key[Array, "B"],
    context: DrawContext | None = None,
    wants_top: Bool[HostOrDevice, "B"] | None = None,
    num_top: int = 0,
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> tuple[Int32[Array, "B"], Int32[Array, "B Z"], Float32[Array, "B Z"], Float32[Array, "B V"]]:
    """Return what `sample_with_top` does of the same arguments, and the `filtered_logits` that were drawn from.

    They are computed once: computed anew in another program, a token at the edge of top-p could fall to the other side.
    """
    filtered = filtered_logits(logits, params, context, cond)
    tokens = jnp.where(has_distribution(logits), draw_from(filtered, params, keys, cond), jnp.int32(NO_DISTRIBUTION))
    return tokens, *top_if_asked(logits, wants_top, num_top, cond), filtered


def draw_from(
    filtered: Float32[Array, "B V"],
    params: SamplingParams,
    keys: Key[Array, "B"],
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> Int32[Array, "B"]:
    """Draw one token a row from `filtered_logits`; `NO_TOKEN` where nothing is left to draw from."""
    best = lambda keys, filtered: jnp.argmax(filtered, axis=-1)
    draw = lambda keys, filtered: jax.vmap(jax.random.categorical)(keys, filtered)
    tokens = cond(jnp.all(params.temperature == 0), best, draw, keys, filtered)
    return jnp.where(jnp.max(filtered, axis=-1) == 0, tokens.astype(jnp.int32), jnp.int32(NO_TOKEN))


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
