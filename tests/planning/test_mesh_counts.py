"""The layers' programs on meshes of 8 CPU devices: what devices exchange, and the share of the work that each has."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from m3jax.cache import Cache
from m3jax.execution import Compute
from m3jax.model import abstract, eagle3
from m3jax.parallel import parse_mesh
from m3jax.planning import hlo

# Widths of which no two products, and no matrix and no chunk, have as many numbers.
CONFIG = tiny.config(
    "dMM", hidden_size=64, num_attention_heads=16, head_dim=32, num_key_value_heads=4, intermediate_size=96,
    dense_intermediate_size=160, shared_intermediate_size=128, num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
ROWS, CHUNK, LAYERS, CONTEXT = 4, 256, 3, 1024
WIDTH, BYTES = CONFIG.hidden_size, 4  # of float32
pytestmark = pytest.mark.usefixtures("eight_devices")
QUICK = {"xla_backend_optimization_level": 0}
MESHES = ["context=2,expert=2,tensor=2", "tensor=4"]
# Products outside attention and the routed experts, by the einsum that makes them.
DIVIDED = ("btd,d...h->bt...h", "btx,xd->btd", "...d,df->...f", "...f,fd->...d", "xd,df->xf", "xf,fd->xd")


@cache
def compiled(name: str, rows: int, length: int):
    """All layers over a cache on a mesh, compiled for shapes alone."""
    mesh = parse_mesh(name)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    number = lambda *shape, dtype="int32": jax.device_put(np.zeros(shape, dtype), whole)
    cache_of_rows = Cache.init(CONFIG, rows, CONTEXT, "float32", mesh)

    def layers(model, cache, x, tokens, lengths):
        return model.hidden(tokens, cache=cache, positions=tokens, lengths=lengths, embeddings=x)

    inputs = number(rows, length, WIDTH, dtype="float32"), number(rows, length), number(rows)
    program = jax.jit(layers, donate_argnums=1)
    return tiny.lower(program, abstract(CONFIG, "float32", mesh), cache_of_rows, *inputs).compile(QUICK)


def exchanged(name: str, rows: int, length: int) -> list[hlo.Collective]:
    return hlo.collectives(compiled(name, rows, length).as_text())


def flops_outside_attention(name: str, rows: int, length: int) -> float:
    found = hlo.products(compiled(name, rows, length).as_text())
    return sum(flops for origin, flops in found.items() if any(f"/{spec}/" in origin for spec in DIVIDED))


def large(collectives: list[hlo.Collective], least: float) -> Counter:
    """How often each kind runs with as many bytes, and over how many devices."""
    runs = Counter()
    for collective in collectives:
        if collective.num_bytes >= least:
            runs[collective.kind, int(collective.num_bytes), collective.num_devices] += collective.times
    return runs


@pytest.mark.parametrize("rows", [1, pytest.param(ROWS, marks=pytest.mark.further)])
def test_a_step_over_tensors_has_two_sums_a_layer_and_nothing_else(rows):
    """No matrix is gathered, no page is moved, and the shared expert is not summed by itself."""
    tokens = rows * WIDTH * BYTES
    assert large(exchanged("tensor=4", rows, 1), tokens / 2) == {("all-reduce", tokens, 4): 2 * LAYERS}


@pytest.mark.further
def test_a_step_over_the_context_exchanges_three_times_a_layer():
    """Candidates of the selection, parts of the output, a sum of the experts' parts; a dense layer has the second."""
    kinds = Counter()
    for collective in exchanged("context=4", 1, 1):
        kinds[collective.kind] += collective.times
    num_sparse = LAYERS - 1
    assert kinds == {"all-gather": LAYERS + num_sparse, "all-reduce": num_sparse}


def test_a_chunk_over_tensors_gathers_and_scatters_its_tokens_twice_a_layer():
    """Two sums that leave a device its own tokens, and two gathers of what they feed; the last of all is the result."""
    tokens = CHUNK * WIDTH * BYTES
    assert large(exchanged("tensor=4", 1, CHUNK), tokens / 8) == {
        ("reduce-scatter", tokens, 4): 2 * LAYERS,
        ("all-gather", tokens, 4): 2 * LAYERS,
    }


def test_a_step_of_a_draft_moves_neither_its_embedding_nor_its_head():
    """Of one row, whose lookup a compiler may make a slice of the whole table."""
    mesh = parse_mesh("expert=2,tensor=2")
    draft = eagle3.Eagle3Config(
        hidden_size=WIDTH, vocab_size=512, draft_vocab_size=512, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, intermediate_size=96, taps=(0, 1, 2),
    )  # fmt: skip

    def step(draft, feature, tokens):
        x, residual = draft.inputs(feature, tokens, None, Compute(mesh=mesh))
        return x, draft.logits(residual, None, Compute(mesh=mesh))

    feature, tokens = jnp.zeros((1, 1, WIDTH)), jnp.zeros((1, 1), jnp.int32)
    text = tiny.lower(jax.jit(step), eagle3.abstract(draft, "float32", mesh), feature, tokens).compile(QUICK).as_text()
    found = hlo.collectives(text)
    # All of a token's logits, and the sum of one row of the table, which each device makes of what it holds.
    assert large(found, 0) == {("all-reduce", WIDTH * BYTES, 2): 1, ("all-gather", 512 * BYTES, 4): 1}, found
    assert [collective.origin for collective in found if collective.kind == "all-reduce"] == [
        "jit(step)/shard_map/psum"
    ]


@pytest.mark.further
@pytest.mark.parametrize("mesh", MESHES)
def test_no_matrix_is_exchanged(mesh):
    """Nor an expert, nor pages: a device's part of one matrix of an expert is larger than all queries of a step."""
    least = WIDTH * CONFIG.intermediate_size * BYTES // parse_mesh(mesh).shape["tensor"]
    of_device = lambda c: c.num_bytes / (c.num_devices if c.kind == "all-gather" else 1)
    assert not [collective for collective in exchanged(mesh, ROWS, 1) if of_device(collective) >= least]


@pytest.mark.further
@pytest.mark.parametrize("mesh", MESHES)
def test_a_chunk_s_products_are_divided_over_all_devices(mesh):
    """Projections, dense and shared experts: each device has 1/n of the operations, within 10%."""
    alone, divided = (flops_outside_attention(name, 1, CHUNK) for name in ("data=1", mesh))
    num_devices = parse_mesh(mesh).size
    assert divided / alone == pytest.approx(1 / num_devices, rel=0.1), f"{mesh}: {divided / alone:.3f}"
