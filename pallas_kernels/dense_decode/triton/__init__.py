"""Dense attention of a decode step in Triton: the kernels of `sparse_decode`, over all blocks.

A query has as many pieces of work as its own position asks for; the programs divide those among themselves.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.pages import Pages
from pallas_kernels.sparse_decode.triton import LIMITS
from pallas_kernels.sparse_decode.triton.attend import Config, attend

__all__ = ["LIMITS", "Config", "run"]


def run(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    kv_heads: int,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
    return_lse: bool,
    config: Config | None,
    interpret: bool,
) -> tuple[Array, ...]:
    """Run `dense_decode` on checked operands."""
    return attend(
        q, k, v, None, positions, lengths, kv_heads=kv_heads, slots=k.num_blocks, scales=scales,
        return_lse=return_lse, config=config or Config(), interpret=interpret, name="dense_decode",
    )  # fmt: skip
