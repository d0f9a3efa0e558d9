"""Loading onto many devices, and how much host memory it takes."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.checkpoint_folders import (
    expected_parameters,
    same_bits,
    shapes,
    tiny_config,
    write_folder,
)

from m3jax import checkpoint, parallel
from m3jax import model as m3_model
from m3jax.checkpoint import tree

CONFIG = tiny_config()


# Sharding


@pytest.mark.parametrize(
    ("axes", "host_bytes"),
    [
        ({"tensor": 4}, 16 << 20),
        ({"data": 2, "expert": 2, "tensor": 2}, 16 << 20),
        pytest.param({"expert": 2, "tensor": 2}, 0, marks=pytest.mark.further),
    ],
    ids=["tensor, on the host", "all, on the host", "expert and tensor, in place"],
)
def test_each_device_gets_its_slice_and_reads_no_more(axes, host_bytes, folder, tensors, monkeypatch):
    monkeypatch.setattr("m3jax.checkpoint.loading.HOST_BYTES", host_bytes)
    mesh = parallel.make_mesh(**axes)
    model, report = checkpoint.load_with_report(folder, mesh=mesh, progress=False)
    leaves, expected = tree.flatten(model), expected_parameters(CONFIG, tensors)
    expected_sharding = tree.flatten(m3_model.shardings(CONFIG, mesh))
    held_bytes = dict.fromkeys(report.bytes_read, 0)
    for path, leaf in leaves.items():
        assert leaf.sharding == expected_sharding[path]
        for shard in leaf.addressable_shards:
            assert same_bits(np.asarray(shard.data), expected[path][shard.index])
            held_bytes[shard.device.id] += shard.data.nbytes
    assert report.bytes_read == held_bytes
    assert max(held_bytes.values()) < 0.7 * sum(value.nbytes for value in expected.values())


# Memory

_PEAK = """
import sys, pathlib
import jax, jax.numpy as jnp
from m3jax import checkpoint
from m3jax.checkpoint import tree

def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

jax.jit(jnp.sort)(jnp.arange(64.0)).block_until_ready()
before = status("VmRSS")
model = checkpoint.load(sys.argv[1], progress=False)
print(status("VmHWM") - before, sum(leaf.nbytes for leaf in tree.flatten(model).values()))
"""


@pytest.mark.further
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_peak_host_memory_is_the_model_and_a_few_tensors(tmp_path):
    config = tiny_config(
        vocab_size=4096, hidden_size=1024, intermediate_size=1024, dense_intermediate_size=4096,
        shared_intermediate_size=1024, num_local_experts=12,
    )  # fmt: skip
    draw = np.random.default_rng(0).integers
    tensors = {
        name: draw(0, 1 << 15, shape, np.uint16).view(ml_dtypes.bfloat16) for name, shape in shapes(config).items()
    }
    write_folder(tmp_path, config, tensors, shards=4)
    sizes = [values.nbytes for values in tensors.values()]
    largest, total = max(sizes), sum(sizes)
    del tensors
    # As users run it: the suite's flags for the compiler make what is loaded slow to cast and to move.
    users = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    child = [sys.executable, "-c", _PEAK, str(tmp_path)]
    output = subprocess.run(child, capture_output=True, text=True, check=True, timeout=300, env=users).stdout
    peak, model_bytes = map(int, output.split())
    assert 250e6 < total <= model_bytes
    # Besides the model: the largest tensor as stored, cast and sent, and what JAX takes to compile.
    assert peak < model_bytes + 3 * largest + 48e6
