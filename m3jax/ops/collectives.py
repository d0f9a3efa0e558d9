"""Exchanges between the devices of a mesh in a layer, inside `jax.shard_map`: XLA's collectives, or a kernel.

The kernel is for GPUs of one host. A CUDA graph can hold it: XLA's own collectives end the graph, and a decode step is
then launched from the host in pieces. Nothing may be exchanged beside it: it runs where each exchange of a layer needs
the one before.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from m3jax.msa.share import Share
from m3jax.ops import measured
from m3jax.ops.backends import kernels_here
from m3jax.ops.cases import PeersCase
from m3jax.parallel import TENSOR, TokenAxes, is_exchanged_by_xla
from m3jax.platform import platform


def psum(x: Shaped[Array, "*X"], axes: str | tuple[str, ...], mesh: Mesh | None, backend: str) -> Shaped[Array, "*X"]:
    """Return the sum of the devices' arrays along some axes of a mesh: `jax.lax.psum`.

    Args:
      x: this device's.
      axes: of the mesh.
      mesh: with all its axes; None where nobody knows the devices, for XLA's collective.
      backend: one of `m3jax.ops.BACKENDS`.
    """
    return _exchange(x, axes, mesh, backend, "sum", jax.lax.psum)


def psum_scatter(
    x: Shaped[Array, "A *X"], axes: str | tuple[str, ...], mesh: Mesh, backend: str
) -> Shaped[Array, "_ *X"]:
    """Return this device's part of the devices' sum, whose first axis they divide: `jax.lax.psum_scatter`.

    Args:
      x, axes, mesh, backend: as of `psum`.
    """
    by_xla = partial(jax.lax.psum_scatter, scatter_dimension=0, tiled=True)
    return _exchange(x, axes, mesh, backend, "part of sum", by_xla)


def all_gather(
    x: Shaped[Array, "*X"], axes: str | tuple[str, ...], mesh: Mesh | None, backend: str
) -> Shaped[Array, "devices *X"]:
    """Return the devices' arrays along some axes of a mesh: `jax.lax.all_gather`.

    Args:
      x, axes, mesh, backend: as of `psum`.
    """
    return _exchange(x, axes, mesh, backend, "parts", jax.lax.all_gather)


def sum_of_parts(x: Float[Array, "..."], tokens: TokenAxes, backend: str) -> Float[Array, "..."]:
    """Return the sum of the tensor axis's parts of each token, on a device: of its tokens of the stream.

    Args:
      x: this device's part of the sums of its tokens in a product.
      tokens: how the mesh divides them.
      backend: as of `psum`.
    """
    if tokens.mesh.shape[TENSOR] == 1:
        return x
    if not tokens.is_scattered:
        return psum(x, TENSOR, tokens.mesh, backend)
    single = x.shape[: tokens.dim]  # of a batch that has several rows the rows are divided, else this is 1
    own = psum_scatter(x.reshape(x.shape[tokens.dim :]), TENSOR, tokens.mesh, backend)
    return own.reshape(*single, *own.shape)


def exchange_backend(num_tokens: int, backend: str) -> str:
    """Return the backend of an exchange that does not wait for all others of its program: XLA's for many tokens.

    Many tokens are divided, and XLA gathers their queries; the exchange of candidates does not wait for that. With both
    at once a prompt over context=2 came to a stop (two H100s, jax 0.11.2, 27 November 2026).

    Args:
      num_tokens: of the call.
      backend: that computes the operation.
    """
    return "xla" if num_tokens >= measured.DIVIDED_TOKENS[platform()] else backend


def gather_between(share: Share, num_tokens: int, backend: str) -> Callable[..., Array]:
    """Return the `all_gather` of devices that share the blocks of rows, for what they make of a call's tokens.

    Args:
      share: this device's.
      num_tokens, backend: as of `exchange_backend`.
    """
    return partial(all_gather, mesh=share.mesh, backend=exchange_backend(num_tokens, backend))


def _exchange(
    x: Shaped[Array, "*X"],
    axes: str | tuple[str, ...],
    mesh: Mesh | None,
    backend: str,
    result: str,
    by_xla: Callable[[Array, tuple[str, ...]], Array],
) -> Shaped[Array, "..."]:
    """Return what one of XLA's collectives does, by a kernel where there is one."""
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    case = PeersCase(result=result, dtype=x.dtype, size=x.size, axes=axes, mesh=mesh)
    if is_exchanged_by_xla() or kernels_here(backend) != "triton" or case.why_not("mosaic_gpu"):
        return by_xla(x, axes)
    from pallas_kernels.gradient import with_gradient
    from pallas_kernels.read_peers import read_peers

    kernel = partial(read_peers, axes=axes, result=result, backend="mosaic_gpu")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return kernel(x)
    return with_gradient(kernel, lambda x: by_xla(x, axes), count=1)(x)
