"""Attention of one layer over the paged cache: write, select, attend; on one device or on a mesh."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.cache import OffloadedStack, StackCache
from m3jax.config import M3Config
from m3jax.model.context import Context
from m3jax.model.offloaded import offloaded_attention
from m3jax.model.projections import Finish, Tensors
from m3jax.msa import api
from m3jax.parallel import PAGE_AXES


def cached_attention(
    x: Tensors,
    finish: Finish | None,
    cache: StackCache | OffloadedStack,
    layer: Int[Array, ""],
    context: Context,
    config: M3Config,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K T J"] | None, StackCache | OffloadedStack]:
    """Write a call's keys, then attend over what each row has.

    On a mesh the pages are divided over the data, context and expert axes, and the KV heads over the tensor axis. Every
    device scores the pages it holds, the scores are joined, each attends over the selected pages that are its own,
    and the partial outputs are merged by log-sum-exp.

    Args:
      x: queries, keys and values, or what they are made of.
      finish: how a kernel makes them while it writes; None if they are ready.
      cache: the stack's pages.
      layer: which layer of the stack.
      context: the call's positions, lengths and places.
      config: the model's configuration.
      mesh: where the cache lies.

    Returns:
      (output, selection or None, cache).

    Raises:
      ValueError: a schedule that reads all blocks, over a cache in host memory.
    """
    if isinstance(cache, OffloadedStack):
        if context.schedule in ("dense", "mask"):
            raise ValueError(f"schedule {context.schedule!r} reads all blocks: it needs a cache without host memory")
        attend = lambda view, blocks: api.attention(
            x.q, view, blocks, context.positions, context.lengths, context.schedule
        )
        rules = selection_rules(config) | dict(backend=context.backend)
        return offloaded_attention(x, cache, layer, context, rules, attend)
    rows = (context.positions, context.lengths, context.places, finish)
    static = _Static(config, context.schedule, context.backend)
    if mesh is None or mesh.size == 1:
        return _core(x, cache, layer, *rows, static)
    return _on_mesh((x, cache, layer, *rows), static, mesh)


class _Static(NamedTuple):
    """What is the same on all devices."""

    config: M3Config
    schedule: str
    backend: str


def _on_mesh(args, static: _Static, mesh: Mesh):
    """`_shard` on every device. Arguments and results cross as flat lists, so that each array finds its spec."""
    tensors, cache = args[:2]
    axes = tuple(axis for axis in PAGE_AXES if axis in mesh.shape)
    heads = "tensor" if static.config.num_key_value_heads % mesh.shape["tensor"] == 0 else None
    by_head = P(None, None, heads)
    pages = [_cache_spec(x, axes, heads) for x in jax.tree.leaves(cache)]
    brought = [P() if t.ndim == 3 else by_head for t in tensors if t is not None]
    leaves, structure = jax.tree.flatten(args)
    in_specs = brought + pages
    in_specs += [P()] * (len(leaves) - len(in_specs))
    sparse = tensors.index_q is not None and static.schedule != "dense"

    def run(*leaves):
        return jax.tree.leaves(_shard(*jax.tree.unflatten(structure, leaves), static, axes))

    out_specs = [by_head, *([P(None, heads)] if sparse else []), *pages]
    out = jax.shard_map(run, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)(*leaves)
    cache = jax.tree.unflatten(jax.tree.structure(cache), out[1 + sparse :])
    return out[0], out[1] if sparse else None, cache


def _core(x, cache, layer, positions, lengths, places, finish, static, gather=None, merge=None):
    """What one device does; `gather` and `merge` join it with what the others do."""
    rows = positions, lengths
    if finish is None:
        cache = cache.write(layer, places, x.k, x.v, x.index_k)
    else:
        x, cache = finish.insert(x, cache, layer, places, *rows)
    view, blocks = cache.view(layer, places, x.q.dtype), None
    held = None
    if x.index_q is not None and static.schedule != "dense":
        index = cache.index_view(layer, places, x.q.dtype)
        rules = selection_rules(static.config) | dict(gather=gather, backend=_selecting(static.backend, gather))
        blocks = api.select(x.index_q, index, *rows, **rules)
        held = blocks if merge is None else _held(blocks, view)
    out, lse = api.attention(x.q, view, held, *rows, static.schedule, attending(static.backend, held))
    return out if merge is None else merge(out, lse), blocks, cache


def _shard(x, cache, layer, positions, lengths, places, finish, static, axes):
    """`_core` with the pages of this device: those of the others are not held."""
    first = jax.lax.axis_index(axes) * cache.num_pages
    places = places._replace(table=places.table - first, page=places.page - first)
    gather = lambda scores: jax.lax.pmax(scores, axes)
    return _core(x, cache, layer, positions, lengths, places, finish, static, gather, partial(_merge, axes))


def _merge(axes, out, lse):
    """Attention over all devices' keys from attention over each one's."""
    top = jax.lax.pmax(lse, axes)
    weight = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jax.lax.psum(weight, axes)
    share = weight / jnp.where(total == 0.0, 1.0, total)
    return jax.lax.psum(out.astype(lse.dtype) * share[..., None], axes).astype(out.dtype)


def _held(blocks, view):
    """The selection less the blocks of other devices; order does not matter to attention."""
    present = view.present(0, view.num_blocks)[:, None, None]
    present = jnp.broadcast_to(present, (*blocks.shape[:3], present.shape[-1]))
    return jnp.where(jnp.take_along_axis(present, jnp.maximum(blocks, 0), axis=-1), blocks, -1)


def _cache_spec(x: Array, axes: tuple[str, ...], heads: str | None) -> P:
    """Pages of keys and values, index keys, scales per head, scales of index keys: told apart by their rank."""
    return {5: P(None, axes, heads), 4: P(None, axes), 2: P(None, heads), 1: P()}[x.ndim]


def selection_rules(config: M3Config) -> dict[str, int | str]:
    """The model's rules, as keyword arguments of `api.select`."""
    return dict(
        top_k=config.index_topk_blocks, local_blocks=config.index_local_blocks, init_blocks=config.index_init_blocks,
        score=config.index_score_type,
    )  # fmt: skip


def attending(backend: str, blocks: Int[Array, "B K T J"] | None) -> str:
    """The backend of a layer's attention: there is no TPU kernel for dense layers, so those are left to "auto"."""
    return "auto" if blocks is None and backend == "mosaic_tpu" else backend


def _selecting(backend: str, gather: Callable | None) -> str:
    """Scores that devices join go through memory, so XLA computes them, whichever kernels attend."""
    return backend if gather is None else "xla"
