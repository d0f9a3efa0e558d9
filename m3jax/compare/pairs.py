"""Two sides' arrays at the tokens that both have, and scores and attention recomputed from them."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from m3jax.compare.quantities import Quantity, quantity
from m3jax.compare.sides import Side, Value
from m3jax.config import M3Config
from m3jax.msa import contiguous_index, walk_scores
from m3jax.spec.msa import dense_attention, sparse_attention

Tensor = Shaped[np.ndarray, "..."]
# The longest prompt whose attention is recomputed: the definition holds all its scores at once.
_MOST_TOKENS = 2048


class Pair:
    """The two sides of a comparison, token by token.

    Attributes:
      a: the reference.
      b: the side in question.
      config: of the model; None where it is not known.
      index: for each token that both have, its indices among a's and among b's tokens [X 2].
      places: the (prompt, position) of each of these tokens [X 2].
    """

    def __init__(self, a: Side, b: Side, config: M3Config | None):
        """Find the tokens that both sides have; raise ValueError if there is none, or if their ids differ."""
        self.a, self.b, self.config = a, b, config
        of_b = {tuple(place): i for i, place in enumerate(b.places.tolist())}
        shared = [(i, of_b[key]) for i, place in enumerate(a.places.tolist()) if (key := tuple(place)) in of_b]
        if not shared or (len(shared) < max(len(a.places), len(b.places)) and not (a.has_some or b.has_some)):
            counts = [f"{len(side.places)} tokens of {len(set(side.places[:, 0]))} prompts" for side in (a, b)]
            raise ValueError(
                f"A has {counts[0]}, B {counts[1]}; a dump with some of the tokens alone says which by positions, "
                "[B T] or [X]"
            )
        self.index = np.array(shared)
        self.places = a.places[self.index[:, 0]]
        if a.tokens is not None and b.tokens is not None:
            ids_of_a, ids_of_b = a.tokens[self.index[:, 0]], b.tokens[self.index[:, 1]]
            if (wrong := np.flatnonzero(ids_of_a != ids_of_b)).size:
                first, which = wrong[0], self.where(wrong[0])
                raise ValueError(f"other tokens: at {which} A has {ids_of_a[first]} and B has {ids_of_b[first]}")

    def where(self, token: int | np.integer) -> str:
        """Return a token's prompt, counted from 1, and position in words."""
        prompt, position = self.places[token].tolist()
        return f"prompt {prompt + 1}, position {position}"

    def has(self, name: str) -> bool:
        """True if both sides have the quantity of this name."""
        return name in self.a.values and name in self.b.values

    def arrays(self, name: str) -> tuple[Tensor, Tensor, Int[np.ndarray, " Y"]]:
        """Return a quantity of both sides, [Y ...] each, and the index of each of these tokens among the pair's.

        Raises:
          ValueError: the two have other shapes.
        """
        which = [self._rows(side.values[name], column) for side, column in ((self.a, 0), (self.b, 1))]
        has_both = (which[0] >= 0) & (which[1] >= 0)
        expected, actual = (
            side.values[name].array[rows[has_both]] for side, rows in zip((self.a, self.b), which, strict=True)
        )
        wanted = quantity(name)
        if wanted.axes[-1] in ("M", "J"):
            width = max(expected.shape[-1], actual.shape[-1])
            filler = -1 if wanted.axes[-1] == "J" else -np.inf
            pad = lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])], constant_values=filler)
            expected, actual = pad(expected), pad(actual)
        if expected.shape != actual.shape:
            shapes = f"{list(expected.shape)} in A and {list(actual.shape)} in B"
            raise ValueError(f"{name} [{' '.join(wanted.axes)}] cannot be aligned: {shapes}")
        tokens = np.flatnonzero(has_both)
        if wanted.kind == "block_scores" and self.config is not None:
            # Engines may leave garbage in the scores of blocks that a query does not see.
            own_block = self.places[tokens, 1] // self.config.index_block_size
            is_seen = np.arange(expected.shape[-1]) <= own_block[:, None, None]
            expected, actual = np.where(is_seen, expected, -np.inf), np.where(is_seen, actual, -np.inf)
        return expected, actual, tokens

    def _rows(self, value: Value, column: int) -> Int[np.ndarray, " X"]:
        """Return for each token of the pair its row in a value's array; -1 where the value lacks the token."""
        row_of = np.full(int(self.index[:, column].max()) + 1, -1)
        is_known = value.tokens < len(row_of)
        row_of[value.tokens[is_known]] = np.arange(len(value.tokens))[is_known]
        return row_of[self.index[:, column]]

    def block_scores(self, layer: int) -> Float[np.ndarray, "X K M"] | None:
        """Return block scores, stored or recomputed, of the reference or else the other side; None if neither has any.

        Args:
          layer: counted from 0.
        """
        for side, column in ((self.a, 0), (self.b, 1)):
            if (value := side.values.get(f"layers.{layer}.block_scores")) is not None:
                return value.array[self._rows(value, column)]
            if (scores := self.scores_of(side, layer)) is not None:
                return scores[self.index[:, column]]
        return None

    def scores_of(self, side: Side, layer: int, in_float8: bool = False) -> Float[np.ndarray, "X K M"] | None:
        """Return block scores recomputed from a side's index queries and keys; None where some of those are missing.

        Args:
          side: one of the pair's.
          layer: counted from 0.
          in_float8: True to round the keys to float8_e4m3fn first.
        """
        names = [f"layers.{layer}.{tensor}" for tensor in ("index_q", "index_k")]
        if self.config is None or not all(name in side.values for name in names) or not is_whole(side):
            return None
        score, size = self.config.index_score_type, self.config.index_block_size
        blocks = -(-int(side.places[:, 1].max() + 1) // size)
        all_scores = np.full((len(side.places), self.config.num_key_value_heads, blocks), -np.inf)
        for tokens in of_prompts(side):
            q, k = (jnp.asarray(side.values[name].array[tokens], jnp.float32)[None] for name in names)
            k = k.astype(jnp.float8_e4m3fn).astype(jnp.float32) if in_float8 else k
            positions, lengths = jnp.arange(len(tokens))[None], jnp.array([len(tokens)])
            scores = walk_scores(q, contiguous_index(k, size), positions, lengths, score)[0]
            all_scores[tokens, :, : scores.shape[-1]] = np.moveaxis(np.asarray(scores), 0, 1)  # [K T M] -> [T K M]
        return all_scores

    def attention_of(self, side: Side, layer: int, blocks: Tensor | None) -> Tensor | None:
        """Return attention recomputed from a side's own q, k and v; None if they are missing or a prompt is too long.

        Args:
          side: one of the pair's.
          layer: counted from 0.
          blocks: chosen blocks [X K J]; None for all of them.
        """
        names = [f"layers.{layer}.{letter}" for letter in "qkv"]
        if self.config is None or not all(name in side.values for name in names) or not is_whole(side):
            return None
        outputs = []
        for tokens in of_prompts(side):
            if len(tokens) > _MOST_TOKENS:
                return None
            q, k, v = (jnp.asarray(side.values[name].array[tokens], jnp.float32)[None] for name in names)
            where = jnp.arange(len(tokens))[None], jnp.array([len(tokens)])
            if blocks is None:
                outputs.append(dense_attention(q, k, v, *where)[0])
            else:
                chosen = jnp.asarray(np.moveaxis(blocks[tokens], 0, 1), jnp.int32)[None]  # [T K J] -> [1 K T J]
                outputs.append(sparse_attention(q, k, v, chosen, *where, block_size=self.config.index_block_size)[0])
        return np.concatenate([np.asarray(one) for one in outputs])


def of_prompts(side: Side) -> list[Int[np.ndarray, " T"]]:
    """Return for each prompt the indices of its tokens among the side's, in the order that the side stores them."""
    prompts = side.places[:, 0]
    return [np.flatnonzero(prompts == prompt) for prompt in np.unique(prompts)]


def is_whole(side: Side) -> bool:
    """True if a side has the tokens of each prompt in order from position 0 on, without a gap."""
    return all((side.places[tokens, 1] == np.arange(len(tokens))).all() for tokens in of_prompts(side))


def are_close(expected: Tensor, actual: Tensor, share: float = 1e-3) -> bool:
    """True if arrays differ by roundings alone: the norm of the difference is at most `share` of the expected norm.

    Arrays with an infinity or a NaN are not close to any.
    """
    if expected.shape != actual.shape or not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        return False
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    return bool(np.linalg.norm(expected - actual) <= share * np.linalg.norm(expected))


def at(compared: Quantity, index: Sequence[int | np.integer]) -> str:
    """Return in words the place of a number or a selection within its token."""
    words = {"N": "head", "K": "KV head", "M": "block", "E": "expert", "A": "choice", "C": "tap", "V": "token id"}
    return "".join(f", {words.get(letter, 'dim')} {i}" for letter, i in zip(compared.axes[1:], index[1:], strict=False))
