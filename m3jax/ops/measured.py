"""Sizes at which one way to compute becomes faster than another, as they were measured.

They decide which implementation runs, never what it means. Those of kernels are of one H200 with jax 0.11.2 and
bfloat16, 23 November 2026 (`scripts/bench.py gpu`); those of XLA's ways are of two x86 cores with jax 0.10.2,
November 2026 (`scripts/bench.py cpu`). No TPU was measured.
"""

import math

# Products: rows up to which a kernel that reads a matrix in its stack is faster than XLA's product with the matrix by
# itself, by (inputs, outputs) (`--only projections`). 1 and 8 rows were measured; the kernel does the same up to 16.
STACKED_ROWS = {(6144, 8192): 16, (6144, 128): 16, (6144, 12288): 16, (6144, 3072): 16, (3072, 6144): 16, (192, 192): 0}
MXFP8_ROWS = 48  # rows up to which a kernel makes numbers of MXFP8 as it multiplies, in place of writing them first
# Rows from which Mosaic's kernel of products with MXFP8 is the fastest on Hopper, and up to which (H100, 27 November
# 2026): 1, 2, 4, 8, 32, 64, 256 and 512 were measured. With 2 the products of q, k and v gain what others lose.
MXFP8_MOSAIC_ROWS = 3, 256
ORDERED_MXFP8_ROWS = 64  # likewise of the kernel with one order of sums

# Float32 products with narrow matrices on a GPU, as the router's: outputs up to which the channels are summed in parts,
# and (rows from which, in how many). 64, 256, 2,048 and 8,192 rows were measured (H100, 27 November 2026).
FLOAT32_OUTPUTS = 128
FLOAT32_PARTS = ((64, 16), (4096, 4))

# Exchanges by a kernel: cards on which it was measured, linked by NVLink; how many, at most; and bytes up to which it
# runs, of those that a device receives.
NVLINK_GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
NVLINK_DEVICES = 2
PEERS_BYTES = 1 << 28

# Norms and routers: tokens of a call up to which one kernel saves more launches than it costs.
LAUNCH_BOUND_TOKENS = 64

# Experts (`--only experts`): tokens up to which the kernel that sorts nothing is the fastest, by an expert's widths.
FEW_TOKENS = {(6144, 3072): 64, (192, 192): 64}
KERNEL_TILES = (16, 32, 64, 128)  # tokens that meet an expert at once in a kernel
MXFP8_TILES = (16, 64)  # likewise of experts in MXFP8: as many as an expert has, on average
# Pairs of an expert, on average, from which `mxfp8_grouped` is faster, by the path of its case: Triton's kernel (24
# November 2026), and Mosaic's (27 November 2026).
MXFP8_PAIRS = {"mxfp8_grouped": 64, "mxfp8_mosaic": 0.25}
MXFP8_MOSAIC_TILES = (16, 64, 128, 256)  # tokens that meet an expert at once in Mosaic's
ORDERED_TILE = 64  # likewise, at least, in the invariant mode: tensor cores take one instruction for all heights
COPIED_TILE = 512  # likewise where experts are copied: more than an expert is wide, so its copies are the smaller part
PRODUCT_TILE = 128  # likewise in kernels that have gradients
CPU_TILE = 64  # likewise on a CPU
TPU_EXPERT_TILE = 128  # likewise on a TPU: rows of its matrix unit; not measured
FEW_PAIRS = 16  # (token, expert) pairs up to which each pair fetches its own expert's weights
MOST_SHARES = 4  # where devices divide experts, skipped pairs cost little: up to 4 x FEW_PAIRS are walked

# Meshes: tokens of a call from which a mesh divides them, by platform. Not measured: with fewer, a product takes the
# time to read its matrix (989 TFLOP/s over 4.8 TB/s of an H200 is 206 operations a byte), which every device does.
DIVIDED_TOKENS = {"cpu": 16, "gpu": 256, "tpu": 256}

# Tokens on the way to their experts: one of `m3jax.execution.exchange.EXCHANGES`, by platform. A ragged exchange moves
# the tokens alone, a dense one half as much again. 2,048 tokens of 6,144 channels in bfloat16, there and back between
# two H100s: dense 0.51 ms, ragged 18.3 ms (jax 0.11.2, 26 November 2026). On a TPU neither was timed.
EXPERT_EXCHANGE = {"cpu": "slots", "gpu": "slots", "tpu": "slots"}

# Dense attention: queries a row from which cuDNN's is as fast on Hopper or faster, its copies of keys and its condition
# included: as fast for 2,048 at a prompt's start, and the faster the more there are (H200, 27 November 2026).
CUDNN_QUERIES = 2048

# Attention by XLA: queries a row up to which gathering a query's blocks beats inverting the selection.
GATHERED_QUERIES = 8


def stacked_rows(inputs: int, outputs: int) -> int:
    """Return `STACKED_ROWS` of the nearest widths that were measured.

    Args:
      inputs: channels that the product sums over.
      outputs: channels that it gives.
    """
    distance = lambda measured: abs(math.log(measured[0] / inputs)) + abs(math.log(measured[1] / outputs))
    return STACKED_ROWS[min(STACKED_ROWS, key=distance)]


def float32_parts(rows: int) -> int:
    """Return in how many parts the channels of a narrow float32 product are summed on a GPU; 1 for as a whole.

    Args:
      rows: of the activations.
    """
    return next((parts for least, parts in reversed(FLOAT32_PARTS) if rows >= least), 1)


def few_tokens(width: int, hidden_width: int) -> int:
    """Return `FEW_TOKENS` of the expert that was measured and is nearest in size.

    Args:
      width: D.
      hidden_width: F.
    """
    size = math.log(width * hidden_width)
    return FEW_TOKENS[min(FEW_TOKENS, key=lambda measured: abs(math.log(math.prod(measured)) - size))]
