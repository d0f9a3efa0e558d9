"""What one device holds and moves, counted from shapes and the sharding rules; nothing is compiled.

Times are rooflines: what must be computed, read and sent, at the chip's full public rates, with no latency. A compiled
program (`m3jax.planning.hlo`) can only do more.
"""

import math
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from m3jax.cache import Cache
from m3jax.cache.device import INDEX_AXES, KV_AXES, page_shards
from m3jax.config import M3Config
from m3jax.model import abstract
from m3jax.model.eagle3 import Eagle3
from m3jax.model.params import leaf_dtype
from m3jax.parallel import AXES, sharding
from m3jax.planning.chips import Chip
from m3jax.planning.job import DRAFT_TOKENS, Job

_SCORES = 64 * 2**20  # elements that selection and dense attention hold at once on an accelerator
_GATHERED = 2**24  # elements of keys that a decode step gathers at once, and of values


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    experts: float
    other_weights: float
    cache: float
    index_keys: float
    draft: float
    temporaries: float
    limit: float

    @property
    def weights(self) -> float:
        """Of the model."""
        return self.experts + self.other_weights

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.cache + self.index_keys + self.draft + self.temporaries

    @property
    def fits(self) -> bool:
        """Whether the device has room."""
        return self.total <= self.limit


@dataclass(frozen=True)
class Work:
    """What one device does in one call.

    Attributes:
      flops: operations.
      traffic: bytes read from and written to memory.
      sent: bytes sent to other devices, as a ring would.
    """

    flops: float | int
    traffic: float | int
    sent: float | int

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Time of each resource on its own."""
        return dict(
            compute=self.flops / chip.flops, memory=self.traffic / chip.hbm_rate, links=self.sent / chip.link_rate
        )

    def roofline(self, chip: Chip) -> float:
        """Seconds at best: the slowest resource, the others hidden behind it."""
        return max(self.seconds(chip).values())


def planned_mesh(sizes: dict[str, int]) -> Mesh:
    """A mesh to divide shapes by; the one device in all its places is not asked to hold anything."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    device = jax.local_devices(backend="cpu")[0]
    return Mesh(np.full(shape, device), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def cache_shapes(job: Job, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """The arrays of the cache, in the order of the tree's leaves: the table is the last."""
    axes = {5: KV_AXES, 4: INDEX_AXES, 2: ("layers", "kv_heads"), 1: ("layers",)}
    table = jax.ShapeDtypeStruct((job.batch, job.blocks), jnp.int32)
    out = []
    for x in _one_page(job.config, job.dtype, job.kv_dtype, job.index_dtype)[:-1]:
        shape = (x.shape[0], _pages(job, mesh), *x.shape[2:]) if x.ndim > 2 else x.shape
        out.append(placed(jax.ShapeDtypeStruct(shape, x.dtype), axes[x.ndim], mesh))
    return [*out, placed(table, (None, None), mesh)]


@cache
def _one_page(config: M3Config, dtype: str, kv_dtype: str | None, index_dtype: str | None) -> list:
    """The arrays of a cache with a single page."""
    types = dict(kv_dtype=kv_dtype, index_dtype=index_dtype)
    return jax.eval_shape(lambda: jax.tree.leaves(Cache.pool(config, 1, 1, 1, dtype, **types)))


def new_cache(job: Job, mesh: Mesh) -> Cache:
    """A cache with as many pages as the mesh divides, for `jax.eval_shape`: it is not on the mesh."""
    types = dict(kv_dtype=job.kv_dtype, index_dtype=job.index_dtype)
    return Cache.pool(job.config, _pages(job, mesh), job.batch, job.blocks, job.dtype, **types)


def _pages(job: Job, mesh: Mesh) -> int:
    parts = page_shards(mesh)
    return -(-job.blocks * job.batch // parts) * parts


def placed(x: jax.ShapeDtypeStruct | np.ndarray, axes: tuple[str | None, ...], mesh) -> jax.ShapeDtypeStruct:
    """A shape where the rules put it."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.shape, axes, mesh))


def held_bytes(tree) -> float:
    """Bytes of a tree on one device."""
    size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
    return float(sum(size(x) for x in jax.tree.leaves(tree)))


def memory(job: Job, sizes: dict[str, int]) -> Memory:
    """What one device of a mesh holds.

    Raises:
      ValueError: a size that does not divide what it should.
    """
    mesh, weights = planned_mesh(sizes), _weights(job.config, job.dtype, tuple(sizes.items()))
    arrays = cache_shapes(job, mesh)
    index = held_bytes([x for x in arrays if x.ndim == len(INDEX_AXES)])
    return Memory(
        experts=weights.experts, other_weights=weights.others, cache=held_bytes(arrays) - index, index_keys=index,
        draft=_draft_bytes(job, mesh), temporaries=_temporaries(job, sizes), limit=job.slice.chip.hbm,
    )  # fmt: skip


@dataclass(frozen=True)
class _Weights:
    """Bytes of weights on one device, and how many of them a token meets besides experts, without and in the head."""

    experts: float
    others: float
    body: float
    head: float


@cache
def _weights(config: M3Config, dtype: str, sizes: tuple[tuple[str, int], ...]) -> _Weights:
    model = abstract(config, dtype, planned_mesh(dict(sizes)))
    experts = held_bytes([s.mlp.experts for s in model.stacks if hasattr(s.mlp, "experts")])
    others, head = held_bytes(model) - experts, held_bytes(model.lm_head)
    return _Weights(experts, others, others - head - held_bytes(model.embed_tokens), head)


def _draft_bytes(job: Job, mesh) -> float:
    """Weights, keys, values and edges of the draft."""
    if job.draft is None:
        return 0.0
    make = lambda shape, axes, own, _: placed(jax.ShapeDtypeStruct(shape, leaf_dtype(own, job.dtype)), axes, mesh)
    pages = _pages(job, mesh)
    size, d = job.config.index_block_size, job.draft
    kv = jax.ShapeDtypeStruct((1, pages, d.num_key_value_heads, size, d.head_dim), jnp.dtype(job.dtype))
    edges = placed(jax.ShapeDtypeStruct((pages, d.hidden_size), kv.dtype), ("pages", None), mesh)
    return held_bytes(Eagle3(d, make)) + 2 * held_bytes(placed(kv, KV_AXES, mesh)) + held_bytes(edges)


def _temporaries(job: Job, sizes: dict[str, int]) -> float:
    """A guess, where nothing is compiled: activations of a chunk, scores, gathered keys, logits."""
    c, t = job.config, sizes["tensor"]
    heads = c.num_attention_heads // t * c.head_dim
    hidden = max(c.dense_intermediate_size, c.intermediate_size * c.num_experts_per_tok) // t
    token = 4 * (4 * c.hidden_size + 2 * hidden + c.index_topk_blocks * heads)
    logits = 4 * 4 * max(job.batch, 1) * c.vocab_size / t
    return job.chunk * token + logits + 4 * (2 * _SCORES + 2 * _GATHERED)


def decode(job: Job, sizes: dict[str, int]) -> Work:
    """One token for every row, at the end of its context; with a draft, one round."""
    tokens = 1 + (DRAFT_TOKENS if job.draft else 0)
    work = _forward(job, sizes, rows=job.batch, tokens=tokens, divided=sizes["data"])
    return work if job.draft is None else _plus(work, _drafting(job, sizes))


def prefill(job: Job, sizes: dict[str, int]) -> Work:
    """The last chunk of one prompt that fills the context; of it the data axis divides the routed experts alone."""
    return _forward(job, sizes, rows=1, tokens=min(job.chunk, job.context), divided=1)


def _plus(a: Work, b: Work) -> Work:
    return Work(a.flops + b.flops, a.traffic + b.traffic, a.sent + b.sent)


def _forward(job: Job, sizes: dict[str, int], rows: int, tokens: int, divided: int) -> Work:
    """All layers for `tokens` new tokens of `rows` rows, of which a device computes one part in `divided`."""
    parts = [_projections(job, sizes, rows * tokens / divided), _attention(job, sizes, rows, tokens)]
    parts.append(_experts(job, sizes, rows * tokens, divided))
    out = Work(0.0, 0.0, 0.0)
    for part in parts:
        out = _plus(out, part)
    return out


def _projections(job: Job, sizes: dict[str, int], tokens: float | int) -> Work:
    """All matrices that every token meets, and what the tensor axis sums after them."""
    c, width, t = job.config, np.dtype(job.dtype).itemsize, sizes["tensor"]
    weights, lasts = _weights(c, job.dtype, tuple(sizes.items())), min(tokens, job.batch)
    # The head meets the last token of each row alone.
    flops = 2 * (tokens * weights.body + lasts * weights.head) / width
    sums, logits = 4 * tokens * c.hidden_size * (2 * c.num_hidden_layers + 1), 4 * lasts * c.vocab_size
    return Work(flops, weights.body + weights.head, _ring(sums, t) + _ring(logits, t) / 2)


def _experts(job: Job, sizes: dict[str, int], tokens: int, divided: int) -> Work:
    """Routed experts: a device reads those of its own that its part of the pairs chose; then all parts are summed.

    Tokens that are not divided over data yet (`divided` is 1) are for the experts, and come together again.
    """
    c, width = job.config, np.dtype(job.dtype).itemsize
    layers = sum(s.num_layers for s in c.stacks if s.is_moe)
    one = 3 * c.hidden_size * c.intermediate_size / sizes["tensor"]
    data = sizes["data"] if tokens % sizes["data"] == 0 else 1
    pairs = tokens / data * c.num_experts_per_tok / sizes["context"]
    chosen = c.num_local_experts * (1 - (1 - 1 / c.num_local_experts) ** pairs) / sizes["expert"]
    out = layers * 4 * tokens / data * c.hidden_size
    sent = _ring(out, sizes["expert"] * sizes["context"] * sizes["tensor"]) + out * (data / divided - 1)
    return Work(2 * layers * pairs / sizes["expert"] * one, layers * chosen * one * width, sent)


def _attention(job: Job, sizes: dict[str, int], rows: int, tokens: int) -> Work:
    """Selection and attention over the cache, whose pages are divided, and the merge of their parts."""
    c, parts = job.config, page_shards(planned_mesh(sizes))
    t, size = sizes["tensor"], c.index_block_size
    heads, kv = c.num_attention_heads / t, _kv_heads(c.num_key_value_heads, t)
    sparse = sum(s.num_layers for s in c.stacks if s.is_sparse)
    dense = c.num_hidden_layers - sparse
    seen = min(c.index_topk_blocks * size, job.context)
    read = min(tokens * seen, job.context)  # distinct keys; at most one selection a query, at least the best case
    keys = rows * (dense * job.context + sparse * (read if tokens <= 16 else seen)) / parts
    kv_bytes, index_bytes = np.dtype(job.kv).itemsize, np.dtype(job.index).itemsize
    traffic = (
        keys * 2 * kv * c.head_dim * kv_bytes + sparse * rows * job.context * c.index_head_dim * index_bytes / parts
    )
    pairs = rows * tokens / parts
    flops = pairs * heads * c.head_dim * 4 * (sparse * seen + dense * job.context)
    flops += pairs * sparse * kv * c.index_head_dim * 2 * job.context
    scores = 4 * rows * tokens * kv * job.blocks * sparse
    outputs = rows * tokens * heads * (c.head_dim * np.dtype(job.dtype).itemsize + 8) * c.num_hidden_layers
    return Work(flops, traffic, _ring(scores + outputs, parts))


def _drafting(job: Job, sizes: dict[str, int]) -> Work:
    """`DRAFT_TOKENS` steps of the draft for every row: its weights, and its dense attention."""
    d, mesh = job.draft, planned_mesh(sizes)
    make = lambda shape, axes, own, _: placed(jax.ShapeDtypeStruct(shape, leaf_dtype(own, job.dtype)), axes, mesh)
    model = Eagle3(d, make)
    read = held_bytes(model) - held_bytes(model.embed_tokens)
    kv = _kv_heads(d.num_key_value_heads, sizes["tensor"]) * d.head_dim * np.dtype(job.dtype).itemsize
    keys = 2 * kv * job.context * job.batch / page_shards(mesh)
    return Work(2 * DRAFT_TOKENS * job.batch * read / np.dtype(job.dtype).itemsize, DRAFT_TOKENS * (read + keys), 0.0)


def _kv_heads(heads: int, tensor: int) -> float:
    """KV heads of one device: all where they cannot be divided."""
    return heads / tensor if heads % tensor == 0 else float(heads)


def _ring(size: float | int, devices: int) -> float:
    """Bytes that a device sends when `size` bytes are summed on a ring."""
    return 2.0 * size * (devices - 1) / devices
