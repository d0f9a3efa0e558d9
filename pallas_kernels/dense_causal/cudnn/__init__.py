"""Dense causal attention over pages by cuDNN, for rows whose queries follow one another.

cuDNN's causal mask has its diagonal at the first key, so a chunk behind other tokens is two kinds of part::

    keys of the row    |  before the chunk, in pieces of 65,536  |  the chunk's own  |
                          every query sees all that is there        causal
                                     └────── joined by log-sum-exp ──────┘

Keys and values of a part are copied out of their pages first: 0.1 ms of a piece's 30 for 8,192 queries of M3. A part's
output is rounded to the queries' dtype before the parts are joined in float32.

A chunk of few queries is filled up with padding. For a single query cuDNN has a kernel of its own, which divides the
keys of a row among programs; its release notes (9.18.1, known issues) advise against a causal mask there where query
heads share keys. On an H100 (jax 0.11.2, 25 November 2026) a second run of two rows of one query each had the same
outputs and log-sum-exps of other bits; filled up, they had the same ones in 20 runs (cuDNN 9.19, 26 November 2026).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.dense_causal import Call
from pallas_kernels.pages import Pages, seen_positions

__all__ = ["LIMITS", "Config", "Part", "in_order", "run", "run_behind_prefix"]

# Outputs [B T N H] and log-sum-exps [B T N] of all keys but a prefix, and how many these are [B].
Part = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a part.

    Attributes:
      piece: blocks before the chunk that are one part, at most.
    """

    piece: int = 512


LIMITS = Limits(config=Config)
_LEAST_QUERIES = 64  # of a call of cuDNN, whose kernels for prompts have no lower tiles


