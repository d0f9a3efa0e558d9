"""Bytes and work of one device, counted from shapes and the sharding rules; nothing is compiled.

Times are rooflines: what must be computed, read and sent, at the chip's full public rates, with no latency. A compiled
program (`m3jax.planning.hlo`) can only do more.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from m3jax.cache import Cache
from m3jax.cache.device import page_shards, pages_of_rows
from m3jax.cache.device_pages import INDEX_AXES, KV_AXES
from m3jax.config import M3Config
from m3jax.execution.experts import dispatch_capacity
from m3jax.model import abstract
from m3jax.model.eagle3 import abstract as abstract_draft
from m3jax.mxfp8 import BLOCK
from m3jax.ops import measured
from m3jax.parallel import AXES, TokenAxes, sharding, token_axes
from m3jax.planning.chips import Chip
from m3jax.planning.job import DRAFT_TOKENS, Job

_SCORES = 64 * 2**20  # elements that selection and dense attention hold at once on an accelerator
_GATHERED = 2**24  # elements of keys that a decode step gathers at once, and of values


@dataclass(frozen=True)
class Memory:
    """The contents of one device's memory, in bytes.

    Attributes:
      experts: weights of routed experts.
      other_weights: all other weights of the model.
      cache: pages of keys and values, scales, and the page table.
      index_keys: pages of index keys.
      draft: weights, keys, values and edges of the draft, if there is one.
      vision: weights of the vision tower and the projector, if there are any.
      temporaries: a call's further needs (a guess where nothing is compiled).
      limit: the most that a program can use.
    """

    experts: float
    other_weights: float
    cache: float
    index_keys: float
    draft: float
    temporaries: float
    limit: float
    vision: float = 0.0

    @property
    def weights(self) -> float:
        """Bytes of the text model's weights."""
        return self.experts + self.other_weights

    @property
    def total(self) -> float:
        """Bytes of everything that lies on the device."""
        return self.weights + self.vision + self.cache + self.index_keys + self.draft + self.temporaries

    @property
    def fits(self) -> bool:
        """True if the device has room for everything."""
        return self.total <= self.limit


