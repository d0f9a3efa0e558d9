"""Pallas kernels for MiniMax Sparse Attention: the ground floor, which imports nothing from m3jax.

Each op is a folder. Its `__init__.py` has the op's one signature, docstring and checks; each backend is a folder in it
(`triton/`, `mosaic_tpu/`) that only runs, and is imported when it is first asked for (backends.py).
"""
