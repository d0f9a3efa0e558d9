"""What the tests on a GPU share: shapes and dtypes, runs on poisoned memory, distances in float64, a narrow model."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3jax import M3Config
from m3jax.model import M3, init

OUT = 5e-3  # error of an output in norm, in 16 bits
SMALL = 3  # the shape of a list that a memory checker gets through


def shapes_and_dtypes(
    shapes: Sequence[tuple], *, others: Sequence[str] = ("float16", "float32"), small: int = SMALL
) -> pytest.MarkDecorator:
    """Parametrise by `shape` and `dtype`: each shape in bfloat16, the first and the fourth in other dtypes too.

    One shape in bfloat16, of index `small`, is marked `small`.
    """
    marks = lambda i: [pytest.mark.small] if i == small else []
    params = [pytest.param(shape, jnp.dtype("bfloat16"), marks=marks(i)) for i, shape in enumerate(shapes)]
    params += [(shape, jnp.dtype(dtype)) for shape in (shapes[0], shapes[SMALL]) for dtype in others] if others else []
    name = lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return pytest.mark.parametrize(("shape", "dtype"), params, ids=name)


def poison() -> None:
    """Fill freed memory with NaN, so that a part of an output that no program writes is noticed."""
    jax.block_until_ready([jnp.full((1 << 28,), jnp.nan, jnp.float32) for _ in range(4)])


def twice(fn: Callable, *args) -> list[np.ndarray]:
    """Return the results of a kernel, which a second run must repeat to the bit; each runs on poisoned memory."""
    runs = []
    for _ in range(2):
        poison()
        runs.append([np.asarray(x) for x in jax.tree.leaves(fn(*args))])
    differing = [i for i, (a, b) in enumerate(zip(*runs, strict=True)) if a.tobytes() != b.tobytes()]
    assert not differing, f"results {differing} have other bits in a second run"
    return runs[0]


def exact(x: jax.Array) -> np.ndarray:
    """Return an array of any float dtype in float64."""
    return np.asarray(x.astype(jnp.float32), np.float64)


def distance(found, expected: np.ndarray) -> float:
    """Return the norm of a difference, relative to the norm of what is expected."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


def narrow_model(dtype: str, mesh: jax.sharding.Mesh | None = None) -> M3:
    """M3's heads, blocks and experts per token in four narrow layers, one of them dense; random weights."""
    full = M3Config.m3()
    layers = slice(full.layer_types.index("minimax_m3_sparse") - 1, None)
    config = dataclasses.replace(
        full, num_hidden_layers=4, hidden_size=1024, intermediate_size=256, dense_intermediate_size=2048,
        shared_intermediate_size=256, num_local_experts=16, vocab_size=4096, vision_config=None, eos_token_id=(),
        bos_token_id=None, layer_types=full.layer_types[layers][:4], mlp_layer_types=full.mlp_layer_types[layers][:4],
    )  # fmt: skip
    return init(config, 0, dtype, mesh)


def random_tokens(seed: int, rows: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 4096, (rows, length), np.int32))
