"""The basis of the invariant mode: tiles whose bits nothing beside them changes, and a model's calls made of them."""

import itertools
import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.lowering import array, equations, lower

from m3jax import mxfp8
from m3jax.cache import HostMemory
from m3jax.cache.device import page_shards, pages_of_rows
from m3jax.execution import Ordered
from m3jax.model import abstract
from m3jax.model.layers import gemma_norm
from m3jax.numerics import einsum
from m3jax.ops import interpret, project_each
from m3jax.parallel import parse_mesh
from m3jax.tiles import by_tiles
from m3jax.weights import StackedLayer

CONFIG = tiny.config("dM", num_experts_per_tok=3)  # of two experts any order of the sum is the same
SIZE, LENGTH, ROWS, CHUNK = CONFIG.index_block_size, 40, 4, 10
BLOCKS = LENGTH // SIZE
IN_FLOAT8 = dict(kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn")


@cache
def products():
    """A norm, a product and an activation of some tokens in tiles, and what has them."""
    rng = np.random.default_rng(0)
    tokens, matrix = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((48, 200), (200, 120)))
    weight = jnp.asarray(rng.normal(size=200), jnp.bfloat16)
    fn = lambda x: jax.nn.silu(einsum("xd,df->xf", gemma_norm(x, weight, 1e-6).astype(x.dtype), matrix))
    return tokens, jax.jit(lambda x, tile: by_tiles(fn, tile, x), static_argnums=1)


@given(st.permutations(range(48)), st.sampled_from([5, 37]))
def test_a_token_s_bits_depend_on_neither_its_place_nor_its_company(order, count):
    tokens, in_tiles = products()
    everywhere = np.asarray(in_tiles(tokens, 16))
    chosen = np.array(order[:count])
    np.testing.assert_array_equal(in_tiles(tokens[chosen], 16), everywhere[chosen])


def test_no_product_of_a_call_is_of_another_shape_for_another_number_of_tokens():
    """Whether a CPU sums a shape as it does another is its own affair: here some bits would be the same by chance."""

    def products(*shape: int) -> Counter:
        """Count the products of a call by the shapes of their operands; a loop's body counts once."""
        call = lambda model, tokens: model.hidden(tokens)[0]
        model = abstract(CONFIG, "bfloat16").with_invariance()
        program = jax.make_jaxpr(call)(model, array(jnp.int32, *shape)).jaxpr
        found = (x for x in equations(program) if x.primitive.name == "dot_general")
        return Counter(tuple(operand.aval.shape for operand in product.invars) for product in found)

    few, many = products(1, 21), products(2, 37)
    assert few == many and sum(few.values()) > 15


def run(mesh: str | None, dtype: str, rows: int, width: int, device_pages: int | None = None, **types) -> np.ndarray:
    """Hidden states [4 40 D] of four texts, so many in a call and so many tokens of each, in pages drawn by lot."""
    model = tiny.model(CONFIG, dtype=dtype, mesh=parse_mesh(mesh) if mesh else None).with_invariance()
    tokens, shards = tiny.tokens(CONFIG, ROWS, LENGTH), page_shards(model.mesh)
    cache = model.new_cache(pages_of_rows([BLOCKS] * ROWS, shards), rows, BLOCKS, device_pages=device_pages, **types)
    host = None if device_pages is None else HostMemory(cache, "numpy")
    # Any page of the device whose turn it is, from any device on.
    draw, on_device = np.random.default_rng(rows), cache.num_pages // shards
    free = [(device * on_device + draw.permutation(on_device)).tolist() for device in range(shards)]
    begins_on = draw.integers(shards, size=(ROWS, 1))
    table = np.vectorize(lambda device: free[device].pop(), otypes=[np.int32])((begins_on + np.arange(BLOCKS)) % shards)
    call = jax.jit(lambda m, t, c, p, n: m.hidden(t, cache=c, positions=p, lengths=n), donate_argnums=2)
    hidden = np.zeros((ROWS, LENGTH, CONFIG.hidden_size), dtype)
    for first, start in itertools.product(range(0, ROWS, rows), range(0, LENGTH, width)):
        some, columns = slice(first, first + rows), slice(start, start + width)
        positions = np.broadcast_to(np.arange(start, start + width, dtype=np.int32), (rows, width))
        place = jax.device_put(table[some], cache.table.sharding)
        cache = cache.replace(table=place, host=None if host is None else host.pages)
        out, cache = call(model, tokens[some, columns], cache, positions, np.full(rows, start + width, np.int32))
        cache = cache if host is None else host.flush(cache.replace(host=None))
        hidden[some, columns] = out
    return hidden


@cache
def alone(mesh: str | None, dtype: str, **types) -> np.ndarray:
    """Each text in one call."""
    return run(mesh, dtype, 1, LENGTH, **types)


@pytest.mark.parametrize(
    ("mesh", "dtype", "types"),
    [
        pytest.param(None, "bfloat16", IN_FLOAT8, marks=pytest.mark.further),  # the next test, with host memory
        ("context=4,tensor=2", "float32", {}),
    ],
)
def test_a_row_in_chunks_beside_others_has_the_bits_that_it_has_alone(mesh, dtype, types):
    """Over float8 pages, and on a mesh, whichever devices were given a row's pages and its experts' pairs."""
    np.testing.assert_array_equal(run(mesh, dtype, ROWS, CHUNK, **types), alone(mesh, dtype, **types))


