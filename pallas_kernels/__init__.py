"""Pallas kernels for MiniMax Sparse Attention: the ground floor, which imports nothing from m3jax.

Each op is a folder, and in it each backend is a file (`triton.py`, `mosaic_tpu.py`). A kernel
arrives with the issue that specifies it. `m3jax/msa/api.py` is the only module of m3jax that calls
one.
"""
