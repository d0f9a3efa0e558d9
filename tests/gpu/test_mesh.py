"""Meshes of two GPUs: in the invariant mode a row has the bits that it has alone, and two processes say what one does.

That each mesh computes what one GPU does, with kernels and with XLA's programs, is in test_model.py.
"""

import json
import os
import socket
import subprocess
import sys

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
