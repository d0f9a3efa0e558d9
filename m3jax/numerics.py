"""What every schedule shares: one dot product, one softmax, one merge."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_FEW_ROWS = 16


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that sums are kept in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """`jnp.einsum` at highest precision with the result left in the accumulator's dtype.

    On accelerators "highest" keeps float32 products from being rounded to tf32 or bfloat16.
    """
    dtype = accumulator(jnp.result_type(*operands))
    return jnp.einsum(spec, *operands, precision="highest", preferred_element_type=dtype)


def dot_scores(q: Float[Array, "*X R H"], k: Float[Array, "*X C H"]) -> Float[Array, "*X R C"]:
    """Inner products of rows and columns; with few rows the columns go first, which XLA's CPU kernels prefer."""
    if q.shape[-2] > _FEW_ROWS:
        return einsum("...rh,...ch->...rc", q, k)
    return einsum("...ch,...rh->...cr", k, q).swapaxes(-1, -2)


class Softmax(NamedTuple):
    """A softmax average under way: sums of exponentials relative to the highest score so far."""

    values: Float[Array, "*X R H"]
    total: Float[Array, "*X R 1"]
    top: Float[Array, "*X R 1"]

    @classmethod
    def empty(cls, shape: tuple[int, ...], width: int, dtype: jnp.dtype) -> "Softmax":
        """Nothing seen yet, for rows of `shape`."""
        zeros = jnp.zeros((*shape, 1), dtype)
        return cls(jnp.zeros((*shape, width), dtype), zeros, jnp.full_like(zeros, -jnp.inf))

    def fold(
        self,
        q: Float[Array, "*X R H"],
        k: Float[Array, "*X C H"],
        v: Float[Array, "*X C H"],
        visible: Bool[Array, "*Y #R C"],
    ) -> "Softmax":
        """Take in more columns."""
        scores = dot_scores(q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(visible, scores, -jnp.inf)
        # The result does not depend on `top`, so no gradient goes through it.
        top = jnp.maximum(self.top, jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        shift = jnp.where(jnp.isneginf(top), 0.0, top)
        p = jnp.exp(scores - shift)
        old = jnp.exp(self.top - shift)
        # The probabilities are rounded to the values' dtype before the product, their sum is not (docs/numerics.md).
        values = self.values * old + einsum("...rc,...ch->...rh", p.astype(v.dtype), v)
        return Softmax(values, self.total * old + jnp.sum(p, axis=-1, keepdims=True), top)

    def finish(self) -> tuple[Float[Array, "*X R H"], Float[Array, "*X R"]]:
        """(out, lse): normalised outputs, and the natural log of the sum of exponentials; (0, -inf) if nothing seen."""
        seen = self.total != 0.0  # true for NaN too, which must not pass for an empty row
        safe = jnp.where(seen, self.total, 1.0)
        lse = jnp.where(seen, self.top + jnp.log(safe), -jnp.inf)
        return jnp.where(seen, self.values / safe, 0.0), lse[..., 0]


def attend(
    q: Float[Array, "*X R H"],
    k: Float[Array, "*X C H"],
    v: Float[Array, "*X C H"],
    visible: Bool[Array, "*Y #R C"],
) -> tuple[Float[Array, "*X R H"], Float[Array, "*X R"]]:
    """Softmax attention of rows over columns, where a row sees only its visible columns.

    Args:
      q: query rows.
      k: key columns; anything finite or not where no row sees them.
      v: value columns; finite wherever they are invisible to some row.
      visible: which row sees which column; broadcasts against the scores.

    Returns:
      (out, lse) in the accumulator's dtype: normalised outputs, and the natural log of the sum of exponentials.
      A row that sees nothing is (0, -inf).
    """
    return Softmax.empty(q.shape[:-1], v.shape[-1], accumulator(q.dtype)).fold(q, k, v, visible).finish()


def merge(
    part: Callable[[Int[Array, ""]], Float[Array, "*X H"]], lses: Float[Array, "J *X"]
) -> tuple[Float[Array, "*X H"], Float[Array, "*X"]]:
    """Attention over a union of disjoint key sets from attention over each (paper, section 4: the combine step).

    Args:
      part: reads the normalised output of part j. Parts are read one after the other, never all at once.
      lses: their log-sum-exps; -inf marks a part that saw nothing, whose weight is 0 whatever its output holds.

    Returns:
      (out, lse) over the union; (0, -inf) where no part saw anything.
    """
    top = jax.lax.stop_gradient(jnp.max(lses, axis=0))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - top)
    total = jnp.sum(weights, axis=0)
    seen = total != 0.0
    safe = jnp.where(seen, total, 1.0)

    def add(out, xs):
        j, weight = xs
        unseen = (weight == 0.0)[..., None]
        # 0 x NaN would be NaN (T38, T40).
        return out + jnp.where(unseen, 0.0, part(j)) * (weight / safe)[..., None], None

    empty = jnp.zeros(jax.eval_shape(part, jnp.int32(0)).shape, lses.dtype)
    out, _ = jax.lax.scan(add, empty, (jnp.arange(len(lses), dtype=jnp.int32), weights))
    return out, jnp.where(seen, top + jnp.log(safe), -jnp.inf)
