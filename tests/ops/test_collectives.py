"""Exchanges between devices: when a kernel reads other devices' memory, and that a step's come one after the other."""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client
from support import drafts, tiny

from m3jax import ops
from m3jax.decoding import Eagle3Drafter, Engine
from m3jax.ops import PeersCase, cases, collectives, measured
from m3jax.parallel import exchanged_by_xla, parse_mesh
from m3jax.platform import reserves_gpu_memory

COLLECTIVES = {"psum", "psum_invariant", "reduce_scatter", "all_gather", "all_to_all", "pmax", "ppermute"}


@dataclass
class Chain:
    """The exchanges of a program, in the order in which they are traced: what each is, and which ones it needs."""

    names: list[str] = field(default_factory=list)
    needed: list[frozenset[int]] = field(default_factory=list)

    def walk(self, jaxpr, given: list[frozenset[int]]) -> list[frozenset[int]]:
        """Return which exchanges each output needs, given those that each input needs."""
        needs = dict(zip(jaxpr.invars, given, strict=True))
        of = lambda atom: needs.get(atom, frozenset()) if not hasattr(atom, "val") else frozenset()
        for step in jaxpr.eqns:
            inputs = [of(atom) for atom in step.invars]
            outputs = self.outputs(step, inputs)
            needs.update(zip(step.outvars, outputs, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def outputs(self, step, inputs: list[frozenset[int]]) -> list[frozenset[int]]:
        name, all_inputs = step.primitive.name, frozenset().union(*inputs)
        if name in COLLECTIVES and any(step.params.get("axes", step.params.get("axis_name", ()))):
            self.names.append(name)
            self.needed.append(all_inputs)
            return [all_inputs | {len(self.names) - 1}] * len(step.outvars)
        if name == "while":
            counts = step.params["cond_nconsts"], step.params["body_nconsts"]
            consts, carry = inputs[counts[0] : sum(counts)], inputs[sum(counts) :]
            for _ in range(2):  # what one turn exchanges the next one's first exchange needs
                carry = self.walk(step.params["body_jaxpr"].jaxpr, [*consts, *carry])
            return carry
        if name == "scan":
            first, last = step.params["num_consts"], step.params["num_consts"] + step.params["num_carry"]
            for _ in range(2):
                outputs = self.walk(step.params["jaxpr"].jaxpr, inputs)
                inputs = [*inputs[:first], *outputs[: last - first], *inputs[last:]]
            return outputs
        if name == "cond":
            branches = [self.walk(branch.jaxpr, inputs[1:]) for branch in step.params["branches"]]
            return [frozenset(inputs[0]).union(*each) for each in zip(*branches, strict=True)]
        inner = step.params.get("jaxpr", step.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if name == "pallas_call" or inner is None or len(inner.invars) != len(inputs):
            return [all_inputs] * len(step.outvars)
        return self.walk(inner, inputs)


def test_chain_sees_an_exchange_that_does_not_wait_for_the_one_before():
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))

    def chain(fn) -> Chain:
        found = Chain()
        over_mesh = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        jaxpr = jax.make_jaxpr(over_mesh)(jnp.ones(2)).jaxpr
        found.walk(jaxpr, [frozenset()])
        return found

    total = partial(jax.lax.psum, axis_name="a")
    assert chain(lambda x: total(x * total(x))).needed == [frozenset(), {0}]
    assert chain(lambda x: total(x) + total(x * 2)).needed == [frozenset(), frozenset()]
    looped = chain(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: total(x), x))
    assert looped.needed == [frozenset(), {0}]


CONFIG = tiny.config("dM")
MESHES = ["tensor=2", "expert=2", "context=2", "data=2,context=2,tensor=2"]


def traced(mesh: str, has_draft: bool = False, max_batch: int = 2) -> Chain:
    """The exchanges of an engine's step, or of a round with a draft of its own layers, as kernels compute it."""
    model = tiny.model(CONFIG, mesh=parse_mesh(mesh)).with_backend("triton")
    settings = dict(draft=Eagle3Drafter(drafts.draft()), draft_tokens=2) if has_draft else {}
    engine = Engine(model, pages=16, max_batch=max_batch, prefill_chunk=16, steps_per_call=2, max_length=32, **settings)
    call = engine._runner._decode_call(2, {})
    with ops.interpret():
        jaxpr = call.func.trace(*call.args, **call.keywords).jaxpr.jaxpr
    found = Chain()
    found.walk(jaxpr, [frozenset()] * len(jaxpr.invars))
    return found


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_an_exchange_of_a_step_needs_the_one_before(mesh, has_draft, unchecked):
    """A CUDA graph runs at once what does not wait for each other, and the devices' barrier counts one exchange."""
    chain = traced(mesh, has_draft)
    assert len(chain.names) > 2 * CONFIG.num_hidden_layers
    for number, needed in enumerate(chain.needed[1:]):
        assert number in needed, f"exchange {number + 1}, a {chain.names[number + 1]}, does not wait for {number}"


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("mesh", MESHES)
def test_every_exchange_of_a_step_can_be_a_kernel(mesh, unchecked):
    """One that XLA computes ends the CUDA graph: the host then launches all of a step's kernels by themselves."""
    kernels = []

    def read(x, axes, result, *, backend):
        kernels.append(result)
        count = int(np.prod([jax.lax.axis_size(axis) for axis in axes]))
        return jnp.broadcast_to(x, (count, *x.shape)) if result == "parts" else x

    can_run = mock.patch.object(PeersCase, "why_not", lambda case, backend: None)
    with can_run, mock.patch("pallas_kernels.read_peers.read_peers", read):
        assert traced(mesh, max_batch=4).names == []  # other shapes than above, whose layers are not traced again
    assert {"parts", "sum"} == set(kernels)


