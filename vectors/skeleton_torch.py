#!/usr/bin/env python3
"""A skeleton in torch: read inputs, compute, write MINE for `check_numpy.py`. Put your kernel in the place of `attend`.

    python vectors/skeleton_torch.py vectors mine [cuda]
    python vectors/check_numpy.py vectors mine

It needs torch and safetensors, and computes attention over given blocks, `out` and `lse` of the group sparse_attention,
in float32. Inputs are bfloat16 in the files: without `.float()` a kernel gets them as they are, and `check_numpy.py`
takes the tolerance of what the kernel writes.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def attend(q, k, v, blocks, positions, lengths, block_size):
    """Attention of each query over the tokens of its blocks that it sees.

    Args:
      q: [B T N H], k, v: [B S K H], blocks: [B K T J] with -1 in unused slots.
      positions: [B T] of queries, -1 for padding; lengths: [B].

    Returns:
      out [B T N H] and lse [B T N]; 0 and -inf where a query sees nothing.
    """
    group = q.shape[2] // k.shape[2]
    s = torch.arange(k.shape[1], device=q.device)
    is_chosen = (s[:, None] // block_size == blocks[..., None, :]).any(-1)  # [B K T S]
    is_token = (positions >= 0) & (positions < lengths[:, None])  # [B T]
    is_seen = (s <= positions[..., None]) & is_token[..., None]  # [B T S]
    is_read = (is_chosen & is_seen[:, None]).repeat_interleave(group, dim=1)  # [B N T S]
    # NaN stands in what must not be read; 0 * NaN would be NaN.
    k, v = (torch.nan_to_num(x).repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~is_read, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [B N T]
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
    return torch.einsum("bnts,bsnh->btnh", weights, v), lse.transpose(1, 2)


def main(vectors, mine, device="cpu"):
    for case in json.loads((vectors / "manifest.json").read_text(encoding="utf-8"))["cases"]:
        if case["group"] != "sparse_attention":
            continue
        x = load_file(vectors / case["file"], device=device)
        # A kernel that selects blocks itself takes index_q and index_k instead, and writes "blocks" as well.
        blocks = x["given_blocks"] if "given_blocks" in x else x["blocks"]
        q, k, v = (x[name].float() for name in ("q", "k", "v"))
        out, lse = attend(q, k, v, blocks, x["positions"], x["lengths"], case["rule"]["block_size"])
        file = mine / case["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"out": out.contiguous(), "lse": lse.contiguous()}, file)
        print(f"wrote {file}")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: {sys.argv[0]} VECTORS MINE [DEVICE]")
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
