"""Attention kernels on a GPU against float64, over pages in any order and rows of many lengths."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpu_pages import DECODE, PREFILL, Inputs, check_attention
from support.on_gpu import shapes_and_dtypes, twice

from pallas_kernels.cudnn_causal import cudnn_causal
from pallas_kernels.dense_causal import cudnn, cudnn_prefix, dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import sparse_prefill

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
CUDNN = [(2, 1024, 1024, 64, 4, 16), (3, 300, 300, 16, 2, 16), (1, 2000, 2000, 32, 4, 16), (2, 130, 130, 12, 2, 16)]


def run_and_check(x: Inputs, op, backend: str, is_dense: bool = False) -> None:
    blocks = None if is_dense else x.selection()
    chosen = () if is_dense else (jnp.asarray(blocks),)
    how = dict(kv_heads=x.K) if is_dense else {}
    if x.stored != x.dtype:
        how |= dict(scales=tuple(jnp.asarray(x.scales, jnp.float32)))
    how |= dict(return_lse=True, backend=backend)
    fn = jax.jit(lambda q, k, v, *rest: op(q, x.pages(k), x.pages(v), *rest, **how))
    out, lse = twice(fn, x.q, x.k, x.v, *chosen, *x.at)
    check_attention(x, blocks, out, lse)


@shapes_and_dtypes(PREFILL)
@pytest.mark.parametrize("schedule", ["query_union", "kv_block_major", None])
def test_sparse_prefill_is_attention_to_the_chosen_blocks(shape, dtype, schedule, backend, seed):
    op = partial(sparse_prefill, schedule=schedule) if schedule else sparse_prefill
    run_and_check(Inputs(shape, dtype, seed), op, backend)


@shapes_and_dtypes(PREFILL)
def test_dense_causal_is_attention_to_all_that_a_query_sees(shape, dtype, backend, seed):
    run_and_check(Inputs(shape, dtype, seed), dense_causal, backend, is_dense=True)


@shapes_and_dtypes(PREFILL, others=["float16"])
@pytest.mark.parametrize("piece", [None, 3])
def test_dense_causal_in_parts_is_attention_to_all_that_a_query_sees(shape, dtype, piece, seed):
    """cuDNN's log-sum-exp is the natural one, and padding and rows that end before a piece count for nothing."""
    x = Inputs(shape, dtype, seed)
    assert cudnn.in_order(x.pages(x.k), *x.at)
    op = partial(dense_causal, config=piece and cudnn.Config(piece))
    run_and_check(x, op, "cudnn", is_dense=True)


@shapes_and_dtypes(PREFILL, others=["float16"])
def test_dense_causal_behind_a_prefix_is_attention_to_all_that_a_query_sees(shape, dtype, seed):
    """On a device that holds every second block: two queries see as much, some see nothing, rows are of any length."""
    x = Inputs(shape, dtype, seed)
    sees_any = (x.positions > 0) & (x.positions < x.lengths[:, None])
    x.positions = np.where(sees_any, (x.positions - 1) // 2, x.S)
    assert cudnn_prefix.in_order(x.pages(x.k), *x.at)
    run_and_check(x, dense_causal, "cudnn_prefix", is_dense=True)


@pytest.mark.parametrize("queries", [1, 2, 65])
def test_dense_causal_in_parts_has_the_same_bits_in_twenty_runs(queries, seed):
    """A single query is one of many to cuDNN: by its kernel for one, a run in two had other log-sum-exps."""
    x = Inputs((2, queries, 1500, 64, 4, 5), jnp.dtype("bfloat16"), seed)
    options = dict(kv_heads=x.K, return_lse=True, backend="cudnn")
    fn = jax.jit(lambda q, k, v, *at: dense_causal(q, x.pages(k), x.pages(v), *at, **options))
    first, *others = (twice(fn, x.q, x.k, x.v, *x.at) for _ in range(10))
    for found, wanted in itertools.chain(*(zip(other, first, strict=True) for other in others)):
        np.testing.assert_array_equal(found, wanted)


@shapes_and_dtypes(DECODE)
def test_sparse_decode_is_attention_to_the_chosen_blocks(shape, dtype, backend, seed):
    run_and_check(Inputs(shape, dtype, seed), sparse_decode, backend)


@shapes_and_dtypes(DECODE)
def test_dense_decode_is_attention_to_all_that_a_query_sees(shape, dtype, backend, seed):
    run_and_check(Inputs(shape, dtype, seed), dense_decode, backend, is_dense=True)


@shapes_and_dtypes(DECODE, others=["float32"], small=0)
def test_sparse_decode_reads_keys_and_values_in_e4m3(shape, dtype, backend, seed):
    run_and_check(Inputs(shape, dtype, seed, stored=E4M3), sparse_decode, backend)


@shapes_and_dtypes(DECODE, others=["float32"], small=0)
def test_dense_decode_reads_keys_and_values_in_e4m3(shape, dtype, backend, seed):
    run_and_check(Inputs(shape, dtype, seed, stored=E4M3), dense_decode, backend, is_dense=True)


@shapes_and_dtypes(CUDNN, others=[])
def test_cudnn_is_attention_to_all_that_a_query_sees(shape, dtype, seed):
    x = Inputs(shape, dtype, seed)
    x.positions = np.broadcast_to(np.arange(x.T), (x.B, x.T))
    x.lengths = np.minimum(x.lengths, x.T)

    def rows(pool):  # [B T K H]
        heads = [pool[x.table[b]].swapaxes(0, 1).reshape(x.K, -1, x.H)[:, : x.T] for b in range(x.B)]
        return jnp.nan_to_num(jnp.stack(heads).swapaxes(1, 2))

    (out,) = twice(jax.jit(cudnn_causal), x.q, rows(x.k), rows(x.v), x.at[1])
    check_attention(x, None, out, None)
