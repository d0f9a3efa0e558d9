"""Kernels in a decode step over a mesh, lowered for CUDA: they run on what a device holds of a matrix."""

import re
import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from support import tiny
from support.lowering import array

from m3jax import M3Config
from m3jax.cache import Cache
from m3jax.model import abstract
from m3jax.parallel import AXES

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.mark.further  # what a layer reads in place, tests/execution/test_divided.py asks of every matrix
def test_a_step_over_tensors_runs_the_kernels_of_one_device():
    """At M3's widths, in its last dense layer and its first sparse one; attention's are not asked for here."""
    full = M3Config.m3()
    first = full.layer_types.index("minimax_m3_sparse") - 1
    layers = slice(first, first + 2)
    config = replace(
        full, num_hidden_layers=2, vision_config=None, layer_types=full.layer_types[layers],
        mlp_layer_types=full.mlp_layer_types[layers],
    )  # fmt: skip

    def kernels(tensor: int) -> Counter:
        shape = [tensor if axis == "tensor" else 1 for axis in AXES]
        mesh = AbstractMesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=H200)
        model = abstract(config)
        model.compute = replace(model.compute, mesh=mesh)

        def run(model, cache, x, positions, lengths):
            return model.hidden(positions, cache=cache, positions=positions, lengths=lengths, embeddings=x)[0]

        cache = jax.eval_shape(lambda: Cache.pool(config, 8, 2, 8, "bfloat16"))
        of_rows = array(jnp.bfloat16, 2, 1, config.hidden_size), array(jnp.int32, 2, 1), array(jnp.int32, 2)
        with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
            # pytest resets filters, this one too, which stands in pallas_kernels.triton_common.
            warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
            text = jax.jit(run).trace(model, cache, *of_rows).lower(lowering_platforms=("cuda",)).as_text()
        return Counter(re.findall(r'name = "(\w+)"', text))

    # Without checks of annotations: a mesh that is only described is not a `Mesh`.
    alone, divided = (tiny.lower(SimpleNamespace(lower=kernels), tensor) for tensor in (1, 2))
    assert alone["stacked_project"] > 0
    alone["add_norm"] -= 1  # the norm before the head is XLA's on a mesh
    for name in ("stacked_project", "add_norm", "choose_experts", "few_experts_hidden", "few_experts_out"):
        assert divided[name] == alone[name], f"{name}: {divided[name]} on a mesh, {alone[name]} on one device"
