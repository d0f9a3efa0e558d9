"""Attention of one sparse layer whose keys and values are in host memory: select, bring what was selected, attend."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from m3jax.cache import OffloadedStack
from m3jax.model.context import Context
from m3jax.model.projections import Tensors
from m3jax.msa import api
from m3jax.msa.views import Pooled

Attend = Callable[[Pooled, Int[Array, "B K T J"]], tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]]


def offloaded_attention(
    x: Tensors,
    cache: OffloadedStack,
    layer: Int[Array, ""],
    context: Context,
    rules: dict[str, int | str],
    attend: Attend,
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K T J"], OffloadedStack]:
    """Write a call's keys, select, and attend in passes over what the pool has room for.

    A decode step needs one pass. A chunk of a long prompt selects more pages than the pool has: each pass brings in
    some, attends over those alone, and the passes are merged by log-sum-exp.

    Args:
      x: queries, keys and values, with those of the index branch.
      cache: the stack's pool and index keys.
      layer: which layer of the stack.
      context: the call's positions, lengths and places, and host memory.
      rules: keyword arguments of `api.select`.
      attend: attention over a view and a selection: (output, LSE).

    Returns:
      (output, selection, cache).
    """
    q, places, host = x.q, context.places, context.host
    cache = cache.write(layer, places, x.k, x.v, x.index_k, host)
    index = cache.index_view(layer, places, q.dtype)
    blocks = api.select(x.index_q, index, context.positions, context.lengths, **rules)
    pages, chosen = _pages(blocks, cache.view(layer, places, q.dtype))
    total = cache.slots.slot_of.shape[1]
    wanted = jnp.zeros(total, bool).at[jnp.where(chosen, pages, total)].set(True, mode="drop")
    cache = cache.count(layer, wanted)

    def one(state):
        cache, left, *sofar = state
        cache = cache.bring(layer, left, host)
        here = left & (cache.slots.slot_of[layer] >= 0)
        part = attend(cache.view(layer, places, q.dtype), jnp.where(chosen & here[pages], blocks, -1))
        return cache, left & ~here, *_merge(*sofar, *part)

    empty = jax.eval_shape(attend, cache.view(layer, places, q.dtype), blocks)
    sofar = jnp.zeros(empty[0].shape, empty[1].dtype), jnp.full(empty[1].shape, -jnp.inf, empty[1].dtype)
    cache, _, out, _ = jax.lax.while_loop(lambda state: jnp.any(state[1]), one, (cache, wanted, *sofar))
    return out.astype(q.dtype), blocks, cache


def _pages(blocks: Int[Array, "B K T J"], view: Pooled) -> tuple[Int[Array, "B K T J"], Bool[Array, "B K T J"]]:
    """The virtual page of each chosen block, and which slots of the selection have one."""
    rows, heads = (jnp.arange(n) for n in blocks.shape[:2])
    pages, inside = view.virtual(rows[:, None, None, None], heads[:, None, None], jnp.maximum(blocks, 0))
    return pages, inside & (blocks >= 0)


def _merge(out, lse, more, its):
    """Attention over two disjoint sets of keys from attention over each; one that is empty changes no bit."""
    top = jnp.maximum(lse, its)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    a, b = jnp.exp(lse - shift), jnp.exp(its - shift)
    total = a + b
    safe = jnp.where(total == 0.0, 1.0, total)
    # A part that saw nothing has weight 0 and may hold anything (T38).
    part = lambda x, w: jnp.where(w[..., None] == 0.0, 0.0, x.astype(lse.dtype) * (w / safe)[..., None])
    return part(out, a) + part(more, b), jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(safe))
