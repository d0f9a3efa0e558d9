"""Sums, products and softmax at the reference's precision (docs/numerics.md), and THE merge of partial attention."""

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int

from m3jax.platform import platform

# The score of a key that a query does not see, and the log-sum-exp of a query that sees none.
UNSEEN = -jnp.inf
# Bytes of all parts of outputs up to which every device gets them all and merges them (`merge_over_devices`). Not
# measured: at 300 GB/s that many take 14 us, and one message over NVLink some 10, however short it is.
GATHERED_BYTES = 1 << 22
_FEW_ROWS = 16
_TPU_ROWS = 8


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that sums are kept in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """`jnp.einsum` at highest precision with the result left in the accumulator's dtype.

    On accelerators "highest" keeps float32 products from being rounded to tf32 or bfloat16. The gradient of a product
    of two bfloat16 arrays is rounded to bfloat16 before it meets the other factor (docs/numerics.md).
    """
    if len(operands) == 2 and operands[0].dtype == operands[1].dtype == jnp.bfloat16:
        return _product_of_bfloat16(spec, *operands)
    dtype = accumulator(jnp.result_type(*operands))
    return jnp.einsum(spec, *operands, precision="highest", preferred_element_type=dtype)


# JAX would multiply the float32 gradient by a factor that it makes float32 first. At "highest" that leaves a GPU's
# tensor cores idle: an H100 is said to reach 67 TFLOP/s so, and 989 in bfloat16.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_of_bfloat16(
    spec: str, left: BFloat16[Array, "..."], right: BFloat16[Array, "..."]
) -> Float32[Array, "..."]:
    """Return the product as `einsum` does, with a gradient of products of bfloat16 arrays."""
    return jnp.einsum(spec, left, right, precision="highest", preferred_element_type=jnp.float32)


def _gradient_of_product(
    spec: str, factors: tuple[BFloat16[Array, "..."], BFloat16[Array, "..."]], gradient: Float[Array, "..."]
) -> tuple[BFloat16[Array, "..."], BFloat16[Array, "..."]]:
    """Return the gradients by both factors, each a product of bfloat16 arrays, summed in float32 and rounded once."""
    left, right = factors
    rounded = gradient.astype(jnp.bfloat16)
    if platform() == "cpu":
        # Since jax 0.12 XLA's CPU backend keeps the sums of some products of bfloat16 in bfloat16. These are the same
        # products, summed in float32: that of two bfloat16 numbers is exact there.
        left, right, rounded = (x.astype(jnp.float32) for x in (left, right, rounded))
    # Of one dtype throughout: then both sides of each transposed product are. A GPU and a TPU sum them in float32.
    narrow = lambda left, right: jnp.einsum(spec, left, right, precision="highest")
    (of_left,) = jax.linear_transpose(lambda left: narrow(left, right), left)(rounded)
    (of_right,) = jax.linear_transpose(lambda right: narrow(left, right), right)(rounded)
    return of_left.astype(jnp.bfloat16), of_right.astype(jnp.bfloat16)


_product_of_bfloat16.defvjp(
    lambda spec, left, right: (_product_of_bfloat16(spec, left, right), (left, right)), _gradient_of_product
)


def dot_scores(queries: Float[Array, "*X R H"], keys: Float[Array, "*X C H"]) -> Float[Array, "*X R C"]:
    """Return the inner products of every query with every key.

    With few queries the keys are the product's left side, which is faster in XLA's CPU backend. A TPU's compiler makes
    of a product with one query sums of its vector unit, for which it first writes all keys in float32: there zeros fill
    few queries up to a register's height.
    """
    num_rows = queries.shape[-2]
    if platform() == "tpu" and num_rows < _TPU_ROWS:
        padding = [(0, 0)] * (queries.ndim - 2) + [(0, _TPU_ROWS - num_rows), (0, 0)]
        return einsum("...rh,...ch->...rc", jnp.pad(queries, padding), keys)[..., :num_rows, :]
    if num_rows > _FEW_ROWS:
        return einsum("...rh,...ch->...rc", queries, keys)
    return einsum("...ch,...rh->...cr", keys, queries).swapaxes(-1, -2)  # [*X C R] -> [*X R C]