def in_order(k: Pages, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Bool[Array, ""]:
    """Return True if this backend can run the rows: `run` does not look.

    The queries of a row stand one behind the other, padding comes last, and every block up to the last query is held.
    """
    seen = seen_positions(positions, lengths, positions.shape[1])
    count, first = _queries(seen)
    token = jnp.arange(seen.shape[1], dtype=jnp.int32)
    follow = jnp.all(seen == jnp.where(token < count[:, None], first[:, None] + token, -1))
    if k.table is None:
        return follow
    is_needed = jnp.arange(k.num_blocks, dtype=jnp.int32) * k.block_size < (first + count)[:, None]  # [B M]
    return follow & jnp.all(k.holds(k.table) | ~is_needed)


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `dense_causal` on a checked call of which `in_order` is true; others get any numbers.

    In interpret mode the parts are computed by XLA, and the rest as on the device.

    Raises:
      ValueError: float32.
    """

    def own_part(q: Float[Array, "B T N H"], seen: Int[Array, "B T"]) -> Part:
        count, first = _queries(seen)
        k_and_v = (_own_tokens(pages, first, count, q.shape[1], call.kv_heads) for pages in (call.k, call.v))
        return *_attend(call.interpret, q, *k_and_v, None), first

    return run_behind_prefix(own_part, call, config)


def run_behind_prefix(
    last_part: Callable[[Float[Array, "B T N H"], Int[Array, "B T"]], Part], call: Call, config: Config | None
) -> tuple[Array, ...]:
    """Run `dense_causal` on rows whose queries all see a prefix: cuDNN attends to that, piece by piece.

    Args:
      last_part: attends to the keys behind the prefixes. Given queries, which may be padded, and the last key that each
        sees (-1 for none), it returns outputs and log-sum-exps (0 and -inf for a query that sees none of these keys),
        and how many keys at the beginning of each row are the prefix, of which it has none.
      call, config: as of `run`.

    Raises:
      ValueError: float32.
    """
    if call.q.dtype not in (jnp.bfloat16, jnp.float16) and not call.interpret:
        raise ValueError(f"q is {call.q.dtype}: cuDNN takes bfloat16 and float16")
    num_queries = call.q.shape[1]
    filling = (0, 0), (0, max(_LEAST_QUERIES - num_queries, 0))
    q, positions = jnp.pad(call.q, (*filling, (0, 0), (0, 0))), jnp.pad(call.positions, filling, constant_values=-1)
    last_seen = seen_positions(positions, call.lengths, q.shape[1])
    out, lse, prefix = last_part(q, last_seen)
    blocks = min((config or Config()).piece, call.k.num_blocks)
    tokens = blocks * call.k.block_size

    def add_piece(i, parts):
        seen = jnp.clip(prefix - i * tokens, 0, tokens)  # [B]
        piece = (_blocks(pages, i * blocks, blocks, seen, call.kv_heads) for pages in (call.k, call.v))
        # A row that ends before this piece has one key in it, for cuDNN; it counts for nothing.
        piece_out, piece_lse = _attend(call.interpret, q, *piece, jnp.maximum(seen, 1))
        return _join(*parts, piece_out, jnp.where((seen > 0)[:, None, None], piece_lse, -jnp.inf))

    num_pieces = (jnp.max(prefix) + tokens - 1) // tokens
    out, lse = jax.lax.fori_loop(0, num_pieces, add_piece, (out.astype(jnp.float32), lse))
    sees_any = (last_seen >= 0)[..., None]  # [B T 1]
    out = jnp.where(sees_any[..., None], out, 0.0).astype(q.dtype)[:, :num_queries]
    return (out, jnp.where(sees_any, lse, -jnp.inf)[:, :num_queries]) if call.return_lse else (out,)


def _queries(seen: Int[Array, "B T"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return (how many queries a row has, position of the first, 0 where there is none)."""
    return jnp.sum(seen >= 0, axis=1, dtype=jnp.int32), jnp.maximum(seen[:, 0], 0)


def _join(
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    new: Float[Array, "B T N H"],
    new_lse: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return (output, LSE) of two parts together, in float32; of a query that sees a key in one of them."""
    top = jnp.maximum(lse, new_lse)
    weight, new_weight = jnp.exp(lse - top), jnp.exp(new_lse - top)
    total = weight + new_weight
    is_any = (new_weight > 0)[..., None]  # what saw nothing may hold NaN
    share = lambda part: (part / total)[..., None]
    joined = out * share(weight) + jnp.where(is_any, new.astype(jnp.float32), 0.0) * share(new_weight)
    return joined, top + jnp.log(total)


def _own_tokens(
    pages: Pages, first: Int[Array, " B"], count: Int[Array, " B"], num_tokens: int, heads: int
) -> Float[Array, "B T K H"]:
    """Return keys or values of a chunk's own tokens; 0 where padding stands."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    position = first[:, None] + jnp.minimum(token, jnp.maximum(count - 1, 0)[:, None])  # [B T]
    row, head = jnp.arange(len(first), dtype=jnp.int32)[:, None, None], jnp.arange(heads, dtype=jnp.int32)
    block = jnp.minimum(position // pages.block_size, pages.num_blocks - 1)
    page, _ = pages.locate(pages.finder(), row, head, block[..., None])  # [B T K]
    x = pages.pool[page, (position % pages.block_size)[..., None]]
    return jnp.where((token < count[:, None])[..., None, None], x, 0)


def _blocks(
    pages: Pages, first_block: Int[Array, ""], blocks: int, seen: Int[Array, " B"], heads: int
) -> Float[Array, "B S K H"]:
    """Return keys or values of some blocks one behind the other; 0 from `seen` on, where memory may hold NaN."""
    batch = len(seen)
    row, head = jnp.arange(batch, dtype=jnp.int32)[:, None, None], jnp.arange(heads, dtype=jnp.int32)
    block = jnp.minimum(first_block + jnp.arange(blocks, dtype=jnp.int32), pages.num_blocks - 1)
    page, _ = pages.locate(pages.finder(), row, head, block[None, :, None])  # [B blocks K]
    x = pages.pool[page].swapaxes(2, 3).reshape(batch, -1, heads, pages.width)  # [B blocks P K H] -> [B S K H]
    is_seen = jnp.arange(x.shape[1], dtype=jnp.int32) < seen[:, None]
    return jnp.where(is_seen[..., None, None], x, 0)


def _attend(interpret: bool, *operands: Array | None) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return what `_attend_by_cudnn` does, in interpret mode by XLA."""
    return (_attend_by_xla if interpret else _attend_by_cudnn)(*operands)


def _attend_by_cudnn(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], seen: Int[Array, " B"] | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return (output, LSE) over the first `seen` keys of each row, or causal where it is None."""
    # `jax.nn.dot_product_attention` rounds the LSE to the queries' dtype: up to 0.03 of one of 10 in bfloat16.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    lengths = {}
    if seen is not None:
        lengths = dict(q_seqlen=jnp.full(q.shape[:1], q.shape[1], jnp.int32), kv_seqlen=seen)
    out, lse = dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask_type=MaskType.CAUSAL if seen is None else MaskType.PADDING,
        return_residual=True, **lengths,
    )  # fmt: skip
    return out, lse.swapaxes(1, 2)  # [B N T] -> [B T N]


def _attend_by_xla(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], seen: Int[Array, " B"] | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return what `_attend_by_cudnn` does, with all scores in memory."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("btkgh,bskh->btkgs", grouped, k, preferred_element_type=jnp.float32) * width**-0.5
    key = jnp.arange(k.shape[1], dtype=jnp.int32)
    is_seen = key <= jnp.arange(length)[:, None] if seen is None else key < seen[:, None, None]  # [T S] or [B 1 S]
    scores = jnp.where(jnp.broadcast_to(is_seen, (batch, length, len(key)))[:, :, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)  # [B T K G]
    weights = jnp.exp(scores - lse[..., None]).astype(q.dtype)
    out = jnp.einsum("btkgs,bskh->btkgh", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)
    return out.reshape(q.shape), lse.reshape(batch, length, heads)
