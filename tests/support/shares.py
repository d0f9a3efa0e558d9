"""Rows whose blocks two devices hold in turn, the devices as an axis that is mapped over: no mesh, one program."""

import jax
import numpy as np

BATCH, QUERIES, HEADS, KV_HEADS, WIDTH, SIZE, BLOCKS = 2, 3, 4, 2, 4, 4, 5
AXIS = "context"
QUICK = {"xla_backend_optimization_level": 0}  # it halves the time to compile a program


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def devices_map(function, *arrays):
    """Run a function on each of the devices, along the first axis of the arrays."""
    return jax.jit(jax.vmap(function, axis_name=AXIS), compiler_options=QUICK)(*arrays)


def shared_memory():
    """Operands, and for each of two devices its share of them: rows begin on different ones, and end inside a block."""
    devices, first = 2, np.array([0, 1], np.int32)
    lengths = np.array([19, 14], np.int32)
    positions = lengths[:, None] - QUERIES + np.arange(QUERIES, dtype=np.int32)
    positions[1, 0] = -1
    q, index_q = normal(BATCH, QUERIES, HEADS, WIDTH), normal(BATCH, QUERIES, KV_HEADS, WIDTH)
    k, v, index_k = normal(3, BATCH, BLOCKS + 1, KV_HEADS, SIZE, WIDTH)
    index_k = index_k[:, :, 0]
    held = [[np.arange((d - f) % devices, BLOCKS + 1, devices) for f in first] for d in range(devices)]
    of_row = lambda x, ids: np.concatenate([x[row, of] for row, of in enumerate(ids)])
    of_devices = lambda x: np.stack([of_row(x, ids) for ids in held])[:, None]  # [devices 1 X ...]
    tables = np.stack([np.arange(BATCH * 3, dtype=np.int32).reshape(BATCH, 3)] * devices)
    firsts = np.stack([(d - first) % devices for d in range(devices)]).astype(np.int32)
    whole = lambda x: np.moveaxis(x, 2, -2).reshape(BATCH, -1, KV_HEADS, WIDTH)  # [B M K P H] -> [B S K H]
    in_rows = whole(k), whole(v), index_k.reshape(BATCH, -1, WIDTH)
    return (q, index_q, positions, lengths), in_rows, (*map(of_devices, (k, v, index_k)), tables, firsts)