class RunningSoftmax(NamedTuple):
    """A running softmax average: sums of exponentials relative to the highest score so far.

    Attributes:
      weighted_values: sum of exp(score - highest) times the value.
      total: sum of exp(score - highest).
      highest: the highest score so far; UNSEEN before the first key.
    """

    weighted_values: Float[Array, "*X R H"]
    total: Float[Array, "*X R 1"]
    highest: Float[Array, "*X R 1"]

    @classmethod
    def empty(cls, shape: tuple[int, ...], width: int, dtype: jnp.dtype) -> "RunningSoftmax":
        """Return the average before any key, for `shape` queries and values of some width."""
        zeros = jnp.zeros((*shape, 1), dtype)
        return cls(jnp.zeros((*shape, width), dtype), zeros, jnp.full_like(zeros, UNSEEN))

    def fold(
        self,
        queries: Float[Array, "*X R H"],
        keys: Float[Array, "*X C H"],
        values: Float[Array, "*X C H"],
        visible: Bool[Array, "*Y #R C"],
    ) -> "RunningSoftmax":
        """Return the average with more keys and values taken in, of which each query sees the visible ones."""
        # Scaled after the mask: XLA's CPU backend takes a scaling that follows the product into it, and is slower.
        scores = jnp.where(visible, dot_scores(queries, keys), UNSEEN) * queries.shape[-1] ** -0.5  # [*X R C]
        # The result does not depend on `highest`, so no gradient goes through it.
        highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        highest = jnp.maximum(self.highest, highest)  # [*X R 1]
        shift = jnp.where(jnp.isneginf(highest), 0.0, highest)
        weights = jnp.exp(scores - shift)  # [*X R C]
        fade = jnp.exp(self.highest - shift)  # [*X R 1]: what the sums so far are worth, relative to the new highest
        # The weights are rounded to the values' dtype before the product, their sum is not (docs/numerics.md).
        added = einsum("...rc,...ch->...rh", weights.astype(values.dtype), values)
        total = self.total * fade + jnp.sum(weights, axis=-1, keepdims=True)
        return RunningSoftmax(self.weighted_values * fade + added, total, highest)

    def average(self) -> tuple[Float[Array, "*X R H"], Float[Array, "*X R"]]:
        """Return (out, lse): the average, and the natural log of the sum of exponentials; (0, UNSEEN) of no keys."""
        sees_any = self.total != 0.0  # true for NaN too, which must not pass for a query that saw no key
        total = jnp.where(sees_any, self.total, 1.0)
        lse = jnp.where(sees_any, self.highest + jnp.log(total), UNSEEN)
        return jnp.where(sees_any, self.weighted_values / total, 0.0), lse[..., 0]


def attend(
    queries: Float[Array, "*X R H"],
    keys: Float[Array, "*X C H"],
    values: Float[Array, "*X C H"],
    visible: Bool[Array, "*Y #R C"],
) -> tuple[Float[Array, "*X R H"], Float[Array, "*X R"]]:
    """Compute softmax attention of query rows over key columns, where a query sees only its visible keys.

    Args:
      queries: R of them.
      keys: C of them; anything finite or not where no query sees them.
      values: of these keys; finite wherever they are invisible to some query.
      visible: which query sees which key; broadcasts against the scores.

    Returns:
      (out, lse) in the accumulator's dtype: normalised outputs, and the natural log of the sum of exponentials.
      A query that sees nothing has (0, UNSEEN).
    """
    softmax = RunningSoftmax.empty(queries.shape[:-1], values.shape[-1], accumulator(queries.dtype))
    return softmax.fold(queries, keys, values, visible).average()


# THE merge: attention over a union of disjoint key sets from attention over each (paper, section 4: the combine step).
# Each part has a normalised output and a log-sum-exp; it counts with weight exp(lse) over the sum of these.


_OVER_FIRST_AXIS = dict(highest=lambda x: jnp.max(x, axis=0), total=lambda x: jnp.sum(x, axis=0))


def merge_weights(
    lse: Float[Array, "*X"],
    highest: Callable[[Float[Array, "*X"]], Float[Array, "*Y"]],
    total: Callable[[Float[Array, "*X"]], Float[Array, "*Y"]],
) -> tuple[Float[Array, "*X"], Float[Array, "*Y"], Float[Array, "*Y"]]:
    """Return (weight of each part, sum of the weights, lse of the union) from the parts' log-sum-exps.

    A part that saw no key has lse UNSEEN and weight 0; a union of only such parts has lse UNSEEN, and a sum of 1.

    Args:
      lse: of the parts.
      highest: the maximum over parts: along an axis, or over devices.
      total: the sum over parts, likewise.
    """
    # The result does not depend on the shift, so no gradient goes through it. If no part saw a key it must not be -inf:
    # -inf - -inf is NaN.
    shift = jax.lax.stop_gradient(highest(lse))
    shift = jnp.where(jnp.isneginf(shift), 0.0, shift)
    weights = jnp.exp(lse - shift)
    sum_of_weights = total(weights)
    sees_any = sum_of_weights != 0.0
    sum_of_weights = jnp.where(sees_any, sum_of_weights, 1.0)
    return weights, sum_of_weights, jnp.where(sees_any, shift + jnp.log(sum_of_weights), UNSEEN)


def weigh(
    part: Float[Array, "*X H"], weight: Float[Array, "*X"], sum_of_weights: Float[Array, "*X"]
) -> Float[Array, "*X H"]:
    """Return a part's contribution to the output of the union; zeros from a part that saw no key.

    Such a part has lse UNSEEN (-inf) and weight 0, but its output may be uninitialised memory, and 0 x NaN would be
    NaN (T38).
    """
    saw_nothing = (weight == 0.0)[..., None]
    return jnp.where(saw_nothing, 0.0, part.astype(weight.dtype)) * (weight / sum_of_weights)[..., None]