def test_over_a_mesh_every_device_has_a_tile_before_and_after():
    """Else a compiler divides it as suits what reads it: on two GPUs a log-probability had other bits beside others."""
    how = tiny.model(CONFIG, mesh=parse_mesh("tensor=2")).with_invariance().execution()
    program = jax.make_jaxpr(how.each_token(lambda x: x + 1))(jnp.zeros((1, 3, 8))).jaxpr
    found = [x.params["sharding"] for x in equations(program) if x.primitive.name == "sharding_constraint"]
    assert len(found) == 2 and all(sharding.is_fully_replicated for sharding in found)


def test_over_a_mesh_no_all_reduce_adds_the_parts_of_devices():
    """It may do so in an order that an element's place decides; but for the embedding's, of which one part is not 0."""
    model = tiny.model(CONFIG, mesh=parse_mesh("context=2,expert=2,tensor=2")).with_invariance()
    program = jax.make_jaxpr(lambda model, tokens: model.hidden(tokens)[0])(model, tiny.tokens(CONFIG, 2, 8)).jaxpr
    found = Counter(x.primitive.name for x in equations(program))
    assert found["psum"] + found["psum_invariant"] + found["reduce_scatter"] == 1
    # A layer's attention, and its dense or shared MLP; and the experts of the stack that has them.
    assert found["all_to_all"] == 2 + 3


def test_host_memory_changes_no_bit():
    """Room for what a chunk writes and one page more: what is selected comes in several passes over the pool."""
    found = run(None, "bfloat16", ROWS, CHUNK, device_pages=13, **IN_FLOAT8)
    np.testing.assert_array_equal(found, alone(None, "bfloat16", **IN_FLOAT8))


@pytest.mark.further
def test_the_data_axis_changes_no_bit():
    """Rows in chunks over two devices have the bits of each row alone, on one device and in one call."""
    found = run("data=2", "bfloat16", ROWS, CHUNK, **IN_FLOAT8)
    np.testing.assert_array_equal(found, alone(None, "bfloat16", **IN_FLOAT8))


# On a GPU kernels take all tokens at once, where widths are whole pieces of theirs.

SIZES = dict(
    vocab_size=128, hidden_size=128, head_dim=64, index_head_dim=64, rotary_dim=32, intermediate_size=128,
    dense_intermediate_size=128, shared_intermediate_size=64, num_local_experts=16,
)  # fmt: skip


def test_kernels_compute_what_tiles_do():
    """Logits in bfloat16, of two texts: kernels round at the same points."""
    config = tiny.config("M", **SIZES)
    model, tokens = tiny.model(config, dtype="bfloat16").with_invariance(), tiny.tokens(config, 2, 20)
    by_tiles = model(tokens)
    with interpret():
        assert isinstance(model.execution(), Ordered)
        by_kernels = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(by_kernels, by_tiles, atol=0.05 * float(jnp.std(by_tiles)))


def test_kernels_take_mxfp8_in_a_stack_as_its_numbers():
    """The second of two layers, few rows and many: a prompt's numbers are written first, a step's are not."""
    rng = np.random.default_rng(0)
    kept = mxfp8.quantize(jnp.asarray(rng.normal(size=(2, 64, 64)), jnp.float32))
    numbers = mxfp8.dequantize(kept, jnp.bfloat16)
    taken = StackedLayer(numbers[1:], jnp.int32(0), is_ordered=True)  # a stack of one, beside it

    def products_of_both(x):
        second = (StackedLayer(weight, jnp.int32(1), is_ordered=True) for weight in (kept, numbers))
        return [project_each("xi,io->xo", x, [taken, layer]) for layer in second]

    for num_rows in (3, 70):
        x = jnp.asarray(rng.normal(size=(num_rows, 64)), jnp.bfloat16)
        with interpret():
            pairs = jax.jit(products_of_both)(x)
        for found in itertools.chain(*pairs):
            np.testing.assert_array_equal(found, pairs[0][0])


def lowered(model, *shape) -> str:
    """Lower a call of the model for a GPU."""
    return lower(lambda model, tokens: model.with_invariance()(tokens), model, array(jnp.int32, *shape))


@pytest.mark.parametrize(
    ("weights", "shape"), [("mxfp8", (1, 1)), pytest.param("dequantize", (2, 40), marks=pytest.mark.further)]
)
def test_on_a_gpu_no_product_of_a_layer_is_left_to_xla(weights, shape):
    """And none is cut in tiles: what is left is element by element, so one token or many makes no other order."""
    config = tiny.config("dM", **SIZES, index_block_size=64, index_topk_blocks=4)  # which kernels of attention take
    text = lowered(abstract(config, "bfloat16", weights=weights), *shape)
    assert "stablehlo.dot_general" not in text and "optimization_barrier" not in text
    assert all(name in text for name in ("ordered_project", "add_norm", "qk_norm_rope"))


def test_on_a_gpu_widths_of_other_than_whole_pieces_are_cut_in_tiles():
    """One tile or two, whose arrays pass the barriers in one dimension.

    XLA's GPU compiler carries the order of an array's axes across a barrier: a step's keys, which go to pages head by
    head, would be normed by another sum than a trainer's.
    """
    model, one = abstract(CONFIG, "bfloat16"), array(jnp.int32, 1, 1)

    def step(model, tokens, positions):
        cache, lengths = model.new_cache(BLOCKS, 1, BLOCKS), positions[:, 0] + 1
        return model.with_invariance()(tokens, cache=cache, positions=positions, lengths=lengths)

    for text in (lowered(model, 1, 130), lower(step, model, one, one)):
        assert "stablehlo.dot_general" in text and "ordered_project" not in text
        barriers = re.findall(r"stablehlo.optimization_barrier .* : (.*)", text)
        shapes = re.findall(r"tensor<((?:\d+x)*)", " ".join(barriers))
        assert len(barriers) > 20 and max(shape.count("x") for shape in shapes) == 1, sorted(set(shapes))
