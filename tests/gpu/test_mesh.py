"""Meshes of two GPUs: in the invariant mode a row has the bits that it has alone, and two processes say what one does.

That each mesh computes what one GPU does, with kernels and with XLA's programs, is in test_model.py.
"""

import json
import math
import os
import socket
import subprocess
import sys
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.on_gpu import narrow_model, random_tokens

from m3jax.decoding import Engine, Generation, Params, Sampling
from m3jax.execution.exchange import EXCHANGES
from m3jax.model import M3
from m3jax.parallel import parse_mesh
from pallas_kernels.read_peers import Result, read_peers

MESHES = ("data=2", "tensor=2", "expert=2", "context=2")
PROMPTS = (3000, 1300, 700, 65)  # more than a selection keeps, and less than a block
NEW_TOKENS = 24
PROMPT = "def fibonacci(n):"


@pytest.fixture(autouse=True, scope="module")
def two_gpus():
    if jax.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this process has {jax.device_count()}")


def prompts() -> list[list[int]]:
    return [np.asarray(random_tokens(i, 1, length))[0].tolist() for i, length in enumerate(PROMPTS)]


def served(model: M3, **shape) -> list[Generation]:
    """What an engine of the model makes of all prompts; every second one is sampled."""
    pages = sum(-(-(n + NEW_TOKENS) // model.config.index_block_size) + 2 for n in PROMPTS)
    engine = Engine(
        model, pages=pages, steps_per_call=8, max_length=max(PROMPTS) + NEW_TOKENS, prefix_cache=False, **shape
    )
    engine.warmup()
    draws = Sampling.greedy(), Sampling(temperature=1.0, seed=7)
    orders = [Params(max_new_tokens=NEW_TOKENS, sampling=draw) for draw in draws * 2]
    handles = [engine.add(prompt, order) for prompt, order in zip(prompts(), orders, strict=True)]
    engine.run()
    return [engine.result(handle) for handle in handles]


@pytest.mark.parametrize("way", EXCHANGES)
def test_rows_are_brought_to_their_devices_and_back(way, seed):
    """Each device multiplies what it is sent by a number of its own; about half of the rows go to each."""
    count, num_rows, width = jax.device_count(), 256, 512
    draw, capacity = np.random.default_rng(seed), 256
    rows = draw.normal(size=(count * num_rows, width)).astype(jnp.bfloat16)
    is_sent = draw.uniform(size=(count * num_rows, count)) < 0.5

    def there_and_back(rows, is_sent):
        exchange = EXCHANGES[way](is_sent, capacity, "d")
        sent = jnp.zeros((count * capacity, width), rows.dtype).at[exchange.target].set(rows[:, None], mode="drop")
        back = exchange.back(exchange.there(sent, 0) * (jax.lax.axis_index("d") + 2).astype(rows.dtype))
        return back.at[exchange.target].get(mode="fill", fill_value=0), exchange.lacks_room[None]

    mesh = Mesh(jax.devices(), ("d",))
    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    back, lacks_room = run(rows, is_sent)
    expected = rows[:, None] * is_sent[..., None] * np.arange(2, count + 2).astype(rows.dtype)[:, None]
    np.testing.assert_array_equal(np.asarray(back, np.float32), expected.astype(np.float32))
    assert not lacks_room.any()


EXCHANGED = [  # numbers of a device's array: of one tile and less, with a rest, and of more tiles than programs
    ((1, 6144), "float32"), ((3, 1, 6144), "bfloat16"), ((2, 4, 17), "int32"), ((2,), "float32"),
    ((66, 129), "float16"), ((130, 2048), "float32"), ((998, 6144), "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), EXCHANGED)
@pytest.mark.parametrize("result", get_args(Result))
def test_what_a_kernel_reads_of_other_devices_is_what_xla_exchanges(result, shape, dtype, seed):
    """Thirty exchanges one after the other, each of arrays that the one before has changed and written over.

    Of four devices and more the mesh has two axes, and both and one of them are read along.
    """
    count = jax.device_count()
    sizes = (2, count // 2) if count > 2 and count % 2 == 0 else (1, count)
    mesh = Mesh(np.reshape(jax.devices(), sizes), ("a", "b"))
    by_xla = {
        "parts": jax.lax.all_gather,
        "sum": jax.lax.psum,
        "part of sum": partial(jax.lax.psum_scatter, scatter_dimension=0, tiled=True),
    }[result]
    x = jnp.asarray(np.random.default_rng(seed).integers(-50, 50, (count * shape[0], *shape[1:])), dtype)

    def exchanged(how, axes):
        """Whole numbers, of whose sums nothing is rounded off; each turn's array depends on what was received."""

        def turn(_, carry):
            x, seen = carry
            received = how(x, axes)
            return (x * 3 + jnp.sum(received).astype(x.dtype)) % 41 - 20, seen + received

        def on_each_device(x):
            return jax.lax.fori_loop(0, 30, turn, (x, jnp.zeros_like(how(x, axes))))[1][None]

        run = jax.shard_map(on_each_device, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False)
        return np.asarray(jax.jit(run)(x), np.float64)

    for axes in (("a", "b"), ("b",)):
        if shape[0] % math.prod(mesh.shape[axis] for axis in axes) and result == "part of sum":
            continue
        kernel = partial(read_peers, result=result, backend="mosaic_gpu")
        np.testing.assert_array_equal(exchanged(kernel, axes), exchanged(by_xla, axes))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_request_has_the_bits_that_it_has_alone(mesh):
    """Chunks of all four rows beside each other, and each prompt in one chunk by itself."""
    model = narrow_model("bfloat16", parse_mesh(mesh)).with_invariance()
    # Where the mesh divides the rows an engine has two at least.
    alone = served(model, max_batch=2 if mesh == "data=2" else 1, prefill_chunk=max(PROMPTS))
    beside = served(model, max_batch=4, prefill_rows=4, prefill_chunk=256)
    for one, other in zip(alone, beside, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def generate(*arguments: str, gpu: str) -> subprocess.Popen:
    """Start `m3jax.generate` with the embedded model in a process that sees these of this process's GPUs."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    gpu = ",".join(mine[int(number)] for number in gpu.split(","))
    greedy = ["--max-new-tokens", "32", "--temperature", "0", "--dtype", "float32", "--json", "--logprobs"]
    command = [sys.executable, "-m", "m3jax.generate", "--prompt", PROMPT, *greedy, *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "JAX_PLATFORMS": "cuda,cpu"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process has most of the memory
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_two_processes_with_one_gpu_each_say_what_one_says(mesh):
    """Over NCCL; process 0 prints for both."""
    together = ["--mesh", mesh, "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id"]
    both = [generate(*together, str(i), gpu=str(i)) for i in range(2)]
    printed, nothing = (finish(process) for process in both)
    assert nothing == ""
    found, expected = json.loads(printed), json.loads(finish(generate(gpu="0")))
    assert found["token_ids"] == expected["token_ids"]
    np.testing.assert_allclose(found["logprobs"], expected["logprobs"], atol=1e-3)
