#!/usr/bin/env python3
"""A skeleton in numpy: read inputs, compute, write MINE for `check_numpy.py`. Put your kernel in the place of `attend`.

    python vectors/skeleton_numpy.py vectors mine
    python vectors/check_numpy.py vectors mine

It needs numpy alone, and computes attention over given blocks, `out` and `lse` of the group sparse_attention.
"""

import json
import sys
from pathlib import Path

import numpy as np
from check_numpy import read_manifest, read_safetensors

NAMES = {"float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64", "bool": "BOOL"}


def write_safetensors(path, arrays):
    """Write numpy arrays: the header's size in eight bytes, the header, and the numbers, row-major, little-endian."""
    header, data = {}, b""
    for name, array in arrays.items():
        numbers = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(numbers)]
        header[name] = {"dtype": NAMES[str(array.dtype)], "shape": list(array.shape), "data_offsets": offsets}
        data += numbers
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def attend(q, k, v, blocks, positions, lengths, block_size):
    """Attention of each query over the tokens of its blocks that it sees.

    Args:
      q: [B T N H], k, v: [B S K H], blocks: [B K T J] with -1 in unused slots.
      positions: [B T] of queries, -1 for padding; lengths: [B].

    Returns:
      out [B T N H] and lse [B T N]; 0 and -inf where a query sees nothing.
    """
    out, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf, q.dtype)
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(lse.shape):
        position = positions[b, t]
        if not 0 <= position < lengths[b]:
            continue
        s = np.arange(position + 1)
        s = s[np.isin(s // block_size, blocks[b, n // group, t])]
        if len(s):
            scores = k[b, s, n // group] @ q[b, t, n] / np.sqrt(q.dtype.type(q.shape[-1]))
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ v[b, s, n // group] / weights.sum()
            lse[b, t, n] = scores.max() + np.log(weights.sum())
    return out, lse


def main(vectors, mine):
    for case in read_manifest(vectors)["cases"]:
        if case["group"] != "sparse_attention":
            continue
        x = {name: array for name, (_, array) in read_safetensors(vectors / case["file"]).items()}
        q, k, v = (x[name].astype(np.float32) for name in ("q", "k", "v"))
        # A kernel that selects blocks itself takes index_q and index_k instead, and writes "blocks" as well.
        blocks = x["given_blocks"] if "given_blocks" in x else x["blocks"]
        out, lse = attend(q, k, v, blocks, x["positions"], x["lengths"], case["rule"]["block_size"])
        write_safetensors(mine / case["file"], {"out": out, "lse": lse})
        print(f"wrote {mine / case['file']}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} VECTORS MINE")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