@dataclass(frozen=True)
class Work:
    """The work of one device in one call of a program.

    Attributes:
      flops: operations of matrix products.
      traffic: bytes read from and written to memory.
      sent: bytes sent to other devices, where collectives run on a ring.
    """

    flops: float | int
    traffic: float | int
    sent: float | int

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Return the seconds that each resource takes on its own: "compute", "memory" and "links"."""
        return dict(
            compute=self.flops / chip.flops, memory=self.traffic / chip.hbm_rate, links=self.sent / chip.link_rate
        )

    def roofline(self, chip: Chip) -> float:
        """Return the least possible seconds: those of the slowest resource, with the others hidden behind it."""
        return max(self.seconds(chip).values())

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.traffic + other.traffic, self.sent + other.sent)


def planned_mesh(sizes: dict[str, int]) -> Mesh:
    """Return a mesh of these sizes to divide shapes by; one CPU device fills all its places and holds nothing."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    device = jax.local_devices(backend="cpu")[0]
    return Mesh(np.full(shape, device), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def cache_shapes(job: Job, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the cache's arrays in the order of the tree's leaves: the page table is the last."""
    # The kinds of arrays have different numbers of axes: keys and values, index keys, scales of heads, of index keys.
    axes_of = {len(axes): axes for axes in (KV_AXES, INDEX_AXES, ("layers", "kv_heads"), ("layers",))}
    pages = _page_count(job, mesh)
    arrays = []
    for leaf in _one_page_cache(job.config, job.dtype, job.kv_dtype, job.index_dtype)[:-1]:
        shape = (leaf.shape[0], pages, *leaf.shape[2:]) if leaf.ndim > 2 else leaf.shape  # [L pages K P H]
        arrays.append(placed(jax.ShapeDtypeStruct(shape, leaf.dtype), axes_of[leaf.ndim], mesh))
    table = jax.ShapeDtypeStruct((job.batch, job.blocks), jnp.int32)  # [B M]
    return [*arrays, placed(table, (None, None), mesh)]


@cache
def _one_page_cache(
    config: M3Config, dtype: str, kv_dtype: str | None, index_dtype: str | None
) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the arrays of a cache with a single page; no device holds any."""
    make = lambda: Cache.pool(config, 1, 1, 1, dtype, kv_dtype=kv_dtype, index_dtype=index_dtype)
    return jax.eval_shape(lambda: jax.tree.leaves(make()))


def new_cache(job: Job, mesh: Mesh) -> Cache:
    """Return a cache with pages for the whole job, to be called under `jax.eval_shape`: it is not on the mesh."""
    return Cache.pool(
        job.config, _page_count(job, mesh), job.batch, job.blocks, job.dtype,
        kv_dtype=job.kv_dtype, index_dtype=job.index_dtype,
    )  # fmt: skip


def _page_count(job: Job, mesh: Mesh) -> int:
    """Return the number of pages for every row's whole context, on each device that divides them."""
    return pages_of_rows([job.blocks] * job.batch, page_shards(mesh))


def placed(array: jax.ShapeDtypeStruct | np.ndarray, axes: tuple[str | None, ...], mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype with the sharding that the rules give it on a mesh."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(array.shape, axes, mesh))


def held_bytes(tree: Any) -> float:
    """Return the bytes that one device holds of a tree of arrays or shapes that have shardings."""
    nbytes = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    return float(sum(nbytes(leaf) for leaf in jax.tree.leaves(tree)))


def memory(job: Job, sizes: dict[str, int]) -> Memory:
    """Return the bytes that one device of a mesh holds, without those for images (`m3jax.planning.images`).

    Raises:
      ValueError: a size that does not divide what it should.
    """
    mesh, weights = planned_mesh(sizes), _weights(job.config, job.dtype, job.weights, tuple(sizes.items()))
    arrays = cache_shapes(job, mesh)
    index_keys = held_bytes([array for array in arrays if array.ndim == len(INDEX_AXES)])
    # On a GPU a loop of decode steps holds a copy of its layers' weights other than experts (`M3.with_layers_apart`).
    copied = weights.body if job.slice.chip.kind == "gpu" else 0.0
    return Memory(
        experts=weights.experts, other_weights=weights.others, cache=held_bytes(arrays) - index_keys,
        index_keys=index_keys, draft=_draft_bytes(job, mesh), temporaries=max(_temporaries(job, sizes), copied),
        limit=job.slice.chip.hbm,
    )  # fmt: skip


@dataclass(frozen=True)
class _Weights:
    """Weights of the model on one device.

    Attributes:
      experts: bytes of routed experts.
      others: bytes of everything else.
      body: bytes, of the others, of the weights that every token meets: all but the embedding and the head.
      head: bytes, of the others, of the head.
      body_numbers: the number of values in the body.
      head_numbers: the number of values in the head.
      number_bytes: bytes of one value of an expert, its share of a scale included.
    """

    experts: float
    others: float
    body: float
    head: float
    body_numbers: float
    head_numbers: float
    number_bytes: float | int


@cache
def _weights(config: M3Config, dtype: str, weights: str, sizes: tuple[tuple[str, int], ...]) -> _Weights:
    """Return the bytes of the text model's weights on one device; `sizes` are pairs because the cache hashes them."""
    text, itemsize = replace(config, vision_config=None), np.dtype(dtype).itemsize
    model = abstract(text, dtype, planned_mesh(dict(sizes)), weights)
    experts = held_bytes([stack.mlp.experts for stack in model.stacks if hasattr(stack.mlp, "experts")])
    others, head = held_bytes(model) - experts, held_bytes(model.lm_head)
    body = others - head - held_bytes(model.embed_tokens)
    if weights == "dequantize":
        return _Weights(experts, others, body, head, body / itemsize, head / itemsize, itemsize)
    numbers = _weights(config, dtype, "dequantize", sizes)
    number_bytes = 1 + 1 / BLOCK
    return _Weights(experts, others, body, head, numbers.body_numbers, numbers.head_numbers, number_bytes)


def _draft_bytes(job: Job, mesh: Mesh) -> float:
    """Return the bytes of the draft on one device: its weights, its keys and values, and an edge for each page."""
    if job.draft is None:
        return 0.0
    pages, dtype = _page_count(job, mesh), jnp.dtype(job.dtype)
    kv_shape = (1, pages, job.draft.num_key_value_heads, job.config.index_block_size, job.draft.head_dim)
    keys = placed(jax.ShapeDtypeStruct(kv_shape, dtype), KV_AXES, mesh)  # [1 pages K P H]
    edges = placed(jax.ShapeDtypeStruct((pages, job.draft.hidden_size), dtype), ("pages", None), mesh)  # [pages D]
    return held_bytes(abstract_draft(job.draft, job.dtype, mesh)) + 2 * held_bytes(keys) + held_bytes(edges)


def _temporaries(job: Job, sizes: dict[str, int]) -> float:
    """Return a guess at the bytes of temporaries: a chunk's activations, scores, gathered keys, and logits."""
    config, tensor_size = job.config, sizes["tensor"]
    heads_width = config.num_attention_heads // tensor_size * config.head_dim
    expert_width = config.intermediate_size * config.num_experts_per_tok
    mlp_width = max(config.dense_intermediate_size, expert_width) // tensor_size
    token_bytes = 4 * (4 * config.hidden_size + 2 * mlp_width + config.index_topk_blocks * heads_width)
    logit_bytes = 4 * 4 * job.batch * config.vocab_size / tensor_size
    weight_bytes = 0.0
    if job.weights == "mxfp8":  # the widest matrix of a layer, dequantised
        widest = max(config.dense_intermediate_size, config.num_attention_heads * config.head_dim)
        weight_bytes = np.dtype(job.dtype).itemsize * config.hidden_size * widest / tensor_size
    return job.chunk * token_bytes + logit_bytes + weight_bytes + 4 * (2 * _SCORES + 2 * _GATHERED)


def decode(job: Job, sizes: dict[str, int]) -> Work:
    """Return the work of one decoded token for every row at the end of its context; with a draft, of one round."""
    tokens = 1 + (DRAFT_TOKENS if job.draft else 0)
    work = _forward(job, sizes, rows=job.batch, tokens=tokens)
    return work if job.draft is None else work + drafting(job, sizes)


def prefill(job: Job, sizes: dict[str, int]) -> Work:
    """Return the work of the last chunk of one prompt that fills the context."""
    return _forward(job, sizes, rows=1, tokens=min(job.chunk, job.context))


def _forward(job: Job, sizes: dict[str, int], rows: int, tokens: int) -> Work:
    """Return the work of all layers for `tokens` new tokens of each row, which a mesh divides if they are many."""
    least = measured.DIVIDED_TOKENS[job.slice.chip.kind]
    axes = token_axes((rows, tokens), planned_mesh(sizes), least)
    return (
        Work(0.0, 0.0, 0.0)
        + _projections(job, sizes, axes, rows * tokens)
        + _attention(job, sizes, rows, tokens)
        + _experts(job, sizes, axes, rows * tokens)
    )


def _projections(job: Job, sizes: dict[str, int], axes: TokenAxes, tokens: int) -> Work:
    """Return the work of all matrices that every token meets, and of the sums over the tensor axis after them."""
    config, weights = job.config, _weights(job.config, job.dtype, job.weights, tuple(sizes.items()))
    last_tokens = min(tokens, job.batch)  # the head meets the last token of each row alone
    tokens_of_device = tokens / _size(sizes, axes.products)
    flops = 2 * (tokens_of_device * weights.body_numbers + last_tokens * weights.head_numbers)
    num_sums, num_numbers = 2 * config.num_hidden_layers, tokens_of_device * config.hidden_size
    sent = _sum_of_parts(num_sums * num_numbers, sizes["tensor"], axes.is_scattered, job.dtype)
    sent += ring(4 * tokens * config.hidden_size, sizes["tensor"])  # of the embedding
    # Logits are gathered, which sends half the bytes of a sum.
    sent += ring(4 * last_tokens * config.vocab_size, sizes["tensor"]) / 2
    return Work(flops, weights.body + weights.head, sent)


def _experts(job: Job, sizes: dict[str, int], axes: TokenAxes, tokens: int) -> Work:
    """Return the work of the routed experts, without the sum over the tensor axis, which `_projections` counts.

    A device reads those of its own experts that its part of the (token, expert) pairs chose. Axes that do not divide
    the tokens share out the pairs, and add up their parts.
    """
    config, weights = job.config, _weights(job.config, job.dtype, job.weights, tuple(sizes.items()))
    layers = sum(stack.num_layers for stack in config.stacks if stack.is_moe)
    expert_size = 3 * config.hidden_size * config.intermediate_size / sizes["tensor"]
    # Pairs are those that all devices of an expert axis have together.
    pairs = tokens * config.num_experts_per_tok / (sizes["data"] * sizes["context"])
    # The expected number of distinct experts among this many pairs, if each pair takes one uniformly at random.
    chosen = config.num_local_experts * (1 - (1 - 1 / config.num_local_experts) ** pairs) / sizes["expert"]
    tokens_of_device = tokens // _size(sizes, axes.products)
    sent = _sum_of_parts(tokens_of_device * config.hidden_size, _size(sizes, axes.whole), False, job.dtype)
    if "expert" in axes.products:
        capacity = dispatch_capacity(tokens_of_device, config.num_experts_per_tok, sizes["expert"])
        exchanged = (capacity or tokens_of_device) * (sizes["expert"] - 1) * config.hidden_size
        sent += exchanged * (4 + np.dtype(job.dtype).itemsize)  # tokens there, sums back
    read_bytes = layers * chosen * expert_size * weights.number_bytes
    return Work(2 * layers * pairs / sizes["expert"] * expert_size, read_bytes, layers * sent)


def _size(sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    """Return the number of devices of some axes of a mesh."""
    return math.prod(sizes[axis] for axis in axes)


def _sum_of_parts(numbers: float | int, devices: int, is_scattered: bool, dtype: str) -> float:
    """Return the bytes that a device sends when so many sums are made of all devices' parts (`TokenAxes`)."""
    if not is_scattered:
        return ring(4 * numbers, devices)
    return (4 + np.dtype(dtype).itemsize) * numbers * (devices - 1) / devices


def _attention(job: Job, sizes: dict[str, int], rows: int, tokens: int) -> Work:
    """Return the work of selection and attention over the cache, whose pages are divided, and of merging the parts."""
    config, shards = job.config, page_shards(planned_mesh(sizes))
    kv_heads = _kv_heads(config.num_key_value_heads, sizes["tensor"])
    # The query heads of a KV head are together: all are on each device where the tensor axis does not divide KV heads.
    heads = config.num_attention_heads * kv_heads / config.num_key_value_heads
    sparse_layers = sum(stack.num_layers for stack in config.stacks if stack.is_sparse)
    dense_layers = config.num_hidden_layers - sparse_layers
    # In a sparse layer, `selected` are the keys of one query's selection, and `distinct` the most that a few queries
    # read: a selection each. For more than 16 queries the best case is counted, in which all select the same blocks.
    selected = min(config.index_topk_blocks * config.index_block_size, job.context)
    distinct = min(tokens * selected, job.context)
    keys = rows * (dense_layers * job.context + sparse_layers * (distinct if tokens <= 16 else selected)) / shards
    kv_bytes = keys * 2 * kv_heads * config.head_dim * np.dtype(job.kv).itemsize
    index_bytes = sparse_layers * rows * job.context * config.index_head_dim * np.dtype(job.index).itemsize / shards
    queries = rows * tokens / shards
    flops = queries * heads * config.head_dim * 4 * (sparse_layers * selected + dense_layers * job.context)
    flops += queries * sparse_layers * kv_heads * config.index_head_dim * 2 * job.context
    score_bytes = 4 * rows * tokens * kv_heads * job.blocks * sparse_layers
    head_bytes = (
        config.head_dim * np.dtype(job.dtype).itemsize + 8
    )  # an output, the largest log-sum-exp, the weights' sum
    output_bytes = rows * tokens * heads * head_bytes * config.num_hidden_layers
    return Work(flops, kv_bytes + index_bytes, ring(score_bytes + output_bytes, shards))


def drafting(job: Job, sizes: dict[str, int]) -> Work:
    """Return the work of `DRAFT_TOKENS` steps of the draft for every row: its weights, and its dense attention."""
    draft, mesh, itemsize = job.draft, planned_mesh(sizes), np.dtype(job.dtype).itemsize
    model = abstract_draft(draft, job.dtype, mesh)
    weight_bytes = held_bytes(model) - held_bytes(model.embed_tokens)
    kv_width = _kv_heads(draft.num_key_value_heads, sizes["tensor"]) * draft.head_dim * itemsize
    key_bytes = 2 * kv_width * job.context * job.batch / page_shards(mesh)
    flops = 2 * DRAFT_TOKENS * job.batch * weight_bytes / itemsize
    return Work(flops, DRAFT_TOKENS * (weight_bytes + key_bytes), 0.0)


def _kv_heads(heads: int, tensor_size: int) -> float:
    """Return the number of KV heads on one device: all of them where the tensor axis cannot divide them."""
    return heads / tensor_size if heads % tensor_size == 0 else float(heads)


def ring(size: float | int, devices: int) -> float:
    """Return the bytes that a device sends when `size` bytes are summed on a ring (reduce-scatter, then all-gather)."""
    return 2.0 * size * (devices - 1) / devices
