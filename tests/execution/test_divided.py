"""A layer on a mesh: what each device multiplies, and where."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from m3jax import M3Config
from m3jax.execution import Projections
from m3jax.execution.compute import TOKEN_TILE, Compute
from m3jax.execution.divided import Divided
from m3jax.execution.fast import Fast
from m3jax.execution.ordered import kernels_order
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import Heads, project
from m3jax.ops.backends import interpret
from m3jax.parallel import make_mesh
from m3jax.weights import merge_inputs

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


@pytest.mark.usefixtures("eight_devices")
def test_a_tile_of_tokens_is_the_platform_s_and_of_the_invariant_mode():
    assert Compute().token_tile is None and Compute(invariant=True).token_tile == TOKEN_TILE["cpu"] == 32
    one, several = (Mesh(jax.devices()[:size], ("tensor",)) for size in (1, 2))
    assert [Compute(mesh=mesh).is_divided for mesh in (None, one, several)] == [False, False, True]
    expected = {"auto": [Compute(), Compute(mesh=one), Compute(backend="triton")]}
    expected["xla"] = [Compute(backend="xla"), Compute(invariant=True), Compute(mesh=several)]
    for backend, settings in expected.items():
        assert {compute.tower_backend for compute in settings} == {backend}


@pytest.mark.usefixtures("eight_devices")
def test_queries_are_finished_where_their_tokens_are(monkeypatch):
    """They are exchanged in the model's dtype; few tokens are everywhere, and a kernel may finish their queries."""
    how = Divided(Compute(mesh=make_mesh(expert=2)), has_cache=True)
    norms = Heads(*[jnp.zeros(4)] * 2, None, *[jnp.zeros(4)] * 2)
    for platform, tokens, dtype in (("cpu", 32, BF16), ("tpu", 512, BF16), ("gpu", 512, BF16), ("cpu", 4, F32)):
        monkeypatch.setattr("m3jax.execution.divided.platform", lambda platform=platform: platform)
        raw = Heads(*[jnp.ones((1, tokens, 2, 4))] * 4, jnp.ones((1, tokens, 4)))
        angles = jnp.ones((1, tokens, 1))
        projections = Projections(raw, norms, angles, angles, 1e-6, BF16)
        found = how.finish_queries(projections, how.token_axes(1, tokens))
        assert found.raw.q.dtype == found.raw.index_q.dtype == dtype
        assert found.raw.k.dtype == found.raw.index_k.dtype == F32  # rounded once, to what is stored
        assert [found.norms.q is None, found.norms.index_q is None] == [dtype == BF16] * 2


@pytest.mark.usefixtures("eight_devices")
def test_a_tpu_cuts_the_last_matrix_of_attention_out_late(monkeypatch):
    """Of many tokens, where no kernel multiplies; which layer it is is known when the activations are."""
    how, stack = Divided(Compute(mesh=make_mesh(expert=2)), has_cache=True), jnp.arange(48.0).reshape(2, 2, 3, 4)
    quantised = MXFP8Array(jnp.zeros((2, 64, 4), jnp.uint8), jnp.zeros((2, 2, 4), jnp.uint8))
    for platform, name, of_stack, rows, is_late in (
        ("tpu", "o_proj", stack, 512, True), ("tpu", "q_proj", stack, 512, False), ("tpu", "o_proj", stack, 4, False),
        ("tpu", "gate_proj", quantised, 512, False), ("cpu", "o_proj", stack, 512, False),
    ):  # fmt: skip
        monkeypatch.setattr("m3jax.execution.divided.platform", lambda platform=platform: platform)
        assert how.reads_in_place(name, of_stack, rows, F32) == is_late, (platform, name, rows)
    monkeypatch.setattr("m3jax.execution.divided.platform", lambda: "tpu")
    assert how.stacked(quantised, jnp.int32(1)).backend == "auto"

    def product(x, layer):
        return project("xi,io->xo", x, merge_inputs(how.stacked(stack, layer), 2))

    x, layer = jnp.ones((5, 6)), jnp.int32(1)
    np.testing.assert_array_equal(product(x, layer), x @ stack[1].reshape(6, 4))
    traced = jax.make_jaxpr(product)(x, layer).jaxpr
    readers = [step.primitive.name for step in traced.eqns if any(read is traced.invars[1] for read in step.invars)]
    assert readers == ["optimization_barrier"]  # with the activations; the slice reads what comes out of it


