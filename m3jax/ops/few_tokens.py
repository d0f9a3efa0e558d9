"""The operations between a layer's products, for few tokens: one kernel where XLA has several, each a launch.

What an operation means is the caller's own code, which XLA compiles wherever there is no kernel for a call.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Float32, Int32

from m3jax.ops.backends import choose, interpreted
from m3jax.ops.cases import TokenwiseCase


def add_norm(
    by_xla: Callable[..., tuple[Float[Array, "B T D"], Float[Array, "B T D"]]],
    x: Float[Array, "B T D"],
    update: Float[Array, "B T D"] | None,
    weight: Float[Array, " D"],
    *,
    eps: float,
    backend: str,
    is_ordered: bool = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return a residual addition and the norm of its result, each rounded once.

    Args:
      by_xla: what it means, of the three arrays.
      x: the residual stream.
      update: what is added, in the accumulator's dtype; None adds nothing.
      weight: of the norm.
      eps: of the norm.
      backend: one of `m3jax.ops.BACKENDS`.
      is_ordered: whether the kernel runs any number of tokens, whose bits are then the same in every call
        (`m3jax.ops.ordered`).
    """
    case = TokenwiseCase(op="add_norm", tokens=x.shape[0] * x.shape[1], dtype=x.dtype)
    if not is_ordered and choose(case, backend) == "xla":
        return by_xla(x, update, weight)
    from pallas_kernels.add_norm import add_norm as kernel
    from pallas_kernels.gradient import with_gradient

    def by_kernel(x, update, weight):
        rows = [None if y is None else y.reshape(-1, y.shape[-1]) for y in (x, update)]
        out = kernel(*rows, weight, eps=eps, backend="triton", interpret=interpreted())
        return tuple(y.reshape(x.shape) for y in out)

    return with_gradient(by_kernel, by_xla, 3)(x, update, weight)


def choose_experts(
    by_xla: Callable[..., tuple[Int32[Array, "X A"], Float32[Array, "X A"]]],
    logits: Float[Array, "X E"],
    bias: Float[Array, " E"],
    *,
    top_k: int,
    backend: str,
) -> tuple[Int32[Array, "X A"], Float[Array, "X A"]]:
    """Return the experts that a router chooses, and their weights.

    Args:
      by_xla: what it means, of the two arrays.
      logits: of each token for each expert.
      bias: counts in the choice only.
      top_k: A, experts of a token.
      backend: one of `m3jax.ops.BACKENDS`.
    """
    tokens, experts = logits.shape
    case = TokenwiseCase(op="choose_experts", tokens=tokens, dtype=logits.dtype, experts=experts)
    if choose(case, backend) == "xla":
        return by_xla(logits, bias)
    from pallas_kernels.choose_experts import choose_experts as kernel
    from pallas_kernels.gradient import with_gradient

    def by_kernel(logits, bias):
        return kernel(logits, bias, top_k=top_k, backend="triton", interpret=interpreted())

    return with_gradient(by_kernel, by_xla, 2)(logits, bias)
