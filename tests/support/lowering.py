"""Lowering for CUDA on a machine that has no GPU, and operands without contents."""

import warnings
from collections.abc import Iterator

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

H200 = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)  # fmt: skip


def array(dtype, *shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(fn, *args, mesh: AbstractMesh = H200) -> str:
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # pytest resets filters, this one too, which stands in pallas_kernels.triton_common.
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


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
