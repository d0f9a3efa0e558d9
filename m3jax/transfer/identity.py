"""What two engines must have in common to exchange pages: model, weights, mode, storage, and the layout on the wire."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped, UInt32

from m3jax.decoding import Engine
from m3jax.messages import shown
from m3jax.transfer.frames import TransferError

LAYOUT = "k, v [pages, heads, tokens, width]; index keys [pages, tokens, width]"


def transfer_identity(engine: Engine) -> dict[str, Any]:
    """Return what an engine says of itself to those that it exchanges pages with.

    Args:
      engine: its weights are read once, on its devices.

    Returns:
      The engine's own identity (configuration, page size, dtypes of the cache), a sum of its weights, whether it runs
      in the invariant mode, and the order of axes in which pages travel; as JSON reads it back.

    Raises:
      ValueError: a cache that holds more than keys, values and index keys, as that of an EAGLE3 draft does.
    """
    layout = engine.page_layout
    if not isinstance(layout, list) or not all(isinstance(stack, tuple) and len(stack) == 3 for stack in layout):
        raise ValueError("the pages of this engine hold more than keys: serve without an EAGLE3 draft to move them")
    said = engine.identity | {
        "weights": weights_sum(engine.model),
        "invariant mode": engine.is_invariant,
        "layout of pages": LAYOUT,
    }
    return json.loads(json.dumps(said))


def check_identity(found: object, expected: Mapping[str, Any], name: str) -> None:
    """Raise TransferError, naming the first difference, if another engine's pages do not fit.

    Args:
      found: what it says of itself.
      expected: of this engine.
      name: of the other engine in the error.
    """
    if not isinstance(found, dict):
        raise TransferError(f"{name} does not say of which model and cache its pages are")
    config, own_config = found.get("config"), expected.get("config")
    if isinstance(config, dict) and isinstance(own_config, dict) and config != own_config:
        found, expected = config, own_config
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise TransferError(
                f"{name} has pages of another model or cache: its {shown(key)[1:-1]} is {shown(found.get(key))}, this "
                f"engine's {shown(expected.get(key))}; start both with the same checkpoint and options"
            )


def weights_sum(model: PyTree) -> str:
    """Return a sum over the bits of all weights that changes with any of them, in hexadecimal.

    Two engines of equal configuration and other weights would take each other's pages for their own. The sum is over
    integers modulo 2^32, so it is the same however the weights lie on devices.
    """
    leaves = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    return bytes(jax.device_get(_sums(leaves)).astype(">u4")).hex()


@jax.jit
def _sums(leaves: list[Shaped[Array, "..."]]) -> UInt32[Array, " 2"]:
    """Return the number of all elements, and the sum of their bits, each times an odd number of its place."""
    total, count = jnp.uint32(0), 0
    for number, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
        bits = leaf.astype(jnp.uint8) if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, unsigned)
        # A weight of its own for each place along each axis, without a reshape: a sharded leaf stays where it is.
        place = jnp.uint32(2 * number + 1)
        for axis in range(bits.ndim):
            place = place * jnp.uint32(2654435761) + 2 * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        total = total + jnp.sum(bits.astype(jnp.uint32) * place, dtype=jnp.uint32)
        count += leaf.size
    return jnp.stack([jnp.uint32(count % 2**32), total])
