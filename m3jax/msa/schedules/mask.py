"""The definition as a schedule: every key that a view holds is read, every score is held."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.arrays import unchecked
from m3jax.msa.views import BlockView, only_held
from m3jax.spec.msa import sparse_attention


def mask(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute `sparse_attention` as its definition does."""
    is_held = jnp.repeat(view.present(0, view.num_blocks), view.block_size, axis=1)  # [#B S]
    keys, values = (x.swapaxes(1, 2) for x in view.run(0, view.num_blocks))  # [B S K H] each
    values = jnp.where(is_held[:, :, None, None], values, 0)  # a block that is not held may read as anything, even NaN
    held_blocks = only_held(blocks, view)
    with unchecked():  # a part of a selection may lack a query's own block
        return sparse_attention(
            q, keys, values, held_blocks, positions, lengths, block_size=view.block_size, return_lse=True
        )


def mask_all(
    q: Float[Array, "B T N H"], view: BlockView, positions: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute `dense_attention`, as `sparse_attention` over all blocks."""
    every_block = jnp.arange(view.num_blocks, dtype=jnp.int32)  # [M]
    blocks = jnp.broadcast_to(every_block, (q.shape[0], view.num_heads, q.shape[1], view.num_blocks))
    return mask(q, view, blocks, positions, lengths)