def test_what_many_tokens_exchange_is_xla_s():
    """It gathers their queries meanwhile, and two exchanges at once can stop all devices."""
    for num_tokens, expected in ((1, "triton"), (15, "triton"), (16, "xla"), (8192, "xla")):
        assert collectives.exchange_backend(num_tokens, "triton") == expected
        assert collectives.exchange_backend(num_tokens, "xla") == "xla"


@pytest.mark.usefixtures("eight_devices")
def test_a_part_of_a_program_can_keep_to_xla():
    """As a prompt's logits: of its other tokens something may be under way."""

    def total(x):
        inside = collectives.psum(x, "tensor", mesh, "auto")
        with exchanged_by_xla():
            return inside + collectives.psum(x, "tensor", mesh, "auto")

    mesh, kernels = parse_mesh("tensor=2"), mock.Mock(side_effect=lambda x, axes, result, *, backend: x)
    over_mesh = jax.shard_map(total, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    can_run = mock.patch.object(PeersCase, "why_not", lambda case, backend: None)
    with can_run, mock.patch("pallas_kernels.read_peers.read_peers", kernels), ops.interpret():
        found = Chain()
        found.walk(jax.make_jaxpr(over_mesh)(jnp.ones(2)).jaxpr, [frozenset()])
    assert found.names == ["psum"] and kernels.call_count == 1


CARD = SimpleNamespace(device_kind="NVIDIA H200")


def mesh_of(ids: list[int], **shape: int) -> Mesh:
    """A mesh of cards that are not there, with numbers of their own."""
    devices = np.full((*shape.values(),), CARD)
    return mock.create_autospec(
        Mesh, instance=True, shape=shape, devices=devices, device_ids=np.reshape(ids, (*shape.values(),))
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(), None),
        (dict(axes=("context",)), "no other device"),
        (dict(mesh=None), "no other device"),
        (dict(mesh=AbstractMesh((1, 2), ("context", "tensor"))), "no other device"),
        (dict(mesh=mesh_of([2, 3], context=1, tensor=2)), "order of their ids from 0 on"),
        (dict(mesh=mesh_of([1, 0], context=1, tensor=2)), "order of their ids from 0 on"),
        (dict(mesh=mesh_of([0, 1, 2, 3, 4], context=1, tensor=5)), "measured on 4 devices, and the mesh has 5"),
        (dict(dtype=jnp.float8_e4m3fn), "16 or 32 bits"),
        (dict(dtype=jnp.bfloat16), None),
        (dict(dtype=jnp.bfloat16, result="part of sum"), "XLA was faster"),
        (dict(size=1 << 26), None),
        (dict(size=1 + (1 << 26)), "268435460 bytes"),
        (dict(size=1 << 26, mesh=mesh_of([0, 1, 2], context=1, tensor=3)), "536870912 bytes"),
        (dict(size=1 << 26, mesh=mesh_of([0, 1, 2], context=1, tensor=3), result="parts"), None),
    ],
)
def test_a_kernel_reads_other_devices_where_it_can(changes, reason, monkeypatch, unchecked):
    monkeypatch.setattr(cases, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(cases, "reserves_gpu_memory", lambda: True)
    monkeypatch.setattr(measured, "NVLINK_DEVICES", 4)
    case = dict(result="sum", dtype=jnp.float32, size=6144, axes=("tensor",), mesh=mesh_of([0, 1], context=1, tensor=2))
    why = PeersCase(**case | changes).why_not("mosaic_gpu")
    assert why is None if reason is None else reason in why


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("compute_capability", lambda: "10.0", "it was measured on NVIDIA H100"),
        ("interpreted", lambda: True, "no interpret"),
        ("reserves_gpu_memory", lambda: False, "takes memory while programs run"),
    ],
)
def test_a_kernel_for_other_devices_is_for_cards_on_which_it_was_measured(name, value, reason, monkeypatch, unchecked):
    monkeypatch.setattr(cases, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(cases, "reserves_gpu_memory", lambda: True)
    case = PeersCase(
        result="sum", dtype=jnp.float32, size=6144, axes=("tensor",), mesh=mesh_of([0, 1], context=1, tensor=2)
    )
    assert case.why_not("mosaic_gpu") is None and "only Mosaic" in case.why_not("triton")
    monkeypatch.setattr(cases, name, value)
    assert reason in case.why_not("mosaic_gpu")
    monkeypatch.undo()
    monkeypatch.setattr(cases, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(measured, "NVLINK_GPUS", ("NVIDIA H100 80GB HBM3",))
    assert "this is a NVIDIA H200" in case.why_not("mosaic_gpu")


@pytest.mark.parametrize(
    ("variables", "reserves"),
    [
        (dict(), True),
        (dict(XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_ALLOCATOR="BFC"), True),
        *((dict(XLA_PYTHON_CLIENT_PREALLOCATE=value), False) for value in ("false", "False", "0")),
        *((dict(XLA_PYTHON_CLIENT_ALLOCATOR=value), False) for value in ("platform", "cuda_async")),
    ],
)
def test_when_xla_takes_a_gpu_s_memory_is_read_as_jax_reads_it(variables, reserves, monkeypatch):
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert reserves_gpu_memory() == reserves
    assert reserves == (options.get("preallocate", True) and options["allocator"] in ("default", "bfc"))