def divided(**sizes: int) -> Divided:
    return Divided(Compute(mesh=make_mesh(**sizes)), True)


@pytest.mark.usefixtures("eight_devices")
def test_a_product_is_read_in_place_by_what_a_device_holds():
    """Kernels take multiples of 32 and 64 channels, and 16 rows: of one device's part, not of the whole."""
    stack = lambda *shape: jnp.zeros((2, *shape), BF16)
    whole, halves, rows = Fast(Compute(), True), divided(tensor=2), divided(data=2)
    with interpret():
        for name, shape, alone, by_halves in (
            ("gate_proj", (64, 128), True, True), ("up_proj", (64, 64), True, False),
            ("down_proj", (64, 64), True, True), ("down_proj", (32, 64), True, False),
            ("o_proj", (2, 32, 64), True, True), ("o_proj", (2, 16, 64), True, False),
            ("q_proj", (32, 2, 64), True, True), ("q_proj", (32, 2, 32), True, False),
            ("index_k_proj", (32, 64), True, True), ("gate_proj", (16, 128), False, False),
            ("input_layernorm", (64,), False, False),
        ):  # fmt: skip
            if len(shape) > 1:
                assert whole.reads_in_place(name, stack(*shape), 1, BF16) == alone, (name, shape)
            assert halves.reads_in_place(name, stack(*shape), 1, BF16) == by_halves, (name, shape)
        for num_rows, alone, by_rows in ((16, True, True), (17, False, False), (32, False, True), (34, False, False)):
            assert whole.reads_in_place("gate_proj", stack(64, 64), num_rows, BF16) == alone
            assert rows.reads_in_place("gate_proj", stack(64, 64), num_rows, BF16) == by_rows


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("sizes", [dict(data=2, tensor=2), dict(context=2, tensor=2), dict(expert=2)])
def test_embedding_and_head_on_a_mesh_are_those_of_one_device(sizes):
    """Few rows, and as many as a mesh divides."""
    how, table = divided(**sizes), np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    for batch in (1, 16):
        tokens = np.random.default_rng(batch).integers(0, 8, (batch, 2), np.int32)
        hidden = table[tokens]
        run = jax.jit(lambda tokens, hidden, table: (how.embed(tokens, table), how.unembed(hidden, table)))
        embedded, logits = run(tokens, hidden, table)
        np.testing.assert_array_equal(embedded, hidden)
        np.testing.assert_allclose(logits, hidden @ table.T, rtol=1e-5, atol=1e-6)
        assert logits.sharding.is_fully_replicated or batch == 16  # drawing one of few exchanges nothing more


@pytest.mark.parametrize(
    ("changes", "is_whole"),
    [
        ({}, True), (dict(dtype="float16"), True), (dict(dtype="float32"), False), (dict(backend="xla"), False),
        (dict(num_attention_heads=4, num_key_value_heads=4, index_n_heads=4), True),
        *[(changes, False) for changes in (
            dict(index_head_dim=96), dict(shared_intermediate_size=96), dict(dense_intermediate_size=96),
            dict(num_local_experts=24), dict(hidden_size=96), dict(rotary_dim=96), dict(head_dim=112, rotary_dim=64),
        )],
    ],
    ids=str,
)  # fmt: skip
def test_kernels_of_one_order_take_all_layers_of_a_model_or_none(changes, is_whole):
    changes = dict(changes)
    dtype, backend = changes.pop("dtype", "bfloat16"), changes.pop("backend", "auto")
    with interpret():
        assert kernels_order(replace(M3Config.m3(), **changes), jnp.dtype(dtype), backend) == is_whole
