"""Dense attention of a decode step in Triton: the kernels of `sparse_decode`, over all blocks.

A query has as many pieces of work as its own position asks for; the programs divide those among themselves.
"""

from jaxtyping import Array

from pallas_kernels.dense_decode import Call
from pallas_kernels.sparse_decode.triton import LIMITS
from pallas_kernels.sparse_decode.triton.attend import Config, attend

__all__ = ["LIMITS", "Config", "run"]


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `dense_decode` on a checked call."""
    return attend(
        call, None, kv_heads=call.kv_heads, slots=call.k.num_blocks, config=config or Config(), name="dense_decode"
    )
