"""Compilation of the engine's two programs, with the TPU's own compiler, for a slice that need not be attached.

It runs in a process of its own (`m3jax.planning.compiler`), because libtpu takes settings from the environment.
"""

import json
import pickle
import sys
import time
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from m3jax.decoding import device
from m3jax.decoding.sampling import WORD_TOKENS, Sampling, SamplingParams
from m3jax.model import abstract
from m3jax.parallel import AXES, sharding
from m3jax.planning import hlo
from m3jax.planning.arithmetic import cache_shapes, new_cache
from m3jax.planning.job import Job
from m3jax.platform import platform

STOP_IDS, _BIASES, _BAD_WORDS = 4, 64, 16


def main() -> None:
    """Compile the program of a pickled (job, sizes, program name) on stdin, and print the answer as JSON."""
    job, sizes, name = pickle.load(sys.stdin.buffer)
    json.dump(compile_program(job, sizes, name), sys.stdout)


def compile_program(job: Job, sizes: dict[str, int], name: str) -> dict[str, Any]:
    """Compile one of the engine's programs and read what the compiler says of it.

    Args:
      job: the model and its requests.
      sizes: of the mesh.
      name: "decode" or "prefill".

    Returns:
      seconds to trace and lower and to compile; "error" where the compiler refuses; else arguments, temporaries and
      code in bytes, and what `hlo.count` finds, all for one device.
    """
    mesh = topology_mesh(str(job.slice), sizes)
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # so that the model is traced for its devices, not ours
        lowered = (decode if name == "decode" else prefill)(job, mesh).lower()
    answer = {"lower_seconds": time.perf_counter() - start}
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return answer | {"compile_seconds": time.perf_counter() - start, "error": str(error)}
    answer["compile_seconds"] = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return answer | {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "fresh_outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,  # outputs in new memory
        "code": memory.generated_code_size_in_bytes,
    } | asdict(hlo.count(compiled.as_text()))  # fmt: skip


def topology_mesh(topology: str, sizes: dict[str, int]) -> Mesh:
    """Return a mesh of a slice's devices, which are only described: none has to be attached."""
    devices = topologies.get_topology_desc(topology, "tpu").devices
    shape = [sizes[axis] for axis in AXES]
    try:
        devices = topologies.make_mesh(topologies.TopologyDescription(devices), shape, AXES).devices
    except (NotImplementedError, AssertionError, ValueError):
        # Mesh axes that are not whole sides of the torus: take the devices in the order of their coordinates.
        devices = np.array(devices).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def decode(job: Job, mesh: Mesh) -> Any:
    """Trace `device.decode` for one step."""
    state, layout = _state(job, mesh)
    return _compiled_as_by_the_engine("decode").trace(
        _model(job, mesh), state, _shape(job.batch), max_steps=1, layout=layout
    )


def prefill(job: Job, mesh: Mesh) -> Any:
    """Trace `device.prefill` for a chunk of one prompt."""
    state, layout = _state(job, mesh)
    continuations = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _continuations(job, 1))
    chunk = device.Chunk(_shape(1), _shape(1, job.chunk), _shape(1), _shape(1), continuations)
    return _compiled_as_by_the_engine("prefill").trace(_model(job, mesh), state, chunk, layout=layout)


def _compiled_as_by_the_engine(name: str) -> Any:
    """Return one of the device's functions, with the compiler's options that an engine gives it there.

    On a TPU, the only kind of device that programs are compiled for here, they are the same in every mode.
    """
    return device.program(name, platform(), "narrow")


def _model(job: Job, mesh: Mesh) -> Any:
    return abstract(job.config, job.dtype, mesh, job.weights).with_backend(job.backend)


def _state(job: Job, mesh: Mesh) -> tuple[device.State, device.Layout]:
    """Return the shapes of the engine's state on the mesh, and the shardings that it keeps."""
    as_placed = lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding(x.shape, ("batch",) + (None,) * (len(x.shape) - 1), mesh)
    )
    each = lambda: as_placed(_shape(job.batch))
    structure = jax.tree.structure(jax.eval_shape(lambda: new_cache(job, mesh)))
    cache = jax.tree.unflatten(structure, cache_shapes(job, mesh))
    state = device.State(cache, jax.tree.map(as_placed, _continuations(job, job.batch)), each(), each(), each())
    return state, tuple(x.sharding for x in jax.tree.leaves(state))


def _continuations(job: Job, count: int) -> device.Continuations:
    return device.Continuations(
        sampling=SamplingParams.stack([Sampling.greedy()] * count, _BIASES, _BAD_WORDS),
        stop_ids=_shape(count, STOP_IDS),
        **dict.fromkeys(("limits", "min_tokens", "top_logprobs", "counts"), _shape(count)),
        uses=_shape(count, job.config.vocab_size),
        recent=_shape(count, WORD_TOKENS - 1),
    )


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


if __name__ == "__main__":
    main()
