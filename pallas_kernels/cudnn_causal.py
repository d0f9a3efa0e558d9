"""Dense causal attention by cuDNN: the yardstick of the benchmarks, and the faster one wherever it can run.

It is no backend of `dense_causal`: it takes whole rows of keys beside their queries, and neither pages nor positions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cudnn_causal(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B T N H"]:
    """Causal attention of whole rows: query t of a row stands at position t, and its key is key t.

    Args:
      q: queries; bfloat16 or float16.
      k: keys, token-major.
      v: values.
      lengths: valid tokens of each row; the output of the others is 0. Keys behind them must be finite.

    Raises:
      ValueError: float32, or as many keys as queries are not there.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q is {q.dtype} of shape {q.shape} and k has shape {k.shape}: cuDNN takes bfloat16 and float16, and this "
            "path as many keys as queries; dense_causal takes the rest"
        )
    lengths = lengths.astype(jnp.int32)
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="cudnn"
    )
    is_valid = jnp.arange(q.shape[1], dtype=jnp.int32) < lengths[:, None]
    return jnp.where(is_valid[..., None, None], out, 0)
