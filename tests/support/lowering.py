"""Lowering for CUDA on a machine that has no GPU, and operands without contents."""

import warnings
from collections.abc import Iterator

import jax
import pytest
from jax._src.state.types import WriteEffect
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

H200 = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)  # fmt: skip


def array(dtype, *shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(fn, *args, mesh: AbstractMesh = H200) -> str:
    """Return a program lowered for CUDA, each of whose kernels writes all of its outputs and can be launched."""
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # pytest resets filters, this one too, which stands in pallas_kernels.triton_common.
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        traced = jax.jit(fn).trace(*args)
        check_kernels(traced.jaxpr.jaxpr)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def check_kernels(jaxpr) -> None:
    """Check that the kernels of a program write to each of their outputs: what none writes to holds anything.

    Their warps are a power of two, and 16 at most, which lowering does not look at.
    """
    for call in (equation for equation in equations(jaxpr) if equation.primitive.name == "pallas_call"):
        kernel, mapping = call.params["jaxpr"], call.params["grid_mapping"]
        first = mapping.num_index_operands + mapping.num_inputs
        written = {effect.input for effect in kernel.effects if isinstance(effect, WriteEffect)}
        outputs = kernel.invars[first : first + mapping.num_outputs]
        assert written.issuperset(outputs), f"{call.params['name']} leaves an output as it is"
        warps = getattr(call.params["compiler_params"], "num_warps", None)
        assert warps in (None, 1, 2, 4, 8, 16), f"{call.params['name']} has {warps} warps"


def refuse(match: str, fn, *args):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(fn, *args)


def equations(jaxpr) -> Iterator:
    """Yield all equations of a program but those inside kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call":
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                yield from equations(inner)