def merge_parts(
    read_part: Callable[[Int[Array, ""]], Float[Array, "*X H"]], lses: Float[Array, "J *X"]
) -> tuple[Float[Array, "*X H"], Float[Array, "*X"]]:
    """Merge J parts that are read one after the other, never all at once.

    Args:
      read_part: the normalised output of part j.
      lses: log-sum-exps of the parts; UNSEEN marks one that saw no key, whatever its output holds.

    Returns:
      (out, lse) over the union; (0, UNSEEN) where no part saw anything.
    """
    weights, sum_of_weights, lse = merge_weights(lses, **_OVER_FIRST_AXIS)  # [J *X], [*X], [*X]

    def add_part(out, part_and_weight):
        part, weight = part_and_weight
        return out + weigh(read_part(part), weight, sum_of_weights), None

    empty = jnp.zeros(jax.eval_shape(read_part, jnp.int32(0)).shape, lses.dtype)
    out, _ = jax.lax.scan(add_part, empty, (jnp.arange(len(lses), dtype=jnp.int32), weights))
    return out, lse


def merge_two(
    out: Float[Array, "*X H"], lse: Float[Array, "*X"], other_out: Float[Array, "*X H"], other_lse: Float[Array, "*X"]
) -> tuple[Float[Array, "*X H"], Float[Array, "*X"]]:
    """Merge two parts; a part that saw no key changes no bit of the other."""
    weights, sum_of_weights, merged_lse = merge_weights(jnp.stack([lse, other_lse]), **_OVER_FIRST_AXIS)  # [2 *X], [*X]
    return weigh(out, weights[0], sum_of_weights) + weigh(other_out, weights[1], sum_of_weights), merged_lse


def merge_over_devices(
    out: Float[Array, "*X H"],
    lse: Float[Array, "*X"],
    mesh_axes: tuple[str, ...],
    divided: int | None = None,
    all_gather: Callable[..., Array] = jax.lax.all_gather,
) -> tuple[Float[Array, "*Y H"], Float[Array, "*Y"]]:
    """Merge one part of each device, inside `shard_map`: (out, lse) over the keys of all devices, in out's dtype.

    Few outputs go to every device in one exchange: three one after the other, of the maximum, of the weights and of the
    outputs, would each take the time that a message takes, however short it is.

    Args:
      out: this device's part.
      lse: its log-sum-exps.
      mesh_axes: over which the devices lie.
      divided: the axis of X that they divide, so that each gets its own share of the results and is sent no more;
        without it all get all.
      all_gather: returns an array of each device, given this one's and the axes; for few outputs.
    """
    count = jax.lax.axis_size(mesh_axes)

    def merge(parts: Float[Array, "D *Y H"], lses: Float[Array, "D *Y"]) -> tuple[Array, Array]:
        weights, sum_of_weights, merged_lse = merge_weights(lses, **_OVER_FIRST_AXIS)
        weighed = jax.vmap(weigh, in_axes=(0, 0, None))(parts, weights, sum_of_weights)  # [devices *Y H]
        return jnp.sum(weighed, axis=0).astype(out.dtype), merged_lse

    if divided is not None:
        of_each = lambda x: x.reshape(*x.shape[:divided], count, -1, *x.shape[divided + 1 :])
        exchange = lambda x: jax.lax.all_to_all(of_each(x), mesh_axes, split_axis=divided, concat_axis=0)
        return merge(exchange(out), exchange(lse))
    if out.size * lse.dtype.itemsize * count <= GATHERED_BYTES:
        parts = jnp.concatenate([out.astype(lse.dtype), lse[..., None]], axis=-1)  # [*X H+1]
        parts = all_gather(parts, mesh_axes)  # [devices *X H+1]
        return merge(parts[..., :-1], parts[..., -1])
    over_devices = dict(highest=lambda x: jax.lax.pmax(x, mesh_axes), total=lambda x: jax.lax.psum(x, mesh_axes))
    weight, sum_of_weights, merged_lse = merge_weights(lse, **over_devices)
    return jax.lax.psum(weigh(out, weight, sum_of_weights), mesh_axes).astype(out.dtype), merged_lse


def sum_over_devices(x: Float[Array, "*X"], mesh_axes: str | tuple[str, ...]) -> Float[Array, "*X"]:
    """Return the sum of an array of each device, inside `shard_map`, each element's parts in the order of the devices.

    `jax.lax.psum` promises no order. A ring of processes begins to sum where an element lies in the array: one token's
    bits then depend on how many others there are.

    Args:
      x: this device's part.
      mesh_axes: the axes whose devices have the parts.
    """
    count = jax.lax.axis_size(mesh_axes)
    own = jnp.pad(x.reshape(-1), (0, -x.size % count)).reshape(count, -1)  # [devices S], S sums for each
    parts = jax.lax.all_to_all(own, mesh_axes, split_axis=0, concat_axis=0)  # [devices S], of the sums of this device
    sums = reduce(operator.add, parts)
    return jax.lax.all_gather(sums, mesh_axes, tiled=True)[: x.size].reshape(x.shape)
